"""Attribution against hand arithmetic: sums, coalitions, completeness, and the engine's chains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pairs
import pytest
import torch
from scipy.spatial.distance import pdist
from scipy.stats import pearsonr
from torch import Tensor

from driftlab.analysis.attribution import (
    Effects,
    attention_effects,
    effective_rank,
    geometry,
    integrated_gradients,
    logit_lens,
    shapley,
    split,
    state_geometry,
)
from driftlab.analysis.interventions import apply, mask_chain_keys, noise, pin_norm
from driftlab.engines.anchors import DepthStep, unroll
from driftlab.errors import ConfigError, ContractError, DataError
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import attach

SIZE, DEPTH = 12, 3
ANCHORS = SIZE - 1 - DEPTH


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor]:
    """tokens [S], half of them in the draft vocabulary, and captured states [S, A*Ht]."""
    known = pairs.drafter().draft_to_target
    tokens = pairs.ids(1, SIZE, seed=9)
    tokens[0, ::2] = known[: SIZE // 2]
    return tokens[0], pairs.states(pairs.target(), tokens)[0]


def steps(drafter: Drafter, given: tuple[Tensor, Tensor], mode: Any = "forced") -> list[DepthStep]:
    """The engine's chains of the measured anchors."""
    tokens, aux = given
    with torch.no_grad():
        anchors = torch.arange(ANCHORS)
        return list(
            unroll(drafter, tokens[None], aux[None], depth=DEPTH, mode=mode, anchors=anchors)
        )


# -- split


