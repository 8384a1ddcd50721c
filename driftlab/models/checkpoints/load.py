"""The public door: a folder or hub id -> a Drafter with every field's provenance."""

from __future__ import annotations

from pathlib import Path

from driftlab.config import refuse_assumptions
from driftlab.errors import CheckpointError
from driftlab.models.checkpoints import native
from driftlab.models.checkpoints.read import read_files
from driftlab.models.drafter import Drafter


def load_drafter(
    source: str | Path, *, revision: str | None = None, strict: bool = False
) -> Drafter:
    files = read_files(source, revision=revision)
    if native.KEY not in files.config:
        raise CheckpointError(f"{source}: only driftlab's own layout is read yet")
    config, provenance = native.read_native(files)
    if strict:
        refuse_assumptions(provenance, owner=str(source))
    drafter = Drafter(config, files.tensors.get("draft_to_target"), provenance)
    drafter.load_state_dict(files.tensors)
    return drafter
