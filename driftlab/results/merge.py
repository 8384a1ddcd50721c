"""What a run is known by, and several runs of one kind made into one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from filecmp import cmp
from pathlib import Path
from typing import Any

from driftlab.config import Axes, Experiment, build_experiment
from driftlab.errors import RunError
from driftlab.results.records import RunDirectory, config_hash
from driftlab.results.shards import atomic_file

_UNMOVED = (
    *("question", "base", "analysis", "workers", "train.checkpoint_every", "measure.bootstrap"),
    *("applied.drafters", "target.device_map", "target.tp_plan"),
)
"""Settings that move no row."""
_MERGED = ("name", "seeds", "axes")
"""Settings in which the parts of one run may differ, beside those."""


def identity(experiment: Experiment) -> dict[str, Any]:
    """The settings that rows depend on. A run may be resumed with others changed.

    Settings that were added later are left out while they are off, so that runs which were begun
    before can be resumed.
    """
    config = experiment.model_dump(mode="json")
    for setting in _UNMOVED:
        table, _, name = setting.rpartition(".")
        if (place := config[table] if table else config) is not None:  # a run without [applied]
            del place[name]
    off: dict[tuple[str, str], Any] = {("train", "alignment"): 0.0, ("train", "align_layer"): None}
    off |= {("train", "evaluate_every"): None}
    off |= {("measure", "agreement"): False, ("axes", "alignment"): []}
    off |= {("axes", "steps_scale"): [], ("axes", "lr_scale"): []}
    for (table, name), value in off.items():
        if config[table][name] == value:
            del config[table][name]
    if experiment.applied is None:
        del config["applied"]
    return config


def merge(runs: Sequence[str | Path], out: str | Path) -> RunDirectory:
    """Make one run of finished runs that differ only in ``_MERGED`` and ``_UNMOVED``.

    Cells, drafters and rows are copied as they are (drafters are hard links where the disk allows
    it). When the cells are the product of the merged axes and seeds, ``driftlab ablate`` with such
    an experiment knows the merged run as its own and resumes it. Merging again goes on where it
    was killed. Each run's own versions, and when its comparisons were fixed, stay in ``merged``;
    what is said of all of them is said only where they agree, and what was late or changed in one
    of them counts for all. Of ``_UNMOVED`` settings the first run's are taken.

    Raises
    ------
    RunError: fewer than two runs, one is not finished, lacks pieces or is a probe's, they differ
        otherwise (it is said in what) or registered other comparisons, hold the same cell, or
        ``out`` holds another run, or files that these runs do not hold.
    """
    found = [RunDirectory.open(path) for path in runs]
    if len(found) < 2:
        raise RunError("merging takes two runs or more", got=len(found))
    manifests = [run.manifest for run in found]
    experiments = [_experiment(run) for run in found]
    _refuse_unlike(found, manifests, experiments)
    rows = [run.table("cells").to_dict("records") for run in found]
    owners: dict[str, Path] = {}
    for run, own in zip(found, rows, strict=True):
        for row in own:
            if row["cell"] in owners:
                raise RunError(
                    f"{owners[row['cell']]} and {run.path} both hold the cell {row['cell']}",
                    remedy="Merge runs of other seeds or variants.",
                )
            if row["status"] != "done":
                raise RunError(
                    f"{run.path} is not finished",
                    got=f"{row['cell']}: {row['status']}",
                    remedy="Run it again until every cell is done.",
                )
            owners[row["cell"]] = run.path
    for run in found:
        run.refuse_incomplete()
    out = Path(out)
    merged = _union(experiments, _name(out))
    first = manifests[0]
    manifest = {
        **{name: first[name] for name in _KEPT if name in first},
        **_sourced(manifests),
        **_drafters(manifests),
        **_conditions(first, Counter(row["condition"] for own in rows for row in own)),
        **{n: v for n in ("precision", "supervised") if (v := _agreed(manifests, n)) is not None},
        **{n: said for n in ("warnings", "differs") if (said := _all_said(manifests, n))},
        "config": merged.model_dump(mode="json"),
        "config_hash": config_hash(identity(merged)),
        "owners": sorted(
            {owner for m in manifests for owner in (m["config_hash"], *m.get("owners", ()))}
        ),
        "name": merged.name,
        "command": shlex.join(["driftlab", "merge", *map(str, runs), "--out", str(out)]),
        "stages": _stages(manifests),
        "merged": [
            {n: m.get(n) for n in _ALWAYS}
            | {n: m[n] for n in _OWN if n in m}
            | {"cells": sorted(row["cell"] for row in own)}
            for m, own in zip(manifests, rows, strict=True)
        ],
    }
    if registered := _registered(manifests, experiments[0]):
        manifest["registered"] = registered
    files = _files(found)
    if (out / "manifest.json").exists():
        _refuse_stale(out, files, manifest)
    with RunDirectory.create(out, manifest) as made:
        for name, source in files.items():
            _copy(source, out / name, link=name.parts[0] == "drafters")
        made.finish(owners)
    return RunDirectory.open(out)


def _stages(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the runs took together: seconds (sum) and peak memory (MiB, largest) of each stage."""
    found: dict[str, dict[str, float]] = {}
    for manifest in manifests:
        for name, stage in (manifest.get("stages") or {}).items():
            so_far = found.setdefault(name, {"seconds": 0.0, "peak_mib": 0.0})
            so_far["seconds"] = round(so_far["seconds"] + stage["seconds"], 2)
            so_far["peak_mib"] = max(so_far["peak_mib"], stage["peak_mib"])
    return found


