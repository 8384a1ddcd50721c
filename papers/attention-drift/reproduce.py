"""Run every experiment of the paper from nothing, and say beforehand how long that takes here.

    python papers/attention-drift/reproduce.py [--base micro] [--only RUN ...] [--plan]

A run's time is what its committed manifest recorded, times how much faster that machine multiplies
matrices. A run that was never recorded is estimated from its number of cells and the costs of the
run of ``norms`` on the same base. Stop at any moment and call again: finished runs are skipped, and
the one that was stopped goes on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as workers do; read when numpy is loaded

import argparse
import json
import math
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from driftlab.config import Experiment, read_experiment
from driftlab.results.merge import identity
from driftlab.results.records import RunDirectory, config_hash

PAPER = Path(__file__).resolve().parent
ROOT = PAPER.parent.parent
BASES = ("micro", "smollm2")
ORDER = ("norms", "gated", "residual", "ttt", "alignment", "budget", "rate")
"""Experiments that train, first: the others apply changes to the drafters of ``norms``."""
EXPLAINED = 12
"""Prompts on which the drafters of ``norms`` are explained."""


@dataclass(frozen=True)
class Job:
    """One run: its experiment on one base, and its cells trained and applied."""

    name: str
    file: Path
    base: str
    spec: Experiment
    trained: int
    applied: int
    of: str = ""
    """The run that is explained, where that is the job."""


def jobs(bases: tuple[str, ...] = BASES) -> list[Job]:
    """Every experiment file that has a base, on every base, in the order of running."""
    files = {}
    for path in sorted((ROOT / "experiments").glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if "base" in data and path.stem not in BASES:
            files[path.stem] = path
    order = sorted(files, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    out = []
    for base in bases:
        for name in order:
            spec = read_experiment(files[name], base=base)
            out.append(Job(f"{name}-{base}", files[name], base, spec, *_cells(spec)))
        norms = next(job for job in out if job.name == f"norms-{base}")
        out.append(Job(f"explained-{base}", norms.file, base, norms.spec, 0, 0, of=norms.name))
    return out


def _cells(spec: Experiment) -> tuple[int, int]:
    axes, applied = spec.axes, spec.applied
    made = math.prod(max(1, len(getattr(axes, name))) for name in type(axes).model_fields)
    if applied is None:
        return made * len(spec.seeds), 0
    drafters = (len(applied.variants) or made) * len(spec.seeds)
    changed = drafters * len(applied.conditions)
    return (0, drafters + changed) if applied.drafters else (made * len(spec.seeds), changed)


def gemm_rate(seconds: float = 0.5) -> float:
    """Best rate of float32 matrix products on one thread, in GFLOP/s.

    Products are short, so that the best one is not one that another process interrupted.
    """
    a = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * 256**3 / (time.perf_counter() - start) / 1e9)
    return best


@dataclass(frozen=True)
class Cost:
    """What a committed run took: seconds in all, of which in training; its cells and settings."""

    total: float
    training: float
    cells: int
    prompts: int
    spec: dict

    @property
    def measuring(self) -> float:
        """Seconds of one cell's measurement, shared work included."""
        return (self.total - self.training) / self.cells


def recorded(name: str) -> Cost | None:
    """The cost of the committed run ``name``."""
    folder = PAPER / "runs" / name
    if not (folder / "manifest.json").exists():
        return None
    run = RunDirectory.open(folder)
    cells, config = run.table("cells"), run.manifest["config"]
    total = sum(stage["seconds"] for stage in run.manifest.get("stages", {}).values())
    # Cells run side by side, so their own seconds add up to more than the clock's.
    training = float(cells["train_seconds"].fillna(0.0).sum()) / config.get("workers", 1)
    prompts = run.table("prompts")["prompt"].nunique()
    return Cost(total, min(training, total), len(cells), prompts, config)


def seconds(job: Job) -> tuple[float, str] | None:
    """Seconds on the machine of the committed runs, and where the figure comes from."""
    if job.of:
        return None
    if (own := recorded(job.name)) is not None:
        return own.total, "recorded"
    like = recorded(f"norms-{job.base}")
    if like is None:
        return None
    spec = job.spec.model_dump(mode="json")
    train, measure = (
        work(spec, like.prompts) / work(like.spec, like.prompts) for work in (_learning, _measuring)
    )
    each = like.training / like.cells * train
    measuring = like.measuring * measure
    return job.trained * (each + measuring) + job.applied * measuring, "from norms"


