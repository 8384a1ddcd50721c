"""Reading drafters: one set of weights in every spelling, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.cases import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from driftlab.config import MLA, DrafterConfig, Feedback, FusionNorm, Origin, Residual, Rope
from driftlab.errors import (
    AssumptionError,
    CheckpointError,
    ConfigError,
    ContractError,
    DriftlabError,
)
from driftlab.models.checkpoints import (
    Dialect,
    Resolved,
    inspect,
    load_drafter,
    save_drafter,
)
from driftlab.models.drafter import Drafter, MLAProjections
from driftlab.models.hooks import capture

V, VD, H, FFN, HEADS, GROUPS, HEAD = 97, 40, 32, 48, 4, 2, 8
IDS = "eagle_aux_hidden_state_layer_ids"
KEPT = torch.arange(VD) * 2 + 3
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def random(*shape: int, seed: int = 0) -> Tensor:
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return noise * scale + (1.0 if len(shape) == 1 else 0.0)


@dataclass
class Target:
    """A target as far as a drafter asks."""

    hidden_size: int = H
    n_layers: int = 10
    vocab_size: int = V
    embedding_weight: Tensor = field(default_factory=lambda: random(V, H, seed=7))
    head_weight: Tensor = field(default_factory=lambda: random(V, H, seed=8))


TARGET = Target()
DEFAULT = (2, 5, 7)  # 2, n//2, n-3


def weights(*, states: int = 3, width: int = H, layers: int = 1, draft: int = VD) -> Tensors:
    """Canonical tensors of a GQA drafter, with the target's embeddings."""
    found = {
        "embed_tokens.weight": TARGET.embedding_weight,
        "fc.weight": random(H, states * width, seed=1),
        "norm.weight": random(H, seed=2),
        "lm_head.weight": random(draft, H, seed=3),
    }
    for i in range(layers):
        wide, stem = 2 * H if i == 0 else H, f"layers.{i}."
        found |= {
            f"{stem}input_layernorm.weight": random(H, seed=4 + i),
            f"{stem}post_attention_layernorm.weight": random(H, seed=5 + i),
            f"{stem}self_attn.q_proj.weight": random(HEADS * HEAD, wide, seed=i),
            f"{stem}self_attn.k_proj.weight": random(GROUPS * HEAD, wide, seed=i + 9),
            f"{stem}self_attn.v_proj.weight": random(GROUPS * HEAD, wide, seed=i + 8),
            f"{stem}self_attn.o_proj.weight": random(H, HEADS * HEAD, seed=i + 7),
            f"{stem}mlp.gate_proj.weight": random(FFN, H, seed=i + 6),
            f"{stem}mlp.up_proj.weight": random(FFN, H, seed=i + 5),
            f"{stem}mlp.down_proj.weight": random(H, FFN, seed=i + 4),
        }
        if i == 0:
            found[f"{stem}hidden_norm.weight"] = random(H, seed=6)
    return found


def sizes(**extra: Any) -> Config:
    return {
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "vocab_size": V,
        "draft_vocab_size": VD,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        **extra,
    }


def maps() -> Tensors:
    mask = torch.zeros(V, dtype=torch.bool)
    mask[KEPT] = True
    return {"d2t": KEPT - torch.arange(VD), "t2d": mask}


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def mid(tensors: Tensors) -> Tensors:
    return renamed(tensors, "layers.0.", "midlayer.")


def bare(tensors: Tensors) -> Tensors:
    return without(tensors, "embed_tokens.weight")


MODELOPT = {"next_layer_regular": True, "use_aux_hidden_state": True, IDS: [1, 4, 6]}
ENTRY, OUTPUT = list(DEFAULT), [b - 1 for b in DEFAULT]


def spell(dialect: str) -> tuple[Config, Tensors]:
    """The same drafter as each producer would write it (D1 to D10 of docs/checkpoints.md)."""
    base, both = weights(), maps()
    match dialect:
        case "safeailab":
            return sizes(architectures=["LlamaForCausalLM"]), mid(bare(base) | both)
        case "specforge":
            config = sizes(architectures=["LlamaForCausalLMEagle3"])
            return config, mid(bare(base) | both)
        case "torchspec-gqa":
            config = sizes(
                architectures=["LlamaForCausalLMEagle3"],
                _torchspec_version="0.1",
                eagle_config={IDS: OUTPUT},
            )
            return config, base | both
        case "speculators":
            nested = sizes(model_type="llama")
            nested["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": nested.pop("rope_theta"),
            }
            config = {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "draft_vocab_size": nested.pop("draft_vocab_size"),
                "norm_before_residual": False,
                "target_hidden_size": None,
                IDS: ENTRY,
                "transformer_layer_config": nested,
            }
            return config, base | both
        case "modelopt-hf":
            config = sizes(architectures=["LlamaForCausalLMEagle3"], eagle_config=MODELOPT)
            return config, bare(base) | without(both, "t2d")
        case "modelopt-megatron":
            config = sizes(architectures=["LlamaForCausalLMEagle3"], eagle_config=MODELOPT)
            return config, mid(bare(base) | without(both, "t2d"))
        case "automodel":
            config = sizes(architectures=["LlamaEagle3DraftModel"], num_hidden_layers=32)
            named = {f"model.{n}": t for n, t in base.items() if n != "lm_head.weight"}
            return config, named | {"lm_head.weight": base["lm_head.weight"]} | both
        case "angelslim":
            return sizes(architectures=["Eagle3LlamaForCausalLM"]), mid(bare(base) | both)
        case "vllm":
            config = sizes(architectures=["Eagle3LlamaForCausalLM"])
            config[IDS] = ENTRY
            return config, base | {"draft_id_to_target_id": both["d2t"]}
    raise AssertionError(dialect)


SPELLINGS = (
    "safeailab",
    "specforge",
    "torchspec-gqa",
    "speculators",
    "modelopt-hf",
    "modelopt-megatron",
    "automodel",
    "angelslim",
    "vllm",
)


def chain(drafter: Drafter, depth: int = 4) -> Tensor:
    """Logits of a greedy chain, [depth, Vd]."""
    config = drafter.config
    width = max(len(config.boundaries), 1) * config.target_hidden_size
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(1, 6, width, generator=generator)
    tokens = torch.randint(0, V, (1, 6), generator=generator)
    memory, found = drafter.new_memory(), []
    with torch.no_grad():
        u = drafter.fuse(aux)
        for d in range(1, depth + 1):
            state = drafter.step(tokens, u, memory, depth=d)
            found.append(drafter.logits(state)[0, -1])
            tokens = drafter.to_target(found[-1].argmax()).reshape(1, 1)
            u = state.feedback[:, -1:]
            if d == 1:
                memory.select(memory.anchors[-1:])
    return torch.stack(found)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Drafter]:
    """Write config and tensors to a folder of their own and load it."""
    count = iter(range(1000))

    def load(config: Config, tensors: Tensors, **options: Any) -> Drafter:
        folder = write_checkpoint(tmp_path / str(next(count)), config, tensors)
        return load_drafter(folder, **({"target": TARGET} | options))

    return load


Read = Callable[..., Drafter]


def plain(**extra: Any) -> tuple[Config, Tensors]:
    """The vLLM spelling: nothing of a trainer's habits."""
    config, tensors = spell("vllm")
    return config | extra, tensors


def reference(read: Read) -> Tensor:
    return chain(read(*plain()))


# The same weights everywhere ---------------------------------------------------------------


