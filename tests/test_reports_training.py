"""Public reports about training, and about drafters used as they were not trained.

47 masks and templates, 37 rotated targets, 54 best weights, 46 small vocabularies, 40 nothing
accepted, 26 context.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pairs
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from driftlab.config import Origin, Sourced, TrainSpec
from driftlab.data.features import Features, FeatureStore
from driftlab.data.text import Text
from driftlab.doctor.selfcheck import states_of_training
from driftlab.engines.chain import Speculation, speculate
from driftlab.engines.habitat import (
    PROMPTS,
    STATES,
    TARGET,
    TEMPLATES,
    differences,
    learned_from,
    prompt_marks,
    record,
    statistics_of,
)
from driftlab.engines.train import (
    TrainResult,
    accepted_drafts,
    choose_vocabulary,
    initialise,
    supervised_share,
    train,
)
from driftlab.errors import DataError
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import attach
from driftlab.models.target import Target
from driftlab.results.hints import CHECKLIST, hints, misconfigured
from driftlab.results.records import Tables

SPEC = TrainSpec(ttt=3, steps=8, batch=4, lr=1e-2, checkpoint_every=3, head_init=0.3)


def stored(target: Target, texts: list[Text], folder: Path) -> Features:
    return FeatureStore(folder).build(target, texts, pairs.BOUNDARIES, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def lessons(folder: Path) -> Features:
    return stored(pairs.memorised_target(), pairs.lessons(40), folder)


def fresh(texts: Features | None = None, **changes: Any) -> Drafter:
    kept = choose_vocabulary((t.tokens for t in texts.texts) if texts else [], 40, pairs.VOCAB)
    return initialise(pairs.config(**changes), pairs.memorised_target(), kept, seed=0, head_init=0)


def learn(made: Drafter, corpus: Features, spec: TrainSpec, **more: Any) -> TrainResult:
    return train(made, corpus, pairs.memorised_target(), spec, seed=0, **more)


# --- 47: nothing supervised -------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        [pairs.as_text([1, 2], [80, 81, 82, 83], "outside the draft vocabulary")],
        [pairs.as_text([1, 2, 3], [], "all prompt")],
        [pairs.as_text([1], [2], "no anchor")],
    ],
    ids=lambda texts: texts[0].prompt_id,
)
def test_nothing_supervised_is_an_error_before_the_first_step(
    texts: list[Text], folder: Path
) -> None:
    corpus = stored(pairs.memorised_target(), texts, folder)
    steps: list[int] = []
    with pytest.raises(DataError, match="no position is supervised"):
        learn(fresh(), corpus, SPEC, on_step=steps.append)
    assert not steps


def test_the_supervised_share_is_counted() -> None:
    texts = [pairs.as_text([1, 2], [3, 50, 4], "a"), pairs.as_text([1], [2, 3], "b")]
    kept = torch.arange(40)
    # a: 3 and 4 of five; b: the token at position 1 has no anchor.
    assert supervised_share(texts, kept, 100) == pytest.approx(3 / 8)
    assert supervised_share(texts, None, 100) == pytest.approx(4 / 8)
    assert supervised_share(texts, kept, 3) == pytest.approx(2 / 6)
    assert supervised_share(texts, kept, 2) == 0 == supervised_share([], kept, 5)


# --- 54: weights by acceptance ----------------------------------------------------------------


def test_the_weights_that_accept_most_are_kept(lessons: Features, tmp_path: Path) -> None:
    """A rate that ruins the drafter after a few steps: the last weights are not the best."""
    spec = SPEC.model_copy(update={"steps": 24, "lr": 3e-2, "warmup": 0.0, "evaluate_every": 4})
    made = fresh(lessons)
    result = learn(made, lessons, spec, checkpoint=tmp_path / "t.pt")
    assert [step for step, _ in result.evaluations] == [4, 8, 12, 16, 20, 24]
    held = range(36, 40)
    best = max(value for _, value in result.evaluations)
    assert result.best is not None and result.best[1] == best > 0
    assert accepted_drafts(made, lessons, held, spec.ttt) == best
    # The held-back texts were never learned from, and a killed training keeps its best weights.
    seen: set[int] = set()
    for batch in lessons.batches(4, seed=0, epoch=0, max_length=512, among=range(36)):
        seen |= set(batch.rows)
    assert seen == set(range(36))
    again = fresh(lessons)

    def stop(steps: int, done: list[int] = [0]) -> None:  # noqa: B006
        done[0] += steps
        if done[0] == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(again, lessons, spec, checkpoint=tmp_path / "u.pt", on_step=stop)
    again = fresh(lessons)
    resumed = learn(again, lessons, spec, checkpoint=tmp_path / "u.pt")
    assert resumed.evaluations == result.evaluations
    weights = made.state_dict()
    assert all(torch.equal(t, weights[n]) for n, t in again.state_dict().items())


def test_acceptance_of_held_back_texts_is_that_of_the_rounds() -> None:
    pair = pairs.memorised()
    prompts = pairs.prompts(2, seed=31, length=8)  # their last tokens follow the rule, too
    texts = [
        pairs.as_text(p, m, f"p{i}")
        for i, (p, m) in enumerate(
            zip(prompts, pair.target.generate(prompts, max_new_tokens=12), strict=True)
        )
    ]
    with tempfile.TemporaryDirectory() as place:
        features = stored(pair.target, texts, Path(place))
        value = accepted_drafts(pair.drafter, features, range(2), 3)
    total = []
    for text in texts:
        for anchor in range(text.prompt_len - 2, len(text.tokens) - 4):
            done = speculate(
                pair.target,
                pair.drafter,
                list(text.tokens[: anchor + 1]),
                depth=3,
                max_new_tokens=5,
            )
            # The first round's newest token is the target's own, which is the text's.
            if done.tokens[anchor + 1] == text.tokens[anchor + 1]:
                total.append(min(done.rounds[0].accepted, 3))
    assert len(total) == 2 * 10
    assert value == pytest.approx(sum(total) / len(total))


def test_there_must_be_texts_to_hold_back(folder: Path) -> None:
    spec = SPEC.model_copy(update={"evaluate_every": 2})
    short = pairs.as_text([1, 2, 3], [4, 5], "short")
    for texts, said in (
        (pairs.lessons(1), "1 text"),
        ([*pairs.lessons(2), short], "1 held back, none with a round of train.ttt = 3"),
    ):
        corpus = stored(pairs.memorised_target(), texts, folder)
        with pytest.raises(DataError, match=f"holds back texts .*{said}"):
            learn(fresh(corpus), corpus, spec)


def test_a_held_back_text_that_is_shorter_than_a_round_has_none(folder: Path) -> None:
    long, *_ = pairs.lessons(1)
    short = [pairs.as_text([1, 2, 3], [4] * n, f"short {n}") for n in range(4)]
    corpus = stored(pairs.memorised_target(), [long, *short], folder)
    made = fresh(corpus)
    alone, all_of_them = (accepted_drafts(made, corpus, range(n), 5) for n in (1, 5))
    assert alone == all_of_them


# --- 46: fewer distinct tokens than draft ids -------------------------------------------------


@pytest.mark.parametrize("size", [7, 9, 10, 40, pairs.VOCAB])
def test_a_draft_vocabulary_beyond_the_corpus_is_filled_up(size: int, lessons: Features) -> None:
    """The corpus has nine distinct tokens."""
    texts = [t.tokens for t in lessons.texts]
    kept = choose_vocabulary(texts, size, pairs.VOCAB)
    assert len(kept) == size == len(set(kept.tolist()))
    assert kept.tolist() == sorted(kept.tolist()) and kept.max() < pairs.VOCAB
    distinct = {t for text in texts for t in text}
    assert distinct <= set(kept.tolist()) or size < len(distinct)
    made = initialise(
        pairs.config(draft_vocab_size=size), pairs.memorised_target(), kept, seed=0, head_init=0
    )
    learn(made, lessons, SPEC.model_copy(update={"steps": 1}))


# --- 37: a rotated target ---------------------------------------------------------------------


@cache
def rotation() -> Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(pairs.WIDTH, pairs.WIDTH, generator=rng))[0]


@cache
def rotated() -> Target:
    """M's target with its residual stream turned: norms folded first, the same logits."""
    plain: Any = pairs.memorised_target().model
    model: Any = LlamaForCausalLM(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    turn = rotation()
    with torch.no_grad():
        for layer in model.model.layers:
            readers = {
                layer.input_layernorm: [
                    layer.self_attn.q_proj,
                    layer.self_attn.k_proj,
                    layer.self_attn.v_proj,
                ],
                layer.post_attention_layernorm: [layer.mlp.gate_proj, layer.mlp.up_proj],
            }
            for norm, linears in readers.items():
                for linear in linears:
                    linear.weight.copy_(linear.weight * norm.weight @ turn)
                norm.weight.fill_(1.0)
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight.copy_(turn.T @ writer.weight)
        head = model.lm_head.weight * model.model.norm.weight @ turn
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ turn)
        model.lm_head.weight = torch.nn.Parameter(head)
    return Target.from_model(model, name="M rotated", eos_ids=())


