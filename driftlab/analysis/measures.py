"""Pure functions, one measure each. Reductions run in fp32 whatever the input's dtype.

Shapes: B texts, h heads, T rows (one per anchor), K = prefix keys + own chain keys.
Masses are softmax weight of one query; norms are RMS, ``||x|| / sqrt(H)``, or L2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlab.errors import ConfigError

SINK_THRESHOLD = 0.3
ROUNDING = 1e-4
"""How far the sum of a row of attention may be from 1."""

_CACHED = 2**18
_ON_DEVICE = 2**26
"""Elements of a block of logits, so that no second tensor of the logits' size is made."""


def rms(x: Tensor) -> Tensor:
    """Root mean square of the last dimension: ``||x|| / sqrt(H)``."""
    return l2(x) * x.shape[-1] ** -0.5


def l2(x: Tensor) -> Tensor:
    """Euclidean norm of the last dimension."""
    return torch.linalg.vector_norm(x.float(), dim=-1)


def entropy(pattern: Tensor) -> Tensor:
    """Entropy in nats of each query's weights, [B, h, T, K] -> [B, h, T]."""
    weights = pattern.float()
    # A weight of 0 adds 0 and not 0 * inf; torch's own entr is ten times as slow.
    logs = weights.clamp(min=torch.finfo(torch.float32).tiny).log_()
    return -logs.mul_(weights).sum(dim=-1)


def region_masses(
    pattern: Tensor, anchors: Tensor, depth: int, sink: Tensor, prompt_lens: Tensor
) -> Tensor:
    """Mass on each region, [B, h, T, K] -> [B, h, T, 6]; they sum to 1.

    The order is `driftlab.results.schema.REGIONS`.

    A key belongs to the position whose captured states it was made of: ``sink`` if that
    position is marked, ``prompt`` below the prompt's length, else ``generated``. The query's
    own key is ``self``: at depth 1 the anchor's, deeper the chain's newest; the chain's
    earlier keys are ``draft``. A sink position that is the query's own key at depth 1 counts
    as ``self``. ``null`` is what the weights lack to 1 (a learned sink logit). Rounding up to
    `ROUNDING` is taken out; what is negative beyond it stays, for the caller to refuse.

    Parameters
    ----------
    anchors: [T] anchor of each row. sink: bool [B, P] for P >= prefix keys.
    prompt_lens: [B].
    """
    pattern = pattern.float()
    keys = pattern.shape[-1]
    seen = keys - (depth - 1)
    key = torch.arange(seen, device=pattern.device)
    is_sink = sink[:, :seen]
    is_prompt = (key < prompt_lens[:, None]) & ~is_sink
    kinds = pattern.new_zeros(len(pattern), 5, keys)  # sink, prompt, generated, draft, self
    kinds[:, 0, :seen], kinds[:, 1, :seen] = is_sink, is_prompt
    kinds[:, 2, :seen] = ~(is_sink | is_prompt)
    kinds[:, 3, seen : keys - 1] = 1
    kinds[:, 4, max(seen, keys - 1) :] = 1
    # One product reads the weights once; this way round it is the quicker one.
    parts = torch.matmul(kinds, pattern.flatten(1, 2).mT).unflatten(2, pattern.shape[1:3])
    if depth == 1:
        index = anchors[None, None, :, None].expand(*pattern.shape[:3], 1)
        own = pattern.gather(-1, index)[..., 0]
        parts = parts - own[:, None] * kinds[:, :, anchors][:, :, None]
        parts[:, 4] = own
    parts = parts.movedim(1, -1)
    parts = torch.where(parts < -ROUNDING, parts, parts.clamp(min=0))
    null = 1 - parts.sum(dim=-1, keepdim=True)
    null = torch.where(null.abs() < ROUNDING, torch.zeros_like(null), null)
    return torch.cat([parts, null], dim=-1)


def recent_mass(pattern: Tensor, anchors: Tensor, depth: int, window: int) -> Tensor:
    """Mass on the query's last ``window`` keys, its own among them, [B, h, T, K] -> [B, h, T]."""
    pattern = pattern.float()
    chain = depth - 1
    window = min(window, pattern.shape[-1])  # no more keys than there are
    mass = pattern[..., pattern.shape[-1] - min(window, chain) :].sum(dim=-1) if chain else 0
    if window > chain:
        key = anchors[:, None] - torch.arange(window - chain, device=anchors.device)  # [T, n]
        index = key.clamp(min=0).expand(*pattern.shape[:2], -1, -1)
        mass = mass + (pattern.gather(-1, index) * (key >= 0)).sum(dim=-1)
    return torch.as_tensor(mass)


