"""Committed results: the small tables of a run, and the figures that they give.

    papers/attention-drift/<item>/tables/    manifest.json and the small Parquet tables
    papers/attention-drift/<item>/figures/   PNG, PDF and CSV, drawn from those tables alone

``driftlab figures RUN --publish ITEM`` makes an item, ``driftlab figures PAPER`` draws a paper's
items again, and ``--check`` proves that what is committed is what the tables give.
"""

from __future__ import annotations

import shutil
import tempfile
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
    source.tables()  # every table is there and can be read, before anything is replaced
    for name in (*(f"{table}.parquet" for table in SMALL), "manifest.json"):
        with atomic_file(tables / name) as file, (source.path / name).open("rb") as made:
            shutil.copyfileobj(made, file)
    save_figures(RunDirectory.open(tables), Path(item) / "figures")
    return Path(item)


def draw(paper: str | Path, *, check: bool = False) -> list[str]:
    """Draw every item's figures; with ``check``, write nothing and list the files that differ."""
    stale: list[str] = []
    for item in items(paper):
        run = RunDirectory.open(item / "tables")
        if not check:
            save_figures(run, item / "figures")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            drawn = save_figures(run, scratch)
            expected = {path.name: path for paths in drawn.values() for path in paths.values()}
            for name, path in sorted(expected.items()):
                if not _same(item / "figures" / name, path):
                    stale.append(f"{item.name}/figures/{name}")
            stale += [
                f"{item.name}/figures/{p.name} (no table gives it)"
                for p in sorted((item / "figures").glob("*"))
                if p.name not in expected
            ]
    return stale


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

    with Image.open(committed) as a, Image.open(drawn) as b:
        if a.size != b.size:
            return False
        left, right = (np.asarray(p.convert("L"), dtype=np.int16) for p in (a, b))
    return float(np.abs(left - right).mean()) <= GREY
