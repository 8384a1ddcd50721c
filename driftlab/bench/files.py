"""Stages without a model: records of many rows, starting up, and a whole ablation."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from driftlab.bench.shapes import Bench
from driftlab.bench.timing import Sample
from driftlab.errors import RunError
from driftlab.results.bench_rows import Row, summary
from driftlab.results.records import RunDirectory

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def child(command: list[str], **settings: str) -> tuple[Sample, str]:
    """Run a command; its wall time, its processor time with its children's, what it printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **_ONE_THREAD, **settings},
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall, busy), done.stdout


PEAK = """
def peak():  # MiB; ru_maxrss of a child would start at its parent's
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024
"""

_RECORDS = (
    PEAK
    + """
import json, sys, time
from pathlib import Path
import numpy as np, pyarrow.parquet as pq
from driftlab.results.records import RunDirectory
from driftlab.results.schema import NORMS
rows, folder = int(sys.argv[1]), Path(sys.argv[2])
depth, anchors = 8, 500
n = depth * anchors
rng = np.random.default_rng(0)
masses = rng.dirichlet(np.ones(6), n)
names = ("sink", "prompt_mass", "generated", "draft_mass", "self_mass", "null_mass")
columns = {
    "text": "greedy", "temperature": 0.0, "mode": "free",
    "anchor": np.repeat(np.arange(anchors), depth),
    "depth": np.tile(np.arange(1, depth + 1), anchors),
    "draft": rng.integers(0, 9999, n), "truth": rng.integers(0, 9999, n),
    "correct": rng.random(n) < 0.5, "accepted": np.zeros(n, bool), "in_vocab": np.ones(n, bool),
    "logprob": np.log(rng.random(n) + 1e-6), "recent": rng.random(n), "entropy": rng.random(n),
    "sink_rate": rng.random(n), **dict(zip(names, masses.T)),
    **{name: rng.random(n) + 0.5 for name in NORMS},
}
before, wall, busy = peak(), time.perf_counter(), time.process_time()
with RunDirectory.create(folder, {"config": {}}) as run:
    for i in range(rows // n):
        run.write(f"cell {i % 12}", f"prompt {i}", {"steps": columns})
    run.finish()
written = time.perf_counter() - wall, time.process_time() - busy
wrote = peak()
wall, busy = time.perf_counter(), time.process_time()
file = pq.ParquetFile(folder / "steps.parquet")
read = sum(batch.num_rows for batch in file.iter_batches())
got = time.perf_counter() - wall, time.process_time() - busy
print(json.dumps({"read": read, "write": written, "back": got, "write_mib": wrote - before,
                  "read_mib": peak() - before}))
"""
)


def records(bench: Bench) -> Iterator[Row]:
    """Step rows through a run directory: shards, tables, read back in batches."""
    sizes = (250_000, 1_000_000) if bench.full else (20_000, 40_000)
    first = 0.0
    for rows in sizes:
        folder = bench.work / f"records-{rows}"
        try:
            _, said = child([sys.executable, "-c", _RECORDS, str(rows), str(folder)])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = json.loads(said)
        assert found["read"] == rows // 4000 * 4000
        both = [a + b for a, b in zip(found["write"], found["back"], strict=True)]
        first = first or found["read_mib"]
        yield Row(
            stage="records",
            case="written and read back",
            size=f"rows={found['read']}",
            **summary([both[1]], [both[0]]),
            memory=found["read_mib"],
            ratio=found["read_mib"] / max(first, 1e-9),
            of=f"memory at {found['read']} rows / {sizes[0] // 4000 * 4000} rows",
            goal="about 1 (and under 5 s at 1M rows)" if rows == sizes[-1] else "",
            note=f"written {found['write'][1]:.2f} s busy, read {found['back'][1]:.2f} s",
        )


def _is_finished(run: Path) -> bool:
    try:
        RunDirectory.open(run).tables()
    except RunError:
        return False
    return True


def startup(bench: Bench) -> Iterator[Row]:
    """Commands as a user starts them, with torch's presence looked for."""
    python = sys.executable
    commands: dict[str, tuple[list[str], float, list[Path]]] = {
        "import driftlab": ([python, "-c", "import driftlab"], 0.3, []),
        "driftlab --help": ([python, "-m", "driftlab.cli", "--help"], 0.5, []),
    }
    if _is_finished(bench.stored):
        # Figures go into the run's folder: a copy gets them.
        run = bench.work / "stored"
        run.mkdir()
        for file in [*bench.stored.glob("*.parquet"), bench.stored / "manifest.json"]:
            shutil.copy(file, run)
        figures = [python, "-m", "driftlab.cli", "figures", str(run)]
        commands["driftlab figures, all anew"] = (figures, 3.0, [run / "figures"])
        commands["driftlab figures, unchanged"] = (figures, 3.0, [])
    else:
        bench.say(f"no finished run in {bench.stored}: driftlab figures is not timed")
    bare = [child([python, "-c", "pass"])[0] for _ in range(max(3, bench.repeats))]
    yield Row(stage="startup", case="python alone", size="", **_times(bare))
    for case, (command, goal, removed) in commands.items():
        loads = _loads_torch(command)  # this first run also fills caches
        found: list[Sample] = []
        while len(found) < bench.repeats and sum(x.busy for x in found) < 20:
            for folder in removed:
                shutil.rmtree(folder)
            found.append(child(command)[0])
        yield Row(
            stage="startup",
            case=case,
            size="",
            **_times(found),
            ratio=min(x.busy for x in found) / goal,
            of=f"busy time / {goal} s",
            goal="at most 1",
            note="torch is loaded" if loads else "torch is not loaded",
        )


def _times(found: list[Sample]) -> dict:
    return summary([x.busy for x in found], [x.wall for x in found])


def _loads_torch(command: list[str]) -> bool:
    """Whether the command imports torch, by Python's own list of imports."""
    done = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]], check=True, capture_output=True, text=True
    )
    return any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


def ablation(bench: Bench) -> Iterator[Row]:
    """Bare `driftlab ablate`, and how much of it was not model arithmetic."""
    out = bench.work / "ablate"
    command = [sys.executable, "-m", "driftlab.cli", "ablate", "--out", str(out)]
    found, _ = child(command)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    stages = {name: stage["seconds"] for name, stage in manifest["stages"].items()}
    yield Row(
        stage="ablate",
        case="driftlab ablate",
        size="suite micro",
        dtype="float32",
        **_times([found]),
        ratio=found.wall / 90,
        of="wall time / 90 s",
        goal="at most 1",
        note="; ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()),
    )
