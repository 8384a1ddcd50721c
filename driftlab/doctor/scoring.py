"""Readings of one drafter, scored on text that the target wrote.

Forced chains give a cross entropy against the target's distribution, which is known at every
depth because the chain reads the text's own tokens; free chains give acceptance. Both use all
anchors of the text at once.

The drafter's distribution is mixed with a little of the uniform one over the whole vocabulary,
``(1 - MIX) q + MIX / V``, so that tokens outside the draft vocabulary have a cost and readings
with different vocabulary maps can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from driftlab.data import grammar
from driftlab.data.corpus import sources
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.data.text import Text
from driftlab.engines.anchors import unroll
from driftlab.errors import DataError, NumericsError
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target
from driftlab.results.stats import Estimate, Sample, estimate

DEPTH = 4
MIX = 0.01
TEXTS, ROUNDS = 24, 4
BUDGET = 2**25  # numbers of the target's distributions held at once
KEEP = 2**27  # numbers of them that are kept between two calls

Prompts = Sequence[Sequence[int]] | str | Path | None


def own_texts(target: Target, prompts: Prompts, *, tokens: int, seed: int) -> list[Text]:
    """About ``tokens`` tokens that ``target`` sampled at temperature 1, in at least two texts.

    prompts: token ids, a named set or .jsonl file, or None for the set ``held-out`` (for a
    target of the embedded suite, openings of its stories). Token ids are used one and all, of a
    set ``TEXTS`` at even distances. Texts that end early are followed by new ones.

    Raises DataError for prompts that cannot be used, and for too little text.
    """
    ids = _prompt_ids(target, prompts)
    room = target.max_position - max(map(len, ids))
    if room < DEPTH + 2:
        raise DataError(
            f"the longest prompt leaves no room for text in the target's context of "
            f"{target.max_position} tokens",
            got=f"{max(map(len, ids))} tokens",
            remedy="Give shorter prompts.",
        )
    new = min(max(DEPTH + 2, math.ceil(tokens / len(ids))), room)
    texts: list[Text] = []
    written = 0
    for round_ in range(ROUNDS):
        made = target.generate(ids, max_new_tokens=new, temperature=1.0, seed=seed + 7919 * round_)
        for i, (prompt, more) in enumerate(zip(ids, made, strict=True)):
            if len(more) >= DEPTH + 2 and written < tokens:
                name = f"{round_}-{i}"
                kind = {"kind": "sampled", "temperature": 1.0, "origin": target.name}
                texts.append(Text.of(name, "doctor", prompt, more, **kind))  # type: ignore[arg-type]
                written += len(more)
        if written >= tokens:
            break
    if len(texts) < 2:
        raise DataError(
            f"{target.name} wrote {len(texts)} text(s) of {DEPTH + 2} tokens or more",
            got=f"{len(ids)} prompt(s), {new} new tokens each",
            remedy="Give more prompts, or ask for more tokens.",
        )
    return texts


def _prompt_ids(target: Target, prompts: Prompts) -> list[list[int]]:
    if prompts is not None and not isinstance(prompts, str | Path):
        if not prompts:
            raise DataError("no prompts", remedy="Give at least two prompts.")
        return [list(map(int, p)) for p in prompts]
    tokenizer = target.tokenizer
    if tokenizer is None:
        if prompts is None and target.vocab_size == len(grammar.VOCABULARY):
            opened = grammar.micro_prompts(TEXTS, 0)
            return [[grammar.BOS_ID, *grammar.encode(p.text)] for p in opened]
        raise DataError(
            f"{target.name} has no tokenizer, so its prompts must be token ids",
            got=prompts if prompts is not None else "no prompts",
            remedy="Give prompts as lists of token ids.",
        )
    found = sources(load_prompts(prompts or "held-out"), tokenizer, Rendering("default"))
    count = min(TEXTS, len(found))
    return [list(found[i * len(found) // count].tokens) for i in range(count)]


@dataclass(frozen=True)
class Score:
    """One reading on one set of texts; tuples are over depths 1..DEPTH.

    acceptance: share of free chains whose drafts 1..d all equal the text's tokens.
    accuracy: share of forced chains whose draft d equals the text's token.
    cross_entropy: nats a token of the forced chain, against the target's distribution.
    accepted_drafts: accepted drafts a round, of DEPTH.
    """

    acceptance: tuple[float, ...]
    accuracy: tuple[float, ...]
    cross_entropy: tuple[float, ...]
    accepted_drafts: float
    anchors: int
    entropy_by_text: Sample
    accepted_by_text: Sample


class _Sums:
    """Sums over anchors of each text, [texts, DEPTH]."""

    def __init__(self, texts: int) -> None:
        self.n = np.zeros((texts, DEPTH))
        self.loss = np.zeros((texts, DEPTH))
        self.right = np.zeros((texts, DEPTH))
        self.accepted = np.zeros((texts, DEPTH))

    def score(self) -> Score:
        n = self.n.sum(axis=0)
        weights = self.n[:, 0]
        with np.errstate(invalid="ignore"):
            loss = self.loss.mean(axis=1) / weights
            accepted = self.accepted.sum(axis=1) / weights
        return Score(
            acceptance=tuple((self.accepted.sum(axis=0) / n).tolist()),
            accuracy=tuple((self.right.sum(axis=0) / n).tolist()),
            cross_entropy=tuple((self.loss.sum(axis=0) / n).tolist()),
            accepted_drafts=float(self.accepted.sum() / n[0]),
            anchors=int(n[0]),
            entropy_by_text=Sample(loss[None], weights[None]),
            accepted_by_text=Sample(accepted[None], weights[None]),
        )


@dataclass
class _Batch:
    """Some of the texts, right-padded, and what the target makes of them.

    p [B, S - first, V]: its distributions from position ``first`` on, where anchors begin.
    states: boundary -> [B, S, Ht]; last: the state after the final norm.
    """

    rows: list[int]
    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    p: Tensor | None = None
    states: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None

    @property
    def first(self) -> int:
        return int(self.starts.min())


class Bench:
    """Texts of one target, and every score that was made on them.

    The target's distributions and captured states are kept while they fit ``KEEP`` numbers, so
    that more readings, or another drafter of the same target, cost the drafter's passes alone.
    A drafter that computes what an earlier one did is not scored again.
    """

    def __init__(self, target: Target, texts: Sequence[Text]) -> None:
        self.target, self.texts = target, list(texts)
        self._batches = [self._batch(rows) for rows in _batches(self.texts, target.vocab_size)]
        self._scores: dict[tuple[Any, ...], Score] = {}
        self._digests: dict[int, tuple[Tensor, bytes]] = {}

    @torch.inference_mode()
    def score(self, readings: Mapping[str, Drafter], *, progress: str = "") -> dict[str, Score]:
        """Score every reading on the same anchors of the same texts.

        Raises NumericsError when a reading's logits are not finite.
        """
        keys = {name: self._key(drafter) for name, drafter in readings.items()}
        new = {keys[n]: d for n, d in readings.items() if keys[n] not in self._scores}
        names = {keys[n]: n for n in readings}
        sums = {key: _Sums(len(self.texts)) for key in new}
        wanted = sorted({b for d in new.values() for b in d.config.boundaries})
        with tqdm(
            total=len(self._batches) * len(new),
            desc=progress,
            disable=None if progress and new else True,
        ) as bar:
            for batch in self._batches if new else ():
                self._run_target(batch, wanted)
                for key, drafter in new.items():
                    _add(sums[key], names[key], drafter, batch)
                    bar.update(1)
                self._forget(batch)
        self._scores |= {key: found.score() for key, found in sums.items()}
        return {name: self._scores[key] for name, key in keys.items()}

    def _batch(self, rows: list[int]) -> _Batch:
        part = [self.texts[i] for i in rows]
        lengths = torch.tensor([len(t.tokens) for t in part])
        tokens = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
        for row, text in zip(tokens, part, strict=True):
            row[: len(text.tokens)] = torch.tensor(text.tokens)
        return _Batch(rows, tokens, lengths, torch.tensor([t.prompt_len - 1 for t in part]))

    def _run_target(self, batch: _Batch, wanted: Sequence[int]) -> None:
        missing = sorted(set(wanted) - set(batch.states))
        if batch.p is not None and not missing:
            return
        new = batch.p is None
        out = self.target.forward(batch.tokens, batch.lengths, missing, logits=new)
        if new:
            assert out.logits is not None  # asked for
            batch.p = out.logits[:, batch.first :].float().softmax(dim=-1)
            batch.last = out.last
        if missing:
            batch.states |= zip(
                missing, out.aux.split(self.target.hidden_size, dim=-1), strict=True
            )

    def _forget(self, batch: _Batch) -> None:
        held = sum(b.p.numel() for b in self._batches if b.p is not None)
        if held > KEEP:
            batch.p, batch.last = None, None
            batch.states.clear()

    def _key(self, drafter: Drafter) -> tuple[Any, ...]:
        """What ``drafter`` computes: its contract, its map and its weights."""
        named = {**dict(drafter.named_parameters()), "map": drafter.draft_to_target}
        weights = tuple((name, self._digest(named[name])) for name in sorted(named))
        return drafter.config.model_dump_json(), weights

    def _digest(self, tensor: Tensor) -> bytes:
        # Readings share their weights. A tensor that is held keeps its address to itself.
        known = self._digests.get(tensor.data_ptr())
        if known is None or known[0].shape != tensor.shape:
            data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            known = (tensor, hashlib.blake2b(data.data, digest_size=16).digest())
            self._digests[tensor.data_ptr()] = known
        return known[1]


def _batches(texts: Sequence[Text], vocab: int) -> Iterator[list[int]]:
    """Texts of like length together, as many as fit the budget."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    held: list[int] = []
    for i in order:
        if held and (len(held) + 1) * len(texts[i].tokens) * vocab > BUDGET:
            yield held
            held = []
        held.append(i)
    if held:
        yield held


