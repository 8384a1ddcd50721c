"""One file per finished piece of work: a JSON header line, then Arrow blobs, checked by SHA-256.

A shard is written to a temporary name, synced, and renamed, so that it is there whole or not
at all. A shard whose checksum or schema version disagrees counts as not written.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from driftlab.errors import DataError, NumericsError, ResourceError, RunError
from driftlab.results.schema import (
    ATTENTION,
    KEYS,
    LOGGED,
    NORMS,
    REGIONS,
    SCHEMA_VERSION,
    SCHEMAS,
)

MASS_TOLERANCE = 1e-4
SUFFIX = ".shard"
_TEMPORARY = ".tmp"
_LEFT = re.compile(r"\..+\.(\d+)\.(\d+)\.tmp")  # names of `atomic_file`
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHOICES = {"text": ("greedy", "sampled", "given"), "mode": ("free", "forced")}


def safe_name(identifier: str) -> str:
    """File name for any id: readable, free of separators, distinct by a hash of the id."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", identifier)[:40]
    return f"{readable}-{hashlib.sha256(identifier.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary neighbour of ``path`` that takes its name when the block succeeds.

    Raises
    ------
    ResourceError: the disk or the quota is full. What was there before is untouched.
    RunError: the folder cannot be written.
    """
    if path.is_dir():
        raise RunError(f"{path} is a folder", remedy="Remove it: a file belongs there.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}{_TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _discard(temporary)
        if error.errno in _FULL:
            raise ResourceError(
                f"no space left to write {path}",
                got=error.strerror,
                remedy="Free some space and run the same command again: finished work is kept.",
            ) from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise RunError(
                f"{path.parent} cannot be a folder",
                got=f"{next((p for p in path.parents if p.exists()), path.parent)} is a file",
                remedy="Remove that file, or give another folder.",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RunError(
                f"{path} cannot be written",
                got=error.strerror,
                remedy="Choose a folder that you may write to.",
            ) from error
        raise
    except BaseException:
        _discard(temporary)
        raise


def write_sealed(path: Path, data: bytes) -> None:
    """``data`` behind a checksum of itself and of its place, so that it is read nowhere else.

    Raises as :func:`atomic_file`. What a killed process left of the file goes away.
    """
    remove_dead(path.parent, path.name)
    with atomic_file(path) as file:
        file.write(_seal(path, data) + b"\n" + data)


def read_sealed(path: Path) -> bytes | None:
    """What :func:`write_sealed` wrote; None when it is absent, damaged or another file's."""
    if not path.is_file():  # a pipe would be waited for
        return None
    seal, _, data = path.read_bytes().partition(b"\n")
    return data if seal == _seal(path, data) else None


def _seal(path: Path, data: bytes) -> bytes:
    place = f"{path.parent.name}/{path.name}\n".encode()
    return hashlib.sha256(place + data).hexdigest().encode()


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for it. The system frees it when a process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which holds {path}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def remove_dead(folder: Path, name: str | None = None) -> None:
    """Delete what killed processes left of the file ``name`` in ``folder``; None: of all below.

    Other processes and threads may be writing there: what is theirs stays.
    """
    pattern = f"**/.*{_TEMPORARY}" if name is None else f".{glob.escape(name)}.*{_TEMPORARY}"
    for path in folder.glob(pattern):
        if (found := _LEFT.fullmatch(path.name)) and not _lives(int(found[1]), int(found[2])):
            _discard(path)


def _lives(process: int, thread: int) -> bool:
    if process == os.getpid():  # or of one that had this number before, as in a container
        return thread in {alive.ident for alive in threading.enumerate()}
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# --- values to checked tables -----------------------------------------------------------------


def make_table(name: str, columns: Mapping[str, Any], where: str) -> pa.Table:
    """Typed, checked and sorted table ``name``.

    ``columns`` maps names to arrays of one length; scalars are repeated. Missing values are
    given by a masked array or by ``None``, never by NaN, and only where the schema allows them;
    a column that may be null can be left out. ``where`` (cell and prompt) goes into messages.

    Raises
    ------
    NumericsError: NaN, infinity, or attention regions that are negative or do not sum to 1
        (tolerance 1e-4).
    DataError: a column is unknown, missing, of the wrong type or length, or a row is there twice.
    """
    schema = SCHEMAS[name]
    for column in columns:
        if column not in schema.names:
            near = difflib.get_close_matches(column, schema.names) or schema.names
            raise DataError(
                f"table {name} ({where}) has no column {column!r}",
                remedy=f"Columns like it: {', '.join(near)}.",
            )
    lengths = {c: len(v) for c, v in columns.items() if not _is_scalar(v)}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"columns of table {name} ({where}) differ in length",
            got=lengths,
            remedy="Give one value a row in every column.",
        )
    n = next(iter(lengths.values()), 1)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is found as infinity
        arrays = [_column(field, columns, n, f"{name}.{field.name} ({where})") for field in schema]
    table = pa.Table.from_arrays(arrays, schema=schema)
    for column, allowed in _CHOICES.items():
        if column in schema.names:
            found = set(pc.unique(table[column]).to_pylist())
            if wrong := sorted(found - set(allowed)):
                raise DataError(
                    f"{name}.{column} ({where}) must be one of {', '.join(allowed)}",
                    got=", ".join(wrong),
                    remedy="Use the words of the schema.",
                )
    if REGIONS[0] in schema.names:
        _check_masses(table, name, where)
    return _sorted(table, name, where)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 0
    return value is None or isinstance(value, str) or np.ndim(value) == 0


