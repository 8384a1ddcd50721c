"""Several processes that train one drafter together; accelerate starts and joins them.

``accelerate launch --num_processes N -m driftlab.cli train ...`` starts N equal processes. Each
takes its share of every batch's texts, and losses and gradients are summed over all, so that N
processes compute what one computes with the same batch. The first process owns the run;
the others only train what it announces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """This process among those that train together. Alone, every call gives back its input."""

    def __init__(self, rank: int = 0, size: int = 1, device: str | torch.device = "cpu") -> None:
        self.rank, self.size, self._device = rank, size, torch.device(device)

    @classmethod
    def joined(cls) -> Ranks:
        """The place that ``accelerate launch`` gave to this process; alone without it."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return ALONE
        from accelerate import PartialState

        # The others wait while the first one writes texts, which may take a day.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=7))
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def mine(self) -> slice:
        """This process's texts of a batch. They go round: like lengths stand side by side."""
        return slice(self.rank, None, self.size)

    def total(self, value: Tensor) -> Tensor:
        """Sum of ``value`` over the processes; no gradient flows."""
        if self.size == 1:
            return value
        sent = value.detach().to(self._device, copy=True)  # NCCL sums what lies on its device
        torch.distributed.all_reduce(sent)
        return sent.to(value.device)

    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        """Replace every gradient by its sum over the processes, in one message."""
        if self.size == 1:
            return
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = self.total(torch.cat([g.reshape(-1) for g in gradients]))
        parts = flat.split([g.numel() for g in gradients])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight)

    def announce(self, work: object) -> None:
        """Tell the others what comes next; None ends them. Of the first process."""
        if self.size > 1:
            torch.distributed.broadcast_object_list([work], src=0)

    def hear(self) -> Any:
        """What the first process announced."""
        heard: list[Any] = [None]
        torch.distributed.broadcast_object_list(heard, src=0)
        return heard[0]


ALONE = Ranks()
