"""Whether figures that lie in a folder are those that a run and this code would give again.

Drawing takes seconds, and `driftlab ablate` has drawn once. Beside the figures a file notes what
they were made of: the run's tables, the settings that figures read, the code and its libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from driftlab.files import file_hash
from driftlab.results.records import SMALL, RunDirectory
from driftlab.results.schema import OPTIONAL
from driftlab.results.shards import atomic_file

NOTE = ".drawn.json"
_READ = ("schema_version", "config", "registered")  # of the manifest, by figures
_LIBRARIES = ("matplotlib", "numpy", "pandas", "scipy", "pyarrow")


def note(run: RunDirectory, folder: Path, drawn: Mapping[str, Mapping[str, Path]]) -> None:
    """Keep what ``drawn`` (paths by figure and suffix), all in ``folder``, was made of."""
    files = {
        name: {suffix: [path.name, file_hash(path)] for suffix, path in paths.items()}
        for name, paths in drawn.items()
    }
    with atomic_file(folder / NOTE) as file:
        file.write(json.dumps({"made_of": _made_of(run), "files": files}, indent=1).encode())


def unchanged(run: RunDirectory, folder: Path) -> dict[str, dict[str, Path]]:
    """The figures in ``folder``, as `save_figures` gives them; none if any is to be drawn again."""
    try:
        noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        if noted["made_of"] != _made_of(run):
            return {}
        found: dict[str, dict[str, Path]] = {}
        for name, files in noted["files"].items():
            for suffix, (file, digest) in files.items():
                if file_hash(folder / file) != digest:
                    return {}
                found.setdefault(name, {})[suffix] = folder / file
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # no such note, or no table: drawing says what is wrong
    return found


def _made_of(run: RunDirectory) -> str:
    manifest = run.manifest
    tables = [run.path / f"{name}.parquet" for name in (*SMALL, *OPTIONAL)]
    facts: dict[str, Any] = {
        "manifest": {key: manifest.get(key) for key in _READ},
        "tables": {path.name: file_hash(path) for path in tables if path.exists()},
        "code": [
            file_hash(path) for path in sorted(Path(__file__).parents[1].glob("results/*.py"))
        ],
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
