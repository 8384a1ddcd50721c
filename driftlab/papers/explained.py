"""What a drafted token owes to what, as a page: the stored explanation of a run.

Every number is one that :mod:`driftlab.results.explanations` makes; here it only gets its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from driftlab.papers.numbers import (
    BOTH,
    NEITHER,
    SWITCHES,
    Found,
    Numbers,
    Panel,
    present,
    together,
)
from driftlab.results.drawing import REGION_STYLE
from driftlab.results.explain_figures import effect_data, layers_data
from driftlab.results.explanations import REGION_NAMES, Explained
from driftlab.results.slices import Group
from driftlab.results.stats import Estimate

LAYERS = ("low", "mid", "high")
"""The lowest, the middle and the highest captured state, as in T1."""

OWED = (
    *(Panel(f"worth of {name} (nats)") for name in LAYERS),
    Panel("attention mass", "condition"),
    Panel("effect (nats)", "condition", zero=True),
)


def owed(runs: Mapping[str, Numbers]) -> Found | None:
    """Layers, regions, states and inputs of every drafter; open questions on two of them."""
    found = runs["explained"].explained
    if found is None:
        return None
    names = {g: _name(g) for g in found.groups}
    rows: dict[str, dict[str, Estimate]] = {}
    for build in (_layers, _attention, _states, _logit):
        for g, name in names.items():
            rows |= build(found, g, name)
    return rows, _contrasts(found), _curves(found, names)


def _name(g: Group) -> str:
    """With the switches' name in front, as on the flagship's page."""
    switches = {v: name for name, v in SWITCHES.items()}
    return f"{switches[g.norms]}: {g.label}" if g.label in switches else g.label


# --- rows ---------------------------------------------------------------------------------------


def _ends(depths: Iterable[int]) -> list[int]:
    """The first and the last depth, once each."""
    there = sorted(depths)
    return list(dict.fromkeys((there[0], there[-1])))


def _kept(row: dict[str, Estimate]) -> dict[str, Estimate]:
    """Without what does not exist, e.g. own drafts at depth 1."""
    return {column: e for column, e in row.items() if not math.isnan(e.value)}


def _layers(found: Explained, g: Group, name: str) -> dict[str, dict[str, Estimate]]:
    return {
        f"{name}, {part}": {
            "share": found.estimate(g, "share", part, found.depths[0]),
            **{f"worth @{d}": found.estimate(g, "shapley", part, d) for d in _ends(found.depths)},
        }
        for part in found.parts("shapley")
    }


def _attention(found: Explained, g: Group, name: str) -> dict[str, dict[str, Estimate]]:
    return {
        f"{name}, {words}": _kept(
            {
                f"{measure} @{d}": found.estimate(g, measure, region, d)
                for d in _ends(found.depths)
                for measure in ("mass", "effect")
            }
        )
        for region, words in REGION_NAMES.items()
    }


def _anew(found: Explained, g: Group, write: str = "") -> Estimate:
    """Cosine with the same token's less that with the depth before, at the last depth."""
    pair = (("cosine", f"{write}same_token"), ("cosine", f"{write}previous"))
    return found.difference(g, *pair, found.depths[-1])


def _states(found: Explained, g: Group, name: str) -> dict[str, dict[str, Estimate]]:
    last = found.depths[-1]
    row = {
        "state": _anew(found, g),
        "written": _anew(found, g, "write_"),
        **{f"rank @{d}": found.estimate(g, "rank", "state", d) for d in _ends(found.depths)},
        "geometry": found.difference(g, ("geometry", "token"), ("geometry", "anchor"), last),
        "lens": found.estimate(g, "lens_draft", "feedback.in", last),
    }
    return {name: _kept(row)}


_INPUTS = {"fused": "fused input", "embedding": "token read", "feedback": "fed-back state"}


def _logit(found: Explained, g: Group, name: str) -> dict[str, dict[str, Estimate]]:
    depths = found.table.loc[found.table["measure"] == "gradients", "depth"].unique().tolist()
    row = {
        f"{words} @{d}": found.estimate(g, "gradients", part, d)
        for d in (_ends(depths) if depths else ())
        for part, words in _INPUTS.items()
    }
    return {f"{name}, its logit": kept} if (kept := _kept(row)) else {}


# --- questions ----------------------------------------------------------------------------------


def _guided(
    found: Explained, g: Group, seen: str, worth: str, parts: Iterable[str], depth: int
) -> Estimate | None:
    """``worth`` of the part that is seen most less that of the next: above 0 for a guide."""
    means = {}
    for part in parts:
        there = (found.sample(g, measure, part, depth).values for measure in (worth, seen))
        if all(np.isfinite(values).any() for values in there):
            means[part] = float(np.nanmean(found.sample(g, seen, part, depth).values))
    if len(means) < 2:
        return None
    most, following = sorted(means, key=lambda part: -means[part])[:2]
    return found.difference(g, (worth, most), (worth, following), depth)


def _contrasts(found: Explained) -> dict[str, Estimate]:
    plain = {g.label: g for g in found.groups}
    neither, both = plain.get(NEITHER), plain.get(BOTH)
    first, last = found.depths[0], found.depths[-1]
    whole = (("logprob", "all layers"), ("logprob", "no layer"))
    layers = found.parts("shapley")

    def mass(g: Group | None, depth: int) -> Estimate | None:
        return _guided(found, g, "mass", "effect", REGION_NAMES, depth) if g else None

    def worth(g: Group | None) -> Estimate | None:
        return found.difference(g, *whole, last) if g and layers else None

    def anew(g: Group | None, write: str = "") -> Estimate | None:
        return _anew(found, g, write) if g else None

    return present(
        mass_first=mass(neither, first),
        mass_last=mass(neither, last),
        mass_last_both=mass(both, last),
        size_worth=_guided(found, neither, "share", "shapley", layers, first) if neither else None,
        worth_last=worth(neither),
        worth_last_both=worth(both),
        state=anew(neither),
        state_both=anew(both),
        written=anew(neither, "write_"),
        written_both=anew(both, "write_"),
    )


# --- curves -------------------------------------------------------------------------------------


def _curves(found: Explained, names: Mapping[Group, str]) -> object:
    """Worth of the low, the middle and the high state by depth; mass beside effect."""
    lines = {g.label: name.partition(":")[0] for g, name in names.items()}
    layers = found.parts("shapley")
    frames = []
    if layers:
        spots = dict(zip((layers[0], layers[len(layers) // 2], layers[-1]), LAYERS, strict=True))
        worth = layers_data(found)
        worth = worth[worth["part"].isin(spots)]
        panels = worth["part"].map(lambda part: f"worth of {spots[part]} (nats)")
        frames.append(worth.assign(panel=panels, x=worth["depth"]))
    beside = effect_data(found).sort_values("depth", kind="stable")
    places = beside["part"].map(lambda r: REGION_STYLE[r][0]) + " @" + beside["depth"].astype(str)
    seen = {"value": "mass", "low": "mass_low", "high": "mass_high"}
    for panel, columns in (("attention mass", seen), ("effect (nats)", {})):
        moved = {name: beside[source] for name, source in columns.items()}
        frames.append(beside.assign(panel=panel, x=places, **moved))
    kept = ["panel", "line", "x", "value", "low", "high", "prompts", "seeds"]
    return together(f.assign(line=f["variant"].map(lines))[kept] for f in frames)
