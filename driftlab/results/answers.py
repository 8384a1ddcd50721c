"""What a run says, in plain sentences with their intervals, and one table row per variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from driftlab.errors import RunError
from driftlab.results.hints import all_loop
from driftlab.results.quantities import own_share, unchanged
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.registered import changed_since, registered
from driftlab.results.slices import (
    Group,
    Mode,
    Slice,
    Stratum,
    TextKind,
    layers,
    modes,
    setting,
    take,
    windowed,
)
from driftlab.results.stats import (
    Estimate,
    Factorial,
    Sample,
    count,
    count_comparisons,
    estimate,
    factorial,
    holm,
    not_available,
    power_note,
    too_few,
)

if TYPE_CHECKING:
    import pandas as pd

PAPER_DEPTH = 8
"""Growth is reported from depth 1 to this depth, as in arXiv 2605.09992."""
SINK_RULE = 2.0
"""A sink holds at least this many times the even share of one key at depth 1."""
ALPHA = 0.05
PRIMARY = ("growth", "accuracy", "length")
"""Measures whose interaction of the two norms is reported as well."""


Role = Literal["primary", "family", "exploratory"]


@dataclass(frozen=True)
class Answer:
    """One question, one sentence, and the numbers in it.

    ``basis`` says which rows the numbers come from. ``p`` holds the Holm-adjusted p values
    of the contrasts. ``role`` says whether the experiment file fixed the comparison before the
    run (its ``primary`` one, or one of the ``family`` that is corrected with it) or it is
    ``exploratory``: then the family is every exploratory contrast.
    """

    question: str
    sentence: str
    estimates: Mapping[str, Estimate]
    basis: str
    p: Mapping[str, float] = field(default_factory=dict)
    role: Role = "exploratory"

    def __str__(self) -> str:
        return self.sentence


def load(run: RunDirectory | Tables) -> Tables:
    return run if isinstance(run, Tables) else run.tables()


def preferred(tables: Tables, *order: Mode) -> Mode:
    """The first of ``order`` that the run has. Raises RunError when it has no chains."""
    there = modes(tables)
    if not there:
        raise RunError(
            "the run has no measured chains",
            got="a published explanation holds its own table only",
            remedy="Make the run itself: its manifest.json names the command.",
        )
    return next((m for m in order if m in there), there[0])


# --- measures that are compared ---------------------------------------------------------------


@dataclass(frozen=True)
class _Measure:
    """A number of a group that two factors may change."""

    key: str
    name: str  # fills "changes ..."
    piece: Slice
    sample: Callable[[Group], Sample]
    ratio: bool = False
    unit: str = ""
    offset: float = 0.0  # added to the values that are shown, not to effects


def _measures(tables: Tables, kind: TextKind | None) -> dict[str, _Measure]:
    there = modes(tables)
    drift = take(tables, preferred(tables, "free", "forced"), kind)
    first, last = drift.index[0], drift.index[-1]
    paper = PAPER_DEPTH if PAPER_DEPTH in drift.index else last
    out: dict[str, _Measure] = {}
    if len(drift.index) > 1:
        out["growth"] = _Measure(
            "growth",
            f"the growth of the hidden state from depth {first} to {paper}",
            drift,
            lambda g: drift.change(g, "log_rms_state_pre", first, paper),
            ratio=True,
        )
    if "forced" in there:
        forced = take(tables, "forced", kind)
        deep = forced.index[-1]
        out["accuracy"] = _Measure(
            "accuracy",
            f"forced accuracy at depth {deep}",
            forced,
            lambda g: forced.accuracy(g, deep),
        )
    if "free" in there:
        free = take(tables, "free", kind)
        out["length"] = _Measure(
            "length",
            "acceptance length (bonus included, mean over prompts)",
            free,
            free.accepted_drafts,
            unit="tokens",
            offset=1.0,
        )
    if len(drift.index) > 1:
        out["drafts"] = _Measure(
            "drafts",
            f"the attention on the chain's own drafts at depth {last}",
            drift,
            lambda g: drift.mean(g, "draft_mass", last),
        )
        out["sink"] = _Measure(
            "sink",
            f"how attention on the sink moves between depths {first} and {last}",
            drift,
            lambda g: drift.change(g, "sink", first, last),
        )
    if len(tables.fused):
        shares = take(tables, None, kind, table="fused")
        top = shares.index[-1]
        if len(shares.index) > 1:
            out["share"] = _Measure(
                "share",
                "the share of the highest captured state in the fused input",
                shares,
                lambda g: shares.mean(g, "share", top),
            )
    return out


def _estimate(measure: _Measure, sample: Sample, resamples: int) -> Estimate:
    value = estimate(sample, ratio=measure.ratio, unit=measure.unit, resamples=resamples)
    return _shift(value, measure.offset)


def _shift(value: Estimate, offset: float) -> Estimate:
    if not offset:
        return value
    low, high = value.over_prompts
    return Estimate(
        value.value + offset,
        value.low + offset,
        value.high + offset,
        value.n,
        value.unit,
        value.note,
        value.seeds,
        tuple(v + offset for v in value.by_seed),
        (low + offset, high + offset),
    )


# --- the 2x2 ----------------------------------------------------------------------------------

_SUBJECTS = {
    "feedback": "post-norm feedback",
    "per_layer": "the per-layer fusion norm",
    "concat": "the fusion norm over the concatenation",
    "concat_per_layer": "the double fusion norm",
}
_QUESTIONS = {
    "growth": "Does {subject} stop the growth of the hidden state?",
    "accuracy": "Does {subject} keep deep drafts right?",
    "length": "Does {subject} make acceptance longer?",
    "drafts": "Does {subject} keep attention off the chain's own drafts?",
    "sink": "Does {subject} keep attention on the sink?",
    "share": "Does {subject} balance the captured states?",
}


@dataclass(frozen=True)
class _Contrast:
    measure: _Measure
    subject: str
    question: str
    effect: Estimate
    before: Estimate | None = None
    after: Estimate | None = None  # neither for an interaction


def _contrasts(measure: _Measure, result: Factorial) -> list[_Contrast]:
    out = []
    # Feedback acts after the fusion: what it does to shares is training noise.
    if result.feedback is not None and result.feedback_ends and measure.key != "share":
        out.append(_main(measure, "feedback", result.feedback, *result.feedback_ends))
    for level, effect in result.fusion.items():
        out.append(_main(measure, level, effect, *result.fusion_ends[level]))
    for level, effect in result.interaction.items() if measure.key in PRIMARY else ():
        subject = _SUBJECTS.get(level, level)
        question = f"Does the effect of post-norm feedback on {measure.name} depend on {subject}?"
        out.append(_Contrast(measure, subject, question, effect))
    return out


def _main(
    measure: _Measure, factor: str, effect: Estimate, before: Estimate, after: Estimate
) -> _Contrast:
    subject = _SUBJECTS.get(factor, factor)
    question = _QUESTIONS[measure.key].format(subject=subject)
    before, after = (_shift(level, measure.offset) for level in (before, after))
    return _Contrast(measure, subject, question, effect, before, after)


def _sentence(c: _Contrast, p: float, family: int, prefix: str) -> str:
    if not c.effect.n:
        return f"{prefix}{c.question} That cannot be told: {power_note(c.effect)}."
    shown = not math.isnan(p) and p < ALPHA and c.effect.differs
    kind = "ratio" if c.effect.unit == "x" else "difference"
    doubt, weak = "no evidence", f"{kind} {c.effect.short}; {power_note(c.effect, family)}."
    if math.isnan(p) or too_few(c.effect.n, family):
        doubt = "too few prompts to say"
    elif c.effect.differs and not shown:
        doubt = "only weak evidence"
        if c.effect.p < ALPHA:
            weak = f"{kind} {c.effect.short}, lost when {family} comparisons are corrected for."
    notes = [c.effect.signs] if c.effect.seeds > 1 else ["one seed: training noise not counted"]
    if c.effect.seeds < (every := len(c.measure.piece.seeds)):
        notes.insert(0, f"{c.effect.seeds} of {every} seeds: those of all cells compared")
        weak = f"{weak[:-1]} ({notes[0]})."
    if c.before and c.after and c.before.low <= c.after.high and c.after.low <= c.before.high:
        notes.insert(0, f"paired {kind} {c.effect.short}")  # what the two intervals do not show
    signs = f" ({'; '.join(notes)})"
    if c.before is None or c.after is None:
        effect = f"the effect of post-norm feedback on {c.measure.name}"
        if not shown:
            text = f"{doubt} that {effect} depends on {c.subject}: {weak}"
        elif kind == "ratio":
            text = f"with {c.subject}, {effect} is {c.effect.short} of that without{signs}."
        else:
            text = f"with {c.subject}, {effect} differs from that without by "
            text += f"{c.effect.short}{signs}."
    else:
        move = f"from {c.before.short} to {c.after.short}"
        if shown:
            text = f"{c.subject} changes {c.measure.name} {move}{signs}."
        else:
            text = f"{doubt} that {c.subject} changes {c.measure.name}: {move}, {weak}"
    return prefix + text[0].upper() + text[1:]


def _stratum_prefix(tables_strata: int, stratum: Stratum) -> str:
    if tables_strata < 2:
        return ""
    residual, gate, ttt, aligned, steps, lr = stratum
    parts = [f"TTT {ttt}" if ttt is not None else "", "gated attention" if gate else ""]
    parts.append("normed residual" if residual != "raw" else "")
    parts.append(f"alignment {aligned:g}" if aligned else "")
    parts.append(f"{steps:g} times the steps" if steps != 1 else "")
    parts.append(f"{lr:g} times the learning rate" if lr != 1 else "")
    return f"[{', '.join(filter(None, parts)) or 'raw residual'}] "


# --- public -----------------------------------------------------------------------------------


def answers(run: RunDirectory | Tables, kind: TextKind | None = None) -> list[Answer]:
    """One sentence per question that the run can answer, the most important first.

    First, where every text loops, that they do; then what the experiment file registered. With
    fusion norm or feedback as trained factors: their main effects and interaction on growth,
    accuracy, acceptance, attention and shares, Holm-corrected as one family. Without: what each
    drafter does as it drafts deeper.
    With applied conditions: what each leaves of a drafter's own length instead. ``kind`` is the
    headline's text by default.
    """
    tables = load(run)
    first = registered_answers(tables, kind)
    rest = _applied(tables, kind) or _explored(tables, kind)
    if first:
        rest = [replace(one, sentence=f"Exploratory: {one.sentence}") for one in rest]
    return _loops(tables, kind) + first + rest


def _loops(tables: Tables, kind: TextKind | None) -> list[Answer]:
    """That every text loops, so that all numbers below are of looping text; else empty."""
    piece = take(tables, preferred(tables, "free", "forced"), kind)
    if not piece.texts[""].all_loop:
        return []
    said = f"{all_loop(piece.kind, len(piece.prompts))}."
    return [Answer("Is the text fit to measure on?", said, {}, piece.basis)]


def registered_answers(tables: Tables, kind: TextKind | None = None) -> list[Answer]:
    """The comparisons that were fixed before the run, whatever came of them."""
    out = []
    found = registered(tables, kind)
    late = changed_since(tables)
    family = sum(not math.isnan(one.p) for one in found)
    for one in found:
        role: Role = "primary" if one.primary else "family"
        head = f"{role.capitalize()} comparison, {one.comparison}: {one.name}"
        if math.isnan(one.effect.value):
            text = f"{head} is {one.effect.note}."
        else:
            kind_of = "ratio" if one.effect.unit == "x" else "difference"
            known = not math.isnan(one.p) and one.p < ALPHA and one.effect.differs
            few = math.isnan(one.p) or too_few(one.effect.n, family)
            doubt = "is of too few prompts to test" if few else "shows no evidence of a change"
            verdict = "goes" if known else f"{doubt}: it goes"
            corrected = f", p {one.p:.2g} corrected for {count_comparisons(family)}"
            p = "" if math.isnan(one.p) else corrected
            text = (
                f"{head} {verdict} from {one.before.short} to {one.after.short}, {kind_of} "
                f"{one.effect.short}{p}; {one.effect.signs}; {power_note(one.effect, family)}"
                f"{f'; {late}' if late else ''}."
            )
        numbers = {"before": one.before, "after": one.after, "effect": one.effect}
        question = f"{one.comparison}: {one.name}?"
        out.append(Answer(question, text, numbers, one.basis, {"effect": one.p}, role))
    return out


def _applied(tables: Tables, kind: TextKind | None) -> list[Answer]:
    """What each condition leaves of the drafters' own lengths; empty without conditions."""
    if not (tables.cells["axis"] == "applied").any() or "free" not in modes(tables):
        return []
    piece = take(tables, "free", kind)
    by_condition: dict[str, dict[str, Group]] = {}  # by the label of the unchanged
    for group in piece.groups:
        if group.condition and (own := unchanged(piece, group)):
            by_condition.setdefault(group.condition, {})[own.label] = group
    out = []
    for condition, members in by_condition.items():
        left = {
            name: estimate(own_share(piece, g), resamples=piece.resamples)
            for name, g in members.items()
        }
        said = "; ".join(
            f"{name} {e.note if math.isnan(e.value) else e.short}" for name, e in left.items()
        )
        apart = piece.apart(next(iter(members.values())))
        whose = ", ".join(filter(None, (condition, apart)))
        sentence = f"{whose}: share of the drafter's own accepted drafts that is left: {said}."
        question = f"What does {condition} leave of a drafter's own length?"
        shares = {members[name].label: e for name, e in left.items()}
        sizes = " or ".join(dict.fromkeys(count(e.n, e.seeds) for e in left.values()))
        over = f"{piece.basis_of(members.values())}; paired over {sizes}"
        out.append(Answer(question, sentence, shares, over))
    return out


