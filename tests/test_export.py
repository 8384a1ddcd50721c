"""Writing drafters: every layout reads back bit-equal, or refuses what it cannot hold."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from driftlab.cli import main
from driftlab.config import MLA, DrafterConfig, Origin, Rope, Sourced
from driftlab.errors import CheckpointError, ConfigError, ContractError, ResourceError
from driftlab.models.checkpoints import inspect, load_drafter, save_drafter
from driftlab.models.drafter import Drafter

V, VD, H = 96, 24, 32
IDS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("driftlab", "vllm", "sglang", "speculators", "safeailab")


@dataclass
class Target:
    name: str = "someone/target"
    hidden_size: int = H
    n_layers: int = 10
    vocab_size: int = V
    embedding_weight: Tensor = field(
        default_factory=lambda: torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    )
    head_weight: Tensor = field(default_factory=lambda: torch.zeros(V, H))


TARGET = Target()
BASE: dict[str, Any] = {
    "hidden_size": H,
    "target_hidden_size": H,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "boundaries": (2, 5, 7),
    "rope": Rope(max_position=256),
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LOW_RANK = {
    "mla": MLA(
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        softmax_multiplier=1.0,
    ),
    "num_kv_heads": 4,
    "head_dim": 12,
    "rope": Rope(theta=5e4, interleaved=True, max_position=256),
}
MANY = {"vllm", "speculators", "driftlab"}
# What differs from BASE -> the layouts that hold it.
VARIANTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, set(LAYOUTS)),
    "eagle 3.1": ({"fusion_norm": "per_layer", "feedback": "post_norm"}, MANY | {"sglang"}),
    "concat": ({"fusion_norm": "concat", "feedback": "post_norm"}, MANY | {"sglang"}),
    "both norms": ({"fusion_norm": "concat_per_layer"}, {"vllm", "driftlab"}),
    "normed residual": ({"residual": "normed"}, MANY),
    "full vocabulary": ({"draft_vocab_size": V}, set(LAYOUTS)),
    "five states": ({"boundaries": (1, 3, 5, 7, 9)}, MANY | {"sglang"}),
    "one state": ({"boundaries": (6,)}, MANY),
    "embeddings": ({"boundaries": (0, 5, 7)}, MANY),
    "no states": ({"boundaries": ()}, {"vllm", "driftlab"}),
    "narrow": ({"target_hidden_size": 48}, set(LAYOUTS)),
    "wide heads": ({"head_dim": 16}, MANY | {"sglang"}),
    "two layers": ({"num_layers": 2}, MANY),
    "QK norms": ({"qk_norm": True}, MANY),
    "biases": ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, MANY),
    "QKV biases": ({"qkv_bias": True}, {"driftlab"}),
    "fc bias": ({"fc_bias": True}, {"driftlab"}),
    "gate": ({"attention_gate": True}, {"driftlab"}),
    "window": ({"windows": (5,)}, MANY),
    "window, QK norms": ({"windows": (5,), "qk_norm": True}, MANY),
    "moving window": ({"windows": (5,), "window_moves": True}, {"driftlab"}),
    "two windows": ({"windows": (5, 6), "num_layers": 2}, {"driftlab"}),
    "window in one layer": ({"windows": (None, 6), "num_layers": 2}, MANY),
    "scale": ({"logit_scale": 0.5}, {"vllm", "driftlab"}),
    "base": ({"rope": Rope(theta=5e5, max_position=64)}, set(LAYOUTS)),
    "linear": ({"rope": Rope(rope_type="linear", parameters={"factor": 2.0})}, set(LAYOUTS)),
    "dynamic": (
        {"rope": Rope(rope_type="dynamic", parameters={"factor": 2.0})},
        {"speculators", "safeailab", "driftlab"},
    ),
    "llama3": ({"rope": Rope(rope_type="llama3", parameters=LLAMA3)}, MANY | {"sglang"}),
    "yarn": ({"rope": Rope(rope_type="yarn", parameters=YARN)}, MANY | {"sglang"}),
    "yarn, magnitude": (
        {"rope": Rope(rope_type="yarn", parameters=YARN | {"attention_factor": 1.5})},
        MANY | {"sglang"},
    ),
    "activation": ({"hidden_act": "gelu"}, {"speculators", "safeailab", "driftlab"}),
    "raw logits": ({"logits_from_raw": True}, {"driftlab"}),
    "double norm": ({"double_hidden_norm": True}, {"driftlab"}),
    "low rank": (LOW_RANK, {"vllm", "sglang", "driftlab"}),
    "low rank 3.1": (
        LOW_RANK | {"fusion_norm": "per_layer", "feedback": "post_norm"},
        {"vllm", "sglang", "driftlab"},
    ),
    "low rank, half split": (LOW_RANK | {"rope": Rope(theta=5e4)}, {"driftlab"}),
}


def build(**changes: Any) -> Drafter:
    config = DrafterConfig(**(BASE | changes))
    torch.manual_seed(0)
    ids = torch.arange(config.draft_vocab_size)
    kept = ids if config.draft_vocab_size == V else ids * 3 + 2
    drafter = Drafter(config, kept)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.2)
        drafter.embed_tokens.weight.copy_(TARGET.embedding_weight)
    return drafter


def target_of(drafter: Drafter) -> Target:
    width = drafter.config.target_hidden_size
    return TARGET if width == H else Target(hidden_size=width)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_back_equal_or_is_refused(variant: str, layout: str, tmp_path: Path) -> None:
    changes, holds = VARIANTS[variant]
    drafter = build(**changes)
    target = target_of(drafter)
    folder = tmp_path / "out"
    if layout not in holds:
        with pytest.raises(CheckpointError, match=f"the {layout} layout cannot hold"):
            save_drafter(drafter, folder, dialect=layout, target=target)
        assert list(tmp_path.iterdir()) == []
        return
    save_drafter(drafter, folder, dialect=layout, target=target)
    # Embeddings and layer ids come from the file alone.
    found = load_drafter(folder)
    assert found.config == drafter.config
    assert found.provenance["dialect"].value == layout
    assert found.provenance["boundaries"].origin is not Origin.assumed
    held, wanted = found.state_dict(), drafter.state_dict()
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(held[name], tensor), name
    assert load_drafter(folder, target=target).config == drafter.config


def written(
    tmp_path: Path, layout: str, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    drafter = build(**changes)
    save_drafter(drafter, tmp_path / "out", dialect=layout, target=target_of(drafter))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    return config, load_file(tmp_path / "out" / "model.safetensors")


EAGLE31 = {"fusion_norm": "per_layer", "feedback": "post_norm"}


def test_what_vllm_reads(tmp_path: Path) -> None:
    config, tensors = written(tmp_path, "vllm", **EAGLE31, boundaries=(1, 3, 5, 7, 10))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config[IDS] == [1, 3, 5, 7, 10]  # boundaries, where both of its runners look
    assert config["num_aux_hidden_states"] == 5  # its Llama class counts no top-level list
    assert config["fc_norm"] is True and config["norm_output"] is True
    assert tensors["fc_norm.4.weight"].shape == (H,)
    assert torch.equal(torch.arange(VD) + tensors["d2t"], torch.arange(VD) * 3 + 2)
    # vLLM reads the config through transformers.
    block = LlamaConfig(**config).rope_parameters
    assert block == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "speculators"])
def test_heads_that_no_reader_takes_are_refused(tmp_path: Path, dialect: str) -> None:
    """transformers' Llama config wants the heads to divide the width, head_dim or not."""
    with pytest.raises(CheckpointError, match="cannot hold 6 heads"):
        save_drafter(build(num_heads=6), tmp_path / "a", dialect=dialect, target=TARGET)
    if dialect != "sglang":
        save_drafter(build(num_heads=6, qk_norm=True), tmp_path / "b", dialect=dialect)
        assert load_drafter(tmp_path / "b").config.num_heads == 6


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "speculators", "safeailab"])
def test_the_default_rotation_is_of_whole_heads(tmp_path: Path, dialect: str) -> None:
    rope = Rope(parameters={"partial_rotary_factor": 0.5})
    config, _ = written(tmp_path, dialect, rope=rope)
    assert "partial_rotary_factor" not in json.dumps(config)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "speculators"])
