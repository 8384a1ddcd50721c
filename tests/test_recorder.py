"""What is recorded inside the hooks equals what captured values give afterwards."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pairs
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from driftlab.analysis import measures
from driftlab.analysis.interventions import apply, window
from driftlab.analysis.recorder import received_mass
from driftlab.config import MeasureSpec
from driftlab.data.text import Text
from driftlab.engines.anchors import unroll
from driftlab.engines.probe import measurable_anchors, probe, sink_set, target_probabilities
from driftlab.errors import NumericsError
from driftlab.models import drafter as drafter_module
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Captured, capture, points
from driftlab.results.schema import NORMS, REGIONS, SCHEMAS

SPEC = MeasureSpec(depth=3, recent=4)
SITES = ["attn.pattern", "feedback.in", "attn.out", "mlp.out", "state.*", "fuse.*"]


def texts(*shapes: tuple[int, int]) -> list[Text]:
    """Random texts of (length, prompt length)."""
    found = []
    for i, (n, prompt) in enumerate(shapes):
        tokens = pairs.ids(n, seed=i + 20).tolist()
        found.append(pairs.as_text(tokens[:prompt], tokens[prompt:], f"p{i}"))
    return found


def states_of(text: Text) -> Tensor:
    return pairs.states(pairs.target(), torch.tensor([text.tokens]))[0]


def measured(made: Drafter, given: list[Text], spec: MeasureSpec = SPEC, **more: Any) -> list[Any]:
    return probe(made, given, [states_of(t) for t in given], spec, **more)


def frame(one: Any, table: str, mode: str | None = None) -> pd.DataFrame:
    rows = pd.DataFrame(one.tables[table])
    return rows if mode is None else rows[rows["mode"] == mode].reset_index(drop=True)


def alone(made: Drafter, text: Text, mode: Any) -> tuple[Captured, list[Any], Tensor]:
    """Everything captured while this text alone is unrolled over its own anchors."""
    anchors = measurable_anchors(text, SPEC)
    with torch.no_grad(), capture(made, SITES) as at:
        steps = list(
            unroll(
                made,
                torch.tensor([text.tokens]),
                states_of(text)[None],
                depth=SPEC.depth,
                mode=mode,
                anchors=anchors,
            )
        )
    return at, steps, anchors


@pytest.mark.parametrize("mode", ["free", "forced"])
@pytest.mark.parametrize("variant", ["none+pre_norm+raw", "per_layer+post_norm+normed"])
def test_rows_equal_what_captured_values_give(variant: str, mode: str) -> None:
    """Two unequal texts in one batch, each against itself alone (report 35)."""
    made = pairs.drafter(**pairs.VARIANTS[variant])
    given = texts((14, 4), (10, 2))
    for text, one in zip(given, measured(made, given), strict=True):
        at, steps, anchors = alone(made, text, mode)
        rows, heads = frame(one, "steps", mode), frame(one, "heads", mode)
        assert one.n_anchors == len(anchors) and len(rows) == SPEC.depth * len(anchors)
        accepted = np.ones(len(anchors), dtype=bool)
        for step in steps:
            d = step.depth
            ours = rows[rows["depth"] == d]
            assert ours["anchor"].tolist() == anchors.tolist()
            truth = [text.tokens[t + 1 + d] for t in anchors.tolist()]
            assert ours["truth"].tolist() == truth == step.truth[0].tolist()
            assert ours["draft"].tolist() == step.draft[0].tolist()
            correct = np.array(ours["draft"]) == np.array(truth)
            assert ours["correct"].tolist() == correct.tolist()
            accepted &= correct
            kept = accepted.tolist() if mode == "free" else [None] * len(anchors)
            assert ours["accepted"].tolist() == kept
            slow = _slow_attention(at["attn.pattern", d], anchors, d, text)
            by_head = heads[heads["depth"] == d]
            assert by_head["head"].tolist() == [0, 1, 2, 3]
            assert (by_head["n"] == len(anchors)).all()
            for name, values in slow.items():  # [h, T]
                np.testing.assert_allclose(ours[name], values.mean(0), atol=1e-5, err_msg=name)
                np.testing.assert_allclose(by_head[name], values.mean(1), atol=1e-5, err_msg=name)
            sums = ours[list(REGIONS)].to_numpy().sum(axis=1)
            np.testing.assert_allclose(sums, 1.0, atol=1e-5)
            for name, values in _slow_norms(at, step, anchors, d).items():
                np.testing.assert_allclose(ours[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_right_draft_after_a_wrong_one_is_not_accepted(wrong: int) -> None:
    """A random drafter is hardly ever right, so the text is made of its own drafts."""
    made, prompt = pairs.drafter(), pairs.ids(8).tolist()
    blank = pairs.as_text(prompt, [5] * (1 + SPEC.depth))
    (one,) = measured(made, [blank])
    drafts = frame(one, "steps", "free").sort_values("depth")["draft"].tolist()
    assert len(drafts) == SPEC.depth > wrong + 1, "one anchor, and a depth after the wrong one"
    drafts[wrong] = (drafts[wrong] + 1) % pairs.VOCAB
    (one,) = measured(made, [pairs.as_text(prompt, [5, *drafts])])
    rows = frame(one, "steps", "free").sort_values("depth")
    assert rows["correct"].tolist() == [d != wrong for d in range(SPEC.depth)]
    assert rows["accepted"].tolist() == [d < wrong for d in range(SPEC.depth)]


def _slow_attention(
    pattern: Tensor, anchors: Tensor, depth: int, text: Text
) -> dict[str, np.ndarray]:
    """Each measure of each head and anchor, key by key; the sink is the first position."""
    size = len(text.tokens) - 1
    rows = anchors.tolist() if depth == 1 else range(len(anchors))  # depth 1 runs every row
    names = [*REGIONS, "recent", "entropy", "sink_rate"]
    found = {name: np.zeros((4, len(anchors))) for name in names}
    for h in range(4):
        for i, (row, t) in enumerate(zip(rows, anchors.tolist(), strict=True)):
            weights = pattern[0, h, row].double().numpy()
            seen = [*range(t + 1), *range(size, size + depth - 1)]
            for key in seen:
                own = key == (t if depth == 1 else size + depth - 2)
                if own:
                    name = "self_mass"
                elif key >= size:
                    name = "draft_mass"
                elif key == 0:
                    name = "sink"
                else:
                    name = "prompt_mass" if key < text.prompt_len else "generated"
                found[name][h, i] += weights[key]
            found["recent"][h, i] = weights[seen[-SPEC.recent :]].sum()
            positive = weights[weights > 0]
            found["entropy"][h, i] = -(positive * np.log(positive)).sum()
            found["sink_rate"][h, i] = found["sink"][h, i] > 0.3
    return found


def _slow_norms(at: Captured, step: Any, anchors: Tensor, depth: int) -> dict[str, np.ndarray]:
    def rms(x: Tensor) -> np.ndarray:
        chosen = x[0] if x.shape[1] == len(anchors) else x[0, anchors]
        return np.sqrt((chosen.double().numpy() ** 2).mean(-1))

    fed = step.state.feedback
    found = {
        "rms_input": rms(at["feedback.in", depth]),
        "rms_attn_out": rms(at["attn.out", depth]),
        "rms_mlp_out": rms(at["mlp.out", depth]),
        "rms_state_pre": rms(at["state.pre", depth]),
        "rms_state_post": rms(at["state.post", depth]),
        "rms_feedback": rms(fed),
    }
    root = np.sqrt(32)
    found |= {f"l2_{n}": found[f"rms_{n}"] * root for n in ("state_pre", "state_post", "feedback")}
    assert set(found) == set(NORMS)
    return found


@pytest.mark.parametrize("feedback", ["pre_norm", "post_norm"])
def test_what_is_handed_on_is_what_the_next_depth_receives(feedback: str) -> None:
    """Also at depth 1, where only some anchors are drafted from."""
    (one,) = measured(pairs.drafter(feedback=feedback), texts((14, 4)))
    for mode in ("free", "forced"):
        rows = frame(one, "steps", mode)
        for d in range(1, SPEC.depth):
            handed = rows[rows["depth"] == d]["rms_feedback"].to_numpy()
            received = rows[rows["depth"] == d + 1]["rms_input"].to_numpy()
            np.testing.assert_allclose(handed, received, rtol=1e-6)


@pytest.mark.parametrize("fusion", ["none", "per_layer", "concat"])
def test_the_fused_input_s_rows(fusion: str) -> None:
    made = pairs.drafter(fusion_norm=fusion)
    given = texts((14, 4), (10, 2))
    for text, one in zip(given, measured(made, given), strict=True):
        at, _, anchors = alone(made, text, "free")
        rows = frame(one, "fused")
        assert rows["boundary"].tolist() == [1, 2, 3] and rows["layer"].tolist() == [0, 1, 2]
        assert (rows["n"] == len(anchors)).all()
        whole = at["fuse.out", 1][0, anchors].double()
        for i in range(3):
            raw = at[f"fuse.in.{i}", 1][0, anchors].double()
            normed = at[f"fuse.normed.{i}", 1][0, anchors].double()
            part = at[f"fuse.part.{i}", 1][0, anchors].double()
            wanted = {
                "rms_in": raw.pow(2).mean(-1).sqrt(),
                "l2_in": raw.norm(dim=-1),
                "rms_normed": normed.pow(2).mean(-1).sqrt(),
                "rms_part": part.pow(2).mean(-1).sqrt(),
                "share": (part * whole).sum(-1) / (whole * whole).sum(-1),
                "cosine": (part * whole).sum(-1) / part.norm(dim=-1) / whole.norm(dim=-1),
            }
            for name, values in wanted.items():
                assert rows[name][i] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5)
        assert rows["share"].sum() == pytest.approx(1.0, abs=1e-4)


def test_the_truth_s_scores_and_the_total_variation() -> None:
    made, (text,) = pairs.drafter(), texts((12, 3))
    of = pairs.target()
    out = of.forward(torch.tensor([text.tokens]), torch.tensor([12]), ())
    chances = target_probabilities(of, out.last[0], made.draft_to_target, rows=5)
    assert out.logits is not None
    p = out.logits[0].double().softmax(-1).numpy()
    np.testing.assert_allclose(chances, p[:, made.draft_to_target.numpy()], atol=1e-6)
    (one,) = measured(made, [text], target_probabilities=[chances])
    rows = frame(one, "steps", "forced")
    _, steps, anchors = alone(made, text, "forced")
    kept = made.draft_to_target.tolist()
    for step in steps:
        ours = rows[rows["depth"] == step.depth].reset_index()
        for i, t in enumerate(anchors.tolist()):
            truth = text.tokens[t + 1 + step.depth]
            q = step.logits[0, i].double().softmax(-1).numpy()
            full = np.zeros(97)
            full[kept] = q
            # The distribution of token t + 1 + d stands at position t + d.
            wanted = 0.5 * np.abs(full - p[t + step.depth]).sum()
            assert ours["tv"][i] == pytest.approx(wanted, abs=1e-5)
            assert ours["in_vocab"][i] == (truth in kept)
            if truth in kept:
                assert ours["logprob"][i] == pytest.approx(np.log(full[truth]), abs=1e-4)
                assert ours["rank"][i] == (q > full[truth]).sum()
            else:
                assert np.isnan(ours["logprob"][i]) and ours["rank"][i] == -1


def test_columns_are_those_of_the_tables() -> None:
    """What the engine gives, with what a cell adds, is what the tables hold."""
    (one,) = measured(pairs.drafter(), texts((12, 3)))
    added = {"cell", "prompt", "text", "temperature", "mode", "tv", "shapley"}
    for name in ("steps", "heads", "fused"):
        assert set(one.tables[name]) | added >= set(SCHEMAS[name].names)
        assert set(one.tables[name]) <= set(SCHEMAS[name].names)


# --- one text or many, one block or many --------------------------------------------------------


def assert_same(a: Any, b: Any) -> None:
    assert a.n_anchors == b.n_anchors and a.tables.keys() == b.tables.keys()
    for name in a.tables:
        left, right = frame(a, name), frame(b, name)
        pd.testing.assert_frame_equal(left, right, check_exact=False, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sink", ["first", "auto", (0, 2)])
def test_a_batch_gives_what_single_runs_give(sink: Any) -> None:
    """Report 35, and report 36: a second call gives the same again."""
    made, given = pairs.drafter(feedback="post_norm"), texts((14, 4), (9, 2), (11, 6))
    spec = SPEC.model_copy(update={"sink": sink})
    together = measured(made, given, spec)
    for text, one in zip(given, together, strict=True):
        assert_same(one, measured(made, [text], spec)[0])
    for one, again in zip(together, measured(made, given, spec), strict=True):
        for name in one.tables:
            pd.testing.assert_frame_equal(frame(one, name), frame(again, name), check_exact=True)
    assert not any(point.hooked for point in points(made).values())


def test_blocks_of_rows_give_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = pairs.drafter(windows=(4,)), texts((14, 4), (10, 2))
    spec = SPEC.model_copy(update={"sink": "auto"})
    whole = measured(made, given, spec)
    monkeypatch.setattr(drafter_module, "SCORE_BUDGET", 250)
    for a, b in zip(whole, measured(made, given, spec), strict=True):
        assert_same(a, b)


def test_a_drafter_in_bfloat16_has_masses_that_sum_to_one() -> None:
    """Weights of bfloat16 sum to 1 within 0.003 only; they are measured before they are rounded."""
    made = pairs.drafter().bfloat16()
    (one,) = measured(made, texts((14, 4)))
    rows = frame(one, "steps")
    np.testing.assert_allclose(rows[list(REGIONS)].to_numpy().sum(axis=1), 1.0, atol=1e-5)
    assert (rows["null_mass"] == 0).all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.size = max([self.size, *sizes])
        return out


def test_memory_grows_with_the_text_and_not_with_its_square() -> None:
    """8192 tokens with all measures on: no tensor comes near T x T."""
    made = pairs.drafter(num_heads=1, num_kv_heads=1)
    largest = {}
    for size in (4096, 8192):
        tokens = pairs.ids(size, seed=1).tolist()
        text = pairs.as_text(tokens[:8], tokens[8:])
        aux = torch.randn(size, 96, generator=torch.Generator().manual_seed(0))
        spec = SPEC.model_copy(update={"depth": 2, "modes": ("forced",), "sink": "auto"})
        with Largest() as seen:
            (one,) = probe(made, [text], [aux], spec)
        largest[size] = seen.size
        sums = frame(one, "steps")[list(REGIONS)].to_numpy().sum(axis=1)
        np.testing.assert_allclose(sums, 1.0, atol=1e-5)
    assert largest[8192] <= 2.05 * largest[4096]
    assert largest[8192] <= 8192 * drafter_module.BLOCK_ROWS * 1.05


@pytest.mark.parametrize("trained", [False, True])
def test_the_masks_of_a_window_live_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    """Masks of all blocks would be half of T x T: no softmax, also of a backward pass, meets more
    than one block's.
    """
    size = 4 * drafter_module.BLOCK_ROWS
    made = pairs.drafter(windows=(16,))
    tokens = pairs.ids(1, size + 1, seed=1)
    aux = torch.randn(1, size, 96).requires_grad_(trained)
    softmax, held = drafter_module._softmax, []

    def masked() -> int:
        found = [x for x in gc.get_objects() if type(x) is Tensor and x.dim() == 2]
        found = [x for x in found if x.device.type == "cpu" and x.layout is torch.strided]
        return sum(x.numel() for x in found if bool((x == float("-inf")).any()))

    def counted(scores: Tensor) -> Tensor:
        held.append(masked() - before)
        return softmax(scores)

    before = masked()

    monkeypatch.setattr(drafter_module, "_softmax", counted)
    with torch.set_grad_enabled(trained):
        state = made.step(tokens[:, 1:], made.fuse(aux), made.new_memory(), depth=1)
        if trained:
            state.pre.sum().backward()
    assert len(held) == (8 if trained else 4)
    assert max(held) <= drafter_module.BLOCK_ROWS * size


# --- which anchors, which sink ------------------------------------------------------------------


def test_anchors_have_a_truth_at_every_depth() -> None:
    """From the prompt's last token, where an engine starts to draft, to the last full chain."""
    (text,) = texts((14, 4))
    assert measurable_anchors(text, SPEC).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert text.tokens[9 + 1 + 3] == text.tokens[-1]
    few = SPEC.model_copy(update={"max_anchors": 3})
    assert measurable_anchors(text, few).tolist() == [3, 6, 9]
    (one,) = measured(pairs.drafter(), [text], few)
    assert sorted(set(frame(one, "steps")["anchor"])) == [3, 6, 9]


