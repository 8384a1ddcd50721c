"""The embedded suite made tiny: a target of a few steps, drafters of a few steps, few prompts."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from driftlab import experiment
from driftlab.config import SUITES, Experiment, read_experiment
from driftlab.engines.pool import understood
from driftlab.errors import DriftlabError, ResourceError
from driftlab.experiment import texts
from driftlab.results.records import RunDirectory

SUITE = SUITES / "micro.toml"
MICRO = {"MICRO_STORIES": 60, "MICRO_STEPS": 6, "MICRO_BATCH": 4, "MICRO_TRAIN_PROMPTS": 8}
SETTINGS = (
    "seeds=[0]",
    'axes.fusion_norm=["none"]',
    "text.limit=3",
    "text.batch=8",
    "text.train_tokens=200",
    "text.max_new_tokens=24",
    "train.steps=4",
    "train.batch=2",
    "train.checkpoint_every=2",
    "measure.depth=4",
    "measure.bootstrap=50",
    "workers=1",
)
CELLS = ("none+pre_norm/s0", "none+post_norm/s0")
TABLES = ("steps", "depths", "heads", "fused", "prompts")


def arguments(*settings: str) -> list[str]:
    """SETTINGS, then ``settings``, as the command line takes them."""
    return [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


MAIN = (
    "from driftlab.experiment import texts\n"
    f"vars(texts).update({MICRO!r})\n"
    "from driftlab.cli import main\n"
    "main()"
)


def command(out: Path, *settings: str) -> list[str]:
    """The suite in a process of its own, with real workers."""
    words = ["ablate", "--suite", "micro", "--out", str(out), *arguments(*settings)]
    return [sys.executable, "-c", MAIN, *words]


def spec(*settings: str) -> Experiment:
    return read_experiment(SUITE, (*SETTINGS, *settings))


def serial(
    jobs: Mapping[str, Any],
    work: Callable[[Any, Callable[[int], None]], None],
    *,
    workers: int,
    on_step: Callable[[int], None],
) -> dict[str, DriftlabError]:
    """`run_jobs` without processes, which take seconds to import what they need."""
    failed: dict[str, DriftlabError] = {}
    for name, job in jobs.items():
        try:
            work(job, on_step)
        except Exception as error:
            failed[name] = understood(error)
            if isinstance(failed[name], ResourceError):
                raise failed[name] from error
    return failed


@contextmanager
def shrunk(*, processes: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """The embedded target made tiny, and cells in this process unless ``processes``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MICRO.items():
            patch.setattr(texts, name, value)
        if not processes:
            patch.setattr(experiment, "run_jobs", serial)
        yield patch


@cache
def home() -> Path:
    """A folder with ``cache`` (target, texts, states) and the finished run ``done``."""
    folder = Path(tempfile.mkdtemp(prefix="driftlab-small-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with shrunk():
        experiment.run_experiment(spec(), folder / "done", quiet=True)
    return folder


def contents(run: Path) -> dict[str, Any]:
    """Bytes of every table, and the rows of ``cells`` without their wall times."""
    found: dict[str, Any] = {n: (run / f"{n}.parquet").read_bytes() for n in TABLES}
    cells = pd.read_parquet(run / "cells.parquet").drop(columns="train_seconds")
    cells = cells.astype(object).where(cells.notna(), None)  # NaN equals nothing
    return {**found, "cells": cells.to_dict("records")}


def drafters(run: Path) -> dict[str, bytes]:
    """Bytes of every drafter's files."""
    folder = run / "drafters"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def leftovers(run: Path) -> list[str]:
    """Temporary names, and trainings of cells that are done."""
    hidden = [path for path in run.rglob(".*") if path.name != ".drawn.json"]  # of the figures
    named = [*hidden, *run.rglob("*.tmp"), *(run / "training").rglob("*.pt")]
    return [str(path.relative_to(run)) for path in named]


def copy(name: str) -> Path:
    """A copy of the finished run, beside it."""
    return Path(shutil.copytree(home() / "done", home() / name))


def status(run: Path) -> dict[str, str]:
    cells = RunDirectory.open(run).cells
    return dict(zip(cells["cell"], cells["status"], strict=True))
