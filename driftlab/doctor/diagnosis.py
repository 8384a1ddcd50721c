"""What the doctor found, and how it reads as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from driftlab.doctor.scoring import DEPTH, Score
from driftlab.doctor.selfcheck import Check
from driftlab.models.checkpoints.profiles import Patch, Profile, Reading
from driftlab.models.drafter import Drafter
from driftlab.results.stats import Estimate

WIDTH = 100


class Verdict(StrEnum):
    clean = "clean"
    doubtful = "doubtful"
    wrong = "wrong"


EXIT_CODES = {Verdict.clean: 0, Verdict.doubtful: 3, Verdict.wrong: 4}


class Outcome(StrEnum):
    """A candidate against the reading that it was paired with; :func:`ruling.outcome` decides."""

    better = "better"  # surely, in one measure at least, and surely worse in none
    worse = "worse"  # the same the other way round
    no_better = "no better"  # cannot tell, and what it can be better by does not matter
    unclear = "unclear"  # it may be better by what matters, or the measures contradict each other


@dataclass(frozen=True)
class Limits:
    """How large a difference must be: to be a finding, and to matter.

    length: acceptance length of the file's reading, of which drafts are a share.
    """

    length: float
    nats_found: float = 0.005
    nats_matter: float = 0.02
    share_found: float = 0.01
    share_matters: float = 0.02

    @classmethod
    def of(cls, score: Score) -> Limits:
        return cls(1 + score.expected_drafts)

    def found(self, unit: str) -> float:
        """The smallest difference that can be a finding, in nats or drafts."""
        return self.nats_found if unit == "nats" else self.share_found * self.length

    def matters(self, unit: str) -> float:
        """The smallest difference that matters, in nats or drafts."""
        return self.nats_matter if unit == "nats" else self.share_matters * self.length


@dataclass(frozen=True)
class Row:
    """One field of the contract: its value, and how and where it was found."""

    field: str
    value: Any
    origin: str
    where: str


@dataclass(frozen=True)
class Candidate:
    """Another reading. ``patch`` holds what differs from the file's reading.

    margin: nats a token saved against ``against``; accepted: expected drafts a round gained.
    Both over as many texts as ``score`` has: a reading that is hopeless on the first is not
    scored on the others.
    """

    name: str
    against: str
    patch: dict[str, Any]
    why: str
    settled: bool
    score: Score
    margin: Estimate
    accepted: Estimate
    outcome: Outcome
    reading: Reading = field(repr=False)


@dataclass(frozen=True)
class Runtime:
    """How a runtime serves the file. ``score`` is None when it cannot load it."""

    profile: Profile
    as_trained: bool
    patches: tuple[Patch, ...]
    refused: str | None
    notes: tuple[str, ...]
    score: Score | None


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's findings on one pair. ``str()`` is the page that the command prints."""

    target: str
    drafter: str
    profile: Profile
    texts: int
    tokens: int
    contract: tuple[Row, ...]
    checks: tuple[Check, ...]
    score: Score | None
    limits: Limits | None
    candidates: tuple[Candidate, ...]
    winner: Candidate | None
    rivals: tuple[Candidate, ...]
    verdict: Verdict
    reasons: tuple[str, ...]
    runtimes: tuple[Runtime, ...]
    notes: tuple[str, ...]
    source: Path | None = None
    subject: Drafter | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        return "\n".join(_page(self)) + "\n"


def _page(d: Diagnosis) -> Iterable[str]:
    read = "" if d.profile is Profile.trained else f", as {d.profile} computes it"
    yield f"driftlab doctor: {d.verdict.upper()}"
    yield from _wrap(_meaning(d), "  ")
    yield ""
    yield from _wrap(
        f"target {d.target}, drafter {d.drafter}{read}; {d.tokens} tokens in "
        f"{d.texts} texts that the target sampled",
        "  ",
    )
    yield from (line for reason in d.reasons for line in _wrap(reason, "  - ", "    "))
    yield ""
    yield "Contract"
    wide = max(len(row.field) for row in d.contract)
    for row in d.contract:
        head = f"  {row.field:<{wide}}  "
        yield from _wrap(f"{row.value}  [{row.origin}: {row.where}]", head, " " * len(head))
    yield ""
    yield "Self-checks"
    for check in d.checks:
        mark = "ok  " if check.ok else "FAIL"
        yield from _wrap(f"{check.name}: {check.detail}", f"  {mark}  ", "        ")
    if d.score is not None and d.limits is not None:
        yield ""
        yield from _readings(d, d.score, d.limits)
        yield ""
        yield from _runtimes(d.runtimes)
    if d.notes:
        yield ""
        yield "Notes"
        yield from (line for note in d.notes for line in _wrap(note, "  - ", "    "))


