"""Frozen settings. Everything that changes a number is a field here."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from driftlab.errors import AssumptionError, ConfigError, faults
from driftlab.files import refuse_irregular


class FusionNorm(StrEnum):
    """Norm between the captured states and ``fc``."""

    none = "none"  # EAGLE-3
    per_layer = "per_layer"  # EAGLE-3.1 ``fc_norm``: one RMSNorm per captured state
    concat = "concat"  # ``norm_before_fc``: one RMSNorm over the concatenation
    concat_per_layer = "concat_per_layer"  # both, concat first; files only, never trained here


class Feedback(StrEnum):
    """What depth d+1 receives from depth d."""

    pre_norm = "pre_norm"  # EAGLE-3: the layer's output
    post_norm = "post_norm"  # EAGLE-3.1: the output after the final norm


class Residual(StrEnum):
    """What the attention output is added to in the first layer."""

    raw = "raw"
    normed = "normed"  # ``norm_before_residual``


class Origin(StrEnum):
    """How sure a resolved value is."""

    read = "read"
    derived = "derived"
    assumed = "assumed"


SUITES = Path(__file__).parent / "data" / "suites"
"""Packaged experiments."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Count = Annotated[int, Field(gt=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Shift = Annotated[int, Field(gt=-(2**31), lt=2**31)]


def is_whole(value: object) -> bool:
    """Whether ``value`` is a whole number; true and false are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number; true and false are none."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


LEAST_TEMPERATURE = 1e-4
"""Below it logits over the temperature leave float32."""


def _samples(temperature: float) -> bool:
    return temperature == 0 or temperature >= LEAST_TEMPERATURE


def _sampled(temperature: float) -> float:
    if not _samples(temperature):
        raise ValueError(f"a temperature is 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_sampled)]


def check_sampling(temperatures: Iterable[float], seed: int) -> None:
    """Raise ConfigError for a temperature or a seed that no experiment file could hold."""
    for value in temperatures:
        if not is_number(value) or not _samples(value):
            raise ConfigError(
                f"a temperature is 0 (greedy) or a finite number from {LEAST_TEMPERATURE:g} on",
                got=value,
            )
    if not is_whole(seed) or not 0 <= seed < 2**31:
        raise ConfigError("a seed is a whole number from 0 to 2147483647", got=seed)


def _check_lists(owner: BaseModel, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a list among ``names`` that is empty or holds a value twice."""
    for name in names:
        values = getattr(owner, name)
        if not values and name not in optional:
            raise ValueError(f"{name} is empty")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} holds a value twice")


def _check_sink(owner: MeasureSpec | ExplainSpec) -> None:
    """A position that is named twice would double the even share of the sink's keys."""
    if not isinstance(owner.sink, str):
        _check_lists(owner, "sink")
        if any(p < 0 for p in owner.sink):
            raise ValueError("a sink position cannot be negative")


class Sourced(Frozen):
    """A resolved value with the place that it came from."""

    value: Any
    origin: Origin
    where: str


Provenance = dict[str, Sourced]


def refuse_assumptions(provenance: Provenance, *, owner: str) -> None:
    """Raise AssumptionError when any value of ``provenance`` was assumed (``--strict``)."""
    assumed = {name: s for name, s in provenance.items() if s.origin is Origin.assumed}
    if assumed:
        listed = "; ".join(f"{name} = {s.value} ({s.where})" for name, s in assumed.items())
        raise AssumptionError(
            f"{owner}: {len(assumed)} value(s) were assumed and not read",
            got=listed,
            remedy="State them in the config or on the command line, or drop --strict.",
        )


class Rope(Frozen):
    """Rotary embedding. ``rope_type`` and ``parameters`` are HuggingFace's ``rope_parameters``."""

    rope_type: str = "default"
    theta: Annotated[float, Field(gt=0)] = 10000.0
    parameters: dict[str, Any] = Field(default_factory=dict)
    interleaved: bool = False  # GPT-J pairing (MLA); False is the half-split NeoX pairing
    max_position: Annotated[int, Field(gt=0)] = 4096