@cache
def told() -> Drafter:
    """M's drafter with what its training stores in the file."""
    with tempfile.TemporaryDirectory() as place:
        corpus = stored(pairs.memorised_target(), pairs.lessons(200), Path(place))
        said = record(pairs.memorised_target(), corpus, {None})
        pair = pairs.memorised()
        made = Drafter(pair.drafter.config, pair.drafter.draft_to_target)
        made.load_state_dict(pair.drafter.state_dict())
        made.provenance = {**pair.drafter.provenance, **said}
        save_drafter(made, Path(place) / "drafter")
        return load_drafter(Path(place) / "drafter").eval().requires_grad_(False)


def accepted(target: Target) -> float:
    rounds = [
        r.accepted
        for prompt in pairs.prompts(2, seed=9, length=6)
        for r in speculate(target, told(), prompt, depth=4, max_new_tokens=16).rounds
    ]
    return sum(rounds) / len(rounds)


def differing(target: Target, texts: list[Text], folder: Path, **more: Any) -> list[str]:
    now = statistics_of(stored(target, texts, folder))
    longest = max(len(t.tokens) for t in texts)
    return differences(told(), target, now, longest=longest, **more)


def test_a_rotated_target_is_reported_and_a_matrix_mends_it(folder: Path) -> None:
    plain, turned = pairs.memorised_target(), rotated()
    ids = torch.tensor(pairs.prompts(3, seed=4, length=20))
    lengths = torch.full((3,), 20)
    a, b = (t.forward(ids, lengths, (4,)) for t in (plain, turned))
    assert a.logits is not None and b.logits is not None
    torch.testing.assert_close(a.logits, b.logits, atol=2e-3, rtol=1e-3)  # the same target's output
    texts = [
        pairs.as_text(t[:4], t[4:], f"q{i}")
        for i, t in enumerate(pairs.prompts(30, seed=8, length=30))
    ]
    assert differing(plain, texts, folder) == []
    found = differing(turned, texts, folder)
    assert found[0].startswith("M rotated has other weights")
    assert [line[:20] for line in found[1:]] == [f"states of boundary {n}" for n in (1, 2, 3)]
    right = accepted(plain)
    assert right > 3.5 and accepted(turned) < 1.0
    # The matrix, for each captured state: what the drafter reads is turned back.
    with attach(told(), "fuse.in.*", lambda value, moment: value @ rotation().T):
        assert accepted(turned) == pytest.approx(right, abs=0.1)


