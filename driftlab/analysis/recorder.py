"""Measures at sites, reduced inside the hooks: no pattern and no state outlives its step.

A recorder watches one `unroll` of B right-padded texts and gives the rows of the tables
``steps``, ``heads`` and ``fused`` for each text. Memory is a few numbers per (anchor, depth,
head), whatever the text's length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from driftlab.analysis import measures
from driftlab.config import Feedback
from driftlab.errors import NumericsError
from driftlab.models.drafter import Drafter, State
from driftlab.models.hooks import HookFn, Moment, attach
from driftlab.results.schema import REGIONS

Columns = dict[str, np.ndarray]

# Column of `steps` -> the site that it is the RMS of.
RMS_SITES = {
    "rms_input": "feedback.in",
    "rms_attn_out": "attn.out",
    "rms_mlp_out": "mlp.out",
}
# Columns of `steps` and the sites that they are made of, in the order of computing.
_ORDER = (
    ("rms_input", "feedback.in"),
    ("entropy", "attn.pattern"),
    *((region, "attn.pattern") for region in REGIONS),
    ("rms_attn_out", "attn.out"),
    ("rms_mlp_out", "mlp.out"),
    ("rms_state_pre", "state.pre"),
    ("l2_state_pre", "state.pre"),
    ("rms_state_post", "state.post"),
    ("l2_state_post", "state.post"),
)


class Step(Protocol):
    """What the recorder reads of an engine's step (see `engines.anchors.DepthStep`)."""

    @property
    def depth(self) -> int: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def draft(self) -> Tensor: ...
    @property
    def truth(self) -> Tensor: ...
    @property
    def logits(self) -> Tensor: ...
    @property
    def state(self) -> State: ...


@dataclass
class _Depth:
    """Values of one depth; lists hold one entry per block of rows."""

    masses: list[Tensor] = field(default_factory=list)  # [B, h, rows, 6]
    least: list[Tensor] = field(default_factory=list)  # [B, h, rows]
    recent: list[Tensor] = field(default_factory=list)  # [B, h, rows]
    entropy: list[Tensor] = field(default_factory=list)  # [B, h, rows]
    per_row: dict[str, Tensor] = field(default_factory=dict)  # [B, T]