def test_a_state_that_is_captured_twice_is_refused(tmp_path: Path, dialect: str) -> None:
    """Every reader takes a layer's id once, so that fc would be too wide."""
    with pytest.raises(CheckpointError, match="cannot hold a captured state twice"):
        save_drafter(build(boundaries=(2, 5, 5)), tmp_path / "a", dialect=dialect)
    assert not (tmp_path / "a").exists()


def test_what_vllm_would_drop_is_refused(tmp_path: Path) -> None:
    """It ignores the map of a full head."""
    config = build(draft_vocab_size=V).config
    with pytest.raises(CheckpointError, match=r"cannot hold draft ids .* in another order"):
        save_drafter(Drafter(config, torch.arange(V).flip(0)), tmp_path / "a", dialect="vllm")


def test_what_vllm_reads_of_other_classes(tmp_path: Path) -> None:
    config, _ = written(tmp_path / "a", "vllm", **LOW_RANK)
    # deepseek_v3 would be rewritten to a multi-token-prediction class.
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config["model_type"] == "kimi_k2" and config["kv_lora_rank"] == 16
    config, _ = written(tmp_path / "b", "vllm", qk_norm=True)
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    config, _ = written(tmp_path / "c", "vllm", fusion_norm="concat")
    assert config["norm_before_fc"] is True and config["eagle_config"]["norm_before_fc"] is True
    config, _ = written(tmp_path / "d", "vllm", boundaries=())
    assert config["eagle_config"]["use_aux_hidden_state"] is False