def first_sink(batch: int, size: int) -> Tensor:
    """Mark the first position of each text (texts are padded on the right). -> [B, size]"""
    sink = torch.zeros(batch, size, dtype=torch.bool)
    sink[:, 0] = True
    return sink


def explicit_sink(positions: Sequence[int], batch: int, size: int) -> Tensor:
    """Mark the given positions. -> [B, size]"""
    sink = torch.zeros(batch, size, dtype=torch.bool)
    for position in positions:
        if position < 0:
            raise ConfigError("a sink position cannot be negative", got=position)
        if position < size:
            sink[:, position] = True
    return sink


def auto_sink(received: Tensor, size: int) -> Tensor:
    """Mark positions whose mean received mass at depth 1, [B, K], exceeds `SINK_THRESHOLD`.

    -> [B, size]; positions past K are not marked.
    """
    sink = torch.zeros(len(received), size, dtype=torch.bool)
    sink[:, : received.shape[1]] = received > SINK_THRESHOLD
    return sink


def fused_parts(chunks: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """``W_i N(a)_i`` for each captured state: the exact split of a bias-free fused input.

    chunks: A tensors [B, T, Ht] after the fusion norm. weight: fc's, [H, A*Ht].
    """
    blocks = weight.split(chunks[0].shape[-1], dim=1)
    return [
        torch.nn.functional.linear(c, w.to(c.dtype)) for c, w in zip(chunks, blocks, strict=True)
    ]


def share(part: Tensor, whole: Tensor) -> Tensor:
    """Signed share ``<part, g> / <g, g>``; the parts' shares sum to 1. -> [B, T]"""
    part, whole = part.float(), whole.float()
    return (part * whole).sum(-1) / whole.pow(2).sum(-1).clamp(min=1e-20)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the last dimension."""
    return torch.cosine_similarity(a.float(), b.float(), dim=-1)


@torch.no_grad()
def draft_scores(
    logits: Tensor, truth: Tensor, target_to_draft: Tensor, target: Tensor | None = None
) -> dict[str, Tensor]:
    """How the drafter scores the true token and how far it is from the target, each [B, T].

    ``in_vocab`` bool; ``logprob`` of the truth; ``rank``, 0 is the best and ties count against
    the truth; ``best``, the largest logit. Where the truth is not in the draft vocabulary,
    logprob is NaN and rank -1. ``tv`` where ``target`` is given: ``0.5 sum_v |q(v) - p(v)|``
    over the target's whole vocabulary.

    Parameters
    ----------
    logits: [B, T, Vd]. truth: [B, T] target ids, -1 where the text has ended.
    target: [B, T, Vd] the target's true (not renormalised) probabilities of the draft ids; what
        they lack to 1 lies outside the draft vocabulary, where q is 0.
    """
    index = target_to_draft[truth.clamp(min=0)]
    inside = (truth >= 0) & (index >= 0)
    own = logits.gather(-1, index.clamp(min=0)[..., None]).float()
    best, total, ahead, tv = logits.new_empty((4, *truth.shape), dtype=torch.float32)
    # On a CPU a block of rows stays in the cache through all that is asked of it.
    size = max(1, (_CACHED if logits.device.type == "cpu" else _ON_DEVICE) // logits.shape[-1])
    scratch = logits.new_empty((min(size, truth.shape[1]), logits.shape[-1]), dtype=torch.float32)
    for text in range(len(logits)):
        for start in range(0, truth.shape[1], size):
            rows = slice(start, start + size)
            x = logits[text, rows].float()
            at, q = (text, rows), scratch[: len(x)]
            best[at] = top = x.amax(dim=-1)
            ahead[at] = torch.ge(x, own[at], out=q).sum(dim=-1)  # exact up to 2^24 ids
            total[at] = sums = torch.sub(x, top[:, None], out=q).exp_().sum(dim=-1)
            if target is not None:
                # Both sum to 1, q without what lies outside: half the distance is q's excess.
                torch.addcmul(q, target[at], sums[:, None], value=-1, out=q).clamp_(min=0)
                tv[at] = q.sum(dim=-1) / sums
    log_q = own[..., 0] - best - total.log()
    found = {
        "in_vocab": inside,
        "logprob": torch.where(inside, log_q, torch.full_like(log_q, float("nan"))),
        "rank": torch.where(inside, ahead.long() - 1, torch.full_like(truth, -1)),
        "best": best,
    }
    return found if target is None else {**found, "tv": tv}
