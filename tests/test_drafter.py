"""The drafter's step against HuggingFace's layer and hand arithmetic, and what it refuses."""

from __future__ import annotations

from typing import Any

import pairs
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from driftlab.config import Feedback, Rope
from driftlab.errors import ConfigError, ContractError
from driftlab.models.drafter import Drafter, Memory, Rotary, State
from driftlab.models.hooks import capture


def stepped(made: Drafter, *, size: int = 9, depth: int = 1) -> tuple[State, Memory]:
    """One text of random tokens and states, stepped to ``depth`` on true tokens."""
    tokens = pairs.ids(1, size + depth, seed=2)
    width = made.config.target_hidden_size * max(1, len(made.config.boundaries))
    aux = torch.randn(1, size, width, generator=torch.Generator().manual_seed(3))
    memory = made.new_memory()
    state = made.step(tokens[:, 1 : size + 1], made.fuse(aux), memory, depth=1)
    for d in range(2, depth + 1):
        state = made.step(tokens[:, d : size + d], state.feedback, memory, depth=d)
    return state, memory


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# --- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_a_deeper_layer_is_a_llama_layer(bias: bool) -> None:
    """At depth 1 a second layer does what HuggingFace's decoder layer does."""
    made: Any = pairs.drafter(num_layers=2, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    layer = LlamaDecoderLayer(
        LlamaConfig(  # type: ignore[call-arg]
            hidden_size=32,
            intermediate_size=80,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            attention_bias=bias,
            mlp_bias=bias,
            attn_implementation="eager",
        ),
        layer_idx=0,
    )
    layer.load_state_dict(made.layers[1].state_dict())
    with torch.no_grad(), capture(made, ["mlp.out", "resid.mid", "state.pre"]) as at:
        stepped(made)
    entering = at["resid.mid", 1] + at["mlp.out", 1]
    positions = torch.arange(9)[None]
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(layer.self_attn.config)
    with torch.no_grad():
        wanted = layer(
            entering,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary(entering, positions),
        )
    close(at["state.pre", 1], wanted)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(),
        Rope(theta=500000.0),
        Rope(rope_type="linear", parameters={"factor": 2.0}),
        Rope(
            rope_type="llama3",
            theta=500000.0,
            parameters={
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=lambda rope: f"{rope.rope_type}-{rope.theta:.0f}",
)
def test_rotation_is_huggingface_s(rope: Rope) -> None:
    settings = pairs.config(rope=rope)
    x = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 4, 9, 50, 200])
    parameters = {**rope.parameters, "rope_type": rope.rope_type, "rope_theta": rope.theta}
    table = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            max_position_embeddings=rope.max_position,
            rope_parameters=parameters,
        )
    )
    wanted, _ = apply_rotary_pos_emb(x, x, *table(x, positions[None]))
    close(Rotary(settings, 8)(x, positions), wanted)


def test_interleaved_rotation_turns_neighbours() -> None:
    """Pair i is (2i, 2i + 1), turned as a complex number; only the order of the result differs."""
    rotary = Rotary(pairs.config(rope=Rope(interleaved=True)), 8)
    x = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    close(rotary(x, positions), torch.cat([turned.real, turned.imag], dim=-1))


def test_an_unknown_rotary_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="'spiral' cannot be built"):
        pairs.drafter(rope=Rope(rope_type="spiral"))
    with pytest.raises(ConfigError, match="'yarn' cannot be built"):
        pairs.drafter(rope=Rope(rope_type="yarn"))  # no factor
    for factors in (1.0, [1.0], [1.0] * 5):  # transformers stretches a list of one in silence
        longrope = {"short_factor": factors, "long_factor": factors}
        longrope |= {"original_max_position_embeddings": 64}
        with pytest.raises(ConfigError, match="'longrope' cannot be built"):
            pairs.drafter(rope=Rope(rope_type="longrope", parameters=longrope))


@pytest.mark.parametrize("width", [1, 3, 5])
def test_heads_without_halves_are_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=r"'default' cannot be built.*\n.*even width"):
        pairs.drafter(head_dim=width)


