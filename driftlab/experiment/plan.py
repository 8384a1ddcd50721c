"""What the cells of an experiment share, made once: target, texts, states; and the cells' jobs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from driftlab.config import (
    Condition,
    DrafterConfig,
    Experiment,
    Feedback,
    FusionNorm,
    Origin,
    Provenance,
    Residual,
    Sourced,
    TrainSpec,
)
from driftlab.data.corpus import (
    MEASURED_SEED,
    Source,
    Writing,
    read_given,
    refuse_repeated,
    write_corpus,
)
from driftlab.data.features import Features, FeatureStore
from driftlab.data.prompts import load_prompts
from driftlab.data.text import Text
from driftlab.engines.align import Rows, store_rows
from driftlab.engines.cell import SWITCHES, CellJob, Learning
from driftlab.engines.habitat import record
from driftlab.engines.probe import measurable_anchors
from driftlab.engines.train import choose_vocabulary, hold_back, supervised_share
from driftlab.errors import ConfigError, DataError, first_fault
from driftlab.experiment.texts import (
    RENDERING,
    find_prompts,
    open_target,
    rendering_of,
    spread,
)
from driftlab.models.frozen import freeze
from driftlab.models.rounding import quantize
from driftlab.models.target import Target


@dataclass(frozen=True)
class Variant:
    """One element of the trained axes."""

    fusion_norm: FusionNorm
    feedback: Feedback
    residual: Residual
    attention_gate: bool
    ttt: int
    alignment: float
    steps_scale: float
    lr_scale: float

    @property
    def name(self) -> str:
        """``per_layer+post_norm``, then what differs from the plain drafter."""
        name = f"{self.fusion_norm}+{self.feedback}"
        if self.residual is Residual.normed:
            name += "+normed"
        if self.attention_gate:
            name += "+gated"
        if self.alignment:
            name += f"+aligned{self.alignment:g}"
        if self.steps_scale != 1:
            name += f"+steps{self.steps_scale:g}x"
        return f"{name}+lr{self.lr_scale:g}x" if self.lr_scale != 1 else name

    @property
    def switches(self) -> dict[str, Any]:
        """The fields of a drafter's contract that the axes set."""
        return {name: getattr(self, name) for name in SWITCHES}

    def training(self, base: TrainSpec) -> TrainSpec:
        """How this variant is trained, where ``base`` is the file's own way."""
        return base.model_copy(
            update={
                "ttt": self.ttt,
                "alignment": self.alignment,
                "steps": round(self.steps_scale * base.steps),
                "lr": self.lr_scale * base.lr,
            }
        )


def variants(experiment: Experiment) -> list[Variant]:
    """The product of the axes, in the file's order."""
    levels = experiment.levels()
    return [
        Variant(**dict(zip(levels, chosen, strict=True)))
        for chosen in itertools.product(*levels.values())
    ]


def cell_name(experiment: Experiment, variant: Variant, seed: int) -> str:
    """Id of a cell, unique in its run."""
    steps = f"/ttt{variant.ttt}" if len(experiment.axes.ttt) > 1 else ""
    return f"{variant.name}{steps}/s{seed}"


