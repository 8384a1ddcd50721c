"""Acceptance that a serving engine counted, beside the acceptance that a run measured.

Conventions differ, so every number says what it counts. vLLM's counters are pooled over all
requests since the server started; ``num_accepted_tokens_per_pos`` counts a position whenever
the round reached it and accepted it, over *all* rounds, so it is not conditional. SGLang logs
the mean accepted length of a logging window with the bonus token in it; its ``accept rate`` has
had different denominators and is shown, never compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driftlab.errors import ConfigError, RunError
from driftlab.files import refuse_irregular
from driftlab.results.compare import Comparison, Side, Source, aligned, compare, one_side
from driftlab.results.records import RunDirectory
from driftlab.results.slices import TextKind, take
from driftlab.results.stats import Estimate, Sample, count_prompts, estimate, with_note

if TYPE_CHECKING:
    import pandas as pd

# --- reading what an engine wrote ------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What an engine counted.

    accepted_drafts: a round, without the bonus token. marginal: share of all rounds that
    accepted position d, for d = 1..depth; empty where the engine does not say. rounds: NaN
    where it does not say. depth: drafts of a round; None when unknown. counts: which numbers
    of the page these are.
    """

    source: str
    path: str
    accepted_drafts: float
    counts: str
    marginal: tuple[float, ...] = ()
    rounds: float = math.nan
    drafted: float = math.nan
    depth: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        return self.accepted_drafts + 1

    @property
    def error(self) -> float:
        """Standard error of ``accepted_drafts`` from counting rounds; NaN without positions."""
        if not self.marginal or math.isnan(self.rounds):
            return math.nan
        odd = 2 * np.arange(1, len(self.marginal) + 1) - 1  # E[n^2] = sum (2d - 1) P(n >= d)
        variance = float(odd @ np.array(self.marginal)) - self.accepted_drafts**2
        return math.sqrt(max(variance, 0.0) / self.rounds)


class _Line(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


# A series, its value, and what OpenMetrics lets follow: a time, and an example behind a #.
_SAMPLE = re.compile(
    r'^([A-Za-z_:][\w:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?[\d.]+)?(?:\s+#.*)?$'
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(r"(?i:[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan))", re.ASCII)
_VLLM = re.compile(r"^(?:vllm[:_])?spec_decode_(num_\w+?)(?:_total)?$")
_SGLANG = re.compile(r"^sglang[:_](spec_\w+)$")
_LENGTH = re.compile(r"\baccept[ _]len(?:gth)?\s*[:=]\s*([^\s,;)\]]+(?:,\d[^\s,;)\]]*)?)")
_RATE = re.compile(r"\baccept[ _]rate\s*[:=]\s*(\d{0,9}(?:\.\d+)?)(?<=\d)(?![\w.]|,\d)", re.ASCII)
_RUNNING = re.compile(r"#running-req\s*:\s*([^\s,;)\]]+)")
_PLAIN = re.compile(r"\d{1,9}(?:\.\d+)?", re.ASCII)
_ARGUMENT = re.compile(
    r"\bspeculative[_-](num[_-]steps|eagle[_-]topk)['\"]?\s*[=:\s]\s*['\"]?(\d{1,9})(?!\d)",
    re.ASCII,
)
_POSITIONS = 10_000  # no engine drafts as many; a page that says so is damaged


def read_served(path: str | Path) -> Served:
    """Read a vLLM ``/metrics`` page, or a log or ``/metrics`` page of SGLang.

    Raises RunError for a file without such numbers, without a drafted token, or with numbers
    that contradict each other.
    """
    path = Path(path)
    refuse_irregular(path, RunError)
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise RunError(
            f"{path} cannot be read", got=error.strerror, remedy="Give the saved page or log."
        ) from None
    samples = [found for line in text.splitlines() if (found := _sample(path, line)) is not None]
    vllm = [s for s in samples if _VLLM.match(s.name) and not s.name.endswith("_created")]
    gauges = [s for s in samples if _SGLANG.match(s.name)]
    if any(_VLLM.sub(r"\1", s.name) == "num_drafts" for s in vllm):
        return _vllm(path, vllm)
    if any(_SGLANG.sub(r"\1", s.name) == "spec_accept_length" for s in gauges):
        return _sglang_page(path, gauges)
    if _LENGTH.search(text):
        return _sglang_log(path, text)
    raise RunError(
        f"{path} holds no counts of speculative decoding",
        remedy="Give what vLLM serves at /metrics (spec_decode_num_drafts, "
        "..._num_accepted_tokens), or an SGLang log with 'accept len', saved to a file.",
    )


_AGAIN = "Save the page anew, whole and once."


def _sample(path: Path, line: str) -> _Line | None:
    """One line of a page, None for any other; RunError for an engine's line without a number."""
    found = _SAMPLE.match(line.strip())
    if found is None or not (_VLLM.match(found[1]) or _SGLANG.match(found[1])):
        return None
    if _NUMBER.fullmatch(found[3]) is None:
        raise RunError(f"{path}: {found[1]} is no number", got=repr(found[3]), remedy=_AGAIN)
    return _Line(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3]))


