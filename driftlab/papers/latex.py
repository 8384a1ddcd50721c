"""Tables for papers: booktabs for LaTeX, and CSV with every number behind a page."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from driftlab.results.stats import Estimate

if TYPE_CHECKING:
    from driftlab.papers.pages import Page

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: "\\" + c for c in "&%$#_{}"
}


def escape(text: str) -> str:
    """Plain text as LaTeX text."""
    return "".join(_SPECIAL.get(c, c) for c in text).replace("->", r"$\rightarrow$")


def number(e: Estimate | None) -> str:
    """A value with its interval as a subscript, e.g. ``$0.41_{[0.38,\\,0.44]}$``."""
    if e is None:
        return "--"
    found = re.fullmatch(r"(x?)(\S+) \[(\S+), (\S+)\]", e.short)
    if found is None:
        return escape(e.short.replace(" [no interval]", ""))
    ratio, value, low, high = found.groups()
    times = r"\times " if ratio else ""
    return rf"${times}{value}_{{[{low},\,{high}]}}$"


def booktabs(
    head: Sequence[str],
    groups: Sequence[tuple[str, Sequence[Sequence[str]]]],
    caption: str,
    label: str,
) -> str:
    """A table whose groups of rows have titles; cells are LaTeX already, titles are not."""
    lines = [
        "% Needs \\usepackage{booktabs}. Written by `driftlab figures`; do not edit.",
        r"\begin{table}",
        r"\centering\scriptsize",
        rf"\caption{{{escape(caption)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(map(escape, head)) + r" \\",
    ]
    for title, rows in groups:
        lines.append(r"\midrule")
        lines.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\emph{{{escape(title)}}}}} \\")
        lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def page_latex(page: Page) -> str:
    """The page's numbers, the paper's and ours: a table for each block of rows."""
    blocks = {base: found.blocks for base, found in page.measured.items()}
    count = max(map(len, blocks.values()), default=0)
    parts = [{b: there[i] for b, there in blocks.items() if i < len(there)} for i in range(count)]
    return "\n".join(_table(page, i, part) for i, part in enumerate(parts or [{}]))


def _table(page: Page, i: int, blocks: Mapping[str, Mapping[str, Mapping[str, Estimate]]]) -> str:
    """Table ``i`` of the page: the paper's rows in the first one, and the rows of every base."""
    ours = [c for block in blocks.values() for row in block.values() for c in row]
    columns = list(dict.fromkeys((*(page.text.columns if not i else ()), *ours)))
    groups: list[tuple[str, list[list[str]]]] = []
    if page.text.rows and not i:
        printed = [dict(zip(page.text.columns, row.values, strict=True)) for row in page.text.rows]
        groups.append(
            (
                "The paper",
                [
                    [escape(f"{row.row} ({row.mark})"), *(escape(p.get(c, "--")) for c in columns)]
                    for row, p in zip(page.text.rows, printed, strict=True)
                ],
            )
        )
    for base, block in blocks.items():
        rows = [
            [escape(name), *(number(row.get(c)) for c in columns)] for name, row in block.items()
        ]
        groups.append((f"{page.bases[base]}, {page.measured[base].basis}", rows))
    caption = f"{page.text.title}. {page.text.question} Subscripts: 95% bootstrap intervals."
    return booktabs(["", *columns], groups, caption, f"{page.id}-{i + 1}" if i else page.id)


def page_csv(page: Page) -> str:
    """Every number of the page: table rows, then statements with their verdicts."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(
        [
            "block",
            "base",
            "row",
            "column",
            "paper",
            "value",
            "low",
            "high",
            "unit",
            "prompts",
            "seeds",
            "p",
            "verdict",
        ]
    )
    for row in page.text.rows:
        for column, value in zip(page.text.columns, row.values, strict=True):
            write(["table", "paper", f"{row.row} ({row.mark})", column, value, *[""] * 8])
    for base, found in page.measured.items():
        for name, numbers in found.rows.items():
            for column, e in numbers.items():
                write(["table", base, name, column, "", *_plain(e), "", ""])
    for claim in page.text.claims:
        for base, judged in page.judged[claim.id].items():
            plain = _plain(judged.estimate) if judged.estimate is not None else [""] * 6
            write(
                ["statement", base, claim.id, claim.expects, claim.paper, *plain,
                 _g(judged.p), judged.words]
            )  # fmt: skip
    return out.getvalue()


def _plain(e: Estimate) -> list[str]:
    return [_g(e.value), _g(e.low), _g(e.high), e.unit, str(e.n), str(e.seeds)]


def _g(value: float) -> str:
    return "" if value != value else f"{value:.5g}"
