"""A drafter in the layouts of a trainer or an engine, or a clear refusal.

Each layout writes layer ids in its own convention (docs/checkpoints.md) and refuses what
its reader would drop or compute otherwise. What only some versions of a reader do comes back
as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from driftlab.config import DrafterConfig, Feedback, FusionNorm, Origin, Residual, Rope
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.boundaries import IDS
from driftlab.models.checkpoints.dialects import EXPORT_KEY, Dialect
from driftlab.models.checkpoints.rope import THETA, softmax_multiplier, yarn_magnitude
from driftlab.models.checkpoints.sheet import TargetLike
from driftlab.models.drafter import Drafter


@dataclass(frozen=True)
class Layout:
    """What will be written, and what a user should know about it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def writable(name: str) -> Dialect:
    """The layout of that name; raises CheckpointError for one that driftlab does not write."""
    for known in (Dialect.driftlab, *_LAYOUTS):
        if name == known:
            return known
    raise CheckpointError(
        "driftlab does not write this layout",
        got=name,
        remedy=f"Layouts: {', '.join([Dialect.driftlab, *_LAYOUTS])}.",
    )


def lay_out(drafter: Drafter, dialect: Dialect, target: TargetLike | None) -> Layout:
    """Config and tensors of ``drafter`` in another layout.

    Raises
    ------
    CheckpointError: the layout cannot hold this drafter.
    """
    config = drafter.config
    said = drafter.provenance.get("double_hidden_norm")
    if config.double_hidden_norm and said is not None and said.origin is Origin.assumed:
        raise CheckpointError(
            f"the {dialect} layout cannot hold the double hidden norm, which was assumed",
            got=said.where,
            remedy="Let the weights settle it: driftlab doctor --target TARGET --drafter DRAFTER "
            f"--fix FOLDER; then driftlab export FOLDER --to {dialect} --out OUT.",
        )
    _refuse(
        dialect,
        (
            (config.logits_from_raw, "logits read from the state before the final norm"),
            (config.double_hidden_norm, "the double hidden norm"),
            (config.draft_position_offset != 0, "shifted draft positions"),
            (config.window_moves and bool(config.windows), "windows that move with the draft"),
            (config.attention_gate, "gated attention"),
            (config.fc_bias, "a bias in fc"),
            (len({*config.boundaries}) < len(config.boundaries), "a captured state twice"),
            (
                config.rope.interleaved != (config.mla is not None),
                "its pairing of rotated dimensions",
            ),
            (config.rope.rope_type == "proportional", "proportional rotation"),
        ),
    )
    return _LAYOUTS[dialect](drafter, target)


def _refuse(dialect: Dialect, limits: Iterable[tuple[bool, str]]) -> None:
    held = [what for present, what in limits if present]
    if held:
        raise CheckpointError(
            f"the {dialect} layout cannot hold {', '.join(held)}",
            remedy="Write driftlab's own layout, or train a drafter without it.",
        )


def _window(dialect: Dialect, config: DrafterConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``: one size for all layers that have one."""
    if not config.windows:
        return {}
    sizes = {w for w in config.windows if w is not None}
    _refuse(dialect, [(len(sizes) > 1, f"windows of several sizes ({config.windows})")])
    types = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {"sliding_window": next(iter(sizes), None), "layer_types": types}


def _rope_block(rope: Rope) -> dict[str, Any]:
    # The default rotation has none: engines would turn a part of each head for its factor.
    parameters = {} if rope.rope_type == "default" else rope.parameters
    return {"rope_type": rope.rope_type, "rope_theta": rope.theta, **parameters}


def _uneven(config: DrafterConfig, *, llama: bool) -> tuple[bool, str]:
    """What transformers' Llama config refuses, where the reader goes through it."""
    what = f"{config.num_heads} heads, which do not divide the width {config.hidden_size}"
    return llama and config.hidden_size % config.num_heads != 0, what


def _engine_rope(dialect: Dialect, config: DrafterConfig) -> dict[str, Any]:
    """vLLM's and SGLang's rotary block, whose yarn and dynamic types are their own."""
    rope = config.rope
    block = _rope_block(rope)
    limits = [(rope.rope_type == "dynamic", "dynamic rotation, which it stretches at any length")]
    if config.mla is not None:
        yarn = rope.rope_type in {"default", "yarn"}
        limits += [
            (not yarn, f"{rope.rope_type} rotation of low-rank attention"),
            (
                config.mla.softmax_multiplier != softmax_multiplier(rope),
                "a softmax scale that its rotary block does not imply",
            ),
        ]
    elif rope.rope_type == "yarn":
        given = rope.parameters.get("attention_factor")
        plain = yarn_magnitude(rope.parameters["factor"], 1.0)
        if given is not None and given != plain:
            block["attn_factor"] = given / plain  # their name, relative to yarn's own
    _refuse(dialect, limits)
    return block


def _sizes(config: DrafterConfig) -> dict[str, Any]:
    found = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.rope.max_position,
        "tie_word_embeddings": False,
    }
    if config.mla is None:
        return found | {"head_dim": config.head_dim}
    return found | config.mla.model_dump(exclude={"softmax_multiplier"})