def _explored(tables: Tables, kind: TextKind | None) -> list[Answer]:
    measures = _measures(tables, kind)
    draws = next(iter(measures.values())).piece.resamples
    sinkless = _no_sink(tables, kind)
    if sinkless:
        measures.pop("sink", None)
    contrasts: list[tuple[_Contrast, str]] = []
    strata = next(iter(measures.values())).piece.strata
    compared = {k: cells for k, cells in strata.items() if len(cells) > 1}
    for measure in measures.values():
        for stratum in compared:
            cells = measure.piece.strata.get(stratum, {})
            result = factorial(
                {key: measure.sample(group) for key, group in cells.items()},
                ratio=measure.ratio,
                unit=measure.unit,
                resamples=draws,
                over_prompts=True,
            )
            prefix = _stratum_prefix(len(compared), stratum)
            contrasts += [(c, prefix) for c in _contrasts(measure, result)]
    adjusted = holm({str(i): c.effect for i, (c, _) in enumerate(contrasts)})
    out = []
    for i, (c, prefix) in enumerate(contrasts):
        p = adjusted.get(str(i), math.nan)
        named = {"before": c.before, "after": c.after, "effect": c.effect}
        numbers = {name: e for name, e in named.items() if e is not None}
        sentence = _sentence(c, p, len(adjusted), prefix)
        out.append(Answer(c.question, sentence, numbers, c.measure.piece.basis, {"effect": p}))
    if not contrasts:
        out += _descriptions(measures, draws)
    return out + ([sinkless] if sinkless else [])


