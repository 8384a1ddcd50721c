"""What the machine is, and what it can do: products by dtype, and copying."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from driftlab.bench.timing import sample


@dataclass(frozen=True)
class Machine:
    """``peak`` in operations a second by (dtype, threads), ``bandwidth`` in bytes a second.

    Both are the best of several tries, in busy seconds for one thread (what one core gives when
    it works for us) and in wall seconds for several.
    """

    facts: dict[str, Any]
    peak: dict[tuple[str, int], float]
    bandwidth: float


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` threads for the length of the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, memory, versions, load; of a GPU also its name and memory."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": [round(x, 1) for x in os.getloadavg()],
    }
    for name in ("driftlab", "torch", "transformers", "numpy", "pyarrow"):
        facts[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["device_memory_gib"] = round(
            torch.cuda.get_device_properties(device).total_memory / 2**30, 1
        )
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def measure(device: torch.device, *, smoke: bool) -> Machine:
    """Measure products in fp32 and bf16 and a copy; on a CPU at one thread and at all."""
    size = 4096 if device.type == "cuda" else (384 if smoke else 768)
    tries = 3 if smoke else 8
    counts = [1] if device.type == "cuda" else sorted({1, os.cpu_count() or 1})
    peak: dict[tuple[str, int], float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n in counts:
            call = gemm(size, dtype, device)
            with threads(n):
                call()
                found = [sample(call, device)]
                # A dtype without units of its own is slow; a second of it says as much.
                while len(found) < tries and sum(x.busy for x in found) < 1:
                    found.append(sample(call, device))
            best = min(x.busy if n == 1 else x.wall for x in found)
            peak[str(dtype).removeprefix("torch."), n] = 2 * size**3 / best
    block = torch.zeros(2**22 if smoke else 2**24, device=device)  # 16 or 64 MiB, past most caches
    into = torch.empty_like(block)
    with threads(1):
        copies = [sample(lambda: into.copy_(block), device) for _ in range(tries + 1)]
    moved = 2 * block.numel() * block.element_size()
    return Machine(describe(device), peak, moved / min(x.busy for x in copies))


def gemm(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A square product, to be timed."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def text(machine: Machine) -> str:
    """The machine in lines for a terminal."""
    facts = machine.facts
    lines = [
        f"{facts.get('device', facts['processor'])}, {facts['cores']} cores, "
        f"{facts['memory_gib']} GiB, load {facts['load'][0]}",
        *(
            f"GEMM {dtype}, {n} thread{'s' if n > 1 else ''}: {peak / 1e9:.1f} GFLOP/s"
            for (dtype, n), peak in machine.peak.items()
        ),
        f"copy: {machine.bandwidth / 1e9:.1f} GB/s",
    ]
    return "\n".join(lines)


def stored(machine: Machine) -> dict[str, Any]:
    """The machine as it is written beside the rows."""
    peaks = {f"{d}, {n} threads": round(p / 1e9, 2) for (d, n), p in machine.peak.items()}
    return {
        **machine.facts,
        "gemm_gflops": peaks,
        "copy_gbs": round(machine.bandwidth / 1e9, 2),
    }
