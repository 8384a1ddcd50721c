"""Estimates with intervals. The prompt is the unit; comparisons are paired by prompt and seed.

Every quantity here is a contrast of weighted means over (seed, prompt) pairs, so that one
bootstrap serves them all: with one seed, prompts are drawn by :func:`scipy.stats.bootstrap`
(BCa); with several, seeds and prompts are drawn, the draw of prompts shared by all seeds
because every seed was measured on the same prompts (crossed design, percentile interval).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from driftlab.errors import DataError

LEVEL = 0.95
RESAMPLES = 2000
P_DRAWS = 9999
"""Draws behind a p value: their spread is right within 1 %."""
_CHUNK = 1 << 22  # resampled means held at once


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    ``low`` and ``high`` bound the 95% interval over seeds and prompts (over prompts alone when
    there is one seed); NaN for one prompt. ``n`` counts prompts. ``unit`` is the unit of ``value``;
    ``x`` marks a ratio. NaN with a ``note`` means n/a.
    """

    value: float
    low: float
    high: float
    n: int
    unit: str = ""
    note: str = ""
    seeds: int = 1
    by_seed: tuple[float, ...] = ()
    """The same quantity for each seed alone, in the order of the seeds."""
    over_prompts: tuple[float, float] = (math.nan, math.nan)
    """Interval with the seeds held fixed: spread over prompts only."""
    p: float = math.nan
    """Two-sided bootstrap p value of "no difference", never below :func:`p_floor` of ``n``; NaN
    where there is no such question, or one prompt."""
    smallest: float = math.nan
    """Smallest true effect that this sample detects in four of five runs (5% level, two-sided);
    NaN where draws do not vary, which says nothing of what could be seen."""

    @property
    def null(self) -> float:
        """The value that means no difference, for a contrast."""
        return 1.0 if self.unit == "x" else 0.0

    @property
    def differs(self) -> bool:
        """The interval excludes :attr:`null`."""
        return self.low > self.null or self.high < self.null

    @property
    def signs(self) -> str:
        """How many seeds lie on the same side of :attr:`null` as the value."""
        if not self.by_seed:
            return "no seeds"
        if not (side := np.sign(self.value - self.null)):
            return "no sign to agree in"
        same = sum(np.sign(v - self.null) == side for v in self.by_seed)
        return f"{same} of {len(self.by_seed)} seeds agree in sign"

    @property
    def short(self) -> str:
        """Value and interval without n."""
        if math.isnan(self.value):
            return "n/a"
        mark = "x" if self.unit == "x" else ""
        digits = _digits(self.value, self.low, self.high)
        value, low, high = (_round(v, digits) for v in (self.value, self.low, self.high))
        if math.isnan(self.low):
            return f"{mark}{value} [no interval]"
        return f"{mark}{value} [{low}, {high}]"

    def __str__(self) -> str:
        return f"{self.short}, n={self.n}"


def _digits(value: float, low: float, high: float) -> int:
    """Decimals that show the interval's width in one or two digits."""
    width = high - low
    least, most = (2, 3) if abs(value) < 1 else (1, 2) if abs(value) < 10 else (0, 1)
    if math.isnan(width) or width <= 0:
        return 3 if 0 < abs(value) < 0.1 else 2
    return min(max(math.ceil(-math.log10(width / 3)), least), most)


