"""The table of docs/doctor.md: clean pairs and planted faults, with margins.

    python experiments/doctor_table.py                       the micro pairs of tests/faults.py
    python experiments/doctor_table.py TARGET DRAFTER...     any trained pair, faults planted in it

Each row is one run of ``driftlab.doctor.examine``; rows are printed as they come.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from driftlab import doctor
from driftlab.config import Feedback, FusionNorm, Residual, TargetSpec
from driftlab.data.corpus import sources
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.doctor.candidates import changes
from driftlab.experiment.texts import open_target
from driftlab.models.checkpoints import load_drafter
from driftlab.models.checkpoints.profiles import Reading, build
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target

HEADER = """| pair | planted | verdict | what the doctor names | nats saved | drafts gained |
|---|---|---|---|---|---|"""
YARN = {"factor": 32.0, "original_max_position_embeddings": 2048}


def row(pair: str, planted: str, found: doctor.Diagnosis, cure: dict[str, Any] | None) -> str:
    """One line. ``cure`` is the patch that undoes the fault, None for a clean pair.

    A fault whose cure was tried and saves nothing is one that these weights cannot tell.
    """
    winner = found.winner
    tried = next((c for c in found.candidates if cure is not None and c.patch == cure), None)
    if winner is None:
        best = max(found.candidates, key=lambda c: c.margin.value)
        named, margin, gained = f"nothing (best: {best.name})", best.margin.short, ""
    else:
        named = ", ".join(f"{k} = {v}" for k, v in winner.patch.items())
        margin, gained = winner.margin.short, winner.accepted.short
    right = winner is None if cure is None else winner is not None and winner.patch == cure
    faint = tried is not None and tried.outcome is doctor.Outcome.no_better
    mark = "" if right else " **cannot tell**" if faint and winner is None else " **missed**"
    return f"| {pair} | {planted} | {found.verdict}{mark} | {named} | {margin} | {gained} |"


def micro() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import faults

    benches: dict[str, doctor.Bench] = {}

    def examine(drafter: Drafter, variant: str) -> doctor.Diagnosis:
        target = faults.target(variant)
        if target.name not in benches:
            prompts = faults.prompts(variant)
            benches[target.name] = doctor.bench(target, tokens=faults.TOKENS, prompts=prompts)
        return doctor.examine(target, drafter, on=benches[target.name])

    for variant in faults.CLEAN:
        found = examine(faults.drafter(variant), variant)
        print(row(variant, "nothing", found, None), flush=True)
    for name, fault in faults.FAULTS.items():
        found = examine(fault.planted(), fault.variant)
        print(row(fault.variant, name, found, fault.cure), flush=True)
    for name, fault in faults.FAINT.items():
        found = examine(fault.planted(), fault.variant)
        print(row(fault.variant, f"{name} (too faint)", found, None), flush=True)


def plants(drafter: Drafter, n_layers: int) -> Iterator[tuple[str, Reading]]:
    """Misreadings of a trained drafter."""
    config, ids = drafter.config, drafter.draft_to_target
    base = Reading(config, ids)
    own = config.boundaries
    if own and own[-1] < n_layers:
        yield "boundaries one too high", base.change(boundaries=tuple(b + 1 for b in own))
    if own and own[0] > 0:
        yield "boundaries one too low", base.change(boundaries=tuple(b - 1 for b in own))
    if len(own) == 3 and own[1] + 1 < own[2]:
        yield "middle boundary one too high", base.change(boundaries=(own[0], own[1] + 1, own[2]))
    other: dict[str, Any] = {
        "feedback": next(f for f in Feedback if f is not config.feedback),
        "residual": next(r for r in Residual if r is not config.residual),
        "double_hidden_norm": not config.double_hidden_norm,
        "draft_position_offset": 1 - config.draft_position_offset,
    }
    for field, value in other.items():
        yield f"{field} read as {value}", base.change(**{field: value})
    for kind in (FusionNorm.none, FusionNorm.per_layer, FusionNorm.concat):
        if kind is not config.fusion_norm:
            yield f"fusion_norm read as {kind}", base.change(fusion_norm=kind)
    rope = config.rope
    for theta in (10000.0, 1e6):
        if theta != rope.theta:
            turned = rope.model_copy(update={"theta": theta})
            yield f"rope base {theta:g} for {rope.theta:g}", base.change(rope=turned)
    scaled = rope.model_copy(update={"rope_type": "yarn", "parameters": YARN})
    yield "rope block yarn x32", base.change(rope=scaled)
    count = torch.arange(len(ids))
    for name, table in (("offsets of d2t as ids", ids - count), ("ids as offsets", ids + count)):
        valid = int(table.min()) >= 0 and int(table.max()) < config.vocab_size
        if valid and len(table.unique()) == len(table):
            yield name, Reading(config, table)


def real(source: str, folders: list[str], tokens: int, shortest: int | None) -> None:
    """Faults planted in trained drafters of one target, all on the same texts."""
    target = open_target(TargetSpec(source=source), Path("runs") / "cache", label="target")
    prompts = None if shortest is None else short_prompts(target, shortest)
    on = doctor.bench(target, tokens=tokens, prompts=prompts)
    anchors = f"{len(on.texts)} texts, {sum(len(t.continuation) for t in on.texts)} tokens"
    for folder in folders:
        drafter = load_drafter(folder, target=target)
        pair = drafter.config.variant
        base = Reading(drafter.config, drafter.draft_to_target)
        found = doctor.examine(target, drafter, on=on)
        print(row(pair, "nothing", found, None), flush=True)
        for name, reading in plants(drafter, target.n_layers):
            found = doctor.examine(target, build(drafter, reading), on=on)
            print(row(pair, name, found, changes(reading, base)), flush=True)
    print(f"\n{anchors}, anchors scored: {found.score.anchors if found.score else 0}")


def short_prompts(target: Target, n: int) -> list[list[int]]:
    """The ``n`` shortest of the held-out prompts, rendered: less to compute for each token."""
    found = sources(load_prompts("held-out"), target.tokenizer, Rendering("default"))
    return [list(s.tokens) for s in sorted(found, key=lambda s: len(s.tokens))[:n]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", help="folder, .gguf file, hub id, or micro")
    parser.add_argument("drafters", nargs="*", help="folders of drafters for it")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--shortest", type=int, help="use this many of the shortest prompts")
    asked = parser.parse_args()
    print(HEADER, flush=True)
    if asked.target is None:
        micro()
    else:
        real(asked.target, asked.drafters, asked.tokens, asked.shortest)
