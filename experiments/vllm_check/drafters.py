"""The pairs that vLLM serves: SmolLM2 and a tiny one, with a drafter of every kind.

Drafters are trained briefly: what counts is that both engines propose the same, and that enough
is accepted for rounds of every length to occur.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from driftlab.config import DrafterConfig, Feedback, FusionNorm, Residual, Rope, TrainSpec
from driftlab.data.corpus import Writing, sources, write_corpus
from driftlab.data.features import FeatureStore
from driftlab.data.prompts import Prompt as Question
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.data.text import Text
from driftlab.engines.train import choose_vocabulary, initialise, train
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target

logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "experiments")]
import pairs  # noqa: E402
from golden import served  # noqa: E402
from golden.served import Prompt  # noqa: E402

HOME = ROOT / ".cache" / "vllm"


@dataclass(frozen=True)
class Kind:
    """Fields of the drafter's config; whether it drafts every id, or reads five states."""

    fields: dict[str, Any] = field(default_factory=dict)
    full: bool = False
    five: bool = False


KINDS = {
    "eagle-3": Kind(),
    "norm per state": Kind({"fusion_norm": FusionNorm.per_layer}),
    "norm over all states": Kind({"fusion_norm": FusionNorm.concat}),
    "post-norm feedback": Kind({"feedback": Feedback.post_norm}),
    "eagle-3.1": Kind({"fusion_norm": FusionNorm.per_layer, "feedback": Feedback.post_norm}),
    "normed residual": Kind({"residual": Residual.normed}),
    "full vocabulary": Kind(full=True),
    "five states": Kind({"fusion_norm": FusionNorm.per_layer}, five=True),
}


@dataclass(frozen=True)
class Pair:
    """A target, as driftlab and as vLLM read it (``folder``), and its drafters by kind.

    ``target`` takes the ids that end a text; ``drafter`` finds or makes one of a kind.
    """

    name: str
    target: Callable[[Sequence[int]], Target]
    folder: Path
    prompts: tuple[Prompt, ...]
    depth: int
    max_model_len: int
    drafter: Callable[[str], Drafter]
    kinds: tuple[str, ...] = tuple(KINDS)


def config_of(
    kind: Kind, target: Target, usual: tuple[int, ...], five: tuple[int, ...], vocabulary: int
) -> DrafterConfig:
    like = target.shape
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=like.intermediate_size,
        num_heads=like.num_heads,
        num_kv_heads=like.num_kv_heads,
        head_dim=like.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if kind.full else vocabulary,
        boundaries=five if kind.five else usual,
        norm_eps=like.norm_eps,
        rope=like.rope,
        **kind.fields,
    )


def fresh(
    config: DrafterConfig, target: Target, texts: Sequence[Text], head_init: float
) -> Drafter:
    kept = None
    if config.draft_vocab_size < config.vocab_size:
        kept = choose_vocabulary(
            (t.tokens for t in texts), config.draft_vocab_size, config.vocab_size
        )
    return initialise(config, target, kept, seed=0, head_init=head_init)


# SmolLM2 ------------------------------------------------------------------------------------

GGUF = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TRAINED = ROOT / "runs" / "smollm2" / "drafters"  # what `make smollm2` leaves
FIVE = (2, 9, 15, 21, 27)
LESSONS = Writing(max_new_tokens=80, temperature=0.8, seed=0, batch=24)
SHORT = TrainSpec(ttt=2, steps=40, batch=1, max_length=128, lr=1e-3, head_init=0.3)
VOCABULARY = 4096
NEW_TOKENS = 32
BRIEF = Question("brief", "chat", "Reply with one word: what is the capital of France?")


@cache
def smollm2_target() -> Target:
    return Target.load(str(GGUF))


@cache
def smollm2_texts() -> list[Text]:
    found = sources(load_prompts("train")[:24], smollm2_target().tokenizer, Rendering("auto"))
    return write_corpus(smollm2_target(), found, LESSONS, HOME / "texts")


def smollm2_drafter(name: str) -> Drafter:
    """The one that `make smollm2` trained where there is such a one; else one trained here."""
    target, kind = smollm2_target(), KINDS[name]
    config = config_of(kind, target, target.default_boundaries(), FIVE, VOCABULARY)
    usual = not kind.full and not kind.five and config.residual is Residual.raw
    found = TRAINED / config.variant / "s0"
    if usual and found.exists():
        return load_drafter(found, target=target)
    identity = f"{config.model_dump_json()} {SHORT.model_dump_json()} {LESSONS}"
    made = HOME / "drafters" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not made.exists():
        drafter = fresh(config, target, smollm2_texts(), SHORT.head_init)
        store = FeatureStore(HOME / "states")
        states = store.build(target, smollm2_texts(), config.boundaries, dtype="float32")
        train(drafter, states, target, SHORT, seed=0)
        save_drafter(drafter, made)
    return load_drafter(made, target=target)