# ModelOpt's HF trainer norms the hidden state twice, which no other trainer does.
ONCE = {"overrides": {"double_hidden_norm": False}}


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_every_spelling_gives_the_same_numbers(dialect: str, read: Read) -> None:
    drafter = read(*spell(dialect), **(ONCE if dialect == "modelopt-hf" else {}))
    assert drafter.provenance["dialect"].value == dialect
    assert drafter.config.boundaries == DEFAULT
    assert torch.equal(drafter.draft_to_target, KEPT)
    assert torch.equal(chain(drafter), reference(read))


def test_every_field_has_a_source(read: Read) -> None:
    for dialect in SPELLINGS:
        drafter = read(*spell(dialect))
        fields = set(DrafterConfig.model_fields) - {"rope", "mla"}
        assert fields <= set(drafter.provenance)
        for name in fields:
            value = drafter.provenance[name].value
            assert value == getattr(drafter.config, name), name
        for name in Rope.model_fields:
            assert drafter.provenance[f"rope.{name}"].value == getattr(drafter.config.rope, name)


def test_modelopt_rope_block_and_layers_of_the_target(read: Read) -> None:
    config, tensors = spell("modelopt-hf")
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 2048,
    }
    drafter = read(config, tensors, **ONCE)
    assert drafter.provenance["rope.rope_type"].origin is Origin.assumed
    assert torch.equal(chain(drafter), reference(read))
    config["rope_scaling"]["factor"] = 16.0
    assert read(config, tensors).config.rope.rope_type == "yarn"


def test_modelopt_norms_the_hidden_state_twice(read: Read) -> None:
    """X4: hidden_norm(input_layernorm(u)), by hand; the file does not say, so it is assumed."""
    config, tensors = spell("modelopt-hf")
    drafter = read(config, tensors)
    said = drafter.provenance["double_hidden_norm"]
    assert said.value is True and said.origin is Origin.assumed and "X4" in said.where
    w_in = tensors["layers.0.input_layernorm.weight"]
    w_hid = tensors["layers.0.hidden_norm.weight"]
    note = next(n for n in drafter.provenance["notes"].value if "input_layernorm(u)" in n)
    assert f"{float(w_in.min()):.3g} to {float(w_in.max()):.3g}" in note

    def rms(x: Tensor, gains: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gains

    with capture(drafter, ["feedback.in", "feedback.normed"]) as seen:
        chain(drafter, depth=1)
    u = seen["feedback.in", 1]
    assert torch.allclose(seen["feedback.normed", 1], rms(rms(u, w_in), w_hid), atol=1e-5)
    assert not torch.allclose(rms(rms(u, w_in), w_hid), rms(u, w_hid), atol=1e-2)


def test_the_trainer_of_low_rank_modelopt_is_not_established(read: Read) -> None:
    config = kimi(eagle_config=MODELOPT)
    del config["_torchspec_version"]
    drafter = read(config, bare(low_rank()))
    assert drafter.provenance["dialect"].value == "modelopt-hf"
    assert drafter.config.double_hidden_norm is False
    assert drafter.provenance["double_hidden_norm"].origin is Origin.assumed


@pytest.mark.parametrize("layout", ["sharded", "bin", "sharded bin", "fused", "bfloat16"])
def test_files_of_any_layout(layout: str, read: Read, tmp_path: Path) -> None:
    config, tensors = plain()
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    want = reference(read)
    if layout == "fused":
        stem = "layers.0.self_attn."
        qkv = torch.cat([tensors.pop(f"{stem}{x}_proj.weight") for x in "qkv"])
        gate = torch.cat([tensors.pop(f"layers.0.mlp.{x}_proj.weight") for x in ("gate", "up")])
        tensors |= {f"{stem}qkv_proj.weight": qkv, "layers.0.mlp.gate_up_proj.weight": gate}
    if layout == "bfloat16":
        tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
        rounded = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        want = chain(read(config, rounded))
    names = sorted(tensors)
    suffix = "bin" if "bin" in layout else "safetensors"
    save: Callable[[Tensors, Path], Any] = torch.save if suffix == "bin" else save_file
    stem = "pytorch_model" if suffix == "bin" else "model"
    if "sharded" in layout:
        shards = {f"{stem}-1-of-2.{suffix}": names[::2], f"{stem}-2-of-2.{suffix}": names[1::2]}
        # A stale copy in the other shard does not count.
        stale = {"norm.weight": torch.zeros(H)}
        for shard, held in shards.items():
            own = {n: tensors[n] for n in held}
            save(own if "norm.weight" in own else own | stale, folder / shard)
        index = {"weight_map": {n: shard for shard, held in shards.items() for n in held}}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    else:
        save(tensors, folder / f"{stem}.{suffix}")
    drafter = load_drafter(folder, target=TARGET)
    assert torch.equal(chain(drafter), want)
    if "sharded" in layout:
        assert any("norm.weight ignored" in n for n in drafter.provenance["notes"].value)


def test_safetensors_come_before_pickle(read: Read, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "both", *plain())
    torch.save({"norm.weight": torch.zeros(H)}, folder / "pytorch_model.bin")
    assert torch.equal(chain(load_drafter(folder, target=TARGET)), reference(read))


def test_loading_leaves_the_random_state_alone(read: Read) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    read(*plain())
    assert torch.equal(torch.rand(3), want)


# Captured layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dialect,place,ids,boundaries,origin",
    [
        ("speculators", "top", [2, 5, 7], (2, 5, 7), Origin.read),
        ("vllm", "top", [2, 5, 7], (2, 5, 7), Origin.assumed),
        ("torchspec-gqa", "eagle_config", [1, 4, 6], (2, 5, 7), Origin.derived),
        ("torchspec-gqa", "both", [2, 5, 7], (2, 5, 7), Origin.read),
        ("modelopt-hf", "eagle_config", [1, 4, 6], (2, 5, 7), Origin.assumed),
        ("modelopt-hf", "eagle_config", [6, 1, 4], (2, 5, 7), Origin.assumed),
        # Counted as blocks, 10 would leave a target of 10 layers.
        ("modelopt-hf", "eagle_config", [4, 7, 10], (4, 7, 10), Origin.derived),
        ("vllm", "top", [4, 7, 10], (4, 7, 10), Origin.derived),
        ("safeailab", "none", [], (2, 5, 7), Origin.derived),
        ("modelopt-hf", "none", [], (2, 5, 7), Origin.assumed),
    ],
)
def test_layer_ids(
    read: Read, dialect: str, place: str, ids: list[int], boundaries: Any, origin: Origin
) -> None:
    config, tensors = spell(dialect)
    config.pop(IDS, None)
    eagle = {k: v for k, v in config.pop("eagle_config", {}).items() if k != IDS}
    if place in {"top", "both"}:
        config[IDS] = ids
    if place in {"eagle_config", "both"}:
        eagle[IDS] = ids
    drafter = read(config | {"eagle_config": eagle}, tensors)
    assert drafter.config.boundaries == boundaries
    assert drafter.provenance["boundaries"].origin is origin
    notes = drafter.provenance["notes"].value
    offered = any("the text alone would also allow" in note for note in notes)
    assert offered == (origin is Origin.assumed and bool(ids))


def test_a_convention_can_be_stated(read: Read) -> None:
    config, tensors = spell("modelopt-hf")
    drafter = read(config, tensors, overrides={"boundary_convention": "entry"})
    assert drafter.config.boundaries == (1, 4, 6)
    assert read(config, tensors, boundaries=(3, 4, 9)).config.boundaries == (3, 4, 9)


