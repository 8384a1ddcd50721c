"""Files of a drafter -> one config dictionary and one dictionary of tensors.

Nothing here knows a dialect. Every fault of a file is a CheckpointError that names it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from driftlab.errors import CheckpointError
from driftlab.files import named_once, refuse_irregular

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# Safe and complete first; an index decides which shard each tensor counts from.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    WEIGHTS,
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Automodel's vocabulary maps beside the weights: absolute target ids, in the order of draft ids.
TOKEN_MAP = "speculative_token_map.pt"
META_FILES = ("eagle_meta.pt", "eagle3_meta.pt")
TOKENIZER = "tokenizer.json"
# A trainer's copies of the target, which no reader uses.
UNUSED = re.compile(r"^(model\.)?verifier_(lm_head|norm)\.|(^|\.)rotary_emb\.inv_freq$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Files:
    """What the folder holds. ``revision`` is the commit of a hub snapshot.

    ``token_map`` holds the target ids of a side file, ``token_map_file`` its name.
    """

    folder: Path
    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str  # the file or index that was read
    revision: str | None = None
    notes: tuple[str, ...] = ()
    token_map: Tensor | None = None
    token_map_file: str = ""


def read_files(source: str | Path, *, revision: str | None = None) -> Files:
    """Read config and tensors of a local folder or a hub id.

    Raises
    ------
    CheckpointError: the folder, its config, its weights or one of its shards is missing,
        damaged or unsafe, or a tensor holds NaN or infinity.
    """
    folder, commit = _locate(source, revision)
    config = read_json(folder / CONFIG)
    for name in WEIGHT_FILES:
        refuse_irregular(folder / name, CheckpointError)
    present = [name for name in WEIGHT_FILES if os.path.isfile(folder / name)]
    if not present:
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        raise CheckpointError(
            f"{folder} holds no weights",
            got=", ".join(found[:12]) or "an empty folder",
            remedy=f"One of {', '.join(WEIGHT_FILES)} is needed.",
        )
    name, *others = present
    notes = [f"{other} was not read, {name} was" for other in others]
    if (folder / "adapter_model.safetensors").is_file():
        notes.append(
            "adapter_model.safetensors belongs to the target: captured states of a target "
            "without it are not those of the training"
        )
    if name.endswith(".index.json"):
        tensors, stale = _read_sharded(folder, name)
        notes += stale
    else:
        tensors = read_tensors(folder / name)
    used = {n: t for n, t in tensors.items() if not UNUSED.search(n)}
    check_numbers(used, where=str(folder / name))
    ids, side = _token_map(folder)
    return Files(folder, str(source), config, tensors, name, commit, tuple(notes), ids, side)


def _token_map(folder: Path) -> tuple[Tensor | None, str]:
    """Target ids of Automodel's side files, and the file that they came from.

    ``eagle_meta.pt`` is the trainer's, beside the folder ``model`` that it exports;
    ``speculative_token_map.pt`` is made from it for SGLang.
    """
    beside = [folder.parent] if folder.name == "model" else []
    places = [folder / TOKEN_MAP] + [f / n for f in (folder, *beside) for n in META_FILES]
    found: list[tuple[Path, Tensor]] = []
    for path in places:
        refuse_irregular(path, CheckpointError)
        if not path.is_file():
            continue
        data = _load_torch(path)
        ids = data.get("selected_token_ids") if isinstance(data, dict) else data
        if ids is None:
            continue  # the bookkeeping of EAGLE-1 holds no map
        if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in IDS:
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids)
            raise CheckpointError(
                f"{path} holds no vector of token ids",
                got=shown,
                remedy=f"Write {path.name} again.",
            )
        _plain({path.name: ids}, path)
        found.append((path, ids.long()))
    if not found:
        return None, ""
    for path, ids in found[1:]:
        if not torch.equal(ids, found[0][1]):
            raise CheckpointError(
                f"{found[0][0]} and {path} map draft ids to other tokens",
                got=f"{len(found[0][1])} and {len(ids)} ids",
                remedy="One of them belongs to another training; remove it.",
            )
    return found[0][1], found[0][0].name


def _locate(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    folder = expanded(source)
    if os.path.isdir(folder):
        if revision is not None:
            raise CheckpointError(
                f"{folder} is a local folder and has no revision",
                got=revision,
                remedy="Leave the revision away, or give a hub id.",
            )
        return folder, None
    if os.path.exists(folder):
        raise CheckpointError(
            f"{folder} is a file", remedy=f"Give the folder that holds {CONFIG} and the weights."
        )
    if not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(
            f"{source} does not exist",
            remedy="Give a folder that exists, or a hub id like owner/name.",
        )
    return _download(str(source), revision)


def expanded(source: str | Path) -> Path:
    """``source`` as a path. Raises CheckpointError when it names a user whom nobody knows."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} does not exist", got=error, remedy="Give a folder that exists."
        ) from None


def _download(name: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.bin", TOKEN_MAP, *META_FILES],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name} is no local folder and could not be fetched from the hub"
            + (f" at revision {revision}" if revision else ""),
            got=reason[0],
            remedy="Check the name and the revision, go online once, or give a local folder.",
        ) from None
    return folder, folder.name


