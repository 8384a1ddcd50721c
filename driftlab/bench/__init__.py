"""`driftlab bench`: what the machine can do, and how near each stage comes to it.

Every figure says what it is a ratio of. Nothing is asserted: a slow machine is no fault.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from driftlab.bench import drafting, files, machine, targets
from driftlab.bench.shapes import Bench
from driftlab.errors import ConfigError
from driftlab.results.bench_rows import Row
from driftlab.results.records import RunDirectory

STAGES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "probing": drafting.probing,
    "training": drafting.training,
    "growth": drafting.grown_training,
    "continuation": targets.continuation,
    "states": targets.states,
    "masses": drafting.masses,
    "records": files.records,
    "startup": files.startup,
    "ablate": files.ablation,
}
ON_REQUEST = ("ablate",)
"""Stages that run only when they are named."""
PEERED = "training"
"""The stage that other trainers take part in."""
STORED = "startup"
"""The stage that draws figures of a stored run."""


def run(
    stages: Sequence[str],
    *,
    smoke: bool,
    repeats: int,
    peers: dict[str, str],
    stored: Path | None,
    say: Callable[[str], None],
    limit: float = math.inf,
) -> Iterator[tuple[machine.Machine, Row]]:
    """Measure the machine, then stage by stage; () is all that need not be named.

    Yields the machine and a row as soon as it is there. A stage that has lasted ``limit`` s ends
    with the rows that it has; what is being timed is not cut short.

    peers: name -> command of other trainers (see `driftlab.bench.peers`). stored: a finished run,
    of which figures are drawn; None is runs/micro, if it is there. ``say`` is told what was done,
    as it is done.

    Raises ConfigError for a stage that does not exist, for peers and a stored run that no stage
    asks, and RunError for a stored run that is not one.
    """
    if unknown := sorted(set(stages) - set(STAGES)):
        raise ConfigError(
            f"there is no stage {unknown[0]!r}", remedy=f"Stages: {', '.join(STAGES)}."
        )
    chosen = stages or [name for name in STAGES if name not in ON_REQUEST]
    if peers and PEERED not in chosen:
        raise ConfigError(
            f"peers take part in the stage {PEERED}, which is not chosen",
            got=f"{', '.join(peers)} and the stages {', '.join(chosen)}",
            remedy=f"Add --stage {PEERED}, or leave --peer away.",
        )
    if math.isnan(limit):
        raise ConfigError("--limit is no number of seconds", got=limit)
    if stored is not None:
        if STORED not in chosen:
            raise ConfigError(
                f"figures of a stored run are drawn in the stage {STORED}, which is not chosen",
                got=f"{stored} and the stages {', '.join(chosen)}",
                remedy=f"Add --stage {STORED}, or leave --stored away.",
            )
        RunDirectory.open(stored).tables()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with machine.threads(1):
        found = machine.measure(device, smoke=smoke)
        say(machine.text(found))
        with tempfile.TemporaryDirectory(prefix="driftlab-bench-") as folder:
            drawn = stored or Path("runs/micro")
            bench = Bench(found, device, not smoke, repeats, Path(folder), drawn, peers, say)
            for name in chosen:
                start = time.monotonic()
                here = replace(found, facts=machine.describe(device))
                for row in STAGES[name](replace(bench, until=start + limit)):
                    yield here, row
                    if time.monotonic() > start + limit:
                        say(f"{name}: ended by its limit of {limit:.0f} s, with the rows so far")
                        break
                say(f"{name}: {time.monotonic() - start:.1f} s")
