"""Work that does not fit is refused before it begins, and nothing grows or stays behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "reliability"))

import peaks

from driftlab.analysis.interventions import apply, mask_chain_keys, noise, pin_norm
from driftlab.config import MeasureSpec, TrainSpec
from driftlab.data.corpus import Source
from driftlab.engines.anchors import unroll
from driftlab.engines.chain import speculate
from driftlab.engines.probe import probe
from driftlab.errors import ResourceError
from driftlab.lab import Lab
from driftlab.models import memory
from driftlab.models.hooks import attach, capture


@pytest.mark.parametrize(
    ("free", "setting", "remedy"),
    [
        (int(6.2 * 2**30), "--batch", "Use --batch 6."),
        (1000, "--batch", "Not even --batch 1 fits: use a larger machine or shorter texts."),
        (int(6.2 * 2**30), None, "Use a larger machine or shorter texts."),
    ],
)
def test_the_refusal_says_what_fits(
    free: int, setting: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    with pytest.raises(ResourceError) as caught:
        memory.refuse_too_large("probing", lambda n: n << 30, 9, setting, memory.TEXTS)
    assert caught.value.cause == f"probing needs 9.0 GB of memory (got {memory.size(free)} free)"
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("free", [None, 5 << 30])
def test_what_fits_or_cannot_be_known_is_not_refused(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    memory.refuse_too_large("probing", lambda n: n << 30, 5, "--batch")
    if free is not None:
        with pytest.raises(ResourceError):
            memory.refuse_too_large("probing", lambda n: (n << 30) + 1, 5, "--batch")


def test_free_memory_is_what_the_system_says() -> None:
    free = memory.free_bytes()
    assert free is not None and 0 < free < 2**50
    available = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    assert free <= available + (1 << 30)


@pytest.mark.parametrize(
    ("limit", "used", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_a_container_leaves_less_but_gives_up_its_file_cache(
    limit: str, used: str, cache: str, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("9000000\n")
    (tmp_path / used).write_text("8000000\n")
    ((tmp_path / limit).parent / "memory.stat").write_text(f"anon 4500000\n{cache} 3500000\n")
    assert memory.free_bytes(tmp_path) == 4500000
    (tmp_path / limit).write_text("max\n")
    free = memory.free_bytes(tmp_path)
    assert free is not None and free > 4500000


@pytest.mark.parametrize("variant", ["none+pre_norm+raw", "per_layer+post_norm+raw"])
def test_parameters_are_counted_by_shapes(variant: str) -> None:
    made = pairs.drafter(**pairs.VARIANTS[variant])
    every, moved = memory.drafter_numbers(made.config)
    own = sum(p.numel() for p in made.parameters())
    norms = sum(p.numel() for n, p in made.named_parameters() if "fc_norm" in n)
    assert every == own - norms, "fusion norms are too small to count"
    assert moved == every - made.embed_tokens.weight.numel()


def test_needs_grow_with_what_they_are_made_of() -> None:
    config, spec = pairs.config(), TrainSpec(steps=1)
    assert memory.training_bytes(config, spec, 64) < memory.training_bytes(config, spec, 128)
    more = spec.model_copy(update={"batch": 8})
    assert memory.training_bytes(config, spec, 64) < memory.training_bytes(config, more, 64)
    assert memory.training_bytes(config, spec, 512) == memory.training_bytes(config, spec, 9000)
    assert memory.probing_bytes(config, 1, 64, 4) < memory.probing_bytes(config, 2, 64, 4)
    assert memory.probing_bytes(config, 1, 64, 4) < memory.probing_bytes(config, 1, 64, 8)


def test_a_probe_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as many texts as there are, however many may run at once."""
    lab = Lab(pairs.target(), pairs.drafter(), cache=tmp_path / "cache")
    source = Source("p", "chat", tuple(range(3, 9)), None)
    monkeypatch.setattr(Lab, "_sources", lambda *_: [source, source])
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match=r"^probing 2 texts of up to 134 tokens at once needs"):
        lab.probe(["a", "b"], batch=16)
    assert not (tmp_path / "cache").exists()


