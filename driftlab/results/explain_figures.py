"""Figures of an explained run: tidy data, then matplotlib, as in :mod:`driftlab.results.figures`.

``EXPLAIN_FIGURES[name].data(explained)`` gives what ``.figure(frame)`` draws and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.results.drawing import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PAGE,
    PURPLE,
    RED,
    REGION_STYLE,
    SKY,
    FigureSpec,
    axes_grid,
    depth_axis,
    draw_lines,
    legend_below,
    legend_rows,
    line_style,
    region_columns,
    regions_height,
    save_frame,
)
from driftlab.results.explanations import MEASURES, REGION_NAMES, Explained
from driftlab.results.stats import bands, interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _series(found: Explained, keys: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Rows of ``measure, part, variant, depth, value, low, high, ...``, drafter by drafter."""
    import pandas as pd

    frames = []
    for measure, part in keys:
        cube = found.cube(measure, part)
        n_groups, n_seeds, n_prompts, n_depths = cube.shape
        flat = np.moveaxis(cube, 3, 1).reshape(-1, n_seeds, n_prompts)
        value, low, high = bands(flat, resamples=found.resamples)
        there = np.isfinite(flat)
        frames.append(
            pd.DataFrame(
                {
                    "measure": measure,
                    "part": part,
                    "unit": MEASURES[measure].unit,
                    "variant": [g.label for g in found.groups for _ in range(n_depths)],
                    "depth": list(found.depths) * n_groups,
                    "value": value,
                    "low": low,
                    "high": high,
                    "prompts": there.any(axis=1).sum(axis=1),
                    "seeds": there.any(axis=2).sum(axis=1),
                }
            )
        )
    frame = pd.concat(frames, ignore_index=True)
    frame = frame[frame["prompts"] > 0].reset_index(drop=True)
    sizes = zip(frame["prompts"], frame["seeds"], strict=True)
    frame["interval"] = [interval(*size, found.resamples, banded=True) for size in sizes]
    frame["text"] = found.text
    frame["mode"] = "forced"
    frame["left_out"] = found.left_out
    return frame


def layers_data(found: Explained) -> pd.DataFrame:
    """Shapley value of every captured layer by depth."""
    return _series(found, (("shapley", part) for part in found.parts("shapley")))


_LENS = {
    ("lens_draft", "feedback.in"): "received state: the drafted token",
    ("lens_draft", "resid.mid"): "after attention: the drafted token",
    ("lens_read", "feedback.in"): "received state: the token just read",
}
_STATES = {
    ("cosine", "previous"): "the same chain, a depth before",
    ("cosine", "same_token"): "the same token, at depth 1",
    ("cosine", "other"): "another anchor",
}


def lens_data(found: Explained) -> pd.DataFrame:
    """How often the lens names the drafted token, and the one just read, by depth."""
    return _series(found, _LENS)


def states_data(found: Explained) -> pd.DataFrame:
    """Cosine of the state with the depth before, with the same token's, and with others."""
    return _series(found, _STATES)


def effect_data(found: Explained) -> pd.DataFrame:
    """Attention mass of each region beside what its keys are worth, at the first and last depth.

    ``value, low, high`` are of the effect; ``mass, mass_low, mass_high`` of the mass.
    """
    ends = {found.depths[0], found.depths[-1]}
    keys = ["variant", "part", "depth"]
    effect = _series(found, (("effect", region) for region in REGION_NAMES))
    mass = _series(found, (("mass", region) for region in REGION_NAMES))
    names = {"value": "mass", "low": "mass_low", "high": "mass_high"}
    frame = effect.merge(mass[[*keys, *names]].rename(columns=names), on=keys)
    return frame[frame["depth"].isin(ends)].reset_index(drop=True)


# --- drawing ------------------------------------------------------------------------------------

_LAYER_STYLES = [
    (BLUE, "dashdot", "^"),
    (ORANGE, "dash", "s"),
    (RED, "solid", "D"),
    (GREEN, "long", "P"),
    (PURPLE, "dashdotdot", "v"),
    (SKY, "dot", "o"),
]


