"""Drafters that speculators and SpecForge write, read by driftlab: the same numbers at four depths?

    PYTHON experiments/bench_peers/readers.py speculators FOLDER    (and specforge)
    .venv/bin/python experiments/bench_peers/readers.py compare FOLDER
    PYTHON experiments/bench_peers/readers.py exported FOLDER

PYTHON is that of the environment that `make bench-peers` builds. It writes small random drafters
over the trainer's options, as the trainer saves them, with what its own unroll computes from the
files; `exported` is speculators again, on what `compare` exported. Dynamic and longrope rotations
stay within the length up to which they are one rotation.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from safetensors.torch import load_file, save_file

VOCAB, KEPT, WIDTH, TEXT, DEPTHS, RANDOM = 96, 40, 32, 28, 4, 150
Given, Tensors = dict[str, Any], dict[str, torch.Tensor]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
EDGES = {"beta_fast": 8.0, "beta_slow": 2.0, "rope_theta": 100.0}
LISTS = {"short_factor": [1 + i / 4 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
ROPES: list[Given] = [
    PLAIN,
    PLAIN | {"rope_theta": 5e5},
    PLAIN | {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3 | {"original_max_position_embeddings": 16},
    YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | EDGES | {"mscale": 1.0, "mscale_all_dim": 0.0, "attention_factor": 1.3},
    YARN | EDGES | {"mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
]
NESTED = {
    "sliding_attention": PLAIN | {"rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
}
COMMON: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 1, 4],
    "head_dim": [16, 8, 24],
    "hidden_act": ["silu", "gelu", "relu"],
    "rms_norm_eps": [1e-5, 1e-6, 1e-2],
    "draft_vocab_size": [KEPT, VOCAB],
    "dtype": ["float32", "bfloat16", "float16"],
    "files": ["one", "shards", "bin"],
}
OWN: dict[str, dict[str, list[Any]]] = {
    "speculators": {
        "rope": [
            *(*ROPES, NESTED, YARN, {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
            {"rope_type": "longrope", "original_max_position_embeddings": 64, **LISTS},
        ],
        "model_type": ["llama", "qwen3"],
        "num_hidden_layers": [1, 2, 3],
        "embeddings": [True],
        "ids": [[2, 4, 5], [6], [0, 8], [1, 2, 4, 6, 8], None],
        "norm": [None, "norm_before_fc", "fc_norm"],
        "norm_before_residual": [False, True],
        "norm_output": [False, True],
        "attention_bias": [False, True],
        "sliding_window": [None, 1, 5],
    },
    "specforge": {
        "rope": [*ROPES, {"rope_type": "mrope", "mrope_section": [2, 3, 3]}],
        "target_hidden_size": [WIDTH, 48],
        "fc_norm": [False, True],
        "norm_output": [None, True, False],
        "embeddings": [True, False],
        "exported": [False, True],
    },
}


def options(peer: str) -> Iterator[Given]:
    """Every value of every option by itself, then random combinations."""
    axes, draw = COMMON | OWN[peer], random.Random(3)
    base = {name: values[0] for name, values in axes.items()}
    yield base
    for name, values in axes.items():
        yield from (base | {name: value} for value in values[1:])
    for _ in range(RANDOM):
        given = {name: draw.choice(values) for name, values in axes.items()}
        lists = {"short_factor", "mrope_section"} & given["rope"].keys()
        yield given | ({"head_dim": 16} if lists else {})  # these are as long as half a head


def sizes(given: Given, *names: str) -> Given:
    copied = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", *names)
    found = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48}
    found |= {"num_attention_heads": 4, "max_position_embeddings": 128, "num_hidden_layers": 1}
    rope = given["rope"] if given["rope"] is NESTED else {"rope_theta": 1e4} | given["rope"]
    return found | {n: given[n] for n in copied} | {"rope_parameters": rope}


def saved(model: Any, given: Given, folder: Path) -> None:
    """Fill a drafter with random weights and save it as the trainer does."""
    weights = {}
    for name, old in model.state_dict().items():
        if name not in {"t2d", "d2t"}:
            scale = 0.2 if old.dim() == 1 else 0.7 * old.shape[-1] ** -0.5
            centre = float(old.dim() == 1 and name.endswith("weight"))
            weights[name] = torch.randn(old.shape) * scale + centre
    if given["draft_vocab_size"] == KEPT:
        ids, mask = torch.randperm(VOCAB)[:KEPT].sort().values, torch.zeros(VOCAB).bool()
        mask[ids] = True
        weights |= {"t2d": mask, "d2t": ids - torch.arange(KEPT)}
    model.load_state_dict(weights, strict=False)
    model = model.to(getattr(torch, given["dtype"]))
    whole = model.state_dict()
    kept = {n: t for n, t in whole.items() if given["embeddings"] or "embed" not in n}
    more = {"max_shard_size": "20KB"} if given["files"] == "shards" else {}
    model.save_pretrained(folder, state_dict=kept, **more)
    if given["files"] == "bin":
        torch.save(held(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()


def held(folder: Path) -> Tensors:
    """Every tensor of a folder's files."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    for path in sorted(folder.glob("*.bin")):
        found |= torch.load(path)
    return found


def speculators(given: Given, folder: Path) -> Tensors:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    layer = sizes(given, "num_hidden_layers", "attention_bias")
    llama = given["model_type"] == "llama"
    layer |= {"mlp_bias": given["attention_bias"]} if llama else {}
    if given["sliding_window"] is not None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        layer |= {"layer_types": kinds[: layer["num_hidden_layers"]], "use_sliding_window": True}
        layer["sliding_window"] = given["sliding_window"]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=(LlamaConfig if llama else Qwen3Config)(**layer),
        draft_vocab_size=given["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=given["ids"],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{name: given[name] for name in ("norm_before_residual", "norm_output")},
        **({given["norm"]: True} if given["norm"] else {}),
    )
    saved(Eagle3DraftModel(config), given, folder)
    wide = len(given["ids"] or [0, 0, 0]) * WIDTH
    found = {"tokens": torch.randint(VOCAB, (1, TEXT)), "aux": torch.randn(1, TEXT, wide)}
    return found | unrolled(folder, found)