def test_a_text_too_short_to_measure_has_no_rows() -> None:
    given = texts((6, 4), (14, 4), (5, 2))
    found = measured(pairs.drafter(), given)
    assert [one.n_anchors for one in found] == [0, 7, 0]
    assert found[0].tables == {} and found[2].tables == {}
    assert measured(pairs.drafter(), [given[0]])[0].n_anchors == 0


@pytest.mark.parametrize("windows", [(), (3,)])
def test_a_window_that_is_put_on_hides_as_one_s_own_does(windows: tuple[int, ...]) -> None:
    made, (given,) = pairs.drafter(windows=windows), texts((12, 2))
    tokens, aux = torch.tensor([given.tokens]), states_of(given)[None]
    with apply(made, [window(size=2)]):
        found = received_mass(made, tokens, aux, torch.tensor([12]))
    own = received_mass(pairs.drafter(windows=(2,)), tokens, aux, torch.tensor([12]))
    torch.testing.assert_close(found, own)


@pytest.mark.parametrize("windows", [(), (3,)])
def test_the_mass_that_a_position_receives(windows: tuple[int, ...]) -> None:
    """Mean over heads and over the queries that can see it; padding counts for nothing."""
    made, given = pairs.drafter(windows=windows), texts((9, 2), (6, 2))
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(t.tokens) for t in given], batch_first=True
    )
    aux = torch.nn.utils.rnn.pad_sequence([states_of(t) for t in given], batch_first=True)
    lengths = torch.tensor([9, 6])
    found = received_mass(made, tokens, aux, lengths)
    with torch.no_grad(), capture(made, "attn.pattern") as at:
        list(unroll(made, tokens, aux, depth=1, mode="forced", lengths=lengths))
    pattern = at["attn.pattern", 1].double().numpy()
    for b, n in enumerate(lengths.tolist()):
        for key in range(8):
            queries = [q for q in range(key, n - 1) if not windows or q - key < windows[0]]
            wanted = pattern[b, :, queries, key].mean() if queries else 0.0
            assert found[b, key].item() == pytest.approx(wanted, abs=1e-5)
    auto = SPEC.model_copy(update={"sink": "auto"})
    marked = sink_set(made, tokens, aux, lengths, auto)
    assert marked.shape == (2, 9) and bool(marked[0, 0])  # the first query sees only itself
    assert torch.equal(marked[:, :8], found > measures.SINK_THRESHOLD)


# --- numbers that are none ----------------------------------------------------------------------


def test_an_overflow_is_named_with_depth_and_anchor() -> None:
    """Report 33: a state that overflows at depth 2 of one anchor stops the measuring."""
    made: Any = pairs.drafter()
    (text,) = texts((14, 4))

    def overflow(module: Any, args: Any, value: Tensor) -> Tensor:
        moment = module.moment()
        if moment.depth != 2:
            return value
        hit = (moment.anchors == 5)[None, :, None]
        return torch.where(hit, torch.full_like(value, float("inf")), value)

    handle = made.at_pre.register_forward_hook(overflow)
    with pytest.raises(
        NumericsError, match=r"state.pre of drafter .* is not finite at depth 2, anchor 5"
    ):
        measured(made, [text])
    handle.remove()


def test_a_measurement_that_failed_leaves_no_hook() -> None:
    made = pairs.drafter()
    text = pairs.as_text([1, 2], [96, 95, 3, 4, 5, 6], "a")
    with pytest.raises(NumericsError):
        probe(made, [text], [torch.full((8, 96), torch.nan)], SPEC)
    assert not any(point.hooked for point in points(made).values())
