"""The engines against each other: all anchors, one by one, in training, and verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pairs
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor

from driftlab.config import MLA, DrafterConfig, Feedback, MeasureSpec, Rope
from driftlab.data.text import Text
from driftlab.engines import chain as chain_engine
from driftlab.engines.anchors import DepthStep, unroll
from driftlab.engines.chain import Speculation, speculate, verify
from driftlab.engines.probe import measurable_anchors, probe
from driftlab.errors import ContractError, DataError
from driftlab.models.drafter import Drafter, Memory
from driftlab.models.hooks import Captured, capture, points
from driftlab.models.target import Target

TOLERANCE = 1e-5
# Besides the twelve variants: what else decides the arithmetic.
SHAPES: dict[str, dict[str, Any]] = {
    "one key head": {"num_kv_heads": 1},
    "no groups": {"num_kv_heads": 4},
    "full vocabulary": {"draft_vocab_size": pairs.VOCAB},
    "wide heads": {"head_dim": 12},
    "gate": {"attention_gate": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "fc_bias": True},
    "qk norm": {"qk_norm": True},
    "two layers": {"num_layers": 2, "feedback": "post_norm"},
    "window": {"windows": (3,)},
    "window that moves": {"windows": (3,), "window_moves": True},
    "two layers, one window": {"num_layers": 2, "windows": (None, 2)},
    "one state": {"boundaries": (2,), "fusion_norm": "per_layer"},
    "equal boundaries": {"boundaries": (1, 2, 2, 3, 4)},
    "no fusion": {"boundaries": ()},
    "both fusion norms": {"fusion_norm": "concat_per_layer"},
    "double norm": {"double_hidden_norm": True},
    "raw head": {"logits_from_raw": True, "logit_scale": 0.5},
    "late positions": {"draft_position_offset": 1},
    "interleaved": {"rope": Rope(theta=500.0, interleaved=True)},
    "yarn": {"rope": Rope(rope_type="yarn", parameters={"factor": 4.0}, max_position=64)},
    "low rank": {
        "num_kv_heads": 4,
        "mla": MLA(
            q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
        ),
    },
}


def last_states(of: Target, tokens: Tensor) -> Tensor:
    return of.forward(tokens, torch.full((len(tokens),), tokens.shape[1]), (), logits=False).last


def captured(of: Target, drafter: Drafter, tokens: Tensor) -> Tensor:
    """What the drafter reads: aux states, or the last state where nothing is fused."""
    boundaries = drafter.config.boundaries
    return pairs.states(of, tokens, boundaries) if boundaries else last_states(of, tokens)


def one_chain(
    drafter: Drafter, tokens: Tensor, aux: Tensor, anchor: int, *, depth: int, forced: bool
) -> list[Tensor]:
    """Logits [Vd] of one anchor's chain, stepped alone with a memory of its own.

    tokens [S], aux [S, A*Ht]. Steps the drafter as an engine does and shares no code with one.
    """
    memory = drafter.new_memory()
    u = drafter.fuse(aux[None, : anchor + 1])
    state = drafter.step(tokens[None, 1 : anchor + 2], u, memory, depth=1)
    memory.select(torch.tensor([anchor]))
    found = [drafter.logits(state)[0, -1]]
    for d in range(2, depth + 1):
        guess = int(drafter.to_target(found[-1].argmax()))
        token = int(tokens[anchor + d]) if forced else guess
        u = state.feedback[:, -1:]
        state = drafter.step(torch.tensor([[token]]), u, memory, depth=d)
        found.append(drafter.logits(state)[0, -1])
    assert memory.length == anchor + 1
    return found


def gap(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest value where that exceeds 1."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def row(value: Tensor, site: str, index: int) -> Tensor:
    """Row ``index`` of a site's value of one text."""
    rows_first = site.split(".")[-1] in {"q", "k", "v", "scores", "pattern"}
    return value[0, :, index] if rows_first else value[0, index]


