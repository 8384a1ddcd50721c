"""Two runs side by side, paired; or one run beside what a serving engine counted.

Runs are compared only where they are alike: same target, same texts, same depth, sink and
anchors. What differs beyond that is what the comparison is about (the drafters), and is listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from driftlab.errors import ConfigError, RunError
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.slices import (
    TEXTS,
    UNKNOWN_SEED,
    Group,
    Mode,
    Slice,
    TextKind,
    groups,
    modes,
    setting,
    take,
    text_kinds,
    texts_of,
)
from driftlab.results.stats import (
    Estimate,
    Sample,
    count,
    count_comparisons,
    count_prompts,
    estimate,
    holm,
    too_few,
)

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
ACCURACY_DEPTHS = (1, 2, 4, 8, 16)
PAPER_DEPTH = 8
"""Growth is from depth 1 to this depth, as in arXiv 2605.09992."""


class Measured(Protocol):
    """A run in memory, as the laboratory's ``probe`` gives it."""

    def tables(self) -> Tables: ...


Source = RunDirectory | Measured | Tables | str | Path


# --- what is compared -------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A group of cells of one run. ``seeds`` are those that are compared; ``kind`` is the run's
    kind of text beside which the group was measured (:func:`texts_of` has its own)."""

    run: str
    group: Group
    tables: Tables = field(repr=False)
    kind: TextKind
    seeds: tuple[int, ...] = ()

    @property
    def texts(self) -> tuple[TextKind, pd.DataFrame]:
        """What it was measured on: the kind, and rows of table ``prompts``."""
        return texts_of(self.tables, self.group, self.kind)

    @property
    def label(self) -> str:
        if self.seeds == (UNKNOWN_SEED,):
            return f"{self.group.label}, seed unknown"
        text = "seed" if len(self.seeds) == 1 else "seeds"
        return f"{self.group.label}, {text} {', '.join(map(str, self.seeds))}"

    def shared(self, other: Side) -> tuple[int, ...]:
        """Seeds that both sides are known to have; an unknown one where the drafter is the same."""
        both = (s for s in self.seeds if s in other.seeds)
        return tuple(s for s in both if s != UNKNOWN_SEED or self.drafter(s) == other.drafter(s))

    def drafter(self, seed: int) -> str:
        """Hash of a probed drafter, as its manifest has it; else the cell, which is no hash."""
        cell = self.cells()[seed]
        return str(setting(self.tables, "inputs", "drafters", cell) or (self.run, cell))

    def cells(self) -> dict[int, str]:
        """Seed -> cell."""
        found, cells = groups(self.tables)
        cells = cells[cells["group"] == found.index(self.group)]
        by_seed = dict(zip(cells["seed"].astype(int), cells["cell"].astype(str), strict=True))
        return {seed: by_seed[seed] for seed in self.seeds}


@dataclass(frozen=True)
class Row:
    """One measure of a pair. ``effect`` is B - A, or B / A for growth; ``p`` is Holm-adjusted."""

    pair: str
    measure: str
    a: Estimate
    b: Estimate
    effect: Estimate
    p: float

    @property
    def shown(self) -> bool:
        """The difference survives the correction."""
        return not math.isnan(self.p) and self.p < ALPHA and self.effect.differs


@dataclass(frozen=True)
class Comparison:
    """Paired differences of two runs. ``str()`` is what the command prints.

    pairs: what was compared with what. differences: settings that differ and may.
    """

    pairs: tuple[tuple[Side, Side], ...]
    rows: tuple[Row, ...]
    basis: str
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def table(self) -> pd.DataFrame:
        """One row a measure: A, B, the difference (each an Estimate) and the Holm-adjusted p."""
        import pandas as pd

        columns = ("pair", "measure", "a", "b", "effect", "p")
        data = {c: [getattr(row, c) for row in self.rows] for c in columns}
        return pd.DataFrame(data, dtype=object).set_index(["pair", "measure"])

    @property
    def sentences(self) -> tuple[str, ...]:
        """The differences that survive the correction, then what else was looked at."""
        out = []
        family = sum(not math.isnan(row.p) for row in self.rows)
        for side_a, side_b in self.pairs:
            pair = _pair_name(side_a, side_b)
            rows = [row for row in self.rows if row.pair == pair]
            prefix = f"{pair}: " if len(self.pairs) > 1 else ""
            for row in rows:
                if row.shown:
                    move = f"{row.measure} goes from {row.a.short} (A) to {row.b.short} (B)"
                    kind = "ratio" if row.effect.unit == "x" else "paired difference"
                    out.append(f"{prefix}{move}, {kind} {row.effect.short}, p = {_p(row.p)}.")
            rest = [row.measure for row in rows if not row.shown]
            n = max((row.effect.n for row in rows), default=0)
            if n < 2:
                out.append(f"{prefix}one prompt: no test.")
            elif too_few(n, family) and any(row.effect.differs for row in rows):
                few = f"{n} prompts are too few to show a difference among {family} comparisons"
                out.append(f"{prefix}{few}.")
            elif len(rest) == len(rows):
                out.append(f"{prefix}no measure differs beyond chance.")
            elif rest:
                out.append(f"{prefix}no evidence of a difference in {', '.join(rest)}.")
        return tuple(out)

    def __str__(self) -> str:
        return "\n".join(_page(self)) + "\n"


def compare(a: Source, b: Source, *, kind: TextKind | str | None = None) -> Comparison:
    """Paired comparison of two runs, or of two cells.

    Parameters
    ----------
    a, b: a run directory, its path, or ``PATH:CELL`` where CELL is a cell (``none+pre_norm/s0``)
        or the label of a variant. Without CELL, every variant that both runs hold is compared;
        runs of one variant each are compared whatever its name.
    kind: text that the numbers come from (``sampled``, ``greedy``, ``given``); the headline's
        by default.

    Raises
    ------
    RunError: no such run or cell, or the runs are not alike. The message names every setting
        that differs, with both values, and what to do. Texts are those that each side was
        measured on: a condition that has texts of its own meets such as have the same.
    """
    runs = [_open(source) for source in (a, b)]
    kinds = _kinds(runs, kind)
    _refuse_unlike(runs)
    pairs = _pairs(runs, kinds)
    for pair in pairs:
        _refuse_other_texts(runs, pair)
        _refuse_nothing_counted(runs, pair)
    made: list[tuple[str, _Pair]] = []
    for side_a, side_b in pairs:
        made += [(_pair_name(side_a, side_b), p) for p in _measured(side_a, side_b)]
    adjusted = holm({str(i): p.effect for i, (_, p) in enumerate(made)})
    rows = tuple(
        Row(name, p.measure, p.a, p.b, p.effect, adjusted.get(str(i), math.nan))
        for i, (name, p) in enumerate(made)
    )
    n = max((row.effect.n for row in rows), default=0)
    seeds = [row.effect.seeds for row in rows]
    drawn = "seeds and prompts" if max(seeds, default=1) > 1 else "prompts"
    if drawn != "prompts" and min(seeds) == 1:
        drawn += " (prompts alone for one seed)"
    size = count(n, max(seeds, default=1), min(seeds, default=1))
    paired = "paired"
    if not any(a.shared(b) for a, b in pairs):
        size, paired = count_prompts(n), "paired by prompt alone"
    texts = dict.fromkeys(str(a.texts[0]) for a, _ in pairs)
    how = (
        f"95% bootstrap intervals over {drawn}; "
        f"p corrected for {count_comparisons(len(adjusted))} (Holm)"
    )
    basis = f"{' and '.join(texts)}, {size}, {paired}; "
    basis += how if n > 1 else "one prompt has no interval"
    return Comparison(
        pairs=tuple(_narrowed(a, b) for a, b in pairs),
        rows=rows,
        basis=basis,
        differences=tuple(_allowed_differences(runs)),
        notes=tuple(_notes(pairs)),
    )


class _Run(NamedTuple):
    name: str
    tables: Tables
    cell: str | None
    directory: RunDirectory | None


def _open(source: Source) -> _Run:
    if isinstance(source, Tables):
        return _Run(str(source.manifest.get("name", "run")), source, None, None)
    if isinstance(source, RunDirectory):
        return _Run(str(source.path), source.tables(), None, source)
    if not isinstance(source, str | Path):
        tables = source.tables()
        return _Run(str(tables.manifest.get("name", "run")), tables, None, None)
    path, cell = split_cell(str(source))
    run = RunDirectory.open(path)
    return _Run(str(path), run.tables(), cell, run)


def split_cell(source: str) -> tuple[Path, str | None]:
    """``RUN:CELL`` -> (RUN, CELL); a path that exists is taken whole."""
    if Path(source).exists() or ":" not in source:
        return Path(source), None
    path, _, cell = source.partition(":")
    while not Path(path).exists() and ":" in cell:
        more, _, cell = cell.partition(":")
        path = f"{path}:{more}"
    return Path(path), cell


def _kinds(runs: Sequence[_Run], asked: TextKind | str | None) -> list[TextKind]:
    """A kind of text of each run, such that what was named was measured on one kind: the
    headline's first."""
    if isinstance(asked, str) and asked not in TEXTS:
        raise ConfigError(
            "no such kind of text", got=asked, remedy=f"Name one of {', '.join(TEXTS)}."
        )
    every = [_measured_on(run) for run in runs]
    for own in every[0]:
        if (asked is None or asked in (own, own.text)) and all(own in there for there in every):
            return [there[own] for there in every]
    listed = "; ".join(
        f"{run.name}{f':{run.cell}' if run.cell else ''}: {', '.join(map(str, there))}"
        for run, there in zip(runs, every, strict=True)
    )
    wanted = f"no {asked} text" if asked is not None else "no kind of text"
    raise RunError(
        f"{wanted} is in both runs" if len(runs) > 1 else f"the run has {wanted}",
        got=listed,
        remedy="Measure both on one kind: sampled text at one temperature (text.temperatures, or "
        "--temperature).",
    )