def test_few_texts_of_the_training_s_kind_are_no_mismatch(folder: Path) -> None:
    for n in (1, 2, 5):
        drawn = pairs.prompts(n, seed=40 + n, length=16)
        texts = [pairs.as_text(t[:4], t[4:], f"f{i}") for i, t in enumerate(drawn)]
        assert differing(pairs.memorised_target(), texts, folder) == []


@pytest.mark.parametrize("wrong", [(0, 1, 2), (2, 3, 4)])
def test_states_of_other_boundaries_are_noticed(wrong: tuple[int, ...], folder: Path) -> None:
    drawn = pairs.prompts(30, seed=8, length=30)
    texts = [pairs.as_text(t[:4], t[4:], f"q{i}") for i, t in enumerate(drawn)]
    target = pairs.memorised_target()
    other = FeatureStore(folder).build(target, texts, wrong, dtype="float32")
    found = differences(told(), target, statistics_of(other), longest=30)
    assert found and all(line.startswith("states of boundary") for line in found)


def test_another_quantisation_dtype_or_template_is_said(folder: Path) -> None:
    target, now = pairs.memorised_target(), told().provenance[STATES].value
    said = told().provenance[TARGET].value
    assert said["quantization"] == "none" and said["dtype"] == "float32"
    model: Any = LlamaForCausalLM(target.model.config)
    model.load_state_dict(target.model.state_dict())
    half = Target.from_model(model.bfloat16(), name="half", eos_ids=())
    half.provenance["quantization"] = Sourced(value="int8", origin=Origin.read, where="checkpoint")
    found = differences(told(), half, now, longest=9)
    assert len(found) == 2
    assert "quantization is int8, the drafter was trained with none" in found[0]
    assert "dtype is bfloat16, the drafter was trained with float32" in found[1]
    (line,) = differences(told(), target, now, longest=9, templates=["abc", None, "abc"])
    assert line.startswith("2 of 3 prompts are rendered with chat template abc, the drafter was")
    assert line.endswith("trained with none")
    assert differences(told(), target, now, longest=9, templates=[None]) == []
    assert told().provenance[TEMPLATES].value == ["none"]