def test_defaults_need_the_target(tmp_path: Path) -> None:
    config, tensors = spell("safeailab")
    tensors["embed_tokens.weight"] = TARGET.embedding_weight
    folder = write_checkpoint(tmp_path / "d", config, tensors)
    found = inspect(folder)
    assert isinstance(found, Resolved) and found.config is None and found.pending is not None
    with pytest.raises(ContractError, match="depends on the target"):
        load_drafter(folder)
    assert load_drafter(folder, boundaries=DEFAULT).config.boundaries == DEFAULT
    two = write_checkpoint(tmp_path / "two", config, tensors | {"fc.weight": random(H, 2 * H)})
    assert load_drafter(two, target=Target(n_layers=6)).config.boundaries == (2, 3)


@pytest.mark.parametrize(
    "ids,fault",
    [([2, 5, 11], "11"), ([-1, 5, 7], "-1"), ([2, 5], "2 state"), ([2, 5, "7"], "no list")],
)
def test_wrong_layer_ids(read: Read, ids: list[Any], fault: str) -> None:
    config, tensors = plain()
    with pytest.raises(DriftlabError, match=fault):
        read(config | {IDS: ids}, tensors)


@pytest.mark.parametrize("states,width", [(3, 48), (5, 48), (1, 32), (4, 32)])
def test_number_of_states_comes_from_fc(read: Read, states: int, width: int) -> None:
    tensors = weights(states=states, width=width) | maps()
    target = Target(hidden_size=width)
    ids = list(range(1, states + 1))
    config = plain()[0] | {IDS: ids}
    for said in ({"target_hidden_size": width}, {}, {"target_hidden_size": None}):
        drafter = read(config | said, tensors, target=target)
        assert drafter.config.target_hidden_size == width
        assert len(drafter.config.boundaries) == states
    assert read(config, tensors, target=None).config.target_hidden_size == width


def test_fused_width_that_nothing_explains(read: Read) -> None:
    tensors = weights(states=3, width=48) | maps()
    config = plain()[0]
    with pytest.raises(CheckpointError, match="144") as caught:
        read(config | {"target_hidden_size": H}, tensors)
    assert "48" in str(caught.value) and "32" in str(caught.value)
    with pytest.raises(ContractError, match="width 48"):
        read(config | {"target_hidden_size": 48}, tensors)


# Switches -------------------------------------------------------------------------------------


def norms(kind: str) -> Tensors:
    if kind == "per_layer":
        return {f"fc_norm.{i}.weight": random(H, seed=20 + i) for i in range(3)}
    return {"input_norm.weight": random(3 * H, seed=30)}


@pytest.mark.parametrize("kind,flag", [("per_layer", "fc_norm"), ("concat", "norm_before_fc")])
def test_fusion_norm_needs_flag_and_tensor(read: Read, kind: str, flag: str) -> None:
    config, tensors = plain()
    at_top = read(config | {flag: True}, tensors | norms(kind))
    nested = read(config | {"eagle_config": {flag: True}}, tensors | norms(kind))
    assert at_top.config.fusion_norm is FusionNorm(kind)
    assert torch.equal(chain(at_top), chain(nested))
    assert not torch.equal(chain(at_top), reference(read))
    for broken in (
        (config, tensors | norms(kind)),
        (config | {flag: False}, tensors | norms(kind)),
        (config | {flag: True}, tensors),
    ):
        with pytest.raises(CheckpointError, match=flag):
            read(*broken)
    forced = read(config, tensors | norms(kind), overrides={"fusion_norm": kind})
    assert torch.equal(chain(forced), chain(at_top))


def test_aliases_of_the_fusion_norm(read: Read) -> None:
    config, tensors = plain()
    want = chain(read(config | {"fc_norm": True}, tensors | norms("per_layer")))
    old = dict(
        zip(
            ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
            norms("per_layer").values(),
            strict=True,
        )
    )
    assert torch.equal(chain(read(config | {"use_aux_norm": True}, tensors | old)), want)
    third = renamed(norms("per_layer"), "fc_norm.", "fc_norms.")
    assert torch.equal(chain(read(config | {"fc_norm": True}, tensors | third)), want)


def test_both_fusion_norms(read: Read) -> None:
    config, tensors = plain(fc_norm=True, norm_before_fc=True)
    drafter = read(config, tensors | norms("per_layer") | norms("concat"))
    assert drafter.config.fusion_norm is FusionNorm.concat_per_layer


@pytest.mark.parametrize("dialect", SPELLINGS)
@pytest.mark.parametrize("value", [True, False])
def test_norm_output_means_what_its_trainer_does(read: Read, dialect: str, value: bool) -> None:
    config, tensors = spell(dialect)
    drafter = read(config | {"norm_output": value}, tensors)
    follows = dialect in {"torchspec-gqa", "speculators", "automodel", "vllm"}
    want = Feedback.post_norm if follows and value else Feedback.pre_norm
    assert drafter.config.feedback is want
    assert drafter.config.logits_from_raw is (dialect == "specforge" and not value)
    if value and not follows:
        assert drafter.provenance["feedback"].origin is Origin.assumed


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_norm_before_residual_means_what_its_trainer_does(read: Read, dialect: str) -> None:
    config, tensors = spell(dialect)
    drafter = read(config | {"norm_before_residual": True}, tensors)
    follows = {"speculators", "modelopt-hf", "modelopt-megatron", "vllm"}
    assert drafter.config.residual is (Residual.normed if dialect in follows else Residual.raw)
    notes = drafter.provenance["notes"].value
    told = any("norm_before_residual" in n for n in notes)
    assert told is (dialect not in {"speculators", "vllm"})


def test_a_flag_that_a_trainer_does_not_know_is_no_file_of_its(read: Read) -> None:
    """No version of TorchSpec, its keys and embeddings: a guess that the flag speaks against."""
    config, tensors = spell("torchspec-gqa")
    config = {k: v for k, v in config.items() if k != "_torchspec_version"}
    guessed = read(config, tensors)
    assert guessed.provenance["dialect"].value == "torchspec-gqa"
    stated = read(config | {"norm_before_residual": True}, tensors)
    assert stated.provenance["dialect"].value == "vllm"
    assert stated.config.residual is Residual.normed


def test_contradictory_switches(read: Read) -> None:
    config, tensors = plain(norm_output=True, eagle_config={"norm_output": False}, rope_theta=1e4)
    assert read(config, tensors).config.feedback is Feedback.post_norm
    with pytest.raises(CheckpointError, match="norm_output is said twice"):
        read(config, tensors, strict=True)


def test_strict_refuses_assumptions(read: Read) -> None:
    config, tensors = spell("speculators")
    assert read(config, tensors, strict=True).config.boundaries == DEFAULT
    with pytest.raises(AssumptionError, match="boundaries"):
        read(*spell("modelopt-hf"), strict=True)


def test_no_captured_states(read: Read) -> None:
    config, tensors = plain(eagle_config={"use_aux_hidden_state": False})
    config.pop(IDS)
    drafter = read(config, without(tensors, "fc.weight"))
    assert drafter.config.boundaries == ()
    assert chain(drafter).isfinite().all()
    with pytest.raises(CheckpointError, match="use_aux_hidden_state"):
        read(config, tensors)
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        read(config | {"eagle_config": {}}, without(tensors, "fc.weight"))


