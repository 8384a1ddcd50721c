"""All anchors of a text at once.

Nothing that is computed from drafted tokens outlives verification, so the chain of anchor t
is a pure function of tokens 0..t+1 and captured states 0..t. A whole text's chains therefore
run in one pass per depth, exactly as stepping through them one by one would give.

    anchor t, depth d:   reads token t+d,   guesses token t+1+d
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from driftlab.errors import ContractError, DataError
from driftlab.models.drafter import Drafter, State

Mode = Literal["free", "forced"]


@dataclass(frozen=True)
class DepthStep:
    """One depth of every selected anchor. ``truth`` is -1 where the text has ended.

    anchors [T]; tokens (read), draft (guessed, target ids), truth: [B, T]; logits [B, T, Vd].
    """

    depth: int
    anchors: Tensor
    tokens: Tensor
    draft: Tensor
    truth: Tensor
    logits: Tensor
    state: State


def unroll(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    *,
    depth: int,
    mode: Mode,
    lengths: Tensor | None = None,
    anchors: Tensor | None = None,
) -> Iterator[DepthStep]:
    """Step every anchor of B right-padded texts through depths 1..``depth``.

    Parameters
    ----------
    tokens: [B, S] target ids. aux: [B, S, A*Ht] captured states of the same positions.
    mode: ``free`` feeds each chain its own drafts, ``forced`` the text's tokens. Both feed
        back the chain's own states.
    lengths: [B] true lengths; None when no text is padded.
    anchors: ascending anchors in 0..S-2 to draft from; None takes all. Depth 1 computes
        the whole prefix either way, since every anchor reads it.

    Raises
    ------
    DataError: a text of fewer than two tokens, or with an id that the drafter does not have.
    ContractError: aux of another length, or
        anchors that are none, do not ascend, or lie outside the text.
    """
    _check(drafter, tokens, aux)
    batch, size = tokens.shape
    device = tokens.device
    if lengths is None:
        lengths = torch.full((batch,), size, device=device)
    if anchors is None:
        anchors = torch.arange(size - 1, device=device)
    chosen = anchors.tolist()
    ascend = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not ascend or chosen[0] < 0 or chosen[-1] > size - 2:
        raise ContractError(
            f"anchors must ascend within 0..{size - 2}", got=chosen[:8] if chosen else "none"
        )
    memory = drafter.new_memory()
    state = drafter.step(tokens[:, 1:], drafter.fuse(aux[:, :-1]), memory, depth=1)
    if len(anchors) < size - 1:
        memory.select(anchors)
        state = state.select(anchors)
    read = draft = tokens[:, anchors + 1]
    for d in range(1, depth + 1):
        if d > 1:
            read = draft if mode == "free" else _at(tokens, anchors + d, lengths, fill=0)
            state = drafter.step(read, state.feedback, memory, depth=d)
        logits = drafter.logits(state)
        draft = drafter.to_target(logits.argmax(dim=-1))
        truth = _at(tokens, anchors + 1 + d, lengths, fill=-1)
        yield DepthStep(d, anchors, read, draft, truth, logits, state)


def forced_states(
    drafter: Drafter, tokens: Tensor, aux: Tensor, *, depth: int, first: int
) -> Iterator[State]:
    """States of all anchors from ``first`` on, as `unroll` gives them in forced mode.

    What training needs and nothing else: no logits, depth d has the anchors that still guess a
    position of the text (``first``..S - 2 - d; it ends when none does), positions before
    ``first`` give keys and values only, and what depends on tokens alone is computed once.

    Raises DataError and ContractError as `unroll` does.
    """
    _check(drafter, tokens, aux)
    memory = drafter.new_memory()
    half = drafter.read(tokens[:, 1:])
    u = drafter.fuse(aux[:, :-1])
    for d in range(1, depth + 1):
        rows = tokens.shape[1] - 1 - d - first
        if rows < 1:
            return
        # Row r of depth d reads token first + r + d; depth 1 reads the whole prefix.
        start, end = (0, tokens.shape[1] - 1) if d == 1 else (first + d - 1, first + d - 1 + rows)
        if d > 1:
            memory.shorten(rows)
            u = u[:, :rows]
        state = drafter.step(
            tokens[:, 1:][:, start:end],
            u,
            memory,
            depth=d,
            first=first if d == 1 else 0,
            half=half and half[start:end],
        )
        u = state.feedback
        yield state


def _check(drafter: Drafter, tokens: Tensor, aux: Tensor) -> None:
    if tokens.shape[1] < 2:
        raise DataError(
            "a chain needs one position with captured states and one known token after it",
            got=f"a text of {tokens.shape[1]} token(s)",
            remedy="Give longer texts.",
        )
    if aux.shape[:2] != tokens.shape:
        raise ContractError(
            "captured states and tokens differ in shape",
            got=f"{tuple(aux.shape[:2])} and {tuple(tokens.shape)}",
        )
    check_known(drafter, int(tokens.max()))


def check_known(drafter: Drafter, largest: int) -> None:
    """Raise DataError for an id of a padded target's vocabulary that the drafter cannot read."""
    if largest >= drafter.config.vocab_size:
        raise DataError(
            f"the text holds token id {largest}, for which the drafter has no embedding",
            got=f"{drafter.config.vocab_size} ids",
            remedy="The target's vocabulary is larger than its tokenizer's; leave such texts out.",
        )


def _at(tokens: Tensor, positions: Tensor, lengths: Tensor, *, fill: int) -> Tensor:
    """tokens [B, S] at ``positions`` [T]; ``fill`` where a text has ended. -> [B, T]"""
    inside = positions[None] < lengths[:, None]
    found = tokens[:, positions.clamp(max=tokens.shape[1] - 1)]
    return torch.where(inside, found, torch.full_like(found, fill))