def test_a_drafter_that_says_nothing_is_compared_by_context_only() -> None:
    made = pairs.drafter()
    limit = made.config.rope.max_position
    assert differences(made, rotated(), [], longest=limit) == []
    (line,) = differences(made, rotated(), [], longest=limit + 1)
    assert f"{limit + 1} tokens" in line and f"context of {limit}" in line


def test_prompts_that_were_learned_from_are_told_of() -> None:
    learned = [
        Text.of("p", "c", (0, i), (5, 6), kind="given", temperature=None, origin="x")
        for i in (1, 2, 3)
    ]
    measured = [
        *learned[:1],
        Text.of("q", "c", (0, 9), (5,), kind="sampled", temperature=1.0, origin="x"),
    ]
    known = prompt_marks(learned)
    (said,) = learned_from(known, measured, strict=True)
    assert said.startswith("1 of 2 measured prompts were also learned from")
    assert learned_from(prompt_marks(learned[1:]), measured, strict=True) == []
    with pytest.raises(DataError, match="3 of 3 measured prompts"):
        learned_from(known, learned, strict=True)


def test_a_drafter_keeps_marks_of_the_prompts_that_it_learned_from(folder: Path) -> None:
    target = pairs.memorised_target()
    lessons, (new, *_) = pairs.lessons(200), pairs.lessons(1)
    known = told().provenance[PROMPTS].value
    assert known == {
        "count": len({t.tokens[: t.prompt_len] for t in lessons}),
        "sha256": sorted(prompt_marks(lessons)),
    }
    other = replace(new, tokens=(pairs.VOCAB - 1, *new.tokens[1:]))
    said = [
        differences(told(), target, [], longest=9, texts=[t, other]) for t in (lessons[0], other)
    ]
    assert [len(lines) for lines in said] == [1, 0]
    assert said[0][0].startswith("1 of 2 measured prompts were also learned from: ")
    features = stored(target, lessons[:5], folder)
    n = len(prompt_marks(features.texts))
    for most, kept in ((n, n), (n - 1, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("driftlab.engines.habitat.MARKED", most)
            value = record(target, features, ())[PROMPTS].value
        assert (value["count"], len(value["sha256"])) == (n, kept)


def test_other_texts_of_the_very_target_are_not_called_another_target(folder: Path) -> None:
    same = pairs.as_text([1, 2], [5] * 30, "one token for ever")
    found = differing(pairs.memorised_target(), [same], folder)
    assert found and all(
        line.endswith(
            "the target is the same, so the texts are few (31 tokens) or unlike those of the "
            "training"
        )
        for line in found
    )
    others = differing(rotated(), [same], folder)
    assert any("another boundary. Acceptance" in line for line in others)
    assert states_of_training(told(), found).ok and not states_of_training(told(), others).ok


def test_the_doctor_fails_a_rotated_target_and_passes_the_trained_one() -> None:
    from driftlab.doctor import examine

    opened = pairs.prompts(24, seed=12)
    for target, ok in ((pairs.memorised_target(), True), (rotated(), False)):
        found = examine(target, told(), tokens=300, prompts=opened)
        (check,) = [c for c in found.checks if c.name == "states as in the training"]
        assert check.ok is ok, check.detail
        assert any("other weights" in note for note in found.notes) is not ok
    bare = Drafter(told().config, told().draft_to_target)
    bare.load_state_dict(told().state_dict())
    found = examine(pairs.memorised_target(), bare.eval(), tokens=300, prompts=opened)
    assert any(c.detail.startswith("n/a: the file holds no") for c in found.checks)


# --- 40: nothing accepted ---------------------------------------------------------------------


def test_nothing_accepted_in_many_rounds_is_a_hint() -> None:
    assert misconfigured(50, 0) is None and misconfigured(5000, 1) is None
    said = misconfigured(51, 0)
    assert said is not None and "likely misconfigured" in said
    assert all(point in said for point in CHECKLIST)
    made = pairs.memorised().drafter
    deaf = Drafter(made.config, made.draft_to_target)
    deaf.load_state_dict(made.state_dict())
    with torch.no_grad():
        deaf.lm_head.weight.zero_()  # always the first draft id, which the target never says
    prompt = pairs.prompts(1, seed=3)[0]
    done = speculate(pairs.memorised_target(), deaf, prompt, depth=2, max_new_tokens=53)
    assert sum(r.accepted for r in done.rounds) == 0 and len(done.rounds) > 50
    assert done.hint == misconfigured(len(done.rounds), 0)
    few = replace(done, rounds=done.rounds[:50])
    assert few.hint is None and isinstance(few, Speculation)


def test_cells_without_an_accepted_draft_are_named() -> None:
    def rows(cell: str, mode: str, n: int, hits: float | None) -> dict[str, Any]:
        return {"cell": cell, "mode": mode, "depth": 1, "n": n, "n_accepted": hits}

    depths = pd.DataFrame(
        [
            *(rows("deaf", "free", 30, 0), rows("deaf", "free", 30, 0)),
            *(rows("deaf", "forced", 60, None), rows("good", "free", 60, 1)),
            *(rows("few", "free", 50, 0), rows("changed", "free", 60, 0)),
        ]
    )
    names = ["deaf", "good", "few", "changed"]
    cells = pd.DataFrame({"cell": names, "condition": ["", "", "", "no sink"]})
    none = pd.DataFrame()
    (line,) = hints(Tables(depths, none, none, none, cells, {}))
    assert line.startswith("deaf accepted no draft in 60 rounds: likely misconfigured")
