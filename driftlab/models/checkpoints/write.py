"""A drafter -> a folder, in driftlab's own layout or in that of a trainer or an engine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from driftlab.errors import CheckpointError, ResourceError
from driftlab.files import file_hash, refuse_file_above
from driftlab.models.checkpoints.dialects import EXPORT_KEY, Dialect
from driftlab.models.checkpoints.layouts import lay_out, writable
from driftlab.models.checkpoints.native import to_native
from driftlab.models.checkpoints.read import CONFIG, WEIGHTS, check_numbers, expanded, read_json
from driftlab.models.checkpoints.sheet import TargetLike
from driftlab.models.drafter import Drafter


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    dialect: str = "driftlab",
    target: TargetLike | None = None,
    source: str | None = None,
    replace: bool = False,
) -> tuple[str, ...]:
    """Write config.json and model.safetensors; return what a user of the layout should know.

    ``load_drafter`` reads any of them back with bit-equal weights and an equal config. A kill
    leaves the old folder, or one that does not load.

    Parameters
    ----------
    dialect: driftlab, vllm, sglang, speculators or safeailab.
    target: needed for safeailab, whose layer ids are fixed; sglang and speculators use it to
        leave default ids away, check embeddings, and name the verifier.
    source: where an export's drafter came from. The export is marked with it, and may be written
        again, as :func:`refuse_occupied` says.
    replace: whatever drafter ``folder`` holds is the caller's own, as that of a cell is the run's,
        and is replaced. A folder with other files than a drafter's is refused all the same.

    Raises
    ------
    CheckpointError: the layout cannot hold the drafter, the drafter holds NaN or infinity, or
        ``folder`` is not free (see :func:`refuse_occupied`).
    ResourceError: the weights cannot be written.
    """
    folder = Path(folder)
    if not replace:
        refuse_occupied(folder, source=source, dialect=dialect)
    if dialect == Dialect.driftlab:
        config, tensors = to_native(drafter)
        notes: list[str] = []
    else:
        wanted = writable(dialect)
        layout = lay_out(drafter, wanted, target)
        config, tensors, notes = layout.config, layout.tensors, layout.notes
        check_numbers(tensors, where=f"the drafter for {folder}")
        if source is not None:
            mark = {"layout": str(wanted), "source_sha256": _mark(source)}
            config[EXPORT_KEY] = config.get(EXPORT_KEY, {}) | mark
    _write(folder, config, tensors, hashed=dialect == Dialect.driftlab)
    return tuple(notes)


def refuse_occupied(folder: Path, *, source: str | None = None, dialect: str = "driftlab") -> None:
    """Raise CheckpointError when ``folder`` holds anything that must not be replaced.

    Free is what is not there or empty, or holds the export of the same ``source`` in the same
    layout that driftlab wrote before, and nothing else.
    """
    wanted = writable(dialect)
    refuse_file_above(folder, CheckpointError)
    if source is not None and expanded(source).resolve() in folder.resolve().parents:
        raise CheckpointError(
            f"{folder} lies inside the drafter's own folder",
            got=source,
            remedy="Give a folder outside: readers take what lies there for the drafter's.",
        )
    held = sorted(p.name for p in folder.iterdir()) if os.path.isdir(folder) else []
    if not held:
        return
    own = source is not None and expanded(source).resolve() == folder.resolve()
    if source is not None and not own and set(held) == {CONFIG, WEIGHTS}:
        try:
            mark = read_json(folder / CONFIG).get(EXPORT_KEY)
        except CheckpointError:
            mark = None
        said = mark if isinstance(mark, dict) else {}
        if (said.get("layout"), said.get("source_sha256")) == (wanted, _mark(source)):
            return
    raise CheckpointError(
        f"{folder} is not empty, and is not replaced",
        got=", ".join(held[:6]),
        remedy="Give another folder, or remove this one.",
    )


def _mark(source: str) -> str:
    """What an export keeps of its source: a path of this machine is nobody else's business."""
    path = expanded(source)
    name = str(path.resolve()) if os.path.isdir(path) else source
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, hashed: bool
) -> None:
    refuse_file_above(folder, CheckpointError)
    held = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if held and not held <= {CONFIG, WEIGHTS}:
        raise CheckpointError(
            f"{folder} exists and holds something else",
            got=", ".join(sorted(held - {CONFIG, WEIGHTS})[:6]),
            remedy="Give a new folder.",
        )
    odd = sorted(name for name in held if not os.path.isfile(folder / name))
    if odd:
        raise CheckpointError(
            f"{folder / odd[0]} is no file, and is not replaced", remedy="Give a new folder."
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
            old = (folder / CONFIG).read_bytes() if CONFIG in held else None
            (folder / CONFIG).unlink(missing_ok=True)
            try:
                os.replace(staged / WEIGHTS, folder / WEIGHTS)
            except OSError:
                if old is not None:
                    (folder / CONFIG).write_bytes(old)
                raise
            os.replace(staged / CONFIG, folder / CONFIG)
        else:
            os.replace(staged, folder)
    except SafetensorError as error:
        raise ResourceError(
            f"the weights cannot be written to {folder}",
            got=error,
            remedy="Free some space, or raise the limit on the size of files.",
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
