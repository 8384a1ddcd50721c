"""Timing that survives a busy machine: rivals take turns, and processor time counts.

Wall time of a shared machine says who else was there. The processor time of this process (or of
a rival's own process), and on a GPU the time between two events, say what the work cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One run: ``wall`` s, and ``busy`` s of the processors (of the device, on a GPU)."""

    wall: float
    busy: float


Call = Callable[[], Any]  # what it returns is dropped, unless it is a Sample


def sample(call: Call, device: torch.device) -> Sample:
    """Run ``call`` once. One that times itself, in another process, returns its own Sample."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    wall, busy = time.perf_counter(), time.process_time()
    found = call()
    if on_gpu:
        end.record()
        torch.cuda.synchronize(device)
        return Sample(time.perf_counter() - wall, start.elapsed_time(end) / 1000)
    if isinstance(found, Sample):
        return found
    return Sample(time.perf_counter() - wall, time.process_time() - busy)


def race(
    calls: Mapping[str, Call], repeats: int, device: torch.device, *, warm: int = 1
) -> dict[str, list[Sample]]:
    """Run all ``calls`` in turn, A B A B .., ``repeats`` times after ``warm`` unmeasured rounds."""
    found: dict[str, list[Sample]] = {name: [] for name in calls}
    for turn in range(-warm, repeats):
        for name, call in calls.items():
            one = sample(call, device)
            if turn >= 0:
                found[name].append(one)
    return found


def ratio(slow: list[Sample], fast: list[Sample]) -> float:
    """Median over turns of how many times the busy time of ``fast`` is in that of ``slow``."""
    return statistics.median(s.busy / f.busy for s, f in zip(slow, fast, strict=True))
