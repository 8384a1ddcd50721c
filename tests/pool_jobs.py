"""Jobs for tests of the pool; a worker that imports this file imports nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

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
    while how == "slow":
        time.sleep(0.02)
        progress(1)
    progress(4)


if __name__ == "__main__":
    try:
        run_jobs({"a": ("slow", Path(sys.argv[1]))}, work, workers=1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
