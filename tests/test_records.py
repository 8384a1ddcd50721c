"""Run directories: what is written comes back, and nothing finished is ever lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_run
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab.errors import DataError, NumericsError, ResourceError, RunError
from driftlab.results.records import TABLES, RunDirectory, config_hash
from driftlab.results.schema import KEYS, REGIONS, SCHEMA_VERSION, SCHEMAS
from driftlab.results.shards import safe_name, waiting_lock

MANIFEST = {"config": {"name": "t", "measure": {"depth": 4}}}
CELL, PROMPT = "per_layer+post_norm/s0", "story/01"
TEXT_IDS = st.text(min_size=0, max_size=60)


def columns(seed: int = 0, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"feedback": "post_norm", "depth": 4, "anchors": 5}
    return synthetic_run.steps(np.random.default_rng(seed), **(defaults | options))


def small(path: Path, **options: Any) -> RunDirectory:
    """12 shards."""
    defaults: dict[str, Any] = {"seeds": (0,), "prompts": synthetic_run.prompt_names(3)}
    defaults |= {"depth": 4, "anchors": 4}
    return synthetic_run.make_run(path, **(defaults | options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run that nothing disturbed; not to be changed."""
    return small(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with RunDirectory.create(tmp_path / "run", MANIFEST) as made:
        yield made


# --- round trip -------------------------------------------------------------------------------


def test_what_is_written_comes_back(run: RunDirectory) -> None:
    given_columns = columns()
    run.write(CELL, PROMPT, {"steps": given_columns})
    run.finish()
    steps = run.steps
    assert list(steps.columns) == SCHEMAS["steps"].names
    assert set(steps["cell"]) == {CELL}
    assert set(steps["prompt"]) == {PROMPT}
    for name in ("anchor", "depth", "draft", "correct"):
        np.testing.assert_array_equal(steps[name], given_columns[name])
    for name in ("sink", "rms_state_pre", "entropy"):
        np.testing.assert_array_equal(steps[name], given_columns[name].astype(np.float32))
    mask = np.ma.getmaskarray(given_columns["logprob"])
    assert mask.any()
    np.testing.assert_array_equal(steps["logprob"].isna(), mask)
    assert steps["rank"].isna().all()
    assert steps["tv"].isna().all()


def test_null_flags_and_counts_stay_what_they_are(run: RunDirectory) -> None:
    forced = columns(mode="forced") | {"rank": np.ma.masked_equal(np.arange(20), 3)}
    run.write(CELL, PROMPT, {"steps": forced})
    run.finish()
    steps = run.table("steps", columns=["accepted", "rank", "depth"])
    assert str(steps["accepted"].dtype) == "boolean"
    assert steps["accepted"].isna().all()
    assert str(steps["rank"].dtype) == "Int32"
    assert steps["rank"].isna().sum() == 1
    assert steps["depth"].dtype == np.int16


def test_tables_state_their_units_and_version(run: RunDirectory) -> None:
    run.write(CELL, PROMPT, {"steps": columns()})
    files = run.finish()
    assert sorted(files) == sorted(TABLES)
    for name, path in files.items():
        schema = pq.read_schema(path)
        assert schema.metadata[b"driftlab.schema_version"] == str(SCHEMA_VERSION).encode()
        assert schema.metadata[b"driftlab.table"] == name.encode()
        for field in schema:
            assert field.metadata[b"unit"], f"{name}.{field.name}"
            assert field.metadata[b"description"], f"{name}.{field.name}"
    assert pq.read_schema(files["steps"]).field("entropy").metadata[b"unit"] == b"nats"


def test_columns_and_filters_are_read_alone(whole: RunDirectory) -> None:
    part = whole.table("steps", columns=["depth", "sink"], filters=[("depth", "==", 2)])
    assert list(part.columns) == ["depth", "sink"]
    assert set(part["depth"]) == {2}


@pytest.mark.parametrize("filters", [[("x", "=", 1)], [("depth", "=", "a")], "depth"])
def test_a_wrong_filter_damages_no_table(whole: RunDirectory, filters: Any) -> None:
    with pytest.raises(RunError, match="steps cannot be filtered so"):
        whole.table("steps", filters=filters)


def test_tables_are_sorted_by_their_keys(whole: RunDirectory) -> None:
    for name in TABLES:
        frame = whole.table(name)
        ordered = frame.sort_values(list(KEYS[name]), kind="stable")
        pd.testing.assert_frame_equal(frame, ordered)
        assert not frame.duplicated(list(KEYS[name])).any()


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    given_columns = columns()
    order = np.random.default_rng(1).permutation(len(given_columns["depth"]))
    shuffled = {k: v[order] if np.ndim(v) else v for k, v in given_columns.items()}
    frames = []
    for i, part in enumerate((given_columns, shuffled)):
        with RunDirectory.create(tmp_path / str(i), MANIFEST) as run:
            run.write(CELL, PROMPT, {"steps": part})
            run.finish()
            frames.append(run.steps)
    pd.testing.assert_frame_equal(frames[0], frames[1])


def test_a_prompt_without_anchors_is_finished(run: RunDirectory) -> None:
    empty = {k: v[:0] if np.ndim(v) else v for k, v in columns().items()}
    run.write(CELL, PROMPT, {"steps": empty})
    assert run.has(CELL, PROMPT)
    run.finish()
    assert len(run.steps) == 0
    assert len(run.depths) == 0


# --- depths: the reduction that everything downstream reads ----------------------------------


def test_depths_are_means_over_anchors_that_reach_the_deepest_depth(run: RunDirectory) -> None:
    whole = columns(anchors=6)
    # Anchors 10 and 11 (the last two) are cut short, as at the end of a text.
    keep = ~((whole["anchor"] >= 10) & (whole["depth"] > 2))
    cut = {k: v[keep] if np.ndim(v) else v for k, v in whole.items()}
    run.write(CELL, PROMPT, {"steps": cut})
    run.finish()
    steps, depths = run.steps, run.depths.set_index("depth")
    assert len(steps) == 20
    by_hand = steps[steps["anchor"] < 10].groupby("depth")
    assert (depths["n"] == 4).all()
    for name in ("sink", "entropy", "rms_state_pre", "l2_feedback"):
        np.testing.assert_allclose(
            depths[name], by_hand[name].apply(lambda x: x.astype(float).mean()), rtol=1e-12
        )
    logs = np.log(steps["rms_state_pre"].to_numpy(float))[steps["anchor"] < 10].reshape(4, 4)
    np.testing.assert_allclose(depths["log_rms_state_pre"], logs.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(depths["logprob"], by_hand["logprob"].mean(), rtol=1e-5)
    np.testing.assert_array_equal(depths["n_correct"], by_hand["correct"].sum())
    accepted = by_hand["accepted"].sum().to_numpy(int)
    np.testing.assert_array_equal(depths["n_accepted"], accepted)
    np.testing.assert_array_equal(depths["n_opportunities"], [4, *accepted[:-1]])
    expected = by_hand.apply(lambda g: (1 / (g["anchor"] + float(str(g.name)))).mean())
    np.testing.assert_allclose(depths["uniform"], expected, rtol=1e-12)


def test_forced_chains_have_no_acceptance(run: RunDirectory) -> None:
    run.write(CELL, PROMPT, {"steps": columns(mode="forced")})
    run.finish()
    assert run.depths["n_accepted"].isna().all()
    assert run.depths["n_opportunities"].isna().all()
    assert run.depths["n_correct"].notna().all()


def test_a_state_set_to_zero_has_no_logarithm_and_does_not_stop_the_run(run: RunDirectory) -> None:
    part = columns()
    part["rms_feedback"] = np.where(part["depth"] == 2, 0.0, part["rms_feedback"])
    run.write(CELL, PROMPT, {"steps": part})
    run.finish()
    depths = run.depths.set_index("depth")
    assert depths.index[depths["log_rms_feedback"].isna()].tolist() == [2]


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("column", ["rms_state_pre", "logprob"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    run: RunDirectory, column: str, bad: float
) -> None:
    part = columns()
    part[column] = np.array(part[column], dtype=float)
    part[column][3] = bad
    with pytest.raises(NumericsError, match=rf"steps\.{column} .*{PROMPT}") as caught:
        run.write(CELL, PROMPT, {"steps": part})
    assert CELL in str(caught.value)
    assert "1 of 20" in str(caught.value)
    assert not run.has(CELL, PROMPT)


def test_regions_must_not_be_negative(run: RunDirectory) -> None:
    part = columns()
    moved = np.where(np.arange(20) == 7, 2, 0)
    part["sink"], part["null_mass"] = part["sink"] - moved, part["null_mass"] + moved
    with pytest.raises(NumericsError, match=r"are negative or do not sum to 1 at .*the least -"):
        run.write(CELL, PROMPT, {"steps": part})
    assert not run.has(CELL, PROMPT)


def test_regions_must_sum_to_one(run: RunDirectory) -> None:
    part = columns()
    part["sink"] = part["sink"] + np.where(np.arange(20) == 7, 2e-4, 0)
    with pytest.raises(NumericsError, match="do not sum to 1") as caught:
        run.write(CELL, PROMPT, {"steps": part})
    assert "'depth': 4" in str(caught.value)
    part["sink"] -= np.where(np.arange(20) == 7, 1.5e-4, 0)
    run.write(CELL, PROMPT, {"steps": part})
    assert run.has(CELL, PROMPT)


def test_regions_of_heads_are_checked_too(run: RunDirectory) -> None:
    part = synthetic_run.heads(np.random.default_rng(0), text="sampled", mode="free", depth=2)
    part["recent"] = 0.0
    part["sink"] = part["sink"] + 0.01
    with pytest.raises(NumericsError, match="regions of heads"):
        run.write(CELL, PROMPT, {"heads": part})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sinks": 0.0}, "Columns like it: sink"),
        ({"entropy": np.zeros(3)}, "differ in length"),
        ({"entropy": None}, "holds nulls"),
        ({"text": "written"}, "greedy, sampled, given"),
        ({"mode": "loose"}, "free, forced"),
        ({"anchor": np.full(20, 2**40)}, "cannot be stored as int32"),
        ({"correct": np.full(20, "yes")}, "cannot be stored as bool"),
        ({"correct": 1}, "cannot be stored as bool"),
        ({"entropy": np.zeros((20, 2))}, "not one value a row"),
        ({"depth": 1}, "holds a row twice"),
        ({"cell": "another"}, "belong to other cells"),
    ],
)
def test_wrong_columns_are_refused(run: RunDirectory, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        run.write(CELL, PROMPT, {"steps": columns() | change})
    assert not run.has(CELL, PROMPT)


def test_missing_columns_are_refused(run: RunDirectory) -> None:
    part = columns()
    del part["truth"]
    with pytest.raises(DataError, match=r"steps\.truth .* is missing"):
        run.write(CELL, PROMPT, {"steps": part})


def test_free_chains_may_not_skip_a_depth(run: RunDirectory) -> None:
    part = columns()
    kept = part["depth"] != 2
    with pytest.raises(DataError, match="skip a depth"):
        run.write(
            CELL, PROMPT, {"steps": {k: v[kept] if np.ndim(v) else v for k, v in part.items()}}
        )


def test_only_measured_tables_are_written_by_prompt(run: RunDirectory) -> None:
    with pytest.raises(DataError, match="'cells' is not written by"):
        run.write(CELL, PROMPT, {"cells": {}})


# --- one folder, one run ----------------------------------------------------------------------


def test_another_run_is_refused_and_the_same_is_resumed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        run.write(CELL, PROMPT, {"steps": columns()})
    with pytest.raises(RunError, match="already holds another run"):
        RunDirectory.create(tmp_path, {"config": {"name": "u"}})
    with pytest.raises(RunError, match="already holds another run"):
        RunDirectory.create(tmp_path, MANIFEST | {"inputs": {"target": "ab"}})
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        assert run.has(CELL, PROMPT)
        assert len(run.manifest["resumed"]) == 1


def test_what_is_written_meanwhile_stays(run: RunDirectory) -> None:
    """By a process that draws the run, or another thread of this one; a dead one's goes away."""
    run.close()
    drawn = run.path / "figures"
    drawn.mkdir()
    dead, ours, other = 2**22 + 1, os.getpid(), os.getppid()  # the first is above Linux's largest
    written = [drawn / f".growth.png.{other}.7.tmp"]
    written.append(drawn / f".growth.png.{ours}.{threading.get_ident()}.tmp")
    left = [drawn / f".growth.png.{dead}.7.tmp", run.path / f".x.{ours}.7.tmp"]
    for path in (*written, *left):
        path.write_bytes(b"half")
    RunDirectory.create(run.path, MANIFEST).close()
    assert [path.exists() for path in (*written, *left)] == [True, True, False, False]


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"no run.*thesis\.tex"):
        RunDirectory.create(tmp_path, MANIFEST)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    for path in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "run"):
        with pytest.raises(RunError, match=r"thesis\.tex is a file"):
            RunDirectory.create(path, MANIFEST)
    with pytest.raises(RunError, match="holds no run"):
        RunDirectory.open(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, MANIFEST).close()
    whole = (tmp_path / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").write_bytes(whole[: len(whole) // 2])
    for attempt in (RunDirectory.open, lambda p: RunDirectory.create(p, MANIFEST)):
        with pytest.raises(RunError, match=r"manifest\.json cannot be read"):
            attempt(tmp_path)


def test_other_schema_versions_are_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, MANIFEST).close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 0}))
    with pytest.raises(RunError, match="schema version 0"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunError, match="schema version 0"):
        RunDirectory.create(tmp_path, MANIFEST)


