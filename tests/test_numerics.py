"""NaN and infinity stop a cell by name and spoil nothing else; precision and ties are told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pairs
import pytest
import small
import torch
from torch import Tensor

from driftlab.config import MeasureSpec, TrainSpec
from driftlab.data.features import FeatureStore
from driftlab.engines import cell, precision
from driftlab.engines.chain import speculate
from driftlab.engines.probe import probe
from driftlab.engines.train import initialise, train
from driftlab.errors import NumericsError, RunError
from driftlab.experiment import run_experiment
from driftlab.models.hooks import Moment, attach
from driftlab.models.target import Target
from driftlab.results.answers import answers
from driftlab.results.precision import precision_note
from driftlab.results.records import RunDirectory

SPEC = MeasureSpec(depth=3, recent=4)


def text() -> Any:
    tokens = pairs.ids(14, seed=3).tolist()
    return pairs.as_text(tokens[:4], tokens[4:], "p7")


def spoiled(site: str, depth: int, anchor: int, value: float) -> Any:
    def spoil(x: Tensor, moment: Moment) -> Tensor:
        rows = (moment.anchors == anchor).nonzero()[:, 0]
        x = x.clone()
        x[..., rows, :] = value  # sites are [B, T, H] or [B, h, T, K]
        return x

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("site", "depth", "named"),
    [
        ("fuse.in.1", 1, "fuse.in.1"),
        ("fuse.out", 1, "feedback.in"),  # at depth 1 it is the same value
        ("feedback.in", 2, "feedback.in"),
        ("attn.pattern", 3, "attn.pattern"),
        ("attn.v", 2, "attn.out"),
        ("mlp.out", 2, "mlp.out"),
        ("state.pre", 3, "state.pre"),
        ("state.post", 3, "state.post"),
        ("logits", 2, "logits"),
    ],
)
def test_site_depth_anchor_and_token_are_named(
    site: str, depth: int, named: str, value: float
) -> None:
    made, given, anchor = pairs.drafter(), text(), 6
    aux = pairs.states(pairs.target(), torch.tensor([given.tokens]))[0]
    token = given.tokens[anchor + depth]
    spec = SPEC.model_copy(update={"modes": ("forced",)})
    variant = made.config.variant.replace("+", r"\+")
    said = (
        rf"^{named}.* of drafter {variant} is not finite at depth {depth}, anchor {anchor}, "
        rf"reading token {token} of greedy text p7 \(got (nan|inf|-inf)\)"
    )
    hook = attach(made, site, spoiled(site, depth, anchor, value), depths=[depth])
    with hook, pytest.raises(NumericsError, match=said):
        probe(made, [given], [aux], spec)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: -x, "a sum of -1, the least weight -"),
        (lambda x: x / 2, "a sum of 0.5, the least weight 0"),
        (lambda x: 2 * x, "a sum of 2, the least weight 0"),
        (lambda x: 2 * x - x.roll(1, -1), r"a sum of (1|1\.0+\d+|0\.9+\d*), the least weight -"),
    ],
)
def test_attention_that_is_none_is_named(change: Any, said: str) -> None:
    """What a row lacks to 1 is no learned sink: no drafter has one."""
    made, given = pairs.drafter(), text()
    aux = pairs.states(pairs.target(), torch.tensor([given.tokens]))[0]
    where = r"^attn\.pattern of drafter .* depth 2, anchor 3, reading token \d+ of greedy text p7: "
    with (
        attach(made, "attn.pattern", lambda x, moment: change(x), depths=[2]),
        pytest.raises(NumericsError, match=f"{where}.*{said}"),
    ):
        probe(made, [given], [aux], SPEC)


def test_one_bad_cell_leaves_the_others_and_counts_for_nothing() -> None:
    """NaN in one cell, after its first prompts were stored."""
    plain = cell._probe_rows
    out = small.home() / "numerics"

    def spoil(drafter: Any, features: Any, teacher: Any, rows: Any, *more: Any) -> Any:
        measured = plain(drafter, features, teacher, rows, *more)
        if drafter.config.feedback == "post_norm":
            measured[rows[-1]]["steps"]["rms_state_pre"][0] = float("nan")
        return measured

    try:
        with small.shrunk() as patch:
            patch.setattr(cell, "_probe_rows", spoil)
            with pytest.raises(RunError, match=r"1 of 2 cells failed: steps\.rms_state_pre .*NaN"):
                run_experiment(small.spec(), out, quiet=True)
        status = small.status(out)
        assert status["none+pre_norm/s0"] == "done"
        assert "holds NaN or infinity" in status["none+post_norm/s0"]
        run = RunDirectory.open(out)
        assert "none+post_norm/s0" in set(run.steps["cell"]), "the rows of before are kept"
        said = " ".join(answer.sentence for answer in answers(run.tables()))
        assert "post-norm feedback" not in said.lower(), "and used for no answer"
    finally:
        shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_training_by_name(
    tmp_path: Path, value: float
) -> None:
    """At the last step, too, after which no loss would tell of it."""
    texts = [pairs.as_text(row[:4], row[4:], f"p{i}") for i, row in enumerate(rows())]
    corpus = FeatureStore(tmp_path).build(pairs.target(), texts, pairs.BOUNDARIES, dtype="float32")
    config, spec = pairs.config(), TrainSpec(steps=2, ttt=2, batch=2)
    ids = torch.arange(config.draft_vocab_size)
    made = initialise(config, pairs.target(), ids, seed=0, head_init=1.0)
    seen = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return gradient if seen == 1 else gradient.index_fill(0, torch.tensor([0]), value)

    made.fc.weight.register_hook(spoil)
    with pytest.raises(NumericsError, match=r"gradient of fc\.weight is not finite at step 1 "):
        train(made, corpus, pairs.target(), spec, seed=0)
    assert all(bool(p.isfinite().all()) for p in made.parameters()), "and moves no weight"


@pytest.fixture
def overflowing() -> Target:
    """T in half precision, with an MLP that is too loud for it."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(settings).half().eval()
    made = Target.from_model(model, name="loud", eos_ids=())
    with torch.no_grad():
        for part in ("gate_proj", "up_proj", "down_proj"):
            getattr(model.model.layers[1].mlp, part).weight.mul_(2000)
    return made