class MLA(Frozen):
    """Low-rank attention of DeepSeek / Kimi drafters (D4 of docs/checkpoints.md)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_multiplier: float = 1.0  # yarn's m^2


class DrafterConfig(Frozen):
    """Everything that decides the drafter's arithmetic (shapes in its docstrings use these names).

    A variant is named by its enums. ``boundaries`` are residual-stream indices of the
    target, ascending; empty means the target's post-final-norm state and no ``fc``.
    """

    hidden_size: Annotated[int, Field(gt=0)]
    target_hidden_size: Annotated[int, Field(gt=0)]
    intermediate_size: Annotated[int, Field(gt=0)]
    num_heads: Annotated[int, Field(gt=0)]
    num_kv_heads: Annotated[int, Field(gt=0)]
    head_dim: Annotated[int, Field(gt=0)]
    vocab_size: Annotated[int, Field(gt=0)]
    draft_vocab_size: Annotated[int, Field(gt=0)]
    boundaries: tuple[int, ...]
    fusion_norm: FusionNorm = FusionNorm.none
    feedback: Feedback = Feedback.pre_norm
    residual: Residual = Residual.raw
    num_layers: Annotated[int, Field(gt=0)] = 1
    rope: Rope = Rope()
    mla: MLA | None = None
    qk_norm: bool = False
    attention_gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    windows: tuple[Count | None, ...] = ()  # per layer; () is full attention in every layer
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    hidden_act: str = "silu"
    # The five fields below exist because trainers and runtimes differ on the same file.
    double_hidden_norm: bool = False  # hidden_norm(input_layernorm(u)), ModelOpt's HF trainer
    logits_from_raw: bool = False  # head reads the state before the final norm (SpecForge < #879)
    draft_position_offset: Shift = 0  # 1: drafted positions one too far (SGLang < #25015)
    window_moves: bool = False  # True: the window counts from the drafted position (engines)
    logit_scale: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if tuple(sorted(self.boundaries)) != self.boundaries:
            raise ValueError(f"boundaries must ascend, got {self.boundaries}")
        if any(b < 0 for b in self.boundaries):
            raise ValueError(f"boundaries must be >= 0, got {self.boundaries}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if not self.boundaries and self.fusion_norm is not FusionNorm.none:
            raise ValueError("a drafter without captured states has no fusion norm")
        return self

    @property
    def variant(self) -> str:
        """Name made of the enums: ``per_layer+post_norm``, then ``+normed`` for the residual."""
        name = f"{self.fusion_norm}+{self.feedback}"
        return name if self.residual is Residual.raw else f"{name}+normed"


class TargetSpec(Frozen):
    """Where the target comes from. ``source`` is ``micro``, a folder, a GGUF file or a hub id."""

    source: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    boundaries: tuple[int, ...] | None = None  # None: the default (2, n//2, n-3)
    trust_remote_code: bool = False
    device_map: str | dict[str, int | str] | None = None  # HuggingFace's: "auto", "cuda:0", parts
    tp_plan: Literal["auto"] | None = None  # each matrix over the processes of torchrun

    @model_validator(mode="after")
    def _consistent(self) -> TargetSpec:
        if self.boundaries == ():
            raise ValueError("boundaries is empty")
        if self.device_map is not None and self.tp_plan is not None:
            raise ValueError("give device_map (whole layers) or tp_plan (parts of layers)")
        if self.source == "micro" and (self.device_map or self.tp_plan):
            raise ValueError("the target 'micro' is trained on the CPU and stays there")
        if self.source == "micro" and (
            self.dtype != "float32" or self.revision is not None or self.trust_remote_code
        ):
            raise ValueError(
                "the target 'micro' is trained in float32: it has no dtype, revision or code of "
                "its own to choose"
            )
        return self


class TextSpec(Frozen):
    """Which text the drafters learn from and are measured on."""

    train_prompts: str | None = None  # named set, .jsonl file or "micro", continued by the target
    given: str | None = None  # a .jsonl file of prompts and responses to learn from instead
    measure_prompts: str  # as train_prompts
    train_tokens: Count  # about so many: of continuations, of whole texts where they are given
    max_new_tokens: Count = 128  # of a continuation
    measure_new_tokens: Count | None = None  # None: max_new_tokens
    train_temperature: Temperature = 1.0
    temperatures: tuple[Temperature, ...] = (0.0, 1.0)  # measured texts
    batch: Count = 32  # prompts continued at a time; sampled texts depend on it
    seed: Seed = 0  # of sampled texts; those that are measured are drawn with seed + 1
    limit: Count | None = None  # measure at most this many prompts

    @model_validator(mode="after")
    def _consistent(self) -> TextSpec:
        if (self.train_prompts is None) == (self.given is None):
            raise ValueError("give either train_prompts or given")
        sampled = [t for t in self.temperatures if t > 0]
        if not self.temperatures or len(sampled) > 1 or len(self.temperatures) > 2:
            raise ValueError(
                "temperatures takes 0 (greedy), one temperature above 0 (sampled), or both"
            )
        _check_lists(self, "temperatures")
        return self


class DrafterSpec(Frozen):
    """Shape of the drafters that a run trains; None takes the target's own value."""

    draft_vocab_size: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None