def _measured_on(run: _Run) -> dict[TextKind, TextKind]:
    """Kinds of text that the named cell, or the run, was measured on, each with the run's kind
    beside which it was: a condition may have a temperature of its own."""
    known, cells = groups(run.tables)
    names = [cells["cell"].astype(str), cells["group"].map(lambda i: known[i].label)]
    rows = cells[(names[0] == run.cell) | (names[1] == run.cell)]
    found: dict[TextKind, TextKind] = {}
    for kind in text_kinds(run.tables):
        of_cell = {texts_of(run.tables, known[i], kind)[0] for i in rows["group"]}
        for own in of_cell or {kind}:
            found.setdefault(own, kind)
    return found


def _pairs(runs: Sequence[_Run], kinds: Sequence[TextKind]) -> list[tuple[Side, Side]]:
    options = [_sides(run, kind) for run, kind in zip(runs, kinds, strict=True)]
    if all(len(o) == 1 for o in options):
        return [(options[0][0], options[1][0])]
    if any(run.cell is not None for run in runs):
        several = next(r for r, o in zip(runs, options, strict=True) if len(o) > 1)
        raise RunError(
            f"{several.name} has several variants, and the other side is one cell",
            got=", ".join(s.group.label for s in options[runs.index(several)]),
            remedy=f"Name one there too: {several.name}:CELL.",
        )
    second = {side.group.label: side for side in options[1]}
    found = [(side, second[side.group.label]) for side in options[0] if side.group.label in second]
    if not found:
        listed = "; ".join(
            f"{run.name}: {', '.join(s.group.label for s in o)}"
            for run, o in zip(runs, options, strict=True)
        )
        raise RunError(
            "the runs have no variant in common",
            got=listed,
            remedy="Name a cell on either side: RUN:CELL.",
        )
    return found


