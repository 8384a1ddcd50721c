"""What a serving runtime computes from a drafter's files, as small patches on its contract.

``trained`` is the contract as the readers resolve it. The other profiles follow what was read
of vLLM 0.32.0 (V1 runner), SGLang after #32334, TensorRT-LLM's one-model path and llama.cpp's
converter. Every patch cites its row X1..X26 of docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.config import DrafterConfig, Feedback, FusionNorm, Residual, Rope
from driftlab.errors import CheckpointError, ConfigError
from driftlab.models.checkpoints.boundaries import layer_ids
from driftlab.models.checkpoints.dialects import NATIVE_KEY, Dialect
from driftlab.models.checkpoints.fields import Fields, Ledger
from driftlab.models.checkpoints.load import _no_init
from driftlab.models.checkpoints.read import CONFIG, _locate, read_json
from driftlab.models.checkpoints.rope import resolve_rope, softmax_multiplier
from driftlab.models.checkpoints.sheet import TargetLike
from driftlab.models.drafter import Drafter

EMBED = "embed_tokens.weight"


class Profile(StrEnum):
    trained = "trained"
    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    llamacpp = "llamacpp"


@dataclass(frozen=True)
class Reading:
    """One way to compute a drafter: config, vocabulary map, and tensors used for the file's."""

    config: DrafterConfig
    draft_to_target: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def change(self, **changes: Any) -> Reading:
        """The same with fields of the config changed. Raises ValueError for what cannot be."""
        fields = {n: getattr(self.config, n) for n in DrafterConfig.model_fields} | changes
        return replace(self, config=DrafterConfig(**fields))


@dataclass(frozen=True)
class Patch:
    """A field of the contract that a runtime computes otherwise, and the row that says so."""

    field: str
    trained: Any
    served: Any
    row: str
    why: str

    def __str__(self) -> str:
        return f"{self.field} {self.trained} -> {self.served} ({self.row}: {self.why})"


@dataclass(frozen=True)
class Facts:
    """What decides a runtime's reading beside the resolved contract.

    raw: config.json as it is written; None for driftlab's own layout and for a drafter in
        memory, which a runtime meets as ``driftlab export`` writes it.
    target_type: HuggingFace's ``model_type`` of the target.
    embedding, own_embedding: the target's [V, Ht] and the drafter's [V, H].
    """

    dialect: Dialect
    raw: Mapping[str, Any] | None
    n_layers: int
    target_type: str
    embedding: Tensor = field(repr=False)
    own_embedding: Tensor = field(repr=False)


@dataclass(frozen=True)
class Served:
    """A profile's reading. ``refused`` says why the runtime cannot load the file, or is None."""

    profile: Profile
    reading: Reading
    patches: tuple[Patch, ...]
    refused: str | None
    notes: tuple[str, ...]


def gather_facts(
    drafter: Drafter,
    target: TargetLike,
    *,
    source: str | Path | None = None,
    revision: str | None = None,
    target_type: str = "",
) -> Facts:
    """Facts of a drafter that was read from ``source``, or that is in memory."""
    raw: Mapping[str, Any] | None = None
    said = drafter.provenance.get("dialect")
    dialect = Dialect(said.value) if said is not None else Dialect.driftlab
    if source is not None:
        folder, _ = _locate(source, revision)
        raw = read_json(folder / CONFIG)
        if NATIVE_KEY in raw:
            raw, dialect = None, Dialect.driftlab
    own = drafter.embed_tokens.weight.detach()
    embedding = target.embedding_weight.detach()
    return Facts(dialect, raw, target.n_layers, target_type, embedding, own)


def build(drafter: Drafter, reading: Reading) -> Drafter:
    """``drafter`` computed as ``reading`` says. The two share the weights that they share.

    A fusion norm whose gains are not there takes those of the other kind, or ones.
    """
    with _no_init():
        made = Drafter(reading.config, reading.draft_to_target.cpu(), drafter.provenance)
    have = {**drafter.state_dict(), **reading.tensors}
    device, dtype = drafter.norm.weight.device, drafter.norm.weight.dtype
    weights = {
        name: have[name] if name in have else _gains(name, have, empty).to(device, dtype)
        for name, empty in made.state_dict().items()
        if name != "draft_to_target"
    }
    made.load_state_dict(weights | {"draft_to_target": made.draft_to_target}, assign=True)
    return made.to(device).eval().requires_grad_(False)


