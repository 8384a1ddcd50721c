"""What a drafted token owes to: captured layers, fused input, token, fed-back state, attention.

Every function takes one text: ``tokens`` [S] target ids and ``aux`` [S, A*Ht] captured states
(``Features.item`` has both). Anchors default to those whose deepest depth has a true token, and
chains read the text's tokens (forced) unless ``free`` is asked for. Hooks and interventions that
are in force act here as well.

A *baseline* is what stands in for a value that is taken away. It is always a mean over the text
and never zero: behind an RMSNorm a zero is no neutral value but a jump.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from driftlab.analysis.measures import cosine, region_masses, share
from driftlab.analysis.recorder import refuse_no_attention
from driftlab.config import Feedback
from driftlab.errors import ConfigError, ContractError, DataError
from driftlab.models.drafter import Drafter, Memory, State
from driftlab.models.hooks import Moment, attach, capture
from driftlab.results.schema import REGIONS

if TYPE_CHECKING:
    import pandas as pd

Mode = Literal["free", "forced"]

COALITIONS = 16
"""Coalitions of layers that are run as one batch."""


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
    2^A coalitions are run, once each, as texts of one batch, and captum's ``ShapleyValues``
    weighs them.

    Raises
    ------
    DataError: an anchor without a true token at ``depth``. ContractError: see :func:`split`.
    """
    from captum.attr import ShapleyValues

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    pieces = split(drafter, aux[:-1])
    count = len(pieces.parts)
    rest = pieces.fused - pieces.parts.sum(dim=0)  # the bias of fc
    means = pieces.parts.mean(dim=1, keepdim=True).expand_as(pieces.parts)
    coalitions = torch.tensor(list(itertools.product((False, True), repeat=count)))
    found = []
    known = torch.ones(len(anchors), depth, dtype=torch.bool)
    with torch.no_grad():
        for block in coalitions.split(COALITIONS):
            there = block[:, :, None, None]
            fused = rest + torch.where(there, pieces.parts, means).sum(dim=1)
            scores, known = _truths(
                drafter, _chain(drafter, tokens, fused, depth, "forced", anchors)
            )
            found.append(scores)
    worths = {
        tuple(c): worth for c, worth in zip(coalitions.tolist(), torch.cat(found), strict=True)
    }

    def worth(present: Tensor) -> Tensor:
        """[1, A] of ones and zeros -> [1, T * D]"""
        return worths[tuple(bool(p) for p in present[0])].reshape(1, -1)

    with torch.no_grad():
        values = ShapleyValues(worth).attribute(torch.ones(1, count))
    values = values.reshape(len(anchors), depth, count).permute(2, 0, 1)
    present, absent = worths[(True,) * count], worths[(False,) * count]
    off = (values.sum(dim=0) - (present - absent)).abs()
    gap = float(off[known].max()) if bool(known.any()) else 0.0
    return Shapley(anchors, values, present, absent, known, gap, len(worths))


# --- integrated gradients -----------------------------------------------------------------------


