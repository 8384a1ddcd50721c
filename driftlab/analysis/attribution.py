"""What a drafted token owes to: captured layers, fused input, token, fed-back state.

Every function takes one text: ``tokens`` [S] target ids and ``aux`` [S, A*Ht] captured states
(``Features.item`` has both). Anchors default to those whose deepest depth has a true token, and
chains read the text's tokens (forced) unless ``free`` is asked for. Hooks and interventions that
are in force act here as well.

A *baseline* is what stands in for a value that is taken away. It is always a mean over the text
and never zero: behind an RMSNorm a zero is no neutral value but a jump.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from driftlab.analysis.measures import cosine, share
from driftlab.config import Feedback
from driftlab.errors import ConfigError, ContractError, DataError
from driftlab.models.drafter import Drafter, Memory, State
from driftlab.models.hooks import attach, capture

if TYPE_CHECKING:
    import pandas as pd

Mode = Literal["free", "forced"]


# --- the exact split of the fused input ---------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """``g = sum_i W_i N(a)_i + bias`` over a text's positions.

    parts: [A, S, H], ``W_i N(a)_i``. fused: [S, H], their sum with the bias of fc, if any.
    share: [A, S], signed ``<part_i, g> / <g, g>``; sums to 1 for a bias-free fc.
    cosine: [A, S], of part_i and g.
    """

    parts: Tensor
    fused: Tensor
    share: Tensor
    cosine: Tensor


def split(drafter: Drafter, aux: Tensor) -> Split:
    """Parts of the fused input at every position of ``aux`` [S, A*Ht].

    Raises ContractError for a drafter that fuses nothing.
    """
    count = len(drafter.config.boundaries)
    if not count:
        raise ContractError(
            "the drafter reads one state of the target and fuses nothing",
            remedy="The split is for drafters with captured states and fc.",
        )
    with torch.no_grad(), capture(drafter, "fuse.part.*") as kept:
        fused = drafter.fuse(aux[None])[0]
    parts = torch.stack([kept[f"fuse.part.{i}", 1][0] for i in range(count)])
    shares = torch.stack([share(part, fused) for part in parts])
    return Split(parts, fused, shares, torch.stack([cosine(part, fused) for part in parts]))


# --- Shapley values of the captured layers ------------------------------------------------------


@dataclass(frozen=True)
class Shapley:
    """Shapley values of the captured layers for the drafter's log-probability of the truth.

    anchors: [T]. values: [A, T, D] in nats, by captured layer, anchor and depth.
    present, absent: [T, D] log-probability with every layer, and with none.
    known: bool [T, D], the truth has a draft id; elsewhere values mean nothing.
    gap: largest ``|sum_i values_i - (present - absent)|`` over known entries; 0 but for rounding.
    passes: coalitions that were run, 2^A.
    """

    anchors: Tensor
    values: Tensor
    present: Tensor
    absent: Tensor
    known: Tensor
    gap: float
    passes: int

    def mean(self) -> Tensor:
        """Mean over the anchors whose truth has a draft id, [A, D]; NaN where there is none."""
        weight = self.known.to(self.values.dtype)
        total = torch.where(self.known, self.values, torch.zeros_like(self.values)).sum(dim=1)
        return total / torch.where(weight.sum(dim=0) > 0, weight.sum(dim=0), float("nan"))


def shapley(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int = 1,
    anchors: Tensor | None = None,
) -> Shapley:
    """Exact Shapley value of every captured layer at depths 1..``depth`` of forced chains.

    The players are the parts of the fused input. A layer that is absent has its part replaced
    by the part's mean over the text's positions, at every position at once: at the anchor and
    in all keys that the chain reads. Deeper depths feel it through the chain's own states. All
    2^A coalitions are run, once each, and captum's ``ShapleyValues`` weighs them.

    Raises
    ------
    DataError: an anchor without a true token at ``depth``. ContractError: see :func:`split`.
    """
    from captum.attr import ShapleyValues

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    pieces = split(drafter, aux[:-1])
    count = len(pieces.parts)
    rest = pieces.fused - pieces.parts.sum(dim=0)  # the bias of fc
    means = pieces.parts.mean(dim=1, keepdim=True)
    seen: dict[tuple[bool, ...], Tensor] = {}
    known = torch.ones(len(anchors), depth, dtype=torch.bool)

    def worth(present: Tensor) -> Tensor:
        """[1, A] of ones and zeros -> [1, T * D]"""
        coalition = tuple(bool(p) for p in present[0])
        if coalition not in seen:
            fused = rest + sum(
                pieces.parts[i] if there else means[i] for i, there in enumerate(coalition)
            )
            found = []
            for link in _chain(drafter, tokens, fused, depth, "forced", anchors):
                truth = drafter.target_to_draft[link.truth]
                known[:, link.depth - 1] = truth >= 0
                log_q = link.logits.float().log_softmax(dim=-1)
                found.append(log_q.gather(-1, truth.clamp(min=0)[:, None])[:, 0])
            seen[coalition] = torch.stack(found, dim=1)
        return seen[coalition].reshape(1, -1)

    with torch.no_grad():
        values = ShapleyValues(worth).attribute(torch.ones(1, count))
    values = values.reshape(len(anchors), depth, count).permute(2, 0, 1)
    present, absent = seen[(True,) * count], seen[(False,) * count]
    off = (values.sum(dim=0) - (present - absent)).abs()
    gap = float(off[known].max()) if bool(known.any()) else 0.0
    return Shapley(anchors, values, present, absent, known, gap, len(seen))


# --- integrated gradients -----------------------------------------------------------------------


def integrated_gradients(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    anchors: Tensor,
    mode: Mode = "forced",
    steps: int = 32,
) -> pd.DataFrame:
    """Integrated gradients (captum) of the drafted token's logit, by anchor and depth.

    The step of (anchor, depth) is a function of three inputs, all else held fixed: the anchor's
    fused input (at depth 1 what the layer receives, deeper its depth-1 key and value), the
    embedding of the token that is read, and the fed-back state (depth >= 2). Baselines: means
    over the text's positions of the fused input and of the embeddings, and over its anchors of
    the state fed back at that depth. Cost: a forward and backward pass of ``steps`` rows for
    each row of the result.

    Returns
    -------
    Columns anchor, depth, token (drafted, target id), logit, ``fused``, ``embedding``,
    ``feedback`` (attributions, in logits; feedback is 0 at depth 1), ``difference`` (logit minus
    the logit at the baselines) and ``gap`` (attributions minus difference: the integration's
    error, which falls with ``steps``).

    Raises DataError for an anchor without a true token at ``depth``.
    """
    import pandas as pd
    from captum.attr import IntegratedGradients

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    everyone = torch.arange(len(tokens) - 1 - depth)
    with torch.no_grad():
        fused = drafter.fuse(aux[None, :-1])[0]
        memory = drafter.new_memory()
        links = list(_chain(drafter, tokens, fused, depth, mode, everyone, memory))
        means = [fused.mean(dim=0), drafter.embed_tokens(tokens).mean(dim=0)]
    rows = []
    for anchor, link in itertools.product(anchors.tolist(), links):
        inputs = [fused[anchor], drafter.embed_tokens.weight[link.read[anchor]]]
        baselines = list(means)
        if link.depth > 1:
            inputs.append(link.received[anchor])
            baselines.append(link.received.mean(dim=0))
        score = _score(drafter, memory, tokens, anchor, link)
        given = tuple(x.detach().clone()[None, None].requires_grad_() for x in inputs)
        base = tuple(b.detach()[None, None] for b in baselines)
        found = IntegratedGradients(score).attribute(given, baselines=base, n_steps=steps)
        parts = [float(part.detach().sum()) for part in found] + [0.0]
        with torch.no_grad():
            logit, lowest = float(score(*given)), float(score(*base))
        rows.append(
            {
                "anchor": anchor,
                "depth": link.depth,
                "token": int(link.draft[anchor]),
                "logit": logit,
                "fused": parts[0],
                "embedding": parts[1],
                "feedback": parts[2],
                "difference": logit - lowest,
                "gap": sum(parts) - (logit - lowest),
            }
        )
    return pd.DataFrame(rows)


def _score(
    drafter: Drafter, memory: Memory, tokens: Tensor, anchor: int, link: _Link
) -> Callable[..., Tensor]:
    """The drafted token's logit as a function of [n, 1, H] inputs, -> [n]."""
    choice = int(drafter.target_to_draft[link.draft[anchor]])

    def widened(pair: tuple[Tensor, Tensor], rows: slice, n: int) -> tuple[Tensor, Tensor]:
        k, v = (t[:, :, rows].detach().expand(n, -1, -1, -1) for t in pair)
        return k, v

    def score(fused: Tensor, embedding: Tensor, received: Tensor | None = None) -> Tensor:
        n = len(fused)
        own = drafter.new_memory()
        own.length = anchor
        own.prefix = [pair and widened(pair, slice(anchor), n) for pair in memory.prefix]
        with attach(drafter, "token.embed", lambda value, moment: embedding, depths=[link.depth]):
            newest = tokens[anchor + 1].expand(n, 1)
            state = drafter.step(newest, fused, own, depth=1)
            if received is not None:
                row = slice(anchor, anchor + 1)  # row r of the chain is anchor r
                earlier = link.depth - 2
                own.chain = [[widened(p, row, n) for p in c[:earlier]] for c in memory.chain]
                read = link.read[anchor].expand(n, 1)
                state = drafter.step(read, received, own, depth=link.depth)
        return drafter.logits(state)[:, 0, choice]

    return score


