"""Rotary settings of a drafter's config -> the rotation that its trainer computed.

Bases stand at three places, the type has two spellings, blocks are nested by layer type, and
some trainers' rotary classes do not do what they read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from driftlab.config import Origin, Rope, Sourced
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.dialects import TRAITS, Dialect
from driftlab.models.checkpoints.fields import Fields, Ledger

# Types that transformers computes, with the parameters that each needs.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "proportional": (),
}
_OPTIONAL = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "factor",
)
_ANY_SIGN = {"mscale", "mscale_all_dim", "truncate"}
_ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "mrope": "default"}
_LAYER_TYPES = ("sliding_attention", "full_attention")
THETA = 10000.0


def resolve_rope(
    layer: Fields, dialect: Dialect, ledger: Ledger, *, dim: int, mla: bool, first_layer: str
) -> Rope:
    """Fill ``rope.*`` of the ledger and build the rope.

    Parameters
    ----------
    dim: rotated width: head_dim, or qk_rope_head_dim of low-rank attention.
    first_layer: the type of layer 0, which picks one block of several.

    Raises
    ------
    CheckpointError: an unknown type, a missing or non-numeric parameter.
    """
    block, where = _block(layer, ledger, first_layer, dialect)
    kind = _kind(block, where, ledger)
    theta = _theta(block, where, layer, dialect, ledger)
    parameters = _parameters(kind.value, block, where, layer, dialect, ledger)
    limit = layer.positive(
        "max_position_embeddings", default=2048, why="transformers' default for Llama"
    )
    written = block.get("rope_type", block.get("type"))
    kind, theta, parameters = _as_trained(
        dialect, written, kind, theta, parameters, limit.value, dim, ledger, mla
    )
    interleaved = layer.get("rope_interleave", bool) if mla else None
    ledger.take("rope.rope_type", kind)
    ledger.take("rope.theta", theta)
    ledger.put("rope.parameters", parameters, kind.origin, where)
    if interleaved is not None:
        ledger.take("rope.interleaved", interleaved)
    else:
        ledger.derived("rope.interleaved", mla, "low-rank attention" if mla else "half split")
    ledger.take("rope.max_position", limit)
    return Rope(
        rope_type=ledger["rope.rope_type"],
        theta=ledger["rope.theta"],
        parameters=ledger["rope.parameters"],
        interleaved=ledger["rope.interleaved"],
        max_position=ledger["rope.max_position"],
    )


def _block(
    layer: Fields, ledger: Ledger, first_layer: str, dialect: Dialect
) -> tuple[dict[str, Any], str]:
    """The one rotary block that counts, and its name."""
    blocks: list[tuple[dict[str, Any], str]] = []
    for name in ("rope_parameters", "rope_scaling"):
        block = dict(layer.child(name).data)
        nested = [key for key in _LAYER_TYPES if isinstance(block.get(key), Mapping)]
        if nested:
            # speculators flattens to the sliding block, whatever the layer is.
            wish = _LAYER_TYPES[0] if dialect is Dialect.speculators else first_layer
            key = wish if wish in nested else nested[0]
            if len(nested) > 1 and block[nested[0]] != block[nested[1]]:
                ledger.note(f"{layer.where}, {name}: {key} was taken of {', '.join(nested)}")
            block, name = dict(block[key]), f"{name}.{key}"
        if block:
            blocks.append((block, name))
    if not blocks:
        return {}, "no rotary block"
    if len(blocks) == 2 and _differ(blocks[0][0], blocks[1][0]):
        ledger.conflict(
            f"{layer.where}: {blocks[0][1]} and {blocks[1][1]} differ, {blocks[0][1]} was taken"
        )
    return blocks[0][0], f"{layer.where}, {blocks[0][1]}"


def _differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def plain(block: dict[str, Any]) -> dict[str, Any]:
        rest = {k: v for k, v in block.items() if k not in {"type", "rope_type", "rope_theta"}}
        return {**rest, "type": block.get("rope_type", block.get("type", "default"))}

    return plain(a) != plain(b)


def _kind(block: dict[str, Any], where: str, ledger: Ledger) -> Sourced:
    new, old = block.get("rope_type"), block.get("type")
    if new is not None and old is not None and _plain(new) != _plain(old):
        ledger.conflict(f"{where}: rope_type {new} and type {old} differ, {new} was taken")
    kind = new if new is not None else old
    if kind is None:
        # A base alone is the default rotation; anything else in the block needs a type.
        if set(block) - {"rope_theta", "partial_rotary_factor"}:
            raise CheckpointError(
                f"{where} has parameters and no rope_type", got=", ".join(sorted(block))
            )
        text = "rope_type is absent, the default rotation"
        return Sourced(value="default", origin=Origin.derived, where=text)
    known = _plain(kind)
    if not isinstance(known, str) or known not in NEEDED:
        raise CheckpointError(
            f"{where}: unknown rope_type",
            got=repr(kind),
            remedy=f"Known types: {', '.join([*NEEDED, *_ALIASES])}.",
        )
    if kind == "mrope":
        ledger.note(f"{where}: mrope is the default rotation on text, where all its rows agree")
    return Sourced(value=known, origin=Origin.read, where=where)


def _plain(kind: object) -> object:
    """A type under transformers' name."""
    return _ALIASES.get(kind, kind) if isinstance(kind, str) else kind


