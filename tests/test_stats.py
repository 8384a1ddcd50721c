"""Estimates against numbers worked out by hand and against scipy."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from driftlab.errors import DataError
from driftlab.results.stats import (
    Estimate,
    Sample,
    acceptance,
    bands,
    estimate,
    factorial,
    holm,
    not_available,
    power_note,
    ratio,
)

RNG = np.random.default_rng


def leading(lengths: list[int], k: int) -> np.ndarray:
    """Rounds that accept ``lengths`` drafts of ``k``."""
    return np.arange(k) < np.array(lengths)[:, None]


# --- acceptance -------------------------------------------------------------------------------


def test_four_rounds_by_hand() -> None:
    # SafeAILab/EAGLE#191: K=4, rounds accepting 4, 2, 0, 1.
    result = acceptance(leading([4, 2, 0, 1], 4))
    np.testing.assert_allclose(result.marginal, [0.75, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(result.conditional, [0.75, 2 / 3, 0.5, 1.0])
    np.testing.assert_array_equal(result.opportunities, [4, 3, 2, 1])
    np.testing.assert_array_equal(result.n_accepted, [3, 2, 1, 1])
    assert result.accepted_drafts == 1.75
    assert result.acceptance_length == 2.75
    assert result.draft_token_rate == 7 / 16


def test_tokens_after_the_first_wrong_one_do_not_count() -> None:
    result = acceptance(np.array([[1, 0, 1, 0]]))
    assert result.accepted_drafts == 1
    np.testing.assert_array_equal(result.n_accepted, [1, 0, 0, 0])


def test_a_depth_without_opportunities_is_not_available() -> None:
    result = acceptance(leading([1, 0], 3))
    np.testing.assert_allclose(result.conditional, [0.5, 0.0, np.nan])
    np.testing.assert_array_equal(result.opportunities, [2, 1, 0])


def test_pooled_and_per_prompt_lengths_differ() -> None:
    # vllm#17908: two prompts, the first accepting 4, 2, 2 and the second 0.
    result = acceptance(leading([4, 2, 2, 0], 4), prompts=["a", "a", "a", "b"])
    assert result.acceptance_length == 3.0
    assert result.acceptance_length_by_prompt == pytest.approx(7 / 3)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,)])
def test_acceptance_needs_rounds(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="rounds x depths"):
        acceptance(np.zeros(shape))


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20))
def test_acceptance_counts_leading_runs(rows: list[list[bool]]) -> None:
    result = acceptance(np.array(rows))
    runs = [len(list(itertools.takewhile(bool, row))) for row in rows]
    assert result.accepted_drafts == pytest.approx(np.mean(runs))
    assert result.accepted_drafts == pytest.approx(result.marginal.sum())


# --- one estimate -----------------------------------------------------------------------------


def test_one_seed_is_scipys_own_interval() -> None:
    values = RNG(1).normal(2, 1, 24)
    ours = estimate(Sample(values[None]), resamples=999, seed=5)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=999, method="BCa", rng=RNG(5)
    ).confidence_interval
    assert ours.value == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    assert ours.n == 24
    assert ours.seeds == 1


def test_a_paired_difference_is_scipys_interval_of_the_differences() -> None:
    rng = RNG(2)
    a = rng.normal(0, 5, 20)
    b = a + rng.normal(0.5, 0.1, 20)
    ours = estimate([Sample(b[None]), Sample(a[None])], [1, -1], resamples=999, seed=3)
    theirs = scipy_stats.bootstrap(
        (b - a,), np.mean, n_resamples=999, method="BCa", rng=RNG(3)
    ).confidence_interval
    assert ours.value == pytest.approx((b - a).mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6)
    assert ours.high - ours.low < 0.2, "prompts differ by 5, pairs by 0.1"
    assert ours.differs
    assert ours.p < 0.001


def ratio_of_sums(x: np.ndarray, y: np.ndarray, seed: int) -> tuple[float, float]:
    """scipy's BCa interval of a ratio of sums, which is that of means as well."""

    def statistic(x: Any, y: Any, axis: int) -> Any:
        return x.sum(axis=axis) / y.sum(axis=axis)

    found = scipy_stats.bootstrap(
        (x, y), statistic, paired=True, n_resamples=499, method="BCa", rng=RNG(seed)
    ).confidence_interval
    return found.low, found.high