class TrainSpec(Frozen):
    """Training-time test: soft cross entropy on the draft vocabulary, step k weighted decay^k."""

    ttt: Count = 4  # depths that are unrolled
    decay: Annotated[float, Field(gt=0)] = 0.8
    steps: Count = 500
    batch: Count = 4  # texts of a step
    max_length: Annotated[int, Field(gt=1)] = 512  # tokens; longer texts are cut
    lr: Annotated[float, Field(gt=0)] = 1e-3  # the highest: AdamW, linear warm-up, then cosine to 0
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.05  # share of the steps
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0  # norm of the gradients
    head_init: Annotated[float, Field(ge=0)] = 1.0  # times the target's head rows
    autocast: Literal["auto", "off", "bfloat16"] = "off"  # auto: bfloat16 where it is native
    checkpoint_every: Count = 200  # steps; changes no number
    alignment: Annotated[float, Field(ge=0)] = 0.0  # weight of the attention-alignment loss
    align_layer: Annotated[int, Field(ge=0)] | None = None  # target layer aligned to; None: last
    evaluate_every: Count | None = None  # steps; keeps the weights that accept most. None: the last


class Axes(Frozen):
    """Trained axes: one drafter for every element of the product, times every seed."""

    fusion_norm: tuple[FusionNorm, ...] = (FusionNorm.none, FusionNorm.per_layer)
    feedback: tuple[Feedback, ...] = (Feedback.pre_norm, Feedback.post_norm)
    residual: tuple[Residual, ...] = (Residual.raw,)
    attention_gate: tuple[bool, ...] = (False,)
    ttt: tuple[Count, ...] = ()  # in place of train.ttt; () takes it
    alignment: tuple[Annotated[float, Field(ge=0)], ...] = ()  # in place of train.alignment
    steps_scale: tuple[Annotated[float, Field(gt=0)], ...] = ()  # times train.steps; () is 1
    lr_scale: tuple[Annotated[float, Field(gt=0)], ...] = ()  # times train.lr; () is 1

    @model_validator(mode="after")
    def _consistent(self) -> Axes:
        optional = ("ttt", "alignment", "steps_scale", "lr_scale")
        _check_lists(self, *type(self).model_fields, optional=optional)
        if FusionNorm.concat_per_layer in self.fusion_norm:
            raise ValueError("concat_per_layer is read from files, not trained")
        for scale in (*self.alignment, *self.steps_scale, *self.lr_scale):
            if float(f"{scale:g}") != scale:
                raise ValueError(f"a cell's name holds six digits of a number, {scale} has more")
        return self


class MeasureSpec(Frozen):
    """What is measured on each cell."""

    depth: Count = 16  # drafted tokens of a chain
    modes: tuple[Literal["free", "forced"], ...] = ("free", "forced")  # reads its drafts, the text
    # The first token; those that receive more than 0.3 of the mass at depth 1; or positions.
    sink: Literal["first", "auto"] | tuple[int, ...] = "first"
    recent: Count = 8  # last keys, of the measure ``recent``
    max_anchors: Count | None = None  # of each text, at even distances; None: all
    bootstrap: Annotated[int, Field(gt=0, le=1_000_000)] = 2000  # draws of an interval
    agreement: bool = False  # also compare with the target's own attention, layer by layer

    @model_validator(mode="after")
    def _consistent(self) -> MeasureSpec:
        _check_lists(self, "modes")
        _check_sink(self)
        return self