def smollm2() -> Pair:
    """Needs the file that the Makefile fetches."""
    target = smollm2_target()
    folder = HOME / "smollm2"
    if not (folder / "model.safetensors").exists():
        model = target.model
        model.config.quantization_config = None
        model.save_pretrained(folder, max_shard_size="8GB")
    held = load_prompts("held-out")
    questions = [BRIEF, *(held[i * len(held) // 3] for i in range(3))]
    prompts = tuple(
        Prompt(source.tokens, tuple(sorted(target.eos_ids)), NEW_TOKENS)
        for source in sources(questions, target.tokenizer, Rendering("auto"))
    )
    return Pair("smollm2", lambda _: target, folder, prompts, 6, 512, smollm2_drafter)


# The tiny pair ------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM serves on a CPU
    "max_position_embeddings": 256,
    "initializer_range": 32**-0.5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TINY_TRAIN = TrainSpec(ttt=4, steps=40, batch=8, lr=1e-2, head_init=0.3)


def tiny() -> Pair:
    """The pair that is stored under tests/golden/vllm."""
    folder = HOME / "tiny"
    served.tiny_model().save_pretrained(folder)

    def drafter(name: str) -> Drafter:
        with tempfile.TemporaryDirectory() as scratch:
            return load_drafter(served.write_drafter(name, Path(scratch)))

    return Pair("tiny", served.tiny_target, folder, _tiny_prompts(), 5, 256, drafter)


def make_tiny() -> None:
    """Store a target that knows its texts, and drafters that learned some of them.

    Drafters of all kinds share the layer and the head of the first one: small files.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    pairs.memorise(model)
    _halve(model)
    target = Target.from_model(model, name="tiny", eos_ids=())
    texts, made = pairs.lessons(160), {}
    first: Drafter | None = None
    with tempfile.TemporaryDirectory() as scratch:
        store = FeatureStore(Path(scratch) / "states")
        for name, kind in KINDS.items():
            config = config_of(kind, target, (1, 2, 3), (0, 1, 2, 3, 4), 24)
            drafter = fresh(config, target, texts, TINY_TRAIN.head_init)
            if first is not None:
                _share(drafter, first)
            states = store.build(target, texts, config.boundaries, dtype="float32")
            result = train(drafter, states, target, TINY_TRAIN, seed=0)
            print(f"{name}: loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}", flush=True)
            _halve(drafter)
            first = first or drafter
            folder = Path(scratch) / name
            save_drafter(drafter, folder, dialect="vllm", target=target)
            read = json.loads((folder / "config.json").read_text())
            made[name] = (read, load_file(folder / "model.safetensors"))
    served.write_tiny(model, made)


def _tiny_prompts() -> tuple[Prompt, ...]:
    """Four by the rule, one of them long, one against it, and two that a token ends early."""
    drawn, long = pairs.prompts(5, seed=11), pairs.prompts(1, seed=12, length=110)[0]
    plain = [*drawn[:3], long, [7, 33, 2, 60, 21, 5]]
    ended = zip(drawn[3:], (pairs.SYMBOLS[4], pairs.SYMBOLS[6]), strict=True)
    return (
        *(Prompt(tuple(p), (), 40) for p in plain),
        *(Prompt(tuple(p), (stop,), 40) for p, stop in ended),
    )


def _halve(module: nn.Module) -> None:
    """Round to what half precision holds, so that nothing is lost by storing it so."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.half().float())


def _share(drafter: Drafter, first: Drafter) -> None:
    """Take the layer and, where it fits, the head of ``first``; they are not trained again."""
    theirs = dict(first.named_parameters())
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if name.startswith(("layers.", "lm_head.")) and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])
                weight.requires_grad_(False)


# Other fields -------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
FIELDS: dict[str, dict[str, Any]] = {
    "both fusion norms": {"fusion_norm": FusionNorm.concat_per_layer},
    "no captured states": {"boundaries": ()},
    "one captured state": {"boundaries": (4,)},
    "two layers": {"num_layers": 2},
    "QK norms": {"qk_norm": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "scaled logits": {"logit_scale": 0.5},
    "another width": {"hidden_size": 48},
    "wider heads": {"head_dim": 64},
    "another base": {"rope": Rope(theta=5e5, max_position=256)},
    "linear rotation": {"rope": Rope(rope_type="linear", parameters={"factor": 2.0})},
    "llama3 rotation": {"rope": Rope(rope_type="llama3", parameters=LLAMA3)},
    "yarn rotation": {"rope": Rope(rope_type="yarn", parameters=YARN)},
    "yarn, own magnitude": {
        "rope": Rope(rope_type="yarn", parameters=YARN | {"attention_factor": 1.5})
    },
}


def fields() -> Pair:
    """Random drafters for the tiny target: the fields that the layout holds besides the above."""
    target = served.tiny_target()
    folder = HOME / "tiny"
    served.tiny_model().save_pretrained(folder)
    prompts = tuple(Prompt(p.tokens, (), 16) for p in _tiny_prompts()[2:5])

    def drafter(name: str) -> Drafter:
        base = config_of(Kind(), target, (1, 2, 3), (), 24).model_dump()
        config = DrafterConfig(**base | {"rope": target.shape.rope} | FIELDS[name])
        rng = torch.Generator().manual_seed(0)
        made = Drafter(config, torch.randperm(config.vocab_size, generator=rng)[:24])
        with torch.no_grad():
            for weight in made.parameters():
                if weight.dim() == 1:
                    weight.uniform_(0.5, 1.5, generator=rng)
                else:
                    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=rng)
        return made.eval().requires_grad_(False)

    return Pair("fields", lambda _: target, folder, prompts, 5, 256, drafter, tuple(FIELDS))