def _column(field: pa.Field, columns: Mapping[str, Any], n: int, where: str) -> pa.Array:
    if field.name not in columns and not field.nullable:
        raise DataError(f"{where} is missing", remedy="The schema does not allow it to be null.")
    value = columns.get(field.name)
    try:
        array = _to_arrow(value, field.type, n)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where} cannot be stored as {field.type}",
            got=str(error).splitlines()[0],
            remedy="Give values of that type and range.",
        ) from None
    if pa.types.is_floating(field.type) and array.null_count < n:
        given = isinstance(value, list | tuple | pa.Array | pa.ChunkedArray)
        finite = np.isfinite(_values(array.fill_null(0) if given else array))
        if not finite.all():
            bad = n - int(finite.sum())
            raise NumericsError(
                f"{where} holds NaN or infinity",
                got=f"{bad} of {n} values",
                remedy="Missing values are masked, not NaN; anything else is a fault upstream, "
                "such as an overflow in half precision.",
            )
    if not field.nullable and array.null_count:
        raise DataError(f"{where} holds nulls", got=array.null_count, remedy="Fill every row.")
    return array


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _values(array: pa.Array) -> np.ndarray:
    """Numbers or flags of ``array``, anything where it is null. Unlike to_numpy: no pandas."""
    stop, data = array.offset + len(array), array.buffers()[1]
    if pa.types.is_boolean(array.type):
        return _bits(data, stop)[array.offset :]
    return np.frombuffer(data, array.type.to_pandas_dtype())[array.offset : stop]


def _there(array: pa.Array) -> np.ndarray:
    """Whether each value is not null."""
    data = array.buffers()[0]
    if data is None:
        return np.ones(len(array), dtype=bool)
    return _bits(data, array.offset + len(array))[array.offset :]


def _bits(data: pa.Buffer, n: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=n, bitorder="little").astype(bool)


# Kinds of numpy that become a column of that type as they are.
_ALIKE = {
    **dict.fromkeys((pa.float32(), pa.float64()), "fiu"),
    **dict.fromkeys((pa.int16(), pa.int32(), pa.int64()), "iu"),
    pa.bool_(): "b",
}


def _to_arrow(value: Any, kind: pa.DataType, n: int) -> pa.Array:
    if _is_scalar(value):
        scalar = value.item() if isinstance(value, np.ndarray | np.generic) else value
        if pa.types.is_boolean(kind) and not isinstance(scalar, bool | None):
            raise TypeError(f"{scalar!r} is no bool")
        if scalar is None:
            return pa.nulls(n, kind)
        if isinstance(scalar, str) and pa.types.is_string(kind):
            return _words([scalar], [n])
        value = np.full(n, scalar)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        return value.cast(kind)
    if isinstance(value, list | tuple):
        return pa.array(value, type=kind)
    mask = None
    if isinstance(value, np.ma.MaskedArray):
        found, value = np.ma.getmask(value), value.data
        mask = found if isinstance(found, np.ndarray) else None
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"shape {array.shape} is not one value a row")
    if array.dtype.kind == "U" and mask is None and array.size and pa.types.is_string(kind):
        # Words come in long runs, and a conversion of each from UCS-4 is slow.
        starts = np.flatnonzero(np.append(True, array[1:] != array[:-1]))
        return _words(array[starts].tolist(), np.diff(np.append(starts, n)).tolist())
    if array.dtype.kind in _ALIKE.get(kind, ""):
        return _over_memory(array, mask, kind)
    return pa.array(array, type=kind, mask=mask, from_pandas=False)


def _over_memory(array: np.ndarray, mask: np.ndarray | None, kind: pa.DataType) -> pa.Array:
    """Numbers as Arrow, 0 where masked.

    `pa.array` takes longer, most of all its first call: it loads pandas.
    """
    if mask is not None:
        array = np.where(mask, array.dtype.type(0), array)
    if array.dtype.kind == "b":
        data = np.packbits(array, bitorder="little")
    else:
        data = np.ascontiguousarray(array, dtype=kind.to_pandas_dtype())
        if data.dtype.kind == "i" and not np.array_equal(data, array):
            raise OverflowError(f"a value is out of the range of {kind}")
    there = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    return pa.Array.from_buffers(kind, len(array), [there, pa.py_buffer(data)])


