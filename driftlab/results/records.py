"""Run directories: typed tables, a manifest, shards that survive a kill, one owner at a time.

Layout
------
    manifest.json                    what was asked for, made and assumed
    shards/CELL/PROMPT.shard         finished (cell, prompt) pairs; see results/shards.py
    rows/prompts.shard, rows/cells/  rows of the small tables
    steps.parquet ...                the tables, written by finish(), sorted by their keys
    lock                             held by the one process that owns the run
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from driftlab.errors import DataError, RunError, first_line
from driftlab.files import file_hash, refuse_file_above
from driftlab.results.manifest import read_manifest
from driftlab.results.schema import MEASURED, OPTIONAL, SCHEMA_VERSION, SCHEMAS, TABLES
from driftlab.results.shards import (
    SUFFIX,
    Shard,
    atomic_file,
    make_table,
    read_shard,
    reduce_steps,
    remove_dead,
    safe_name,
    write_shard,
)

if TYPE_CHECKING:
    import pandas as pd

    from driftlab.results.figures import Plots

SMALL = ("depths", "heads", "fused", "prompts", "cells")
"""Tables that figures and reports are drawn from; small enough to be committed."""

_DRAFTER = b"driftlab.drafter"
_ROW_GROUP = 1 << 17
_OURS = {"manifest.json", "lock", "shards", "rows"}

Role = Literal["owner", "worker", "reader"]


@dataclass(frozen=True, eq=False)
class Tables:
    """The small tables of a run in memory; what statistics, figures and reports read."""

    depths: pd.DataFrame
    heads: pd.DataFrame
    fused: pd.DataFrame
    prompts: pd.DataFrame
    cells: pd.DataFrame
    manifest: Mapping[str, Any]
    extra: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """The optional tables that the run has, by name."""
    cache: dict[object, Any] = field(default_factory=dict, repr=False)
    """What readers derive from the tables and want to keep as long as they live."""


def config_hash(config: object, inputs: object = None) -> str:
    """SHA-256 of a resolved config and of the hashes of its inputs, in canonical JSON."""
    text = json.dumps([config, inputs], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class RunDirectory:
    """One run on disk.

    Made by :meth:`create` (owner: may write, holds the lock), :meth:`worker` (writes shards
    for an owner elsewhere) or :meth:`open` (reads). Pickling an owner gives a worker, so an
    owner can be passed to a process pool.

    Finished (cell, prompt) pairs are files; tables come from :meth:`finish`. Killing the run
    anywhere and running it again gives equal tables, byte for byte.
    """

    def __init__(self, path: Path, role: Role, lock: _Lock | None = None) -> None:
        self.path = path
        self._role = role
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, manifest: Mapping[str, Any], **made_by: Any) -> Self:
        """Start a run in ``path``, or resume the same run.

        ``manifest`` must be JSON-able and hold ``config``; ``inputs`` (hashes of target,
        prompts) is optional. The two, or ``config_hash`` when it is given, say whether a
        folder already holds this run. On resume the stored manifest is kept, other keys are
        updated from ``manifest``. ``made_by`` (versions, hardware) are keys of whoever begins the
        run: they stay, and what is other where the run is resumed stands in ``resumed``.

        Raises
        ------
        RunError: the folder holds another run or foreign files, its manifest is damaged, or
            another process owns it.
        """
        path = Path(path)
        wanted = manifest.get("config_hash") or config_hash(
            manifest.get("config"), manifest.get("inputs")
        )
        refuse_foreign(path)
        if (path / "manifest.json").exists():
            _refuse_other(path, wanted)  # before the lock: the clearer message of the two
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path, "owner", _Lock(path / "lock"))
        try:
            stored: dict[str, Any] = {"created": _now(), **made_by}
            if (path / "manifest.json").exists():
                _refuse_other(path, wanted)
                stored = dict(run.manifest)
                other = {n: v for n, v in made_by.items() if v != stored.get(n)}
                stored["resumed"] = [*stored.get("resumed", []), {"time": _now(), **other}]
            remove_dead(path)
            run._write_manifest(
                {**stored, **manifest, "config_hash": wanted, "schema_version": SCHEMA_VERSION}
            )
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read an existing run. Raises RunError when there is none, or it is damaged."""
        path = Path(path)
        if not (path / "manifest.json").exists():
            raise RunError(
                f"{path} holds no run",
                remedy="Give a folder that `driftlab ablate` or `driftlab probe` made.",
            )
        run = cls(path, "reader")
        version = run.manifest.get("schema_version")
        if version != SCHEMA_VERSION:
            raise RunError(
                f"{path} has tables of schema version {version!r}, this driftlab reads "
                f"{SCHEMA_VERSION}",
                remedy="Run the experiment again, or use the version of driftlab that made it.",
            )
        return run

    @classmethod
    def worker(cls, path: str | Path) -> Self:
        """Write shards into a run whose owner is another process."""
        run = cls.open(path)
        run._role = "worker"
        return run

    def __reduce__(self) -> tuple[Callable[..., RunDirectory], tuple[Path, Role]]:
        return _reopen, (self.path, "reader" if self._role == "reader" else "worker")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r}, {self._role})"

    def close(self) -> None:
        """Give the lock back; the object then only reads."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._role = "reader"

    # --- writing ------------------------------------------------------------------------------

    def _may_write(self, *roles: Role) -> None:
        if self._role not in roles:
            raise RunError(
                f"{self.path} is open as {self._role}",
                remedy=f"Only the {' or '.join(roles)} of a run may do this; see RunDirectory.",
            )
        if not (self.path / "manifest.json").exists():
            # Else what is written next would stand in a folder that is no run.
            raise RunError(
                f"{self.path} was moved or deleted while it was made",
                remedy="Where it is now, the same command goes on; leave it in place meanwhile.",
            )

    def _shard_path(self, cell: str, prompt: str) -> Path:
        return self.path / "shards" / safe_name(cell) / f"{safe_name(prompt)}{SUFFIX}"

    def has(self, cell: str, prompt: str) -> bool:
        """Whether (cell, prompt) is finished: its shard is there and its checksum agrees."""
        shard = read_shard(self._shard_path(cell, prompt), owners=self._owners)
        return shard is not None and shard.key == (cell, prompt)

    def write(self, cell: str, prompt: str, tables: Mapping[str, Mapping[str, Any]]) -> None:
        """Store all rows of one (cell, prompt) at once: ``{table: {column: array or scalar}}``.

        Takes ``steps``, ``heads``, ``fused``. Columns ``cell`` and ``prompt`` may be left out.
        ``prompt`` is any text that names the piece of work; texts of several kinds go into one
        call, or into calls with different ``prompt`` and a ``prompt`` column of their own.
        Missing values are masked (``numpy.ma``) or None, never NaN. Written again, the shard
        is replaced.

        Raises
        ------
        NumericsError: NaN, infinity, or regions that are negative or do not sum to 1; nothing
            is written.
        DataError: wrong columns, types or rows; nothing is written.
        ResourceError: the disk is full; finished shards stay.
        """
        self._may_write("owner", "worker")
        where = f"cell {cell}, prompt {prompt}"
        made: dict[str, pa.Table] = {}
        for name, columns in tables.items():
            if name not in MEASURED:
                raise DataError(
                    f"table {name!r} is not written by (cell, prompt)",
                    remedy=f"Such tables are {', '.join(MEASURED)}.",
                )
            table = make_table(name, {"cell": cell, "prompt": prompt, **columns}, where)
            if others := sorted(set(table["cell"].unique().to_pylist()) - {cell}):
                raise DataError(f"rows of {name} ({where}) belong to other cells", got=others[:3])
            made[name] = table
        if "steps" in made:
            made["depths"] = reduce_steps(made["steps"], where)
        self._write(self._shard_path(cell, prompt), (cell, prompt), made)

    def write_cell(self, row: Mapping[str, Any], drafter: str | None = None) -> None:
        """Store one row of ``cells``; the row of the same cell is replaced.

        ``drafter``: hash of the drafter that the cell is measured with. What another one was
        measured to do is removed.
        """
        self._may_write("owner", "worker")
        cell = str(row.get("cell", ""))
        table = make_table("cells", row, f"cell {cell}")
        if drafter is not None:
            if self.drafter_of(cell) not in (None, drafter):
                shutil.rmtree(self.path / "shards" / safe_name(cell), ignore_errors=True)
            # Beside the columns, which stay those of older runs; under the shard's checksum.
            table = table.replace_schema_metadata(
                {**(table.schema.metadata or {}), _DRAFTER: drafter.encode()}
            )
        self._write(self._row_path(cell), (cell,), {"cells": table})

    def _write(self, path: Path, key: tuple[str, ...], tables: Mapping[str, pa.Table]) -> None:
        write_shard(path, key, tables, owner=self._owners[0])

    @cached_property
    def _owners(self) -> tuple[str, ...]:
        """What pieces of this run say that they belong to: it, and runs that were merged in it."""
        manifest = self.manifest
        return str(manifest.get("config_hash")), *manifest.get("owners", ())

    def row_of(self, cell: str) -> dict[str, Any] | None:
        """The stored row of ``cells``; None when there is none."""
        shard = read_shard(self._row_path(cell), owners=self._owners)
        return None if shard is None else dict(shard.table("cells").to_pylist()[0])

    def rows_of_cells(self) -> list[dict[str, Any]]:
        """The stored rows of ``cells``; of a run that is not finished, too."""
        paths = (self.path / "rows" / "cells").glob(f"*{SUFFIX}")
        shards = (read_shard(path, owners=self._owners) for path in paths)
        return [dict(s.table("cells").to_pylist()[0]) for s in shards if s is not None]

    def drafter_of(self, cell: str) -> str | None:
        """The hash that :meth:`write_cell` was given; None in runs that were made without."""
        shard = read_shard(self._row_path(cell), owners=self._owners)
        metadata = None if shard is None else shard.table("cells").schema.metadata
        found = (metadata or {}).get(_DRAFTER)
        return None if found is None else found.decode()

    def _row_path(self, cell: str) -> Path:
        return self.path / "rows" / "cells" / f"{safe_name(cell)}{SUFFIX}"

    def write_prompts(self, columns: Mapping[str, Any]) -> None:
        """Store the whole table ``prompts``, one row per (prompt, text)."""
        self._may_write("owner")
        table = make_table("prompts", columns, "all prompts")
        self._write(self.path / "rows" / f"prompts{SUFFIX}", ("prompts",), {"prompts": table})

    def write_texts(self, columns: Mapping[str, Any]) -> None:
        """Store the whole table ``texts``, one row per (condition, prompt, text)."""
        self._may_write("owner")
        table = make_table("texts", columns, "texts of conditions")
        self._write(self.path / "rows" / f"texts{SUFFIX}", ("texts",), {"texts": table})

    def finish(self, cells_of_run: Iterable[str] | None = None) -> dict[str, Path]:
        """Write every table as Parquet, sorted by its key, and note it in the manifest.

        Memory does not grow with the run. Returns the files by table name. Raises RunError
        when a shard is damaged (running the same command again redoes it), or belongs to none of
        ``cells_of_run`` (None: any cell may).
        """
        self._may_write("owner")
        if cells_of_run is not None:
            self._refuse_strays({safe_name(cell) for cell in cells_of_run})
        cells = self._shards(self.path / "rows" / "cells")
        shards = self._shards(self.path / "shards")
        prompts = self._shards(self.path / "rows", f"prompts{SUFFIX}")
        texts = self._shards(self.path / "rows", f"texts{SUFFIX}")
        files, noted = {}, {}
        rows_of = {"cells": cells, "prompts": prompts, "texts": texts}
        for name in (*TABLES, *OPTIONAL):
            source = rows_of.get(name, shards)
            files[name] = self.path / f"{name}.parquet"
            rows = _write_parquet(files[name], name, (shard.table(name) for shard in source))
            if not rows and name in OPTIONAL:
                files.pop(name).unlink()
                continue
            noted[name] = {"rows": rows, "sha256": file_hash(files[name])}
        self.update_manifest(tables=noted, finished=_now())
        return files

    def _refuse_strays(self, cells: set[str]) -> None:
        """Raise RunError for pieces that have no place in a run of ``cells`` (names of files)."""
        rows = {Path("rows", f"{name}{SUFFIX}") for name in ("prompts", "texts")}
        rows |= {Path("rows", "cells", f"{cell}{SUFFIX}") for cell in cells}
        strays = []
        for folder in ("rows", "shards"):
            for path in sorted((self.path / folder).rglob(f"*{SUFFIX}")):
                place = path.relative_to(self.path)
                measured = len(place.parts) == 3 and place.parts[1] in cells
                if not (measured if folder == "shards" else place in rows):
                    strays.append(str(place))
        if strays:
            raise RunError(
                f"{len(strays)} piece(s) in {self.path} belong to no cell of this run",
                got=", ".join(strays[:3]),
                remedy="Delete them, then run the same command again.",
            )

    def _shards(self, folder: Path, pattern: str = f"**/*{SUFFIX}") -> list[Shard]:
        found, damaged = [], []
        for path in sorted(folder.glob(pattern)):
            shard = read_shard(path, owners=self._owners)
            (damaged.append(path) if shard is None else found.append(shard))
        if damaged:
            names = ", ".join(str(p.relative_to(self.path)) for p in damaged[:3])
            raise RunError(
                f"{len(damaged)} piece(s) of {self.path} are damaged, or another run's",
                got=names,
                remedy="Run the command that made it again: they are made anew. Delete what stays.",
            )
        return sorted(found, key=lambda shard: shard.key)

    def refuse_incomplete(self) -> None:
        """Raise RunError when the pieces of this finished run are not all there and whole: another
        number of rows would come of them than its tables have."""
        found: Counter[str] = Counter()
        for folder in ("rows", "shards"):
            for shard in self._shards(self.path / folder):
                found.update({name: shard.table(name).num_rows for name in shard.blobs})
        noted = self.manifest.get("tables") or {}
        for name, table in noted.items():
            if found[name] != table["rows"]:
                raise RunError(
                    f"the pieces of {self.path} are not those of its tables",
                    got=f"{found[name]} rows of {name} in place of {table['rows']}",
                    remedy="Run the command that made it again: what lacks is made anew.",
                )

    # --- manifest -----------------------------------------------------------------------------

    @property
    def manifest(self) -> dict[str, Any]:
        """The stored manifest. Raises RunError when it is damaged."""
        return read_manifest(self.path / "manifest.json")

    def update_manifest(self, **changes: Any) -> None:
        """Replace top-level keys of the manifest, atomically."""
        self._may_write("owner")
        self._write_manifest({**self.manifest, **changes})

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False, default=str)
        with atomic_file(self.path / "manifest.json") as handle:
            handle.write(text.encode() + b"\n")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's wall time (s) and the peak memory so far (MiB) to ``manifest.stages``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            stages = dict(self.manifest.get("stages", {}))
            seconds = stages.get(name, {}).get("seconds", 0.0) + time.perf_counter() - start
            stages[name] = {"seconds": round(seconds, 2), "peak_mib": _peak_mib()}
            self.update_manifest(stages=stages)

    # --- reading ------------------------------------------------------------------------------

    def table(
        self, name: str, columns: Sequence[str] | None = None, filters: Any = None
    ) -> pd.DataFrame:
        """Table ``name`` as a DataFrame, with ``columns`` and row ``filters`` as in pyarrow.

        Nullable counts and flags have pandas' nullable types. Raises RunError when the run is
        not finished or the file is damaged.
        """
        return self._read(name, columns, filters)

    def _read(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        *,
        categories: bool = False,
    ) -> pd.DataFrame:
        if name not in (*TABLES, *OPTIONAL):
            raise RunError(f"there is no table {name!r}", remedy=f"Tables: {', '.join(TABLES)}.")
        path = self.path / f"{name}.parquet"
        if unknown := sorted(set(columns or ()) - set(SCHEMAS[name].names)):
            raise RunError(
                f"table {name} has no column {', '.join(unknown)}",
                remedy=f"Columns: {', '.join(SCHEMAS[name].names)}.",
            )
        manifest = self.manifest
        noted = (manifest.get("tables") or {}).get(name)
        try:
            if noted is not None and noted["sha256"] != file_hash(path):
                raise RunError(
                    f"{path} is damaged",
                    got="its checksum is not the one in manifest.json",
                    remedy="Run the same command again: the tables are rebuilt from finished "
                    "pieces.",
                )
            if "reduced" not in manifest:  # a published run holds less, in fewer bits
                _check_columns(path, name)
            table = pq.read_table(
                path, columns=list(columns) if columns is not None else None, filters=filters
            )
        except FileNotFoundError:
            raise RunError(
                f"{path} is not there",
                remedy="The run is not finished: run the same command again to complete it.",
            ) from None
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            if filters is not None and noted is not None:  # the file is whole
                raise RunError(
                    f"table {name} cannot be filtered so",
                    got=f"{filters}: {first_line(error)}",
                    remedy="Filters are those of pyarrow.parquet.read_table.",
                ) from None
            raise RunError(
                f"{path} is damaged",
                got=first_line(error),
                remedy="Run the same command again: the tables are rebuilt from finished pieces.",
            ) from None
        return to_pandas(table, categories)

    @property
    def steps(self) -> pd.DataFrame:
        return self.table("steps")

    @property
    def depths(self) -> pd.DataFrame:
        return self.table("depths")

    @property
    def heads(self) -> pd.DataFrame:
        return self.table("heads")

    @property
    def fused(self) -> pd.DataFrame:
        return self.table("fused")

    @property
    def prompts(self) -> pd.DataFrame:
        return self.table("prompts")

    @property
    def cells(self) -> pd.DataFrame:
        return self.table("cells")

    @property
    def plot(self) -> Plots:
        """Figures for a notebook, e.g. ``run.plot.sink_by_depth()``."""
        from driftlab.results.figures import Plots

        return Plots(self)

    def tables(self) -> Tables:
        """The small tables and the manifest, read once; text columns are categorical."""
        frames: dict[str, Any] = {name: self._read(name, categories=True) for name in SMALL}
        there = [name for name in OPTIONAL if (self.path / f"{name}.parquet").exists()]
        extra = {name: self._read(name, categories=True) for name in there}
        return Tables(**frames, manifest=self.manifest, extra=extra)


def _reopen(path: Path, role: Role) -> RunDirectory:
    return RunDirectory.worker(path) if role == "worker" else RunDirectory.open(path)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _peak_mib() -> float:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be made", got=error.strerror, remedy="Choose a folder you may write to."
        ) from None


def _check_columns(path: Path, name: str) -> None:
    """Raise RunError for other columns, or columns of another type, than the table has."""
    held, wanted = pq.read_schema(path), SCHEMAS[name]
    lacks = sorted(set(wanted.names) - set(held.names))
    odd = [
        c for c in held.names if c not in wanted.names or held.field(c).type != wanted.field(c).type
    ]
    if lacks or odd:
        found = {"lacking": lacks, "unknown or of another type": odd}
        raise RunError(
            f"{path} has not the columns of {name}",
            got="; ".join(f"{what}: {', '.join(found[what])}" for what in found if found[what]),
            remedy="Run the same command again: the tables are rebuilt from finished pieces.",
        )


def refuse_foreign(path: Path) -> None:
    """Raise RunError when ``path`` is or lies under a file, or holds other things than a run."""
    refuse_file_above(path, RunError)
    if not path.is_dir() or (path / "manifest.json").exists():
        return
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OURS and p.name[0] != ".")
    if foreign:
        raise RunError(
            f"{path} holds files that are no run",
            got=", ".join(foreign[:5]),
            remedy="Choose an empty or a new folder.",
        )


def refuse_inside_run(place: Path, *, but: Path | None = None) -> None:
    """Raise RunError when ``place`` is or lies in a run, other than ``but``: one run's figures or
    page would stand for another's."""
    place, own = place.resolve(), but and but.resolve()
    for folder in (place, *place.parents):
        is_run = (folder / "shards").is_dir() and (folder / "manifest.json").exists()
        if is_run and folder != own:
            raise RunError(f"{place} lies in the run {folder}", remedy="Name a place outside.")


