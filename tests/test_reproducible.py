"""The same seed gives the same bytes, other threads and batches nearly the same numbers, and a
manifest is enough to run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import small

from driftlab import cli
from driftlab.data.corpus import Source, Writing, write_corpus
from driftlab.errors import RunError
from driftlab.experiment import run_experiment
from driftlab.experiment.redo import (
    cells_of,
    differences,
    experiment_of,
    manifest_of,
    resumed_by_other_code,
    verdict,
)
from driftlab.results.manifest import read_manifest
from driftlab.results.records import RunDirectory

VERSIONS, GIT = {"torch": "2.0", "python": "3.11"}, {"commit": "a" * 40, "changed": False}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = small.home() / "reproducible"
    path.mkdir()
    with small.shrunk():
        yield path
    shutil.rmtree(path, ignore_errors=True)


def test_from_scratch_the_same_bytes(folder: Path) -> None:
    """Target, texts, states, drafters and tables, in an empty cache, and from the manifest."""
    done = small.home() / "done"
    stored = RunDirectory.open(done).manifest
    spec, _, apart = experiment_of(done, stored["versions"], stored["git"], other_code=True)
    assert [a for a in apart if "changes that no commit holds" not in a] == []
    again = run_experiment(spec, folder / "run", cache=folder / "cache", quiet=True)
    assert small.contents(folder / "run") == small.contents(done)
    assert small.drafters(folder / "run") == small.drafters(done)
    assert verdict(stored, again) == (
        "3 of 3 inputs equal the first run's byte for byte. "
        "5 of 5 tables equal the first run's byte for byte."
    )
    text = (folder / "run" / "steps.parquet").read_bytes()
    again._role = "owner"
    again.update_manifest(tables={**stored["tables"], "steps": {"sha256": str(len(text))}})
    assert "not finished, and has no tables" in verdict({**stored, "tables": {}}, again)
    assert "4 of 5 tables equal the first run's byte for byte; others: steps." in verdict(
        stored, again
    )
    again.update_manifest(inputs={**stored["inputs"], "drafters": {"none+pre_norm/s0": "a"}})
    stored["inputs"]["drafters"] = {"none+pre_norm/s0": "b"}
    assert "3 of 4 inputs equal the first run's byte for byte; others: drafters." in verdict(
        stored, again
    )


# Measured over the small suite: see docs/reliability.md.
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def apart(a: pd.DataFrame, b: pd.DataFrame, keys: list[str]) -> float:
    """Largest difference in units of the tolerance."""
    both = a.merge(b, on=keys, validate="one_to_one", suffixes=("", "_other"))
    assert len(both) == len(a) == len(b)
    floats = [c for c in a if pd.api.types.is_float_dtype(a[c]) and c not in keys]
    x, y = (both[floats].to_numpy(), both[[f"{c}_other" for c in floats]].to_numpy())
    return float(np.nanmax(np.abs(x - y) / (ABSOLUTE + RELATIVE * np.abs(x))))


def test_threads_move_last_bits_only(folder: Path) -> None:
    """Forced chains: a free one may choose another draft where two are nearly as good."""
    run = run_experiment(
        small.spec("threads=2", 'axes.feedback=["pre_norm"]'), folder / "run", quiet=True
    )
    ours, theirs = run.steps, RunDirectory.open(small.home() / "done").steps
    ours = ours[ours["mode"] == "forced"]
    theirs = theirs[(theirs["mode"] == "forced") & theirs["cell"].isin(ours["cell"])]
    columns = [c for c in ours if c not in {"mode", "temperature"}]
    far = apart(ours[columns], theirs[columns], ["cell", "prompt", "text", "depth", "anchor"])
    print(f"{far:.3g} of the tolerance")
    assert far < 1


def test_the_batch_moves_no_greedy_text(tmp_path: Path) -> None:
    """Sampled texts are drawn by batches, whose size is a setting (docs/reliability.md)."""
    import pairs

    given = [
        Source(f"p{i}", "chat", tuple(pairs.ids(4 + i, seed=i).tolist()), None) for i in range(6)
    ]
    one, four = (
        write_corpus(pairs.target(), given, Writing(12, 0.0, 0, batch), tmp_path)
        for batch in (1, 4)
    )
    assert one == four and len(one) == 6
    again = [
        write_corpus(pairs.target(), given, Writing(12, 1.0, 0, 4), tmp_path / name)
        for name in "ab"
    ]
    assert again[0] == again[1] != four


def test_texts_probed_at_once_move_last_bits_only() -> None:
    import pairs
    import torch

    from driftlab.config import MeasureSpec
    from driftlab.engines.probe import probe

    made, spec = pairs.drafter(), MeasureSpec(depth=4, modes=("forced",))
    rows = [pairs.ids(n, seed=n).tolist() for n in (14, 20, 27)]
    texts = [pairs.as_text(r[:4], r[4:], f"p{i}") for i, r in enumerate(rows)]
    aux = [pairs.states(pairs.target(), torch.tensor([r]))[0] for r in rows]
    together = probe(made, texts, aux, spec)
    for text, states, both in zip(texts, aux, together, strict=True):
        (alone,) = probe(made, [text], [states], spec)
        for name, column in alone.tables["steps"].items():
            if column.dtype.kind == "f":
                np.testing.assert_allclose(
                    both.tables["steps"][name], column, rtol=RELATIVE, atol=ABSOLUTE
                )


# --- from a manifest ------------------------------------------------------------------------------


def manifest(**changes: Any) -> dict[str, Any]:
    return {"versions": VERSIONS, "git": GIT, **changes}


def test_differences_of_code_are_said() -> None:
    assert differences(manifest(), VERSIONS, GIT) == []
    other = {**VERSIONS, "torch": "2.1"}
    assert differences(manifest(), other, GIT) == ["torch 2.0 then, 2.1 now"]
    assert differences(manifest(), VERSIONS, {**GIT, "commit": "b" * 40}) == [
        "commit aaaaaaaaaaaa then, bbbbbbbbbbbb now"
    ]
    assert (
        "that no commit holds"
        in differences(manifest(git={**GIT, "changed": True}), VERSIONS, GIT)[0]
    )
    assert len(differences(manifest(git=None, versions=None), VERSIONS, GIT)) == 3


def test_a_resumption_by_other_code_is_said() -> None:
    at, torch = {"time": "T"}, {**VERSIONS, "torch": "2.1"}
    other = [at, {**at, "command": "c"}, {**at, "versions": torch}, {**at, "git": None}]
    other += [{**at, "git": {**GIT, "changed": True}}]
    said = "resumed at T by other code than began the run: "
    assert resumed_by_other_code(manifest(resumed=["T", *other])) == [
        f"{said}torch 2.0 and then 2.1",
        f"{said}commit aaaaaaaaaaaa and then None",
        f"{said}changes that no commit holds",
    ]
    assert resumed_by_other_code(manifest()) == []


def test_a_run_that_other_code_resumed_was_made_by_other_code(tmp_path: Path) -> None:
    stored = json.loads((small.home() / "done" / "manifest.json").read_text())
    code = stored["versions"], GIT
    resumed = [{"time": "T", "versions": {**code[0], "torch": "1.0"}}]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**stored, "git": GIT, "resumed": resumed}))
    with pytest.raises(RunError, match=r"was made by other code .got resumed at T by other code"):
        experiment_of(path, *code, other_code=False)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 3}', '{"config": {"measure": {}}}'])
def test_a_file_that_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json (cannot be read|is damaged|describes no)"):
        manifest_of(tmp_path)


EDITED: dict[str, Any] = {
    "stages": {"target": [1]},
    "stages.target": {"seconds": {}, "peak_mib": 1.0},
    "config.measure.bootstrap": [None],
    "config.analysis": "x",
    "inputs": [1],
    "tables.steps": "x",
    "tables.steps.sha256": None,
    "assumed": {"x": 1},
    "resolved": {"x": {"value": 1, "origin": "guessed", "where": "w"}},
    "versions": {"torch": 2},
    "warnings": [1],
    "resumed": [{"versions": {}}],
    "precision": {"dtype": "bfloat16", "positions": 9, "ties": 0},
    "merged": [{"name": "x"}],
    "registered": {"analysis": []},
    "config_hash": 3,
    "command": ["a"],
    "": [],
}


@pytest.mark.parametrize("place", EDITED)
def test_an_edited_manifest_is_damaged_by_name(place: str, tmp_path: Path) -> None:
    stored = json.loads((small.home() / "done" / "manifest.json").read_text())
    *path, last = place.split(".")
    node = stored
    for key in path:
        node = node[key]
    node[last] = EDITED[place]
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(stored if place else EDITED[place]))
    with pytest.raises(RunError, match="is damaged: ") as error:
        read_manifest(file)
    assert error.value.remedy and place in str(error.value)


def test_the_command_runs_again_and_refuses_other_code(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.home())
    monkeypatch.setattr(cli, "_finish", lambda run: None)
    stored = json.loads((small.home() / "done" / "manifest.json").read_text())
    path = folder / "manifest.json"

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["ablate", "--from", str(path), "--out", str(folder / "again"), *words])
        said = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, said.out, said.err

    stored["git"] = None
    stored["versions"] = {**stored["versions"], "torch": "1.0"}
    path.write_text(json.dumps(stored))
    code, _, err = call()
    assert code == 2
    assert "was made by other code (got torch 1.0 then, " in err and "--other-code" in err
    assert not (folder / "again").exists()
    shutil.copytree(small.home() / "done", folder / "again")
    code, out, _ = call("--other-code")
    assert code == 0
    assert "other code: torch 1.0 then" in out
    assert "5 of 5 tables equal the first run's byte for byte" in out
    assert "2 of 2 cells were there and not made again" in out
    assert call("--suite", "micro")[0] == 2


def test_only_cells_that_are_done_count_as_there(tmp_path: Path) -> None:
    assert cells_of(tmp_path / "none") == 0
    half = Path(shutil.copytree(small.home() / "done", tmp_path / "half"))
    assert cells_of(half) == 2
    run = RunDirectory.worker(half)
    row = run.row_of(small.CELLS[0])
    assert row is not None
    run.write_cell({**row, "status": "failed: no memory"})
    assert cells_of(half) == 1


def test_a_run_is_not_made_again_into_itself(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_finish", lambda run: None)
    out = folder / "mine"
    shutil.copytree(small.home() / "done", out)
    before = small.contents(out)
    for path in (out, out / "manifest.json", folder / "." / "mine"):
        words = ["ablate", "--from", str(path), "--other-code", "--out", str(out)]
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
        said = capsys.readouterr()
        assert "is the run that is to be made again" in said.err
        assert "byte for byte" not in said.out
    assert small.contents(out) == before


def test_an_edited_manifest_is_noticed(folder: Path) -> None:
    stored = json.loads((small.home() / "done" / "manifest.json").read_text())
    path = folder / "manifest.json"
    path.write_text(json.dumps(stored))
    code = stored["versions"], stored["git"]
    asked = experiment_of(path, *code, other_code=True, overrides=("train.steps=5",))[0]
    assert asked.train.steps == 5, "what the command line changes is no edit"
    stored["config"]["train"]["steps"] = 400
    path.write_text(json.dumps(stored))
    if not differences(stored, *code):
        with pytest.raises(RunError, match="does not describe the run that was made"):
            experiment_of(path, *code, other_code=True)
    other = {**stored["versions"], "torch": "1.0"}
    with pytest.raises(RunError, match="settings are not those of its config_hash"):
        experiment_of(path, other, stored["git"], other_code=False)
    assert "config_hash" in experiment_of(path, other, stored["git"], other_code=True)[2][-1]


def test_a_clock_that_goes_back_changes_nothing(folder: Path) -> None:
    """Every file seems to be of tomorrow, and the clock of the second half says 1970."""
    import datetime
    import os
    import time

    with small.shrunk() as patch:
        out = folder / "run"
        shutil.copytree(small.home() / "done", out)
        next((out / "shards").rglob("*.shard")).unlink()
        (out / "steps.parquet").unlink()
        tomorrow = time.time() + 86_400
        for file in [*out.rglob("*"), *(small.home() / "cache").rglob("*")]:
            os.utime(file, (tomorrow, tomorrow))
        patch.setattr(time, "time", lambda: 1.0)
        patch.setattr("driftlab.results.records._now", lambda: datetime.datetime.min.isoformat())
        run_experiment(small.spec(), out, quiet=True)
    assert small.contents(out) == small.contents(small.home() / "done")