def _meaning(d: Diagnosis) -> str:
    """The verdict in words, and what to do."""
    if d.verdict is Verdict.clean:
        return (
            "The drafter is computed as its weights were trained, as far as this text can tell: no "
            "change of one field is better, nor a change that costs nothing that matters together "
            "with any other one. Nothing to do; see Runtimes for who serves it so."
        )
    if d.verdict is Verdict.doubtful:
        return (
            "This text cannot settle how the drafter was trained. Ask for more of it "
            f"(--tokens {max(4 * d.tokens // 1000, 1) * 1000}); until then state the doubtful "
            "fields beside any number."
        )
    if d.winner is None:
        return "A check failed (FAIL below): numbers of this pair mean nothing until it is mended."
    if d.profile is not Profile.trained:
        return f"{d.profile} computes another drafter than was trained: it accepts less for that."
    return (
        "The weights were trained under another reading than the file's. --fix FOLDER writes a "
        "copy with the better one; the file itself stays as it is."
    )


def _readings(d: Diagnosis, own: Score, limits: Limits) -> Iterable[str]:
    yield f"Readings: the same weights under every reading of the file, depths 1-{DEPTH}"
    yield from _wrap(
        "accepted: share of chains whose drafts up to each depth are all right. cross entropy: of "
        "chains that read the true tokens, nats, lower is better. saved and gained: nats a token "
        "and drafts a round against the file's reading, or against the reading that a row is on "
        "top of [95% interval over texts]; what matters: "
        f"{limits.nats_matter} nats, or {limits.matters('drafts'):.3f} drafts, which is "
        f"{limits.share_matters:.0%} of the acceptance length",
        "  ",
    )
    first = [c for c in d.candidates if c.against == FILE]
    later = [c for c in d.candidates if c.against != FILE]
    wide = max([len(FILE), *(len(c.name) for c in first)])
    columns = len(_joined(own.acceptance))
    yield f"  {'':<{wide}}  {'accepted':<{columns}} | {'cross entropy':<{columns}}"
    yield f"  {FILE:<{wide}}  {numbers(own)}"
    for c in sorted(first, key=lambda c: -c.margin.value):
        yield f"  {c.name:<{wide}}  {_scored(c, own)}  {c.outcome}"
        yield f"  {'':<{wide}}  {_against(c, own)}"
    for against in dict.fromkeys(c.against for c in later):
        yield f"  on top of {against}, and against it:"
        part = [c for c in later if c.against == against]
        for c in sorted(part, key=lambda c: -c.margin.value):
            added = c.name.removeprefix(f"{against} + ")
            yield f"    {added:<{wide - 2}}  {_scored(c, own)}  {c.outcome}"
            yield f"  {'':<{wide}}  {_against(c, own)}"


def _against(c: Candidate, own: Score) -> str:
    """``saved 0.049 [0.036, 0.060], gained 0.12 [0.08, 0.16]``"""
    few = f", paired on {c.score.texts} texts" if c.score.texts < own.texts else ""
    return f"saved {c.margin.short}, gained {c.accepted.short}{few}"


def _scored(c: Candidate, own: Score) -> str:
    """The numbers of a reading, where they are over the texts that the file's are over."""
    if c.score.texts == own.texts:
        return numbers(c.score)
    return f"{f'given up after {c.score.texts} of {own.texts} texts':<{len(numbers(own))}}"


FILE = "the file's"


def numbers(score: Score) -> str:
    """``0.91 0.85 0.80 0.74 | 0.40 0.52 0.61 0.70``"""
    return f"{_joined(score.acceptance)} | {_joined(score.cross_entropy)}"


def _joined(values: Sequence[float]) -> str:
    return " ".join(f"{v:.2f}" for v in values)


def _runtimes(runtimes: Sequence[Runtime]) -> Iterable[str]:
    yield "Runtimes: do they compute what the weights were trained for, and what would they accept"
    for r in runtimes:
        word = "refuses" if r.refused else "yes" if r.as_trained else "no"
        shown = ""
        if r.score is not None:
            length = f"{r.score.expected_drafts:.2f} of {DEPTH} accepted"
            shown = f"  {_joined(r.score.acceptance)}  {length}"
        name = "as read" if r.profile is Profile.trained else str(r.profile)
        yield f"  {name:<9} {word:<8}{shown}".rstrip()
        for text in [*([r.refused] if r.refused else []), *map(str, r.patches), *r.notes]:
            yield from _wrap(text, "            - ", "              ")


def _wrap(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