def _add(sums: _Sums, name: str, drafter: Drafter, batch: _Batch) -> None:
    assert batch.p is not None and batch.last is not None
    own = [batch.states[b] for b in drafter.config.boundaries] or [batch.last]
    aux = torch.cat(own, dim=-1).to(drafter.norm.weight)
    tokens, lengths, starts = (
        t.to(aux.device) for t in (batch.tokens, batch.lengths, batch.starts)
    )
    anchors = torch.arange(batch.first, int(lengths.max()) - 1 - DEPTH, device=aux.device)
    keep = (anchors >= starts[:, None]) & (anchors < lengths[:, None] - 1 - DEPTH)
    floor = math.log(MIX / batch.p.shape[-1])
    reachable = batch.p.to(aux.device)[..., drafter.draft_to_target]
    rows = batch.rows

    def total(x: Tensor) -> np.ndarray:
        return np.asarray((x * keep).sum(dim=1, dtype=torch.float64).cpu())

    common = {"depth": DEPTH, "lengths": lengths, "anchors": anchors}
    for step in unroll(drafter, tokens, aux, mode="forced", **common):  # type: ignore[arg-type]
        d = step.depth - 1
        if not bool(torch.isfinite(step.logits[keep]).all()):
            raise NumericsError(
                f"the reading {name!r} gives logits that are not finite",
                got=f"depth {step.depth}",
                remedy="Look for damaged tensors, or states that overflow.",
            )
        log_q = step.logits.float().log_softmax(dim=-1) + math.log1p(-MIX)
        log_q = torch.logaddexp(log_q, torch.full((), floor, device=log_q.device))
        wanted = reachable[:, anchors - batch.first + step.depth]
        loss = -(wanted * log_q).sum(-1) - (1 - wanted.sum(-1)) * floor
        sums.n[rows, d] += total(torch.ones_like(loss))
        sums.loss[rows, d] += total(loss)
        sums.right[rows, d] += total(step.draft == step.truth)
    alive = keep.clone()
    for step in unroll(drafter, tokens, aux, mode="free", **common):  # type: ignore[arg-type]
        alive = alive & (step.draft == step.truth)
        sums.accepted[rows, step.depth - 1] += total(alive)


def margins(old: Score, new: Score, *, seed: int = 0) -> tuple[Estimate, Estimate]:
    """How much better ``new`` is: cross entropy saved (nats a token, mean over depths), and
    accepted drafts gained a round; paired bootstrap over texts."""
    return (
        estimate([old.entropy_by_text, new.entropy_by_text], [1, -1], unit="nats", seed=seed),
        estimate([new.accepted_by_text, old.accepted_by_text], [1, -1], unit="drafts", seed=seed),
    )