def _sides(run: _Run, kind: TextKind) -> list[Side]:
    """The groups of a run, or the one that was named."""
    piece = take(run.tables, modes(run.tables)[0], kind)
    cells = run.tables.cells
    sides = []
    for group in piece.groups:
        seeds = np.isfinite(piece.at(group, "n", piece.index[0])).any(axis=1)
        numbers = tuple(s for s, there in zip(piece.seeds, seeds, strict=True) if there)
        sides.append(Side(run.name, group, run.tables, kind, numbers))
    if run.cell is None:
        return sides
    variant = [s for s in sides if s.group.variant == run.cell]
    named = (
        [s for s in sides if s.group.label == run.cell]
        or [s for s in variant if not s.group.condition]
        or variant
    )
    if len(named) == 1:
        return named
    if named:
        raise RunError(
            f"{run.name} has several of {run.cell!r}",
            got=", ".join(s.group.label for s in named),
            remedy=f"Name one: {run.name}:{named[0].group.label!r}.",
        )
    row = cells[cells["cell"].astype(str) == run.cell]
    if len(row) == 1:
        seed = row["seed"].fillna(UNKNOWN_SEED).astype(int).iloc[0]
        for side in sides:
            same = (side.group.variant, side.group.condition, side.group.axis) == tuple(
                str(row[c].iloc[0]) for c in ("variant", "condition", "axis")
            )
            ttt = row["ttt"].iloc[0]
            if same and seed in side.seeds and side.group.ttt in (None, ttt):
                return [replace(side, seeds=(int(seed),))]
    raise RunError(
        f"{run.name} has no finished cell {run.cell!r} with {kind}",
        remedy=f"Cells: {', '.join(cells['cell'].astype(str))}.",
    )


