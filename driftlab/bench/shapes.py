"""The sizes that are benchmarked, and random models of them: times do not depend on weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.bench.count import TargetShape
from driftlab.bench.machine import Machine
from driftlab.bench.timing import Call, Sample, race
from driftlab.config import DrafterConfig, Rope
from driftlab.data.text import Text
from driftlab.engines.train import initialise
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama


@dataclass(frozen=True)
class Bench:
    """What every stage is told.

    full: not a smoke run. work: a folder for files. stored: a finished run. peers: name -> command.
    repeats: the most turns of a race; full sizes take fewer where a turn is long. until: when the
    stage is to end, by `time.monotonic`.
    """

    machine: Machine
    device: torch.device
    full: bool
    repeats: int
    work: Path
    stored: Path
    peers: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print
    until: float = math.inf

    def race(self, calls: Mapping[str, Call], budget: float = 30.0) -> dict[str, list[Sample]]:
        """Let ``calls`` take turns for about ``budget`` s of busy time; see `timing.race`."""
        return race(calls, self.repeats, self.device, budget=budget, until=self.until)

    def peak(self, dtype: torch.dtype) -> float:
        return self.machine.peak[str(dtype).removeprefix("torch."), 1]


# Drafter: hidden, heads, kv heads, inner, vocabulary, draft vocabulary.
SMALL = (64, 4, 2, 128, 512, 256)
STEP = (256, 4, 4, 1024, 16384, 4096)
SMOLLM2 = (576, 9, 3, 1536, 49152, 16384)
LLAMA_8B = (4096, 32, 8, 14336, 128256, 32000)

SMALL_TARGET = TargetShape(2, 64, 170, 4, 2, 16, 512)
MIDDLE_TARGET = TargetShape(8, 512, 1365, 8, 4, 64, 8192)
SMOLLM2_TARGET = TargetShape(30, 576, 1536, 9, 3, 64, 49152)


def config_of(shape: tuple[int, ...], *, heads: int | None = None) -> DrafterConfig:
    """``heads`` cuts the same width into another number of heads, without grouping."""
    hidden, own, kv, inner, vocabulary, draft = shape
    width = hidden // own
    if heads is not None:
        own, kv, width = heads, heads, hidden // heads
    return DrafterConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=inner,
        num_heads=own,
        num_kv_heads=kv,
        head_dim=width,
        vocab_size=vocabulary,
        draft_vocab_size=draft,
        boundaries=(0, 1, 2),
        rope=Rope(max_position=16384),
    )


class RandomTeacher:
    """Head and embedding of a target that is not there. Ids outside ``kept`` never win."""

    logit_scale = 1.0
    softcap: float | None = None
    final_norm_weight: Tensor | None = None

    def __init__(self, config: DrafterConfig, kept: Tensor, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(1)
        width = config.target_hidden_size
        self.embedding_weight = torch.randn(config.vocab_size, width, generator=rng).to(device)
        self.head_weight = torch.zeros(config.vocab_size, width)
        self.head_weight[kept] = torch.randn(len(kept), width, generator=rng) * 2 * width**-0.5
        self.head_weight = self.head_weight.to(device)

    def head(self, last: Tensor) -> Tensor:
        return last @ self.head_weight.T


def random_pair(config: DrafterConfig, device: torch.device) -> tuple[Drafter, RandomTeacher]:
    """A drafter as training begins with it; its draft ids are every n-th target id."""
    step = config.vocab_size // config.draft_vocab_size
    kept = torch.arange(config.draft_vocab_size) * step
    teacher = RandomTeacher(config, kept, torch.device("cpu"))
    drafter = initialise(config, teacher, kept, seed=0, head_init=1.0).to(device)
    teacher.head_weight = teacher.head_weight.to(device)
    return drafter, teacher


def random_target(
    shape: TargetShape, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Target:
    """A Llama of ``shape`` with random weights that names no end token."""
    model: Any = tiny_llama(  # transformers hides the signature of `to`
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        max_position=16384,
    )
    return Target.from_model(
        model.to(dtype).to(device or torch.device("cpu")), name="random Llama", eos_ids=()
    )


def random_text(tokens: int, vocabulary: int, *, prompt: int = 1, seed: int = 0) -> Text:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens,), generator=rng).tolist()
    return Text(f"random-{seed}", "random", tuple(ids), prompt, "given", None, False, "random")