def unrolled(folder: Path, given: Tensors) -> Tensors:
    """What speculators computes from the files of ``folder``."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary

    install_partial_neox_rotary()  # as their command line does
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).eval()
    loaded = model.load_state_dict(held(folder), strict=False)
    assert not [n for n in loaded.missing_keys if not n.startswith("verifier_")]
    assert not loaded.unexpected_keys
    states, logits = [], []
    model.norm.register_forward_pre_hook(lambda _, x: states.append(x[0]))
    model.lm_head.register_forward_hook(lambda _, __, y: logits.append(y))
    model(given["aux"], given["tokens"], torch.zeros(1, TEXT).long(), ttt_steps=DEPTHS)
    return {"states": torch.cat(states), "logits": torch.cat(logits)}


def specforge(given: Given, folder: Path) -> Tensors:
    from specforge.export.checkpoint_io import apply_legacy_rope_scaling
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.utils import padding
    from transformers import LlamaConfig

    config = sizes(given, "draft_vocab_size", "target_hidden_size", "fc_norm")
    config |= {"tie_word_embeddings": False, "pad_token_id": 0, "pretraining_tp": 1}
    config |= {} if given["norm_output"] is None else {"norm_output": given["norm_output"]}
    first = LlamaForCausalLMEagle3(LlamaConfig(**config))
    saved(first, given, folder)
    if given["exported"]:
        apply_legacy_rope_scaling(str(folder))
    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder)).eval()
    model.load_state_dict({"embed_tokens.weight": first.embed_tokens.weight} | held(folder))
    tokens = torch.randint(VOCAB, (1, TEXT))
    aux = torch.randn(1, TEXT, 3 * given["target_hidden_size"])
    rows, blank = torch.ones(1, TEXT).bool(), torch.zeros(1, TEXT, 1)
    mask = model.prepare_decoder_attention_mask(rows, blank, 1, TEXT, 0)
    positions, cache = torch.arange(TEXT)[None], [[], []]
    if given["rope"]["rope_type"] == "mrope":
        positions = positions[None].expand(3, 1, TEXT)
    states, logits, ids, u = [], [], tokens, model.project_hidden_states(aux)
    for _ in range(DEPTHS):
        u = model.backbone(model.embed_input_ids(ids), u, cache, mask, positions)
        states, logits = [*states, u], [*logits, model.compute_logits(u)]
        ids = padding(ids, left=False)
    found = {"tokens": tokens, "aux": aux, "states": torch.cat(states), "logits": torch.cat(logits)}
    return found | {"embeddings": model.embed_tokens.weight.clone()}


def prepare() -> None:
    from transformers.utils import logging
    from worker import Absent

    sys.meta_path.append(Absent())
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def write(peer: str, out: Path) -> None:
    for number, given in enumerate(options(peer)):
        torch.manual_seed(number)
        folder = out / peer / f"{number:03d}"
        found = {"speculators": speculators, "specforge": specforge}[peer](given, folder)
        save_file(found, folder / "computed.of.it")
        (folder / "options.json").write_text(json.dumps(given))


def read(folder: Path, export: Path) -> float:
    """Largest difference of the trainer's numbers and driftlab's; writes the drafter's export."""
    from driftlab.errors import CheckpointError
    from driftlab.models.checkpoints import load_drafter, save_drafter

    found = load_file(folder / "computed.of.it")
    given = json.loads((folder / "options.json").read_text())

    class Target:
        n_layers, vocab_size, embedding_weight = 8, VOCAB, found.get("embeddings")
        hidden_size = given.get("target_hidden_size", WIDTH)

    drafter = load_drafter(folder, target=Target())  # type: ignore[arg-type]
    if folder.parent.name == "speculators":
        try:
            save_drafter(drafter, export, dialect="speculators")
        except CheckpointError as refusal:
            print(f"{export.name} is not exported: {str(refusal).splitlines()[0]}")
    memory, u, worst = drafter.new_memory(), drafter.fuse(found["aux"]), 0.0
    for depth in range(DEPTHS):
        tokens = torch.nn.functional.pad(found["tokens"], (0, depth))[:, depth:]
        state = drafter.step(tokens, u, memory, depth=depth + 1)
        u = state.feedback
        ours = {"states": state.pre[0], "logits": drafter.logits(state)[0]}
        worst = max(worst, *(float((t - found[n][depth]).abs().max()) for n, t in ours.items()))
    return worst


def read_export(folder: Path) -> float:
    found = load_file(folder.parents[1] / "speculators" / folder.name / "computed.of.it")
    theirs = unrolled(folder, found)
    return max(float((t - found[n]).abs().max()) for n, t in theirs.items())


def report(name: str, apart: dict[str, float]) -> None:
    worst = max(apart, key=lambda n: apart[n])
    print(f"{name}: {len(apart)} drafters, largest difference {apart[worst]:.1e} ({worst})")


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    if what == "compare":
        for peer in OWN:
            folders = sorted((where / peer).glob("*/"))
            report(peer, {f.name: read(f, where / "exported" / f.name) for f in folders})
    else:
        prepare()
        if what == "exported":
            report(what, {f.name: read_export(f) for f in sorted((where / what).glob("*/"))})
        else:
            write(what, where)
