"""What each item of the paper is in our tables: rows of a table, contrasts, curves.

An item reads one or several runs of one base. Contrasts carry the ids of the claims in
``paper.toml``. "Pre-norm" is ``none+pre_norm`` (EAGLE-3); "post-norm" is ``per_layer+post_norm``
(EAGLE-3.1), because no source says that the paper's post-norm drafters lack the fusion norm; the
two switches apart are the flagship's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.results.answers import SINK_RULE
from driftlab.results.figures import FEWEST
from driftlab.results.records import Tables
from driftlab.results.slices import Group, Slice, modes, take
from driftlab.results.stats import Estimate, Sample, bands, count, estimate, not_available

if TYPE_CHECKING:
    import pandas as pd

NEITHER, FC, POST, BOTH = (
    "none+pre_norm",
    "per_layer+pre_norm",
    "none+post_norm",
    ("per_layer+post_norm"),
)
CONCAT, CONCAT_BOTH = "concat+pre_norm", "concat+post_norm"
PAIR = {"pre-norm": NEITHER, "post-norm": BOTH}
SHALLOW = 3
"""Reports of deployed drafters draft this deep."""


@dataclass(frozen=True)
class Panel:
    """One row of an item's figure: what is drawn, and on which axis."""

    name: str
    x: str = "depth"
    log: bool = False
    zero: bool = False
    """A line at "no effect"."""
    per_cent: bool = False


@dataclass(frozen=True)
class Measured:
    """An item's numbers on one base."""

    runs: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Estimate]]
    contrasts: Mapping[str, Estimate]
    frame: pd.DataFrame
    """Curves: panel, line, x, value, low, high, prompts, seeds."""
    basis: str
    size: str
    sink: bool = True


# --- a run, and the ways to its numbers ---------------------------------------------------------


