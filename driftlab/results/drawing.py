"""What figures share: colours and lines, axes over depth, legends, and files of a figure.

Lines are told apart by colour (Okabe and Ito's, safe for colour-blind readers), dash and marker,
so that they survive grey print. Importing this module loads no plotting library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.results.answers import load
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.shards import atomic_file, remove_dead
from driftlab.results.slices import TextKind
from driftlab.results.stats import count

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.9
"""Widths in inches of one and of two columns of a paper."""

_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same on every machine
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.3,
    "grid.color": "0.85",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "pdf.fonttype": 42,
    "svg.hashsalt": "driftlab",
}

# index into Okabe and Ito's colours, dash, marker. Hollow markers: the state is fed back raw.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = range(8)
_DASH: dict[str, Any] = {
    "dot": (0, (1, 1)),
    "dash": (0, (4, 1.5)),
    "dashdot": (0, (4, 1, 1, 1)),
    "solid": "-",
    "long": (0, (7, 1.5)),
    "dashdotdot": (0, (4, 1, 1, 1, 1, 1)),
}
REGION_STYLE: dict[str, tuple[str, int, str, str]] = {
    "sink": ("sink", BLACK, "solid", "o"),
    "prompt_mass": ("prompt", ORANGE, "dash", "s"),
    "generated": ("generated", GREEN, "dashdot", "^"),
    "draft_mass": ("draft", RED, "long", "D"),
    "self_mass": ("self", BLUE, "dot", "v"),
    "null_mass": ("null", PURPLE, "dashdotdot", "P"),
}


def _colour(index: int) -> Any:
    import matplotlib

    return matplotlib.color_sequences["okabe_ito"][index]


def line_style(colour: int, dash: str, marker: str, *, hollow: bool) -> dict[str, Any]:
    return {
        "color": _colour(colour),
        "linestyle": _DASH[dash],
        "marker": marker,
        "markerfacecolor": "white" if hollow else _colour(colour),
        "markeredgewidth": 0.7,
    }


def draw_lines(
    ax: Axes, frame: pd.DataFrame, by: str, styles: dict[str, dict[str, Any]], x: str = "depth"
) -> None:
    for label, style in styles.items():
        part = frame[(frame[by] == label) & frame["value"].notna()]
        if not len(part):
            continue
        if part["low"].notna().any():
            ax.fill_between(
                part[x], part["low"], part["high"], color=style["color"], alpha=0.18, linewidth=0
            )
        ax.plot(part[x], part["value"], label=label, **style)


def depth_axis(ax: Axes, frame: pd.DataFrame, *, label: bool = True) -> None:
    last = int(frame["depth"].max())
    step = next(s for s in (1, 4, 8, 16, 32, 64, 128) if last / s <= 8)
    ax.set_xticks([1, *range(step if step > 1 else 2, last + 1, step)])
    ax.set_xlim(1 - 0.03 * last, last + 0.03 * last)
    if label:
        ax.set_xlabel("depth")


def axes_grid(
    figure: Figure,
    rows: int,
    columns: int,
    *,
    legend: int,
    shared: bool = False,
    titles: bool = False,
) -> np.ndarray:
    """Axes [rows, columns] with room in inches for labels and ``legend`` rows of a legend.

    Margins are fixed, not fitted: fitting takes longer than drawing, and fixed frames line up
    from figure to figure.
    """
    width, height = figure.get_size_inches()
    left, right, top = 0.52, 0.08, 0.22 if titles else 0.07
    bottom = 0.36 + 0.13 * legend
    across = (width - left - right) / columns
    wspace, hspace = (0.12, 0.12) if shared else (0.52, 0.12)
    hspace += 0.18 if titles else 0.0
    down = (height - bottom - top) / rows
    axes: np.ndarray = figure.subplots(
        rows,
        columns,
        squeeze=False,
        sharex=True,
        sharey=shared,
        gridspec_kw={
            "left": left / width,
            "right": 1 - right / width,
            "bottom": bottom / height,
            "top": 1 - top / height,
            "wspace": wspace / (across - wspace * (columns - 1) / columns),
            "hspace": hspace / (down - hspace * (rows - 1) / rows),
        },
    )
    return axes


def legend_rows(entries: int, figure: Figure, narrow: int, wide: int) -> tuple[int, int]:
    columns = min(entries, narrow if figure.get_figwidth() < 5 else wide)
    return -(-entries // columns), columns


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=columns,
        handlelength=3.2,
        columnspacing=1.2,
        labelspacing=0.25,
        borderaxespad=0.1,
    )


def region_columns(variants: int, width: float) -> int:
    return min(variants, 2 if width < 5 else 4 if variants in (4, 7, 8) else 3)


def regions_height(frame: pd.DataFrame, width: float) -> float:
    n = frame["variant"].nunique()
    return 0.75 + (1.3 if width < 5 else 1.5) * -(-n // region_columns(n, width))


@dataclass(frozen=True)
class FigureSpec:
    """A named figure. Calling it with tables gives a matplotlib Figure that pyplot never sees."""

    name: str
    title: str
    data: Callable[..., pd.DataFrame]
    draw: Callable[[Figure, pd.DataFrame], None]
    width: float
    height: Callable[[pd.DataFrame, float], float]
    explains: str | Callable[[pd.DataFrame], str]
    needs: str = ""  # a mode, or a table

    def __call__(
        self,
        tables: RunDirectory | Tables,
        *,
        width: float | None = None,
        kind: TextKind | None = None,
    ) -> Figure:
        return self.figure(self.data(load(tables), kind), width=width)

    def figure(self, frame: pd.DataFrame, *, width: float | None = None) -> Figure:
        """Draw tidy data, e.g. a CSV that was read back."""
        from matplotlib.figure import Figure

        width = self.width if width is None else width
        with own_style():
            figure = Figure(figsize=(width, self.height(frame, width)))
            self.draw(figure, frame)
        return figure

    def caption(self, frame: pd.DataFrame) -> str:
        """What is drawn, over what, with which interval."""
        left_out = frame.groupby("text", sort=False)["left_out"].max()
        told = [f"{n} looping text{'s' * (n != 1)} left out" if n else "" for n in left_out]
        loops = f"; {told[0]}" if told[0] and len(told) == 1 else ""
        texts = ", ".join(
            f"{text} ({said})" if said and not loops else text
            for text, said in zip(left_out.index, told, strict=True)
        )
        kinds = " and ".join(m for m in dict.fromkeys(frame["mode"]) if m)
        basis = f"{kinds[:1].upper()}{kinds[1:]} chains on {texts}" if kinds else texts.capitalize()
        seeds = frame.groupby("variant")["seeds"].max()
        size = count(int(frame["prompts"].max()), int(seeds.max()), int(seeds.min()))
        drawn = dict.fromkeys(frame.loc[frame["value"].notna(), "interval"])
        explains = self.explains if isinstance(self.explains, str) else self.explains(frame)
        return (
            f"{self.title}. {explains} {basis}, {size}{loops}. "
            f"Interval: {'; '.join(drawn) or 'none'}."
        )


@contextmanager
def own_style(settings: Any = None) -> Iterator[None]:
    """``settings`` (those of a run's figures) over the library's own, whatever a matplotlibrc of
    the user's says: the same bytes."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC if settings is None else settings)
        yield


def save_frame(
    named: FigureSpec, frame: pd.DataFrame, out: str | Path, *, width: float | None = None
) -> dict[str, Path]:
    """Write a figure of tidy data as PNG (300 dpi), PDF and CSV into folder ``out``.

    The same data give the same bytes. Raises ResourceError when the disk is full.
    """
    folder = Path(out)
    paths = {suffix: folder / f"{named.name}.{suffix}" for suffix in ("png", "pdf", "csv")}
    figure = named.figure(frame, width=width)
    remove_dead(folder, named.name)
    with own_style():
        with atomic_file(paths["png"]) as handle:
            figure.savefig(handle, format="png", dpi=300, metadata={"Software": None})
        with atomic_file(paths["pdf"]) as handle:
            figure.savefig(handle, format="pdf", metadata={"CreationDate": None, "Creator": None})
    with atomic_file(paths["csv"]) as handle:
        handle.write(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return paths