def _descriptions(measures: Mapping[str, _Measure], draws: int) -> list[Answer]:
    """What each drafter does, when there are no factors to compare."""
    out = []
    for measure in measures.values():
        for group in measure.piece.groups:
            sample = measure.sample(group)
            value = _estimate(measure, sample, draws)
            numbers = {group.label: value}
            name = measure.name
            if measure.key == "growth":
                question = "Does the hidden state grow as the drafter drafts deeper?"
                if math.isnan(value.low):
                    said = f"{value.short}; one prompt tells no more" if value.n else value.note
                    sentence = f"{group.label}: {name} is {said}."
                elif value.differs:
                    sentence = f"{group.label}: {name} is {value.short}."
                else:
                    sentence = f"{group.label}: no evidence of growth; {name} is {value.short}."
            elif measure.key == "sink":
                question = "Does attention leave the sink?"
                piece = measure.piece
                ends = [piece.index[0], piece.index[-1]]
                before, after = (
                    estimate(piece.mean(group, "sink", d), resamples=draws) for d in ends
                )
                numbers = {"before": before, "after": after, "effect": value}
                still = "" if math.isnan(value.low) else "shows no evidence of moving: it "
                verb = "goes" if value.differs else f"{still}goes"
                sentence = (
                    f"{group.label}: attention on the sink {verb} from {before.short} at depth "
                    f"{ends[0]} to {after.short} at depth {ends[1]}."
                )
            else:
                question = f"How large is {name}?"
                sentence = f"{group.label}: {name} is {value.short}."
                if measure.key == "accuracy" and len(measure.piece.index) > 1:
                    first = measure.piece.index[0]
                    start = estimate(measure.piece.accuracy(group, first), resamples=draws)
                    numbers = {"before": start, "after": value}
                    question = "Does accuracy fall with depth?"
                    sentence = f"{sentence[:-1]}, against {start.short} at depth {first}."
            out.append(Answer(question, sentence, numbers, measure.piece.basis))
    return out


