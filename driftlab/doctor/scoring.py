"""Readings of one drafter, scored on text that the target wrote.

Forced chains read the text's own tokens, so the target's distribution is known at every depth.
They give a cross entropy, and acceptance as well: while its drafts are right, a free chain reads
the same tokens, so that it accepts as many as the forced one drafts right in a row. All anchors
of a text are computed at once, and every reading on the same ones.

The drafter's distribution is mixed with a little of the uniform one over the whole vocabulary,
``(1 - MIX) q + MIX / V``, so that tokens outside the draft vocabulary have a cost and readings
with different vocabulary maps can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from driftlab.data import grammar
from driftlab.data.corpus import sources
from driftlab.data.prompts import Rendering, load_prompts
from driftlab.data.text import Text
from driftlab.engines.anchors import forced_states
from driftlab.errors import DataError, NumericsError
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target
from driftlab.progress import progress_bar
from driftlab.results.stats import Estimate, Sample, estimate

DEPTH = 4
MIX = 0.01
TEXTS, ROUNDS = 24, 4
BUDGET = 2**25  # numbers of the target's distributions held at once
KEEP = 2**28  # numbers of the target (distributions, states) that are kept between two calls
ROUNDING = 1e-5  # nats or drafts that single precision can make of nothing
FEW = 4  # texts of a first look, below which there is none: one text in four

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

    acceptance: share of chains whose drafts 1..d all equal the text's tokens.
    accuracy: share of forced chains whose draft d equals the text's token.
    cross_entropy: nats a token of the forced chain, against the target's distribution.
    accepted_drafts: accepted drafts a round, of DEPTH, as the text's tokens count them.
    expected_drafts: the same with the last draft of every chain weighed by the target's
        probability of it, and not by the token that the target happened to draw: on text
        sampled at temperature 1 both mean the same, and this one varies less.

    Samples hold one value a text, NaN where a text was not scored.
    """

    acceptance: tuple[float, ...]
    accuracy: tuple[float, ...]
    cross_entropy: tuple[float, ...]
    accepted_drafts: float
    expected_drafts: float
    anchors: int
    texts: int
    entropy_by_text: Sample
    expected_by_text: Sample


class _Sums:
    """Sums over anchors of each text, [texts, DEPTH]."""

    def __init__(self, texts: int) -> None:
        self.n = np.zeros(texts)
        self.loss = np.zeros((texts, DEPTH))
        self.right = np.zeros((texts, DEPTH))
        self.accepted = np.zeros((texts, DEPTH))
        self.expected = np.zeros((texts, DEPTH))
        self.done: set[int] = set()

    def score(self) -> Score:
        total = self.n.sum()
        with np.errstate(invalid="ignore"):
            loss = self.loss.mean(axis=1) / self.n
            expected = self.expected.sum(axis=1) / self.n
        return Score(
            acceptance=tuple((self.accepted.sum(axis=0) / total).tolist()),
            accuracy=tuple((self.right.sum(axis=0) / total).tolist()),
            cross_entropy=tuple((self.loss.sum(axis=0) / total).tolist()),
            accepted_drafts=float(self.accepted.sum() / total),
            expected_drafts=float(self.expected.sum() / total),
            anchors=int(total),
            texts=int((self.n > 0).sum()),
            entropy_by_text=Sample(loss[None], self.n[None]),
            expected_by_text=Sample(expected[None], self.n[None]),
        )


@dataclass
class _Batch:
    """Some of the texts, right-padded, and what the target makes of them.

    p [B, S - first, V]: its distributions from position ``first`` on, where anchors begin.
    states: boundary -> [B, S, Ht]; last: the state after the final norm.
    mapped: the last vocabulary map that was asked for, and p of its ids.
    """

    rows: list[int]
    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    p: Tensor | None = None
    states: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None
    mapped: tuple[Tensor, Tensor] | None = None

    @property
    def first(self) -> int:
        return int(self.starts.min())

    @property
    def held(self) -> int:
        """How many numbers of the target are held."""
        tensors = (self.p, self.last, *self.states.values(), *(self.mapped or ()))
        return sum(t.numel() for t in tensors if t is not None)

    def reachable(self, ids: Tensor) -> Tensor:
        """The target's probabilities of ``ids`` [Vd], [B, S - first, Vd]."""
        assert self.p is not None
        if self.mapped is None or not torch.equal(self.mapped[0], ids):
            self.mapped = ids, self.p.to(ids.device)[..., ids]
        return self.mapped[1]


