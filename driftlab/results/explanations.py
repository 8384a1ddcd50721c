"""Table ``explained``: where it is kept, what its measures mean, and what it says in sentences.

docs/explain.md has the formula and the limits of every measure.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from driftlab.errors import DataError, RunError, first_line
from driftlab.files import file_hash
from driftlab.results.answers import ALPHA, Answer
from driftlab.results.manifest import read_manifest
from driftlab.results.records import (
    RunDirectory,
    Tables,
    _Lock,
    _write_parquet,
    to_pandas,
)
from driftlab.results.schema import REGIONS
from driftlab.results.shards import (
    SUFFIX,
    Shard,
    atomic_file,
    make_table,
    read_shard,
    remove_dead,
    safe_name,
    write_shard,
)
from driftlab.results.slices import Group, groups, resamples, sample_size, seeds_of_a_group
from driftlab.results.stats import (
    Estimate,
    Sample,
    count_prompts,
    estimate,
    factorial,
    holm,
    too_few,
)

if TYPE_CHECKING:
    import pandas as pd


class Measure(NamedTuple):
    """What a value of ``explained`` is."""

    unit: str
    parts: str
    meaning: str


_BOUNDARY = "boundary "

MEASURES: dict[str, Measure] = {
    "share": Measure("1", "a captured layer", "<part_i, g> / <g, g> of the fused input"),
    "alignment": Measure("1", "a captured layer", "cosine of part_i and the fused input g"),
    "shapley": Measure("nats", "a captured layer", "Shapley value for log p(truth), exact"),
    "logprob": Measure("nats", "all layers, no layer", "log p(truth) with and without the layers"),
    "gradients": Measure(
        "logits", "fused, embedding, feedback, all", "integrated gradients of the drafted token"
    ),
    "gap": Measure(
        "see docs/explain.md", "split, shapley, gradients", "largest error of the sum, over anchors"
    ),
    "lens_draft": Measure("share", "feedback.in, resid.mid", "the lens reads the drafted token"),
    "lens_read": Measure("share", "feedback.in, resid.mid", "the lens reads the token just read"),
    "lens_logprob": Measure("nats", "feedback.in, resid.mid, state.pre", "log p(truth) there"),
    "cosine": Measure(
        "1",
        "previous, same_token, write_previous, write_same_token, other, target",
        "of the state, or of what the layer writes, with another (docs/explain.md)",
    ),
    "rank": Measure("1", "state, target", "effective rank of the states over the anchors"),
    "geometry": Measure("1", "token, anchor", "correlation of the states' and target's geometry"),
    "mass": Measure("probability", "a region", "attention mass, mean over heads"),
    "effect": Measure("nats", "a region", "log p(truth) lost when hidden at this depth alone"),
    "effect_chain": Measure("nats", "a region", "the same, hidden at every depth up to this one"),
}

REGION_NAMES = {
    "sink": "the sink",
    "prompt_mass": "the rest of the prompt",
    "generated": "the generated text",
    "draft_mass": "the chain's own drafts",
}
"""Regions whose keys can be hidden, in words."""

IDLE_MASS, IDLE_EFFECT = 0.1, 0.02
"""A region with surely more mass than the first and surely less effect than the second is idle."""


def boundary_part(boundary: int) -> str:
    """Name of a captured layer in the table."""
    return f"{_BOUNDARY}{boundary}"


# --- on disk ------------------------------------------------------------------------------------


class ExplainedFolder:
    """``explained/`` of a run: one shard for each (cell, prompt), and what was asked for."""

    def __init__(self, run: str | Path) -> None:
        self.run, self.path = Path(run), Path(run) / "explained"

    @property
    def table(self) -> Path:
        return self.run / "explained.parquet"

    @property
    def manifest(self) -> dict[str, Any]:
        """Settings, prompts and versions. Raises RunError when there is none."""
        if not (self.path / "manifest.json").exists():
            raise RunError(
                f"{self.run} was not explained", remedy=f"Run `driftlab explain {self.run}`."
            )
        return read_manifest(
            self.path / "manifest.json", f"Delete {self.path}: it is explained anew."
        )

    @cached_property
    def _owner(self) -> str:
        """What rows depend on."""
        return str(self.manifest.get("hash"))

    def _read(self, cell: str, prompt: str) -> Shard | None:
        return read_shard(self._shard(cell, prompt), owners=(self._owner,))

    def _shard(self, cell: str, prompt: str) -> Path:
        return self.path / safe_name(cell) / f"{safe_name(prompt)}{SUFFIX}"

    def has(self, cell: str, prompt: str) -> bool:
        """Whether (cell, prompt) is finished and its checksum agrees."""
        shard = self._read(cell, prompt)
        return shard is not None and shard.key == (cell, prompt)

    def write(self, cell: str, prompt: str, columns: Mapping[str, Any]) -> None:
        """Store the rows of one (cell, prompt). Raises NumericsError for NaN, DataError else."""
        where = f"cell {cell}, prompt {prompt}"
        table = make_table("explained", {"cell": cell, "prompt": prompt, **columns}, where)
        made = {"explained": table}
        write_shard(self._shard(cell, prompt), (cell, prompt), made, owner=self._owner)

    @contextmanager
    def begin(self, facts: Mapping[str, Any]) -> Iterator[Self]:
        """Own the folder while the context is open. ``facts["hash"]`` names what rows depend on.

        Raises RunError when it holds rows of other settings, or another process owns it.
        """
        if self.path.is_file():
            raise RunError(f"{self.path} is a file", remedy="Remove it: a folder belongs there.")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = _Lock(self.path / "lock")
        try:
            if (self.path / "manifest.json").exists():
                held = self.manifest
                if held.get("hash") != facts["hash"]:
                    raise RunError(
                        f"{self.run} was explained with other settings",
                        got=held.get("spec"),
                        remedy=f"Ask for these, or delete {self.path} to explain it anew.",
                    )
            remove_dead(self.path)
            self._note(facts)
            yield self
        finally:
            lock.release()

    def finish(self, cells: Sequence[str], prompts: Sequence[str]) -> None:
        """Write ``explained.parquet`` beside the run's tables, sorted by its keys."""
        pairs = itertools.product(sorted(cells), sorted(prompts))
        shards = (self._read(*pair) for pair in pairs)
        parts = (shard.table("explained") for shard in shards if shard is not None)
        rows = _write_parquet(self.table, "explained", parts)
        self._note({**self.manifest, "table": {"rows": rows, "sha256": file_hash(self.table)}})

    def _note(self, facts: Mapping[str, Any]) -> None:
        with atomic_file(self.path / "manifest.json") as file:
            file.write(json.dumps(facts, indent=1, default=str).encode() + b"\n")


