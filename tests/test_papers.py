"""Committed results: published from finished runs, drawn from their tables, proven current."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from synthetic_run import cell_row, make_run

from driftlab.errors import RunError
from driftlab.papers import committed
from driftlab.results.figures import load, save_figure
from driftlab.results.records import SMALL, RunDirectory

SMALL_RUN: dict[str, Any] = {
    "prompts": ("p0", "p1", "p2"),
    "seeds": (0, 1),
    "depth": 4,
    "anchors": 4,
    "texts": ("sampled",),
}


@pytest.fixture(scope="module", autouse=True)
def _one_figure() -> Iterator[None]:
    """All figures take seconds to draw; one shows what happens to a file."""

    def draw(run: RunDirectory, out: str | Path) -> dict[str, dict[str, Path]]:
        return {"forced_accuracy": save_figure(load(run), "forced_accuracy", out)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committed, "save_figures", draw)
        yield


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    make_run(folder / "run", manifest={"name": "first"}, **SMALL_RUN)
    committed.publish(folder / "run", folder / "paper" / "first")
    return folder / "paper"


@pytest.fixture
def item(paper: Path, tmp_path: Path) -> Path:
    """A copy of the published item, to be spoiled."""
    return Path(shutil.copytree(paper, tmp_path / "paper")) / "first"


def test_an_item_holds_the_small_tables_and_their_figures(paper: Path) -> None:
    tables = paper / "first" / "tables"
    names = {f"{name}.parquet" for name in SMALL} | {"manifest.json"}
    assert {p.name for p in tables.iterdir()} == names
    drawn = {p.suffix for p in (paper / "first" / "figures").iterdir()}
    assert drawn == {".png", ".pdf", ".csv"}
    assert committed.is_paper(paper)
    assert not committed.is_paper(tables)
    assert committed.items(paper) == [paper / "first"]


def test_what_was_just_published_is_current(paper: Path) -> None:
    assert committed.draw(paper, check=True) == []


@pytest.mark.parametrize("spoil", ["number", "csv", "png", "cut", "gone", "extra"])
def test_every_stale_file_is_named(item: Path, spoil: str) -> None:
    figures = item / "figures"
    csv, png = figures / "forced_accuracy.csv", figures / "forced_accuracy.png"
    expected = "first/figures/forced_accuracy.csv"
    if spoil == "number":
        frame = pd.read_csv(csv)
        column = next(c for c in frame.columns if frame[c].dtype == float and frame[c].abs().max())
        frame[column] = frame[column] * 1.01
        frame.to_csv(csv, index=False)
    elif spoil == "csv":
        csv.write_bytes(b"\xff\x00,")
    elif spoil == "png":
        with Image.open(png) as drawn:
            drawn.convert("L").point(lambda grey: 255 - grey).save(png)
        expected = "first/figures/forced_accuracy.png"
    elif spoil == "cut":
        png.write_bytes(png.read_bytes()[:300])
        expected = "first/figures/forced_accuracy.png"
    elif spoil == "gone":
        csv.unlink()
    else:
        (figures / "old.png").write_bytes(b"")
        expected = "first/figures/old.png (no table gives it)"
    assert committed.draw(item.parent, check=True) == [expected]


def test_a_table_that_is_not_the_manifest_s_is_named(item: Path) -> None:
    table = item / "tables" / "cells.parquet"
    run = RunDirectory.open(item / "tables")
    assert committed.changed_tables(run) == []
    table.write_bytes(table.read_bytes() + b" ")
    assert committed.changed_tables(run) == ["cells.parquet"]


def test_drawing_again_mends_and_writes_nothing_else(item: Path) -> None:
    before = sorted(p.name for p in item.rglob("*"))
    (item / "figures" / "forced_accuracy.csv").unlink()
    assert committed.draw(item.parent) == []
    assert sorted(p.name for p in item.rglob("*")) == before
    assert committed.draw(item.parent, check=True) == []


def test_another_experiment_is_not_replaced(item: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other", manifest={"name": "second"}, **SMALL_RUN)
    kept = (item / "tables" / "manifest.json").read_bytes()
    with pytest.raises(RunError, match="another experiment"):
        committed.publish(tmp_path / "other", item)
    assert (item / "tables" / "manifest.json").read_bytes() == kept
    assert json.loads(kept)["name"] == "first"


def test_a_run_takes_no_published_item(paper: Path, tmp_path: Path) -> None:
    """Its figures would be another run's."""
    run, other = paper.parent / "run", tmp_path / "other"
    make_run(other, **SMALL_RUN)
    for item in (run, run / "figures", other):
        with pytest.raises(RunError, match="lies in the run"):
            committed.publish(run, item)
    assert not (run / "tables").exists() and not (other / "figures").exists()


def test_unfinished_runs_are_not_published(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, finish=False, **SMALL_RUN)
    with pytest.raises(RunError, match="is not there"):
        committed.publish(run, tmp_path / "item")
    with RunDirectory.create(run, RunDirectory.open(run).manifest) as owner:
        owner.write_cell(cell_row("none", "pre_norm", 1, status="failed: inf"))
        owner.finish()
    with pytest.raises(RunError, match=r"not done \(got none\+pre_norm/s1\)"):
        committed.publish(run, tmp_path / "item")
    assert not (tmp_path / "item").exists()
