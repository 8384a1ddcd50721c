"""The target against HuggingFace's own forward, hooks and generate, one tiny model a family."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from driftlab.config import Origin
from driftlab.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    NumericsError,
    ResourceError,
)
from driftlab.models import attention, generation, gguf_header, loading, wide
from driftlab.models.attention import Pattern
from driftlab.models.continuation import Request
from driftlab.models.gguf_header import read_gguf_header
from driftlab.models.target import Target

V, H, N = 97, 32, 4
NO_TOKENS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
COMMON: dict[str, Any] = NO_TOKENS | {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WINDOW = 4


def _llama(**more: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON | more))


def _gpt_oss() -> Any:
    model = hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **COMMON,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(0.5)
    return model


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**COMMON)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=WINDOW)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**COMMON, sliding_window=WINDOW, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**COMMON, sliding_window=WINDOW, query_pre_attn_scalar=8)
    ),
    "gpt_oss": _gpt_oss,
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=V, n_embd=H, n_layer=N, n_head=4, n_positions=64, **NO_TOKENS)
    ),
}
# One of each kind: plain, window in every layer, window in every other layer, absolute
# positions, learned sinks.
KINDS = ("llama", "mistral", "gemma3", "gpt2", "gpt_oss")


def spread(model: Any, name: str = "x") -> Target:
    """``model`` with weights so large that its logits lie apart."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return Target.from_model(model, name=name, eos_ids=())


def make(family: str, **more: Any) -> Target:
    """A random target whose logits are far enough apart to have no near ties."""
    torch.manual_seed(0)
    return spread(FAMILIES[family]() if not more else _llama(**more), family)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Target:
    return make(request.param)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Target:
    return make(request.param)


@pytest.fixture(scope="module")
def llama() -> Target:
    return make("llama")


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g).tolist() for n in lengths]


def padded(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(t) for t in texts])
    tokens = torch.full((len(texts), int(lengths.max())), 7)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    return tokens, lengths


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# Forward


def test_states_of_a_padded_batch_are_those_of_single_huggingface_runs(target: Target) -> None:
    texts = prompts(13, 5, 1)
    tokens, lengths = padded(texts)
    boundaries = tuple(range(N + 1))
    out = target.forward(tokens, lengths, boundaries)
    assert out.logits is not None
    assert out.aux.shape == (3, 13, (N + 1) * H)
    for i, text in enumerate(texts):
        raw: list[Tensor] = []
        blocks = target.model.get_decoder()
        blocks = blocks.h if hasattr(blocks, "h") else blocks.layers
        handle = blocks[-1].register_forward_hook(lambda m, a, output, raw=raw: raw.append(output))
        with torch.no_grad():
            own = target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
        handle.remove()
        n = len(text)
        parts = out.aux[i, :n].split(H, -1)
        for b in range(N):
            close(parts[b], own.hidden_states[b][0])
        close(parts[N], raw[0][0])  # before the final norm ...
        close(out.last[i, :n], own.hidden_states[-1][0])  # ... and after it
        close(out.logits[i, :n], own.logits[0])
        assert not out.aux[i, n:].any()
        assert not out.last[i, n:].any()


def test_boundary_n_is_before_the_final_norm_and_rebuilds_the_logits(target: Target) -> None:
    tokens, lengths = padded(prompts(50))
    out = target.forward(tokens, lengths, (N,))
    assert out.logits is not None
    assert (out.aux - out.last).abs().max() > 0.1
    close(target.final_norm(out.aux), out.last, 1e-5)
    close(target.head(target.final_norm(out.aux)), out.logits, 1e-5)
    target.self_check(tokens[0].tolist())


