"""Target states on disk: computed once, found again by what they are made of, read as mapped files.

A drafter learns from ``aux`` (the captured boundaries side by side) and ``last`` (the state after
the final norm, from which the target's logits are one matrix product away). Both are the same
for every drafter of one target, so they are stored once, under a key that hashes the target,
the boundaries, the dtype and the texts.

On disk::

    root/<key>/manifest.json    written last: a folder without it is unfinished
    root/<key>/texts.parquet    the texts
    root/<key>/shard-00000      rows [aux | last] of whole texts, position by position, then
                                the SHA-256 of these rows

Every file is written under another name and then renamed, and a shard carries its own checksum:
a build that was killed anywhere goes on after the last whole shard. Processes that build the
same key wait for one another.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from driftlab.data.text import Text
from driftlab.errors import DataError, NumericsError, ResourceError
from driftlab.files import file_hash
from driftlab.models import memory
from driftlab.models.anatomy import Shape
from driftlab.progress import progress_bar
from driftlab.results.shards import atomic_file, remove_dead, waiting_lock

Dtype = Literal["float32", "bfloat16", "float16"]

FORMAT = 1
LAST_STATE = "post_final_norm"
SHARD_BYTES = 8 << 20
CAPTURED = 16  # texts in one forward pass, unless told
_DTYPES = {name: getattr(torch, name) for name in get_args(Dtype)}
_DIGEST = 32  # bytes of a SHA-256
_OPEN_SHARDS = 64
_TEXTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("prompt_len", pa.int32()),
        ("kind", pa.string()),
        ("temperature", pa.float64()),
        ("loops", pa.bool_()),
        ("origin", pa.string()),
    ]
)
# (path, size, time of change) of files whose checksum this process has seen to be right.
_verified: set[tuple[str, int, int]] = set()


class StateSource(Protocol):
    """What a store needs of :class:`driftlab.models.target.Target`."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def shape(self) -> Shape: ...
    def check_boundaries(self, boundaries: Sequence[int]) -> None: ...
    def self_check(self, tokens: Sequence[int]) -> None: ...
    def forward(
        self, tokens: Tensor, lengths: Tensor, boundaries: Sequence[int], *, logits: bool
    ) -> Any: ...


class Item(TypedDict):
    """States of one text: tokens [S] int64, aux [S, A*Ht], last [S, Ht] in the stored dtype.

    Without boundaries ``aux`` is ``last``: what a drafter reads that fuses nothing.
    """

    tokens: Tensor
    prompt_len: int
    aux: Tensor
    last: Tensor


