"""The numbers of one run, as an item of a paper asks for them: samples, estimates, curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.results.answers import SINK_RULE, Answer
from driftlab.results.explanations import Explained
from driftlab.results.figures import FEWEST
from driftlab.results.records import Tables
from driftlab.results.slices import Group, Slice, modes, take
from driftlab.results.stats import Estimate, Sample, bands, count, estimate, not_available, ratio

if TYPE_CHECKING:
    import pandas as pd

NEITHER, FC = "none+pre_norm", "per_layer+pre_norm"
POST, BOTH = "none+post_norm", "per_layer+post_norm"
CONCAT, CONCAT_BOTH = "concat+pre_norm", "concat+post_norm"
PAIR = {"pre-norm": NEITHER, "post-norm": BOTH}
SWITCHES = {"neither": NEITHER, "fc_norm alone": FC, "post_norm alone": POST, "both": BOTH}
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
    answers: tuple[Answer, ...] = ()
    """What the run's own report says of these numbers."""

    @property
    def blocks(self) -> list[dict[str, Mapping[str, Estimate]]]:
        """``rows`` as tables: one that shares no column with those before it begins another."""
        out: list[dict[str, Mapping[str, Estimate]]] = []
        columns: set[str] = set()
        for name, row in self.rows.items():
            if not columns & set(row):
                out.append({})
                columns = set()
            out[-1][name] = row
            columns |= set(row)
        return out


class Numbers:
    """Samples and estimates of one run, on the headline's text.

    A run of which only the explanation is kept has ``explained``, and no other numbers.
    """

    def __init__(self, tables: Tables, explained: Explained | None = None) -> None:
        self.tables = tables
        self.explained = explained

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
        if self.explained is not None:
            return count(len(self.explained.prompts), len(self.explained.seeds))
        each = [self.free.n_prompts([group]) for group in self.free.groups]
        fewest = f"{min(each)} to " if min(each) < max(each) else ""  # of texts of their own
        return fewest + count(max(each), len(self.free.seeds))

    @property
    def basis(self) -> str:
        if self.explained is not None:
            return self.explained.basis
        left_out = sum(texts.left_out for texts in self.free.texts.values())  # of all rows
        looping = f"; {left_out} looping left out" if left_out else ""
        others = any(texts.kind != self.free.kind for texts in self.free.texts.values())
        named = "; where a row names another temperature, on text of that" if others else ""
        return f"{self.free.kind}, {self.size}{looping}{named}"

    def group(
        self, variant: str, *, condition: str = "", ttt: int | None = None, gate: bool = False
    ) -> Group | None:
        """The group of ``variant`` (its two norms), raw residual."""
        for g in self.free.groups:
            usual = ("raw", gate, g.ttt if ttt is None else ttt, 0.0, 1.0, 1.0)
            if (g.norms, g.condition, g.stratum) == (variant, condition, usual):
                return g
        return None

    def drafts(self, group: Group, k: int | None = None) -> Sample:
        """Drafts accepted in a round of at most ``k``, without the bonus token."""
        return self.free.accepted_drafts(group, k)

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
            there = np.isfinite(values) & (True if weight is None else weight > 0)
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


def relative(run: Numbers, sample: Sample) -> Estimate:
    """A ratio of means as a ratio: no effect is 1, and p that of the means' paired difference."""
    found = replace(run.number(sample), unit="x")
    if not found.n or sample.parts is None or sample.weights is None:
        return found
    whole = np.where(np.isfinite(sample.parts), sample.weights, np.nan)
    return replace(found, p=run.less(Sample(sample.parts), Sample(whole)).p)
