"""Config and tensor shapes -> DrafterConfig, vocabulary map and every value's provenance.

The algorithm of section 5.3 of the checkpoint reference. Shapes beat the config where a
trainer is known to write a wrong number; every other contradiction is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from driftlab.config import (
    MLA,
    DrafterConfig,
    Feedback,
    FusionNorm,
    Origin,
    Provenance,
    Residual,
    Sourced,
)
from driftlab.errors import CheckpointError, ConfigError, ContractError
from driftlab.models.checkpoints.dialects import (
    EXPORT_KEY,
    TRAITS,
    Dialect,
    canonical_names,
    recognise,
    refuse_other_eagle,
    refuse_other_families,
)
from driftlab.models.checkpoints.fields import Fields, Ledger
from driftlab.models.checkpoints.read import CONFIG, Files
from driftlab.models.checkpoints.rope import resolve_rope, softmax_multiplier

IDS = "eagle_aux_hidden_state_layer_ids"
# Names in ``overrides`` that are no fields of DrafterConfig.
EXTRA_OVERRIDES = ("dialect", "boundary_convention")
ROPE_FIELDS = ("rope_type", "theta", "parameters", "interleaved", "max_position")


class TargetLike(Protocol):
    """What a target must tell to resolve a drafter against it."""

    hidden_size: int
    n_layers: int
    vocab_size: int

    @property
    def embedding_weight(self) -> Tensor: ...

    @property
    def head_weight(self) -> Tensor: ...


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


def resolve(
    files: Files,
    *,
    target: TargetLike | None,
    boundaries: Sequence[int] | None,
    overrides: Mapping[str, Any],
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
    return _Resolver(files, dialect, where, target, boundaries, ledger).run()


class _Resolver:
    def __init__(
        self,
        files: Files,
        dialect: Dialect,
        where: str,
        target: TargetLike | None,
        boundaries: Sequence[int] | None,
        ledger: Ledger,
    ) -> None:
        self.files, self.dialect, self.where = files, dialect, where
        self.target, self.given, self.ledger = target, boundaries, ledger
        self.traits = TRAITS[dialect]
        self.top = Fields(files.config, where)
        self.eagle = self.top.child("eagle_config")
        self.layer = self._layer_fields()
        self.tensors = canonical_names(files.tensors, self.layer.data)
        self.pending: ContractError | None = None

    # Small helpers ------------------------------------------------------------------------

    def shape(self, name: str, dims: int = 2) -> tuple[int, ...]:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.files.folder / self.files.weights}: tensor {name} is missing",
                got=f"{len(self.tensors)} tensors: {', '.join(sorted(self.tensors)[:6])}, ...",
                remedy="The file is no whole EAGLE-3 drafter; fetch or write it again.",
            )
        if tensor.dim() != dims:
            raise CheckpointError(
                f"tensor {name} has {tensor.dim()} dimensions, not {dims}",
                got=tuple(tensor.shape),
            )
        return tuple(tensor.shape)

    def lie(self, name: str, said: object, tensor: str, shown: object) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {name} is {said}, but {tensor} has {tuple(self.tensors[tensor].shape)}",
            got=f"{shown} from the tensor",
            remedy="Config and weights do not belong together; correct the config.",
        )

    def sized(self, name: str, tensor: str, value: int) -> int:
        """A size that a tensor shows and the config, if it says it, must repeat."""
        said = self.layer.get(name, int)
        if said is not None and said.origin is Origin.read and said.value != value:
            raise self.lie(name, said.value, tensor, value)
        return value

    def flag(self, *names: str, eagle_first: bool = False) -> Sourced | None:
        """A boolean that may stand at top level or inside ``eagle_config``."""
        places = [self.top, self.eagle]
        if self.dialect is Dialect.speculators:
            places.append(self.layer)
        if eagle_first:
            places[:2] = [self.eagle, self.top]
        found = [v for fields in places for n in names if (v := fields.get(n, bool)) is not None]
        if len({f.value for f in found}) > 1:
            listed = ", ".join(f"{f.value} ({f.where})" for f in found)
            self.ledger.conflict(f"{names[0]} is said twice: {listed}; the first was taken")
        return found[0] if found else None

    # Parts --------------------------------------------------------------------------------

    def _layer_fields(self) -> Fields:
        """Where the sizes of the layer stand; speculators nests a diff to a class's defaults."""
        if self.dialect is not Dialect.speculators:
            return self.top
        nested = self.top.child("transformer_layer_config")
        kind = nested.get("model_type", str)
        if kind is None:
            self.ledger.note(
                f"{nested.where}: model_type is absent, speculators reads qwen3 (vLLM reads llama)"
            )
        name = kind.value if kind else "qwen3"
        self.ledger.put(
            "model_type",
            name,
            Origin.read if kind else Origin.assumed,
            kind.where if kind else "model_type is absent, speculators' default",
        )
        if name not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{nested.where}: model_type is unknown to transformers", got=name
            )
        data = deepcopy(dict(nested.data))  # transformers edits what it is given
        for name_of_other in ("rope_parameters", "rope_scaling", "layer_types", "model_type"):
            data.pop(name_of_other, None)
        try:
            defaults = CONFIG_MAPPING[name](**data).to_dict()
        except Exception as error:
            raise CheckpointError(
                f"{nested.where} is no {name} config", got=str(error).strip().splitlines()[-1]
            ) from None
        defaults.pop("rope_parameters", None)
        return Fields(
            nested.data, nested.where, defaults=defaults, default_of=f"transformers' {name}"
        )

    def run(self) -> Resolved:
        ledger, layer = self.ledger, self.layer
        if self.top.has("quantization_config"):
            raise CheckpointError(
                f"{self.where}: the drafter is quantised (quantization_config)",
                remedy="Dequantise it to float32, bfloat16 or float16 first.",
            )
        hidden = self.shape("norm.weight", 1)[0]
        refuse_other_eagle(self.tensors, hidden)
        self.sized("hidden_size", "norm.weight", hidden)
        ledger.derived("hidden_size", hidden, "norm.weight")
        layers = self._layers()
        mla = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in self.tensors
        heads = layer.positive("num_attention_heads")
        fields: dict[str, Any] = {"hidden_size": hidden, "num_layers": layers}
        fields |= self._attention(heads, hidden, mla)
        fields |= self._mlp(hidden)
        fields |= self._fusion(hidden)
        fields |= self._norms()
        windows = self._windows(layers)
        first = "sliding_attention" if windows and windows[0] else "full_attention"
        width = ledger["mla"].qk_rope_head_dim if mla else fields["head_dim"]
        rope = resolve_rope(layer, self.dialect, ledger, dim=width, mla=mla, first_layer=first)
        if mla:
            multiplier = softmax_multiplier(rope)
            if self.dialect is Dialect.automodel:
                multiplier = 1.0
            fields["mla"] = fields["mla"].model_copy(update={"softmax_multiplier": multiplier})
            ledger.derived("mla", fields["mla"], "low-rank projections and the rotary block")
        fields |= {"rope": rope, "windows": windows}
        fields |= self._rest()
        vocab = self._vocabulary(fields)
        ids = self._boundaries(fields.pop("n_states"), hidden)
        config = None
        if ids is not None:
            fields |= {"boundaries": ids}
            fields |= {k: v for k, v in ledger.overrides.items() if k in DrafterConfig.model_fields}
            try:
                config = DrafterConfig(**fields)
            except ValidationError as error:
                first_fault = error.errors()[0]
                raise CheckpointError(
                    f"{self.where}: the resolved contract is impossible",
                    got=f"{'.'.join(map(str, first_fault['loc']))} {first_fault['msg']}".strip(),
                ) from None
        self._check_shapes(fields)
        ledger.put("notes", list(ledger.notes), Origin.derived, "the reader's remarks")
        return Resolved(
            source=self.files.source,
            dialect=self.dialect,
            config=config,
            provenance=ledger.provenance,
            notes=tuple(ledger.notes),
            shapes={n: tuple(t.shape) for n, t in self.files.tensors.items()},
            pending=self.pending,
            tensors=self.tensors,
            draft_to_target=vocab,
            conflicts=tuple(ledger.conflicts),
        )

    def _layers(self) -> int:
        parts = [n.split(".") for n in self.tensors if n.startswith("layers.")]
        indices = {int(p[1]) for p in parts if len(p) > 2 and p[1].isdigit()}
        if indices != set(range(len(indices))) or not indices:
            raise CheckpointError(
                "the drafter's layers are not numbered from 0 on",
                got=f"layers {sorted(indices)}" if indices else "no layers.* or midlayer.* tensor",
            )
        count = len(indices)
        said = self.layer.get("num_hidden_layers", int)
        if said is not None and said.origin is Origin.read and said.value != count:
            text = f"{said.where} is {said.value}, the file holds {count} layer(s)"
            if self.dialect is Dialect.automodel:
                self.ledger.note(f"{text}; Automodel saves the target's number")
            else:
                self.ledger.conflict(f"{text}, which were taken")
        return self.ledger.derived("num_layers", count, "tensor names")

    def _attention(self, heads: Sourced, hidden: int, mla: bool) -> dict[str, Any]:
        ledger, layer = self.ledger, self.layer
        ledger.take("num_heads", heads)
        bias = self._biases(mla)
        gate = "layers.0.self_attn.g_proj.weight" in self.tensors
        ledger.derived("attention_gate", gate, f"g_proj {'there' if gate else 'absent'}")
        common = {"num_heads": heads.value, "attention_gate": gate, **bias}
        if mla:
            return common | self._low_rank(heads.value)
        groups = layer.get("num_key_value_heads", int) or Sourced(
            value=heads.value,
            origin=Origin.derived,
            where="num_key_value_heads is absent, one per head",
        )
        rows = self.shape("layers.0.self_attn.q_proj.weight")[0]
        size, rest = divmod(rows, heads.value)
        said = layer.get("head_dim", int)
        if said is not None and said.origin is Origin.read:
            if said.value * heads.value != rows:
                raise self.lie(
                    "num_attention_heads x head_dim",
                    f"{heads.value} x {said.value}",
                    "layers.0.self_attn.q_proj.weight",
                    f"{rows} rows",
                )
            ledger.take("head_dim", said)
        elif rest:
            raise self.lie(
                "num_attention_heads",
                heads.value,
                "layers.0.self_attn.q_proj.weight",
                f"{rows} rows",
            )
        else:
            if size * heads.value != hidden:
                ledger.note(
                    f"head_dim is absent; {rows} rows of q_proj for {heads.value} heads give {size}"
                )
            ledger.derived("head_dim", size, "q_proj rows over num_attention_heads")
        if (
            groups.value <= 0
            or groups.value * size != self.shape("layers.0.self_attn.k_proj.weight")[0]
        ):
            raise self.lie(
                "num_key_value_heads x head_dim",
                f"{groups.value} x {size}",
                "layers.0.self_attn.k_proj.weight",
                f"{self.shape('layers.0.self_attn.k_proj.weight')[0]} rows",
            )
        ledger.take("num_kv_heads", groups)
        normed = self._qk_norm()
        return common | {"num_kv_heads": groups.value, "head_dim": size, "qk_norm": normed}

    def _low_rank(self, heads: int) -> dict[str, Any]:
        layer, ledger = self.layer, self.ledger
        nope = layer.positive("qk_nope_head_dim").value
        rope = layer.positive("qk_rope_head_dim").value
        value = layer.positive("v_head_dim").value
        rank = layer.positive("kv_lora_rank").value
        stem = "layers.0.self_attn."
        down = f"{stem}kv_a_proj_with_mqa.weight"
        if self.shape(down)[0] != rank + rope:
            raise self.lie("kv_lora_rank + qk_rope_head_dim", f"{rank} + {rope}", down, "rows")
        up = f"{stem}kv_b_proj.weight"
        if self.shape(up) != (heads * (nope + value), rank):
            raise self.lie(
                "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
                f"{heads} x ({nope} + {value})",
                up,
                "rows",
            )
        q_rank = None
        if f"{stem}q_a_proj.weight" in self.tensors:
            q_rank = self.shape(f"{stem}q_a_proj.weight")[0]
            said = layer.get("q_lora_rank", int)
            if said is not None and said.value != q_rank:
                raise self.lie("q_lora_rank", said.value, f"{stem}q_a_proj.weight", q_rank)
        mla = MLA(
            q_lora_rank=q_rank,
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=value,
        )
        ledger.derived("mla", mla, "low-rank projections")
        ledger.derived("num_kv_heads", heads, "low-rank attention has one per head")
        ledger.derived("head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        ledger.derived("qk_norm", False, "low-rank attention norms its latents")
        return {"mla": mla, "num_kv_heads": heads, "head_dim": nope + rope, "qk_norm": False}

    def _biases(self, mla: bool) -> dict[str, bool]:
        """Presence of each bias, the same in every layer, against ``attention_bias``."""
        n = self.ledger["num_layers"]
        inputs = ("q_a_proj", "kv_a_proj_with_mqa") if mla else ("q_proj", "k_proj", "v_proj")
        groups = {
            "qkv_bias": tuple(f"self_attn.{stem}" for stem in inputs),
            "out_bias": ("self_attn.o_proj",),
            "mlp_bias": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        }
        found: dict[str, bool] = {}
        for name, stems in groups.items():
            owners = [
                f"layers.{i}.{stem}"
                for i in range(n)
                for stem in stems
                if f"layers.{i}.{stem}.weight" in self.tensors
            ]
            present = [f"{owner}.bias" in self.tensors for owner in owners]
            if any(present) and not all(present):
                lacking = [f"{o}.bias" for o, p in zip(owners, present, strict=True) if not p]
                raise CheckpointError(
                    f"{name}: some of its tensors are missing", got=", ".join(lacking)
                )
            found[name] = any(present)
            self.ledger.derived(name, found[name], f"bias tensors {_there(any(present))}")
        found["fc_bias"] = self.ledger.derived(
            "fc_bias", "fc.bias" in self.tensors, f"fc.bias {_there('fc.bias' in self.tensors)}"
        )
        for flag, name in (("attention_bias", "qkv_bias"), ("mlp_bias", "mlp_bias")):
            said = self.layer.get(flag, bool)
            if said is None or said.origin is not Origin.read or self.ledger.overridden(name):
                continue
            either = found[name] or (flag == "attention_bias" and found["out_bias"])
            if said.value != either:
                raise CheckpointError(
                    f"{said.where} is {said.value}, but its bias tensors are {_there(either)}",
                    remedy=f"Correct the config, or override {name}.",
                )
        return found

    def _qk_norm(self) -> bool:
        names = [
            f"layers.{i}.self_attn.{stem}_norm.weight"
            for i in range(self.ledger["num_layers"])
            for stem in "qk"
        ]
        present = [name in self.tensors for name in names]
        if any(present) != all(present):
            lacking = [n for n, p in zip(names, present, strict=True) if not p]
            raise CheckpointError("some QK norms are missing", got=", ".join(lacking))
        if self.dialect is Dialect.speculators and not self.ledger.overridden("qk_norm"):
            kind = self.ledger["model_type"]
            if kind.startswith("qwen3") != all(present) and kind in {"llama", "qwen3"}:
                raise CheckpointError(
                    f"{self.layer.where}: model_type is {kind}, but QK norms are "
                    f"{_there(all(present))}",
                    got=", ".join(names),
                    remedy="Correct model_type, or override qk_norm.",
                )
        return self.ledger.derived("qk_norm", all(present), f"QK norms {_there(all(present))}")

    def _mlp(self, hidden: int) -> dict[str, Any]:
        gate = "layers.0.mlp.gate_proj.weight"
        size = self.sized("intermediate_size", gate, self.shape(gate)[0])
        self.ledger.derived("intermediate_size", size, gate)
        act = self.layer.get("hidden_act", str)
        if act is None:
            self.ledger.assumed("hidden_act", "silu", "hidden_act is absent")
        else:
            self.ledger.take("hidden_act", act)
        eps = self.layer.get("rms_norm_eps", float)
        if eps is None:
            self.ledger.assumed("norm_eps", 1e-6, "rms_norm_eps is absent, transformers' default")
        elif eps.value <= 0:
            raise CheckpointError(f"{eps.where} must be above 0", got=eps.value)
        else:
            self.ledger.take("norm_eps", eps)
        return {
            "intermediate_size": size,
            "hidden_act": self.ledger["hidden_act"],
            "norm_eps": self.ledger["norm_eps"],
        }

    def _fusion(self, hidden: int) -> dict[str, Any]:
        """Number of captured states and the target's width, from fc."""
        ledger = self.ledger
        use = self.flag("use_aux_hidden_state")
        has_fc = "fc.weight" in self.tensors
        if use is not None and use.value != has_fc:
            raise CheckpointError(
                f"{use.where} is {use.value}, but fc.weight is {_there(has_fc)}",
                remedy="Config and weights do not belong together.",
            )
        if not has_fc:
            if use is None:
                self.shape("fc.weight")  # raises: an EAGLE-3 drafter without fc says so
            width = self._target_width(hidden)
            if width not in (None, hidden):
                raise ContractError(
                    f"a drafter without fc reads the target's state of width {hidden}",
                    got=f"target width {width}",
                )
            ledger.derived("target_hidden_size", hidden, "no fc: the target's own width")
            return {"target_hidden_size": hidden, "n_states": 0}
        wide = self.shape("fc.weight")[1]
        width = self._target_width(hidden)
        counts = self._counts()
        if width is None:
            width = self._guess_width(wide, hidden, counts)
        states, rest = divmod(wide, width)
        if rest:
            raise CheckpointError(
                f"fc expects {wide} input features, no multiple of the target's width",
                got=f"{width} ({ledger.provenance['target_hidden_size'].where})",
                remedy=f"If it captures 3 states, the target's width is {wide / 3:g}; "
                "state target_hidden_size in the config.",
            )
        for count, place in counts:
            if count != states:
                raise CheckpointError(
                    f"fc expects {wide} = {states} x {width}, but {place} names {count} state(s)",
                    got=f"fc.weight {self.shape('fc.weight')}",
                    remedy="Correct the config; the weights decide.",
                )
        return {"target_hidden_size": width, "n_states": states}

    def _target_width(self, hidden: int) -> int | None:
        said = self.top.get("target_hidden_size", int)
        has = self.target.hidden_size if self.target is not None else None
        if said is not None:
            if has is not None and said.value != has:
                raise ContractError(
                    f"the drafter was made for a target of width {said.value} ({said.where})",
                    got=f"a target of width {has}",
                    remedy="Give the drafter's own target.",
                )
            if said.value <= 0:
                raise CheckpointError(f"{said.where} must be above 0", got=said.value)
            return self.ledger.take("target_hidden_size", said)
        if has is not None:
            return self.ledger.derived("target_hidden_size", has, "the target")
        return None

    def _counts(self) -> list[tuple[int, str]]:
        """Every statement of the config on how many states are captured."""
        found = []
        for fields, name in (
            (self.top, "num_aux_hidden_states"),
            (self.top, "num_aux_layers"),
            (self.eagle, "num_aux_hidden_states"),
        ):
            said = fields.get(name, int)
            if said is not None:
                found.append((said.value, said.where))
        for fields in (self.top, self.eagle):
            ids = self._ids(fields)
            if ids is not None:
                found.append((len(set(ids)), f"{fields.where}, {IDS}"))
        norms = {n for n in self.tensors if n.startswith("fc_norm.")}
        if norms:
            found.append((len(norms), "the number of fc_norm tensors"))
        if self.given is not None:
            found.append((len(self.given), "the argument boundaries"))
        return found

    def _guess_width(self, wide: int, hidden: int, counts: list[tuple[int, str]]) -> int:
        for count, place in counts:
            if count > 0 and wide % count == 0:
                return self.ledger.derived(
                    "target_hidden_size", wide // count, f"fc's {wide} inputs over {place}"
                )
        if wide % hidden == 0:
            return self.ledger.assumed(
                "target_hidden_size", hidden, "target_hidden_size is absent, the drafter's width"
            )
        if wide % 3 == 0:
            self.ledger.note(
                f"fc expects {wide} = 3 x {wide // 3}, the drafter's own width is {hidden}"
            )
            return self.ledger.assumed(
                "target_hidden_size", wide // 3, f"a third of fc's {wide} inputs"
            )
        raise CheckpointError(
            f"fc expects {wide} input features, which no number of states explains",
            got=f"drafter width {hidden}, no target_hidden_size",
            remedy="State target_hidden_size in the config, or give the target.",
        )

    def _norms(self) -> dict[str, Any]:
        """Fusion norm, residual and feedback: tensors and flags must agree."""
        per_layer = any(n.startswith("fc_norm.") for n in self.tensors)
        concat = "input_norm.weight" in self.tensors
        flags = {
            "fc_norm": (self.flag("fc_norm", "use_aux_norm"), per_layer, "fc_norm.*.weight"),
            "norm_before_fc": (
                self.flag("norm_before_fc", eagle_first=True),
                concat,
                "input_norm.weight",
            ),
        }
        for name, (said, present, tensor) in flags.items():
            wanted = said.value if said is not None else False
            if wanted != present and not self.ledger.overridden("fusion_norm"):
                place = said.where if said is not None else f"{self.where}, {name} (absent)"
                raise CheckpointError(
                    f"{place} is {'on' if wanted else 'off'}, but {tensor} is {_there(present)}",
                    remedy=f"Set {name} as the drafter was trained, or override fusion_norm.",
                )
        kind = {
            (False, False): FusionNorm.none,
            (True, False): FusionNorm.per_layer,
            (False, True): FusionNorm.concat,
            (True, True): FusionNorm.concat_per_layer,
        }[per_layer, concat]
        if kind is FusionNorm.concat_per_layer:
            self.ledger.note("both fusion norms are there: concat first, then per layer, as vLLM")
        self.ledger.derived("fusion_norm", kind, "norm tensors, and flags that agree")
        out: dict[str, Any] = {"fusion_norm": kind}
        out["residual"] = self._residual()
        out["feedback"], out["logits_from_raw"] = self._feedback()
        return out

    def _residual(self) -> Residual:
        said = self.flag("norm_before_residual")
        if said is None:
            if self.dialect is Dialect.speculators:
                self.ledger.note(
                    "norm_before_residual is absent: off as speculators' class, vLLM turns it on"
                )
                return self.ledger.assumed("residual", Residual.raw, "norm_before_residual absent")
            return self.ledger.derived(
                "residual", Residual.raw, f"norm_before_residual is absent, {self.dialect}"
            )
        wish = Residual.normed if said.value else Residual.raw
        if said.value and not self.traits.residual_flag:
            self.ledger.note(f"{said.where} is on, but {self.dialect} trains without it")
            return self.ledger.assumed(
                "residual", Residual.raw, f"{self.dialect} does not know norm_before_residual"
            )
        modelopt = self.dialect in {Dialect.modelopt_hf, Dialect.modelopt_megatron}
        origin = Origin.assumed if said.value and modelopt else Origin.read
        if origin is Origin.assumed:
            self.ledger.note(
                f"{said.where} is on; ModelOpt's templates say so of raw residuals too"
            )
        return self.ledger.put("residual", wish, origin, said.where)

    def _feedback(self) -> tuple[Feedback, bool]:
        ledger, rule = self.ledger, self.traits.norm_output
        said = self.flag("norm_output", "return_hidden_post_norm")
        guessed = ledger.provenance["dialect"].origin is Origin.assumed
        if rule == "head":
            raw_head = said is not None and not said.value
            origin = Origin.derived if said is None else Origin.assumed
            if said is not None:
                ledger.note(
                    f"{said.where} is {said.value}: SpecForge before #879 feeds back the raw state "
                    "with either, and reads the raw state in its head when off; engines feed back "
                    "the normed state when on"
                )
            ledger.put("logits_from_raw", raw_head, origin, "SpecForge's norm_output")
            feedback = ledger.put(
                "feedback", Feedback.pre_norm, origin, "SpecForge before #879 never norms it"
            )
            return feedback, ledger["logits_from_raw"]
        ledger.derived("logits_from_raw", False, f"{self.dialect} reads the normed state")
        if said is None:
            feedback = ledger.derived(
                "feedback", Feedback.pre_norm, f"norm_output is absent, {self.dialect}"
            )
        elif rule == "no" and not said.where.endswith("return_hidden_post_norm"):
            if said.value:
                ledger.note(f"{said.where} is on, but {self.dialect} trains without it")
            feedback = ledger.put(
                "feedback",
                Feedback.pre_norm,
                Origin.assumed if said.value else Origin.read,
                f"{self.dialect} does not know norm_output",
            )
        else:
            if said.value and guessed:
                ledger.note(
                    f"{said.where} is on: the normed state is fed back, unless SpecForge before "
                    "#879 wrote the file"
                )
            feedback = ledger.put(
                "feedback",
                Feedback.post_norm if said.value else Feedback.pre_norm,
                Origin.assumed if guessed else Origin.read,
                said.where,
            )
        return feedback, ledger["logits_from_raw"]

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        ledger = self.ledger
        fields = self.layer
        types = fields.data.get("layer_types") or fields.defaults.get("layer_types") or []
        if not isinstance(types, list) or any(not isinstance(t, str) for t in types):
            raise CheckpointError(f"{fields.where}: layer_types is no list of names", got=types)
        size = fields.get("sliding_window", int)
        sliding = [t == "sliding_attention" for t in types[:layers]]
        if not any(sliding) or size is None:
            return ledger.derived("windows", (), "no sliding_attention layer with a window")
        if len(types) < layers:
            raise CheckpointError(
                f"{fields.where}: layer_types names {len(types)} of {layers} layers"
            )
        if not self.traits.windows:
            ledger.note(
                f"{fields.where}: sliding_window {size.value} is ignored, {self.dialect} trains "
                "with full attention"
            )
            return ledger.assumed("windows", (), f"{self.dialect} has no sliding windows")
        if size.value <= 0:
            raise CheckpointError(f"{size.where} must be above 0", got=size.value)
        windows = tuple(size.value if s else None for s in sliding)
        ledger.note("windows count from the anchor, as trained; engines count from the draft")
        return ledger.put("windows", windows, size.origin, f"layer_types, {size.where}")

    def _rest(self) -> dict[str, Any]:
        """Switches that the file never states, and the scale of the logits."""
        ledger = self.ledger
        if self.dialect is Dialect.modelopt_hf:
            ledger.note(
                "ModelOpt's HF trainer sends hidden_norm(input_layernorm(u)) into attention since "
                "2025-12-18, engines hidden_norm(u); the file does not say, the latter was taken"
            )
            ledger.assumed("double_hidden_norm", False, "not in the file; as engines compute it")
        else:
            ledger.derived("double_hidden_norm", False, f"{self.dialect} norms once")
        ledger.derived("draft_position_offset", 0, "the standard positions")
        ledger.derived("window_moves", False, "as trained")
        scale = self.top.get("logit_scale", float)
        if scale is None:
            ledger.derived("logit_scale", 1.0, "logit_scale is absent")
        else:
            ledger.take("logit_scale", scale)
        names = ("double_hidden_norm", "draft_position_offset", "window_moves", "logit_scale")
        return {name: ledger[name] for name in names}

    # Vocabulary ---------------------------------------------------------------------------

    def _vocabulary(self, fields: dict[str, Any]) -> Tensor | None:
        """Sizes and the map of absolute ids; None when the head itself is the target's."""
        ledger, target = self.ledger, self.target
        said = self.layer.get("vocab_size", int)
        if said is not None and said.origin is not Origin.read:
            said = None
        rows = (
            self.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in self.tensors else None
        )
        t2d = self._mask()
        claims = [
            (rows, "embed_tokens.weight"),
            (said.value if said else None, said.where if said else ""),
            (len(t2d) if t2d is not None else None, "t2d"),
        ]
        stated = [(value, place) for value, place in claims if value is not None]
        if not stated and target is None:
            raise CheckpointError(f"{self.where}: vocab_size is missing")
        own, own_where = stated[0] if stated else (target.vocab_size, "the target")  # type: ignore[union-attr]
        for value, place in stated[1:]:
            if value != own:
                if not only_padding(value, own):
                    raise CheckpointError(
                        f"{place} has {value} tokens, {own_where} has {own}",
                        remedy="Config and weights do not belong together.",
                    )
                ledger.conflict(f"{place} has {value} tokens, {own_where} has {own}: padding")
        used = own
        if target is not None and target.vocab_size != own:
            if not only_padding(target.vocab_size, own):
                raise ContractError(
                    f"the drafter was made for {own} tokens ({own_where})",
                    got=f"a target of {target.vocab_size} tokens",
                    remedy="Give the drafter's own target.",
                )
            ledger.note(f"target of {target.vocab_size} tokens, drafter of {own}: padding only")
            if rows is None:
                used, own_where = target.vocab_size, "the target, whose embeddings are used"
        ledger.derived("vocab_size", used, own_where)
        embed = "file" if rows is not None else "target"
        ledger.derived("embed_tokens", embed, f"embed_tokens.weight {_there(rows is not None)}")
        kept = self._draft_size(own)
        fields |= {"vocab_size": used, "draft_vocab_size": kept}
        return self._map(kept, own, used, t2d)

    def _mask(self) -> Tensor | None:
        t2d = self.tensors.get("t2d")
        if t2d is None:
            return None
        if t2d.dim() != 1 or t2d.is_floating_point():
            raise CheckpointError("t2d is no vector of booleans", got=f"{t2d.dtype} {t2d.shape}")
        return t2d.bool()

    def _draft_size(self, vocab: int) -> int:
        ledger = self.ledger
        d2t = self.tensors.get("d2t")
        if "lm_head.weight" in self.tensors:
            size, place = self.shape("lm_head.weight")[0], "lm_head.weight"
            ledger.derived("lm_head", "file", "lm_head.weight there")
        else:
            tied = self.layer.get("tie_word_embeddings", bool)
            own = tied is not None and tied.value and "embed_tokens.weight" in self.tensors
            size, place = (len(d2t), "d2t") if d2t is not None else (vocab, "the vocabulary")
            why = (
                f"lm_head.weight absent, tie_word_embeddings {'on' if own else 'off or no matter'}"
            )
            ledger.derived("lm_head", "embed_tokens" if own else "target", why)
            ledger.note(
                f"lm_head.weight is absent: the head is the "
                f"{'drafter’s own embedding' if own else 'target’s head'}"
            )
        said = self.top.get("draft_vocab_size", int)
        if said is not None and said.value != size:
            ledger.conflict(f"{said.where} is {said.value}, {place} has {size}, which was taken")
        if not 0 < size <= vocab:
            raise CheckpointError(
                f"{place} has {size} draft ids for a vocabulary of {vocab}",
                remedy="Config and weights do not belong together.",
            )
        return ledger.derived("draft_vocab_size", size, place)

    def _map(self, kept: int, own: int, used: int, t2d: Tensor | None) -> Tensor:
        """Absolute target ids of the draft ids (section 4.3)."""
        ledger = self.ledger
        table = self.tensors.get("d2t")
        marked = None if t2d is None else t2d.nonzero().flatten()
        if marked is not None and len(marked) != kept:
            raise CheckpointError(
                f"t2d marks {len(marked)} tokens, the head has {kept} draft ids",
                remedy="The vocabulary map belongs to another drafter.",
            )
        arange = torch.arange(kept)
        if table is None:
            if marked is not None:
                ledger.derived("draft_to_target", "t2d", "d2t absent, the tokens that t2d marks")
                return marked
            if kept == own:
                ledger.derived("draft_to_target", "identity", "no d2t, the vocabulary is whole")
                return arange
            extra = (
                " ModelOpt's Megatron export never writes it."
                if self.dialect is Dialect.modelopt_megatron
                else ""
            )
            raise CheckpointError(
                f"the draft vocabulary is reduced ({kept} of {own}) and the file has no d2t",
                got=", ".join(sorted(self.tensors)[:4]) + ", ...",
                remedy=f"Add d2t from the training's token map.{extra}",
            )
        if table.shape != (kept,) or table.is_floating_point() or table.dtype is torch.bool:
            raise CheckpointError(
                f"d2t is no vector of {kept} integers, one per row of the head",
                got=f"{table.dtype} {tuple(table.shape)}",
                remedy="The vocabulary map belongs to another drafter.",
            )
        table = table.long()
        if not bool(table.any()):
            if kept == own or (marked is not None and torch.equal(marked, arange)):
                ledger.derived("draft_to_target", "identity", "d2t is all zero")
                return arange
            raise CheckpointError(
                f"d2t is all zero for a reduced vocabulary ({kept} of {own}): never filled",
                remedy="Write d2t from the training's token map.",
            )
        offset, absolute = arange + table, table
        limit = max(own, used)
        forms = [
            (name, ids)
            for name, ids in (("offset", offset), ("absolute", absolute))
            if _ascending(ids, limit) and (marked is None or torch.equal(ids, marked))
        ]
        if not forms and marked is not None and torch.equal(offset.sort().values, marked):
            forms = [("offset", offset)]
            ledger.note("d2t is not ascending; t2d marks exactly its tokens")
        if not forms:
            raise self._broken_map(offset, limit, marked)
        name, ids = forms[0]
        if name == "absolute":
            ledger.conflict("d2t holds absolute ids, where every known trainer writes offsets")
        if len(forms) == 2 and marked is None:
            ledger.note("d2t would be a valid table of absolute ids too; read as offsets")
            ledger.assumed("draft_to_target", name, "d2t, offsets as every trainer writes")
        else:
            ledger.derived("draft_to_target", name, "d2t, the only valid reading")
        return ids

    def _broken_map(self, offset: Tensor, limit: int, marked: Tensor | None) -> CheckpointError:
        outside = ((offset < 0) | (offset >= limit)).nonzero().flatten()
        if len(outside):
            i = int(outside[0])
            fault = f"draft id {i} -> {int(offset[i])}, outside 0..{limit - 1}"
        elif len(offset.unique()) < len(offset):
            ordered = offset.sort().values
            twice = int(ordered[:-1][ordered[1:] == ordered[:-1]][0])
            fault = f"two draft ids -> {twice}"
        elif marked is not None:
            fault = "it differs from the tokens that t2d marks"
        else:
            fault = "target ids do not ascend"
        return CheckpointError(
            "d2t is no valid vocabulary map, neither as offsets nor as absolute ids",
            got=fault,
            remedy="Write d2t from the training's token map.",
        )

    # Boundaries ---------------------------------------------------------------------------

    def _ids(self, fields: Fields) -> list[int] | None:
        ids = fields.data.get(IDS)
        if ids is None or ids == []:
            return None
        if not isinstance(ids, list) or any(
            isinstance(i, bool) or not isinstance(i, int) for i in ids
        ):
            raise CheckpointError(f"{fields.where}: {IDS} is no list of integers", got=repr(ids))
        return ids

    def _boundaries(self, states: int, hidden: int) -> tuple[int, ...] | None:
        ledger = self.ledger
        n = self.target.n_layers if self.target is not None else None
        if self.given is not None:
            ids = tuple(sorted(self.given))
            if states != len(ids):
                raise ContractError(
                    f"the drafter captures {states} state(s)", got=f"boundaries {ids}"
                )
            self._inside(ids, n, "the argument boundaries")
            return ledger.put("boundaries", ids, Origin.read, "argument")
        if states == 0:
            return ledger.derived("boundaries", (), "no fc: the target's post-final-norm state")
        exported = self.top.child(EXPORT_KEY).data.get("boundaries")
        if isinstance(exported, list):
            ids = tuple(exported)
            self._inside(ids, n, f"{EXPORT_KEY}.boundaries")
            return ledger.put("boundaries", ids, Origin.read, f"{EXPORT_KEY}.boundaries")
        top, nested = self._ids(self.top), self._ids(self.eagle)
        if top is None and nested is None:
            return self._default(states, n)
        return self._listed(top, nested, n)

    def _listed(
        self, top: list[int] | None, nested: list[int] | None, n: int | None
    ) -> tuple[int, ...]:
        ledger = self.ledger
        written = top if top is not None else nested or []
        if written != sorted(set(written)):
            ledger.note(f"{IDS} {written} was sorted; states are concatenated ascending")
        ids = sorted(set(written))
        convention, origin, why = self._convention(top, nested)
        if convention == "output" and n is not None and ids[-1] == n:
            convention, origin = "entry", Origin.derived
            why = f"{ids} counted as blocks leaves the target's {n} layers"
        ledger.put("boundary_convention", convention, origin, why)
        convention = ledger["boundary_convention"]
        if convention not in {"entry", "output"}:
            raise ConfigError("boundary_convention is entry or output", got=convention)
        shift = 1 if convention == "output" else 0
        found = tuple(i + shift for i in ids)
        if origin is Origin.assumed and not ledger.overridden("boundary_convention"):
            other = tuple(i + 1 - shift for i in ids)
            ledger.note(
                f"{IDS} {ids} was read as boundaries {found} ({why}); "
                f"the text alone would also allow {other}"
            )
        self._inside(found, n, IDS)
        origin = ledger.provenance["boundary_convention"].origin
        return ledger.put("boundaries", found, origin, f"{IDS} {ids}, convention {convention}")

    def _convention(
        self, top: list[int] | None, nested: list[int] | None
    ) -> tuple[str, Origin, str]:
        """Section 2.3: what an id means depends on where it stands and who wrote it."""
        if top is not None:
            if nested is not None and top != nested:
                self.ledger.conflict(
                    f"{IDS} at top level {top} and in eagle_config {nested} differ; "
                    "the first was taken"
                )
            known = self.dialect is Dialect.speculators or nested == top
            return "entry", Origin.read if known else Origin.assumed, "list at top level"
        ids = self.traits.ids
        decisive = self.ledger.provenance["dialect"].origin is not Origin.assumed and (
            self.dialect in {Dialect.torchspec_gqa, Dialect.torchspec_mla, Dialect.specforge}
            or self.traits.fixed_ids
        )
        origin = Origin.derived if decisive else Origin.assumed
        return ids, origin, f"list in eagle_config, {self.dialect}"

    def _default(self, states: int, n: int | None) -> tuple[int, ...] | None:
        if n is None:
            self.pending = ContractError(
                "the config names no captured layers, and the default depends on the target",
                got=f"fc with {states} state(s)",
                remedy="Give the target, or boundaries=.",
            )
            return None
        ids = tuple(sorted({2, n // 2, n - 3}))
        if len(ids) != states or ids[0] < 0:
            raise ContractError(
                f"the config names no captured layers, and the default {ids} of a target with "
                f"{n} layers does not fit",
                got=f"fc with {states} state(s)",
                remedy="Give boundaries=.",
            )
        origin = Origin.derived if self.traits.fixed_ids else Origin.assumed
        return self.ledger.put(
            "boundaries", ids, origin, f"none named, default (2, n//2, n-3) with n = {n}"
        )

    def _inside(self, ids: tuple[int, ...], n: int | None, place: str) -> None:
        bad = [i for i in ids if i < 0 or (n is not None and i > n)]
        if bad or len(set(ids)) != len(ids):
            raise ContractError(
                f"{place}: boundary {bad[0] if bad else ids} is not one of 0..{n or 'n'}, each once",
                got=f"boundaries {ids}",
                remedy="Give the drafter's own target, or boundaries=.",
            )

    # Shapes -------------------------------------------------------------------------------

    def _check_shapes(self, fields: dict[str, Any]) -> None:
        """Every expected tensor has its shape, and no other tensor is there."""
        states = _states(self.tensors, fields)
        want = dict(expected_shapes(fields, states))
        optional = {"embed_tokens.weight", "lm_head.weight"}
        have = {n: tuple(t.shape) for n, t in self.tensors.items() if n not in {"d2t", "t2d"}}
        missing = sorted(set(want) - set(have) - optional)
        unknown = sorted(set(have) - set(want))
        if missing or unknown:
            parts = []
            if missing:
                parts.append(f"missing: {', '.join(missing)}")
            if unknown:
                parts.append(f"unknown: {', '.join(unknown)}")
            raise CheckpointError(
                f"{self.files.folder / self.files.weights}: tensors do not fit a "
                f"{self.dialect} drafter",
                got="; ".join(parts),
                remedy="Nothing is skipped or filled in; correct the names or the file.",
            )
        wrong = [f"{n} {have[n]}, expected {want[n]}" for n in have if have[n] != want[n]]
        if wrong:
            raise CheckpointError(
                f"{self.files.folder / self.files.weights}: wrong shapes",
                got="; ".join(wrong[:6]),
                remedy="Config and weights do not belong together.",
            )


def _states(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> int:
    if "fc.weight" not in tensors:
        return 0
    return tensors["fc.weight"].shape[1] // fields["target_hidden_size"]


def expected_shapes(
    fields: Mapping[str, Any], states: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the drafter's tensors, vocabulary map aside (reference, section 3.3)."""
    h, wide = fields["hidden_size"], states * fields["target_hidden_size"]
    yield "embed_tokens.weight", (fields["vocab_size"], h)
    yield "lm_head.weight", (fields["draft_vocab_size"], h)
    yield "norm.weight", (h,)
    if states:
        yield "fc.weight", (h, wide)
        if fields["fc_bias"]:
            yield "fc.bias", (h,)
    if fields["fusion_norm"] in {FusionNorm.concat, FusionNorm.concat_per_layer}:
        yield "input_norm.weight", (wide,)
    if fields["fusion_norm"] in {FusionNorm.per_layer, FusionNorm.concat_per_layer}:
        for i in range(states):
            yield f"fc_norm.{i}.weight", (fields["target_hidden_size"],)
    for i in range(fields["num_layers"]):
        stem = f"layers.{i}."
        yield f"{stem}input_layernorm.weight", (h,)
        yield f"{stem}post_attention_layernorm.weight", (h,)
        if i == 0:
            yield f"{stem}hidden_norm.weight", (h,)
        for name, rows, columns, bias in _linear(fields, h * 2 if i == 0 else h):
            yield f"{stem}{name}.weight", (rows, columns)
            if bias:
                yield f"{stem}{name}.bias", (rows,)
        mla: MLA | None = fields.get("mla")
        if mla is not None:
            yield f"{stem}self_attn.kv_a_layernorm.weight", (mla.kv_lora_rank,)
            if mla.q_lora_rank is not None:
                yield f"{stem}self_attn.q_a_layernorm.weight", (mla.q_lora_rank,)
        elif fields["qk_norm"]:
            yield f"{stem}self_attn.q_norm.weight", (fields["head_dim"],)
            yield f"{stem}self_attn.k_norm.weight", (fields["head_dim"],)


def _linear(fields: Mapping[str, Any], wide: int) -> Iterator[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, bias) of a layer's projections; ``wide`` is attention's input."""
    h, heads, e = fields["hidden_size"], fields["num_heads"], fields["head_dim"]
    mla: MLA | None = fields.get("mla")
    bias = fields["qkv_bias"]
    value = heads * (e if mla is None else mla.v_head_dim)
    if mla is None:
        groups = fields["num_kv_heads"]
        yield "self_attn.q_proj", heads * e, wide, bias
        yield "self_attn.k_proj", groups * e, wide, bias
        yield "self_attn.v_proj", groups * e, wide, bias
    else:
        if mla.q_lora_rank is None:
            yield "self_attn.q_proj", heads * e, wide, False
        else:
            yield "self_attn.q_a_proj", mla.q_lora_rank, wide, bias
            yield "self_attn.q_b_proj", heads * e, mla.q_lora_rank, False
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        yield "self_attn.kv_a_proj_with_mqa", down, wide, bias
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "self_attn.kv_b_proj", up, mla.kv_lora_rank, False
    yield "self_attn.o_proj", h, value, fields["out_bias"]
    if fields["attention_gate"]:
        yield "self_attn.g_proj", value, wide, False
    ffn, mlp_bias = fields["intermediate_size"], fields["mlp_bias"]
    yield "mlp.gate_proj", ffn, h, mlp_bias
    yield "mlp.up_proj", ffn, h, mlp_bias
    yield "mlp.down_proj", h, ffn, mlp_bias


def only_padding(a: int, b: int) -> bool:
    """Whether the larger of two vocabularies is the smaller, rounded up to 64, 128, 256 or 512."""
    small, large = min(a, b), max(a, b)
    return any(large == -(-small // step) * step for step in (64, 128, 256, 512))


def _ascending(ids: Tensor, limit: int) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < limit


def _there(present: bool) -> str:
    return "there" if present else "absent"
