"""The figure of `driftlab bench`: growth of busy time with size, and the share of the roofline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from driftlab.results.bench_rows import Row


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write bench.png and bench.pdf from rows that have a time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row.busy]
    stages = list(dict.fromkeys(row.stage for row in timed))
    if not stages:
        return []
    columns = min(3, len(stages))
    lines = -(-len(stages) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(stages) :]:
        axis.remove()
    for axis, stage in zip(axes.flat, stages, strict=False):
        own = [row for row in timed if row.stage == stage]
        varied = _varied([row.size for row in own])
        for case in dict.fromkeys((row.case, row.dtype) for row in own):
            points = [row for row in own if (row.case, row.dtype) == case]
            x = [_number(row.size, varied) for row in points]
            order = sorted(range(len(x)), key=lambda i: x[i])
            label = " ".join(part for part in case if part)
            axis.plot(
                [x[i] for i in order],
                [points[i].busy or 0.0 for i in order],
                marker="o",
                label=label,
            )
        axis.set(title=stage, ylabel="busy time [s]", xlabel=varied or "", yscale="log")
        if varied:
            axis.set_xscale("log", base=2)
        else:
            axis.set_xticks([])
        axis.legend(fontsize=6)
    paths = [folder / "bench.png", folder / "bench.pdf"]
    for path in paths:
        meta = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=meta)
    plt.close(figure)
    return paths


def _varied(sizes: Sequence[str]) -> str:
    """The quantity of which most values occur, among ``name=number`` parts of ``sizes``."""
    values: dict[str, set[str]] = {}
    for size in sizes:
        for name, value in re.findall(r"(\w+)=(\d+)", size):
            values.setdefault(name, set()).add(value)
    many = {name: len(found) for name, found in values.items() if len(found) > 1}
    return max(many, key=lambda name: many[name]) if many else ""


def _number(size: str, name: str) -> float:
    found = re.search(rf"\b{name}=(\d+)", size) if name else None
    return float(found.group(1)) if found else 1.0
