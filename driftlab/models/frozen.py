"""The parts of a target that training and measuring need, in one file that workers share.

A worker that trains a drafter on stored states never runs the target, so it reads the
embedding, the head and the final norm's gains and nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from driftlab.errors import CheckpointError, ContractError
from driftlab.files import refuse_irregular
from driftlab.models.target import Target
from driftlab.results.shards import atomic_file, remove_dead


class Teacher(Protocol):
    """What training needs of a target: head and embedding [V, Ht], final norm's gains [Ht].

    The head's product is scaled and then softly capped; see `head_logits`.
    """

    logit_scale: float
    softcap: float | None

    @property
    def head_weight(self) -> Tensor: ...
    @property
    def embedding_weight(self) -> Tensor: ...
    @property
    def final_norm_weight(self) -> Tensor | None: ...
    def head(self, last: Tensor) -> Tensor: ...


def head_logits(teacher: Teacher, last: Tensor, rows: Tensor) -> Tensor:
    """Logits [.., n] of states after the final norm for some ``rows`` [n, Ht] of the head."""
    logits = nn.functional.linear(last.to(rows), rows) * teacher.logit_scale
    if teacher.softcap is None:
        return logits
    return torch.tanh(logits / teacher.softcap) * teacher.softcap


class Frozen:
    """The parts of a target that cells need: embedding [V, Ht], head [V, Ht], final norm [Ht].

    Read from one file, so that a worker does not load the whole target.
    """

    def __init__(self, path: Path) -> None:
        refuse_irregular(path, CheckpointError)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                meta = file.metadata() or {}
                self.logit_scale = float(meta["scale"])
                self.softcap: float | None = float(meta["softcap"]) or None
        except Exception as error:  # safetensors raises its own and the system's errors
            raise _unreadable(path, error) from None
        if meta.get("sha256") != _digest(tensors, {**meta, "name": path.name}):
            raise _unreadable(path, "its checksum does not agree, or it is another target's")
        self.embedding_weight: Tensor = tensors["embedding"]
        self.head_weight: Tensor = tensors.get("head", tensors["embedding"])
        self.final_norm_weight: Tensor | None = tensors.get("final_norm")

    def head(self, last: Tensor) -> Tensor:
        """Logits [.., V] of states after the final norm."""
        return head_logits(self, last, self.head_weight)


def _digest(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """Checksum of the parts, their settings and the file's name, which is the target's."""
    named = [facts.get(fact) for fact in ("scale", "softcap", "name")]
    digest = sha256(json.dumps(named).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unreadable(path: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"the target's frozen parts in {path} cannot be read",
        got=why,
        remedy="Delete the file; the next run writes it again.",
    )


def check_head(teacher: Teacher) -> None:
    """Raise ContractError for a head that does more than a product, a scale and a soft cap."""
    weight = teacher.head_weight
    rng = torch.Generator().manual_seed(0)
    last = torch.randn(4, weight.shape[1], generator=rng).to(weight)
    with torch.no_grad():
        own = teacher.head(last)
        rebuilt = head_logits(teacher, last, weight).to(own)
    if not torch.allclose(own, rebuilt, rtol=1e-2, atol=1e-2):
        raise ContractError(
            "the target's head is not a product of its weight alone",
            got=f"logits that differ by up to {float((own - rebuilt).abs().max()):.3g}",
            remedy="A head with a bias cannot be taught from; use another target.",
        )


def freeze(target: Target, path: Path) -> None:
    """Write the target's frozen parts to ``path`` unless they are there and whole.

    Raises
    ------
    ContractError: the target's head does more than a product, a scale and a soft cap.
    """
    check_head(target)
    with contextlib.suppress(CheckpointError):
        Frozen(path)
        return
    tensors = {"embedding": target.embedding_weight.detach().cpu().contiguous()}
    if target.head_weight.data_ptr() != target.embedding_weight.data_ptr():
        tensors["head"] = target.head_weight.detach().cpu().contiguous()
    if target.final_norm_weight is not None:
        tensors["final_norm"] = target.final_norm_weight.detach().cpu().contiguous()
    facts = {"softcap": str(target.softcap or 0.0), "scale": str(target.logit_scale)}
    digest = _digest(tensors, {**facts, "name": path.name})
    remove_dead(path.parent, path.name)
    with atomic_file(path) as file:
        file.write(save(tensors, metadata={**facts, "sha256": digest}))
