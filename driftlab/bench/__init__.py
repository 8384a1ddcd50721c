"""`driftlab bench`: what the machine can do, and how near each stage comes to it.

Every figure says what it is a ratio of. Nothing is asserted: a slow machine is no fault.
"""

from __future__ import annotations

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


def run(
    stages: Sequence[str],
    *,
    smoke: bool,
    repeats: int,
    peers: dict[str, str],
    stored: Path,
    say: Callable[[str], None],
) -> Iterator[tuple[machine.Machine, list[Row]]]:
    """Measure the machine, then stage by stage; () is all that need not be named.

    Yields the machine and a stage's rows as soon as they are there.

    peers: name -> command of other trainers (see `driftlab.bench.peers`). stored: a finished run,
    of which figures are drawn. ``say`` is told what was done, as it is done.

    Raises ConfigError for a stage that does not exist.
    """
    if unknown := sorted(set(stages) - set(STAGES)):
        raise ConfigError(
            f"there is no stage {unknown[0]!r}", remedy=f"Stages: {', '.join(STAGES)}."
        )
    chosen = stages or [name for name in STAGES if name not in ON_REQUEST]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with machine.threads(1):
        found = machine.measure(device, smoke=smoke)
        say(machine.text(found))
        with tempfile.TemporaryDirectory(prefix="driftlab-bench-") as folder:
            bench = Bench(found, device, not smoke, repeats, Path(folder), stored, peers, say)
            for name in chosen:
                start = time.monotonic()
                rows = list(STAGES[name](bench))
                say(f"{name}: {time.monotonic() - start:.1f} s")
                yield replace(found, facts=machine.describe(device)), rows