def _refuse_other(path: Path, wanted: str) -> None:
    stored = read_manifest(path / "manifest.json")
    if stored.get("config_hash") != wanted:
        raise RunError(
            f"{path} already holds another run",
            got=f"config {str(stored.get('config_hash'))[:12]}, not {wanted[:12]}",
            remedy="Choose another folder with --out, or delete that run.",
        )
    if stored.get("schema_version") != SCHEMA_VERSION:
        raise RunError(
            f"{path} was begun with schema version {stored.get('schema_version')}, this driftlab "
            f"writes {SCHEMA_VERSION}",
            remedy="Choose another folder with --out.",
        )


def _write_parquet(path: Path, name: str, parts: Iterable[pa.Table]) -> int:
    """Stream ``parts`` into row groups of a size that depends on the rows alone."""
    schema, rows, held = SCHEMAS[name], 0, 0
    waiting: list[pa.Table] = []
    with atomic_file(path) as handle:
        # Measurements repeat too seldom for a dictionary to pay.
        words = [f.name for f in schema if not pa.types.is_floating(f.type)]
        writer = pq.ParquetWriter(
            handle, schema, compression="zstd", version="2.6", use_dictionary=words
        )

        def flush() -> None:
            writer.write_table(pa.concat_tables(waiting).combine_chunks(), row_group_size=1 << 26)
            waiting.clear()

        with writer:
            for part in parts:
                waiting.append(part)
                rows += part.num_rows
                held += part.num_rows
                if held >= _ROW_GROUP:
                    flush()
                    held = 0
            if waiting:
                flush()
    return rows


