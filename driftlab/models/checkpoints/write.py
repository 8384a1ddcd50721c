"""A drafter -> a folder, in driftlab's own layout or in that of a trainer or an engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.layouts import lay_out
from driftlab.models.checkpoints.native import file_hash, to_native
from driftlab.models.checkpoints.read import CONFIG, WEIGHTS
from driftlab.models.checkpoints.sheet import TargetLike
from driftlab.models.drafter import Drafter


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    dialect: str = "driftlab",
    target: TargetLike | None = None,
) -> tuple[str, ...]:
    """Write config.json and model.safetensors; return what a user of the layout should know.

    ``load_drafter`` reads any of them back with bit-equal weights and an equal config. A kill
    leaves the old folder, or one that does not load.

    Parameters
    ----------
    dialect: driftlab, vllm, sglang, speculators or safeailab.
    target: needed for safeailab, whose layer ids are fixed; sglang and speculators use it to
        leave default ids away, check embeddings, and name the verifier.

    Raises
    ------
    CheckpointError: the layout cannot hold the drafter, or ``folder`` exists and holds
        something else.
    """
    folder = Path(folder)
    if dialect == Dialect.driftlab:
        config, tensors = to_native(drafter)
        notes: list[str] = []
    else:
        try:
            wanted = Dialect(dialect)
        except ValueError:
            raise CheckpointError("unknown layout", got=dialect) from None
        layout = lay_out(drafter, wanted, target)
        config, tensors, notes = layout.config, layout.tensors, layout.notes
    _write(folder, config, tensors, hashed=dialect == Dialect.driftlab)
    return tuple(notes)


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, hashed: bool
) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file", remedy="Give a folder.")
    held = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if held and not held <= {CONFIG, WEIGHTS}:
        raise CheckpointError(
            f"{folder} exists and holds something else",
            got=", ".join(sorted(held - {CONFIG, WEIGHTS})[:6]),
            remedy="Give a new folder.",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        # Tensors that share storage cannot be saved, so each is written as its own.
        save_file(
            {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()},
            staged / WEIGHTS,
            metadata={"format": "pt"},
        )
        if hashed:
            config["sha256"] = file_hash(staged / WEIGHTS)
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Temporary folders and safetensors files are private; a checkpoint is not.
        staged.chmod(0o755)
        (staged / WEIGHTS).chmod(0o644)
        if held:
            # Without its config the folder does not load, so no mixture ever does.
            (folder / CONFIG).unlink(missing_ok=True)
            os.replace(staged / WEIGHTS, folder / WEIGHTS)
            os.replace(staged / CONFIG, folder / CONFIG)
        else:
            os.replace(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
