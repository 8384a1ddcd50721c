"""Committed results: the small tables of a run, and the figures and pages that they give.

    ITEM/tables/         manifest.json and the small Parquet tables of a run
    ITEM/figures/        PNG, PDF and CSV, drawn from those tables alone

A folder with ``paper.toml`` has pages instead (see papers/pages.py); its tables are reduced:

    PAPER/runs/NAME/     manifest.json and what the pages need of a run's tables
    PAPER/runs/explained-BASE/   the same of a run's explanation, and nothing that it measured
    PAPER/README.md, PAPER/<item>/, PAPER/note.typ   written from them

``driftlab figures RUN --publish ITEM`` (or ``PAPER/runs/NAME``) stores a run, ``driftlab figures
PAPER`` draws a paper again, and ``--check`` proves that what is committed is what the tables give.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftlab.config import ExplainSpec
from driftlab.errors import RunError
from driftlab.files import file_hash
from driftlab.papers.drawing import draw as draw_panels
from driftlab.papers.items import ITEMS
from driftlab.papers.latex import page_csv, page_latex
from driftlab.papers.note import note_source
from driftlab.papers.pages import Page, Paper, find_paper
from driftlab.results.drawing import own_style
from driftlab.results.explanations import Explained, ExplainedFolder
from driftlab.results.figures import save_figures
from driftlab.results.records import SMALL, RunDirectory, refuse_inside_run
from driftlab.results.schema import ATTENTION, KEYS, OPTIONAL
from driftlab.results.shards import atomic_file, remove_dead
from driftlab.results.slices import text_kinds

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Numbers drawn again on another machine differ in the last digits that are written.
RELATIVE = 1e-4
# Mean difference of two drawings of one figure, in grey levels of 255.
GREY = 1.0
# Bits of a number's mantissa that a reduced table keeps: a relative error below 1.3e-4.
BITS = 12


def items(paper: str | Path) -> list[Path]:
    """The item folders below ``paper``, sorted; ``paper`` itself where it is one."""
    folder = Path(paper)
    found = [*folder.glob("tables/manifest.json"), *folder.glob("*/tables/manifest.json")]
    return sorted(p.parent.parent for p in found)


def is_paper(folder: str | Path) -> bool:
    """Whether ``folder`` holds pages or items and is no run itself."""
    there = Paper.at(folder) or bool(items(folder))
    return there and not (Path(folder) / "manifest.json").exists()


def publish(run: str | Path, item: str | Path) -> Path:
    """Copy the small tables of a finished run to ``item`` and draw its figures.

    In a paper with pages (``PAPER/runs/NAME``) the tables are reduced and no figure is drawn:
    ``driftlab figures PAPER`` writes the pages that use them. ``PAPER/runs/explained-BASE`` takes
    the run's explanation in place of what it measured; it may be of any run on that base.

    Raises
    ------
    RunError: there is no finished run, or the item lies in a run or holds another run's tables;
        for an explanation, the run was not explained.
    """
    paged = find_paper(item) is not None
    source, tables = RunDirectory.open(run), Path(item) if paged else Path(item) / "tables"
    explained = paged and tables.name.startswith("explained-")
    refuse_inside_run(tables)
    if (tables / "manifest.json").exists() and not explained:
        old = RunDirectory.open(tables).manifest
        if old.get("name") != source.manifest.get("name"):
            raise RunError(
                f"{item} holds tables of another experiment",
                got=old.get("name"),
                remedy="Choose another folder, or remove that item first.",
            )
    whole = source.tables()  # all can be read, before anything is replaced
    cells = whole.cells
    if unfinished := list(cells["cell"][cells["status"] != "done"]):
        raise RunError(
            f"{run} has cells that are not done",
            got=", ".join(unfinished),
            remedy="Run it again until every cell is done.",
        )
    remove_dead(tables)
    if explained:
        reduce_explained(source, tables)
        return tables
    if paged:
        reduce(source, tables)
        return tables
    copied = (*SMALL, *sorted(whole.extra))
    for name in (*(f"{table}.parquet" for table in copied), "manifest.json"):
        with atomic_file(tables / name) as file, (source.path / name).open("rb") as made:
            shutil.copyfileobj(made, file)
    save_figures(RunDirectory.open(tables), Path(item) / "figures")
    return Path(item)


def draw(paper: str | Path, *, check: bool = False) -> list[str]:
    """Draw every item and page; with ``check``, write nothing and list the files that differ."""
    found: list[str] = []
    for item in items(Path(paper).resolve()):
        run = RunDirectory.open(item / "tables")
        if check:
            found += [f"{item.name}/tables/{name}" for name in changed_tables(run)]
            found += [f"{item.name}/figures/{name}" for name in stale(run, item / "figures")]
        else:
            save_figures(run, item / "figures")
    if Paper.at(paper):
        found += _draw_pages(Paper(paper), check)
    return found


def _draw_pages(paper: Paper, check: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        made = write_pages(paper, Path(scratch))
        if not check:
            for folder in {(paper.folder / name).parent for name in made}:
                remove_dead(folder)
            for name, path in made.items():
                with atomic_file(paper.folder / name) as file:
                    file.write(path.read_bytes())
            return []
        changed = [
            f"runs/{folder.parent.name}/{name}"
            for folder in sorted(paper.folder.glob("runs/*/manifest.json"))
            for name in changed_tables(RunDirectory.open(folder.parent))
        ]
        changed += [n for n, path in made.items() if not _same(paper.folder / n, path)]
    there = {
        str(path.relative_to(paper.folder))
        for page in paper.pages
        for path in (paper.folder / page).rglob("[!.]*")
        if path.is_file()
    }
    return changed + [f"{name} (no table gives it)" for name in sorted(there - set(made))]


def write_pages(paper: Paper, out: Path) -> dict[str, Path]:
    """Write everything that the paper's tables give below ``out``: files by relative path."""
    made: dict[str, Path] = {}

    def put(name: str, content: str | bytes) -> None:
        made[name] = out / name
        made[name].parent.mkdir(parents=True, exist_ok=True)
        made[name].write_bytes(content if isinstance(content, bytes) else content.encode())

    for page in paper.pages.values():
        put(f"{page.id}/README.md", paper.readme(page))
        put(f"{page.id}/table.csv", page_csv(page))
        put(f"{page.id}/table.tex", page_latex(page))
        for suffix, content in page_figure(page).items():
            put(f"{page.id}/figures/{page.id}.{suffix}", content)
    put("README.md", paper.front())
    if (paper.folder / "note.in.typ").exists():
        put("note.typ", note_source(paper))
    return made