def test_a_call_keeps_nothing_and_repeats_exactly(llama: Target) -> None:
    hooks = [len(m._forward_hooks) for m in llama.model.modules()]
    tokens, lengths = padded(prompts(6, 4))
    first = llama.forward(tokens, lengths, (2, 2, 3))
    again = llama.forward(tokens, lengths, (2, 2, 3), logits=False)
    assert torch.equal(first.aux, again.aux)
    assert again.logits is None
    assert torch.equal(first.aux[..., :H], first.aux[..., H : 2 * H])  # equal ids are honoured
    assert hooks == [len(m._forward_hooks) for m in llama.model.modules()]
    assert llama.forward(tokens, lengths, ()).aux.shape == (2, 6, 0)


def test_a_block_that_returns_a_tuple_keeps_its_batch() -> None:
    model = _llama().eval()
    plain = Target.from_model(model, name="plain")
    tokens, lengths = padded(prompts(6, 4))
    expected = plain.forward(tokens, lengths, (2,)).aux
    # Registered before ours, so ours sees the tuple; the last hook hands the tensor on again.
    model.model.layers[1].register_forward_hook(lambda m, a, out: (out, "cache"))
    with plain.capture((2,)) as states:
        model.model.layers[1].register_forward_hook(lambda m, a, out: out[0])
        plain.run(tokens)
    assert states[2].shape == (2, 6, H)
    close(states[2][0], expected[0])


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_have_no_default_boundaries(layers: int) -> None:
    shallow = Target.from_model(_llama(num_hidden_layers=layers), name="shallow")
    with pytest.raises(ContractError, match=rf"{layers} layers.*\({2}, {layers // 2}, ") as info:
        shallow.default_boundaries()
    assert info.value.remedy is not None
    assert "State the boundaries" in info.value.remedy


def test_default_boundaries_of_a_deep_enough_target() -> None:
    assert Target.from_model(_llama(num_hidden_layers=7), name="7").default_boundaries() == (
        2,
        3,
        4,
    )


@pytest.mark.parametrize("boundaries", [(5,), (-1,), (0, 9)])
def test_a_boundary_outside_the_target_is_named(llama: Target, boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match=rf"boundary {boundaries[-1]} is outside 0..4"):
        llama.forward(*padded(prompts(3)), boundaries)


def test_boundaries_ascend(llama: Target) -> None:
    with pytest.raises(ContractError, match="ascend"):
        llama.session([1, 2], (3, 1))


# Norm and head


def test_the_final_norm_weight_is_the_factor_that_the_norm_applies(target: Target) -> None:
    weight = target.final_norm_weight
    assert weight is not None
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(0))
    if target.name == "gpt2":
        normed = torch.nn.functional.layer_norm(x, (H,), eps=1e-5)
    else:
        normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    close(target.final_norm(x), normed * weight, 1e-3)
    assert target.head_weight.shape == target.embedding_weight.shape == (V, H)