def biased(*stems: str) -> Tensors:
    base = weights()
    return {
        f"layers.0.{stem}.bias": random(base[f"layers.0.{stem}.weight"].shape[0], seed=40)
        for stem in stems
    }


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def test_biases(read: Read) -> None:
    config, tensors = plain()
    qkv = read(config, tensors | biased(*QKV))
    assert qkv.config.qkv_bias and not qkv.config.out_bias
    full = read(config | {"attention_bias": True}, tensors | biased(*QKV, "self_attn.o_proj"))
    assert full.config.qkv_bias and full.config.out_bias
    mlp = biased("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert read(config, tensors | mlp | {"fc.bias": random(H)}).config.fc_bias
    with pytest.raises(CheckpointError, match=r"v_proj\.bias"):
        read(config, tensors | biased(*QKV[:2]))
    with pytest.raises(CheckpointError, match="attention_bias"):
        read(config | {"attention_bias": True}, tensors)
    with pytest.raises(CheckpointError, match="attention_bias"):
        read(config | {"attention_bias": False}, tensors | biased(*QKV))


def test_qk_norms_and_a_class_that_has_them(read: Read) -> None:
    both = {f"layers.0.self_attn.{x}_norm.weight": random(HEAD, seed=50) for x in "qk"}
    config, tensors = spell("speculators")
    config["transformer_layer_config"]["model_type"] = "qwen3"
    drafter = read(config, tensors | both)
    assert drafter.config.qk_norm
    with pytest.raises(CheckpointError, match="qwen3"):
        read(config, tensors)
    config["transformer_layer_config"]["model_type"] = "llama"
    with pytest.raises(CheckpointError, match="llama"):
        read(config, tensors | both)
    with pytest.raises(CheckpointError, match="k_norm"):
        read(config, tensors | dict(list(both.items())[:1]))
    # Without a class the tensors decide, where speculators and vLLM disagree.
    del config["transformer_layer_config"]["model_type"]
    assert torch.equal(chain(read(config, tensors)), reference(read))
    assert torch.equal(chain(read(config, tensors | both)), chain(drafter))
    assert read(config, tensors).provenance["model_type"].origin is Origin.assumed


@pytest.mark.parametrize("style", ["layers", "midlayer", "hidden_norm"])
def test_several_layers(read: Read, style: str) -> None:
    tensors = weights(layers=2) | maps()
    config = plain(num_hidden_layers=2)[0]
    want = chain(read(config, tensors))
    if style != "layers":
        tensors = renamed(tensors, "layers.", "midlayer.")
    if style == "hidden_norm":
        tensors = renamed(tensors, "midlayer.1.input_layernorm", "midlayer.1.hidden_norm")
    drafter = read(config, tensors, overrides={"dialect": Dialect.vllm}, boundaries=DEFAULT)
    assert drafter.config.num_layers == 2
    assert torch.equal(chain(drafter), want)


def test_windows(read: Read) -> None:
    config, tensors = spell("speculators")
    nested = config["transformer_layer_config"]
    nested |= {"sliding_window": 3, "layer_types": ["sliding_attention"]}
    drafter = read(config, tensors)
    assert drafter.config.windows == (3,)
    assert not torch.equal(chain(drafter), reference(read))
    # Trainers without windows copy the keys from the target's config.
    config, tensors = spell("specforge")
    config |= {"sliding_window": 3, "layer_types": ["sliding_attention"] * 10}
    drafter = read(config, tensors)
    assert drafter.config.windows == ()
    assert drafter.provenance["windows"].origin is Origin.assumed


def test_gated_attention(read: Read) -> None:
    gate = {"layers.0.self_attn.g_proj.weight": random(HEADS * HEAD, 2 * H, seed=60)}
    config, tensors = plain()
    assert read(config, tensors | gate).config.attention_gate


# Rotary ---------------------------------------------------------------------------------------

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 256,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn with magnitude": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16},
    "llama3": LLAMA3,
    "longrope": LONG,
    "half the head": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "none": {"rope_type": "default"},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_rotary_types_against_transformers(read: Read, kind: str) -> None:
    block, theta = BLOCKS[kind], 5e5
    config, tensors = plain(rope_parameters=block | {"rope_theta": theta})
    del config["rope_theta"]
    drafter = read(config, tensors)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=HEADS * HEAD,
            num_attention_heads=HEADS,
            head_dim=HEAD,
            max_position_embeddings=128,
            rope_parameters=block | {"rope_theta": theta},
        )
    )
    layer: Any = drafter.layers[0]
    found = layer.self_attn.rotary.table
    positions = torch.arange(40)[None]
    x = torch.zeros(1, 1, 40, HEAD)
    for ours, want in zip(found(x, positions), theirs(x, positions), strict=True):
        assert torch.equal(ours, want)
    # The same block, spelled for older libraries.
    old = {("type" if k == "rope_type" else k): v for k, v in block.items()}
    config, tensors = plain(rope_scaling=old, rope_theta=theta)
    assert torch.equal(chain(read(config, tensors)), chain(drafter))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_length_of_the_text(read: Read, kind: str) -> None:
    """Exact up to the length where they begin to depend on the text, refused past it."""
    long = LONG | {"short_factor": [1.0] * 4, "attention_factor": 1.0}
    long["original_max_position_embeddings"] = 9
    block = long if kind == "longrope" else BLOCKS["dynamic"]
    config, tensors = plain(rope_parameters=block | {"rope_theta": 1e4})
    del config["rope_theta"]
    config["max_position_embeddings"] = 64 if kind == "longrope" else 9
    drafter = read(config, tensors)
    # Six anchors and four depths end at position 8. Within the limit both are the plain rotation.
    assert torch.equal(chain(drafter), reference(read))
    with pytest.raises(ContractError, match=f"the {kind} rotation of position 9 depends") as error:
        chain(drafter, depth=5)
    assert "up to 9 tokens" in str(error.value)
    # transformers turns even position 0 otherwise, once the text is longer.
    table: Any = drafter.layers[0]
    table = table.self_attn.rotary.table
    x = torch.zeros(1, 1, 1, HEAD)
    short = table(x, torch.arange(9)[None])[0]
    assert not torch.equal(table(x, torch.arange(10)[None])[0][:, :9], short)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
    ],
)
def test_a_base_may_stand_anywhere(read: Read, spelling: Config) -> None:
    drafter = read(*plain(**spelling))
    assert drafter.config.rope == Rope(theta=5e5, max_position=128)
    assert not torch.equal(chain(drafter), reference(read))


def test_blocks_by_layer_type(read: Read) -> None:
    config, tensors = spell("speculators")
    nested = config["transformer_layer_config"]
    nested["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    drafter = read(config, tensors)
    assert drafter.config.rope.theta == 2e4
    assert any("sliding_attention was taken" in n for n in drafter.provenance["notes"].value)


@pytest.mark.parametrize(
    "extra,fault",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "several rotary bases"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
            "type linear differ",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
            },
            "differ, rope_parameters",
        ),
    ],
)
def test_rotary_contradictions(read: Read, extra: Config, fault: str) -> None:
    config, tensors = spell("speculators")
    config["transformer_layer_config"] |= extra | {"rope_theta": 1e4}
    if "rope_parameters" not in extra:
        del config["transformer_layer_config"]["rope_parameters"]
    notes = read(config, tensors).provenance["notes"].value
    assert any(fault in note for note in notes)
    with pytest.raises(CheckpointError, match=fault):
        read(config, tensors, strict=True)