class ExplainSpec(Frozen):
    """How a drafter is explained (docs/explain.md); chains read the text's tokens."""

    depth: Count = 8  # drafted tokens of a chain
    anchors: Count = 24  # of each text, at even distances
    state_anchors: Count = 96  # the same, where only states are compared
    sink: Literal["first", "auto"] | tuple[int, ...] = "first"
    gradient_depths: tuple[Count, ...] = (1, 2, 4, 8)
    gradient_anchors: Count = 2  # of each text, among its anchors
    gradient_steps: Count = 16  # of the integral; doubled, up to 16 times as many, where it is
    gradient_gap: Annotated[float, Field(gt=0)] = 0.05  # off by more logits than this

    @model_validator(mode="after")
    def _consistent(self) -> ExplainSpec:
        _check_lists(self, "gradient_depths")
        _check_sink(self)
        return self


Policy = Literal["auto", "always", "never"]
Level = bool | int | float | str


class Context(Frozen):
    """Text put in front of each prompt: ``tokens`` of it, from a prompt set or a .txt file."""

    tokens: Count
    filler: str = "train"


class Condition(Frozen):
    """What is changed about trained drafters, or about what they read. One row says it all.

    ``interventions`` are tables ``{kind = "noise", alpha = 0.5}``: a kind of
    :mod:`driftlab.analysis.interventions` and its parameters. ``template``, ``bos``, ``system``
    and ``context`` change the prompt, ``temperature`` the text that continues it. ``quantize``
    rounds the target's weights; the text stays the unchanged target's, so that only what the
    drafter reads differs, unless the rounded target ``writes`` its own.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,+=_-]*$")]
    variants: tuple[str, ...] = ()  # only drafters of these; () is all
    interventions: tuple[dict[str, Level | list[int]], ...] = ()
    template: Policy | None = None
    bos: Policy | None = None
    system: str | None = None
    temperature: Temperature | None = None
    context: Context | None = None
    quantize: Literal["int8", "int4"] | None = None
    writes: bool = False

    @property
    def changes_text(self) -> bool:
        """Whether prompts or continuations are others than those of the unchanged drafter."""
        changed = (self.template, self.bos, self.system, self.temperature, self.context)
        return self.writes or any(value is not None for value in changed)

    @model_validator(mode="after")
    def _consistent(self) -> Condition:
        if self.writes and self.quantize is None:
            raise ValueError("writes is for a target that is quantized")
        if not (self.interventions or self.quantize or self.changes_text):
            raise ValueError(f"condition {self.name} changes nothing")
        return self


class ApplySpec(Frozen):
    """Applied axes: conditions on trained drafters, each beside the same drafter unchanged.

    ``drafters`` names a run with the same base (``norms`` is the folder ``norms-BASE`` beside
    this run), or the folder of a run; empty means the drafters that this run trains.
    """

    drafters: str = ""
    variants: tuple[str, ...] = ()  # only drafters of these; () is all
    text: Literal["both", "greedy", "sampled"] = "both"
    conditions: tuple[Condition, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ApplySpec:
        names = [c.name for c in self.conditions]
        if len(set(names)) < len(names):
            raise ValueError("two conditions have the same name")
        return self


Quantity = Literal[
    "forced accuracy",
    "conditional acceptance",
    "accepted drafts",
    "share of own length",
    "growth",
    "sink",
    "own drafts",
    "entropy",
]
Factor = Literal[
    "fusion_norm",
    "feedback",
    "residual",
    "attention_gate",
    "ttt",
    "alignment",
    "steps_scale",
    "lr_scale",
    "condition",
]


class Contrast(Frozen):
    """A comparison that is fixed before the run: ``levels[1]`` against ``levels[0]``.

    ``at`` holds other factors at a level; those that are not named are averaged. ``depth`` None
    is the deepest (for ``growth``: from depth 1 to it); lengths have none. For the factor
    ``condition`` the level "" is the unchanged drafter; ``share of own length`` is what is left
    of a drafter's accepted drafts under the condition that ``at`` or a level names.
    """

    measure: Quantity
    factor: Factor
    levels: tuple[Level, Level]
    at: dict[Factor, Level] = Field(default_factory=dict)
    depth: Count | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Contrast:
        if self.levels[0] == self.levels[1]:
            raise ValueError("a contrast needs two levels")
        if self.factor in self.at:
            raise ValueError(f"{self.factor} cannot be held and compared")
        return self


class Analysis(Frozen):
    """What the run is asked first. ``primary`` and ``family`` are corrected together (Holm);
    every other comparison that a run prints is exploratory."""

    primary: Contrast
    family: tuple[Contrast, ...] = ()


class Experiment(Frozen):
    """One experiment: an experiment file, laid over its base."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    question: str = ""
    base: str = ""  # name of the base
    target: TargetSpec
    text: TextSpec
    drafter: DrafterSpec = DrafterSpec()
    train: TrainSpec = TrainSpec()
    axes: Axes = Axes()
    seeds: tuple[Seed, ...] = (0, 1, 2)
    measure: MeasureSpec = MeasureSpec()
    applied: ApplySpec | None = None
    analysis: Analysis | None = None
    workers: Annotated[int, Field(gt=0, le=1024)] = 2  # cells at once; changes no number
    threads: Annotated[int, Field(gt=0, le=1024)] = 1  # of each worker; sums depend on it

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        _check_lists(self, "seeds")
        return self

    def levels(self) -> dict[str, tuple[Any, ...]]:
        """What each axis is crossed over: its values, or the one that training takes anyway."""
        usual = {
            "ttt": self.train.ttt,
            "alignment": self.train.alignment,
            "steps_scale": 1.0,
            "lr_scale": 1.0,
        }
        return {n: getattr(self.axes, n) or (usual[n],) for n in Axes.model_fields}