class _Reversed(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.flip(-1)
        return out


def test_a_model_whose_head_is_not_understood_is_refused() -> None:
    with pytest.raises(ContractError, match="disagree with the model's own"):
        Target.from_model(_Reversed(hf.LlamaConfig(**COMMON)), name="reversed")


def test_self_check_notices_a_state_one_block_too_early(llama: Target) -> None:
    early = make("llama")
    early._blocks = early._blocks[: N - 1]
    early.n_layers = N - 1
    with pytest.raises(ContractError, match="boundary 3 disagree"):
        early.self_check(prompts(50)[0])


# Generation


def own_greedy(target: Target, prompt: list[int], n: int, eos: int | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=hf.GenerationConfig(
            max_new_tokens=n, do_sample=False, eos_token_id=eos, pad_token_id=0
        ),
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_batches_equal_huggingface_generate(target: Target) -> None:
    texts = prompts(3, 11, 1)
    ours = target.generate(texts, max_new_tokens=8)
    assert ours == [own_greedy(target, text, 8) for text in texts]
    assert ours[:1] == target.generate(texts[:1], max_new_tokens=8)


def test_rows_that_end_leave_the_batch_and_the_rest_is_unmoved(kind: Target) -> None:
    texts = prompts(3, 11, 1, 7, 5, 9)
    free = kind.generate(texts, max_new_tokens=14)
    eos = free[0][3], free[3][6]
    ending = Target.from_model(kind.model, name=kind.name, eos_ids=eos)
    ours = ending.generate(texts, max_new_tokens=14, batch=4)
    for text, whole in zip(ours, free, strict=True):
        stop = next((i for i, token in enumerate(whole) if token in eos), len(whole) - 1)
        assert text == whole[: stop + 1]  # EOS included
    assert len(ours[0]) <= 4
    assert ours[3] == own_greedy(kind, texts[3], 14, eos[1])[: len(ours[3])]


def test_a_draw_depends_on_seed_prompt_and_step_only(kind: Target) -> None:
    texts = prompts(3, 11, 1, 7, 3)
    texts[4] = texts[0]
    kw: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.5}
    ours = kind.generate(texts, seed=5, **kw)
    assert ours == kind.generate(texts, seed=5, batch=2, **kw)
    assert ours == kind.generate(texts, seed=5, batch=1, **kw)
    assert ours[0] != ours[4]  # the same prompt twice draws twice
    assert ours != kind.generate(texts, seed=6, **kw)


def test_draws_follow_the_softmax(llama: Target) -> None:
    prompt = prompts(4)[0]
    n, temperature = 3000, 3.0
    draws = llama.generate([prompt] * n, max_new_tokens=1, temperature=temperature, batch=500)
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=V).double()
    with torch.no_grad():
        logits = llama.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = n * (logits / temperature).softmax(-1)
    often = expected >= 5
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    due = torch.cat([expected[often], expected[~often].sum()[None]])
    keep = due > 0
    assert stats.chisquare(seen[keep].numpy(), due[keep].numpy()).pvalue > 1e-3


def test_the_context_may_be_filled_and_not_exceeded(kind: Target) -> None:
    assert len(kind.generate(prompts(60), max_new_tokens=4)[0]) == 4
    with pytest.raises(DataError, match=r"prompt 1 exceeds.*64 tokens \(got 61 \+ 4 new"):
        kind.generate(prompts(2, 61), max_new_tokens=4)
    with pytest.raises(DataError, match="exceeds the context"):
        kind.forward(*padded(prompts(65)), ())
    session = kind.session(prompts(60)[0], ())
    with pytest.raises(DataError, match="exceeds the context"):
        session.extend([1] * 5)
    session.extend([1] * 4)
    assert session.length == 64


@pytest.mark.parametrize(
    "prompt, message", [([], "empty"), ([1, V], "outside 0..96"), ([-1], "outside 0..96")]
)
def test_prompts_that_cannot_be_read(llama: Target, prompt: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        llama.generate([[1], prompt], max_new_tokens=2)


@pytest.mark.parametrize("lengths", [[3, 0], [3, 4], [3]])
def test_lengths_must_fit(llama: Target, lengths: list[int]) -> None:
    with pytest.raises(DataError, match="lengths"):
        llama.forward(torch.ones(2, 3, dtype=torch.int64), torch.tensor(lengths), ())


def test_refilled_rows_are_what_single_prompts_give(kind: Target) -> None:
    """Long and short prompts through three rows that end at different steps, buffers moved."""
    texts = prompts(3, 11, 1, 30, 2, 7, 20, 5, 9, 4)
    free = kind.generate(texts, max_new_tokens=14, batch=1)
    eos = free[0][3], free[3][6], free[6][0]
    ending = Target.from_model(kind.model, name=kind.name, eos_ids=eos)
    taken: list[int] = []
    tokens: list[int] = []

    def requests() -> Iterator[Request]:
        for i, text in enumerate(texts):
            taken.append(i)
            yield Request(text, 0, i)

    found: dict[int, list[int]] = {}
    for request, text in ending.stream(
        requests(), max_new_tokens=14, batch=3, on_tokens=tokens.append
    ):
        found[request.index] = text
        assert len(taken) <= len(found) + 3  # prompts are taken when a row is free
    assert sorted(found) == list(range(len(texts)))
    for i, whole in enumerate(free):
        stop = next((k for k, token in enumerate(whole) if token in eos), len(whole) - 1)
        assert found[i] == whole[: stop + 1]
    assert sum(tokens) == sum(map(len, found.values()))


def test_a_draw_keeps_its_noise_in_any_company(llama: Target) -> None:
    texts = prompts(4, 9, 6, 2, 8)
    kw: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.3}
    whole = {r.index: t for r, t in llama.stream(_asked(texts, range(5)), batch=2, **kw)}
    some = {r.index: t for r, t in llama.stream(_asked(texts, (4, 1)), batch=5, **kw)}
    assert some == {i: whole[i] for i in (1, 4)}


