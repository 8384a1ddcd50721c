"""One cell of an experiment: train a drafter (or take one), measure it, store rows.

A cell runs in a process of its own and shares with the others only files: stored states, the
frozen parts of the target, and shards of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftlab.analysis import measures
from driftlab.analysis.interventions import apply, from_settings
from driftlab.analysis.recorder import Columns
from driftlab.config import DrafterConfig, MeasureSpec, Provenance, TrainSpec
from driftlab.data.features import Features, FeatureStore
from driftlab.engines.align import Alignment, Rows, agreement
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.engines.probe import measurable_anchors, probe, storable, target_probabilities
from driftlab.engines.train import TrainResult, initialise, train
from driftlab.errors import CheckpointError, DriftlabError, ResourceError
from driftlab.files import file_hash
from driftlab.models.checkpoints.load import load_drafter
from driftlab.models.checkpoints.native import verified_config
from driftlab.models.checkpoints.read import CONFIG
from driftlab.models.checkpoints.write import save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Frozen
from driftlab.results.records import RunDirectory

Progress = Callable[[int], None]

DONE = "done"
FACTS = ("n_parameters", "train_steps", "train_tokens", "train_loss", "train_seconds", "note")
"""Columns of ``cells`` that training fills."""
SWITCHES = ("fusion_norm", "feedback", "residual", "attention_gate")
"""Fields of a drafter's contract that the axes set, and columns of ``cells``."""


@dataclass(frozen=True)
class Learning:
    """How a cell's drafter is trained; ``rows`` are the target's rows for an alignment loss."""

    states: str
    config: DrafterConfig
    draft_to_target: tuple[int, ...] | None
    seed: int
    spec: TrainSpec
    rows: Rows | None = None
    origin: Provenance = field(default_factory=dict)  # see engines.habitat


@dataclass(frozen=True)
class CellJob:
    """Everything a worker needs; picklable.

    Attributes
    ----------
    states: key of the stored states that are measured on, and ``prompts`` their prompts.
    row: the known columns of ``cells``.
    drafter: its folder. ``learning`` is None for a drafter that is there already.
    interventions: what is applied to it, as an experiment file says it.
    reference: key of the unchanged target's states of the same texts, for the table ``shift``.
    rows: the target's attention rows of the same texts, for the table ``agreement``.
    """

    cell: str
    run: Path
    frozen: Path
    store: Path
    states: str
    prompts: tuple[str, ...]
    measure: MeasureSpec
    row: dict
    threads: int
    texts_at_once: int
    drafter: Path
    learning: Learning | None = None
    interventions: tuple[dict, ...] = ()
    reference: str | None = None
    rows: Rows | None = None

    @property
    def training(self) -> Path:
        """Where the unfinished training is kept."""
        return self.run / "training" / f"{self.cell.replace('/', '_')}.pt"

    @property
    def steps(self) -> int:
        """Steps of progress that the whole job reports."""
        return len(self.prompts) + (self.learning.spec.steps if self.learning else 0)


def finished(job: CellJob) -> bool:
    """Whether nothing is left to do: the row says so, its drafter and all shards are there."""
    run = RunDirectory.open(job.run)
    row = run.row_of(job.cell)
    return (
        row is not None
        and row["status"] == DONE
        and fault_of(job.drafter, job.row, run.drafter_of(job.cell)) is None
        and all(run.has(job.cell, prompt) for prompt in job.prompts)
    )


def fault_of(folder: Path, row: Mapping[Any, Any], known: str | None) -> str | None:
    """Why ``folder`` does not hold the drafter of the cell ``row``, or None when it does.

    Its checksums must agree, its config with ``known``, what the run keeps of it
    (:meth:`RunDirectory.drafter_of`), and its contract with the row's switches.
    """
    try:
        contract = verified_config(folder)
    except CheckpointError as error:
        return error.cause
    if known is not None and known != file_hash(folder / CONFIG):
        return f"{folder} holds another drafter"
    other = [name for name in SWITCHES if getattr(contract, name) != row[name]]
    return f"{folder} holds a drafter of other {', '.join(other)}" if other else None


def run_cell(job: CellJob, on_step: Progress, ranks: Ranks = ALONE) -> None:
    """Train unless the drafter is there, measure what has no shard yet, write the cell's row.

    With ``ranks``, the other processes are in :func:`follow` and help with the training.

    Raises
    ------
    DriftlabError: of any kind; what was finished before stays, and the row says why it ended.
    """
    torch.set_num_threads(job.threads)
    run = RunDirectory.worker(job.run)
    facts: dict[str, Any] = {}
    made = run.drafter_of(job.cell)
    try:
        teacher = Frozen(job.frozen)
        if job.learning is None:
            drafter, made = load_drafter(job.drafter), file_hash(job.drafter / CONFIG)
            run.write_cell({**job.row, "status": "not measured"}, made)
        else:
            drafter, facts = _trained(job, job.learning, run, teacher, on_step, ranks)
            made = file_hash(job.drafter / CONFIG)
        _measure(job, run, teacher, drafter, on_step)
    except ResourceError:
        raise  # says nothing of the cell, and there may be no room for its row
    except DriftlabError as error:
        run.write_cell({**job.row, **facts, "status": f"failed: {error.cause}"}, made)
        raise
    run.write_cell({**job.row, **facts, "status": DONE}, made)


def follow(ranks: Ranks) -> None:
    """Help to train what the first process announces, until it announces an end."""
    while (job := ranks.hear()) is not None:
        torch.set_num_threads(job.threads)
        with contextlib.suppress(DriftlabError):  # the first process meets it too, and says so
            _learn(job, job.learning, Frozen(job.frozen), lambda steps: None, ranks)


