"""Committed results: the small tables of a run, and the figures that they give.

    papers/attention-drift/<item>/tables/    manifest.json and the small Parquet tables
    papers/attention-drift/<item>/figures/   PNG, PDF and CSV, drawn from those tables alone

``driftlab figures RUN --publish ITEM`` makes an item, ``driftlab figures PAPER`` draws a paper's
items again, and ``--check`` proves that what is committed is what the tables give.
"""

from __future__ import annotations

import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from driftlab.errors import RunError
from driftlab.results.figures import save_figures
from driftlab.results.records import SMALL, RunDirectory
from driftlab.results.shards import atomic_file

# Numbers drawn again on another machine differ in the last digits that are written.
RELATIVE = 1e-4
# Mean difference of two drawings of one figure, in grey levels of 255.
GREY = 1.0


def items(paper: str | Path) -> list[Path]:
    """The item folders below ``paper``, sorted."""
    return sorted(p.parent.parent for p in Path(paper).glob("*/tables/manifest.json"))


def is_paper(folder: str | Path) -> bool:
    """Whether ``folder`` holds items and is no run itself."""
    return not (Path(folder) / "manifest.json").exists() and bool(items(folder))


def publish(run: str | Path, item: str | Path) -> Path:
    """Copy the small tables of a finished run to ``item`` and draw its figures.

    Raises
    ------
    RunError: there is no finished run, or the item holds another run's tables.
    """
    source, tables = RunDirectory.open(run), Path(item) / "tables"
    if (tables / "manifest.json").exists():
        old = RunDirectory.open(tables).manifest
        if old.get("name") != source.manifest.get("name"):
            raise RunError(
                f"{item} holds tables of another experiment",
                got=old.get("name"),
                remedy="Choose another folder, or remove that item first.",
            )
    cells = source.tables().cells  # all can be read, before anything is replaced
    if unfinished := list(cells["cell"][cells["status"] != "done"]):
        raise RunError(
            f"{run} has cells that are not done",
            got=", ".join(unfinished),
            remedy="Run it again until every cell is done.",
        )
    for name in (*(f"{table}.parquet" for table in SMALL), "manifest.json"):
        with atomic_file(tables / name) as file, (source.path / name).open("rb") as made:
            shutil.copyfileobj(made, file)
    save_figures(RunDirectory.open(tables), Path(item) / "figures")
    return Path(item)


def draw(paper: str | Path, *, check: bool = False) -> list[str]:
    """Draw every item's figures; with ``check``, write nothing and list the files that differ."""
    found: list[str] = []
    for item in items(paper):
        run = RunDirectory.open(item / "tables")
        if check:
            found += [f"{item.name}/tables/{name}" for name in changed_tables(run)]
            found += [f"{item.name}/figures/{name}" for name in stale(run, item / "figures")]
        else:
            save_figures(run, item / "figures")
    return found


def changed_tables(run: RunDirectory) -> list[str]:
    """Tables of ``run`` that are no longer the ones that its manifest knows by their hash."""
    noted = run.manifest.get("tables") or {}
    return [
        path.name
        for path in sorted(run.path.glob("*.parquet"))
        if sha256(path.read_bytes()).hexdigest() != noted.get(path.stem, {}).get("sha256")
    ]


def stale(run: RunDirectory, folder: Path) -> list[str]:
    """Files of ``folder`` that are missing or are not what the tables of ``run`` give."""
    with tempfile.TemporaryDirectory() as scratch:
        drawn = save_figures(run, scratch)
        expected = {path.name: path for paths in drawn.values() for path in paths.values()}
        found = [n for n, path in sorted(expected.items()) if not _same(folder / n, path)]
    extra = sorted(path.name for path in folder.glob("[!.]*") if path.name not in expected)
    return found + [f"{name} (no table gives it)" for name in extra]


def _same(committed: Path, drawn: Path) -> bool:
    """Whether two files show the same numbers; not byte by byte, fonts and sums may differ."""
    if not committed.exists():
        return False
    if committed.read_bytes() == drawn.read_bytes():
        return True
    if drawn.suffix == ".csv":
        return _same_numbers(committed, drawn)
    if drawn.suffix == ".png":
        return _same_picture(committed, drawn)
    # A PDF is drawn together with its PNG, from the same CSV; its size tells a stale one.
    return abs(committed.stat().st_size - drawn.stat().st_size) <= 0.02 * drawn.stat().st_size


def _same_numbers(committed: Path, drawn: Path) -> bool:
    import pandas as pd

    try:
        pd.testing.assert_frame_equal(
            pd.read_csv(committed), pd.read_csv(drawn), rtol=RELATIVE, atol=1e-6
        )
    except (AssertionError, ValueError):
        return False
    return True


def _same_picture(committed: Path, drawn: Path) -> bool:
    import numpy as np
    from PIL import Image

    try:
        with Image.open(committed) as a, Image.open(drawn) as b:
            if a.size != b.size:
                return False
            left, right = (np.asarray(p.convert("L"), dtype=np.int16) for p in (a, b))
    except (OSError, SyntaxError, ValueError):  # what PIL makes of a damaged file
        return False
    return float(np.abs(left - right).mean()) <= GREY