def _round(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def not_available(note: str, unit: str = "") -> Estimate:
    return Estimate(math.nan, math.nan, math.nan, 0, unit, f"n/a: {note}")


@dataclass(frozen=True)
class Sample:
    """One measure of one group of cells: a value for every (seed, prompt).

    ``values`` [seeds, prompts], NaN where nothing was measured. ``weights`` of the same shape
    turn the mean over prompts into a mean pooled over anchors or opportunities. ``parts`` are
    values times weights, for a ratio whose weight may be 0 where its part is not; then they say
    what was measured, and a value is NaN where its weight is 0.
    """

    values: np.ndarray
    weights: np.ndarray | None = None
    parts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise DataError("a sample has shape [seeds, prompts]", got=self.values.shape)
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise DataError(
                f"weights must have the shape {self.values.shape} of the values",
                got=self.weights.shape,
            )

    @property
    def there(self) -> np.ndarray:
        """Where something was measured."""
        return np.isfinite(self.values if self.parts is None else self.parts)


def ratio(part: Sample, whole: Sample) -> Sample:
    """A sample whose mean is ``mean(part) / mean(whole)`` over the pairs that both have.

    A whole of 0 counts with its part; where all wholes are 0 there is no ratio (n/a).
    """
    there = np.isfinite(part.values) & np.isfinite(whole.values)
    parts, wholes = np.where(there, part.values, np.nan), np.where(there, whole.values, 0.0)
    values = np.full_like(parts, np.nan)
    np.divide(parts, wholes, out=values, where=wholes > 0)
    return Sample(values, wholes, parts)


def estimate(
    samples: Sequence[Sample] | Sample,
    contrast: Sequence[float] = (1.0,),
    *,
    ratio: bool = False,
    unit: str = "",
    note: str = "",
    resamples: int = RESAMPLES,
    seed: int = 0,
    over_prompts: bool = False,
) -> Estimate:
    """``sum_k contrast_k * mean(sample_k)`` with its interval; ``exp`` of it when ``ratio``.

    Only (seed, prompt) pairs present in every sample count, so that differences are paired.
    A contrast that sums to 0 is a difference and gets a p value and the smallest effect.
    p is that of Student's t: the draws' spread, corrected for the n prompts that weigh in every
    sample by ``sqrt(n / (n - 1))``, and n - 1 degrees of freedom, since draws of few prompts spread
    too little (Hesterberg, The American Statistician 69, 2015, section 4). It is at least
    :func:`p_floor`, and NaN when fewer than two prompts weigh. The smallest effect is what four in
    five runs of this size would find at p < .05.
    n/a when all weights of a sample are 0. Draws of such weights are left out: the note says how
    many, and there is no interval when that is more than 5% of them.
    ``over_prompts`` asks for the interval with the seeds held fixed as well.
    """
    from scipy.special import stdtr, stdtrit  # not needed to read a run

    samples = [samples] if isinstance(samples, Sample) else list(samples)
    coefficients = np.asarray(contrast, dtype=float)
    if len(coefficients) != len(samples):
        raise DataError(f"{len(samples)} samples need as many coefficients", got=len(coefficients))
    unit = "x" if ratio else unit
    weighted, weights, present = _paired(samples)
    with_data = _seeds_with_data(samples, weights, present)
    used = present[with_data].any(axis=0)  # a prompt of other seeds alone is in no number here
    weighted, weights = weighted[:, with_data][:, :, used], weights[:, with_data][:, :, used]
    n_seeds, n = weights.shape[1:]
    if not n or not n_seeds:
        return not_available("nothing to average", unit)
    if not (weights.sum(axis=(1, 2)) > 0).all():
        return not_available("nothing to divide by", unit)

    def combine(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.where(denominator > 0, numerator / denominator, np.nan)
            return np.tensordot(coefficients, means, axes=1)

    value = float(combine(weighted.sum(axis=(1, 2)), weights.sum(axis=(1, 2))))
    by_seed = combine(weighted.sum(axis=2), weights.sum(axis=2))
    difference = abs(coefficients.sum()) < 1e-12 and len(samples) > 1
    # Rounding noise far below any digit shown would otherwise pass for a spread or an effect.
    noise = 1e-12 * max(1.0, float(np.abs(weighted).max()))
    if difference and max(abs(value), float(np.abs(np.nan_to_num(by_seed)).max())) <= noise:
        value, by_seed = 0.0, np.where(np.isfinite(by_seed), 0.0, np.nan)
    flat = _is_flat(samples, coefficients, value)
    prompt_low = prompt_high = math.nan
    lost = 0.0  # share of draws with nothing to divide by
    if over_prompts or n_seeds == 1:
        prompt_low, prompt_high, lost = _over_prompts(
            weighted.sum(axis=1), weights.sum(axis=1), coefficients, value, flat, resamples, seed
        )
    low, high = prompt_low, prompt_high
    if n_seeds > 1 and n > 1:  # one prompt says nothing of others, whatever its seeds
        if flat:
            low, high, lost = _constant(value, weights, resamples, seed)
        else:
            draws = combine(*_draw_both(weighted, weights, resamples, seed))
            low, high, lost = _percentile(draws)
    p, smallest = math.nan, math.nan
    weighing = int((weights.sum(axis=1) > 0).sum(axis=1).min())
    if difference and weighing > 1:
        if flat:
            p = 1.0 if value == 0 else p_floor(weighing)
        elif (spread := _spread(combine(*_draw_both(weighted, weights, P_DRAWS, seed)))) > noise:
            spread *= math.sqrt(weighing / (weighing - 1))
            p = max(p_floor(weighing), 2 * float(stdtr(weighing - 1, -abs(value) / spread)))
            smallest = float(stdtrit(weighing - 1, [0.975, 0.8]).sum()) * spread
        elif value == 0:  # ratios that no draw tells apart
            p = 1.0
    notes = [note] if note else []
    drawn_units = "seeds and prompts" if n_seeds > 1 else "prompts"
    drawn = f", drawn: {drawn_units}" if n > 1 else ": one prompt has no interval"
    notes.append(count(n, n_seeds) + drawn)
    if lost:
        notes.append(f"{lost:.1%} of the draws left out, with nothing to divide by")
    shape = math.exp if ratio else float
    return Estimate(
        value=shape(value),
        low=shape(low),
        high=shape(high),
        n=n,
        unit=unit,
        note="; ".join(notes),
        seeds=n_seeds,
        by_seed=tuple(shape(v) for v in by_seed),
        over_prompts=(shape(prompt_low), shape(prompt_high)),
        p=p,
        smallest=shape(smallest),
    )


def bands(
    values: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weighted means and percentile intervals of many measures at once.

    ``values`` [K, seeds, prompts], NaN where missing. Returns value, low, high, each [K]; NaN
    where there is no data. One draw of seeds and prompts serves all K with data of the same seeds:
    a seed without any is not drawn.
    """
    weighted, weight = _weighted(values, weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = weighted.sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
        low, high = np.full_like(value, np.nan), np.full_like(value, np.nan)
        step = max(1, _CHUNK // max(1, resamples * values.shape[1]))
        there = weight.sum(axis=2) > 0
        for seeds in np.unique(there[there.any(axis=1)], axis=0):
            rows = np.flatnonzero((there == seeds).all(axis=1))
            for part in np.split(rows, range(step, len(rows), step)):
                used = np.ix_(part, np.flatnonzero(seeds))
                drawn, drawn_weight = _draw_both(weighted[used], weight[used], resamples, seed)
                for k, row in zip(part, drawn / drawn_weight, strict=True):
                    if (weight[k].sum(axis=0) > 0).sum() > 1:
                        low[k], high[k], _ = _percentile(row)
    return value, low, high


def interval(prompts: int, seeds: int, resamples: int, *, banded: bool = False) -> str:
    """What an interval of so many prompts and seeds draws, and how; one of :func:`bands` if
    ``banded``."""
    if prompts < 2:
        return "one prompt has none" if prompts else "nothing measured"
    drawn = "seeds and prompts" if seeds > 1 else "prompts"
    method = "percentile" if banded or seeds > 1 else ONE_SEED
    return f"95% bootstrap over {drawn}, {resamples} draws, {method}"


def _weighted(values: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    there = np.isfinite(values)
    weight = there.astype(float) if weights is None else np.where(there, weights, 0.0)
    return np.where(there, values, 0.0) * weight, weight


def _paired(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values times weights, and weights, [K, seeds, prompts]; which pairs count [seeds, prompts]:
    all samples have them, and one gives them weight or is a ratio."""
    shapes = {s.values.shape for s in samples}
    if len(shapes) != 1:
        raise DataError("samples of one comparison differ in shape", got=sorted(shapes))
    there = np.logical_and.reduce([s.there for s in samples])
    found = [
        _weighted(np.where(there, s.values, np.nan), s.weights)
        if s.parts is None or s.weights is None
        else (np.where(there, s.parts, 0.0), np.where(there, s.weights, 0.0))
        for s in samples
    ]
    weighted, weights = (np.stack(arrays) for arrays in zip(*found, strict=True))
    counts = np.array([s.parts is not None for s in samples])
    present = there & ((weights > 0).any(axis=0) | counts.any())
    return weighted, weights, present


def _seeds_with_data(
    samples: Sequence[Sample], weights: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Seeds [seeds] in which every sample weighs something; a ratio need not."""
    each = [
        present.any(axis=1) if s.parts is not None else w.sum(axis=1) > 0
        for s, w in zip(samples, weights, strict=True)
    ]
    return np.logical_and.reduce(each)


def _is_flat(samples: Sequence[Sample], coefficients: np.ndarray, value: float) -> bool:
    """Every (seed, prompt) has the same contrast, so that any resample gives ``value``."""
    if len(samples) > 1 and any(s.weights is not None for s in samples):
        return all(_is_flat([s], np.ones(1), _mean(s)) for s in samples)
    if len(samples) == 1 and samples[0].parts is not None and samples[0].weights is not None:
        # A part of a whole of 0 moves the ratio of means, whatever the other ratios are.
        off = samples[0].parts - _mean(samples[0]) * samples[0].weights
        off = off[np.isfinite(off)]
        return bool(off.size) and float(np.abs(off).max()) <= 1e-12 * max(1.0, abs(value))
    with np.errstate(invalid="ignore"):
        each = np.tensordot(coefficients, np.stack([s.values for s in samples]), axes=1)
    each = each[np.isfinite(each)]
    return bool(each.size) and float(np.ptp(each)) <= 1e-12 * max(1.0, abs(value))


def _mean(sample: Sample) -> float:
    if sample.parts is not None and sample.weights is not None:
        there = np.isfinite(sample.parts)
        whole = float(sample.weights[there].sum())
        return float(sample.parts[there].sum()) / whole if whole > 0 else math.nan
    values = sample.values[np.isfinite(sample.values)]
    return float(values.mean()) if values.size else math.nan


def _finite(draws: np.ndarray) -> np.ndarray:
    return draws[np.isfinite(draws)]  # a draw of prompts without any opportunity has no mean


def _spread(draws: np.ndarray) -> float:
    kept = _finite(draws)
    return float(kept.std(ddof=1)) if len(kept) > 1 else 0.0


ONE_SEED = "BCa (percentile where that has none)"
MOST_LOST = 0.05
"""There is no interval when a larger share of the draws has nothing to divide by."""


def _percentile(draws: np.ndarray) -> tuple[float, float, float]:
    """Interval of the draws that have a value, and the share of those that have none."""
    kept = _finite(draws)
    lost = 1 - len(kept) / max(1, len(draws))
    if not len(kept) or lost > MOST_LOST:
        return math.nan, math.nan, lost
    low, high = np.quantile(kept, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high), lost


def _constant(
    value: float, weights: np.ndarray, resamples: int, seed: int
) -> tuple[float, float, float]:
    """The same of a contrast that all draws give which have something to divide by."""
    if (weights > 0).all():
        return value, value, 0.0
    _, wholes = _draw_both(weights, weights, resamples, seed)
    lost = float((wholes <= 0).any(axis=0).mean())
    return (math.nan, math.nan, lost) if lost > MOST_LOST else (value, value, lost)


def _over_prompts(
    weighted: np.ndarray,
    weights: np.ndarray,
    coefficients: np.ndarray,
    value: float,
    flat: bool,
    resamples: int,
    seed: int,
) -> tuple[float, float, float]:
    """Interval of the contrast when prompts alone are drawn, and the share of draws without a
    value; inputs [K, prompts]."""
    k, n = weighted.shape
    if n < 2:
        return math.nan, math.nan, 0.0
    if flat:
        return _constant(value, weights[:, None], resamples, seed)

    from scipy.stats import DegenerateDataWarning, bootstrap

    def statistic(*columns: np.ndarray, axis: int) -> np.ndarray:
        wholes = np.stack([columns[k + i].sum(axis=axis) for i in range(k)])
        sums = np.stack([columns[i].sum(axis=axis) for i in range(k)])
        means = np.where(wholes > 0, sums / wholes, np.nan)
        return np.tensordot(coefficients, means, axes=1)

    def run(method: str) -> tuple[float, float, np.ndarray]:
        # One resample may hold a constant; that warning is about the resample, not the data.
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            warnings.simplefilter("ignore", DegenerateDataWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            result = bootstrap(
                (*weighted, *weights),
                statistic,
                paired=True,
                vectorized=True,
                n_resamples=resamples,
                confidence_level=LEVEL,
                method=method,
                rng=np.random.default_rng(seed),
            )
        interval = result.confidence_interval
        return float(interval.low), float(interval.high), result.bootstrap_distribution

    low, high, draws = run("BCa")
    plain_low, plain_high, lost = _percentile(draws)
    if lost or math.isnan(low) or math.isnan(high):  # BCa divides by the spread of the jackknife
        low, high = plain_low, plain_high
    return low, high, lost


@lru_cache(maxsize=8)
def _counts(n: int, n_seeds: int, resamples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each prompt [n, resamples] and each seed [n_seeds, resamples] is drawn."""
    rng = np.random.default_rng(seed)
    prompts = rng.multinomial(n, np.full(n, 1 / n), size=resamples).T.astype(float)
    seeds = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=resamples).T.astype(float)
    return prompts, seeds


def _draw_both(
    weighted: np.ndarray, weights: np.ndarray, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of [K, seeds, prompts] under random draws of both, each [K, resamples]."""
    k, n_seeds, n = weighted.shape
    prompts, seeds = _counts(n, n_seeds, resamples, seed)

    def total(x: np.ndarray) -> np.ndarray:
        return np.einsum(
            "ksb,sb->kb", (x.reshape(k * n_seeds, n) @ prompts).reshape(k, n_seeds, -1), seeds
        )

    return total(weighted), total(weights)


# --- families of comparisons ------------------------------------------------------------------


def holm(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Holm-adjusted p values of one family; estimates without a p value are left out."""
    known = sorted((e.p, name) for name, e in estimates.items() if not math.isnan(e.p))
    adjusted, highest = {}, 0.0
    for i, (p, name) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - i)))
        adjusted[name] = highest
    return adjusted


@dataclass(frozen=True)
class Factorial:
    """Main effects and interactions of fusion norm x feedback on one measure.

    For a measure in logarithms the effects are ratios. ``feedback`` compares post_norm with
    pre_norm averaged over fusion norms; ``fusion[level]`` compares a level with ``none``
    averaged over feedback; ``interaction[level]`` is the effect of feedback under that level
    minus (or divided by) its effect under ``none``. ``feedback_ends`` and ``fusion_ends`` hold
    the two levels that a main effect lies between, over the (seed, prompt) pairs that count in it;
    ``levels`` the means of the cells, each over its own.
    """

    levels: Mapping[tuple[str, str], Estimate]
    feedback: Estimate | None
    feedback_ends: tuple[Estimate, Estimate] | None
    fusion: Mapping[str, Estimate]
    fusion_ends: Mapping[str, tuple[Estimate, Estimate]]
    interaction: Mapping[str, Estimate]

    def effects(self) -> dict[str, Estimate]:
        """Every contrast by name."""
        out = {} if self.feedback is None else {"feedback": self.feedback}
        out |= {f"fusion norm {name}": e for name, e in self.fusion.items()}
        return out | {f"feedback x {name}": e for name, e in self.interaction.items()}


def factorial(
    samples: Mapping[tuple[str, str], Sample],
    *,
    ratio: bool = False,
    unit: str = "",
    resamples: int = RESAMPLES,
    seed: int = 0,
    over_prompts: bool = False,
) -> Factorial:
    """Effects of ``samples[(fusion_norm, feedback)]``; combinations that are missing drop out.

    A main effect averages over the levels of the other factor at which both sides exist.
    """

    def contrast(weights: Mapping[tuple[str, str], float]) -> Estimate:
        return estimate(
            [samples[key] for key in weights],
            list(weights.values()),
            ratio=ratio,
            unit=unit,
            resamples=resamples,
            seed=seed,
            over_prompts=over_prompts,
        )

    def main(
        before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]
    ) -> tuple[Estimate, tuple[Estimate, Estimate]]:
        """The effect, and its two levels over what counts in it: all cells take part in each."""

        def part(of_before: float, of_after: float) -> Estimate:
            given = {**dict.fromkeys(after, of_after), **dict.fromkeys(before, of_before)}
            return contrast({key: value / len(before) for key, value in given.items()})

        return part(-1, 1), (part(1, 0), part(0, 1))

    fusions = list(dict.fromkeys(key[0] for key in samples))
    both = [f for f in fusions if (f, "pre_norm") in samples and (f, "post_norm") in samples]
    feedback, feedback_ends = None, None
    if both:
        feedback, feedback_ends = main(
            [(f, "pre_norm") for f in both], [(f, "post_norm") for f in both]
        )
    fusion, fusion_ends, interaction = {}, {}, {}
    for level in (f for f in fusions if f != "none"):
        shared = [b for b in ("pre_norm", "post_norm") if {("none", b), (level, b)} <= set(samples)]
        if not shared:
            continue
        fusion[level], fusion_ends[level] = main(
            [("none", b) for b in shared], [(level, b) for b in shared]
        )
        if len(shared) == 2:
            interaction[level] = contrast(
                {
                    (level, "post_norm"): 1,
                    (level, "pre_norm"): -1,
                    ("none", "post_norm"): -1,
                    ("none", "pre_norm"): 1,
                }
            )
    levels = {key: contrast({key: 1.0}) for key in samples}
    return Factorial(levels, feedback, feedback_ends, fusion, fusion_ends, interaction)