class Numbers:
    """Samples and estimates of one run, on the headline's text."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    @cached_property
    def free(self) -> Slice:
        return take(self.tables, "free")

    @cached_property
    def forced(self) -> Slice:
        return take(self.tables, "forced")

    @property
    def has_forced(self) -> bool:
        return "forced" in modes(self.tables)

    @cached_property
    def fused(self) -> Slice:
        return take(self.tables, None, table="fused")

    @cached_property
    def has_sink(self) -> bool:
        """Some variant gives the sink at depth 1 at least SINK_RULE times an even share."""
        even = float(np.nanmean(self.free.cube("uniform")[..., 0]))
        first = self.free.cube("sink")[..., 0]
        return any(np.nanmean(group) >= SINK_RULE * even for group in first)

    @property
    def deepest(self) -> int:
        return self.free.index[-1]

    @property
    def deep(self) -> int:
        """The paper's depth 8, or the last one there is."""
        return 8 if 8 in self.free.index else self.deepest

    @property
    def size(self) -> str:
        return count(len(self.free.prompts), len(self.free.seeds))

    @property
    def basis(self) -> str:
        looping = f"; {self.free.left_out} looping left out" if self.free.left_out else ""
        return f"{self.free.kind}, {self.size}{looping}"

    def group(
        self, variant: str, *, condition: str = "", ttt: int | None = None, gate: bool = False
    ) -> Group | None:
        """The group of ``variant`` (its two norms), raw residual."""
        for g in self.free.groups:
            if f"{g.fusion_norm}+{g.feedback}" != variant or g.residual != "raw":
                continue
            if g.condition != condition or g.attention_gate != gate or g.alignment:
                continue
            if ttt is None or g.ttt == ttt:
                return g
        return None

    def drafts(self, group: Group, k: int | None = None) -> Sample:
        """Drafts accepted in a round of at most ``k``, without the bonus token."""
        last = self.deepest if k is None else k
        accepted = self.free.cube("n_accepted")[self.free.groups.index(group)]
        upto = [i for i, d in enumerate(self.free.index) if d <= last]
        total = np.where(
            np.isfinite(accepted[:, :, 0]), np.nansum(accepted[:, :, upto], axis=2), np.nan
        )
        with np.errstate(invalid="ignore"):
            return Sample(total / self.free.at(group, "n", self.free.index[0]))

    def kept(self, changed: Group, own: Group) -> Sample:
        """Accepted drafts of ``changed`` as a part of those of ``own``: a ratio of means."""
        return ratio(self.drafts(changed), self.drafts(own))

    def number(self, *samples: Sample, contrast: Sequence[float] = (1.0,), **how: Any) -> Estimate:
        return estimate(list(samples), contrast, resamples=self.free.resamples, **how)

    def less(self, a: Sample, b: Sample, **how: Any) -> Estimate:
        """``a - b``, paired; ``a / b`` of logarithms with ``ratio=True``."""
        return self.number(a, b, contrast=(1.0, -1.0), **how)

    def level(self, group: Group, column: str, depth: int) -> Estimate:
        """Mean of ``column`` at ``depth``; geometric for a logarithm."""
        log = column.startswith("log_")
        value = self.number(self.free.mean(group, column, depth), ratio=log)
        return replace(value, unit="")

    def change(self, group: Group, column: str, start: int, end: int, **how: Any) -> Estimate:
        at = [self.free.mean(group, column, d) for d in (end, start)]
        return self.less(*at, **how)

    def growth(self, group: Group, start: int, end: int) -> Estimate:
        return self.change(group, "log_rms_state_pre", start, end, ratio=True)

    def conditional(self, group: Group, depth: int) -> Estimate:
        """Conditional acceptance, n/a below FEWEST opportunities."""
        sample = self.free.conditional(group, depth)
        if sample.weights is None or sample.weights.sum() < FEWEST:
            return not_available("too few opportunities")
        return self.number(sample)

    def conditions(self, own: Group) -> Iterator[tuple[Mapping[str, Any], Group]]:
        """What was applied to the drafter of ``own``: settings of the condition, and its group."""
        config = self.tables.manifest.get("config") or {}
        applied = (config.get("applied") or {}).get("conditions") or ()
        settings = {c["name"]: c for c in applied}
        for g in self.free.groups:
            if g.condition in settings and replace(g, condition="", axis=own.axis, label="") == (
                replace(own, label="")
            ):
                yield settings[g.condition], g

    # --- curves ---------------------------------------------------------------------------

    def curve(self, panel: str, piece: Slice, lines: Mapping[str, np.ndarray], **how: Any) -> Any:
        """Rows of ``{line: [seed, prompt, depth]}``; ``transform`` acts on value and interval."""
        import pandas as pd

        transform: Callable[[np.ndarray], np.ndarray] = how.pop("transform", lambda v: v)
        weights: Mapping[str, np.ndarray] = how.pop("weights", {})
        frames = []
        for line, cube in lines.items():
            values = np.moveaxis(cube, 2, 0)
            weight = np.moveaxis(weights[line], 2, 0) if line in weights else None
            value, low, high = bands(values, weight, resamples=piece.resamples)
            there = np.isfinite(values)
            frames.append(
                pd.DataFrame(
                    {
                        "panel": panel,
                        "line": line,
                        "x": piece.index,
                        "value": transform(value),
                        "low": transform(low),
                        "high": transform(high),
                        "prompts": there.any(axis=1).sum(axis=1),
                        "seeds": there.any(axis=2).sum(axis=1),
                    }
                )
            )
        return pd.concat(frames, ignore_index=True)

    def of(self, piece: Slice, column: str, groups: Mapping[str, Group | None]) -> dict[str, Any]:
        cube = piece.cube(column)
        return {n: cube[piece.groups.index(g)] for n, g in groups.items() if g in piece.groups}

    def accuracy(self, panel: str, groups: Mapping[str, Group | None]) -> Any:
        right = self.of(self.forced, "n_correct", groups)
        of = self.of(self.forced, "n", groups)
        return self.curve(panel, self.forced, {n: right[n] / of[n] for n in right})

    def acceptance(self, panel: str, groups: Mapping[str, Group | None]) -> Any:
        """Conditional acceptance by depth, left out below FEWEST opportunities."""
        accepted = self.of(self.free, "n_accepted", groups)
        chances = {
            n: np.nan_to_num(c) for n, c in self.of(self.free, "n_opportunities", groups).items()
        }
        rate = {
            n: np.divide(a, chances[n], out=np.zeros_like(chances[n]), where=chances[n] > 0)
            for n, a in accepted.items()
        }
        frame = self.curve(panel, self.free, rate, weights=chances)
        few = np.concatenate([c.sum(axis=(0, 1)) < FEWEST for c in chances.values()])
        return frame[~few]

    def means(self, panel: str, column: str, groups: Mapping[str, Group | None]) -> Any:
        how = {"transform": np.exp} if column.startswith("log_") else {}
        return self.curve(panel, self.free, self.of(self.free, column, groups), **how)


def ratio(part: Sample, whole: Sample) -> Sample:
    """A sample whose mean is ``mean(part) / mean(whole)`` over the pairs that both have."""
    there = np.isfinite(part.values) & np.isfinite(whole.values)
    # A whole of nothing still has to count with its part, hence a weight that is nearly 0.
    weights = np.where(there, np.maximum(whole.values, 1e-9), 0.0)
    with np.errstate(invalid="ignore"):
        return Sample(
            np.where(there, part.values / np.maximum(whole.values, 1e-9), np.nan), weights
        )


