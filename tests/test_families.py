"""Targets of many families: what differs between them and was, or would be, a silent wrong number.

Scales of logits and embeddings, chunks and windows, rotations that depend on length, files that
hold more than the model, ends of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pairs
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_target import COMMON, WINDOW, H, N, V, close, padded, patterns, prompts, spread
from torch import Tensor

from driftlab.config import SUITES, Origin, read_experiment
from driftlab.engines.align import store_rows
from driftlab.engines.anchors import unroll
from driftlab.engines.chain import speculate
from driftlab.engines.train import SoftTargets, initialise
from driftlab.errors import CheckpointError, ContractError, DataError
from driftlab.experiment.plan import Plan
from driftlab.models.target import Target

PLAIN: dict[str, Any] = {k: v for k, v in COMMON.items() if k != "head_dim"}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GRANITE: dict[str, Any] = {
    "logits_scaling": 4.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}
CAPPED: dict[str, Any] = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}
LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "attention_chunk_size": WINDOW,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**PLAIN, **GRANITE)),
    "hyperclovax": lambda: hf.HyperCLOVAXForCausalLM(
        hf.HyperCLOVAXConfig(**COMMON, logits_scaling=0.25)
    ),
    "cohere2": lambda: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**COMMON, sliding_window=WINDOW, logit_scale=0.25)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**COMMON, sliding_window=WINDOW, query_pre_attn_scalar=8, **CAPPED)
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**COMMON, **LLAMA4, no_rope_layers=[1, 1, 1, 0])
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**COMMON | EXPERTS | LATENT, moe_intermediate_size=16)
    ),
    "exaone4": lambda: hf.Exaone4ForCausalLM(
        hf.Exaone4Config(
            **COMMON, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2
        )
    ),
    "nemotron": lambda: hf.NemotronForCausalLM(hf.NemotronConfig(**COMMON)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=V, hidden_size=H, num_hidden_layers=N, num_attention_heads=4, alibi=True
        )
    ),
    "gemma4": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **COMMON | {"head_dim": 4, "global_head_dim": 8},
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
}


GPT2 = hf.GPT2Config(vocab_size=V, n_embd=H, n_layer=N, n_head=4, n_positions=64)
NEMOTRON = hf.NemotronConfig(**COMMON)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    torch.manual_seed(0)
    return spread(FAMILIES[request.param](), request.param)


def test_states_logits_and_the_cache_are_the_family_s_own(target: Target) -> None:
    texts = prompts(13, 5)
    tokens, lengths = padded(texts)
    out = target.forward(tokens, lengths, tuple(range(N + 1)))
    assert out.logits is not None
    for i, text in enumerate(texts):
        with torch.no_grad():
            own = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
        n = len(text)
        for b, state in enumerate(out.aux[i, :n].split(H, -1)[:N]):
            close(state, own.hidden_states[b][0])
        close(out.last[i, :n], own.hidden_states[-1][0])
        close(out.logits[i, :n], own.logits[0], 1e-5)
    rebuilt = target.head(target.final_norm(out.aux[..., -H:]))[0]
    close(rebuilt, out.logits[0], 1e-5)
    session = target.session(texts[0][:6], (2, N))
    session.extend(texts[0][6:9])
    session.rewind(7)
    again = session.extend(texts[0][7:])
    close(again.aux[0], out.aux[0, 7:].unflatten(-1, (N + 1, H))[:, [2, N]].flatten(1))


def test_what_a_drafter_is_taught_is_the_family_s_own_distribution(target: Target) -> None:
    out = target.forward(*padded(prompts(9)), (N,))
    assert out.logits is not None
    taught = SoftTargets(target, torch.arange(V))(out.last[0])
    with torch.no_grad():
        own = target.model(input_ids=torch.tensor(prompts(9))).logits[0].softmax(-1)
    close(taught, own, 1e-5)


def test_a_final_norm_s_gains_are_found(target: Target) -> None:
    norm: Any = target._norm
    norm.weight.data.uniform_(-0.4, 0.4, generator=torch.Generator().manual_seed(1))
    gains = target.final_norm_weight
    assert gains is not None
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(-1, keepdim=True)  # then both kinds of norm divide by the RMS
    close(target.final_norm(x), x / x.pow(2).mean(-1, keepdim=True).sqrt() * gains, 1e-3)
    norm.weight.data.fill_(float(torch.ones(())))


@pytest.mark.parametrize(
    ("family", "scale"), [("granite", 12.0), ("gemma2", H**0.5), ("cohere2", 1.0)]
)
def test_the_scale_of_embeddings_is_said(family: str, scale: float) -> None:
    said = spread(FAMILIES[family]()).provenance["embedding_scale"]
    assert said.value == pytest.approx(scale, rel=1e-3)
    assert "as they are stored" in said.where


def test_sizes_are_those_of_a_full_layer() -> None:
    shape = spread(FAMILIES["gemma4"]()).shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)


def test_sizes_under_names_of_their_own() -> None:
    opt = hf.OPTConfig(
        vocab_size=V, hidden_size=H, word_embed_proj_dim=H, ffn_dim=48, num_hidden_layers=N,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    assert spread(hf.OPTForCausalLM(opt)).shape.intermediate_size == 48
    shape = spread(hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**PLAIN))).shape
    assert (shape.norm_eps, shape.assumed) == (1e-5, ())
    assert spread(FAMILIES["falcon"]()).shape.num_kv_heads == 1


def test_a_target_that_turns_a_part_of_each_head_has_drafters_that_turn_it_whole() -> None:
    """The drafter's default rotation takes no factor, so its contract must not name one."""
    shape = spread(hf.GlmForCausalLM(hf.GlmConfig(**COMMON))).shape
    assert shape.whole and shape.rope.parameters == {}
    assert not spread(_model()).shape.whole


