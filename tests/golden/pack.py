"""Make golden.safetensors and cases.json from the peers' full folders (see README.md).

    python tests/golden/pack.py FOLDER

Keeps whole what a drafting chain needs, and samples of the rest. Equal tensors are stored once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
CASES = {
    "safeailab": "gqa full_vocab rope_linear",
    "specforge": "gqa full_vocab rope_linear rope_yarn fc_norm_norm_output padded_batch "
    "rope_theta500k_headdim32",
    "torchspec": "gqa full_vocab rope_yarn rope_llama3 rope_theta500k_headdim32",
    "torchspec_dogacel": "norm_output rope_linear rope_yarn padded_batch",
    "speculators": "eagle31_fcnorm_normout gqa_nbr norm_before_fc_nbr sliding_window4 two_layers "
    "rope_partial_neox attn_bias",
}
# Losses and gradients of the training unroll are kept for one case of each trainer.
TRAINED = (
    "safeailab/gqa",
    "specforge/padded_batch",
    "torchspec/gqa",
    "torchspec_dogacel/norm_output",
    "speculators/eagle31_fcnorm_normout",
)
DEPTHS, ROWS, GRADIENT_STEP = (0, 1, 3, 7), (0, 5, 10), 11


class Store:
    """Tensors by the hash of their content."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def put(self, tensor: Tensor) -> str:
        tensor = tensor.contiguous().clone()
        data = f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes()
        key = hashlib.sha256(data).hexdigest()[:16]
        self.tensors[key] = tensor
        return key


def pack_case(folder: Path, name: str, store: Store) -> dict[str, Any]:
    inputs = load_file(folder / "inputs.safetensors")
    expected = load_file(folder / "expected.safetensors")
    meta = json.loads((folder / "case.json").read_text())
    trained = name in TRAINED
    ids = [t.flatten() for k, t in inputs.items() if k.endswith("input_ids")]
    ids += [expected["chain.tokens"]] if "chain.tokens" in expected else []
    used = torch.cat([*ids, torch.zeros(1, dtype=torch.long)]).unique()
    checkpoint: dict[str, Any] = {}
    for key, tensor in load_file(folder / "ckpt" / "model.safetensors").items():
        if key == "embed_tokens.weight":  # only the rows that the case looks up
            checkpoint[key] = {
                "rows": store.put(used),
                "of": tensor.shape[0],
                "values": store.put(tensor[used]),
            }
        else:
            checkpoint[key] = store.put(tensor)
    kept: dict[str, str] = {}
    for key, tensor in expected.items():
        if key.startswith("grad."):
            if trained:
                kept[key] = store.put(tensor.flatten()[::GRADIENT_STEP])
        elif key in {"logits", "ttt.logits"}:
            kept["ttt.logits"] = store.put(
                tensor[list(DEPTHS)][..., list(ROWS), :].reshape(len(DEPTHS), -1, tensor.shape[-1])
            )
        elif key == "ttt.target_logits_shifted_fp32":
            if trained:
                kept[key] = store.put(tensor)
        elif key in {
            "chain.tokens",
            "chain.logits",
            "chain.prenorm_hidden",
            "chain.attn_weights",
            "chain.attn_prefix",
            "chain.attn_chain",
        }:
            kept[key] = store.put(tensor)
    # speculators leaves the prefix "ttt." away.
    prefixed = {k if "." in k else f"ttt.{k}": t for k, t in inputs.items()}
    return {
        "peer": meta["peer"],
        "config": json.loads((folder / "ckpt" / "config.json").read_text()),
        "losses": meta.get("losses") if trained else None,
        "checkpoint": checkpoint,
        "inputs": {k: store.put(t) for k, t in prefixed.items()},
        "expected": kept,
    }


def main(root: Path) -> None:
    store = Store()
    target = load_file(root / "_target" / "llama" / "model.safetensors")
    trained = load_file(root / "_target" / "llama_trained" / "model.safetensors")
    rounds = root / "e2e_chain" / "base"
    prompts = json.loads((rounds / "expected.json").read_text())["prompts"]
    packed = {
        "depths": DEPTHS,
        "rows": ROWS,
        "gradient_step": GRADIENT_STEP,
        "cases": {
            name: pack_case(root / name, name, store)
            for peer, cases in CASES.items()
            for name in (f"{peer}/{case}" for case in cases.split())
        },
        # What turns the verifier's last state into logits; eps 1e-5.
        "verifier": {
            key: store.put(target[name])
            for key, name in {"norm": "model.norm.weight", "head": "lm_head.weight"}.items()
        },
        "rounds": {
            "target_config": json.loads(
                (root / "_target" / "llama_trained" / "config.json").read_text()
            ),
            # Half precision halves the file, and leaves four of the five prompts as they were.
            "target": {k: store.put(t.half()) for k, t in trained.items()},
            "config": json.loads((rounds / "ckpt" / "config.json").read_text()),
            "checkpoint": {
                k: store.put(t) for k, t in load_file(rounds / "ckpt" / "model.safetensors").items()
            },
            "prompts": [p for i, p in enumerate(prompts) if i != 2],
        },
    }
    save_file(store.tensors, HERE / "golden.safetensors", metadata={"format": "pt"})
    (HERE / "golden.safetensors").chmod(0o644)
    text = json.dumps(packed, separators=(",", ":"), sort_keys=True)
    (HERE / "cases.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
