"""From tables to samples: one kind of text, one mode, groups of cells that differ by seed only.

Text kinds and modes are never mixed; a :class:`Slice` holds one of each.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from driftlab.errors import DataError, RunError
from driftlab.results.records import Tables
from driftlab.results.stats import ONE_SEED, RESAMPLES, Sample, count, count_prompts

if TYPE_CHECKING:
    import pandas as pd

Mode = Literal["free", "forced"]
Axis = Literal["trained", "applied"]
MODES: tuple[Mode, ...] = ("free", "forced")
UNKNOWN_SEED = -1
"""Of a drafter that was probed: its file does not say what it was drawn with."""
TEXTS = ("sampled", "given", "greedy")
"""Text kinds, the headline's first choice first: greedy text of a small model loops."""


@dataclass(frozen=True, order=True)
class TextKind:
    """How the measured text was made."""

    text: str
    temperature: float | None = None

    def __str__(self) -> str:
        if self.text != "sampled" or self.temperature is None:
            return f"{self.text} text"
        return f"sampled text (temperature {self.temperature:g})"


@dataclass(frozen=True)
class Group:
    """Cells that differ by seed only: one line of a figure, one row of a table."""

    label: str
    variant: str
    fusion_norm: str
    feedback: str
    residual: str
    attention_gate: bool
    ttt: int | None
    axis: str
    condition: str

    @property
    def norms(self) -> str:
        """The two switches, as a plain variant is named."""
        return f"{self.fusion_norm}+{self.feedback}"

    @property
    def alignment(self) -> float:
        """Weight of the attention-alignment loss."""
        return self._named("aligned", 0.0)

    @property
    def steps_scale(self) -> float:
        """Steps of training, times those of the experiment file."""
        return self._named("steps", 1.0)

    @property
    def lr_scale(self) -> float:
        """Learning rate, times that of the experiment file."""
        return self._named("lr", 1.0)

    def _named(self, setting: str, usual: float) -> float:
        """A setting of training, which the variant's name holds when it is not the usual one."""
        # A number in scientific notation has a plus sign of its own.
        number = r"[0-9.]+(?:e[+-][0-9]+)?"
        found = re.search(rf"(?:^|\+){setting}({number})x?(?=\+|$)", self.variant)
        return float(found[1]) if found else usual

    @property
    def stratum(self) -> Stratum:
        """What must agree before fusion norm and feedback may be compared."""
        training = (self.ttt, self.alignment, self.steps_scale, self.lr_scale)
        return self.residual, self.attention_gate, *training


Stratum = tuple[str, bool, int | None, float, float, float]

_GROUP_KEYS = ("variant", "ttt", "axis", "condition")
_FUSION_ORDER = {"none": 0, "per_layer": 1, "concat": 2, "concat_per_layer": 3}
_FEEDBACK_ORDER = {"pre_norm": 0, "post_norm": 1}


def setting(tables: Tables, *names: str) -> Any:
    """What the manifest holds under ``names``, one within the other; None where one is absent."""
    value: Any = tables.manifest
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def text_kinds(tables: Tables) -> tuple[TextKind, ...]:
    """Kinds of text in the run, the headline's kind first: sampled, given, greedy; among
    sampled texts the temperature nearest to 1."""
    depths, cells = tables.depths, tables.cells
    plain = depths["cell"].isin(cells.loc[cells["condition"] == "", "cell"])
    if plain.any():  # a condition may have a temperature of its own
        depths = depths[plain]
    pairs = depths[["text", "temperature"]].drop_duplicates()
    kinds = {
        TextKind(t, None if t != "sampled" or math.isnan(h) else float(h))
        for t, h in zip(pairs["text"], pairs["temperature"], strict=True)
    }
    return tuple(sorted(kinds, key=lambda k: (TEXTS.index(k.text), abs((k.temperature or 0) - 1))))


