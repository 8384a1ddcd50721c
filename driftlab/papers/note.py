"""The reproduction note: Typst source with numbers from the tables, compiled to PDF.

The source is committed, so that a change of any number shows in a diff. Compiling needs the
optional extra ``papers``: ``pip install driftlab[papers]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from driftlab.errors import ConfigError, RunError
from driftlab.papers.pages import fill

if TYPE_CHECKING:
    from driftlab.papers.pages import Page, Paper


def note_source(paper: Paper) -> str:
    """``note.in.typ`` with every ``{{name}}`` filled, tables and verdicts included."""
    parts = {f"table:{page.id}": _table(page) for page in paper.pages.values()}
    parts |= {f"claims:{page.id}": _claims(page) for page in paper.pages.values()}
    parts |= {f"short:{page.id}": escape(paper.short(page)) for page in paper.pages.values()}
    parts["tally"] = _tally(paper)
    values = {name: escape(text) for name, text in paper.values.items()}
    path = paper.folder / "note.in.typ"
    return fill(path.read_text(encoding="utf-8"), values | parts, where=str(path))


def compile_note(paper: str | Path) -> Path:
    """Build ``note.pdf`` from ``note.typ``; the same source gives the same bytes.

    Raises ConfigError when typst is not installed, RunError when there is no source.
    """
    folder = Path(paper)
    source = folder / "note.typ"
    if not source.exists():
        raise RunError(
            f"{source} is not there", remedy=f"Write it first: driftlab figures {folder}."
        )
    try:
        import typst
    except ImportError:
        raise ConfigError(
            "typst is not installed", remedy="Install it: pip install 'driftlab[papers]'."
        ) from None
    out = folder / "note.pdf"
    typst.compile(str(source), output=str(out), ignore_system_fonts=True, timestamp=0)
    return out


def escape(text: str) -> str:
    """Plain text as Typst text."""
    for c in "\\#$*_`<>@[]=~/":
        text = text.replace(c, f"\\{c}")
    return text


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], columns: str) -> str:
    cells = ["table.header(" + ", ".join(f"[*{escape(h)}*]" for h in head) + ")"]
    cells += [", ".join(f"[{escape(c)}]" for c in row) for row in rows]
    body = ",\n  ".join(cells)
    return f"#table(\n  columns: ({columns}),\n  {body},\n)"


def _table(page: Page) -> str:
    """The paper's rows and ours in the paper's columns and those that only we have."""
    ours = [c for m in page.measured.values() for row in m.rows.values() for c in row]
    columns = list(dict.fromkeys((*page.text.columns, *ours)))
    rows = []
    for owner, name, cells in page.cells():
        whose = page.bases.get(owner, "paper")
        rows.append([f"{name}" if owner == "paper" else f"{whose}: {name}",
                     *(cells.get(c, "") for c in columns)])  # fmt: skip
    return _grid(["", *columns], rows, ", ".join(["auto"] * (len(columns) + 1)))


def _claims(page: Page) -> str:
    rows = []
    for claim in page.text.claims:
        row = [claim.says, f"{claim.paper} ({claim.mark})" if claim.paper else "open"]
        for base in page.bases:
            judged = page.judged[claim.id][base]
            silent = judged.verdict in ("not run", "not asked")
            row.append(judged.verdict if silent else f"{judged.number}: {judged.words}")
        rows.append(row)
    names = list(page.bases.values())
    return _grid(
        ["statement", "paper", *names], rows, ", ".join(["2fr", *["1fr"] * (len(names) + 1)])
    )


def _tally(paper: Paper) -> str:
    kinds = ("agrees", "does not agree", "not settled", "up", "down", "not asked", "not run")
    rows = []
    for base, label in paper.text.bases.items():
        judged = [j[base] for page in paper.pages.values() for j in page.judged.values()]
        rows.append([label, *(str(sum(j.verdict == k for j in judged)) for k in kinds)])
    names = [*kinds[:3], "open: up", "open: down", *kinds[5:]]
    return _grid(["", *names], rows, ", ".join(["auto"] * (len(kinds) + 1)))


if __name__ == "__main__":
    import sys

    print(compile_note(sys.argv[1]))
