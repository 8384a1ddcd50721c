"""Are the tokens of a drafter those of its target? Their strings, where both are at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from driftlab.config import Origin, Sourced
from driftlab.errors import CheckpointError, ContractError
from driftlab.models.checkpoints.read import TOKENIZER, read_json
from driftlab.models.checkpoints.sheet import TargetLike


def compare_tokens(folder: Path, target: TargetLike | None) -> Sourced | None:
    """Compare the drafter's ``tokenizer.json`` with the target's tokenizer, id by id.

    Returns what was found, or None when one of the two has no tokenizer. Ids that only one of
    them has are padding or additions, and are counted.

    Raises
    ------
    ContractError: an id stands for other strings in the two.
    CheckpointError: the file is damaged.
    """
    theirs = getattr(target, "tokenizer", None)
    if theirs is None or not (folder / TOKENIZER).exists():
        return None
    own = _strings(folder / TOKENIZER)
    known = {int(i): str(token) for token, i in theirs.get_vocab().items()}
    shared = sorted(own.keys() & known.keys())
    for i in shared:
        if own[i] != known[i]:
            raise ContractError(
                f"token {i} is {own[i]!r} in {folder / TOKENIZER} and {known[i]!r} in the target",
                got=f"{sum(own[j] != known[j] for j in shared)} of {len(shared)} ids differ",
                remedy="Give the drafter's own target.",
            )
    if not shared:
        raise ContractError(
            f"{folder / TOKENIZER} and the target have no token id in common",
            remedy="Give the drafter's own target.",
        )
    alone = {"the drafter": own.keys() - known.keys(), "the target": known.keys() - own.keys()}
    only = [f"{len(ids)} in {who} alone" for who, ids in alone.items() if ids]
    where = f"{TOKENIZER}: the strings of {len(shared)} token ids equal the target's"
    return Sourced(value="equal", origin=Origin.derived, where="; ".join([where, *only]))


def _strings(path: Path) -> dict[int, str]:
    """Token id -> string of a ``tokenizers`` file."""
    data = read_json(path)
    model = data.get("model")
    vocab: Any = model.get("vocab") if isinstance(model, Mapping) else None
    try:
        if isinstance(vocab, Mapping):
            found = {int(i): str(token) for token, i in vocab.items()}
        else:  # pairs of token and score, in the order of ids
            found = {i: str(token) for i, (token, _) in enumerate(vocab)}
        found |= {int(t["id"]): str(t["content"]) for t in data.get("added_tokens") or []}
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} holds no vocabulary", got=error, remedy="Fetch the file again."
        ) from None
    return found
