"""The public door: a folder or hub id -> a Drafter with every field's provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from driftlab.config import DrafterConfig, Origin, Sourced, refuse_assumptions
from driftlab.errors import CheckpointError, ConfigError, ContractError, first_fault
from driftlab.models.checkpoints import native
from driftlab.models.checkpoints.dialects import NATIVE_KEY, Dialect
from driftlab.models.checkpoints.fields import Ledger
from driftlab.models.checkpoints.read import Files, read_files
from driftlab.models.checkpoints.resolve import (
    Resolved,
    check_boundaries,
    check_overrides,
    resolve,
)
from driftlab.models.checkpoints.sheet import TargetLike
from driftlab.models.checkpoints.tokens import compare_tokens
from driftlab.models.checkpoints.vocabulary import only_padding
from driftlab.models.drafter import Drafter


def inspect(
    source: str | Path,
    *,
    target: TargetLike | None = None,
    revision: str | None = None,
    boundaries: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolve a drafter's contract without building the model.

    Without a target the default boundaries stay open: ``config`` is None and ``pending``
    says what is needed. Raises as :func:`load_drafter` does.
    """
    overrides = dict(overrides or {})
    check_overrides(overrides)
    if boundaries is not None:
        check_boundaries(boundaries)
    files = read_files(source, revision=revision)
    tokens = compare_tokens(files.folder, target)
    if NATIVE_KEY in files.config:
        return _native(files, target, boundaries, overrides, tokens)
    return resolve(files, target=target, boundaries=boundaries, overrides=overrides, tokens=tokens)


