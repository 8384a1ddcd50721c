"""One speculation round at a time, verified by the target: what a serving engine does.

A round at anchor t drafts tokens for t+2 .. t+1+depth from the newest token t+1; one target
forward over the newest token and the drafts verifies them. Drafted keys, in the drafter and
in the target, are thrown away; accepted positions get the target's true states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from driftlab.config import check_sampling, is_whole
from driftlab.engines.anchors import check_known
from driftlab.errors import ConfigError, ContractError, DataError, NumericsError
from driftlab.models.drafter import Drafter, Memory
from driftlab.models.target import Target
from driftlab.results.hints import misconfigured

Draft = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Round:
    """``anchor`` t, the drafted target ids, how many were accepted, and the token after them.

    The last round may go past the end token or the limit, where the continuation is cut.
    """

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    bonus: int


@dataclass(frozen=True)
class Speculation:
    """A continuation made by speculation. ``rule`` says how drafts were accepted.

    ``ties`` counts the verified positions at which the target's two best tokens have the same
    logit: there another kernel may choose another one.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    rounds: tuple[Round, ...]
    rule: str
    ties: int = 0

    @property
    def hint(self) -> str | None:
        """A checklist when more than 50 rounds accepted nothing, else None."""
        return misconfigured(len(self.rounds), sum(r.accepted for r in self.rounds))

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]


def speculate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    *,
    depth: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    draft: Draft = "greedy",
    seed: int = 0,
) -> Speculation:
    """Continue ``prompt`` with drafts of ``depth`` tokens.

    At temperature 0 the result is the target's own greedy text. Above it, a greedy draft is
    accepted with the target's probability of it, and a sampled one by the rule of
    Leviathan et al. 2023 (arXiv 2211.17192); in both cases the text follows the target's
    distribution exactly. No round drafts more than ``max_new_tokens``, and rounds near the
    target's context length draft fewer.

    Raises
    ------
    ConfigError: an unknown ``draft``, or a temperature or seed that cannot be.
    ContractError: see `check_pair`; or a sampled draft at temperature 0.
    DataError: an empty or foreign prompt, prompt + new tokens beyond the target's context, an id
        that the drafter does not have, or a depth or number of new tokens below 1.
    NumericsError: logits of either model are not finite; model, depth and position are named.
    """
    if draft not in get_args(Draft):
        raise ConfigError(
            "unknown draft", got=draft, remedy=f"One of {', '.join(get_args(Draft))}."
        )
    if draft == "sampled" and temperature == 0:
        raise ContractError("a sampled draft needs a temperature above 0")
    if (
        not (is_whole(depth) and is_whole(max_new_tokens))
        or depth < 1
        or max_new_tokens < 1
        or temperature < 0
    ):
        raise DataError(
            "speculation needs depth >= 1, max_new_tokens >= 1 and temperature >= 0",
            got=f"{depth}, {max_new_tokens}, {temperature}",
        )
    check_sampling([temperature], seed)
    check_pair(target, drafter)
    target.check_tokens(prompt, what="the prompt", extra=max_new_tokens)
    rng = torch.Generator().manual_seed(seed)
    session = target.session(prompt, drafter.config.boundaries)
    # A drafter that fuses nothing reads the state after the target's final norm.
    fuses = bool(drafter.config.boundaries)
    tokens, aux = list(prompt), session.aux if fuses else session.last
    rounds: list[Round] = []
    ties = _ties(session.logits[0, -1:], target.name, len(prompt) - 1)
    tokens.append(_choose(session.logits[0, -1], temperature, rng))
    memory = drafter.new_memory()
    limit = len(prompt) + max_new_tokens
    with torch.inference_mode():
        ended = tokens[-1] in target.eos_ids
        while len(tokens) < limit and not ended:
            anchor = len(tokens) - 2
            room = min(depth, max_new_tokens, target.max_position - len(tokens))
            drafted, q = _draft(drafter, memory, tokens, aux, room, draft, temperature, rng)
            block = session.extend([tokens[-1], *drafted])
            if block.logits is None:
                raise ContractError("verification needs the target's logits")
            ties += _ties(block.logits[0], target.name, anchor + 1)
            accepted, bonus = verify(block.logits[0], drafted, q, temperature, rng)
            session.rewind(len(tokens) + accepted)
            aux = (block.aux if fuses else block.last)[:, : accepted + 1]
            rounds.append(Round(anchor, tuple(drafted), accepted, bonus))
            new = [*drafted[:accepted], bonus]
            ended = not target.eos_ids.isdisjoint(new)
            tokens += new
    kept = tokens[:limit]
    for i, token in enumerate(kept[len(prompt) :], start=len(prompt)):
        if token in target.eos_ids:
            kept = kept[: i + 1]
            break
    rule = "greedy match" if temperature == 0 else f"{draft} draft, temperature {temperature}"
    return Speculation(tuple(kept), len(prompt), tuple(rounds), rule, ties)


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise ContractError when the drafter was not made for this target's widths and ids."""
    config = drafter.config
    if config.target_hidden_size != target.hidden_size:
        raise ContractError(
            f"{target.name} has states of width {target.hidden_size}",
            got=f"a drafter for width {config.target_hidden_size}",
            remedy="Use the target that the drafter was trained for.",
        )
    if config.vocab_size > target.vocab_size:
        raise ContractError(
            f"{target.name} has {target.vocab_size} token ids",
            got=f"a drafter for {config.vocab_size}",
            remedy="Use the target that the drafter was trained for.",
        )
    target.check_boundaries(config.boundaries)


