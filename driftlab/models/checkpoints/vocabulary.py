"""Vocabulary sizes, and the map of draft ids to target ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftlab.config import Origin
from driftlab.errors import CheckpointError, ContractError
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.sheet import Sheet, there


def resolve_vocabulary(sheet: Sheet, fields: dict[str, Any]) -> Tensor | None:
    """Sizes and the map of absolute ids; None when the head itself is the target's."""
    ledger, target = sheet.ledger, sheet.target
    said = sheet.layer.get("vocab_size", int)
    if said is not None and said.origin is not Origin.read:
        said = None
    rows = sheet.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in sheet.tensors else None
    t2d = _mask(sheet)
    claims = [
        (rows, "embed_tokens.weight"),
        (said.value if said else None, said.where if said else ""),
        (len(t2d) if t2d is not None else None, "t2d"),
    ]
    stated = [(value, place) for value, place in claims if value is not None]
    if not stated and target is None:
        raise CheckpointError(f"{sheet.where}: vocab_size is missing")
    own, own_where = stated[0] if stated else (target.vocab_size, "the target")  # type: ignore[union-attr]
    for value, place in stated[1:]:
        if value != own:
            if not only_padding(value, own):
                raise CheckpointError(
                    f"{place} has {value} tokens, {own_where} has {own}",
                    remedy="Config and weights do not belong together.",
                )
            ledger.conflict(f"{place} has {value} tokens, {own_where} has {own}: padding")
    used = own
    if target is not None and target.vocab_size != own:
        if sheet.tokens is None and not only_padding(target.vocab_size, own):
            raise ContractError(
                f"the drafter was made for {own} tokens ({own_where})",
                got=f"a target of {target.vocab_size} tokens",
                remedy="Give the drafter's own target.",
            )
        why = "padding only" if sheet.tokens is None else sheet.tokens.where
        ledger.note(f"target of {target.vocab_size} tokens, drafter of {own}: {why}")
        if rows is None:
            used, own_where = target.vocab_size, "the target, whose embeddings are used"
    ledger.derived("vocab_size", used, own_where)
    embed = "file" if rows is not None else "target"
    ledger.derived("embed_tokens", embed, f"embed_tokens.weight {there(rows is not None)}")
    kept = _draft_size(sheet, own)
    fields |= {"vocab_size": used, "draft_vocab_size": kept}
    return _map(sheet, kept, own, used, t2d)


def _mask(sheet: Sheet) -> Tensor | None:
    t2d = sheet.tensors.get("t2d")
    if t2d is None:
        return None
    if t2d.dim() != 1 or t2d.is_floating_point():
        raise CheckpointError("t2d is no vector of booleans", got=f"{t2d.dtype} {t2d.shape}")
    return t2d.bool()


def _draft_size(sheet: Sheet, vocab: int) -> int:
    ledger = sheet.ledger
    d2t = sheet.tensors.get("d2t")
    if "lm_head.weight" in sheet.tensors:
        size, place = sheet.shape("lm_head.weight")[0], "lm_head.weight"
        ledger.derived("lm_head", "file", "lm_head.weight there")
    else:
        tied = sheet.layer.get("tie_word_embeddings", bool)
        own = tied is not None and tied.value and "embed_tokens.weight" in sheet.tensors
        size, place = (len(d2t), "d2t") if d2t is not None else (vocab, "the vocabulary")
        why = f"lm_head.weight absent, tie_word_embeddings {'on' if own else 'off or no matter'}"
        ledger.derived("lm_head", "embed_tokens" if own else "target", why)
        ledger.note(
            f"lm_head.weight is absent: the head is the "
            f"{'drafter’s own embedding' if own else 'target’s head'}"
        )
    said = sheet.top.get("draft_vocab_size", int)
    if said is not None and said.value != size:
        ledger.conflict(f"{said.where} is {said.value}, {place} has {size}, which was taken")
    if not 0 < size <= vocab:
        raise CheckpointError(
            f"{place} has {size} draft ids for a vocabulary of {vocab}",
            remedy="Config and weights do not belong together.",
        )
    return ledger.derived("draft_vocab_size", size, place)


def _map(sheet: Sheet, kept: int, own: int, used: int, t2d: Tensor | None) -> Tensor:
    """Absolute target ids of the draft ids, from the weights or a side file."""
    ledger = sheet.ledger
    table = sheet.tensors.get("d2t")
    marked = None if t2d is None else t2d.nonzero().flatten()
    unfilled = table is None or not bool(table.any())
    if marked is not None and not len(marked) and kept == own and unfilled:
        # SafeAILab's buffers of a full vocabulary, which it drops after loading.
        ledger.note("t2d marks no token and the vocabulary is whole: it was never filled")
        marked = None
    if marked is not None and len(marked) != kept:
        raise CheckpointError(
            f"t2d marks {len(marked)} tokens, the head has {kept} draft ids",
            remedy="The vocabulary map belongs to another drafter.",
        )
    side = _side_map(sheet, kept, max(own, used))
    if table is None and side is not None and kept != own:
        where = sheet.files.token_map_file
        if marked is not None and not torch.equal(side.sort().values, marked):
            raise CheckpointError(
                f"{where} and t2d keep other tokens", remedy="One belongs to another training."
            )
        ledger.put("draft_to_target", "side file", Origin.read, f"{where}, absolute ids")
        return side
    ids = _table_map(sheet, kept, own, used, marked, table)
    if side is not None and not torch.equal(side, ids):
        i = int((side != ids).nonzero()[0])
        ledger.conflict(
            f"{sheet.files.token_map_file} sends draft id {i} to {int(side[i])}, the weights' map "
            f"to {int(ids[i])}, which was taken"
        )
    return ids


