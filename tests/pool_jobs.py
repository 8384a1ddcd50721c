"""Jobs for tests of the pool; a worker that imports this file imports nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driftlab.engines.pool import Progress, run_jobs
from driftlab.errors import NumericsError, ResourceError


def work(job: tuple[str, Path], progress: Progress) -> None:
    """Leave a file of one's own, then end as ``job`` says."""
    how, file = job
    first = not file.exists()
    with file.open("a") as lives:
        lives.write(f"{os.getpid()} ")
    progress(3)
    if how == "inf":
        raise NumericsError("a state is infinite", got=ValueError("inf"), remedy="Lower it.")
    if how == "bug":
        raise KeyError("nothing of that name")
    if how == "full":
        raise ResourceError("no space left")
    if how == "killed" or (how == "killed once" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "quits":
        os._exit(3)
    if how == "asleep":
        time.sleep(600)
    while how == "slow":
        time.sleep(0.02)
        progress(1)
    progress(4)


class Starting:
    """Takes as long to read as what imports a large library."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return work, (("asleep", self.file), int)  # who counts no progress


if __name__ == "__main__":
    how, file = sys.argv[1], Path(sys.argv[2])
    does: Any = Starting(file) if how == "starting" else work
    try:
        run_jobs({"a": (how, file)}, does, workers=1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
