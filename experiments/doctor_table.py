"""The tables of docs/doctor-table.md: clean pairs and planted faults, with margins.

    python experiments/doctor_table.py                       the micro pairs of tests/faults.py
    python experiments/doctor_table.py TARGET DRAFTER...     any trained pair, faults planted in it
    python experiments/doctor_table.py TARGET DRAFTER... --learn STEPS
        the same after the drafter has learned the doctor's own texts: a drafter that accepts much

Each row is one run of ``driftlab.doctor.examine``; rows are printed as they come.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from driftlab import doctor
from driftlab.config import Feedback, FusionNorm, Residual, TargetSpec, TrainSpec
from driftlab.data.corpus import sources
from driftlab.data.features import FeatureStore
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.doctor.candidates import changes
from driftlab.doctor.scoring import DEPTH
from driftlab.engines.train import train
from driftlab.errors import DriftlabError
from driftlab.experiment.texts import open_target
from driftlab.models.checkpoints import load_drafter
from driftlab.models.checkpoints.profiles import Reading, build
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import faults

HEADER = """| pair | planted | verdict | what the doctor names | nats saved | drafts gained |
|---|---|---|---|---|---|"""
LEARN_LR = 1e-3
YARN = {"factor": 32.0, "original_max_position_embeddings": 2048}


class Table:
    """Rows as they come, and how many of each kind there were."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        print(HEADER, flush=True)

    def add(
        self, pair: str, planted: str, found: doctor.Diagnosis, cure: dict[str, Any] | None
    ) -> None:
        """One line. ``cure`` is the patch that undoes the fault, None for a clean pair.

        Margins are the cure's; of a clean pair those of the reading that comes nearest.
        """
        winner = found.winner
        tried = [c for c in found.candidates if c.patch == cure]
        if winner is not None and (cure is None or winner.patch == cure or not tried):
            shown = winner
        else:
            shown = tried[0] if tried else max(found.candidates, key=lambda c: c.margin.value)
        if winner is not None:
            patches = (c.patch for c in (winner, *found.rivals))
            said = (", ".join(f"{k} = {v}" for k, v in patch.items()) for patch in patches)
            named = "; as good: ".join(said)
        elif cure is None:
            named = f"nothing (nearest: {shown.name})"
        else:
            named = "nothing"
        if cure is None:
            kind = "clean" if found.verdict is doctor.Verdict.clean else "not clean"
        elif winner is not None:
            beside = any(c.patch == cure for c in found.rivals)
            other = "named beside its equal" if beside else "another named"
            kind = "found" if winner.patch == cure else other
        else:
            even = tried and tried[0].outcome is doctor.Outcome.no_better
            kind = "cannot tell" if even else "missed"
        self.counts[kind] += 1
        mark = "" if kind in {"clean", "found"} else f" **{kind}**"
        print(
            f"| {pair} | {planted} | {found.verdict}{mark} | {named} | {shown.margin.short} | "
            f"{shown.accepted.short} |",
            flush=True,
        )

    def refused(self, pair: str, planted: str, error: DriftlabError) -> None:
        """A fault that no reader lets pass."""
        self.counts["refused"] += 1
        print(f"| {pair} | {planted} | refused | {error} | | |", flush=True)

    def end(self, more: str) -> None:
        print(f"\n{', '.join(f'{n} {kind}' for kind, n in self.counts.items())}; {more}")


def micro() -> None:
    benches: dict[str, doctor.Bench] = {}
    table = Table()

    def examine(drafter: Drafter, variant: str) -> doctor.Diagnosis:
        target = faults.target(variant)
        if target.name not in benches:
            prompts = faults.prompts(variant)
            benches[target.name] = doctor.bench(target, tokens=faults.TOKENS, prompts=prompts)
        return doctor.examine(target, drafter, on=benches[target.name])

    for variant in faults.CLEAN:
        table.add(variant, "nothing", examine(faults.drafter(variant), variant), None)
    for name, fault in {**faults.FAULTS, **faults.ALIKE}.items():
        table.add(fault.variant, name, examine(fault.planted(), fault.variant), fault.cure)
    for name, fault in faults.FAINT.items():
        found = examine(fault.planted(), fault.variant)
        table.add(fault.variant, f"{name} (too faint)", found, fault.cure)
    table.end("; ".join(size(on) for on in benches.values()))


