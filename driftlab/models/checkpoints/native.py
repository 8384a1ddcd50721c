"""driftlab's own layout: everything of the contract, nothing to assume.

config.json        {"driftlab_drafter": 1, "config": ..., "provenance": ...,
                    "contract_sha256": ... of the two, "sha256": ... of the weights}
model.safetensors  the Drafter's state_dict, with absolute ids in ``draft_to_target``
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from driftlab.config import DrafterConfig, Provenance
from driftlab.errors import CheckpointError, first_fault
from driftlab.files import file_hash
from driftlab.models.checkpoints.dialects import NATIVE_KEY
from driftlab.models.checkpoints.layers import activation_fault
from driftlab.models.checkpoints.read import CONFIG, IDS, WEIGHTS, Files, read_json
from driftlab.models.checkpoints.shapes import expected_shapes
from driftlab.models.drafter import Drafter

VERSION = 1
_PROVENANCE = TypeAdapter(Provenance)


def contract_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the contract as it stands in the file."""
    text = json.dumps([config.get("config"), config.get("provenance", {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_native(drafter: Drafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config (without the hash of the weights) and tensors of the native layout."""
    config = {
        NATIVE_KEY: VERSION,
        "variant": drafter.config.variant,
        "config": drafter.config.model_dump(mode="json"),
        "provenance": _PROVENANCE.dump_python(drafter.provenance, mode="json"),
    }
    config["contract_sha256"] = contract_hash(config)
    return config, dict(drafter.state_dict())


def stated_config(folder: Path) -> DrafterConfig:
    """The contract of a native folder as it stands there; no checksum is compared.

    Raises CheckpointError: not a native folder.
    """
    return _stated(folder)[0]


def _stated(folder: Path) -> tuple[DrafterConfig, Mapping[str, Any]]:
    """The contract, and the whole config that it stands in."""
    try:
        stated = read_json(folder / CONFIG)
        return DrafterConfig.model_validate(stated["config"]), stated
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not a drafter's of driftlab's own",
            got=f"{type(error).__name__}",
            remedy="Write the drafter again with save_drafter.",
        ) from None


def verified_config(folder: Path) -> DrafterConfig:
    """`stated_config`, after both checksums of the folder were compared. Raises CheckpointError."""
    config, stated = _stated(folder)
    _check_weights(folder / WEIGHTS, stated)
    _check_contract(folder / CONFIG, stated)
    return config


def _check_weights(path: Path, stated: Mapping[str, Any]) -> None:
    try:
        found = file_hash(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read",
            got=error.strerror,
            remedy="Write the drafter again with save_drafter.",
        ) from None
    if stated.get("sha256") != found:
        raise CheckpointError(
            f"{path} is not the file that its config was written with",
            got=f"sha256 {found}",
            remedy="The weights are damaged or were exchanged; write the drafter again.",
        )


def _check_contract(path: Path, stated: Mapping[str, Any]) -> None:
    known = stated.get("contract_sha256")
    if known is not None and known != contract_hash(stated):
        raise CheckpointError(
            f"{path} was changed after it was written",
            got="its checksum does not agree",
            remedy="Write the drafter again with save_drafter; overrides read it another way.",
        )


def read_native(files: Files) -> tuple[DrafterConfig, Provenance]:
    """Contract of a native folder.

    Raises
    ------
    CheckpointError: another version, a wrong field, or weights that are not those that
        the config was written with.
    """
    where = files.folder / CONFIG
    if files.config[NATIVE_KEY] != VERSION:
        raise CheckpointError(
            f"{where}: unknown version of driftlab's layout",
            got=files.config[NATIVE_KEY],
            remedy=f"This driftlab reads version {VERSION}.",
        )
    try:
        config = DrafterConfig.model_validate(files.config.get("config"))
        provenance = _PROVENANCE.validate_python(files.config.get("provenance", {}))
    except ValidationError as error:
        raise CheckpointError(
            f"{where}: its fields are wrong",
            got=first_fault(error),
            remedy="Write the drafter again with save_drafter.",
        ) from None
    if fault := activation_fault(config.hidden_act):
        raise CheckpointError(f"{where}: hidden_act {fault}", got=repr(config.hidden_act))
    _check_weights(files.folder / files.weights, files.config)
    return config, provenance


def check_tensors(files: Files, config: DrafterConfig) -> Tensor:
    """The vocabulary map, after every tensor was found to have its name and shape."""
    fields = {name: getattr(config, name) for name in DrafterConfig.model_fields}
    have = {name: tuple(tensor.shape) for name, tensor in files.tensors.items()}
    if config.num_layers > len(have):  # before a name is made for each of them
        raise CheckpointError(
            f"{files.folder / CONFIG}: {config.num_layers} layers cannot be in the file",
            got=f"{len(have)} tensors",
            remedy="Write the drafter again with save_drafter.",
        )
    want = dict(expected_shapes(fields, len(config.boundaries)))
    want["draft_to_target"] = (config.draft_vocab_size,)
    if have != want:
        odd = sorted(n for n in have.keys() | want.keys() if have.get(n) != want.get(n))
        raise CheckpointError(
            f"{files.folder / files.weights}: tensors do not fit the config",
            got="; ".join(f"{n} {have.get(n)}, expected {want.get(n)}" for n in odd[:6]),
            remedy="Write the drafter again with save_drafter.",
        )
    ids = files.tensors["draft_to_target"]
    if ids.dtype not in IDS:
        raise CheckpointError(
            f"{files.folder / files.weights}: draft_to_target holds no token ids",
            got=ids.dtype,
            remedy="Write the drafter again with save_drafter.",
        )
    _check_contract(files.folder / CONFIG, files.config)
    return ids