def _asked(texts: list[list[int]], which: Iterable[int]) -> Iterator[Request]:
    return (Request(texts[i], 7, i) for i in which)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_products_round_the_exact_sum_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=g).to(dtype) for s in ((5, 70), (9, 70), (9,)))
    exact = (x.double() @ weight.double().T + bias.double()).to(dtype)
    with wide.Wide():
        ours = torch.nn.functional.linear(x, weight, bias)
    assert ours.dtype is dtype
    # One unit in the last place where the fp32 sum falls on the other side of a rounding edge.
    close(ours.float(), exact.float(), torch.finfo(dtype).eps)
    assert (ours != exact).float().mean() < 0.05


def test_only_a_cpu_without_units_multiplies_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert wide.native(torch.float32, cpu) and wide.native(torch.bfloat16, torch.device("cuda"))
    for has in (True, False):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda has=has: has)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
        assert wide.native(torch.bfloat16, cpu) is has
        half = make("llama").model.to(torch.bfloat16)
        target = Target.from_model(half, name="half")
        assert target.provenance["multiplication"].value == ("bfloat16" if has else "float32")


# Sessions


def test_blocks_equal_one_run(kind: Target) -> None:
    text = prompts(30)[0]
    whole = kind.forward(*padded([text]), (0, 2, N))
    assert whole.logits is not None
    session = kind.session(text[:9], (0, 2, N))
    close(session.aux, whole.aux[:, :9])
    close(session.logits, whole.logits[:, 8:9])
    at = 9
    for size in (1, 5, 1, 8, 6):
        out = session.extend(text[at : at + size])
        assert out is not None and out.logits is not None
        close(out.aux, whole.aux[:, at : at + size])
        close(out.last, whole.last[:, at : at + size])
        close(out.logits, whole.logits[:, at : at + size])
        at += size
        assert session.length == at


@pytest.mark.parametrize("drop", [0, 2, 5, "all"])
def test_a_rewind_leaves_no_trace(kind: Target, drop: int | str) -> None:
    """Far past the window, so that the window's edge moves back over forgotten keys."""
    text, wrong = prompts(20, 5)
    session = kind.session(text[:15], (2,))
    session.extend(wrong)
    n = 5 + (0 if isinstance(drop, str) else 5 - drop)
    keep = 0 if drop == "all" else 20 - int(drop)
    session.rewind(keep)
    assert session.length == keep
    base = (text[:15] + wrong)[:keep]
    after = text[:n]
    ours = session.extend(after)
    whole = kind.forward(*padded([base + after]), (2,))
    assert ours.logits is not None and whole.logits is not None
    close(ours.aux, whole.aux[:, keep:])
    close(ours.logits, whole.logits[:, keep:])


def test_rewinding_wrongly(llama: Target) -> None:
    session = llama.session([1, 2, 3], ())
    for length in (4, -1):
        with pytest.raises(ContractError, match="cannot be rewound"):
            session.rewind(length)
    session.rewind(3)
    assert session.logits.shape == (1, 1, V)
    session.rewind(2)
    with pytest.raises(ContractError, match="no newest block"):
        _ = session.logits