@dataclass(frozen=True, eq=False)
class Explained:
    """Table ``explained`` with the cells that its rows belong to.

    Attributes
    ----------
    table: the rows. groups: cells that differ by seed only. seeds, prompts, depths: sorted.
    left_out: looping texts that were not explained. all_loop: no text was free of loops, so that
        looping ones were. resamples: bootstrap draws.
    """

    table: pd.DataFrame
    groups: tuple[Group, ...]
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    depths: tuple[int, ...]
    left_out: int
    all_loop: bool
    resamples: int
    _place: Mapping[str, tuple[int, int]] = field(repr=False)
    _cubes: dict[tuple[str, str], np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, run: RunDirectory | str | Path) -> Explained:
        """The table of a stored run. Raises RunError when it was not explained, or is damaged."""
        run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
        folder = ExplainedFolder(run.path)
        facts = folder.manifest
        noted = facts.get("table")
        try:
            if noted is None or noted["sha256"] != file_hash(folder.table):
                raise ValueError("it is not the table that its manifest notes")
            table = pq.read_table(folder.table)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise RunError(
                f"{folder.table} cannot be read",
                got=first_line(error),
                remedy=f"Run `driftlab explain {run.path}` again: it goes on where it stopped.",
            ) from None
        left_out, all_loop = int(facts.get("left_out", 0)), bool(facts.get("all_loop"))
        return cls.build(table, run.cells, run.manifest, left_out=left_out, all_loop=all_loop)

    @classmethod
    def build(
        cls,
        table: pa.Table,
        cells: pd.DataFrame,
        manifest: Mapping[str, Any],
        *,
        left_out: int = 0,
        all_loop: bool = False,
    ) -> Explained:
        """From rows in memory and the rows of ``cells``."""
        frame = to_pandas(table, categories=False)
        if not len(frame):
            raise DataError("nothing was explained", remedy="Give texts that are long enough.")
        # `groups` asks which cells have rows, and nothing else of the tables.
        known, rows = groups(Tables(frame, frame, frame, frame, cells, manifest))
        seeds = tuple(sorted(set(rows["seed"].tolist())))
        place = {
            cell: (int(group), seeds.index(seed))
            for cell, group, seed in zip(rows["cell"], rows["group"], rows["seed"], strict=True)
        }
        return cls(
            frame,
            known,
            seeds,
            tuple(sorted(frame["prompt"].unique())),
            tuple(sorted(int(d) for d in frame["depth"].unique())),
            left_out,
            all_loop,
            resamples(Tables(frame, frame, frame, frame, cells, manifest)),
            place,
        )

    @property
    def text(self) -> str:
        """Kinds of the explained texts, in words."""
        kinds = " and ".join(f"{kind} text" for kind in sorted(self.table["text"].unique()))
        return f"{kinds}, all looping" if self.all_loop else kinds

    @property
    def basis(self) -> str:
        """Which rows the numbers come from, in words."""
        texts = "text" if self.left_out == 1 else "texts"
        left = f"; {self.left_out} looping {texts} left out" if self.left_out else ""
        _, most = seeds_of_a_group(self._place.values())
        one = "; one seed: training noise not counted" if most == 1 else ""
        each = self.table.groupby("measure")["n"].max()
        least, anchors = int(each.min()), int(each.max())
        size = f"{least} to {anchors}" if least < anchors else f"{anchors}"
        units = sample_size(len(self.prompts), self._place.values())
        return f"forced chains on {self.text}, {units}, {size} anchors a text at most{left}{one}"

    def parts(self, measure: str) -> tuple[str, ...]:
        """Parts of ``measure``: layers by number, regions in the order of the schema."""
        there = set(self.table.loc[self.table["measure"] == measure, "part"])
        order = {name: i for i, name in enumerate(REGIONS)}

        def rank(part: str) -> tuple[int, str]:
            if part.startswith(_BOUNDARY):
                return int(part.removeprefix(_BOUNDARY)), part
            return order.get(part, 0), part

        return tuple(sorted(there, key=rank))

    def cube(self, measure: str, part: str) -> np.ndarray:
        """[group, seed, prompt, depth], NaN where there is no row."""
        key = (measure, part)
        if key not in self._cubes:
            sizes = [len(x) for x in (self.groups, self.seeds, self.prompts, self.depths)]
            values = np.full(sizes, np.nan)
            rows = self.table[(self.table["measure"] == measure) & (self.table["part"] == part)]
            prompt = {name: i for i, name in enumerate(self.prompts)}
            depth = {d: i for i, d in enumerate(self.depths)}
            for cell, name, d, value in zip(
                rows["cell"], rows["prompt"], rows["depth"], rows["value"], strict=True
            ):
                if cell in self._place:
                    values[(*self._place[cell], prompt[name], depth[int(d)])] = value
            self._cubes[key] = values
        return self._cubes[key]

    def sample(self, group: Group, measure: str, part: str, depth: int) -> Sample:
        """One value for each (seed, prompt)."""
        cube = self.cube(measure, part)
        return Sample(cube[self.groups.index(group), :, :, self.depths.index(depth)])

    def estimate(self, group: Group, measure: str, part: str, depth: int) -> Estimate:
        """The mean with its interval."""
        unit = MEASURES[measure].unit
        sample = self.sample(group, measure, part, depth)
        return estimate(sample, unit=unit, resamples=self.resamples)

    def difference(
        self, group: Group, one: tuple[str, str], other: tuple[str, str], depth: int
    ) -> Estimate:
        """(measure, part) minus another of the same texts and depth, paired."""
        samples = [self.sample(group, *key, depth) for key in (one, other)]
        return estimate(samples, [1, -1], resamples=self.resamples)

    def answers(self) -> list[Answer]:
        """See :func:`answers`."""
        return answers(self)

    def __repr__(self) -> str:
        names = ", ".join(group.label for group in self.groups)
        return f"Explained({names}: {self.basis}, depths {self.depths[0]}..{self.depths[-1]})"


