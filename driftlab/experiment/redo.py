"""A run again from its manifest: the same settings, and whether the tables came out equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftlab.config import Experiment, build_experiment
from driftlab.engines.cell import DONE
from driftlab.errors import RunError
from driftlab.results.manifest import read_manifest
from driftlab.results.merge import identity
from driftlab.results.records import RunDirectory, config_hash


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of an experiment's run; ``path`` is the file or its folder.

    Raises RunError when it cannot be read, or was written by another command.
    """
    path = path / "manifest.json" if path.is_dir() else path
    found = read_manifest(path, "Give the manifest.json of a run.")
    if "axes" not in (found.get("config") or {}):
        raise RunError(
            f"{path} describes no experiment", remedy="Give what `ablate` or `train` wrote."
        )
    return found


def differences(
    stored: Mapping[str, Any], versions: Mapping[str, str], git: Mapping[str, Any] | None
) -> list[str]:
    """What of the code differs from the code that made ``stored``, in words."""
    found = [f"{name} {then} then, {now} now" for name, then, now in _apart(stored, versions, git)]
    if (stored.get("git") or {}).get("changed"):
        found.append("its code had changes that no commit holds")
    if git and git.get("changed"):
        found.append("this code has changes that no commit holds")
    return found


def resumed_by_other_code(stored: Mapping[str, Any]) -> list[str]:
    """Each time that ``stored`` was resumed by other code than began it, in words."""
    found = []
    for entry in stored.get("resumed") or ():
        if isinstance(entry, str) or not {"versions", "git"} & {*entry}:
            continue
        versions = entry.get("versions", stored.get("versions") or {})
        unlike = _apart(stored, versions, entry.get("git", stored.get("git")))
        apart = [f"{name} {then} and then {now}" for name, then, now in unlike]
        said = "; ".join(apart or ["changes that no commit holds"])
        found.append(f"resumed at {entry['time']} by other code than began the run: {said}")
    return found


def _apart(
    stored: Mapping[str, Any], versions: Mapping[str, str], git: Mapping[str, Any] | None
) -> list[tuple[str, str, str]]:
    """What has another version or commit: its name, in ``stored``, and as given."""
    then = stored.get("versions") or {}
    found = [
        (name, then.get(name, "unknown"), versions.get(name, "absent"))
        for name in sorted({*versions, *then})
        if versions.get(name) != then.get(name)
    ]
    old, new = ((code or {}).get("commit") for code in (stored.get("git"), git))
    return found if old == new else [*found, ("commit", str(old)[:12], str(new)[:12])]


def experiment_of(
    path: Path,
    versions: Mapping[str, str],
    git: Mapping[str, Any] | None,
    *,
    other_code: bool,
    overrides: tuple[str, ...] = (),
) -> tuple[Experiment, dict[str, Any], list[str]]:
    """Settings of the run that ``path`` describes, its manifest, and how the code differs.

    Raises
    ------
    RunError: it was made by other code, and ``other_code`` does not allow that; or its settings
        are not those that its hash was made of.
    ConfigError: its settings are none of this version.
    """
    stored = manifest_of(path)
    apart = differences(stored, versions, git) + resumed_by_other_code(stored)
    experiment = build_experiment(dict(stored["config"]), where=str(path))
    if config_hash(identity(experiment)) != stored.get("config_hash"):
        edited = "its settings are not those of its config_hash: edited, or hashed by other code"
        if not apart:
            raise RunError(
                f"{path} does not describe the run that was made",
                got=edited,
                remedy="Restore it, or put the settings into an experiment file.",
            )
        apart.append(edited)
    if apart and not other_code:
        raise RunError(
            f"{path} was made by other code",
            got="; ".join(apart),
            remedy="Use the code that made it, or allow other code with --other-code.",
        )
    if overrides:
        experiment = build_experiment(dict(stored["config"]), overrides, where=str(path))
    return experiment, stored, apart


def refuse_same(path: Path, out: Path) -> None:
    """Raise RunError when ``out`` is the run that ``path`` describes: nothing would be made, and
    its tables would be compared with themselves."""
    folder = path if path.is_dir() else path.parent
    if out.resolve() == folder.resolve():
        raise RunError(
            f"{out} is the run that is to be made again",
            remedy="Give --out a folder of its own; without --out it is NAME-again.",
        )


def cells_of(out: Path) -> int:
    """Cells that ``out`` holds and that are done; others in it are made again."""
    if not (out / "manifest.json").exists():
        return 0
    return sum(row["status"] == DONE for row in RunDirectory.open(out).rows_of_cells())


def verdict(stored: Mapping[str, Any], run: RunDirectory, kept: int = 0) -> str:
    """Which tables and inputs are what the manifest says, and how many cells, ``kept``, were
    there before and so were not made again."""
    made, told = run.manifest, []
    if not stored.get("tables"):
        return "it was not finished, and has no tables to compare with."
    for kind in ("inputs", "tables"):
        old, new = stored.get(kind) or {}, made.get(kind) or {}
        # The cells' table holds wall times.
        names = sorted({*old, *new} - {"cells"})
        other = [n for n in names if _mark(old.get(n)) != _mark(new.get(n))]
        told.append(
            f"{len(names) - len(other)} of {len(names)} {kind} equal the first run's byte for byte"
            + (f"; others: {', '.join(other)}" if other else "")
        )
    counts = [int((m.get("tables") or {}).get("cells", {}).get("rows", 0)) for m in (stored, made)]
    if counts[0] != counts[1]:
        told.append(
            f"the first run has {counts[0]} cells and this one {counts[1]}, every variant with "
            "every seed, so that tables cannot be equal"
        )
    if kept:
        told.append(f"{kept} of {len(run.table('cells'))} cells were there and not made again")
    return ". ".join(told) + "."


def _mark(value: object) -> object:
    """What must be equal: of a table its hash. Of drafters, by name, all of them."""
    return value["sha256"] if isinstance(value, Mapping) and "sha256" in value else value
