"""Comparisons that the experiment file fixed before the run: effect, interval, corrected p."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from driftlab.config import Analysis, Contrast, Factor
from driftlab.results.quantities import own_share
from driftlab.results.records import Tables
from driftlab.results.slices import Group, Mode, Slice, TextKind, modes, setting, take
from driftlab.results.stats import Estimate, Sample, count, estimate, holm, not_available

FACTORS: tuple[str, ...] = get_args(Factor)


@dataclass(frozen=True)
class Registered:
    """One registered comparison. ``effect`` is after minus before, or their ratio for growth.

    ``p`` is Holm-adjusted over the primary comparison and its family; NaN without one.
    """

    contrast: Contrast
    primary: bool
    before: Estimate
    after: Estimate
    effect: Estimate
    p: float
    basis: str

    @property
    def name(self) -> str:
        """The measure with its depth, in words."""
        c = self.contrast
        if c.measure in _WITHOUT_DEPTH:
            return c.measure
        return f"{c.measure} at {f'depth {c.depth}' if c.depth else 'the deepest depth'}"

    @property
    def comparison(self) -> str:
        """The levels, and what is held, in words."""
        c = self.contrast
        held = ", ".join(f"{k} {v}" for k, v in c.at.items())
        a, b = (str(level) or "unchanged" for level in c.levels)
        return f"{c.factor} {b} against {a}" + (f" ({held})" if held else "")


_WITHOUT_DEPTH = ("accepted drafts", "share of own length")


def registered(tables: Tables, kind: TextKind | None = None) -> list[Registered]:
    """The registered comparisons of a run, the primary first; empty when it registered none."""
    stated = setting(tables, "config", "analysis")
    if not stated:
        return []
    analysis = Analysis.model_validate(stated)
    contrasts = [analysis.primary, *analysis.family]
    found = [_compare(tables, contrast, kind) for contrast in contrasts]
    adjusted = holm({str(i): one[2] for i, one in enumerate(found)})
    return [
        Registered(contrast, i == 0, *one[:3], adjusted.get(str(i), math.nan), one[3])
        for i, (contrast, one) in enumerate(zip(contrasts, found, strict=True))
    ]


def changed_since(tables: Tables) -> str:
    """What a reader must know of when the comparisons were fixed; empty when before the rows."""
    first = tables.manifest.get("registered")
    config = tables.manifest.get("config")
    if not isinstance(first, Mapping) or not isinstance(config, Mapping):
        return ""
    if first.get("analysis") != config.get("analysis"):
        return "the registered comparisons were changed after the run began"
    return "some rows were there when the comparisons were fixed" if first.get("rows") else ""


def _compare(
    tables: Tables, contrast: Contrast, kind: TextKind | None
) -> tuple[Estimate, Estimate, Estimate, str]:
    mode: Mode = "forced" if contrast.measure == "forced accuracy" else "free"
    if mode not in modes(tables):
        missing = not_available(f"no {mode} chains were measured")
        return missing, missing, missing, ""
    piece = take(tables, mode, kind)
    sample, ratio, unit = _sampler(piece, contrast)
    pairs = _pairs(piece, contrast)
    over = piece.basis_of([group for pair in pairs for group in pair])
    if sample is None or not pairs:
        why = "the depth was not measured" if pairs else "the levels were not measured side by side"
        missing = not_available(why)
        return missing, missing, missing, over
    draws = piece.resamples
    before, after = ([sample(pair[i]) for pair in pairs] for i in (0, 1))
    weights, nothing = [1 / len(pairs)] * len(pairs), [0.0] * len(pairs)

    def level(*contrast: float) -> Estimate:
        """A side's own level, over the prompts that count in the effect: both sides have them."""
        return estimate([*after, *before], contrast, ratio=ratio, unit=unit, resamples=draws)

    effect = estimate(
        [*after, *before],
        [*weights, *(-w for w in weights)],
        ratio=ratio,
        unit=unit,
        resamples=draws,
        over_prompts=True,
    )
    over = f"{over}; paired over {count(effect.n, effect.seeds)}"
    return level(*nothing, *weights), level(*weights, *nothing), effect, over


def _pairs(piece: Slice, contrast: Contrast) -> list[tuple[Group, Group]]:
    """Groups that differ in the contrast's factor alone and agree with what is held."""
    held = dict(contrast.at)
    if contrast.factor != "condition":
        held.setdefault("condition", "")
    rest = [name for name in FACTORS if name != contrast.factor]
    levels: tuple[dict[tuple, Group], dict[tuple, Group]] = ({}, {})
    for group in piece.groups:
        if any(getattr(group, name) != value for name, value in held.items()):
            continue
        for i, level in enumerate(contrast.levels):
            if getattr(group, contrast.factor) == level:
                levels[i][tuple(getattr(group, name) for name in rest)] = group
    return [(levels[0][key], levels[1][key]) for key in levels[0] if key in levels[1]]


def _sampler(
    piece: Slice, contrast: Contrast
) -> tuple[Callable[[Group], Sample] | None, bool, str]:
    """How the measure is taken of a group; None when its depth is not there. Ratio, unit."""
    first, depth = piece.index[0], contrast.depth or piece.index[-1]
    if contrast.measure == "accepted drafts":
        return piece.accepted_drafts, False, "drafts"
    if contrast.measure == "share of own length":
        return lambda g: own_share(piece, g), False, ""
    if depth not in piece.index:
        return None, False, ""
    if contrast.measure == "forced accuracy":
        return lambda g: piece.accuracy(g, depth), False, ""
    if contrast.measure == "conditional acceptance":
        return lambda g: piece.conditional(g, depth), False, ""
    if contrast.measure == "growth":
        return lambda g: piece.change(g, "log_rms_state_pre", first, depth), True, ""
    column = {"sink": "sink", "own drafts": "draft_mass", "entropy": "entropy"}[contrast.measure]
    return lambda g: piece.mean(g, column, depth), False, "nats" if column == "entropy" else ""