def one_side(
    source: Source, kind: TextKind | str | None
) -> tuple[Side, TextKind, RunDirectory | None]:
    """The one group of a run, or of ``RUN:CELL``, with free chains; the kind of text that it was
    measured on; and its directory.

    Raises RunError when there is no such cell, or several groups to choose from.
    """
    run = _open(source)
    (chosen,) = _kinds([run], kind)
    sides = _sides(run, chosen)
    if len(sides) > 1:
        raise RunError(
            f"{run.name} has several variants",
            got=", ".join(s.group.label for s in sides),
            remedy=f"Name one: {run.name}:CELL.",
        )
    return sides[0], sides[0].texts[0], run.directory


def _narrowed(a: Side, b: Side) -> tuple[Side, Side]:
    """Both with the seeds that they are compared by."""
    shared = a.shared(b)
    return (replace(a, seeds=shared), replace(b, seeds=shared)) if shared else (a, b)


def _pair_name(a: Side, b: Side) -> str:
    if a.group.label == b.group.label:
        return a.group.label
    return f"{b.group.label} against {a.group.label}"


# --- are they alike? --------------------------------------------------------------------------

_MEASURE = {
    "depth": "measured depth",
    "sink": "sink set",
    "recent": "recent window",
    "max_anchors": "anchors of a text",
}