def test_verified_blocks_give_the_greedy_text(kind: Target) -> None:
    """Drafts that are right up to a random place, verified block by block."""
    prompt = prompts(6)[0]
    truth = kind.generate([prompt], max_new_tokens=40)[0]
    g = torch.Generator().manual_seed(0)
    session = kind.session(prompt, ())
    text = [int(session.logits[0, -1].argmax())]
    while len(text) < 32:
        drafts = truth[len(text) : len(text) + 5]
        right = int(torch.randint(6, (), generator=g))
        if right < 5:
            drafts[right] = (drafts[right] + 1) % V
        logits = session.extend([text[-1], *drafts]).logits
        assert logits is not None
        answers = logits[0].argmax(-1).tolist()
        accepted = next((i for i in range(5) if drafts[i] != answers[i]), 5)
        assert accepted == right
        session.rewind(session.length - (5 - accepted))
        text += answers[: accepted + 1]
    assert text == truth[: len(text)]


def test_a_state_that_cannot_be_rewound_is_refused() -> None:
    config = hf.Lfm2Config(
        vocab_size=V, hidden_size=H, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ContractError, match=r"layer 0 .*cannot be rewound"):
        generation.new_cache(config, 8)


# Attention


def patterns(target: Target, texts: list[list[int]], **kw: Any) -> list[Pattern]:
    out: list[Pattern] = []
    target.attention(*padded(texts), out.append, **kw)
    return out


def test_patterns_are_those_of_eager_attention(target: Target) -> None:
    texts = prompts(11, 4)
    ours = patterns(target, texts)
    assert [p.layer for p in ours] == list(range(N))
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation("eager")
    for i, text in enumerate(texts):
        with torch.no_grad():
            own = target.model(input_ids=torch.tensor([text]), output_attentions=True).attentions
        n = len(text)
        for pattern, expected in zip(ours, own, strict=True):
            assert pattern.weights.shape == (2, 4, 11, 11)
            close(pattern.weights[i, :, :n, :n], expected[0], 1e-5)
            assert not pattern.weights[i, :, n:].any()  # rows of padding
            assert not pattern.weights[i, :, :, n:].any()  # columns of padding
            assert not pattern.weights[i].triu(1).any()
            close(
                pattern.weights[i, :, :n].sum(-1) + pattern.null[i, :, :n], torch.ones(4, n), 1e-5
            )
    target.model.set_attn_implementation(before)


def test_recording_changes_neither_states_nor_settings(target: Target) -> None:
    texts = prompts(11, 4)
    tokens, lengths = padded(texts)
    plain = target.forward(tokens, lengths, (N,))
    before = target.model.config._attn_implementation
    with target.capture((N,)) as states:
        target.attention(tokens, lengths, lambda pattern: None)
    for i, text in enumerate(texts):
        close(states[N][i, : len(text)], plain.aux[i, : len(text)], 1e-5)
    assert target.model.config._attn_implementation == before
    assert torch.equal(target.forward(tokens, lengths, (N,)).aux, plain.aux)


def test_a_later_token_changes_no_earlier_row(kind: Target) -> None:
    text = prompts(9)[0]
    other = [*text[:-1], (text[-1] + 1) % V]
    for a, b in zip(patterns(kind, [text]), patterns(kind, [other]), strict=True):
        assert torch.equal(a.weights[:, :, :-1], b.weights[:, :, :-1])


def test_learned_sinks_take_their_own_share() -> None:
    ours = patterns(make("gpt_oss"), prompts(11))
    for pattern in ours:
        assert 0.05 < float(pattern.null.min()) < float(pattern.null.max()) < 1
    late = ours[0].weights[0, :, WINDOW:, 0]
    assert not late.any() and not ours[0].reach[0, WINDOW:, 0].any()  # no measured 0
    assert ours[1].reach[0].tril().equal(torch.ones(11, 11, dtype=torch.bool).tril())
    assert ours[1].weights[0, :, WINDOW:, 0].all()
    assert not patterns(make("llama"), prompts(11))[0].null.any()


