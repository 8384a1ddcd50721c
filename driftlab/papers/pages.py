"""A paper's pages: what it measured, what the committed tables say, and whether they agree.

    PAPER/paper.toml                 the paper's numbers and claims with their sureness, the prose
    PAPER/page.md, front.md          templates; ``{{name}}`` is filled with what the tables give
    PAPER/runs/<experiment>-<base>/  the small tables of a run
    PAPER/<item>/                    README.md, table.csv, table.tex, figures/

Numbers of ours are computed here from the tables, verdicts from their intervals. Nothing on a page
is typed twice, and a page whose run is missing says so with the command that makes it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from driftlab.config import Frozen
from driftlab.errors import ConfigError, first_fault
from driftlab.papers.items import ITEMS, Measured, measure
from driftlab.results.answers import ALPHA
from driftlab.results.explanations import Explained
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.stats import Estimate, count, holm

Mark = Literal["two sources", "one source", "inferred", "none"]
Verdict = Literal["agrees", "does not agree", "not settled", "up", "down", "not asked", "not run"]


class PaperRow(Frozen):
    """One row of a table as the paper prints it."""

    row: str
    mark: Mark
    values: tuple[str, ...]


class Claim(Frozen):
    """A statement with a direction. ``expects`` is what the contrast should be against no effect.

    ``equal`` means inside ``margin`` of no effect; ``open`` means that the paper says nothing.
    The three sentences say why, for each outcome.
    """

    id: str
    says: str
    expects: Literal["above", "below", "equal", "open"]
    paper: str = ""
    value: float | None = None
    """The paper's contrast as a number, to compare sizes with."""
    mark: Mark = "none"
    margin: float = Field(0.0, ge=0)
    needs_sink: bool = False
    agrees: str
    differs: str
    unsettled: str


class ItemText(Frozen):
    """One item of the paper; ``columns`` are those of its table, after the first."""

    title: str
    question: str
    paper: str
    ours: str
    runs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[PaperRow, ...] = ()
    claims: tuple[Claim, ...] = ()
    caption: str = ""


class PaperText(Frozen):
    """``paper.toml``: everything on the pages that is not computed."""

    title: str
    reference: str
    gemm_gflops: float = Field(gt=0)
    """Rate of the machine that made the runs; what estimates of time are scaled by."""
    marks: dict[str, str]
    bases: dict[str, str]
    items: dict[str, ItemText]


@dataclass(frozen=True)
class Judged:
    """A claim with what one base has to say about it."""

    claim: Claim
    base: str
    estimate: Estimate | None
    verdict: Verdict
    p: float = math.nan

    @property
    def number(self) -> str:
        return self.estimate.short if self.estimate is not None else "n/a"

    @property
    def size(self) -> str:
        """Whether an effect that agrees is of another order than the paper's (a factor of 3)."""
        e, paper = self.estimate, self.claim.value
        if e is None or paper is None or self.verdict != "agrees" or self.claim.expects == "equal":
            return ""
        ends = [e.low, e.high]
        if e.unit == "x":
            ends, paper = [math.log(v) for v in ends], math.log(paper)
        least, most = sorted(v / paper for v in ends)
        return "far weaker" if most < 1 / 3 else "far stronger" if least > 3 else ""

    @property
    def words(self) -> str:
        """The verdict, with its reserves: another size, one training seed."""
        one = self.estimate is not None and self.estimate.seeds == 1
        seed = " (1 seed)" if one and self.verdict not in _SILENT else ""
        return ", ".join(filter(None, (self.verdict, self.size))) + seed

    @property
    def why(self) -> str:
        sentences = {
            "agrees": self.claim.agrees,
            "up": self.claim.agrees,
            "down": self.claim.differs,
            "does not agree": self.claim.differs,
            "not settled": self.claim.unsettled,
            "not asked": "No drafter here attends to a sink, so this cannot be asked here.",
        }
        return sentences.get(self.verdict, "")


_SILENT = ("not run", "not asked")


def judge(claim: Claim, estimate: Estimate | None, p: float = math.nan) -> Verdict:
    """What the interval says: a direction counts when the interval excludes no effect.

    ``p`` is the p value after Holm's correction over the page's claims; at 5% or more the
    direction does not count either. ``equal`` is settled when the whole interval lies inside the
    margin (agrees) or outside of it (does not agree). For a ratio the margin is a factor 1 + m.
    """
    if estimate is None or math.isnan(estimate.value) or math.isnan(estimate.low):
        return "not run"
    if claim.expects == "equal":
        if estimate.unit == "x":
            low, high = 1 / (1 + claim.margin), 1 + claim.margin
        else:
            low, high = -claim.margin, claim.margin
        if low <= estimate.low and estimate.high <= high:
            return "agrees"
        return "does not agree" if estimate.low > high or estimate.high < low else "not settled"
    if not estimate.differs or (not math.isnan(p) and p >= ALPHA):
        return "not settled"
    above = estimate.value > estimate.null
    if claim.expects == "open":
        return "up" if above else "down"
    return "agrees" if above == (claim.expects == "above") else "does not agree"