def test_pooled_rates_are_scipys_ratio_of_sums() -> None:
    rng = RNG(3)
    chances = rng.integers(1, 40, 15).astype(float)
    accepted = rng.binomial(chances.astype(int), 0.6).astype(float)
    ours = estimate(Sample((accepted / chances)[None], chances[None]), resamples=499, seed=1)
    assert ours.value == pytest.approx(accepted.sum() / chances.sum())
    assert (ours.low, ours.high) == pytest.approx(ratio_of_sums(accepted, chances, 1), rel=1e-9)


def test_every_side_of_a_difference_is_pooled_over_its_own_chances() -> None:
    """0.9 of 10 and 0.2 of 30 are 15 of 40, 0.5 of 2 and 0.25 of 8 are 3 of 10."""
    many = Sample(np.array([[0.9, 0.2]]), np.array([[10.0, 30.0]]))
    few = Sample(np.array([[0.5, 0.25]]), np.array([[2.0, 8.0]]))
    result = estimate([many, few], [1, -1], resamples=50)
    assert result.value == pytest.approx(15 / 40 - 3 / 10)
    assert result.by_seed == pytest.approx([15 / 40 - 3 / 10])


def test_growth_is_a_ratio_of_geometric_means() -> None:
    first = np.array([[1.0, 2.0, 4.0]])
    last = np.array([[3.0, 2.0, 8.0]])
    value = estimate(Sample(np.log(last) - np.log(first)), ratio=True)
    by_hand = scipy_stats.gmean(last[0]) / scipy_stats.gmean(first[0])
    assert value.value == pytest.approx(by_hand)
    assert value.unit == "x"
    assert value.low <= value.value <= value.high


def test_seeds_and_prompts_are_both_drawn() -> None:
    rng = RNG(4)
    prompt, seed = rng.normal(0, 1, 30), np.array([-2.0, 0.0, 2.0])
    values = prompt[None] + seed[:, None]
    both = estimate(Sample(values), over_prompts=True)
    assert both.by_seed == pytest.approx(values.mean(axis=1))
    # Seeds held fixed, the interval is that of the prompts' own means.
    theirs = scipy_stats.bootstrap(
        (values.mean(axis=0),), np.mean, n_resamples=2000, method="BCa", rng=RNG(0)
    ).confidence_interval
    assert both.over_prompts == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    # Crossed design: the variance is that of a mean of 3 seeds plus that of a mean of 30 prompts.
    sd = math.sqrt(seed.var() / 3 + prompt.var() / 30)
    width = both.high - both.low
    assert width == pytest.approx(2 * 1.96 * sd, rel=0.12)
    assert width > 2 * (both.over_prompts[1] - both.over_prompts[0])


def test_the_crossed_draw_equals_a_loop() -> None:
    """The matrix form against drawing indices one resample at a time."""
    values = RNG(5).normal(0, 1, (3, 12))
    value, low, high = bands(values[None], resamples=4000)
    rng, means = RNG(9), []
    for _ in range(4000):
        drawn = values[rng.integers(0, 3, 3)][:, rng.integers(0, 12, 12)]
        means.append(drawn.mean())
    assert value[0] == pytest.approx(values.mean())
    sd = np.std(means)
    assert [low[0], high[0]] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.15 * sd)


def test_bands_and_estimates_agree() -> None:
    rng = RNG(6)
    values, weights = rng.normal(0, 1, (5, 3, 9)), rng.integers(0, 5, (5, 3, 9)).astype(float)
    value, low, high = bands(values, weights, resamples=500)
    for k in range(5):
        one = estimate(Sample(values[k], weights[k]), resamples=500)
        assert (value[k], low[k], high[k]) == pytest.approx((one.value, one.low, one.high))