def _side_map(sheet: Sheet, kept: int, limit: int) -> Tensor | None:
    """Target ids of a side file, checked."""
    ids, where = sheet.files.token_map, sheet.files.token_map_file
    if ids is None:
        return None
    fault = None
    if len(ids) != kept:
        fault = f"{len(ids)} ids for a head of {kept}"
    elif int(ids.min()) < 0 or int(ids.max()) >= limit:
        fault = f"an id outside 0..{limit - 1}"
    elif len(ids.unique()) < kept:
        fault = "an id twice"
    if fault is not None:
        raise CheckpointError(
            f"{sheet.files.folder / where} is no map of this drafter's vocabulary",
            got=fault,
            remedy="It belongs to another training; put the right one there or remove it.",
        )
    return ids


def _table_map(
    sheet: Sheet, kept: int, own: int, used: int, marked: Tensor | None, table: Tensor | None
) -> Tensor:
    """The map that the weights hold, as ``d2t`` or as ``t2d``."""
    ledger = sheet.ledger
    arange = torch.arange(kept)
    if table is None:
        if marked is not None:
            ledger.derived("draft_to_target", "t2d", "d2t absent, the tokens that t2d marks")
            return marked
        if kept == own:
            ledger.derived("draft_to_target", "identity", "no d2t, the vocabulary is whole")
            return arange
        extra = {
            Dialect.modelopt_megatron: " ModelOpt's Megatron export never writes it.",
            Dialect.automodel: " Automodel's lies beside it, in speculative_token_map.pt.",
        }.get(sheet.dialect, "")
        raise CheckpointError(
            f"the draft vocabulary is reduced ({kept} of {own}) and the file has no d2t",
            got=", ".join(sorted(sheet.tensors)[:4]) + ", ...",
            remedy=f"Add d2t from the training's token map.{extra}",
        )
    if table.shape != (kept,) or table.is_floating_point() or table.dtype is torch.bool:
        raise CheckpointError(
            f"d2t is no vector of {kept} integers, one per row of the head",
            got=f"{table.dtype} {tuple(table.shape)}",
            remedy="The vocabulary map belongs to another drafter.",
        )
    table = table.long()
    if not bool(table.any()):
        if kept == own or (marked is not None and torch.equal(marked, arange)):
            ledger.derived("draft_to_target", "identity", "d2t is all zero")
            return arange
        raise CheckpointError(
            f"d2t is all zero for a reduced vocabulary ({kept} of {own}): never filled",
            remedy="Write d2t from the training's token map.",
        )
    offset, absolute = arange + table, table
    limit = max(own, used)
    forms = [
        (name, ids)
        for name, ids in (("offset", offset), ("absolute", absolute))
        if _ascending(ids, limit) and (marked is None or torch.equal(ids, marked))
    ]
    if not forms and marked is not None and torch.equal(offset.sort().values, marked):
        forms = [("offset", offset)]
        ledger.note("d2t is not ascending; t2d marks exactly its tokens")
    if not forms:
        raise _broken_map(offset, limit, marked)
    name, ids = forms[0]
    if name == "absolute":
        ledger.conflict("d2t holds absolute ids, where every known trainer writes offsets")
    if len(forms) == 2 and marked is None:
        ledger.note("d2t would be a valid table of absolute ids too; read as offsets")
        ledger.assumed("draft_to_target", name, "d2t, offsets as every trainer writes")
    else:
        ledger.derived("draft_to_target", name, "d2t, the only valid reading")
    return ids


def _broken_map(offset: Tensor, limit: int, marked: Tensor | None) -> CheckpointError:
    outside = ((offset < 0) | (offset >= limit)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        fault = f"draft id {i} -> {int(offset[i])}, outside 0..{limit - 1}"
    elif len(offset.unique()) < len(offset):
        ordered = offset.sort().values
        twice = int(ordered[:-1][ordered[1:] == ordered[:-1]][0])
        fault = f"two draft ids -> {twice}"
    elif marked is not None:
        fault = "it differs from the tokens that t2d marks"
    else:
        fault = "target ids do not ascend"
    return CheckpointError(
        "d2t is no valid vocabulary map, neither as offsets nor as absolute ids",
        got=fault,
        remedy="Write d2t from the training's token map.",
    )


def only_padding(a: int, b: int) -> bool:
    """Whether the larger of two vocabularies is the smaller, rounded up to 64, 128, 256 or 512."""
    small, large = min(a, b), max(a, b)
    return any(large == -(-small // step) * step for step in (64, 128, 256, 512))


def _ascending(ids: Tensor, limit: int) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < limit
