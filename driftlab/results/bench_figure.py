"""The figure of `driftlab bench`: what every case of every stage took, or held, at every size."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from driftlab.results.bench_rows import Row
from driftlab.results.drawing import own_style

_LINE = 0.17
"""Inches of a row."""
_ALTERNATIVES = re.compile("HF |speculators|specforge|verified chain|stored$")
_BOUNDS = re.compile("GEMM|python alone")
_OURS, _THEIRS, _BOUND = "#0072B2", "#D55E00", "0.45"


@own_style({})
def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write bench.png and bench.pdf: a panel a stage, a dot for each row that was measured.

    Dots are busy seconds on a logarithmic axis; MiB where a stage is about memory. A dot is named
    by its case and by the sizes that differ within the stage, its colour says whose work it is.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    stages = list(dict.fromkeys(row.stage for row in rows if row.busy))
    if not stages:
        return []
    panels = [[row for row in rows if row.stage == stage and row.busy] for stage in stages]
    figure, axes = plt.subplots(
        len(stages),
        figsize=(8, sum(_LINE * len(own) + 0.65 for own in panels)),
        height_ratios=[len(own) + 1 for own in panels],
        squeeze=False,
        layout="constrained",
    )
    for axis, stage, own in zip(axes.flat, stages, panels, strict=True):
        held = all(row.memory is not None for row in own) and stage == "region masses"
        values = [(row.memory if held else row.busy) or 0.0 for row in own]
        places = range(len(own), 0, -1)
        axis.scatter(values, places, color=[_colour(row.case) for row in own], s=18, zorder=3)
        axis.grid(axis="y", linewidth=0.3, color="0.85")
        axis.set_axisbelow(True)
        axis.set_ylim(0.4, len(own) + 0.6)
        axis.set_yticks(places, _names(own), fontsize=6)
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2, max(values) * 3)
        for place, value in zip(places, values, strict=True):
            shown = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            axis.annotate(
                shown, (value, place), (5, 0), textcoords="offset points", va="center", fontsize=6
            )
        decades = math.log10(max(values) / min(values))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{stage}, {'MiB' if held else 'busy seconds'}", fontsize=8, loc="left")
        axis.tick_params(axis="x", labelsize=6)
        axis.spines[["top", "right"]].set_visible(False)
    for colour, meaning in ((_OURS, "driftlab"), (_THEIRS, "an alternative"), (_BOUND, "a bound")):
        figure.axes[0].scatter([], [], color=colour, s=18, label=meaning)
    figure.axes[0].legend(
        fontsize=6, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1)
    )
    paths = [folder / "bench.png", folder / "bench.pdf"]
    for path in paths:
        meta = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=meta)
    plt.close(figure)
    return paths


def _colour(case: str) -> str:
    return _BOUND if _BOUNDS.match(case) else _THEIRS if _ALTERNATIVES.match(case) else _OURS


def _names(rows: Sequence[Row]) -> list[str]:
    """Case, what differs among the sizes, and the dtype where several occur."""
    sizes = [dict(re.findall(r"(\w+)=(\d+)", row.size)) for row in rows]
    differ = list(dict.fromkeys(k for size in sizes for k in size))
    differ = [key for key in differ if len({size.get(key) for size in sizes}) > 1]
    dtypes = len({row.dtype for row in rows}) > 1
    return [
        " ".join(
            [
                row.case,
                *(f"{key}={size[key]}" for key in differ if key in size),
                *((row.dtype,) if dtypes else ()),
            ]
        )
        for row, size in zip(rows, sizes, strict=True)
    ]