def test_a_fresh_drafter_speculates_for_every_family(target: Target) -> None:
    like = target.shape
    config = pairs.config(
        rope=like.rope, num_heads=like.num_heads, num_kv_heads=like.num_kv_heads,
        norm_eps=like.norm_eps, draft_vocab_size=V,
    )  # fmt: skip
    made = initialise(config, target, None, seed=0, head_init=0.3).requires_grad_(False)
    prompt = prompts(5)[0]
    found = speculate(target, made, prompt, depth=3, max_new_tokens=8)
    assert [list(found.continuation)] == target.generate([prompt], max_new_tokens=8)


def test_what_a_drafter_takes_over_and_the_target_lacks_is_assumed() -> None:
    experiment = read_experiment(SUITES / "micro.toml", ("drafter.draft_vocab_size=97",))
    said = {}
    for model in (_model(), hf.GPT2LMHeadModel(GPT2), hf.NemotronForCausalLM(NEMOTRON)):
        target = Target.from_model(model, name="x", eos_ids=())
        plan = SimpleNamespace(
            experiment=experiment, target=target, boundaries=(1, 2, 3), provenance={}
        )
        config = Plan.drafter_config(plan)  # type: ignore[arg-type]
        assert plan.provenance["drafter.norm_eps"].value == config.norm_eps
        said[model.config.model_type] = [
            name for name, s in plan.provenance.items() if s.origin is Origin.assumed
        ]
    assert said == {
        "llama": [],
        "gpt2": ["drafter.intermediate_size", "drafter.rope"],
        "nemotron": [],
    }
    assert plan.provenance["drafter.rope"].where.endswith("the target turns a part")


