"""Every measure against numpy or scipy, written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special as scipy_special
from scipy import stats as scipy_stats
from torch import Tensor

from driftlab.analysis import measures
from driftlab.errors import ConfigError
from driftlab.results.schema import REGIONS
from driftlab.results.stats import acceptance

BATCH, HEADS, SIZE = 2, 3, 9


def patterns(anchors: Tensor, depth: int, *, seed: int, null: float = 0.0) -> Tensor:
    """Random attention rows of ``anchors``, [B, h, T, SIZE + depth - 1]; ``null`` is lost mass."""
    rng = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, len(anchors), SIZE + depth - 1)
    scores = torch.randn(shape, generator=rng) * 2
    key = torch.arange(SIZE + depth - 1)
    scores = scores.masked_fill((key > anchors[:, None]) & (key < SIZE), -torch.inf)
    return scores.softmax(-1) * (1 - null)


def slow_regions(
    row: np.ndarray, anchor: int, depth: int, sink: np.ndarray, prompt_len: int
) -> dict[str, float]:
    """One query, key by key."""
    mass = dict.fromkeys(REGIONS, 0.0)
    for key, weight in enumerate(row):
        if key >= SIZE:
            newest = key == SIZE + depth - 2
            mass["self_mass" if newest else "draft_mass"] += float(weight)
        elif depth == 1 and key == anchor:
            mass["self_mass"] += float(weight)
        elif sink[key]:
            mass["sink"] += float(weight)
        else:
            mass["prompt_mass" if key < prompt_len else "generated"] += float(weight)
    mass["null_mass"] = 1 - sum(mass.values())
    return mass


@settings(max_examples=40)
@given(
    depth=st.integers(1, 5),
    chosen=st.sets(st.integers(0, SIZE - 1), min_size=1),
    marked=st.sets(st.integers(0, SIZE - 1)),
    prompts=st.tuples(st.integers(1, SIZE), st.integers(1, SIZE)),
    null=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 99),
)
def test_regions_equal_a_loop_and_sum_to_one(
    depth: int, chosen: set[int], marked: set[int], prompts: tuple[int, int], null: float, seed: int
) -> None:
    anchors = torch.tensor(sorted(chosen))
    sink = torch.zeros(BATCH, SIZE + 2, dtype=torch.bool)  # longer than the prefix is fine
    sink[0, list(marked)] = True
    pattern = patterns(anchors, depth, seed=seed, null=null)
    found = measures.region_masses(pattern, anchors, depth, sink, torch.tensor(prompts))
    assert found.shape == (BATCH, HEADS, len(anchors), len(REGIONS))
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]), atol=1e-5, rtol=0)
    for b in range(BATCH):
        for r, t in enumerate(anchors.tolist()):
            row = pattern[b, 0, r].numpy()
            wanted = slow_regions(row, t, depth, sink[b].numpy(), prompts[b])
            np.testing.assert_allclose(
                found[b, 0, r].numpy(), [wanted[name] for name in REGIONS], atol=1e-5
            )


@settings(max_examples=40)
@given(
    depth=st.integers(1, 5),
    chosen=st.sets(st.integers(0, SIZE - 1), min_size=1),
    window=st.integers(1, 14),
    seed=st.integers(0, 99),
)
def test_recent_mass_is_that_of_the_last_keys(
    depth: int, chosen: set[int], window: int, seed: int
) -> None:
    anchors = torch.tensor(sorted(chosen))
    pattern = patterns(anchors, depth, seed=seed)
    found = measures.recent_mass(pattern, anchors, depth, window)
    for r, t in enumerate(anchors.tolist()):
        keys = [*range(t + 1), *range(SIZE, SIZE + depth - 1)][-window:]
        wanted = pattern[:, :, r, keys].sum(-1)
        torch.testing.assert_close(found[:, :, r], wanted, atol=1e-6, rtol=1e-5)
    every = measures.recent_mass(pattern, anchors, depth, 10**12)  # no more keys than there are
    torch.testing.assert_close(every, pattern.sum(-1), atol=1e-6, rtol=1e-5)


def test_regions_of_a_row_worked_out_by_hand() -> None:
    """Anchor 3 of a text with a prompt of two, depth 3: keys 0..3 and two of the chain."""
    pattern = torch.tensor([0.4, 0.2, 0.1, 0.05, 0.15, 0.1]).reshape(1, 1, 1, 6)
    sink = measures.first_sink(1, 4)
    found = measures.region_masses(pattern, torch.tensor([3]), 3, sink, torch.tensor([2]))
    wanted = {"sink": 0.4, "prompt_mass": 0.2, "generated": 0.15, "draft_mass": 0.15}
    wanted |= {"self_mass": 0.1, "null_mass": 0.0}
    np.testing.assert_allclose(found[0, 0, 0], [wanted[n] for n in REGIONS], atol=1e-6)


def test_a_position_that_attends_to_itself_is_no_sink_to_itself() -> None:
    """At depth 1 the first position sees itself alone: self, not sink."""
    pattern = torch.ones(1, 1, 1, 1)
    found = measures.region_masses(
        pattern, torch.tensor([0]), 1, measures.first_sink(1, 1), torch.tensor([1])
    )
    assert found[0, 0, 0].tolist() == [0, 0, 0, 0, 1, 0]


def test_entropy_is_scipy_s_in_nats() -> None:
    pattern = patterns(torch.arange(SIZE), 2, seed=0)
    wanted = scipy_stats.entropy(pattern.double().numpy(), axis=-1)
    np.testing.assert_allclose(measures.entropy(pattern).numpy(), wanted, atol=1e-5)
    uniform = torch.full((1, 1, 1, 8), 1 / 8)
    assert measures.entropy(uniform).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_taken_in_fp32(dtype: torch.dtype) -> None:
    """Report 33: 300 squared is more than fp16 holds."""
    x = torch.full((2, 64), 300.0).to(dtype)
    assert measures.rms(x).tolist() == [300.0, 300.0]
    assert measures.l2(x).tolist() == [2400.0, 2400.0]
    y = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = np.linalg.norm(y.float().numpy(), axis=-1)
    np.testing.assert_allclose(measures.l2(y), wanted, rtol=1e-6)
    np.testing.assert_allclose(measures.rms(y), wanted / math.sqrt(7), rtol=1e-6)


def test_parts_sum_to_the_fused_input_and_shares_to_one() -> None:
    rng = torch.Generator().manual_seed(0)
    chunks = [torch.randn(2, 5, 6, generator=rng) for _ in range(3)]
    weight = torch.randn(4, 18, generator=rng)
    whole = torch.cat(chunks, dim=-1) @ weight.T
    parts = measures.fused_parts(chunks, weight)
    for i, part in enumerate(parts):
        wanted = chunks[i].numpy() @ weight[:, 6 * i : 6 * i + 6].numpy().T
        np.testing.assert_allclose(part.numpy(), wanted, atol=1e-5)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-5, rtol=1e-5)
    shares = torch.stack([measures.share(part, whole) for part in parts])
    torch.testing.assert_close(shares.sum(0), torch.ones(2, 5), atol=1e-4, rtol=0)
    g, p = whole[0, 0].numpy(), parts[1][0, 0].numpy()
    assert shares[1, 0, 0].item() == pytest.approx(np.dot(p, g) / np.dot(g, g), rel=1e-4)
    wanted = np.dot(p, g) / np.linalg.norm(p) / np.linalg.norm(g)
    assert measures.cosine(parts[1], whole)[0, 0].item() == pytest.approx(wanted, rel=1e-4)


def test_scores_of_the_truth_by_hand() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]]).expand(1, 6, 4)
    back = torch.tensor([-1, 0, 1, -1, 2, 3])  # target id -> draft id
    truth = torch.tensor([[1, 2, 4, 5, 3, -1]])
    found = measures.draft_scores(logits, truth, back)
    inside, log_q, rank = (found[name] for name in ("in_vocab", "logprob", "rank"))
    assert "tv" not in found and found["best"][0].tolist() == [2.0] * 6
    assert inside[0].tolist() == [True, True, True, True, False, False]
    # Equal scores count against the truth: ids 1 and 2 both have one better and one equal.
    assert rank[0].tolist() == [0, 2, 2, 3, -1, -1]
    total = sum(math.exp(x) for x in (2.0, 1.0, 1.0, 0.0))
    wanted = [math.log(math.exp(x) / total) for x in (2.0, 1.0, 1.0, 0.0)]
    np.testing.assert_allclose(log_q[0, :4], wanted, atol=1e-6)
    assert bool(log_q[0, 4:].isnan().all())


def test_total_variation_counts_what_the_draft_vocabulary_lacks() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(10), size=(2, 3))
    kept = [1, 4, 5, 9]
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    q = np.zeros((2, 3, 10))
    q[..., kept] = logits.softmax(-1).numpy()
    back, truth = torch.full((10,), -1), torch.ones(2, 3, dtype=torch.long)
    back[kept] = torch.arange(4)
    found = measures.draft_scores(logits, truth, back, torch.tensor(p[..., kept]))
    np.testing.assert_allclose(found["tv"].numpy(), 0.5 * np.abs(p - q).sum(-1), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_by_block_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(measures, "_CACHED", 3 * 32)  # three rows at a time, and one is left
    rng = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 7, 32, generator=rng)).to(dtype)
    truth = torch.randint(40, (2, 7), generator=rng)
    back = torch.arange(40).where(torch.arange(40) < 32, torch.tensor(-1))
    p = torch.rand(2, 7, 32, generator=rng) / 32
    found = measures.draft_scores(logits, truth, back, p)
    x = logits.double().numpy()
    log_q = scipy_special.log_softmax(x, axis=-1)
    wanted_tv = np.maximum(np.exp(log_q) - p.numpy(), 0).sum(-1)
    np.testing.assert_allclose(found["tv"], wanted_tv, atol=1e-6)
    np.testing.assert_array_equal(found["best"], x.max(-1))
    for b, t in np.ndindex(2, 7):
        own = int(truth[b, t])
        assert bool(found["in_vocab"][b, t]) == (own < 32)
        if own < 32:
            assert found["logprob"][b, t] == pytest.approx(log_q[b, t, own], abs=1e-5)
            assert found["rank"][b, t] == (x[b, t] >= x[b, t, own]).sum() - 1


def test_sink_sets() -> None:
    assert measures.first_sink(2, 3).tolist() == [[True, False, False]] * 2
    marked = measures.explicit_sink((0, 2, 7), 1, 4)  # 7 lies past this text
    assert marked.tolist() == [[True, False, True, False]]
    with pytest.raises(ConfigError, match="negative"):
        measures.explicit_sink((-1,), 1, 4)
    received = torch.tensor([[0.31, 0.3, 0.9]])
    assert measures.auto_sink(received, 4).tolist() == [[True, False, True, False]]


# --- acceptance as the tables give it -----------------------------------------------------------


def rounds(*lengths: int, depth: int = 4) -> np.ndarray:
    return np.arange(depth) < np.array(lengths)[:, None]


def test_acceptance_by_its_four_names() -> None:
    """Report 27: four rounds that accept 4, 2, 0 and 1 of four drafts."""
    found = acceptance(rounds(4, 2, 0, 1))
    np.testing.assert_allclose(found.marginal, [0.75, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(found.conditional, [0.75, 2 / 3, 0.5, 1.0])
    assert found.opportunities.tolist() == [4, 3, 2, 1] and found.n_accepted.tolist() == [
        3,
        2,
        1,
        1,
    ]
    assert found.accepted_drafts == 1.75 and found.acceptance_length == 2.75
    assert found.draft_token_rate == 7 / 16
    # What follows the first wrong draft does not count, and no opportunity is n/a, not 0.
    lone = acceptance(np.array([[True, False, True, False]]))
    assert lone.n_accepted.tolist() == [1, 0, 0, 0]
    assert np.isnan(lone.conditional).tolist() == [False, False, True, True]


def test_acceptance_length_pooled_and_by_prompt() -> None:
    """Report 28: one prompt accepts 4, 2, 2 and the other 0."""
    found = acceptance(rounds(4, 2, 2, 0), prompts=["a", "a", "a", "b"])
    assert found.acceptance_length == 3.0
    assert found.acceptance_length_by_prompt == pytest.approx(7 / 3)