@pytest.mark.parametrize(
    "block,fault",
    [
        ({"rope_type": "spiral"}, "unknown rope_type"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, "yarn needs factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor is no number"),
        ({"rope_type": "linear", "factor": 0}, "above 0"),
        ({"rope_type": "linear", "factor": 10**400}, "finite"),
        ({"rope_type": "linear", "factor": True}, "factor is no number"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"factor": 8.0}, "no rope_type"),
        ({"rope_type": "default", "rope_theta": "big"}, "wrong type"),
        ("yarn", "no object"),
    ],
)
def test_broken_rotary_blocks(read: Read, block: Any, fault: str) -> None:
    with pytest.raises(CheckpointError, match=fault):
        read(*plain(rope_scaling=block, rope_theta=None))


def test_rotations_that_ignore_their_config(read: Read) -> None:
    config, tensors = spell("safeailab")
    config |= {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}
    drafter = read(config, tensors)
    assert drafter.config.rope.theta == 1e4
    config, tensors = spell("specforge")
    config["rope_scaling"] = {"type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert read(config, tensors).config.rope.theta == 5e5  # and a note: the top level differs
    # SpecForge builds its dynamic table for 20 positions more than the limit.
    config["rope_scaling"] = {"type": "dynamic", "factor": 4.0}
    rope = read(config, tensors).config.rope
    stretch = 4 * 148 / 128 - 3
    assert rope.rope_type == "default"
    assert rope.theta == pytest.approx(1e4 * stretch ** (HEAD / (HEAD - 2)))


RATES = [1.0, 0.17787811160087585, 0.012500000186264515, 0.0039528473280370235]


@pytest.mark.parametrize("unread", [{}, {"attention_factor": 1.4}, {"truncate": False}])
def test_yarn_of_trainers_with_a_rotation_of_their_own(read: Read, unread: Config) -> None:
    """Rates and magnitude of SpecForge 0.2.0's rotation, which transformers' would not give."""
    block = {
        **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0},
        **{"original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        **{"mscale": 1, "mscale_all_dim": 0, **unread},
    }
    config, tensors = spell("specforge")
    del config["rope_theta"]
    layer: Any = read(config | {"rope_parameters": block}, tensors).layers[0]
    table = layer.self_attn.rotary.table
    want = torch.tensor(RATES)
    torch.testing.assert_close(table.inv_freq, want, rtol=1e-6, atol=0)
    assert table.attention_scaling == pytest.approx(1.2079441547393799)
    if unread:
        config, tensors = plain(rope_parameters=block, rope_theta=None)
        layer = read(config, tensors).layers[0]
        other = layer.self_attn.rotary.table
        moved = not torch.allclose(other.inv_freq, want, rtol=1e-3)
        assert moved or other.attention_scaling == 1.4


def test_a_type_beside_its_alias_is_no_contradiction(read: Read) -> None:
    block = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 1, 1]}
    drafter = read(*plain(rope_scaling=block))
    assert not any("differ" in note for note in drafter.provenance["notes"].value)
    # AngelSlim trains this type with the config's base, and every other with 10,000.
    config, tensors = spell("angelslim")
    config |= {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    assert read(config, tensors).provenance["rope.theta"].origin is Origin.read


def test_overrides(read: Read) -> None:
    config, tensors = plain()
    drafter = read(config, tensors, overrides={"rope.theta": 5e5, "feedback": "post_norm"})
    assert drafter.config.rope.theta == 5e5
    assert drafter.config.feedback is Feedback.post_norm
    assert drafter.provenance["rope.theta"].where == "overrides"
    with pytest.raises(ConfigError, match=r"rope\.base"):
        read(config, tensors, overrides={"rope.base": 1})


# Low-rank attention ---------------------------------------------------------------------------

RANKS: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}
KIMI_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def low_rank(q_rank: int | None = 12) -> Tensors:
    tensors = weights(draft=V)
    stem = "layers.0.self_attn."
    for name in ("q_proj", "k_proj", "v_proj"):
        del tensors[f"{stem}{name}.weight"]
    if q_rank is None:
        tensors[f"{stem}q_proj.weight"] = random(HEADS * 16, 2 * H, seed=70)
    else:
        tensors |= {
            f"{stem}q_a_proj.weight": random(q_rank, 2 * H, seed=71),
            f"{stem}q_a_layernorm.weight": random(q_rank, seed=72),
            f"{stem}q_b_proj.weight": random(HEADS * 16, q_rank, seed=73),
        }
    return tensors | {
        f"{stem}kv_a_proj_with_mqa.weight": random(24, 2 * H, seed=74),
        f"{stem}kv_a_layernorm.weight": random(16, seed=75),
        f"{stem}kv_b_proj.weight": random(HEADS * 14, 16, seed=76),
        f"{stem}o_proj.weight": random(H, HEADS * 6, seed=77),
    }


def kimi(**extra: Any) -> Config:
    config = sizes(architectures=["Eagle3DeepseekV2ForCausalLM"], _torchspec_version="0.1")
    return config | RANKS | {"draft_vocab_size": V, "eagle_config": {IDS: OUTPUT}} | extra


@pytest.mark.parametrize("q_rank", [12, None])
@pytest.mark.parametrize("block", [KIMI_YARN, {"rope_type": "default"}], ids=["yarn", "plain"])
def test_low_rank_attention_against_transformers(
    read: Read, q_rank: int | None, block: Config
) -> None:
    config = kimi(rope_parameters=block | {"rope_theta": 1e4}, q_lora_rank=q_rank)
    drafter = read(config, low_rank(q_rank))
    assert drafter.provenance["dialect"].value == "torchspec-mla"
    layer: Any = drafter.layers[0]
    own = layer.self_attn
    assert isinstance(own, MLAProjections)
    theirs_config = DeepseekV3Config(
        hidden_size=2 * H,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters=block | {"rope_theta": 1e4},
        **(RANKS | {"q_lora_rank": q_rank}),
    )
    theirs_config._attn_implementation = "eager"
    theirs: Any = DeepseekV3Attention(theirs_config, 0)
    # transformers fixes the epsilon of these two; TorchSpec and vLLM take the config's.
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        if getattr(theirs, norm, None) is not None:
            getattr(theirs, norm).variance_epsilon = 1e-5
    theirs.o_proj = torch.nn.Linear(HEADS * 6, H, bias=False)
    stem = "layers.0.self_attn."
    theirs.load_state_dict(
        {k.removeprefix(stem): v for k, v in low_rank(q_rank).items() if k.startswith(stem)}
    )
    x = random(1, 9, 2 * H, seed=80)
    positions = torch.arange(9)
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rotation = DeepseekV3RotaryEmbedding(theirs_config)(x, positions[None])
        want = theirs(x, position_embeddings=rotation, attention_mask=mask)[0]
        memory = drafter.new_memory()
        memory.length, memory.anchors, memory.host = 9, positions, positions
        found = layer.attention(
            own, [matrix(x) for matrix in own.readers()], positions, memory, 1, 0
        )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    m = 0.1 * math.log(64) + 1
    scale = m**2 if block is KIMI_YARN else 1.0
    assert drafter.config.mla == MLA(**(RANKS | {"q_lora_rank": q_rank}), softmax_multiplier=scale)
    assert drafter.config.rope.interleaved