class Bench:
    """Texts of one target, and every score that was made on them.

    The target's distributions and captured states are kept while they fit ``KEEP`` numbers, so
    that more readings, or another drafter of the same target, cost the drafter's passes alone.
    A drafter that computes what an earlier one did is not scored again.
    """

    def __init__(self, target: Target, texts: Sequence[Text]) -> None:
        self.target, self.texts = target, list(texts)
        whole = range(len(self.texts))
        looks = [whole[::4], [i for i in whole if i % 4]]
        if len(looks[0]) < FEW:
            looks = [[], whole]
        self._looks = [
            [self._batch(rows) for rows in _batches(self.texts, look, target.vocab_size)]
            for look in looks
        ]
        self._wanted: set[int] = set()
        self._sums: dict[tuple[Any, ...], _Sums] = {}
        self._digests: dict[int, tuple[Tensor, bytes]] = {}

    def prepare(self, boundaries: Iterable[int]) -> None:
        """Name boundaries that later readings capture, so that one pass of the target does."""
        self._wanted |= set(boundaries)

    @torch.inference_mode()
    def score(
        self, readings: Mapping[str, Drafter], *, first: bool = False, progress: str = ""
    ) -> dict[str, Score]:
        """Score every reading on the same anchors of the same texts.

        ``first`` asks for a quarter of the texts only, or all where there are few; a reading
        that was scored on more before keeps that.

        Raises NumericsError when a reading's logits are not finite.
        """
        keys = {name: self._key(drafter) for name, drafter in readings.items()}
        for key in keys.values():
            self._sums.setdefault(key, _Sums(len(self.texts)))
        drafters = {keys[n]: (n, d) for n, d in readings.items()}
        self.prepare(b for d in readings.values() for b in d.config.boundaries)
        looks = [0] if first and self._looks[0] else [0, 1]
        new = {
            look: {k: d for k, d in drafters.items() if look not in self._sums[k].done}
            for look in looks
        }
        total = sum(len(self._looks[look]) * len(new[look]) for look in looks)
        with progress_bar(progress if total else "", total=total, unit="batch") as bar:
            for look in looks:
                for batch in self._looks[look] if new[look] else ():
                    self._run_target(batch)
                    for key, (name, drafter) in new[look].items():
                        _add(self._sums[key], name, drafter, batch)
                        bar.update(1)
                    self._forget(batch)
                for key in new[look]:
                    self._sums[key].done.add(look)
        return {name: self._sums[key].score() for name, key in keys.items()}

    def _batch(self, rows: list[int]) -> _Batch:
        part = [self.texts[i] for i in rows]
        lengths = torch.tensor([len(t.tokens) for t in part])
        tokens = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
        for row, text in zip(tokens, part, strict=True):
            row[: len(text.tokens)] = torch.tensor(text.tokens)
        return _Batch(rows, tokens, lengths, torch.tensor([t.prompt_len - 1 for t in part]))

    def _run_target(self, batch: _Batch) -> None:
        missing = sorted(self._wanted - set(batch.states))
        if batch.p is not None and not missing:
            return
        out = self.target.forward(batch.tokens, batch.lengths, missing, logits=False)
        if batch.p is None:
            batch.last = out.last
            batch.p = self.target.head(out.last[:, batch.first :]).float().softmax(dim=-1)
        if missing:
            batch.states |= zip(
                missing, out.aux.split(self.target.hidden_size, dim=-1), strict=True
            )

    def _forget(self, batch: _Batch) -> None:
        if sum(b.held for look in self._looks for b in look) > KEEP:
            batch.p, batch.last, batch.mapped = None, None, None
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