def test_a_seed_without_data_is_not_drawn() -> None:
    """Groups of merged runs have unlike seeds: a band is what the estimate beside it says."""
    values = RNG(8).normal(0, 1, (2, 3, 9))
    values[1, [0, 2]] = np.nan
    value, low, high = bands(values, resamples=500)
    both = estimate(Sample(values[0]), resamples=500)
    assert (low[0], high[0]) == pytest.approx((both.low, both.high))
    _, one_low, one_high = bands(values[1:, 1:2], resamples=500)
    assert (low[1], high[1]) == (one_low[0], one_high[0])
    assert low[1] < value[1] < high[1]


def test_prompts_of_a_seed_that_is_left_out_are_not_counted() -> None:
    values = RNG(9).normal(0, 1, (2, 6))
    values[0, 4:] = np.nan  # seed 0 has prompts 0 to 3, seed 1 all
    chances = np.ones((2, 6))
    chances[1] = 0
    found = estimate([Sample(values, np.ones((2, 6))), Sample(values + 1, chances)], (1, -1))
    assert (found.n, found.seeds, found.value) == (4, 1, pytest.approx(-1))


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_constant_data_has_a_point_interval_and_no_warning(n_seeds: int) -> None:
    constant = Sample(np.full((n_seeds, 8), 0.1) + 0.2)
    same = estimate(constant, over_prompts=True)
    assert (same.value, same.low, same.high) == pytest.approx((0.3, 0.3, 0.3))
    shifted = Sample(np.full((n_seeds, 8), 0.8))
    change = estimate([shifted, constant], [1, -1], over_prompts=True)
    assert (change.low, change.high) == pytest.approx((0.5, 0.5))
    assert change.differs
    assert change.p == 2**-7, "eight prompts, all on one side"
    none = estimate([constant, constant], [1, -1], over_prompts=True)
    assert (none.value, none.low, none.high, none.p) == (0, 0, 0, 1)
    assert not none.differs
    for flat in (change, none):
        assert math.isnan(flat.smallest)
        assert power_note(flat) == "the smallest effect that could be seen is unknown"


def test_almost_constant_data_warns_nowhere() -> None:
    values = np.zeros((1, 6))
    values[0, 0] = 1.0
    result = estimate(Sample(values))
    assert result.low <= result.value <= result.high
    two = estimate(Sample(np.array([[0.0, 1.0]])))
    assert math.isfinite(two.low)
    assert math.isfinite(two.high)


@pytest.mark.parametrize("seeds", [1, 3])
def test_one_prompt_has_no_interval(seeds: int) -> None:
    values = 1.0 + np.arange(seeds, dtype=float)[:, None]
    result = estimate(Sample(values))
    assert result.value == values.mean()
    assert math.isnan(result.low)
    assert result.note.endswith("one prompt has no interval")
    assert result.short == f"{values.mean():.2f} [no interval]"
    value, low, _ = bands(values[None])
    assert value[0] == values.mean()
    assert math.isnan(low[0])


def test_nothing_is_not_available() -> None:
    for sample in (Sample(np.full((2, 3), np.nan)), Sample(np.zeros((2, 3)), np.zeros((2, 3)))):
        result = estimate(sample)
        assert result.short == "n/a"
        assert result.n == 0
        assert result.note.startswith("n/a")
    assert str(not_available("no free chains")) == "n/a, n=0"


def test_only_pairs_that_both_sides_have_count() -> None:
    a = np.array([[1.0, 2.0, 3.0, 100.0], [1.0, 2.0, 3.0, 4.0]])
    b = np.array([[2.0, 3.0, 4.0, np.nan], [2.0, 3.0, 4.0, np.nan]])
    result = estimate([Sample(b), Sample(a)], [1, -1])
    assert result.value == pytest.approx(1.0)
    assert result.n == 3
    lost_seed = b.copy()
    lost_seed[1] = np.nan
    result = estimate([Sample(lost_seed), Sample(a)], [1, -1])
    assert result.value == pytest.approx(1.0)
    assert result.seeds == 1


def test_the_same_seed_gives_the_same_interval() -> None:
    sample = Sample(RNG(7).normal(0, 1, (3, 10)))
    assert estimate(sample, seed=1) == estimate(sample, seed=1)
    assert estimate(sample, seed=1).low != estimate(sample, seed=2).low