def read_json(path: Path) -> dict[str, Any]:
    refuse_irregular(path, CheckpointError)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=named_once)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist", remedy=f"A drafter's folder needs {path.name}."
        ) from None
    except (ValueError, RecursionError) as error:  # also of an integer of thousands of digits
        raise CheckpointError(
            f"{path} is not a JSON file", got=error, remedy="Fetch or write the file again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", got=error) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", got=type(data).__name__)
    return data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one .safetensors or .bin file. Nothing is ever unpickled freely."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged or no safetensors file",
                got=error,
                remedy="Fetch or write the file again.",
            ) from None
    data = _load_torch(path)
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} does not hold a dictionary of tensors", got=type(data).__name__
        )
    other = [f"{k} ({type(v).__name__})" for k, v in data.items() if not isinstance(v, Tensor)]
    if other:
        raise CheckpointError(
            f"{path} holds entries that are no tensors",
            got=", ".join(other[:6]),
            remedy="Save the drafter's state_dict alone.",
        )
    _plain(data, path)
    return {str(name): tensor.detach() for name, tensor in data.items()}


def _plain(tensors: dict[str, Tensor], path: Path) -> None:
    """Raise CheckpointError on tensors whose numbers do not lie in one block."""
    odd = [
        f"{name} (nested)" if t.is_nested else f"{name} ({t.layout}, {t.device})"
        for name, t in tensors.items()
        if t.is_nested or t.is_meta or t.layout is not torch.strided
    ]
    if odd:
        raise CheckpointError(
            f"{path} holds sparse, nested or empty tensors",
            got=", ".join(odd[:6]),
            remedy="Save the drafter's state_dict as plain tensors.",
        )


def _load_torch(path: Path) -> Any:
    """A file of ``torch.save``, weights only: nothing in it is ever run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused or read below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        with path.open("rb") as file:
            head = file.read(2)
        if not head.startswith(_PICKLED):
            raise _no_torch_file(path, f"it begins with {head!r}") from None
        raise CheckpointError(
            f"{path} holds more than tensors, and unpickling it could run its code",
            remedy="Convert it to safetensors on a machine that may run it, and give that file.",
        ) from None
    except Exception as error:  # a damaged file makes torch raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise _no_torch_file(path, reason[0]) from None


def _no_torch_file(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or no torch file",
        got=reason,
        remedy="Fetch or write the file again.",
    )


def _read_sharded(folder: Path, index: str) -> tuple[dict[str, Tensor], list[str]]:
    where = folder / index
    weight_map = read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map", remedy="Write the index again.")
    by_shard: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _inside(shard):
            raise CheckpointError(
                f"{where} sends tensor {tensor} out of its folder",
                got=shard,
                remedy="A shard is a file beside its index; do not load files from this source.",
            )
        by_shard.setdefault(shard, []).append(tensor)
    for shard in by_shard:
        refuse_irregular(folder / shard, CheckpointError)
    missing = [shard for shard in sorted(by_shard) if not os.path.isfile(folder / shard)]
    if missing:
        raise CheckpointError(
            f"{where} names {len(missing)} shard(s) that do not exist",
            got=", ".join(missing),
            remedy="Fetch the missing files, or write the checkpoint again.",
        )
    tensors: dict[str, Tensor] = {}
    notes = []
    for shard, names in sorted(by_shard.items()):
        held = read_tensors(folder / shard)
        absent = sorted(set(names) - set(held))
        if absent:
            raise CheckpointError(
                f"{folder / shard} lacks tensors that {index} places there",
                got=", ".join(absent),
                remedy="Write index and shards again together.",
            )
        stale = sorted(set(held) - set(names))
        if stale:
            notes.append(f"{shard}: {', '.join(stale)} ignored, the index places them elsewhere")
        tensors |= {name: held[name] for name in names}
    return tensors, notes


def _inside(shard: str) -> bool:
    parts = PurePosixPath(shard.replace("\\", "/"))
    return bool(shard) and not parts.is_absolute() and ".." not in parts.parts and ":" not in shard


def check_numbers(tensors: dict[str, Tensor], *, where: str) -> None:
    """Raise CheckpointError on quantised storage, and on tensors with NaN or infinity.

    float64 is looked at as the float32 that a drafter computes in.
    """
    odd = [f"{n} ({t.dtype})" for n, t in tensors.items() if t.dtype not in _READABLE]
    if odd:
        raise CheckpointError(
            f"{where} holds quantised tensors",
            got=", ".join(odd[:6]),
            remedy="Dequantise the drafter to float32, bfloat16 or float16 first.",
        )
    kept = {
        name: t.float() if t.dtype is torch.float64 else t
        for name, t in tensors.items()
        if t.is_floating_point()
    }
    bad = [
        f"{name} ({int((~torch.isfinite(t)).sum())} of {t.numel()})"
        for name, t in kept.items()
        if not bool(torch.isfinite(t).all())
    ]
    if bad:
        raise CheckpointError(
            f"{where} holds NaN or infinity",
            got=", ".join(bad),
            remedy="The file is damaged, or a tensor was never filled; fetch or train it again.",
        )


_PICKLED = (b"PK", b"\x80")  # a zip archive, as torch writes; a bare pickle
IDS = {torch.int64, torch.int32}
_READABLE = {
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.int64, torch.int32, torch.bool,
}  # fmt: skip