def p_floor(prompts: int) -> float:
    """The least two-sided p that so many prompts can give: 2^(1-n), NaN for fewer than two.

    Without an effect the sign of each of n paired differences is a coin's, so that all of them
    fall on one side with that probability. Six prompts are the fewest that can give p < 0.05.
    """
    return 2.0 ** (1 - prompts) if prompts > 1 else math.nan


def too_few(prompts: int, family: int = 1) -> bool:
    """Whether so many prompts cannot show anything among ``family`` corrected comparisons."""
    return prompts < 2 or p_floor(prompts) * family >= 1 - LEVEL


def power_note(effect: Estimate, family: int = 1) -> str:
    """What this sample could have seen among ``family`` corrected comparisons, in words."""
    if effect.n == 0:
        return "no prompt and seed was measured in all cells compared"
    if effect.n == 1:
        return "one prompt: no test"
    if too_few(effect.n, family):
        among = f" among {family} comparisons" if family > 1 else ""
        least = min(1.0, p_floor(effect.n) * family)
        return f"{effect.n} prompts cannot give a p below {least:.2g}{among}"
    if math.isnan(effect.smallest):
        return "the smallest effect that could be seen is unknown"
    ratio = effect.unit == "x"
    size = f"{effect.smallest:.2f}" if ratio else f"{effect.smallest:.3f}"
    if float(size) == (1 if ratio else 0):
        size = f"{effect.smallest:.6g}" if ratio else f"{effect.smallest:.1g}"
    size = f"x{size}" if ratio else size
    said = f"{count(effect.n, effect.seeds)} would see an effect of {size} in four of five runs"
    return said + (", uncorrected" if family > 1 else "")


