"""The parts of a target that training and measuring need, in one file that workers share.

A worker that trains a drafter on stored states never runs the target, so it reads the
embedding, the head and the final norm's gains and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from driftlab.errors import CheckpointError
from driftlab.models.target import Target
from driftlab.results.shards import atomic_file


class Teacher(Protocol):
    """What training needs of a target: head and embedding [V, Ht], final norm's gains [Ht]."""

    @property
    def head_weight(self) -> Tensor: ...
    @property
    def embedding_weight(self) -> Tensor: ...
    @property
    def final_norm_weight(self) -> Tensor | None: ...
    def head(self, last: Tensor) -> Tensor: ...


class Frozen:
    """The parts of a target that cells need: embedding [V, Ht], head [V, Ht], final norm [Ht].

    Read from one file, so that a worker does not load the whole target.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                meta = file.metadata() or {}
                self.softcap, self.scale = float(meta["softcap"]), float(meta["scale"])
        except Exception as error:  # safetensors raises its own and the system's errors
            raise CheckpointError(
                f"the target's frozen parts in {path} cannot be read",
                got=error,
                remedy="Delete the file; the next run writes it again.",
            ) from None
        self.embedding_weight: Tensor = tensors["embedding"]
        self.head_weight: Tensor = tensors.get("head", tensors["embedding"])
        self.final_norm_weight: Tensor | None = tensors.get("final_norm")

    def head(self, last: Tensor) -> Tensor:
        """Logits [.., V] of states after the final norm."""
        logits = nn.functional.linear(last.to(self.head_weight.dtype), self.head_weight)
        logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def freeze(target: Target, path: Path) -> None:
    """Write the target's frozen parts to ``path`` unless they are there."""
    if path.exists():
        return
    tensors = {"embedding": target.embedding_weight.contiguous()}
    if target.head_weight.data_ptr() != target.embedding_weight.data_ptr():
        tensors["head"] = target.head_weight.contiguous()
    if target.final_norm_weight is not None:
        tensors["final_norm"] = target.final_norm_weight.contiguous()
    facts = {"softcap": str(target.softcap or 0.0), "scale": str(target.logit_scale)}
    with atomic_file(path) as file:
        file.write(save(tensors, metadata=facts))