def _no_sink(tables: Tables, kind: TextKind | None) -> Answer | None:
    """The statement that no variant attends to a sink, or None when one does.

    Rule: in every group the mean mass on the sink set at depth 1 is below ``SINK_RULE`` times
    the even share of as many keys. A changed drafter says nothing of the target.
    """
    piece = take(tables, preferred(tables, "free", "forced"), kind)
    first = piece.index[0]
    keys = _sink_keys(tables)
    plain = [g for g in piece.groups if not g.condition]
    if not plain:
        return None
    mass = {g.label: np.nanmean(piece.at(g, "sink", first)) for g in plain}
    even = float(np.nanmean([piece.at(g, "uniform", first) for g in plain])) * keys
    if any(value >= SINK_RULE * even for value in mass.values()):
        return None
    highest = max(plain, key=lambda g: mass[g.label])
    value = estimate(piece.mean(highest, "sink", first), resamples=piece.resamples)
    sentence = (
        "A drafter here sees a window of keys only, out of which the sink may be: whether "
        f"attention leaves it cannot be asked (at depth {first} it holds at most {value.short})."
        if windowed(tables, plain)
        else f"No drafter here attends to a sink: at depth {first} it holds at most "
        f"{value.short} of the attention in any variant, below {SINK_RULE:g} times the even "
        f"share of {'one key' if keys == 1 else f'{keys} keys'} ({even:.3f}); whether attention "
        "leaves a sink cannot be asked here."
    )
    return Answer("Does attention leave the sink?", sentence, {highest.label: value}, piece.basis)