def _maps(drafter: Drafter) -> dict[str, Tensor]:
    """d2t as offsets and t2d as a mask; nothing when draft ids are target ids."""
    ids, config = drafter.draft_to_target, drafter.config
    arange = torch.arange(len(ids), device=ids.device)
    if config.draft_vocab_size == config.vocab_size and torch.equal(ids, arange):
        return {}
    mask = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return {"d2t": ids - arange, "t2d": mask}


def _reorders(drafter: Drafter) -> bool:
    """Whether every target id is drafted, under a map that a reader of a full head ignores."""
    return bool(_maps(drafter)) and drafter.config.draft_vocab_size == drafter.config.vocab_size


def _tensors(drafter: Drafter, *, first: str = "layers.0.") -> dict[str, Tensor]:
    state = {n: t for n, t in drafter.state_dict().items() if n != "draft_to_target"}
    named = {
        first + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n: t
        for n, t in state.items()
    }
    return named | _maps(drafter)


def _flags(config: DrafterConfig) -> dict[str, Any]:
    """The switches, at top level and in the words of vLLM and speculators."""
    per_layer = {FusionNorm.per_layer, FusionNorm.concat_per_layer}
    concat = {FusionNorm.concat, FusionNorm.concat_per_layer}
    return {
        "fc_norm": config.fusion_norm in per_layer,
        "norm_before_fc": config.fusion_norm in concat,
        "norm_output": config.feedback is Feedback.post_norm,
        "norm_before_residual": config.residual is Residual.normed,
    }


def _mark(config: DrafterConfig, dialect: Dialect) -> dict[str, Any]:
    """What lets driftlab read its own export without assuming anything; others ignore it."""
    return {EXPORT_KEY: {"layout": str(dialect), "boundaries": list(config.boundaries)}}


def _engine(drafter: Drafter, dialect: Dialect) -> dict[str, Any]:
    """The config that vLLM and SGLang share."""
    config = drafter.config
    mla = config.mla is not None
    _refuse(
        dialect,
        (
            (config.hidden_act != "silu", f"activation {config.hidden_act}"),
            (mla and config.num_layers > 1, "several layers of low-rank attention"),
            (mla and not config.boundaries, "low-rank attention without captured states"),
            (mla and config.residual is Residual.normed, "low-rank attention, normed residual"),
            (mla and bool(config.windows), "low-rank attention with windows"),
            (
                mla and config.fusion_norm not in {FusionNorm.none, FusionNorm.per_layer},
                "low-rank attention with a norm over the concatenation",
            ),
            (
                mla and (config.qkv_bias or config.out_bias or config.mlp_bias),
                "low-rank attention with biases",
            ),
        ),
    )
    flags = _flags(config)
    eagle: dict[str, Any] = {"use_aux_hidden_state": bool(config.boundaries)}
    if flags["norm_before_fc"]:
        eagle["norm_before_fc"] = True
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        # vLLM rewrites deepseek_v3 drafters to MTP; kimi_k2 is left alone (X17).
        "model_type": "kimi_k2" if mla else "llama",
        **_sizes(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.boundaries),
        "eagle_config": eagle,
        **flags,
        "torch_dtype": str(drafter.lm_head.weight.dtype).removeprefix("torch."),
        **_mark(config, dialect),
    }