def _learn(
    job: CellJob, learning: Learning, teacher: Frozen, on_step: Progress, ranks: Ranks
) -> tuple[Drafter, TrainResult]:
    chosen = learning.draft_to_target
    mapping = None if chosen is None else torch.tensor(chosen)
    made = initialise(
        learning.config, teacher, mapping, seed=learning.seed, head_init=learning.spec.head_init
    )
    made.provenance |= learning.origin
    rows, spec = learning.rows, learning.spec
    result = train(
        made,
        FeatureStore(job.store).open(learning.states),
        teacher,
        spec,
        seed=learning.seed,
        checkpoint=job.training,
        alignment=None if rows is None else Alignment(rows, spec.alignment),
        on_step=on_step,
        ranks=ranks,
    )
    return made, result


def _trained(
    job: CellJob,
    learning: Learning,
    run: RunDirectory,
    teacher: Frozen,
    on_step: Progress,
    ranks: Ranks,
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter as its files give it, and what the cell's row says of its training."""
    row = run.row_of(job.cell)
    fault = fault_of(job.drafter, job.row, run.drafter_of(job.cell))
    if fault is None and row is not None and row["train_steps"] is not None:
        # A drafter that is gone, damaged or another's is trained again, to the same bytes.
        with contextlib.suppress(CheckpointError):
            drafter = load_drafter(job.drafter)
            on_step(learning.spec.steps)
            return drafter, {name: row[name] for name in FACTS}
    ranks.announce(job)
    made, result = _learn(job, learning, teacher, on_step, ranks)
    facts = {
        "n_parameters": sum(p.numel() for n, p in made.named_parameters() if "embed" not in n),
        "train_steps": len(result.losses),
        "train_tokens": result.tokens,
        "train_loss": result.loss,
        "train_seconds": result.seconds,
        "note": _note(result),
    }
    save_drafter(made, job.drafter, replace=True)
    made_of = file_hash(job.drafter / CONFIG)
    run.write_cell({**job.row, **facts, "status": "trained, not measured"}, made_of)
    # Only now: until the row is there, a kill must find the finished training.
    job.training.unlink(missing_ok=True)
    return load_drafter(job.drafter), facts


def _note(result: TrainResult) -> str:
    if result.best is None:
        return result.precision
    step, value = result.best
    many = len(result.evaluations)
    return (
        f"{result.precision}; weights of step {step}, "
        f"{'the only evaluation' if many == 1 else f'the best of {many} evaluations'}: "
        f"{value:.3f} accepted drafts a round on held-back texts"
    )


def _measure(
    job: CellJob, run: RunDirectory, teacher: Frozen, drafter: Drafter, on_step: Progress
) -> None:
    store = FeatureStore(job.store)
    features = store.open(job.states)
    reference = None if job.reference is None else store.open(job.reference)
    applied = [from_settings(settings) for settings in job.interventions]
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
            with apply(drafter, applied) as changed:
                measured = _probe_rows(changed, features, teacher, rows, job.measure)
                for i in rows:
                    _compare(job, changed, features, reference, i, measured[i])
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


def _compare(
    job: CellJob,
    drafter: Drafter,
    features: Features,
    reference: Features | None,
    index: int,
    tables: dict[str, dict],
) -> None:
    """Add the tables ``agreement`` and ``shift`` of text ``index``, where the job asks for them."""
    text = features.texts[index]
    anchors = measurable_anchors(text, job.measure)
    if not len(anchors):
        return
    aux = features.item(index)["aux"].to(drafter.norm.weight.dtype)
    if job.rows is not None:
        found = agreement(drafter, text, aux, job.rows.item(index))
        tables["agreement"] = {"text": text.kind, "layer": np.array(job.rows.layers), **found}
    if reference is not None:
        before = reference.item(index)["aux"].to(aux.dtype)
        tables["shift"] = {"text": text.kind, **_shift(drafter, before, aux, anchors)}


def _shift(drafter: Drafter, before: Tensor, after: Tensor, anchors: Tensor) -> Columns:
    """How far ``after`` [S, A*Ht] lies from ``before`` at ``anchors`` [T]: each captured state as
    the target gives it, then what the drafter fuses of both."""
    width = drafter.config.target_hidden_size
    pairs = {
        f"fuse.in.{i}": tuple(x[anchors, i * width : (i + 1) * width] for x in (before, after))
        for i in range(len(drafter.config.boundaries))
    }
    with torch.inference_mode():
        pairs["fuse.out"] = tuple(drafter.fuse(x[None])[0][anchors] for x in (before, after))
    rows = []
    for place, (was, now) in pairs.items():
        size, error = measures.rms(was), measures.rms(now - was)
        means = (size.mean(), error.mean(), (error / size.clamp(min=1e-20)).mean())
        rows.append((place, len(was), *(float(m) for m in means)))
    names = ("place", "n", "rms", "rms_error", "alpha")
    return {n: np.array(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}


def _merge(tables: dict[str, dict], more: dict[str, dict]) -> None:
    """Append the rows of ``more``; scalars become columns."""
    for name, columns in more.items():
        n = max(np.size(c) for c in columns.values())
        full = {c: np.full(n, v) if np.ndim(v) == 0 else v for c, v in columns.items()}
        have = tables.get(name)
        tables[name] = full if have is None else {c: _join(have[c], full[c]) for c in full}


def _join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    masked = np.ma.isMaskedArray(a) or np.ma.isMaskedArray(b)
    return np.ma.concatenate([a, b]) if masked else np.concatenate([a, b])