# --- sentences ----------------------------------------------------------------------------------


def answers(found: Explained) -> list[Answer]:
    """What the numbers say, one sentence each: the surprising ones first.

    1. Where attention mass and causal effect disagree, and where a layer's size and its worth do.
       Holm-corrected as one family; one sentence says how many comparisons showed nothing.
    2. Layer of a stack or autoregressor, for each drafter, and what the two norms do to it.
    3. What each drafter's tokens owe to layers and inputs, and how exact these sums are.
    """
    return [
        *_disagreements(found),
        *_stacked(found),
        *_norms(found),
        *(line for group in found.groups for line in _owes(found, group)),
        _gaps(found),
    ]


@dataclass(frozen=True)
class _Candidate:
    """A disagreement that may be told; ``p`` before correction."""

    key: str  # of the candidates with one key, the strongest is told
    tell: Callable[[], tuple[str, dict[str, Estimate]]]
    p: float
    size: float
    differs: bool


def _disagreements(found: Explained) -> list[Answer]:
    question = "Do attention mass and causal effect agree?"
    first, last = found.depths[0], found.depths[-1]
    candidates: list[_Candidate] = []
    for group, depth in itertools.product(found.groups, dict.fromkeys((first, last))):
        regions = {r: n for r, n in REGION_NAMES.items() if _has(found, group, "effect", r, depth)}
        candidates += _reversals(found, group, depth, "mass", "effect", regions)
        candidates += [c for r in regions for c in _harmful(found, group, depth, r)]
        if depth == first:
            layers = {p: f"the state at {p}" for p in found.parts("shapley")}
            candidates += _reversals(found, group, depth, "share", "shapley", layers)
    adjusted = holm({str(i): _p_only(c.p) for i, c in enumerate(candidates)})
    shown: dict[str, tuple[_Candidate, float]] = {}
    for i, c in enumerate(candidates):
        p = adjusted.get(str(i), math.nan)
        if c.differs and p < ALPHA:
            held = shown.get(c.key)
            if held is None or c.size > held[0].size:
                shown[c.key] = c, p
    out = [
        Answer(question, *c.tell(), found.basis, {"disagreement": p})
        for c, p in sorted(shown.values(), key=lambda pair: -pair[0].size)
    ]
    told, bounds = len(out), _idle(found, question)
    rest = f"{len(candidates)} comparisons of mass with effect and of size with worth were made; "
    if told:
        rest += (
            f"{told} disagreement{'s' * (told > 1)} of different kinds, drafters and depths "
            f"{'are' if told > 1 else 'is'} told here, the strongest of each, after correction"
        )
    elif too_few(len(found.prompts), len(adjusted)):
        rest += f"{count_prompts(len(found.prompts))} cannot show a disagreement among so many"
    else:
        rest += "no disagreement is left after correction"
    if bounds:
        rest += f"; large masses of next to no effect ({len(bounds)}) are bounds and no tests"
    return [*out, *bounds, Answer(question, f"{rest}.", {}, found.basis)]