def test_shapes_are_checked() -> None:
    with pytest.raises(DataError, match=r"\[seeds, prompts\]"):
        Sample(np.zeros(3))
    with pytest.raises(DataError, match="weights must have the shape"):
        Sample(np.zeros((1, 3)), np.zeros((1, 2)))
    with pytest.raises(DataError, match="differ in shape"):
        estimate([Sample(np.zeros((1, 3))), Sample(np.zeros((1, 2)))], [1, -1])
    with pytest.raises(DataError, match="2 samples need as many"):
        estimate([Sample(np.zeros((1, 3)))] * 2, [1])


def test_intervals_cover_the_truth() -> None:
    rng, hits = RNG(8), 0
    for i in range(200):
        result = estimate(Sample(rng.normal(0.3, 1, (1, 25))), resamples=300, seed=i)
        hits += result.low <= 0.3 <= result.high
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize("n", [8, 12, 30])
def test_p_values_are_small_only_when_there_is_something(n: int) -> None:
    rng, small = RNG(9), 0
    for _ in range(60):
        a, b = rng.normal(0, 1, (2, 1, n))
        small += estimate([Sample(a), Sample(b)], [1, -1], resamples=50).p < 0.05
    assert small <= 7  # 3 expected


@pytest.mark.parametrize("n", range(2, 9))
def test_no_p_is_below_that_of_the_signs(n: int) -> None:
    """All n differences on one side: scipy's sign test is the least p there is."""
    a = RNG(n).normal(0, 1, (1, n))
    b = a + RNG(n + 1).uniform(1, 2, (1, n))
    signs = scipy_stats.binomtest(n, n).pvalue
    assert estimate([Sample(b), Sample(a)], [1, -1], resamples=20).p == pytest.approx(signs)
    assert estimate([Sample(a + 1), Sample(a)], [1, -1], resamples=20).p == pytest.approx(signs)


@pytest.mark.parametrize("n", [6, 8, 12, 24])
def test_few_prompts_are_no_cheap_evidence(n: int) -> None:
    """One seed is scipy's paired t, which knows that the spread of few prompts is a guess."""
    a, b = RNG(n).normal(0, 1, (2, 1, n))
    b += 2.5 * (a - b).std() / math.sqrt(n) - (b - a).mean()
    theirs = scipy_stats.ttest_rel(a[0], b[0]).pvalue
    assert 0.01 < theirs < 0.1
    assert theirs * 0.93 <= estimate([Sample(b), Sample(a)], [1, -1]).p <= theirs * 1.15


@pytest.mark.parametrize("seeds", [1, 3])
def test_one_prompt_has_no_test(seeds: int) -> None:
    a, b = RNG(3).normal(0, 1, (2, seeds, 1))
    for one, other in ((a, b), (a, a + 1), (a, a)):
        result = estimate([Sample(other), Sample(one)], [1, -1], resamples=20)
        assert math.isnan(result.p) and math.isnan(result.smallest)
        assert power_note(result) == "one prompt: no test"


def test_the_side_that_rests_on_one_prompt_has_no_test() -> None:
    """Twelve prompts had opportunities before, one of them after."""
    rng = RNG(5)
    chances = np.zeros((1, 12))
    chances[0, 3] = 4
    before = Sample(rng.uniform(0, 1, (1, 12)), np.full((1, 12), 5.0))
    after = Sample(np.where(chances > 0, 0.9, 0.0), chances)
    result = estimate([after, before], [1, -1], resamples=200)
    assert result.value == pytest.approx(0.9 - before.values.mean())
    assert math.isnan(result.p)
    assert math.isnan(result.low), "a third of the draws has no such prompt"
    assert "of the draws left out" in result.note


# --- ratios of means --------------------------------------------------------------------------


def test_a_ratio_of_means_is_scipys_interval() -> None:
    rng = RNG(13)
    part, whole = rng.uniform(0.1, 2, 15), rng.uniform(1, 3, 15)
    ours = estimate(ratio(Sample(part[None]), Sample(whole[None])), resamples=499, seed=4)
    assert ours.value == pytest.approx(part.mean() / whole.mean())
    assert (ours.low, ours.high) == pytest.approx(ratio_of_sums(part, whole, 4), rel=1e-9)


