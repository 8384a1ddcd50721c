"""The frame says one thing: pins, targets, documents and the built package agree."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lock_lines() -> list[str]:
    return [row for row in read("requirements.lock").splitlines() if not row.startswith("#")]


def lock() -> dict[str, str]:
    return dict(row.split("==") for row in lock_lines())


def pins(requirements: list[str]) -> dict[str, str]:
    """``name==version`` requirements as a mapping; anything looser is refused."""
    for row in requirements:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", row), f"{row} is not an exact pin"
    return dict(row.split("==") for row in requirements)


def imported(path: Path) -> set[str]:
    """The modules that a file imports by absolute name."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return plain | {node.module for node in named if node.module}


def targets() -> set[str]:
    """The targets of the Makefile that a person calls."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    return set(phony.split())


# -- pins


def test_the_lock_is_sorted_exact_and_free_of_local_builds() -> None:
    names = list(pins(lock_lines()))
    assert names == sorted(set(names))
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]


def test_pyproject_agrees_with_the_lock() -> None:
    extras = dict(PROJECT["project"]["optional-dependencies"])
    ray = extras.pop("ray")
    named = {
        "build-system": PROJECT["build-system"]["requires"],
        "dependencies": PROJECT["project"]["dependencies"],
        **extras,
    }
    locked = lock()
    assert not set(pins(ray)) & set(locked), "ray comes on top of the default install"
    for where, rows in named.items():
        for name, version in pins(rows).items():
            assert locked.get(name) == version, f"{where}: {name}"


def test_conda_takes_its_pins_from_the_lock() -> None:
    rows = [row.strip() for row in read("environment.yml").splitlines()]
    wanted = rows[rows.index("dependencies:") + 1 :]
    assert wanted == ["- python=3.11", "- pip", "- pip:", "- -r requirements.lock", "- -e ."]
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_what_is_installed_is_what_is_locked() -> None:
    found = {
        name: importlib.metadata.version(name).partition("+")[0]
        for name in pins(PROJECT["project"]["dependencies"])
    }
    assert found == {name: lock()[name] for name in found}


def test_every_import_is_a_declared_dependency() -> None:
    """A package that only comes along with another one may leave with it."""
    declared = {
        name.replace("-", "_")
        for rows in (
            PROJECT["project"]["dependencies"],
            *PROJECT["project"]["optional-dependencies"].values(),
        )
        for name in pins(rows)
    }
    files = [path for folder in ("driftlab", "tests") for path in (ROOT / folder).rglob("*.py")]
    used = {module.split(".")[0] for path in files for module in imported(path)}
    ours = {"driftlab"} | {path.stem for path in (ROOT / "tests").rglob("*.py")}
    ours |= {path.stem for path in (ROOT / "tests").iterdir()}
    ours |= {path.stem for path in (ROOT / "papers").rglob("*.py")}
    used = {"pillow" if name == "PIL" else name for name in used}
    assert used - set(sys.stdlib_module_names) - ours - declared == set()


# -- version and entry point


def test_one_version() -> None:
    version = PROJECT["project"]["version"]
    assert importlib.metadata.version("driftlab") == version
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), flags=re.MULTILINE)[0] == version


def test_the_command_exists() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="driftlab")
    assert entry.value == PROJECT["project"]["scripts"]["driftlab"]
    assert callable(entry.load())


# -- make and continuous integration


def test_help_lists_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # The flags of an outer make would be inherited and read as arguments.
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^make (\S+)  *\S", shown, flags=re.MULTILINE)) == targets()


def test_documents_name_targets_that_exist() -> None:
    for name in [*DOCUMENTS, ".ci/run", "tests/conftest.py"]:
        named = set(re.findall(r"(?:`|^ *|-- )make ([a-z][a-z0-9-]*)", read(name), re.MULTILINE))
        assert named <= targets(), name


def test_long_targets_say_where_the_results_are() -> None:
    for name in ("ablate", "smollm2"):
        (body,) = re.findall(rf"^{name}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
        assert f"Results: $(OUT)/{'micro' if name == 'ablate' else name}" in body.splitlines()[-1]


def test_ci_runs_every_check_and_pytest_last() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    call = r"^(?:step|exec make --no-print-directory) ([a-z-]+)$"
    steps = re.findall(call, read(".ci/run"), flags=re.MULTILINE)
    assert steps == ["setup", "lint", "types", "ablate", "bench-smoke", "audit", "test"]
    assert re.search(r"^test: .*\n\t.*-m pytest$", MAKEFILE, flags=re.MULTILINE)


def test_warnings_are_errors() -> None:
    assert PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"][0] == "error"


# -- documents


@pytest.mark.parametrize(
    "page", [*DOCUMENTS, *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
)
def test_links_and_pictures_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", read(page))
    folder = (ROOT / page).parent
    missing = [link for link in links if "://" not in link and not (folder / link).exists()]
    assert not missing


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = read("LICENSE")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_nothing_committed_is_private_to_a_machine() -> None:
    for name in [*DOCUMENTS, "Makefile", ".ci/run", "requirements.lock", "environment.yml"]:
        assert not re.search(r"/(root|home|work|opt|Users)/|file://", read(name)), name


# -- the package


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "driftlab", tmp_path / "driftlab", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "driftlab").rglob("*")
        if path.is_file()
    }
    assert wanted <= inside
    assert "driftlab/data/suites/micro.toml" in inside


def test_numbers_in_the_readme_are_the_papers() -> None:
    """They are typed there; the papers' page computes them from committed tables."""
    page = read("papers/attention-drift/README.md")
    told = re.findall(r"-?x?\d[\d.]* \[[^\]]*\]", read("README.md"))
    assert len(told) >= 6
    assert [number for number in told if number not in page] == []


def test_every_disagreement_that_the_code_cites_is_explained() -> None:
    rows = re.findall(r"^\| (X\d+) \|", read("docs/checkpoints.md"), flags=re.MULTILINE)
    assert rows == [f"X{n}" for n in range(1, 27)]
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "driftlab").rglob("*.py"))
    assert set(re.findall(r"\bX\d+\b", code)) <= set(rows)