class Recorder:
    """Records one unroll over ``anchors`` [T] of B texts.

    Parameters
    ----------
    sink: bool [B, P] positions of the sink set. prompt_lens: [B].
    recent: how many last keys count as recent.
    target_probabilities: [B, S, Vd] the target's probabilities of the draft ids after each
        position, for the total variation; None leaves it out.
    fused: whether the rows of ``fused`` are wanted; depth 1 is the same in every mode.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        anchors: Tensor,
        sink: Tensor,
        prompt_lens: Tensor,
        recent: int,
        target_probabilities: Tensor | None = None,
        fused: bool = True,
    ) -> None:
        self.drafter, self.anchors = drafter, anchors
        self.fused = fused and bool(drafter.config.boundaries)
        self._host = anchors.cpu().numpy()
        self.sink, self.prompt_lens, self.window = sink, prompt_lens, recent
        self.target_probabilities = target_probabilities
        self._depths: dict[int, _Depth] = defaultdict(_Depth)
        self._fused: list[dict[str, Tensor]] = []
        self._stacked: _Stacked | None = None
        self._rows: dict[tuple[bool, int, int], Tensor | slice] = {}

    @contextmanager
    def watch(self) -> Iterator[Recorder]:
        """Attach to the drafter for the length of the context."""
        with ExitStack() as stack:
            stack.enter_context(attach(self.drafter, "attn.pattern", self._pattern))
            for column, site in RMS_SITES.items():
                stack.enter_context(attach(self.drafter, site, self._rms(column)))
            if self.fused:
                globs = ["fuse.in.*", "fuse.normed.*", "fuse.out"]
                self._chunks: dict[str, Tensor] = {}
                stack.enter_context(attach(self.drafter, globs, self._fuse))
            yield self

    def _wanted(self, moment: Moment) -> Tensor | slice:
        """Rows of this call that belong to a recorded anchor; a slice where that is all."""
        # The anchors of a block change once, after depth 1: a device is asked no more often.
        key = (moment.depth == 1, moment.rows.start, moment.rows.stop)
        if key not in self._rows:
            rows = torch.isin(moment.anchors, self.anchors).nonzero()[:, 0]
            self._rows[key] = slice(None) if len(rows) == len(moment.anchors) else rows
        return self._rows[key]

    def _pattern(self, pattern: Tensor, moment: Moment) -> None:
        rows = self._wanted(moment)
        anchors = moment.anchors[rows]
        if not len(anchors):
            return
        pattern = pattern[:, :, rows]
        kept = self._depths[moment.depth]
        d = moment.depth
        kept.masses.append(measures.region_masses(pattern, anchors, d, self.sink, self.prompt_lens))
        kept.least.append(pattern.amin(dim=-1))
        kept.recent.append(measures.recent_mass(pattern, anchors, d, self.window))
        kept.entropy.append(measures.entropy(pattern))

    def _rms(self, column: str) -> HookFn:
        def record(value: Tensor, moment: Moment) -> None:
            rows = self._wanted(moment)
            self._depths[moment.depth].per_row[column] = measures.rms(value[:, rows])

        return record

    def _fuse(self, value: Tensor, moment: Moment) -> None:
        self._chunks[moment.site] = value
        if moment.site != "fuse.out":
            return
        whole = value[:, self.anchors]
        layers = range(len(self.drafter.config.boundaries))
        normed = [self._chunks[f"fuse.normed.{i}"][:, self.anchors] for i in layers]
        parts = measures.fused_parts(normed, self.drafter.fc.weight)
        for i in layers:
            raw = self._chunks[f"fuse.in.{i}"][:, self.anchors]
            self._fused.append(
                {
                    "rms_in": measures.rms(raw),
                    "l2_in": measures.l2(raw),
                    "rms_normed": measures.rms(normed[i]),
                    "rms_part": measures.rms(parts[i]),
                    "share": measures.share(parts[i], whole),
                    "cosine": measures.cosine(parts[i], whole),
                }
            )
        self._chunks.clear()

    def add(self, step: Step) -> None:
        """Take one engine step; call once per depth, inside the context."""
        state, kept = step.state, self._depths[step.depth].per_row
        for name, value in (("state_pre", state.pre), ("state_post", state.post)):
            kept[f"l2_{name}"] = measures.l2(value)
            kept[f"rms_{name}"] = kept[f"l2_{name}"] * value.shape[-1] ** -0.5
        fed = "post" if self.drafter.config.feedback is Feedback.post_norm else "pre"
        kept |= {f"{norm}_feedback": kept[f"{norm}_state_{fed}"] for norm in ("rms", "l2")}
        kept |= measures.draft_scores(
            step.logits, step.truth, self.drafter.target_to_draft, self._target(step.depth)
        )
        kept |= {"read": step.tokens, "draft": step.draft, "truth": step.truth}

    def _target(self, depth: int) -> Tensor | None:
        """The target's probabilities of what is guessed at ``depth``, [B, T, Vd]."""
        whole = self.target_probabilities
        if whole is None:
            return None
        first, last = int(self._host[0]) + depth, int(self._host[-1]) + depth
        if last - first + 1 == len(self._host) and last < whole.shape[1]:
            return whole[:, first : last + 1]  # no copy
        return whole[:, (self.anchors + depth).clamp(max=whole.shape[1] - 1)]

    def tables(self, text: int, rows: Tensor, *, mode: str, where: str = "") -> dict[str, Columns]:
        """Tables of text ``text`` over the recorded rows ``rows`` (indices into anchors).

        Every row's truth must exist at every depth, so that depths compare the same anchors.
        ``where`` names the text in messages.

        Raises
        ------
        NumericsError: a value is not finite, or attention has a negative weight or does not sum
            to 1; drafter, site, depth, anchor and token are named.
        """
        if self._stacked is None:
            self._stacked = _Stacked.of(self._depths, self._fused)
        everything, n = self._stacked, len(rows)
        index = rows.cpu().numpy()
        depths = everything.depths
        anchors = self._host[index]
        steps = {name: v[:, text][:, index] for name, v in everything.per_row.items()}  # [D, n]
        heads = {name: v[:, text][:, :, index] for name, v in everything.per_head.items()}
        least = heads.pop("least")
        steps["correct"] = steps["draft"] == steps["truth"]
        if mode == "free":
            steps["accepted"] = np.logical_and.accumulate(steps["correct"], axis=0)
        steps |= {name: v.mean(axis=1) for name, v in heads.items()}

        def at(d: int, row: int) -> str:
            place = f"depth {depths[d]}, anchor {anchors[row]}, reading token "
            return f"{place}{steps['read'][d, row]}" + (f" of {where}" if where else "")

        name = self.drafter.config.variant
        if fault := _first_fault(steps, everything.per_layer, text, index):
            site, d, row, value = fault
            raise NumericsError(
                f"{site} of drafter {name} is not finite at {at(d, row)}",
                got=value,
                remedy="The cell is stopped and its rows are invalid; check checkpoint and dtype.",
            )
        refuse_no_attention(heads["null_mass"], least, at, drafter=name)
        steps = {name: v for name, v in steps.items() if name not in ("read", "best")}
        steps["depth"] = np.repeat(depths[:, None], n, axis=1)
        steps["anchor"] = np.repeat(anchors[None], len(depths), axis=0)
        by_head = {name: v.mean(axis=2) for name, v in heads.items()}  # [D, h]
        n_heads = by_head["entropy"].shape[1]
        by_head["depth"] = np.repeat(depths[:, None], n_heads, axis=1)
        by_head["head"] = np.repeat(np.arange(n_heads)[None], len(depths), axis=0)
        by_head["n"] = np.full_like(by_head["head"], n)
        found = {
            "steps": {name: v.reshape(-1) for name, v in steps.items()},
            "heads": {name: v.reshape(-1) for name, v in by_head.items()},
        }
        if everything.per_layer:
            found["fused"] = self._fused_rows(everything.per_layer, text, index)
        return found

    def _fused_rows(self, layers: Sequence[Columns], text: int, rows: np.ndarray) -> Columns:
        means = [{name: value[text, rows].mean() for name, value in one.items()} for one in layers]
        columns = {name: np.array([m[name] for m in means]) for name in means[0]}
        columns["layer"] = np.arange(len(means))
        columns["boundary"] = np.array(self.drafter.config.boundaries)
        columns["n"] = np.full(len(means), len(rows))
        return columns


