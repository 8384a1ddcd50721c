"""Reads the packed golden cases back: checkpoints as folders, inputs and expected values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent


@cache
def packed() -> dict[str, Any]:
    return json.loads((HERE / "cases.json").read_text())


@cache
def _tensors() -> dict[str, Tensor]:
    return load_file(HERE / "golden.safetensors")


def _take(refs: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, ref in refs.items():
        if isinstance(ref, str):
            found[name] = _tensors()[ref].clone()
        else:
            values = _tensors()[ref["values"]]
            found[name] = torch.zeros(ref["of"], *values.shape[1:])
            found[name][_tensors()[ref["rows"]]] = values
    return found


@dataclass(frozen=True)
class Case:
    """One peer's case. ``expected["ttt.logits"]`` is [depths, B * rows, Vd], sampled at
    ``depths`` (0 is the first) and ``rows``; gradients are every ``gradient_step``-th element."""

    name: str
    peer: str
    config: dict[str, Any]
    losses: dict[str, Any] | None
    checkpoint: dict[str, Tensor]
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]

    def write(self, folder: Path) -> Path:
        """The checkpoint as its peer wrote it; embedding rows that the case never uses are 0."""
        return write_checkpoint(folder, self.config, self.checkpoint)


def names() -> list[str]:
    return sorted(packed()["cases"])


def case(name: str) -> Case:
    data = packed()["cases"][name]
    return Case(
        name=name,
        peer=data["peer"],
        config=data["config"],
        losses=data["losses"],
        checkpoint=_take(data["checkpoint"]),
        inputs=_take(data["inputs"]),
        expected=_take(data["expected"]),
    )


def rounds() -> dict[str, Any]:
    """The end-to-end rounds: target and drafter with their configs, and the prompts."""
    data = packed()["rounds"]
    return data | {
        "target": {k: t.float() for k, t in _take(data["target"]).items()},
        "checkpoint": _take(data["checkpoint"]),
    }


def verifier() -> dict[str, Tensor]:
    """``norm`` [H] and ``head`` [V, H] of the random cases' verifier; eps 1e-5."""
    return _take(packed()["verifier"])


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {k: t.contiguous() for k, t in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