class _Unlike:
    """What keeps two runs from being compared, and what to do about each."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.names = [run.name if run.cell is None else f"{run.name}:{run.cell}" for run in runs]
        self.faults: list[tuple[str, str]] = []

    def differ(self, what: str, first: object, second: object, remedy: str) -> None:
        self.faults.append((f"{what}: {first} and {second}", remedy))

    def refuse(self) -> None:
        """Raise RunError when there is anything."""
        if self.faults:
            raise RunError(
                f"{self.names[0]} and {self.names[1]} are not alike",
                got="; ".join(text for text, _ in self.faults),
                remedy=" ".join(dict.fromkeys(remedy for _, remedy in self.faults)),
            )


def _refuse_unlike(runs: Sequence[_Run]) -> None:
    a, b = (run.tables for run in runs)
    unlike = _Unlike(runs)
    targets = [setting(t, "inputs", "target") for t in (a, b)]
    if targets[0] != targets[1]:
        unlike.differ(
            "target",
            _target_name(a),
            _target_name(b),
            "Acceptance is that of a pair: measure both on one target.",
        )
    for name, text in _MEASURE.items():
        values = [setting(t, "config", "measure", name) for t in (a, b)]
        if values[0] != values[1]:
            unlike.differ(
                text,
                values[0],
                values[1],
                f"Measure one of them again with measure.{name} of the other.",
            )
    chains = [modes(t) for t in (a, b)]
    if not set(chains[0]) & set(chains[1]):
        remedy = "Measure one of them again with measure.modes of the other."
        one, other = (", ".join(there) or "none" for there in chains)
        unlike.differ("chains", one, other, remedy)
    unlike.refuse()


def _target_name(tables: Tables) -> str:
    name = (
        setting(tables, "config", "target", "source")
        or setting(tables, "resolved", "target.source", "value")
        or "unnamed"
    )
    return f"{name} ({str(setting(tables, 'inputs', 'target'))[:12]})"


def _refuse_other_texts(runs: Sequence[_Run], pair: tuple[Side, Side]) -> None:
    """Same continuation of every shared prompt, the same anchors in each."""
    unlike = _Unlike(runs)
    kinds, frames = zip(*(side.texts for side in pair), strict=True)
    frames = tuple(f.assign(prompt=f["prompt"].astype(str)).set_index("prompt") for f in frames)
    if kinds[0] != kinds[1]:
        remedy = "Name cells on both sides that were measured on one kind."
        unlike.differ("kind of text", kinds[0], kinds[1], remedy)
        unlike.refuse()
    shared = frames[0].index.intersection(frames[1].index)
    if not len(shared):
        names = [f"{', '.join(f.index[:3])}, ..." for f in frames]
        remedy = "Measure both on the same prompts."
        unlike.differ("prompts, none in common", names[0], names[1], remedy)
        unlike.refuse()
    for column, what, remedy in (
        (
            "tokens_sha",
            "text",
            "The target wrote other text: measure both with the same prompts, temperature, "
            "length, seed and batch of text (a shared cache gives the same texts).",
        ),
        ("n_prompt", "rendered prompt", "Measure both with the same template and BOS."),
        ("n_anchors", "anchors", "Measure both with the same depth, length and max_anchors."),
    ):
        values = [f.loc[shared, column].astype(str) for f in frames]
        odd = shared[(values[0] != values[1]).to_numpy()]
        if len(odd):
            first = odd[0]
            shown = [f"{str(v[first])[:12]}" for v in values]
            where = f"{what} of {len(odd)} of {len(shared)} prompts, first {first}"
            unlike.differ(where, shown[0], shown[1], remedy)
            unlike.refuse()


def _allowed_differences(runs: Sequence[_Run]) -> Iterable[str]:
    """Settings that differ and may: they are what is compared."""
    flat = [dict(_flat(setting(run.tables, "config"))) for run in runs]
    for settings, run in zip(flat, runs, strict=True):
        whose = setting(run.tables, "drafters", "run")
        if whose and setting(run.tables, "merged"):  # its settings name the first part's alone
            settings["applied.drafters"] = whose
    skip = ("name", "question", "workers", "threads", "measure.bootstrap", "seeds", "axes")
    made = {setting(run.tables, "config", "axes") is None for run in runs}
    # A probe names its settings otherwise than an experiment.
    keys = flat[0].keys() | flat[1].keys() if len(made) == 1 else flat[0].keys() & flat[1].keys()
    for key in sorted(keys):
        values = [f.get(key, "not set") for f in flat]
        if len(made) > 1 and None in values:  # left to the target by the one, resolved by the other
            continue
        if key.startswith("interventions.") and all(v in ((), "not set") for v in values):
            continue  # kept by the cell's name, which is no setting
        if values[0] != values[1] and not key.startswith(skip):
            yield f"{key}: {_brief(values[0])} (A), {_brief(values[1])} (B)"


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _flat(value: object, prefix: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tuple(value) if isinstance(value, list) else value


def _notes(pairs: Sequence[tuple[Side, Side]]) -> Iterable[str]:
    said = []
    for pair in pairs:
        rows = [side.texts[1] for side in pair]
        names = [set(r["prompt"].astype(str)) for r in rows]
        both = names[0] & names[1]
        if names[0] != names[1]:
            said.append(
                f"prompts in both runs: {len(both)}; {len(names[0] - both)} of A and "
                f"{len(names[1] - both)} of B were left out"
            )
        loops = both & {str(p) for p in rows[0].loc[rows[0]["loops"].astype(bool), "prompt"]}
        kept = loops & _counted(pair[0]) & _counted(pair[1])
        if kept:
            said.append("all compared texts run in a loop, which flatters every drafter")
        if loops - kept:
            said.append(f"texts left out because they run in a loop: {len(loops - kept)}")
    yield from dict.fromkeys(said)
    for a, b in pairs:
        shared = sorted(a.shared(b))
        if set(shared) == {*a.seeds, *b.seeds}:
            continue
        if shared:
            listed = ", ".join(map(str, shared))
            yield f"{_pair_name(a, b)}: paired by seeds {listed}, which both have"
        else:
            yield (
                f"{_pair_name(a, b)}: no seed known to be in common; each prompt's mean over "
                "seeds was compared, and the noise of training is not in the intervals"
            )
    if single := [_pair_name(a, b) for a, b in pairs if len(a.shared(b)) == 1]:
        whose = "" if len(single) == len(pairs) else f"{', '.join(single)}: "
        yield f"{whose}one seed: the noise of training is not in the intervals"


def _counted(side: Side) -> set[str]:
    """Prompts that count in a side's numbers: a looping text does where all of its run loop."""
    piece = take(side.tables, modes(side.tables)[0], side.kind)
    there = np.isfinite(piece.at(side.group, "n", piece.index[0])).any(axis=0)
    return {p for p, counts in zip(piece.prompts, there, strict=True) if counts}


