"""Explain drafters: what their drafted tokens owe to which input, layer, state and key.

The functions of analysis/attribution on stored texts and states, reduced to the rows of table
``explained``; and the drafters of a stored run, each in a process of its own, one shard for
every (cell, prompt), so that what is killed goes on where it stopped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.analysis import attribution
from driftlab.config import ExplainSpec, MeasureSpec
from driftlab.data.features import Features, FeatureStore, Item
from driftlab.data.text import Text
from driftlab.engines.cell import fault_of
from driftlab.engines.pool import Progress, run_jobs
from driftlab.engines.probe import check_sink, measurable_anchors, sink_set
from driftlab.errors import ConfigError, DataError, RunError
from driftlab.models.checkpoints.load import load_drafter
from driftlab.models.drafter import Drafter
from driftlab.progress import progress_bar
from driftlab.results.explanations import Explained, ExplainedFolder, boundary_part
from driftlab.results.records import RunDirectory, config_hash
from driftlab.results.schema import REGIONS
from driftlab.results.slices import TEXTS

Columns = dict[str, list[Any]]

_PAST = ("previous", "same_token")

EXPLAINED = 1
"""Version of what is measured; folders of another version are made anew elsewhere."""


def explain(
    drafter: Drafter, texts: Sequence[Text], states: Sequence[Item], spec: ExplainSpec
) -> list[Columns]:
    """Rows of ``explained`` for each text: depth, measure, part, n, value (and text).

    Measures, units and formulas: ``driftlab.results.explanations.MEASURES``. A text without
    ``spec.depth`` true tokens after a first anchor gives no rows. Hooks and interventions that
    are in force act here as well.

    Raises ConfigError when no depth of ``spec.gradient_depths`` is one of the chain.
    """
    _check_depths(spec)
    return [_explain(drafter, text, item, spec) for text, item in zip(texts, states, strict=True)]


def explainable(text: Text, spec: ExplainSpec, count: int | None = None) -> Tensor:
    """The ``count`` anchors of ``text`` that are explained; none when it is too short."""
    most = spec.anchors if count is None else count
    return measurable_anchors(text, MeasureSpec(depth=spec.depth, max_anchors=most))


def _check_depths(spec: ExplainSpec) -> None:
    if spec.depth < min(spec.gradient_depths):
        raise ConfigError(
            f"every depth of gradient_depths exceeds depth = {spec.depth}",
            got=list(spec.gradient_depths),
            remedy="Raise depth, or name a depth of the chain in gradient_depths.",
        )


class _Rows:
    """Rows of one text; a mean over no anchor is no row."""

    def __init__(self) -> None:
        self.columns: Columns = defaultdict(list)

    def add(self, measure: str, part: str, depth: int, value: float, n: int) -> None:
        if n and not math.isnan(value):
            row = {"measure": measure, "part": part, "depth": depth, "value": value, "n": n}
            for name, entry in row.items():
                self.columns[name].append(entry)

    def means(self, measure: str, part: str, values: Tensor, known: Tensor | None = None) -> None:
        """Rows of depths 1.. from ``values`` [T, D], over the anchors that are ``known``."""
        for d in range(values.shape[1]):
            column = values[:, d] if known is None else values[known[:, d], d]
            if len(column):
                self.add(measure, part, d + 1, float(column.double().mean()), len(column))


def _explain(drafter: Drafter, text: Text, item: Item, spec: ExplainSpec) -> Columns:
    anchors = explainable(text, spec)
    rows = _Rows()
    if not len(anchors):
        return dict(rows.columns)
    # What lies past the deepest truth of the last anchor is read by nobody.
    size = int(anchors[-1]) + spec.depth + 2
    dtype = drafter.norm.weight.dtype
    tokens, last = item["tokens"][:size], item["last"][:size]
    aux = item["aux"][:size].to(dtype)
    if drafter.config.boundaries:
        _layers(rows, drafter, tokens, aux, anchors, spec)
    _gradients(rows, drafter, tokens, aux, anchors, spec)
    _lens(rows, drafter, tokens, aux, anchors, spec)
    _states(rows, drafter, tokens, aux, last, explainable(text, spec, spec.state_anchors), spec)
    measure = MeasureSpec(sink=spec.sink)
    lengths = torch.tensor([size])
    sink = sink_set(drafter, tokens[None], aux[None], lengths, measure)[0]
    _attention(rows, drafter, tokens, aux, sink, text, anchors, spec)
    return {**rows.columns, "text": [text.kind] * len(rows.columns["n"])}


def _layers(
    rows: _Rows, drafter: Drafter, tokens: Tensor, aux: Tensor, anchors: Tensor, spec: ExplainSpec
) -> None:
    names = [boundary_part(b) for b in drafter.config.boundaries]
    pieces = attribution.split(drafter, aux[anchors])
    n = len(anchors)
    for i, name in enumerate(names):
        rows.add("share", name, 1, float(pieces.share[i].double().mean()), n)
        rows.add("alignment", name, 1, float(pieces.cosine[i].double().mean()), n)
    bias = drafter.fc.bias if drafter.config.fc_bias else 0.0
    rest = pieces.fused - pieces.parts.sum(dim=0) - bias
    rows.add("gap", "split", 1, float((rest.norm(dim=-1) / pieces.fused.norm(dim=-1)).max()), n)
    found = attribution.shapley(drafter, tokens, aux, depth=spec.depth, anchors=anchors)
    for i, name in enumerate(names):
        rows.means("shapley", name, found.values[i], found.known)
    rows.means("logprob", "all layers", found.present, found.known)
    rows.means("logprob", "no layer", found.absent, found.known)
    off = (found.values.sum(dim=0) - (found.present - found.absent)).abs()
    for d in range(spec.depth):
        known = off[found.known[:, d], d]
        if len(known):
            rows.add("gap", "shapley", d + 1, float(known.max()), len(known))


def _gradients(
    rows: _Rows, drafter: Drafter, tokens: Tensor, aux: Tensor, anchors: Tensor, spec: ExplainSpec
) -> None:
    some = torch.linspace(0, len(anchors) - 1, min(spec.gradient_anchors, len(anchors)))
    depths = [d for d in spec.gradient_depths if d <= spec.depth]
    found = attribution.integrated_gradients(
        drafter,
        tokens,
        aux,
        depth=spec.depth,
        depths=depths,
        anchors=anchors[some.round().long()],
        background=anchors,
        steps=spec.gradient_steps,
        gap=spec.gradient_gap,
    )
    for depth, part in found.groupby("depth"):
        d, n = int(str(depth)), len(part)
        for name in ("fused", "embedding", "feedback"):
            if name != "feedback" or d > 1:
                rows.add("gradients", name, d, float(part[name].mean()), n)
        rows.add("gradients", "all", d, float(part["difference"].mean()), n)
        rows.add("gap", "gradients", d, float(part["gap"].abs().max()), n)


def _lens(
    rows: _Rows, drafter: Drafter, tokens: Tensor, aux: Tensor, anchors: Tensor, spec: ExplainSpec
) -> None:
    lens = attribution.logit_lens(drafter, tokens, aux, depth=spec.depth, anchors=anchors)
    for row in (
        lens.groupby(["depth", "site"], as_index=False)
        .agg(
            draft=("says_draft", "mean"),
            read=("says_previous", "mean"),
            logprob=("logprob", "mean"),
            known=("logprob", "count"),
        )
        .to_dict("records")
    ):
        d, site = int(row["depth"]), str(row["site"])
        rows.add("lens_logprob", site, d, row["logprob"], int(row["known"]))
        if site != "state.pre":  # there the drafted token is read
            rows.add("lens_draft", site, d, row["draft"], len(anchors))
            rows.add("lens_read", site, d, row["read"], len(anchors))


def _states(
    rows: _Rows,
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    last: Tensor,
    anchors: Tensor,
    spec: ExplainSpec,
) -> None:
    n = len(anchors)
    moves = attribution.state_geometry(
        drafter, tokens, aux, depth=spec.depth, last=last, anchors=anchors
    )
    for row in moves.to_dict("records"):
        d = int(row["depth"])
        for name in (*(f"{w}{p}" for w in ("", "write_") for p in _PAST), "other", "target"):
            if d > 1 or not name.endswith("same_token"):
                rows.add("cosine", name, d, row[f"cosine_{name}"], n)
        rows.add("rank", "state", d, row["effective_rank"], n)
        rows.add("rank", "target", d, row["effective_rank_target"], n)
        for name in ("token", "anchor"):
            rows.add("geometry", name, d, row[f"geometry_{name}"], n)


def _attention(
    rows: _Rows,
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    sink: Tensor,
    text: Text,
    anchors: Tensor,
    spec: ExplainSpec,
) -> None:
    found = attribution.attention_effects(
        drafter,
        tokens,
        aux,
        depth=spec.depth,
        sink=sink,
        prompt_len=text.prompt_len,
        anchors=anchors,
        where=f"{text.kind} text {text.prompt_id}",
    )
    # Mass and effect of the same anchors, so that they can be held against each other.
    for i, region in enumerate(REGIONS):
        rows.means("mass", region, found.mass[i], found.known)
    for i, region in enumerate(attribution.EFFECTS):
        there = found.known.clone()
        if region == "draft_mass":
            there[:, :2] = False  # no drafted key but the query's own
        rows.means("effect", region, found.direct[i], there)
        rows.means("effect_chain", region, found.chain[i], there)


# --- a stored run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExplainJob:
    """One cell of a run; picklable. ``rows`` are indices into the texts of ``states``."""

    cell: str
    drafter: Path
    store: Path
    states: str
    run: Path
    rows: tuple[int, ...]
    spec: ExplainSpec
    threads: int


def explain_cell(job: ExplainJob, on_step: Progress) -> None:
    """Explain what has no shard yet, one text after the other."""
    torch.set_num_threads(job.threads)
    folder = ExplainedFolder(job.run)
    features = FeatureStore(job.store).open(job.states)
    drafter = load_drafter(job.drafter)
    for i in job.rows:
        text = features.texts[i]
        if not folder.has(job.cell, text.prompt_id):
            (columns,) = explain(drafter, [text], [features.item(i)], job.spec)
            folder.write(job.cell, text.prompt_id, columns)
        on_step(1)


def explain_run(
    path: str | Path,
    spec: ExplainSpec | None = None,
    *,
    limit: int | None = None,
    cache: str | Path | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Explained:
    """Explain the drafters of a finished run; writes ``explained.parquet`` into it.

    Conditions are left out: what is explained are the drafters as they were trained.

    Texts and states are those that the run measured, from its cache; of the texts the headline's
    kind (sampled, given, greedy), without those that loop. Nothing that is there is changed.

    Parameters
    ----------
    spec: with the run's own sink set unless it names one.
    limit: at most so many prompts, at even distances.
    cache: where the run's states are; by default ``cache`` beside the run.
    workers: cells at once, by default the run's; changes no number.

    Raises
    ------
    RunError: no such run, one that was explained with other settings, or a drafter that is not
        the one that was measured. DataError: its states are gone, or no text is long enough.
    ConfigError: see :func:`explain`.
    """
    run = RunDirectory.open(path)
    path = run.path
    manifest = run.manifest
    config = manifest.get("config") or {}
    inputs = manifest.get("inputs") or {}
    key = inputs.get("measure_states")
    cells = run.cells
    cells = cells[(cells["status"] == "done") & (cells["axis"] == "trained")]
    done = list(cells["cell"])
    missing = [c for c in done if not (path / "drafters" / c / "config.json").exists()]
    if missing or not done or key is None:
        taken = (config.get("applied") or {}).get("drafters")
        raise RunError(
            f"{path} holds no drafters to explain",
            got=", ".join(missing[:3]) or None,
            remedy=f"Explain the run that trained them: {taken}."
            if taken
            else "Give a run of `driftlab ablate` or `driftlab train`.",
        )
    spec = spec or ExplainSpec()
    if "sink" not in spec.model_fields_set:
        spec = spec.model_copy(update={"sink": _sink(config)})
    _check_depths(spec)
    for row in cells.to_dict("records"):
        folder = path / "drafters" / row["cell"]
        if other := fault_of(folder, row, run.drafter_of(row["cell"])):
            raise RunError(
                f"the drafter of {row['cell']} is not the one that {path} measured",
                got=other,
                remedy=f"Run {manifest.get('command') or 'that experiment'} again: it trains the "
                "drafter anew.",
            )
    root = (path.parent / "cache" if cache is None else Path(cache)) / "states"
    try:
        features = FeatureStore(root).open(key)
    except DataError as error:
        raise DataError(
            f"the states that {path} was measured on cannot be used",
            got=error.cause,
            remedy=f"Make them again with the run's own command: {manifest.get('command')}.",
        ) from None
    rows = _chosen(features, spec, limit)
    identity = {
        "explained": EXPLAINED,
        "run": manifest.get("config_hash"),
        "states": key,
        "spec": spec.model_dump(mode="json"),
    }
    threads = int(config.get("threads", 1))
    jobs = {
        cell: ExplainJob(
            cell, path / "drafters" / cell, root, key, path, tuple(rows), spec, threads
        )
        for cell in done
    }
    prompts = [features.texts[i].prompt_id for i in rows]
    facts = {
        **identity,
        "hash": config_hash(identity),
        "prompts": prompts,
        "texts": sorted({features.texts[i].kind for i in rows}),
        "left_out": _looping(features, rows),
        "all_loop": features.texts[rows[0]].loops,  # none is taken beside one that does not
        "versions": {n: version(n) for n in ("driftlab", "torch", "captum")},
    }
    with ExplainedFolder(path).begin(facts) as folder:
        todo = {
            cell: job
            for cell, job in jobs.items()
            if not all(folder.has(cell, prompt) for prompt in prompts)
        }
        total = len(todo) * len(rows)
        with progress_bar("" if quiet else "explain", total=total, unit="text") as bar:
            failed = run_jobs(
                todo,
                explain_cell,
                workers=workers or int(config.get("workers", 1)),
                on_step=bar.update,
            )
        if failed:
            cell, fault = next(iter(failed.items()))
            raise RunError(
                f"{len(failed)} of {len(jobs)} cells could not be explained",
                got=f"{cell}: {fault.cause}",
                remedy="Mend the cause: what is finished is kept, and the same command goes on.",
            )
        folder.finish(done, prompts)
    return Explained.of(run)


def _sink(config: dict[str, Any]) -> Any:
    sink = (config.get("measure") or {}).get("sink", "first")
    return tuple(sink) if isinstance(sink, list) else sink


def _headline(features: Features) -> list[int]:
    """Texts of the headline's kind, in their order."""
    kinds = {text.kind for text in features.texts}
    kind = next(k for k in TEXTS if k in kinds)
    return [i for i, text in enumerate(features.texts) if text.kind == kind]