class Plan:
    """What is resolved once for all cells, and the jobs of those that train a drafter."""

    def __init__(self, experiment: Experiment, cache: Path, *, quiet: bool) -> None:
        self.experiment, self.cache = experiment, cache
        self.quiet = quiet
        self.provenance: Provenance = {}
        self.store = FeatureStore(cache / "states")
        self._rounded: dict[str, Target] = {}
        self._prompts: dict[str, list[Source]] = {}  # to measure on, by condition
        self.warnings: list[str] = []
        self.templates: set[str | None] = {None}  # chat templates of the prompts to learn from
        self.target = self._load_target()
        longest = self._new_tokens(measured=True)
        self.room = self.target.max_position - max(experiment.text.max_new_tokens, longest)
        if self.room < 1:
            raise ConfigError(
                f"the new tokens leave no room for a prompt in {self.target.name}'s context of "
                f"{self.target.max_position} tokens",
                got=max(experiment.text.max_new_tokens, longest),
                remedy="Lower text.max_new_tokens and text.measure_new_tokens.",
            )
        # Prompts that cannot be used are refused now, and not after texts are written.
        self.prompts()
        self._given: list[Text] = []
        self._to_learn: list[Source] = []
        applied = experiment.applied
        if applied is None or not applied.drafters:
            if experiment.text.given is not None:
                self._given = self._read_given()
            else:
                self._to_learn = self._prompts_to_learn()

    def _label(self, text: str) -> str:
        return "" if self.quiet else text

    def _load_target(self) -> Target:
        spec = self.experiment.target
        target = open_target(spec, self.cache, label=self._label("target learns the stories"))
        self.provenance |= {f"target.{n}": s for n, s in target.provenance.items()}
        boundaries = spec.boundaries
        if boundaries is None:
            boundaries = target.default_boundaries()
            self.provenance["boundaries"] = Sourced(
                value=list(boundaries), origin=Origin.derived, where="default 2, n//2, n-3"
            )
        else:
            self.provenance["boundaries"] = Sourced(
                value=list(boundaries), origin=Origin.read, where="target.boundaries"
            )
        target.check_boundaries(boundaries)
        self.boundaries = tuple(boundaries)
        return target

    # --- texts --------------------------------------------------------------------------------

    def _new_tokens(self, *, measured: bool) -> int:
        spec = self.experiment.text
        return (spec.measure_new_tokens if measured else None) or spec.max_new_tokens

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of the measured texts."""
        given, applied = self.experiment.text.temperatures, self.experiment.applied
        if applied is None or applied.text == "both":
            return given
        chosen = tuple(t for t in given if (t > 0) == (applied.text == "sampled"))
        if not chosen:
            raise ConfigError(
                f"no {applied.text} text is measured",
                got=f"text.temperatures = {list(given)}",
                remedy="Name such a temperature, or let applied.text be both.",
            )
        return chosen

    def prompts(self, condition: Condition | None = None) -> list[Source]:
        """Prompts of the texts to measure on, as they are or under ``condition``."""
        name = "" if condition is None else condition.name
        if name in self._prompts:
            return self._prompts[name]
        spec = self.experiment.text
        rendering = RENDERING if condition is None else rendering_of(condition, self.target)
        held = find_prompts(spec.measure_prompts, self.target, "held-out", self.room, rendering)
        held = spread(held, spec.limit)
        refuse_repeated([p.tokens for p in held], [p.id for p in held])
        self._prompts[name] = held
        return held

    def texts(self, condition: Condition | None = None) -> tuple[list[Text], list[Source]]:
        """Texts to measure on, as they are or under ``condition``, and the prompts of them."""
        spec, measure = self.experiment.text, self.experiment.measure
        held = self.prompts(condition)
        temperatures, writer = self.temperatures, self.target
        label = "texts to measure on"
        if condition is not None:
            label = f"texts of {condition.name}"
            if condition.temperature is not None:
                temperatures = (condition.temperature,)
            if condition.writes:
                writer = self.rounded(str(condition.quantize))
        found: list[Text] = []
        for temperature in temperatures:
            new = self._new_tokens(measured=True)
            writing = Writing(new, temperature, MEASURED_SEED + spec.seed, spec.batch)
            shown = self._label(f"{label}, temperature {temperature}")
            found += write_corpus(writer, held, writing, self.cache / "texts", progress=shown)
        if not any(len(measurable_anchors(t, measure)) for t in found):
            under = "" if condition is None else f" under {condition.name}"
            raise DataError(
                f"no measured text{under} has {measure.depth} tokens after a first generated one",
                remedy="Raise text.max_new_tokens or lower measure.depth.",
            )
        return found, held

    def _read_given(self) -> list[Text]:
        spec, target = self.experiment.text, self.target
        if target.tokenizer is None:
            raise ConfigError(
                "given texts need a target with a tokenizer",
                got=target.name,
                remedy="Leave text.given out, or name a target that has one.",
            )
        texts, self.templates = read_given(
            str(spec.given),
            target.tokenizer,
            max_tokens=spec.train_tokens,
            limit=target.max_position,
        )
        return texts

    def _prompts_to_learn(self) -> list[Source]:
        name = str(self.experiment.text.train_prompts)
        prompts = find_prompts(name, self.target, "train", self.room)
        self.templates = {p.rendered.template_sha if p.rendered else None for p in prompts}
        return prompts

    def texts_to_learn(self) -> list[Text]:
        spec, target = self.experiment.text, self.target
        if spec.given is not None:
            texts = self._given
            if left := len(load_prompts(spec.given)) - len(texts):
                self.warnings.append(
                    f"{left} of {left + len(texts)} texts of {spec.given} are not learned from: "
                    f"those before them hold text.train_tokens = {spec.train_tokens} tokens"
                )
            return texts
        writing = Writing(
            spec.max_new_tokens, spec.train_temperature, spec.seed, spec.batch, spec.train_tokens
        )
        label = self._label("texts to learn from")
        cache = self.cache / "texts"
        return write_corpus(target, self._to_learn, writing, cache, progress=label)

    # --- states -------------------------------------------------------------------------------

    def rounded(self, kind: str) -> Target:
        """The target with rounded weights; a copy of its own."""
        if kind not in self._rounded:
            self._rounded.clear()  # one at a time in memory
            self._rounded[kind] = quantize(open_target(self.experiment.target, self.cache), kind)
        return self._rounded[kind]

    def states(self, texts: Sequence[Text], label: str, target: Target | None = None) -> Features:
        """States of ``target`` (the unchanged one by default) on ``texts``, stored once."""
        target = target or self.target
        shown = self._label(label)
        return self.store.build(target, texts, self.boundaries, progress=shown)

    def rows(
        self, texts: Sequence[Text], layers: Sequence[int], label: str, *, measured: bool
    ) -> Rows:
        """The target's attention rows: at the measured anchors, or at all positions."""
        measure = self.experiment.measure
        return store_rows(
            self.target,
            texts,
            self.cache / "attention",
            layers=layers,
            positions=[measurable_anchors(t, measure) for t in texts] if measured else None,
            progress=self._label(label),
        )

    def freeze(self) -> Path:
        """The file with the parts of the target that cells need."""
        path = self.cache / "frozen" / f"{self.target.fingerprint[:24]}.safetensors"
        freeze(self.target, path)
        return path

    # --- drafters -----------------------------------------------------------------------------

    def vocabulary(self, texts: Sequence[Text]) -> tuple[int, ...] | None:
        """Target id of each draft id, or None for the whole vocabulary."""
        size = self.experiment.drafter.draft_vocab_size
        if size is None or size == self.target.vocab_size:
            return None
        lessons = (text.continuation for text in self._lessons(texts))
        return tuple(choose_vocabulary(lessons, size, self.target.vocab_size).tolist())

    def _lessons(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Those of ``texts`` that are not held back to choose weights on."""
        # Texts that are too short to be held back for the shortest chains are for all variants.
        shortest = min(self.experiment.levels()["ttt"])
        spec = self.experiment.train.model_copy(update={"ttt": shortest})
        return texts[: len(hold_back(texts, spec)[0])]

    def supervised(self, texts: Sequence[Text], mapping: tuple[int, ...] | None) -> float:
        """Share of the tokens to learn from that bear loss. Raises DataError when none does."""
        ids = None if mapping is None else torch.tensor(mapping)
        texts = self._lessons(texts)
        share = supervised_share(texts, ids, self.experiment.train.max_length)
        if not share:
            raise DataError(
                f"no position of {len(texts)} texts is supervised, so nothing can be learned",
                remedy="Raise train.max_length, or give texts with longer responses.",
            )
        return share

    def drafter_config(self) -> DrafterConfig:
        """The plain drafter; fields that the file leaves out follow the target."""
        spec, target = self.experiment.drafter, self.target
        like = target.shape
        values: dict[str, Any] = {
            "hidden_size": spec.hidden_size or target.hidden_size,
            "intermediate_size": spec.intermediate_size or like.intermediate_size,
            "num_heads": spec.num_heads or like.num_heads,
            "num_kv_heads": spec.num_kv_heads or like.num_kv_heads,
            "head_dim": spec.head_dim or like.head_dim,
        }
        taken = {**values, "norm_eps": like.norm_eps, "rope": like.rope.model_dump()}
        for name, value in taken.items():
            if getattr(spec, name, None) is not None:
                origin, where = Origin.read, "experiment file"
            elif name in like.assumed:
                origin, where = Origin.assumed, "the target's config has none"
                if name == "intermediate_size":
                    where = f"four times the width: {where}"
            else:
                origin, where = Origin.derived, "the target's own"
                if name == "rope" and like.whole:
                    where += ", of whole heads: the target turns a part"
            self.provenance[f"drafter.{name}"] = Sourced(value=value, origin=origin, where=where)
        # Not refused where the head starts at random anyway: nothing was asked that is not done.
        usual, head = TrainSpec.model_fields["head_init"].default, self.experiment.train.head_init
        if values["hidden_size"] != target.hidden_size and head not in (0, usual):
            raise ConfigError(
                "train.head_init changes nothing: the target's head rows are of another width",
                got=f"{head:g}, drafter.hidden_size = {values['hidden_size']} and the target's "
                f"{target.hidden_size}",
                remedy="Set train.head_init = 0, the random head that such a drafter starts with.",
            )
        try:
            return DrafterConfig(
                **values,
                target_hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                draft_vocab_size=spec.draft_vocab_size or target.vocab_size,
                boundaries=self.boundaries,
                norm_eps=like.norm_eps,
                rope=like.rope,
            )
        except ValidationError as error:
            raise ConfigError(
                f"the drafter cannot be built: {first_fault(error)}",
                remedy="Correct [drafter] in the file.",
            ) from None

    def job(
        self, run: Path, frozen: Path, measured: Features, row: dict[str, Any], **more: Any
    ) -> CellJob:
        """The job of cell ``row["cell"]``, measured on ``measured``."""
        longest = max(len(text.tokens) for text in measured.texts)
        # Prompts that are probed in one batch: many when the drafter is small.
        at_once = 400_000 // (longest * self.target.hidden_size)
        return CellJob(
            cell=row["cell"],
            run=run,
            frozen=frozen,
            store=self.store.root,
            states=measured.key,
            prompts=tuple(dict.fromkeys(text.prompt_id for text in measured.texts)),
            measure=self.experiment.measure,
            row=row,
            threads=self.experiment.threads,
            texts_at_once=max(1, min(24, at_once)),
            **more,
        )

    def training_jobs(
        self, run: Path, frozen: Path, learned: Features, measured: Features, rows: Rows | None
    ) -> list[CellJob]:
        """A job for every variant and seed: train, then measure."""
        experiment = self.experiment
        mapping = self.vocabulary(learned.texts)
        base = self.drafter_config()
        origin = record(self.target, learned, self.templates)
        aligned: Rows | None = None
        if any(v.alignment for v in variants(experiment)):
            layer = experiment.train.align_layer
            layer = self.target.n_layers - 1 if layer is None else layer
            aligned = self.rows(learned.texts, [layer], "attention to learn from", measured=False)
        # Cells that a kill interrupted come in the same order; all seeds of a variant differ
        # most in time when the slowest stand last, so seeds are the outer loop.
        found = []
        for seed, variant in itertools.product(experiment.seeds, variants(experiment)):
            name = cell_name(experiment, variant, seed)
            row = {
                "cell": name,
                "variant": variant.name,
                "fusion_norm": variant.fusion_norm.value,
                "feedback": variant.feedback.value,
                "residual": variant.residual.value,
                "attention_gate": variant.attention_gate,
                "ttt": variant.ttt,
                "seed": seed,
                "axis": "trained",
                "condition": "",
                "coverage": coverage(mapping, measured.texts),
            }
            learning = Learning(
                states=learned.key,
                config=DrafterConfig.model_validate({**base.model_dump(), **variant.switches}),
                draft_to_target=mapping,
                seed=seed,
                spec=variant.training(experiment.train),
                rows=aligned if variant.alignment else None,
                origin=origin,
            )
            folder = run / "drafters" / name
            found.append(
                self.job(
                    *(run, frozen, measured, row), drafter=folder, learning=learning, rows=rows
                )
            )
        return found


def coverage(mapping: tuple[int, ...] | None, texts: Sequence[Text]) -> float:
    """Share of the measured continuations' tokens that a draft can name."""
    if mapping is None:
        return 1.0
    known = set(mapping)
    tokens = [token for text in texts for token in text.continuation]
    return sum(token in known for token in tokens) / len(tokens)
