"""From an experiment file to a run directory: target, texts, states, cells, tables, report.

Every stage leaves files that the next call finds, so a run that is killed anywhere goes on
with the same command and ends with the same tables. What does not depend on the variants
(texts, captured states) is content-addressed in ``cache`` beside the run and shared by runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from driftlab.config import Experiment, Origin, refuse_assumptions
from driftlab.data.features import Features, FeatureStore
from driftlab.engines.cell import CellJob, finished, run_cell
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.engines.habitat import learned_from, prompt_marks
from driftlab.engines.pool import Progress, run_jobs
from driftlab.engines.precision import against_float32
from driftlab.engines.probe import check_sink, measured_spans
from driftlab.engines.ray_pool import found_ray, run_jobs_on_ray
from driftlab.errors import CheckpointError, DriftlabError, ResourceError, RunError
from driftlab.experiment.applied import (
    Given,
    applied_jobs,
    check_conditions,
    find_drafters,
    unchanged_jobs,
)
from driftlab.experiment.checks import check_experiment
from driftlab.experiment.plan import Plan
from driftlab.experiment.redo import resumed_by_other_code
from driftlab.experiment.texts import prompt_rows
from driftlab.models import memory
from driftlab.models.checkpoints import stated_config
from driftlab.models.checkpoints.read import CONFIG, WEIGHTS
from driftlab.progress import progress_bar
from driftlab.results.merge import identity
from driftlab.results.records import RunDirectory, config_hash


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    cache: str | Path | None = None,
    strict: bool = False,
    command: str = "",
    quiet: bool = False,
    ray: str | None = None,
    ranks: Ranks = ALONE,
) -> RunDirectory:
    """Run every cell of ``experiment`` that ``out`` does not hold yet, and finish its tables.

    Parameters
    ----------
    cache: shared texts and states; by default ``cache`` beside ``out``.
    strict: refuse values that were assumed and not read.
    ray: address of a Ray cluster that runs the cells, or ``local``; see ``engines.ray_pool``.
    ranks: the processes that train together, of which this is the first; the others are in
        ``engines.cell.follow`` until this returns or raises.

    Raises
    ------
    DriftlabError: of any kind. What was measured before stays, and the same command goes on.
    """
    check_experiment(experiment)
    if ray is not None:
        found_ray(ray)  # not after hours of preparation
    out = Path(out)
    cache = out.parent / "cache" if cache is None else Path(cache)
    manifest = {
        "config": experiment.model_dump(mode="json"),
        "config_hash": config_hash(identity(experiment)),
        "name": experiment.name,
        "question": experiment.question,
    }
    versions, git = code_in_use()
    made_by = {"command": command, "versions": versions, "git": git, "hardware": _hardware()}
    fresh = not (out / "manifest.json").exists()
    with RunDirectory.create(out, manifest, **made_by) as run:
        try:
            phases = _prepare(experiment, run, cache, strict=strict, quiet=quiet, here=ray is None)
        except DriftlabError:
            if fresh:
                _forget(out)
            raise
        with run.stage("cells"):
            failed: dict[str, DriftlabError] = {}
            for jobs in phases:
                todo = [job for job in jobs if not finished(job)]
                failed |= _run_jobs(todo, experiment, ray, ranks, quiet=quiet)
        with run.stage("tables"):
            run.finish([job.cell for jobs in phases for job in jobs])
        if failed:
            again = "Mend the cause, then run it again."
            if experiment.applied is not None:
                trained = experiment.applied.drafters or out
                again += (
                    f" Other settings need another --out; applied.drafters={trained} trains none."
                )
            raise RunError(
                f"{len(failed)} of {sum(map(len, phases))} cells failed: {_by_cause(failed)}",
                remedy=f"The others are in the tables of {out}. {again}",
            )
        shutil.rmtree(out / "training", ignore_errors=True)
    return RunDirectory.open(out)


def _prepare(
    experiment: Experiment, run: RunDirectory, cache: Path, *, strict: bool, quiet: bool, here: bool
) -> list[list[CellJob]]:
    """Everything that cells share, made once: the cells' jobs, each list after the one before.

    ``here``: cells run on this machine, so that its memory must do.
    """
    _remove_unfinished(run.path)
    applied = experiment.applied
    given = find_drafters(experiment, run.path)
    with run.stage("target"):
        plan = Plan(experiment, cache, quiet=quiet)
    if given is None:
        plan.drafter_config()  # its values have a provenance from here on
    else:
        given.check(plan.target, plan.boundaries)
        plan.provenance |= given.provenance()
    check_conditions(plan, given)
    if strict:
        refuse_assumptions(plan.provenance, owner=experiment.target.source)
    with run.stage("texts"):
        measure_texts, found = plan.texts()
        spans = measured_spans(measure_texts, experiment.measure)
        check_sink(experiment.measure.sink, [length for _, length in spans])
        train_texts = plan.texts_to_learn() if given is None else []
        known = prompt_marks(train_texts) if given is None else given.prompts()
        warned = [*plan.warnings, *resumed_by_other_code(run.manifest)]
        warned += learned_from(known, measure_texts, strict=strict)
    inputs: dict[str, Any] = {"target": plan.target.fingerprint}
    with run.stage("states"):
        learned = plan.states(train_texts, "states to learn from") if train_texts else None
        measured = plan.states(measure_texts, "states to measure on")
        frozen = plan.freeze()
        if "precision" not in run.manifest:
            sample = against_float32(plan.target, measure_texts, plan.boundaries)
            run.update_manifest(precision=sample)
        rows = None
        if experiment.measure.agreement:
            layers = range(plan.target.n_layers)
            rows = plan.rows(measure_texts, layers, "attention of the target", measured=True)
    if learned is not None:
        inputs["train_states"] = learned.key
        first = plan.training_jobs(run.path, frozen, learned, measured, rows)
        covered = first[0].row["coverage"]
        told = {"supervised": plan.supervised(learned.texts, plan.vocabulary(learned.texts))}
    else:
        assert given is not None
        inputs["drafters"] = {drafter.cell: drafter.sha for drafter in given.drafters}
        first = unchanged_jobs(plan, given, run.path, frozen, measured, rows)
        covered, told = None, {}
    inputs["measure_states"] = measured.key
    phases, notes = [first], {}
    if applied is not None:
        with run.stage("conditions"):
            changed = applied_jobs(plan, first, run, frozen, measured)
        phases.append(changed.jobs)
        notes = {"conditions": changed.notes}
        warned += changed.warnings
        inputs |= {f"states of {name}": key for name, key in changed.states.items()}
    if here:
        _check_memory(phases, given, learned, plan.store, experiment.workers)
    begun = run.manifest.get("inputs", inputs)
    if lost := [name for name in inputs if begun.get(name) != inputs[name]]:
        raise RunError(
            f"{run.path} was begun with other models or texts",
            got=f"changed since: {', '.join(lost)}",
            remedy="Restore the files that it was begun with, or choose another folder with --out.",
        )
    if experiment.analysis is not None and "registered" not in run.manifest:
        fixed = experiment.analysis.model_dump(mode="json")
        measured_before = any((run.path / "shards").glob("*/*"))
        run.update_manifest(registered={"analysis": fixed, "rows": measured_before})
    run.write_prompts(prompt_rows(measure_texts, found, experiment.measure))
    run.update_manifest(
        inputs=inputs,
        assumed={
            name: s.model_dump(mode="json")
            for name, s in plan.provenance.items()
            if s.origin is Origin.assumed
        },
        resolved={n: s.model_dump(mode="json") for n, s in plan.provenance.items()},
        coverage=covered,
        **told,
        **({"warnings": warned} if warned else {}),
        **({} if given is None else {"drafters": given.record()}),
        **notes,
    )
    return phases


def _check_memory(
    phases: Sequence[Sequence[CellJob]],
    given: Given | None,
    learned: Features | None,
    store: FeatureStore,
    workers: int,
) -> None:
    """Refuse cells that together need more memory than is free."""
    jobs = list(itertools.chain(*phases))
    # Drafters that will be, and those that are there; a damaged one fails its cell.
    configs = {job.drafter: job.learning.config for job in jobs if job.learning is not None}
    for drafter in () if given is None else given.drafters:
        with contextlib.suppress(CheckpointError):
            configs[drafter.folder] = stated_config(drafter.folder)
    lesson = 0 if learned is None else max(len(text.tokens) for text in learned.texts)
    sizes: dict[str, tuple[int, int]] = {}  # of each kind of states: longest, most of a prompt
    for key in {job.states for job in jobs}:
        texts = store.open(key).texts
        most = max(Counter(text.prompt_id for text in texts).values())
        sizes[key] = max(len(text.tokens) for text in texts), most
    needs = [0]
    for job in jobs:
        if (config := configs.get(job.drafter)) is None:
            continue
        longest, most = sizes[job.states]
        probed = min(job.texts_at_once, len(job.prompts)) * most
        needs.append(memory.probing_bytes(config, probed, longest, job.measure.depth))
        if job.learning is not None:
            needs.append(memory.training_bytes(config, job.learning.spec, lesson))
    at_once = min(workers, max(map(len, phases)))
    memory.refuse_too_large(
        f"{at_once} cell(s) at once: this",
        lambda n: n * (memory.PROCESS + max(needs)),
        at_once,
        "workers =",
    )


def _remove_unfinished(out: Path) -> None:
    """Drafters that a killed process was writing, under the names that `save_drafter` takes."""
    for folder in (out / "drafters").rglob(".s*"):
        named = re.fullmatch(r"\.s\d+\.[a-z0-9_]{8}", folder.name) and folder.is_dir()
        if named and {path.name for path in folder.iterdir()} <= {CONFIG, WEIGHTS}:
            shutil.rmtree(folder, ignore_errors=True)


def _forget(out: Path) -> None:
    """Undo the making of a run that ended before its first cell: the folder is free again."""
    with contextlib.suppress(OSError):
        (out / "manifest.json").unlink()
        shutil.rmtree(out / "rows", ignore_errors=True)
        (out / "lock").unlink()
        out.rmdir()


def _by_cause(failed: Mapping[str, DriftlabError]) -> str:
    """Each cause once, with its cells."""
    cells: dict[str, list[str]] = {}
    for cell, error in failed.items():
        cells.setdefault(error.cause, []).append(cell)
    return "; ".join(f"{cause} [{', '.join(names)}]" for cause, names in cells.items())


def _run_jobs(
    jobs: Sequence[CellJob],
    experiment: Experiment,
    ray: str | None,
    ranks: Ranks,
    *,
    quiet: bool,
) -> dict[str, DriftlabError]:
    """Run the cells in processes of their own. Returns the failed cells and why."""
    if not jobs:
        return {}
    total = sum(job.steps for job in jobs)
    label = "1 cell" if len(jobs) == 1 else f"{len(jobs)} cells"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with progress_bar("" if quiet else label, total=total, unit="step") as bar:
        named, workers = {job.cell: job for job in jobs}, experiment.workers
        if ranks.size > 1:
            return _run_together(named, ranks, bar.update)
        if ray is None:
            return run_jobs(named, run_cell, workers=workers, on_step=bar.update)
        return run_jobs_on_ray(
            named,
            run_cell,
            address=ray,
            workers=workers,
            threads=experiment.threads,
            on_step=bar.update,
        )


def code_in_use() -> tuple[dict[str, str], dict[str, Any] | None]:
    """Versions of what computes numbers, and the state of the checkout."""
    return _versions(), _git_state()


def _run_together(
    jobs: Mapping[str, CellJob], ranks: Ranks, on_step: Progress
) -> dict[str, DriftlabError]:
    """One cell after the other, each trained by all ``ranks``."""
    failed: dict[str, DriftlabError] = {}
    for name, job in jobs.items():
        try:
            run_cell(job, on_step, ranks)
        except ResourceError:
            raise
        except DriftlabError as error:
            failed[name] = error
    return failed


def _versions() -> dict[str, str]:
    names = ("driftlab", "torch", "transformers", "numpy", "scipy", "pandas", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _git_state() -> dict[str, Any] | None:
    """Commit of the code in use and whether it was changed; None outside a checkout."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parents[1]), *args],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        if not git("ls-files", "experiment"):
            return None  # installed inside somebody else's checkout
        # Only of the package: a user's own files beside it compute nothing.
        changed = bool(git("status", "--porcelain", "."))
        return {"commit": git("rev-parse", "HEAD"), "changed": changed}
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