def _check_series(path: Path, pattern: re.Pattern[str], samples: Sequence[_Line]) -> None:
    """Raise RunError for several models, and for a series that stands there twice."""
    models = sorted({s.labels["model_name"] for s in samples if "model_name" in s.labels})
    if len(models) > 1:
        raise RunError(
            f"{path} counts several models",
            got=", ".join(models),
            remedy="Save the lines of one model only.",
        )
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for s in samples:
        series = (pattern.sub(r"\1", s.name), frozenset(s.labels.items()))
        if series in seen:  # it would count twice
            got = dict(s.labels) or None
            raise RunError(f"{path} holds {s.name} twice", got=got, remedy=_AGAIN)
        seen.add(series)


def _vllm(path: Path, samples: Sequence[_Line]) -> Served:
    _check_series(path, _VLLM, samples)
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for s in samples:
        name = _VLLM.sub(r"\1", s.name)
        if not s.value.is_integer() or s.value < 0:
            raise RunError(f"{path}: {s.name} is no count", got=s.value, remedy=_AGAIN)
        if name == "num_accepted_tokens_per_pos":
            place = s.labels.get("position", "")
            if re.fullmatch("[0-9]{1,9}", place) is None or int(place) >= _POSITIONS:
                what = f"{path}: {s.name} names no position"
                raise RunError(what, got=f"{place[:20]!r}", remedy=_AGAIN)
            positions[int(place)] = positions.get(int(place), 0.0) + s.value
        else:
            totals[name] = totals.get(name, 0.0) + s.value
    needed = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    if missing := [name for name in needed if name not in totals]:
        raise RunError(
            f"{path} lacks {', '.join(f'spec_decode_{n}' for n in missing)}",
            remedy="Save the whole /metrics page.",
        )
    rounds, drafted, accepted = (totals[name] for name in needed)
    if not rounds or not drafted:
        raise RunError(
            f"{path} counts no drafted token",
            got=f"{rounds:g} drafts",
            remedy="Save the page after the server has answered requests with speculation on.",
        )
    counted = [positions.get(i, 0.0) for i in range(max(positions) + 1)] if positions else []
    falling = all(a >= b for a, b in zip([rounds, *counted], counted, strict=False))
    odd = drafted < rounds or (bool(counted) and drafted > len(counted) * rounds)
    if accepted > drafted or odd or (counted and (sum(counted) != accepted or not falling)):
        raise RunError(
            f"{path}: the counts contradict each other",
            got=f"{rounds:g} drafts, {drafted:g} drafted, {accepted:g} accepted, by position "
            f"{', '.join(f'{c:g}' for c in counted) or 'not given'}",
            remedy="Save the page once, while the server is idle.",
        )
    depth = len(counted) or (round(drafted / rounds) if drafted % rounds == 0 else None)
    notes = ["counted since the server started, over all of its requests"]
    if depth is not None and drafted != depth * rounds:
        notes.append(f"rounds drafted {drafted / rounds:.2f} tokens on average, not always {depth}")
    return Served(
        source="vLLM metrics page",
        path=str(path),
        accepted_drafts=accepted / rounds,
        counts="num_accepted_tokens / num_drafts, and num_accepted_tokens_per_pos / num_drafts: "
        "unconditional, the bonus token in neither",
        marginal=tuple(c / rounds for c in counted),
        rounds=rounds,
        drafted=drafted,
        depth=depth,
        notes=tuple(notes),
    )


