"""Tiny targets and drafters. T, D and M are the fixtures of the small cases.

- T: random Llama, 97 ids, width 32, 4 layers, 4 heads over 2 key/value heads.
- D: random drafter for T with 40 of its ids; norm gains are random too, so that a norm in the
  wrong place shows.
- M: T trained until its greedy text follows one deterministic rule, and drafters trained on it.
  A random drafter accepts nothing and hides bugs; M accepts nearly everything, so that a fault
  moves its acceptance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from driftlab.config import DrafterConfig, Feedback, FusionNorm, Residual, TrainSpec
from driftlab.data.features import FeatureStore
from driftlab.data.text import Text
from driftlab.engines.train import choose_vocabulary, initialise, train
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama

VOCAB, WIDTH, LAYERS, DRAFT_VOCAB = 97, 32, 4, 40
BOUNDARIES = (1, 2, 3)

# The rule: a text begins with a key; then each symbol is the one BACK places before the newest,
# moved on by the key's shift. A drafter must attend to the right place to follow it, at depth 1
# in the text, deeper in its own chain; and it sees the key, the first token, in captured states
# only.
SYMBOLS = tuple(range(5, 97, 8))[:7]
SHIFTS = {1: 2, 2: 4}
BACK = 2
PROMPT = BACK + 2  # a key and BACK + 1 free symbols

VARIANTS: dict[str, dict[str, Any]] = {
    f"{fusion}+{feedback}+{residual}": {
        "fusion_norm": fusion,
        "feedback": feedback,
        "residual": residual,
    }
    for fusion in (FusionNorm.none, FusionNorm.per_layer, FusionNorm.concat)
    for feedback in Feedback
    for residual in Residual
}

M = "per_layer+post_norm+raw"


def follow(start: Sequence[int], length: int) -> list[int]:
    """``start``, at least PROMPT tokens, continued by the rule to ``length`` tokens."""
    key, *symbols = start
    text = [SYMBOLS.index(token) for token in symbols]
    while len(text) < length - 1:
        text.append((text[-1 - BACK] + SHIFTS[key]) % len(SYMBOLS))
    return [key, *(SYMBOLS[i] for i in text)]


def prompts(n: int, *, seed: int, length: int = PROMPT) -> list[list[int]]:
    """``n`` prompts; what is longer than PROMPT follows the rule."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(SYMBOLS), (n, BACK + 1), generator=rng).tolist()
    keys = torch.randint(len(SHIFTS), (n,), generator=rng).tolist()
    return [
        follow([list(SHIFTS)[key], *(SYMBOLS[i] for i in row)], length)
        for key, row in zip(keys, drawn, strict=True)
    ]


def config(**changes: Any) -> DrafterConfig:
    """D's configuration with some fields changed."""
    fields: dict[str, Any] = {
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "intermediate_size": 80,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "boundaries": BOUNDARIES,
    }
    return DrafterConfig(**fields | changes)


@cache
def target() -> Target:
    """T."""
    model = tiny_llama(vocab_size=VOCAB, hidden_size=WIDTH, layers=LAYERS, max_position=256)
    return Target.from_model(model, name="T", eos_ids=())


def drafter(seed: int = 0, **changes: Any) -> Drafter:
    """D, or a relative of it: every weight random, norm gains between 0.5 and 1.5."""
    settings = config(**changes)
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=rng)[: settings.draft_vocab_size].sort().values
    made = Drafter(settings, ids)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1 and name.endswith("weight"):
                weight.uniform_(0.5, 1.5, generator=rng)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=rng)
    return made.eval().requires_grad_(False)


def ids(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids of T."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def states(of: Target, tokens: Tensor, boundaries: Sequence[int] = BOUNDARIES) -> Tensor:
    """Captured states [B, S, A*Ht] of unpadded ``tokens`` [B, S]."""
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return of.forward(tokens, lengths, boundaries, logits=False).aux


def as_text(prompt: Sequence[int], continuation: Sequence[int], name: str = "p") -> Text:
    return Text.of(
        name, "rule", prompt, continuation, kind="greedy", temperature=0.0, origin="pairs"
    )


@dataclass(frozen=True)
class Pair:
    """A target that follows the rule and a drafter that learned it; ``losses`` of its training."""

    target: Target
    drafter: Drafter
    losses: tuple[float, ...]


@cache
def memorised_target() -> Target:
    """M's target."""
    model = tiny_llama(vocab_size=VOCAB, hidden_size=WIDTH, layers=LAYERS, max_position=256)
    memorise(model)
    return Target.from_model(model, name="M", eos_ids=())


def memorise(model: LlamaForCausalLM) -> None:
    """Train ``model`` until its greedy text follows the rule."""
    steps = 150
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    texts = torch.tensor(prompts(8 * steps, seed=1, length=48))
    for tokens in texts.split(8):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()


def lessons(n: int = 400, *, length: int = 32) -> list[Text]:
    """Texts of the rule that M's drafters learn from."""
    drawn = prompts(n, seed=2, length=length)
    return [as_text(t[:PROMPT], t[PROMPT:], f"p{i}") for i, t in enumerate(drawn)]


@cache
def memorised(variant: str = M, *, steps: int = 100) -> Pair:
    """M. Fewer ``steps`` give a drafter that is trained, but not to the end."""
    teacher, texts = memorised_target(), lessons()
    spec = TrainSpec(ttt=4, steps=steps, batch=8, lr=1.5e-2, head_init=0.3)
    kept = choose_vocabulary((t.tokens for t in texts), DRAFT_VOCAB, VOCAB)
    made = initialise(config(**VARIANTS[variant]), teacher, kept, seed=0, head_init=spec.head_init)
    with tempfile.TemporaryDirectory() as folder:
        corpus = FeatureStore(folder).build(teacher, texts, BOUNDARIES, dtype="float32")
        result = train(made, corpus, teacher, spec, seed=0)
    return Pair(teacher, made.requires_grad_(False), result.losses)


def trained(variant: str) -> Pair:
    """A pair of any variant whose weights training has moved; M itself is trained to the end."""
    return memorised() if variant == M else memorised(variant, steps=12)
