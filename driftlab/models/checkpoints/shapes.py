"""Names and shapes that a drafter must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from driftlab.config import MLA, FusionNorm
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.sheet import Sheet


def _states(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> int:
    if "fc.weight" not in tensors:
        return 0
    return tensors["fc.weight"].shape[1] // fields["target_hidden_size"]


def expected_shapes(
    fields: Mapping[str, Any], states: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the drafter's tensors, vocabulary map aside."""
    h, wide = fields["hidden_size"], states * fields["target_hidden_size"]
    yield "embed_tokens.weight", (fields["vocab_size"], h)
    yield "lm_head.weight", (fields["draft_vocab_size"], h)
    yield "norm.weight", (h,)
    if states:
        yield "fc.weight", (h, wide)
        if fields["fc_bias"]:
            yield "fc.bias", (h,)
    if fields["fusion_norm"] in {FusionNorm.concat, FusionNorm.concat_per_layer}:
        yield "input_norm.weight", (wide,)
    if fields["fusion_norm"] in {FusionNorm.per_layer, FusionNorm.concat_per_layer}:
        for i in range(states):
            yield f"fc_norm.{i}.weight", (fields["target_hidden_size"],)
    for i in range(fields["num_layers"]):
        stem = f"layers.{i}."
        yield f"{stem}input_layernorm.weight", (h,)
        yield f"{stem}post_attention_layernorm.weight", (h,)
        if i == 0:
            yield f"{stem}hidden_norm.weight", (h,)
        for name, rows, columns, bias in _linear(fields, h * 2 if i == 0 else h):
            yield f"{stem}{name}.weight", (rows, columns)
            if bias:
                yield f"{stem}{name}.bias", (rows,)
        mla: MLA | None = fields.get("mla")
        if mla is not None:
            yield f"{stem}self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,)
            if mla.q_lora_rank is not None:
                yield f"{stem}self_attn.q_a_layernorm.weight", (mla.q_lora_rank,)
        elif fields["qk_norm"]:
            yield f"{stem}self_attn.q_norm.weight", (fields["head_dim"],)
            yield f"{stem}self_attn.k_norm.weight", (fields["head_dim"],)


def _linear(fields: Mapping[str, Any], wide: int) -> Iterator[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, bias) of a layer's projections; ``wide`` is attention's input."""
    h, heads, e = fields["hidden_size"], fields["num_heads"], fields["head_dim"]
    mla: MLA | None = fields.get("mla")
    bias = fields["qkv_bias"]
    value = heads * (e if mla is None else mla.v_head_dim)
    if mla is None:
        groups = fields["num_kv_heads"]
        yield "self_attn.q_proj", heads * e, wide, bias
        yield "self_attn.k_proj", groups * e, wide, bias
        yield "self_attn.v_proj", groups * e, wide, bias
    else:
        if mla.q_lora_rank is None:
            yield "self_attn.q_proj", heads * e, wide, False
        else:
            yield "self_attn.q_a_proj", mla.q_lora_rank, wide, bias
            yield "self_attn.q_b_proj", heads * e, mla.q_lora_rank, False
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        yield "self_attn.kv_a_proj_with_mqa", down, wide, bias
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "self_attn.kv_b_proj", up, mla.kv_lora_rank, False
    yield "self_attn.o_proj", h, value, fields["out_bias"]
    if fields["attention_gate"]:
        yield "self_attn.g_proj", value, wide, False
    ffn, mlp_bias = fields["intermediate_size"], fields["mlp_bias"]
    yield "mlp.gate_proj", ffn, h, mlp_bias
    yield "mlp.up_proj", ffn, h, mlp_bias
    yield "mlp.down_proj", h, ffn, mlp_bias


def check_shapes(sheet: Sheet, fields: dict[str, Any]) -> None:
    """Every expected tensor has its shape, and no other tensor is there."""
    states = _states(sheet.tensors, fields)
    want = dict(expected_shapes(fields, states))
    optional = {"embed_tokens.weight", "lm_head.weight"}
    have = {n: tuple(t.shape) for n, t in sheet.tensors.items() if n not in {"d2t", "t2d"}}
    missing = sorted(set(want) - set(have) - optional)
    unknown = sorted(set(have) - set(want))
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"missing: {', '.join(missing)}")
        if unknown:
            parts.append(f"unknown: {', '.join(unknown)}")
        raise CheckpointError(
            f"{sheet.files.folder / sheet.files.weights}: tensors do not fit a "
            f"{sheet.dialect} drafter",
            got="; ".join(parts),
            remedy="Nothing is skipped or filled in; correct the names or the file.",
        )
    wrong = [f"{n} {have[n]}, expected {want[n]}" for n in have if have[n] != want[n]]
    if wrong:
        raise CheckpointError(
            f"{sheet.files.folder / sheet.files.weights}: wrong shapes",
            got="; ".join(wrong[:6]),
            remedy="Config and weights do not belong together.",
        )