def test_a_target_in_half_precision_needs_half() -> None:
    """But for one layer in float32 at a time, and the logits that tokens are drawn from."""
    sizes: Any = {"hidden": 64, "intermediate": 128, "boundaries": 3}
    whole, half = (memory.capturing_bytes(8, 100, itemsize=n, **sizes) for n in (4, 2))
    assert half == whole // 2 + 4 * (800 * (64 + 128) + 64 * 128)
    shape = pairs.target().shape
    of: Any = {"shape": shape, "hidden": 64, "layers": 4, "vocabulary": 1000}
    whole, half = (memory.writing_bytes(8, 1, 50, itemsize=n, **of) for n in (4, 2))
    drawn, head = 4 * 4 * 8 * 1000, 4 * (8 * (64 + 1000) + 64 * 1000)
    assert half == (whole - drawn) // 2 + drawn + head


# --- nothing stays ------------------------------------------------------------------------------


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def text(seed: int = 3, n: int = 20) -> Any:
    tokens = pairs.ids(n, seed=seed).tolist()
    return pairs.as_text(tokens[:4], tokens[4:], f"p{seed}")


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_and_no_tensor_survives_a_context(fails: bool) -> None:
    """Hooks, captures, interventions, recorder, the target's own captures; also after errors."""
    teacher, made = pairs.target(), pairs.drafter()
    before = hooks(made), hooks(teacher.model)
    given = text()
    aux = pairs.states(teacher, torch.tensor([given.tokens]))
    seen: list[weakref.ref] = []

    def watch(value: torch.Tensor, moment: Any) -> torch.Tensor:
        changed = value + 0
        seen.extend((weakref.ref(value), weakref.ref(changed)))
        if fails and moment.depth == 2:
            raise ValueError("on purpose")
        return changed

    def run() -> None:
        changes = [pin_norm(), noise(0.1, seed=0), mask_chain_keys()]
        with (
            attach(made, ["attn.*", "state.*", "logits"], watch),
            capture(made, "resid.mid"),
            teacher.capture((1, 2)),
        ):
            for step in unroll(made, torch.tensor([given.tokens]), aux, depth=3, mode="free"):
                seen.append(weakref.ref(step.logits))
        with apply(made, changes) as changed:
            probe(changed, [given], [aux[0]], MeasureSpec(depth=2))

    failed = False
    try:
        run()
    except ValueError:
        failed = True  # and the error is gone with its frames, which hold tensors
    assert failed is fails
    gc.collect()
    assert len(seen) > 10
    assert [ref for ref in seen if ref() is not None] == []
    assert (hooks(made), hooks(teacher.model)) == before


def test_a_speculation_leaves_no_cache() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    teacher, made = pairs.target(), pairs.drafter()
    speculate(teacher, made, [1, 2, 3], depth=2, max_new_tokens=8)
    before = tensors()
    for _ in range(3):
        speculate(teacher, made, [1, 2, 3], depth=2, max_new_tokens=8)
    assert tensors() <= before


# --- measured in processes of their own ---------------------------------------------------------

GROWTH = """
import resource, sys
sys.path.insert(0, {tests!r})
import torch
import test_memory as t, pairs
from driftlab.config import MeasureSpec
from driftlab.engines.probe import probe
made, teacher = pairs.drafter(), pairs.target()
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * 4096
found = []
for i in range(200):
    given = t.text(i, 120)
    aux = pairs.states(teacher, torch.tensor([given.tokens]))[0]
    probe(made, [given], [aux], MeasureSpec(depth=6))
    found.append(resident())
print(found[39], found[199])
"""


@pytest.mark.slow
def test_memory_does_not_grow_over_200_prompts() -> None:
    code = GROWTH.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    early, late = map(int, done.stdout.split())
    print(f"resident after 40 prompts {early / 2**20:.1f} MiB, after 200 {late / 2**20:.1f} MiB")
    assert late - early < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "size"), [line for line in peaks.LINES if line[1] in ("micro", "mid", "half")]
)
def test_estimates_are_upper_bounds_within_a_factor_of_two(work: str, size: str) -> None:
    need, grown, before = peaks.measure(work, size)
    print(f"{work} {size}: estimated {memory.size(need)}, measured {memory.size(grown)}")
    assert peaks.fits(need, grown)
    assert before < memory.PROCESS