def assert_chains_agree(of: Target, drafter: Drafter, *, size: int = 7, depth: int = 4) -> float:
    """Every site at every depth; returns the largest difference."""
    tokens = pairs.ids(1, size, seed=3)
    aux = captured(of, drafter, tokens)
    worst = 0.0
    for mode in ("forced", "free"):
        anchors = torch.arange(size - depth if mode == "forced" else size - 1)
        with torch.no_grad(), capture(drafter, "*") as together:
            at_once = list(unroll(drafter, tokens, aux, depth=depth, mode=mode, anchors=anchors))
        for t in anchors.tolist():
            with torch.no_grad(), capture(drafter, "*") as alone:
                forced = mode == "forced"
                logits = one_chain(drafter, tokens[0], aux[0], t, depth=depth, forced=forced)
            assert alone.keys() == together.keys()
            for d, found in enumerate(logits, start=1):
                worst = max(worst, gap(at_once[d - 1].logits[0, t], found))
                assert at_once[d - 1].draft[0, t] == drafter.to_target(found.argmax())
            worst = max(worst, _largest_gap(drafter, together, alone, t))
    assert worst < TOLERANCE
    return worst


def _largest_gap(drafter: Drafter, together: Captured, alone: Captured, t: int) -> float:
    worst = 0.0
    for (site, depth), value in alone.items():
        one, all_rows = row(value, site, -1), row(together[site, depth], site, t)
        if site.endswith(("scores", "pattern")):
            chain = depth - 1
            prefix = all_rows.shape[-1] - chain
            # Keys after the anchor: no weight at all.
            unseen = all_rows[:, t + 1 : prefix]
            assert bool((unseen == (0 if site.endswith("pattern") else -torch.inf)).all())
            all_rows = torch.cat([all_rows[:, : t + 1], all_rows[:, prefix:]], dim=-1)
            finite = torch.isfinite(one)
            assert torch.equal(finite, torch.isfinite(all_rows))
            one, all_rows = one[finite], all_rows[finite]
        worst = max(worst, gap(all_rows, one))
    return worst


# --- 1. all anchors = one by one ----------------------------------------------------------------


@pytest.mark.parametrize("variant", pairs.VARIANTS)
def test_all_anchors_equal_single_chains(variant: str) -> None:
    assert_chains_agree(pairs.target(), pairs.drafter(**pairs.VARIANTS[variant]))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_anchors_equal_single_chains_in_every_shape(shape: str) -> None:
    assert_chains_agree(pairs.target(), pairs.drafter(**SHAPES[shape]), size=6, depth=4)


TRAINED = (
    "none+pre_norm+raw",
    "none+post_norm+raw",
    "per_layer+pre_norm+raw",
    pairs.M,
    "concat+post_norm+normed",
)


@pytest.mark.parametrize("variant", TRAINED)
def test_all_anchors_equal_single_chains_when_trained(variant: str) -> None:
    pair = pairs.trained(variant)
    assert_chains_agree(pair.target, pair.drafter)


def test_a_selection_of_anchors_changes_nothing_for_them() -> None:
    made, tokens = pairs.drafter(), pairs.ids(2, 10)
    aux = captured(pairs.target(), made, tokens)
    some = torch.tensor([0, 3, 4, 8])
    every = list(unroll(made, tokens, aux, depth=3, mode="free"))
    chosen = list(unroll(made, tokens, aux, depth=3, mode="free", anchors=some))
    for a, b in zip(every, chosen, strict=True):
        assert torch.equal(b.anchors, some)
        assert torch.equal(a.draft[:, some], b.draft) and torch.equal(a.truth[:, some], b.truth)
        torch.testing.assert_close(a.logits[:, some], b.logits, atol=TOLERANCE, rtol=0)
        for name in ("pre", "post", "feedback"):
            whole, part = getattr(a.state, name), getattr(b.state, name)
            torch.testing.assert_close(whole[:, some], part, atol=TOLERANCE, rtol=0)


def test_a_chain_depends_on_its_past_only() -> None:
    """Anchor t is a function of tokens 0..t+1 and states 0..t."""
    made, tokens = pairs.drafter(feedback="post_norm"), pairs.ids(1, 12)
    aux = captured(pairs.target(), made, tokens)
    t = 5
    bare = [s.logits[0, : t + 1] for s in unroll(made, tokens, aux, depth=4, mode="free")]
    later, other = tokens.clone(), aux.clone()
    later[:, t + 2 :] = pairs.ids(1, 5, seed=9)
    other[:, t + 1 :] = 7.0
    after = [s.logits[0, : t + 1] for s in unroll(made, later, other, depth=4, mode="free")]
    for a, b in zip(bare, after, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)
    earlier = aux.clone()
    earlier[:, t] += 1.0
    changed = next(unroll(made, tokens, earlier, depth=1, mode="free")).logits[0, t]
    assert not torch.allclose(bare[0][t], changed)