def page_figure(page: Page) -> dict[str, bytes]:
    """The page's figure as ``png``, ``pdf`` and the ``csv`` of what is drawn; empty without one."""
    import pandas as pd
    from PIL import Image

    panels = ITEMS[page.id].panels
    frames = [m.frame.assign(base=base) for base, m in page.measured.items() if len(m.frame)]
    if not panels or not frames:
        return {}
    frame: pd.DataFrame = pd.concat(frames, ignore_index=True)
    sizes = {base: f"{page.bases[base]}, {m.size}" for base, m in page.measured.items()}
    figure = draw_panels(frame, panels, sizes)
    png, small, pdf = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with own_style({}):
        figure.savefig(png, format="png", dpi=220, metadata={"Software": None})
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None, "Creator": None})
    with Image.open(png) as image:
        # Few colours are used: a palette makes the file a third as large.
        image.convert("RGB").quantize(128).save(small, format="png", optimize=True)
    first = ["base", "panel", "line"]
    frame = frame[[*first, *(c for c in frame.columns if c not in first)]]
    text = frame.to_csv(index=False, float_format="%.5g", lineterminator="\n")
    return {"png": small.getvalue(), "pdf": pdf.getvalue(), "csv": text.encode()}


# --- reduced tables -----------------------------------------------------------------------------