def _p_only(p: float) -> Estimate:
    return Estimate(math.nan, math.nan, math.nan, 0, p=p)


def _has(found: Explained, group: Group, measure: str, part: str, depth: int) -> bool:
    return bool(np.isfinite(found.sample(group, measure, part, depth).values).any())


_WORDS = {
    "mass": ("holds more attention than", "hiding it costs the target's token less"),
    "share": ("is a larger part of the fused input than", "it is worth less"),
}
_MORALS = {"mass": "mass is not effect", "share": "size is not worth"}


def _reversals(
    found: Explained,
    group: Group,
    depth: int,
    seen: str,
    worth: str,
    parts: Mapping[str, str],
) -> Iterator[_Candidate]:
    """Pairs of which the one that is seen more is worth less: both differences must show."""
    for one, other in itertools.combinations(parts, 2):
        more = found.difference(group, (seen, one), (seen, other), depth)
        if more.value < 0:
            one, other = other, one
            more = found.difference(group, (seen, one), (seen, other), depth)
        less = found.difference(group, (worth, one), (worth, other), depth)

        def tell(
            one: str = one, other: str = other, more: Estimate = more, less: Estimate = less
        ) -> tuple[str, dict[str, Estimate]]:
            a, b = (found.estimate(group, seen, part, depth) for part in (one, other))
            c, d = (found.estimate(group, worth, part, depth) for part in (one, other))
            verb, yet = _WORDS[seen]
            sentence = (
                f"{group.label}, depth {depth}: {parts[one]} {verb} {parts[other]} ({a.short} "
                f"against {b.short}), yet {yet} ({c.short} against {d.short} nats; paired "
                f"difference {less.short}): {_MORALS[seen]}."
            )
            numbers = {seen: a, f"{seen} of the other": b, worth: c, f"{worth} of the other": d}
            return sentence, {**numbers, "more": more, "less": less}

        shows = more.differs and less.differs and less.value < 0
        key = f"{group.label} {depth} {seen}"
        yield _Candidate(key, tell, max(more.p, less.p), -less.value, shows)