# --- what the state says, and how it moves ------------------------------------------------------

LENS = ("feedback.in", "resid.mid", "state.pre")


def logit_lens(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    anchors: Tensor | None = None,
    mode: Mode = "forced",
) -> pd.DataFrame:
    """What the stream says at each depth, read through the drafter's own final norm and head.

    Sites: ``feedback.in`` (what the layer receives; a state that was normed before it was fed
    back is not normed twice), ``resid.mid``, ``state.pre``. If the layer only refined one guess,
    ``feedback.in`` would name the same token as ``state.pre``; an autoregressor's names the one
    before.

    Returns
    -------
    Columns anchor, depth, site, token (best, target id), ``says_previous`` (it is the token that
    was read at this depth), ``says_draft`` (it is the one drafted at this depth) and ``logprob``
    of the truth (NaN where it has no draft id).
    """
    import pandas as pd

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    last = drafter.config.num_layers - 1
    mid = f"layer.{last}.resid.mid" if last else "resid.mid"
    frames = []
    with torch.no_grad(), capture(drafter, ["feedback.in", mid, "state.pre"]) as kept:
        fused = drafter.fuse(aux[None, :-1])[0]
        for link in _chain(drafter, tokens, fused, depth, mode, anchors):
            truth = drafter.target_to_draft[link.truth]
            for name, site in zip(LENS, ("feedback.in", mid, "state.pre"), strict=True):
                stream = kept[site, link.depth]
                if link.depth == 1:
                    stream = stream[:, anchors]
                normed = name == "feedback.in" and link.depth > 1
                if not (normed and drafter.config.feedback is Feedback.post_norm):
                    stream = drafter.norm(stream)
                log_q = drafter.lm_head(stream)[0].float()
                log_q = (log_q * drafter.config.logit_scale).log_softmax(dim=-1)
                best = drafter.to_target(log_q.argmax(dim=-1))
                own = log_q.gather(-1, truth.clamp(min=0)[:, None])[:, 0]
                frames.append(
                    pd.DataFrame(
                        {
                            "anchor": anchors.numpy(),
                            "depth": link.depth,
                            "site": name,
                            "token": best.numpy(),
                            "says_previous": (best == link.read).numpy(),
                            "says_draft": (best == link.draft).numpy(),
                            "logprob": own.where(truth >= 0, torch.tensor(float("nan"))).numpy(),
                        }
                    )
                )
    return pd.concat(frames, ignore_index=True)