_DEPTHS = (
    *KEYS["depths"],
    *("temperature", "n", "n_correct", "n_opportunities", "n_accepted", "uniform"),
    *("rms_input", "log_rms_state_pre", "log_rms_feedback"),
)
_ATTENDED = ("norms", "gated", "residual", "alignment", "budget", "sink")
"""Experiments whose pages show attention; others keep the sink and the chain's own drafts."""


def reduce(run: RunDirectory, out: Path) -> None:
    """Write what pages need of ``run`` to ``out``: the headline's text, fewer columns and digits.

    ``heads`` keeps its columns and no row. Numbers of ``depths`` and ``fused`` are rounded to
    ``BITS`` bits, which is said in the manifest, as are the rows' and columns' selection.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    tables = run.tables()
    kind = text_kinds(tables)[0]
    attended = str(run.manifest.get("name", "")).split("-")[0] in (*_ATTENDED, "micro", "smollm2")
    columns = [*_DEPTHS, *(ATTENTION if attended else ("sink", "draft_mass"))]

    def shaved(column: pa.ChunkedArray) -> pa.ChunkedArray:
        values = column.combine_chunks()
        there = np.asarray(values.is_valid())
        raw = np.asarray(values.fill_null(0.0).to_numpy(zero_copy_only=False), dtype=np.float32)
        drop = 23 - BITS
        bits = raw.view(np.uint32)
        bits = ((bits + np.uint32(1 << (drop - 1))) >> np.uint32(drop)) << np.uint32(drop)
        return pa.chunked_array([pa.array(bits.view(np.float32), mask=~there)])

    config = run.manifest.get("config") or {}
    conditions = (config.get("applied") or {}).get("conditions") or ()
    named = [c["name"] for c in conditions if c.get("temperature") is not None]
    own_text = tables.cells.loc[tables.cells["condition"].isin(named), "cell"].astype(str).tolist()
    noted: dict[str, Any] = {}
    for name in (*SMALL, *sorted(tables.extra)):
        table = pq.read_table(run.path / f"{name}.parquet")
        if name == "heads":
            table = table.slice(0, 0)
        elif "text" in table.column_names:
            wanted = pc.equal(table["text"], kind.text)
            # A condition may have a temperature of its own.
            for column, own in (("cell", own_text), ("condition", named)):
                if column in table.column_names:
                    theirs = pc.is_in(table[column], pa.array(own, pa.string()))
                    wanted = pc.or_(wanted, theirs)
            table = table.filter(wanted)
        if name == "depths":
            table = table.select([c for c in table.column_names if c in columns])
        if name not in ("cells", "prompts", "texts"):
            for i, found in enumerate(table.schema):
                if pa.types.is_floating(found.type) and found.name != "temperature":
                    new = pa.field(found.name, pa.float32(), found.nullable, found.metadata)
                    table = table.set_column(i, new, shaved(table[found.name]))
        noted[name] = _store(table, out / f"{name}.parquet")
    others = " but for conditions of another" if named else ""
    note = (
        f"{kind} only{others}; no rows by head; columns that the pages need; "
        f"numbers rounded to {BITS} bits (1.3e-4 of their size)"
    )
    _note(run.manifest | {"tables": noted, "reduced": note}, out)


_OWED = ("mass", "effect", "share", "cosine", "rank", "geometry", "lens_draft", "logprob")
"""Measures of an explanation that pages show at the first and the last depth."""
_BY_DEPTH = ("shapley", "gradients", "gap")


def reduce_explained(run: RunDirectory, out: Path) -> None:
    """Write what pages need of the explanation of ``run`` to ``out``.

    Its numbers are not rounded: a page says the same as the run's own report. ``cells`` is whole,
    ``prompts`` has those that were explained, and what the run measured keeps columns and no row.

    Raises RunError when the run was not explained.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    source, kept = ExplainedFolder(run.path), ExplainedFolder(out)
    facts, found = source.manifest, Explained.of(run)
    noted: dict[str, Any] = {}
    for name in SMALL:
        table = pq.read_table(run.path / f"{name}.parquet")
        if name == "prompts":
            asked = (pc.is_in(table[n], pa.array(facts[f"{n}s"])) for n in ("prompt", "text"))
            table = table.filter(pc.and_(*asked))
        elif name != "cells":
            table = table.slice(0, 0)
        noted[name] = _store(table, out / f"{name}.parquet")
    table = pq.read_table(source.table)
    ends = pa.array((found.depths[0], found.depths[-1]), table.schema.field("depth").type)
    shown = pc.and_(pc.is_in(table["measure"], pa.array(_OWED)), pc.is_in(table["depth"], ends))
    table = table.filter(pc.or_(shown, pc.is_in(table["measure"], pa.array(_BY_DEPTH))))
    note = (
        "the explanation alone, with the measures and depths that the pages need; no rows of what "
        "the run measured"
    )
    # Its time was not recorded, and the run's own is that of other tables.
    own = {"tables": noted, "reduced": note, "stages": {}, "command": _command(run, facts)}
    _note(run.manifest | own, out)
    _note(facts | {"table": _store(table, kept.table), "reduced": note}, kept.path)


