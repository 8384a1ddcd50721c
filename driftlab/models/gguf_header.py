"""The head of a GGUF file: read in a moment, where the full reader takes seconds."""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from driftlab.errors import CheckpointError
from driftlab.files import refuse_irregular


@dataclass(frozen=True)
class GgufHeader:
    """What the head says.

    sizes: elements of each tensor by its name. types: counts, e.g. ``Q4_1 x 210, F32 x 61``.
    scaling: how rotations are scaled (``yarn``, ``longrope``, ``factors`` for a tensor of them).
    """

    sizes: dict[str, int]
    types: str
    scaling: str | None

    @property
    def elements(self) -> int:
        return sum(self.sizes.values())


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's tensor list and prove that its data are all there (format version 2, 3).

    Raises
    ------
    CheckpointError: the file is missing, is no GGUF file, or is shorter than its tensors.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    refuse_irregular(path, CheckpointError)
    if not path.is_file():
        raise CheckpointError("the GGUF file does not exist", got=path, remedy="Check the path.")
    counts: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    needed, alignment = 0, 32
    scaling: str | None = None
    try:
        with path.open("rb") as file:
            magic, version, n_tensors, n_fields = struct.unpack("<4sIQQ", _take(file, 24))
            if magic != b"GGUF":
                raise ValueError(f"it begins with {magic!r}")
            if version not in (2, 3):
                raise CheckpointError(
                    f"{path} is no little-endian GGUF file of version 2 or 3",
                    got=f"version {version}",
                    remedy="Convert the model again with a current llama.cpp.",
                )
            for _ in range(n_fields):
                key, (kind,) = _string(file), struct.unpack("<I", _take(file, 4))
                value = _value(file, kind)
                if key == b"general.alignment" and isinstance(value, int):
                    alignment = value
                if key.endswith(b".rope.scaling.type") and value != "none":
                    scaling = str(value)
            for _ in range(n_tensors):
                name = _string(file).decode("utf-8", "replace")
                (n_dims,) = struct.unpack("<I", _take(file, 4))
                *shape, kind, offset = struct.unpack(f"<{n_dims}QIQ", _take(file, 8 * n_dims + 12))
                size = 1
                for dim in shape:
                    size *= dim
                quant = GGMLQuantizationType(kind)
                block, block_bytes = GGML_QUANT_SIZES[quant]
                counts[quant.name] += 1
                sizes[name] = size
                if name.startswith("rope_f"):  # rope_freqs, rope_factors_long and _short
                    scaling = scaling or "factors"
                needed = max(needed, offset + size // block * block_bytes)
            if alignment < 1:
                raise ValueError(f"general.alignment is {alignment}")
            start = -(-file.tell() // alignment) * alignment
        found = os.path.getsize(path)
        if found < start + needed:
            raise EOFError(f"{found} bytes where its tensors need {start + needed}")
    except (EOFError, ValueError, KeyError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{path} is no complete GGUF file", got=error, remedy="Fetch the file again."
        ) from None
    types = ", ".join(f"{k} x {n}" for k, n in counts.most_common())
    return GgufHeader(sizes, types, scaling)


def _take(file: BinaryIO, n: int) -> bytes:
    left = os.fstat(file.fileno()).st_size - file.tell()
    data = file.read(n) if n <= left else b""  # a length that lies asks for no memory
    if len(data) != n:
        raise EOFError("the file ends inside its header")
    return data


def _string(file: BinaryIO) -> bytes:
    return _take(file, struct.unpack("<Q", _take(file, 8))[0])


def _value(file: BinaryIO, kind: int) -> int | str | None:
    """Step over one metadata value; return it when it is text or a 32-bit unsigned integer."""
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    if kind == 8:
        return _string(file).decode("utf-8", "replace")
    if kind == 9:
        inner, n = struct.unpack("<IQ", _take(file, 12))
        if inner in widths:
            _take(file, widths[inner] * n)
        else:
            for _ in range(n):
                _value(file, inner)
    else:
        data = _take(file, widths[kind])
        if kind == 4:
            return int(struct.unpack("<I", data)[0])
    return None