def _vllm(drafter: Drafter, target: TargetLike | None) -> Layout:
    config, dialect = drafter.config, Dialect.vllm
    _refuse(
        dialect,
        (
            (config.qkv_bias != config.out_bias, "biases on one side of attention only"),
            (config.qk_norm and config.mlp_bias, "QK norms together with biases of the MLP"),
            (_reorders(drafter), "draft ids of a full vocabulary in another order"),
            _uneven(config, llama=not (config.qk_norm or config.mla)),
        ),
    )
    made = _engine(drafter, dialect)
    made |= {"rope_parameters": _engine_rope(dialect, config), "rope_theta": config.rope.theta}
    made |= _window(dialect, config)
    made |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    made["logit_scale"] = config.logit_scale
    if config.qk_norm:
        made |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    if config.boundaries:
        made[IDS] = list(config.boundaries)
    notes = []
    if config.windows:
        notes.append("vLLM counts a window from the drafted position, the training from the anchor")
    if config.mla is not None and config.fusion_norm is FusionNorm.per_layer:
        notes.append("vLLM reads fc_norm of low-rank drafters since #43482")
    return Layout(made, _tensors(drafter), notes)


def _sglang(drafter: Drafter, target: TargetLike | None) -> Layout:
    config, dialect = drafter.config, Dialect.sglang
    same_width = config.target_hidden_size == config.hidden_size
    _refuse(
        dialect,
        (
            (config.residual is Residual.normed, "the normed residual"),
            (config.qk_norm, "QK norms"),
            (config.qkv_bias or config.out_bias or config.mlp_bias, "biases"),
            (bool(config.windows), "windows, which are an argument of its server"),
            (config.num_layers > 1, "several layers"),
            (config.logit_scale != 1.0, "a scale of the logits"),
            (config.fusion_norm is FusionNorm.concat_per_layer, "both fusion norms"),
            (not config.boundaries, "a drafter without captured states"),
            (len(config.boundaries) == 1 and same_width, "one captured state: it would skip fc"),
            (0 in config.boundaries, "boundary 0: its ids count blocks"),
            (
                target is not None and target.n_layers in config.boundaries,
                "the state after the last block, which it never captures",
            ),
            _uneven(config, llama=config.mla is None),
            (
                config.mla is not None and config.mla.q_lora_rank is None,
                "low-rank attention without q_lora_rank",
            ),
        ),
    )
    made, notes = _engine(drafter, dialect), []
    block = _engine_rope(dialect, config)
    made["rope_theta"] = block.pop("rope_theta")
    made["rope_scaling"] = block if config.rope.rope_type != "default" else None
    default = target is not None and config.boundaries == _default_boundaries(target)
    if default:
        notes.append("the boundaries are SGLang's default, so no layer ids are written")
    else:
        made["eagle_config"][IDS] = [b - 1 for b in config.boundaries]
        notes.append(
            "layer ids count blocks, as SGLang's Llama targets read them; DeepSeek and Kimi "
            "targets since #25454 do so only if the first id is 1, gpt-oss targets since #32334 "
            "never (X1)"
        )
    if config.fusion_norm is not FusionNorm.none or config.feedback is Feedback.post_norm:
        notes.append(
            "SGLang reads input_norm since #32334, and 3.1 of low-rank drafters since #26506"
        )
    if same_width:
        held = drafter.embed_tokens.weight
        equal = target is not None and torch.equal(held.cpu(), target.embedding_weight.cpu())
        _refuse(
            dialect,
            [
                (
                    target is not None and not equal,
                    "embeddings of its own: the target's replace them",
                )
            ],
        )
        if target is None:
            notes.append("SGLang replaces the drafter's embeddings by the target's (X11)")
    return Layout(made, _tensors(drafter, first="midlayer."), notes)


