"""Jobs in processes of their own. One that fails leaves the others running.

A worker ends with its owner, however that one dies: a thread waits for it, and ends the worker in
the middle of what it does. It never sees Ctrl-C: the owner answers it, and ends its workers.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from driftlab.errors import (
    ConfigError,
    DriftlabError,
    ResourceError,
    RunError,
    first_line,
    lacks_memory,
    wants_traceback,
)

Progress = Callable[[int], None]
Job = TypeVar("Job")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LUMP = 0.2  # seconds between two messages of progress: one for each small step would cost more
_TAKEN = {  # how the variables begin that a library reads when it is imported
    "tqdm": ("TQDM_",),
    "huggingface_hub": ("HF_",),
    "torch": ("TORCH", "PYTORCH_", "AOTINDUCTOR_"),
}
_PATIENCE = 1.0  # seconds that a worker gets to end before it is killed


def run_jobs(
    jobs: Mapping[str, Job],
    work: Callable[[Job, Progress], None],
    *,
    workers: int,
    on_step: Progress = lambda steps: None,
) -> dict[str, DriftlabError]:
    """Call ``work(job, progress)`` for every job, ``workers`` at a time. Returns what failed.

    ``work`` and the jobs must be picklable; results travel by files. Jobs start in order.

    Raises
    ------
    ResourceError: of a job. The others would meet it too, so they are ended.
    RunError: a worker died, so nobody knows what became of its job.
    """
    failed: dict[str, DriftlabError] = {}
    waiting = deque((name, (work, job)) for name, job in jobs.items())
    crew: list[tuple[SpawnProcess, Connection]] = []
    busy: dict[Connection, tuple[SpawnProcess, str]] = {}
    try:
        for _ in range(min(workers, len(jobs))):
            process, pipe = _start()
            crew.append((process, pipe))
            _give(pipe, process, busy, waiting)
        while busy:
            for ready in connection.wait(list(busy)):
                pipe = next(p for p in busy if p is ready)
                process, name = busy[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, OSError):
                    raise _died(process, name) from None
                if isinstance(said, int):
                    on_step(said)
                    continue
                if isinstance(said, ResourceError):
                    raise said
                if said is not None:
                    failed[name] = said
                del busy[pipe]
                if waiting:
                    _give(pipe, process, busy, waiting)
    finally:
        for process, pipe in crew:
            process.terminate()  # what a job has finished is on disk
            pipe.close()
        for process, _ in crew:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
    return failed


def understood(error: BaseException) -> DriftlabError:
    """``error`` as one of ours: full disks and memories by name, the rest as a fault of driftlab.

    Libraries hide a full disk in errors of their own, so causes and messages are searched.
    """
    if isinstance(error, DriftlabError):
        return error
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    said = " ".join(map(str, chain))
    if any(isinstance(e, OSError) and e.errno in _FULL for e in chain) or "No space left" in said:
        named = next((e.filename for e in chain if isinstance(e, OSError) and e.filename), None)
        return ResourceError(
            "no space left on the disk",
            got=named,
            remedy="Free some space and run the same command again: finished work is kept.",
        )
    if any(map(lacks_memory, chain)):
        return ResourceError(
            "not enough memory",
            got=first_line(error),
            remedy="Use fewer workers or a smaller batch; finished work is kept.",
        )
    if isinstance(error, OSError) and error.strerror:
        return RunError(
            f"{error.filename or 'a file'} cannot be used",
            got=error.strerror,
            remedy="Check the path and its permissions.",
        )
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and (variables := _variables_of(frames)):
        return ConfigError(
            "a library cannot use what the environment holds for it",
            got=f"{first_line(error)}; set: {', '.join(variables)}",  # a value may be a token
            remedy="Correct that variable, or unset it.",
        )
    ours = [f for f in frames if "driftlab" in Path(f.filename).parts] or frames
    place = f" in {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return DriftlabError(
        f"driftlab failed{place}",
        got=f"{type(error).__name__}: {first_line(error)}",
        remedy="Please report this line. DRIFTLAB_TRACEBACK=1 shows where it comes from.",
    )


def _variables_of(frames: traceback.StackSummary) -> list[str]:
    """Variables that are set for the library whose import ended in ``frames``, if one's did."""
    files = [Path(f.filename).parts for f in frames if f.name == "<module>"]
    begin = next((v for k, v in _TAKEN.items() if files and k in files[-1]), ())
    return sorted(name for name in os.environ if begin and name.startswith(begin))


def _start() -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _deaf_to_ctrl_c():
        process.start()
    theirs.close()
    return process, ours


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Hold SIGINT back. A process that is started meanwhile holds it back for ever."""
    resource_tracker.ensure_running()  # starting it lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give(
    pipe: Connection,
    process: SpawnProcess,
    busy: dict[Connection, tuple[SpawnProcess, str]],
    waiting: deque[tuple[str, Any]],
) -> None:
    name, job = waiting.popleft()
    busy[pipe] = process, name
    with contextlib.suppress(OSError):  # it has died: the next read says so
        pipe.send(job)


def _died(process: SpawnProcess, name: str) -> RunError:
    process.join(_PATIENCE)
    code = process.exitcode
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
        remedy = (
            "Too little memory is the usual reason: use fewer workers. "
            "The same command goes on from what is finished."
        )
    else:
        how = f"exit code {code}"
        remedy = (
            "Its last words are above. A script that runs experiments needs "
            "`if __name__ == '__main__':`."
        )
    return RunError(f"the worker of cell {name} died", got=how, remedy=remedy)


def _serve(pipe: Connection) -> None:
    """A worker's life. It ends when the pipe does.

    What it is to do comes by the pipe, too: reading that imports torch, and takes long.
    """
    threading.Thread(target=_follow, args=(multiprocessing.parent_process(),), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            ticker = _Ticker(pipe)
            work, job = pipe.recv()
            outcome: DriftlabError | None = None
            try:
                work(job, ticker)
            except (BrokenPipeError, ConnectionResetError):
                return  # the owner is gone
            except Exception as error:
                if wants_traceback():
                    traceback.print_exc()
                found = understood(error)
                got = None if found.got is None else str(found.got)  # whatever it was can travel
                outcome = type(found)(found.what, got=got, remedy=found.remedy)
            ticker.flush()
            pipe.send(outcome)


def _follow(owner: Any) -> None:
    owner.join()
    os._exit(1)


class _Ticker:
    """Sends progress to the owner in lumps."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._held, self._last = pipe, 0, time.monotonic()

    def __call__(self, steps: int) -> None:
        self._held += steps
        if time.monotonic() - self._last >= _LUMP:
            self.flush()

    def flush(self) -> None:
        if self._held:
            self._pipe.send(self._held)
        self._held, self._last = 0, time.monotonic()