def test_an_id_of_padding_that_a_drafter_does_not_have_is_an_error() -> None:
    padded_target, drafter = Target.from_model(_model(vocab_size=128), name="x"), pairs.drafter()
    with pytest.raises(DataError, match=r"token id 120, for which the drafter .*got 97 ids"):
        speculate(padded_target, drafter, [1, 2, 120], depth=2, max_new_tokens=4)
    tokens = torch.tensor([[1, 120, 3, 4]])
    with pytest.raises(DataError, match="token id 120"):
        list(unroll(drafter, tokens, pairs.states(padded_target, tokens), depth=1, mode="free"))


class _Quarter(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits / 4
        return out


def test_a_scale_that_is_not_known_is_refused_though_the_best_tokens_agree() -> None:
    with pytest.raises(ContractError, match=r"the same best tokens, values apart by 3 "):
        Target.from_model(_Quarter(hf.LlamaConfig(**COMMON)), name="quarter")


def test_a_head_with_a_bias_teaches_nobody() -> None:
    model = hf.PhiForCausalLM(hf.PhiConfig(**PLAIN))
    model.lm_head.bias.data.normal_()
    with pytest.raises(ContractError, match="not a product of its weight alone"):
        SoftTargets(Target.from_model(model, name="phi"), torch.arange(V))


def test_blocks_with_several_streams_are_refused() -> None:
    config = hf.Gemma3nTextConfig(
        **COMMON,
        vocab_size_per_layer_input=V,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    with pytest.raises(ContractError, match="boundary 4 is not one state a token"):
        Target.from_model(hf.Gemma3nForCausalLM(config), name="gemma3n")


class _Forgetful(hf.LlamaForCausalLM):
    """Its positions begin anew with every block."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._anew, with_kwargs=True)

    @staticmethod
    def _anew(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"position_ids": torch.arange(kwargs["input_ids"].shape[1])[None]}


def test_a_cache_that_gives_other_states_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ContractError, match="states on a cache are not those of one run"):
        spread(_Forgetful(hf.LlamaConfig(**COMMON)))
    # Quantized layers round in half precision whatever dtype the rest has.
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "bitsandbytes"}}
    assert spread(_Forgetful(hf.LlamaConfig(**COMMON | quantized))).n_layers == N


def test_a_config_that_asks_for_tuples_changes_nothing() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON))
    plain = Target.from_model(model, name="x").generate(prompts(4), max_new_tokens=3)
    model.config.return_dict = model.config.use_cache = False
    assert Target.from_model(model, name="x").generate(prompts(4), max_new_tokens=3) == plain


# What a query may read


@pytest.mark.parametrize(
    ("family", "back"),
    [("llama4", ["chunk"] * 3 + [None]), ("exaone4", [WINDOW, None] * 2), ("nemotron", [None] * N)],
)
def test_keys_out_of_reach_are_told_from_a_measured_nought(family: str, back: list[Any]) -> None:
    torch.manual_seed(0)
    q, k = torch.arange(11)[:, None], torch.arange(11)[None]
    kinds: dict[Any, Tensor] = {
        None: k <= q,
        WINDOW: (k <= q) & (q - k < WINDOW),
        "chunk": (k <= q) & (q // WINDOW == k // WINDOW),
    }
    target = spread(FAMILIES[family]())
    for pattern, kind in zip(patterns(target, prompts(11)), back, strict=True):
        assert torch.equal(pattern.reach[0] & (k <= q), kinds[kind])
        assert torch.equal((pattern.weights[0] > 0).any(0), kinds[kind])


def test_stored_rows_mark_the_keys_of_another_chunk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = spread(FAMILIES["llama4"]())
    text = pairs.as_text(prompts(4)[0], prompts(6)[0])
    _, rows = store_rows(target, [text], tmp_path, layers=[0, 3]).item(0)
    assert rows[0, 6].tolist()[:WINDOW] == [-1] * WINDOW and (rows[0, 6, WINDOW:] >= 0).all()
    assert (rows[1] >= 0).all()


def test_attention_that_is_called_twice_a_block_is_refused() -> None:
    target = spread(hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**COMMON)))
    with pytest.raises(ContractError, match="more than once"):
        patterns(target, prompts(5))


# Rotations that depend on the length of the text


def test_a_text_past_the_length_where_rotations_change_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    }
    config = hf.Phi3Config(**COMMON, rope_parameters=rope, original_max_position_embeddings=16)
    target = spread(hf.Phi3ForCausalLM(config))
    assert target.max_position == 16
    assert target.provenance["max_position"].where.startswith("longrope")
    target.generate(prompts(12), max_new_tokens=4)
    with pytest.raises(DataError, match=r"16 tokens \(longrope: .* other factors"):
        target.generate(prompts(12), max_new_tokens=5)
    with pytest.raises(DataError, match="longrope"):
        target.session(prompts(12)[0], (2,)).extend(prompts(5)[0])


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    _model().save_pretrained(tmp_path / "t", max_shard_size="40KB")
    return tmp_path / "t"


def _model(**more: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON | more))


def _edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_tensor_that_the_config_leaves_without_a_place_is_an_error(tmp_path: Path) -> None:
    _model(attention_bias=True).save_pretrained(tmp_path)
    _edit(tmp_path, attention_bias=False)
    with pytest.raises(CheckpointError, match=r"16 tensors .*without a place: .*k_proj\.bias"):
        Target.load(str(tmp_path))


def test_parts_that_the_model_does_not_have_are_left_out_and_said(folder: Path) -> None:
    _edit(folder, num_hidden_layers=N - 1)
    target = Target.load(str(folder))
    assert target.n_layers == N - 1
    said = target.provenance["tensors left out"]
    assert said.origin is Origin.assumed
    assert f"model.layers.{N - 1}.input_layernorm.weight" in said.value and "5 more" in said.value


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors"])
def test_an_index_that_is_not_read_may_lack_its_shards(folder: Path, name: str) -> None:
    """Folders that were fetched without a second copy of the weights."""
    index = {"weight_map": {"lm_head.weight": f"not-there-{name}"}}
    (folder / f"{name}.index.json").write_text(json.dumps(index))
    assert Target.load(str(folder)).n_layers == N


def test_scales_of_a_server_s_cache_are_left_out_and_said(folder: Path) -> None:
    """Files in 8 bits bring them along; driftlab's cache is in the model's own dtype."""
    place = "model.layers.0.self_attn"
    names = (f"{place}.k_proj.k_scale", f"{place}.kv_scale")
    more = {name: torch.ones(1) for name in names}
    shard = min(folder.glob("*.safetensors"))
    save_file(load_file(shard) | more, shard, metadata={"format": "pt"})
    said = Target.load(str(folder)).provenance["tensors left out"]
    assert said.value == ", ".join(names)


def test_a_stale_copy_in_another_shard_is_an_error(folder: Path) -> None:
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.0.input_layernorm.weight"
    other = next(s for s in sorted(set(places.values()), reverse=True) if s != places[name])
    tensors = load_file(folder / other)
    save_file(tensors | {name: torch.zeros(H)}, folder / other, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{other} holds tensors .*{name}"):
        Target.load(str(folder))


def test_weights_that_loading_made_plain_are_called_quantized(folder: Path) -> None:
    _edit(folder, quantization_config={"quant_method": "mxfp4"})
    assert Target.load(str(folder)).provenance["quantization"].value == "mxfp4, dequantized"


def _gguf(path: Path, *, without: str = "", yarn: bool = False, **more: tuple[int, ...]) -> str:
    """A tiny Llama with ``more`` tensors, whose names have _ for a dot."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(H)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(V)
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"token {i}" for i in range(3, V))])
    writer.add_token_types([1] * V)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (V, H),
        "output_norm.weight": (H,),
        "output.weight": (V, H),
    }
    block = {"attn_norm": (H,), "attn_q": (H, H), "attn_k": (16, H), "attn_v": (16, H)}
    block |= {"attn_output": (H, H), "ffn_norm": (H,), "ffn_gate": (48, H), "ffn_up": (48, H)}
    for i in range(2):
        for name, shape in {**block, "ffn_down": (H, 48)}.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    shapes.pop(without, None)
    rng = torch.Generator().manual_seed(0)
    for name, shape in (shapes | {k.replace("__", "."): v for k, v in more.items()}).items():
        writer.add_tensor(name, torch.randn(shape, generator=rng).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"rope_freqs__weight": (4,)}, r"scales its rotations.*got factors"),
        ({"yarn": True}, r"scales its rotations.*got yarn"),
        ({"blk__0__attn_q__bias": (H,)}, "32 numbers more than the model"),
        ({"without": "blk.1.ffn_up.weight"}, r"missing: .*layers\.1\.mlp\.up_proj"),
    ],
)
def test_a_gguf_file_that_is_not_read_whole_is_refused(
    odd: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Target.load(_gguf(tmp_path / "odd.gguf", **odd))


def test_a_gguf_file_that_is_read_whole(tmp_path: Path) -> None:
    target = Target.load(_gguf(tmp_path / "x.gguf", blk__2__nextn=(H,)))
    assert target.shape.rope.theta == 5e5 and target.provenance["eos_ids"].value == [2]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_the_text_part_of_a_model_that_sees_is_a_target(kind: str, tmp_path: Path) -> None:
    eye: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    eye["num_attention_heads"] = 2
    ids: dict[str, Any] = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    seeing: Any
    if kind == "gemma3":
        eye |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
        seeing = hf.Gemma3ForConditionalGeneration(
            hf.Gemma3Config(
                text_config=COMMON | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
                vision_config=eye, mm_tokens_per_image=4,
            )
        )  # fmt: skip
    else:
        eye |= {"depth": 1, "out_hidden_size": H, "deepstack_visual_indexes": [0]}
        seeing = hf.Qwen3VLForConditionalGeneration(
            hf.Qwen3VLConfig(
                text_config=COMMON | {"rope_parameters": rope}, vision_config=eye,
                vision_end_token_id=93, **ids,
            )
        )  # fmt: skip
    seeing.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    assert "tensors left out" not in target.provenance
    tokens, lengths = padded(prompts(9, 4))
    own = seeing.eval().model.language_model(input_ids=tokens[:1]).last_hidden_state
    close(target.forward(tokens, lengths, (2,)).last[:1], own)


def test_settings_that_cannot_be_read_are_not_passed_over(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        Target.load(str(folder))


def test_dtypes_that_do_not_mix_are_one_clear_error() -> None:
    model = _model().bfloat16()
    model.model.layers[0].input_layernorm.float()
    with pytest.raises(ContractError, match=r"x cannot be run.*same dtype"):
        Target.from_model(model, name="x")


# Ends of text


class _Tokenizer:
    eos_token_id = 7


@pytest.mark.parametrize(
    ("settings", "ids", "where"),
    [
        (5, [5, 7], "generation_config and tokenizer"),
        ([7, 9], [7, 9], "generation_config"),
        (None, [7], "tokenizer"),
    ],
)
def test_a_text_ends_where_engines_end_it(settings: Any, ids: list[int], where: str) -> None:
    model = _model()
    model.generation_config.eos_token_id = settings
    target = Target.from_model(model, _Tokenizer(), name="x")
    said = target.provenance["eos_ids"]
    assert (said.value, said.where) == (ids, where) and target.eos_ids == set(ids)
    assert Target.from_model(model, _Tokenizer(), name="x", eos_ids=(3,)).eos_ids == {3}


@pytest.mark.parametrize("odd", [[[2]], "2", [True], 2.5])
def test_an_end_that_is_no_token_id_is_refused(odd: Any) -> None:
    model = _model()
    model.generation_config.eos_token_id = odd
    with pytest.raises(ContractError, match="eos_token_id of generation_config is no token id"):
        Target.from_model(model, name="x")
