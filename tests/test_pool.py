"""Workers: failures stay with their job, deaths are named, nobody outlives the owner."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pool_jobs
import pytest

from driftlab.engines.pool import run_jobs, understood
from driftlab.errors import ConfigError, DriftlabError, NumericsError, ResourceError, RunError


def jobs(folder: Path, *hows: str) -> dict[str, tuple[str, Path]]:
    return {f"{how}-{i}": (how, folder / str(i)) for i, how in enumerate(hows)}


def test_failures_stay_with_their_job_and_progress_is_complete(tmp_path: Path) -> None:
    steps: list[int] = []
    hows = ("fine", "inf", "bug", "fine")
    failed = run_jobs(jobs(tmp_path, *hows), pool_jobs.work, workers=1, on_step=steps.append)
    assert sum(steps) == 7 + 3 + 3 + 7
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1", "2", "3"}
    assert len({p.read_text() for p in tmp_path.iterdir()}) == 1, "one worker does them all"
    assert set(failed) == {"inf-1", "bug-2"}
    assert isinstance(failed["inf-1"], NumericsError)
    assert failed["inf-1"].cause == "a state is infinite (got inf)"
    assert failed["inf-1"].remedy == "Lower it."
    assert "driftlab failed in pool.py" in failed["bug-2"].cause
    assert "KeyError: 'nothing of that name'" in failed["bug-2"].cause


def test_a_full_disk_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no space left"):
        run_jobs(jobs(tmp_path, "full", "fine"), pool_jobs.work, workers=1)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(("how", "said"), [("killed", "SIGKILL"), ("quits", "exit code 3")])
def test_a_worker_that_dies_is_named_and_ends_the_others(
    tmp_path: Path, how: str, said: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=f"{how}-1 died .*{said}"):
        run_jobs(jobs(tmp_path, "slow", how), pool_jobs.work, workers=2)
    assert time.monotonic() - started < 60
    slow = tmp_path / "0"
    assert not slow.exists() or gone(int(slow.read_text()))


@contextmanager
def owner(tmp_path: Path, how: str = "slow") -> Iterator[tuple[subprocess.Popen, int]]:
    """A process group: an owner, and the worker that it waits for (its id)."""
    file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, pool_jobs.__file__, how, str(file)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A runner in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(lambda: file.exists() and bool(file.read_text()))
        yield process, int(file.read_text())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_ends_all_at_once_and_only_the_owner_answers(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, worker):
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 130
        assert said == b""
        assert gone(worker)


@pytest.mark.parametrize("how", ["slow", "asleep", "starting"])
def test_a_worker_ends_with_an_owner_that_was_killed(tmp_path: Path, how: str) -> None:
    """Also one that says nothing for minutes, and one that still reads what it is to do."""
    with owner(tmp_path, how) as (process, worker):
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: gone(worker), 3)
        said, _ = process.communicate(timeout=20)
        assert (process.returncode, said) == (-signal.SIGKILL, b"")


def _chained() -> RuntimeError:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "/x/file")
        except OSError:
            raise RuntimeError("writer failed")  # noqa: B904
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (_chained(), ResourceError, "no space left on the disk (got /x/file)"),
        (ValueError("IO error: No space left on device (os error 28)"), ResourceError, "no space"),
        (MemoryError(), ResourceError, "not enough memory"),
        (RuntimeError("can't allocate memory: you tried 9 bytes"), ResourceError, "you tried 9"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), RunError, "/x cannot be used"),
        (RunError("ours", got=1), RunError, "ours (got 1)"),
        (TypeError("two\nlines"), DriftlabError, "driftlab failed (got TypeError: two)"),
    ],
)
def test_foreign_errors_become_ours(error: Exception, kind: type, said: str) -> None:
    found = understood(error)
    assert type(found) is kind
    assert said in found.cause
    assert "\n" not in found.cause


@pytest.mark.parametrize(
    ("variable", "module"),
    [
        ("TQDM_MININTERVAL", "tqdm.std"),
        ("HF_HUB_ETAG_TIMEOUT", "huggingface_hub.constants"),
        ("TORCHDYNAMO_REPRO_LEVEL", "torch._dynamo.config"),
    ],
)
def test_a_variable_that_a_library_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, module: str
) -> None:
    found = importlib.util.find_spec(module)
    assert found is not None and found.loader is not None
    monkeypatch.setenv(variable, "abc")
    with pytest.raises(ValueError, match="abc") as raised:
        found.loader.exec_module(importlib.util.module_from_spec(found))
    said = understood(raised.value)
    assert type(said) is ConfigError
    assert variable in said.cause and "'abc'" in said.cause
    assert type(understood(ValueError("abc"))) is DriftlabError