def state_geometry(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    last: Tensor | None = None,
    anchors: Tensor | None = None,
    mode: Mode = "forced",
) -> pd.DataFrame:
    """How the state moves over depth: one row for each depth.

    Returns
    -------
    Columns depth; ``cosine_previous``, mean cosine of ``state.pre`` with that of the depth
    before (NaN at depth 1); ``effective_rank`` of the anchors' states (:func:`effective_rank`);
    ``cosine_target``, mean cosine of ``state.post`` with the target's own state after its final
    norm at the same position, ``last`` [S, Ht] (NaN without it, or where widths differ).
    """
    import pandas as pd

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    rows = []
    previous: Tensor | None = None
    comparable = last is not None and last.shape[-1] == drafter.config.hidden_size
    with torch.no_grad():
        fused = drafter.fuse(aux[None, :-1])[0]
        for link in _chain(drafter, tokens, fused, depth, mode, anchors):
            pre, post = link.state.pre[0], link.state.post[0]
            rows.append(
                {
                    "depth": link.depth,
                    "cosine_previous": float("nan")
                    if previous is None
                    else float(cosine(pre, previous).mean()),
                    "effective_rank": effective_rank(pre),
                    "cosine_target": float(cosine(post, last[anchors + link.depth]).mean())
                    if comparable and last is not None
                    else float("nan"),
                }
            )
            previous = pre
    return pd.DataFrame(rows)