@pytest.mark.parametrize(
    "ids,names,boundaries,origin",
    [
        # The trainer's ids are outputs; its export for vLLM adds one and renames midlayer.
        ([1, 4, 6], "midlayer", (2, 5, 7), Origin.derived),
        ([1, 4, 6], "layers.0", (2, 5, 7), Origin.assumed),
        ([2, 5, 7], "layers.0", (2, 5, 7), Origin.assumed),
        ([3, 4, 9], "layers.0", (4, 5, 10), Origin.assumed),
    ],
)
def test_ids_of_kimi_exports(
    read: Read, ids: list[int], names: str, boundaries: tuple[int, ...], origin: Origin
) -> None:
    tensors = mid(low_rank()) if names == "midlayer" else low_rank()
    drafter = read(kimi(model_type="kimi_k2", eagle_config={IDS: ids}), tensors)
    assert drafter.config.boundaries == boundaries
    assert drafter.provenance["boundaries"].origin is origin


def test_low_rank_attention_without_rotation_is_refused(read: Read) -> None:
    assert read(kimi(mla_use_nope=False), low_rank()).config.mla is not None
    with pytest.raises(CheckpointError, match="mla_use_nope is on"):
        read(kimi(mla_use_nope=True), low_rank())


def test_automodel_leaves_the_softmax_alone(read: Read) -> None:
    config = kimi(rope_scaling=KIMI_YARN, architectures=["DeepseekV3Eagle3DraftModel"])
    drafter = read(config, {f"model.{n}": t for n, t in low_rank().items()}, boundaries=DEFAULT)
    assert drafter.config.mla is not None and drafter.config.mla.softmax_multiplier == 1.0
    assert drafter.config.rope.rope_type == "yarn"


@pytest.mark.parametrize("name", ["kv_lora_rank", "v_head_dim", "q_lora_rank"])
def test_low_rank_sizes_must_be_those_of_the_tensors(read: Read, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        read(kimi(**{name: 5}), low_rank())


# Vocabulary -----------------------------------------------------------------------------------


def test_full_vocabularies(read: Read) -> None:
    config, tensors = plain(draft_vocab_size=V)
    tensors = without(weights(draft=V), "d2t")
    want = read(config, tensors)
    assert torch.equal(want.draft_to_target, torch.arange(V))
    zero = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    never_filled = zero | {"t2d": torch.zeros(V, dtype=torch.bool)}
    for said in (config, config | {"draft_vocab_size": None}):
        for extra in ({}, zero, never_filled):
            assert torch.equal(chain(read(said, tensors | extra)), chain(want))


@pytest.mark.parametrize("form", ["offset", "absolute", "t2d", "int32", "no t2d"])
def test_map_forms(read: Read, form: str) -> None:
    config, tensors = plain()
    tensors = without(tensors, "draft_id_to_target_id")
    both = maps()
    extra = {
        "offset": both,
        "absolute": {"d2t": KEPT, "t2d": both["t2d"]},
        "t2d": {"t2d": both["t2d"]},
        "int32": {"d2t": both["d2t"].int()},
        "no t2d": {"d2t": KEPT},
    }[form]
    drafter = read(config, tensors | extra)
    assert torch.equal(drafter.draft_to_target, KEPT)
    if extra.get("d2t") is KEPT:
        with pytest.raises(CheckpointError, match="absolute"):
            read(config, tensors | extra, strict=True)


def broken_maps() -> dict[str, tuple[Tensors, str]]:
    both = maps()
    offset, mask = both["d2t"], both["t2d"]
    twice, outside = offset.clone(), offset.clone()
    twice[1] = twice[0] - 1
    outside[-1] = V
    other = mask.roll(1)
    return {
        "none": ({}, "no d2t"),
        "zero": ({"d2t": torch.zeros_like(offset)}, "all zero"),
        "zero, marked": ({"d2t": torch.zeros_like(offset), "t2d": mask}, "all zero"),
        "twice": ({"d2t": twice}, "two draft ids"),
        "outside": ({"d2t": outside}, "outside 0..96"),
        "short": ({"d2t": offset[:-1]}, "no vector of 40"),
        "float": ({"d2t": offset.float()}, "no vector of 40"),
        "wrong mask": ({"d2t": offset, "t2d": other}, "t2d"),
        "few marked": ({"d2t": offset, "t2d": torch.zeros_like(mask)}, "t2d marks 0"),
    }


@pytest.mark.parametrize("kind", broken_maps())
def test_broken_maps(read: Read, kind: str) -> None:
    config, tensors = plain()
    extra, fault = broken_maps()[kind]
    with pytest.raises(CheckpointError, match=fault):
        read(config, without(tensors, "draft_id_to_target_id") | extra)


def test_head_and_embeddings_of_the_target(read: Read) -> None:
    config, tensors = plain()
    headless = without(tensors, "lm_head.weight", "embed_tokens.weight")
    drafter = read(config, headless)
    assert torch.equal(drafter.lm_head.weight, TARGET.head_weight[KEPT])
    assert torch.equal(drafter.embed_tokens.weight, TARGET.embedding_weight)
    assert drafter.provenance["lm_head"].value == "target"
    full = without(headless, "draft_id_to_target_id")
    assert torch.equal(read(config, full).lm_head.weight, TARGET.head_weight)
    tied = without(tensors, "lm_head.weight", "draft_id_to_target_id")
    own = random(V, H, seed=90)
    drafter = read(config | {"tie_word_embeddings": True}, tied | {"embed_tokens.weight": own})
    assert torch.equal(drafter.lm_head.weight, own)
    # The flag alone ties nothing: an own head stays, as everyone but SGLang reads it.
    assert torch.equal(
        chain(read(config | {"tie_word_embeddings": True}, tensors)), reference(read)
    )
    with pytest.raises(ContractError, match="embed_tokens"):
        read(config, headless, target=None)


def test_padded_and_foreign_vocabularies(read: Read) -> None:
    config, tensors = plain()
    padded = Target(vocab_size=128, embedding_weight=random(128, H), head_weight=random(128, H))
    drafter = read(config, tensors, target=padded)
    assert any("padding only" in n for n in drafter.provenance["notes"].value)
    assert torch.equal(chain(drafter), reference(read))
    bare_drafter = read(config, bare(tensors), target=padded)
    assert bare_drafter.config.vocab_size == 128
    with pytest.raises(ContractError, match="97 tokens"):
        read(config, tensors, target=Target(vocab_size=320))


WORDS = [f"w{i}" for i in range(V)]


@dataclass
class Words:
    """A tokenizer as far as a comparison asks."""

    words: list[str]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


@dataclass
class Speaking(Target):
    tokenizer: Words = field(default_factory=lambda: Words(WORDS))


def tokenizer(folder: Path, words: list[str], *, scores: bool = False) -> None:
    """Write a tokenizer.json of ``words``, the last of them an added token."""
    *first, last = words
    vocab: Any = {w: i for i, w in enumerate(first)}
    if scores:
        vocab = [[w, -float(i)] for i, w in enumerate(first)]
    added = [{"id": len(first), "content": last, "special": True}]
    data = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize("scores", [False, True])
def test_token_strings_are_compared(tmp_path: Path, scores: bool) -> None:
    folder = write_checkpoint(tmp_path / "d", *plain())
    tokenizer(folder, WORDS, scores=scores)
    said = load_drafter(folder, target=Speaking()).provenance["tokenizer"]
    assert said.value == "equal" and f"{V} token ids" in said.where
    # Any size is fine when the strings agree and the rest is padding.
    odd = Speaking(vocab_size=103, embedding_weight=random(103, H), head_weight=random(103, H))
    drafter = load_drafter(folder, target=odd)
    assert any("103 tokens, drafter of 97" in n for n in drafter.provenance["notes"].value)
    grown = replace(odd, tokenizer=Words([*WORDS, "new"]))
    assert (
        "1 in the target alone" in load_drafter(folder, target=grown).provenance["tokenizer"].where
    )
    swapped = Words([*WORDS[:5], "w6", "w5", *WORDS[7:]])
    with pytest.raises(ContractError, match=r"token 5 is 'w5' in .* and 'w6' in the target") as e:
        load_drafter(folder, target=Speaking(tokenizer=swapped))
    assert "2 of 97 ids differ" in str(e.value)


def test_token_strings_of_driftlabs_own_layout(tmp_path: Path, read: Read) -> None:
    save_drafter(read(*plain()), tmp_path / "own")
    tokenizer(tmp_path / "own", WORDS)
    drafter = load_drafter(tmp_path / "own", target=Speaking())
    assert drafter.provenance["tokenizer"].value == "equal"
    with pytest.raises(ContractError, match="token 0 is 'w0'"):
        load_drafter(tmp_path / "own", target=Speaking(tokenizer=Words(WORDS[1:])))
    tokenizer(tmp_path / "own", ["x"])
    (tmp_path / "own" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match="holds no vocabulary"):
        load_drafter(tmp_path / "own", target=Speaking())


# Automodel's map lies beside the weights -------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["speculative_token_map.pt", "eagle_meta.pt", "eagle3_meta.pt", "../eagle_meta.pt"]
)
def test_a_map_in_a_side_file(tmp_path: Path, read: Read, place: str) -> None:
    config, tensors = spell("automodel")
    bare_map = without(tensors, "d2t", "t2d")
    folder = write_checkpoint(tmp_path / "run" / "model", config, bare_map)
    with pytest.raises(CheckpointError, match=r"has no d2t"):
        load_drafter(folder, target=TARGET)
    meta = {"global_step": 7, "epoch": 1, "selected_token_ids": KEPT, "selected_token_mask": None}
    torch.save(KEPT if "map" in place else meta, folder / place)
    drafter = load_drafter(folder, target=TARGET)
    assert torch.equal(drafter.draft_to_target, KEPT)
    said = drafter.provenance["draft_to_target"]
    assert said.origin is Origin.read and Path(place).name in said.where
    assert torch.equal(chain(drafter), reference(read))


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        (KEPT[:-1], "39 ids for a head of 40"),
        (KEPT + 60, "an id outside"),
        (torch.zeros(VD, dtype=torch.long), "an id twice"),
        (KEPT.float(), "no vector of token ids"),
        ([1, 2], "no vector of token ids"),
    ],
)
def test_a_side_file_of_another_training(tmp_path: Path, ids: Any, fault: str) -> None:
    config, tensors = spell("automodel")
    folder = write_checkpoint(tmp_path / "d", config, without(tensors, "d2t", "t2d"))
    torch.save(ids, folder / "speculative_token_map.pt")
    with pytest.raises(CheckpointError, match=fault):
        load_drafter(folder, target=TARGET)