def test_overflow_of_half_precision_is_named(overflowing: Target, tmp_path: Path) -> None:
    prompt = [3, 5, 7, 9]
    with pytest.raises(NumericsError, match=r"logits of loud are not finite.*float16"):
        overflowing.generate([prompt], max_new_tokens=3)
    with pytest.raises(NumericsError, match=r"logits of loud are not finite.*self-check"):
        overflowing.self_check(prompt)
    overflowing.self_check = lambda tokens: None  # type: ignore[method-assign]
    said = r"boundary 2 of loud is not finite .*position 0, token 3 of text p0.*float16.*6\.55e\+04"
    with pytest.raises(NumericsError, match=said):
        FeatureStore(tmp_path).build(
            overflowing, [pairs.as_text(prompt, [1, 2], "p0")], (0, 2, 3), dtype="bfloat16"
        )


def test_norms_of_half_precision_states_are_taken_in_float32() -> None:
    from driftlab.analysis import measures

    states = torch.full((2, 3, 32), 300.0, dtype=torch.float16)
    assert states.pow(2).mean(-1).isinf().all(), "the naive mean square overflows"
    assert torch.equal(measures.rms(states), torch.full((2, 3), 300.0))
    assert torch.allclose(measures.l2(states), torch.full((2, 3), 300.0 * 32**0.5))


def test_logits_that_are_not_finite_end_a_speculation() -> None:
    teacher, made = pairs.target(), pairs.drafter()
    hook = attach(made, "logits", spoiled("logits", 2, 4, float("nan")), depths=[2])
    with hook, pytest.raises(NumericsError, match=r"depth 2, are not finite at position 4"):
        speculate(teacher, made, [1, 2, 3, 4, 5], depth=3, max_new_tokens=6)


def test_ties_of_the_target_are_counted() -> None:
    from driftlab.engines.chain import _ties

    rows = torch.tensor([[1.0, 2.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -3.0]])
    assert _ties(rows, "x", 0) == 2
    told = speculate(pairs.target(), pairs.drafter(), [1, 2, 3], depth=2, max_new_tokens=4)
    assert told.ties == 0, "in float32 a random model has none"


def half(scale: float = 1.0) -> Target:
    import copy

    model = copy.deepcopy(pairs.target().model).to(torch.bfloat16)
    model.lm_head.weight.data.mul_(scale)
    return Target.from_model(model, name="T16", eos_ids=())


def test_a_half_precision_target_is_compared_with_float32() -> None:
    """Against the same model cast by hand."""
    teacher = half()
    given = [pairs.as_text(row[:4], row[4:], f"p{i}") for i, row in enumerate(rows())]
    found = precision.against_float32(teacher, given, (1, 2, 3))
    import copy

    exact = copy.deepcopy(teacher.model).float()
    choices, largest, first = 0, 0.0, None
    for text in given:
        ids = torch.tensor([text.tokens])
        with torch.no_grad():
            own = teacher.model(ids).logits[0].float()
            want = exact(ids).logits[0]
        largest = max(largest, float((own - want).abs().max()))
        other = (own.argmax(-1) != want.argmax(-1)).nonzero()[:, 0].tolist()
        choices += len(other)
        if other and first is None:
            first = (text.prompt_id, other[0], float(want[other[0]].topk(2).values.diff().abs()))
    assert first is not None, "bfloat16 moves a choice of a random model"
    told = found["first_other_choice"]
    assert (told["text"], told["index"]) == first[:2]
    assert told["gap"] == pytest.approx(first[2], abs=1e-5) and told["within_rounding"]
    assert found["other_choices"] == choices
    assert found["largest_logit_difference"] == pytest.approx(largest, rel=1e-3)
    assert 0 < max(found["states_difference"].values()) < 0.02
    assert found["ties"] > 0, "bfloat16 has few numbers, so some tie"
    said = precision_note(found)
    assert f"first at index {first[1]} of text {first[0]}" in said and "(rounding)" in said


def rows() -> list[list[int]]:
    return [pairs.ids(40, seed=i).tolist() for i in range(4)]


def test_a_float32_target_says_only_its_ties() -> None:
    given = [pairs.as_text(row[:4], row[4:], f"p{i}") for i, row in enumerate(rows())]
    found = precision.against_float32(pairs.target(), given, (1, 2, 3))
    assert found == {"dtype": "float32", "texts": 4, "positions": 160, "ties": 0}
    assert precision_note(found) == ""


def test_a_copy_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "free_bytes", lambda: 1000)
    found = precision.against_float32(half(), [], (1, 2, 3))
    assert "was not compared with float32: a copy in float32 needs" in precision_note(found)


def test_a_copy_that_is_refused_is_not_compared() -> None:
    """In half precision, states on a cache are not compared with one run; in the copy they are."""
    teacher = half()

    def anew(module: Any, args: Any, given: dict[str, Any]) -> Any:
        return args, given | {"position_ids": torch.arange(given["input_ids"].shape[1])[None]}

    teacher.model.model.register_forward_pre_hook(anew, with_kwargs=True)
    found = precision.against_float32(teacher, [], (1, 2, 3))
    assert "not compared with float32" in precision_note(found)
    assert "states on a cache" in found["not_compared"]