def _batches(texts: Sequence[Text], chosen: Iterable[int], vocab: int) -> Iterator[list[int]]:
    """Texts of like length together, as many as fit the budget."""
    order = sorted(chosen, key=lambda i: len(texts[i].tokens))
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
    first, rows, vocab = batch.first, batch.rows, batch.p.shape[-1]
    anchors = torch.arange(first, int(lengths.max()) - 1 - DEPTH, device=aux.device)
    keep = (anchors >= starts[:, None]) & (anchors < lengths[:, None] - 1 - DEPTH)
    reachable = batch.reachable(drafter.draft_to_target)
    floor = MIX / vocab
    chosen = anchors - first

    def total(x: Tensor) -> np.ndarray:
        return np.asarray((x * keep).sum(dim=1, dtype=torch.float64).cpu())

    sums.n[rows] = total(torch.ones_like(keep))
    alive = keep.clone()
    for state in forced_states(drafter, tokens, aux, depth=DEPTH, first=first):
        logits = drafter.logits(state.select(chosen)).float()
        if not bool(torch.isfinite(logits.sum(dim=-1)[keep]).all()):
            raise NumericsError(
                f"the reading {name!r} gives logits that are not finite",
                got=f"depth {state.depth}",
                remedy="Look for damaged tensors, or states that overflow.",
            )
        best = logits.argmax(dim=-1, keepdim=True)
        wanted = reachable[:, chosen + state.depth]
        log_q = logits.softmax(dim=-1).mul_(1 - MIX).add_(floor).log_()
        loss = -torch.linalg.vecdot(wanted, log_q) - (1 - wanted.sum(-1)) * math.log(floor)
        right = drafter.to_target(best[..., 0]) == tokens[:, anchors + 1 + state.depth]
        d = state.depth - 1
        sums.loss[rows, d] = total(loss)
        sums.right[rows, d] = total(right)
        sums.expected[rows, d] = total(alive * wanted.gather(-1, best)[..., 0])
        alive = alive & right
        sums.accepted[rows, d] = total(alive)


def margins(old: Score, new: Score, *, seed: int = 0) -> tuple[Estimate, Estimate]:
    """How much better ``new`` is: cross entropy saved (nats a token, mean over depths), and
    expected drafts gained a round; paired by anchor, over the texts that both were scored on.

    Intervals are a bootstrap over texts, p values those of Student's t over texts: a correction
    for many readings looks at tails that a bootstrap of few texts does not have.
    """
    pairs = (
        ("nats", new.entropy_by_text, old.entropy_by_text, -1.0),
        ("drafts", new.expected_by_text, old.expected_by_text, 1.0),
    )
    nats, drafts = (
        replace(estimate([b, a], [sign, -sign], unit=unit, seed=seed), p=paired_p(b, a))
        for unit, b, a, sign in pairs
    )
    return nats, drafts


def saved(old: Score, new: Score) -> float:
    """Nats a token that ``new`` saves, over the texts that both were scored on."""
    a, b = old.entropy_by_text, new.entropy_by_text
    assert a.weights is not None
    there = np.isfinite(a.values) & np.isfinite(b.values)
    return float(np.average((a.values - b.values)[there], weights=a.weights[there]))


def paired_p(a: Sample, b: Sample) -> float:
    """Two-sided p of no difference between two weighted means over the same texts.

    Student's t of the mean of differences, each text weighed by its anchors (linearised ratio).
    """
    assert a.weights is not None
    there = np.isfinite(a.values[0]) & np.isfinite(b.values[0])
    d, w = (a.values - b.values)[0][there], a.weights[0][there]
    n = len(d)
    if n < 2:
        return math.nan
    mean = float((w * d).sum() / w.sum())
    spread = math.sqrt(n / (n - 1) * float(((w * (d - mean)) ** 2).sum())) / float(w.sum())
    if abs(mean) < ROUNDING:
        return 1.0
    if spread <= 1e-12 * abs(mean):
        return 0.0
    return float(2 * student.sf(abs(mean) / spread, n - 1))