def test_a_side_file_against_the_weights_map(tmp_path: Path) -> None:
    config, tensors = spell("automodel")
    folder = write_checkpoint(tmp_path / "d", config, tensors)
    torch.save(KEPT, folder / "speculative_token_map.pt")
    assert not inspect(folder, target=TARGET).conflicts
    torch.save({"selected_token_ids": KEPT + 1}, folder / "eagle_meta.pt")
    with pytest.raises(CheckpointError, match="map draft ids to other tokens"):
        load_drafter(folder, target=TARGET)
    (folder / "speculative_token_map.pt").unlink()
    found = inspect(folder, target=TARGET)
    assert found.draft_to_target is not None and torch.equal(found.draft_to_target, KEPT)
    assert any("sends draft id 0 to 4, the weights' map to 3" in c for c in found.conflicts)


def test_a_side_file_with_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch executed",)

    folder = write_checkpoint(tmp_path / "d", *spell("automodel"))
    torch.save({"selected_token_ids": Evil()}, folder / "eagle_meta.pt")
    with pytest.raises(CheckpointError, match="could run its code"):
        load_drafter(folder, target=TARGET)
    assert not Path("executed").exists()


# Bad files ------------------------------------------------------------------------------------


def as_safeailab_wrote(eagle1: Tensors) -> Tensors:
    """EAGLE-1 and 2 have neither a norm before attention nor a final one, and no head."""
    gone = ("norm.weight", "lm_head.weight", "draft_id_to_target_id")
    layer = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
    return without(eagle1, *gone, *layer) | {"fc.bias": random(H)}


def test_other_kinds_are_refused_by_name(read: Read) -> None:
    config, tensors = plain()
    eagle1 = tensors | {
        "fc.weight": random(H, 2 * H),
        "layers.0.self_attn.q_proj.weight": random(HEADS * HEAD, H),
    }
    kinds: list[tuple[str, Config, Tensors]] = [
        ("EAGLE-1/2", config, eagle1),
        ("P-EAGLE", config, tensors | {"mask_hidden": random(1, 3 * H)}),
        ("P-EAGLE", config | {"parallel_drafting": True}, tensors),
        ("P-EAGLE", config | {"eagle_config": {"parallel_draft_step": 4}}, tensors),
        ("MTP", config, tensors | {"layers.0.eh_proj.weight": random(H, 2 * H)}),
        ("MTP", config, tensors | {"enorm.weight": random(H)}),
        ("DFlash", config | {"dflash_config": {"target_layer_ids": [1]}}, tensors),
        ("DSpark", config, tensors | {"markov_head.weight": random(H, H)}),
        ("DSpark", config | {"dspark_target_layer_ids": [1, 2]}, tensors),
        ("early-stop", config, tensors | {"fc.weight": random(H + 1, 3 * H)}),
        ("dflash", {"speculators_model_type": "dflash"}, tensors),
        ("EAGLE-1/2", {"speculators_model_type": "eagle"}, tensors),
        ("EAGLE-1/2", sizes(architectures=["LlamaForCausalLM"]), as_safeailab_wrote(eagle1)),
        ("MTP", sizes(), {"mtp.fc.weight": random(H, 2 * H), "mtp.norm.weight": random(H)}),
    ]
    for name, said, held in kinds:
        with pytest.raises(CheckpointError, match=f"(?i){name}"):
            read(said, held)


def test_nothing_is_skipped_or_filled_in(read: Read) -> None:
    config, tensors = plain()
    for name in sorted(set(tensors) - {"embed_tokens.weight", "lm_head.weight"}):
        with pytest.raises(CheckpointError, match=r"missing|no d2t|not numbered|absent"):
            read(config, without(tensors, name))
    stray = renamed(tensors, "layers.0.hidden_norm", "layers.0.hidden_nrom")
    with pytest.raises(CheckpointError) as caught:
        read(config, stray)
    assert "missing: layers.0.hidden_norm.weight" in str(caught.value)
    assert "unknown: layers.0.hidden_nrom.weight" in str(caught.value)
    ignored = {
        "verifier_norm.weight": torch.full((H,), float("nan")),  # as speculators begins
        "layers.0.self_attn.rotary_emb.inv_freq": random(4),
    }
    assert torch.equal(chain(read(config, tensors | ignored)), reference(read))
    with pytest.raises(CheckpointError, match="two tensors"):
        read(config, tensors | {"model.norm.weight": random(H)})
    for name in ("mlp.gate_up_proj", "self_attn.qkv_proj"):
        with pytest.raises(CheckpointError, match=f"unknown: layers.0.{name}.weight"):
            read(config, tensors | {f"layers.0.{name}.weight": torch.tensor(1.0)})