def test_config_hash_ignores_the_order_of_keys() -> None:
    assert config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert config_hash({"a": 1}, {"target": "x"}) != config_hash({"a": 1})


# --- one owner --------------------------------------------------------------------------------

HOLD = """
import sys, time
from driftlab.results.records import RunDirectory
run = RunDirectory.create(sys.argv[1], {"config": {"name": "t", "measure": {"depth": 4}}})
print("held", flush=True)
time.sleep(60)
"""


def hold(path: Path, root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_a_dead_owner_is_followed(
    tmp_path: Path, root: Path
) -> None:
    process = hold(tmp_path / "r", root)
    try:
        with pytest.raises(RunError, match=f"in use .*pid {process.pid}"):
            RunDirectory.create(tmp_path / "r", MANIFEST)
        RunDirectory.open(tmp_path / "r")  # reading is free
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with RunDirectory.create(tmp_path / "r", MANIFEST):
        assert f"pid {os.getpid()}" in (tmp_path / "r" / "lock").read_text()


def test_the_same_process_cannot_own_a_run_twice(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="in use"):
        RunDirectory.create(run.path, MANIFEST)
    run.close()
    RunDirectory.create(run.path, MANIFEST).close()


def test_a_lock_file_of_a_dead_process_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("pid 999999 on elsewhere\n")
    RunDirectory.create(tmp_path, MANIFEST).close()


def test_readers_do_not_write(run: RunDirectory) -> None:
    reader = RunDirectory.open(run.path)
    with pytest.raises(RunError, match="open as reader"):
        reader.write(CELL, PROMPT, {"steps": columns()})
    worker = pickle.loads(pickle.dumps(run))
    worker.write(CELL, PROMPT, {"steps": columns()})
    with pytest.raises(RunError, match="open as worker"):
        worker.finish()
    assert run.has(CELL, PROMPT)
    assert repr(worker).endswith("worker)")


def _write_some(run: RunDirectory, names: list[str]) -> int:
    for i, name in enumerate(names):
        run.write(CELL, name, {"steps": columns(i)})
    return len(names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["condition"]), "lacking: condition"),
        (lambda t: t.append_column("x", pa.array([1] * len(t))), "unknown .*: x"),
        (lambda t: t.set_column(0, "cell", pa.array([1] * len(t))), "another type: cell"),
    ],
)
def test_a_table_of_other_columns_is_refused(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], said: str
) -> None:
    """Also where the manifest notes its checksum, as another writer's would."""
    run = synthetic_run.make_run(tmp_path / "r", seeds=(0,), prompts=synthetic_run.prompt_names(2))
    path = run.path / "cells.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["tables"]["cells"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=rf"has not the columns of cells .*{said}"):
        RunDirectory.open(run.path).table("cells")