def to_pandas(table: pa.Table, categories: bool) -> pd.DataFrame:
    import pandas as pd

    kinds = {pa.bool_(): pd.BooleanDtype(), pa.int16(): pd.Int16Dtype()}
    kinds |= {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()}
    nullable = [
        f.name
        for f in table.schema
        if f.nullable and (pa.types.is_integer(f.type) or pa.types.is_boolean(f.type))
    ]
    frame = table.to_pandas(strings_to_categorical=categories)
    if nullable:
        typed = table.select(nullable).to_pandas(types_mapper=kinds.get)
        for column in nullable:
            frame[column] = typed[column]
    return frame


class _Lock:
    """An advisory lock on a file. The system drops it when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._handle = path.open("a+b")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._handle.seek(0)
            holder = self._handle.read(200).decode(errors="replace").strip()
            self._handle.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunError(
                    f"{path.parent} is in use by another process",
                    got=holder,
                    remedy="Wait until it ends, or work in another folder.",
                ) from None
            raise RunError(
                f"{path.parent} is on a file system that cannot lock files",
                got=error.strerror,
                remedy="Put the run on a local disk with --out.",
            ) from None
        self._handle.seek(0)
        self._handle.truncate()
        self._handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        self._handle.flush()
        # A forked worker shares the open file: were it to outlive the owner, so would the lock.
        handle = weakref.ref(self._handle)
        os.register_at_fork(after_in_child=lambda: _close(handle()))

    def release(self) -> None:
        self._handle.close()


def _close(handle: Any) -> None:
    if handle is not None:
        handle.close()
