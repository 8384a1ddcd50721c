"""Training of a tiny target from nothing, for the embedded suite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from driftlab.errors import DataError, NumericsError
from driftlab.models.tiny import tiny_llama
from driftlab.progress import progress_bar


def pretrain(
    texts_tokens: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    steps: int,
    batch: int,
    length: int,
    lr: float,
    seed: int,
    progress: str = "",
) -> nn.Module:
    """Train a small Llama on ``texts_tokens`` joined end to end, in windows of ``length`` tokens
    that open where a text opens.

    AdamW (beta2 0.95, weight decay 0.01) under a cosine schedule with 5 % warm-up, gradients
    clipped to norm 1. The same arguments give the same weights on the same build of torch; the
    global random state is left as it was. Texts keep whatever end token they carry: the model
    itself names none, so pass ``eos_ids`` to ``Target.from_model``.

    Raises
    ------
    DataError: fewer than ``length + 1`` tokens, or a token outside the vocabulary.
    NumericsError: the loss is not finite.
    """
    stream = torch.tensor([t for text in texts_tokens for t in text], dtype=torch.int64)
    if len(stream) <= length:
        raise DataError(
            f"pretraining needs more than {length} tokens",
            got=len(stream),
            remedy="Give more text, or a shorter length.",
        )
    if int(stream.min()) < 0 or int(stream.max()) >= vocab_size:
        raise DataError(
            f"pretraining text holds token ids outside 0..{vocab_size - 1}",
            got=f"ids from {int(stream.min())} to {int(stream.max())}",
            remedy="Give the vocabulary size of the tokenizer that made the text.",
        )
    model = tiny_llama(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        max_position=max(2048, length),
        seed=seed,
    )
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            (step + 1) / warmup
            if step < warmup
            else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
        ),
    )
    window = torch.arange(length + 1)
    # A window opens where a text opens, so that what it repeats was said inside it.
    begins = torch.tensor([0, *itertools.accumulate(len(text) for text in texts_tokens)])
    begins = begins[begins < len(stream) - length]
    model.train()
    with progress_bar(progress, iterable=range(steps), unit="step") as bar:
        for step in bar:
            chosen = torch.randint(len(begins), (batch,), generator=generator)
            tokens = stream[begins[chosen][:, None] + window]
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            if not torch.isfinite(loss):
                raise NumericsError(
                    f"the loss of step {step} is not finite",
                    got=loss.item(),
                    remedy="Lower the learning rate.",
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if step % 20 == 0:
                bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
    return model.eval()