@pytest.mark.parametrize(
    "field,value",
    [
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("num_attention_heads", 8),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 4),
        ("head_dim", 16),
        ("target_hidden_size", 64),
        ("vocab_size", 300),
        ("num_aux_hidden_states", 4),
        ("hidden_size", "32"),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", 1e30),
        ("hidden_act", "swoosh"),
        ("hidden_act", "prelu"),  # it has a weight
        ("eagle_config", [1]),
    ],
)
def test_a_config_that_lies(read: Read, field: str, value: Any) -> None:
    config, tensors = plain()
    with pytest.raises(DriftlabError, match=field if field != "target_hidden_size" else "width"):
        read(config | {field: value}, tensors)


JUNK = st.sampled_from(
    [
        *(None, 0, -1, 1, 3, 2.5, float("nan"), True, "x", "linear", 10**12),
        *([], [1], [None], [3, 2, 1], {}, {"a": 1}, {"full_attention": 3}),
        {"rope_type": "yarn", "factor": -1},
    ]
)
KEYS = st.sampled_from(
    [
        *sizes(),
        *(IDS, "rope_scaling", "rope_parameters", "layer_types", "sliding_window"),
        *("eagle_config", "num_aux_hidden_states", "architectures", "speculators_model_type"),
        *("transformer_layer_config", "driftlab_export", "target_hidden_size", "norm_output"),
        *("tie_word_embeddings", "logit_scale", "model_type", "head_dim", "parallel_draft_step"),
    ]
)


@settings(max_examples=60)
@given(
    st.sampled_from(SPELLINGS), st.dictionaries(KEYS, JUNK, min_size=1, max_size=2), st.booleans()
)
def test_junk_in_a_config_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, dialect: str, junk: Config, nested: bool
) -> None:
    config, tensors = spell(dialect)
    inner = config.get("transformer_layer_config")
    place = inner if nested and inner is not None else config
    place.update(junk)
    folder = write_checkpoint(tmp_path_factory.getbasetemp() / "junk", config, tensors)
    with contextlib.suppress(DriftlabError):
        assert chain(load_drafter(folder, target=TARGET), depth=2).isfinite().all()


def test_sizes_that_trainers_get_wrong_are_noted(read: Read) -> None:
    config, tensors = plain(num_hidden_layers=2, draft_vocab_size=99)
    drafter = read(config, tensors)
    assert drafter.config.num_layers == 1 and drafter.config.draft_vocab_size == VD
    with pytest.raises(CheckpointError, match="2 contradiction"):
        read(config, tensors, strict=True)


def test_numbers_that_are_none(read: Read) -> None:
    config, tensors = plain()
    for value in (float("nan"), float("inf")):
        tensors["norm.weight"] = tensors["norm.weight"].clone()
        tensors["norm.weight"][3] = value
        with pytest.raises(CheckpointError, match=r"norm\.weight \(1 of 32\)"):
            read(config, tensors)


def test_quantised_files(read: Read) -> None:
    config, tensors = plain()
    with pytest.raises(CheckpointError, match="quantised"):
        read(config | {"quantization_config": {"quant_algo": "FP8"}}, tensors)
    assert torch.equal(chain(read(config | {"quantization_config": {}}, tensors)), reference(read))
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        read(config, tensors)


def test_damaged_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d", *plain())
    whole = (folder / "model.safetensors").read_bytes()

    def refused(data: bytes, name: str = "model.safetensors") -> None:
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            load_drafter(folder, target=TARGET)
        assert name in str(caught.value)

    for cut in (0, 5, 200, len(whole) - 7):
        refused(whole[:cut])
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(0, header, 37):
        # Every bit of the header that is flipped breaks a name, a shape or an offset.
        data = bytearray(whole)
        data[place] ^= 0x10
        (folder / "model.safetensors").write_bytes(bytes(data))
        try:
            load_drafter(folder, target=TARGET)
        except DriftlabError:
            continue
        assert bytes(data)[8:header].isspace() or b"__metadata__" in data[8:header]
    (folder / "model.safetensors").unlink()
    torch.save(plain()[1], folder / "pytorch_model.bin")
    whole = (folder / "pytorch_model.bin").read_bytes()
    for cut in (0, 10, len(whole) // 2):
        refused(whole[:cut], "pytorch_model.bin")
    torch.save({"model": plain()[1]}, folder / "pytorch_model.bin")
    refused((folder / "pytorch_model.bin").read_bytes(), "pytorch_model.bin")
    torch.save([1, 2], folder / "pytorch_model.bin")
    refused((folder / "pytorch_model.bin").read_bytes(), "pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_drafter(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"a": NaN', '{"a": 1, "a": 2}'])
def test_damaged_configs(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "d", *plain())
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter(folder, target=TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_drafter(folder, target=TARGET)


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("/tmp/driftlab-was-run",)


def test_a_pickle_with_code_in_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d", *plain())
    (folder / "model.safetensors").unlink()
    for save in (torch.save, lambda data, path: path.write_bytes(pickle.dumps(data))):
        save(plain()[1] | {"extra": Code()}, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="Convert it"):
            load_drafter(folder, target=TARGET)
        assert not Path("/tmp/driftlab-was-run").exists()


@pytest.mark.parametrize(
    "weight_map,fault",
    [
        ({"norm.weight": "../other/model.safetensors"}, "out of its folder"),
        ({"norm.weight": "/etc/passwd"}, "out of its folder"),
        ({"norm.weight": "..\\model.safetensors"}, "out of its folder"),
        ({"norm.weight": 3}, "out of its folder"),
        ({"norm.weight": "model-2.safetensors"}, r"model-2\.safetensors"),
        ({"nowhere.weight": "model.safetensors"}, r"nowhere\.weight"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_wrong_indexes(tmp_path: Path, weight_map: Any, fault: str) -> None:
    folder = write_checkpoint(tmp_path / "d", *plain())
    if isinstance(weight_map, dict) and weight_map:
        rest = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        weight_map = rest | weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=fault):
        load_drafter(folder, target=TARGET)


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_drafter(tmp_path / "no" / "such" / "folder")
    folder = write_checkpoint(tmp_path / "d", *plain())
    with pytest.raises(CheckpointError, match="is a file"):
        load_drafter(folder / "config.json")
    with pytest.raises(CheckpointError, match="no revision"):
        load_drafter(folder, revision="main")
    # The tests are offline: a hub id cannot be fetched.
    with pytest.raises(CheckpointError, match=r"could not be fetched.*abc") as caught:
        load_drafter("someone/some-drafter", revision="abc")
    assert "go online" in str(caught.value)


def test_a_hub_id_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "snapshots" / "0123abc", *plain())
    asked: dict[str, Any] = {}

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    drafter = load_drafter("someone/some-drafter", target=TARGET, revision="v1")
    assert asked == {"name": "someone/some-drafter", "revision": "v1"}
    assert drafter.provenance["revision"].value == "0123abc"
