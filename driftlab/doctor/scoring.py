"""Readings of one drafter, scored on text that the target wrote.

Forced chains give a cross entropy against the target's distribution, which is known at every
depth because the chain reads the text's own tokens; free chains give acceptance. Both use all
anchors of the text at once.

The drafter's distribution is mixed with a little of the uniform one over the whole vocabulary,
``(1 - MIX) q + MIX / V``, so that tokens outside the draft vocabulary have a cost and readings
with different vocabulary maps can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@torch.inference_mode()
def score(
    target: Target, texts: Sequence[Text], readings: Mapping[str, Drafter], *, progress: str = ""
) -> dict[str, Score]:
    """Score every reading on the same anchors of the same texts, in one pass of the target.

    Raises NumericsError when a reading's logits are not finite.
    """
    sums = {name: _Sums(len(texts)) for name in readings}
    wanted = sorted({b for d in readings.values() for b in d.config.boundaries})
    rows = list(_batches(texts, target.vocab_size))
    with tqdm(
        total=len(rows) * len(readings), desc=progress, disable=None if progress else True
    ) as bar:
        for chosen in rows:
            part = [texts[i] for i in chosen]
            lengths = torch.tensor([len(t.tokens) for t in part])
            tokens = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
            for row, text in zip(tokens, part, strict=True):
                row[: len(text.tokens)] = torch.tensor(text.tokens)
            out = target.forward(tokens, lengths, wanted)
            assert out.logits is not None  # asked for by default
            states = dict(zip(wanted, out.aux.split(target.hidden_size, dim=-1), strict=True))
            starts = torch.tensor([t.prompt_len - 1 for t in part])
            p = out.logits.float().softmax(dim=-1)
            for name, drafter in readings.items():
                own = [states[b] for b in drafter.config.boundaries] or [out.last]
                aux = torch.cat(own, dim=-1).to(drafter.norm.weight)
                batch = (tokens.to(aux.device), aux, lengths.to(aux.device), starts.to(aux.device))
                _add(sums[name], chosen, name, drafter, batch, p.to(aux.device))
                bar.update(1)
    return {name: found.score() for name, found in sums.items()}


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


def _add(
    sums: _Sums,
    rows: list[int],
    name: str,
    drafter: Drafter,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    p: Tensor,
) -> None:
    tokens, aux, lengths, starts = batch
    anchors = torch.arange(int(starts.min()), int(lengths.max()) - 1 - DEPTH, device=aux.device)
    keep = (anchors >= starts[:, None]) & (anchors < lengths[:, None] - 1 - DEPTH)
    ids, vocab = drafter.draft_to_target, p.shape[-1]
    floor = math.log(MIX / vocab)

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
        wanted = p[:, anchors + step.depth][..., ids]
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
