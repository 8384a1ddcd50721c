"""Training-time test: the drafter is unrolled over K depths and learns on its own states.

The forward is ``Drafter.step`` on all anchors, the same code that probes and, row by row,
drafts; so what is trained is what is run. At step k of anchor t the loss is
``-sum_v p(v) log q(v)`` over the draft vocabulary, where p is the target's distribution of
token t+1+d (d = k+1), restricted to the draft vocabulary and renormalised, and steps are
weighted ``decay**k``. Gradients flow through the fed-back states and the chain's keys.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from driftlab.config import DrafterConfig, TrainSpec
from driftlab.data.features import Batch, Features
from driftlab.data.text import Text
from driftlab.engines.align import Alignment
from driftlab.engines.anchors import forced_states, unroll
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.errors import CheckpointError, ConfigError, DataError, NumericsError
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Teacher, check_head, head_logits
from driftlab.results.shards import atomic_file


@dataclass(frozen=True)
class TrainResult:
    """What a training run did. ``losses`` holds the loss of every step as it is minimised; nan of a
    batch without a supervised position, which moves no weight."""

    losses: tuple[float, ...]
    tokens: int
    seconds: float
    skipped: int  # batches without a single supervised position
    precision: str  # dtype in use, and why
    evaluations: tuple[tuple[int, float], ...] = ()  # step, accepted drafts on held-back texts

    @property
    def best(self) -> tuple[int, float] | None:
        """The evaluation whose weights were kept: the first of the highest acceptance."""
        return max(self.evaluations, key=lambda e: e[1], default=None)

    @property
    def loss(self) -> float | None:
        """Mean of the last 20 losses up to the weights that were kept; None when they had none."""
        kept = self.losses[: self.best[0]] if self.best else self.losses
        last = [loss for loss in kept if not math.isnan(loss)][-20:]
        return sum(last) / len(last) if last else None


def choose_vocabulary(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """The ``size`` most frequent ids of ``texts``, ascending [size].

    Ties and ids that never occur are taken in ascending order, so the choice is the same on
    every machine and always has ``size`` entries.
    """
    if not 0 < size <= vocab_size:
        raise DataError(
            f"the draft vocabulary must have 1 to {vocab_size} ids",
            got=size,
            remedy="Set drafter.draft_vocab_size in that range.",
        )
    counts = Counter(token for text in texts for token in text)
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[:size]))


def initialise(
    config: DrafterConfig,
    teacher: Teacher,
    draft_to_target: Tensor | None,
    *,
    seed: int,
    head_init: float,
) -> Drafter:
    """A fresh drafter: embeddings frozen from the target, norms 1, matrices N(0, 1/in).

    The head starts as ``head_init`` x the target's rows x its final norm's gains, where the
    widths allow it; 0 starts it at random.
    """
    rng = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, draft_to_target)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=rng)
                if module.bias is not None:
                    module.bias.zero_()
        same_width = config.hidden_size == config.target_hidden_size
        if same_width:
            drafter.embed_tokens.weight.copy_(teacher.embedding_weight[: config.vocab_size])
        else:
            drafter.embed_tokens.weight.normal_(0.0, 0.02, generator=rng)
        if head_init > 0 and same_width:
            rows = teacher.head_weight[drafter.draft_to_target].float()
            gains = teacher.final_norm_weight
            drafter.lm_head.weight.copy_(head_init * (rows if gains is None else rows * gains))
    drafter.embed_tokens.weight.requires_grad_(not same_width)
    return drafter


def supervised_share(
    texts: Iterable[Text], draft_to_target: Tensor | None, max_length: int
) -> float:
    """Share of the texts' tokens, cut to ``max_length``, that bear loss.

    Those of the response that are in the draft vocabulary (None: all are) and have an anchor.
    """
    known = None if draft_to_target is None else np.asarray(draft_to_target.cpu())
    bearing = total = 0
    for text in texts:
        tokens = np.asarray(text.tokens[:max_length])
        total += len(tokens)
        rest = tokens[max(2, text.prompt_len) :]
        bearing += len(rest) if known is None else int(np.isin(rest, known).sum())
    return bearing / max(1, total)


def accepted_drafts(drafter: Drafter, corpus: Features, rows: Sequence[int], depth: int) -> float:
    """Mean accepted drafts of a greedy round of ``depth``, over all anchors of the texts ``rows``
    that have ``depth`` tokens of response to guess."""
    accepted = anchors = 0
    device, dtype = drafter.norm.weight.device, drafter.norm.weight.dtype
    with torch.no_grad():
        for row in rows:
            item = corpus.item(row)
            chosen = _rounds(corpus.texts[row], depth)
            if not len(chosen):
                continue
            right = torch.ones(len(chosen), dtype=torch.bool, device=device)
            for step in unroll(
                drafter,
                item["tokens"][None].to(device),
                item["aux"][None].to(device, dtype),
                depth=depth,
                mode="free",
                anchors=chosen.to(device),
            ):
                right = right & (step.draft[0] == step.truth[0])
                accepted += int(right.sum())
            anchors += len(chosen)
    return accepted / max(1, anchors)


def _rounds(text: Text, depth: int) -> Tensor:
    """The anchors of ``text`` with ``depth`` tokens of response to guess; none in a short one."""
    first = max(0, text.prompt_len - 2)
    return torch.arange(first, max(first, len(text.tokens) - 1 - depth))


class SoftTargets:
    """The target's distribution over the draft vocabulary: states [.., Ht] -> fp32 [.., Vd].

    States are those after the target's final norm; the head's rows are taken once.
    """

    def __init__(self, teacher: Teacher, draft_to_target: Tensor) -> None:
        check_head(teacher)
        weight = teacher.head_weight
        ids = draft_to_target.to(weight.device)
        self.teacher, self.rows = teacher, weight if len(ids) == len(weight) else weight[ids]
        self.rows = self.rows.to(draft_to_target.device)

    def __call__(self, last: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(last.device.type, enabled=False):
            return head_logits(self.teacher, last, self.rows).float().softmax(dim=-1)


@dataclass(frozen=True)
class Supervised:
    """Which rows of a batch bear loss; all on the CPU.

    Text ``text`` [N], position ``at`` [N] of each token that is learned; ``row`` [N, K] the
    anchor that guesses it at each depth, counted from the first one that is drafted from, and
    ``weight`` [N, K] what its cross entropy counts: 0 where that anchor is none.
    """

    text: Tensor
    at: Tensor
    row: Tensor
    weight: Tensor

    @property
    def count(self) -> int:
        return int((self.weight > 0).sum())

    def share(self, ranks: Ranks) -> Supervised:
        """Those of the texts ``ranks.mine``, counted as they stand there."""
        own = self.text % ranks.size == ranks.rank
        text = self.text[own] // ranks.size
        return Supervised(text, self.at[own], self.row[own], self.weight[own])


def supervised(drafter: Drafter, batch: Batch, spec: TrainSpec, first: int) -> Supervised:
    """A position counts when its token stands in the response and in the draft vocabulary."""
    position = torch.arange(batch.tokens.shape[1])
    inside = (position >= batch.prompt_lens[:, None]) & (position < batch.lengths[:, None])
    bears = inside & (drafter.target_to_draft.cpu()[batch.tokens] >= 0)
    bears[:, : first + 2] = False  # no anchor guesses them
    text, at = bears.nonzero(as_tuple=True)
    steps = torch.arange(spec.ttt)
    row = at[:, None] - 2 - steps - first
    counts = (row >= 0).sum(dim=0)
    weight = spec.decay**steps / counts.clamp(min=1) * (row >= 0)
    return Supervised(text, at, row.clamp(min=0), weight)


def ttt_loss(
    drafter: Drafter,
    batch: Batch,
    targets: SoftTargets,
    spec: TrainSpec,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, int]:
    """Weighted loss of one batch, and how many (anchor, step) positions it is a mean over.

    A position counts when its token stands in the response and in the draft vocabulary;
    each step's loss is the mean over its own positions. The batch is on the CPU.
    Each of ``ranks`` gives the part of its own texts, and the count of all.
    """
    device = drafter.norm.weight.device
    first = max(0, int(batch.prompt_lens.min()) - 2)  # the first response token's anchor
    whole = supervised(drafter, batch, spec, first)
    rows, last = whole.share(ranks), batch.last[ranks.mine]
    tokens, aux = (x[ranks.mine].to(device) for x in (batch.tokens, batch.aux))
    if not len(tokens):
        return torch.zeros((), device=device), whole.count
    guesses = []
    steps = forced_states(drafter, tokens, aux, depth=spec.ttt, first=first)
    for k, state in enumerate(steps):
        states = drafter.head_input(state)
        flat = rows.text * states.shape[1] + rows.row[:, k]
        guesses.append(states.flatten(0, 1).index_select(0, flat.to(device)))
    if not rows.count:
        return torch.zeros((), device=device), whole.count
    total = distillation(
        torch.stack(guesses, dim=1),
        drafter.lm_head.weight,
        rows.weight[:, : len(guesses)].to(device),
        # Position p's distribution stands at the state of position p - 1.
        last[rows.text, rows.at - 1].to(device),
        targets,
        scale=drafter.config.logit_scale,
    )
    return total, whole.count


def distillation(
    states: Tensor,
    head: Tensor,
    weight: Tensor,
    last: Tensor,
    targets: Callable[[Tensor], Tensor],
    *,
    scale: float = 1.0,
) -> Tensor:
    """``sum_nk weight_nk * -sum_v p_n(v) log q_nk(v)`` with q the softmax of scale * head x state.

    Blocks of positions are handled one after the other, and their gradients with them: at no
    time are there logits, or target distributions, of more than one block.

    Parameters
    ----------
    states: [N, K, H], K guesses of each of N positions. head: [Vd, H]. weight: [N, K].
    last: [N, Ht] the target's states, of which ``targets`` makes p [n, Vd].
    """
    learn = torch.is_grad_enabled()
    return _Distillation.apply(states, head, weight, last, targets, scale, learn)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: Tensor,
        weight: Tensor,
        last: Tensor,
        targets: Callable[[Tensor], Tensor],
        scale: float,
        learn: bool,
    ) -> Tensor:
        device = states.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else states.dtype
        n, depths, _ = states.shape
        x, w = states.to(dtype), head.to(dtype)
        total = torch.zeros((), device=states.device)
        d_states = torch.empty_like(states)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        size = max(1, _block_rows(device, len(head)) // depths)
        with torch.autocast(device, enabled=False):
            for at in range(0, n, size):
                span = slice(at, at + size)
                p, k, rows = targets(last[span]), weight[span], x[span].flatten(0, 1)
                flat = (rows @ w.T).float()
                logits = flat.view(-1, depths, len(head))
                if scale != 1:
                    logits *= scale
                hit = torch.matmul(logits, p[..., None])[..., 0]
                top = logits.amax(dim=-1, keepdim=True)
                mass = logits.sub_(top).exp_().sum(dim=-1)
                total += (k * (top[..., 0] + mass.log() - hit)).sum()
                if learn:  # d logits = weight * (q - p)
                    logits.mul_((scale * k / mass)[..., None])
                    logits.addcmul_(p[:, None], k[..., None], value=-scale)
                    g = flat.to(dtype)
                    d_states[span] = (g @ w).view_as(states[span])
                    if mixed:
                        d_head += g.T @ rows
                    else:
                        d_head.addmm_(g.T, rows)
        ctx.save_for_backward(d_states, d_head.to(head.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_head = ctx.saved_tensors
        return (d_states * grad, d_head * grad, *[None] * 5)


def _block_rows(device: str, vocabulary: int) -> int:
    """Rows of logits at once: about what the CPU's cache holds, 1 GB on other devices."""
    return max(256, (2**21 if device == "cpu" else 2**28) // vocabulary)


def train(
    drafter: Drafter,
    corpus: Features,
    teacher: Teacher,
    spec: TrainSpec,
    *,
    seed: int,
    checkpoint: Path | None = None,
    alignment: Alignment | None = None,
    on_step: Callable[[int], None] = lambda steps: None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Train ``drafter`` in place for ``spec.steps`` steps.

    AdamW (betas .9, .95), cosine schedule after a linear warm-up, gradients clipped to
    ``spec.clip``. ``alignment`` adds a loss on the drafter's attention.
    With ``checkpoint`` the state is saved there every
    ``spec.checkpoint_every`` steps, and a later call with the same arguments goes on from
    it to the same weights that an undisturbed run gives. ``on_step`` is told how many steps
    were done. With ``ranks``, several processes share each batch and compute what one would; all
    call this with the same arguments, and the first one saves.

    With ``spec.evaluate_every`` the last tenth of the corpus's texts is held back, and the weights
    that accept most drafts on it are the result: a loss may go on falling while acceptance falls.

    Raises
    ------
    ConfigError: ``alignment`` with several ``ranks``.
    NumericsError: the loss or a gradient is not finite. DataError: no position is supervised (said
        before the first step), or too few or too short texts to hold any back.
    CheckpointError: ``checkpoint`` belongs to another training.
    """
    if alignment is not None and ranks.size > 1:
        raise ConfigError(
            "the alignment loss is a mean over a batch that several processes would share",
            got=f"{ranks.size} processes",
            remedy="Train with train.alignment in one process.",
        )
    started = time.monotonic()
    device = drafter.norm.weight.device
    amp, precision = _precision(spec, device)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    lessons, held = hold_back(corpus.texts, spec)
    learned = corpus.texts[: len(lessons)]
    if not supervised_share(learned, drafter.draft_to_target, spec.max_length):
        raise DataError(
            f"no position is supervised: 0 of {sum(len(t.tokens) for t in learned)} tokens",
            remedy="The texts need responses whose tokens are in the draft vocabulary.",
        )
    optimiser = torch.optim.AdamW(
        weights, lr=spec.lr, betas=(0.9, 0.95), weight_decay=spec.weight_decay, fused=True
    )
    targets = SoftTargets(teacher, drafter.draft_to_target)
    identity = _identity(drafter, corpus, spec, seed)
    losses: list[float] = []
    tokens = skipped = 0
    earlier = 0.0
    evaluations: list[tuple[int, float]] = []
    best: dict[str, Tensor] = {}
    if checkpoint is not None and checkpoint.exists():
        saved = _load(checkpoint, identity)
        drafter.load_state_dict(saved["drafter"])
        optimiser.load_state_dict(saved["optimiser"])
        losses, tokens, skipped = list(saved["losses"]), saved["tokens"], saved["skipped"]
        earlier = saved["seconds"]
        evaluations = [(int(step), float(value)) for step, value in saved.get("evaluations", [])]
        best = saved.get("best", {})
        del saved  # weights and moments, which are in use elsewhere now
    drafter.train()
    on_step(len(losses))
    for batch in _stream(corpus, spec, seed, skip=len(losses), among=lessons):
        if len(losses) == spec.steps:
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            plain = partial(ttt_loss, drafter, batch, targets, spec, ranks)
            loss, counted = plain() if alignment is None else alignment.add(plain, drafter, batch)
        value = float(ranks.total(loss.detach()))
        if counted:
            if not math.isfinite(value):
                raise NumericsError(
                    f"the training loss is not finite at step {len(losses)}",
                    got=value,
                    remedy="Lower train.lr, or look for non-finite captured states.",
                )
            optimiser.zero_grad(set_to_none=True)
            if loss.requires_grad:  # not where all of a batch's texts are other ranks'
                loss.backward()
            ranks.sum_gradients(weights)
            norm = nn.utils.get_total_norm(
                [p.grad for p in weights if p.grad is not None], foreach=True
            )
            if not math.isfinite(norm):  # before clipping spreads it, and a last step stores it
                raise _bad_gradients(drafter, len(losses))
            nn.utils.clip_grads_with_norm_(weights, spec.clip, norm, foreach=True)
            for group in optimiser.param_groups:
                group["lr"] = spec.lr * _cosine(len(losses), spec)
            optimiser.step()
        else:
            skipped += 1
        losses.append(value if counted else math.nan)
        tokens += int(batch.lengths.sum())
        on_step(1)
        done = len(losses) == spec.steps
        due = done or len(losses) % spec.checkpoint_every == 0
        if spec.evaluate_every and (done or len(losses) % spec.evaluate_every == 0):
            drafter.eval()
            value = accepted_drafts(drafter, corpus, held, spec.ttt)
            drafter.train()
            if not evaluations or value > max(v for _, v in evaluations):
                best = {n: t.detach().clone() for n, t in drafter.state_dict().items()}
            evaluations.append((len(losses), value))
        if checkpoint is not None and ranks.rank == 0 and due:
            _save(
                checkpoint,
                {
                    "identity": identity,
                    "drafter": drafter.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "losses": losses,
                    "tokens": tokens,
                    "skipped": skipped,
                    "seconds": earlier + time.monotonic() - started,
                    **({"evaluations": evaluations, "best": best} if evaluations else {}),
                },
            )
    if best:
        drafter.load_state_dict(best)
    if skipped == spec.steps:
        raise DataError(
            "no position was supervised in any batch",
            remedy="The texts need responses whose tokens are in the draft vocabulary.",
        )
    drafter.eval()
    seconds = earlier + time.monotonic() - started
    return TrainResult(tuple(losses), tokens, seconds, skipped, precision, tuple(evaluations))


def _bad_gradients(drafter: Drafter, step: int) -> NumericsError:
    names = [
        name
        for name, p in drafter.named_parameters()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    what = f"gradient of {names[0]}" if names else "norm of all gradients together"
    return NumericsError(
        f"the {what} is not finite at step {step} of training",
        got=f"{len(names)} such parameters",
        remedy="Lower train.lr, or set train.autocast = off.",
    )


def hold_back(texts: Sequence[Text], spec: TrainSpec) -> tuple[range, range]:
    """Texts to learn from, the first ones, and texts to choose weights on.

    Raises DataError when texts are held back, and these are too few or too short.
    """
    if spec.evaluate_every is None:
        return range(len(texts)), range(0)
    first = len(texts) - max(1, len(texts) // 10)
    # Without a round all evaluations would be 0, and the first weights would count as the best.
    if first < 1 or not any(len(_rounds(text, spec.ttt)) for text in texts[first:]):
        raise DataError(
            "train.evaluate_every holds back texts to choose weights on",
            got="1 text"
            if first < 1
            else f"{len(texts) - first} held back, none with a round of train.ttt = {spec.ttt}",
            remedy="Give more or longer texts, or leave train.evaluate_every out.",
        )
    return range(first), range(first, len(texts))


def _stream(
    corpus: Features, spec: TrainSpec, seed: int, *, skip: int, among: range
) -> Iterator[Batch]:
    epoch = 0
    while True:
        empty = True
        for batch in corpus.batches(
            spec.batch, seed=seed, epoch=epoch, max_length=spec.max_length, among=among
        ):
            empty = False
            if skip:
                skip -= 1
                continue
            yield batch
        if empty:
            raise DataError("the training corpus has no batches", remedy="Give longer texts.")
        epoch += 1


def _cosine(step: int, spec: TrainSpec) -> float:
    warm = max(1, round(spec.warmup * spec.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, spec.steps - warm)))


def _precision(spec: TrainSpec, device: torch.device) -> tuple[bool, str]:
    """Whether to autocast to bfloat16, and the reason for the record."""
    if spec.autocast == "off":
        return False, "float32 (train.autocast = off)"
    if spec.autocast == "bfloat16":
        return True, "bfloat16 autocast (train.autocast = bfloat16)"
    if device.type != "cpu":
        return True, f"bfloat16 autocast (auto: {device.type})"
    capability = torch.backends.cpu.get_cpu_capability()
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has, f"{'bfloat16 autocast' if has else 'float32'} (auto: CPU is {capability})"


def _identity(drafter: Drafter, corpus: Features, spec: TrainSpec, seed: int) -> str:
    """Everything that decides what a training computes, from its first step on."""
    # How often it is saved moves no number; a setting that was added later is left out while off.
    later = set() if spec.evaluate_every else {"evaluate_every"}
    settings = spec.model_dump_json(exclude={"checkpoint_every", *later})
    vocabulary = sha256(drafter.draft_to_target.cpu().numpy().tobytes()).hexdigest()
    return (
        f"{drafter.config.model_dump_json()} {settings} seed {seed}, "
        f"vocabulary {vocabulary}, states {corpus.key}"
    )


def _save(path: Path, state: dict) -> None:
    with atomic_file(path) as file:
        torch.save({**state, "sha256": _digest(state)}, file)


def _digest(state: object) -> str:
    """SHA-256 (hex) of everything in nested dictionaries, lists and tensors."""
    found = sha256()

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            found.update(f"{tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key, part in value.items():
                found.update(repr(key).encode())
                add(part)
        elif isinstance(value, list | tuple):
            found.update(str(len(value)).encode())
            for part in value:
                add(part)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


def _load(path: Path, identity: str) -> dict:
    try:
        saved = torch.load(path, weights_only=True)
        if saved.pop("sha256") != _digest(saved):
            raise ValueError("its checksum does not agree")
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"training checkpoint {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            remedy="Delete the file; the training then starts again.",
        ) from None
    if saved.get("identity") != identity:
        raise CheckpointError(
            f"training checkpoint {path} belongs to another training",
            remedy="Use another output folder, or delete the file.",
        )
    return saved
