"""Figures: tables -> tidy data -> matplotlib. What is drawn is what the CSV holds.

Every figure has two halves: ``data(tables)`` gives a tidy frame with value, interval, n and
basis in each row, ``draw(figure, frame)`` reads nothing but that frame. Importing this module
loads no plotting library.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftlab.errors import ConfigError, ResourceError
from driftlab.results.answers import effects, load, preferred, summary
from driftlab.results.drawing import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    ORANGE,
    PAGE,
    PURPLE,
    RED,
    REGION_STYLE,
    SKY,
    YELLOW,
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
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.schema import REGIONS
from driftlab.results.slices import (
    Slice,
    TextKind,
    layers,
    modes,
    take,
    windowed,
    without_conditions,
)
from driftlab.results.stats import Estimate, bands, interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST = 10
"""Conditional acceptance is n/a below this many opportunities."""

_VARIANTS: dict[tuple[str, str], tuple[int, str, str]] = {
    ("none", "pre_norm"): (BLACK, "dot", "o"),
    ("per_layer", "pre_norm"): (ORANGE, "dash", "s"),
    ("concat", "pre_norm"): (PURPLE, "dashdotdot", "v"),
    ("none", "post_norm"): (BLUE, "dashdot", "^"),
    ("per_layer", "post_norm"): (RED, "solid", "D"),
    ("concat", "post_norm"): (GREEN, "long", "P"),
}
_SPARE = [
    (colour, dash, marker)
    for marker in "X*h<>p"
    for colour, dash in zip(
        (SKY, PURPLE, GREEN, YELLOW, ORANGE, BLUE, RED, BLACK),
        ("solid", "dash", "dashdot", "long", "dashdotdot", "dot", "solid", "dash"),
        strict=True,
    )
]

# --- tidy data --------------------------------------------------------------------------------


def _series(
    piece: Slice,
    cubes: Iterable[tuple[dict[str, Any], np.ndarray, np.ndarray | None]],
    *,
    x: str = "depth",
    transform: Callable[[np.ndarray], np.ndarray] = lambda v: v,
) -> pd.DataFrame:
    """Rows of ``labels, group, x, value, low, high, ...`` from [group, seed, prompt, x] cubes."""
    import pandas as pd

    frames = []
    for labels, values, weights in cubes:
        n_groups, n_seeds, n_prompts, n_x = values.shape

        def flat(a: np.ndarray, shape: tuple[int, ...] = (n_seeds, n_prompts)) -> np.ndarray:
            return np.moveaxis(a, 3, 1).reshape(-1, *shape)

        flat_weights = None if weights is None else flat(weights)
        value, low, high = bands(flat(values), flat_weights, resamples=piece.resamples)
        there = np.isfinite(flat(values))
        if flat_weights is not None:
            there &= flat_weights > 0
        frame = pd.DataFrame(
            {
                "variant": [g.label for g in piece.groups for _ in range(n_x)],
                "fusion_norm": [g.fusion_norm for g in piece.groups for _ in range(n_x)],
                "feedback": [g.feedback for g in piece.groups for _ in range(n_x)],
                "ttt": pd.array([g.ttt for g in piece.groups for _ in range(n_x)], dtype="Int32"),
                x: list(piece.index) * n_groups,
                "value": transform(value),
                "low": transform(low),
                "high": transform(high),
                "prompts": there.any(axis=1).sum(axis=1),
                "seeds": there.any(axis=2).sum(axis=1),
            }
        )
        for name, label in reversed(labels.items()):
            frame.insert(0, name, label)
        frames.append(frame)
    return _based(pd.concat(frames, ignore_index=True), piece)


def _based(frame: pd.DataFrame, piece: Slice, *, estimated: bool = False) -> pd.DataFrame:
    """``estimated``: its intervals are not those of ``bands``."""
    frame["interval"] = [
        interval(*size, piece.resamples, banded=not estimated)
        for size in zip(frame["prompts"], frame["seeds"], strict=True)
    ]
    texts = {g.label: piece.texts_of(g) for g in piece.groups}
    each = [texts.get(name, piece.texts[""]) for name in frame["variant"]]  # effects have none
    frame["text"] = [f"{t.kind}{', all looping' if t.all_loop else ''}" for t in each]
    frame["mode"] = piece.mode or ""
    frame["left_out"] = [t.left_out for t in each]
    return frame


def _drift(tables: Tables, kind: TextKind | None) -> Slice:
    return take(tables, preferred(tables, "free", "forced"), kind)


def regions_data(
    tables: Tables, kind: TextKind | None = None, regions: Sequence[str] = REGIONS
) -> pd.DataFrame:
    """Attention mass of every region by depth; ``even`` is the share of one key."""
    piece = _drift(tables, kind)
    frame = _series(
        piece, (({"region": r, "unit": "probability"}, piece.cube(r), None) for r in regions)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a depth that no text reaches
        even = np.nanmean(piece.cube("uniform"), axis=(0, 1, 2))
    # Of a drafter that sees a window it is not known here; nothing is drawn then.
    known = math.nan if windowed(tables, piece.groups) else 1
    frame["even"] = frame["depth"].map(dict(zip(piece.index, even * known, strict=True)))
    if (deep := layers(tables)) > 1:
        frame["layers"] = deep
    return frame


def sink_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    return regions_data(tables, kind, ("sink",))


_STATES = {"state_pre": "before the final norm", "feedback": "as fed back"}


def rms_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Geometric mean RMS by depth, before the final norm and as fed back."""
    piece = _drift(tables, kind)
    parts = (({"state": s, "unit": "rms"}, piece.cube(f"log_rms_{s}"), None) for s in _STATES)
    return _series(piece, parts, transform=np.exp)