def points(panel: str, rows: Iterable[tuple[str, object, Estimate]]) -> Any:
    """Rows of a curve from single estimates: (line, x, estimate)."""
    import pandas as pd

    return pd.DataFrame(
        [
            {
                "panel": panel,
                "line": line,
                "x": x,
                "value": e.value,
                "low": e.low,
                "high": e.high,
                "prompts": e.n,
                "seeds": e.seeds,
            }
            for line, x, e in rows
        ]
    )


def together(frames: Iterable[Any]) -> Any:
    import pandas as pd

    there = [f for f in frames if len(f)]
    return (
        pd.concat(there, ignore_index=True)
        if there
        else pd.DataFrame(
            columns=["panel", "line", "x", "value", "low", "high", "prompts", "seeds"]
        )
    )


def present(**estimates: Estimate | None) -> dict[str, Estimate]:
    """Contrasts by claim (``_`` stands for ``-``), without those that cannot be had."""
    return {k.replace("_", "-"): e for k, e in estimates.items() if e is not None}


Found = tuple[dict[str, dict[str, Estimate]], dict[str, Estimate], Any]
"""Rows, contrasts and curves."""


# --- T1 and T2: size and attention by depth -----------------------------------------------------


def stages(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["norms"]
    g = run.group(NEITHER)
    if g is None:
        return None
    free, fused = run.free, run.fused
    depths = [d for d in (1, 2, 3, run.deep) if d in free.index]
    row = {
        name: run.number(fused.mean(g, "rms_in", i))
        for name, i in zip(
            ("low", "mid", "high"),
            (fused.index[0], fused.index[len(fused.index) // 2], fused.index[-1]),
            strict=True,
        )
    }
    row["h_FC"] = run.number(free.mean(g, "rms_input", 1))
    row |= {f"h*{d}": run.level(g, "log_rms_state_pre", d) for d in depths}
    row[f"h*{run.deep}/h*1"] = run.growth(g, 1, run.deep)
    logs = [Sample(np.log(fused.at(g, "rms_in", i))) for i in (fused.index[-1], fused.index[0])]
    contrasts = present(
        grows=run.growth(g, 1, run.deep),
        second=run.growth(g, 1, 2) if 2 in free.index else None,
        third=run.growth(g, 2, 3) if 3 in free.index else None,
        unbalanced=run.less(*logs, ratio=True),
    )
    lines = {g.label: g}
    frame = run.means("RMS of the state", "log_rms_state_pre", lines)
    layers = [("captured states and fused input", n, e) for n, e in list(row.items())[:4]]
    return {g.label: row}, contrasts, together([points("RMS by stage", layers), frame])


_T2 = {"log_rms_state_pre": "RMS", "entropy": "entropy", "sink": "sink", "recent": "recent"}


def architectures(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs.get("gated") or runs["norms"]
    named = {
        "pre-norm": run.group(NEITHER),
        "gated attention": run.group(NEITHER, gate=True),
        "post-norm": run.group(BOTH) or run.group(POST),
        "gated + post-norm": run.group(BOTH, gate=True) or run.group(POST, gate=True),
    }
    pre, gated, post = (named[n] for n in ("pre-norm", "gated attention", "post-norm"))
    both = named["gated + post-norm"]
    if pre is None or post is None:
        return None
    deep, free = run.deep, run.free
    rows = {
        f"{name}: {g.label}": {
            f"{short} @{d}": run.level(g, column, d)
            for column, short in _T2.items()
            for d in (1, deep)
        }
        for name, g in named.items()
        if g is not None
    }

    def at(g: Group, column: str, d: int = 1) -> Sample:
        return free.mean(g, column, d)

    def moves(g: Group) -> Sample:
        return free.change(g, "log_rms_state_pre", 1, deep)

    contrasts = present(
        sink_falls=run.change(pre, "sink", 1, deep),
        entropy_rises=run.change(pre, "entropy", 1, deep),
        recent_rises=run.change(pre, "recent", 1, deep),
        post_bounds=run.less(moves(post), moves(pre), ratio=True),
        post_low_sink=run.less(at(post, "sink"), at(pre, "sink")),
        post_flat_sink=run.change(post, "sink", 1, deep),
        post_recent=run.less(at(post, "recent"), at(pre, "recent")),
        gate_grows=run.less(moves(gated), moves(pre), ratio=True) if gated else None,
        gate_no_sink=run.less(at(gated, "sink"), at(pre, "sink")) if gated else None,
        gate_post_flat=run.growth(both, 1, deep) if both else None,
    )
    panels = {
        "RMS of the state": "log_rms_state_pre",
        "entropy (nats)": "entropy",
        "attention on the sink": "sink",
        "attention on recent keys": "recent",
    }
    lines = {name: g for name, g in named.items() if g is not None}
    return rows, contrasts, together(run.means(p, c, lines) for p, c in panels.items())


# --- the flagship: the two switches apart -------------------------------------------------------

_SWITCHES = {"neither": NEITHER, "fc_norm alone": FC, "post_norm alone": POST, "both": BOTH}


def flagship(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["norms"]
    four = {name: run.group(v) for name, v in _SWITCHES.items()}
    if any(g is None for g in four.values()):
        return None
    more = {"concat alone": run.group(CONCAT), "concat and post_norm": run.group(CONCAT_BOTH)}
    named: dict[str, Group] = {n: g for n, g in (four | more).items() if g is not None}
    neither, fc, post, both = (named[n] for n in _SWITCHES)
    free, forced, deep, last = run.free, run.forced, run.deep, run.deepest
    shares = run.fused
    top, first = shares.index[-1], free.index[0]
    spots = [d for d in (1, SHALLOW, 8, 16) if d in forced.index]

    def values(g: Group) -> dict[str, Estimate]:
        return {
            f"drafts, k={SHALLOW}": run.number(run.drafts(g, SHALLOW)),
            f"drafts, k={last}": run.number(run.drafts(g)),
            **{f"forced @{d}": run.number(forced.accuracy(g, d)) for d in spots},
            f"growth 1-{deep}": run.growth(g, 1, deep),
            "sink @1": run.level(g, "sink", first),
            f"sink @{last}": run.level(g, "sink", last),
            f"own drafts @{last}": run.level(g, "draft_mass", last),
            "top layer": run.number(shares.mean(g, "share", top)),
        }

    rows = {f"{name}: {g.label}": values(g) for name, g in named.items()}

    def effect(
        plus: Sequence[Group], minus: Sequence[Group], of: Callable[[Group], Sample], **how: Any
    ) -> Estimate:
        weights = [1 / len(plus)] * len(plus) + [-1 / len(minus)] * len(minus)
        return run.number(*map(of, (*plus, *minus)), contrast=weights, **how)

    switches = {
        "post_norm": ((post, both), (neither, fc)),
        "fc_norm": ((fc, both), (neither, post)),
    }

    def moves(g: Group) -> Sample:
        return free.change(g, "log_rms_state_pre", 1, deep)

    def accuracy(d: int) -> Callable[[Group], Sample]:
        return lambda g: forced.accuracy(g, d)

    for name, (plus, minus) in switches.items():
        rows[f"effect of {name}"] = {
            f"drafts, k={SHALLOW}": effect(plus, minus, lambda g: run.drafts(g, SHALLOW)),
            f"drafts, k={last}": effect(plus, minus, run.drafts),
            **{f"forced @{d}": effect(plus, minus, accuracy(d)) for d in spots},
            f"growth 1-{deep}": effect(plus, minus, moves, ratio=True),
        }

    def interaction(of: Callable[[Group], Sample], **how: Any) -> Estimate:
        four = [of(g) for g in (both, neither, fc, post)]
        return run.number(*four, contrast=(1, 1, -1, -1), **how)

    rows["interaction"] = {
        f"drafts, k={SHALLOW}": interaction(lambda g: run.drafts(g, SHALLOW)),
        f"drafts, k={last}": interaction(run.drafts),
        **{f"forced @{d}": interaction(accuracy(d)) for d in spots},
        f"growth 1-{deep}": interaction(moves, ratio=True),
    }
    posts, pres = switches["post_norm"]
    norms, raws = switches["fc_norm"]
    whole = run.drafts(neither)
    contrasts = present(
        both_longer=relative(run, ratio(run.drafts(both), whole)),
        shallow=relative(run, ratio(run.drafts(both, SHALLOW), run.drafts(neither, SHALLOW))),
        post_growth=effect(posts, pres, moves, ratio=True),
        fc_growth=effect(norms, raws, moves, ratio=True),
        post_shallow=effect(posts, pres, lambda g: run.drafts(g, SHALLOW)),
        fc_shallow=effect(norms, raws, lambda g: run.drafts(g, SHALLOW)),
        post_length=effect(posts, pres, run.drafts),
        fc_length=effect(norms, raws, run.drafts),
        post_deep=effect(posts, pres, accuracy(spots[-1])),
        fc_deep=effect(norms, raws, accuracy(spots[-1])),
        interaction_deep=interaction(accuracy(spots[-1])),
        fc_balances=effect(norms, raws, lambda g: shares.mean(g, "share", top)),
    )
    right = {
        n: c / run.of(forced, "n", named)[n] for n, c in run.of(forced, "n_correct", named).items()
    }
    apart = {
        "effect of post_norm": (
            right["post_norm alone"] + right["both"] - right["neither"] - right["fc_norm alone"]
        )
        / 2,
        "effect of fc_norm": (
            right["fc_norm alone"] + right["both"] - right["neither"] - right["post_norm alone"]
        )
        / 2,
        "interaction": (
            right["both"] + right["neither"] - right["fc_norm alone"] - right["post_norm alone"]
        ),
    }
    frame = together(
        [
            run.accuracy("forced accuracy", named),
            run.curve("effect on accuracy", forced, apart),
            run.means("RMS of the state", "log_rms_state_pre", named),
        ]
    )
    return rows, contrasts, frame


def relative(run: Numbers, sample: Sample) -> Estimate:
    """A ratio of means as a ratio: no effect is 1."""
    return replace(run.number(sample), unit="x")


# --- T3 and T4: applied to trained drafters -----------------------------------------------------


def only(condition: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Parameters of the condition's one intervention, if it is of that kind and nothing else."""
    made: Sequence[Mapping[str, Any]] = condition.get("interventions") or ()
    changes = [n for n in _TEXT if condition.get(n) is not None]
    if len(made) != 1 or made[0].get("kind") != kind or changes:
        return None
    parameters: Mapping[str, Any] = made[0]
    return parameters


_TEXT = ("template", "bos", "system", "temperature", "context", "quantize")


def noise(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["noise"]
    rows: dict[str, dict[str, Estimate]] = {}
    kept: dict[tuple[str, str, float], Sample] = {}
    frames = []
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        for condition, g in run.conditions(own):
            if (made := only(condition, "noise")) is not None:
                setting = (str(made.get("path", "hidden")), float(made["alpha"]))
                kept[name, *setting] = run.kept(g, own)
        for path in ("hidden", "embedding"):
            here = {a: s for (n, p, a), s in sorted(kept.items()) if (n, p) == (name, path)}
            if not here:
                continue
            part = {a: run.number(s) for a, s in here.items()}
            rows[f"{name}, {path}"] = {
                "drafts": run.number(run.drafts(own)),
                **{f"{a:g}": per_cent(e) for a, e in part.items()},
            }
            frames.append(points(f"kept, {path} path", ((name, a, e) for a, e in part.items())))
    if not rows:
        return None

    def gap(a: tuple[str, str], b: tuple[str, str], alpha: float = 0.5) -> Estimate | None:
        left, right = kept.get((*a, alpha)), kept.get((*b, alpha))
        return per_cent(run.less(left, right)) if left and right else None

    hidden, embedding = ("pre-norm", "hidden"), ("pre-norm", "embedding")
    contrasts = present(
        hidden_worse=gap(hidden, embedding),
        post_sturdier=gap(("post-norm", "hidden"), hidden),
        paths_alike=gap(("post-norm", "embedding"), embedding),
    )
    return rows, contrasts, together(frames)


def per_cent(e: Estimate) -> Estimate:
    """100 times ``e``."""
    return replace(
        e,
        value=100 * e.value,
        low=100 * e.low,
        high=100 * e.high,
        smallest=100 * e.smallest,
        by_seed=tuple(100 * v for v in e.by_seed),
        over_prompts=(100 * e.over_prompts[0], 100 * e.over_prompts[1]),
        unit="%",
    )


def pin(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["pin"]
    rows: dict[str, dict[str, Estimate]] = {}
    kept: dict[str, Sample] = {}
    deep: dict[str, Estimate] = {}
    drawn = []
    last = run.deepest
    for name, variant in PAIR.items():
        own = run.group(variant)
        found = run.conditions(own) if own else ()
        pinned = next((g for c, g in found if only(c, "pin_norm") is not None), None)
        if own is None or pinned is None:
            continue
        kept[name] = run.kept(pinned, own)
        rows[name] = {
            "plain": run.number(run.drafts(own)),
            "pinned": run.number(run.drafts(pinned)),
            "ratio": relative(run, kept[name]),
        }
        lines: dict[str, Group | None] = {f"{name}, plain": own, f"{name}, pinned": pinned}
        drawn.append(run.means("RMS of the state", "log_rms_state_pre", lines))
        if run.has_forced:
            was, now = (run.forced.accuracy(g, last) for g in (own, pinned))
            deep[name] = run.less(now, was)
            rows[name] |= {
                f"forced @{last}, plain": run.number(was),
                f"forced @{last}, pinned": run.number(now),
            }
            drawn.append(run.accuracy("forced accuracy", lines))
    if not rows:
        return None
    pre, post = kept.get("pre-norm"), kept.get("post-norm")
    contrasts = present(
        pin_hurts=relative(run, pre) if pre else None,
        pin_hurts_post=relative(run, post) if post else None,
        post_keeps_more=run.less(post, pre) if pre and post else None,
        pin_deep=deep.get("pre-norm"),
    )
    return rows, contrasts, together(drawn)


# --- F10: TTT extrapolation ---------------------------------------------------------------------


def extrapolation(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["ttt"]
    last, forced = run.deepest, run.has_forced
    named: dict[tuple[str, int], Group] = {}
    for name, variants in {"pre-norm": (NEITHER,), "post-norm": (BOTH, POST)}.items():
        for g in run.free.groups:
            if (
                f"{g.fusion_norm}+{g.feedback}" in variants
                and g.ttt is not None
                and not g.condition
            ):
                named.setdefault((name, g.ttt), g)
    if not named:
        return None
    rows = {
        f"{name} / {ttt}": {
            "k=1": run.conditional(g, 1),
            f"k={last}": run.conditional(g, last),
            "drafts": run.number(run.drafts(g)),
            **({f"forced @{last}": run.number(run.forced.accuracy(g, last))} if forced else {}),
        }
        for (name, ttt), g in sorted(named.items(), key=lambda i: (i[0][0] != "pre-norm", i[0][1]))
    }

    def gap(a: tuple[str, int], b: tuple[str, int], of: Callable[[Group], Sample]) -> Any:
        left, right = named.get(a), named.get(b)
        return run.less(of(left), of(right)) if left and right else None

    def deep(g: Group) -> Sample:
        return run.forced.accuracy(g, last)

    pre, post = "pre-norm", "post-norm"
    contrasts = present(
        short_fails=gap((pre, 2), (pre, 8), run.drafts),
        post_helps=gap((post, 2), (pre, 2), run.drafts),
        post_helps_deep=gap((post, 2), (pre, 2), deep) if forced else None,
        long_wins=gap((post, 2), (pre, 8), run.drafts),
        never_shown=gap((post, 8), (pre, 8), run.drafts),
        never_shown_deep=gap((post, 8), (pre, 8), deep) if forced else None,
    )
    lines: dict[str, Group | None] = {
        f"{name}, TTT {ttt}": g for (name, ttt), g in sorted(named.items())
    }
    return (
        rows,
        contrasts,
        together(
            [
                run.acceptance("conditional acceptance", lines),
                run.accuracy("forced accuracy", lines),
            ]
        ),
    )


# --- S5.2 and S5.3: other text ------------------------------------------------------------------


TEMPLATE = ("template + BOS", "template, no BOS", "no template, BOS", "neither")


def template_of(condition: Mapping[str, Any]) -> str | None:
    """Which of the four conditions it is; None for a changed system prompt or anything else."""
    others = [n for n in _TEXT if n not in ("template", "bos") and condition.get(n) is not None]
    if others or condition.get("interventions"):
        return None
    return TEMPLATE[2 * (condition.get("template") == "never") + (condition.get("bos") == "never")]


def template(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["template"]
    rows: dict[str, dict[str, Estimate]] = {}
    samples: dict[tuple[str, str], Sample] = {}
    drawn = []
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        found = {TEMPLATE[0]: own}
        found |= {label: g for c, g in run.conditions(own) if (label := template_of(c))}
        for label in (t for t in TEMPLATE if t in found):
            samples[name, label] = run.drafts(found[label])
            rows.setdefault(name, {})[label] = run.number(samples[name, label])
            drawn.append((name, label, rows[name][label]))
    if not drawn:
        return None
    first, last = TEMPLATE[0], TEMPLATE[-1]

    def fall(name: str) -> Sample | None:
        a, b = samples.get((name, last)), samples.get((name, first))
        return ratio(a, b) if a and b else None

    pre, post = fall("pre-norm"), fall("post-norm")
    home = [samples.get((n, first)) for n in ("post-norm", "pre-norm")]
    for name, s in (("pre-norm", pre), ("post-norm", post)):
        if s is not None:
            rows[name]["neither / trained"] = relative(run, s)
    contrasts = present(
        pre_falls=relative(run, pre) if pre else None,
        post_holds=run.less(post, pre) if pre and post else None,
        post_unmoved=relative(run, post) if post else None,
        equal_at_home=relative(run, ratio(home[0], home[1])) if home[0] and home[1] else None,
    )
    return rows, contrasts, points("accepted drafts", drawn)


REACH = ("full", "window", "window + sink", "window + prompt")


def reach_of(condition: Mapping[str, Any]) -> tuple[int, str] | None:
    """Tokens put before the prompt, and what of the text the drafter may attend to."""
    before = (condition.get("context") or {}).get("tokens", 0)
    made = condition.get("interventions") or ()
    if not made:
        return (before, REACH[0]) if before else None
    if len(made) != 1 or made[0].get("kind") != "window":
        return None
    return before, REACH[1 + min(2, int(made[0].get("keep", 0)))]


def context(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["context"]
    samples: dict[tuple[str, int, str], Sample] = {}
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        samples[name, 0, "full"] = run.drafts(own)
        for condition, g in run.conditions(own):
            if (reach := reach_of(condition)) is not None:
                samples[name, *reach] = run.drafts(g)
    if not samples:
        return None
    lengths = sorted({length for _, length, _ in samples})
    rows: dict[str, dict[str, Estimate]] = {}
    drawn = []
    for (name, length, kept), sample in samples.items():
        e = run.number(sample)
        rows.setdefault(f"{name}, {length} tokens before", {})[kept] = e
        drawn.append((f"{name}, {kept}", length, e))
    longest = lengths[-1]

    def gap(a: tuple[str, str], b: tuple[str, str]) -> Estimate | None:
        left, right = (samples.get((n, longest, reach)) for n, reach in (a, b))
        return run.less(left, right) if left and right else None

    pre, post = "pre-norm", "post-norm"
    contrasts = present(
        post_longer=gap((post, "full"), (pre, "full")),
        window_helps=gap((pre, "window"), (pre, "full")),
        sink_helps=gap((pre, "window + sink"), (pre, "window")),
        post_windowed=gap((post, "window"), (pre, "window")),
    )
    return rows, contrasts, points("accepted drafts", drawn)


# --- beyond the paper ---------------------------------------------------------------------------


def changed(experiment: str) -> Callable[[Mapping[str, Numbers]], Found | None]:
    """Every condition of an applied experiment beside the same drafter unchanged."""

    def find(runs: Mapping[str, Numbers]) -> Found | None:
        run = runs[experiment]
        last = run.deepest
        rows: dict[str, dict[str, Estimate]] = {}
        kept, drawn = [], []
        for own in (g for g in run.free.groups if not g.condition and g.axis == "trained"):
            rows[own.label] = {"drafts": run.number(run.drafts(own))}
            before = run.forced.accuracy(own, last) if run.has_forced else None
            if before is not None:
                rows[own.label][f"forced @{last}"] = run.number(before)
            for condition, g in run.conditions(own):
                part = relative(run, run.kept(g, own))
                row = {"drafts": run.number(run.drafts(g)), "of its own": part}
                kept.append((own.label, condition["name"], part))
                if before is not None:
                    after = run.forced.accuracy(g, last)
                    difference = run.less(after, before)
                    row |= {f"forced @{last}": run.number(after), "difference": difference}
                    drawn.append((own.label, condition["name"], difference))
                rows[f"{own.label}, {condition['name']}"] = row
        if not kept:
            return None
        frames = [points("accepted, of its own", kept)]
        if drawn:
            frames.append(points("accuracy less its own", drawn))
        return rows, {}, together(frames)

    return find


def trained(experiment: str) -> Callable[[Mapping[str, Numbers]], Found | None]:
    """Every variant of an experiment that trains, side by side."""

    def find(runs: Mapping[str, Numbers]) -> Found | None:
        run = runs[experiment]
        last = run.deepest
        groups = [g for g in run.free.groups if g.axis == "trained" and not g.condition]
        rows = {
            g.label: {
                "drafts": run.number(run.drafts(g)),
                **(
                    {f"forced @{d}": run.number(run.forced.accuracy(g, d)) for d in (1, last)}
                    if run.has_forced
                    else {}
                ),
                f"growth 1-{run.deep}": run.growth(g, 1, run.deep),
                "sink @1": run.level(g, "sink", 1),
                f"own drafts @{last}": run.level(g, "draft_mass", last),
            }
            for g in groups
        }
        lines: dict[str, Group | None] = {g.label: g for g in groups}
        curves = [run.means("RMS of the state", "log_rms_state_pre", lines)]
        if run.has_forced:
            curves.append(run.accuracy("forced accuracy", lines))
        return rows, {}, together(curves)

    return find


def agreement(runs: Mapping[str, Numbers]) -> Found | None:
    """Correlation and divergence of a drafter's attention and its target's, by target layer."""
    run = runs["agreement"]
    table = run.tables.extra.get("agreement")
    if table is None:
        return None
    table = table[table["text"] == run.free.kind.text]
    layers = tuple(sorted(int(i) for i in table["layer"].unique()))
    cells = run.tables.cells.set_index("cell")
    rows: dict[str, dict[str, Estimate]] = {}
    cubes: dict[str, dict[str, np.ndarray]] = {"correlation": {}, "divergence": {}}
    for g in (g for g in run.free.groups if not g.condition):
        for measure in cubes:
            cube = np.full((len(run.free.seeds), len(run.free.prompts), len(layers)), np.nan)
            mine = table["cell"].map(cells["variant"]).astype(str) == g.variant
            for cell, prompt, layer, value in table.loc[
                mine, ["cell", "prompt", "layer", measure]
            ].itertuples(index=False):
                seed = run.free.seeds.index(int(cells.loc[cell, "seed"]))
                if prompt in run.free.prompts and value is not None:
                    place = run.free.prompts.index(str(prompt)), layers.index(int(layer))
                    cube[seed, *place] = value
            cubes[measure][g.label] = cube
        found = cubes["correlation"][g.label]
        best = int(np.nanargmax(np.nanmean(found, axis=(0, 1))))
        rows[g.label] = {
            "highest correlation": run.number(Sample(found[:, :, best])),
            f"last layer ({layers[-1]})": run.number(Sample(found[:, :, -1])),
            "lowest divergence (nats)": run.number(
                Sample(
                    cubes["divergence"][g.label][
                        :, :, int(np.nanargmin(np.nanmean(cubes["divergence"][g.label], (0, 1))))
                    ]
                )
            ),
        }
    by_layer = replace(run.free, index=layers)
    frames = [run.curve(m, by_layer, lines) for m, lines in cubes.items()]
    return rows, {}, together(frames)


_CHANGED = (
    Panel("accepted, of its own", "condition"),
    Panel("accuracy less its own", "condition", zero=True),
)
_TRAINED = (Panel("forced accuracy"), Panel("RMS of the state", log=True))


# --- all of them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """How an item is measured and which panels its figure has."""

    run: str
    """The experiment that it cannot do without."""
    find: Callable[[Mapping[str, Numbers]], Found | None]
    panels: tuple[Panel, ...] = ()


ITEMS: dict[str, Item] = {
    "flagship": Item(
        "norms",
        flagship,
        (
            Panel("forced accuracy"),
            Panel("effect on accuracy", zero=True),
            Panel("RMS of the state", log=True),
        ),
    ),
    "t1": Item(
        "norms",
        stages,
        (Panel("RMS by stage", "stage", log=True), Panel("RMS of the state", log=True)),
    ),
    "t2": Item(
        "norms",
        architectures,
        (
            Panel("RMS of the state", log=True),
            Panel("entropy (nats)"),
            Panel("attention on the sink"),
            Panel("attention on recent keys"),
        ),
    ),
    "t3": Item(
        "noise",
        noise,
        tuple(Panel(f"kept, {p} path", "alpha", per_cent=True) for p in ("hidden", "embedding")),
    ),
    "t4": Item("pin", pin, (Panel("forced accuracy"), Panel("RMS of the state", log=True))),
    "f7": Item("mtp", lambda runs: None),
    "f10": Item("ttt", extrapolation, (Panel("conditional acceptance"), Panel("forced accuracy"))),
    "s5-2": Item("template", template, (Panel("accepted drafts", "condition"),)),
    **{
        name: Item(name, changed(name), _CHANGED)
        for name in ("swap", "sink", "self-keys", "layers", "quantized", "temperature")
    },
    "agreement": Item(
        "agreement",
        agreement,
        (
            Panel("correlation", "target layer"),
            Panel("divergence", "target layer"),
        ),
    ),
    **{name: Item(name, trained(name), _TRAINED) for name in ("residual", "alignment")},
    "s5-3": Item("context", context, (Panel("accepted drafts", "tokens before the prompt"),)),
}


def measure(item: str, runs: Mapping[str, Tables], base: str) -> Measured | None:
    """The numbers of ``item`` from the runs of one base; None when they do not hold it."""
    numbers = {name: Numbers(tables) for name, tables in runs.items()}
    if ITEMS[item].run not in numbers:
        return None
    found = ITEMS[item].find(numbers)
    if found is None:
        return None
    rows, contrasts, frame = found
    first = numbers[ITEMS[item].run]
    return Measured(
        tuple(f"{name}-{base}" for name in runs),
        rows,
        contrasts,
        frame,
        first.basis,
        first.size,
        first.has_sink,
    )
