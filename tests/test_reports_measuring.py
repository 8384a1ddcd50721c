"""Public reports about states, attention, positions and devices, on one process's models.

17 no attention, 22 versions, 24 rotations, 26 context, 35 padding, 39 shallow targets, 55 devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pandas as pd
import pytest
import torch
import transformers as hf

from driftlab.config import MeasureSpec, Rope
from driftlab.data.features import Features, FeatureStore
from driftlab.data.text import Text
from driftlab.doctor.selfcheck import known_bad
from driftlab.engines.anchors import unroll
from driftlab.engines.probe import measurable_anchors, probe
from driftlab.errors import CheckpointError, ContractError
from driftlab.models import loading
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama
from driftlab.results.quantities import accepted_by_context

# --- 17: a target that hands out no attention --------------------------------------------------


class Deaf(torch.nn.Module):
    """Attention of custom code that calls no attention function and returns None for its map."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.v_proj, self.o_proj = inner.v_proj, inner.o_proj

    def forward(self, hidden_states: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, None]:
        values = self.v_proj(hidden_states)
        return self.o_proj(torch.cat([values, values], dim=-1)), None


@pytest.mark.parametrize("deaf", [[0, 1, 2, 3], [2]])
def test_attention_that_is_not_handed_out_is_an_error(deaf: list[int]) -> None:
    model: Any = tiny_llama(vocab_size=97, hidden_size=32, layers=4, max_position=64)
    for layer in deaf:
        model.model.layers[layer].self_attn = Deaf(model.model.layers[layer].self_attn)
    target = Target.from_model(model, name="deaf", eos_ids=())
    given: list[int] = []
    with pytest.raises(ContractError, match="never called their attention function") as caught:
        target.attention(pairs.ids(1, 6), torch.tensor([6]), lambda p: given.append(p.layer))
    assert str(deaf) in str(caught.value)
    assert not set(given) & set(deaf)