def integrated_gradients(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    anchors: Tensor,
    depths: Sequence[int] | None = None,
    background: Tensor | None = None,
    mode: Mode = "forced",
    steps: int = 32,
    gap: float = math.inf,
) -> pd.DataFrame:
    """Integrated gradients (captum) of the drafted token's logit, by anchor and depth.

    The step of (anchor, depth) is a function of three inputs, all else held fixed: the anchor's
    fused input (at depth 1 what the layer receives, deeper its depth-1 key and value), the
    embedding of the token that is read, and the fed-back state (depth >= 2). Baselines: means
    over the text's positions of the fused input and of the embeddings, and over ``background``
    (anchors, by default all) of the state fed back at that depth. Cost: a forward and backward
    pass of ``steps`` rows for each row of the result; ``depths`` takes some of 1..``depth``. Where
    the attributions miss their sum by more than ``gap`` logits, steps are doubled, up to 16 times
    as many: between two states a norm may turn sharply.

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
    if background is not None:
        everyone = torch.unique(torch.cat([background, anchors]))
    with torch.no_grad():
        fused = drafter.fuse(aux[None, :-1])
        memory = drafter.new_memory()
        links = list(_chain(drafter, tokens, fused, depth, mode, everyone, memory))
        means = [fused[0].mean(dim=0), drafter.embed_tokens(tokens).mean(dim=0)]
    rows = []
    for row, anchor in enumerate(everyone.tolist()):
        if anchor not in anchors:
            continue
        for link in links:
            if depths is not None and link.depth not in depths:
                continue
            inputs = [fused[0, anchor], drafter.embed_tokens.weight[link.read[0, row]]]
            baselines = list(means)
            if link.depth > 1:
                inputs.append(link.received[0, row])
                baselines.append(link.received[0].mean(dim=0))
            score = _score(drafter, memory, tokens, anchor, row, link)
            given = tuple(x.detach().clone()[None, None].requires_grad_() for x in inputs)
            base = tuple(b.detach()[None, None] for b in baselines)
            with torch.no_grad():
                logit, lowest = float(score(*given)), float(score(*base))
            for doubled in range(5):
                found = IntegratedGradients(score).attribute(
                    given, baselines=base, n_steps=steps << doubled
                )
                parts = [float(part.detach().sum()) for part in found] + [0.0]
                off = sum(parts) - (logit - lowest)
                if abs(off) <= gap:
                    break
            rows.append(
                {
                    "anchor": anchor,
                    "depth": link.depth,
                    "token": int(link.draft[0, row]),
                    "logit": logit,
                    "fused": parts[0],
                    "embedding": parts[1],
                    "feedback": parts[2],
                    "difference": logit - lowest,
                    "gap": off,
                }
            )
    return pd.DataFrame(rows)


def _score(
    drafter: Drafter, memory: Memory, tokens: Tensor, anchor: int, row: int, link: _Link
) -> Callable[..., Tensor]:
    """The drafted token's logit as a function of [n, 1, H] inputs, -> [n]."""
    choice = int(drafter.target_to_draft[link.draft[0, row]])

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
                one, earlier = slice(row, row + 1), link.depth - 2
                own.chain = [[widened(p, one, n) for p in c[:earlier]] for c in memory.chain]
                read = link.read[0, row].expand(n, 1)
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
        fused = drafter.fuse(aux[None, :-1])
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
                            "says_previous": (best == link.read[0]).numpy(),
                            "says_draft": (best == link.draft[0]).numpy(),
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
    """How the state moves over depth: one row for each depth, means over the anchors.

    A layer of a stack would refine one state: close to the state of the depth before. An
    autoregressor starts anew at every token: close to what depth 1, which reads true states,
    makes of the same token.

    Returns
    -------
    Columns depth; of ``state.pre``: ``cosine_previous`` with the same chain's depth before (NaN
    at depth 1), ``cosine_same_token`` with the depth-1 state that guesses the same token, from
    anchor t + depth - 1 (1 at depth 1; forced chains only read the same tokens), and
    ``cosine_other``, mean over pairs of anchors at one depth: what unrelated states share.
    ``cosine_write_previous``, ``cosine_write_same_token``: the same of what attention and MLP
    write at that depth, which leaves out what the residual stream only carries on.
    ``cosine_target``: of ``state.post`` with the target's own state after its final norm at the
    same position, ``last`` [S, Ht] (NaN without it, or where widths differ).
    ``effective_rank`` of the anchors' ``state.pre`` (:func:`effective_rank`), and
    ``effective_rank_target`` of the target's states at the same positions.
    ``geometry_token``, ``geometry_anchor``: :func:`geometry` of ``state.pre`` and the target's
    states at the token's position t + depth, and at the anchor's t (NaN without ``last``).
    """
    import pandas as pd

    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    nan = float("nan")
    rows = []
    previous: tuple[Tensor, Tensor] | None = None
    sites = ["state.pre", "*attn.out", "*mlp.out"]
    with torch.no_grad(), capture(drafter, sites) as kept:
        fused = drafter.fuse(aux[None, :-1])
        for link in _chain(drafter, tokens, fused, depth, mode, anchors):
            pre, post, d = link.state.pre[0], link.state.post[0], link.depth
            written = torch.stack(
                [v[0] for (site, at), v in kept.items() if at == d and site != "state.pre"]
            ).sum(dim=0)
            if d == 1:
                fresh = kept["state.pre", 1][0], written
                written = written[anchors]
            row = {
                "depth": d,
                **dict.fromkeys(("cosine_previous", "cosine_write_previous"), nan),
                "cosine_same_token": float(cosine(pre, fresh[0][anchors + d - 1]).mean()),
                "cosine_write_same_token": float(cosine(written, fresh[1][anchors + d - 1]).mean()),
                "cosine_other": float(_pairs(pre).mean()) if len(pre) > 1 else nan,
                "effective_rank": effective_rank(pre),
                **dict.fromkeys(("cosine_target", "effective_rank_target"), nan),
                **dict.fromkeys(("geometry_token", "geometry_anchor"), nan),
            }
            if previous is not None:
                row["cosine_previous"] = float(cosine(pre, previous[0]).mean())
                row["cosine_write_previous"] = float(cosine(written, previous[1]).mean())
            if last is not None:
                own = last[anchors + d].to(post.dtype)
                if own.shape[-1] == post.shape[-1]:
                    row["cosine_target"] = float(cosine(post, own).mean())
                row["effective_rank_target"] = effective_rank(own)
                row["geometry_token"] = geometry(pre, own)
                row["geometry_anchor"] = geometry(pre, last[anchors].to(post.dtype))
            rows.append(row)
            previous = pre, written
    return pd.DataFrame(rows)