def load_drafter(
    source: str | Path,
    *,
    target: TargetLike | None = None,
    revision: str | None = None,
    boundaries: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Drafter:
    """Read a drafter of any dialect, in float32 on the CPU, as it was trained.

    ``drafter.provenance`` holds the origin of every field of its config, the dialect, where
    embeddings, head and vocabulary map came from, and ``notes``, the reader's remarks.

    Parameters
    ----------
    source: a folder, or a hub id (pin it with ``revision``).
    target: the drafter's target; needed for default boundaries and for embeddings or a
        head that the file does not hold, and checked against the drafter otherwise.
    boundaries: the captured residual streams, whatever the file says.
    overrides: ``DrafterConfig`` fields, ``rope.theta`` and the like, ``dialect`` or
        ``boundary_convention`` (entry or output), taken instead of what the file says.
    strict: refuse contradictions and assumed values instead of noting them.

    Raises
    ------
    CheckpointError: the files are missing, damaged, of another kind, or contradict themselves.
    ContractError: drafter and target do not belong together, or the target is needed.
    AssumptionError: ``strict`` and a value that is not in the file.
    """
    found = inspect(
        source, target=target, revision=revision, boundaries=boundaries, overrides=overrides
    )
    if found.pending is not None:
        raise found.pending
    if strict:
        if found.conflicts:
            raise CheckpointError(
                f"{source}: {len(found.conflicts)} contradiction(s) in the file",
                got="; ".join(found.conflicts),
                remedy="Correct the config, or drop --strict.",
            )
        refuse_assumptions(found.provenance, owner=str(source))
    config = found.config
    assert config is not None  # else pending had said why
    weights = _weights(found, config, target)
    with _no_init():
        drafter = Drafter(config, found.draft_to_target, found.provenance)
    wanted = set(drafter.state_dict()) - {"draft_to_target"}
    wrong = [n for n in wanted if weights[n].shape != drafter.get_parameter(n).shape]
    if wrong:
        raise ContractError(
            "the target's tensors do not fit the drafter",
            got="; ".join(f"{n} {tuple(weights[n].shape)}" for n in sorted(wrong)),
            remedy="Give the drafter's own target.",
        )
    drafter.load_state_dict(
        {**{n: weights[n] for n in wanted}, "draft_to_target": drafter.draft_to_target},
        assign=True,
    )
    return drafter


def _weights(
    found: Resolved, config: DrafterConfig, target: TargetLike | None
) -> dict[str, Tensor]:
    """Every parameter in float32, with what only the target holds copied from it.

    Each is a copy: tensors of a mapped file lie at any address, and a matrix product depends
    on alignment in its last bit.
    """
    odd = [
        f"{n} ({t.dtype})"
        for n, t in found.tensors.items()
        if not t.is_floating_point() and n not in {"d2t", "t2d"}
    ]
    if odd:
        raise CheckpointError(
            f"{found.source}: weights are no floating-point numbers",
            got=", ".join(odd[:6]),
            remedy="The file is damaged, or quantised; fetch or write it again.",
        )
    weights = {
        n: t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for n, t in found.tensors.items()
        if n not in {"d2t", "t2d"}
    }
    if "embed_tokens.weight" not in weights:
        weights["embed_tokens.weight"] = _borrow(found, target, "embedding_weight", config)
    if "lm_head.weight" not in weights:
        if found.provenance["lm_head"].value == "embed_tokens":
            head = weights["embed_tokens.weight"]
        else:
            head = _borrow(found, target, "head_weight", config)
        ids = found.draft_to_target
        weights["lm_head.weight"] = head.clone() if ids is None else head[ids].clone()
    return weights


def _borrow(found: Resolved, target: TargetLike | None, name: str, config: DrafterConfig) -> Tensor:
    what = "embed_tokens.weight" if name == "embedding_weight" else "lm_head.weight"
    if target is None:
        raise ContractError(
            f"{found.source} does not hold {what}: it is the target's",
            remedy="Give the target too: --target, or target= in Python.",
        )
    weight: Tensor = getattr(target, name).detach().to("cpu", torch.float32)
    if weight.shape[1] != config.hidden_size:
        raise ContractError(
            f"{found.source} does not hold {what}, and the target's cannot take its place",
            got=f"target width {weight.shape[1]}, drafter width {config.hidden_size}",
        )
    return weight.clone()


def _native(
    files: Files,
    target: TargetLike | None,
    boundaries: Sequence[int] | None,
    overrides: Mapping[str, Any],
    tokens: Sourced | None,
) -> Resolved:
    """driftlab's own layout: the contract stands in the file, only checks are left."""
    config, provenance = native.read_native(files)
    ledger = Ledger(overrides)
    stated = {"dialect": Dialect.driftlab, **dict(config)}
    ledger.provenance = {
        name: Sourced(value=value, origin=Origin.read, where="driftlab's own layout")
        for name, value in stated.items()
    } | provenance
    ledger.put("source", files.source, Origin.read, "argument")
    if tokens is not None:
        ledger.take("tokenizer", tokens)
    changes: dict[str, Any] = {}
    if boundaries is not None:
        changes["boundaries"] = tuple(sorted(boundaries))
        ledger.put("boundaries", changes["boundaries"], Origin.read, "argument")
    rope = {}
    for name, value in overrides.items():
        if name.startswith("rope."):
            rope[name.removeprefix("rope.")] = value
        elif name in DrafterConfig.model_fields:
            changes[name] = value
        else:
            raise ConfigError(f"driftlab's own layout leaves {name} nothing to decide")
        ledger.put(name, value, Origin.read, "overrides")
    try:
        changed = config.model_dump() | changes
        changed["rope"] = changed["rope"] | rope
        new = DrafterConfig.model_validate(changed)
    except ValidationError as error:
        raise ConfigError(
            "the overrides make an impossible contract", got=first_fault(error)
        ) from None
    _fits(new, target, tokens)
    return Resolved(
        source=files.source,
        dialect=Dialect.driftlab,
        config=new,
        provenance=ledger.provenance,
        notes=(),
        shapes={n: tuple(t.shape) for n, t in files.tensors.items()},
        tensors={n: t for n, t in files.tensors.items() if n != "draft_to_target"},
        draft_to_target=native.check_tensors(files, new),
    )


def _fits(config: DrafterConfig, target: TargetLike | None, tokens: Sourced | None) -> None:
    if target is None:
        return
    if config.target_hidden_size != target.hidden_size:
        raise ContractError(
            f"the drafter was made for a target of width {config.target_hidden_size}",
            got=f"a target of width {target.hidden_size}",
            remedy="Give the drafter's own target.",
        )
    if (
        config.vocab_size != target.vocab_size
        and tokens is None
        and not only_padding(config.vocab_size, target.vocab_size)
    ):
        raise ContractError(
            f"the drafter was made for {config.vocab_size} tokens",
            got=f"a target of {target.vocab_size} tokens",
            remedy="Give the drafter's own target.",
        )
    if config.boundaries and config.boundaries[-1] > target.n_layers:
        raise ContractError(
            f"boundary {config.boundaries[-1]} is not one of 0..{target.n_layers}",
            got=f"boundaries {config.boundaries}",
            remedy="Give the drafter's own target.",
        )


@contextmanager
def _no_init() -> Iterator[None]:
    """Build modules without drawing their weights: loading must not move the random state."""
    kept = {c: c.reset_parameters for c in (nn.Linear, nn.Embedding)}
    for cls in kept:
        cls.reset_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cls, method in kept.items():
            cls.reset_parameters = method  # type: ignore[method-assign]