def _words(words: Sequence[str], runs: Sequence[int]) -> pa.Array:
    """Each of ``words`` as often as ``runs`` says."""
    coded = [word.encode() for word in words]
    ends = np.cumsum(np.repeat([len(word) for word in coded], runs))
    offsets = pa.py_buffer(np.append(0, ends).astype(np.int32))
    data = pa.py_buffer(b"".join(word * run for word, run in zip(coded, runs, strict=True)))
    return pa.Array.from_buffers(pa.string(), len(ends), [None, offsets, data])


def _check_masses(table: pa.Table, name: str, where: str) -> None:
    total, least = np.zeros(table.num_rows), np.zeros(table.num_rows)
    for region in REGIONS:
        values = _values(_whole(table, region))
        total += values
        np.minimum(least, values, out=least)
    off = np.maximum(np.abs(total - 1), -least)
    if off.size and off.max() > MASS_TOLERANCE:
        worst = int(off.argmax())
        row = {key: table[key][worst].as_py() for key in KEYS[name][2:]}
        raise NumericsError(
            f"attention regions of {name} ({where}) are negative or do not sum to 1 at {row}",
            got=f"a sum of {total[worst]:.6f}, the least {least[worst]:.6f}",
            remedy="Every key belongs to exactly one region; check the region map.",
        )


def _sorted(table: pa.Table, name: str, where: str) -> pa.Table:
    """``table`` by its key columns, refusing rows with the same key."""
    codes = []
    for key in KEYS[name]:
        column = _whole(table, key)
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
            if len(column.dictionary) > 1:  # a word that all rows share orders nothing
                order = np.argsort(np.argsort(column.dictionary.to_numpy(zero_copy_only=False)))
                codes.append(order[_values(column.indices)])
        else:
            codes.append(_values(column).astype(np.int64))
    if table.num_rows < 2:
        return table
    # One integer a row, in lexicographic order: sorting it is much faster than sorting columns.
    rank = np.zeros(table.num_rows, dtype=np.int64)
    for code in codes:
        code = code - code.min()
        rank = rank * (int(code.max()) + 1) + code
    step = np.diff(rank)
    if not (step > 0).all():
        order = np.argsort(rank, kind="stable")
        if not np.diff(rank[order]).all():
            raise DataError(
                f"table {name} ({where}) holds a row twice",
                got=f"{table.num_rows - len(np.unique(rank))} repeated",
                remedy=f"Rows are told apart by {', '.join(KEYS[name])}.",
            )
        table = table.take(_over_memory(order, None, pa.int64()))
    return table


