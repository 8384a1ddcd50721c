"""From an experiment file to a run directory: target, texts, states, cells, tables, report.

Every stage leaves files that the next call finds, so a run that is killed anywhere goes on
with the same command and ends with the same tables. What does not depend on the variants
(texts, captured states) is content-addressed in ``cache`` beside the run and shared by runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from tqdm import tqdm

from driftlab.config import (
    DrafterConfig,
    Experiment,
    Feedback,
    FusionNorm,
    Origin,
    Provenance,
    Residual,
    Sourced,
    TargetSpec,
    refuse_assumptions,
)
from driftlab.data import grammar
from driftlab.data.corpus import Source, Writing, read_given, sources, write_corpus
from driftlab.data.features import Dtype, Features, FeatureStore
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.data.text import Text
from driftlab.engines.cell import CellJob, finished, run_cell
from driftlab.engines.pool import run_jobs
from driftlab.engines.pretrain import pretrain
from driftlab.engines.probe import measurable_anchors
from driftlab.engines.train import choose_vocabulary
from driftlab.errors import ConfigError, DataError, DriftlabError, RunError
from driftlab.models.frozen import freeze
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama
from driftlab.results.records import RunDirectory, config_hash
from driftlab.results.shards import atomic_file

MICRO = "micro"
RENDERING = Rendering("default")
# The embedded target: about ten CPU-seconds.
MICRO_STORIES, MICRO_STEPS, MICRO_BATCH, MICRO_LENGTH, MICRO_LR = 1500, 200, 8, 104, 1e-2
MICRO_TRAIN_PROMPTS, MICRO_PROMPT_TOKENS = 400, 14


@dataclass(frozen=True)
class Variant:
    """One element of the trained axes."""

    fusion_norm: FusionNorm
    feedback: Feedback
    residual: Residual
    attention_gate: bool
    ttt: int

    @property
    def name(self) -> str:
        """``per_layer+post_norm``, then what differs from the plain drafter."""
        name = f"{self.fusion_norm}+{self.feedback}"
        if self.residual is Residual.normed:
            name += "+normed"
        return f"{name}+gated" if self.attention_gate else name


def variants(experiment: Experiment) -> list[Variant]:
    """The product of the axes, in the file's order."""
    axes = experiment.axes
    return [
        Variant(*chosen)
        for chosen in itertools.product(
            axes.fusion_norm,
            axes.feedback,
            axes.residual,
            axes.attention_gate,
            axes.ttt or (experiment.train.ttt,),
        )
    ]


def cell_name(experiment: Experiment, variant: Variant, seed: int) -> str:
    """Id of a cell, unique in its run."""
    steps = f"/ttt{variant.ttt}" if len(experiment.axes.ttt) > 1 else ""
    return f"{variant.name}{steps}/s{seed}"


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    cache: str | Path | None = None,
    strict: bool = False,
    command: str = "",
    quiet: bool = False,
) -> RunDirectory:
    """Run every cell of ``experiment`` that ``out`` does not hold yet, and finish its tables.

    Parameters
    ----------
    cache: shared texts and states; by default ``cache`` beside ``out``.
    strict: refuse values that were assumed and not read.

    Raises
    ------
    DriftlabError: of any kind. What was measured before stays, and the same command goes on.
    """
    out = Path(out)
    cache = out.parent / "cache" if cache is None else Path(cache)
    manifest = {
        "config": experiment.model_dump(mode="json"),
        "config_hash": config_hash(_identity(experiment)),
        "name": experiment.name,
        "question": experiment.question,
        "command": command,
        "versions": _versions(),
        "git": _git_state(),
        "hardware": _hardware(),
    }
    fresh = not (out / "manifest.json").exists()
    with RunDirectory.create(out, manifest) as run:
        try:
            jobs, prompts = _prepare(experiment, run, cache, strict=strict, quiet=quiet)
        except DriftlabError:
            if fresh:
                _forget(out)
            raise
        with run.stage("cells"):
            todo = [job for job in jobs if not finished(job, prompts)]
            failed = _run_jobs(todo, len(prompts), experiment.workers, quiet=quiet)
        with run.stage("tables"):
            run.finish()
        if failed:
            raise RunError(
                f"{len(failed)} of {len(jobs)} cells failed: {_by_cause(failed)}",
                remedy=f"The others are in the tables of {out}. Mend the cause, then run it again.",
            )
        shutil.rmtree(out / "training", ignore_errors=True)
    return RunDirectory.open(out)


def _identity(experiment: Experiment) -> dict[str, Any]:
    """The settings that rows depend on. A run may be resumed with others changed."""
    return experiment.model_dump(
        mode="json",
        exclude={
            "question": True,
            "workers": True,
            "train": {"checkpoint_every"},
            "measure": {"bootstrap"},
        },
    )