def _speculators(drafter: Drafter, target: TargetLike | None) -> Layout:
    config, dialect = drafter.config, Dialect.speculators
    _refuse(
        dialect,
        (
            (config.mla is not None, "low-rank attention"),
            (not config.boundaries, "a drafter without captured states"),
            (config.fusion_norm is FusionNorm.concat_per_layer, "both fusion norms"),
            (config.qkv_bias != config.out_bias, "biases on one side of attention only"),
            (config.qk_norm and config.mlp_bias, "QK norms together with biases of the MLP"),
            (config.logit_scale != 1.0, "a scale of the logits"),
            _uneven(config, llama=not config.qk_norm),
        ),
    )
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **_sizes(config),
        "attention_bias": config.qkv_bias,
        "rope_parameters": _rope_block(config.rope),
        **_window(dialect, config),
    }
    if config.qk_norm:
        layer["use_sliding_window"] = bool(config.windows)
        layer.setdefault("layer_types", ["full_attention"] * config.num_layers)
    else:
        layer["mlp_bias"] = config.mlp_bias
    other = config.target_hidden_size != config.hidden_size
    made = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        IDS: list(config.boundaries),
        "target_hidden_size": config.target_hidden_size if other else None,
        **_flags(config),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": [], "name_or_path": getattr(target, "name", "")},
        },
        "transformer_layer_config": layer,
    }
    notes = []
    if target is None:
        notes.append("speculators_config.verifier.name_or_path is empty: state the target there")
    return Layout(made, _tensors(drafter), notes)


def _safeailab(drafter: Drafter, target: TargetLike | None) -> Layout:
    config, dialect = drafter.config, Dialect.safeailab
    rope = config.rope
    baseless = rope.rope_type in {"linear", "dynamic"}
    _refuse(
        dialect,
        (
            (config.mla is not None, "low-rank attention"),
            (config.fusion_norm is not FusionNorm.none, "a fusion norm"),
            (config.feedback is Feedback.post_norm, "feedback of the normed state"),
            (config.residual is Residual.normed, "the normed residual"),
            (config.qk_norm, "QK norms"),
            (config.qkv_bias or config.out_bias or config.mlp_bias, "biases"),
            (bool(config.windows), "windows"),
            (config.num_layers > 1, "several layers"),
            (config.logit_scale != 1.0, "a scale of the logits"),
            (config.head_dim * config.num_heads != config.hidden_size, "heads of another width"),
            (rope.rope_type != "default" and not baseless, f"{rope.rope_type} rotation"),
            (baseless and rope.theta != THETA, f"{rope.rope_type} rotation of base {rope.theta}"),
            (
                rope.rope_type != "default" and "partial_rotary_factor" in rope.parameters,
                "rotation of a part of the head",
            ),
            (_reorders(drafter), "draft ids of a full vocabulary in another order"),
        ),
    )
    if target is None:
        raise CheckpointError(
            "the safeailab layout has no layer ids: whether its default fits needs the target",
            got=f"boundaries {config.boundaries}",
            remedy="Give the target too: --target, or target= in Python.",
        )
    default = _default_boundaries(target)
    _refuse(
        dialect,
        [
            (config.boundaries != default, f"boundaries {config.boundaries}, only {default}"),
            (len(config.boundaries) != 3, f"{len(config.boundaries)} captured states"),
        ],
    )
    made = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(config),
        "draft_vocab_size": config.draft_vocab_size,
        # Its presence makes SafeAILab take the embeddings of the file.
        "target_hidden_size": config.target_hidden_size,
        "rope_scaling": None,
        "rope_theta": rope.theta,
        **_mark(config, dialect),
    }
    if baseless:
        made["rope_scaling"] = {"type": rope.rope_type, "factor": rope.parameters["factor"]}
    return Layout(made, _tensors(drafter, first="midlayer."))


def _default_boundaries(target: TargetLike) -> tuple[int, ...]:
    n = target.n_layers
    return tuple(sorted({2, n // 2, n - 3}))


_LAYOUTS: dict[Dialect, Callable[[Drafter, TargetLike | None], Layout]] = {
    Dialect.vllm: _vllm,
    Dialect.sglang: _sglang,
    Dialect.speculators: _speculators,
    Dialect.safeailab: _safeailab,
}
