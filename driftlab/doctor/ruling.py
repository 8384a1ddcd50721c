"""From margins to a verdict: when a reading is better, and when a pair is clean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from scipy.stats import norm
from scipy.stats import t as student

from driftlab.doctor.diagnosis import FILE, Candidate, Limits, Outcome, Verdict
from driftlab.doctor.selfcheck import Check
from driftlab.results.stats import Estimate

LEVEL = 0.05
HOPELESS = 0.02
POWER = 0.8


def hopeless(nats: Estimate, drafts: Estimate) -> bool:
    """Whether a first look says enough: worse in one measure, and no better in the other."""
    one, other = sorted((nats, drafts), key=lambda e: e.p)
    return one.value < 0 and one.p <= HOPELESS and other.value <= 0


def outcome(limits: Limits, nats: Estimate, drafts: Estimate) -> Outcome:
    """What two margins over another reading say; their p values are corrected for the family."""
    sure = [e for e in (nats, drafts) if e.p <= LEVEL]
    up = any(e.value > 0 for e in sure)
    down = any(e.value < 0 for e in sure)
    if not down and any(e.value >= limits.found(e.unit) for e in sure):
        return Outcome.better
    if down and not up:
        return Outcome.worse
    if all(e.high < limits.matters(e.unit) for e in (nats, drafts)):
        return Outcome.no_better
    return Outcome.unclear


def judge(
    limits: Limits,
    checks: Sequence[Check],
    candidates: Sequence[Candidate],
    winner: Candidate | None,
    rivals: Sequence[str] = (),
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and what it rests on."""
    reasons = []
    if winner is not None:
        patch = ", ".join(f"{name} = {value}" for name, value in winner.patch.items())
        reasons.append(
            f"the weights support another reading: {patch} saves {winner.margin.short} nats a "
            f"token and accepts {winner.accepted.short} more drafts a round"
        )
    if rivals:
        reasons.append(f"as good as the winner on this text: {', '.join(rivals)}")
    reasons += [f"failed: {check.name} ({check.detail})" for check in checks if not check.ok]
    if reasons:
        return Verdict.wrong, tuple(reasons)
    reasons += [
        f"{c.name} may be better: {c.margin.short} nats, {c.accepted.short} drafts ({c.why})"
        for c in candidates
        if c.outcome is Outcome.unclear
    ]
    even = [c for c in candidates if c.outcome is Outcome.no_better]
    # A rotation matters more the longer the text: equal here is not equal everywhere.
    blind = [c for c in even if not c.settled and any(name.startswith("rope.") for name in c.patch)]
    reasons += [f"cannot tell from this text: {c.name} ({c.why})" for c in blind]
    if reasons:
        return Verdict.doubtful, tuple(reasons)
    if not even:
        return Verdict.clean, ("every reading that differs in one field is worse",)
    return Verdict.clean, (
        "no reading that differs in one field is better; so near that it does not matter which is "
        "right: " + ", ".join(f"{c.name} ({_most(c)})" for c in even),
        sensitivity(limits, candidates),
    )


def _most(c: Candidate) -> str:
    return f"at most {max(c.margin.high, 0):.3f} nats, {max(c.accepted.high, 0):.3f} drafts"


def sensitivity(limits: Limits, candidates: Sequence[Candidate]) -> str:
    """How small a fault this text would have shown, against what matters."""
    first = [c for c in candidates if c.against == FILE]
    open_ = [c for c in first if c.outcome is not Outcome.worse]
    tests, power = 2 * max(len(first), 1), norm.ppf(POWER)
    # Estimates tell it for one normal test at the same level; here two tests a reading are
    # corrected, and they are Student's.
    more = [
        (student.isf(LEVEL / 2 / tests, c.score.texts - 1) + power) / (norm.isf(LEVEL / 2) + power)
        for c in open_
    ]
    seen = {}
    field: Literal["margin", "accepted"]
    for field in ("margin", "accepted"):
        each = (getattr(c, field).smallest * m for c, m in zip(open_, more, strict=True))
        # NaN: a reading that changes no draw has no smallest effect.
        seen[field] = max((e for e in each if not math.isnan(e)), default=0.0)
    return (
        f"this text shows a reading that saves {seen['margin']:.3f} nats or accepts "
        f"{seen['accepted']:.3f} more drafts ({seen['accepted'] / limits.length:.1%} of the "
        f"acceptance length) in four of five runs; {limits.nats_matter} nats or "
        f"{limits.share_matters:.0%} would matter"
    )