def test_a_run_that_was_moved_leaves_nothing_in_its_old_place(
    run: RunDirectory, tmp_path: Path
) -> None:
    old = run.path
    old.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="was moved or deleted while it was made"):
        run.write("c", "p", {})
    assert not old.exists()


def test_workers_write_at_the_same_time(run: RunDirectory) -> None:
    names = [f"p{i}" for i in range(8)]
    with get_context("spawn").Pool(2) as pool:
        # Both write p0: the last one wins, whole.
        pool.starmap(_write_some, [(run, names[:5]), (run, [names[0], *names[5:]])])
    run.finish()
    assert sorted(run.depths["prompt"].unique()) == names
    assert len(run.steps) == 8 * 20


# --- kill it anywhere -------------------------------------------------------------------------


def bytes_of(run: RunDirectory) -> dict[str, bytes]:
    return {name: (run.path / f"{name}.parquet").read_bytes() for name in TABLES}


def test_a_resumed_run_equals_an_undisturbed_one_byte_for_byte(
    tmp_path: Path, whole: RunDirectory
) -> None:
    cell = "none+post_norm/s0"
    late = [(cell, "story-00"), (cell, "story-02"), ("none+pre_norm/s0", "story-01")]
    small(tmp_path / "broken", finish=False, skip=late)
    resumed = small(tmp_path / "broken")
    assert bytes_of(resumed) == bytes_of(whole)


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
import synthetic_run
from driftlab.results.records import RunDirectory
write, count = RunDirectory.write, 0
def stop(self, *args):
    global count
    count += 1
    if count > 4:
        (self.path / "shards" / f".half.shard.{os.getpid()}.1.tmp").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *args)
