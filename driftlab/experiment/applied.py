"""Conditions on trained drafters: where the drafters come from, and a cell for each condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driftlab.analysis.interventions import first_idle, from_settings
from driftlab.config import (
    Axes,
    Condition,
    DrafterConfig,
    Experiment,
    Provenance,
    Sourced,
    build_experiment,
)
from driftlab.data.corpus import Source
from driftlab.data.features import Features
from driftlab.data.text import Text
from driftlab.engines.align import Rows
from driftlab.engines.cell import FACTS, CellJob, fault_of
from driftlab.engines.habitat import PROMPTS
from driftlab.engines.probe import check_sink, measured_spans
from driftlab.errors import ConfigError, RunError
from driftlab.experiment.plan import Plan, variants
from driftlab.experiment.texts import prompt_rows
from driftlab.files import file_hash
from driftlab.models.checkpoints import stated_config
from driftlab.models.checkpoints.read import CONFIG, read_json
from driftlab.models.rounding import refuse_experts
from driftlab.models.target import Target
from driftlab.results.records import RunDirectory

_KEPT = (
    *("cell", "variant", "fusion_norm", "feedback", "residual", "attention_gate", "ttt", "seed"),
    *FACTS,
)


@dataclass(frozen=True)
class GivenDrafter:
    """A drafter of another run; ``row`` is its row of ``cells``."""

    cell: str
    folder: Path
    sha: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Given:
    """Drafters that another run has trained."""

    run: RunDirectory
    drafters: tuple[GivenDrafter, ...]

    def check(self, target: Target, boundaries: Sequence[int]) -> None:
        """Raise RunError when that run had another target or other boundaries."""
        manifest = self.run.manifest
        held = (manifest.get("inputs") or {}).get("target")
        if held != target.fingerprint:
            raise RunError(
                f"the drafters of {self.run.path} were trained for another target",
                got=(manifest.get("config") or {}).get("target", {}).get("source"),
                remedy="Name a run on the same base: --base, or --set applied.drafters=RUN.",
            )
        known = ((manifest.get("resolved") or {}).get("boundaries") or {}).get("value")
        if known != list(boundaries):
            raise RunError(
                f"the drafters of {self.run.path} read other boundaries",
                got=known,
                remedy=f"Set target.boundaries as there; here they are {list(boundaries)}.",
            )

    def provenance(self) -> Provenance:
        """Where the drafters' values came from, as the run that trained them says."""
        resolved = self.run.manifest.get("resolved") or {}
        return {
            name: Sourced.model_validate(stated)
            for name, stated in resolved.items()
            if name.startswith("drafter.")
        }

    def prompts(self) -> set[str]:
        """Marks of the prompts that they learned from, as far as their files tell."""
        told = (read_json(d.folder / CONFIG).get("provenance", {}) for d in self.drafters)
        return {mark for one in told if PROMPTS in one for mark in one[PROMPTS]["value"]["sha256"]}

    def record(self) -> dict[str, Any]:
        """For the manifest: which run, and the hash of every drafter that was used."""
        manifest = self.run.manifest
        return {
            "run": manifest.get("name"),
            "config_hash": manifest.get("config_hash"),
            "sha256": {d.cell: d.sha for d in self.drafters},
        }


def find_drafters(experiment: Experiment, out: Path) -> Given | None:
    """The drafters that ``applied.drafters`` names; None when the run trains its own.

    Raises
    ------
    RunError: no such run, it lacks drafters of the asked variants and seeds, or a drafter is not
        the one that it trained.
    """
    applied = experiment.applied
    if applied is None or not applied.drafters:
        return None
    named = applied.drafters
    sibling = out.parent / (f"{named}-{experiment.base}" if experiment.base else named)
    folder = sibling if (sibling / "manifest.json").exists() else Path(named)
    if not (folder / "manifest.json").exists():
        raise RunError(
            f"there are no drafters: neither {sibling} nor {named} is a run",
            remedy="Run the experiment that trains them first, or --set applied.drafters=RUN.",
        )
    run = RunDirectory.open(folder)
    _refuse_idle(experiment, run)
    cells = run.table("cells")
    cells = cells[(cells["axis"] == "trained") & cells["seed"].isin(experiment.seeds)]
    if applied.variants:
        cells = cells[cells["variant"].isin(applied.variants)]
    missing = sorted(set(applied.variants) - set(cells["variant"]))
    seeds = sorted(set(experiment.seeds) - set(cells["seed"].tolist()))
    if missing or seeds or not len(cells):
        raise RunError(
            f"{folder} lacks drafters",
            got=", ".join([*missing, *(f"seed {s}" for s in seeds)]) or "none at all",
            remedy="Set seeds and applied.variants to what that run trained, or applied.drafters "
            "to one that trained them all (driftlab merge makes one of several).",
        )
    if len(undone := cells[cells["train_steps"].isna()]):
        raise RunError(
            f"{folder} has not trained all of its drafters",
            got=", ".join(undone["cell"]),
            remedy="Run that experiment again until every cell is done.",
        )
    found = []
    for row in cells.sort_values(["seed", "cell"]).astype(object).to_dict("records"):
        drafter = folder / "drafters" / row["cell"]
        try:
            sha = file_hash(drafter / "config.json")
        except OSError:
            raise RunError(
                f"the drafter {drafter} is not there",
                remedy="Run the experiment that trains it again.",
            ) from None
        if fault := fault_of(drafter, row, run.drafter_of(row["cell"])):
            raise RunError(
                f"the drafter of {row['cell']} is not the one that {folder} trained",
                got=fault,
                remedy="Run that experiment again: it trains the drafter anew.",
            )
        known = {n: None if row[n] is None or row[n] != row[n] else row[n] for n in _KEPT}  # NaN
        found.append(GivenDrafter(row["cell"], drafter, sha, known))
    return Given(run, tuple(found))