@pytest.mark.parametrize("feedback", Feedback)
def test_the_head_is_normed_once_and_feedback_follows_its_name(feedback: Feedback) -> None:
    """Report 5. The gains differ: a second norm with equal gains would change nothing."""
    made = pairs.drafter(feedback=feedback)
    gains = torch.linspace(0.5, 4.0, pairs.WIDTH)
    with torch.no_grad():
        made.norm.weight.copy_(gains)
        state, _ = stepped(made, depth=2)
    rms = (state.pre.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(state.post, gains * state.pre / rms)
    close(made.logits(state), state.post @ made.lm_head.weight.T)
    fed = state.post if feedback is Feedback.post_norm else state.pre
    assert torch.equal(state.feedback, fed)


def test_an_open_gate_is_no_gate_and_a_half_open_one_halves() -> None:
    gated: Any = pairs.drafter(attention_gate=True)
    with torch.no_grad(), capture(gated, "attn.out") as at:
        gated.layers[0].self_attn.g_proj.weight.fill_(0.0)
        stepped(gated)
        half = at["attn.out", 1]
        bare: Any = pairs.drafter()
        bare.load_state_dict(gated.state_dict(), strict=False)
        with capture(bare, "attn.out") as plain:
            stepped(bare)
    close(half, plain["attn.out", 1] / 2)


@pytest.mark.parametrize("moves", [False, True])
def test_a_window_hides_what_is_out_of_it(moves: bool) -> None:
    """A window of 3 from the anchor, or from the drafted position when it moves."""
    made = pairs.drafter(windows=(3,), window_moves=moves)
    with torch.no_grad(), capture(made, "attn.pattern") as at:
        stepped(made, size=7, depth=5)
    for depth in range(1, 6):
        pattern = at["attn.pattern", depth][0].sum(0)  # [7, 7 + depth - 1]
        for t in range(7):
            newest = t + depth - 1 if moves else t
            keys = {k for k in range(t + 1) if newest - k < 3}
            chain = range(2, depth + 1)
            keys |= {7 + d - 2 for d in chain if not moves or depth - d < 3}
            assert set(pattern[t].nonzero()[:, 0].tolist()) == keys


def test_a_narrow_drafter_of_a_wide_target() -> None:
    """Report 42: the fused width is the target's, the state's is the drafter's."""
    made = pairs.drafter(target_hidden_size=48, boundaries=(1, 2, 3, 4, 4))
    assert made.fc.weight.shape == (32, 5 * 48)
    state, _ = stepped(made)
    assert state.pre.shape == (1, 9, 32)
    with pytest.raises(ContractError, match=r"fc expects 240 = 5 x 48.*width 96"):
        made.fuse(torch.zeros(1, 2, 96))


def test_norms_survive_half_precision() -> None:
    """Report 33: a vector of 300s overflows when it is squared in fp16."""
    made = pairs.drafter(fusion_norm="per_layer").half()
    with torch.no_grad():
        fused = made.fuse(torch.full((1, 3, 96), 300.0, dtype=torch.float16))
        post = made.norm(torch.full((1, 3, 32), 300.0, dtype=torch.float16))
    assert bool(torch.isfinite(fused).all()) and bool(torch.isfinite(post).all())
    assert bool(torch.isinf(torch.tensor(300.0, dtype=torch.float16) ** 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fusion", ["none", "per_layer", "concat"])
def test_states_of_another_dtype_are_cast(dtype: torch.dtype, fusion: str) -> None:
    made = pairs.drafter(fusion_norm=fusion)
    aux = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = made.fuse(aux)
    assert found.dtype == torch.float32
    assert torch.equal(found, made.fuse(aux.float()))


# --- memory -------------------------------------------------------------------------------------


def test_depths_run_in_order() -> None:
    made = pairs.drafter()
    u = torch.zeros(1, 3, 32)
    tokens = pairs.ids(1, 3)
    with pytest.raises(ContractError, match="0 anchors"):
        made.step(tokens, u, made.new_memory(), depth=2)
    memory = made.new_memory()
    state = made.step(tokens, u, memory, depth=1)
    with pytest.raises(ContractError, match="depths run in order"):
        made.step(tokens, state.feedback, memory, depth=3)
    state = made.step(tokens, state.feedback, memory, depth=2)
    with pytest.raises(ContractError, match="depths run in order"):
        made.step(tokens, state.feedback, memory, depth=2)
    with pytest.raises(ContractError, match="2 rows for 3 anchors"):
        made.step(tokens[:, :2], state.feedback[:, :2], memory, depth=3)


def test_anchors_are_selected_before_depth_two_and_inside_the_prefix() -> None:
    made = pairs.drafter()
    tokens, u = pairs.ids(1, 3), torch.zeros(1, 3, 32)
    memory = made.new_memory()
    state = made.step(tokens, u, memory, depth=1)
    with pytest.raises(ContractError, match=r"outside the prefix.*3"):
        memory.select(torch.tensor([3]))
    made.step(tokens, state.feedback, memory, depth=2)
    with pytest.raises(ContractError, match="before depth 2"):
        memory.select(torch.tensor([1]))


def test_a_new_round_forgets_the_chain_and_keeps_the_prefix() -> None:
    """A prefix in two pieces, drafted from in between, is the prefix in one."""
    made = pairs.drafter(feedback="post_norm")
    tokens = pairs.ids(1, 8)
    aux = torch.randn(1, 7, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, pieces = made.new_memory(), made.new_memory()
        one = made.step(tokens[:, 1:], made.fuse(aux), whole, depth=1)
        state = made.step(tokens[:, 1:5], made.fuse(aux[:, :4]), pieces, depth=1)
        pieces.select(torch.tensor([3]))
        for d in (2, 3):
            state = made.step(tokens[:, :1], state.feedback[:, -1:], pieces, depth=d)
        rest = made.fuse(aux[:, 4:], first=4)
        two = made.step(tokens[:, 5:], rest, pieces, depth=1)
    assert pieces.length == whole.length == 7 and not any(pieces.chain)
    assert pieces.anchors.tolist() == [4, 5, 6] == two.anchors.tolist()
    close(two.pre, one.pre[:, 4:])
    for a, b in zip(whole.prefix, pieces.prefix, strict=True):
        assert a is not None and b is not None
        close(a[0], b[0])
        close(a[1], b[1])


def test_a_state_s_rows_can_be_chosen() -> None:
    state, _ = stepped(pairs.drafter(), size=6)
    rows = torch.tensor([1, 4])
    some = state.select(rows)
    assert some.anchors.tolist() == [1, 4] and some.depth == 1
    assert torch.equal(some.post, state.post[:, rows])


# --- vocabulary and configuration ---------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, words",
    [
        (None, "a reduced draft vocabulary needs its map"),
        (torch.arange(39), "one entry per draft id"),
        (torch.arange(40) + 60, r"leaves the target's 97 ids \(got draft id 37 -> 97\)"),
        (torch.arange(40) - 1, r"draft id 0 -> -1"),
        (torch.arange(40).clamp(max=38), "two draft ids to one"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(ids: Tensor | None, words: str) -> None:
    """Report 9: no identity is assumed unless the sizes are equal."""
    with pytest.raises(ContractError, match=words):
        Drafter(pairs.config(), ids)


def test_ids_go_there_and_back() -> None:
    made = pairs.drafter()
    draft = torch.arange(40)
    assert torch.equal(made.target_to_draft[made.to_target(draft)], draft)
    assert int((made.target_to_draft >= 0).sum()) == 40
    full = Drafter(pairs.config(draft_vocab_size=97))
    assert torch.equal(full.to_target(torch.arange(97)), torch.arange(97))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "4 is not a multiple of num_kv_heads 3"),
        ({"boundaries": (3, 1, 2)}, "must ascend"),
        ({"boundaries": (-1, 1, 2)}, ">= 0"),
        ({"draft_vocab_size": 98}, "exceeds vocab_size"),
        ({"windows": (3, 3)}, "2 windows for 1 layers"),
        ({"boundaries": (), "fusion_norm": "concat"}, "no fusion norm"),
        ({"norm_output": True}, "norm_output"),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        pairs.config(**changes)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({}, "none+pre_norm"),
        ({"fusion_norm": "per_layer", "feedback": "post_norm"}, "per_layer+post_norm"),
        ({"residual": "normed"}, "none+pre_norm+normed"),
    ],
)
def test_a_variant_is_named_by_its_enums(changes: dict[str, Any], name: str) -> None:
    assert pairs.config(**changes).variant == name
