"""Sizes, attention, biases and windows of the layers, from shapes and config."""

from __future__ import annotations

from typing import Any

from transformers.activations import ACT2FN

from driftlab.config import MLA, Origin, Sourced
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.sheet import Sheet, there


def count_layers(sheet: Sheet) -> int:
    parts = [n.split(".") for n in sheet.tensors if n.startswith("layers.")]
    indices = {int(p[1]) for p in parts if len(p) > 2 and p[1].isdigit()}
    if indices != set(range(len(indices))) or not indices:
        raise CheckpointError(
            "the drafter's layers are not numbered from 0 on",
            got=f"layers {sorted(indices)}" if indices else "no layers.* or midlayer.* tensor",
        )
    count = len(indices)
    said = sheet.layer.get("num_hidden_layers", int)
    if said is not None and said.origin is Origin.read and said.value != count:
        text = f"{said.where} is {said.value}, the file holds {count} layer(s)"
        if sheet.dialect is Dialect.automodel:
            sheet.ledger.note(f"{text}; Automodel saves the target's number")
        else:
            sheet.ledger.conflict(f"{text}, which were taken")
    return sheet.ledger.derived("num_layers", count, "tensor names")


def resolve_attention(sheet: Sheet, heads: Sourced, hidden: int, mla: bool) -> dict[str, Any]:
    ledger, layer = sheet.ledger, sheet.layer
    ledger.take("num_heads", heads)
    bias = _biases(sheet, mla)
    gate = "layers.0.self_attn.g_proj.weight" in sheet.tensors
    ledger.derived("attention_gate", gate, f"g_proj {'there' if gate else 'absent'}")
    common = {"num_heads": heads.value, "attention_gate": gate, **bias}
    if mla:
        return common | _low_rank(sheet, heads.value)
    groups = layer.get("num_key_value_heads", int) or Sourced(
        value=heads.value,
        origin=Origin.derived,
        where="num_key_value_heads is absent, one per head",
    )
    rows = sheet.shape("layers.0.self_attn.q_proj.weight")[0]
    size, rest = divmod(rows, heads.value)
    said = layer.get("head_dim", int)
    if said is not None and said.origin is Origin.read:
        if said.value * heads.value != rows:
            raise sheet.lie(
                "num_attention_heads x head_dim",
                f"{heads.value} x {said.value}",
                "layers.0.self_attn.q_proj.weight",
                f"{rows} rows",
            )
        ledger.take("head_dim", said)
    elif rest:
        raise sheet.lie(
            "num_attention_heads",
            heads.value,
            "layers.0.self_attn.q_proj.weight",
            f"{rows} rows",
        )
    else:
        if size * heads.value != hidden:
            ledger.note(
                f"head_dim is absent; {rows} rows of q_proj for {heads.value} heads give {size}"
            )
        ledger.derived("head_dim", size, "q_proj rows over num_attention_heads")
    if (
        groups.value <= 0
        or groups.value * size != sheet.shape("layers.0.self_attn.k_proj.weight")[0]
    ):
        raise sheet.lie(
            "num_key_value_heads x head_dim",
            f"{groups.value} x {size} (num_attention_heads {heads.value})",
            "layers.0.self_attn.k_proj.weight",
            f"{sheet.shape('layers.0.self_attn.k_proj.weight')[0]} rows",
        )
    ledger.take("num_kv_heads", groups)
    normed = _qk_norm(sheet)
    return common | {"num_kv_heads": groups.value, "head_dim": size, "qk_norm": normed}