def _refuse_nothing_counted(runs: Sequence[_Run], pair: tuple[Side, Side]) -> None:
    """One text at least must count on both sides."""
    sets = [_counted(side) for side in pair]
    if not sets[0] & sets[1]:
        raise RunError(
            f"{runs[0].name} and {runs[1].name}: no text counts in both",
            got=f"{len(sets[0])} and {len(sets[1])} that count in one",
            remedy="Looping texts are left out of a run, unless all of its texts loop: measure "
            "both on the same prompts.",
        )


# --- measures ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measure:
    name: str
    mode: Mode | None
    sample: Callable[[Slice, Group], Sample]
    ratio: bool = False
    unit: str = ""
    offset: float = 0.0


@dataclass(frozen=True)
class _Pair:
    measure: str
    a: Estimate
    b: Estimate
    effect: Estimate


def _measures(there: Sequence[Mode], depths: Sequence[int], states: int) -> list[_Measure]:
    """Every measure that both runs have."""
    first, last = depths[0], depths[-1]
    paper = PAPER_DEPTH if PAPER_DEPTH in depths else last
    out: list[_Measure] = []

    def add(name: str, mode: Mode | None, sample: Callable[..., Sample], **more: Any) -> None:
        out.append(_Measure(name, mode, sample, **more))

    if "free" in there:
        add("acceptance length (bonus included)", "free", Slice.accepted_drafts, offset=1.0)
        for d in (d for d in depths if d in ACCURACY_DEPTHS):
            add(f"conditional acceptance @{d}", "free", lambda p, g, d=d: p.conditional(g, d))
    if "forced" in there:
        for d in (d for d in depths if d in ACCURACY_DEPTHS):
            add(f"forced accuracy @{d}", "forced", lambda p, g, d=d: p.accuracy(g, d))
    drift: Mode = "free" if "free" in there else "forced"
    if last > first:
        for name, column in (("state", "state_pre"), ("fed back", "feedback")):
            add(
                f"growth {first}-{paper}, {name}",
                drift,
                lambda p, g, c=column: p.change(g, f"log_rms_{c}", first, paper),
                ratio=True,
            )
    for column, text in (("sink", "sink"), ("draft_mass", "own drafts"), ("entropy", "entropy")):
        unit = "nats" if column == "entropy" else ""
        for d in dict.fromkeys((first, last)):
            if (column, d) != ("draft_mass", 1):  # a chain of one draft has no earlier ones
                add(f"{text} @{d}", drift, lambda p, g, c=column, d=d: p.mean(g, c, d), unit=unit)
    for i in range(states if states > 1 else 0):
        add(f"share of captured state {i}", None, lambda p, g, i=i: p.mean(g, "share", i))
    return out


