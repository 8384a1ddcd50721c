"""The drafter's attention beside the target's, against scipy; and training for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pairs
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import pearsonr
from transformers import MixtralConfig, MixtralForCausalLM

from driftlab.data.features import Batch
from driftlab.data.text import Text
from driftlab.engines.align import Alignment, agreement, store_rows
from driftlab.errors import ContractError, DataError
from driftlab.models.attention import Pattern
from driftlab.models.hooks import capture
from driftlab.models.rounding import quantize, rounded
from driftlab.models.target import Target

SIZE = 12


@pytest.fixture(scope="module")
def text() -> Text:
    tokens = pairs.ids(1, SIZE, seed=3)[0].tolist()
    return Text.of("p", "chat", tokens[:4], tokens[4:], kind="given", temperature=None, origin="")


def target_maps(text: Text) -> dict[int, torch.Tensor]:
    """Head-averaged maps [S, S] by layer."""
    found: dict[int, torch.Tensor] = {}

    def keep(pattern: Pattern) -> None:
        found[pattern.layer] = pattern.weights[0].mean(dim=0)

    pairs.target().attention(torch.tensor([text.tokens]), torch.tensor([SIZE]), keep)
    return found


def test_stored_rows_are_the_targets(text: Text, tmp_path: Path) -> None:
    at = torch.tensor([3, 5, 9])
    stored = store_rows(pairs.target(), [text], tmp_path, layers=[1, 3], positions=[at])
    positions, rows = stored.item(0)
    assert positions.tolist() == at.tolist() and rows.shape == (2, 3, SIZE)
    maps = target_maps(text)
    for i, layer in enumerate((1, 3)):
        torch.testing.assert_close(rows[i], maps[layer][at], rtol=2e-3, atol=1e-4)
    (path,) = stored.folder.iterdir()
    before = path.stat().st_mtime_ns
    again = store_rows(pairs.target(), [text], tmp_path, layers=[1, 3], positions=[at])
    assert again == stored and path.stat().st_mtime_ns == before
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="Delete the file"):
        stored.item(0)


def test_agreement_is_scipys(text: Text, tmp_path: Path) -> None:
    drafter = pairs.drafter()
    aux = pairs.states(pairs.target(), torch.tensor([text.tokens]))[0]
    at = torch.tensor([4, 7, 10])
    stored = store_rows(pairs.target(), [text], tmp_path, layers=[0, 2], positions=[at]).item(0)
    found = agreement(drafter, text, aux, stored)
    with torch.inference_mode(), capture(drafter, "attn.pattern") as seen:
        tokens = torch.tensor([text.tokens[1:]])
        drafter.step(tokens, drafter.fuse(aux[None, :-1]), drafter.new_memory(), depth=1)
    own = seen["attn.pattern", 1][0].mean(dim=0).double().numpy()
    for i in range(2):
        rows = stored[1][i].double().numpy()
        pearson = [
            pearsonr(own[t, : t + 1], rows[j, : t + 1]).statistic for j, t in enumerate(at.tolist())
        ]
        js = [
            jensenshannon(own[t, : t + 1], rows[j, : t + 1]) ** 2 for j, t in enumerate(at.tolist())
        ]
        assert found["correlation"][i] == pytest.approx(np.mean(pearson), rel=1e-5)
        assert found["divergence"][i] == pytest.approx(np.mean(js), rel=1e-5)
        assert found["n"][i] == 3


def test_keys_beyond_a_window_are_not_shared(text: Text) -> None:
    drafter = pairs.drafter()
    aux = pairs.states(pairs.target(), torch.tensor([text.tokens]))[0]
    row = torch.full((1, 1, SIZE), -1.0)
    row[0, 0, 4:8] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = agreement(drafter, text, aux, (torch.tensor([7]), row))
    with torch.inference_mode(), capture(drafter, "attn.pattern") as seen:
        tokens = torch.tensor([text.tokens[1:]])
        drafter.step(tokens, drafter.fuse(aux[None, :-1]), drafter.new_memory(), depth=1)
    own = seen["attn.pattern", 1][0].mean(dim=0)[7, 4:8].double().numpy()
    expected = jensenshannon(own, row[0, 0, 4:8].numpy()) ** 2
    assert found["divergence"][0] == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_a_divergence_whose_gradient_lowers_it(text: Text, tmp_path: Path) -> None:
    target, drafter = pairs.target(), pairs.drafter().requires_grad_(True)
    tokens = torch.tensor([text.tokens])
    aux = pairs.states(target, tokens)
    batch = Batch(
        tokens, torch.tensor([SIZE]), torch.tensor([text.prompt_len]), aux, aux[..., :1], (0,)
    )
    stored = store_rows(target, [text], tmp_path, layers=[3])
    alignment = Alignment(stored, 2.0)

    def plain() -> tuple[torch.Tensor, int]:
        drafter.step(tokens[:, 1:], drafter.fuse(aux[:, :-1]), drafter.new_memory(), depth=1)
        return torch.zeros(()), 5

    with capture(drafter, "attn.pattern") as seen:
        loss, counted = alignment.add(plain, drafter, batch)
    own = seen["attn.pattern", 1][0].mean(dim=0).double()
    wanted = stored.item(0)[1][0].double()
    rows = range(text.prompt_len - 2, SIZE - 1)
    terms = [
        float(torch.xlogy(wanted[t, : t + 1], wanted[t, : t + 1] / own[t, : t + 1]).sum())
        for t in rows
    ]
    assert counted == 5
    assert float(loss.detach()) == pytest.approx(2 * np.mean(terms), rel=1e-4)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    loss.backward()
    with torch.no_grad():
        for weight in weights:
            if weight.grad is not None:
                weight.sub_(1e-3 * weight.grad)
    after, _ = alignment.add(plain, drafter, batch)
    assert float(after.detach()) < float(loss.detach())


def test_without_a_supervised_position_nothing_is_added(text: Text, tmp_path: Path) -> None:
    target, drafter = pairs.target(), pairs.drafter()
    tokens = torch.tensor([text.tokens])
    aux = pairs.states(target, tokens)
    batch = Batch(tokens, torch.tensor([SIZE]), torch.tensor([4]), aux, aux[..., :1], (0,))
    alignment = Alignment(store_rows(target, [text], tmp_path, layers=[3]), 2.0)

    def plain() -> tuple[torch.Tensor, int]:
        drafter.step(tokens[:, 1:], drafter.fuse(aux[:, :-1]), drafter.new_memory(), depth=1)
        return torch.ones(()), 0

    assert float(alignment.add(plain, drafter, batch)[0]) == 1.0


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_weights_lie_on_a_grid_of_their_own_row(kind: str, levels: int) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[2] *= 100
    made = rounded(weight, kind)
    scale = weight.abs().amax(dim=1, keepdim=True) / levels
    steps = made / scale
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert int(steps.abs().max().round()) == levels
    assert bool(((made - weight).abs() <= scale / 2 * 1.001).all())


def test_embedding_head_and_norms_stay() -> None:
    plain, other = pairs.target(), pairs.target.__wrapped__()  # a model of its own
    made = quantize(other, "int4")
    assert made.fingerprint != plain.fingerprint and made.name.endswith("in int4")
    torch.testing.assert_close(made.embedding_weight, plain.embedding_weight, rtol=0, atol=0)
    torch.testing.assert_close(made.head_weight, plain.head_weight, rtol=0, atol=0)
    tokens = pairs.ids(1, SIZE, seed=3)
    before, after = pairs.states(plain, tokens), pairs.states(made, tokens)
    error = (after - before).norm() / before.norm()
    assert 0.01 < float(error) < 1


def test_experts_in_one_piece_are_not_passed_over() -> None:
    """They are most of the weights: what is left would be called int4 and is hardly rounded."""
    sizes = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = MixtralForCausalLM(sizes)
    experts = Target.from_model(model, name="x", eos_ids=())
    before = experts.fingerprint
    with pytest.raises(ContractError, match=r"experts in one piece.*mlp\.experts"):
        quantize(experts, "int4")
    assert Target.from_model(model, name="x", eos_ids=()).fingerprint == before