# --- 2. training = inference --------------------------------------------------------------------


@pytest.mark.parametrize("variant", TRAINED)
def test_training_steps_equal_inference_in_padded_batches(variant: str) -> None:
    """Report 45: texts of 2, 5 and 9 tokens and four depths in one batch."""
    pair = pairs.trained(variant)
    assert_padding_is_harmless(pair.target, pair.drafter)


@pytest.mark.parametrize("shape", ["two layers", "window", "gate", "no groups"])
def test_training_steps_equal_inference_in_other_shapes(shape: str) -> None:
    assert_padding_is_harmless(pairs.target(), pairs.drafter(**SHAPES[shape]))


def assert_padding_is_harmless(of: Target, made: Drafter) -> None:
    lengths, depth = torch.tensor([2, 5, 9]), 4
    texts = [pairs.ids(int(n), seed=int(n)) for n in lengths]
    states = [captured(of, made, text[None])[0] for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    aux = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    with torch.no_grad():
        steps = list(unroll(made, tokens, aux, depth=depth, mode="forced", lengths=lengths))
    compared = 0
    for b, (text, state) in enumerate(zip(texts, states, strict=True)):
        for t in range(len(text) - 1):
            known = min(depth, len(text) - 1 - t)  # depths whose token the text has
            with torch.no_grad():
                chain = one_chain(made, text, state, t, depth=known, forced=True)
            for d, logits in enumerate(chain, start=1):
                step = steps[d - 1]
                assert gap(step.logits[b, t], logits) < TOLERANCE
                assert step.tokens[b, t] == text[t + d]
                truth = int(text[t + 1 + d]) if t + 1 + d < len(text) else -1
                assert step.truth[b, t] == truth
                compared += 1
    assert compared == 1 + (4 + 3 + 2 + 1) + (5 * 4 + 3 + 2 + 1)
    for step in steps:  # where a text has ended
        assert bool((step.truth[:, -1] == -1).all()) and bool((step.truth[0] == -1).all())


# --- 3, 4. verified chains ----------------------------------------------------------------------


def spoken(of: Target, n: int = 6, *, length: int = 6, new: int = 26) -> list[Text]:
    """Prompts of the rule (of several lengths) continued by the target."""
    starts = [p[: length - i % 2] for i, p in enumerate(pairs.prompts(n, seed=9, length=length))]
    texts = of.generate(starts, max_new_tokens=new)
    return [
        pairs.as_text(p, t, f"p{i}") for i, (p, t) in enumerate(zip(starts, texts, strict=True))
    ]


@pytest.mark.parametrize("variant, depth", [*((v, 4) for v in TRAINED), (pairs.M, 1), (pairs.M, 7)])
def test_greedy_speculation_is_the_target_s_own_text(variant: str, depth: int) -> None:
    """Report 36 too: prompts that accept different numbers, the same call twice."""
    pair = pairs.trained(variant)
    for text in spoken(pair.target, 2, new=18):
        prompt = list(text.tokens[: text.prompt_len])
        new = len(text.continuation)
        done = speculate(pair.target, pair.drafter, prompt, depth=depth, max_new_tokens=new)
        assert done.continuation == text.continuation
        assert done.rule == "greedy match" and done.prompt_len == len(prompt)
    again = speculate(pair.target, pair.drafter, prompt, depth=depth, max_new_tokens=new)
    assert again == done


LOSSLESS = ("two layers", "window", "no fusion", "full vocabulary", "low rank")


@pytest.mark.parametrize("shape", LOSSLESS)
def test_greedy_speculation_is_lossless_for_random_drafters(shape: str) -> None:
    of, made = pairs.target(), pairs.drafter(**SHAPES[shape])
    prompt = pairs.ids(5, seed=4).tolist()
    done = speculate(of, made, prompt, depth=3, max_new_tokens=12)
    assert list(done.continuation) == of.generate([prompt], max_new_tokens=12)[0]


def assert_rounds_hang_together(done: Speculation, depth: int) -> None:
    """Each round starts where the last one ended, and the text is what the rounds accepted."""
    at = done.prompt_len - 1
    text = list(done.tokens[: done.prompt_len + 1])
    for r in done.rounds:
        assert r.anchor == at and 0 <= r.accepted <= len(r.drafted) == depth
        text += [*r.drafted[: r.accepted], r.bonus]
        at += r.accepted + 1
    assert tuple(text[: len(done.tokens)]) == done.tokens


@pytest.mark.parametrize("variant", ["none+pre_norm+raw", pairs.M])
def test_acceptance_from_all_anchors_is_that_of_the_verified_chain(variant: str) -> None:
    """On the target's greedy text, exactly, at every anchor at which a round started."""
    pair, depth = pairs.trained(variant), 4
    texts = spoken(pair.target, 4, new=22)
    aux = [pairs.states(pair.target, torch.tensor([t.tokens]))[0] for t in texts]
    spec = MeasureSpec(depth=depth, modes=("free",))
    measured = probe(pair.drafter, texts, aux, spec)
    compared = []
    for text, one in zip(texts, measured, strict=True):
        steps = pd.DataFrame(one.tables["steps"]).sort_values(["anchor", "depth"])
        counts = {int(k): int(n) for k, n in steps.groupby("anchor").accepted.sum().items()}  # type: ignore[call-overload]
        drafts = steps.groupby("anchor").draft.agg(tuple).to_dict()
        assert sorted(counts) == measurable_anchors(text, spec).tolist()
        done = speculate(
            pair.target,
            pair.drafter,
            list(text.tokens[: text.prompt_len]),
            depth=depth,
            max_new_tokens=len(text.continuation),
        )
        assert_rounds_hang_together(done, depth)
        # The prompt's last token is the first anchor: both start where generation starts.
        assert done.rounds[0].anchor == text.prompt_len - 1 == min(counts)
        for r in done.rounds:
            if r.anchor in counts:
                assert counts[r.anchor] == r.accepted
                assert drafts[r.anchor] == r.drafted
                compared.append(r.accepted)
    assert len(compared) >= 12
    if variant != pairs.M:
        assert len(set(compared)) > 1  # rounds that accept different numbers


def test_the_memorised_pair_accepts_nearly_everything() -> None:
    """What makes M a fixture: acceptance of at least .95 at depths 1 to 4 in free chains."""
    pair = pairs.memorised()
    texts = spoken(pair.target, 8)
    for text in texts:
        assert list(text.tokens) == pairs.follow(text.tokens[: text.prompt_len], len(text.tokens))
    aux = [pairs.states(pair.target, torch.tensor([t.tokens]))[0] for t in texts]
    rows = [
        m.tables["steps"]
        for m in probe(pair.drafter, texts, aux, MeasureSpec(depth=4, modes=("free",)))
    ]
    for d in range(1, 5):
        accepted = np.concatenate([r["accepted"][r["depth"] == d] for r in rows]).astype(float)
        assert accepted.mean() >= 0.95


def test_speculation_ends_at_the_end_token() -> None:
    """Also when it comes as an accepted draft in the middle of a round."""
    pair = pairs.memorised()
    prompt = pairs.prompts(1, seed=9, length=6)[0]
    whole = pair.target.generate([prompt], max_new_tokens=20)[0]
    for end in sorted(set(whole))[::2]:
        ending = Target.from_model(pair.target.model, name="M", eos_ids=(end,))
        wanted = ending.generate([prompt], max_new_tokens=20)[0]
        done = speculate(ending, pair.drafter, prompt, depth=4, max_new_tokens=20)
        assert list(done.continuation) == wanted and wanted[-1] == end
        # Nothing is drafted from a text that has ended.
        assert all(done.prompt_len + len(wanted) > r.anchor + 1 for r in done.rounds)


@pytest.mark.parametrize("new", [1, 2, 5, 6])
def test_speculation_keeps_to_its_number_of_tokens(new: int) -> None:
    pair = pairs.memorised()
    prompt = pairs.prompts(1, seed=9, length=6)[0]
    done = speculate(pair.target, pair.drafter, prompt, depth=4, max_new_tokens=new)
    assert list(done.continuation) == pair.target.generate([prompt], max_new_tokens=new)[0]
    assert len(done.rounds) == {1: 0, 2: 1, 5: 1, 6: 1}[new]


def test_speculation_up_to_the_context_s_last_token() -> None:
    """Drafts shorten where the context ends; what does not fit is refused up front."""
    of, made = pairs.target(), pairs.drafter()
    prompt = pairs.ids(of.max_position - 4, seed=5).tolist()
    done = speculate(of, made, prompt, depth=8, max_new_tokens=4)
    assert list(done.continuation) == of.generate([prompt], max_new_tokens=4)[0]
    assert max(len(r.drafted) for r in done.rounds) <= 3
    with pytest.raises(DataError, match=r"the prompt exceeds the context.*256 tokens"):
        speculate(of, made, prompt, depth=2, max_new_tokens=5)


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"depth": 0}, DataError),
        ({"max_new_tokens": 0}, DataError),
        ({"temperature": -1.0}, DataError),
        ({"prompt": []}, DataError),
        ({"prompt": [97]}, DataError),
        ({"draft": "sampled"}, ContractError),
    ],
)
def test_speculation_refuses(changes: dict[str, Any], error: type[Exception]) -> None:
    call: dict[str, Any] = {"prompt": [1, 2], "depth": 2, "max_new_tokens": 3} | changes
    prompt = call.pop("prompt")
    with pytest.raises(error):
        speculate(pairs.target(), pairs.drafter(), prompt, **call)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"target_hidden_size": 48}, "width 32"),
        ({"vocab_size": 120, "draft_vocab_size": 40}, "97 token ids"),
        ({"boundaries": (1, 2, 9)}, r"boundary 9 is outside 0\.\.4"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        speculate(pairs.target(), pairs.drafter(**changes), [1, 2], depth=2, max_new_tokens=3)


# --- 5. cached = uncached -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["none+pre_norm+raw", pairs.M])
def test_cached_rounds_equal_fresh_ones(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 16: every round's draft logits against a drafter and a target without a cache.

    A forced mismatch a round: the drafter's third choice is replaced, so that every round rejects
    and rolls back, and what was rejected must leave no trace.
    """
    pair = pairs.trained(variant)
    made, of = pair.drafter, pair.target
    rounds: list[tuple[list[int], Tensor, list[Tensor], list[int], int]] = []
    real = chain_engine._draft

    def watch(
        drafter: Drafter, memory: Memory, tokens: list[int], aux: Tensor, *rest: Any
    ) -> tuple[list[int], Tensor | None]:
        with capture(drafter, ["logits", "attn.pattern"]) as seen:
            drafted, q = real(drafter, memory, tokens, aux, *rest)
        # Rollback: the prefix holds one key per anchor and nothing of earlier chains.
        anchors = len(tokens) - 1
        assert memory.length == anchors
        for prefix, chain in zip(memory.prefix, memory.chain, strict=True):
            assert prefix is not None and prefix[0].shape[2] == prefix[1].shape[2] == anchors
            assert len(chain) == len(drafted) - 1
        for d in range(1, len(drafted) + 1):
            pattern = seen["attn.pattern", d]
            assert pattern.shape[-1] == anchors + d - 1  # no column for a rejected position
            torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        logits = [seen["logits", d][0, -1].clone() for d in range(1, len(drafted) + 1)]
        rounds.append((list(tokens), aux.clone(), logits, list(drafted), anchors))
        drafted[2] = drafted[2] + 1 if drafted[2] + 1 < pairs.VOCAB else 0
        return drafted, q

    monkeypatch.setattr(chain_engine, "_draft", watch)
    prompt = pairs.prompts(1, seed=11, length=7)[0]
    done = speculate(of, made, prompt, depth=4, max_new_tokens=20)
    assert list(done.continuation) == of.generate([prompt], max_new_tokens=20)[0]
    assert len(rounds) > 4 and all(r.accepted <= 2 for r in done.rounds)
    for tokens, newest_aux, logits, drafted, anchors in rounds:
        text = torch.tensor(tokens)
        aux = pairs.states(of, text[None, :-1])[0]  # the target afresh, without a cache
        assert gap(newest_aux[0], aux[-newest_aux.shape[1] :]) < TOLERANCE
        with torch.no_grad():
            fresh = one_chain(made, text, aux, anchors - 1, depth=4, forced=False)
        for a, b, token in zip(logits, fresh, drafted, strict=True):
            assert gap(a, b) < TOLERANCE
            assert int(made.to_target(b.argmax())) == token


def test_rounds_announce_the_anchors_of_the_text() -> None:
    """A hook in a verified chain sees true anchors, also in the fused input of later rounds."""
    pair = pairs.memorised()
    seen: list[list[int]] = []
    site = points(pair.drafter)["fuse.out"]
    handle = site.register_forward_hook(lambda m, a, out: seen.append(m.moment().anchors.tolist()))
    prompt = pairs.prompts(1, seed=9, length=6)[0]
    done = speculate(pair.target, pair.drafter, prompt, depth=3, max_new_tokens=12)
    handle.remove()
    assert [a for anchors in seen for a in anchors] == list(range(done.rounds[-1].anchor + 1))


# --- 9. sampling --------------------------------------------------------------------------------

P = (0.45, 0.25, 0.15, 0.1, 0.05)
Q = (0.1, 0.3, 0.05, 0.35, 0.2)


@pytest.mark.parametrize("mode", ["greedy draft", "sampled draft", "wide target"])
def test_verification_keeps_the_target_s_distribution(mode: str) -> None:
    """Report 30: 20,000 tokens out of rounds of four drafts follow p, accepted or not."""
    n, depth, temperature = 5_000 if mode == "wide target" else 20_000, 4, 0.7
    rng = torch.Generator().manual_seed(0)
    p, q = torch.tensor(P), torch.tensor(Q)
    if mode == "wide target":  # the drafter knows the first four ids only, as with padding rows
        q = q[:4] / q[:4].sum()
    logits = (p.log() * temperature).expand(depth + 1, 5)
    if mode == "greedy draft":
        drafts, given = torch.zeros(n, depth, dtype=torch.long), None
    else:
        drafts = torch.multinomial(q, n * depth, True, generator=rng).reshape(n, depth)
        given = q.expand(depth, -1)
    out: list[int] = []
    judged = accepted = 0
    for drafted in drafts.tolist():
        count, token = verify(logits, drafted, given, temperature, rng)
        out += [*drafted[:count], token]
        accepted, judged = accepted + count, judged + min(count + 1, depth)
        if len(out) >= n:
            break
    assert len(out) >= n
    counts = np.bincount(out[:n], minlength=5)
    assert stats.chisquare(counts, n * np.array(P)).pvalue > 0.01
    # A sampled draft passes with probability sum(min(p, q)), a greedy one with its own p.
    rate = P[0] if given is None else float(torch.minimum(p[: len(q)], q).sum())
    assert abs(accepted / judged - rate) < 4 * (rate * (1 - rate) / judged) ** 0.5


def test_verification_at_temperature_nought_is_a_match() -> None:
    """The third mode: greedy drafts under a greedy target leave no choice."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    rng = torch.Generator().manual_seed(0)
    assert verify(logits, [1, 0], None, 0.0, rng) == (2, 2)
    assert verify(logits, [1, 2], None, 0.0, rng) == (1, 0)
    assert verify(logits, [0, 0], None, 0.0, rng) == (0, 1)  # what follows a miss is not counted


def test_the_residual_is_the_positive_part_of_p_minus_q() -> None:
    rng = torch.Generator().manual_seed(0)
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.5, 0.5]])
    for _ in range(50):  # token 2 has no mass in p, and 0 is all that p has over q
        assert verify(p.log().repeat(2, 1), [2], q, 1.0, rng) == (0, 0)
    for _ in range(50):  # equal distributions are always accepted
        assert verify(p.log().repeat(2, 1), [1], p, 1.0, rng)[0] == 1


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
def test_sampled_speculation_follows_the_target(draft: Any) -> None:
    """The second token after a prompt, which a draft was made for, has the target's marginal."""
    pair = pairs.memorised()
    prompt, temperature, n = pairs.prompts(1, seed=9, length=6)[0], 4.0, 150
    every = torch.tensor([[*prompt, token] for token in range(pairs.VOCAB)])
    logits = pair.target.forward(every, torch.full((pairs.VOCAB,), 7), ()).logits
    assert logits is not None
    chances = (logits / temperature).double().softmax(-1)
    marginal = (chances[0, -2] @ chances[:, -1]).numpy()  # first token known, then summed over
    top = np.argsort(-marginal)[:6]
    rule = {"temperature": temperature, "draft": draft}
    done = [
        speculate(pair.target, pair.drafter, prompt, depth=1, max_new_tokens=2, seed=seed, **rule)
        for seed in range(n)
    ]
    assert {d.rule for d in done} == {f"{draft} draft, temperature 4.0"}
    assert 0 < sum(d.rounds[0].accepted for d in done) < n
    second = [d.continuation[1] for d in done]
    counts = [second.count(token) for token in top]
    wanted = n * np.append(marginal[top], 1 - marginal[top].sum())
    assert stats.chisquare([*counts, n - sum(counts)], wanted).pvalue > 0.01
    again = speculate(pair.target, pair.drafter, prompt, depth=1, max_new_tokens=2, seed=3, **rule)
    assert again == done[3]