def _harmful(found: Explained, group: Group, depth: int, region: str) -> Iterator[_Candidate]:
    """Keys that are attended to and without which the target's token is likelier."""
    sample = found.sample(group, "effect", region, depth)
    nothing = Sample(np.where(np.isfinite(sample.values), 0.0, np.nan))
    effect = estimate([sample, nothing], [1, -1], resamples=found.resamples)

    def tell() -> tuple[str, dict[str, Estimate]]:
        mass = found.estimate(group, "mass", region, depth)
        sentence = (
            f"{group.label}, depth {depth}: {REGION_NAMES[region]} holds {mass.short} of the "
            f"attention, and hiding it makes the target's token likelier: its effect is "
            f"{effect.short} nats."
        )
        return sentence, {"mass": mass, "effect": effect}

    shows = effect.differs and effect.value < 0
    yield _Candidate(f"{group.label} {depth} {region}", tell, effect.p, -effect.value, shows)


def _idle(found: Explained, question: str) -> list[Answer]:
    """Regions with much attention and surely next to no effect."""
    out = []
    ends = dict.fromkeys((found.depths[0], found.depths[-1]))
    for group, depth, region in itertools.product(found.groups, ends, REGION_NAMES):
        mass = found.estimate(group, "mass", region, depth)
        effect = found.estimate(group, "effect", region, depth)
        bound = max(abs(effect.low), abs(effect.high))
        if mass.low > IDLE_MASS and bound < IDLE_EFFECT:
            sentence = (
                f"{group.label}, depth {depth}: {REGION_NAMES[region]} holds {mass.short} of the "
                f"attention, and hiding it changes the target's log-probability by no more than "
                f"{bound:.3f} nats ({effect.short})."
            )
            out.append(Answer(question, sentence, {"mass": mass, "effect": effect}, found.basis))
    return out


