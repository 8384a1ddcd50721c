"""Every intervention against hand arithmetic, and in both engines alike."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import pairs
import pytest
import torch
from torch import Tensor

from driftlab.analysis.interventions import (
    Intervention,
    apply,
    drop_layer,
    from_settings,
    knock_out_sink,
    mask_chain_keys,
    noise,
    pin_norm,
    raise_sink,
    swap_norm,
    window,
)
from driftlab.config import Feedback, FusionNorm
from driftlab.engines.anchors import DepthStep, unroll
from driftlab.errors import ConfigError, ContractError, SiteError
from driftlab.models import drafter as drafter_module
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Captured, attach, capture, points

SIZE, DEPTH = 14, 5
SINK = (0, 3)
EVERY = [
    pin_norm(),
    noise(0.7),
    noise(0.7, "embedding", seed=3),
    knock_out_sink(positions=SINK),
    knock_out_sink("redirect", SINK),
    raise_sink(1.5, SINK),
    mask_chain_keys(),
    window(3),
    window(2, keep=2),
    drop_layer(1),
    drop_layer(1, "mean"),
    drop_layer(1, "shuffle", seed=2),
    swap_norm("concat", "post_norm"),
]


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor]:
    """tokens [2, S] and their captured states; the second text is 3 tokens shorter."""
    tokens = pairs.ids(2, SIZE, seed=5)
    return tokens, pairs.states(pairs.target(), tokens)


def run(
    drafter: Drafter, given: tuple[Tensor, Tensor], mode: Any = "forced", depth: int = DEPTH
) -> list[DepthStep]:
    with torch.inference_mode():
        return list(unroll(drafter, *given, depth=depth, mode=mode))


def seen(
    intervention: Intervention, drafter: Drafter, given: tuple[Tensor, Tensor], globs: Any
) -> Captured:
    """Values under ``intervention``, forced, as later hooks see them."""
    with apply(drafter, [intervention]) as changed, capture(changed, globs) as kept:
        run(changed, given)
    return kept


def rms(x: Tensor) -> Tensor:
    return (x**2).mean(-1).sqrt()


# -- properties of all


@pytest.mark.parametrize("intervention", EVERY, ids=str)
def test_all_anchors_at_once_equal_one_chain_at_a_time(
    intervention: Intervention, given: tuple[Tensor, Tensor]
) -> None:
    """Stepping like a serving engine, prefix in two pieces, gives the logits of the batch."""
    tokens, aux = given
    drafter = pairs.drafter()
    with apply(drafter, [intervention]) as changed, torch.inference_mode():
        together = run(changed, given)
        for anchor in (0, 4, SIZE - DEPTH - 2):
            memory = changed.new_memory()
            for first, end in ((0, anchor // 2), (anchor // 2, anchor + 1)):
                if first == end:
                    continue
                rows = tokens[1:, first + 1 : end + 1]
                fused = changed.fuse(aux[1:, first:end], first=first)
                state = changed.step(rows, fused, memory, depth=1)
            memory.select(memory.anchors[-1:])
            for step in together:
                if step.depth > 1:
                    read = tokens[1:, anchor + step.depth][:, None]
                    state = changed.step(read, state.feedback[:, -1:], memory, depth=step.depth)
                logits = changed.logits(state)[0, -1]
                torch.testing.assert_close(logits, step.logits[1, anchor], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["free", "forced"])
@pytest.mark.parametrize("intervention", EVERY, ids=str)
def test_neither_blocks_nor_batch_matter(
    intervention: Intervention,
    mode: str,
    given: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = pairs.drafter()
    with apply(drafter, [intervention]) as changed:
        whole = run(changed, given, mode)
        monkeypatch.setattr(drafter_module, "SCORE_BUDGET", 200)  # blocks of one to three rows
        blocks = run(changed, given, mode)
        alone = run(changed, (given[0][1:], given[1][1:]), mode)
    for a, b, c in zip(whole, blocks, alone, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.logits[1:], c.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("intervention", EVERY, ids=str)
def test_it_changes_something_and_leaves_nothing(
    intervention: Intervention, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter()
    config, names = drafter.config, list(drafter.state_dict())
    before = run(drafter, given)
    with apply(drafter, [intervention]) as changed:
        during = run(changed, given)
    with pytest.raises(ZeroDivisionError), apply(drafter, [intervention]):
        raise ZeroDivisionError
    after = run(drafter, given)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(before, after, strict=True))
    gap = max(float((a.logits - b.logits).abs().max()) for a, b in zip(before, during, strict=True))
    assert gap > 1e-2
    assert drafter.config is config
    assert list(drafter.state_dict()) == names


@pytest.mark.parametrize("intervention", EVERY, ids=str)
def test_the_record_rebuilds_it(intervention: Intervention) -> None:
    record = intervention.record()
    kind = type(intervention)
    assert record.pop("name") == kind.__name__
    assert kind(**record) == intervention


def test_the_label_names_what_is_not_default() -> None:
    assert str(pin_norm()) == "pin_norm()"
    assert str(noise(0.5)) == "noise(alpha=0.5)"
    assert str(noise(0.5, "embedding", 1)) == "noise(alpha=0.5, path=embedding, seed=1)"
    assert str(swap_norm(feedback="post_norm")) == "swap_norm(feedback=post_norm)"


def test_they_act_in_the_order_given(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    sizes = []
    for order in ([noise(2.0), pin_norm()], [pin_norm(), noise(2.0)]):
        with apply(drafter, order) as changed, capture(changed, "feedback.in") as kept:
            run(changed, given)
        sizes.append(rms(kept["feedback.in", 3]))
        fused = rms(kept["feedback.in", 1])
    torch.testing.assert_close(sizes[0], fused)  # pinned last, to the noisy fused input
    assert float((sizes[1] / fused - 1).abs().min()) > 1e-3  # noisy last


def test_a_drafter_that_never_ran_is_said() -> None:
    with pytest.raises(SiteError, match="never fired"), apply(pairs.drafter(), [pin_norm()]):
        pass


# -- pin and noise


def test_the_pin_keeps_direction_and_takes_the_size_of_the_fused_input(
    given: tuple[Tensor, Tensor],
) -> None:
    drafter = pairs.drafter()
    kept = seen(pin_norm(), drafter, given, ["feedback.in", "fuse.out", "state.pre"])
    wanted = rms(kept["fuse.out", 1])
    torch.testing.assert_close(kept["feedback.in", 1], kept["fuse.out", 1])
    for d in range(2, DEPTH + 1):
        handed, made = kept["feedback.in", d], kept["state.pre", d - 1]
        torch.testing.assert_close(rms(handed), wanted)
        torch.testing.assert_close(
            torch.cosine_similarity(handed, made, dim=-1), torch.ones(2, SIZE - 1)
        )
        assert float((rms(made) / wanted - 1).abs().max()) > 0.1  # else nothing was tested


def test_the_pin_refuses_anchors_that_it_has_not_seen(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    with torch.inference_mode(), apply(drafter, [pin_norm()]):
        memory = drafter.new_memory()
        for first, end in ((0, 5), (5, 9)):
            fused = drafter.fuse(given[1][:, first:end], first=first)
            state = drafter.step(given[0][:, first + 1 : end + 1], fused, memory, depth=1)
        memory.select(torch.tensor([3]))
        with pytest.raises(ContractError, match="anchor 3 before 5"):
            drafter.step(given[0][:, 5:6], state.feedback[:, :1], memory, depth=2)


@pytest.mark.parametrize(
    "path,site,index", [("hidden", "feedback.in", 0), ("embedding", "token.embed", 1)]
)
def test_noise_is_the_formula(
    path: Any, site: str, index: int, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter()
    raw: dict[int, Tensor] = {}
    with (
        attach(drafter, site, lambda value, moment: raw.update({moment.depth: value})),
        apply(drafter, [noise(0.3, path, seed=7)]),
        capture(drafter, site) as kept,
    ):
        run(drafter, given)
    for depth, anchor in ((1, 0), (1, 6), (4, 6)):
        eps = np.random.default_rng([7, index, depth, anchor]).standard_normal(
            pairs.WIDTH, np.float32
        )
        x = raw[depth][:, anchor].double().numpy()
        size = np.sqrt((x**2).mean(-1, keepdims=True))
        np.testing.assert_allclose(
            kept[site, depth][:, anchor].numpy(), x + 0.3 * size * eps, rtol=1e-5, atol=1e-6
        )


def test_noise_of_two_seeds_depths_and_paths_is_independent(given: tuple[Tensor, Tensor]) -> None:
    ones = torch.ones(1, 1, 512)
    drawn = []
    drafter = pairs.drafter()
    for spec in (noise(1.0, seed=0), noise(1.0, seed=1), noise(1.0, "embedding", seed=0)):
        site = "feedback.in" if spec.path == "hidden" else "token.embed"
        with spec.hook(drafter):
            point = points(drafter)[site]
            for depth in (1, 2):
                drafter._clock.depth = depth
                drafter._clock.rows, drafter._clock.anchors = slice(0, 1), torch.tensor([4])
                drawn.append((point(ones) - ones)[0, 0])
    correlation = np.corrcoef(torch.stack(drawn).numpy())
    assert np.abs(correlation - np.eye(len(drawn))).max() < 0.2  # 4.5 standard errors
    assert torch.stack(drawn).std() == pytest.approx(1, abs=0.1)


def test_no_noise_is_no_change(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    plain = run(drafter, given)
    with apply(drafter, [noise(0.0)]):
        same = run(drafter, given)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(plain, same, strict=True))


# -- attention


def patterns(
    intervention: Intervention, given: tuple[Tensor, Tensor]
) -> tuple[dict[int, Tensor], Captured]:
    """Pattern by depth without and with ``intervention``, from the same scores at that depth."""
    drafter = pairs.drafter()
    scores: dict[int, Tensor] = {}
    with (
        attach(drafter, "attn.scores", lambda v, m: scores.update({m.depth: v.clone()})),
        apply(drafter, [intervention]),
        capture(drafter, "attn.pattern") as kept,
    ):
        run(drafter, given)
    return {d: s.softmax(-1) for d, s in scores.items()}, kept


def is_sink(depth: int, keys: int) -> Tensor:
    """[T, K] by hand: SINK's columns, but not the row's own key at depth 1."""
    marked = torch.zeros(SIZE - 1, keys, dtype=torch.bool)
    for row in range(SIZE - 1):
        for p in SINK:
            marked[row, p] = not (depth == 1 and row == p)
    return marked


def test_removing_the_sink_leaves_the_rest_in_proportion(given: tuple[Tensor, Tensor]) -> None:
    before, after = patterns(knock_out_sink(positions=SINK), given)
    for d, old in before.items():
        sink = is_sink(d, old.shape[-1])
        left = old.masked_fill(sink, 0)
        torch.testing.assert_close(
            after["attn.pattern", d], left / left.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
        )


def test_redirecting_gives_the_sink_to_the_own_key(given: tuple[Tensor, Tensor]) -> None:
    before, after = patterns(knock_out_sink("redirect", SINK), given)
    for d, old in before.items():
        wanted = old.clone()
        for row in range(SIZE - 1):
            own = row if d == 1 else old.shape[-1] - 1
            for p in SINK:
                if p != own or d > 1:
                    wanted[:, :, row, own] += old[:, :, row, p]
                    wanted[:, :, row, p] = 0
        torch.testing.assert_close(after["attn.pattern", d], wanted, rtol=1e-4, atol=1e-6)


def test_raising_the_sink_multiplies_its_odds(given: tuple[Tensor, Tensor]) -> None:
    before, after = patterns(raise_sink(1.5, SINK), given)
    for d, old in before.items():
        wanted = old * torch.where(is_sink(d, old.shape[-1]), math.exp(1.5), 1.0)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(after["attn.pattern", d], wanted, rtol=1e-4, atol=1e-6)


def test_masked_chain_keys_leave_prefix_and_self(given: tuple[Tensor, Tensor]) -> None:
    before, after = patterns(mask_chain_keys(), given)
    for d, old in before.items():
        left = old.clone()
        if d > 2:
            left[..., -(d - 1) : -1] = 0
        torch.testing.assert_close(
            after["attn.pattern", d], left / left.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
        )
        assert bool((after["attn.pattern", d][..., -1 if d > 1 else 0] > 0).all())


# -- captured layers and norms


@pytest.mark.parametrize("how", ["zero", "mean", "shuffle"])
@pytest.mark.parametrize("fusion", list(FusionNorm)[:3])
def test_a_dropped_layer_by_hand(how: Any, fusion: Any, given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter(fusion_norm=fusion)
    with torch.inference_mode(), capture(drafter, "fuse.normed.*") as plain:
        drafter.fuse(given[1])
        with apply(drafter, [drop_layer(2, how, seed=4)]) as changed, capture(changed, "*") as kept:
            list(unroll(changed, *given, depth=2, mode="forced"))
            fused = changed.fuse(given[1])
    states = [plain["fuse.normed.0", 1], plain["fuse.normed.1", 1]]
    old = pairs.states(pairs.target(), given[0])  # the third boundary, normed by hand
    chunk = old[..., 2 * pairs.WIDTH :].double()
    if fusion is FusionNorm.per_layer:
        chunk = chunk / (chunk.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        chunk = chunk * drafter.get_parameter("fc_norm.2.weight").double()
    elif fusion is FusionNorm.concat:
        whole = old.double()
        scale = (whole.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        gains = drafter.input_norm.weight.double()
        chunk = (whole / scale * gains)[..., 2 * pairs.WIDTH :]
    if how == "zero":
        new = torch.zeros_like(chunk)
    elif how == "mean":
        new = torch.stack([chunk[:, : t + 1].mean(1) for t in range(SIZE)], dim=1)
    else:
        drawn = [int(np.random.default_rng([4, t]).integers(t + 1)) for t in range(SIZE)]
        new = chunk[:, drawn]
    wanted = torch.cat([*states, new.float()], dim=-1) @ drafter.fc.weight.T
    torch.testing.assert_close(fused, wanted, rtol=1e-4, atol=1e-5)
    assert kept["fuse.normed.2", 1].shape == given[1][..., : pairs.WIDTH].shape


def test_dropping_every_layer_to_nothing_leaves_no_input(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    with apply(drafter, [drop_layer(i) for i in range(3)]), torch.inference_mode():
        assert not drafter.fuse(given[1]).any()
        run(drafter, given)


@pytest.mark.parametrize("trained,wanted", list(itertools.permutations(list(FusionNorm)[:3], 2)))
def test_a_swapped_norm_is_a_drafter_with_gains_of_one(
    trained: Any, wanted: Any, given: tuple[Tensor, Tensor]
) -> None:
    drafter = pairs.drafter(fusion_norm=trained)
    by_hand = Drafter(
        drafter.config.model_copy(update={"fusion_norm": wanted, "feedback": Feedback.post_norm}),
        drafter.draft_to_target,
    )
    missing, extra = by_hand.load_state_dict(drafter.state_dict(), strict=False)
    assert all("norm" in name for name in (*missing, *extra))
    with apply(drafter, [swap_norm(wanted, "post_norm")]) as changed:
        got = run(changed, given)
    assert changed.config == by_hand.config
    for a, b in zip(got, run(by_hand, given), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=0)


def test_a_swap_shares_the_weights_and_keeps_the_hooks(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    fired = []
    with (
        attach(drafter, "state.post", lambda value, moment: fired.append(moment.depth)),
        apply(drafter, [swap_norm(feedback="post_norm")]) as changed,
    ):
        run(changed, given, depth=2)
    assert fired == [1, 2]
    assert changed is not drafter
    assert changed.fc.weight is drafter.fc.weight
    assert changed.lm_head.weight is drafter.lm_head.weight
    assert changed.draft_to_target is drafter.draft_to_target


# -- refusals


@pytest.mark.parametrize(
    "make,says",
    [
        (lambda: noise(-1.0), "alpha"),
        (lambda: noise(float("nan")), "alpha"),
        (lambda: noise(1.0, cast("Any", "text")), "hidden, embedding"),
        (lambda: noise(1.0, seed=-1), "seed"),
        (lambda: noise(float("inf")), "finite"),
        (lambda: noise(True), "alpha"),
        (lambda: noise(1.0, seed=cast("Any", 1.5)), "seed"),
        (lambda: window(cast("Any", 2.5)), "whole number"),
        (lambda: window(2, cast("Any", True)), "whole number"),
        (lambda: drop_layer(True), "layer"),
        (lambda: drop_layer(-1), "layer"),
        (lambda: knock_out_sink(positions=(0, 0)), "twice"),
        (lambda: knock_out_sink(positions=cast("Any", 0)), "positions"),
        (lambda: raise_sink(cast("Any", "1")), "delta"),
        (lambda: knock_out_sink(cast("Any", "drop")), "remove, redirect"),
        (lambda: knock_out_sink(positions=()), "positions"),
        (lambda: raise_sink(float("inf")), "finite"),
        (lambda: raise_sink(1.0, (-1,)), "position"),
        (lambda: drop_layer(0, cast("Any", "half")), "zero, mean, shuffle"),
        (lambda: swap_norm(), "changes nothing"),
        (lambda: swap_norm("rms"), "none, per_layer"),
    ],
)
def test_impossible_parameters(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "intervention,says",
    [
        (drop_layer(3), "3 captured states"),
        (swap_norm("none"), "none already"),
        (swap_norm(feedback="pre_norm"), "pre_norm already"),
    ],
)
def test_what_does_not_fit_the_drafter(intervention: Intervention, says: str) -> None:
    with pytest.raises(ConfigError, match=says), apply(pairs.drafter(), [intervention]):
        pass


# -- windows, and interventions by name


@pytest.mark.parametrize("keep", [0, 2])
def test_a_window_counts_back_from_the_drafted_position(
    given: tuple[Tensor, Tensor], keep: int
) -> None:
    size = 3
    kept = seen(window(size, keep), pairs.drafter(), given, "attn.pattern")
    for (_, depth), pattern in kept.items():
        shown = pattern[0].sum(dim=0).numpy() > 0  # [T, K]
        for anchor in range(SIZE - 1):
            own = anchor + depth - 1
            position = [*range(SIZE - 1), *(anchor + e - 1 for e in range(2, depth + 1))]
            for column, at in enumerate(position):
                real = column <= anchor or column >= SIZE - 1
                inside = own - size < at <= own or (column < SIZE - 1 and at < keep)
                assert shown[anchor, column] == (real and inside), (depth, anchor, column)


def test_a_wide_window_changes_nothing(given: tuple[Tensor, Tensor]) -> None:
    drafter = pairs.drafter()
    plain = run(drafter, given)
    with apply(drafter, [window(100)]) as changed:
        for a, b in zip(plain, run(changed, given), strict=True):
            assert torch.equal(a.logits, b.logits)


@pytest.mark.parametrize("made", EVERY, ids=str)
def test_a_record_gives_the_intervention_back(made: Intervention) -> None:
    record = {n: v for n, v in made.record().items() if v is not None}
    kind = record.pop("name")
    assert from_settings({"kind": kind, **record}) == made


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "unknown intervention"),
        ({"kind": "noise"}, "no alpha"),
        ({"kind": "pin_norm", "alpha": 1}, "unknown or missing .*alpha"),
        ({"kind": "noise", "alpha": "much"}, "alpha"),
        ({"kind": "window", "size": 0}, "size of a window"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_settings(settings)


@pytest.mark.parametrize(
    ("made", "lengths", "depth", "said"),  # of a drafter with full attention
    [
        (knock_out_sink(positions=(0, 20)), (20, 30), 4, "20 tokens has no position 20"),
        (knock_out_sink(positions=(0, 19)), (20, 30), 4, None),
        (raise_sink(0.0), (20,), 4, "delta is 0"),
        (noise(0.0), (20,), 4, "alpha is 0"),
        (mask_chain_keys(), (20,), 2, "no such keys"),
        (mask_chain_keys(), (20,), 3, None),
        (pin_norm(), (20,), 1, "no state"),
        (swap_norm(feedback="post_norm"), (20,), 1, "no state"),
        (swap_norm("per_layer"), (20,), 1, None),
    ],
)
def test_a_change_that_changes_nothing_says_why(
    made: Intervention, lengths: tuple[int, ...], depth: int, said: str | None
) -> None:
    found = made.idle(pairs.config(), [(4, length) for length in lengths], depth)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("keep", [0, 2, 4])
def test_a_window_is_idle_where_its_mask_hides_nothing(
    given: tuple[Tensor, Tensor], keep: int
) -> None:
    # Anchors of a text of SIZE tokens that have `depth` true tokens after the newest one.
    seen_by_size = {}
    for size in range(1, SIZE + 2):
        hidden = 0
        for anchor in range(SIZE - 1 - DEPTH):
            for depth in range(1, DEPTH + 1):
                own = anchor + depth - 1
                hidden += sum(keep <= key <= own - size for key in range(anchor + 1))
                hidden += sum(key <= own - size for key in range(anchor + 1, own + 1))
        seen_by_size[size] = hidden
    spans = [(2, 5), (2, SIZE)]
    idle = {
        size: window(size, keep).idle(pairs.config(), spans, DEPTH) is not None
        for size in seen_by_size
    }
    assert idle == {size: hidden == 0 for size, hidden in seen_by_size.items()}


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("windows", [(1,), (2,), (4,), (1, 1), (2, 4), (4, None)])
def test_what_the_drafters_own_window_hides_already_is_idle(
    given: tuple[Tensor, Tensor], windows: tuple[int | None, ...], moves: bool
) -> None:
    """Idle is what leaves every number of the drafter as it is, and nothing else."""
    config = pairs.config(windows=windows, num_layers=len(windows), window_moves=moves)
    drafter = pairs.drafter(windows=windows, num_layers=len(windows), window_moves=moves)
    first, depth = 4, 3
    anchors = torch.arange(first, SIZE - 1 - depth)

    def logits(*made: Intervention) -> Tensor:
        with torch.inference_mode(), apply(drafter, made) as changed:
            steps = unroll(changed, *given, depth=depth, mode="forced", anchors=anchors)
            return torch.stack([step.logits for step in steps])

    plain = logits()
    changes: list[Intervention] = [window(size) for size in range(1, 9)]
    changes += [raise_sink(2.0, (position,)) for position in range(first)]
    changes += [knock_out_sink("remove", (0, position)) for position in range(1, first)]
    changes.append(mask_chain_keys())
    for made in changes:
        idle = made.idle(config, [(first, SIZE)] * 2, depth)
        assert (idle is not None) == torch.equal(logits(made), plain), (made, idle)
