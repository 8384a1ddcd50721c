"""Who wrote a file: recognition, what each trainer does, and canonical tensor names.

The dialects of docs/checkpoints.md, as code. Nothing is resolved here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from driftlab.config import Origin, Sourced
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.read import UNUSED

NATIVE_KEY = "driftlab_drafter"
EXPORT_KEY = "driftlab_export"


class Dialect(StrEnum):
    driftlab = "driftlab"
    safeailab = "safeailab"  # D1
    specforge = "specforge"  # D2
    torchspec_gqa = "torchspec-gqa"  # D3
    torchspec_mla = "torchspec-mla"  # D4
    speculators = "speculators"  # D5
    modelopt_hf = "modelopt-hf"  # D6
    modelopt_megatron = "modelopt-megatron"  # D7
    automodel = "automodel"  # D8
    angelslim = "angelslim"  # D9
    vllm = "vllm"  # written for an engine, trainer unknown
    sglang = "sglang"


@dataclass(frozen=True)
class Traits:
    """What the trainer of a dialect computes, where its config does not say.

    ids: what ``eagle_config`` layer ids mean: the boundary itself, or the block before it.
    fixed_ids: the trainer has no other than the default boundaries.
    residual_flag, norm_output: whether the trainer knows the flag; "head" is the older
        SpecForge, where it decides only whether the head reads the normed state.
    rotary: "own" classes ignore ``partial_rotary_factor``, "hf" is transformers'.
    windows: the trainer has sliding windows.
    """

    ids: Literal["entry", "output"] = "output"
    fixed_ids: bool = False
    residual_flag: bool = False
    norm_output: Literal["no", "feedback", "head"] = "no"
    rotary: Literal["own", "hf"] = "hf"
    windows: bool = False


_ENGINE = Traits(residual_flag=True, norm_output="feedback", windows=True)
TRAITS: Mapping[Dialect, Traits] = {
    Dialect.safeailab: Traits(ids="entry", fixed_ids=True, rotary="own"),
    Dialect.specforge: Traits(norm_output="head", rotary="own"),
    Dialect.torchspec_gqa: Traits(norm_output="feedback", rotary="own"),
    Dialect.torchspec_mla: Traits(norm_output="feedback", rotary="own"),
    Dialect.speculators: Traits(
        ids="entry", residual_flag=True, norm_output="feedback", windows=True
    ),
    Dialect.modelopt_hf: Traits(residual_flag=True),
    Dialect.modelopt_megatron: Traits(residual_flag=True),
    Dialect.automodel: Traits(norm_output="feedback"),
    Dialect.angelslim: Traits(ids="entry", fixed_ids=True, rotary="own"),
    Dialect.vllm: _ENGINE,
    Dialect.sglang: _ENGINE,
}


# Refusals -------------------------------------------------------------------------------


def refuse_other_families(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when the files hold another kind of drafter, by its name."""
    eagle = _eagle(config)
    names = [name.removeprefix("model.") for name in tensors]
    architectures = " ".join(_architectures(config)).lower()
    kind = str(config.get("speculators_model_type") or "eagle3").lower()

    def key(*keys: str) -> str | None:
        return next((k for k in keys if config.get(k) or _of(eagle, k)), None)

    def tensor(*stems: str) -> str | None:
        return next((n for n in names if any(s in f".{n}" for s in stems)), None)

    dspark = key("dspark_target_layer_ids", "dspark_config") or tensor("markov_")
    dflash = key("dflash_config", "target_layer_ids") or (_of(eagle, "layer_ids") and "layer_ids")
    peagle = key("mask_token_id", "pard_token", "parallel_drafting") or tensor("mask_hidden")
    steps = config.get("parallel_draft_step") or _of(eagle, "parallel_draft_step")
    if isinstance(steps, int) and steps > 1:
        peagle = peagle or "parallel_draft_step"
    families = {
        "DSpark": dspark or ("dspark" in architectures + kind and "its architecture"),
        "DFlash": dflash or ("dflash" in architectures + kind and "its architecture"),
        "P-EAGLE": peagle or ("peagle" in architectures + kind and "its architecture"),
        "MTP": tensor("eh_proj.", ".enorm.", ".hnorm.", ".mtp.") or ("mtp" in kind and "its type"),
        "EAGLE-1/2": kind == "eagle" and "its type",
        "Medusa": tensor("medusa_head") or ("medusa" in architectures and "its architecture"),
    }
    for family, sign in families.items():
        if sign:
            raise _other(family, str(sign))
    if kind not in {"eagle3", "eagle-3"}:
        raise _other(f"speculators {kind!r}", "speculators_model_type")