def acceptance_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Conditional acceptance by depth, pooled over opportunities, with their count."""
    piece = take(tables, "free", kind)
    accepted, chances = piece.cube("n_accepted"), piece.cube("n_opportunities")
    weights = np.nan_to_num(chances)
    rate = np.divide(accepted, chances, out=np.zeros_like(weights), where=weights > 0)
    frame = _series(piece, [({"unit": "probability"}, rate, weights)])
    frame["opportunities"] = weights.sum(axis=(1, 2)).astype(int).ravel()
    few = frame["opportunities"] < FEWEST
    frame.loc[few, ["value", "low", "high"]] = np.nan
    return frame


def accuracy_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Top-1 accuracy of the forced chain by depth."""
    piece = take(tables, "forced", kind)
    values = piece.cube("n_correct") / piece.cube("n")
    return _series(piece, [({"unit": "probability"}, values, None)])


_LAYER_MEASURES = {"share": "1", "rms_in": "rms", "rms_normed": "rms"}


def shares_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Share in the fused input and RMS of every captured state."""
    piece = take(tables, None, kind, table="fused")
    frame = _series(
        piece,
        (({"measure": m, "unit": u}, piece.cube(m), None) for m, u in _LAYER_MEASURES.items()),
        x="layer",
    )
    each = dict(zip(zip(*piece.positions[::3], strict=True), piece.frame["boundary"], strict=True))
    places = list(itertools.product(range(len(piece.groups)), range(len(piece.index))))
    # Drafters side by side need not read the same boundaries.
    boundary = [each.get(place) for place in places] * len(_LAYER_MEASURES)
    frame.insert(frame.columns.get_loc("layer"), "boundary", boundary)  # type: ignore[arg-type]
    return frame


def table_data(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Headline numbers by variant, then the effects of the two norms on them."""
    import pandas as pd

    rows = []
    for block, numbers in (("variant", summary(tables, kind)), ("effect", effects(tables, kind))):
        for name, columns in numbers.items():
            for measure, e in columns.items():
                rows.append(
                    {
                        "block": block,
                        "variant": name,
                        "measure": measure,
                        "value": e.value,
                        "low": e.low,
                        "high": e.high,
                        "unit": e.unit,
                        "prompts": e.n,
                        "seeds": e.seeds,
                        "p": e.p,
                        "by_seed": " ".join(f"{v:.6g}" for v in e.by_seed),
                        "note": e.note,
                    }
                )
    piece = _drift(tables, kind)
    frame = _based(pd.DataFrame(rows), piece, estimated=True)
    free = frame["measure"].str.startswith("accept")
    frame.loc[free, "mode"] = "free"
    frame.loc[frame["measure"].str.startswith("forced"), "mode"] = "forced"
    return frame


# --- drawing ----------------------------------------------------------------------------------