def effective_rank(states: Tensor) -> float:
    """Roy and Vetterli 2007: exp of the entropy of the normalised singular values, [N, H] -> 1.."""
    values = torch.linalg.svdvals(states.float())
    return float(torch.special.entr(values / values.sum()).sum().exp())


# --- chains -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Link:
    """One depth of every anchor: tokens [T], received [T, H], logits [T, Vd]; state has B = 1."""

    depth: int
    read: Tensor
    draft: Tensor
    truth: Tensor
    received: Tensor
    logits: Tensor
    state: State


def _checked(
    tokens: Tensor, aux: Tensor, depth: int, anchors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if tokens.dim() != 1 or aux.dim() != 2 or len(aux) != len(tokens):
        raise ContractError(
            "tokens [S] and captured states [S, A*Ht] of one text are needed",
            got=f"{tuple(tokens.shape)} and {tuple(aux.shape)}",
        )
    if depth < 1:
        raise ConfigError("depth starts at 1", got=depth)
    end = len(tokens) - 1 - depth  # the first anchor without a truth at the deepest depth
    if anchors is None:
        anchors = torch.arange(max(0, end))
    if not len(anchors) or int(anchors.min()) < 0 or int(anchors.max()) >= end:
        raise DataError(
            f"anchors need true tokens at depths 1..{depth}: 0..{end - 1} of a text of "
            f"{len(tokens)} tokens",
            got=anchors.tolist()[:8],
            remedy="Give a longer text, a lower depth, or other anchors.",
        )
    return tokens, aux, anchors.sort().values


def _chain(
    drafter: Drafter,
    tokens: Tensor,
    fused: Tensor,
    depth: int,
    mode: Mode,
    anchors: Tensor,
    memory: Memory | None = None,
) -> Iterator[_Link]:
    """Chains of ``anchors`` from given fused inputs [S - 1, H]; engines.anchors on one text."""
    memory = drafter.new_memory() if memory is None else memory
    state = drafter.step(tokens[None, 1:], fused[None], memory, depth=1)
    memory.select(anchors)
    state = state.select(anchors)
    read, received = tokens[anchors + 1], fused[anchors]
    draft = read
    for d in range(1, depth + 1):
        if d > 1:
            read = draft if mode == "free" else tokens[anchors + d]
            received = state.feedback[0]
            state = drafter.step(read[None], state.feedback, memory, depth=d)
        logits = drafter.logits(state)[0]
        draft = drafter.to_target(logits.argmax(dim=-1))
        yield _Link(d, read, draft, tokens[anchors + 1 + d], received, logits, state)