def refuse_other_eagle(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for EAGLE-1/2 and early-stop heads, which only shapes tell apart."""
    first = _first_projection(tensors)
    norm, fc = tensors.get("norm.weight"), tensors.get("fc.weight")
    # EAGLE-1/2 has no final norm of its own.
    sized = norm if norm is not None else fc
    if sized is None or sized.dim() == 0:
        return
    hidden_size = sized.shape[0]
    if fc is not None and fc.dim() == 2 and fc.shape[0] in {hidden_size + 1, hidden_size + 3}:
        raise _other("AngelSlim early-stop", f"fc.weight with {fc.shape[0]} outputs")
    if first is not None and tensors[first].shape[-1] == hidden_size:
        raise _other("EAGLE-1/2", f"{first} with {hidden_size} input features, not twice as many")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures") or []
    if not isinstance(found, list) or any(not isinstance(name, str) for name in found):
        raise CheckpointError("config.json: architectures is no list of names", got=repr(found))
    return found


def _eagle(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("eagle_config") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError("config.json: eagle_config is no object", got=repr(found))
    return found


def _first_projection(tensors: Mapping[str, Tensor]) -> str | None:
    stems = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
    names = (f"layers.0.self_attn.{stem}.weight" for stem in stems)
    return next((name for name in names if name in tensors and tensors[name].dim() == 2), None)


def _other(family: str, sign: str) -> CheckpointError:
    return CheckpointError(
        f"this is a {family} drafter, told by {sign}",
        remedy="driftlab reads autoregressive EAGLE-3 and EAGLE-3.1 drafters.",
    )


def _of(mapping: object, key: str) -> Any:
    return mapping.get(key) if isinstance(mapping, Mapping) else None


# Recognition ----------------------------------------------------------------------------


def recognise(config: Mapping[str, Any], names: Iterable[str]) -> Sourced:
    """The dialect, and whether the signs are decisive (derived) or a best guess (assumed)."""
    names = set(names)
    exported = _of(config.get(EXPORT_KEY), "layout")
    if exported is not None:
        try:
            return _read(Dialect(exported), f"{EXPORT_KEY}.layout")
        except ValueError:
            raise CheckpointError(
                f"config.json: {EXPORT_KEY}.layout is unknown", got=exported
            ) from None
    if config.get("speculators_model_type") is not None or "transformer_layer_config" in config:
        return _read(Dialect.speculators, "speculators_model_type")
    arch = next(iter(_architectures(config)), "")
    eagle = _eagle(config)
    midlayer = any(n.startswith("midlayer.") for n in names)
    embedded = bool({"embed_tokens.weight", "model.embed_tokens.weight"} & names)
    torchspec = config.get("_torchspec_version") is not None
    if arch == "LlamaForCausalLMEagle3Deep":
        return _derived(Dialect.modelopt_megatron, f"architecture {arch}")
    if any(n.startswith("model.layers.") for n in names) or arch.endswith("Eagle3DraftModel"):
        return _derived(Dialect.automodel, f"architecture {arch or 'absent'}, keys under model.")
    if arch == "Eagle3LlamaForCausalLM" and midlayer:
        return _derived(Dialect.angelslim, f"architecture {arch}, keys midlayer.*")
    if arch == "Eagle3DeepseekV2ForCausalLM":
        if torchspec:
            return _derived(Dialect.torchspec_mla, "_torchspec_version")
        dialect = Dialect.torchspec_mla if embedded else Dialect.modelopt_hf
        return _assumed(dialect, f"architecture {arch}, embeddings {_there(embedded)}")
    if arch == "LlamaForCausalLMEagle3":
        if torchspec:
            return _derived(Dialect.torchspec_gqa, "_torchspec_version")
        if "next_layer_regular" in eagle and not embedded:
            dialect = Dialect.modelopt_megatron if midlayer else Dialect.modelopt_hf
            return _derived(dialect, "eagle_config.next_layer_regular, no embeddings")
        if midlayer:
            return _specforge_or_torchspec(config, names, embedded)
        # A trainer that does not know the flag does not write it.
        if embedded and config.get("norm_before_residual") is None:
            return _assumed(Dialect.torchspec_gqa, "keys layers.0.*, embeddings there")
        return _assumed(Dialect.vllm, f"architecture {arch}, no trainer's sign")
    if midlayer:
        decisive = arch == "LlamaForCausalLM" and "draft_vocab_size" in config
        make = _derived if decisive else _assumed
        return make(Dialect.safeailab, f"architecture {arch or 'absent'}, keys midlayer.*")
    return _assumed(Dialect.vllm, f"architecture {arch or 'absent'}, no trainer's sign")


def _specforge_or_torchspec(config: Mapping[str, Any], names: set[str], embedded: bool) -> Sourced:
    """Both write the same keys in training dumps; they differ in small habits only."""
    same = config.get("draft_vocab_size") == config.get("vocab_size")
    if not embedded:
        return _derived(Dialect.specforge, "keys midlayer.*, no embeddings")
    if same and "d2t" in names:
        return _derived(Dialect.specforge, "keys midlayer.*, d2t of a full vocabulary")
    if same:
        return _derived(Dialect.torchspec_gqa, "keys midlayer.*, no d2t for a full vocabulary")
    if config.get("rope_parameters"):
        # SpecForge runs on transformers 5, TorchSpec on transformers 4.
        return _assumed(Dialect.specforge, "keys midlayer.*, config of transformers 5")
    return _assumed(Dialect.torchspec_gqa, "keys midlayer.*, embeddings, config of transformers 4")


def _there(present: bool) -> str:
    return "there" if present else "absent"


def _read(dialect: Dialect, where: str) -> Sourced:
    return Sourced(value=dialect, origin=Origin.read, where=where)


def _derived(dialect: Dialect, where: str) -> Sourced:
    return Sourced(value=dialect, origin=Origin.derived, where=where)


def _assumed(dialect: Dialect, where: str) -> Sourced:
    return Sourced(value=dialect, origin=Origin.assumed, where=where)


# Names ----------------------------------------------------------------------------------

_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(\d+)\."), r"layers.\1."),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^fc_norms\."), "fc_norm."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
)
_LATER_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.weight$")


def canonical_names(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors under the names that :class:`driftlab.models.drafter.Drafter` uses.

    ``d2t`` and ``t2d`` keep their names. Unknown names pass through and are refused later.

    Raises
    ------
    CheckpointError: two tensors of the file have the same canonical name.
    """
    found: dict[str, Tensor] = {}
    origin: dict[str, str] = {}

    def put(name: str, tensor: Tensor, source: str) -> None:
        if name in found:
            raise CheckpointError(
                f"two tensors of the file are {name}", got=f"{origin[name]} and {source}"
            )
        found[name], origin[name] = tensor, source

    for source, tensor in tensors.items():
        name = source
        for pattern, text in _RENAMES:
            name = pattern.sub(text, name)
        if UNUSED.search(name):
            continue
        # Layers above the first have one entry norm, under either of two names.
        later = _LATER_NORM.match(name)
        if later:
            name = f"layers.{later[1]}.input_layernorm.weight"
        for part, piece in _unfused(name, tensor, config).items():
            put(part, piece, source)
    return found


def _unfused(name: str, tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parts of a fused ``qkv_proj`` or ``gate_up_proj``; other tensors as they are."""
    if tensor.dim() == 0:
        return {name: tensor}  # refused later, as every wrong shape
    if ".mlp.gate_up_proj." in name and tensor.shape[0] % 2 == 0:
        gate, up = tensor.chunk(2)
        return {
            name.replace("gate_up_proj", "gate_proj"): gate,
            name.replace("gate_up_proj", "up_proj"): up,
        }
    if ".self_attn.qkv_proj." in name:
        heads = config.get("num_attention_heads")
        groups = config.get("num_key_value_heads") or heads
        if isinstance(heads, int) and isinstance(groups, int) and heads > 0 and groups > 0:
            each, rest = divmod(tensor.shape[0], heads + 2 * groups)
            if rest == 0:
                parts = torch.split(tensor, [heads * each, groups * each, groups * each])
                return {
                    name.replace("qkv_proj", f"{stem}_proj"): part
                    for stem, part in zip("qkv", parts, strict=True)
                }
    return {name: tensor}
