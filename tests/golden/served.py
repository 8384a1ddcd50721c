"""What vLLM served: recorded proposals and counters, and the tiny pair that it served them with.

``vllm/`` is written by ``make vllm-check RECORD=1``. A drafter is kept as the files that vLLM read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from driftlab.engines.chain import Speculation
from driftlab.models.target import Target
from golden.cases import write_checkpoint
from golden.pack import Store

HERE = Path(__file__).parent / "vllm"
PAIR = HERE / "pair.json"  # the tiny pair; its weights lie beside it


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue for ``max_new_tokens``, or up to one of the ids ``stop``."""

    tokens: tuple[int, ...]
    stop: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Served:
    """One continued prompt.

    Attributes
    ----------
    continuation: the new tokens, cut at the end token and at the limit.
    drafts: the drafted ids of each verification, in order.
    counts: verifications, drafted tokens, accepted tokens. What was accepted in the last
        verification counts even where the continuation was cut before it.
    per_position: how often the draft at each position was accepted, over all verifications.
    """

    continuation: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    counts: tuple[int, int, int]
    per_position: tuple[int, ...]

    @classmethod
    def by_vllm(cls, data: dict[str, Any]) -> Served:
        """From what the worker wrote. The proposal after the last token is verified by none."""
        (rounds,), (drafted,), (accepted,) = (
            data[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        proposed = data["proposed"]
        if len(proposed) != rounds + 1:
            raise ValueError(f"vLLM verified {rounds} of {len(proposed)} proposals")
        return cls(
            continuation=tuple(data["continuation"]),
            drafts=tuple(tuple(draft) for draft in proposed[:-1]),
            counts=(rounds, drafted, accepted),
            per_position=tuple(data["num_accepted_tokens_per_pos"]),
        )

    @classmethod
    def by_chain(cls, found: Speculation, depth: int) -> Served:
        return cls(
            continuation=found.continuation,
            drafts=tuple(r.drafted for r in found.rounds),
            counts=(
                len(found.rounds),
                sum(len(r.drafted) for r in found.rounds),
                sum(r.accepted for r in found.rounds),
            ),
            per_position=tuple(sum(r.accepted > d for r in found.rounds) for d in range(depth)),
        )


@dataclass(frozen=True)
class Recording:
    """What vLLM did with one pair.

    ``made`` says by which version and command; ``cases`` maps a kind of drafter to what was
    served, prompt by prompt, and ``files`` maps it to the SHA-256 of the exported weights.
    """

    made: dict[str, str]
    depth: int
    prompts: tuple[Prompt, ...]
    cases: dict[str, tuple[Served, ...]]
    files: dict[str, str]

    def write(self, name: str) -> None:
        data = vars(self) | {
            "prompts": [vars(p) for p in self.prompts],
            "cases": {kind: [vars(s) for s in served] for kind, served in self.cases.items()},
        }
        (HERE / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")


@cache
def recording(name: str) -> Recording:
    """``tiny`` or ``smollm2``."""
    data = json.loads((HERE / f"{name}.json").read_text())
    cases = {
        kind: tuple(
            Served(
                tuple(s["continuation"]),
                tuple(tuple(draft) for draft in s["drafts"]),
                tuple(s["counts"]),
                tuple(s["per_position"]),
            )
            for s in served
        )
        for kind, served in data.pop("cases").items()
    }
    prompts = tuple(
        Prompt(tuple(p["tokens"]), tuple(p["stop"]), p["max_new_tokens"])
        for p in data.pop("prompts")
    )
    return Recording(**data, prompts=prompts, cases=cases)


# The tiny pair ------------------------------------------------------------------------------


def write_tiny(
    model: LlamaForCausalLM, drafters: dict[str, tuple[dict[str, Any], dict[str, Tensor]]]
) -> None:
    """Store the pair; weights in half precision, which must hold them exactly."""
    store = Store()

    def keep(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        halves = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
        if any(not torch.equal(halves[n].to(t.dtype), t) for n, t in tensors.items()):
            raise ValueError("half precision does not hold these weights")
        return {"config": config, "tensors": {n: store.put(t) for n, t in halves.items()}}

    kept = {
        "target": keep(model.config.to_diff_dict(), model.state_dict()),
        "drafters": {kind: keep(*files) for kind, files in drafters.items()},
    }
    HERE.mkdir(exist_ok=True)
    save_file(store.tensors, HERE / "pair.safetensors", metadata={"format": "pt"})
    (HERE / "pair.safetensors").chmod(0o644)
    PAIR.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    for read in (_pair, tiny_model):
        read.cache_clear()


@cache
def _pair() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads(PAIR.read_text()), load_file(HERE / "pair.safetensors")


def _take(refs: dict[str, str]) -> dict[str, Tensor]:
    found = {name: _pair()[1][ref] for name, ref in refs.items()}
    return {n: t.float() if t.dtype == torch.float16 else t for n, t in found.items()}


def write_drafter(kind: str, folder: Path) -> Path:
    """The tiny drafter's files, as vLLM read them."""
    kept = _pair()[0]["drafters"][kind]
    return write_checkpoint(folder, kept["config"], _take(kept["tensors"]))


@cache
def tiny_model() -> LlamaForCausalLM:
    kept = _pair()[0]["target"]
    model = LlamaForCausalLM(LlamaConfig(**kept["config"]))
    model.load_state_dict(_take(kept["tensors"]))
    return model


def tiny_target(stop: Sequence[int] = ()) -> Target:
    """``stop`` are the ids that end a text."""
    return Target.from_model(tiny_model(), name="tiny", eos_ids=stop)