def _command(run: RunDirectory, facts: Mapping[str, Any]) -> str:
    """What makes the run and its explanation; the sink set is the run's own by default."""
    usual = ExplainSpec().model_dump(mode="json") | {"sink": facts["spec"]["sink"]}
    changed = [f" --set '{k}={v}'" for k, v in facts["spec"].items() if v != usual.get(k)]
    limit = f" --limit {len(facts['prompts'])}"
    explain = f"driftlab explain runs/{run.path.name}{limit}{''.join(changed)}"
    return f"{run.manifest.get('command') or 'driftlab ablate'} && {explain}"


def _store(table: pa.Table, path: Path) -> dict[str, Any]:
    """Write a table for git, small; how many rows it has, and its hash."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    words = [f.name for f in table.schema if f.name not in floats]
    with atomic_file(path) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=15,
            version="2.6",
            use_dictionary=words,
            use_byte_stream_split=floats,
            write_statistics=False,
        )
    return {"rows": table.num_rows, "sha256": file_hash(path)}


def _note(manifest: Mapping[str, Any], folder: Path) -> None:
    with atomic_file(folder / "manifest.json") as file:
        file.write(json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n")


# --- what is current ----------------------------------------------------------------------------


def changed_tables(run: RunDirectory) -> list[str]:
    """Tables of ``run`` that are not, or no longer, those that its manifests know by hash."""
    known = dict(run.manifest.get("tables") or {})
    explained = ExplainedFolder(run.path)  # it has a manifest of its own
    if (explained.path / "manifest.json").exists():
        known["explained"] = explained.manifest.get("table")
    hashes = {name: (noted or {}).get("sha256") for name, noted in known.items()}
    gone = [n for n in OPTIONAL if hashes.get(n) and not (run.path / f"{n}.parquet").exists()]
    return [
        path.name
        for path in sorted(run.path.glob("*.parquet"))
        if file_hash(path) != hashes.get(path.stem)
    ] + [f"{name}.parquet (missing)" for name in gone]


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
    if drawn.suffix in (".md", ".tex", ".typ"):
        return _same_text(committed, drawn)
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


_NUMBER = re.compile(r"-?\d+\.\d+")


def _same_text(committed: Path, drawn: Path) -> bool:
    """Equal words, and numbers that differ by one in the last digit shown at most."""
    left, right = (path.read_text(encoding="utf-8") for path in (committed, drawn))
    if _NUMBER.split(left) != _NUMBER.split(right):
        return False
    pairs = zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=True)
    return all(
        len(a) == len(b) and abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(a.partition(".")[2])
        for a, b in pairs
    )


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
