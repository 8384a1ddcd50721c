"""Half-precision products on a CPU that has no units for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_HALVES = (torch.bfloat16, torch.float16)


class Wide(TorchFunctionMode):
    """Linear layers in half precision multiply in fp32, and round once at the end.

    That is what units for bf16 do: products of halves are exact in fp32 and sums are kept in
    fp32. Without such units the library converts element by element, which takes about five
    times as long as converting a layer's weights and multiplying in fp32.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and args[0].dtype in _HALVES:
            x, weight, *bias = args
            wide = [b if b is None else b.float() for b in bias]
            return functional.linear(x.float(), weight.float(), *wide).to(x.dtype)
        return func(*args, **(kwargs or {}))


def native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``device`` multiplies numbers of ``dtype`` itself. Unknown CPUs count as able."""
    if device.type != "cpu" or dtype not in _HALVES:
        return True
    if torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2", "AVX512"):
        return True
    if torch.cpu._is_amx_tile_supported():
        return True
    return dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def multiplying(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Context in which layers of ``dtype`` on ``device`` multiply as fast as they can."""
    return nullcontext() if native(dtype, device) else Wide()