def test_query_heads_are_paired_with_their_own_key_head(llama: Target) -> None:
    text = prompts(8)[0]
    kept: dict[str, Tensor] = {}
    block = llama.model.model.layers[1].self_attn
    handles = [
        getattr(block, name).register_forward_hook(lambda m, a, out, k=name: kept.update({k: out}))
        for name in ("q_proj", "k_proj")
    ]
    pattern = patterns(llama, [text], layers=[1])[0]
    for handle in handles:
        handle.remove()
    q = kept["q_proj"].view(1, 8, 4, 8).transpose(1, 2)
    k = kept["k_proj"].view(1, 8, 2, 8).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *llama.model.model.rotary_emb(q, torch.arange(8)[None]))
    causal = torch.full((8, 8), -torch.inf).triu(1)

    def recompute(keys: Tensor) -> Tensor:
        return (q @ keys.transpose(-1, -2) / 8**0.5 + causal).softmax(-1)

    close(pattern.weights, recompute(k.repeat_interleave(2, 1)), 1e-5)
    assert (pattern.weights - recompute(k.repeat(1, 2, 1, 1))).abs().max() > 1e-2


def test_only_the_asked_layers_are_handed_on(llama: Target) -> None:
    assert [p.layer for p in patterns(llama, prompts(5), layers=(3, 1))] == [1, 3]
    with pytest.raises(ContractError, match=r"layers outside 0\.\.3"):
        patterns(llama, prompts(5), layers=(4,))


def test_a_reader_that_fails_leaves_the_model_as_it_was(llama: Target) -> None:
    def fail(pattern: Pattern) -> None:
        raise KeyError("reader")

    before = llama.model.config._attn_implementation
    with pytest.raises(KeyError, match="reader"):
        llama.attention(*padded(prompts(5)), fail)
    assert llama.model.config._attn_implementation == before
    assert attention._sink.get() is None


def test_attention_that_sees_the_future_is_refused(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "eager_mask", lambda **kwargs: None)
    with pytest.raises(NumericsError, match="layer 0 is not causal"):
        patterns(llama, prompts(5))


# Reading from disk


@pytest.fixture
def folder(llama: Target, tmp_path: Path) -> Path:
    llama.model.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_a_saved_target_comes_back(llama: Target, folder: Path) -> None:
    loaded = Target.load(str(folder))
    assert loaded.tokenizer is None
    assert loaded.fingerprint == llama.fingerprint
    assert loaded.provenance["trust_remote_code"].value is False
    tokens, lengths = padded(prompts(6))
    assert torch.equal(
        loaded.forward(tokens, lengths, (2,)).aux, llama.forward(tokens, lengths, (2,)).aux
    )
    half = Target.load(str(folder), dtype="bfloat16")
    assert half.dtype is torch.bfloat16
    assert half.provenance["dtype"].value == "bfloat16"
    assert "stored as float32" in half.provenance["dtype"].where
    assert half.fingerprint != llama.fingerprint


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_what_is_being_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Target.load(str(folder))
    assert capsys.readouterr().err == ""  # off a terminal nothing is shown
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    Target.load(str(folder))
    assert f"reading {folder} 00:00" in terminal.getvalue()
    with loading._stage("waiting"):
        time.sleep(1.2)
    assert "waiting 00:01" in terminal.getvalue()


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_gives_the_same_target(
    llama: Target, folder: Path, device_map: str | dict[str, str]
) -> None:
    """On a machine without a GPU every map ends on the CPU, through accelerate's hooks."""
    placed = Target.load(str(folder), device_map=device_map)
    assert placed.fingerprint == llama.fingerprint
    assert placed.provenance["placement"].value == {"device_map": device_map, "tp_plan": None}
    tokens, lengths = padded(prompts(9, 5))
    ours, plain = (t.forward(tokens, lengths, (0, 2, N)) for t in (placed, llama))
    assert torch.equal(ours.aux, plain.aux) and torch.equal(ours.last, plain.last)
    texts = prompts(3, 11, 1)
    assert placed.generate(texts, max_new_tokens=6) == [own_greedy(llama, t, 6) for t in texts]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("how", [{"device_map": "cuda:0"}, {"tp_plan": "auto"}])