def _sink_keys(tables: Tables) -> int:
    """Keys that count as sink; 1 for ``auto``, where one key that counts is above the rule."""
    sink = setting(tables, "config", "measure", "sink")
    return max(1, len({*sink})) if isinstance(sink, list | tuple) else 1


ACCURACY_DEPTHS = (1, 4, 8, 16)
_EFFECT_NAMES = {"feedback": "post-norm feedback"}


def _accuracy(piece: Slice, depth: int, group: Group) -> Sample:
    return piece.accuracy(group, depth)


def _change(piece: Slice, column: str, start: int, end: int, group: Group) -> Sample:
    return piece.change(group, column, start, end)


def _mean(piece: Slice, column: str, index: int, group: Group) -> Sample:
    return piece.mean(group, column, index)


def _columns(tables: Tables, kind: TextKind | None) -> list[_Measure]:
    """Headline numbers, in the order of the table."""
    there = modes(tables)
    drift = take(tables, preferred(tables, "free", "forced"), kind)
    first, last = drift.index[0], drift.index[-1]
    paper = PAPER_DEPTH if PAPER_DEPTH in drift.index else last
    out = []

    def add(
        name: str,
        piece: Slice,
        sample: Callable[[Group], Sample],
        ratio: bool = False,
        unit: str = "",
        offset: float = 0.0,
    ) -> None:
        out.append(_Measure(name, name, piece, sample, ratio, unit, offset))

    if "free" in there:
        free = take(tables, "free", kind)
        add("acceptance length", free, free.accepted_drafts, unit="tokens", offset=1)
        add("accepted drafts", free, free.accepted_drafts, unit="drafts")
        add(
            "acceptance length, pooled",
            free,
            lambda g: free.accepted_drafts(g, pooled=True),
            unit="tokens",
            offset=1,
        )
    if "forced" in there:
        forced = take(tables, "forced", kind)
        for depth in (d for d in ACCURACY_DEPTHS if d in forced.index):
            add(f"forced accuracy @{depth}", forced, partial(_accuracy, forced, depth))
    if last > first:
        for name, column in (("state", "state_pre"), ("fed back", "feedback")):
            add(
                f"growth {first}-{paper}, {name}",
                drift,
                partial(_change, drift, f"log_rms_{column}", first, paper),
                ratio=True,
            )
    for depth in dict.fromkeys((first, last)):
        add(f"sink @{depth}", drift, partial(_mean, drift, "sink", depth))
    if last > first:
        add(f"own drafts @{last}", drift, lambda g: drift.mean(g, "draft_mass", last))
    return out