def _gains(name: str, have: Mapping[str, Tensor], empty: Tensor) -> Tensor:
    stem, _, _ = name.partition(".")
    if stem == "input_norm" and "fc_norm.0.weight" in have:
        parts = [n for n in have if n.startswith("fc_norm.")]
        return torch.cat([have[n] for n in sorted(parts, key=lambda n: int(n.split(".")[1]))])
    if stem == "fc_norm" and "input_norm.weight" in have:
        return have["input_norm.weight"].split(len(empty))[int(name.split(".")[1])]
    if stem in {"input_norm", "fc_norm"}:
        return torch.ones_like(empty)
    raise CheckpointError(f"the drafter has no tensor {name}, which this reading needs")


def default_boundaries(n_layers: int) -> tuple[int, ...]:
    """(2, n//2, n-3) as every runtime computes it: sorted, without repeats."""
    return tuple(sorted({2, n_layers // 2, n_layers - 3}))


def written_rope(config: DrafterConfig, raw: Mapping[str, Any]) -> Rope:
    """The rotary block as a runtime reads it from the file, without any trainer's habits."""
    nested = raw.get("transformer_layer_config")
    layer = Fields(nested if isinstance(nested, Mapping) else raw, CONFIG)
    windowed = bool(config.windows and config.windows[0])
    return resolve_rope(
        layer,
        Dialect.vllm,
        Ledger({}),
        dim=config.mla.qk_rope_head_dim if config.mla else config.head_dim,
        mla=config.mla is not None,
        first_layer="sliding_attention" if windowed else "full_attention",
    )


def serve(profile: Profile | str, reading: Reading, facts: Facts) -> Served:
    """The reading of ``profile`` for a file whose trained reading is ``reading``.

    Raises ConfigError for an unknown profile.
    """
    try:
        profile = Profile(profile)
    except ValueError:
        raise ConfigError(
            "unknown profile", got=profile, remedy=f"Known: {', '.join(Profile)}."
        ) from None
    work = _Serving(profile, reading, facts)
    if profile is not Profile.trained:
        work.run()
    return Served(profile, work.reading, tuple(work.patches), work.refused, tuple(work.notes))


class _Serving:
    """One runtime's walk through the contract."""

    def __init__(self, profile: Profile, reading: Reading, facts: Facts) -> None:
        self.profile, self.reading, self.facts = profile, reading, facts
        self.patches: list[Patch] = []
        self.notes: list[str] = []
        self.refused: str | None = None
        raw = dict(facts.raw or {})
        self.written = facts.raw is not None
        self.top = Fields(raw, CONFIG)
        self.eagle = self.top.child("eagle_config")
        self.layer = (
            self.top.child("transformer_layer_config")
            if facts.dialect is Dialect.speculators
            else self.top
        )

    def run(self) -> None:
        self.loadable()
        self.boundaries()
        self.fusion_norm()
        self.feedback()
        self.residual()
        self.norms_and_positions()
        self.rope()
        self.windows()
        self.weights()

    def put(self, name: str, value: Any, row: str, why: str) -> None:
        old = getattr(self.reading.config, name)
        if value == old:
            return
        self.patches.append(Patch(name, old, value, row, why))
        self.reading = self.reading.change(**{name: value})

    def refuse(self, row: str, why: str) -> None:
        self.refused = self.refused or f"{row}: {why}"

    def flag(self, *names: str, nested: bool = True) -> bool | None:
        places = [self.top, self.layer, *([self.eagle] if nested else [])]
        found = [v.value for f in places for n in names if (v := f.get(n, bool)) is not None]
        return found[0] if found else None

    # Steps

    def loadable(self) -> None:
        if self.profile is not Profile.vllm or not self.written:
            return
        if self.facts.dialect is Dialect.automodel:
            self.refuse("X18", "vLLM puts model. before keys that already stand under model.")
        if self.top.data.get("model_type") == "deepseek_v3":
            self.refuse("X17", "model_type deepseek_v3 is rewritten to a DeepSeek-MTP class")

    def boundaries(self) -> None:
        config, n = self.reading.config, self.facts.n_layers
        if not config.boundaries:
            return
        ids, why = self._captured(n)
        states = len(config.boundaries)
        if len(ids) != states:
            self.refuse("X19", f"it captures {ids}, and fc expects {states} states ({why})")
        elif ids[0] < 0:
            self.refuse("X12", f"the default {ids} of a target of {n} layers does not exist")
        elif ids[-1] > n or (ids[-1] == n and self._misses_last()):
            self.refuse("X1", f"boundary {ids[-1]} of {n} layers is never captured ({why})")
        else:
            self.put("boundaries", ids, "X1", why)

    def _captured(self, n: int) -> tuple[tuple[int, ...], str]:
        own, default = self.reading.config.boundaries, default_boundaries(n)
        top, nested = layer_ids(self.top), layer_ids(self.eagle)
        if self.profile is Profile.llamacpp:
            return default, "its converter ignores every list, (2, n//2, n-3) is fixed"
        if self.profile is Profile.trtllm:
            wanted = [b - 1 for b in own]
            if n <= 5:
                self.refuse("X1", f"TensorRT-LLM has no default for a target of {n} layers")
            return default, f"default unless eagle3_layers_to_capture = {wanted} is given"
        if not self.written:
            return own, "as exported"
        if self.profile is Profile.vllm:
            listed = top if top is not None else nested
            if listed is None:
                return default, "no list, the default (2, n//2, n-3)"
            counted = self.top.get("num_aux_hidden_states", int)
            if (
                top is not None
                and nested is None
                and counted is None
                and self.facts.dialect is not Dialect.speculators
                and len(own) != 3
            ):
                self.refuse("X19", "a list at top level is not counted, 3 states are expected")
            if top is None and tuple(sorted(set(listed))) != default:
                self.notes.append(
                    f"X1: its V2 runner ignores eagle_config and captures {default} instead"
                )
            return tuple(sorted(set(listed))), "a listed id is the boundary itself"
        if nested is None:
            return default, "SGLang ignores a list at top level; default (2, n//2, n-3)"
        ids = tuple(sorted(set(nested)))
        kind = self.facts.target_type
        if kind == "gpt_oss":
            return ids, "gpt-oss targets: a listed id is the boundary itself"
        if kind.startswith(("deepseek", "kimi")) and ids[0] != 1:
            return ids, "DeepSeek and Kimi targets: no shift unless the first id is 1"
        return tuple(i + 1 for i in ids), "a listed id is the block whose output is captured"

    def _misses_last(self) -> bool:
        return self.profile is Profile.sglang and self.facts.target_type != "gpt_oss"

    def fusion_norm(self) -> None:
        norm = self.reading.config.fusion_norm
        per_layer = norm in {FusionNorm.per_layer, FusionNorm.concat_per_layer}
        concat = norm in {FusionNorm.concat, FusionNorm.concat_per_layer}
        rows: list[tuple[str, str]] = []
        if self.profile is Profile.llamacpp:
            if per_layer:
                per_layer = False
                rows.append(("X9", "fc_norm is not read"))
            if concat:
                concat = False
                rows.append(("X8", "input_norm is not read"))
        elif self.profile is Profile.trtllm and concat:
            if per_layer:
                concat = False
                rows.append(("X10", "of both norms only fc_norm is applied"))
            elif self.written and self.eagle.get("norm_before_fc", bool) is None:
                concat = False
                rows.append(("X8", "norm_before_fc is read from eagle_config only"))
        elif self.profile is Profile.vllm and concat and self.reading.config.mla is not None:
            concat = False
            rows.append(("X8", "the class for low-rank attention has no norm_before_fc"))
        kind = {
            (False, False): FusionNorm.none,
            (True, False): FusionNorm.per_layer,
            (False, True): FusionNorm.concat,
            (True, True): FusionNorm.concat_per_layer,
        }[per_layer, concat]
        if rows:
            names = ", ".join(row for row, _ in rows)
            self.put("fusion_norm", kind, names, "; ".join(why for _, why in rows))

    def feedback(self) -> None:
        self.put("logits_from_raw", False, "X2", "runtimes always norm the head's input")
        if self.profile is Profile.llamacpp:
            self.put("feedback", Feedback.pre_norm, "X9", "norm_output is not read")
        elif self.written:
            names = ["norm_output"]
            if self.profile is Profile.trtllm:
                names.append("return_hidden_post_norm")
            wish = Feedback.post_norm if self.flag(*names) else Feedback.pre_norm
            row = "X9" if wish is Feedback.pre_norm else "X2"
            self.put("feedback", wish, row, f"{names[0]} is taken literally")

    def residual(self) -> None:
        if self.profile in {Profile.sglang, Profile.trtllm}:
            self.put("residual", Residual.raw, "X3", "norm_before_residual is not implemented")
        elif self.written:
            said = self.flag("norm_before_residual")
            why = "norm_before_residual is taken literally"
            if said is None:
                said = self.profile is Profile.vllm and self.facts.dialect is Dialect.speculators
                why = f"norm_before_residual is absent, the default is {said}"
            self.put("residual", Residual.normed if said else Residual.raw, "X3", why)

    def norms_and_positions(self) -> None:
        self.put("double_hidden_norm", False, "X4", "runtimes compute hidden_norm(u)")
        self.put("draft_position_offset", 0, "X7", "standard positions")

    def rope(self) -> None:
        if self.facts.raw is None:
            return
        config = self.reading.config
        rope = written_rope(config, self.facts.raw)
        if config.mla is not None:
            multiplier = softmax_multiplier(rope)
            if multiplier != config.mla.softmax_multiplier:
                mla = config.mla.model_copy(update={"softmax_multiplier": multiplier})
                self.put("mla", mla, "X15", "the block's factor on the scores is applied")
        # The table's length changes no number below it.
        rope = rope.model_copy(update={"max_position": config.rope.max_position})
        same_block = (rope.rope_type, rope.parameters) == (
            config.rope.rope_type,
            config.rope.parameters,
        )
        row = "X6" if same_block else "X5"
        self.put("rope", rope, row, "the block is computed as it is written")

    def windows(self) -> None:
        windows = self.reading.config.windows
        if self.profile is Profile.sglang:
            self.put("windows", (), "X16", "a window is a server argument, not the file's")
        elif self.profile is Profile.vllm:
            if self.written and not windows:
                windows = self._written_windows()
                self.put("windows", windows, "X16", "layer_types and sliding_window are honoured")
            if windows:
                self.put("window_moves", True, "X16", "windows count from the drafted position")
        elif windows:
            self.notes.append(f"X16: what {self.profile} does with windows is not established")

    def _written_windows(self) -> tuple[int | None, ...]:
        size = self.layer.get("sliding_window", int)
        types = self.layer.data.get("layer_types")
        layers = self.reading.config.num_layers
        if size is None or not isinstance(types, list) or len(types) < layers:
            return ()
        sliding = [t == "sliding_attention" for t in types[:layers]]
        return tuple(size.value if s else None for s in sliding) if any(sliding) else ()

    def weights(self) -> None:
        config, embedding = self.reading.config, self.facts.embedding
        if self.profile is Profile.sglang:
            self.put("qkv_bias", False, "X14", "biases of q, k and v are not read")
            tied = self.layer.get("tie_word_embeddings", bool)
            if tied is not None and tied.value:
                self.notes.append(
                    "tie_word_embeddings is on: SGLang takes the embedding for its head, whatever "
                    "head the file holds; that is not computed here"
                )
        own = self.facts.own_embedding
        replaced = self.profile in {Profile.sglang, Profile.trtllm}
        if not replaced or embedding.shape[1] != config.hidden_size:
            return
        rows = min(len(own), len(embedding))
        new = embedding[:rows].to(own.device, own.dtype)
        gap = float((own[:rows] - new).abs().max())
        if gap > 0:
            self.reading = replace(
                self.reading,
                tensors={**self.reading.tensors, EMBED: torch.cat([new, own[rows:]])},
            )
            why = f"equal widths: the target's replaces it, rows differ by up to {gap:.3g}"
            self.patches.append(Patch("embed_tokens", "the file's", "the target's", "X11", why))