def reduce_steps(steps: pa.Table, where: str) -> pa.Table:
    """Table ``depths`` of one shard: means of ``steps`` over fixed anchors.

    An anchor near the end of a text has no truth at the deepest depths. Keeping only anchors
    whose chain reaches the deepest depth of its (cell, prompt, text, mode) makes every depth
    speak of the same anchors.
    """
    if not steps.num_rows:
        return SCHEMAS["depths"].empty_table()
    columns = {name: _whole(steps, name) for name in steps.column_names}
    depth, anchor = _values(columns["depth"]), _values(columns["anchor"])
    same = ["prompt", "text", "mode"]  # a shard holds one cell
    change = np.zeros(steps.num_rows, dtype=bool)
    change[0] = True
    for name in same:
        codes = _values(columns[name].dictionary_encode().indices)
        change[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(change)  # rows are sorted, so that every group is one run
    parts: list[dict[str, Any]] = []
    for rows in np.split(np.arange(steps.num_rows), starts[1:]):
        key = {name: columns[name][rows[0]].as_py() for name in ("cell", *same)}
        deepest = np.zeros(anchor[rows].max() + 1, dtype=bool)
        deepest[anchor[rows][depth[rows] == depth[rows].max()]] = True
        rows = rows[deepest[anchor[rows]]]
        rows = rows[np.argsort(depth[rows], kind="stable")]
        part = _means(columns, rows, where)
        parts.append({k: np.repeat(v, len(part["depth"])) for k, v in key.items()} | part)
    # Masked arrays are slow, and most columns have no mask.
    joined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        masked = any(isinstance(v, np.ma.MaskedArray) for v in values)
        joined[name] = (np.ma if masked else np).concatenate(values)
    return make_table("depths", joined, where)


def _means(columns: Mapping[str, pa.Array], rows: np.ndarray, where: str) -> dict[str, Any]:
    """Columns of ``depths`` from ``rows`` of the table ``steps``, which are in order of depth."""
    depth = _values(columns["depth"])[rows]
    starts = np.flatnonzero(np.append(True, depth[1:] != depth[:-1]))
    depths = depth[starts]

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, starts, axis=-1)

    def values(name: str) -> tuple[np.ndarray, np.ndarray]:
        there = _there(columns[name])[rows]
        return np.where(there, _values(columns[name])[rows], 0).astype(np.float64), there

    n = np.diff(np.append(starts, len(rows)))
    out: dict[str, Any] = {"depth": depths, "n": n}
    keys = (_values(columns["anchor"])[rows] + depth).astype(np.float64)
    out["uniform"] = total(1 / np.maximum(keys, 1)) / n
    plain = (*ATTENTION, *NORMS)
    block = np.empty((len(plain), len(rows)))  # all at once: calls would cost more than sums
    for i, name in enumerate(plain):
        block[i] = _values(columns[name])[rows]
    out |= dict(zip(plain, total(block) / n, strict=True))
    rms = block[[plain.index(name) for name in LOGGED]]
    # A state that an intervention has set to zero has no logarithm.
    zeros = total((rms <= 0).astype(int)) > 0
    logs = total(np.log(np.where(rms > 0, rms, 1))) / n
    for name, mean, zero in zip(LOGGED, logs, zeros, strict=True):
        out[f"log_{name}"] = np.ma.array(mean, mask=zero)
    for name in ("logprob", "tv"):
        column, there = values(name)
        count = total(there.astype(int))
        out[name] = np.ma.array(total(column) / np.maximum(count, 1), mask=count == 0)
    for name in ("correct", "in_vocab"):
        out[f"n_{name}"] = total(_values(columns[name])[rows].astype(int))
    temperature, there = values("temperature")
    out["temperature"] = np.ma.array(temperature[starts], mask=~there[starts])
    out["n_accepted"] = out["n_opportunities"] = np.ma.masked_all(len(n), dtype=np.int64)
    accepted, there = values("accepted")
    if there.all():
        if not np.array_equal(depths, np.arange(1, len(depths) + 1)):
            raise DataError(
                f"free chains of steps ({where}) skip a depth",
                got=depths.tolist(),
                remedy="Acceptance at depth d needs depths 1..d.",
            )
        out["n_accepted"] = total(accepted).astype(int)
        out["n_opportunities"] = np.append(n[0], out["n_accepted"][:-1])
    return out


_READ = pa.ipc.IpcReadOptions(use_threads=False)  # columns of a shard are small


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A file on disk: its key, and where each table's bytes lie."""

    path: Path
    key: tuple[str, ...]
    blobs: Mapping[str, tuple[int, int]]  # table -> (offset, length)

    def table(self, name: str) -> pa.Table:
        if name not in self.blobs:
            return pa.Table.from_batches([], SCHEMAS[name])
        offset, length = self.blobs[name]
        with self.path.open("rb") as handle:
            handle.seek(offset)
            data = handle.read(length)
        return pa.ipc.open_stream(data, options=_READ).read_all()


def write_shard(
    path: Path, key: tuple[str, ...], tables: Mapping[str, pa.Table], *, owner: str
) -> None:
    """Store ``tables`` of the piece ``key`` in one file. ``owner``: hash of what they depend on."""
    # Measurements hardly shrink, so the quick codec; the tables at the end are packed better.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    payload, blobs, offset = [], {}, 0
    for name, table in tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        payload.append(data)
        blobs[name] = (offset, data.size)
        offset += data.size
    digest = hashlib.sha256()
    for data in payload:
        digest.update(data)
    header = {
        "driftlab_shard": SCHEMA_VERSION,
        "owner": owner,
        "key": key,
        "blobs": blobs,
        "sha256": digest.hexdigest(),
    }
    with atomic_file(path) as handle:
        handle.write(json.dumps(header).encode() + b"\n")
        for data in payload:
            handle.write(data)


def read_shard(path: Path, *, owners: Collection[str]) -> Shard | None:
    """The shard at ``path``, or None when it is absent, damaged, of another schema version, or
    depends on something else than ``owners`` name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            return None
        with path.open("rb") as handle:
            header = json.loads(handle.readline(1 << 20))
            start = handle.tell()
            if header["driftlab_shard"] != SCHEMA_VERSION or header["owner"] not in owners:
                return None
            if hashlib.file_digest(handle, "sha256").hexdigest() != header["sha256"]:
                return None
            blobs, end = {}, start
            for name, (at, size) in header["blobs"].items():
                if name not in SCHEMAS or start + at != end or size < 0:
                    return None  # the checksum does not cover the header
                blobs[name] = (end, size)
                end += size
            if end != path.stat().st_size:
                return None
            return Shard(path, tuple(header["key"]), blobs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