# --- 10. positions and faults -------------------------------------------------------------------


def accepted_per_round(of: Target, made: Drafter) -> float:
    rounds = [
        r.accepted
        for prompt in pairs.prompts(3, seed=9, length=6)
        for r in speculate(of, made, prompt, depth=4, max_new_tokens=20).rounds
    ]
    return sum(rounds) / len(rounds)


def changed(made: Drafter, **changes: Any) -> Drafter:
    """The same weights under another contract."""
    settings = DrafterConfig(**made.config.model_dump() | changes)
    other = Drafter(settings, made.draft_to_target)
    other.load_state_dict(made.state_dict(), strict=False)
    return other.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_position_offset": 1},
        {"feedback": Feedback.pre_norm},
        {"boundaries": (0, 1, 2)},
        {"boundaries": (2, 3, 4)},
        {"windows": (2,)},
    ],
    ids=str,
)
def test_a_fault_lowers_the_memorised_pair_s_acceptance(changes: dict[str, Any]) -> None:
    pair = pairs.memorised()
    right = accepted_per_round(pair.target, pair.drafter)
    assert right == accepted_per_round(pair.target, changed(pair.drafter)) >= 3.8
    assert accepted_per_round(pair.target, changed(pair.drafter, **changes)) < right - 0.25


def test_the_hidden_state_first_lowers_the_memorised_pair_s_acceptance() -> None:
    """Embedding and hidden state in the wrong order under q, k and v."""
    pair = pairs.memorised()
    other: Any = changed(pair.drafter)
    attention = other.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.data = projection.weight.data.roll(pairs.WIDTH, dims=1)
    assert accepted_per_round(pair.target, other) < 1.0


