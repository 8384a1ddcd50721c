"""Limits of the system and damaged files: the same command ends with the same tables, or says why.

More of the kind: test_experiment.py (killed, starved and damaged runs), test_records.py,
test_features.py, test_pool.py, and tests/reliability/kill.py.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import small

from driftlab import cli
from driftlab.engines import cell, train
from driftlab.errors import CheckpointError
from driftlab.experiment import run_experiment
from driftlab.models.frozen import Frozen
from driftlab.results.schema import SCHEMAS
from driftlab.results.shards import read_shard, write_shard


@pytest.fixture
def out() -> Iterator[Path]:
    path = small.home() / "damage"
    with small.shrunk():
        yield path
    shutil.rmtree(path, ignore_errors=True)


def in_a_child(words: list[str], before: Callable[[], Any], said: Path) -> int:
    """Exit code of a command in a process that ``before`` has limited; stderr goes to ``said``."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 2)
            sys.stderr = os.fdopen(2, "w")
            before()
            cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(out: Path) -> list[str]:
    return ["ablate", "--suite", "micro", "--out", str(out), *small.arguments()]


def test_a_file_that_may_not_grow(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own limit on the size of a file, in the middle of a run."""
    monkeypatch.setattr(cli, "_finish", lambda run: None)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    said = tmp_path / "said"
    assert in_a_child(command(out), limit, said) == 2
    lines = said.read_text().splitlines()
    assert len(lines) == 2 and "no space left" in lines[0] and "Free some space" in lines[1]
    run_experiment(small.spec(), out, quiet=True)
    assert small.contents(out) == small.contents(small.home() / "done")
    assert small.leftovers(out) == []


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    """Linux lets nobody make a folder there, root included, whom no permission stops."""
    locked = Path("/sys/driftlab")
    if not locked.parent.is_dir():
        pytest.skip("no /sys on this system")
    said = tmp_path / "said"
    code = in_a_child(command(locked / "run"), lambda: None, said)
    lines = said.read_text().splitlines()
    assert code == 2 and len(lines) == 2, lines
    assert str(locked) in lines[0]
    assert "Permission denied" in lines[0] or "not permitted" in lines[0] or "Read-only" in lines[0]
    assert not locked.exists()


def test_damaged_parts_of_the_target_are_written_again(out: Path) -> None:
    shutil.copytree(small.home() / "done", out)
    next((out / "shards").rglob("*.shard")).unlink()
    (path,) = (small.home() / "cache" / "frozen").glob("*.safetensors")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match=r"checksum does not agree"):
        Frozen(path)
    run_experiment(small.spec(), out, quiet=True)
    assert path.stat().st_size == len(whole)
    Frozen(path)  # whole again
    assert small.contents(out) == small.contents(small.home() / "done")


def test_a_damaged_training_checkpoint_is_refused_by_name(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of the weights: torch would read it without a word."""
    plain, saved = train._save, 0

    def stop(path: Path, state: dict) -> None:
        nonlocal saved
        plain(path, state)
        saved += 1
        if saved == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "_save", stop)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(small.spec(), out, quiet=True)
    (path,) = (out / "training").glob("*.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(Exception, match=r"training checkpoint .* cannot be read") as caught:
        run_experiment(small.spec(), out, quiet=True)
    assert path.name in str(caught.value)
    path.unlink()
    run_experiment(small.spec(), out, quiet=True)
    assert small.contents(out) == small.contents(small.home() / "done")
    assert cell.DONE in small.status(out).values()


def test_no_flipped_bit_of_a_shard_s_header_gives_other_rows(tmp_path: Path) -> None:
    """Every bit: the checksum covers the tables alone."""
    whole, damaged = tmp_path / "whole.shard", tmp_path / "x.shard"
    made = {"texts": table("texts", "a"), "explained": table("explained", "b")}
    write_shard(whole, ("cell", "prompt"), made, owner="run")
    data = whole.read_bytes()
    head = data.index(b"\n") + 1
    refused = 0
    for at in range(head):
        for bit in range(8):
            damaged.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            found = read_shard(damaged, owners=["run"])
            if found is None or found.key != ("cell", "prompt"):
                refused += 1
                continue
            assert all(found.table(name).equals(rows) for name, rows in made.items()), (at, bit)
    assert refused > head * 4


def table(name: str, word: str) -> pa.Table:
    """Two rows of one text in every column of text; no other values."""
    schema = SCHEMAS[name]
    words = {f.name: [word] * 2 for f in schema if pa.types.is_string(f.type)}
    columns = [pa.array(words.get(f.name, [None] * 2), type=f.type) for f in schema]
    return pa.Table.from_arrays(columns, names=schema.names)
