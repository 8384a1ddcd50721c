"""One cell of an experiment: train a drafter (or go on training it), measure it, store rows.

A cell runs in a process of its own and shares with the others only files: stored states, the
frozen parts of the target, and shards of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftlab.config import DrafterConfig, MeasureSpec, TrainSpec
from driftlab.data.features import Features, FeatureStore
from driftlab.engines.probe import probe, storable, target_probabilities
from driftlab.engines.train import initialise, train
from driftlab.errors import CheckpointError, DriftlabError, ResourceError
from driftlab.models.checkpoints.load import load_drafter
from driftlab.models.checkpoints.write import save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Frozen
from driftlab.results.records import RunDirectory
from driftlab.results.shards import SUFFIX, read_shard, safe_name

Progress = Callable[[int], None]

DONE = "done"
FACTS = ("n_parameters", "train_steps", "train_tokens", "train_loss", "train_seconds", "note")
"""Columns of ``cells`` that training fills."""


@dataclass(frozen=True)
class CellJob:
    """Everything a worker needs; picklable. ``row`` holds the cell's known columns of ``cells``."""

    cell: str
    run: Path
    frozen: Path
    store: Path
    train_key: str
    measure_key: str
    config: DrafterConfig
    draft_to_target: tuple[int, ...] | None
    seed: int
    train: TrainSpec
    measure: MeasureSpec
    row: dict
    threads: int
    texts_at_once: int

    @property
    def drafter(self) -> Path:
        return self.run / "drafters" / self.cell

    @property
    def training(self) -> Path:
        """Where the unfinished training is kept."""
        return self.run / "training" / f"{self.cell.replace('/', '_')}.pt"


def finished(job: CellJob, prompts: Iterable[str]) -> bool:
    """Whether nothing is left to do: the row says so, drafter and all shards are there."""
    row, run = _row(job), RunDirectory.open(job.run)
    return (
        row is not None
        and row["status"] == DONE
        and (job.drafter / "config.json").exists()
        and all(run.has(job.cell, prompt) for prompt in prompts)
    )


def run_cell(job: CellJob, on_step: Progress) -> None:
    """Train unless the drafter is there, measure what has no shard yet, write the cell's row.

    Raises
    ------
    DriftlabError: of any kind; what was finished before stays, and the row says why it ended.
    """
    torch.set_num_threads(job.threads)
    run = RunDirectory.worker(job.run)
    facts: dict[str, Any] = {}
    try:
        teacher = Frozen(job.frozen)
        store = FeatureStore(job.store)
        drafter, facts = _trained(job, run, store, teacher, on_step)
        _measure(job, run, store.open(job.measure_key), teacher, drafter, on_step)
    except ResourceError:
        raise  # says nothing of the cell, and there may be no room for its row
    except DriftlabError as error:
        run.write_cell({**job.row, **facts, "status": f"failed: {error.cause}"})
        raise
    run.write_cell({**job.row, **facts, "status": DONE})


def _trained(
    job: CellJob, run: RunDirectory, store: FeatureStore, teacher: Frozen, on_step: Progress
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter as its files give it, and what the cell's row says of its training."""
    row = _row(job)
    if row is not None and row["train_steps"] is not None:
        # A drafter that is gone or damaged is trained again, to the same bytes.
        with contextlib.suppress(CheckpointError):
            drafter = load_drafter(job.drafter)
            on_step(job.train.steps)
            return drafter, {name: row[name] for name in FACTS}
    mapping = None if job.draft_to_target is None else torch.tensor(job.draft_to_target)
    made = initialise(job.config, teacher, mapping, seed=job.seed, head_init=job.train.head_init)
    result = train(
        made,
        store.open(job.train_key),
        teacher,
        job.train,
        seed=job.seed,
        checkpoint=job.training,
        on_step=on_step,
    )
    facts = {
        "n_parameters": sum(p.numel() for n, p in made.named_parameters() if "embed" not in n),
        "train_steps": len(result.losses),
        "train_tokens": result.tokens,
        "train_loss": sum(result.losses[-20:]) / len(result.losses[-20:]),
        "train_seconds": result.seconds,
        "note": result.precision,
    }
    save_drafter(made, job.drafter)
    run.write_cell({**job.row, **facts, "status": "trained, not measured"})
    # Only now: until the row is there, a kill must find the finished training.
    job.training.unlink(missing_ok=True)
    return load_drafter(job.drafter), facts


def _row(job: CellJob) -> dict[str, Any] | None:
    """The cell's stored row of ``cells``."""
    shard = read_shard(job.run / "rows" / "cells" / f"{safe_name(job.cell)}{SUFFIX}")
    return None if shard is None else shard.table("cells").to_pylist()[0]


def _measure(
    job: CellJob,
    run: RunDirectory,
    features: Features,
    teacher: Frozen,
    drafter: Drafter,
    on_step: Progress,
) -> None:
    by_prompt: dict[str, list[int]] = {}
    for i, text in enumerate(features.texts):
        by_prompt.setdefault(text.prompt_id, []).append(i)
    # Texts of like length share a batch; a prompt's texts always do. Batches do not depend on
    # what is there already: padding moves the last bits of a sum.
    order = sorted(
        by_prompt, key=lambda p: (max(len(features.texts[i].tokens) for i in by_prompt[p]), p)
    )
    for start in range(0, len(order), job.texts_at_once):
        prompts = order[start : start + job.texts_at_once]
        if missing := [p for p in prompts if not run.has(job.cell, p)]:
            rows = [i for prompt in prompts for i in by_prompt[prompt]]
            measured = _probe_rows(drafter, features, teacher, rows, job.measure)
            for prompt in missing:
                tables: dict[str, dict] = {}
                for i in by_prompt[prompt]:
                    _merge(tables, measured[i])
                run.write(job.cell, prompt, {n: storable(c) for n, c in tables.items()})
        on_step(len(prompts))


def _probe_rows(
    drafter: Drafter,
    features: Features,
    teacher: Frozen,
    rows: Sequence[int],
    spec: MeasureSpec,
) -> dict[int, dict[str, dict]]:
    items = [features.item(i) for i in rows]
    dtype = drafter.norm.weight.dtype
    found = probe(
        drafter,
        [features.texts[i] for i in rows],
        [item["aux"].to(dtype) for item in items],
        spec,
        target_probabilities=[
            target_probabilities(teacher, item["last"], drafter.draft_to_target) for item in items
        ],
    )
    tables: dict[int, dict[str, dict]] = {}
    for i, one in zip(rows, found, strict=True):
        tables[i] = {name: {"text": one.text.kind, **c} for name, c in one.tables.items()}
        if "steps" in tables[i]:
            tables[i]["steps"]["temperature"] = one.text.temperature
    return tables


def _merge(tables: dict[str, dict], more: dict[str, dict]) -> None:
    """Append the rows of ``more``; scalars become columns."""
    for name, columns in more.items():
        n = max(np.size(c) for c in columns.values())
        full = {c: np.full(n, v) if np.ndim(v) == 0 else v for c, v in columns.items()}
        have = tables.get(name)
        tables[name] = (
            full if have is None else {c: np.concatenate([have[c], full[c]]) for c in full}
        )
