"""Attention patterns of a HuggingFace model, handed to a reader one layer at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from driftlab.errors import ContractError, NumericsError

NAME = "driftlab_record"


@dataclass(frozen=True)
class Pattern:
    """Attention of one layer.

    Attributes
    ----------
    layer: 0-based index of the block (it reads boundary ``layer``).
    weights: fp32 [B, heads, S, S], query by key, one row per *query* head. Rows of padding are 0.
    null: fp32 [B, heads, S], mass that a learned sink logit took (gpt-oss); 0 without one.
        ``weights.sum(-1) + null`` is 1 in every row that is not padding.
    reach: bool [B, S, S], the keys that a query may read. A past key that is out of reach (of a
        window, a chunk) has weight 0, which is not a measured 0.
    """

    layer: int
    weights: Tensor
    null: Tensor
    reach: Tensor


Reader = Callable[[Pattern], None]
_sink: ContextVar[Callable[[Pattern], None] | None] = ContextVar(NAME, default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The model's own eager attention, so that its sinks, soft caps and scales are its own."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ContractError(
            "the target has no attention function that returns its weights",
            got=type(module).__name__,
            remedy="Attention can be measured on models with HuggingFace's eager attention only.",
        )
    output, weights = eager(module, query, key, value, attention_mask, **kwargs)
    give = _sink.get()
    if give is not None:
        weights = weights.float()
        learned = getattr(module, "sinks", None) is not None or kwargs.get("s_aux") is not None
        null = (
            (1 - weights.sum(-1)).clamp(min=0) if learned else weights.new_zeros(weights.shape[:-1])
        )
        reach = _reach(attention_mask, weights)
        give(Pattern(int(module.layer_idx), weights, null, reach))  # type: ignore[arg-type]
    return output, weights


def _reach(mask: Tensor | None, weights: Tensor) -> Tensor:
    """bool [B, S, S] of a mask [B or 1, heads or 1, S, S], which is bool or is added to scores."""
    batch, _, rows, keys = weights.shape
    if mask is None:
        return torch.ones(rows, keys, dtype=torch.bool, device=weights.device).expand(batch, -1, -1)
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen[..., :keys].any(dim=1).expand(batch, -1, -1)


@contextmanager
def recording(model: Any, give: Callable[[Pattern], None]) -> Iterator[None]:
    """Within this context ``give`` receives every layer's pattern, in the order of the layers."""
    # Without its mask function a registered attention function is silently non-causal.
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    token = _sink.set(give)
    try:
        if model.config._attn_implementation != NAME:
            raise ContractError(
                "the target does not let its attention function be replaced",
                got=type(model).__name__,
                remedy="Attention can be measured on models of HuggingFace's attention interface.",
            )
        yield
    finally:
        _sink.reset(token)
        model.set_attn_implementation(before)


def checked(pattern: Pattern, lengths: Tensor, dtype: torch.dtype) -> Pattern:
    """``pattern`` without its padding rows, after proof that it is causal and sums to 1.

    Raises
    ------
    NumericsError: mass on a future key, or rows that do not sum to 1 within the dtype's rounding.
    """
    weights = pattern.weights
    size = weights.shape[-1]
    real = torch.arange(size, device=weights.device) < lengths.to(weights.device)[:, None]
    weights = weights * real[:, None, :, None]
    null = pattern.null * real[:, None]
    future = float(torch.triu(weights, 1).amax()) if size > 1 else 0.0
    off = float(((weights.sum(-1) + null - 1).abs() * real[:, None]).amax())
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 2e-2
    if future != 0 or not off <= tolerance:
        raise NumericsError(
            f"attention of layer {pattern.layer} is not causal or does not sum to 1",
            got=f"mass on a future key {future:.3g}, row sum off by {off:.3g}",
            remedy="The target's attention function is not what it claims; nothing was measured.",
        )
    return Pattern(pattern.layer, weights, null, pattern.reach)