def test_positions_of_the_steps() -> None:
    """Report 14: after a 7-token prompt rows 0..6 stand at 0..6, drafts at 7, 8, 9.

    Read off the queries alone: turning a query back by its position's angles, computed here,
    must give the same vector as the projection without rotation.
    """
    made: Any = pairs.drafter()
    prompt, newest = pairs.ids(7, seed=1), 11
    aux = pairs.states(pairs.target(), prompt[None])
    tokens = torch.cat([prompt[1:], torch.tensor([newest])])
    memory = made.new_memory()
    found: list[tuple[int, list[int], list[int]]] = []
    with torch.no_grad(), capture(made, ["attn.q", "token.normed", "feedback.normed"]) as seen:
        state = made.step(tokens[None], made.fuse(aux), memory, depth=1)
        memory.select(torch.tensor([6]))
        read = tokens.tolist()
        for d in range(1, 5):
            if d > 1:
                read = [int(made.to_target(made.logits(state)[0, -1].argmax()))]
                state = made.step(torch.tensor([read]), state.feedback[:, -1:], memory, depth=d)
            x = torch.cat([seen["token.normed", d], seen["feedback.normed", d]], dim=-1)
            bare = (x @ made.layers[0].self_attn.q_proj.weight.T).unflatten(-1, (4, 8))
            queries = seen["attn.q", d][0].transpose(0, 1)  # [rows, heads, 8]
            found.append(
                (d, read, [_position(a, b) for a, b in zip(queries, bare[0], strict=True)])
            )
    assert found[0] == (1, [*prompt[1:].tolist(), newest], list(range(7)))
    assert [positions for _, _, positions in found[1:]] == [[7], [8], [9]]
    assert memory.length == 7 and [len(c) for c in memory.chain] == [3]