def test_a_placement_that_this_machine_does_not_have(
    folder: Path, how: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"names a GPU|and there is one"):
        Target.load(str(folder), **how)  # type: ignore[arg-type]


def test_the_fingerprint_notices_one_weight() -> None:
    a, b = make("llama"), make("llama")
    assert a.fingerprint == b.fingerprint
    c = make("llama")
    c.model.model.layers[2].mlp.up_proj.weight.data[3, 5] += 1e-6
    assert c.fingerprint != a.fingerprint


def test_an_end_token_outside_the_vocabulary_ends_nothing_and_is_said() -> None:
    model = _llama(eos_token_id=5)
    model.generation_config.eos_token_id = [5, -1, 10**9]
    target = Target.from_model(model, name="t")
    assert target.eos_ids == {5}
    said = target.provenance["eos_ids"]
    assert said.origin is Origin.assumed
    assert said.where == (
        "generation_config; [-1, 1000000000] are outside the vocabulary and end no text"
    )


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(ContractError, match="blocks or head were not found"):
        Target.from_model(_llama(num_hidden_layers=0), name="t")


def test_eos_is_read_and_its_place_recorded() -> None:
    model = _llama(eos_token_id=5)
    model.generation_config.eos_token_id = [5, 6]
    target = Target.from_model(model, name="x")
    assert target.eos_ids == {5, 6}
    assert target.provenance["eos_ids"].where == "generation_config"
    nothing = Target.from_model(_llama(), name="x")
    assert nothing.eos_ids == frozenset()
    assert nothing.provenance["eos_ids"].origin is Origin.assumed


def _state(folder: Path, **fields: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def _cut(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1000])


