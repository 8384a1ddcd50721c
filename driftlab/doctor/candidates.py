"""Other readings of a drafter's files: one for every field that is assumed or disputed.

A field is *settled* when the file states it and nothing is known to contradict its trainer; it
is scored all the same, since stating is not proving, but a text that cannot tell the readings
apart leaves a settled field in peace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from driftlab.config import Feedback, FusionNorm, Origin, Provenance, Residual, Rope
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.profiles import Facts, Reading, default_boundaries, written_rope

Apply = Callable[[Reading], Reading]
# Which rows of docs/checkpoints.md dispute a field; field -> rows.
DISPUTED: Mapping[str, str] = {
    "boundaries": "X1, X12",
    "fusion_norm": "X8, X9",
    "residual": "X3",
    "feedback": "X2, X9",
    "logits_from_raw": "X2",
    "double_hidden_norm": "X4",
    "rope.theta": "X6",
    "rope.rope_type": "X5",
    "draft_position_offset": "X7",
    "draft_to_target": "X20",
}


@dataclass(frozen=True)
class Alternative:
    """A reading that differs in one field. ``why`` says what makes the field doubtful."""

    field: str
    name: str
    why: str
    settled: bool
    apply: Apply


def alternatives(
    reading: Reading, provenance: Provenance, facts: Facts, target_rope: Rope
) -> list[Alternative]:
    """Every alternative that can be built and differs from ``reading``."""
    found = []
    for field, name, apply in _proposals(reading, facts, target_rope):
        if same(tried(apply, reading), reading):
            continue
        why, settled = _standing(field, provenance)
        found.append(Alternative(field, name, why, settled, apply))
    return found


def both(a: Alternative, b: Alternative) -> Alternative:
    """Two changes at once. They are settled when one is: the other alone was scored as well."""
    return Alternative(
        field=f"{a.field}, {b.field}",
        name=f"{a.name} + {b.name}",
        why=f"{a.why}; {b.why}",
        settled=a.settled or b.settled,
        apply=lambda r: b.apply(a.apply(r)),
    )


def tried(apply: Apply, reading: Reading) -> Reading:
    """``apply(reading)``, or ``reading`` itself where the change is impossible."""
    try:
        return apply(reading)
    except (ValueError, CheckpointError):
        return reading


def same(a: Reading, b: Reading) -> bool:
    """Whether two readings are one computation."""
    return (
        a.config == b.config
        and torch.equal(a.draft_to_target, b.draft_to_target)
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)
    )


def changes(old: Reading, new: Reading) -> dict[str, Any]:
    """Field -> new value of everything that differs."""
    found = {
        name: value
        for name, value in new.config
        if value != getattr(old.config, name) and name != "rope"
    }
    found |= {
        f"rope.{name}": value
        for name, value in new.config.rope
        if value != getattr(old.config.rope, name)
    }
    if not torch.equal(old.draft_to_target, new.draft_to_target):
        found["draft_to_target"] = f"{new.draft_to_target[:4].tolist()}..."[:-4] + ", ...]"
    return found


def _standing(field: str, provenance: Provenance) -> tuple[str, bool]:
    said = provenance.get(field)
    rows = DISPUTED[field]
    if said is None:
        return f"the drafter's own config, disputed: {rows}", True
    if said.origin is Origin.assumed:
        return f"assumed: {said.where}", False
    if said.where in {"argument", "overrides"}:
        return f"given by {said.where}", False
    return f"{said.origin}, disputed: {rows}", True


def _proposals(
    reading: Reading, facts: Facts, target_rope: Rope
) -> Iterator[tuple[str, str, Apply]]:
    config = reading.config
    yield from _boundaries(reading, facts)
    if config.boundaries:
        for kind in (FusionNorm.none, FusionNorm.per_layer, FusionNorm.concat):
            yield _field("fusion_norm", kind)
    for residual in Residual:
        yield _field("residual", residual)
    for feedback in Feedback:
        yield _field("feedback", feedback)
    if config.logits_from_raw or facts.dialect is Dialect.specforge:
        yield _field("logits_from_raw", not config.logits_from_raw)
    yield _field("double_hidden_norm", not config.double_hidden_norm)
    yield _field("draft_position_offset", 1 - config.draft_position_offset)
    yield from _rope(reading, facts, target_rope)
    yield from _vocabulary(reading)


def _field(field: str, value: Any) -> tuple[str, str, Apply]:
    return field, f"{field} {value}", lambda r: r.change(**{field: value})


def _boundaries(reading: Reading, facts: Facts) -> Iterator[tuple[str, str, Apply]]:
    own, n = reading.config.boundaries, facts.n_layers
    if not own:
        return
    shifts = {"-1": tuple(b - 1 for b in own), "+1": tuple(b + 1 for b in own)}
    if len(own) % 2:
        middle = len(own) // 2
        for step, text in ((1, "middle +1"), (-1, "middle -1")):
            shifts[text] = tuple(b + step * (i == middle) for i, b in enumerate(own))
    shifts["default"] = default_boundaries(n)
    seen = {own}
    for text, ids in shifts.items():
        inside = min(ids) >= 0 and max(ids) <= n and len(set(ids)) == len(own)
        if inside and list(ids) == sorted(ids) and ids not in seen:
            seen.add(ids)
            yield "boundaries", f"boundaries {text}: {ids}", _set_boundaries(ids)


def _set_boundaries(ids: tuple[int, ...]) -> Apply:
    return lambda r: r.change(boundaries=ids)


def _rope(reading: Reading, facts: Facts, target_rope: Rope) -> Iterator[tuple[str, str, Apply]]:
    rope = reading.config.rope
    written = None
    if facts.raw is not None:
        try:
            written = written_rope(reading.config, facts.raw)
        except CheckpointError:
            written = None  # the readers had to repair it, so no runtime reads it either
    bases = {10000.0: "everyone's default", target_rope.theta: "the target's"}
    if written is not None:
        bases[written.theta] = "the file's"
    for theta, whose in bases.items():
        if theta != rope.theta:
            yield "rope.theta", f"rope base {theta:g} ({whose})", _set_rope(theta=theta)
    if rope.rope_type != "default":
        yield "rope.rope_type", "rope unscaled", _set_rope(rope_type="default", parameters={})
    if written is not None and written.rope_type not in {"default", rope.rope_type}:
        block = {"rope_type": written.rope_type, "parameters": written.parameters}
        yield "rope.rope_type", f"rope block {written.rope_type} as written", _set_rope(**block)


def _set_rope(**fields: Any) -> Apply:
    return lambda r: r.change(rope=r.config.rope.model_copy(update=fields))


def _vocabulary(reading: Reading) -> Iterator[tuple[str, str, Apply]]:
    ids, limit = reading.draft_to_target, reading.config.vocab_size
    count = torch.arange(len(ids), device=ids.device)
    for text, other in (
        ("d2t as absolute ids", ids - count),
        ("d2t as offsets", ids + count),
    ):
        valid = int(other.min()) >= 0 and int(other.max()) < limit
        if valid and len(other.unique()) == len(other):
            yield "draft_to_target", text, _set_map(other)


def _set_map(ids: torch.Tensor) -> Apply:
    return lambda r: Reading(r.config, ids, r.tensors)