# --- 22: versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["4.57.1", "5.23.0", "6.0.0", "6.1.0.dev0"])
def test_an_unsupported_transformers_is_said(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loading._check_transformers()
    monkeypatch.setattr(hf, "__version__", version)
    with pytest.raises(Exception, match=r"5\.24 or later, below 6") as caught:
        loading._check_transformers()
    assert version in str(caught.value) and not isinstance(caught.value, CheckpointError)


# --- 24: rotations of two models in one process --------------------------------------------------


def test_rotations_are_not_shared_between_models() -> None:
    tokens, made = pairs.ids(1, 12), []
    aux = pairs.states(pairs.target(), tokens)
    ropes = [
        Rope(theta=1e4),
        Rope(theta=1e6),
        Rope(rope_type="linear", parameters={"factor": 4.0}),
        Rope(
            rope_type="llama3",
            parameters={
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ]

    def logits(rope: Rope) -> torch.Tensor:
        drafter = pairs.drafter(rope=rope)
        made.append(drafter)  # kept alive: the next one must not read its table
        with torch.no_grad():
            return list(unroll(drafter, tokens, aux, depth=2, mode="forced"))[-1].logits

    alone = [logits(rope) for rope in ropes]
    pairs.target().forward(tokens, torch.tensor([12]), (1,))
    for rope, before in zip(reversed(ropes), reversed(alone), strict=True):
        assert torch.equal(logits(rope), before)
    for i, a in enumerate(alone):
        assert all((a - b).abs().max() > 1e-3 for b in alone[:i])


# --- 26: context -------------------------------------------------------------------------------


def test_a_short_context_limit_is_no_table_s_end() -> None:
    """A drafter with limit 16 run to length 40 computes what one with limit 64 does."""
    tokens = pairs.ids(1, 40)
    aux = pairs.states(pairs.target(), tokens)
    with torch.no_grad():
        a, b = (
            list(
                unroll(
                    pairs.drafter(rope=Rope(max_position=limit)), tokens, aux, depth=3, mode="free"
                )
            )
            for limit in (16, 64)
        )
    assert all(torch.equal(x.logits, y.logits) for x, y in zip(a, b, strict=True))


def test_acceptance_by_length_of_the_context() -> None:
    def chain(
        anchor: int, accepted: list[bool], mode: str = "free", prompt: str = "p"
    ) -> list[dict[str, Any]]:
        return [
            {"cell": "c", "prompt": prompt, "text": "greedy", "mode": mode, "anchor": anchor}
            | {"depth": d, "accepted": hit if mode == "free" else None}
            for d, hit in enumerate(accepted, start=1)
        ]

    steps = pd.DataFrame(
        [
            *chain(2, [True, True]),  # 4 tokens known
            *chain(5, [True, False]),  # 7
            *chain(6, [False, False]),  # 8
            *chain(13, [True, True]),  # 15
            *chain(14, [False, False]),  # 16
            *chain(15, [True]),  # does not reach the deepest depth
            *chain(3, [True, True], "forced"),
            *chain(4, [True, True], prompt="loops"),
        ]
    )
    prompts = pd.DataFrame(
        {
            "prompt": ["p", "loops", "short"],
            "text": "greedy",
            "loops": [False, True, False],
            "n_anchors": [6, 1, 0],
        }
    )
    found = accepted_by_context(steps, prompts)
    assert found["low"].tolist() == [4, 8, 16] and found["high"].tolist() == [8, 16, 32]
    assert found["anchors"].tolist() == [2, 2, 1]
    assert found["accepted"].tolist() == [1.5, 1.0, 0.0]
    assert accepted_by_context(steps[steps["mode"] == "forced"], prompts).empty
    alone = prompts[prompts["prompt"] != "p"]  # all that was measured loops
    looping = accepted_by_context(steps[steps["prompt"] == "loops"], alone)
    assert looping[["low", "anchors", "accepted"]].to_numpy().tolist() == [[4, 1, 2.0]]


# --- 35, 36: padded batches ---------------------------------------------------------------------


def absolute() -> Target:
    """A target with learned absolute positions, where padding on the left would show."""
    config = hf.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Target.from_model(hf.GPT2LMHeadModel(config), name="gpt2", eos_ids=())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("sink", ["first", "auto"])
def test_unequal_prompts_in_one_batch_give_what_each_gives_alone(
    family: str, sink: Any, tmp_path: Path
) -> None:
    target = pairs.target() if family == "llama" else absolute()
    made, spec = pairs.drafter(), MeasureSpec(depth=3, recent=4, sink=sink)
    texts = []
    for n, prompt in ((16, 4), (10, 2), (13, 6)):
        tokens = pairs.ids(n, seed=n).tolist()
        texts.append(pairs.as_text(tokens[:prompt], tokens[prompt:], f"p{n}"))

    def measured(part: list[Text], batch: int) -> list[Any]:
        features: Features = FeatureStore(tmp_path / f"{len(part)}-{batch}").build(
            target, part, pairs.BOUNDARIES, dtype="float32", batch=batch
        )
        return list(probe(made, part, [features.item(i)["aux"] for i in range(len(part))], spec))

    together = measured(texts, 3)
    assert len(together) == 3
    for text, one in zip(texts, together, strict=True):
        (alone,) = measured([text], 1)
        assert len(measurable_anchors(text, spec)) == one.n_anchors == alone.n_anchors
        for name, columns in one.tables.items():
            for column, values in columns.items():
                other = alone.tables[name][column]
                if np.asarray(values).dtype.kind == "f":
                    np.testing.assert_allclose(values, other, atol=1e-4, err_msg=column)
                else:
                    assert np.array_equal(np.asarray(values), np.asarray(other)), column


# --- 39: shallow targets ------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_shallow_targets_take_stated_ids_and_have_no_default(layers: int) -> None:
    model = tiny_llama(vocab_size=31, hidden_size=16, layers=layers, heads=2, kv_heads=1)
    target = Target.from_model(model, name="shallow", eos_ids=())
    with pytest.raises(ContractError) as caught:
        target.default_boundaries()
    said = str(caught.value)
    assert f"{layers} layers" in said and "State the boundaries" in said
    assert str((2, layers // 2, layers - 3)) in said
    tokens = torch.tensor([[1, 2, 3]])
    equal = target.forward(tokens, torch.tensor([3]), (layers,) * 3, logits=False).aux
    assert equal.shape == (1, 3, 48)
    assert torch.equal(equal[..., :16], equal[..., 16:32])
    assert torch.equal(equal[..., :16], equal[..., 32:])


# --- 55: devices that are known to be wrong -----------------------------------------------------


def test_devices_that_are_known_to_be_wrong() -> None:
    for version in ("2.7.1", "2.8.0", "2.8.0+cpu", "2.8.0.dev20250701"):
        said = known_bad({"cpu", "mps"}, version)
        assert said is not None and "MPS" in said and version in said
    assert known_bad({"cpu", "mps"}, "2.9.0") is None
    assert known_bad({"cpu", "mps"}, "2.13.0+cpu") is None
    assert known_bad({"cpu", "cuda"}, "2.8.0") is None
    assert known_bad({"cpu"}, "2.8.0") is None