@dataclass(frozen=True)
class Page:
    """One item with its numbers on every base that has run."""

    id: str
    text: ItemText
    bases: Mapping[str, str]
    measured: Mapping[str, Measured]
    """By base; a base that has not run is absent."""

    @cached_property
    def judged(self) -> dict[str, dict[str, Judged]]:
        """By claim, then by base."""
        out: dict[str, dict[str, Judged]] = {claim.id: {} for claim in self.text.claims}
        for base in self.bases:
            found = self.measured.get(base)
            contrasts = found.contrasts if found else {}
            asked = [c for c in self.text.claims if not (c.needs_sink and found and not found.sink)]
            family = {
                c.id: contrasts[c.id] for c in asked if c.id in contrasts and c.expects != "equal"
            }
            adjusted = holm(family)
            for claim in self.text.claims:
                p = adjusted.get(claim.id, math.nan)
                estimate = contrasts.get(claim.id)
                verdict = judge(claim, estimate, p) if claim in asked else "not asked"
                out[claim.id][base] = Judged(claim, base, estimate, verdict, p)
        return out

    @property
    def missing(self) -> list[str]:
        """Runs that the page would use and does not have."""
        there = {name for m in self.measured.values() for name in m.runs}
        return [
            f"{experiment}-{base}"
            for experiment in self.text.runs
            for base in self.bases
            if f"{experiment}-{base}" not in there
        ]

    @property
    def short(self) -> str:
        """The title's first word: T1, Flagship."""
        return self.text.title.split(". ")[0]

    def cells(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Rows of the table: whose (``paper`` or a base), row, and text by column."""
        for row in self.text.rows:
            yield (
                "paper",
                f"{row.row} ({row.mark})",
                dict(zip(self.text.columns, row.values, strict=True)),
            )
        for base, found in self.measured.items():
            for name, numbers in found.rows.items():
                yield base, name, {c: e.short for c, e in numbers.items()}


class Paper:
    """A folder with ``paper.toml``: its text, its runs, its pages.

    Raises ConfigError when ``paper.toml`` is missing or wrong.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "paper.toml"
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            self.text = PaperText.model_validate(data)
        except (OSError, ValueError) as error:  # ValidationError is a ValueError
            got = first_fault(error) if isinstance(error, ValidationError) else error
            raise ConfigError(
                f"{path} is not a paper's description",
                got=got,
                remedy="See driftlab/papers/pages.py for its keys.",
            ) from None
        if unknown := sorted(set(self.text.items) - set(ITEMS)):
            raise ConfigError(
                f"{path} names items that nothing measures",
                got=", ".join(unknown),
                remedy=f"Items: {', '.join(ITEMS)}.",
            )

    @staticmethod
    def at(folder: str | Path) -> bool:
        return (Path(folder) / "paper.toml").is_file()

    @cached_property
    def runs(self) -> dict[str, Tables]:
        """The committed runs by name, ``<experiment>-<base>``."""
        folders = sorted(self.folder.glob("runs/*/manifest.json"))
        return {p.parent.name: RunDirectory.open(p.parent).tables() for p in folders}

    @cached_property
    def explained(self) -> dict[str, Explained]:
        """Those of ``runs`` of which only the explanation is kept."""
        folders = sorted(self.folder.glob("runs/*/explained/manifest.json"))
        return {p.parent.parent.name: Explained.of(p.parent.parent) for p in folders}

    @cached_property
    def pages(self) -> dict[str, Page]:
        out = {}
        for name, text in self.text.items.items():
            found = {}
            for base in self.text.bases:
                runs = {
                    experiment: self.runs[f"{experiment}-{base}"]
                    for experiment in text.runs
                    if f"{experiment}-{base}" in self.runs
                }
                explained = {
                    experiment: self.explained[f"{experiment}-{base}"]
                    for experiment in runs
                    if f"{experiment}-{base}" in self.explained
                }
                if runs and (numbers := measure(name, runs, base, explained)) is not None:
                    found[base] = numbers
            out[name] = Page(name, text, self.text.bases, found)
        return out

    @cached_property
    def values(self) -> dict[str, str]:
        """Every number by name: ``item.base.row.column`` and ``item.base.claim``."""
        out: dict[str, str] = {}
        for page in self.pages.values():
            for base, found in page.measured.items():
                for row, numbers in found.rows.items():
                    for column, e in numbers.items():
                        out[f"{page.id}.{base}.{row}.{column}"] = e.short
                out[f"{page.id}.{base}.n"] = found.size
            for claim, by_base in page.judged.items():
                for base, judged in by_base.items():
                    out[f"{page.id}.{base}.{claim}"] = judged.number
                    out[f"{page.id}.{base}.{claim}.verdict"] = judged.words
        return out

    # --- pages --------------------------------------------------------------------------------

    def readme(self, page: Page) -> str:
        """The item's page in Markdown."""
        parts = {
            "title": page.text.title,
            "question": page.text.question,
            "short": self.short(page),
            "paper": page.text.paper,
            "paper_table": _paper_table(page),
            "marks": "; ".join(f"**{m}** {text}" for m, text in self.text.marks.items()),
            "ours": page.text.ours,
            "ours_table": self._ours_table(page),
            "said": self._said(page),
            "figure": self._figure(page),
            "claims": self._claims(page),
            "whys": _whys(page),
            "commands": self._commands(page),
        }
        return self._fill("page.md", parts)

    def front(self) -> str:
        """The paper's first page: what holds, what does not, how sure, and the items' status."""
        rows = []
        for page in self.pages.values():
            status = [self.text.bases[b] for b in page.measured]
            rows.append(
                [
                    f"[{page.text.title}]({page.id})",
                    " and ".join(status) or "not run",
                    *(_tally(page, base) for base in self.text.bases),
                ]
            )
        names = list(self.text.bases.values())
        head = ["item", "measured on", *(f"{n}: verdicts" for n in names)]
        parts = {
            "items": markdown(head, rows),
            "holds": self._listed("agrees"),
            "fails": self._listed("does not agree"),
            "open": self._listed("not settled"),
            "ours": self._listed("up", "down"),
            "runs": self._run_list(),
        }
        return self._fill("front.md", parts)

    def short(self, page: Page) -> str:
        """One sentence a base: how many of the page's statements agree."""
        if not page.text.claims:
            first = {b: next(iter(m.answers), None) for b, m in page.measured.items()}
            said = [f"{self.text.bases[b]}. {a.sentence}" for b, a in first.items() if a]
            nothing = "The paper has no numbers to compare with." if page.measured else "Not run."
            return " ".join(said) or nothing
        out = []
        for base, label in self.text.bases.items():
            tally = _tally(page, base)
            where = page.measured.get(base)
            size = f" ({where.size})" if where else ""
            out.append(f"{label}{size}: {tally}.")
        return " ".join(out)

    def _listed(self, *verdicts: Verdict) -> str:
        """Claims with one of ``verdicts`` on the first base that has run them, as a table."""
        rows = []
        for page in self.pages.values():
            for claim in page.text.claims:
                by_base = page.judged[claim.id]
                heard = [by_base[b] for b in self.text.bases if by_base[b].verdict not in _SILENT]
                if heard and heard[0].verdict in verdicts:
                    rows.append(
                        [
                            f"[{page.short}]({page.id})",
                            claim.says,
                            f"{claim.paper} ({claim.mark})" if claim.paper else "-",
                            *(_told(by_base[b]) for b in self.text.bases),
                        ]
                    )
        head = ["item", "statement", "paper", *self.text.bases.values()]
        return markdown(head, rows) if rows else "Nothing yet."

    def _run_list(self) -> str:
        rows = []
        for name, tables in self.runs.items():
            manifest = tables.manifest
            done = tables.cells[tables.cells["status"] == "done"]
            stages = [s.get("seconds", 0.0) for s in (manifest.get("stages") or {}).values()]
            measured = tables.prompts[tables.prompts["n_anchors"] > 0]
            prompts = len(measured["prompt"].unique())
            rows.append(
                [
                    name,
                    str(len(done)),
                    count(prompts, int(done["seed"].fillna(0).nunique())),
                    f"{sum(stages) / 60:.0f} min" if stages else "not timed",
                    f"`{manifest.get('command') or 'driftlab ablate'}`",
                ]
            )
        if not rows:
            return "No run is here yet."
        return markdown(["run", "cells", "size", "took", "command"], rows)

    def _ours_table(self, page: Page) -> str:
        if not page.measured:
            return "**Not run.** No table of ours is here yet."
        out = []
        for base, found in page.measured.items():
            out.append(f"{self.text.bases[base]}, {found.basis}:")
            for block in found.blocks:
                columns = list(dict.fromkeys(c for row in block.values() for c in row))
                rows = [
                    [name, *(_shown(row.get(c)) for c in columns)] for name, row in block.items()
                ]
                out.append(markdown(["", *columns], rows))
        return "\n\n".join(out)

    def _said(self, page: Page) -> str:
        """The sentences of the runs' own reports: the registered comparisons, or by question."""
        out = []
        for base, found in page.measured.items():
            said: dict[str, list[str]] = {}
            for answer in found.answers:
                asked = "" if answer.role in ("primary", "family") else f"*{answer.question}*"
                said.setdefault(asked, []).append(f"- {answer.sentence}")
            if said:
                out.append(f"### In sentences: {self.text.bases[base]}")
            for question, sentences in said.items():
                out += [question, "\n".join(sentences)]
        return "\n\n".join(out)

    def _figure(self, page: Page) -> str:
        if not page.measured or not ITEMS[page.id].panels:
            return ""
        caption = page.text.caption or page.text.title
        bands = "Bands and bars: 95% bootstrap intervals."
        return f"![{page.text.title}](figures/{page.id}.png)\n\n*{caption} {bands}*"

    def _claims(self, page: Page) -> str:
        if not page.text.claims:
            return "The paper says nothing about this."
        names = list(self.text.bases.values())
        rows = []
        for claim in page.text.claims:
            by_base = page.judged[claim.id]
            paper = f"{claim.paper} ({claim.mark})" if claim.paper else "not measured"
            row = [claim.says, paper]
            for base in self.text.bases:
                judged = by_base[base]
                row.append(_told(judged))
            rows.append(row)
        return markdown(["statement", "paper", *names], rows)

    def _commands(self, page: Page) -> str:
        if not page.text.runs:
            return "No run belongs to this item."
        out = []
        for experiment in page.text.runs:
            for base in self.text.bases:
                name = f"{experiment}-{base}"
                made = name in self.runs
                manifest = self.runs[name].manifest if made else {}
                parts = [m["command"] for m in manifest.get("merged") or ()]
                last = manifest.get("command") or f"make reproduce ONLY={name}"
                commands = ", then ".join(f"`{c}`" for c in (*parts, last))
                out.append(f"- {name}: {commands}" + ("" if made else " (**not run**)"))
        out.append("- numbers and figures of this page: `driftlab figures papers/attention-drift`")
        return "\n".join(out)

    def _fill(self, template: str, parts: Mapping[str, str]) -> str:
        path = self.folder / template
        text = path.read_text(encoding="utf-8")
        # Prose may name numbers itself, so it is filled twice.
        text = fill(text, {**self.values, **parts}, where=str(path))
        text = fill(text, self.values, where=f"paper.toml, {template}")
        return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


_NAME = re.compile(r"\{\{([^{}\n]+)\}\}")


def fill(text: str, values: Mapping[str, str], *, where: str) -> str:
    """``text`` with every ``{{name}}`` replaced; a number that has not been run reads "n/a".

    Raises ConfigError for a name that cannot be a number's: those have dots.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in values:
            return values[name]
        if "." in name:
            return "n/a (not run)"
        raise ConfigError(
            f"{where} asks for {name!r}", remedy=f"Known: {', '.join(sorted(values)[:12])} ..."
        )

    return _NAME.sub(value, text)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def _shown(e: Estimate | None) -> str:
    return "" if e is None else e.short


def _paper_table(page: Page) -> str:
    if not page.text.rows:
        return ""
    rows = [[row.row, *row.values, row.mark] for row in page.text.rows]
    return markdown(["", *page.text.columns, "sure"], rows)


def _whys(page: Page) -> str:
    out = []
    for claim in page.text.claims:
        judged = [j for j in page.judged[claim.id].values() if j.verdict not in _SILENT]
        if judged:
            out.append(f"- {claim.says} {judged[0].why}")
    if not page.text.claims:
        return "No statement, so no reading of it."
    return "\n".join(out) or "Nothing has been run, so there is nothing to explain."


def _told(judged: Judged) -> str:
    if judged.verdict in _SILENT:
        return judged.verdict
    return f"{judged.number}: **{judged.words}**"


_TALLIED: dict[str, tuple[Verdict, ...]] = {
    "agree": ("agrees",),
    "do not agree": ("does not agree",),
    "not settled": ("not settled",),
    "open questions answered": ("up", "down"),
    "cannot be asked": ("not asked",),
    "not run": ("not run",),
}


def _tally(page: Page, base: str) -> str:
    """How the page's statements fare, in words."""
    verdicts = [by_base[base].verdict for by_base in page.judged.values()]
    if not verdicts:
        return "nothing to compare"
    if set(verdicts) == {"not run"}:
        return "not run"
    counts = {words: sum(v in of for v in verdicts) for words, of in _TALLIED.items()}
    said = ", ".join(f"{words} {n}" for words, n in counts.items() if n)
    return f"of {len(verdicts)} statements: {said}"


def find_paper(path: str | Path) -> Path | None:
    """The paper's folder that ``path`` is, or lies in as ``PAPER/runs/NAME``."""
    path = Path(path)
    return next((p for p in (path, path.parent.parent) if Paper.at(p)), None)