_OWN = ("registered", "precision", "supervised", "corrected", "resumed")
_ALWAYS = ("name", "config_hash", "command", "created", "versions", "git", "hardware")
_KEPT = ("question", "versions", "git", "hardware", "inputs", "coverage")


def _drafters(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is said of drafters that other runs have trained: of all, by the names of those runs."""
    said = [m["drafters"] for m in manifests if m.get("drafters")]
    if not said:
        return {}
    hashes = {cell: sha for m in manifests for cell, sha in m["inputs"]["drafters"].items()}
    named = {
        n: ", ".join(dict.fromkeys(str(one.get(n)) for one in said)) for n in ("run", "config_hash")
    }
    inputs = {**manifests[0]["inputs"], "drafters": hashes}
    return {"inputs": inputs, "drafters": {**named, "sha256": hashes}}


def _sourced(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The resolved values, which agree; what one of the runs assumed is assumed."""
    assumed, resolved = (
        {name: said for m in reversed(manifests) for name, said in (m.get(n) or {}).items()}
        for n in ("assumed", "resolved")
    )
    return {"assumed": assumed, "resolved": {**resolved, **assumed}}


def _conditions(manifest: Mapping[str, Any], cells: Counter[str]) -> dict[str, Any]:
    """The notes of all conditions, with the drafters that the merged ``cells`` count."""
    notes = manifest.get("conditions")
    if notes is None:
        return {}
    return {"conditions": {n: {**note, "drafters": cells[n]} for n, note in notes.items()}}


def _agreed(manifests: Sequence[Mapping[str, Any]], name: str) -> Any:
    """What all runs that say ``name`` say of it; None where they disagree or say nothing."""
    said = [m[name] for m in manifests if m.get(name) is not None]
    return said[0] if said and all(value == said[0] for value in said) else None


def _all_said(manifests: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(line for m in manifests for line in m.get(name) or ()))


def _registered(
    manifests: Sequence[Mapping[str, Any]], experiment: Experiment
) -> dict[str, Any] | None:
    """When the comparisons were fixed: of the runs that say it, the one with most against it."""
    said: list[dict[str, Any]] = [dict(m["registered"]) for m in manifests if m.get("registered")]
    if not said or experiment.analysis is None:
        return None
    now = experiment.analysis.model_dump(mode="json")
    worst = max(said, key=lambda one: one.get("analysis") != now)
    return {**worst, "rows": any(one.get("rows") for one in said)}


def _experiment(run: RunDirectory) -> Experiment:
    config = run.manifest.get("config") or {}
    if "axes" not in config:
        raise RunError(
            f"{run.path} is a probe's run, which is no part of an experiment",
            remedy="Compare two of them: driftlab compare RUN RUN. In Python ProbeRun.beside sets "
            "several beside each other.",
        )
    return build_experiment(dict(config), where=str(run.path))


def _refuse_unlike(
    runs: Sequence[RunDirectory],
    manifests: Sequence[Mapping[str, Any]],
    experiments: Sequence[Experiment],
) -> None:
    first = _leaves(_alike(experiments[0]))
    for run, manifest, experiment in zip(runs[1:], manifests[1:], experiments[1:], strict=True):
        other = _leaves(_alike(experiment))
        differs = {n: (first.get(n), other.get(n)) for n in sorted({*first, *other})}
        differs = {n: pair for n, pair in differs.items() if pair[0] != pair[1]}
        held, given = manifests[0].get("inputs") or {}, manifest.get("inputs") or {}
        for name in sorted({*held, *given} - {"drafters"}):
            if held.get(name) != given.get(name):
                differs[f"inputs.{name}"] = (held.get(name), given.get(name))
        values, others = (m.get("resolved") or {} for m in (manifests[0], manifest))
        for name in sorted({*values} & {*others}):
            pair = (values[name].get("value"), others[name].get("value"))
            if pair[0] != pair[1]:
                differs[f"resolved.{name}"] = pair
        if differs:
            said = "; ".join(f"{n}: {a} and {b}" for n, (a, b) in differs.items())
            raise RunError(
                f"{runs[0].path} and {run.path} are no parts of one run",
                got=said,
                remedy=f"Only these may differ: {', '.join((*_MERGED, *_UNMOVED))}.",
            )
        if experiments[0].analysis != experiment.analysis:
            raise RunError(
                f"{runs[0].path} and {run.path} registered other comparisons",
                got=f"{_stated(experiments[0])} and {_stated(experiment)}",
                remedy="Merge runs whose files have the same [analysis]. A merged run without it "
                "would hide what was fixed before.",
            )
        if not runs[0].table("prompts").equals(run.table("prompts")):
            raise RunError(f"{runs[0].path} and {run.path} measured other texts")


def _stated(experiment: Experiment) -> str:
    if experiment.analysis is None:
        return "none"
    first, more = experiment.analysis.primary, len(experiment.analysis.family)
    return f"{first.measure} by {first.factor}, {more} beside it"


def _alike(experiment: Experiment) -> dict[str, Any]:
    config = identity(experiment)
    return {n: v for n, v in config.items() if n not in _MERGED}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _name(out: Path) -> str:
    """A folder's name as that of an experiment."""
    return re.sub(r"[^a-z0-9._-]+", "-", out.resolve().name.lower()).strip("._-") or "merged"


def _union(experiments: Sequence[Experiment], name: str) -> Experiment:
    """The first experiment with the seeds and axes of all, each value in the order of its enum
    (numbers ascending), so that one experiment file gives the same settings."""
    data = experiments[0].model_dump(mode="json")
    data["name"] = name
    data["seeds"] = sorted({seed for e in experiments for seed in e.seeds})
    for axis in Axes.model_fields:
        named = any(getattr(e.axes, axis) for e in experiments)
        values = {value for e in experiments for value in e.levels()[axis]} if named else set()
        kind = type(next(iter(values), None))
        order = list(kind) if issubclass(kind, Enum) else sorted(values)
        data["axes"][axis] = [v for v in order if v in values]
    return build_experiment(data, where="merged runs")


def _files(runs: Sequence[RunDirectory]) -> dict[Path, Path]:
    """Everything that belongs to a cell, by its place in a run; of rows that runs share, the
    first run's."""
    found: dict[Path, Path] = {}
    for run in runs:
        for folder in _FOLDERS:
            for path in sorted((run.path / folder).rglob("*")):
                if path.is_file() and not path.name.startswith("."):
                    found.setdefault(path.relative_to(run.path), path)
    return found


_FOLDERS = ("shards", "rows", "drafters")


def _refuse_stale(out: Path, files: Mapping[Path, Path], manifest: Mapping[str, Any]) -> None:
    """Raise RunError when ``out`` is no part of this very merge: then its rows would be kept."""
    stored = RunDirectory.open(out).manifest
    if stored.get("config_hash") != manifest["config_hash"]:
        return  # another run, which is said where runs are made
    remedy = "Delete that folder, or merge into another one."
    held, given = stored.get("inputs") or {}, manifest.get("inputs") or {}
    if lost := [n for n in sorted({*held, *given}) if held.get(n) != given.get(n)]:
        raise RunError(
            f"{out} was merged from runs of other models or texts",
            got=f"changed since: {', '.join(lost)}",
            remedy=remedy,
        )
    for folder in _FOLDERS:
        for path in sorted((out / folder).rglob("*")):
            if not path.is_file() or path.name.startswith("."):
                continue
            source = files.get(name := path.relative_to(out))
            if source is None or not (path.samefile(source) or cmp(path, source, shallow=False)):
                what = "none of the runs holds" if source is None else "now differs from the run's"
                raise RunError(
                    f"{out} was merged from other rows", got=f"{name}, which {what}", remedy=remedy
                )


def _copy(source: Path, place: Path, *, link: bool) -> None:
    """``source`` at ``place``; what is there already is equal, and stays."""
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not link:
            raise OSError  # small, and rewritten when they are damaged
        os.link(source, place)
    except OSError:
        with atomic_file(place) as file, source.open("rb") as made:
            shutil.copyfileobj(made, file)