def _chosen(features: Features, spec: ExplainSpec, limit: int | None) -> list[int]:
    """The texts that are explained: long enough, not looping unless all do, spread evenly."""
    headline = [i for i in _headline(features) if len(explainable(features.texts[i], spec))]
    if not headline:
        raise DataError(
            f"no text has {spec.depth} tokens after a first generated one",
            remedy="Lower depth, or explain a run with longer texts.",
        )
    check_sink(spec.sink, [len(features.texts[i].tokens) for i in headline])
    found = [i for i in headline if not features.texts[i].loops] or headline
    found.sort(key=lambda i: features.texts[i].prompt_id)
    if limit is None or limit >= len(found):
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


def _looping(features: Features, rows: Iterable[int]) -> int:
    """Looping texts that were left out."""
    loops = [i for i in _headline(features) if features.texts[i].loops]
    return 0 if set(loops) & set(rows) else len(loops)


def explain_features(
    drafter: Drafter, features: Features, spec: ExplainSpec
) -> tuple[list[tuple[Text, Columns]], int]:
    """The texts of ``features`` with their rows, and how many were left out because they loop.

    Raises DataError when no text is long enough.
    """
    rows = _chosen(features, spec, None)
    found = []
    for i in progress_bar("explain", iterable=rows, unit="text"):
        text = features.texts[i]
        (columns,) = explain(drafter, [text], [features.item(i)], spec)
        found.append((text, columns))
    return found, _looping(features, rows)