def _theta(
    block: dict[str, Any], where: str, layer: Fields, dialect: Dialect, ledger: Ledger
) -> Sourced:
    places = [
        (Fields(block, where), "rope_theta"),
        (layer, "rope_theta"),
        (layer.child("rope_scaling"), "rope_theta"),
    ]
    found = [v for fields, name in places if (v := fields.get(name, float)) is not None]
    if not found:
        return Sourced(
            value=THETA,
            origin=Origin.derived if dialect is Dialect.speculators else Origin.assumed,
            where="no rope_theta in the config, 10000 is the default everywhere",
        )
    if len({float(f.value) for f in found}) > 1:
        listed = ", ".join(f"{f.value} ({f.where})" for f in found)
        ledger.conflict(f"the config names several rotary bases: {listed}; the first was taken")
    if found[0].value <= 0:
        raise CheckpointError(f"{found[0].where} must be above 0", got=found[0].value)
    return found[0].model_copy(update={"value": float(found[0].value)})


def _parameters(
    kind: str, block: dict[str, Any], where: str, layer: Fields, dialect: Dialect, ledger: Ledger
) -> dict[str, Any]:
    block = dict(block)
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if layer.has(name):
            block.setdefault(name, layer.data[name])
    if kind == "yarn":
        block.setdefault(
            "original_max_position_embeddings", layer.data.get("max_position_embeddings")
        )
    absent = [name for name in NEEDED[kind] if block.get(name) is None]
    if absent:
        raise CheckpointError(f"{where}: {kind} needs {', '.join(absent)}")
    partial = block.get("partial_rotary_factor")
    if partial is not None and partial != 1:
        if kind == "default" or TRAITS[dialect].rotary == "own":
            ledger.note(
                f"{where}: partial_rotary_factor {partial} has no effect, the trainer's "
                f"{kind} rotation turns the whole head"
            )
            del block["partial_rotary_factor"]
    elif partial is not None:
        del block["partial_rotary_factor"]
    wanted = () if kind == "default" else (*NEEDED[kind], *_OPTIONAL)
    kept = {k: v for k, v in block.items() if k in wanted and v is not None}
    for name, value in kept.items():
        numbers = value if isinstance(value, list) else [value]
        switch = name == "truncate"
        if not numbers or any(
            not isinstance(n, int | float) or (isinstance(n, bool) and not switch) for n in numbers
        ):
            raise CheckpointError(f"{where}: {name} is no number", got=repr(value))
        # An integer of JSON may be larger than any float.
        if any(
            not abs(n) <= sys.float_info.max or (n <= 0 and name not in _ANY_SIGN) for n in numbers
        ):
            raise CheckpointError(f"{where}: {name} must be finite and above 0", got=repr(value))
    if kept.get("partial_rotary_factor", 1) > 1:
        raise CheckpointError(f"{where}: partial_rotary_factor is above 1")
    return kept