@dataclass(frozen=True)
class _Stacked:
    """All depths side by side: per_row [D, B, T], per_head [D, B, h, T]."""

    depths: np.ndarray
    per_row: Columns
    per_head: Columns
    per_layer: list[Columns]

    @classmethod
    def of(cls, kept: dict[int, _Depth], fused: list[dict[str, Tensor]]) -> _Stacked:
        order = sorted(kept)
        masses = torch.stack([torch.cat(kept[d].masses, dim=2) for d in order])
        heads = {name: masses[..., i] for i, name in enumerate(REGIONS)}
        heads["sink_rate"] = (masses[..., 0] > measures.SINK_THRESHOLD).float()
        for name in ("least", "recent", "entropy"):
            heads[name] = torch.stack([torch.cat(getattr(kept[d], name), dim=2) for d in order])
        rows = {n: torch.stack([kept[d].per_row[n] for d in order]) for n in kept[order[0]].per_row}
        per_row, per_head, *per_layer = _to_host([rows, heads, *fused])
        return cls(np.array(order), per_row, per_head, per_layer)


def refuse_no_attention(
    null: np.ndarray, least: np.ndarray, at: Callable[[int, int], str], *, drafter: str
) -> None:
    """Raise NumericsError where the weights of a query are negative or do not sum to 1.

    null, least: [D, h, T], what the weights lack to 1 and the smallest of them. ``at`` says in
    words which depth and row are meant.
    """
    # No drafter has a learned sink logit, so that nothing may be lacking to 1.
    wrong = (null != 0) | (least < -measures.ROUNDING)
    if wrong.any():
        d, row, head = np.argwhere(wrong.swapaxes(1, 2))[0]
        raise NumericsError(
            f"attn.pattern of drafter {drafter} is no attention at {at(d, row)}: weights must be "
            "0 or more and sum to 1",
            got=f"head {head}: a sum of {1 - null[d, head, row]:.6g}, the least weight "
            f"{least[d, head, row]:.3g}",
            remedy="Change attn.scores instead, before the softmax, or hand the mass on to "
            "other keys.",
        )


