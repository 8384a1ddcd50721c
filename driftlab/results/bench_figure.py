"""The figure of `driftlab bench`: what every case of every stage took, or held, at every size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from driftlab.results.bench_rows import Row

_BAR = 0.17
"""Inches of a bar."""


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write bench.png and bench.pdf: a panel a stage, a bar for each row that was measured.

    Bars are busy seconds on a logarithmic axis; MiB where a stage is about memory. A bar is named
    by its case and by the sizes that differ within the stage.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = list(dict.fromkeys(row.stage for row in rows if row.busy))
    if not stages:
        return []
    panels = [[row for row in rows if row.stage == stage and row.busy] for stage in stages]
    figure, axes = plt.subplots(
        len(stages),
        figsize=(8, sum(_BAR * len(own) + 0.65 for own in panels)),
        height_ratios=[len(own) + 1 for own in panels],
        squeeze=False,
        layout="constrained",
    )
    for axis, stage, own in zip(axes.flat, stages, panels, strict=True):
        held = all(row.memory is not None for row in own) and stage == "region masses"
        values = [(row.memory if held else row.busy) or 0.0 for row in own]
        cases = list(dict.fromkeys((row.case, row.dtype) for row in own))
        colours = [f"C{cases.index((row.case, row.dtype)) % 10}" for row in own]
        places = range(len(own), 0, -1)
        axis.barh(places, values, color=colours, height=0.75)
        axis.set_yticks(places, _names(own), fontsize=6)
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2, max(values) * 3)
        for place, value in zip(places, values, strict=True):
            axis.text(value * 1.06, place, f"{value:.3g}", va="center", fontsize=6)
        axis.set_title(f"{stage}, {'MiB' if held else 'busy seconds'}", fontsize=8, loc="left")
        axis.tick_params(axis="x", labelsize=6)
        axis.spines[["top", "right"]].set_visible(False)
    paths = [folder / "bench.png", folder / "bench.pdf"]
    for path in paths:
        meta = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=meta)
    plt.close(figure)
    return paths


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