def _prepare(
    experiment: Experiment, run: RunDirectory, cache: Path, *, strict: bool, quiet: bool
) -> tuple[list[CellJob], list[str]]:
    """Everything that cells share, made once: their jobs, and the prompts that they measure."""
    _remove_unfinished(run.path)
    plan = _Plan(experiment, run, cache, quiet=quiet)
    with run.stage("target"):
        target = plan.load_target()
    if strict:
        refuse_assumptions(plan.provenance, owner=experiment.target.source)
    with run.stage("texts"):
        train_texts, measure_texts, found = plan.make_texts(target)
    mapping = plan.vocabulary(target, train_texts)
    base = plan.drafter_config(target, mapping)
    with run.stage("states"):
        store = FeatureStore(cache / "states")
        learned = plan.store_states(store, target, train_texts, "states to learn from")
        measured = plan.store_states(store, target, measure_texts, "states to measure on")
        frozen = cache / "frozen" / f"{target.fingerprint[:24]}.safetensors"
        freeze(target, frozen)
    inputs = {
        "target": target.fingerprint,
        "train_states": learned.key,
        "measure_states": measured.key,
    }
    begun = run.manifest.get("inputs", inputs)
    if changed := [name for name in inputs if begun.get(name) != inputs[name]]:
        raise RunError(
            f"{run.path} was begun with other models or texts",
            got=f"changed since: {', '.join(changed)}",
            remedy="Restore the files that it was begun with, or choose another folder with --out.",
        )
    jobs = plan.jobs(base, mapping, learned, measured, frozen, store)
    plan.write_prompts(measure_texts, found)
    run.update_manifest(
        inputs=inputs,
        assumed={
            name: s.model_dump(mode="json")
            for name, s in plan.provenance.items()
            if s.origin is Origin.assumed
        },
        resolved={n: s.model_dump(mode="json") for n, s in plan.provenance.items()},
        coverage=plan.coverage(mapping, measure_texts),
    )
    return jobs, list(dict.fromkeys(text.prompt_id for text in measure_texts))


def _remove_unfinished(out: Path) -> None:
    """Drafters that a killed process was writing, under their temporary names."""
    for folder in (out / "drafters").rglob(".*"):
        shutil.rmtree(folder, ignore_errors=True)


def _forget(out: Path) -> None:
    """Undo the making of a run that ended before its first cell: the folder is free again."""
    with contextlib.suppress(OSError):
        (out / "manifest.json").unlink()
        shutil.rmtree(out / "rows", ignore_errors=True)
        (out / "lock").unlink()
        out.rmdir()


def _by_cause(failed: Mapping[str, DriftlabError]) -> str:
    """Each cause once, with its cells."""
    cells: dict[str, list[str]] = {}
    for cell, error in failed.items():
        cells.setdefault(error.cause, []).append(cell)
    return "; ".join(f"{cause} [{', '.join(names)}]" for cause, names in cells.items())