class Batch(NamedTuple):
    """Texts padded on the right with 0.

    Attributes
    ----------
    tokens: [B, S] int64.
    lengths: [B] int64, tokens of each text (after truncation).
    prompt_lens: [B] int64; positions before it are prompt and bear no loss.
    aux: [B, S, A*Ht] in the stored dtype; ``last`` without boundaries.
    last: [B, S, Ht] in the stored dtype.
    rows: index of each text in ``Features.texts``.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    aux: Tensor
    last: Tensor
    rows: tuple[int, ...]


@dataclass(frozen=True)
class _Shard:
    """Texts first .. first+count-1, ``tokens`` rows in all."""

    name: str
    first: int
    count: int
    tokens: int


class FeatureStore:
    """A folder of stored states. Several processes may use it at the same time."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def build(
        self,
        target: StateSource,
        texts: Sequence[Text],
        boundaries: Sequence[int],
        *,
        dtype: Dtype | None = None,
        batch: int | None = None,
        progress: str = "",
    ) -> Features:
        """Compute the states of ``texts``, or what is missing of them, and open them.

        Parameters
        ----------
        boundaries: ascending residual-stream ids, 0 .. n.
        dtype: of the stored states; None takes the one that the target computes in (float32
            where that is no kind of stored states).
        batch: texts in one forward pass; None takes ``CAPTURED``, and no remedy names it.
        progress: title of the progress bar; none is shown without it.

        Raises
        ------
        ResourceError: the estimated size exceeds the free space, or a batch the free memory
            (before anything is written; memory of another device than the CPU is not known), or
            the space ran out (what is written is kept and used by the next call).
        NumericsError: a state is not finite, or too large for ``dtype``.
        DataError: no texts, or texts that the target refuses.
        ContractError: a boundary that the target does not have, or a target whose captured
            states are not those that its logits are made of.
        """
        if not texts:
            raise DataError("no texts to store states of", remedy="Give at least one text.")
        own: Dtype = next((d for d in get_args(Dtype) if _DTYPES[d] is target.dtype), "float32")
        dtype = dtype or own
        if dtype not in _DTYPES:
            raise DataError("unknown dtype", got=dtype, remedy=f"Use {', '.join(_DTYPES)}.")
        target.check_boundaries(boundaries)
        key = _key(target.fingerprint, boundaries, dtype, texts)
        folder = self.root / key
        self.root.mkdir(parents=True, exist_ok=True)
        with waiting_lock(self.root / f".{key}.lock"):
            if not (folder / "manifest.json").exists():
                self._write(folder, target, texts, boundaries, dtype, batch, progress)
        return self.open(key)

    def open(self, key: str) -> Features:
        """States stored under ``key``. Checksums are compared once in each process.

        Raises
        ------
        DataError: nothing or something unfinished under ``key``, a damaged file, or states of
            another kind than this version reads.
        """
        return Features(self.root / key)

    def _write(
        self,
        folder: Path,
        target: StateSource,
        texts: Sequence[Text],
        boundaries: Sequence[int],
        dtype: Dtype,
        batch: int | None,
        progress: str,
    ) -> None:
        width = (len(boundaries) + 1) * target.hidden_size
        row_bytes = width * _DTYPES[dtype].itemsize
        remove_dead(folder)
        plan = _plan([len(t.tokens) for t in texts], row_bytes)
        missing = [s for s in plan if _digest(folder / s.name, s.tokens * row_bytes) is None]
        self._check_space(sum(s.tokens for s in missing) * row_bytes)
        if missing and target.device.type == "cpu":
            _check_memory(target, texts, missing, boundaries, _DTYPES[dtype], batch)
        batch = CAPTURED if batch is None else batch
        target.self_check(texts[0].tokens[:64])
        total = sum(s.tokens for s in plan)
        done = total - sum(s.tokens for s in missing)
        with progress_bar(
            progress, total=total, initial=done, unit="token", unit_scale=True
        ) as bar:
            for shard in missing:
                part = texts[shard.first : shard.first + shard.count]
                rows = _states(target, part, boundaries, _DTYPES[dtype], batch)
                data = rows.view(torch.uint8).numpy().data
                with atomic_file(folder / shard.name) as file:
                    file.write(data)
                    file.write(sha256(data).digest())
                _verified.add(_identity(folder / shard.name))
                bar.update(shard.tokens)
        table = pa.Table.from_pylist([asdict(t) for t in texts], schema=_TEXTS)
        with atomic_file(folder / "texts.parquet") as file:
            pq.write_table(table, file)
        digests = {s.name: _digest(folder / s.name, s.tokens * row_bytes) for s in plan}
        manifest = {
            "format": FORMAT,
            "key": folder.name,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "boundaries": list(boundaries),
            "hidden_size": target.hidden_size,
            "dtype": dtype,
            "last_state": LAST_STATE,
            "n_texts": len(texts),
            "n_tokens": total,
            "texts_sha256": file_hash(folder / "texts.parquet"),
            "shards": [{**asdict(s), "sha256": digests[s.name]} for s in plan],
        }
        with atomic_file(folder / "manifest.json") as file:
            file.write(json.dumps(manifest, indent=1).encode())

    def _check_space(self, need: int) -> None:
        free = shutil.disk_usage(self.root).free
        if need > free:
            raise ResourceError(
                f"the target's states need {_size(need)} in {self.root}",
                got=f"{_size(free)} free",
                remedy="Free space, store fewer tokens or boundaries, or use a 16-bit dtype.",
            )