def _grid(
    figure: Figure,
    frame: pd.DataFrame,
    draw: Callable[[Axes, pd.DataFrame], None],
    entries: int,
    label: str,
    low: float | None = None,
) -> None:
    """One panel for each drafter, all with the same axes, and one legend below."""
    variants = list(dict.fromkeys(frame["variant"]))
    columns = region_columns(len(variants), figure.get_figwidth())
    legend, legend_columns = legend_rows(entries, figure, 2, 4)
    rows = -(-len(variants) // columns)
    axes = axes_grid(figure, rows, columns, legend=legend, shared=True, titles=True)
    for i, ax in enumerate(axes.flat):
        if i >= len(variants):
            ax.set_visible(False)
            continue
        draw(ax, frame[frame["variant"] == variants[i]])
        ax.axhline(0, color="0.3", linewidth=0.6, zorder=0.5)
        ax.set_title(variants[i], pad=3)
        if i % columns == 0:
            ax.set_ylabel(label)
        if i + columns < len(variants):
            ax.set_xlabel("")
    bottom, top = frame[["value", "low"]].min().min(), frame[["value", "high"]].max().max()
    room = 0.05 * (top - bottom) or 0.05
    axes.flat[0].set_ylim(bottom - room if low is None else low, top + room)
    legend_below(figure, axes.flat[0], legend_columns)


def _lines(
    ax: Axes, frame: pd.DataFrame, names: dict[tuple[str, str], str], styles: list[dict[str, Any]]
) -> None:
    labels = [names[key] for key in zip(frame["measure"], frame["part"], strict=True)]
    shown = dict(zip(names.values(), styles, strict=False))
    draw_lines(ax, frame.assign(name=labels), "name", shown)
    depth_axis(ax, frame)


def _draw_layers(figure: Figure, frame: pd.DataFrame) -> None:
    names = {("shapley", part): part for part in dict.fromkeys(frame["part"])}
    styles = [
        line_style(*_LAYER_STYLES[i % len(_LAYER_STYLES)], hollow=i >= len(_LAYER_STYLES))
        for i in range(len(names))
    ]
    draw = partial(_lines, names=names, styles=styles)
    _grid(figure, frame, draw, len(names), "Shapley value (nats)")


def _draw_named(
    names: dict[tuple[str, str], str], label: str, low: float | None = None
) -> Callable[[Figure, pd.DataFrame], None]:
    def draw(figure: Figure, frame: pd.DataFrame) -> None:
        styles = [
            line_style(RED, "solid", "D", hollow=False),
            line_style(BLUE, "dash", "o", hollow=False),
            line_style(BLACK, "dot", "s", hollow=True),
        ]
        lines = partial(_lines, names=names, styles=styles)
        _grid(figure, frame, lines, len(names), label, low)

    return draw


def _effect_axes(ax: Axes, frame: pd.DataFrame) -> None:
    first, last = int(frame["depth"].min()), int(frame["depth"].max())
    for region in REGION_NAMES:
        part = frame[frame["part"] == region].sort_values("depth")
        name, colour, _, marker = REGION_STYLE[region]
        style = line_style(colour, "solid", marker, hollow=False)
        if len(part) > 1:
            ax.plot(part["mass"], part["value"], color=style["color"], linewidth=0.6, alpha=0.6)
        for depth in dict.fromkeys((first, last)):
            rows = part[part["depth"] == depth]
            if not len(rows):
                continue
            error = [
                np.abs(rows[[f"{p}low", f"{p}high"]].to_numpy(float).T - rows[v].to_numpy(float))
                for p, v in (("mass_", "mass"), ("", "value"))
            ]
            ax.errorbar(
                rows["mass"],
                rows["value"],
                xerr=error[0],
                yerr=error[1],
                label=f"{name}, depth {depth}",
                elinewidth=0.7,
                **{
                    **style,
                    "linestyle": "none",
                    "markerfacecolor": "white" if depth == first else style["color"],
                },
            )
    ax.set_xlabel("attention mass")


def _draw_effect(figure: Figure, frame: pd.DataFrame) -> None:
    _grid(figure, frame, _effect_axes, 7, "effect on log p(truth) (nats)")


EXPLAIN_FIGURES: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        FigureSpec(
            "explain_layers",
            "What each captured layer is worth, by depth",
            layers_data,
            _draw_layers,
            PAGE,
            regions_height,
            "Shapley value of the layer's part of the fused input for the log-probability of the "
            "target's token, through the chain.",
            needs="shapley",
        ),
        FigureSpec(
            "explain_lens",
            "What the stream says, by depth",
            lens_data,
            _draw_named(_LENS, "share of anchors", 0.0),
            PAGE,
            regions_height,
            "Token that the drafter's final norm and head read off the stream.",
            needs="lens_draft",
        ),
        FigureSpec(
            "explain_states",
            "What the state resembles, by depth",
            states_data,
            _draw_named(_STATES, "cosine"),
            PAGE,
            regions_height,
            "Cosine of the state before the final norm with three others.",
            needs="cosine",
        ),
        FigureSpec(
            "explain_effect",
            "Attention mass against causal effect",
            effect_data,
            _draw_effect,
            PAGE,
            regions_height,
            "Effect: log-probability of the target's token lost when a region's keys are hidden "
            "from that depth's query. Hollow: the first depth; filled: the last.",
            needs="effect",
        ),
    )
}


def available(found: Explained) -> list[str]:
    """Figures that the table has rows for."""
    there = set(found.table["measure"])
    return [name for name, spec in EXPLAIN_FIGURES.items() if spec.needs in there]


def save_explain_figures(found: Explained, out: str | Path) -> dict[str, dict[str, Path]]:
    """Write every figure as PNG, PDF and CSV into folder ``out``; paths by name and suffix.

    One without a value is not drawn, as what only deeper drafts have in chains of one.
    """
    frames = {name: EXPLAIN_FIGURES[name].data(found) for name in available(found)}
    return {
        name: save_frame(EXPLAIN_FIGURES[name], frame, out)
        for name, frame in frames.items()
        if len(frame)
    }