def without_conditions(tables: Tables) -> Tables:
    """``tables`` of an experiment with applied conditions, its unchanged drafters alone; those of
    any other run as they are. Dozens of conditions are no lines of one figure."""
    if not setting(tables, "config", "applied"):
        return tables
    plain = tables.cells[tables.cells["axis"] == "trained"]

    def kept(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["cell"].isin(plain["cell"])]

    return replace(
        tables,
        cells=plain,
        depths=kept(tables.depths),
        heads=kept(tables.heads),
        fused=kept(tables.fused),
        extra={},
        cache={},
    )


def windowed(tables: Tables, chosen: Iterable[Group]) -> bool:
    """Whether a drafter of ``chosen`` saw a window of keys only, of its own or by an intervention:
    then a key has another even share, and the sink may be out of sight."""
    if any(any(contract.get("windows") or ()) for contract in contracts(tables)):
        return True
    conditions = {group.condition for group in chosen} - {""}
    names = dict(zip(tables.cells["cell"], tables.cells["condition"], strict=True))
    probed = setting(tables, "config", "interventions") or {}
    stated = setting(tables, "config", "applied", "conditions") or ()
    changes = [
        *((names.get(cell), made.get("name")) for cell, every in probed.items() for made in every),
        *((c.get("name"), made.get("kind")) for c in stated for made in c.get("interventions", ())),
    ]
    return any(kind == "window" and condition in conditions for condition, kind in changes)


def contracts(tables: Tables) -> list[Mapping[str, Any]]:
    """What the manifest says of the drafters: one contract, or those of drafters side by side."""
    stated = setting(tables, "config", "drafter")
    return stated if isinstance(stated, list) else [stated or {}]


def layers(tables: Tables) -> int:
    """Layers of the deepest drafter; attention is that of the first."""
    return max(contract.get("num_layers") or 1 for contract in contracts(tables))


def modes(tables: Tables) -> tuple[Mode, ...]:
    there = set(tables.depths["mode"].unique())
    return tuple(m for m in MODES if m in there)


def resamples(tables: Tables) -> int:
    """Bootstrap draws that the run's config asks for."""
    return int(setting(tables, "config", "measure", "bootstrap") or RESAMPLES)


def groups(tables: Tables, axis: Axis | None = None) -> tuple[tuple[Group, ...], pd.DataFrame]:
    """Groups of finished cells, and ``cells`` with the number of each cell's group.

    Raises DataError when two cells have the same group and seed.
    """
    cells = tables.cells
    cells = cells[
        (cells["status"] == "done") & (cells["cell"].isin(tables.depths["cell"].unique()))
    ]
    if axis is not None:
        cells = cells[cells["axis"] == axis]
    cells = cells.copy()
    cells["ttt"] = cells["ttt"].astype("float64")
    cells["seed"] = cells["seed"].fillna(UNKNOWN_SEED).astype(int)
    lengths = cells.groupby("variant")["ttt"].nunique(dropna=False)
    found: dict[tuple[Any, ...], Group] = {}
    keys = []
    for row in cells.to_dict("records"):
        ttt = None if math.isnan(row["ttt"]) else int(row["ttt"])
        key = tuple(ttt if k == "ttt" else row[k] for k in _GROUP_KEYS)
        label = row["variant"]
        if lengths[row["variant"]] > 1:
            label += f", TTT {ttt}"
        if row["condition"]:
            label += f", {row['condition']}"
        if row["axis"] == "applied":
            label += " (applied)"
        keys.append(key)
        found[key] = Group(
            label,
            row["variant"],
            row["fusion_norm"],
            row["feedback"],
            row["residual"],
            bool(row["attention_gate"]),
            ttt,
            row["axis"],
            row["condition"],
        )
    order = sorted(found, key=lambda key: _order(found[key]))
    cells["group"] = [order.index(key) for key in keys]
    twice = cells[cells.duplicated(["group", "seed"])]
    if len(twice):
        raise DataError(
            "two cells have the same variant, condition and seed",
            got=", ".join(twice["cell"]),
            remedy="Give repeated cells different seeds.",
        )
    return tuple(found[key] for key in order), cells