def _position(turned: Tensor, bare: Tensor) -> int:
    """The position at which ``bare`` [heads, 8] becomes ``turned``: pairs (i, i + 4) turn by
    p * 10000^(-i / 4)."""
    first, second = bare[:, :4].double(), bare[:, 4:].double()
    angle = torch.arange(32)[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)  # [p, 4]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    candidates = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    gaps = (candidates - turned).abs().amax(dim=(1, 2))
    assert gaps.min() < TOLERANCE and int((gaps < 1e-3).sum()) == 1
    return int(gaps.argmin())


def test_an_offset_moves_drafted_positions_only() -> None:
    """Only distances count, so one position too far shows between the text and the chain."""
    tokens = pairs.ids(1, 8)
    right, late = pairs.drafter(), pairs.drafter(draft_position_offset=1)
    aux = captured(pairs.target(), right, tokens)
    a, b = (list(unroll(m, tokens, aux, depth=2, mode="forced")) for m in (right, late))
    assert torch.equal(a[0].logits, b[0].logits)
    assert (a[1].logits - b[1].logits).abs().max() > 1e-3


# --- what the engines refuse --------------------------------------------------------------------


def test_unroll_refuses_texts_without_a_known_token() -> None:
    made, tokens = pairs.drafter(), pairs.ids(1, 1)
    aux = captured(pairs.target(), made, tokens)
    with pytest.raises(DataError, match="one known token after it"):
        next(unroll(made, tokens, aux, depth=1, mode="free"))