def _sglang_page(path: Path, samples: Sequence[_Line]) -> Served:
    _check_series(path, _SGLANG, samples)
    held: dict[str, list[float]] = {}
    for s in samples:
        held.setdefault(_SGLANG.sub(r"\1", s.name), []).append(s.value)
    lengths = [v for v in held["spec_accept_length"] if v >= 1]
    if not lengths:
        raise RunError(
            f"{path}: spec_accept_length is 0, nothing was drafted",
            remedy="Save the page while the server answers requests with speculation on.",
        )
    steps = {v for v in held.get("spec_num_steps", []) if v > 0}
    if not all(math.isfinite(v) and v == int(v) for v in steps):
        raise RunError(
            f"{path}: spec_num_steps is no count", got=sorted(steps), remedy="Save the page anew."
        )
    depth = int(steps.pop()) if len(steps) == 1 else None
    _refuse_longer(path, lengths, depth)
    return Served(
        source="SGLang metrics page",
        path=str(path),
        accepted_drafts=float(np.mean(lengths)) - 1,
        counts="the gauge spec_accept_length, bonus token included, less 1",
        depth=depth,
        notes=(
            "the gauge is that of the last logging window alone: a log says more",
            *([f"mean of {len(lengths)} ranks, each alike"] if len(lengths) > 1 else []),
        ),
    )


def _sglang_log(path: Path, text: str) -> Served:
    kept, unread, idle, weighed = [], 0, 0, 0
    rates: list[tuple[float, float]] = []
    for line in text.splitlines():
        found = _LENGTH.search(line)
        if found is None:
            continue
        running = _RUNNING.search(line)
        weighed += running is not None
        words = found[1], running[1] if running else "1"
        if not all(map(_PLAIN.fullmatch, words)):
            unread += 1
            continue
        length, weight = map(float, words)
        if length < 1 or not weight:  # nothing ran in this window
            idle += 1
            continue
        kept.append((length, weight))
        if (rate := _RATE.search(line)) is not None:
            rates.append((float(rate[1]), weight))
    if not kept:
        raise RunError(
            f"{path}: no window has running requests and an accept len of 1 or more",
            got=f"{idle} in which nothing ran, {unread} without plain numbers",
            remedy="Give the log of a server that answered requests with speculation on.",
        )
    arguments: dict[str, int] = {}
    for name, value in _ARGUMENT.findall(text):
        known = arguments.setdefault(name.replace("-", "_"), int(value))
        if known != int(value):
            raise RunError(
                f"{path} is of servers with unlike settings",
                got=f"speculative {name} {known} and {value}",
                remedy="Save the lines of one server only.",
            )
    depth = arguments.get("num_steps")
    _refuse_longer(path, [x for x, _ in kept], depth)
    alike = "by their running requests" if weighed else "alike: the log holds no #running-req"
    notes = [
        f"mean of {len(kept)} logging windows, weighted {alike}; the log rounds each to two "
        "decimals"
    ]
    if idle:
        notes.append(f"{idle} windows in which nothing ran are left out")
    if unread:
        notes.append(f"{unread} windows are left out: their numbers are not plain ones")
    if rates:
        logged, requests = np.array(rates).T
        mean = np.average(logged, weights=requests)
        notes.append(
            f"accept rate {mean:.2f}, of {len(rates)} windows with the same weights; its "
            "denominator has changed between versions, so it is not compared"
        )
    if arguments.get("eagle_topk", 1) > 1:
        notes.append(
            f"the engine drafted trees (topk {arguments['eagle_topk']}), which accept more than "
            "the chains that are measured here"
        )
    values, shares = np.array(kept).T
    return Served(
        source="SGLang log",
        path=str(path),
        accepted_drafts=float(np.average(values, weights=shares)) - 1,
        counts="accept len, bonus token included, less 1; no counts by position",
        depth=depth,
        notes=tuple(notes),
    )


def _refuse_longer(path: Path, lengths: Sequence[float], depth: int | None) -> None:
    """Raise RunError for a round that accepts more than its drafts and the bonus token."""
    most, said = max(lengths), "unknown" if depth is None else depth
    if math.isinf(most) or (depth is not None and most > depth + 1):
        raise RunError(
            f"{path}: the counts contradict each other",
            got=f"accept length {most:g}, drafts a round {said}",
            remedy="Give the file of one server, with the settings that it ran with.",
        )


# --- beside a run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """One quantity: what the engine counted, what the run measured, and the two in words."""

    name: str
    served: float
    error: float
    measured: Estimate
    verdict: str


