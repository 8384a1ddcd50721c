"""What work was estimated to need, beside what it took.

    python tests/reliability/peaks.py [--only WORD]

Every line is a process of its own. It imports, does the same work at a size of nothing (so that
code is loaded), lets a child make the inputs, and then measures how far its resident memory
rises while it does the work: VmHWM, reset before, less VmRSS before. Sizes are those of the
embedded suite and of random models. Ends with 1 when an estimate is less than what was taken,
or more than twice as much and by more than 32 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
SLACK = 32 << 20  # what the allocator keeps, which no formula knows


@dataclass(frozen=True)
class Size:
    """A random target and drafter, texts of ``length`` tokens, and how they are worked on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    drafts: int
    length: int
    texts: int  # probed, captured or written at once
    batch: int  # of a training step
    ttt: int
    depth: int
    dtype: str = "float32"  # of the target


SIZES = {
    "nothing": Size(32, 2, 2, 1, 100, 50, 24, 2, 2, 2, 2),
    "micro": Size(64, 2, 4, 2, 215, 215, 110, 24, 4, 3, 16),
    "mid": Size(256, 4, 8, 4, 8000, 4000, 512, 8, 4, 4, 8),
    "deep": Size(128, 4, 8, 8, 2000, 1000, 512, 8, 8, 7, 16),
    "wide": Size(576, 4, 9, 3, 32000, 8000, 256, 4, 2, 4, 8),
}
SIZES["half"] = replace(SIZES["mid"], dtype="bfloat16")
WORKS = ("train", "probe", "capture", "write")
LINES = [
    (work, name)
    for work in WORKS
    for name in list(SIZES)[1:]
    if name != "half" or work in ("capture", "write")  # a drafter is in float32
]


def config(size: Size) -> Any:
    import pairs

    return pairs.config(
        hidden_size=size.hidden,
        target_hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocab,
        draft_vocab_size=size.drafts,
        boundaries=(0, 1, 2),
    )