def size(on: doctor.Bench) -> str:
    tokens = sum(len(t.continuation) for t in on.texts)
    return f"{on.target.name}: {len(on.texts)} texts, {tokens} tokens"


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


def maps(drafter: Drafter) -> Iterator[tuple[str, torch.Tensor]]:
    """The vocabulary map of a drafter, read as what it is not."""
    ids = drafter.draft_to_target
    count = torch.arange(len(ids))
    if not torch.equal(ids, count):
        yield "offsets of d2t taken as ids", ids - count
        yield "ids of d2t taken as offsets", ids + count


def real(
    source: str, folders: list[str], tokens: int, shortest: int | None, learn: int | None
) -> None:
    """Faults planted in trained drafters of one target, all on the same texts."""
    target = open_target(TargetSpec(source=source), Path("runs") / "cache", label="target")
    prompts = None if shortest is None else short_prompts(target, shortest)
    on = doctor.bench(target, tokens=tokens, prompts=prompts)
    table = Table()
    for folder in folders:
        drafter = load_drafter(folder, target=target)
        if learn is not None:
            taught(drafter, on, learn)
        planted(table, on, drafter)
    table.end(size(on))


def taught(drafter: Drafter, on: doctor.Bench, steps: int) -> None:
    """Train ``drafter`` on, on the texts it will be scored on. A drafter that accepts little lets
    most faults pass, since they change little; this one has something to lose."""
    spec = TrainSpec(ttt=DEPTH, steps=steps, lr=LEARN_LR)
    embedding = drafter.embed_tokens.weight  # frozen, as in every other training
    drafter.requires_grad_(True)
    embedding.requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        corpus = FeatureStore(folder).build(on.target, on.texts, drafter.config.boundaries)
        result = train(drafter, corpus, on.target, spec, seed=0)
    drafter.requires_grad_(False)
    print(f"loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}", file=sys.stderr, flush=True)


def planted(table: Table, on: doctor.Bench, drafter: Drafter) -> None:
    """All rows of one drafter."""
    target, pair, n = on.target, drafter.config.variant, on.target.n_layers
    near = {b + step for b in drafter.config.boundaries for step in (-2, -1, 0, 1, 2)}
    on.prepare(b for b in near if 0 <= b <= n)

    def examine(drafter: Drafter, label: str, wrong: Reading | None = None) -> None:
        right = Reading(drafter.config, drafter.draft_to_target)
        cure = None if wrong is None else changes(wrong, right)
        given = drafter if wrong is None else build(drafter, wrong)
        table.add(pair, label, doctor.examine(target, given, on=on), cure)

    examine(drafter, "nothing")
    for name, reading in plants(drafter, n):
        examine(drafter, name, reading)
    flip = {"double_hidden_norm": not drafter.config.double_hidden_norm}
    base = Reading(drafter.config, drafter.draft_to_target)
    twin = faults.spread(drafter)
    examine(twin, "nothing, gains spread")
    examine(twin, "gains spread, one hidden norm read as two", base.change(**flip))
    twin = faults.twice(drafter, faults.fed(drafter, target, on.texts[:4]))
    examine(twin, "nothing, made for two hidden norms")
    examine(twin, "two hidden norms read as one", base)
    for name, ids in maps(drafter):
        try:
            build(drafter, Reading(drafter.config, ids))
        except DriftlabError as error:
            table.refused(pair, name, error)
        few = faults.apart(drafter, on.texts)
        for again, other in maps(few):
            if again == name:
                label = f"{name}, {len(other)} ids kept"
                examine(few, label, Reading(few.config, other))


def short_prompts(target: Target, n: int) -> list[list[int]]:
    """The ``n`` shortest of the held-out prompts, rendered: less to compute for each token."""
    found = sources(load_prompts("held-out"), target.tokenizer, Rendering("default"))
    return [list(s.tokens) for s in sorted(found, key=lambda s: len(s.tokens))[:n]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", help="folder, .gguf file, hub id, or micro")
    parser.add_argument("drafters", nargs="*", help="folders of drafters for it")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--learn", type=int, help="first learn the texts, for so many steps")
    parser.add_argument("--shortest", type=int, help="use this many of the shortest prompts")
    asked = parser.parse_args()
    if asked.target is None:
        micro()
    else:
        real(asked.target, asked.drafters, asked.tokens, asked.shortest, asked.learn)