@dataclass(frozen=True)
class ServedComparison:
    """Served acceptance beside the measured one. ``str()`` is what the command prints."""

    served: Served
    side: Side = field(repr=False)
    rows: tuple[Beside, ...]
    basis: str
    sentence: str
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return all(row.verdict == AGREES for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(_page(self)) + "\n"


AGREES = "agree"


def compare_served(
    run: Source,
    served: Served | str | Path,
    *,
    kind: TextKind | str | None = None,
    depth: int | None = None,
) -> ServedComparison:
    """Set what an engine counted beside what ``run`` (or ``RUN:CELL``) measured.

    A run that kept every anchor is walked as an engine would: the next round starts after the
    tokens that the last one accepted and its bonus token. Otherwise a round starts at every
    measured anchor, and ``notes`` says so. Both are pooled over rounds, as engines pool. The
    interval is a bootstrap over prompts (and seeds).

    Parameters
    ----------
    kind: the measured text; it should be what the engine served (greedy, or sampled).
    depth: drafts of a round, when the engine's file does not say.

    Raises
    ------
    RunError: no such run or cell, a file without such counts, or drafts deeper than the run's.
    """
    if not isinstance(served, Served):
        served = read_served(served)
    side, kind, directory = one_side(run, kind)
    piece = take(side.tables, "free", side.kind)
    said = served.depth
    if said is not None and depth is not None and said != depth:
        raise RunError(
            f"{served.path} says {said} drafts a round", got=f"depth {depth}", remedy="Drop it."
        )
    k = said if said is not None else depth
    if k is None:
        raise RunError(
            f"{served.path} does not say how many tokens a round drafts",
            remedy="Give it with --depth, as the server's speculative_num_steps.",
        )
    if k > len(piece.index):
        raise RunError(
            f"the engine drafts {k} tokens a round, the run measured {len(piece.index)}",
            remedy=f"Measure again with depth {k} or more.",
        )
    accepted, rounds, how = _rounds(side, kind, directory, k)
    draws = piece.resamples

    def pooled(counts: np.ndarray) -> Estimate:
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.where(rounds > 0, counts / rounds, np.nan)
        return estimate(Sample(values, rounds), resamples=draws)

    drafts = pooled(accepted.sum(axis=-1))
    error = served.error
    if math.isnan(error) and not math.isnan(served.rounds):
        # Of counts up to k with a known mean; this is the largest that their spread can be.
        spread = max(served.accepted_drafts * (k - served.accepted_drafts), 0.0)
        error = math.sqrt(spread / served.rounds)
    rows = [
        _beside("acceptance length (bonus included)", served.acceptance_length, error,
                _plus_one(drafts)),
        _beside("accepted drafts (no bonus)", served.accepted_drafts, error, drafts),
    ]  # fmt: skip
    for d, share in enumerate(served.marginal[:k]):
        error = math.sqrt(share * (1 - share) / served.rounds)
        name = f"position {d + 1} accepted, of all rounds"
        rows.append(_beside(name, share, error, pooled(accepted[..., d])))
    n = int(np.isfinite(rounds).any(axis=0).sum())
    size = f"{count_prompts(n)}, {int(np.nansum(rounds))} rounds, {how}"
    faults = piece.texts_of(side.group).faults  # a server counts such texts too
    basis = "; ".join([f"free chains on {kind}, {size}", *faults])
    return ServedComparison(
        served,
        side,
        tuple(rows),
        basis,
        _sentence(rows, served),
        (
            *served.notes,
            "requests that were served and prompts that were measured should be of one kind, and "
            f"served as the text was made ({kind})",
        ),
    )


def _rounds(
    side: Side, kind: TextKind, directory: RunDirectory | None, k: int
) -> tuple[np.ndarray, np.ndarray, str]:
    """Accepted rounds [seeds, prompts, k] by position, rounds [seeds, prompts], and how."""
    piece = take(side.tables, "free", side.kind)
    rows = [piece.seeds.index(s) for s in side.seeds]
    group = piece.groups.index(side.group)
    accepted = np.nan_to_num(piece.cube("n_accepted")[group][rows][..., :k])
    rounds = piece.at(side.group, "n", piece.index[0])[rows]
    every = "a round starts at every anchor, where an engine's starts after accepted tokens"
    if directory is None or "reduced" in directory.manifest:  # a published run has no steps
        return accepted, rounds, every
    walked, counted = accepted.copy(), rounds.copy()
    for i, cell in enumerate(side.cells().values()):
        steps = directory.table(
            "steps",
            columns=["prompt", "anchor", "depth", "accepted"],
            filters=[
                ("cell", "=", cell),
                ("text", "=", kind.text),
                ("mode", "=", "free"),
                ("depth", "<=", k),
            ],
        )
        for j, prompt in enumerate(piece.prompts):
            if not np.isfinite(rounds[i, j]):
                continue
            part = steps[steps["prompt"] == prompt]
            grid = _grid(part["anchor"], part["depth"], part["accepted"], k)
            if grid is None:
                return accepted, rounds, every
            taken = _walk(grid)
            walked[i, j], counted[i, j] = taken.sum(axis=0), len(taken)
    return walked, counted, "walked as an engine does, round after round"


def _grid(anchor: pd.Series, depth: pd.Series, accepted: pd.Series, k: int) -> np.ndarray | None:
    """Accepted [anchors, k], ascending; None when anchors between were left out."""
    names, rows = np.unique(anchor.to_numpy(), return_inverse=True)
    if not len(names) or names[-1] - names[0] + 1 != len(names):
        return None
    grid = np.zeros((len(names), k), dtype=bool)
    grid[rows, depth.to_numpy() - 1] = accepted.to_numpy(dtype=bool)
    return grid


def _walk(grid: np.ndarray) -> np.ndarray:
    """The rows of ``grid`` at which an engine starts rounds: after accepted and bonus tokens."""
    at, out = 0, []
    while at < len(grid):
        out.append(grid[at])
        at += int(grid[at].sum()) + 1
    return np.array(out)


def _plus_one(value: Estimate) -> Estimate:
    return replace(value, value=value.value + 1, low=value.low + 1, high=value.high + 1)


def _beside(name: str, served: float, error: float, measured: Estimate) -> Beside:
    room = 0.005 if math.isnan(error) else 1.96 * error
    if math.isnan(measured.low):
        verdict = "cannot tell: measured without an interval"
    elif served + room < measured.low:
        verdict = f"served is lower by {measured.value - served:.2f}"
    elif served - room > measured.high:
        verdict = f"served is higher by {served - measured.value:.2f}"
    else:
        verdict = AGREES
    return Beside(name, served, error, with_note(measured, "pooled over rounds"), verdict)


def _sentence(rows: Sequence[Beside], served: Served) -> str:
    length = rows[0]
    numbers = f"{length.served:.2f} served, {length.measured.short} measured, bonus included"
    odd = [row.name for row in rows[2:] if row.verdict != AGREES]
    if length.verdict == AGREES:
        text = f"Served and measured acceptance length agree ({numbers})"
        return f"{text}, but not at: {', '.join(odd)}." if odd else f"{text}."
    if length.verdict.startswith("served"):
        side = "lower" if "lower" in length.verdict else "higher"
        text = f"Served acceptance length is {side} than the measured one ({numbers})"
        engine = "vllm" if served.source.startswith("vLLM") else "sglang"
        return (
            f"{text}. Other text, another temperature or another reading of the file can be the "
            f"cause; driftlab doctor --as {engine} shows the last."
        )
    return f"Whether they agree cannot be told ({numbers})."


def _page(c: ServedComparison) -> Iterable[str]:
    s = c.served
    yield f"served    {s.path}: {s.source}" + (
        "" if math.isnan(s.rounds) else f", {s.rounds:g} rounds, {s.drafted:g} drafted tokens"
    )
    yield f"          {s.counts}"
    yield f"measured  {c.side.run}  {c.side.label}"
    yield f"          {c.basis}"
    yield ""
    rows = [("quantity", "served", "measured [95%]", "")]
    for row in c.rows:
        error = "" if math.isnan(row.error) else f" ± {1.96 * row.error:.3f}"
        rows.append((row.name, f"{row.served:.3f}{error}", row.measured.short, row.verdict))
    yield from aligned(rows)
    yield ""
    yield f"- {c.sentence}"
    yield ""
    yield from (f"note: {text}" for text in c.notes)


def beside(
    run: Source, other: Source, *, kind: str | None = None, depth: int | None = None
) -> Comparison | ServedComparison:
    """Two runs (or ``RUN:CELL``) paired; or a run beside a file that a serving engine wrote.

    See :func:`driftlab.results.compare.compare` and :func:`compare_served` for ``kind``,
    ``depth`` and the errors.
    """
    if isinstance(other, str | Path) and Path(other).exists() and not Path(other).is_dir():
        return compare_served(run, other, kind=kind, depth=depth)
    if depth is not None:
        raise ConfigError("depth belongs to an engine's file", remedy="Leave it away.")
    return compare(run, other, kind=kind)
