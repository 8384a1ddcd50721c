"""Config and tensor shapes -> DrafterConfig, vocabulary map and every value's provenance.

Shapes beat the config where a trainer is known to write a wrong number; every other contradiction
is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from driftlab.config import DrafterConfig, Origin, Provenance, Rope, Sourced
from driftlab.errors import CheckpointError, ConfigError, ContractError, first_fault
from driftlab.models.checkpoints.boundaries import resolve_boundaries
from driftlab.models.checkpoints.dialects import (
    Dialect,
    recognise,
    refuse_other_eagle,
    refuse_other_families,
)
from driftlab.models.checkpoints.fields import Ledger
from driftlab.models.checkpoints.fusion import resolve_fusion, resolve_norms
from driftlab.models.checkpoints.layers import (
    count_layers,
    resolve_attention,
    resolve_mlp,
    resolve_windows,
)
from driftlab.models.checkpoints.read import CONFIG, Files
from driftlab.models.checkpoints.rope import resolve_rope, softmax_multiplier
from driftlab.models.checkpoints.shapes import check_shapes
from driftlab.models.checkpoints.sheet import Sheet, TargetLike
from driftlab.models.checkpoints.vocabulary import resolve_vocabulary

# Names in ``overrides`` that are no fields of DrafterConfig.
EXTRA_OVERRIDES = ("dialect", "boundary_convention")
ROPE_FIELDS = ("rope_type", "theta", "parameters", "interleaved", "max_position")


@dataclass
class Resolved:
    """A drafter's contract. ``config`` is None while ``pending`` says what the target must tell."""

    source: str
    dialect: Dialect
    config: DrafterConfig | None
    provenance: Provenance
    notes: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    pending: ContractError | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    draft_to_target: Tensor | None = field(default=None, repr=False)
    conflicts: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{self.source}: {self.dialect}"]
        rows += [
            f"  {name} = {s.value}  [{s.origin}: {s.where}]" for name, s in self.provenance.items()
        ]
        return "\n".join(rows + [f"  note: {note}" for note in self.notes])


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that nothing reads."""
    known = {*DrafterConfig.model_fields, *EXTRA_OVERRIDES, *(f"rope.{f}" for f in ROPE_FIELDS)}
    known -= {"rope", "boundaries"}  # rope.* one by one, boundaries= as an argument
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ConfigError(
            "unknown override",
            got=", ".join(unknown),
            remedy=f"Known: {', '.join(sorted(known))}; boundaries have their own argument.",
        )

    for name, value in overrides.items():
        owner, _, part = name.rpartition(".")
        field = (Rope if owner else DrafterConfig).model_fields.get(part)
        try:
            if field is not None:
                TypeAdapter(field.rebuild_annotation()).validate_python(value)
            elif name == "dialect":
                Dialect(value)
        except ValueError as error:
            shown = first_fault(error) if isinstance(error, ValidationError) else error
            raise ConfigError(
                f"the override of {name} is impossible", got=f"{value!r}: {shown}"
            ) from None


def check_boundaries(boundaries: Sequence[int]) -> None:
    """Raise ConfigError for an argument that is no list of indices."""
    listed = isinstance(boundaries, Sequence) and not isinstance(boundaries, str | bytes)
    if not listed or any(type(i) is not int for i in boundaries):
        raise ConfigError(
            "the argument boundaries is no list of integers",
            got=repr(boundaries),
            remedy="Give the residual streams that are captured, like (2, 5, 7).",
        )


def resolve(
    files: Files,
    *,
    target: TargetLike | None,
    boundaries: Sequence[int] | None,
    overrides: Mapping[str, Any],
    tokens: Sourced | None = None,
) -> Resolved:
    """Resolve the files of any public dialect.

    Raises
    ------
    CheckpointError: another kind of drafter, an unknown or missing tensor, a flag without
        its tensor or the reverse, a config that contradicts shapes, a broken map.
    ContractError: the drafter was made for another target.
    """
    where = str(files.folder / CONFIG)
    refuse_other_families(files.config, files.tensors)
    ledger = Ledger(overrides)
    for note in files.notes:
        ledger.note(note)
    ledger.put("source", files.source, Origin.read, "argument")
    if files.revision is not None:
        ledger.put("revision", files.revision, Origin.read, "hub snapshot")
    found = recognise(files.config, files.tensors)
    dialect = Dialect(ledger.take("dialect", found))
    if tokens is not None:
        ledger.take("tokenizer", tokens)
    return _run(Sheet(files, dialect, where, target, boundaries, ledger, tokens))


def _run(sheet: Sheet) -> Resolved:
    ledger, layer = sheet.ledger, sheet.layer
    if sheet.top.data.get("quantization_config"):
        raise CheckpointError(
            f"{sheet.where}: the drafter is quantised (quantization_config)",
            remedy="Dequantise it to float32, bfloat16 or float16 first.",
        )
    refuse_other_eagle(sheet.tensors)
    hidden = sheet.shape("norm.weight", 1)[0]
    sheet.sized("hidden_size", "norm.weight", hidden)
    ledger.derived("hidden_size", hidden, "norm.weight")
    layers = count_layers(sheet)
    mla = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in sheet.tensors
    heads = layer.positive("num_attention_heads")
    fields: dict[str, Any] = {"hidden_size": hidden, "num_layers": layers}
    fields |= resolve_attention(sheet, heads, hidden, mla)
    fields |= resolve_mlp(sheet)
    fields |= resolve_fusion(sheet, hidden)
    fields |= resolve_norms(sheet)
    windows = resolve_windows(sheet, layers)
    first = "sliding_attention" if windows and windows[0] else "full_attention"
    width = ledger["mla"].qk_rope_head_dim if mla else fields["head_dim"]
    rope = resolve_rope(layer, sheet.dialect, ledger, dim=width, mla=mla, first_layer=first)
    if mla:
        multiplier = softmax_multiplier(rope)
        if sheet.dialect is Dialect.automodel:
            multiplier = 1.0
        fields["mla"] = fields["mla"].model_copy(update={"softmax_multiplier": multiplier})
        ledger.derived("mla", fields["mla"], "low-rank projections and the rotary block")
    fields |= {"rope": rope, "windows": windows}
    fields |= _rest(sheet)
    vocab = resolve_vocabulary(sheet, fields)
    ids = resolve_boundaries(sheet, fields.pop("n_states"))
    config = None
    if ids is not None:
        fields |= {"boundaries": ids}
        fields |= {k: v for k, v in ledger.overrides.items() if k in DrafterConfig.model_fields}
        try:
            config = DrafterConfig(**fields)
        except ValidationError as error:
            raise CheckpointError(
                f"{sheet.where}: the resolved contract is impossible",
                got=first_fault(error),
            ) from None
    check_shapes(sheet, fields)
    ledger.put("notes", list(ledger.notes), Origin.derived, "the reader's remarks")
    return Resolved(
        source=sheet.files.source,
        dialect=sheet.dialect,
        config=config,
        provenance=ledger.provenance,
        notes=tuple(ledger.notes),
        shapes={n: tuple(t.shape) for n, t in sheet.files.tensors.items()},
        pending=sheet.pending,
        tensors=sheet.tensors,
        draft_to_target=vocab,
        conflicts=tuple(ledger.conflicts),
    )


def _rest(sheet: Sheet) -> dict[str, Any]:
    """Switches that the file never states, and the scale of the logits."""
    ledger = sheet.ledger
    if sheet.dialect is Dialect.modelopt_hf:
        low_rank = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in sheet.tensors
        sheet.shape("layers.0.input_layernorm.weight", 1)
        gains = sheet.tensors["layers.0.input_layernorm.weight"].float()
        ledger.note(
            "ModelOpt's HF trainer sends hidden_norm(input_layernorm(u)) into attention since "
            "2025-12-18, before then and in engines hidden_norm(u); the file does not say. "
            + ("For low-rank attention the latter" if low_rank else "The former")
            + f" was taken; the two part as the gains of input_layernorm do, here {gains.min():.3g}"
            f" to {gains.max():.3g}, spread {gains.std() / gains.mean().abs():.2f} of their mean"
        )
        where = "the trainer's low-rank layer is not established" if low_rank else "as trained"
        ledger.assumed("double_hidden_norm", not low_rank, f"not in the file; {where} (X4)")
    else:
        ledger.derived("double_hidden_norm", False, f"{sheet.dialect} norms once")
    ledger.derived("draft_position_offset", 0, "the standard positions")
    ledger.derived("window_moves", False, "as trained")
    scale = sheet.top.get("logit_scale", float)
    if scale is None:
        ledger.derived("logit_scale", 1.0, "logit_scale is absent")
    elif scale.value <= 0:
        raise CheckpointError(f"{scale.where} must be above 0", got=scale.value)
    else:
        ledger.take("logit_scale", scale)
    names = ("double_hidden_norm", "draft_position_offset", "window_moves", "logit_scale")
    return {name: ledger[name] for name in names}