def _to_host(groups: Sequence[dict[str, Tensor]]) -> list[Columns]:
    """All tensors in one transfer; float64 holds fp32 and every id exactly."""
    every = [tensor for group in groups for tensor in group.values()]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in every]).cpu()
    pieces = iter(flat.split([tensor.numel() for tensor in every]))
    return [
        {name: next(pieces).to(t.dtype).reshape(t.shape).numpy() for name, t in group.items()}
        for group in groups
    ]


def _first_fault(
    steps: Columns, layers: Sequence[Columns], text: int, rows: np.ndarray
) -> tuple[str, int, int, float] | None:
    """(site, depth's index, row, value) of the first value that is not finite, or None.

    First of the shallowest depth, in the order of computing: whatever is after follows from it.
    """
    fused = [
        (f"{site}.{i}", value[text, rows][None])
        for i, layer in enumerate(layers)
        for site, value in (("fuse.in", layer["rms_in"]), ("fuse.normed", layer["rms_normed"]))
    ]
    own = [(site, steps[name]) for name, site in _ORDER if name in steps]
    own += [
        ("logits", steps["best"]),
        *(("logits (against the target's)", steps[n]) for n in ("tv",) if n in steps),
    ]
    bad = [(site, values, np.argwhere(~np.isfinite(values))) for site, values in fused + own]
    first = [(tuple(where[0]), site, values) for site, values, where in bad if len(where)]
    if not first:
        return None
    (depth, row), site, values = min(first, key=lambda fault: fault[0][0])
    return site, int(depth), int(row), float(values[depth, row])


def received_mass(drafter: Drafter, tokens: Tensor, aux: Tensor, lengths: Tensor) -> Tensor:
    """Mean mass that each position receives at depth 1, over heads and the queries that see it.

    tokens [B, S], aux [B, S, A*Ht] -> [B, S - 1]; padded queries do not count, nor do those that a
    window, the drafter's own or an intervention's, keeps from the position: they give it 0 exactly.
    """
    batch, size = tokens.shape
    total = torch.zeros(batch, size - 1, device=tokens.device)
    seen = torch.zeros_like(total)

    def collect(pattern: Tensor, moment: Moment) -> None:
        real = moment.anchors[None] < lengths[:, None] - 1  # [B, rows]
        weight = (real / pattern.shape[1])[:, None].expand(-1, pattern.shape[1], -1)
        total[:, : pattern.shape[-1]] += torch.einsum("bht,bhtk->bk", weight, pattern.float())
        seen[:, : pattern.shape[-1]] += ((pattern > 0).any(1) & real[..., None]).sum(1)

    memory = drafter.new_memory()
    with torch.inference_mode(), attach(drafter, "attn.pattern", collect):
        drafter.step(tokens[:, 1:], drafter.fuse(aux[:, :-1]), memory, depth=1)
    return (total / seen.clamp(min=1)).cpu()