def _stacked(found: Explained) -> list[Answer]:
    """Whether the state goes on from the depth before, or starts anew at every token."""
    question = "Is the drafter a layer of a stack, or an autoregressor?"
    depth = found.depths[-1]
    if depth < 2:
        return []
    moved = {
        (group.label, write): found.difference(
            group, ("cosine", f"{write}same_token"), ("cosine", f"{write}previous"), depth
        )
        for group in found.groups
        for write in ("", "write_")
    }
    adjusted = holm({f"{label}{write}": e for (label, write), e in moved.items()})
    out = []
    for group in found.groups:
        state, written = (moved[group.label, write] for write in ("", "write_"))
        p = {w: adjusted.get(f"{group.label}{w}", math.nan) for w in ("", "write_")}
        told = {
            name: found.estimate(group, "cosine", name, depth)
            for name in ("same_token", "previous", "write_same_token", "write_previous", "other")
        }
        token = found.difference(group, ("geometry", "token"), ("geometry", "anchor"), depth)
        lens = found.estimate(group, "lens_draft", "feedback.in", depth)
        ranks = [found.estimate(group, "rank", "state", d) for d in (found.depths[0], depth)]
        sides = tuple(
            int(np.sign(e.value)) if e.differs and p[w] < ALPHA else 0
            for w, e in (("", state), ("write_", written))
        )
        few = any(too_few(e.n, len(adjusted)) for e in (state, written))
        verdict = "too few prompts to say which" if few else _VERDICTS[sides]
        sentence = (
            f"{group.label}, depth {depth}: the state has cosine {told['same_token'].short} with "
            f"the depth-1 state of the same token and {told['previous'].short} with its own a "
            f"depth before (difference {state.short}; unrelated states: {told['other'].short}); "
            f"what the layer writes has {told['write_same_token'].short} and "
            f"{told['write_previous'].short} (difference {written.short}): {verdict}. "
            f"What it receives already names the drafted token in {lens.short} of cases; its "
            f"effective rank goes from {ranks[0].short} to {ranks[1].short}; its geometry follows "
            f"the target's states of the token more than of the anchor by {token.short}."
        )
        numbers = {
            **told,
            "state": state,
            "write": written,
            "lens": lens,
            "rank at first": ranks[0],
            "rank at last": ranks[1],
            "geometry": token,
        }
        out.append(
            Answer(question, sentence, numbers, found.basis, {"state": p[""], "write": p["write_"]})
        )
    return out


_VERDICTS: dict[tuple[int, ...], str] = {
    (1, 1): "an autoregressor",
    (-1, -1): "a layer of a stack",
    (-1, 1): "an autoregressor on a residual stream: it carries its state on, and what it adds is "
    "made anew for the token",
    (1, -1): "undecided: the state is the token's, what is written is the chain's",
    (1, 0): "an autoregressor by its state; what is written shows no evidence either way",
    (-1, 0): "a layer of a stack by its state; what is written shows no evidence either way",
    (0, 1): "an autoregressor by what it writes; the state shows no evidence either way",
    (0, -1): "a layer of a stack by what it writes; the state shows no evidence either way",
    (0, 0): "no evidence either way",
}
"""By the sign of same_token minus previous: of the state, and of what is written."""


_SUBJECTS = {
    "feedback": "Post-norm feedback",
    "fusion norm per_layer": "The per-layer fusion norm",
    "fusion norm concat": "The fusion norm over the concatenation",
    "fusion norm concat_per_layer": "The double fusion norm",
}