def _learning(spec: dict, prompts: int) -> float:
    train, lengths = spec["train"], spec["axes"].get("ttt") or [spec["train"]["ttt"]]
    scales = spec["axes"].get("steps_scale") or [1.0]
    mean = sum(lengths) / len(lengths) * sum(scales) / len(scales)
    return float(train["steps"] * train["batch"] * train["max_length"] * mean)


def _measuring(spec: dict, prompts: int) -> float:
    """Steps that a cell is measured on, up to what two specs of one base share."""
    measure, text = spec["measure"], spec["text"]
    applied = spec.get("applied") or {}
    texts = 1 if applied.get("text", "both") != "both" else len(text["temperatures"])
    anchors = measure["max_anchors"] or text["measure_new_tokens"] or text["max_new_tokens"]
    size = min(text["limit"] or prompts, prompts) * texts * len(measure["modes"])
    return float(size * anchors * measure["depth"])


def finished(job: Job, out: Path) -> bool:
    """Whether ``out`` holds this very run, complete."""
    if job.of and not (out / "explained.parquet").exists():
        return False
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not manifest.get("finished"):
        return False
    if manifest.get("config_hash") != config_hash(identity(job.spec)):
        return False
    return bool((RunDirectory.open(out).table("cells")["status"] == "done").all())


def told(duration: float) -> str:
    """Seconds in the unit that suits."""
    if duration < 90:
        return f"{duration:.0f} s"
    return f"{duration / 60:.0f} min" if duration < 5400 else f"{duration / 3600:.1f} h"


def plan(todo: list[Job], runs: Path, *, rate: float, theirs: float) -> str:
    """What will run and for how long, as text."""
    lines = [
        f"This machine multiplies at {rate:.0f} GFLOP/s a thread; the committed runs were made at "
        f"{theirs:.0f}."
    ]
    total, unknown = 0.0, 0
    for job in todo:
        cells = f"{job.trained} trained, {job.applied} applied"
        if job.of:
            cells = f"{job.of}, {EXPLAINED} prompts"
        if finished(job, runs / (job.of or job.name)):
            lines.append(f"  {job.name:<22} {cells:<26} done before")
            continue
        cost = seconds(job)
        if cost is None:
            unknown += 1
            lines.append(f"  {job.name:<22} {cells:<26} not known")
            continue
        here = cost[0] * theirs / rate
        total += here
        lines.append(f"  {job.name:<22} {cells:<26} about {told(here)} ({cost[1]})")
    more = f", and {unknown} runs whose time is not known" if unknown else ""
    lines.append(f"In all about {told(total)}{more}. Stop at any moment; the same command goes on.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", choices=BASES, action="append", help="only these targets")
    parser.add_argument("--only", action="append", help="only these runs, e.g. noise-micro")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--plan", action="store_true", help="say how long it takes, and stop")
    asked = parser.parse_args()
    todo = jobs(tuple(asked.base or BASES))
    if asked.only:
        known = {job.name for job in todo}
        if unknown := sorted(set(asked.only) - known):
            parser.error(f"no run {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        todo = [job for job in todo if job.name in asked.only]
    theirs = tomllib.loads((PAPER / "paper.toml").read_text(encoding="utf-8"))["gemm_gflops"]
    print(plan(todo, asked.runs, rate=gemm_rate(), theirs=theirs), flush=True)
    if asked.plan:
        return 0
    driftlab = Path(sys.executable).with_name("driftlab")
    for job in todo:
        out = asked.runs / (job.of or job.name)
        if not finished(job, out):
            print(f"\n{job.name}", flush=True)
            if job.of:
                _call(driftlab, "explain", out, "--limit", EXPLAINED)
            else:
                _call(driftlab, "ablate", job.file, "--base", job.base, "--out", out)
        _call(driftlab, "figures", out, "--publish", PAPER / "runs" / job.name)
    _call(driftlab, "figures", PAPER)
    return 0


def _call(*command: object) -> None:
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    raise SystemExit(main())
