"""The chain engine proposes what vLLM proposed, and counts what it counted (docs/engines.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from golden import served
from golden.served import Recording, Served
from safetensors.torch import load_file

from driftlab.config import Feedback, FusionNorm, Residual
from driftlab.engines.chain import speculate
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target

ROOT = Path(__file__).resolve().parent.parent
GGUF = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPORTS = ROOT / ".cache" / "vllm" / "exports" / "smollm2"
TINY = list(served.recording("tiny").cases)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    kind = request.node.callspec.params["kind"]
    return load_drafter(served.write_drafter(kind, tmp_path / "drafter"))


def assert_equal(
    kind: str, drafter: Drafter, kept: Recording, target: Callable[[Sequence[int]], Target]
) -> None:
    for prompt, theirs in zip(kept.prompts, kept.cases[kind], strict=True):
        found = speculate(
            target(prompt.stop),
            drafter,
            list(prompt.tokens),
            depth=kept.depth,
            max_new_tokens=prompt.max_new_tokens,
        )
        assert Served.by_chain(found, kept.depth) == theirs, kind


@pytest.mark.parametrize("kind", TINY)
def test_every_proposal_and_every_counter(kind: str, drafter: Drafter) -> None:
    assert_equal(kind, drafter, served.recording("tiny"), served.tiny_target)


@pytest.mark.parametrize("kind", TINY)
def test_the_export_is_what_vllm_read(kind: str, drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path / "again", dialect="vllm", target=served.tiny_target())
    first, again = tmp_path / "drafter", tmp_path / "again"
    assert json.loads((again / "config.json").read_text()) == json.loads(
        (first / "config.json").read_text()
    )
    wanted = load_file(first / "model.safetensors")
    found = load_file(again / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_recording_holds_every_kind(tmp_path: Path) -> None:
    configs = [load_drafter(served.write_drafter(k, tmp_path / k)).config for k in TINY]
    assert {c.fusion_norm for c in configs} == set(FusionNorm) - {FusionNorm.concat_per_layer}
    assert {c.feedback for c in configs} == set(Feedback)
    assert {c.residual for c in configs} == set(Residual)
    assert {len(c.boundaries) for c in configs} == {3, 5}
    assert {c.draft_vocab_size == c.vocab_size for c in configs} == {True, False}


def test_the_recording_holds_every_way_a_round_can_end() -> None:
    """Else equal counters would say little."""
    kept = served.recording("tiny")
    found = [
        (p, s) for case in kept.cases.values() for p, s in zip(kept.prompts, case, strict=True)
    ]
    rejected = [s.counts[0] - s.per_position[0] for _, s in found]
    assert sum(rejected) > 0  # at once
    assert all(sum(s.per_position[d] for _, s in found) for d in range(kept.depth))
    ended = [s for p, s in found if p.stop and s.continuation[-1] in p.stop]
    assert ended
    # A token comes from the prompt's forward, one from each verification, and the accepted ones.
    past = [1 + s.counts[0] + s.counts[2] - len(s.continuation) for _, s in found]
    assert min(past) == 0 and max(past) > 0
    assert any(1 + s.counts[0] + s.counts[2] > len(s.continuation) for s in ended)


@pytest.mark.slow
@pytest.mark.real
def test_smollm2() -> None:
    """On the drafters that the check left, as far as they are the recorded ones."""
    if not (served.HERE / "smollm2.json").exists():
        pytest.skip("nothing recorded")
    kept = served.recording("smollm2")
    folders = {kind: EXPORTS / kind.replace(" ", "-") for kind in kept.cases}
    same = [kind for kind, folder in folders.items() if sha256_of(folder) == kept.files[kind]]
    if not same:
        pytest.skip("needs what `make vllm-check` leaves")
    target = Target.load(str(GGUF))
    for kind in same:
        drafter = load_drafter(folders[kind], target=target)
        assert_equal(kind, drafter, kept, lambda _: target)


def sha256_of(folder: Path) -> str:
    weights = folder / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""
