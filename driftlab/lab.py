"""A target and a drafter on the bench: probe, hook, intervene, speculate.

lab = driftlab.open(target, drafter)           # shows contract, sites, sizes
run = lab.probe(prompts, depth=8)              # run.steps, run.depths, ... are DataFrames
run.plot.sink_by_depth()                       # matplotlib Axes
with lab.hook("attn.pattern", fn): ...
with lab.intervene(pin_norm()): ...
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import torch
from pydantic import ValidationError

from driftlab.analysis import attribution
from driftlab.analysis.interventions import Intervention, apply, first_idle
from driftlab.config import (
    DrafterConfig,
    ExplainSpec,
    MeasureSpec,
    Origin,
    Provenance,
    Sourced,
    TargetSpec,
    check_sampling,
    is_whole,
    refuse_assumptions,
)
from driftlab.data.corpus import Source, Writing, refuse_repeated, sources, write_corpus
from driftlab.data.features import Features, FeatureStore
from driftlab.data.grammar import VOCABULARY, WordTokenizer
from driftlab.data.prompts import Prompt, Rendering, load_prompts
from driftlab.data.text import Text
from driftlab.engines.chain import Draft, Speculation, check_pair, speculate
from driftlab.engines.explain import explain_features
from driftlab.engines.habitat import differences, statistics_of
from driftlab.engines.precision import against_float32
from driftlab.engines.probe import (
    check_sink,
    measurable_anchors,
    measured_spans,
    probe,
    storable,
    target_probabilities,
)
from driftlab.errors import ConfigError, DataError, first_fault
from driftlab.experiment.texts import (
    MICRO,
    RENDERING,
    find_prompts,
    open_target,
    prompt_rows,
    spread,
)
from driftlab.models import memory
from driftlab.models.checkpoints import load_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Captured, HookFn, Moment, attach, capture, points
from driftlab.models.target import Target
from driftlab.progress import progress_bar
from driftlab.results.explanations import Explained
from driftlab.results.probed import ProbeRun
from driftlab.results.records import to_pandas
from driftlab.results.schema import MEASURED, OPTIONAL, SCHEMAS
from driftlab.results.shards import make_table, reduce_steps

CACHE = Path("runs/cache")
"""Where generated texts, captured states and the embedded target are kept by default."""

Prompts = str | Path | Sequence[str | Prompt]

_BUSY: WeakKeyDictionary[Drafter, tuple[Lab, int]] = WeakKeyDictionary()
"""Drafters that a lab runs or changes now, with that lab and its thread."""


def open(
    target: str | Path | Target,
    drafter: str | Path | Drafter,
    *,
    strict: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    cache: str | Path = CACHE,
) -> Lab:
    """Load a pair and prove that it belongs together.

    Parameters
    ----------
    target: a folder, a ``.gguf`` file, a hub id, ``micro`` (the embedded suite's target, trained
        on first use), or a Target; see :meth:`Target.load` for more ways to load one.
    drafter: a folder or hub id of any dialect, or a Drafter; see :func:`load_drafter`.
    strict: refuse contradictions in the drafter's file, and every assumed value.
    dtype: of a target that is loaded here, float32 by default. The drafter runs in float32.
    cache: folder for what is generated and can be used again. It may be a run's own ``cache``.

    Raises
    ------
    CheckpointError, ContractError: a file is damaged, or the two do not belong together.
    AssumptionError: ``strict``, and a value was assumed.
    ConfigError: ``dtype`` for a target that needs no loading.
    """
    cache = Path(cache)
    if isinstance(target, Target) or str(target) == MICRO:
        if dtype is not None:
            raise ConfigError(
                "dtype is for a target that is loaded here",
                got=f"{target if isinstance(target, str) else target.name} and {dtype}",
                remedy="Leave dtype out; a Target has its own, and micro runs in float32.",
            )
        if not isinstance(target, Target):
            target = open_target(TargetSpec(source=MICRO), cache, label="target learns the stories")
    else:
        target = Target.load(str(target), dtype=dtype or "float32")
    if strict:
        refuse_assumptions(target.provenance, owner=target.name)
    if not isinstance(drafter, Drafter):
        drafter = load_drafter(str(drafter), target=target, strict=strict)
    if strict:
        refuse_assumptions(drafter.provenance, owner="the drafter")
    return Lab(target, drafter, cache=cache)


class Lab:
    """A target with a drafter. Made by :func:`driftlab.open`; shows itself in a notebook.

    Attributes
    ----------
    target: the verified model.
    drafter: the drafter, or its changed version inside :meth:`intervene`.
    cache: folder of generated texts and captured states, addressed by content.
    """

    def __init__(self, target: Target, drafter: Drafter, *, cache: str | Path = CACHE) -> None:
        check_pair(target, drafter)
        self.target, self.drafter, self.cache = target, drafter.eval(), Path(cache)
        self._plain = self.drafter
        self._applied: tuple[Intervention, ...] = ()
        self._replaced: set[str] = set()  # sites at which a hook changed a value

    # --- what it is ---------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer; the embedded suite's words for ``micro``."""
        if self.target.tokenizer is not None:
            return self.target.tokenizer
        if self.target.name == MICRO and self.target.vocab_size == len(VOCABULARY):
            return WordTokenizer()
        raise ConfigError(
            f"the target {self.target.name} has no tokenizer",
            remedy="Give one: Target.from_model(model, tokenizer, name=...).",
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """Token ids as text."""
        return str(self.tokenizer.decode(list(tokens)))

    @property
    def contract(self) -> Provenance:
        """Every resolved value of both models with its origin: read, derived or assumed."""
        drafter = self.drafter
        fields: Provenance = {}
        for name in DrafterConfig.model_fields:
            stated = Sourced(
                value=getattr(drafter.config, name), origin=Origin.read, where="drafter's config"
            )
            if getattr(self._plain.config, name) != stated.value:
                swapped = f"swapped by {self.condition}"
                stated = Sourced(value=stated.value, origin=Origin.derived, where=swapped)
                fields[f"drafter.{name}"] = stated
            else:
                fields[f"drafter.{name}"] = drafter.provenance.get(name, stated)
        rest = {f"drafter.{n}": s for n, s in drafter.provenance.items()}
        return {f"target.{n}": s for n, s in self.target.provenance.items()} | rest | fields

    @property
    def sites(self) -> tuple[str, ...]:
        """Names that :meth:`hook` and :meth:`capture` take."""
        return tuple(points(self.drafter))

    @property
    def variant(self) -> str:
        """``per_layer+post_norm``, then ``+normed`` and ``+gated`` where they hold; as trained,
        whatever an intervention swaps."""
        config = self._plain.config
        return config.variant + ("+gated" if config.attention_gate else "")

    @property
    def condition(self) -> str:
        """The interventions in force, as text; empty for the drafter as it was trained."""
        return " + ".join(map(str, self._applied))

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters of both models, and bytes of the drafter's cache for each token."""
        config = self.drafter.config
        own = dict(self.drafter.named_parameters())
        values = config.mla.v_head_dim if config.mla else config.head_dim
        keys = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim if config.mla else values
        heads = config.num_heads if config.mla else config.num_kv_heads
        itemsize = self.drafter.norm.weight.element_size()
        return {
            "target parameters": sum(p.numel() for p in self.target.model.parameters()),
            "drafter parameters": sum(p.numel() for p in own.values()),
            "drafter parameters without embeddings": sum(
                p.numel() for n, p in own.items() if "embed" not in n
            ),
            "drafter cache, bytes a token": config.num_layers * heads * (keys + values) * itemsize,
        }

    def _summary(self) -> list[tuple[str, str]]:
        config = self.drafter.config
        shown = [
            ("target", repr(self.target)),
            ("drafter", f"{self.variant}, boundaries {config.boundaries}"),
            ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids"),
            *((name, f"{size:,}") for name, size in self.sizes.items()),
            ("sites", f"{len(self.sites)}: {_shortened(self.sites)}"),
        ]
        if self._applied:
            shown.insert(2, ("applied", self.condition))
        return shown

    def _contract_rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (name, _short(s.value), str(s.origin), s.where) for name, s in self.contract.items()
        ]

    def __repr__(self) -> str:
        summary = self._summary()
        wide = max(len(name) for name, _ in summary)
        lines = [f"  {name:{wide}}  {value}" for name, value in summary]
        rows = self._contract_rows()
        a, b, c = (max(len(row[i]) for row in rows) for i in range(3))
        lines += [f"    {n:{a}}  {v:{b}}  {o:{c}}  {w}".rstrip() for n, v, o, w in rows]
        lines.insert(len(summary), "  contract")
        return "\n".join(["Lab", *lines])

    def _repr_html_(self) -> str:
        summary = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self._summary()
        )
        marks = {Origin.assumed.value: "background:#fff0c2;color:#000"}
        rows = "".join(
            f"<tr style='{marks.get(row[2], '')}'>"
            + "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in self._contract_rows()
        )
        assumed = sum(s.origin is Origin.assumed for s in self.contract.values())
        return (
            f"<table>{summary}</table><details><summary>contract: {len(self.contract)} values, "
            f"{assumed} assumed</summary><table><tr><th>value of</th><th>is</th><th>origin</th>"
            f"<th>where</th></tr>{rows}</table></details>"
        )

    # --- reading and changing values ----------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise ConfigError while another lab, or another thread, has the drafter.

        Its sites and hooks are in the drafter: what one changes, the other would measure.
        """
        mine = self, threading.get_ident()
        held = _BUSY.get(self._plain)
        if held not in (None, mine):
            raise ConfigError(
                "another lab or another thread runs or changes this drafter now",
                remedy="Open each lab with a drafter of its own, and use it in one thread.",
            )
        _BUSY[self._plain] = mine
        try:
            yield
        finally:
            if held is None:
                _BUSY.pop(self._plain, None)

    @contextmanager
    def hook(
        self, globs: str | Iterable[str], fn: HookFn, *, depths: Iterable[int] | None = None
    ) -> Iterator[None]:
        """Call ``fn(value, moment)`` at matching sites while the context is open.

        ``moment`` has ``site``, ``depth``, ``anchors`` and ``rows``. None from ``fn`` leaves the
        value, a tensor like it takes its place. What is probed with a value that ``fn`` changed is
        ``applied``, under the condition ``replaced SITE``. Raises SiteError for a glob that matches
        nothing, for what cannot take the value's place, and on exit for a site that never fired.
        """

        def call(value: torch.Tensor, moment: Moment) -> torch.Tensor | None:
            before = value.clone()
            new = fn(value, moment)
            now = value if new is None else new
            if not (isinstance(now, torch.Tensor) and torch.equal(now, before)):
                self._replaced.add(moment.site)
            return new

        with self._alone(), attach(self.drafter, globs, call, depths=depths):
            yield

    @contextmanager
    def capture(
        self, globs: str | Iterable[str], *, depths: Iterable[int] | None = None
    ) -> Iterator[Captured]:
        """Keep the newest value of every matching (site, depth) while the context is open.

        A probe runs texts in batches and once for each mode, so capture it on one prompt and
        one mode, or a speculation of one round.
        """
        with self._alone(), capture(self.drafter, globs, depths=depths) as kept:
            yield kept

    @contextmanager
    def intervene(self, *interventions: Intervention) -> Iterator[Lab]:
        """Run the drafter under ``interventions``; what is probed meanwhile is ``applied``.

        Contexts nest. Raises ConfigError for an intervention that does not fit the drafter, and
        for contexts that are closed in another order; SiteError on exit when the drafter was
        never run.
        """
        if not interventions or not all(isinstance(i, Intervention) for i in interventions):
            raise ConfigError(
                "no intervention is named",
                got=interventions or None,
                remedy="For example pin_norm().",
            )
        with self._alone():
            plain, before = self.drafter, self._applied
            now = (*before, *interventions)
            with apply(plain, interventions) as changed:
                self.drafter, self._applied = changed, now
                try:
                    yield self
                finally:
                    crossed = self._applied is not now
                    if crossed:
                        plain, before = self._plain, ()
                    self.drafter, self._applied = plain, before
            if crossed:
                raise ConfigError(
                    "interventions are closed in another order than they were opened",
                    remedy="Use nested `with` blocks; what was run since then is not labelled.",
                )

    # --- running ------------------------------------------------------------------------------

    def speculate(
        self,
        prompt: str | Prompt | Sequence[int] | torch.Tensor,
        *,
        depth: int = 8,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        draft: Draft = "greedy",
        seed: int = 0,
        rendering: Rendering = RENDERING,
    ) -> Speculation:
        """Continue one prompt (text, Prompt or token ids) by verified speculation.

        At temperature 0 the continuation is the target's own greedy text, whatever the drafter
        does; see :func:`driftlab.engines.chain.speculate` for the rule above it.
        """
        if isinstance(prompt, str | Prompt):
            (source,) = self._sources([prompt], rendering, max_new_tokens)
            tokens = list(source.tokens)
        else:
            tokens = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
        with self._alone():
            return speculate(
                self.target,
                self.drafter,
                tokens,
                depth=depth,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                draft=draft,
                seed=seed,
            )

    def states(
        self,
        prompts: Prompts,
        *,
        temperature: float | Sequence[float] = 0.0,
        max_new_tokens: int = 64,
        limit: int | None = None,
        seed: int = 0,
        batch: int = 16,
        rendering: Rendering = RENDERING,
    ) -> Features:
        """The target's own continuations of ``prompts`` and its states on them, from the cache.

        ``.item(i)`` holds tokens [S], aux [S, A*Ht] and last [S, Ht] of one text, which is what
        the functions of :mod:`driftlab.analysis.attribution` take. See :meth:`probe` for the
        parameters.
        """
        _check_counts(max_new_tokens=max_new_tokens, limit=limit, batch=batch)
        temperatures = _temperatures(temperature, seed)
        found = self._measured(prompts, rendering, max_new_tokens, limit)
        return self._states(found, temperatures, max_new_tokens, seed, batch)

    def probe(
        self,
        prompts: Prompts,
        *,
        depth: int = 8,
        temperature: float | Sequence[float] = 0.0,
        max_new_tokens: int = 128,
        modes: Sequence[Literal["free", "forced"]] = ("free", "forced"),
        limit: int | None = None,
        sink: Literal["first", "auto"] | tuple[int, ...] = "first",
        recent: int = 8,
        max_anchors: int | None = None,
        shapley: bool = False,
        seed: int = 0,
        batch: int = 16,
        rendering: Rendering = RENDERING,
    ) -> ProbeRun:
        """Measure the drafter on the target's own continuations of ``prompts``.

        Texts and states are found in ``cache`` when they were made before, so that the same
        probe under an intervention runs on the same texts. Sampled text of a prompt depends on
        the list that it stands in, not on the prompt alone.

        Parameters
        ----------
        prompts: ``held-out``, ``train``, ``micro`` or a ``.jsonl`` file; or a list of Prompts
            and of strings, each one user turn.
        depth: how deep every chain drafts.
        temperature: of the text; or both, as in ``(0.0, 1.0)``. 0 is greedy, which loops on small
            models: loops flatter a drafter.
        max_new_tokens: longest continuation; only anchors with ``depth`` tokens after the
            newest one are measured.
        modes: chains that read their own drafts (free), or the text's tokens (forced).
        limit: at most so many prompts, at even distances.
        sink, recent, max_anchors: see :class:`driftlab.config.MeasureSpec`.
        shapley: fill ``fused.shapley`` (2^A more passes at depth 1).
        seed: of sampled text; a run's own are drawn with its ``text.seed`` + 1.
        batch: prompts that the target continues, and texts that the drafter runs, at a time.
        rendering: chat template and BOS; another than the default makes the row ``applied``.

        Raises
        ------
        DataError: no prompts, a prompt beyond the context, or texts too short for ``depth``.
        ConfigError: an impossible setting.
        """
        _check_counts(depth=depth, max_new_tokens=max_new_tokens, limit=limit, batch=batch)
        try:
            spec = MeasureSpec(
                depth=depth,
                modes=tuple(modes),
                sink=sink,
                recent=recent,
                max_anchors=max_anchors,
            )
        except ValidationError as error:
            raise ConfigError(first_fault(error), got=error.errors()[0]["input"]) from None
        if depth >= max_new_tokens:  # said before the target writes: no text could be long enough
            raise _too_short(depth)
        temperatures = _temperatures(temperature, seed)
        found = self._measured(prompts, rendering, max_new_tokens, limit)
        longest = max((len(source.tokens) for source in found), default=0) + max_new_tokens
        config = self.drafter.config
        at_once = min(batch, len(found) * len(temperatures))
        memory.refuse_too_large(
            f"probing {at_once} texts of up to {longest} tokens at once",
            lambda n: memory.probing_bytes(config, n, longest, depth),
            at_once,
            "--batch",
        )
        features = self._states(found, temperatures, max_new_tokens, seed, batch)
        self._check_effect(features, spec)
        rows = self._measure(features, spec, self._named(rendering)[0], batch, shapley)
        cell, condition = self._named(rendering)  # with what hooks turned out to replace
        pieces = _tables(rows, cell)
        pieces["cells"] = [make_table("cells", self._cell(cell, condition, features), cell)]
        pieces["prompts"] = [make_table("prompts", prompt_rows(features.texts, found, spec), cell)]
        settings = {
            "measure": spec.model_dump(mode="json"),
            "prompts": [s.id for s in found],
            "temperatures": temperatures,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "batch": batch,
            "rendering": rendering.name,
            "drafter": self.drafter.config.model_dump(mode="json"),
            "interventions": {cell: [i.record() for i in self._applied]},
        }
        said = self.drafter.provenance.get("notes")
        manifest = {
            "name": "probe",
            "config": settings,
            "inputs": {
                "target": self.target.fingerprint,
                "states": features.key,
                "drafters": {cell: _weights_sha(self.drafter)},
            },
            "resolved": {n: s.model_dump(mode="json") for n, s in self.contract.items()},
            "assumed": {
                n: s.model_dump(mode="json")
                for n, s in self.contract.items()
                if s.origin is Origin.assumed
            },
            "versions": {n: version(n) for n in ("driftlab", "torch", "transformers")},
            "warnings": list(said.value) if said is not None else [],
            "precision": against_float32(
                self.target, features.texts, self.drafter.config.boundaries
            ),
            "differs": differences(
                self.drafter,
                self.target,
                statistics_of(features),
                longest=max(len(text.tokens) for text in features.texts),
                templates=[s.rendered.template_sha for s in found if s.rendered],
                texts=features.texts,
            ),
        }
        return ProbeRun({n: pa.concat_tables(p) for n, p in pieces.items()}, manifest)

    def explain(
        self,
        prompts: Prompts,
        *,
        spec: ExplainSpec = ExplainSpec(),
        temperature: float = 1.0,
        max_new_tokens: int = 64,
        limit: int | None = None,
        seed: int = 0,
        batch: int = 16,
        rendering: Rendering = RENDERING,
    ) -> Explained:
        """What the drafter's tokens owe to layers, inputs, states and keys (docs/explain.md).

        On the target's own continuations of ``prompts``; looping ones are left out. ``.answers()``
        says it in sentences, ``.table`` holds the rows, and
        ``driftlab.results.explain_figures.EXPLAIN_FIGURES`` draws them. Interventions in force
        act here as well. See :meth:`probe` for the parameters.

        Raises DataError when no text has ``spec.depth`` tokens after a first generated one.
        """
        if spec.depth >= max_new_tokens:
            raise _too_short(spec.depth)
        features = self.states(
            prompts,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            limit=limit,
            seed=seed,
            batch=batch,
            rendering=rendering,
        )
        self._check_effect(features, MeasureSpec(depth=spec.depth, sink=spec.sink))
        with self._alone():
            self._replaced.clear()
            found, left_out = explain_features(self.drafter, features, spec)
        cell, condition = self._named(rendering)
        tables = [
            make_table(
                "explained",
                {"cell": cell, "prompt": text.prompt_id, **columns},
                f"cell {cell}, prompt {text.prompt_id}",
            )
            for text, columns in found
        ]
        cells = make_table("cells", self._cell(cell, condition, features), cell)
        return Explained.build(
            pa.concat_tables(tables),
            to_pandas(cells, False),
            {},
            left_out=left_out,
            all_loop=all(text.loops for text, _ in found),
        )

    def _named(self, rendering: Rendering) -> tuple[str, str]:
        """The cell's name, and the condition that it is measured under."""
        given = "" if rendering == RENDERING else f"rendering {rendering.name}"
        replaced = f"replaced {', '.join(sorted(self._replaced))}" if self._replaced else ""
        condition = " + ".join(filter(None, (given, self.condition, replaced)))
        return "/".join(filter(None, (self.variant, condition))), condition

    def _measured(
        self, prompts: Prompts, rendering: Rendering, new: int, limit: int | None
    ) -> list[Source]:
        found = spread(self._sources(prompts, rendering, new), limit)
        refuse_repeated([p.tokens for p in found], [p.id for p in found])
        return found

    def _sources(self, prompts: Prompts, rendering: Rendering, new: int) -> list[Source]:
        room = self.target.max_position - new
        if room < 1:
            raise ConfigError(
                f"{new} new tokens leave no room for a prompt in {self.target.name}'s context of "
                f"{self.target.max_position} tokens",
                remedy="Ask for fewer new tokens.",
            )
        if str(prompts) == MICRO and self.target.tokenizer is None:
            return find_prompts(MICRO, self.target, "held-out", room)
        if isinstance(prompts, str | Path):
            found = load_prompts(prompts)
        else:
            given = list(prompts) if isinstance(prompts, Iterable) else [prompts]
            if odd := [p for p in given if not isinstance(p, str | Prompt)]:
                raise DataError(
                    "a prompt is neither text nor a Prompt",
                    got=repr(odd[0]),
                    remedy="Give texts; token ids are for speculate.",
                )
            found = [
                p if isinstance(p, Prompt) else Prompt(f"prompt-{i:03d}", "given", p)
                for i, p in enumerate(given)
            ]
        counts = Counter(prompt.id for prompt in found)
        if twice := sorted(id for id, n in counts.items() if n > 1):
            raise DataError("prompt ids occur twice", got=", ".join(twice[:3]))
        return sources(found, self.tokenizer, rendering, limit=room)

    def _states(
        self,
        found: Sequence[Source],
        temperatures: Sequence[float],
        max_new_tokens: int,
        seed: int,
        batch: int,
    ) -> Features:
        texts: list[Text] = []
        with self._alone():
            for temperature in temperatures:
                writing = Writing(max_new_tokens, temperature, seed, batch)
                label = f"target writes, temperature {temperature:g}"
                texts += write_corpus(
                    self.target, found, writing, self.cache / "texts", progress=label
                )
            return FeatureStore(self.cache / "states").build(
                self.target,
                sorted(texts, key=lambda t: (t.prompt_id, t.kind)),
                self.drafter.config.boundaries,
                batch=batch,
                progress="states of the target",
            )

    def _check_effect(self, features: Features, spec: MeasureSpec) -> None:
        """Refuse a sink that a text does not have, and an intervention that changes nothing."""
        spans = measured_spans(features.texts, spec)
        check_sink(spec.sink, [length for _, length in spans])
        if found := first_idle(self._applied, self.drafter.config, spans, spec.depth):
            raise ConfigError(
                f"{found[0]} changes nothing: {found[1]}",
                remedy="It would be labelled as one that does: correct it or leave it out.",
            )

    def _measure(
        self, features: Features, spec: MeasureSpec, label: str, batch: int, shapley: bool
    ) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
        """Prompt and rows by table of every text, in the order of their keys."""
        texts = features.texts
        if not any(len(measurable_anchors(text, spec)) for text in texts):
            raise _too_short(spec.depth)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        made: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        self._replaced.clear()
        with (
            self._alone(),
            progress_bar(f"probe {label}", total=len(order), unit="text") as bar,
        ):
            for start in range(0, len(order), batch):
                rows = order[start : start + batch]
                made.update(zip(rows, self._rows(features, rows, spec, shapley), strict=True))
                bar.update(len(rows))
        return [(text.prompt_id, made[i]) for i, text in enumerate(texts)]

    def _rows(
        self, features: Features, rows: Sequence[int], spec: MeasureSpec, shapley: bool
    ) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        drafter = self.drafter
        dtype = drafter.norm.weight.dtype
        items = [features.item(i) for i in rows]
        aux = [item["aux"].to(dtype) for item in items]
        measured = probe(
            drafter,
            [features.texts[i] for i in rows],
            aux,
            spec,
            target_probabilities=[
                target_probabilities(self.target, item["last"], drafter.draft_to_target)
                for item in items
            ],
        )
        for one, states in zip(measured, aux, strict=True):
            text = one.text
            labels = {"prompt": text.prompt_id, "text": text.kind}
            tables: list[tuple[str, dict[str, Any]]] = [
                (n, {**labels, **storable(c)}) for n, c in one.tables.items()
            ]
            for name, columns in tables:
                if name == "steps":
                    columns["temperature"] = text.temperature
                elif name == "fused" and shapley:
                    value = attribution.shapley(
                        drafter,
                        torch.tensor(text.tokens),
                        states,
                        anchors=measurable_anchors(text, spec),
                    ).mean()[:, 0]
                    columns["shapley"] = np.ma.masked_invalid(value.numpy())
            yield tables

    def _cell(self, cell: str, condition: str, features: Features) -> dict[str, Any]:
        config = self._plain.config
        known = set(self.drafter.draft_to_target.tolist())
        said = [token for text in features.texts for token in text.continuation]
        source = self.drafter.provenance.get("source")
        return {
            "cell": cell,
            "variant": self.variant,
            "fusion_norm": config.fusion_norm.value,
            "feedback": config.feedback.value,
            "residual": config.residual.value,
            "attention_gate": config.attention_gate,
            "axis": "applied" if condition else "trained",
            "condition": condition,
            "status": "done",
            "n_parameters": self.sizes["drafter parameters without embeddings"],
            "coverage": sum(token in known for token in said) / max(1, len(said)),
            "note": None if source is None else f"drafter {source.value}",
        }