@pytest.mark.parametrize("part", [[0.1, 0.2, 0.1], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("seeds", [1, 2])
def test_nothing_has_no_share(part: list[float], seeds: int) -> None:
    nothing, some = Sample(np.zeros((seeds, 3))), Sample(np.array([part] * seeds))
    result = estimate(ratio(some, nothing))
    assert result.short == "n/a"
    assert result.note == "n/a: nothing to divide by"
    beside = ratio(some, Sample(np.ones((seeds, 3))))
    assert math.isnan(estimate([beside, ratio(some, nothing)], [1, -1]).value)


@pytest.mark.parametrize("part", [[0.1, 0.2, 0.1], [0.1, 0.1, 0.1]])
def test_a_whole_of_nothing_counts_with_its_part(part: list[float]) -> None:
    result = estimate(ratio(Sample(np.array([part])), Sample(np.array([[0.0, 0.2, 0.2]]))))
    assert result.value == pytest.approx(sum(part) / 0.4)
    assert result.n == 3
    # One draw in 27 holds the first prompt alone, and no length to divide by.
    assert min(part) / 0.2 <= result.low <= result.value <= result.high <= 3 * max(part) / 0.2
    assert "of the draws left out, with nothing to divide by" in result.note


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_constant_that_many_draws_lack_has_no_interval(seeds: int) -> None:
    """Nothing is left of the one draft that was accepted: (4/5)^5 of the draws have none."""
    own = np.array([[0.0, 0.0, 0.25, 0.0, 0.0]] * seeds)
    result = estimate(ratio(Sample(np.zeros_like(own)), Sample(own)))
    assert result.value == 0 and math.isnan(result.low) and math.isnan(result.high)
    lost = float(re.search(r"([0-9.]+)% of the draws left out", result.note)[1])  # type: ignore[index]
    assert lost == pytest.approx(100 * 0.8**5, abs=1.5)
    rarely = np.array([[0.0, 0.2, 0.25, 0.1, 0.3]] * seeds)
    result = estimate(ratio(Sample(np.zeros_like(rarely)), Sample(rarely)))
    assert (result.low, result.high) == (0, 0)


def test_a_seed_without_a_length_of_its_own() -> None:
    own = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]])
    result = estimate(ratio(Sample(np.full((3, 4), 0.5)), Sample(own)))
    assert result.value == pytest.approx(6 / 12)
    assert result.seeds == 3
    assert math.isnan(result.by_seed[0])
    assert result.by_seed[1:] == pytest.approx((2 / 6, 2 / 6))
    assert result.high < 5


@pytest.mark.parametrize("effect", [0.08, -0.15])
def test_a_p_value_has_two_tails(effect: float) -> None:
    a, b = RNG(12).normal(0, 1, (2, 1, 150))
    a += effect - (a - b).mean()
    p = estimate([Sample(a), Sample(b)], [1, -1], resamples=50).p
    theirs = scipy_stats.ttest_rel(a[0], b[0]).pvalue
    assert 0.1 < theirs < 0.7, "neither so small nor so large that a half could be taken for it"
    assert p == pytest.approx(theirs, rel=0.15)


def test_the_smallest_effect_is_what_four_in_five_runs_find() -> None:
    rng = RNG(10)
    a, b = rng.normal(0, 1, (2, 1, 40))
    smallest = estimate([Sample(a), Sample(b)], [1, -1]).smallest
    theory = (1.96 + 0.84) * np.std(a - b) / math.sqrt(40)
    assert smallest == pytest.approx(theory, rel=0.1)
    found = 0
    for _ in range(100):
        noise = rng.normal(0, np.std(a - b), (1, 40))
        change = estimate([Sample(noise + smallest), Sample(0 * noise)], [1, -1], resamples=99)
        found += change.p < 0.05
    assert 65 <= found <= 95


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, low, high, unit, text",
    [
        (0.612, 0.581, 0.643, "", "0.61 [0.58, 0.64], n=24"),
        (3.12, 2.88, 3.41, "x", "x3.1 [2.9, 3.4], n=24"),
        (1.0, 0.99, 1.01, "x", "x1.00 [0.99, 1.01], n=24"),
        (0.0004, -0.0002, 0.001, "", "0.000 [0.000, 0.001], n=24"),
        (704.2, 650.0, 760.0, "rms", "704 [650, 760], n=24"),
        (0.5, 0.5, 0.5, "", "0.50 [0.50, 0.50], n=24"),
        (-0.24, -0.3, -0.2, "", "-0.24 [-0.30, -0.20], n=24"),
    ],
)
def test_numbers_read_well(value: float, low: float, high: float, unit: str, text: str) -> None:
    assert str(Estimate(value, low, high, 24, unit)) == text