def yarn_magnitude(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 for factors up to 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_multiplier(rope: Rope) -> float:
    """Square of yarn's magnitude at ``mscale_all_dim``, which DeepSeek puts on the scores."""
    scale = rope.parameters.get("mscale_all_dim")
    if rope.rope_type != "yarn" or not scale:
        return 1.0
    return yarn_magnitude(rope.parameters["factor"], scale) ** 2


def _as_trained(
    dialect: Dialect,
    written: object,
    kind: Sourced,
    theta: Sourced,
    parameters: dict[str, Any],
    limit: int,
    dim: int,
    ledger: Ledger,
    mla: bool,
) -> tuple[Sourced, Sourced, dict[str, Any]]:
    """What the trainer's rotary class does with the block that it was given."""
    if ledger.overridden("rope.rope_type") or ledger.overridden("rope.parameters"):
        return kind, theta, parameters
    own = TRAITS[dialect].rotary == "own"
    baseless = {
        Dialect.safeailab: {"linear", "dynamic"},
        Dialect.torchspec_gqa: {"linear", "dynamic", "mrope"},
        Dialect.torchspec_mla: {"linear", "dynamic"},
    }
    if written in baseless.get(dialect, set()):
        if theta.value != THETA:
            ledger.note(f"{dialect} gives its {written} rotation no base: 10000 it is")
        theta = Sourced(value=THETA, origin=Origin.derived, where=f"{dialect}'s {written} rotation")
    elif theta.value != THETA and (
        dialect is Dialect.safeailab or (dialect is Dialect.angelslim and written != "mrope")
    ):
        theta = theta.model_copy(
            update={"origin": Origin.assumed, "where": f"{theta.where}; its trainer uses 10000"}
        )
        ledger.note(
            f"{dialect} trains with base 10000 and drafts with {theta.value:g}, which was taken"
        )
    elif dialect is Dialect.torchspec_mla and kind.value == "yarn" and theta.value != THETA:
        theta = theta.model_copy(update={"origin": Origin.assumed})
        ledger.note(
            f"TorchSpec trained low-rank yarn drafters with base 10000 until 2026-08-09; "
            f"{theta.value:g} of the config was taken"
        )
    modelopt = dialect in {Dialect.modelopt_hf, Dialect.modelopt_megatron}
    swapped = {"factor": 32.0, "original_max_position_embeddings": 2048}
    if modelopt and kind.value == "yarn" and swapped.items() <= parameters.items():
        ledger.note(
            "ModelOpt's export writes yarn x32 of 2048 over the default rotation it trained "
            "with; the default was taken, engines compute yarn"
        )
        return (
            Sourced(value="default", origin=Origin.assumed, where="ModelOpt's export block"),
            theta,
            {},
        )
    if dialect is Dialect.automodel and mla and kind.value == "yarn":
        original = parameters["original_max_position_embeddings"]
        if limit <= original:
            ledger.note("Automodel applies yarn only past the original length; default was taken")
            where = f"Automodel's low-rank yarn within {original} positions"
            return Sourced(value="default", origin=Origin.derived, where=where), theta, {}
    unread = {"attention_factor", "truncate"} & parameters.keys()
    if kind.value == "yarn" and own and unread:
        ledger.note(f"{dialect}'s yarn rotation does not read {', '.join(sorted(unread))}")
        parameters = {k: v for k, v in parameters.items() if k not in unread}
    if kind.value == "yarn" and (own or mla) and {"mscale", "mscale_all_dim"} & set(parameters):
        parameters = dict(parameters)
        factor = parameters["factor"]
        ratio = yarn_magnitude(factor, parameters.get("mscale", 1.0))
        ratio /= yarn_magnitude(factor, parameters.get("mscale_all_dim", 0.0))
        parameters.setdefault("attention_factor", ratio)
    tabled = {Dialect.specforge, Dialect.torchspec_gqa, Dialect.torchspec_mla}
    if kind.value == "dynamic" and dialect in tabled:
        # Their table is built once, 20 positions past the limit, and so is always scaled.
        factor, length = parameters["factor"], limit + 20
        stretch = factor * length / limit - (factor - 1)
        base = theta.value * stretch ** (dim / (dim - 2))
        ledger.note(
            f"{dialect} builds its dynamic table for {length} positions: base {base:.6g}, "
            f"right for texts up to that length"
        )
        where = f"{dialect}'s dynamic table of {length} positions"
        return (
            Sourced(value="default", origin=Origin.derived, where=where),
            Sourced(value=base, origin=theta.origin, where=where),
            {},
        )
    return kind, theta, parameters