def _tables(
    rows: Sequence[tuple[str, list[tuple[str, dict[str, Any]]]]], cell: str
) -> dict[str, list[pa.Table]]:
    """Checked tables of what `Lab._measure` gives."""
    names = (*(n for n in MEASURED if n not in OPTIONAL), "depths")
    found: dict[str, list[pa.Table]] = {name: [] for name in names}
    for prompt, tables in rows:
        where = f"cell {cell}, prompt {prompt}"
        for name, columns in tables:
            found[name].append(make_table(name, {"cell": cell, **columns}, where))
            if name == "steps":
                found["depths"].append(reduce_steps(found["steps"][-1], where))
    return {n: tables or [SCHEMAS[n].empty_table()] for n, tables in found.items()}


def _too_short(depth: int) -> DataError:
    return DataError(
        f"no text has {depth} tokens after a first generated one",
        remedy="Ask for more new tokens, or lower the depth.",
    )


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is None and name == "limit":
            continue
        if not is_whole(value) or not 1 <= value < 2**31:
            raise ConfigError(f"{name} is no whole number from 1 to 2147483647", got=repr(value))


def _temperatures(given: float | Sequence[float], seed: int) -> tuple[float, ...]:
    """At most one greedy and one sampled text for each prompt: tables tell them apart by that."""
    found = tuple(given) if isinstance(given, Sequence) else (given,)
    check_sampling(found, seed)
    if not found or len({t > 0 for t in found}) < len(found):
        raise ConfigError(
            "temperature takes 0 (greedy), one value above 0 (sampled), or both", got=found
        )
    return found


def _weights_sha(drafter: Drafter) -> str:
    digest = sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _short(value: object, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _shortened(sites: Sequence[str]) -> str:
    """Site names, those of the captured states under one ``{i}``."""
    named = dict.fromkeys(
        ".".join("{i}" if part.isdigit() else part for part in site.split(".")) for site in sites
    )
    return ", ".join(named)