class _Plan:
    """What is resolved once for all cells."""

    def __init__(
        self, experiment: Experiment, run: RunDirectory, cache: Path, *, quiet: bool
    ) -> None:
        self.experiment, self.run, self.cache = experiment, run, cache
        self.quiet = quiet
        self.provenance: Provenance = {}

    def _label(self, text: str) -> str:
        return "" if self.quiet else text

    def load_target(self) -> Target:
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

    def make_texts(self, target: Target) -> tuple[list[Text], list[Text], list[Source]]:
        """Texts to learn from, texts to measure on, and the prompts of the latter."""
        spec = self.experiment.text
        longest = spec.measure_new_tokens or spec.max_new_tokens
        room = target.max_position - max(spec.max_new_tokens, longest)
        if room < 1:
            raise ConfigError(
                f"the new tokens leave no room for a prompt in {target.name}'s context of "
                f"{target.max_position} tokens",
                got=max(spec.max_new_tokens, longest),
                remedy="Lower text.max_new_tokens and text.measure_new_tokens.",
            )
        held = _prompts(spec.measure_prompts, target, "held-out", room)
        if spec.limit is not None:
            held = _spread(held, spec.limit)
        folder = self.cache / "texts"
        measured: list[Text] = []
        for temperature in spec.temperatures:
            writing = Writing(longest, temperature, spec.seed + 1, spec.batch)
            label = self._label(f"texts to measure on, temperature {temperature}")
            measured += write_corpus(target, held, writing, folder, progress=label)
        learned = self._texts_to_learn(target, room)
        measure = self.experiment.measure
        if not any(len(measurable_anchors(t, measure)) for t in measured):
            raise DataError(
                f"no measured text has {measure.depth} tokens after a first generated one",
                remedy="Raise text.max_new_tokens or lower measure.depth.",
            )
        return learned, measured, held

    def _texts_to_learn(self, target: Target, room: int) -> list[Text]:
        spec = self.experiment.text
        if spec.given is not None:
            if target.tokenizer is None:
                raise ConfigError(
                    "given texts need a target with a tokenizer",
                    got=target.name,
                    remedy="Leave text.given out, or name a target that has one.",
                )
            return read_given(
                spec.given,
                target.tokenizer,
                max_tokens=spec.train_tokens,
                limit=target.max_position,
            )
        prompts = _prompts(str(spec.train_prompts), target, "train", room)
        writing = Writing(
            spec.max_new_tokens, spec.train_temperature, spec.seed, spec.batch, spec.train_tokens
        )
        label = self._label("texts to learn from")
        return write_corpus(target, prompts, writing, self.cache / "texts", progress=label)

    def store_states(
        self, store: FeatureStore, target: Target, texts: Sequence[Text], label: str
    ) -> Features:
        dtype: Dtype = "float32" if target.dtype == torch.float32 else "bfloat16"
        return store.build(target, texts, self.boundaries, dtype=dtype, progress=self._label(label))

    def vocabulary(self, target: Target, texts: Sequence[Text]) -> tuple[int, ...] | None:
        """Target id of each draft id, or None for the whole vocabulary."""
        size = self.experiment.drafter.draft_vocab_size
        if size is None or size == target.vocab_size:
            return None
        chosen = choose_vocabulary((t.continuation for t in texts), size, target.vocab_size)
        return tuple(chosen.tolist())

    def coverage(self, mapping: tuple[int, ...] | None, texts: Sequence[Text]) -> float:
        """Share of the measured continuations' tokens that a draft can name."""
        if mapping is None:
            return 1.0
        known = set(mapping)
        tokens = [token for text in texts for token in text.continuation]
        return sum(token in known for token in tokens) / len(tokens)

    def drafter_config(self, target: Target, mapping: tuple[int, ...] | None) -> DrafterConfig:
        """The plain drafter; fields that the file leaves out follow the target."""
        spec, like = self.experiment.drafter, target.shape
        values: dict[str, Any] = {
            "hidden_size": spec.hidden_size or target.hidden_size,
            "intermediate_size": spec.intermediate_size or like.intermediate_size,
            "num_heads": spec.num_heads or like.num_heads,
            "num_kv_heads": spec.num_kv_heads or like.num_kv_heads,
            "head_dim": spec.head_dim or like.head_dim,
        }
        for name, value in values.items():
            given = getattr(spec, name) is not None
            self.provenance[f"drafter.{name}"] = Sourced(
                value=value,
                origin=Origin.read if given else Origin.derived,
                where="experiment file" if given else "the target's own",
            )
        try:
            return DrafterConfig(
                **values,
                target_hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                draft_vocab_size=len(mapping) if mapping else target.vocab_size,
                boundaries=self.boundaries,
                norm_eps=like.norm_eps,
                rope=like.rope,
            )
        except ValueError as error:
            raise ConfigError(
                f"the drafter cannot be built: {error}", remedy="Correct [drafter] in the file."
            ) from None

    def write_prompts(self, texts: Sequence[Text], found: Sequence[Source]) -> None:
        by_id = {source.id: source for source in found}
        rows = []
        for text in texts:
            rendered = by_id[text.prompt_id].rendered
            rows.append(
                {
                    "prompt": text.prompt_id,
                    "category": text.category,
                    "text": text.kind,
                    "temperature": text.temperature,
                    "n_prompt": text.prompt_len,
                    "n_text": len(text.tokens),
                    "n_anchors": len(measurable_anchors(text, self.experiment.measure)),
                    "first_token": text.tokens[0],
                    "bos": rendered.bos if rendered else True,
                    "template_sha": rendered.template_sha if rendered else None,
                    "loops": text.loops,
                    "tokens_sha": text.tokens_sha,
                }
            )
        self.run.write_prompts({name: [row[name] for row in rows] for name in rows[0]})

    def jobs(
        self,
        base: DrafterConfig,
        mapping: tuple[int, ...] | None,
        learned: Features,
        measured: Features,
        frozen: Path,
        store: FeatureStore,
    ) -> list[CellJob]:
        experiment = self.experiment
        # Cells that a kill interrupted come in the same order; all seeds of a variant differ
        # most in time when the slowest stand last, so seeds are the outer loop.
        found = []
        for seed, variant in itertools.product(experiment.seeds, variants(experiment)):
            name = cell_name(experiment, variant, seed)
            switches = {
                "fusion_norm": variant.fusion_norm,
                "feedback": variant.feedback,
                "residual": variant.residual,
                "attention_gate": variant.attention_gate,
            }
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
                "coverage": self.coverage(mapping, measured.texts),
            }
            found.append(
                CellJob(
                    cell=name,
                    run=self.run.path,
                    frozen=frozen,
                    store=store.root,
                    train_key=learned.key,
                    measure_key=measured.key,
                    config=DrafterConfig.model_validate({**base.model_dump(), **switches}),
                    draft_to_target=mapping,
                    seed=seed,
                    train=experiment.train.model_copy(update={"ttt": variant.ttt}),
                    measure=experiment.measure,
                    row=row,
                    threads=experiment.threads,
                    texts_at_once=_texts_at_once(base, measured),
                )
            )
        return found