def count_prompts(n: int) -> str:
    return f"{n} prompt{'s' * (n != 1)}"


def count_comparisons(n: int) -> str:
    return f"{n} comparison{'s' * (n != 1)}"


def count(prompts: int, seeds: int, fewest: int | None = None) -> str:
    """The size of a sample in words; ``fewest`` seeds where groups have unlike numbers of them."""
    size = f"{count_prompts(prompts)} x "
    size += f"{fewest} to " if fewest is not None and fewest < seeds else ""
    return f"{size}{seeds} seed{'s' * (seeds != 1)}"


# --- acceptance -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafted chains, every quantity by its name; arrays are over depths 1..K.

    ``marginal`` n_accepted / rounds; ``conditional`` n_accepted / opportunities, NaN (n/a)
    without opportunities; ``accepted_drafts`` a round without the bonus token;
    ``acceptance_length`` with it; ``draft_token_rate`` accepted / drafted tokens. The
    ``_by_prompt`` twins average per-prompt means instead of pooling rounds.
    """

    rounds: int
    n_accepted: np.ndarray
    opportunities: np.ndarray
    marginal: np.ndarray
    conditional: np.ndarray
    accepted_drafts: float
    accepted_drafts_by_prompt: float
    draft_token_rate: float

    @property
    def acceptance_length(self) -> float:
        return self.accepted_drafts + 1

    @property
    def acceptance_length_by_prompt(self) -> float:
        return self.accepted_drafts_by_prompt + 1


def acceptance(correct: np.ndarray, prompts: Sequence[object] | None = None) -> Acceptance:
    """Acceptance of ``correct`` [rounds, K]: draft d of a round equals the target's token.

    A round accepts its leading run of correct drafts: 1, 0, 1, 0 accepts one. ``prompts``
    names the prompt of each round.
    """
    correct = np.asarray(correct, dtype=bool)
    if correct.ndim != 2 or not correct.size:
        raise DataError("acceptance needs rounds x depths, at least one of each", got=correct.shape)
    accepted = np.logical_and.accumulate(correct, axis=1)
    rounds, k = accepted.shape
    n_accepted = accepted.sum(axis=0)
    opportunities = np.append(rounds, n_accepted[:-1])
    conditional = np.full(k, np.nan)
    np.divide(n_accepted, opportunities, out=conditional, where=opportunities > 0)
    lengths = accepted.sum(axis=1)
    names = (
        np.zeros(rounds, int)
        if prompts is None
        else np.unique(np.asarray(prompts, str), return_inverse=True)[1]
    )
    per_prompt = np.bincount(names, weights=lengths) / np.bincount(names)
    return Acceptance(
        rounds=rounds,
        n_accepted=n_accepted,
        opportunities=opportunities,
        marginal=n_accepted / rounds,
        conditional=conditional,
        accepted_drafts=float(lengths.mean()),
        accepted_drafts_by_prompt=float(per_prompt.mean()),
        draft_token_rate=float(accepted.mean()),
    )


def with_note(value: Estimate, note: str) -> Estimate:
    """``value`` with ``note`` added to its notes."""
    return replace(value, note="; ".join(filter(None, (value.note, note))))