def _styles(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Line properties by variant: the same variant looks the same in every figure."""
    used: set[tuple[str, str]] = set()
    spare: Iterator[tuple[int, str, str]] = iter(_SPARE)
    out = {}
    groups = frame[["variant", "fusion_norm", "feedback"]].drop_duplicates()
    for label, *key in groups.itertuples(index=False):
        norms = (str(key[0]), str(key[1]))
        if norms in _VARIANTS and norms not in used:
            used.add(norms)
            colour, dash, marker = _VARIANTS[norms]
        else:
            colour, dash, marker = next(spare)
        out[str(label)] = line_style(colour, dash, marker, hollow=norms[1] == "pre_norm")
    return out


def _trained_to(frame: pd.DataFrame) -> list[int]:
    return sorted({int(t) for t in frame["ttt"].dropna() if t <= frame["depth"].max()})


def _mark_training(ax: Axes, frame: pd.DataFrame) -> None:
    """A vertical line after the last depth that training unrolled."""
    for ttt in _trained_to(frame):
        ax.axvline(ttt, color="0.45", linewidth=0.8, zorder=0.5)
        ax.annotate(
            f"trained to {ttt}",
            (ttt, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -1),
            textcoords="offset points",
            va="top",
            fontsize=6,
            color="0.35",
        )


def _sink_axes(ax: Axes, frame: pd.DataFrame) -> None:
    draw_lines(ax, frame, "variant", _styles(frame))
    even = frame.drop_duplicates("depth")
    if even["even"].notna().any():
        label = "even share of one key"
        ax.plot(even["depth"], even["even"], color="0.6", linewidth=0.8, label=label)
    ax.set_ylabel("attention on the sink")
    ax.set_ylim(bottom=0)
    depth_axis(ax, frame)


def _rms_axes(ax: Axes, frame: pd.DataFrame, state: str) -> None:
    part = frame[frame["state"] == state]
    draw_lines(ax, part, "variant", _styles(frame))
    ax.set_yscale("log")
    _plain_log_ticks(ax)
    ax.set_ylabel(f"RMS {_STATES[state]}")
    depth_axis(ax, part)


def _plain_log_ticks(ax: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = ax.get_ylim()
    decades = np.log10(high / low)
    subs: Sequence[float] = (1, 2, 5) if decades < 2.5 else (1,)
    if decades < 0.6:
        subs = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _acceptance_axes(ax: Axes, frame: pd.DataFrame) -> None:
    draw_lines(ax, frame, "variant", _styles(frame))
    ax.set_ylabel("conditional acceptance")
    ax.set_ylim(0, 1)
    _mark_training(ax, frame)
    depth_axis(ax, frame)


def _accuracy_axes(ax: Axes, frame: pd.DataFrame) -> None:
    draw_lines(ax, frame, "variant", _styles(frame))
    ax.set_ylabel("forced accuracy")
    ax.set_ylim(bottom=0)
    _mark_training(ax, frame)
    depth_axis(ax, frame)


def _layers_axes(ax: Axes, frame: pd.DataFrame, measure: str) -> None:
    part = frame[frame["measure"] == measure]
    styles = _styles(frame)
    layers = sorted(part["layer"].unique())
    width = 0.7 / len(styles)
    for i, (label, style) in enumerate(styles.items()):
        rows = part[part["variant"] == label]
        x = rows["layer"].to_numpy(float) + (i - (len(styles) - 1) / 2) * width
        spread = np.abs(rows[["low", "high"]].to_numpy(float).T - rows["value"].to_numpy(float))
        ax.errorbar(
            x,
            rows["value"],
            yerr=None if np.isnan(spread).all() else spread,
            label=label,
            elinewidth=0.8,
            capsize=1.5,
            **{**style, "linestyle": "none"},
        )
    if measure == "share":
        ax.axhline(1 / len(layers), color="0.6", linewidth=0.8)
        ax.axhline(0, color="0.3", linewidth=0.6)
        ax.set_ylabel("share of the fused input")
    else:
        ax.set_yscale("log")
        _plain_log_ticks(ax)
        what = "captured state" if measure == "rms_in" else "captured state after its norm"
        ax.set_ylabel(f"RMS of the {what}")
    names = part.dropna(subset="boundary").groupby("layer")["boundary"].unique()
    ax.set_xticks(layers, ["/".join(f"{b:.0f}" for b in names[layer]) for layer in layers])
    ax.set_xlabel("boundary (blocks)")
    ax.grid(axis="x", visible=False)


def _single(
    axes: Callable[[Axes, pd.DataFrame], None], extra: int = 0
) -> Callable[[Figure, pd.DataFrame], None]:
    def draw(figure: Figure, frame: pd.DataFrame) -> None:
        rows, columns = legend_rows(frame["variant"].nunique() + extra, figure, 2, 5)
        ax = axes_grid(figure, 1, 1, legend=rows)[0, 0]
        axes(ax, frame)
        legend_below(figure, ax, columns)

    return draw


def _pair(
    left: Callable[[Axes, pd.DataFrame], None], right: Callable[[Axes, pd.DataFrame], None]
) -> Callable[[Figure, pd.DataFrame], None]:
    """Two panels side by side, or one above the other in one column."""

    def draw(figure: Figure, frame: pd.DataFrame) -> None:
        rows, columns = legend_rows(frame["variant"].nunique(), figure, 2, 4)
        narrow = figure.get_figwidth() < 5
        panels = axes_grid(figure, *((2, 1) if narrow else (1, 2)), legend=rows).ravel()
        left(panels[0], frame)
        right(panels[1], frame)
        if narrow:
            panels[0].set_xlabel("")
            panels[0].tick_params(labelbottom=False)
        legend_below(figure, panels[0], columns)

    return draw


def _regions_axes(ax: Axes, frame: pd.DataFrame) -> None:
    present = frame.groupby("region")["value"].max()
    styles = {}
    for region, (name, colour, dash, marker) in REGION_STYLE.items():
        if region in present and present[region] > 1e-6:
            styles[name] = line_style(colour, dash, marker, hollow=False)
    named = frame.assign(region=frame["region"].map({k: v[0] for k, v in REGION_STYLE.items()}))
    draw_lines(ax, named, "region", styles)
    ax.set_ylim(bottom=0)
    depth_axis(ax, frame)


def _draw_regions(figure: Figure, frame: pd.DataFrame) -> None:
    variants = list(dict.fromkeys(frame["variant"]))
    columns = region_columns(len(variants), figure.get_figwidth())
    legend, legend_columns = legend_rows(5, figure, 3, 6)
    grid = axes_grid(
        figure, -(-len(variants) // columns), columns, legend=legend, shared=True, titles=True
    )
    for i, ax in enumerate(grid.flat):
        if i >= len(variants):
            ax.set_visible(False)
            continue
        _regions_axes(ax, frame[frame["variant"] == variants[i]])
        ax.set_title(variants[i], pad=3)
        if i % columns == 0:
            ax.set_ylabel("attention mass")
        if i + columns < len(variants):
            ax.set_xlabel("")
    # Each panel has set its own limits, and shared axes would keep those of the first.
    grid.flat[0].set_ylim(0, 1.05 * frame[["value", "high"]].max().max())
    legend_below(figure, grid.flat[0], legend_columns)


def _draw_table(figure: Figure, frame: pd.DataFrame) -> None:
    columns = list(dict.fromkeys(frame["measure"]))
    shown = [c for c in columns if "pooled" not in c and c != "accepted drafts"]
    if figure.get_figwidth() < 5:
        deepest = [c for c in shown if c.startswith("forced")][-1:]
        shown = [c for c in shown if c.endswith(("length", ", state")) or c in deepest]
    names = list(dict.fromkeys(zip(frame["block"], frame["variant"], strict=True)))
    ax = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    ax.set_axis_off()
    left, line = (1.9, 1.0) if figure.get_figwidth() > 5 else (1.5, 1.0)
    effects_from = next((i for i, (block, _) in enumerate(names) if block == "effect"), len(names))
    gap = 0.5 if effects_from < len(names) else 0.0
    bottom = len(names) * line + gap
    ax.set_xlim(0, left + len(shown))
    ax.set_ylim(bottom + 0.1, -1.3)
    heads = [c.replace("forced accuracy ", "forced\naccuracy\n") for c in shown]
    heads = [h.replace("acceptance length", "acceptance\nlength") for h in heads]
    heads = [h.replace(", ", ",\n").replace("growth ", "growth\n") for h in heads]
    heads = [h.replace("own drafts", "own\ndrafts") for h in heads]
    for j, head in enumerate(heads):
        ax.text(left + j + 0.5, -0.15, head, ha="center", va="bottom", fontsize=6)
    for y, weight in ((-1.3, 1.0), (0.0, 0.6), (bottom, 1.0)):
        ax.axhline(y, color="black", linewidth=weight, clip_on=False)
    rows = {(r["block"], r["variant"], r["measure"]): r for r in frame.to_dict("records")}
    for i, (block, name) in enumerate(names):
        y = i * line + (gap if i >= effects_from else 0.0)
        if i == effects_from:
            ax.axhline(y - gap / 2 + 0.05, color="black", linewidth=0.4)
        ax.text(0, y + 0.5, _wrapped(name), va="center", fontsize=6)
        for j, measure in enumerate(shown):
            row = rows.get((block, name, measure))
            if row is None:
                continue
            e = Estimate(row["value"], row["low"], row["high"], row["prompts"], row["unit"])
            value, _, interval = e.short.partition(" ")
            strong = "bold" if block == "effect" and e.differs else "normal"
            x = left + j + 0.5
            ax.text(x, y + 0.34, value, ha="center", va="center", fontsize=6.5, fontweight=strong)
            ax.text(x, y + 0.72, interval, ha="center", va="center", fontsize=4.6, color="0.25")


def _wrapped(name: str) -> str:
    if len(name) <= 22:
        return name
    for mark in (" x ", ", ", "+", " "):
        if mark in name:
            head, tail = name.split(mark, 1)
            return f"{head}{mark.rstrip()}\n{tail}"
    return name


def _fixed(column: float, page: float) -> Callable[[pd.DataFrame, float], float]:
    return lambda frame, width: column if width < 5 else page


def _table_height(frame: pd.DataFrame, width: float) -> float:
    rows = len(frame[["block", "variant"]].drop_duplicates())
    return 0.5 + 0.3 * rows


def _first_layer(frame: pd.DataFrame) -> str:
    return f" Of the first of {frame['layers'].max()} layers." if "layers" in frame else ""


def _vertical(frame: pd.DataFrame) -> str:
    marked = _trained_to(frame)
    return "; the vertical line marks the depth that training unrolled to" if marked else ""


FIGURES: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        FigureSpec(
            "regions_by_depth",
            "Attention by region and depth",
            regions_data,
            _draw_regions,
            PAGE,
            regions_height,
            lambda frame: (
                "Softmax mass of the drafter's query, mean over heads; regions sum to 1."
                + _first_layer(frame)
            ),
        ),
        FigureSpec(
            "sink_by_depth",
            "Attention on the sink by depth",
            sink_data,
            _single(_sink_axes, extra=1),
            COLUMN,
            _fixed(2.5, 2.8),
            lambda frame: (
                (
                    "Grey: what one key would get if attention were even."
                    if frame["even"].notna().any()
                    else "Mean over heads."
                )
                + _first_layer(frame)
            ),
        ),
        FigureSpec(
            "rms_by_depth",
            "Size of the state by depth",
            rms_data,
            _pair(partial(_rms_axes, state="state_pre"), partial(_rms_axes, state="feedback")),
            PAGE,
            _fixed(3.9, 2.5),
            "Geometric mean of ||x||/sqrt(H), before the final norm and as fed back.",
        ),
        FigureSpec(
            "layer_shares",
            "Captured states in the fused input",
            shares_data,
            _pair(partial(_layers_axes, measure="share"), partial(_layers_axes, measure="rms_in")),
            PAGE,
            _fixed(3.9, 2.5),
            "Signed share of each captured state in the fused input (grey: even share), and its "
            "RMS before any norm.",
            needs="fused",
        ),
        FigureSpec(
            "conditional_acceptance",
            "Conditional acceptance by depth",
            acceptance_data,
            _single(_acceptance_axes),
            COLUMN,
            _fixed(2.5, 2.8),
            lambda frame: (
                "P(draft d accepted | drafts 1..d-1 accepted), pooled over opportunities, n/a "
                f"below {FEWEST} of them{_vertical(frame)}."
            ),
            needs="free",
        ),
        FigureSpec(
            "forced_accuracy",
            "Forced accuracy by depth",
            accuracy_data,
            _single(_accuracy_axes),
            COLUMN,
            _fixed(2.5, 2.8),
            lambda frame: f"Top-1 accuracy with the text's own tokens as input{_vertical(frame)}.",
            needs="forced",
        ),
        FigureSpec(
            "table_2x2",
            "Fusion norm and feedback apart",
            table_data,
            _draw_table,
            PAGE,
            _table_height,
            lambda frame: (
                "Above: means with intervals. Below: main effects and interaction (differences; "
                "ratios for growth); bold where the interval excludes no effect."
                if (frame["block"] == "effect").any()
                else "Means with intervals."
            ),
        ),
    )
}


def spec(name: str) -> FigureSpec:
    """The figure called ``name``. Raises ConfigError with the known names."""
    if name not in FIGURES:
        raise ConfigError(f"there is no figure {name!r}", remedy=f"Figures: {', '.join(FIGURES)}.")
    return FIGURES[name]


def available(tables: RunDirectory | Tables) -> dict[str, str]:
    """Figures by name with the reason why one cannot be drawn, or an empty string."""
    tables = load(tables)
    there = {*modes(tables), *(("fused",) if len(tables.fused) else ())}
    return {
        name: ""
        if not f.needs or f.needs in there
        else f"the run has no {f.needs} {_kind(f.needs)}"
        for name, f in FIGURES.items()
    }


def _kind(need: str) -> str:
    return "inputs" if need == "fused" else "chains"


def save_figure(
    run: RunDirectory | Tables,
    name: str,
    out: str | Path,
    *,
    width: float | None = None,
    kind: TextKind | None = None,
) -> dict[str, Path]:
    """Write ``name`` as PNG (300 dpi), PDF and CSV (exactly what is drawn) into folder ``out``.

    The same tables give the same bytes. Returns the paths by suffix. Raises RunError when
    the run has no such numbers, ResourceError when the disk is full.
    """
    frame = spec(name).data(load(run), kind)
    return save_frame(spec(name), frame, out, width=width)


def save_figures(
    run: RunDirectory | Tables, out: str | Path, *, processes: int = 1
) -> dict[str, dict[str, Path]]:
    """Every figure that the run has numbers for; see :func:`save_figure`.

    An experiment with applied conditions is drawn without them.

    ``processes`` of them are forked to share the work: for callers that hold no threads.
    """
    tables = without_conditions(load(run))
    names = [name for name, reason in available(tables).items() if not reason]
    if processes == 1:
        return {name: save_figure(tables, name, out) for name in names}

    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Loaded once, before the fork.
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf  # noqa: F401

    wide_first = sorted(names, key=lambda name: (-FIGURES[name].width, name))
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(processes, mp_context=fork) as pool:
            paths = list(pool.map(partial(save_figure, tables, out=out), wide_first))
    except BrokenProcessPool:
        raise ResourceError(
            "a process that drew figures died",
            got="killed, as the system does when memory runs out",
            remedy="Free memory and draw them again: the tables are whole.",
        ) from None
    drawn = dict(zip(wide_first, paths, strict=True))
    return {name: drawn[name] for name in names}


class Plots:
    """Figures for a notebook: every method draws on ``ax`` and returns it.

    Without ``ax`` the current pyplot axes are used, as in seaborn; where they hold something, a
    new figure: two measures share no axis.
    """

    def __init__(self, run: RunDirectory | Tables, kind: TextKind | None = None) -> None:
        self._tables = load(run)
        self._kind = kind

    def _ax(self, ax: Axes | None) -> Axes:
        if ax is not None:
            return ax
        import matplotlib.pyplot as plt

        return plt.subplots()[1] if plt.gca().has_data() else plt.gca()

    def _draw(
        self,
        ax: Axes | None,
        data: Callable[..., pd.DataFrame],
        draw: Callable[..., None],
        *args: Any,
    ) -> Axes:
        ax = self._ax(ax)
        draw(ax, data(self._tables, self._kind), *args)
        ax.legend()
        return ax

    def sink_by_depth(self, ax: Axes | None = None) -> Axes:
        return self._draw(ax, sink_data, _sink_axes)

    def rms_by_depth(self, ax: Axes | None = None, *, state: str = "state_pre") -> Axes:
        """``state`` is ``state_pre`` (before the final norm) or ``feedback``."""
        if state not in _STATES:
            raise ConfigError("state must be state_pre or feedback", got=state)
        return self._draw(ax, rms_data, _rms_axes, state)

    def regions_by_depth(self, ax: Axes | None = None, *, variant: str | None = None) -> Axes:
        """Regions of one variant, the first of the run by default."""

        def one(tables: Tables, kind: TextKind | None) -> pd.DataFrame:
            frame = regions_data(tables, kind)
            names = list(dict.fromkeys(frame["variant"]))
            chosen = names[0] if variant is None else variant
            if chosen not in names:
                raise ConfigError(
                    "the run has no such variant", got=chosen, remedy=f"It has {', '.join(names)}."
                )
            return frame[frame["variant"] == chosen]

        return self._draw(ax, one, _regions_axes)

    def layer_shares(self, ax: Axes | None = None) -> Axes:
        return self._draw(ax, shares_data, _layers_axes, "share")

    def conditional_acceptance(self, ax: Axes | None = None) -> Axes:
        return self._draw(ax, acceptance_data, _acceptance_axes)

    def forced_accuracy(self, ax: Axes | None = None) -> Axes:
        return self._draw(ax, accuracy_data, _accuracy_axes)