def _texts_at_once(config: DrafterConfig, features: Features) -> int:
    """Prompts that are probed in one batch: many when the drafter is small."""
    longest = max(len(text.tokens) for text in features.texts)
    return max(1, min(24, 400_000 // (longest * config.hidden_size)))


def _spread(items: list[Source], limit: int) -> list[Source]:
    """``limit`` items at even distances, so that every category stays."""
    if limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _prompts(name: str, target: Target, stream: Any, room: int) -> list[Source]:
    if name == MICRO:
        if target.tokenizer is not None:
            raise ConfigError(
                "the prompts 'micro' are for the target 'micro'",
                got=target.name,
                remedy="Name a packaged set (held-out, train) or a .jsonl file.",
            )
        n = MICRO_TRAIN_PROMPTS if stream == "train" else 64
        stories = grammar.stories(n, 1, stream=stream)
        return [
            Source(f"story-{i:03d}", MICRO, tuple(s[:MICRO_PROMPT_TOKENS]), None)
            for i, s in enumerate(stories)
        ]
    if target.tokenizer is None:
        raise ConfigError(
            f"the target {target.name} has no tokenizer for the prompts {name!r}",
            remedy="Use the prompts 'micro' with the target 'micro'.",
        )
    return sources(load_prompts(name), target.tokenizer, RENDERING, limit=room)


def open_target(spec: TargetSpec, cache: Path, *, label: str = "") -> Target:
    """Load a target; ``micro`` is the embedded one, trained once for each ``cache``."""
    if spec.source == MICRO:
        return _micro_target(cache, label)
    return Target.load(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        trust_remote_code=spec.trust_remote_code,
    )


def _micro_target(cache: Path, label: str) -> Target:
    words = len(grammar.VOCABULARY)
    recipe = [MICRO_STORIES, MICRO_STEPS, MICRO_BATCH, MICRO_LENGTH, MICRO_LR, words]
    stories = grammar.stories(MICRO_STORIES, 0)
    text_sha = sha256(json.dumps(stories).encode()).hexdigest()
    key = sha256(json.dumps([recipe, text_sha, version("torch")]).encode()).hexdigest()[:16]
    path = cache / "targets" / f"micro-{key}.weights"
    model = _read_micro(path, words)
    if model is None:
        model = pretrain(
            stories,
            vocab_size=words,
            steps=MICRO_STEPS,
            batch=MICRO_BATCH,
            length=MICRO_LENGTH,
            lr=MICRO_LR,
            seed=0,
            progress=label,
        )
        data = save({n: t.contiguous() for n, t in model.state_dict().items()})
        with atomic_file(path) as file:
            file.write(sha256(data).digest() + data)
    return Target.from_model(model, name=MICRO, eos_ids=[grammar.VOCABULARY.index(grammar.EOS)])


def _read_micro(path: Path, words: int) -> torch.nn.Module | None:
    """The stored embedded target; None when it is absent or damaged, so that it is made anew."""
    if not path.exists():
        return None
    data = path.read_bytes()
    if sha256(data[32:]).digest() != data[:32]:
        return None
    model = tiny_llama(vocab_size=words)
    model.load_state_dict(load(data[32:]))
    return model


def _run_jobs(
    jobs: Sequence[CellJob], prompts: int, workers: int, *, quiet: bool
) -> dict[str, DriftlabError]:
    """Run the cells in processes of their own. Returns the failed cells and why."""
    if not jobs:
        return {}
    total = sum(job.train.steps + prompts for job in jobs)
    label = "1 cell" if len(jobs) == 1 else f"{len(jobs)} cells"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with tqdm(total=total, desc=label, disable=True if quiet else None) as bar:
        return run_jobs({j.cell: j for j in jobs}, run_cell, workers=workers, on_step=bar.update)


def _versions() -> dict[str, str]:
    names = ("driftlab", "torch", "transformers", "numpy", "scipy", "pandas", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _git_state() -> dict[str, Any] | None:
    """Commit of the code in use and whether it was changed; None outside a checkout."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # installed inside somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
