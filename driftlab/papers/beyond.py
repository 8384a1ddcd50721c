"""Experiments beyond the paper's items, as rows of a table, contrasts and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from driftlab.papers.numbers import (
    BOTH,
    NEITHER,
    Found,
    Numbers,
    Panel,
    points,
    present,
    relative,
    together,
)
from driftlab.results.slices import Group
from driftlab.results.stats import Estimate, Sample


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
        frames = [points("accepted drafts, ratio to unchanged", kept)]
        if drawn:
            frames.append(points("forced accuracy, change", drawn))
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


def budget(runs: Mapping[str, Numbers]) -> Found | None:
    """What changes as drafters are trained for longer, by the tokens that they learned from."""
    run = runs["budget"]
    if not run.has_forced:
        return None
    cells = run.tables.cells
    groups = [g for g in run.free.groups if not g.condition]
    learned = {
        g: float(cells.loc[cells["variant"] == g.variant, "train_tokens"].mean()) for g in groups
    }
    groups.sort(key=lambda g: (g.norms, learned[g]))
    first, last = run.free.index[0], run.deepest
    rows: dict[str, dict[str, Estimate]] = {}
    drawn: dict[str, list[tuple[str, object, Estimate]]] = {panel.name: [] for panel in BUDGET}
    for g in groups:
        growth, sink = run.growth(g, 1, run.deep), run.change(g, "sink", first, last)
        deep, drafts = run.number(run.forced.accuracy(g, last)), run.number(run.drafts(g))
        rows[f"{g.norms}, {learned[g] / 1000:.0f}k tokens"] = {
            "drafts": drafts,
            "forced @1": run.number(run.forced.accuracy(g, 1)),
            f"forced @{last}": deep,
            f"growth 1-{run.deep}": growth,
            f"sink {first}-{last}": sink,
            f"entropy {first}-{last}": run.change(g, "entropy", first, last),
            f"own drafts @{last}": run.level(g, "draft_mass", last),
        }
        for panel, e in zip(drawn, (growth, sink, deep, drafts), strict=True):
            drawn[panel].append((g.norms, learned[g] / 1000, e))

    pre, post = ([g for g in groups if g.norms == v] for v in (NEITHER, BOTH))
    if len(pre) < 2 or len(pre) != len(post):
        return None
    free, forced = run.free, run.forced

    def trend(of: Callable[[Group], Sample], **how: Any) -> Estimate:
        return run.less(of(pre[-1]), of(pre[0]), **how)

    def gain(of: Callable[[Group], Sample]) -> Estimate:
        """How much further apart the two drafters are after the longest training."""
        return run.number(
            *(of(g) for g in (post[-1], pre[-1], post[0], pre[0])), contrast=(1, -1, -1, 1)
        )

    contrasts = present(
        grows=run.growth(pre[-1], 1, run.deep),
        growth_trend=trend(lambda g: free.change(g, "log_rms_state_pre", 1, run.deep), ratio=True),
        sink_falls=run.change(pre[-1], "sink", first, last),
        sink_trend=trend(lambda g: free.change(g, "sink", first, last)),
        own_trend=trend(lambda g: free.mean(g, "draft_mass", last)),
        deep=run.less(forced.accuracy(post[-1], last), forced.accuracy(pre[-1], last)),
        deep_trend=gain(lambda g: forced.accuracy(g, last)),
        drafts=run.less(run.drafts(post[-1]), run.drafts(pre[-1])),
        drafts_trend=gain(run.drafts),
    )
    return rows, contrasts, together(points(panel, found) for panel, found in drawn.items())


CHANGED = (
    Panel("accepted drafts, ratio to unchanged", "condition"),
    Panel("forced accuracy, change", "condition", zero=True),
)
TRAINED = (Panel("forced accuracy"), Panel("RMS of the state", log=True))
BUDGET = (
    Panel("growth, depth 8 / 1", "thousand training tokens", log=True),
    Panel("sink, last depth - first", "thousand training tokens", zero=True),
    Panel("forced accuracy, last depth", "thousand training tokens"),
    Panel("accepted drafts", "thousand training tokens"),
)