def test_the_split_is_exact(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter(fusion_norm="per_layer", fc_bias=True)
    found = split(drafter, given[1])
    blocks = drafter.fc.weight.split(pairs.WIDTH, dim=1)
    for i, chunk in enumerate(given[1].split(pairs.WIDTH, dim=-1)):
        normed = chunk / (chunk.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        part = (normed * drafter.fc_norm[i].weight) @ blocks[i].T
        torch.testing.assert_close(found.parts[i], part, rtol=1e-4, atol=1e-5)
    whole = found.parts.sum(0) + drafter.fc.bias
    torch.testing.assert_close(found.fused, whole, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(found.fused, drafter.fuse(given[1][None])[0])


def test_shares_sum_to_one_and_cosines_are_cosines(given: tuple[Tensor, Tensor]) -> None:
    found = split(pairs.drafter(), given[1])
    torch.testing.assert_close(found.share.sum(0), torch.ones(SIZE), rtol=1e-4, atol=1e-4)
    part, g = found.parts[1, 4].numpy(), found.fused[4].numpy()
    assert float(found.share[1, 4]) == pytest.approx(part @ g / (g @ g), rel=1e-4)
    wanted = part @ g / np.linalg.norm(part) / np.linalg.norm(g)
    assert float(found.cosine[1, 4]) == pytest.approx(wanted, rel=1e-4)


def test_nothing_to_split(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter(boundaries=())
    with pytest.raises(ContractError, match="fuses nothing"):
        split(drafter, given[1][:, : pairs.WIDTH])


# -- Shapley


def logprobs(drafter: Drafter, given: tuple[Tensor, Tensor], fused: Tensor) -> np.ndarray:
    """[T, D] from the engine, its fused input replaced through a hook."""
    with attach(drafter, "fuse.out", lambda value, moment: fused[None]):
        found = steps(drafter, given)
    out = []
    for step in found:
        index = drafter.target_to_draft[step.truth[0]].clamp(min=0)
        out.append(step.logits[0].log_softmax(-1).gather(-1, index[:, None])[:, 0])
    return torch.stack(out, dim=1).double().numpy()


def by_hand(count: int, worth: Callable[[frozenset[int]], np.ndarray]) -> np.ndarray:
    """The textbook sum over coalitions S without i of |S|! (n-|S|-1)! / n! (v(S+i) - v(S))."""
    values = []
    for i in range(count):
        others = [j for j in range(count) if j != i]
        terms = []
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for chosen in itertools.combinations(others, size):
                gain = worth(frozenset({*chosen, i})) - worth(frozenset(chosen))
                terms.append(weight * gain)
        values.append(sum(terms))
    return np.stack(values)


@pytest.mark.parametrize("bias", [False, True])
def test_shapley_is_the_textbook_sum_at_every_depth(
    bias: bool, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter(fusion_norm="per_layer", feedback="post_norm", fc_bias=bias)
    found = shapley(drafter, *given, depth=DEPTH)
    parts = split(drafter, given[1][:-1]).parts
    offset = drafter.fc.bias if bias else torch.zeros(pairs.WIDTH)
    cache: dict[frozenset[int], np.ndarray] = {}

    def worth(present: frozenset[int]) -> np.ndarray:
        if present not in cache:
            chosen = [
                parts[i] if i in present else parts[i].mean(0).expand_as(parts[i]) for i in range(3)
            ]
            cache[present] = logprobs(drafter, given, torch.stack(chosen).sum(0) + offset)
        return cache[present]

    wanted = by_hand(3, worth)
    np.testing.assert_allclose(found.values.numpy(), wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        found.present.numpy(), worth(frozenset({0, 1, 2})), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(found.absent.numpy(), worth(frozenset()), rtol=1e-4, atol=1e-4)
    assert found.values.shape == (3, ANCHORS, DEPTH)
    assert found.passes == 8
    assert 0 <= found.gap < 1e-4


def test_shapley_means_leave_out_what_a_draft_cannot_name(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    found = shapley(drafter, *given, depth=DEPTH)
    back = drafter.target_to_draft
    for t, d in itertools.product(range(ANCHORS), range(DEPTH)):
        assert bool(found.known[t, d]) == bool(back[given[0][t + 2 + d]] >= 0)
    assert 0 < int(found.known.sum()) < found.known.numel()
    for d in range(DEPTH):
        wanted = found.values[:, found.known[:, d], d].mean(1)
        torch.testing.assert_close(found.mean()[:, d], wanted)


def test_shapley_without_a_known_truth_is_nan_and_not_zero(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    absent = int((drafter.target_to_draft < 0).nonzero()[0, 0])
    found = shapley(drafter, torch.full((SIZE,), absent), given[1], anchors=torch.tensor([2]))
    assert bool(found.mean().isnan().all())
    assert found.gap == 0


def test_a_layer_that_writes_nothing_is_worth_nothing(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    with torch.no_grad():
        drafter.fc.weight[:, : pairs.WIDTH] = 0
    values = shapley(drafter, *given).values
    assert float(values[0].abs().max()) < 1e-5
    assert float(values[1].abs().max()) > 1e-2


# -- integrated gradients


@pytest.mark.parametrize("variant", [{}, {"feedback": "post_norm", "residual": "normed"}], ids=str)
@pytest.mark.parametrize("mode", ["free", "forced"])
def test_gradients_add_up_and_start_from_the_engine(
    variant: dict[str, Any], mode: Any, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter(**variant)
    anchors = torch.tensor([5, 0])
    found = integrated_gradients(drafter, *given, depth=DEPTH, anchors=anchors, mode=mode)
    assert list(zip(found["anchor"], found["depth"], strict=True)) == [
        (a, d) for a in (0, 5) for d in (1, 2, 3)
    ]
    engine = steps(drafter, given, mode)
    for row in found.itertuples():
        step = engine[int(str(row.depth)) - 1]
        anchor = int(str(row.anchor))
        assert row.token == int(step.draft[0, anchor])
        assert row.logit == pytest.approx(float(step.logits[0, anchor].max()), abs=1e-4)
    total = found["fused"] + found["embedding"] + found["feedback"]
    np.testing.assert_allclose(total - found["difference"], found["gap"], atol=1e-5)
    assert found["gap"].abs().max() < 0.05 * found["difference"].abs().max()
    assert (found.loc[found["depth"] == 1, "feedback"] == 0).all()
    assert (found.loc[found["depth"] > 1, "feedback"].abs() > 1e-4).all()


def test_the_gap_falls_with_steps(given: tuple[Tensor, Tensor]) -> None:
    drafter, anchors = pairs.drafter(), torch.tensor([4])
    gaps = [
        integrated_gradients(drafter, *given, depth=2, anchors=anchors, steps=n)["gap"].abs().max()
        for n in (2, 40)
    ]
    assert gaps[1] < gaps[0] / 3


def test_a_linear_path_is_attributed_exactly(given: tuple[Tensor, Tensor]) -> None:
    """With attention and MLP silent, and no final norm, the logit is linear in what is fed in."""
    drafter = pairs.drafter(logits_from_raw=True)
    layer: Any = drafter.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    found = integrated_gradients(
        drafter, *given, depth=2, anchors=torch.tensor([3]), mode="forced", steps=2
    )
    with torch.no_grad():
        g = drafter.fuse(given[1][None, :-1])[0]
        row = drafter.lm_head.weight[drafter.target_to_draft[found["token"][0]]]
    assert found["fused"][0] == pytest.approx(float((g[3] - g.mean(0)) @ row), rel=1e-3)
    assert found["embedding"].abs().max() < 1e-5
    # Depth 2 hands the same state on, so all of it is feedback.
    mean = g[: SIZE - 3].mean(0)
    assert found["feedback"][1] == pytest.approx(float((g[3] - mean) @ row), rel=1e-3)
    assert abs(found["fused"][1]) < 1e-5


# -- lens and geometry


@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
def test_the_lens_reads_the_last_state_as_the_drafter_does(
    feedback: str, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter(feedback=feedback)
    found = logit_lens(drafter, *given, depth=DEPTH)
    assert len(found) == ANCHORS * DEPTH * 3
    before: list[int] = []
    for step in steps(drafter, given):
        part = found[found["depth"] == step.depth]
        last = part[part["site"] == "state.pre"]
        assert last["token"].tolist() == step.draft[0].tolist()
        assert last["says_draft"].all()
        index = drafter.target_to_draft[step.truth[0]]
        log_q = step.logits[0].log_softmax(-1).gather(-1, index.clamp(min=0)[:, None])[:, 0]
        wanted = torch.where(index >= 0, log_q, float("nan")).numpy()
        np.testing.assert_allclose(last["logprob"], wanted, rtol=1e-4, atol=1e-5)
        if step.depth > 1:
            # What is fed back says what the depth before drafted, in either feedback.
            fed = part[part["site"] == "feedback.in"]
            assert fed["token"].tolist() == before
        before = step.draft[0].tolist()


def test_geometry_against_numpy(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    last = torch.randn(SIZE, pairs.WIDTH, generator=torch.Generator().manual_seed(1))
    found = state_geometry(drafter, *given, depth=DEPTH, last=last)
    engine = steps(drafter, given)
    states = [step.state.pre[0].double().numpy() for step in engine]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(
            np.mean((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))
        )

    assert np.isnan(found["cosine_previous"][0])
    for d in (1, 2):
        wanted = cosine(states[d], states[d - 1])
        assert found["cosine_previous"][d] == pytest.approx(wanted, abs=1e-5)
    post = engine[1].state.post[0].double().numpy()
    wanted = cosine(post, last[2 : 2 + ANCHORS].double().numpy())  # position t + 2
    assert found["cosine_target"][1] == pytest.approx(wanted, abs=1e-5)
    assert found["effective_rank"][0] == pytest.approx(effective_rank(engine[0].state.pre[0]))
    assert state_geometry(drafter, *given, depth=1)["cosine_target"].isna().all()


def test_effective_rank_of_known_matrices() -> None:
    assert effective_rank(torch.eye(7)) == pytest.approx(7, rel=1e-5)
    assert effective_rank(torch.ones(5, 3)) == pytest.approx(1, abs=1e-3)
    two = torch.diag(torch.tensor([3.0, 1.0]))  # entropy of (3/4, 1/4)
    assert effective_rank(two) == pytest.approx(math.exp(2 * math.log(2) - 0.75 * math.log(3)))


# -- attention


def hidden_by_hand(
    drafter: Drafter, given: tuple[Tensor, Tensor], hide: Callable[[Tensor, Any], Tensor], **at: Any
) -> np.ndarray:
    """[T, D] log-probabilities of the engine's chains with some keys hidden by a plain hook."""
    with attach(drafter, "attn.scores", hide, **at):
        found = steps(drafter, given)
    out = []
    for step in found:
        index = drafter.target_to_draft[step.truth[0]].clamp(min=0)
        out.append(step.logits[0].log_softmax(-1).gather(-1, index[:, None])[:, 0])
    return torch.stack(out, dim=1).double().numpy()


PROMPT_LEN = 5


def effects(drafter: Drafter, given: tuple[Tensor, Tensor]) -> Effects:
    return attention_effects(
        drafter, *given, depth=DEPTH, sink=torch.arange(SIZE) < 1, prompt_len=PROMPT_LEN
    )


REGION_KEYS = {"sink": (0, 1), "prompt_mass": (1, PROMPT_LEN), "generated": (PROMPT_LEN, SIZE)}


@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
def test_hidden_keys_cost_what_the_engine_says(feedback: str, given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter(feedback=feedback)
    found = effects(drafter, given)
    plain = hidden_by_hand(drafter, given, lambda scores, moment: scores)
    np.testing.assert_allclose(found.present.numpy(), plain, rtol=1e-4, atol=1e-4)
    for i, (first, end) in enumerate(REGION_KEYS.values()):

        def hide(scores: Tensor, moment: Any, first: int = first, end: int = end) -> Tensor:
            changed = scores.clone()
            for row, anchor in enumerate(moment.anchors.tolist()):
                for key in range(first, min(end, anchor + 1)):
                    if moment.depth > 1 or key != anchor:  # a query keeps its own key
                        changed[:, :, row, key] = float("-inf")
            return changed

        everywhere = hidden_by_hand(drafter, given, hide)
        np.testing.assert_allclose(found.chain[i].numpy(), plain - everywhere, rtol=1e-3, atol=2e-4)
        for d in range(1, DEPTH + 1):
            once = hidden_by_hand(drafter, given, hide, depths=[d])
            wanted = (plain - once)[:, d - 1]
            np.testing.assert_allclose(found.direct[i, :, d - 1].numpy(), wanted, atol=2e-4)
    assert float((found.direct[:3, :, 1:] - found.chain[:3, :, 1:]).abs().max()) > 1e-3


def test_hiding_the_chains_keys_is_the_intervention(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    found = effects(drafter, given)
    plain = logprobs(drafter, given, drafter.fuse(given[1][None, :-1])[0])
    with apply(drafter, [mask_chain_keys()]):
        masked = logprobs(drafter, given, drafter.fuse(given[1][None, :-1])[0])
    np.testing.assert_allclose(found.chain[3].numpy(), plain - masked, rtol=1e-3, atol=2e-4)
    assert float(found.direct[3, :, :2].abs().max()) == 0  # no drafted key but the query's own
    assert float(found.direct[3, :, 2].abs().max()) > 1e-3


def test_masses_are_the_recorders_and_untouched_by_hiding(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    found = effects(drafter, given)
    seen: dict[int, Tensor] = {}
    with attach(drafter, "attn.pattern", lambda p, m: seen.__setitem__(m.depth, p.clone())):
        steps(drafter, given)
    for d, pattern in seen.items():
        row = pattern[0, :, 4].mean(0)  # anchor 4, the prompt's last
        split_at = len(row) - (d - 1)
        own = float(row[4] if d == 1 else row[-1])
        generated = float(row[PROMPT_LEN:split_at].sum())
        assert float(found.mass[0, 4, d - 1]) == pytest.approx(float(row[0]), abs=1e-5)
        prompt = float(row[1:PROMPT_LEN].sum()) - (own if d == 1 else 0)
        assert float(found.mass[1, 4, d - 1]) == pytest.approx(prompt, abs=1e-5)
        assert float(found.mass[2, 4, d - 1]) == pytest.approx(generated, abs=1e-5)
        assert float(found.mass[4, 4, d - 1]) == pytest.approx(own, abs=1e-5)
    assert torch.allclose(found.mass.sum(0), torch.ones(ANCHORS, DEPTH), atol=1e-5)


def test_a_region_that_nobody_attends_to_has_no_effect(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()

    def away(scores: Tensor, moment: Any) -> Tensor:
        changed = scores.clone()
        for row, anchor in enumerate(moment.anchors.tolist()):
            if anchor or moment.depth > 1:
                changed[:, :, row, 0] = float("-inf")
        return changed

    with attach(drafter, "attn.scores", away):
        found = effects(drafter, given)
    assert float(found.mass[0, 1:].abs().max()) == 0
    assert float(found.direct[0].abs().max()) < 1e-5
    assert float(found.direct[1].abs().max()) > 1e-3


# -- gradients and states, in parts


def test_more_steps_where_the_sum_is_missed(given: tuple[Tensor, Tensor]) -> None:
    drafter, anchors = pairs.drafter(), torch.tensor([4])
    coarse = integrated_gradients(drafter, *given, depth=2, anchors=anchors, steps=2)
    assert coarse["gap"].abs().max() > 1e-3
    finer = integrated_gradients(drafter, *given, depth=2, anchors=anchors, steps=2, gap=1e-3)
    assert finer["gap"].abs().max() < coarse["gap"].abs().max() / 2


def test_some_depths_over_a_smaller_background(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    every = torch.arange(ANCHORS)
    whole = integrated_gradients(drafter, *given, depth=DEPTH, anchors=torch.tensor([4]))
    part = integrated_gradients(
        drafter, *given, depth=DEPTH, anchors=torch.tensor([4]), depths=[1, 3], background=every
    )
    assert part["depth"].tolist() == [1, 3]
    kept = whole[whole["depth"] != 2].reset_index(drop=True)
    np.testing.assert_allclose(part["feedback"], kept["feedback"], atol=1e-5)
    few = integrated_gradients(
        drafter, *given, depth=DEPTH, anchors=torch.tensor([4]), background=torch.tensor([0, 6])
    )
    states = [step.state.feedback[0] for step in steps(drafter, given)]
    mean = states[1][[0, 4, 6]].mean(0)  # the anchor's own belongs to its background
    with torch.no_grad():
        away = float((states[1][4] - mean).norm())
    assert away > 0 and few["feedback"][2] != pytest.approx(whole["feedback"][2], abs=1e-4)


def test_the_same_token_at_depth_1(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    last = torch.randn(SIZE, pairs.WIDTH, generator=torch.Generator().manual_seed(1))
    found = state_geometry(drafter, *given, depth=DEPTH, last=last)
    tokens, aux = given
    with torch.no_grad():
        (fresh,) = unroll(drafter, tokens[None], aux[None], depth=1, mode="forced")
    received: dict[int, Tensor] = {}
    with attach(drafter, "feedback.in", lambda u, m: received.__setitem__(m.depth, u[0])):
        engine = [step.state.pre[0].numpy() for step in steps(drafter, given)]
    # What a raw residual does not hold already was written.
    written = [states - received[d].numpy() for d, states in enumerate(engine[1:], start=2)]
    with attach(drafter, "feedback.in", lambda u, m: received.__setitem__(m.depth, u[0])):
        next(unroll(drafter, tokens[None], aux[None], depth=1, mode="forced"))
    written = [(fresh.state.pre[0] - received[1]).numpy(), *written]
    for d, states in enumerate(engine, start=1):
        same = fresh.state.pre[0, d - 1 : d - 1 + ANCHORS].numpy()
        cosines = (states * same).sum(-1)
        cosines /= np.linalg.norm(states, axis=-1) * np.linalg.norm(same, axis=-1)
        assert found["cosine_same_token"][d - 1] == pytest.approx(cosines.mean(), abs=1e-5)
        unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
        near = (unit @ unit.T)[np.triu_indices(ANCHORS, 1)]
        assert found["cosine_other"][d - 1] == pytest.approx(near.mean(), abs=1e-5)
        wrote = [written[d - 1][:ANCHORS], written[0][d - 1 : d - 1 + ANCHORS]]
        cosines = (wrote[0] * wrote[1]).sum(-1)
        cosines /= np.linalg.norm(wrote[0], axis=-1) * np.linalg.norm(wrote[1], axis=-1)
        assert found["cosine_write_same_token"][d - 1] == pytest.approx(cosines.mean(), abs=1e-4)
        own = last[d : d + ANCHORS]
        assert found["effective_rank_target"][d - 1] == pytest.approx(effective_rank(own))
    assert found["cosine_same_token"][0] == pytest.approx(1)


def test_geometry_is_scipys_and_blind_to_rotation() -> None:
    rng = torch.Generator().manual_seed(3)
    a, b = torch.randn(9, 6, generator=rng), torch.randn(9, 4, generator=rng)
    distances = [pdist((x - x.mean(0)).numpy(), "cosine") for x in (a, b)]
    assert geometry(a, b) == pytest.approx(pearsonr(*distances).statistic, abs=1e-5)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=rng)).Q
    assert geometry(a, 3 * a @ turn + 2) == pytest.approx(1, abs=1e-5)
    assert math.isnan(geometry(a[:2], b[:2]))


# -- what is in force, and what is refused


def test_interventions_act_here_as_well(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    plain = shapley(drafter, *given, depth=2)
    with apply(drafter, [noise(0.5), pin_norm()]):
        changed = shapley(drafter, *given, depth=2)
        found = integrated_gradients(drafter, *given, depth=2, anchors=torch.tensor([4]))
    assert float((plain.values - changed.values).abs().max()) > 1e-2
    with apply(drafter, [noise(0.5), pin_norm()]):
        logit = steps(drafter, given)[1].logits[0, 4].max()
    assert found["logit"][1] == pytest.approx(float(logit), abs=1e-4)


@pytest.mark.parametrize(
    "change,error,says",
    [
        ({"anchors": torch.tensor([ANCHORS])}, DataError, f"0..{ANCHORS - 1}"),
        ({"anchors": torch.tensor([-1])}, DataError, "anchors need"),
        ({"depth": SIZE}, DataError, "anchors need"),
        ({"depth": 0}, ConfigError, "starts at 1"),
        ({"aux": torch.zeros(3, 96)}, ContractError, "of one text"),
    ],
)
def test_impossible_requests(
    change: dict[str, Any], error: type[Exception], says: str, given: tuple[Tensor, Tensor]
) -> None:
    asked = {"tokens": given[0], "aux": given[1], "depth": DEPTH, **change}
    with pytest.raises(error, match=says):
        shapley(pairs.drafter(), **asked)