def test_seeds_that_agree_are_counted() -> None:
    assert Estimate(0.2, 0, 1, 9, by_seed=(0.1, 0.3, -0.1)).signs == "2 of 3 seeds agree in sign"
    assert Estimate(2, 1, 3, 9, "x", by_seed=(1.1, 3.0, 0.9)).signs == "2 of 3 seeds agree in sign"
    assert Estimate(2, 1, 3, 9).signs == "no seeds"
    assert Estimate(0, -1, 1, 9, by_seed=(0.0, 0.0)).signs == "no sign to agree in"


def test_power_is_put_in_words() -> None:
    effect = Estimate(0.1, -0.1, 0.3, 24, seeds=3, smallest=0.2)
    assert (
        power_note(effect)
        == "24 prompts x 3 seeds would see an effect of 0.200 in four of five runs"
    )
    assert "x1.20" in power_note(Estimate(1, 1, 1, 9, "x", smallest=1.2))
    assert "unknown" in power_note(Estimate(1, 1, 1, 9))
    assert "of 4e-05 in" in power_note(Estimate(1, 1, 1, 9, smallest=4e-5))
    assert "of x1.0001 in" in power_note(Estimate(1, 1, 1, 9, "x", smallest=1.0001))
    assert power_note(Estimate(1, 1, 1, 1)) == "one prompt: no test"
    assert power_note(Estimate(1, 1, 1, 5, smallest=0.1)) == (
        "5 prompts cannot give a p below 0.062"
    )
    assert power_note(effect, 3).endswith("four of five runs, uncorrected")
    assert power_note(Estimate(1, 1, 1, 6, smallest=0.1), 3) == (
        "6 prompts cannot give a p below 0.094 among 3 comparisons"
    )
    assert "a p below 1 among 12" in power_note(Estimate(1, 1, 1, 4, smallest=0.1), 12)
    assert power_note(not_available("nothing to average")) == (
        "no prompt and seed was measured in all cells compared"
    )