def target(size: Size) -> Any:
    import torch

    from driftlab.bench.count import TargetShape
    from driftlab.bench.shapes import random_target

    width, heads = size.hidden, size.heads
    inner = width * 8 // 3
    shape = TargetShape(size.layers, width, inner, heads, size.kv_heads, width // heads, size.vocab)
    return random_target(shape, getattr(torch, size.dtype))


def make(size: Size, folder: Path) -> None:
    """What the work reads, in ``folder``: states of texts, and the target's frozen parts."""
    import pairs
    import torch

    from driftlab.data.features import FeatureStore
    from driftlab.models.frozen import freeze

    rng = torch.Generator().manual_seed(0)
    many = max(size.texts, size.batch)
    rows = torch.randint(0, size.drafts, (many, size.length), generator=rng).tolist()
    texts = [pairs.as_text(r[:16], r[16:], f"p{i}") for i, r in enumerate(rows)]
    teacher = target(size)
    freeze(teacher, folder / "frozen.safetensors")
    key = FeatureStore(folder).build(teacher, texts, (0, 1, 2), dtype="float32").key
    (folder / "key").write_text(key)


def trained(size: Size, folder: Path) -> int:
    import torch

    from driftlab.config import TrainSpec
    from driftlab.data.features import FeatureStore
    from driftlab.engines.train import initialise, train
    from driftlab.models import memory
    from driftlab.models.frozen import Frozen

    states = FeatureStore(folder).open((folder / "key").read_text())
    teacher = Frozen(folder / "frozen.safetensors")
    spec = TrainSpec(steps=2, ttt=size.ttt, batch=size.batch, max_length=size.length)
    ids = torch.arange(size.drafts)
    made = initialise(config(size), teacher, ids, seed=0, head_init=1.0)
    train(made, states, teacher, spec, seed=0, checkpoint=folder / "t.pt")
    return memory.training_bytes(made.config, spec, size.length)


def probed(size: Size, folder: Path) -> int:
    import torch

    from driftlab.config import MeasureSpec
    from driftlab.data.features import FeatureStore
    from driftlab.engines.probe import probe, target_probabilities
    from driftlab.engines.train import initialise
    from driftlab.models import memory
    from driftlab.models.frozen import Frozen

    states = FeatureStore(folder).open((folder / "key").read_text())
    teacher = Frozen(folder / "frozen.safetensors")
    ids = torch.arange(size.drafts)
    made = initialise(config(size), teacher, ids, seed=0, head_init=1.0)
    items = [states.item(i) for i in range(size.texts)]
    chances = [target_probabilities(teacher, item["last"], ids) for item in items]
    probe(
        *(made, states.texts[: size.texts], [item["aux"] for item in items]),
        MeasureSpec(depth=size.depth),
        target_probabilities=chances,
    )
    return memory.probing_bytes(made.config, size.texts, size.length, size.depth)


def captured(size: Size, folder: Path) -> int:
    """The target's weights are there before: what they need is said when they are read."""
    import pairs

    from driftlab.data.features import FeatureStore
    from driftlab.models import memory

    teacher = target(size)
    rows = [pairs.ids(size.length, seed=i) % size.vocab for i in range(size.texts)]
    texts = [pairs.as_text(r[:16].tolist(), r[16:].tolist(), f"p{i}") for i, r in enumerate(rows)]
    start()
    store = FeatureStore(folder / "new")
    dtype: Any = size.dtype
    store.build(teacher, texts, (0, 1, 2), dtype=dtype, batch=size.texts)
    return memory.capturing_bytes(
        size.texts,
        size.length,
        hidden=size.hidden,
        intermediate=size.hidden * 8 // 3,
        boundaries=3,
        itemsize=teacher.dtype.itemsize,
    )


def written(size: Size, folder: Path) -> int:
    from driftlab.models import memory

    teacher = target(size)
    half = size.length // 2
    prompts = [[i + 1] * half for i in range(size.texts)]
    start()
    teacher.generate(prompts, max_new_tokens=min(24, half), temperature=1.0, batch=size.texts)
    return memory.writing_bytes(
        *(size.texts, half, min(24, half)),
        shape=teacher.shape,
        hidden=size.hidden,
        layers=size.layers,
        vocabulary=size.vocab,
        itemsize=teacher.dtype.itemsize,
    )


DO: dict[str, Callable[[Size, Path], int]] = dict(
    zip(WORKS, (trained, probed, captured, written), strict=True)
)


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no {name} here: this measures on Linux")


_before = 0


def start() -> None:
    """Forget the peak so far; what is resident now is where the work begins."""
    global _before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    _before = status("VmRSS")


def one(work: str, name: str) -> None:
    """In a process of its own: print bytes estimated, risen, and of the process before."""
    import torch

    torch.set_num_threads(1)
    size = replace(SIZES[name])
    with tempfile.TemporaryDirectory() as where:
        folders = [Path(where) / n for n in ("small", "large")]
        for folder, of in zip(folders, (SIZES["nothing"], size), strict=True):
            folder.mkdir()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    make(of, folder)
                    code = 0
                finally:
                    os._exit(code)
            if os.waitpid(child, 0)[1]:
                raise SystemExit("the inputs could not be made")
        DO[work](SIZES["nothing"], folders[0])
        start()
        need = DO[work](size, folders[1])
        print(json.dumps([need, status("VmHWM") - _before, _before]))


def measure(work: str, name: str) -> tuple[int, int, int]:
    words = [sys.executable, str(HERE), "--one", work, name]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{work} {name}: {done.stderr[-2000:]}")
    need, grown, before = json.loads(done.stdout.splitlines()[-1])
    return need, grown, before


def fits(need: int, grown: int) -> bool:
    return grown <= need + SLACK / 4 and need <= max(2 * grown, grown + SLACK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="lines that hold this word")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(*asked.one)
        return
    wrong = 0
    print(f"{'work':16} {'estimate':>9} {'measured':>9} {'ratio':>6} {'process':>8}   MiB")
    for work, name in LINES:
        if asked.only not in (line := f"{work} {name}"):
            continue
        need, grown, before = measure(work, name)
        good = fits(need, grown)
        wrong += not good
        shown = f"{need >> 20:9} {grown / 2**20:9.1f} {need / grown:6.2f} {before >> 20:8}"
        print(f"{line:16} {shown} {'' if good else '  WRONG'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