BASE = ("target", "text", "drafter", "train", "measure", "workers", "threads")
"""What a base gives: the experiment's own settings are laid over them, key by key."""


def read_experiment(
    path: str | Path, overrides: tuple[str, ...] = (), *, base: str | Path | None = None
) -> Experiment:
    """Read an experiment file; ``overrides`` are ``dotted.key=toml-value`` strings.

    A file may name a ``base``, a path from its own folder, and ``base`` here takes the place of
    it. Either may be a name, too (``targets/NAME.toml`` beside the experiment, or the packaged
    suite).
    A base is laid under the file (see ``BASE``), and the experiment is then called
    ``EXPERIMENT-BASE``, unless both have one name.

    Raises
    ------
    ConfigError: a file is missing, is no TOML, or a key or type is wrong. Every wrong
        key is listed with the value that was found.
    """
    path = Path(path)
    data = own_tables = _read_toml(path)
    own = data.pop("base", None)
    if base is None and own is not None:
        if not isinstance(own, str):
            raise ConfigError("base is not a path", got=own, remedy="Name a .toml file.")
        base = path.parent / own if own.endswith(".toml") else _find_base(own, path.parent)
    elif base is not None:
        base = _find_base(str(base), path.parent)
    if base is not None:
        data = _over(data, _read_base(Path(base)), Path(base).stem)
    return build_experiment(data, overrides, where=str(path), named=own_tables)


def _find_base(name: str, folder: Path) -> Path:
    places = [folder / "targets" / f"{name}.toml", SUITES / f"{name}.toml"]
    if name.endswith(".toml"):
        return Path(name)
    named = not {"/", "\\"} & {*name}  # a path needs its suffix
    if named and (found := next((p for p in places if p.exists()), None)):
        return found
    known = {p.stem for where in (folder / "targets", SUITES) for p in where.glob("*.toml")}
    raise ConfigError(
        f"no base {name!r}",
        remedy=f"Known: {', '.join(sorted(known))}. Or give the path of a .toml file.",
    )


def _read_base(path: Path) -> dict[str, Any]:
    """A base's tables. Raises ConfigError for a key that no experiment has: it would be dropped."""
    found = _read_toml(path)
    if unknown := sorted({*found} - ({*Experiment.model_fields} - {"base"})):
        raise ConfigError(
            f"{path}: a base has no key {', '.join(unknown)}",
            remedy=f"It gives {', '.join(BASE)}; correct or remove the key.",
        )
    return found


