"""Figures of a paper's pages: one column a base, one row a panel, drawn from tidy data alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.papers.items import Panel
from driftlab.results.drawing import own_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.9
"""Inches; two columns of a paper."""
_LEFT, _RIGHT, _TOP, _GAP = 0.62, 0.08, 0.25, 0.42
_HEIGHT = {1: 2.1, 2: 1.7, 3: 1.55, 4: 1.4}

# Okabe and Ito's colours; with dash and marker each line survives grey print.
_LOOKS: dict[str, tuple[str, str, Any]] = {
    "neither": ("#000000", "o", (1, 1)),
    "fc_norm alone": ("#E69F00", "s", (4, 1.5)),
    "post_norm alone": ("#0072B2", "^", (4, 1, 1, 1)),
    "both": ("#D55E00", "D", ""),
    "concat alone": ("#CC79A7", "v", (4, 1, 1, 1, 1, 1)),
    "concat and post_norm": ("#009E73", "P", (7, 1.5)),
    "effect of post_norm": ("#882255", "<", ""),
    "effect of fc_norm": ("#8B6D00", ">", (7, 1.5)),
    "interaction": ("#56B4E9", "X", (1, 1)),
}
_SAME = {
    "none+pre_norm": "neither",
    "per_layer+pre_norm": "fc_norm alone",
    "none+post_norm": "post_norm alone",
    "per_layer+post_norm": "both",
    "concat+pre_norm": "concat alone",
    "concat+post_norm": "concat and post_norm",
    "pre-norm": "neither",
    "pre-norm, plain": "neither",
    "pre-norm, pinned": "fc_norm alone",
    "post-norm, plain": "both",
    "post-norm, pinned": "post_norm alone",
    "post-norm": "both",
    "gated attention": "fc_norm alone",
    "gated + post-norm": "post_norm alone",
}
_SPARE = [
    ("#0072B2", "^", (4, 1, 1, 1)),
    ("#D55E00", "D", ""),
    ("#000000", "o", (1, 1)),
    ("#E69F00", "s", (4, 1.5)),
    ("#009E73", "P", (7, 1.5)),
    ("#CC79A7", "v", (4, 1, 1, 1, 1, 1)),
    ("#56B4E9", "X", (2, 1)),
    ("#666666", "*", (6, 1, 1, 1)),
]


def looks(lines: Sequence[str]) -> dict[str, tuple[str, str, Any]]:
    """Colour, marker and dash by line; what stands for one drafter looks alike everywhere."""
    known = {n: _LOOKS[_SAME.get(n, n)] for n in lines if _SAME.get(n, n) in _LOOKS}
    free = [look for look in _SPARE if look not in known.values()]
    spare: Iterator[tuple[str, str, Any]] = cycle(free)
    return {n: known.get(n) or next(spare) for n in lines}


def draw(frame: pd.DataFrame, panels: Sequence[Panel], bases: Mapping[str, str]) -> Figure:
    """The figure of ``frame``: columns base, panel, line, x, value, low, high."""
    import seaborn
    from matplotlib.figure import Figure

    there = [b for b in bases if (frame["base"] == b).any()]
    shown = [p for p in panels if (frame["panel"] == p.name).any()]
    lines = list(dict.fromkeys(frame["line"]))
    style = looks(lines)
    columns = min(len(lines), 4 if max(map(len, lines)) < 18 else 3)
    legend = 0.17 * -(-len(lines) // columns) + 0.06
    row = _HEIGHT.get(len(shown), 1.4)
    following = [*shown[1:], None]
    named = [q is None or q.x != p.x for p, q in zip(shown, following, strict=True)]
    gaps = [
        (_GAP if n else 0.22) + (0.55 if _turned(_places(frame, p)) else 0.1) * (p.x == "condition")
        for p, n in zip(shown, named, strict=True)
    ]
    height = _TOP + row * len(shown) + sum(gaps) + legend
    rc: dict[Any, Any] = {
        **seaborn.axes_style("ticks"),
        **seaborn.plotting_context("paper", font_scale=0.75),
    }
    with own_style(rc | _RC):
        figure = Figure(figsize=(WIDTH, height))
        across = (WIDTH - _LEFT - _RIGHT - 0.45 * (len(there) - 1)) / len(there)
        top = height - _TOP
        for panel, gap, name in zip(shown, gaps, named, strict=True):
            for j, base in enumerate(there):
                part = frame[(frame["panel"] == panel.name) & (frame["base"] == base)]
                left = _LEFT + j * (across + 0.45)
                ax = figure.add_axes(
                    (left / WIDTH, (top - row) / height, across / WIDTH, row / height)
                )
                if not len(part):
                    ax.set_axis_off()
                    ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes)
                    continue
                _panel(ax, part, panel, style)
                ax.set_ylabel(panel.name + (" (%)" if panel.per_cent else "") if not j else "")
                if not name:
                    ax.set_xlabel("")
                if panel is shown[0]:
                    ax.set_title(bases[base], pad=4)
            top -= row + gap
        _legend(figure, style, columns)
    return figure


def _places(frame: pd.DataFrame, panel: Panel) -> list[str]:
    return [str(x) for x in dict.fromkeys(frame.loc[frame["panel"] == panel.name, "x"])]


def _broken(place: str) -> str:
    return place.replace(", ", ",\n").replace(" + ", " +\n")


def _turned(places: Sequence[str]) -> bool:
    """The names of a panel's places have no room beside each other."""
    return len(places) * max(len(row) for p in places for row in _broken(p).split("\n")) > 52


_RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same on every machine
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.3,
    "grid.color": "0.85",
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "driftlab",
}


def _panel(ax: Axes, part: pd.DataFrame, panel: Panel, style: Mapping[str, Any]) -> None:
    import seaborn

    scale = 100.0 if panel.per_cent else 1.0
    part = part.assign(**{c: part[c] * scale for c in ("value", "low", "high")})
    words = part["x"].map(lambda x: isinstance(x, str) and not _is_number(x)).any()
    if words:
        _dots(ax, part, style)
    else:
        part = part.assign(x=part["x"].astype(float))
        seaborn.lineplot(
            part, x="x", y="value", hue="line", style="line", ax=ax, errorbar=None, legend=False,
            palette={n: s[0] for n, s in style.items()},
            markers={n: s[1] for n, s in style.items()},
            dashes={n: s[2] for n, s in style.items()},
        )  # fmt: skip
        for name, rows in part.groupby("line", sort=False):
            bounded = rows[rows["low"].notna()]
            ax.fill_between(
                bounded["x"], bounded["low"], bounded["high"],
                color=style[str(name)][0], alpha=0.16, linewidth=0,
            )  # fmt: skip
    ax.set_xlabel("" if words else panel.x)
    if panel.log:
        ax.set_yscale("log")
        _plain_ticks(ax)
    elif not panel.zero:
        ax.set_ylim(bottom=min(0.0, float(part["low"].min())))
    if panel.zero:
        ax.axhline(0, color="0.3", linewidth=0.8, zorder=0.9)
    if panel.x == "alpha":
        ax.set_xscale("log")
        ax.set_xticks(sorted(part["x"].unique()))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_xlabel("noise, times the RMS of what it is added to")
    elif panel.x.startswith("tokens"):
        ax.set_xticks(sorted(part["x"].unique()))
    elif panel.x == "target layer":
        ax.locator_params("x", integer=True)
    elif panel.x == "depth":
        last = int(part["x"].max())
        step = next(s for s in (1, 2, 4, 8, 16, 32) if last / s <= 8)
        ax.set_xticks(sorted({1, *range(step, last + 1, step)}))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dots(ax: Axes, part: pd.DataFrame, style: Mapping[str, Any]) -> None:
    """Values at named places, with bars; lines stand beside each other."""
    places = list(dict.fromkeys(part["x"]))
    lines = list(dict.fromkeys(part["line"]))
    for i, line in enumerate(lines):
        rows = part[part["line"] == line]
        at = np.array([places.index(x) for x in rows["x"]]) + 0.16 * (i - (len(lines) - 1) / 2)
        spread = np.abs(rows[["low", "high"]].to_numpy(float).T - rows["value"].to_numpy(float))
        colour, marker, _ = style[line]
        ax.errorbar(
            at, rows["value"], yerr=None if np.isnan(spread).all() else spread,
            color=colour, marker=marker, linestyle="none", elinewidth=0.9, capsize=2,
        )  # fmt: skip
    turned: dict[str, Any] = {"rotation": 35, "ha": "right"} if _turned(places) else {}
    ax.set_xticks(range(len(places)), [_broken(p) for p in places], **turned)
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.grid(axis="x", visible=False)


def _plain_ticks(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = ax.get_ylim()
    decades = np.log10(high / low)
    subs: Sequence[float] = (1, 2, 5) if decades < 2.5 else (1,)
    if decades < 0.9:
        subs = (1, 1.5, 2, 3, 4, 5, 7)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, style: Mapping[str, Any], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=c, marker=m, linestyle=(0, d) if d else "-", label=name)
        for name, (c, m, d) in style.items()
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=columns, frameon=False, handlelength=3.2,
        columnspacing=1.4, labelspacing=0.25, borderaxespad=0.1,
    )  # fmt: skip