def _order(group: Group) -> tuple[Any, ...]:
    return (
        group.axis != "trained",
        group.condition,
        group.attention_gate,
        group.residual != "raw",
        _FEEDBACK_ORDER.get(group.feedback, 9),
        _FUSION_ORDER.get(group.fusion_norm, 9),
        group.alignment,
        group.steps_scale,
        group.lr_scale,
        group.variant,
        group.ttt or 0,
    )


@dataclass(frozen=True)
class Texts:
    """Texts that groups were measured on.

    Attributes
    ----------
    left_out: looping texts that were left out; none when ``all_loop``.
    unmeasured: texts without one measured anchor: too short for the depth.
    all_loop: every text loops, and none was left out.
    """

    kind: TextKind
    left_out: int = 0
    unmeasured: int = 0
    all_loop: bool = False

    @property
    def faults(self) -> list[str]:
        """What a reader must know of them, in words."""
        said = [f"{_texts(self.left_out, 'looping')} left out"] if self.left_out else []
        if self.all_loop:
            said.append("all texts loop and none could be left out")
        if self.unmeasured:
            said.append(f"{_texts(self.unmeasured)} too short for the depth")
        return said


@dataclass(frozen=True)
class Slice:
    """One kind of text and one mode of a run, as dense arrays [group, seed, prompt, index].

    ``index`` is the depth, or the position among the captured states for table ``fused``.

    Attributes
    ----------
    texts: by condition that has texts of its own; the run's under the empty name.
    """

    texts: Mapping[str, Texts]
    mode: Mode | None
    groups: tuple[Group, ...]
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    index: tuple[int, ...]
    resamples: int
    frame: pd.DataFrame = field(repr=False)
    positions: tuple[np.ndarray, ...] = field(repr=False)
    _cubes: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def basis(self) -> str:
        """Which rows the numbers come from, in words."""
        return self.basis_of(self.groups)

    def basis_of(self, groups: Iterable[Group]) -> str:
        """The same of some groups' numbers."""
        return f"{self.mode} chains on {self.over(groups)}" if self.mode else self.over(groups)

    @property
    def kind(self) -> TextKind:
        """Of the run's texts."""
        return self.texts[""].kind

    def texts_of(self, group: Group) -> Texts:
        """The texts that a group was measured on."""
        return self.texts.get(group.condition, self.texts[""])

    def over(self, groups: Iterable[Group]) -> str:
        """The texts that the numbers of ``groups`` come from, and what was left out of these."""
        groups = list(groups) or list(self.groups)
        plain = [g for g in groups if not self._has_own(g)] or groups
        size = self.n_prompts(plain)
        words = sample_size(size, self._pairs(plain))
        if self.seeds == (UNKNOWN_SEED,):
            words = f"{count_prompts(size)}, seed unknown"
        said = [f"{self.kind}, {words}", *self.texts[""].faults]
        theirs: dict[str, dict[str, None]] = {}
        for group in groups:
            if words := self.apart(group):
                theirs.setdefault(words, {})[group.condition] = None
        return "; ".join(
            [*said, *(f"{', '.join(names)} {words}" for words, names in theirs.items())]
        )

    def apart(self, group: Group) -> str:
        """What a group was measured on in place of the run's texts, in words; empty where on
        these."""
        if not self._has_own(group):
            return ""
        own, size = self.texts[group.condition], self.n_prompts([group])
        whose = " of its own" if own.kind == self.kind else ""
        every = self.n_prompts([g for g in self.groups if not self._has_own(g)])
        other = [count_prompts(size)] if every not in (0, size) else []
        return ", ".join([f"on {own.kind}{whose}", *other, *own.faults])

    def _has_own(self, group: Group) -> bool:
        return bool(group.condition) and group.condition in self.texts

    def n_prompts(self, groups: Iterable[Group]) -> int:
        """Prompts that ``groups`` have."""
        return len(np.unique(self.positions[2][self._rows(groups)]))

    def _pairs(self, groups: Iterable[Group]) -> set[tuple[int, int]]:
        """(group, seed) of ``groups``, as positions."""
        shown = self._rows(groups)
        return {*zip(*(p[shown].tolist() for p in self.positions[:2]), strict=True)}

    def _rows(self, groups: Iterable[Group]) -> np.ndarray:
        return np.isin(self.positions[0], [self.groups.index(g) for g in groups])

    @property
    def intervals(self) -> tuple[str, str]:
        """What the intervals of :func:`driftlab.results.stats.estimate` draw, and how they are
        made."""
        fewest, most = seeds_of_a_group(self._pairs(self.groups))
        if most == 1:
            return "prompts", ONE_SEED
        if fewest == 1:
            return "prompts, and seeds where there are several", "percentile, and BCa for one seed"
        return "seeds and prompts", "percentile"

    def cube(self, column: str) -> np.ndarray:
        """``column`` as [group, seed, prompt, index], NaN where there is no row.

        Raises RunError for a column that the tables of a published run do without.
        """
        if column not in self._cubes:
            if column not in self.frame:
                raise RunError(
                    f"the run's tables have no {column}",
                    got="a published run holds only what its pages need",
                    remedy="Make the run itself: its manifest.json names the command.",
                )
            sizes = (self.groups, self.seeds, self.prompts, self.index)
            values = np.full([len(s) for s in sizes], np.nan)
            values[self.positions] = self.frame[column].to_numpy(dtype=float, na_value=np.nan)
            self._cubes[column] = values
        return self._cubes[column]

    def at(self, group: Group, column: str, index: int) -> np.ndarray:
        """[seed, prompt] of one group at one depth or layer."""
        return self.cube(column)[self.groups.index(group), :, :, self.index.index(index)]

    # --- samples: one value for each (seed, prompt) ---------------------------------------

    def mean(self, group: Group, column: str, index: int) -> Sample:
        """``column`` at a depth (or layer), prompts weighted alike."""
        return Sample(self.at(group, column, index))

    def change(self, group: Group, column: str, start: int, end: int) -> Sample:
        """``column`` at ``end`` minus at ``start``. For ``log_rms_*`` this is log growth."""
        return Sample(self.at(group, column, end) - self.at(group, column, start))

    def slope(self, group: Group, column: str) -> Sample:
        """Least-squares slope of ``column`` over all depths, a depth; NaN where one is missing."""
        depth = np.asarray(self.index, dtype=float)
        if len(depth) < 2:
            raise DataError("a slope needs two depths", got=len(depth))
        centred = depth - depth.mean()
        return Sample(self.cube(column)[self.groups.index(group)] @ centred / (centred @ centred))

    def accuracy(self, group: Group, depth: int) -> Sample:
        """Top-1 accuracy at ``depth``: drafts equal to the text's token / anchors."""
        return Sample(self.at(group, "n_correct", depth) / self.at(group, "n", depth))

    def conditional(self, group: Group, depth: int) -> Sample:
        """Conditional acceptance at ``depth``, pooled over opportunities."""
        return _ratio(self.at(group, "n_accepted", depth), self.at(group, "n_opportunities", depth))

    def accepted_drafts(
        self, group: Group, k: int | None = None, *, pooled: bool = False
    ) -> Sample:
        """Drafts accepted in a round of at most ``k``, without the bonus token. A round starts at
        every anchor.

        Prompts are weighted alike, or by their rounds when ``pooled``.
        """
        accepted = self.cube("n_accepted")[self.groups.index(group)]
        rounds = self.at(group, "n", self.index[0])
        there = np.isfinite(accepted[:, :, 0])
        upto = [i for i, depth in enumerate(self.index) if k is None or depth <= k]
        total = np.where(there, np.nansum(accepted[:, :, upto], axis=2), np.nan)
        with np.errstate(invalid="ignore"):
            return Sample(total / rounds, np.nan_to_num(rounds) if pooled else None)

    @cached_property
    def strata(self) -> dict[Stratum, dict[tuple[str, str], Group]]:
        """Trained, unperturbed groups by what must agree, then by (fusion norm, feedback)."""
        out: dict[Stratum, dict[tuple[str, str], Group]] = {}
        for group in self.groups:
            if group.axis == "trained" and not group.condition:
                out.setdefault(group.stratum, {})[group.fusion_norm, group.feedback] = group
        return out