def geometry(a: Tensor, b: Tensor) -> float:
    """Whether two sets of states [N, H] and [N, H'] put the same things close to each other.

    Pearson correlation, over pairs of rows, of the cosines within ``a`` and within ``b``, each
    after its mean was taken away. Blind to rotation and scale, and to the widths. NaN below
    three rows.
    """
    if len(a) < 3:
        return float("nan")
    near = torch.stack([_pairs(x.float() - x.float().mean(dim=0)) for x in (a, b)])
    return float(torch.corrcoef(near)[0, 1])


def _pairs(states: Tensor) -> Tensor:
    """Cosine of every pair of rows, [N, H] -> [N (N - 1) / 2]."""
    unit = torch.nn.functional.normalize(states.float(), dim=-1)
    i, j = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[i, j]


def effective_rank(states: Tensor) -> float:
    """Roy and Vetterli 2007: exp of the entropy of the normalised singular values, [N, H] -> 1.."""
    values = torch.linalg.svdvals(states.float())
    return float(torch.special.entr(values / values.sum()).sum().exp())


# --- attention: how much goes where, and what it is worth ----------------------------------------

EFFECTS = REGIONS[:4]
"""Regions whose keys can be hidden. A query keeps its own key, so that something is left."""


@dataclass(frozen=True)
class Effects:
    """Attention mass of each region beside what its keys are worth to the target's token.

    anchors: [T]. mass: [6, T, D], mean over heads of the first layer, in the order of ``REGIONS``.
    direct, chain: [4, T, D] in nats, in the order of :data:`EFFECTS`: log-probability of the
    truth with all keys minus that without the region's. ``direct`` hides them from the query
    of that depth alone, on the states and keys of the untouched chain; ``chain`` at every depth
    up to it. Positive: the region helps.
    present: [T, D] log-probability with all keys. known: bool [T, D], the truth has a draft id.
    """

    anchors: Tensor
    mass: Tensor
    direct: Tensor
    chain: Tensor
    present: Tensor
    known: Tensor