def _refuse_idle(experiment: Experiment, run: RunDirectory) -> None:
    """Raise ConfigError for settings of training that ``run`` made its drafters without."""
    made, asked = run.manifest.get("config") or {}, experiment.model_dump(mode="json")
    lessons = {"train_prompts", "given", "train_tokens", "train_temperature"}
    if experiment.text.measure_new_tokens is not None:
        lessons.add("max_new_tokens")  # else measured texts are of that length
    for table in ("train", "drafter", "text"):
        there, spec = made.get(table) or {}, getattr(experiment, table)
        for name, known in type(spec).model_fields.items():
            if name == "checkpoint_every" or (table == "text" and name not in lessons):
                continue
            value = asked[table][name]
            named = getattr(spec, name) != known.default
            if named and name in there and there[name] != value:
                raise ConfigError(
                    f"{table}.{name} changes nothing: the drafters of {run.path} are trained",
                    got=f"{value}, they were made with {there[name]}",
                    remedy="Leave it as it is there, or train drafters of your own.",
                )
    trained = build_experiment(dict(made), where=str(run.path)).levels() if "axes" in made else {}
    for axis, values in experiment.levels().items():
        if getattr(experiment.axes, axis) == Axes.model_fields[axis].default:
            continue  # not named
        if other := [v for v in values if v not in trained.get(axis, values)]:
            raise ConfigError(
                f"axes.{axis} names what the drafters of {run.path} were not trained with",
                got=", ".join(map(str, other)),
                remedy="Leave it away: applied.variants chooses among the drafters that are there.",
            )


def unchanged_jobs(
    plan: Plan, given: Given, run: Path, frozen: Path, measured: Features, rows: Rows | None
) -> list[CellJob]:
    """Each given drafter as it is: what the conditions are compared with."""
    return [
        plan.job(
            *(run, frozen, measured, {**d.row, "axis": "trained", "condition": ""}),
            drafter=d.folder,
            rows=rows,
        )
        for d in given.drafters
    ]


def check_conditions(plan: Plan, given: Given | None) -> None:
    """Hold every condition against the drafters that it changes, before any text is written.

    Raises
    ------
    ConfigError: one names variants that are not there, or does not fit a drafter.
    ContractError: one rounds a mixture of experts.
    DataError: the prompts of one cannot be used.
    """
    applied = plan.experiment.applied
    if applied is None:
        return
    contracts: list[tuple[str, DrafterConfig]]
    if given is None:
        plain = plan.drafter_config()
        contracts = [
            (v.name, plain.model_copy(update=v.switches)) for v in variants(plan.experiment)
        ]
    else:
        contracts = [(d.row["variant"], stated_config(d.folder)) for d in given.drafters]
    chosen = _chosen("applied.variants", applied.variants, {name for name, _ in contracts})
    for condition in applied.conditions:
        wanted = _chosen(f"condition {condition.name}", condition.variants, chosen)
        if condition.changes_text:
            plan.prompts(condition)
        if condition.quantize:
            refuse_experts(plan.target)
        for name, config in contracts:
            if name not in wanted:
                continue
            try:
                for one in condition.interventions:
                    config = from_settings(one).fit(config)
            except ConfigError as error:
                raise ConfigError(
                    f"condition {condition.name} does not fit {name}: {error.what}",
                    got=error.got,
                    remedy="Correct it, or name the drafters that it is for in its variants.",
                ) from None