def _over(data: dict[str, Any], base: dict[str, Any], stem: str) -> dict[str, Any]:
    """``data`` laid over the ``BASE`` keys of ``base``."""
    under = {name: base[name] for name in BASE if name in base}
    merged = {**under, **data, "base": stem}
    for name, value in under.items():
        if isinstance(value, dict) and isinstance(data.get(name), dict):
            merged[name] = {**value, **data[name]}
    called = data.get("name")
    if isinstance(called, str) and called != stem:
        merged["name"] = f"{called}-{stem}"
    return merged


def _read_toml(path: Path) -> dict[str, Any]:
    refuse_irregular(path, ConfigError)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"experiment file {path} does not exist",
            remedy="Give the path of a .toml file, or --suite micro.",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"experiment file {path} cannot be read",
            got=error.strerror,
            remedy="Give the path of a .toml file that you may read.",
        ) from None
    except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
        raise ConfigError(
            f"{path} is not a TOML file",
            got=str(error) or type(error).__name__,
            remedy="Correct what is named; the file must be text in UTF-8.",
        ) from None


def build_experiment(
    data: dict[str, Any],
    overrides: tuple[str, ...] = (),
    *,
    where: str,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Experiment:
    """Validate a parsed experiment; see :func:`read_experiment`. ``named``: what its own file says,
    without the base."""
    last: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
        _apply(last, override)
    made = _validated(Experiment, data, where)
    for setting in ("ttt", "alignment"):
        _refuse_overruled(made, setting, last, named)
    return made


def _refuse_overruled(made: Experiment, setting: str, *named: Mapping[str, Any]) -> None:
    """Raise ConfigError when an axis drops the value of ``setting`` that is named with it, or over
    it. ``named``: tables, those that lie over the others first."""
    value, levels = getattr(made.train, setting), getattr(made.axes, setting)
    for tables in named:
        if setting in tables.get("train", {}) and levels and value not in levels:
            raise ConfigError(
                f"train.{setting} changes nothing: axes.{setting} names what is trained",
                got=f"{value} and {list(levels)}",
                remedy=f"Leave train.{setting} out, or name its value in axes.{setting}.",
            )
        if setting in tables.get("axes", {}):
            return  # the axis is laid over what the others say, as over a base


def build_explain(overrides: tuple[str, ...], *, where: str) -> ExplainSpec:
    """The default settings with ``key=toml-value`` overrides. Raises ConfigError."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    return _validated(ExplainSpec, data, where)


Settings = TypeVar("Settings", bound=BaseModel)


def _validated(kind: type[Settings], data: dict[str, Any], where: str) -> Settings:
    try:
        # As JSON, because its strict mode takes a list for a tuple and a word for an enum, but
        # neither true for 1 nor "1" for 1.
        text = json.dumps(data, default=_refuse_date)
        return kind.model_validate_json(text, strict=True)
    except RecursionError:
        raise ConfigError(f"{where}: tables in tables too deep to read") from None
    except ValidationError as error:
        said = "; ".join(
            f"{fault}, found {found['input']!r:.80}"
            for fault, found in zip(faults(error), error.errors(), strict=True)
        )
        raise ConfigError(
            f"{where}: {error.error_count()} wrong setting(s): {said}",
            remedy="Every key is documented in driftlab/config.py; correct or remove those named.",
        ) from None


def _refuse_date(value: object) -> str:
    raise ConfigError(
        "no setting is a date or a time", got=value, remedy='Put text in quotes: "2026-01-31".'
    )


def _apply(data: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(
            "--set needs key=value", got=override, remedy="Example: --set train.steps=50"
        )
    try:
        read = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        read = {"v": text.strip()}  # a bare word is a string
    if more := sorted({*read} - {"v"}):
        raise ConfigError(
            f"--set {key.strip()} sets more than one key",
            got=", ".join(more),
            remedy="Give each key a --set of its own.",
        )
    value = read["v"]
    *parents, last = (name.strip() for name in key.split("."))
    node = data
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {key}: {name} is not a table", remedy="Name a leaf key.")
    node[last] = value