class Features:
    """Stored states of a list of texts, mapped from disk: memory does not grow with their size.

    Attributes
    ----------
    key: names the states in their store.
    manifest: target, boundaries, dtype, kind of the last state, counts and checksums.
    texts: the texts, in the order of :meth:`item`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.key = folder.name
        self.manifest: Mapping[str, Any] = self._read_manifest()
        try:
            self._dtype: torch.dtype = _DTYPES[self.manifest["dtype"]]
            self._aux_width: int = len(self.manifest["boundaries"]) * self.manifest["hidden_size"]
            self._width: int = self._aux_width + self.manifest["hidden_size"]
            self._shards = [
                _Shard(s["name"], s["first"], s["count"], s["tokens"])
                for s in self.manifest["shards"]
            ]
            self._verify_texts()
            self.texts: tuple[Text, ...] = self._read_texts()
            self._verify_manifest()
            self._verify()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._damaged("manifest.json", error) from None
        # Where each text lies: its shard, and its first row there.
        self._place: list[tuple[_Shard, int]] = []
        for shard in self._shards:
            row = 0
            for text in self.texts[shard.first : shard.first + shard.count]:
                self._place.append((shard, row))
                row += len(text.tokens)
        self._mapped: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"Features({m['n_texts']} texts, {m['n_tokens']} tokens of {m['target']}, boundaries "
            f"{tuple(m['boundaries'])}, {m['dtype']}, {_size(m['n_tokens'] * self._row_bytes)})"
        )

    @property
    def _row_bytes(self) -> int:
        return self._width * self._dtype.itemsize

    def item(self, index: int) -> Item:
        """States of text ``index``: copies nothing, the tensors are views of the mapped file."""
        text = self.texts[index]
        shard, row = self._place[index]
        rows = self._map(shard)[row : row + len(text.tokens)]
        return Item(
            tokens=torch.tensor(text.tokens, dtype=torch.int64),
            prompt_len=text.prompt_len,
            aux=rows[:, : self._aux_width or None],
            last=rows[:, self._aux_width :],
        )

    def unusable(self, max_length: int) -> int:
        """Number of texts with no token after the prompt among their first ``max_length``."""
        return len(self.texts) - len(self._usable(max_length))

    def batches(
        self,
        batch: int,
        *,
        seed: int,
        epoch: int,
        max_length: int,
        bucket: int = 8,
        among: Container[int] | None = None,
    ) -> Iterator[Batch]:
        """One pass over the texts in batches; the order depends on (seed, epoch) only.

        Texts are cut to ``max_length`` tokens; those that have no token after the prompt then
        bear no loss and are left out (:meth:`unusable` counts them). Texts of similar length
        share a batch: ``bucket`` batches are sorted by length at a time, 1 turns that off.
        ``among`` names the texts to take; None takes all.

        Raises
        ------
        DataError: no text is usable.
        """
        usable = [i for i in self._usable(max_length) if among is None or i in among]
        if not usable:
            raise DataError(
                f"none of {len(self.texts)} texts has a token after its prompt within"
                f" {max_length} tokens, so nothing can be learned",
                remedy="Raise max_length, shorten the prompts, or give longer continuations.",
            )
        rng = np.random.Generator(np.random.PCG64([seed, epoch]))
        order = [usable[i] for i in rng.permutation(len(usable))]
        groups: list[list[int]] = []
        for start in range(0, len(order), batch * bucket):
            window = order[start : start + batch * bucket]
            if bucket > 1:
                window.sort(key=lambda i: min(len(self.texts[i].tokens), max_length))
            groups += [window[i : i + batch] for i in range(0, len(window), batch)]
        if bucket > 1:
            groups = [groups[i] for i in rng.permutation(len(groups))]
        for rows in groups:
            yield self._pad(rows, max_length)

    def _usable(self, max_length: int) -> list[int]:
        return [
            i for i, t in enumerate(self.texts) if t.prompt_len < min(len(t.tokens), max_length)
        ]

    def _pad(self, rows: Sequence[int], max_length: int) -> Batch:
        lengths = [min(len(self.texts[i].tokens), max_length) for i in rows]
        size = max(lengths)
        tokens = torch.zeros(len(rows), size, dtype=torch.int64)
        last = torch.zeros(len(rows), size, self._width - self._aux_width, dtype=self._dtype)
        aux = torch.zeros(len(rows), size, self._aux_width or last.shape[-1], dtype=self._dtype)
        for b, (i, n) in enumerate(zip(rows, lengths, strict=True)):
            item = self.item(i)
            tokens[b, :n] = item["tokens"][:n]
            aux[b, :n] = item["aux"][:n]
            last[b, :n] = item["last"][:n]
        prompt_lens = torch.tensor([self.texts[i].prompt_len for i in rows])
        return Batch(tokens, torch.tensor(lengths), prompt_lens, aux, last, tuple(rows))

    def _map(self, shard: _Shard) -> Tensor:
        """[tokens of the shard, A*Ht + Ht]; the most recently used shards stay mapped."""
        if shard.name not in self._mapped:
            flat = torch.from_file(
                str(self._folder / shard.name),
                shared=False,
                size=shard.tokens * self._width,
                dtype=self._dtype,
            )
            self._mapped[shard.name] = flat.view(shard.tokens, self._width)
            if len(self._mapped) > _OPEN_SHARDS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(shard.name)
        return self._mapped[shard.name]

    def _read_manifest(self) -> dict[str, Any]:
        path = self._folder / "manifest.json"
        try:
            manifest = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"no finished states in {self._folder}",
                remedy="Build them; what is already written there will be used.",
            ) from None
        except (ValueError, OSError) as error:
            raise self._damaged("manifest.json", error) from None
        for field, value in (("format", FORMAT), ("last_state", LAST_STATE), ("key", self.key)):
            if not isinstance(manifest, dict) or manifest.get(field) != value:
                found = manifest.get(field) if isinstance(manifest, dict) else manifest
                raise DataError(
                    f"states in {self._folder} are of another kind: {field} is not {value!r}",
                    got=repr(found),
                    remedy="Delete the folder and build the states again.",
                )
        return manifest

    def _verify_texts(self) -> None:
        texts = self._folder / "texts.parquet"
        found = file_hash(texts) if texts.exists() else None
        if found != self.manifest["texts_sha256"]:
            raise self._damaged("texts.parquet")

    def _verify_manifest(self) -> None:
        """The key is a hash of what the states are made of, and the texts decide the shards."""
        m = self.manifest
        key = _key(m["target_fingerprint"], m["boundaries"], m["dtype"], self.texts)
        plan = _plan([len(t.tokens) for t in self.texts], self._row_bytes)
        if key != self.key or plan != self._shards or type(m["hidden_size"]) is not int:
            raise ValueError("it does not describe these states")
        self._shards = plan  # numbers of JSON may equal these and be no integers

    def _verify(self) -> None:
        for shard, stored in zip(self._shards, self.manifest["shards"], strict=True):
            found = _digest(self._folder / shard.name, shard.tokens * self._row_bytes)
            if found != stored["sha256"]:
                raise self._damaged(shard.name)

    def _damaged(self, name: str, error: Exception | None = None) -> DataError:
        return DataError(
            f"{self._folder / name} is damaged or missing",
            got=error,
            remedy=f"Delete {self._folder / 'manifest.json'} and build the states again: only"
            " damaged files are made anew.",
        )

    def _read_texts(self) -> tuple[Text, ...]:
        columns = pq.read_table(self._folder / "texts.parquet").to_pydict()
        columns["tokens"] = [tuple(t) for t in columns["tokens"]]
        names = [f.name for f in fields(Text)]
        rows = zip(*(columns[name] for name in names), strict=True)
        return tuple(Text(**dict(zip(names, row, strict=True))) for row in rows)


def _key(fingerprint: str, boundaries: Sequence[int], dtype: Dtype, texts: Sequence[Text]) -> str:
    digest = sha256(json.dumps([FORMAT, fingerprint, list(boundaries), dtype]).encode())
    for text in texts:
        digest.update(json.dumps(asdict(text), sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _plan(lengths: Sequence[int], row_bytes: int) -> list[_Shard]:
    """Whole texts in order, shards of SHARD_BYTES or the one text that made them larger."""
    shards: list[_Shard] = []
    first, tokens = 0, 0
    for index, length in enumerate(lengths, start=1):
        tokens += length
        if tokens * row_bytes >= SHARD_BYTES or index == len(lengths):
            shards.append(_Shard(f"shard-{len(shards):05d}", first, index - first, tokens))
            first, tokens = index, 0
    return shards


def _check_memory(
    target: StateSource,
    texts: Sequence[Text],
    missing: Sequence[_Shard],
    boundaries: Sequence[int],
    dtype: torch.dtype,
    batch: int | None,
) -> None:
    """Refuse a forward pass of ``missing`` that does not fit."""
    # Of each shard: its texts, and the longest. A pass holds texts of one shard.
    sizes = [
        (s.count, max(len(text.tokens) for text in texts[s.first : s.first + s.count]))
        for s in missing
    ]
    most = CAPTURED if batch is None else batch
    count, longest = max(sizes, key=lambda of: min(of[0], most) * of[1])
    at_once = min(count, most)
    memory.refuse_too_large(
        f"capturing states of {at_once} texts of up to {longest} tokens at once",
        lambda n: max(
            memory.capturing_bytes(
                *(min(count, n), longest),
                hidden=target.hidden_size,
                intermediate=target.shape.intermediate_size,
                boundaries=len(boundaries),
                itemsize=max(target.dtype.itemsize, dtype.itemsize),
            )
            for count, longest in sizes
        ),
        at_once,
        None if batch is None else "a batch of",
        memory.TEXTS,
    )


def _states(
    target: StateSource,
    texts: Sequence[Text],
    boundaries: Sequence[int],
    dtype: torch.dtype,
    batch: int,
) -> Tensor:
    """Rows [aux | last] of all positions of ``texts``, on the CPU."""
    width = (len(boundaries) + 1) * target.hidden_size
    rows: list[Tensor] = [torch.empty(0, width)] * len(texts)
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for start in range(0, len(texts), batch):
        chosen = by_length[start : start + batch]
        lengths = torch.tensor([len(texts[i].tokens) for i in chosen])
        tokens = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.int64)
        for b, i in enumerate(chosen):
            tokens[b, : lengths[b]] = torch.tensor(texts[i].tokens)
        out = target.forward(tokens, lengths, boundaries, logits=False)
        states = torch.cat([out.aux, out.last], -1).to("cpu", dtype)
        for b, i in enumerate(chosen):
            rows[i] = states[b, : lengths[b]]
            finite = rows[i].isfinite().all(-1)
            if not bool(finite.all()):
                raise _overflow(target, texts[i], states[b], finite, boundaries, dtype)
    return torch.cat(rows)


def _overflow(
    target: StateSource,
    text: Text,
    states: Tensor,
    finite: Tensor,
    boundaries: Sequence[int],
    dtype: torch.dtype,
) -> NumericsError:
    """What is not finite first: model, site, position and token. states [S, (A + 1) * Ht]."""
    position = int(finite.logical_not().nonzero()[0])
    parts = states[position].split(target.hidden_size)
    k = next(k for k, part in enumerate(parts) if not bool(part.isfinite().all()))
    site = f"boundary {boundaries[k]}" if k < len(boundaries) else "the state after the final norm"
    own, stored = (str(d).removeprefix("torch.") for d in (target.dtype, dtype))
    return NumericsError(
        f"{site} of {target.name} is not finite in {stored} at position {position}, token "
        f"{text.tokens[position]} of text {text.prompt_id}",
        got=f"computed in {own}, whose largest number is {torch.finfo(target.dtype).max:.4g}",
        remedy="Load the target in bfloat16 or float32.",
    )


def _digest(path: Path, size: int) -> str | None:
    """SHA-256 (hex) of a shard that is whole and agrees with its own checksum, else None."""
    try:
        identity = _identity(path)
        if identity[1] != size + _DIGEST:
            return None
        with path.open("rb") as file:
            file.seek(size)
            stored = file.read(_DIGEST)
            if identity not in _verified:
                file.seek(0)
                digest, left = sha256(), size
                while left and (block := file.read(min(left, 1 << 20))):
                    digest.update(block)
                    left -= len(block)
                if digest.digest() != stored:
                    return None
                _verified.add(identity)
    except FileNotFoundError:
        return None
    return stored.hex()


def _identity(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


def _size(n: int) -> str:
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n / 1024:.1f} KiB"