def _low_rank(sheet: Sheet, heads: int) -> dict[str, Any]:
    layer, ledger = sheet.layer, sheet.ledger
    unturned = layer.get("mla_use_nope", bool)
    if unturned is not None and unturned.value:
        raise CheckpointError(
            f"{unturned.where} is on: low-rank attention without rotation is not read",
            remedy="driftlab reads low-rank attention that turns qk_rope_head_dim of a head.",
        )
    nope = layer.positive("qk_nope_head_dim").value
    rope = layer.positive("qk_rope_head_dim").value
    value = layer.positive("v_head_dim").value
    rank = layer.positive("kv_lora_rank").value
    stem = "layers.0.self_attn."
    down = f"{stem}kv_a_proj_with_mqa.weight"
    if sheet.shape(down)[0] != rank + rope:
        raise sheet.lie("kv_lora_rank + qk_rope_head_dim", f"{rank} + {rope}", down, "rows")
    up = f"{stem}kv_b_proj.weight"
    if sheet.shape(up) != (heads * (nope + value), rank):
        raise sheet.lie(
            "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
            f"{heads} x ({nope} + {value})",
            up,
            "rows",
        )
    q_rank = None
    if f"{stem}q_a_proj.weight" in sheet.tensors:
        q_rank = sheet.shape(f"{stem}q_a_proj.weight")[0]
        said = layer.get("q_lora_rank", int)
        if said is not None and said.value != q_rank:
            raise sheet.lie("q_lora_rank", said.value, f"{stem}q_a_proj.weight", q_rank)
    mla = MLA(
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )
    ledger.derived("mla", mla, "low-rank projections")
    ledger.derived("num_kv_heads", heads, "low-rank attention has one per head")
    ledger.derived("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    ledger.derived("qk_norm", False, "low-rank attention norms its latents")
    return {"mla": mla, "num_kv_heads": heads, "head_dim": nope + rope, "qk_norm": False}


def _biases(sheet: Sheet, mla: bool) -> dict[str, bool]:
    """Presence of each bias, the same in every layer, against ``attention_bias``."""
    n = sheet.ledger["num_layers"]
    inputs = ("q_a_proj", "kv_a_proj_with_mqa") if mla else ("q_proj", "k_proj", "v_proj")
    groups = {
        "qkv_bias": tuple(f"self_attn.{stem}" for stem in inputs),
        "out_bias": ("self_attn.o_proj",),
        "mlp_bias": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    }
    found: dict[str, bool] = {}
    for name, stems in groups.items():
        owners = [
            f"layers.{i}.{stem}"
            for i in range(n)
            for stem in stems
            if f"layers.{i}.{stem}.weight" in sheet.tensors
        ]
        present = [f"{owner}.bias" in sheet.tensors for owner in owners]
        if any(present) and not all(present):
            lacking = [f"{o}.bias" for o, p in zip(owners, present, strict=True) if not p]
            raise CheckpointError(
                f"{name}: some of its tensors are missing", got=", ".join(lacking)
            )
        found[name] = any(present)
        sheet.ledger.derived(name, found[name], f"bias tensors {there(any(present))}")
    found["fc_bias"] = sheet.ledger.derived(
        "fc_bias", "fc.bias" in sheet.tensors, f"fc.bias {there('fc.bias' in sheet.tensors)}"
    )
    for flag, name in (("attention_bias", "qkv_bias"), ("mlp_bias", "mlp_bias")):
        said = sheet.layer.get(flag, bool)
        if said is None or said.origin is not Origin.read or sheet.ledger.overridden(name):
            continue
        either = found[name] or (flag == "attention_bias" and found["out_bias"])
        if said.value != either:
            raise CheckpointError(
                f"{said.where} is {said.value}, but its bias tensors are {there(either)}",
                remedy=f"Correct the config, or override {name}.",
            )
    return found


def _qk_norm(sheet: Sheet) -> bool:
    names = [
        f"layers.{i}.self_attn.{stem}_norm.weight"
        for i in range(sheet.ledger["num_layers"])
        for stem in "qk"
    ]
    present = [name in sheet.tensors for name in names]
    if any(present) != all(present):
        lacking = [n for n, p in zip(names, present, strict=True) if not p]
        raise CheckpointError("some QK norms are missing", got=", ".join(lacking))
    if sheet.dialect is Dialect.speculators and not sheet.ledger.overridden("qk_norm"):
        kind = sheet.ledger["model_type"]
        if kind.startswith("qwen3") != all(present) and kind in {"llama", "qwen3"}:
            raise CheckpointError(
                f"{sheet.layer.where}: model_type is {kind}, but QK norms are "
                f"{there(all(present))}",
                got=", ".join(names),
                remedy="Correct model_type, or override qk_norm.",
            )
    return sheet.ledger.derived("qk_norm", all(present), f"QK norms {there(all(present))}")


def resolve_mlp(sheet: Sheet) -> dict[str, Any]:
    gate = "layers.0.mlp.gate_proj.weight"
    size = sheet.sized("intermediate_size", gate, sheet.shape(gate)[0])
    sheet.ledger.derived("intermediate_size", size, gate)
    act = sheet.layer.get("hidden_act", str)
    if act is None:
        sheet.ledger.assumed("hidden_act", "silu", "hidden_act is absent")
    elif fault := activation_fault(act.value):
        raise CheckpointError(
            f"{act.where} {fault}",
            got=repr(act.value),
            remedy="Name the activation that the drafter was trained with, often silu.",
        )
    else:
        sheet.ledger.take("hidden_act", act)
    eps = sheet.layer.get("rms_norm_eps", float)
    if eps is None:
        sheet.ledger.assumed("norm_eps", 1e-6, "rms_norm_eps is absent, transformers' default")
    elif not 0 < eps.value < 1:  # above, it would outweigh the mean square that it guards
        raise CheckpointError(
            f"{eps.where} must lie between 0 and 1",
            got=eps.value,
            remedy="Correct it in the config; trainers write 1e-5 or 1e-6.",
        )
    else:
        sheet.ledger.take("norm_eps", eps)
    return {
        "intermediate_size": size,
        "hidden_act": sheet.ledger["hidden_act"],
        "norm_eps": sheet.ledger["norm_eps"],
    }


def activation_fault(name: str) -> str | None:
    """Why a drafter cannot have this activation, or None."""
    if name not in ACT2FN:
        return "is unknown to transformers"
    return "has weights of its own" if list(ACT2FN[name].parameters()) else None


def resolve_windows(sheet: Sheet, layers: int) -> tuple[int | None, ...]:
    ledger = sheet.ledger
    fields = sheet.layer
    types = fields.data.get("layer_types") or fields.defaults.get("layer_types") or []
    if not isinstance(types, list) or any(not isinstance(t, str) for t in types):
        raise CheckpointError(f"{fields.where}: layer_types is no list of names", got=types)
    size = fields.get("sliding_window", int)
    sliding = [t == "sliding_attention" for t in types[:layers]]
    if not any(sliding) or size is None:
        return ledger.derived("windows", (), "no sliding_attention layer with a window")
    if len(types) < layers:
        raise CheckpointError(f"{fields.where}: layer_types names {len(types)} of {layers} layers")
    if not sheet.traits.windows:
        ledger.note(
            f"{fields.where}: sliding_window {size.value} is ignored, {sheet.dialect} trains "
            "with full attention"
        )
        return ledger.assumed("windows", (), f"{sheet.dialect} has no sliding windows")
    if size.value <= 0:
        raise CheckpointError(f"{size.where} must be above 0", got=size.value)
    windows = tuple(size.value if s else None for s in sliding)
    ledger.note("windows count from the anchor, as trained; engines count from the draft")
    return ledger.put("windows", windows, size.origin, f"layer_types, {size.where}")
