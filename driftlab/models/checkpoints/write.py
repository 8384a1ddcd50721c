"""A drafter -> a folder, in driftlab's own layout or in that of a trainer or an engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from driftlab.errors import CheckpointError
from driftlab.models.checkpoints.native import file_hash, to_native
from driftlab.models.checkpoints.read import CONFIG, WEIGHTS
from driftlab.models.drafter import Drafter


def save_drafter(drafter: Drafter, folder: str | Path, *, dialect: str = "driftlab") -> None:
    """Write config.json and model.safetensors; a kill leaves the old folder, or none that loads.

    Raises
    ------
    CheckpointError: ``folder`` exists and holds something that is no drafter.
    """
    if dialect != "driftlab":
        raise CheckpointError("unknown layout", got=dialect, remedy="driftlab")
    config, tensors = to_native(drafter)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file", remedy="Give a folder.")
    strangers = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if strangers and CONFIG not in strangers and WEIGHTS not in strangers:
        raise CheckpointError(
            f"{folder} exists and holds no drafter",
            got=", ".join(sorted(strangers)[:6]),
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
        config["sha256"] = file_hash(staged / WEIGHTS)
        (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # Temporary folders and safetensors files are private; a checkpoint is not.
        staged.chmod(0o755)
        (staged / WEIGHTS).chmod(0o644)
        if strangers:
            # Without its config the folder does not load, so no mixture ever does.
            (folder / CONFIG).unlink(missing_ok=True)
            os.replace(staged / WEIGHTS, folder / WEIGHTS)
            os.replace(staged / CONFIG, folder / CONFIG)
        else:
            os.replace(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
