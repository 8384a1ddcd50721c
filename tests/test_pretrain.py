"""Pretraining learns a rule, repeats exactly, and touches nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftlab.engines.pretrain import pretrain
from driftlab.errors import DataError, NumericsError
from driftlab.models.target import Target

TEXTS = [[(a + i) % 20 for i in range(30)] for a in range(20)]
TINY: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1,
    "steps": 40, "batch": 8, "length": 16, "lr": 1e-2, "seed": 0,
}  # fmt: skip


def test_it_learns_the_rule() -> None:
    model = pretrain(TEXTS, **TINY | {"steps": 100})
    target = Target.from_model(model, name="counter", eos_ids=())
    assert not model.training
    texts = target.generate([[3, 4], [11, 12, 13]], max_new_tokens=12)
    assert texts == [[(5 + i) % 20 for i in range(12)], [(14 + i) % 20 for i in range(12)]]


def test_one_seed_gives_one_model_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = pretrain(TEXTS, **TINY).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    again, other = pretrain(TEXTS, **TINY), pretrain(TEXTS, **TINY | {"seed": 1})
    assert all(torch.equal(first[k], v) for k, v in again.state_dict().items())
    assert not torch.equal(first["lm_head.weight"], other.state_dict()["lm_head.weight"])


def test_the_shape_is_the_one_asked_for() -> None:
    model = pretrain(TEXTS, **TINY | {"steps": 1, "layers": 3, "heads": 4, "kv_heads": 2})
    target = Target.from_model(model, name="shape")
    assert (target.n_layers, target.hidden_size, target.vocab_size) == (3, 16, 20)
    keys = model.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    assert keys.shape == (2 * 4, 16)
    assert target.eos_ids == frozenset()


@pytest.mark.parametrize(
    "change, message",
    [({"length": 600}, "more than 600 tokens"), ({"vocab_size": 19}, "outside 0..18")],
)
def test_text_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pretrain(TEXTS, **TINY | change)


def test_a_diverged_loss_is_named() -> None:
    with pytest.raises(NumericsError, match=r"loss of step \d+ is not finite"):
        pretrain(TEXTS, **TINY | {"lr": 1e30})
