"""What a drafter was trained on, kept in its file, and what differs where it is used.

A drafter that reads other states than it learned from (a rotated or otherwise quantised target,
another fine-tune, other layers) accepts little, and nothing else shows it: shapes, losses and the
target's own text are as they should be. So its file says which target and templates it was trained
with, and the mean and spread of some channels of every captured state. It also marks the prompts
that it learned from: on them it is better than on others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftlab.config import Origin, Provenance, Sourced
from driftlab.data.features import Features
from driftlab.data.text import Text
from driftlab.errors import DataError
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target

CHANNELS = 64
"""Channels of each captured state that are kept, at even distances."""
TOKENS = 20_000
"""Tokens that statistics are taken of, at most."""
SHIFT, SPREAD = (0.25, 6.0), (0.2, 2.0)
"""What other text of the same target is believed to move at most: channel means in deviations, and
logarithms of deviations; a + b / sqrt(tokens). Of SmolLM2, 26,390 tokens of other prompts moved
them by 0.15 and 0.09, single texts by 0.64 and 0.16, and a random rotation by 1.5 and 0.16 to 0.6.
"""

MARKED = 4096
"""Prompts that are kept, at most; of more only their number is."""

SAME_TARGET = "the target is the same"
TARGET, TEMPLATES, STATES = "trained.target", "trained.templates", "trained.states"
PROMPTS = "trained.prompts"


def record(target: Target, features: Features, templates: Collection[str | None]) -> Provenance:
    """What a drafter that learns from ``features`` keeps in its file.

    ``templates``: hashes of the chat templates of the prompts, None where none was used.
    """

    def said(value: Any) -> Sourced:
        return Sourced(value=value, origin=Origin.derived, where="the drafter's training")

    marks = prompt_marks(features.texts)
    return {
        TARGET: said({"name": target.name, **_facts(target)}),
        TEMPLATES: said(sorted({t or "none" for t in templates})),
        STATES: said(statistics_of(features)),
        PROMPTS: said(
            {"count": len(marks), "sha256": sorted(marks) if len(marks) <= MARKED else []}
        ),
    }


def prompt_marks(texts: Iterable[Text]) -> set[str]:
    """A short hash of each distinct prompt, as token ids."""
    prompts = {text.tokens[: text.prompt_len] for text in texts}
    return {sha256(np.asarray(p, dtype="<i8").tobytes()).hexdigest()[:12] for p in prompts}


def learned_from(
    known: Collection[str], texts: Iterable[Text], *, strict: bool = False
) -> list[str]:
    """A warning when prompts of measured ``texts`` are those of the marks ``known``, which were
    learned from.

    ``strict``: DataError when they are most of them; short prompts may meet by chance.
    """
    measured = prompt_marks(texts)
    common = measured.intersection(known)
    if not common:
        return []
    said = f"{len(common)} of {len(measured)} measured prompts were also learned from"
    if strict and 2 * len(common) > len(measured):
        raise DataError(said, remedy="Name other prompts in text.measure_prompts.")
    return [f"{said}: what is measured on them is no held-out number"]


def statistics_of(features: Features) -> list[dict[str, Any]]:
    """:func:`statistics` of stored states."""
    states = (features.item(i)["aux"] for i in range(len(features)))
    return statistics(states, features.manifest["boundaries"], features.manifest["hidden_size"])


def statistics(
    states: Iterable[Tensor], boundaries: Sequence[int], width: int
) -> list[dict[str, Any]]:
    """Mean and deviation of :data:`CHANNELS` channels of every captured state, over tokens.

    ``states`` [S, A*Ht] are those of one text each. The first token of a text is left out: it
    may be a sink, whose state is unlike all others.
    """
    chosen = torch.linspace(0, width - 1, min(CHANNELS, width)).long()
    total = torch.zeros(2, len(boundaries), len(chosen), dtype=torch.float64)
    count = 0
    for aux in states:
        rows = aux[1:, : len(boundaries) * width].cpu()
        rows = rows.unflatten(-1, (len(boundaries), width))[:, :, chosen].double()
        total += torch.stack([rows.sum(0), rows.square().sum(0)])
        count += len(rows)
        if count >= TOKENS:
            break
    mean, square = total / max(1, count)
    spread = (square - mean**2).clamp(min=0).sqrt()
    return [
        {"boundary": b, "tokens": count, "mean": _short(mean[i]), "deviation": _short(spread[i])}
        for i, b in enumerate(boundaries)
    ]


def differences(
    drafter: Drafter,
    target: Target,
    now: Sequence[Mapping[str, Any]],
    *,
    longest: int,
    templates: Sequence[str | None] = (),
    texts: Sequence[Text] = (),
) -> list[str]:
    """One line for everything that is not as it was in the drafter's training.

    Only the context is compared where the drafter's file says nothing of its training. What a
    hook changes later is not seen here.

    Parameters
    ----------
    now: :func:`statistics` of the states that are read. longest: tokens of the longest text.
    templates: sha256 of each prompt's chat template, None for a prompt without one; none are
        compared when it is empty. texts: those whose prompts are compared.
    """
    known, found = drafter.provenance, []
    same = False
    if TARGET in known:
        stored, facts = known[TARGET].value, _facts(target)
        for name in ("quantization", "dtype"):
            if stored[name] != facts[name]:
                found.append(
                    f"the target's {name} is {facts[name]}, the drafter was trained with "
                    f"{stored[name]} ({stored['name']})"
                )
        if not found and stored["fingerprint"] != facts["fingerprint"]:
            found.append(
                f"{target.name} has other weights than the target of the drafter's training, "
                f"{stored['name']}"
            )
        same = not found
    if TEMPLATES in known and templates:
        was = known[TEMPLATES].value
        if new := [name for t in templates if (name := t or "none") not in was]:
            found.append(
                f"{len(new)} of {len(templates)} prompts are rendered with chat template "
                f"{', '.join(t[:12] for t in sorted(set(new)))}, the drafter was trained with "
                f"{', '.join(t[:12] for t in was)}"
            )
    limit = drafter.config.rope.max_position
    if longest > limit:
        found.append(
            f"texts of up to {longest} tokens exceed the drafter's context of {limit} (its "
            "max_position): rotations go on, but it never learned from such distances"
        )
    if PROMPTS in known:
        found += learned_from(known[PROMPTS].value["sha256"], texts)
    return found + unlike_states(drafter, now, same)


def unlike_states(drafter: Drafter, now: Sequence[Mapping[str, Any]], same: bool) -> list[str]:
    """A line for each captured state whose statistics are not those of the training.

    ``same``: they are the very target's, so that only the texts can be others.
    """
    known = drafter.provenance.get(STATES)
    if known is None:
        return []
    found = []
    for was, new in zip(known.value, now, strict=False):
        shift, spread = _distance(was, new)
        tokens = max(1, min(was["tokens"], new["tokens"]))
        a, b = (base + slope / math.sqrt(tokens) for base, slope in (SHIFT, SPREAD))
        if shift > a or spread > b:
            found.append(
                f"states of boundary {new['boundary']} are not those of the training: channel "
                f"means are {shift:.2f} deviations apart (limit {a:.2f}), deviations differ by a "
                f"factor of {math.exp(spread):.2f} (limit {math.exp(b):.2f}); "
                + (
                    f"{SAME_TARGET}, so the texts are few ({new['tokens']} tokens) or unlike "
                    "those of the training"
                    if same and was["boundary"] == new["boundary"]
                    else "a rotated or fine-tuned target, or another boundary. Acceptance and "
                    "drift of this pair are not the drafter's own"
                )
            )
    return found


def _facts(target: Target) -> dict[str, Any]:
    said = target.provenance.get("quantization")
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": "none" if said is None or said.value is None else str(said.value),
        "fingerprint": target.fingerprint,
    }


def _distance(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[float, float]:
    """Root mean square shift of means in deviations, and mean distance of log deviations."""
    a, b = (torch.tensor(x["mean"], dtype=torch.float64) for x in (was, now))
    s, t = (torch.tensor(x["deviation"], dtype=torch.float64) for x in (was, now))
    if a.shape != b.shape:
        return float("inf"), float("inf")
    tiny = 1e-6 + 1e-3 * float(s.mean())  # a channel that never moves has no scale of its own
    shift = ((b - a) / (s + tiny)).square().mean().sqrt()
    spread = ((t + tiny).log() - (s + tiny).log()).abs().mean()
    return float(shift), float(spread)


def _short(values: Tensor) -> list[float]:
    """Four significant digits: enough to compare, and short in a file."""
    return [float(f"{v:.4g}") for v in values.tolist()]