def _drop_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def _rename_tensor(folder: Path) -> None:
    model = _llama()
    _drop_weights(folder)
    state = {k.replace("up_proj", "op_proj"): v for k, v in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


def _other_width(folder: Path) -> None:
    _drop_weights(folder)
    config = folder / "config.json"
    text = config.read_text()
    _llama(intermediate_size=40).save_pretrained(folder)
    config.write_text(text)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
    "an epsilon of no model": (
        lambda f: _state(f, rms_norm_eps=1e30),
        r"constants that no model has \(got rms_norm_eps 1e\+30\)",
    ),
    "a factor below 0": (
        lambda f: _state(
            f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}
        ),
        r"constants that no model has \(got rope factor -1\.0\)",
    ),
    "unknown architecture": (
        lambda f: (f / "config.json").write_text('{"model_type": "nonesuch"}'),
        "nonesuch",
    ),
    "no weights": (_drop_weights, "holds no weights"),
    "shard missing": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        r"1 of \d+ weight files are missing \(got model-00002",
    ),
    "truncated": (_cut, "cannot be loaded"),
    "tensor missing": (
        _rename_tensor,
        r"8 tensors do not fit .*missing: .*up_proj.*without a place: .*op_proj",
    ),
    "wrong shape": (_other_width, "cannot be loaded|wrong shape"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder_is_one_clear_error(folder: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as info:
        Target.load(str(folder))
    assert info.value.remedy


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_a_folder_is_that_of_the_weights_read(
    llama: Target, tmp_path: Path, dtype: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored in half precision, beside a copy that the library leaves alone."""
    llama.model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    for file in tmp_path.glob("*.safetensors"):
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, {"format": "pt"})
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(10**6))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(10**6))
    numbers = sum(p.numel() for p in llama.model.parameters())
    need = loading._bytes_in_memory(tmp_path, loading.DTYPES[dtype])
    headers = need - numbers * loading.DTYPES[dtype].itemsize
    assert 0 < headers < 20_000
    monkeypatch.setattr(loading, "free_bytes", lambda: need - 1)
    with pytest.raises(ResourceError, match="of memory"):
        Target.load(str(tmp_path), dtype=dtype)
    monkeypatch.setattr(loading, "free_bytes", lambda: need)
    assert Target.load(str(tmp_path), dtype=dtype).n_layers == llama.n_layers


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    ],
)
def test_a_target_that_does_not_fit_says_so(
    llama: Target, folder: Path, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Target, "self_check", fail)
        with pytest.raises(ResourceError, match="while it runs"):
            Target.from_model(llama.model, name="t")
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ResourceError, match="does not fit in memory"):
        Target.load(str(folder))


def test_a_device_map_that_is_none_is_not_blamed_on_the_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_map is neither a device nor .*got nonsense"):
        Target.load(str(folder), device_map="nonsense")


def test_code_in_a_checkpoint_does_not_run(folder: Path) -> None:
    (folder / "code.py").write_text("raise SystemExit('the code ran')")
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        Target.load(str(folder))


def test_a_whole_encoder_decoder_is_refused_as_one(tmp_path: Path) -> None:
    small = ("layers", "ffn_dim", "attention_heads")
    sizes: Any = {f"{part}_{n}": 2 for part in ("encoder", "decoder") for n in small}
    config = hf.BartConfig(vocab_size=40, d_model=16, max_position_embeddings=32, **sizes)
    hf.BartForConditionalGeneration(config).save_pretrained(tmp_path / "bart")
    with pytest.raises(ContractError, match="is an encoder-decoder"):
        Target.load(str(tmp_path / "bart"))


def test_a_hub_id_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(CheckpointError, match="nobody/nothing cannot be loaded"):
        Target.load("nobody/nothing")


@pytest.mark.parametrize("source", ["./nowhere", "/no/such/folder", "nothing"])
def test_a_source_that_is_nothing(source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder"):
        Target.load(source)


def _tiny_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {i}" for i in range(9)])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float64("pi", 3.14)
    writer.add_tensor("a", torch.zeros(3, 64).numpy())
    blocks = gguf.quants.quantize(torch.zeros(2, 64).numpy(), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("b", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_header_is_read_and_a_cut_file_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _tiny_gguf(path)
    header = read_gguf_header(path)
    sizes = {"a": 3 * 64, "b": 2 * 64}
    assert header == gguf_header.GgufHeader(sizes, "F32 x 1, Q4_1 x 1", None)
    assert header.elements == 5 * 64
    data = path.read_bytes()
    for damaged in (data[:-40], data[:100], data[:10], b"", b"GGML" + data[4:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no complete GGUF file"):
            read_gguf_header(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 9, 0, 0))
    with pytest.raises(CheckpointError, match=r"version 2 or 3 .got version 9"):
        read_gguf_header(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**40))
    with pytest.raises(CheckpointError, match="no complete GGUF file"):
        read_gguf_header(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf_header(tmp_path / "y.gguf")


@pytest.mark.real
def test_a_real_gguf_file() -> None:
    """SmolLM2-135M-Instruct: quantisation recorded, its own tokenizer, HuggingFace's text."""
    path = Path(__file__).resolve().parent.parent / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    target = Target.load(str(path))
    assert (target.n_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.default_boundaries() == (2, 15, 27)
    assert "Q4_1 x 210" in target.provenance["quantization"].value
    assert target.tokenizer is not None
    assert target.tokenizer.convert_ids_to_tokens(sorted(target.eos_ids)) == ["<|im_end|>"]
    texts = [target.tokenizer(t)["input_ids"] for t in ("The sea", "Two and two make four, and")]
    target.self_check(texts[1])
    ours = target.generate(texts, max_new_tokens=16)
    assert ours == [own_greedy(target, t, 16, min(target.eos_ids)) for t in texts]