def test_engines_scale_yarn_by_their_own_name(tmp_path: Path) -> None:
    rope = Rope(rope_type="yarn", parameters=YARN | {"attention_factor": 2.0})
    config, _ = written(tmp_path, "vllm", rope=rope)
    # Their magnitude is (0.1 ln 4 + 1) times attn_factor.
    factor = config["rope_parameters"]["attn_factor"]
    assert factor * (0.1 * torch.tensor(4.0).log().item() + 1) == pytest.approx(2.0)


def test_what_sglang_reads(tmp_path: Path) -> None:
    config, tensors = written(tmp_path / "a", "sglang", boundaries=(3, 5, 7))
    assert config["eagle_config"][IDS] == [2, 4, 6] and IDS not in config
    assert "midlayer.hidden_norm.weight" in tensors
    assert config["rope_scaling"] is None and config["rope_theta"] == 10000.0
    with pytest.raises(CheckpointError, match="after the last block, which it never captures"):
        written(tmp_path / "c", "sglang", boundaries=(3, 5, TARGET.n_layers))
    # Its default needs no ids, and so no version reads them another way.
    config, _ = written(tmp_path / "b", "sglang")
    assert IDS not in config["eagle_config"]


def test_sglang_replaces_embeddings(tmp_path: Path) -> None:
    drafter = build()
    other = Target(embedding_weight=torch.zeros(V, H))
    with pytest.raises(CheckpointError, match="embeddings of its own"):
        save_drafter(drafter, tmp_path / "a", dialect="sglang", target=other)
    notes = save_drafter(drafter, tmp_path / "a", dialect="sglang")
    assert any("X11" in note for note in notes)


def test_what_speculators_reads(tmp_path: Path) -> None:
    config, _ = written(tmp_path, "speculators", **EAGLE31, target_hidden_size=48)
    assert config["speculators_model_type"] == "eagle3" and config[IDS] == [2, 5, 7]
    assert config["target_hidden_size"] == 48
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    layer = config["transformer_layer_config"]
    assert LlamaConfig(**layer).rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["fc_norm"] and config["norm_output"] and not config["norm_before_residual"]


def test_what_safeailab_reads(tmp_path: Path) -> None:
    config, tensors = written(tmp_path, "safeailab")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["target_hidden_size"] == H and "embed_tokens.weight" in tensors
    drafter = build(boundaries=(3, 5, 7))
    with pytest.raises(CheckpointError, match=r"boundaries \(3, 5, 7\), only \(2, 5, 7\)"):
        save_drafter(drafter, tmp_path / "b", dialect="safeailab", target=TARGET)
    with pytest.raises(CheckpointError, match="needs the target"):
        save_drafter(drafter, tmp_path / "b", dialect="safeailab")


