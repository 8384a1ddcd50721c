"""Timing that survives a busy machine: rivals take turns, and processor time counts.

Wall time of a shared machine says who else was there. The processor time of this process (or of
a rival's own process), and on a GPU the time between two events, say what the work cost.
"""

from __future__ import annotations

import math
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
    calls: Mapping[str, Call],
    repeats: int,
    device: torch.device,
    *,
    budget: float = math.inf,
    until: float = math.inf,
) -> dict[str, list[Sample]]:
    """Run all ``calls`` in turn, A B A B .., ``repeats`` times after a turn that only warms up.

    Where time is short there are fewer turns, at least one, and the first of them counts.

    budget: s of busy time; no turn begins that would go beyond it. until: of `time.monotonic`;
    no turn begins after it.
    """
    turns: list[dict[str, Sample]] = []
    spent = longest = 0.0
    while len(turns) <= repeats:
        if turns and (spent + longest > budget or time.monotonic() > until):
            break
        turns.append({name: sample(call, device) for name, call in calls.items()})
        longest = max(longest, sum(x.busy for x in turns[-1].values()))
        spent += sum(x.busy for x in turns[-1].values())
    counted = turns[1:] if len(turns) > repeats else turns
    return {name: [turn[name] for turn in counted] for name in calls}


def ratio(slow: list[Sample], fast: list[Sample]) -> float:
    """Median over turns of how many times the busy time of ``fast`` is in that of ``slow``."""
    return statistics.median(s.busy / f.busy for s, f in zip(slow, fast, strict=True))
