"""Imports point down. The floors are read from ARCHITECTURE.md, so that the picture stays true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "driftlab"
FILES = sorted(PACKAGE.rglob("*.py"))
LIGHT = [path for path in FILES if path.relative_to(PACKAGE).parts[0] in ("results", "papers")]

# What may be imported without paying for a model: nothing of these.
HEAVY = {"torch", "transformers", "captum", "accelerate", "gguf"}


def floors() -> dict[str, int]:
    """Room -> height, from the one line of ARCHITECTURE.md that starts with ``floors:``."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (line,) = [row for row in text.splitlines() if row.strip().startswith("floors:")]
    levels = line.split(":", 1)[1].split(">")
    return {
        room.strip(): len(levels) - i for i, level in enumerate(levels) for room in level.split(",")
    }


def room_of(module: str) -> str:
    """``driftlab.models.target`` -> ``models``; the package itself is the room ``driftlab``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "driftlab"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file: at any depth, relative ones resolved, and
    ``import_module`` with a literal name."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if base == "driftlab" else base
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
            in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def faults(path: Path, heights: dict[str, int]) -> list[str]:
    """Every import of ``path`` that points up or sideways, as one line each."""
    here = room_of(module_of(path))
    found = []
    for line, module in imports(path):
        if module.split(".")[0] != "driftlab":
            continue
        there = room_of(module)
        if there in {here, "__version__"} or here == "driftlab":
            continue
        if there not in heights:
            found.append(f"{path}:{line}: {here} imports {module}, which has no floor")
        elif heights[there] >= heights[here]:
            found.append(f"{path}:{line}: {here} must not import {module}")
    return found


def test_every_room_has_a_floor_and_every_floor_a_room() -> None:
    rooms = {room_of(module_of(path)) for path in FILES} - {"driftlab"}
    assert rooms == set(floors())


def test_the_picture_names_every_file() -> None:
    """ARCHITECTURE.md draws the tree; a file that it does not name is not in the picture."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text[text.index("    driftlab/\n") : text.index("Two borders")]
    words = set(re.findall(r"[a-z_]+", tree))
    drawn = words | {"__init__"}
    assert {path.stem for path in FILES if "checkpoints" not in path.parts} - drawn == set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    assert faults(path, floors()) == []


def test_results_holds_no_model_library() -> None:
    for path in LIGHT:
        heavy = [(line, m) for line, m in imports(path) if m.split(".")[0] in HEAVY]
        assert heavy == [], path


def test_transformers_is_known_in_one_room() -> None:
    users = {
        room_of(module_of(path))
        for path in FILES
        if any(module.split(".")[0] == "transformers" for _, module in imports(path))
    }
    assert users == {"models"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from driftlab.engines import anchors", 1),
        ("import driftlab.experiment", 1),
        ("from driftlab import cli", 1),
        ("from ..experiment import run", 1),
        ("def f():\n    from driftlab.data.text import Text", 1),
        ("import importlib\nimportlib.import_module('driftlab.cli')", 1),
        ("from driftlab.nowhere import x", 1),
        ("from driftlab.models.target import Target\nfrom .measures import mass\nimport torch", 0),
    ],
)
def test_the_reader_sees_each_way_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: int
) -> None:
    folder = tmp_path / "driftlab" / "analysis"
    folder.mkdir(parents=True)
    (folder / "probe.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "driftlab")
    assert len(faults(folder / "probe.py", floors())) == expected


def _loaded(statement: str) -> set[str]:
    """The HEAVY libraries that are loaded after ``statement`` in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_driftlab_loads_no_model_library() -> None:
    assert _loaded("import driftlab") == set()


def test_importing_results_loads_no_model_library() -> None:
    modules = [module_of(path) for path in LIGHT]
    assert _loaded("\n".join(f"import {module}" for module in modules)) == set()