def attention_effects(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    sink: Tensor,
    prompt_len: int,
    anchors: Tensor | None = None,
    where: str = "",
) -> Effects:
    """Hide each region's keys before the softmax, in every head and layer, of forced chains.

    Regions are those of :func:`driftlab.analysis.measures.region_masses`; the keys that are left
    share the mass in their own proportions. ``sink``: bool [S], the positions that count as
    sink. A drafter of several layers makes its later layers' keys from what attention wrote, so
    there the keys of other positions feel what is hidden at depth 1 as well. ``where`` names the
    text in messages.

    Raises
    ------
    DataError: an anchor without a true token at ``depth``.
    NumericsError: attention has a negative weight or does not sum to 1, as a hook may leave it.
    """
    tokens, aux, anchors = _checked(tokens, aux, depth, anchors)
    key = torch.arange(len(tokens) - 1)
    marked = sink[: len(key)]
    prompt = (key < prompt_len) & ~marked
    nothing = torch.zeros_like(marked)
    # One batch: nothing hidden, then one region each. The chain's keys are no prefix.
    hidden = torch.stack([nothing, marked, prompt, ~(marked | prompt), nothing])

    def hide(scores: Tensor, moment: Moment) -> Tensor:
        own, rows = moment.depth - 1, scores.shape[-2]
        seen = scores.shape[-1] - own
        where = hidden[:, None, :seen].expand(-1, rows, -1)
        if moment.depth == 1:
            where = where & (key[:seen] != moment.anchors[:, None])
        drafts = torch.zeros(len(hidden), rows, own, dtype=torch.bool)
        drafts[-1, :, :-1] = True
        return scores.masked_fill(torch.cat([where, drafts], dim=-1)[:, None], float("-inf"))

    masses: list[list[Tensor]] = [[] for _ in range(depth)]  # [rows, 6]
    checked: list[list[Tensor]] = [[] for _ in range(depth)]  # [2, h, rows]

    def watch(pattern: Tensor, moment: Moment) -> None:
        rows = torch.isin(moment.anchors, anchors)
        own = pattern[:1, :, rows]
        found = region_masses(
            own,
            moment.anchors[rows],
            moment.depth,
            sink[None],
            torch.tensor([prompt_len]),
        )
        masses[moment.depth - 1].append(found[0].mean(dim=0))
        checked[moment.depth - 1].append(torch.stack([found[0, ..., -1], own[0].amin(dim=-1)]))

    def at(d: int, row: int) -> str:
        anchor = int(anchors[row])
        place = f"depth {d + 1}, anchor {anchor}, reading token {int(tokens[anchor + d + 1])}"
        return place + (f" of {where}" if where else "")

    with torch.no_grad(), attach(drafter, "*attn.scores", hide):
        fused = drafter.fuse(aux[None, :-1]).expand(len(hidden), -1, -1)
        with attach(drafter, "attn.pattern", watch):
            links = _chain(drafter, tokens, fused, depth, "forced", anchors, restore=True)
            alone, known = _truths(drafter, links)
        null, least = torch.stack([torch.cat(x, dim=2) for x in checked], dim=1).numpy()
        refuse_no_attention(null, least, at, drafter=drafter.config.variant)
        links = _chain(drafter, tokens, fused, depth, "forced", anchors)
        onwards, _ = _truths(drafter, links)
    mass = torch.stack([torch.cat(blocks) for blocks in masses], dim=1)  # [T, D, 6]
    return Effects(
        anchors,
        mass.permute(2, 0, 1),
        alone[:1] - alone[1:],
        onwards[:1] - onwards[1:],
        alone[0],
        known,
    )


# --- chains -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Link:
    """One depth of every anchor: truth [T]; read, draft [B, T]; received, logits [B, T, ..]."""

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
    *,
    restore: bool = False,
) -> Iterator[_Link]:
    """Chains of ``anchors`` of one text from B given fused inputs [B, S - 1, H].

    ``restore``: every row goes on from row 0's state and keys, so that what a hook changed in
    another row at one depth is not handed on to the next.
    """
    memory = drafter.new_memory() if memory is None else memory
    batch = len(fused)
    state = drafter.step(tokens[1:].expand(batch, -1), fused, memory, depth=1)
    memory.select(anchors)
    state = state.select(anchors)
    read, received = tokens[anchors + 1].expand(batch, -1), fused[:, anchors]
    draft = read
    for d in range(1, depth + 1):
        if d > 1:
            read = draft if mode == "free" else tokens[anchors + d].expand(batch, -1)
            received = state.feedback
            if restore:
                received = _first(received)
                _restore(memory)
            state = drafter.step(read, received, memory, depth=d)
        logits = drafter.logits(state)
        draft = drafter.to_target(logits.argmax(dim=-1))
        yield _Link(d, read, draft, tokens[anchors + 1 + d], received, logits, state)


def _first(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _restore(memory: Memory) -> None:
    """Give every row of the batch the newest keys and values of the first."""
    for i, (prefix, chain) in enumerate(zip(memory.prefix, memory.chain, strict=True)):
        if chain:
            chain[-1] = (_first(chain[-1][0]), _first(chain[-1][1]))
        elif prefix is not None:
            memory.prefix[i] = (_first(prefix[0]), _first(prefix[1]))


def _truths(drafter: Drafter, links: Iterable[_Link]) -> tuple[Tensor, Tensor]:
    """Log-probability of the truth [B, T, D] in nats, and whether it has a draft id [T, D]."""
    scores, known = [], []
    for link in links:
        truth = drafter.target_to_draft[link.truth]
        index = truth.clamp(min=0)[None, :, None].expand(len(link.logits), -1, -1)
        log_q = link.logits.float().log_softmax(dim=-1)
        scores.append(log_q.gather(-1, index)[..., 0])
        known.append(truth >= 0)
    return torch.stack(scores, dim=-1), torch.stack(known, dim=-1)
