"""A target with rounded weights: what a drafter reads when its target is served quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from driftlab.config import Origin, Sourced
from driftlab.errors import ContractError
from driftlab.models.target import Target

LEVELS = {"int8": 127, "int4": 7}
"""Largest integer of each format; the grid is symmetric."""


def rounded(weight: Tensor, kind: str) -> Tensor:
    """``weight`` [out, in] on a symmetric grid with one scale for each output channel.

    ``scale = max|w| / levels``, ``w <- round(w / scale) * scale``; no calibration.
    """
    levels = LEVELS[kind]
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
    return ((weight.float() / scale).round().clamp(-levels, levels) * scale).to(weight.dtype)


def refuse_experts(target: Target) -> None:
    """Raise ContractError when the blocks hold experts' matrices in one piece."""
    stacked = [name for name, p in target._blocks.named_parameters() if p.dim() > 2]
    if stacked:  # most of such a model's weights, and no linear layers of their own
        raise ContractError(
            f"{target.name} keeps the matrices of its experts in one piece, which are not rounded",
            got=", ".join(stacked[:3]),
            remedy="Leave quantize out for a mixture of experts.",
        )


def quantize(target: Target, kind: str) -> Target:
    """``target`` with every linear layer of its blocks rounded, in place; embedding, head and
    norms stay. The returned target is the same model under another name.

    Raises
    ------
    ContractError: the blocks hold no linear layer, or experts' matrices in one piece.
    """
    refuse_experts(target)
    head = target.head_weight.data_ptr()
    linears = [
        m
        for m in target.model.modules()
        if isinstance(m, nn.Linear) and m.weight.data_ptr() != head
    ]
    if not linears:
        raise ContractError(
            f"{target.name} has no linear layers to round", got=type(target.model).__name__
        )
    with torch.no_grad():
        for linear in linears:
            linear.weight.copy_(rounded(linear.weight, kind))
    made = Target.from_model(
        target.model,
        target.tokenizer,
        name=f"{target.name} in {kind}",
        eos_ids=sorted(target.eos_ids),
    )
    made.provenance["quantized"] = Sourced(
        value=kind,
        origin=Origin.derived,
        where=f"{len(linears)} linear layers rounded, one scale for each output channel",
    )
    return made