def _norms(found: Explained) -> list[Answer]:
    """What the two norms change in the numbers above, when both are trained factors."""
    last = found.depths[-1]
    plain = [g for g in found.groups if g.axis == "trained" and not g.condition]
    strata = {g.stratum for g in plain}
    if len(plain) < 2 or len(strata) > 1 or last < 2:
        return []

    def minus(group: Group, one: tuple[str, str], other: tuple[str, str], depth: int) -> Sample:
        a, b = (found.sample(group, *key, depth).values for key in (one, other))
        return Sample(a - b)

    layers = found.parts("shapley")
    measured: dict[str, dict[tuple[str, str], Sample]] = {
        f"how much closer {what} at depth {last} is to the same token's than to the depth "
        "before (cosines)": {
            (g.fusion_norm, g.feedback): minus(
                g, ("cosine", f"{write}same_token"), ("cosine", f"{write}previous"), last
            )
            for g in plain
        }
        for what, write in (("the state", ""), ("what is written", "write_"))
    }
    if layers:
        measured[f"the worth of the state at {layers[-1]} for the first draft (nats)"] = {
            (g.fusion_norm, g.feedback): found.sample(g, "shapley", layers[-1], 1) for g in plain
        }
    for region, name in REGION_NAMES.items():
        measured[f"what hiding {name} costs at depth {last} (nats)"] = {
            (g.fusion_norm, g.feedback): found.sample(g, "effect", region, last) for g in plain
        }
    effects: dict[tuple[str, str], Estimate] = {}
    for what, samples in measured.items():
        result = factorial(samples, resamples=found.resamples)
        effects |= {(what, name): e for name, e in result.effects().items() if name in _SUBJECTS}
    adjusted = holm({f"{what}{name}": e for (what, name), e in effects.items()})
    out = []
    for (what, name), effect in effects.items():
        p = adjusted.get(f"{what}{name}", math.nan)
        if effect.differs and p < ALPHA:
            sentence = f"{_SUBJECTS[name]} changes {what} by {effect.short}."
            question = f"What does {_SUBJECTS[name][0].lower()}{_SUBJECTS[name][1:]} change?"
            out.append(Answer(question, sentence, {"effect": effect}, found.basis, {"effect": p}))
    return out


def _owes(found: Explained, group: Group) -> Iterator[Answer]:
    """Layers and inputs, at the first and the last depth."""
    ends = list(dict.fromkeys((found.depths[0], found.depths[-1])))
    layers = found.parts("shapley")
    if layers:
        numbers = {
            f"{part}, depth {d}": found.estimate(group, "shapley", part, d)
            for d in ends
            for part in layers
        }
        told = [
            f"at depth {d} {', '.join(numbers[f'{part}, depth {d}'].short for part in layers)}"
            for d in ends
        ]
        sentence = (
            f"{group.label}: the states at boundaries "
            f"{', '.join(part.removeprefix(_BOUNDARY) for part in layers)} are worth, to the "
            f"target's token, {' and '.join(told)} nats (Shapley)."
        )
        yield Answer("Which captured layer is a draft made of?", sentence, numbers, found.basis)
    names = {"fused": "the anchor's fused input" if layers else "the target's last state"}
    names |= {"embedding": "the token that is read", "feedback": "the fed-back state"}
    depth = max(
        (int(d) for d in found.table.loc[found.table["measure"] == "gradients", "depth"]),
        default=0,
    )
    numbers = {
        name: found.estimate(group, "gradients", part, depth)
        for part, name in names.items()
        if depth and _has(found, group, "gradients", part, depth)
    }
    if numbers:
        told = [f"{e.short} to {name}" for name, e in numbers.items()]
        sentence = f"{group.label}, depth {depth}: of its logit a drafted token owes "
        sentence += f"{', '.join(told)} (integrated gradients)."
        yield Answer("Which input is a draft made of?", sentence, numbers, found.basis)


def _gaps(found: Explained) -> Answer:
    """The largest error of a sum that theory calls exact."""
    rows = found.table[found.table["measure"] == "gap"]
    largest = rows.groupby("part")["value"].max()
    units = {"split": "of the fused input", "shapley": "nats", "gradients": "logits"}
    told = [f"{name} {largest[name]:.2g} {unit}" for name, unit in units.items() if name in largest]
    sentence = f"The largest error of a sum, over all texts: {', '.join(told)}."
    return Answer("Do the parts add up?", sentence, {}, found.basis)
