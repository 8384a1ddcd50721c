"""Figures draw what the CSV holds, the same bytes every time, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import synthetic_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from driftlab.errors import ConfigError, DataError, ResourceError, RunError
from driftlab.results import drawn, figures
from driftlab.results.answers import basis
from driftlab.results.drawing import save_frame
from driftlab.results.figures import (
    FEWEST,
    FIGURES,
    Plots,
    available,
    save_figure,
    save_figures,
)
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.slices import Group, TextKind, groups, modes, take, text_kinds
from driftlab.results.stats import estimate

NAMES = list(FIGURES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return synthetic_run.make_run(
        tmp_path_factory.mktemp("run") / "r",
        seeds=(0, 1),
        prompts=synthetic_run.prompt_names(5),
        loops=("story-03",),
        depth=8,
    )


@pytest.fixture(scope="module")
def tables(run: RunDirectory) -> Tables:
    return run.tables()


def smaller(tables: Tables, keep: pd.Series | np.ndarray) -> Tables:
    """``tables`` with part of its depths."""
    return replace(tables, depths=tables.depths[np.asarray(keep, bool)], cache={})


def lines(figure: Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in figure.axes[0].lines
    }


# --- slices -----------------------------------------------------------------------------------


def test_the_headline_text_is_sampled_and_kinds_are_never_mixed(tables: Tables) -> None:
    assert text_kinds(tables) == (TextKind("sampled", 1.0), TextKind("greedy"))
    assert modes(tables) == ("free", "forced")
    piece = take(tables, "free")
    assert set(piece.frame["text"]) == {"sampled"}
    assert set(piece.frame["mode"]) == {"free"}
    assert "sampled text (temperature 1)" in piece.basis
    greedy = take(tables, "free", TextKind("greedy"))
    assert set(greedy.frame["text"]) == {"greedy"}


def test_settings_of_training_are_read_from_a_variant_s_name() -> None:
    def group(variant: str) -> Group:
        return Group(variant, variant, "none", "pre_norm", "raw", False, 3, "trained", "")

    assert group("none+pre_norm+lr1e+06x").lr_scale == 1e6
    both = group("none+pre_norm+aligned1e-05+steps1e+02x+lr1e+06x")
    assert (both.alignment, both.steps_scale, both.lr_scale) == (1e-5, 100, 1e6)
    for name in ("mine", "lrx", "lrnone+pre_norm", "steps", "none+pre_norm"):
        assert (group(name).steps_scale, group(name).lr_scale) == (1, 1), name


def test_looping_texts_are_left_out_and_counted(tables: Tables) -> None:
    piece = take(tables, "free")
    assert "story-03" not in piece.prompts
    assert piece.texts[""].left_out == 1
    assert "1 looping text left out" in piece.basis
    every = replace(tables, prompts=tables.prompts.assign(loops=True), cache={})
    piece = take(every, "free")
    assert len(piece.prompts) == 5
    assert piece.texts[""].all_loop and piece.texts[""].left_out == 0
    assert "all texts loop" in piece.basis


def test_texts_too_short_for_the_depth_are_counted(tables: Tables) -> None:
    rows = tables.prompts[tables.prompts["text"] == take(tables, "free").kind.text]
    short = rows.iloc[:2].assign(prompt=["s-1", "s-2"], n_anchors=0, loops=True)
    more = replace(tables, prompts=pd.concat([tables.prompts, short]), cache={})
    piece = take(more, "free")
    assert (piece.texts[""].unmeasured, piece.texts[""].left_out) == (2, 1)
    assert "2 texts too short for the depth" in piece.basis
    assert basis(more).endswith("95% bootstrap intervals over seeds and prompts, percentile")


def test_cubes_hold_each_row_where_it_belongs(tables: Tables) -> None:
    piece = take(tables, "forced")
    assert piece.cube("sink").shape == (4, 2, 4, 8)
    row = piece.frame.sample(1, random_state=0).iloc[0]
    cell = tables.cells.set_index("cell").loc[row["cell"]]
    group = next(g for g in piece.groups if g.label == cell["variant"])
    sample = piece.mean(group, "rms_state_pre", int(row["depth"]))
    i, j = piece.seeds.index(int(cell["seed"])), piece.prompts.index(str(row["prompt"]))
    assert sample.values[i, j] == row["rms_state_pre"]


def test_slopes_are_least_squares(tables: Tables) -> None:
    piece = take(tables, "free")
    group = piece.groups[0]
    ours = piece.slope(group, "log_rms_state_pre").values[0, 0]
    y = piece.cube("log_rms_state_pre")[0, 0, 0]
    assert ours == pytest.approx(np.polyfit(np.arange(1, 9), y, 1)[0])
    value = estimate(piece.slope(group, "log_rms_state_pre"))
    assert np.exp(value.value) == pytest.approx(synthetic_run.GROWTH["pre_norm"], rel=0.01)


def test_acceptance_of_a_slice_equals_the_steps(run: RunDirectory, tables: Tables) -> None:
    steps = run.table("steps", filters=[("mode", "==", "free"), ("text", "==", "sampled")])
    steps = steps[(steps["prompt"] != "story-03") & (steps["cell"] == "none+pre_norm/s1")]
    rounds = steps.pivot_table(
        index=["prompt", "anchor"], columns="depth", values="accepted", aggfunc="first"
    ).astype(bool)
    piece = take(tables, "free")
    seed = piece.seeds.index(1)
    sample = piece.accepted_drafts(piece.groups[0])
    by_prompt = rounds.sum(axis=1).groupby("prompt").mean()
    np.testing.assert_allclose(sample.values[seed], by_prompt)
    conditional = piece.conditional(piece.groups[0], 3)
    assert conditional.weights is not None
    assert conditional.weights[seed].sum() == rounds[2].sum()
    rate = (conditional.values * conditional.weights)[seed].sum() / conditional.weights[seed].sum()
    assert rate == pytest.approx(rounds[3].sum() / rounds[2].sum())


def test_cells_that_did_not_finish_are_left_out(tables: Tables) -> None:
    cells = tables.cells.copy()
    cells["status"] = cells["status"].astype(str)
    cells.loc[cells["variant"] == "none+pre_norm", "status"] = "failed: no memory"
    found, kept = groups(replace(tables, cells=cells, cache={}))
    assert "none+pre_norm" not in [g.label for g in found]
    assert len(kept) == 6


def test_two_cells_of_one_seed_are_refused(tables: Tables) -> None:
    with pytest.raises(DataError, match=r"none\+pre_norm/s0, none\+pre_norm/s1|same variant"):
        groups(replace(tables, cells=tables.cells.assign(seed=0), cache={}))


def test_applied_cells_are_labelled_apart(tables: Tables) -> None:
    cells = tables.cells.copy()
    late = cells["seed"] == 1
    cells["condition"] = np.where(late, "pin", "")
    cells["axis"] = np.where(late, "applied", "trained")
    found, _ = groups(replace(tables, cells=cells, cache={}))
    labels = [g.label for g in found]
    assert "none+pre_norm" in labels
    assert "none+pre_norm, pin (applied)" in labels
    assert all(label.endswith("(applied)") for label in labels[4:])


def test_training_lengths_are_told_apart(tables: Tables) -> None:
    cells = tables.cells.assign(ttt=np.where(tables.cells["seed"] == 1, 8, 2), seed=0)
    found, _ = groups(replace(tables, cells=cells, cache={}))
    assert {"none+pre_norm, TTT 2", "none+pre_norm, TTT 8"} <= {g.label for g in found}


# --- drawing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_written_with_its_data(tables: Tables, tmp_path: Path, name: str) -> None:
    parameters = matplotlib.rcParams.copy()
    paths = save_figure(tables, name, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.{s}" for s in ("png", "pdf", "csv")}
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert paths["pdf"].read_bytes().startswith(b"%PDF")
    frame = pd.read_csv(paths["csv"])
    assert {"value", "low", "high", "unit", "prompts", "seeds", "interval", "text"} <= {*frame}
    shown = frame[frame["value"].notna() & frame["low"].notna()]
    assert len(shown) > 3
    assert (shown["low"] <= shown["value"] + 1e-5).all()
    assert (shown["value"] <= shown["high"] + 1e-5).all()
    assert (shown["prompts"] == 4).all()
    assert (shown["seeds"] == 2).all()
    assert matplotlib.rcParams == parameters, "style leaked"
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )


def test_a_csv_that_is_read_back_draws_the_same_picture(tables: Tables, tmp_path: Path) -> None:
    figure = FIGURES["sink_by_depth"]
    frame = figure.data(tables, None)
    back = pd.read_csv(save_frame(figure, frame, tmp_path)["csv"], keep_default_na=False)
    for label, (x, y) in lines(figure.figure(back)).items():
        drawn = lines(figure.figure(frame))[label]
        np.testing.assert_array_equal(x, drawn[0])
        np.testing.assert_allclose(y, drawn[1], rtol=1e-5)


DRAW = """
import sys
from driftlab.results.records import RunDirectory
from driftlab.results.figures import save_figure
save_figure(RunDirectory.open(sys.argv[1]), "rms_by_depth", sys.argv[2])
"""


def test_figures_are_the_same_bytes_in_every_process(
    run: RunDirectory, tmp_path: Path, root: Path
) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "7", "MPLCONFIGDIR": matplotlib.get_cachedir()}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", DRAW, str(run.path), str(tmp_path / "other")],
        check=True,
        cwd=root,
        env=environment,
    )
    for path in save_figure(run, "rms_by_depth", tmp_path / "here").values():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes(), path.name
        assert b"CreationDate" not in path.read_bytes()


def test_the_lines_are_the_numbers(tables: Tables) -> None:
    figure = FIGURES["forced_accuracy"](tables)
    frame = FIGURES["forced_accuracy"].data(tables, None)
    drawn = lines(figure)
    for variant, rows in frame.groupby("variant"):
        x, y = drawn[str(variant)]
        np.testing.assert_array_equal(x, rows["depth"])
        np.testing.assert_array_equal(y, rows["value"])
    piece = take(tables, "forced")
    by_hand = piece.accuracy(piece.groups[0], 5).values.mean()
    assert drawn[piece.groups[0].label][1][4] == pytest.approx(by_hand)


def test_the_training_length_is_marked(tables: Tables) -> None:
    for name in ("forced_accuracy", "conditional_acceptance"):
        ax = FIGURES[name](tables).axes[0]
        assert [t.get_text() for t in ax.texts] == ["trained to 3"]
        assert any(np.all(np.asarray(line.get_xdata()) == 3) for line in ax.lines)
    no_length = pd.array([pd.NA] * len(tables.cells), dtype="Int16")
    unknown = replace(tables, cells=tables.cells.assign(ttt=no_length), cache={})
    assert not FIGURES["forced_accuracy"](unknown).axes[0].texts


def test_rms_is_a_geometric_mean_on_a_log_axis(tables: Tables) -> None:
    figure = FIGURES["rms_by_depth"](tables)
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log"]
    piece = take(tables, "free")
    expected = np.exp(piece.mean(piece.groups[0], "log_rms_state_pre", 8).values.mean())
    assert lines(figure)[piece.groups[0].label][1][-1] == pytest.approx(expected)


def test_drafters_side_by_side_have_boundaries_of_their_own(tables: Tables) -> None:
    deeper = tables.fused["cell"].astype(str).str.startswith("none+post_norm")
    boundary = tables.fused["boundary"] + deeper.astype(int)
    changed = replace(tables, fused=tables.fused.assign(boundary=boundary), cache={})
    frame = FIGURES["layer_shares"].data(changed, None)
    read = frame.groupby("variant")["boundary"].unique().map(list).to_dict()
    assert read["none+post_norm"] == [3, 16, 28]
    assert read["none+pre_norm"] == [2, 15, 27]
    ticks = [t.get_text() for t in FIGURES["layer_shares"].figure(frame).axes[0].get_xticklabels()]
    assert ticks == ["2/3", "15/16", "27/28"]


def test_few_opportunities_are_not_drawn(tables: Tables) -> None:
    frame = FIGURES["conditional_acceptance"].data(tables, None)
    few = frame["opportunities"] < FEWEST
    assert few.any()
    assert frame.loc[few, "value"].isna().all()
    assert frame.loc[~few, "value"].notna().all()
    assert (frame.loc[frame["depth"] == 1, "opportunities"] == 12 * 4 * 2).all()
    gone = tables.depths["depth"] > 5
    none = tables.depths.assign(n_opportunities=tables.depths["n_opportunities"].mask(gone, 0))
    frame = FIGURES["conditional_acceptance"].data(replace(tables, depths=none, cache={}), None)
    assert set(frame.loc[frame["depth"] > 5, "interval"]) == {"nothing measured"}
    caption = FIGURES["conditional_acceptance"].caption(frame)
    assert caption.endswith(
        "Interval: 95% bootstrap over seeds and prompts, 200 draws, percentile."
    )


def test_variants_look_different_without_colour(tables: Tables) -> None:
    ax = FIGURES["rms_by_depth"](tables).axes[0]
    shown = [line for line in ax.lines if "norm" in str(line.get_label())]
    dashes = {str(getattr(line, "_unscaled_dash_pattern", line.get_linestyle())) for line in shown}
    assert len(dashes) == len({line.get_marker() for line in shown}) == 4
    assert len({str(line.get_color()) for line in shown}) == 4


def test_a_variant_keeps_its_colour_when_others_are_missing(tables: Tables) -> None:
    alone = smaller(tables, tables.depths["cell"].astype(str).str.startswith("per_layer+post"))

    def colour(t: Tables) -> Any:
        ax = FIGURES["forced_accuracy"](t).axes[0]
        return next(ln.get_color() for ln in ax.lines if ln.get_label() == "per_layer+post_norm")

    assert colour(alone) == colour(tables)


@pytest.mark.parametrize("name, width", [*((n, 3.3) for n in NAMES), ("table_2x2", 6.9)])
def test_nothing_sticks_out_of_the_page(tables: Tables, name: str, width: float) -> None:
    figure = FIGURES[name](tables, width=width)
    assert figure.get_figwidth() == width
    FigureCanvasAgg(figure).draw()
    box = figure.get_tightbbox()
    assert box.x0 >= -0.01
    assert box.y0 >= -0.01
    assert box.x1 <= width + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01


def test_regions_fill_the_attention(tables: Tables) -> None:
    frame = FIGURES["regions_by_depth"].data(tables, None)
    totals = frame.groupby(["variant", "depth"])["value"].sum()
    np.testing.assert_allclose(totals, 1, atol=1e-6)
    figure = FIGURES["regions_by_depth"](tables)
    assert [ax.get_title() for ax in figure.axes] == list(dict.fromkeys(frame["variant"]))
    labels = {str(line.get_label()) for line in figure.axes[0].lines}
    assert labels == {"sink", "prompt", "generated", "draft", "self"}, "null is absent here"


def test_captions_say_what_the_numbers_are(tables: Tables) -> None:
    for name, figure in FIGURES.items():
        caption = figure.caption(figure.data(tables, None))
        for part in (
            "sampled text (temperature 1)",
            "4 prompts x 2 seeds",
            "draws, percentile",
        ):
            assert part.lower() in caption.lower(), name
        assert "1 looping text left out" in caption


# --- runs of other shapes ---------------------------------------------------------------------


def test_one_drafter_one_seed_one_prompt(tmp_path: Path) -> None:
    run = synthetic_run.make_run(
        tmp_path / "r",
        variants=[("none", "pre_norm")],
        seeds=(4,),
        prompts=("only",),
        texts=("given",),
        depth=3,
    )
    tables = run.tables()
    for name in NAMES:
        FigureCanvasAgg(FIGURES[name](tables)).draw()
    frame = FIGURES["forced_accuracy"].data(tables, None)
    assert frame["low"].isna().all(), "one prompt has no interval"
    assert frame["value"].notna().all()
    assert set(frame["text"]) == {"given text"}
    assert FIGURES["forced_accuracy"].caption(frame).endswith("Interval: one prompt has none.")


def test_many_variants_and_depths(tables: Tables) -> None:
    frame = FIGURES["forced_accuracy"].data(tables, None)
    copies = []
    for ttt in (1, 2, 4, 8, 12):
        part = frame.copy()
        part["variant"], part["ttt"] = part["variant"] + f", TTT {ttt}", ttt
        part["depth"] = part["depth"] * 8
        copies.append(part)
    ax = FIGURES["forced_accuracy"].figure(pd.concat(copies)).axes[0]
    assert len(ax.get_xticks()) <= 10
    assert len(ax.texts) == 5


def test_what_was_not_measured_is_not_drawn(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = smaller(tables, tables.depths["mode"] == "free")
    free = replace(free, fused=free.fused.iloc[:0], cache={})
    reasons = available(free)
    assert reasons["forced_accuracy"] == "the run has no forced chains"
    assert reasons["layer_shares"] == "the run has no fused inputs"
    assert [n for n, r in reasons.items() if r] == ["layer_shares", "forced_accuracy"]
    drawn: list[str] = []
    monkeypatch.setattr("driftlab.results.figures.save_figure", lambda _, n, __: drawn.append(n))
    assert list(save_figures(free, "unused")) == drawn
    assert drawn == [n for n, r in reasons.items() if not r]
    with pytest.raises(RunError, match="forced chains on sampled text"):
        FIGURES["forced_accuracy"](free)


def test_figures_are_drawn_again_only_where_something_changed(
    tables: Tables, run: RunDirectory, tmp_path: Path
) -> None:
    own = RunDirectory.open(shutil.copytree(run.path, tmp_path / "run"))
    folder = own.path / "figures"
    assert drawn.unchanged(own, folder) == {}
    made = {"forced_accuracy": save_figure(tables, "forced_accuracy", folder)}
    drawn.note(own, folder, made)
    assert drawn.unchanged(own, folder) == made
    picture = made["forced_accuracy"]["png"].read_bytes()
    made["forced_accuracy"]["png"].write_bytes(picture + b" ")
    assert drawn.unchanged(own, folder) == {}  # somebody painted over it
    made["forced_accuracy"]["png"].write_bytes(picture)
    assert drawn.unchanged(own, folder) == made
    manifest = own.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"finished"', '"ended"'))
    assert drawn.unchanged(own, folder) == made  # no figure reads it
    with (own.path / "depths.parquet").open("ab") as table:
        table.write(b" ")
    assert drawn.unchanged(own, folder) == {}


def test_two_processes_draw_what_one_draws(tables: Tables, tmp_path: Path) -> None:
    two = save_figures(tables, tmp_path / "two", processes=2)
    for name in ("sink_by_depth", "forced_accuracy"):
        one = save_figure(tables, name, tmp_path / "one")
        assert {k: p.read_bytes() for k, p in one.items()} == {
            k: p.read_bytes() for k, p in two[name].items()
        }
    assert list(two) == [name for name, reason in available(tables).items() if not reason]


def test_unknown_figures_are_named(tables: Tables, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no figure 'rms'(.|\n)*rms_by_depth"):
        save_figure(tables, "rms", tmp_path)


# --- notebooks --------------------------------------------------------------------------------


def test_plots_draw_on_given_axes(tables: Tables) -> None:
    plots = Plots(tables)
    for name in (
        "sink_by_depth",
        "rms_by_depth",
        "regions_by_depth",
        "layer_shares",
        "conditional_acceptance",
        "forced_accuracy",
    ):
        ax = Figure().subplots()
        assert getattr(plots, name)(ax=ax) is ax
        assert ax.lines or ax.containers, name
        assert ax.get_legend() is not None
        assert ax.get_ylabel() or name == "regions_by_depth"
    with pytest.raises(ConfigError, match="no such variant"):
        plots.regions_by_depth(ax=Figure().subplots(), variant="x")
    with pytest.raises(ConfigError, match="state_pre or feedback"):
        plots.rms_by_depth(ax=Figure().subplots(), state="x")


def test_plots_use_the_current_axes_by_default(run: RunDirectory) -> None:
    import matplotlib.pyplot as plt

    try:
        ax = run.plot.sink_by_depth()
        assert ax is plt.gca()
        assert run.plot.forced_accuracy() is plt.gca() is not ax, "two measures on one axis"
    finally:
        plt.close("all")


LIGHT = """
import sys
import driftlab.results.records, driftlab.results.stats, driftlab.results.figures
import driftlab.results.report
heavy = {"torch", "transformers", "matplotlib", "seaborn", "scipy", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""


def test_importing_results_is_light(root: Path) -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, cwd=root)


def _killed(*_: object, **__: object) -> None:
    os.kill(os.getpid(), SIGKILL)


def test_a_drawing_process_that_is_killed_is_not_waited_for(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system does when memory runs out."""
    monkeypatch.setattr(figures, "save_figure", _killed)
    with pytest.raises(ResourceError, match="a process that drew figures died"):
        save_figures(tables, tmp_path, processes=2)


def test_a_matplotlibrc_of_the_user_s_changes_nothing(tables: Tables, tmp_path: Path) -> None:
    plain = save_figure(tables, "rms_by_depth", tmp_path / "plain")
    mine: dict[Any, Any] = {"font.size": 20, "savefig.bbox": "tight", "text.usetex": True}
    with matplotlib.rc_context(mine):  # as a matplotlibrc sets them
        other = save_figure(tables, "rms_by_depth", tmp_path / "other")
        assert matplotlib.rcParams["font.size"] == 20, "a notebook keeps its own"
    for suffix in ("png", "pdf"):
        assert plain[suffix].read_bytes() == other[suffix].read_bytes()