# --- families ---------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    family = {k: Estimate(1, 0, 2, 9, p=p) for k, p in ps.items()} | {"e": Estimate(1, 0, 2, 9)}
    # 0.005*4, 0.01*3, 0.03*2, max(0.06, 0.04*1)
    expected = {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    assert holm(family) == pytest.approx(expected)


@given(st.lists(st.floats(0.0001, 1), min_size=1, max_size=12))
def test_holm_never_lowers_and_keeps_the_order(ps: list[float]) -> None:
    adjusted = holm({str(i): Estimate(1, 0, 2, 9, p=p) for i, p in enumerate(ps)})
    values = [adjusted[str(i)] for i in range(len(ps))]
    assert all(p <= v <= 1 for p, v in zip(ps, values, strict=True))
    in_order = np.array(values)[np.argsort(ps, kind="stable")]
    assert (np.diff(in_order) >= -1e-12).all()


def test_the_2x2_by_hand() -> None:
    shape = (2, 4)
    means = {
        ("none", "pre_norm"): 1.0,
        ("per_layer", "pre_norm"): 2.0,
        ("none", "post_norm"): 4.0,
        ("per_layer", "post_norm"): 8.0,
    }
    noise = RNG(0).normal(0, 0.1, shape)
    result = factorial({k: Sample(m + noise) for k, m in means.items()})
    assert result.feedback is not None
    assert result.feedback.value == pytest.approx((4 + 8 - 1 - 2) / 2)
    assert result.fusion["per_layer"].value == pytest.approx((2 + 8 - 1 - 4) / 2)
    assert result.interaction["per_layer"].value == pytest.approx((8 - 2) - (4 - 1))
    assert result.feedback_ends is not None
    assert [e.value for e in result.feedback_ends] == pytest.approx(
        [1.5 + noise.mean(), 6.0 + noise.mean()]
    )
    assert [e.value for e in result.fusion_ends["per_layer"]] == pytest.approx(
        [2.5 + noise.mean(), 5.0 + noise.mean()]
    )
    # The noise is shared by all four cells: paired, it cancels.
    assert result.feedback.high - result.feedback.low < 1e-9
    assert list(result.effects()) == ["feedback", "fusion norm per_layer", "feedback x per_layer"]


def test_the_ends_of_an_effect_are_over_what_counts_in_it() -> None:
    """per_layer has one of two seeds, concat both and one prompt less."""
    drawn = RNG(1).normal(0, 1, (3, 2, 4))
    drawn[1, 1] = np.nan
    drawn[2, :, 3] = np.nan
    names = ("none", "per_layer", "concat")
    result = factorial({(n, "pre_norm"): Sample(v) for n, v in zip(names, drawn, strict=True)})
    for name, there in (("per_layer", np.s_[0]), ("concat", np.s_[:, :3])):
        before, after = result.fusion_ends[name]
        own = drawn[names.index(name)][there].mean()
        assert (before.value, after.value) == pytest.approx((drawn[0][there].mean(), own))
        assert result.fusion[name].value == pytest.approx(after.value - before.value)
    assert result.levels["none", "pre_norm"].value == pytest.approx(drawn[0].mean())


def test_logarithms_make_effects_ratios() -> None:
    ones = np.zeros((1, 3))
    result = factorial(
        {
            ("none", "pre_norm"): Sample(ones + math.log(3)),
            ("per_layer", "pre_norm"): Sample(ones + math.log(3)),
            ("none", "post_norm"): Sample(ones),
            ("per_layer", "post_norm"): Sample(ones + math.log(2)),
        },
        ratio=True,
    )
    assert result.feedback is not None
    assert result.feedback.value == pytest.approx(math.sqrt(2) / 3)
    assert result.interaction["per_layer"].value == pytest.approx(2.0)
    assert result.levels["none", "pre_norm"].value == pytest.approx(3.0)


def test_three_levels_and_missing_corners() -> None:
    def flat(value: float) -> Sample:
        return Sample(np.full((1, 3), value))

    cells = {
        ("none", "pre_norm"): flat(1),
        ("none", "post_norm"): flat(2),
        ("per_layer", "pre_norm"): flat(1.5),
        ("per_layer", "post_norm"): flat(4),
        ("concat", "post_norm"): flat(7),
    }
    result = factorial(cells)
    assert result.feedback is not None
    assert result.feedback.value == pytest.approx((1 + 2.5) / 2)  # concat has no pre_norm
    assert set(result.fusion) == {"per_layer", "concat"}
    assert result.fusion["concat"].value == pytest.approx(5)  # against none at post_norm alone
    assert set(result.interaction) == {"per_layer"}
    alone = factorial({("none", "pre_norm"): flat(1)})
    assert alone.feedback is None
    assert alone.effects() == {}


def test_equal_ratios_differ_by_nothing() -> None:
    """Shares of unlike wholes, the same on both sides: no draw tells them apart."""
    share = Sample(np.array([[0.5, 0.25, 0.75]]), np.array([[2.0, 4.0, 4.0]]))
    found = estimate([share, share], [-1, 1])
    assert (found.value, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_equal_measurements_differ_by_nothing_whatever_their_rounding() -> None:
    """Four thirds, added and taken away with weights of a quarter, leave 1e-17 and no effect."""
    rng = np.random.default_rng(0)
    values = [rng.integers(1, 9, size=(1, 11)) / 3 for _ in range(4)]
    samples = [Sample(v) for v in (*values, *values)]
    found = estimate(samples, [0.25] * 4 + [-0.25] * 4)
    assert (found.value, found.low, found.high, found.by_seed) == (0.0, 0.0, 0.0, (0.0,))
    assert found.p == 1.0