def test_unroll_refuses_states_of_another_text_or_width() -> None:
    made, tokens = pairs.drafter(), pairs.ids(1, 6)
    aux = captured(pairs.target(), made, tokens)
    with pytest.raises(ContractError, match="differ in shape"):
        next(unroll(made, tokens, aux[:, :5], depth=1, mode="free"))
    with pytest.raises(ContractError, match=r"fc expects 96 = 3 x 32.*width 32"):
        next(unroll(made, tokens, aux[..., :32], depth=1, mode="free"))


@pytest.mark.parametrize("anchors", [[], [3, 1], [1, 1], [-1, 2], [2, 5]])
def test_unroll_refuses_anchors_that_are_not_in_the_text(anchors: list[int]) -> None:
    made, tokens = pairs.drafter(), pairs.ids(1, 6)
    aux = captured(pairs.target(), made, tokens)
    chosen = torch.tensor(anchors, dtype=torch.long)
    with pytest.raises(ContractError, match=r"anchors must ascend within 0\.\.4"):
        next(unroll(made, tokens, aux, depth=1, mode="free", anchors=chosen))


def test_steps_read_the_tokens_that_they_say() -> None:
    made, tokens = pairs.drafter(), pairs.ids(2, 8)
    aux = captured(pairs.target(), made, tokens)

    def read(mode: Any) -> Sequence[DepthStep]:
        return list(unroll(made, tokens, aux, depth=3, mode=mode))

    forced, free = read("forced"), read("free")
    for d in (1, 2, 3):
        shifted = torch.nn.functional.pad(tokens, (0, d))[:, d : d + 7]
        assert torch.equal(forced[d - 1].tokens, shifted)
        later = torch.nn.functional.pad(tokens, (0, d + 1), value=-1)[:, d + 1 : d + 8]
        assert torch.equal(forced[d - 1].truth, later) and torch.equal(free[d - 1].truth, later)
    assert torch.equal(free[1].tokens, free[0].draft) and torch.equal(free[2].tokens, free[1].draft)
    in_vocabulary = made.draft_to_target
    assert all(bool(torch.isin(s.draft, in_vocabulary).all()) for s in free)