RunDirectory.write = stop
synthetic_run.make_run(
    __import__("pathlib").Path(sys.argv[1]), seeds=(0,),
    prompts=synthetic_run.prompt_names(3), depth=4, anchors=4,
)
"""


def test_a_killed_run_is_completed_by_running_it_again(
    tmp_path: Path, root: Path, whole: RunDirectory
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")], cwd=root)
    assert done.returncode == -signal.SIGKILL
    shards = [*(tmp_path / "killed" / "shards").rglob("*.shard")]
    assert len(shards) == 4
    before = {path: path.stat().st_mtime_ns for path in shards}
    resumed = small(tmp_path / "killed")
    assert bytes_of(resumed) == bytes_of(whole)
    assert {path: path.stat().st_mtime_ns for path in before} == before, "done work was redone"
    assert not [*(tmp_path / "killed").rglob("*.tmp")]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "version"])
def test_a_damaged_shard_is_redone(tmp_path: Path, whole: RunDirectory, damage: str) -> None:
    broken = RunDirectory.open(shutil.copytree(whole.path, tmp_path / "broken"))
    shard = sorted((broken.path / "shards").rglob("*.shard"))[2]
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-20] ^= 1
    elif damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = bytearray()
    elif damage == "version":
        data = data.replace(b'"driftlab_shard": 1', b'"driftlab_shard": 0')
    else:
        data = bytearray(b"not a shard\n")
    shard.write_bytes(data)
    with (
        RunDirectory.create(broken.path, broken.manifest) as owner,
        pytest.raises(RunError, match=r"1 piece.*damaged"),
    ):
        owner.finish()
    assert bytes_of(small(tmp_path / "broken")) == bytes_of(whole)


def test_no_space_left_is_said_and_nothing_is_lost(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(CELL, "first", {"steps": columns()})
    run.finish()
    before = bytes_of(run)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for action in (
            lambda: run.write(CELL, "second", {"steps": columns(1)}),
            lambda: run.write(CELL, "first", {"steps": columns(1)}),
            run.finish,
            lambda: run.update_manifest(note="x"),
        ):
            with pytest.raises(ResourceError, match="no space left") as caught:
                action()
            assert "same command again" in str(caught.value)
    assert bytes_of(run) == before
    assert run.has(CELL, "first")
    assert not run.has(CELL, "second")
    assert "note" not in run.manifest
    assert not [*run.path.rglob("*.tmp")]


def test_a_folder_that_cannot_be_written(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match="cannot be written"):
            run.write(CELL, PROMPT, {"steps": columns()})


def test_an_unfinished_run_says_so(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="not finished"):
        _ = run.steps
    with pytest.raises(RunError, match="no table 'stepss'"):
        run.table("stepss")


def test_a_truncated_table_is_named(run: RunDirectory) -> None:
    run.write(CELL, PROMPT, {"steps": columns()})
    path = run.finish()["steps"]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=r"steps\.parquet is damaged"):
        _ = run.steps
    with pytest.raises(RunError, match="no column sinks"):
        run.table("steps", columns=["sinks"])


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../outside", "/etc/passwd", "a\x00b", "..", ".", "", "p" * 500, "Ünï/ço\\dé", "CON"],
)
def test_ids_never_climb_out_of_the_folder(run: RunDirectory, name: str) -> None:
    run.write(name, name, {"steps": columns() | {"cell": name}})
    assert run.has(name, name)
    files = [p for p in run.path.parent.rglob("*") if p.is_file()]
    assert all(run.path in p.parents for p in files)
    run.finish()
    assert set(run.steps["prompt"]) == {name}


@given(a=TEXT_IDS, b=TEXT_IDS)
def test_file_names_are_safe_and_distinct(a: str, b: str) -> None:
    for name in (safe_name(a), safe_name(b)):
        assert len(name) < 100
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert (safe_name(a).lower() == safe_name(b).lower()) == (a == b)


@settings(max_examples=20)
@given(n=st.integers(1, 40), seed=st.integers(0, 99))
def test_masses_survive_storage(
    tmp_path_factory: pytest.TempPathFactory, n: int, seed: int
) -> None:
    part = columns(seed, anchors=n, depth=2)
    masses = np.random.default_rng(seed).dirichlet(np.full(6, 0.3), 2 * n).astype(np.float32)
    part |= dict(zip(REGIONS, masses.T, strict=True))
    with RunDirectory.create(tmp_path_factory.mktemp("run"), MANIFEST) as run:
        run.write(CELL, PROMPT, {"steps": part})
        run.finish()
        np.testing.assert_array_equal(run.steps[list(REGIONS)], masses)


# --- manifest and small tables ----------------------------------------------------------------


def test_stages_add_up_and_keep_the_rest(run: RunDirectory) -> None:
    for _ in range(2):
        with run.stage("measure"):
            time.sleep(0.02)
    with pytest.raises(ValueError, match="boom"), run.stage("train"):
        raise ValueError("boom")
    stages = run.manifest["stages"]
    assert stages["measure"]["seconds"] >= 0.04
    assert stages["measure"]["peak_mib"] > 1
    assert "train" in stages
    assert run.manifest["config"] == MANIFEST["config"]


def test_a_cell_is_replaced_by_its_newer_row(run: RunDirectory) -> None:
    row = synthetic_run.cell_row("none", "pre_norm", 0, status="failed", note="<no> memory")
    run.write_cell(row)
    assert run.finish()
    assert run.cells["status"].tolist() == ["failed"]
    del row["train_loss"]
    run.write_cell(row | {"status": "done", "ttt": None})
    run.finish()
    cells = run.cells
    assert cells["status"].tolist() == ["done"]
    assert cells["ttt"].isna().all()
    assert cells["train_loss"].isna().all()
    assert run.manifest["tables"]["cells"]["rows"] == 1


def test_what_another_drafter_was_measured_to_do_is_removed(run: RunDirectory) -> None:
    row = synthetic_run.cell_row("none", "pre_norm", 0)
    cell = row["cell"]
    assert run.drafter_of(cell) is None
    run.write(cell, PROMPT, {"steps": columns()})
    for drafter, kept in (("a" * 64, True), ("a" * 64, True), ("b" * 64, False)):
        run.write_cell(row, drafter)
        assert run.drafter_of(cell) == drafter
        assert run.has(cell, PROMPT) == kept
    run.finish()
    assert pq.read_schema(run.path / "cells.parquet").metadata == SCHEMAS["cells"].metadata
    run.write_cell(row)
    assert run.drafter_of(cell) is None


def test_tables_hold_the_same_values_as_the_frames(whole: RunDirectory) -> None:
    tables = whole.tables()
    for name in ("depths", "heads", "fused", "prompts", "cells"):
        frame = getattr(tables, name)
        assert frame.astype(object).equals(whole.table(name).astype(object)), name
    assert tables.manifest["config"]["name"] == "synthetic"


@pytest.mark.slow
def test_a_million_rows_are_written_quickly_in_little_memory(tmp_path: Path) -> None:
    import pyarrow as pa

    part = columns(depth=16, anchors=625)
    start = time.process_time()
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        for i in range(100):
            run.write(CELL, f"p{i}", {"steps": part})
        written = time.process_time() - start
        pool = pa.default_memory_pool()
        before = pool.max_memory()
        run.finish()
        grown = pool.max_memory() - before
        assert len(run.table("steps", columns=["depth"])) == 1_000_000
    assert written < 20
    assert grown < 400 << 20


def test_a_lock_that_another_holds_is_said_to_be_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lock"

    def wait() -> None:
        with waiting_lock(path):
            pass

    with waiting_lock(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive()
        assert capfd.readouterr().err == f"waiting for another process, which holds {path}\n"
    waiter.join(5)
    assert not waiter.is_alive()