def seeds_of_a_group(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Fewest and most seeds that a group has, of the pairs (group, seed) that are there."""
    each = Counter(group for group, _ in set(pairs)).values()
    return min(each), max(each)


def sample_size(prompts: int, pairs: Iterable[tuple[int, int]]) -> str:
    """``12 prompts x 1 to 3 seeds``, of the pairs (group, seed) that are there; groups that have
    as many seeds and not the same say so."""
    pairs = set(pairs)
    fewest, most = seeds_of_a_group(pairs)
    unlike = fewest == most < len({seed for _, seed in pairs})
    return count(prompts, most, fewest) + (" each, not the same" if unlike else "")


def _texts(n: int, what: str = "") -> str:
    return " ".join(filter(None, (str(n), what, "text" if n == 1 else "texts")))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> Sample:
    there = np.isfinite(numerator) & np.isfinite(denominator)
    weights = np.where(there, denominator, 0.0)
    values = np.divide(numerator, denominator, out=np.zeros_like(weights), where=weights > 0)
    return Sample(np.where(there, values, np.nan), weights)


def take(
    tables: Tables,
    mode: Mode | None,
    kind: TextKind | None = None,
    *,
    table: Literal["depths", "fused"] = "depths",
    axis: Axis | None = None,
) -> Slice:
    """The rows of one mode and one kind of text (the headline's kind by default).

    Raises RunError when there are none.
    """
    key = (mode, kind, table, axis)
    if key not in tables.cache:
        tables.cache[key] = _take(tables, mode, kind, table, axis)
    piece: Slice = tables.cache[key]
    return piece


def _take(
    tables: Tables, mode: Mode | None, kind: TextKind | None, table: str, axis: Axis | None
) -> Slice:
    import pandas as pd

    if not len(tables.depths):
        raise RunError("the run holds no measurements", remedy="Measure at least one prompt.")
    kind = kind or text_kinds(tables)[0]
    all_groups, cells = groups(tables, axis)
    frame = getattr(tables, table)
    frame = frame[frame["cell"].isin(cells["cell"])]
    if mode is not None:
        frame = frame[frame["mode"] == mode]
    condition = (
        frame["cell"].astype(str).map(dict(zip(cells["cell"], cells["condition"], strict=True)))
    )
    chosen = (frame["text"] == kind.text).to_numpy(copy=True)
    if kind.temperature is not None and "temperature" in frame:
        chosen &= np.isclose(frame["temperature"].to_numpy(float), kind.temperature)
    # A condition that sets the temperature has one kind of text, its own, and stands for itself.
    chosen |= condition.isin({*_of_other_kind(tables, kind)}).to_numpy()
    frame, condition = frame[chosen], condition[chosen]
    if not len(frame):
        what = " ".join(filter(None, (mode, "chains on" if mode else "", str(kind))))
        raise RunError(
            f"the run has no finished cell with {what}", remedy="See the run's table cells."
        )
    frame, texts = _without_loops(frame, condition, tables, kind)
    by_cell = cells.set_index("cell")
    seeds = tuple(sorted(by_cell.loc[frame["cell"].unique(), "seed"].unique().tolist()))
    prompts = tuple(sorted(frame["prompt"].astype(str).unique()))
    key = "depth" if table == "depths" else "layer"
    index = tuple(sorted(frame[key].unique().tolist()))
    shown = sorted(by_cell.loc[frame["cell"].unique(), "group"].unique().tolist())
    positions = (
        np.searchsorted(shown, _mapped(frame["cell"], by_cell["group"])),
        np.searchsorted(seeds, _mapped(frame["cell"], by_cell["seed"])),
        _mapped(frame["prompt"], pd.Series(range(len(prompts)), index=prompts)),
        np.searchsorted(index, frame[key].to_numpy(int)),
    )
    return Slice(
        texts,
        mode,
        tuple(all_groups[g] for g in shown),
        seeds,
        prompts,
        index,
        resamples(tables),
        frame,
        positions,
    )


def _mapped(names: pd.Series, codes: pd.Series) -> np.ndarray:
    return codes.reindex(names.astype(str)).to_numpy(int)


def _of_other_kind(tables: Tables, kind: TextKind) -> dict[str, TextKind]:
    """Conditions whose texts are all of one kind, which is another than ``kind``; and that kind."""
    texts = tables.extra.get("texts")
    if texts is None:
        return {}
    found: dict[str, set[TextKind]] = {}
    for row in texts[["condition", "text", "temperature"]].drop_duplicates().to_dict("records"):
        at = 0.0 if math.isnan(row["temperature"]) else round(float(row["temperature"]), 6)
        own = TextKind(str(row["text"]), at if row["text"] == "sampled" else None)
        found.setdefault(str(row["condition"]), set()).add(own)
    wanted = kind
    if kind.temperature is not None:
        wanted = replace(kind, temperature=round(kind.temperature, 6))
    return {c: next(iter(own)) for c, own in found.items() if len(own) == 1 and wanted not in own}


def texts_of(tables: Tables, group: Group, kind: TextKind) -> tuple[TextKind, pd.DataFrame]:
    """The texts that ``take`` reads for ``group``, as rows of table ``prompts``, and their kind:
    those of its condition where that has texts of its own."""
    kind = _of_other_kind(tables, kind).get(group.condition, kind)
    return kind, _rows_of(tables, group.condition, kind)


def _rows_of(tables: Tables, condition: str, kind: TextKind) -> pd.DataFrame:
    rows, texts = tables.prompts, tables.extra.get("texts")
    if texts is not None and (own := texts["condition"].astype(str) == condition).any():
        rows = texts[own]
    return rows[rows["text"].astype(str) == kind.text]


def _without_loops(
    frame: pd.DataFrame, condition: pd.Series, tables: Tables, kind: TextKind
) -> tuple[pd.DataFrame, dict[str, Texts]]:
    """Degeneracy rule: looping texts flatter every drafter and are left out, and counted, unless
    all loop. The texts of a condition that has its own are judged for themselves.
    """
    others, texts = _of_other_kind(tables, kind), tables.extra.get("texts")
    own = set() if texts is None else set(texts["condition"].astype(str))
    source = condition.where(condition.isin(own), "").to_numpy()
    prompt, kept, found = frame["prompt"].astype(str), np.ones(len(frame), bool), {}
    for name in ("", *sorted(own & {*source})):
        whose = others.get(name, kind)
        rows = _rows_of(tables, name, whose)
        loops = rows.loc[rows["loops"].astype(bool), "prompt"].astype(str)
        theirs = source == name
        looping = theirs & prompt.isin(loops).to_numpy()
        every = bool(looping.any()) and bool(looping[theirs].all())
        if not every:
            kept &= ~looping
        left_out = 0 if every else prompt[looping].nunique()
        found[name] = Texts(whose, left_out, int((rows["n_anchors"] == 0).sum()), every)
    return frame[kept], found