def summary(
    run: RunDirectory | Tables, kind: TextKind | None = None
) -> dict[str, dict[str, Estimate]]:
    """Headline numbers of each group: ``{label: {column: Estimate}}``."""
    tables = load(run)
    columns = _columns(tables, kind)
    labels = {g.label: g for column in columns for g in column.piece.groups}
    out: dict[str, dict[str, Estimate]] = {label: {} for label in labels}
    for label, group in labels.items():
        for column in columns:
            if group in column.piece.groups:
                draws = column.piece.resamples
                out[label][column.key] = _estimate(column, column.sample(group), draws)
            else:
                out[label][column.key] = not_available("not measured", column.unit)
    return out


def effects(
    run: RunDirectory | Tables, kind: TextKind | None = None
) -> dict[str, dict[str, Estimate]]:
    """Main effects and interactions of the two norms on the headline numbers, by effect.

    Differences, or ratios for growth; empty when the run has no such factors. With several
    strata (TTT length, residual, gate) the stratum is part of the effect's name.
    """
    tables = load(run)
    out: dict[str, dict[str, Estimate]] = {}
    for column in _columns(tables, kind):
        compared = {k: cells for k, cells in column.piece.strata.items() if len(cells) > 1}
        for stratum, cells in compared.items():
            result = factorial(
                {key: column.sample(group) for key, group in cells.items()},
                ratio=column.ratio,
                unit=column.unit,
                resamples=column.piece.resamples,
            )
            prefix = _stratum_prefix(len(compared), stratum)
            for name, effect in result.effects().items():
                out.setdefault(prefix + _EFFECT_NAMES.get(name, name), {})[column.key] = effect
    return out


def basis(run: RunDirectory | Tables, kind: TextKind | None = None) -> str:
    """What the headline numbers are taken over, and what their intervals draw, in words."""
    tables = load(run)
    piece = take(tables, preferred(tables, "free", "forced"), kind)
    deep = layers(tables)
    first = f"; attention is that of the first of {deep} layers" if deep > 1 else ""
    brackets = f"brackets hold 95% bootstrap intervals over {', '.join(piece.intervals)}"
    if len(piece.prompts) == 1:
        brackets = "one prompt has no interval"
    return f"{piece.over(piece.groups)}; {brackets}{first}"


def summary_table(run: RunDirectory | Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """One row per variant; every entry is an :class:`Estimate` that prints with its interval.

    Acceptance length counts the bonus token, accepted drafts do not; both average prompts
    alike, ``pooled`` weights prompts by their rounds. Growth is a ratio of geometric means.
    """
    import pandas as pd

    rows = summary(run, kind)
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=object)
    frame.index.name = "variant"
    return frame
