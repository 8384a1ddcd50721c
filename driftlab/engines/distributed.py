"""Several processes that train one drafter together; accelerate starts and joins them.

``accelerate launch --num_processes N -m driftlab.cli train ...`` starts N equal processes. Each
takes its share of every batch's texts, and losses and gradients are summed over all, so that N
processes compute what one computes with the same batch. The first process owns the run;
the others only train what it announces.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from driftlab.errors import ConfigError


class Ranks:
    """This process among those that train together. Alone, every call gives back its input."""

    def __init__(self, rank: int = 0, size: int = 1, device: str | torch.device = "cpu") -> None:
        self.rank, self.size, self._device = rank, size, torch.device(device)

    @classmethod
    def joined(cls) -> Ranks:
        """The place that ``accelerate launch`` gave to this process; alone without it.

        Raises ConfigError when the environment names several processes and not how they meet.
        """
        told = {name: os.environ.get(name, "") for name in _PLACE}
        size = told["WORLD_SIZE"] or "1"
        if size.isdecimal() and int(size) < 2:
            return ALONE
        wrong = [n for n, v in told.items() if not (v.isdecimal() or (v and n == "MASTER_ADDR"))]
        if wrong:
            raise ConfigError(
                f"WORLD_SIZE says that {size} processes train together, and {wrong[0]} not how",
                got=told[wrong[0]] or "nothing",
                remedy="Start them with `accelerate launch`, or unset WORLD_SIZE to train in one.",
            )
        from accelerate import PartialState

        print(
            f"number {told['RANK']} of {size} processes waits for the others at "
            f"{told['MASTER_ADDR']}:{told['MASTER_PORT']} (WORLD_SIZE is set)",
            file=sys.stderr,
        )
        # The others wait while the first one writes texts, which may take a day.
        with _ended_at_once():
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
        with _ended_at_once():
            torch.distributed.broadcast_object_list(heard, src=0)
        return heard[0]


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Signals end the process while it waits in code that lets no handler of Python's run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [n for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
    before = {n: signal.signal(getattr(signal, n), signal.SIG_DFL) for n in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            # None: a handler that Python did not set, which it cannot give back.
            signal.signal(getattr(signal, name), signal.SIG_DFL if handler is None else handler)


_PLACE = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


ALONE = Ranks()