def _measured(a: Side, b: Side) -> Iterable[_Pair]:
    """Estimates of both sides and of their paired difference, for every shared measure."""
    there = [m for m in modes(a.tables) if m in modes(b.tables)]
    depths = take(a.tables, there[0], a.kind).index
    states = [len(t.fused["layer"].unique()) if len(t.fused) else 0 for t in (a.tables, b.tables)]
    for measure in _measures(there, depths, min(states) if states[0] == states[1] else 0):
        table: Any = "fused" if measure.mode is None else "depths"
        pieces = [take(s.tables, measure.mode, s.kind, table=table) for s in (a, b)]
        if any(s.group not in p.groups for s, p in zip((a, b), pieces, strict=True)):
            continue
        samples = [measure.sample(p, s.group) for p, s in zip(pieces, (a, b), strict=True)]
        first, second = _align(samples, pieces, (a, b))
        draws = max(p.resamples for p in pieces)
        options: dict[str, Any] = {"ratio": measure.ratio, "unit": measure.unit}
        options["resamples"] = draws
        effect = estimate([second, first], [1, -1], **options)
        if math.isnan(effect.value):
            continue
        both = np.isfinite(first.values) & np.isfinite(second.values)
        for s in (first, second):  # a seed without a chance on one side is not in the effect
            if s.weights is not None:
                both &= np.where(both, s.weights, 0).sum(axis=1, keepdims=True) > 0
        levels = [
            estimate(Sample(np.where(both, s.values, np.nan), s.weights), **options)
            for s in (first, second)
        ]
        level_a, level_b = (_shift(level, measure.offset) for level in levels)
        yield _Pair(measure.name, level_a, level_b, effect)


def _align(
    samples: Sequence[Sample], pieces: Sequence[Slice], sides: Sequence[Side]
) -> tuple[Sample, Sample]:
    """Both samples over the same prompts, and over the same seeds or their mean."""
    prompts = [p for p in pieces[0].prompts if p in set(pieces[1].prompts)]
    shared = sides[0].shared(sides[1])
    out = []
    for sample, piece, side in zip(samples, pieces, sides, strict=True):
        columns = [piece.prompts.index(p) for p in prompts]
        rows = [piece.seeds.index(s) for s in (shared or side.seeds)]
        values = sample.values[np.ix_(rows, columns)]
        weights = None if sample.weights is None else sample.weights[np.ix_(rows, columns)]
        if not shared:
            values, weights = _mean_over_seeds(values, weights)
        out.append(Sample(values, weights))
    return out[0], out[1]


def _mean_over_seeds(
    values: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    there = np.isfinite(values)
    weight = there.astype(float) if weights is None else np.where(there, weights, 0.0)
    total = weight.sum(axis=0, keepdims=True)
    summed = (np.where(there, values, 0.0) * weight).sum(axis=0, keepdims=True)
    mean = np.full_like(total, np.nan)
    np.divide(summed, total, out=mean, where=total > 0)
    return mean, None if weights is None else total


def _shift(value: Estimate, by: float) -> Estimate:
    if not by:
        return value
    return replace(value, value=value.value + by, low=value.low + by, high=value.high + by)


# --- as text ----------------------------------------------------------------------------------


def _page(c: Comparison) -> Iterable[str]:
    for a, b in c.pairs:
        yield f"A  {a.run}  {a.label}"
        yield f"B  {b.run}  {b.label}"
    yield f"{c.basis}; effect: B - A, for growth B / A (x)"
    yield ""
    columns = ("measure", "A", "B", "effect", "p", "n")
    for a, b in c.pairs:
        pair = _pair_name(a, b)
        if len(c.pairs) > 1:
            yield pair
        rows = [
            (r.measure, r.a.short, r.b.short, r.effect.short, _p(r.p), _prompts(r))
            for r in c.rows
            if r.pair == pair
        ]
        yield from aligned([columns, *rows])
        yield ""
    yield from (f"- {sentence}" for sentence in c.sentences)
    if c.differences:
        yield ""
        yield "Settings that differ:"
        yield from (f"- {text}" for text in c.differences)
    if c.notes:
        yield ""
        yield from (f"note: {text}" for text in c.notes)


def _prompts(row: Row) -> str:
    """Prompts that weigh in A and in B: chances need not be there on both sides."""
    return str(row.a.n) if row.a.n == row.b.n else f"{row.a.n}, {row.b.n}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Rows of words as lines with columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def _p(p: float) -> str:
    if math.isnan(p):
        return "n/a"
    return "<0.001" if p < 0.001 else f"{p:.3f}"