def _check_effect(condition: Condition, job: CellJob, features: Features) -> None:
    """Refuse a condition whose rows would be those of the unchanged drafter, which ``job`` is."""
    spans = measured_spans(features.texts, job.measure)
    check_sink(job.measure.sink, [length for _, length in spans])
    config = stated_config(job.drafter) if job.learning is None else job.learning.config
    made = map(from_settings, condition.interventions)
    if found := first_idle(made, config, spans, job.measure.depth):
        raise ConfigError(
            f"condition {condition.name}: {found[0]} changes nothing, {found[1]}",
            remedy="It would be labelled as one that does: correct or remove it.",
        )


@dataclass
class Changed:
    """Jobs of all conditions; ``notes`` and keys of ``states`` by condition, and ``warnings``, for
    the manifest."""

    jobs: list[CellJob] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def applied_jobs(
    plan: Plan, unchanged: Sequence[CellJob], run: RunDirectory, frozen: Path, measured: Features
) -> Changed:
    """A cell for each condition and drafter. Conditions share texts and states where they can."""
    applied = plan.experiment.applied
    assert applied is not None
    out, rows = Changed(), _TextRows(plan)
    variants = {job.row["variant"] for job in unchanged}
    chosen = _chosen("applied.variants", applied.variants, variants)
    for condition in applied.conditions:
        settings = tuple(dict(one) for one in condition.interventions)
        made = [from_settings(one) for one in settings]
        wanted = _chosen(f"condition {condition.name}", condition.variants, chosen)
        drafters = [job for job in unchanged if job.row["variant"] in wanted]
        features, reference = _states(plan, condition, measured, rows)
        for job in drafters:
            _check_effect(condition, job, features)
        # Not refused: of a series that is asked of every target, one may be what this one has.
        own = {text.tokens for text in features.texts} - {text.tokens for text in measured.texts}
        if not (own or made or condition.quantize):
            said = "changes nothing here: its texts are those of the unchanged drafter"
            out.warnings.append(f"condition {condition.name} {said}")
        out.states[condition.name] = features.key
        out.notes[condition.name] = {
            "interventions": [one.record() for one in made],
            "states": features.key,
            "drafters": len(drafters),
            "own_texts": condition.changes_text,
        }
        for job in drafters:
            cell = f"{job.cell}/{condition.name}"
            row = {**job.row, "cell": cell, "axis": "applied", "condition": condition.name}
            out.jobs.append(
                plan.job(
                    *(run.path, frozen, features, {**row, "coverage": None}),
                    drafter=job.drafter,
                    interventions=settings,
                    reference=reference,
                )
            )
    if rows.columns:
        run.write_texts(rows.columns)
    return out


def _chosen(who: str, named: Sequence[str], known: set[str]) -> set[str]:
    """The variants ``named`` by ``who``, all where none is; ConfigError: one is not ``known``."""
    if absent := sorted(set(named) - known):
        raise ConfigError(
            f"{who} names variants that are not there to be changed",
            got=", ".join(absent),
            remedy=f"There are: {', '.join(sorted(known))}.",
        )
    return set(named) or known


class _TextRows:
    """Rows of the table ``texts``, condition by condition."""

    def __init__(self, plan: Plan) -> None:
        self._spec = plan.experiment.measure
        self.columns: dict[str, list[Any]] = {}

    def add(self, condition: str, texts: Sequence[Text], found: Sequence[Source]) -> None:
        rows = prompt_rows(texts, found, self._spec)
        for name, values in {"condition": [condition] * len(texts), **rows}.items():
            self.columns.setdefault(name, []).extend(values)


def _states(
    plan: Plan, condition: Condition, measured: Features, rows: _TextRows
) -> tuple[Features, str | None]:
    """States that the drafters read under ``condition``; and the key of the unchanged target's
    states of the same texts when it is not that target that is read."""
    texts: Sequence[Text] = measured.texts
    if condition.changes_text:
        texts, found = plan.texts(condition)
        rows.add(condition.name, texts, found)
    label = f"states of {condition.name}"
    if condition.quantize is None:
        return (plan.states(texts, label) if condition.changes_text else measured), None
    plain = plan.states(texts, f"{label}, target unchanged") if condition.writes else measured
    if not condition.writes and condition.changes_text:
        plain = plan.states(texts, f"{label}, target unchanged")
    return plan.states(texts, label, plan.rounded(condition.quantize)), plain.key