def _draft(
    drafter: Drafter,
    memory: Memory,
    tokens: list[int],
    aux: Tensor,
    depth: int,
    draft: Draft,
    temperature: float,
    rng: torch.Generator,
) -> tuple[list[int], Tensor | None]:
    """Extend the prefix by the rows of ``aux`` and draft from the last. q: [depth, Vd]."""
    first = memory.length
    read = tokens[first + 1 : first + 1 + aux.shape[1]]
    check_known(drafter, max(read))
    rows = torch.tensor([read], device=aux.device)
    state = drafter.step(rows, drafter.fuse(aux, first=first), memory, depth=1)
    memory.select(memory.anchors[-1:])
    drafted: list[int] = []
    chances = []
    for d in range(1, depth + 1):
        if d > 1:
            newest = torch.tensor([[drafted[-1]]], device=aux.device)
            state = drafter.step(newest, state.feedback[:, -1:], memory, depth=d)
        logits = drafter.logits(state)[0, -1]
        _ties(logits[None], f"drafter {drafter.config.variant}, depth {d},", len(tokens) - 2)
        if draft == "greedy":
            choice = logits.argmax()
        else:
            q = _probabilities(logits, temperature)
            chances.append(q)
            choice = torch.multinomial(q, 1, generator=rng)[0]
        drafted.append(int(drafter.to_target(choice)))
    if not chances:
        return drafted, None
    wide = torch.zeros(depth, drafter.config.vocab_size)
    wide[:, drafter.draft_to_target.cpu()] = torch.stack(chances)
    return drafted, wide


def _ties(logits: Tensor, owner: str, position: int) -> int:
    """How many rows of logits [N, V] have no single best token.

    Raises NumericsError when one is not finite; ``position`` is that of the first row.
    """
    best = logits.amax(-1)
    if not bool(best.isfinite().all()):
        row = int((~best.isfinite()).nonzero()[0])
        raise NumericsError(
            f"the logits of {owner} are not finite at position {position + row}",
            got=f"computed in {str(logits.dtype).removeprefix('torch.')}",
            remedy="Use bfloat16 or float32; if it is, the weights are damaged.",
        )
    return int(((logits == best[..., None]).sum(-1) > 1).sum())


def verify(
    logits: Tensor,
    drafted: list[int],
    q: Tensor | None,
    temperature: float,
    rng: torch.Generator,
) -> tuple[int, int]:
    """How many drafts are accepted, and the token that follows them.

    Parameters
    ----------
    logits: [K+1, V] target logits; row i judges draft i, row K gives the bonus token.
    q: [K, V] the distributions that the drafts were sampled from; None for greedy drafts,
        whose distribution is a point, so that acceptance has the target's probability.
    """
    if temperature == 0:
        best = logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == best[accepted]:
            accepted += 1
        return accepted, best[accepted]
    p = _probabilities(logits, temperature)
    rows, ids = torch.arange(len(drafted)), torch.tensor(drafted)
    # Ratio of the target's to the draft's probability; a point mass has q = 1.
    ratio = p[rows, ids] if q is None else p[rows, ids] / q[rows, ids]
    passed = torch.rand(len(drafted), generator=rng) < ratio
    accepted = int(passed.long().cumprod(dim=0).sum())
    left = p[accepted].clone()
    if accepted < len(drafted):
        token = drafted[accepted]
        if q is None:
            left[token] = 0
        else:
            # Ids past the draft's vocabulary (padding rows) keep all of their mass.
            left[: q.shape[1]] = (left[: q.shape[1]] - q[accepted]).clamp(min=0)
        if not left.any():  # p and q differ by rounding only: nothing else can be drawn
            return accepted, token
    return accepted, int(torch.multinomial(left, 1, generator=rng))


def _choose(logits: Tensor, temperature: float, rng: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(_probabilities(logits, temperature), 1, generator=rng))


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """On the CPU, where the random state lives: the same draws whatever computed the logits."""
    return (logits.float().cpu() / temperature).softmax(dim=-1)