def test_a_map_in_any_order(tmp_path: Path) -> None:
    drafter = Drafter(build().config, torch.arange(VD).flip(0) * 3)
    for layout in LAYOUTS:
        target = Target(embedding_weight=drafter.embed_tokens.weight.detach())
        save_drafter(drafter, tmp_path / layout, dialect=layout, target=target)
        found = load_drafter(tmp_path / layout)
        assert torch.equal(found.draft_to_target, drafter.draft_to_target)


# driftlab's own layout ----------------------------------------------------------------------


def test_provenance_survives(tmp_path: Path) -> None:
    drafter = build()
    drafter.provenance["fc"] = Sourced(value="x", origin=Origin.assumed, where="y")
    save_drafter(drafter, tmp_path / "d")
    assert load_drafter(tmp_path / "d").provenance["fc"].where == "y"


def test_writing_again_replaces_where_it_is_asked_to(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "d"
    save_drafter(build(), folder)
    before = contents(folder)
    for dialect in ("driftlab", "vllm"):
        with pytest.raises(CheckpointError, match="not empty, and is not replaced"):
            save_drafter(build(**EAGLE31), folder, dialect=dialect)
    assert contents(folder) == before
    save_drafter(build(**EAGLE31), folder, replace=True)
    assert load_drafter(folder).config.variant == "per_layer+post_norm"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["d"]
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    (folder / "notes.txt").write_text("mine")
    for replace in (False, True):
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            save_drafter(build(), folder, replace=replace)
    for below in (folder / "notes.txt", folder / "notes.txt" / "d"):
        with pytest.raises(CheckpointError, match=r"notes\.txt is a file"):
            save_drafter(build(), below)
    with pytest.raises(CheckpointError, match="does not write"):
        save_drafter(build(), tmp_path / "e", dialect="angelslim")
    with pytest.raises(CheckpointError, match="does not write") as unknown:
        save_drafter(build(), tmp_path / "e", dialect="onnx")
    assert "Layouts: driftlab, vllm, sglang, speculators, safeailab." in str(unknown.value)
    with pytest.raises(CheckpointError, match="inside the drafter's own folder"):
        save_drafter(build(), folder / "vllm", dialect="vllm", source=str(folder))


def test_a_kill_while_writing_leaves_nothing_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    save_drafter(build(), folder)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("driftlab.models.checkpoints.write.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(build(**EAGLE31), folder, replace=True)
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_drafter(folder)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(build(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_only_the_same_export_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another drafter, the source, a target's folder: what is there stays, byte for byte."""
    a, b, target, out = (tmp_path / name for name in "abto")
    save_drafter(build(), a)
    save_drafter(build(**EAGLE31), b)
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_text("{}")
    before = [contents(folder) for folder in (a, b, target)]
    for taken in (a, b, target):
        assert call("export", a, "--to", "vllm", "--out", taken) == 2
        said = capfd.readouterr().err
        assert f"{taken} is not empty" in said and "remove this one" in said
        words = ("--target", "nowhere", "--drafter", a, "--fix", taken)
        assert call("doctor", *words) == 2
        assert f"{taken} is not empty" in capfd.readouterr().err
    assert [contents(folder) for folder in (a, b, target)] == before
    for layout in ("vllm", "speculators"):
        out = tmp_path / layout
        assert call("export", a, "--to", layout, "--out", out) == 0
        assert str(tmp_path) not in (out / "config.json").read_text()
        first = contents(out)
        assert call("export", a, "--to", layout, "--out", out) == 0
        assert contents(out) == first
        assert call("export", b, "--to", layout, "--out", out) == 2
        assert call("export", a, "--to", "sglang", "--out", out) == 2
        assert call("export", out, "--to", layout, "--out", out) == 2
        (out / "notes.txt").write_text("mine")
        assert call("export", a, "--to", layout, "--out", out) == 2
        assert load_drafter(out).config == build().config


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_layer_ids_that_contradict_the_export_are_said(tmp_path: Path, layout: str) -> None:
    """Engines read the list; driftlab its own boundaries."""
    save_drafter(build(), tmp_path / layout, dialect=layout)
    assert "contradicts" not in str(load_drafter(tmp_path / layout, target=TARGET).provenance)
    path = tmp_path / layout / "config.json"
    config = json.loads(path.read_text())
    fields = config["eagle_config"] if layout == "sglang" else config
    fields[IDS] = [i + 1 for i in fields[IDS]]
    path.write_text(json.dumps(config))
    notes = load_drafter(tmp_path / layout, target=TARGET).provenance["notes"].value
    assert any("contradicts driftlab_export.boundaries [2, 5, 7]" in note for note in notes)
    with pytest.raises(CheckpointError, match="contradicts"):
        load_drafter(tmp_path / layout, target=TARGET, strict=True)


@pytest.mark.parametrize("ids", [[], [2, 5]])
def test_boundaries_of_an_export_that_fc_does_not_fit(tmp_path: Path, ids: list[int]) -> None:
    """Without any, fc would be left out in silence."""
    save_drafter(build(), tmp_path / "a", dialect="vllm")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    config["driftlab_export"]["boundaries"] = ids
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"fc reads 3 .* names {len(ids)}"):
        load_drafter(tmp_path / "a", target=TARGET)


def test_a_folder_that_cannot_be_replaced_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "model.safetensors").mkdir(parents=True)
    (folder / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file"):
        save_drafter(build(), folder, replace=True)
    assert (folder / "config.json").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_an_export_holds_no_infinity(tmp_path: Path) -> None:
    drafter = build()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"NaN or infinity \(got fc\.weight \(1 of"):
        save_drafter(drafter, tmp_path / "d", dialect="vllm")
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ResourceError, match="cannot be written"):
            save_drafter(build(), tmp_path / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    save_drafter(build(), tmp_path / "d")
    flip(tmp_path / "d" / "model.safetensors", -5)
    with pytest.raises(CheckpointError, match="not the file that its config was written with"):
        load_drafter(tmp_path / "d")


def edit_version(data: dict[str, Any]) -> None:
    data["driftlab_drafter"] = 2


def edit_heads(data: dict[str, Any]) -> None:
    data["config"]["num_heads"] = "many"


def edit_size(data: dict[str, Any]) -> None:
    data["config"]["intermediate_size"] = 41


def edit_unknown(data: dict[str, Any]) -> None:
    data["config"]["colour"] = "red"


@pytest.mark.parametrize(
    "edit,fault",
    [
        (edit_version, "unknown version"),
        (edit_heads, "num_heads"),
        (edit_size, r"mlp\.gate_proj"),
        (edit_unknown, "colour"),
    ],
)
def test_edited_configs(tmp_path: Path, edit: Callable[[dict[str, Any]], None], fault: str) -> None:
    save_drafter(build(), tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=fault):
        load_drafter(tmp_path / "d")


def test_own_layout_against_a_target_and_overrides(tmp_path: Path) -> None:
    save_drafter(build(), tmp_path / "d")
    for other, fault in (
        (Target(hidden_size=48), "width 32"),
        (Target(vocab_size=500), "96 tokens"),
        (Target(n_layers=6), "boundary 7"),
    ):
        with pytest.raises(ContractError, match=fault):
            load_drafter(tmp_path / "d", target=other)
    assert load_drafter(tmp_path / "d", target=Target(vocab_size=128)).config.vocab_size == 96
    found = inspect(tmp_path / "d", overrides={"rope.theta": 5.0, "feedback": "post_norm"})
    assert found.config is not None and found.config.rope.theta == 5.0
    assert found.provenance["feedback"].where == "overrides"
    assert load_drafter(tmp_path / "d", boundaries=(1, 2, 3)).config.boundaries == (1, 2, 3)
    with pytest.raises(ConfigError, match="impossible"):
        load_drafter(tmp_path / "d", overrides={"num_kv_heads": 3})
    with pytest.raises(ConfigError, match="nothing to decide"):
        load_drafter(tmp_path / "d", overrides={"dialect": "vllm"})
