"""Measure a drafter on texts: unroll all anchors, record at sites, give table rows.

Only anchors whose every depth has a true token are used, so all depths speak of the same
anchors. The first anchor is the prompt's last token: the newest token is then the first one
that the target generated, where a serving engine starts to draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftlab.analysis import measures
from driftlab.analysis.recorder import Columns, Recorder, received_mass
from driftlab.config import MeasureSpec
from driftlab.data.text import Text
from driftlab.engines.anchors import unroll
from driftlab.errors import ConfigError
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Teacher

_CACHED = 8  # rows of the target's vocabulary


@dataclass(frozen=True)
class Measured:
    """Rows of one text. ``n_anchors`` is 0, and the tables empty, when the text is too short."""

    text: Text
    n_anchors: int
    tables: dict[str, Columns]


def measurable_anchors(text: Text, spec: MeasureSpec) -> Tensor:
    """Anchors of ``text`` with ``spec.depth`` true tokens after the newest one, ascending."""
    first, last = text.prompt_len - 1, len(text.tokens) - 2 - spec.depth
    anchors = torch.arange(first, max(first, last + 1))
    if spec.max_anchors is not None and len(anchors) > spec.max_anchors:
        chosen = torch.linspace(0, len(anchors) - 1, spec.max_anchors).round().long()
        anchors = anchors[chosen]
    return anchors


def probe(
    drafter: Drafter,
    texts: Sequence[Text],
    aux: Sequence[Tensor],
    spec: MeasureSpec,
    *,
    target_probabilities: Sequence[Tensor] | None = None,
) -> list[Measured]:
    """Measure ``drafter`` on a batch of texts, in every mode of ``spec``.

    aux: per text [S, A*Ht]. target_probabilities: per text [S, Vd], the target's
    probabilities of the draft ids after each position.
    """
    own = [measurable_anchors(text, spec) for text in texts]
    used = [i for i, anchors in enumerate(own) if len(anchors)]
    results = [Measured(text, 0, {}) for text in texts]
    if not used:
        return results
    device = drafter.norm.weight.device
    tokens, lengths = (t.to(device) for t in _pad_tokens([texts[i] for i in used]))
    states = torch.nn.utils.rnn.pad_sequence([aux[i] for i in used], batch_first=True).to(device)
    chances = (
        None
        if target_probabilities is None
        else torch.nn.utils.rnn.pad_sequence(
            [target_probabilities[i] for i in used], batch_first=True
        ).to(device)
    )
    prompt_lens = torch.tensor([texts[i].prompt_len for i in used]).to(device)
    chosen = torch.unique(torch.cat([own[i] for i in used]))
    anchors = chosen.to(device)
    sink = sink_set(drafter, tokens, states, lengths, spec).to(device)
    tables: list[dict[str, list[Columns]]] = [{} for _ in used]
    with torch.inference_mode():
        for mode in spec.modes:
            recorder = Recorder(
                drafter,
                anchors=anchors,
                sink=sink,
                prompt_lens=prompt_lens,
                recent=spec.recent,
                target_probabilities=chances,
                fused=mode == spec.modes[0],
            )
            with recorder.watch():
                for step in unroll(
                    drafter,
                    tokens,
                    states,
                    depth=spec.depth,
                    mode=mode,
                    lengths=lengths,
                    anchors=anchors,
                ):
                    recorder.add(step)
            for b, i in enumerate(used):
                rows = torch.isin(chosen, own[i]).nonzero()[:, 0]
                where = f"{texts[i].kind} text {texts[i].prompt_id}"
                for name, columns in recorder.tables(b, rows, mode=mode, where=where).items():
                    n = len(next(iter(columns.values())))
                    if name != "fused":
                        columns["mode"] = np.full(n, mode)
                    if name == "steps" and mode == "forced":
                        columns["accepted"] = np.full(n, None)
                    tables[b].setdefault(name, []).append(columns)
    for b, i in enumerate(used):
        merged = {
            name: {c: np.concatenate([p[c] for p in parts]) for c in parts[0]}
            for name, parts in tables[b].items()
        }
        results[i] = Measured(texts[i], len(own[i]), merged)
    return results


def storable(columns: Columns) -> Columns:
    """Mask what does not exist: log-probability and rank of a truth without a draft id."""
    changed = dict(columns)
    if "logprob" in columns:
        absent = ~columns["in_vocab"].astype(bool)
        for name in ("logprob", "rank"):
            changed[name] = np.ma.array(columns[name], mask=absent)
    return changed


def measured_spans(texts: Iterable[Text], spec: MeasureSpec) -> list[tuple[int, int]]:
    """First anchor and number of tokens of every text that has an anchor to measure."""
    return [
        (text.prompt_len - 1, len(text.tokens))
        for text in texts
        if len(measurable_anchors(text, spec))
    ]


def check_sink(sink: str | Sequence[int], lengths: Sequence[int]) -> None:
    """Raise ConfigError for a sink position that a text of one of ``lengths`` does not have.

    Where there is no text, that is said when it is measured.
    """
    if lengths and not isinstance(sink, str) and max(sink) >= min(lengths):
        raise ConfigError(
            f"sink position {max(sink)} is not in every text",
            got=f"a text of {min(lengths)} tokens",
            remedy="Name positions that all texts have: a sink that is not there holds no mass.",
        )


def sink_set(
    drafter: Drafter, tokens: Tensor, aux: Tensor, lengths: Tensor, spec: MeasureSpec
) -> Tensor:
    """The positions that count as sink, bool [B, S]; see `MeasureSpec.sink`."""
    batch, size = tokens.shape
    if spec.sink == "first":
        return measures.first_sink(batch, size)
    if spec.sink == "auto":
        received = received_mass(drafter, tokens, aux, lengths)
        return measures.auto_sink(received, size)
    return measures.explicit_sink(spec.sink, batch, size)


def target_probabilities(
    target: Teacher, last: Tensor, draft_to_target: Tensor, *, rows: int = 256
) -> Tensor:
    """The target's probabilities of the draft ids, [S, Ht] -> [S, Vd], not renormalised.

    ``last`` is the target's state after its final norm. The full vocabulary's logits exist
    for ``rows`` positions at a time only.
    """
    found = last.new_empty((len(last), len(draft_to_target)), dtype=torch.float32)
    with torch.inference_mode():
        for out, chunk in zip(found.split(rows), last.split(rows), strict=True):
            logits = target.head(chunk)
            # On a CPU a few rows of the vocabulary at a time stay in the cache.
            few = _CACHED if logits.device.type == "cpu" else rows
            for o, x in zip(out.split(few), logits.split(few), strict=True):
                p = x.softmax(dim=-1, dtype=torch.float32)
                torch.index_select(p, 1, draft_to_target, out=o)
    return found


def _pad_tokens(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(text.tokens) for text in texts]
    return (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        torch.tensor([len(r) for r in rows]),
    )
