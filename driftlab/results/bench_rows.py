"""What `driftlab bench` measured: rows, their files, and the table that is printed."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from driftlab.errors import DataError, first_fault
from driftlab.files import refuse_file_above, refuse_irregular
from driftlab.results.shards import atomic_file


@dataclass(frozen=True)
class Row:
    """One case of one stage at one size.

    seconds: median wall time of ``n`` runs; fastest: the least; busy: least time of the
    processors, or of the GPU. share: of the roofline (products at the machine's peak, copies at
    its bandwidth) that busy reaches. ratio: see ``of``. memory: MiB at the peak, where asked.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    stage: str
    case: str
    size: str
    dtype: str = ""
    seconds: float | None = None
    fastest: float | None = None
    busy: float | None = None
    n: int = 0
    gflop: float | None = None
    gbyte: float | None = None
    share: float | None = None
    memory: float | None = None
    ratio: float | None = None
    of: str = ""
    goal: str = ""
    note: str = ""


class _Machine(BaseModel):
    """What a stage's machine was, and measured to do; other facts are kept as they are."""

    model_config = ConfigDict(extra="allow")

    gemm_gflops: dict[str, float] = {}
    copy_gbs: float | None = None


class _Stage(BaseModel):
    machine: _Machine
    rows: list[Row]


class _Stored(BaseModel):
    stages: dict[str, _Stage]


def store(folder: Path, machine: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """Write bench.json and bench.csv; stages of an earlier run that were not run now are kept.

    ``machine`` is kept with each stage, since stages may be run on different days.
    Raises DataError when the folder's bench.json cannot be read.
    """
    stages = stored(folder)
    for name in dict.fromkeys(row.stage for row in rows):
        own = [row for row in rows if row.stage == name]
        stages[name] = _Stage(machine=_Machine.model_validate(dict(machine)), rows=own)
    everything = [row for stage in stages.values() for row in stage.rows]
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "bench.json") as file:
        made = _Stored(stages=stages).model_dump(mode="json")
        file.write(json.dumps(made, indent=1).encode() + b"\n")
    names = [field.name for field in fields(Row)]
    with (folder / "bench.csv").open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: _short(v) for k, v in asdict(row).items()} for row in everything)
    return everything


def stored(folder: Path) -> dict[str, _Stage]:
    """The stages of an earlier run. Raises DataError when they cannot be read, or ``folder`` is
    none."""
    refuse_file_above(folder, DataError)
    path = folder / "bench.json"
    return _stages(path) if path.exists() else {}


def _stages(path: Path) -> dict[str, _Stage]:
    refuse_irregular(path, DataError)
    try:
        return _Stored.model_validate_json(path.read_bytes()).stages
    except (ValidationError, OSError) as error:
        raise DataError(
            f"{path} is no benchmark of this version",
            got=first_fault(error) if isinstance(error, ValidationError) else error,
            remedy="Delete it, or name another --out.",
        ) from None


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, for a terminal and for a page."""
    heads = ("stage", "case", "size", "dtype", "wall s", "busy s", "n", "roof", "MiB", "ratio")
    lines = [
        (
            *(row.stage, row.case, row.size, row.dtype, _short(row.seconds), _short(row.busy)),
            *(str(row.n or ""), "" if row.share is None else f"{100 * row.share:.0f}%"),
            "" if row.memory is None else f"{row.memory:.0f}",
            "" if row.ratio is None else f"{row.ratio:.2f} = {row.of}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in (heads, *lines)
    )


def goals(rows: Sequence[Row]) -> str:
    """The ratios that have a goal, a line each: what, measured, to reach."""
    return "\n".join(
        f"{row.stage}: {row.of}, {f'{row.size} {row.dtype}'.strip() or row.case}: "
        f"{row.ratio:.2f}, to reach {row.goal}"
        for row in rows
        if row.goal and row.ratio is not None
    )


def fill(page: Path) -> list[str]:
    """Put stored benchmarks into a Markdown page, and return the paths that it names.

    A table stands between ``<!-- bench: PATH -->`` and ``<!-- end -->``, PATH being that of a
    bench.json, as seen from the page.

    Raises DataError when there is no such place in the page, or a benchmark cannot be read.
    """
    refuse_irregular(page, DataError)
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{page} is no text", got=error, remedy="Save it as UTF-8.") from None
    named = _PLACE.findall(text)
    if not named:
        raise DataError(f"{page} has no place for a table", remedy="See docs/benchmarks.md.")

    def table_of(place: re.Match[str]) -> str:
        return f"{place[1]}\n\n{markdown(page.parent / place[2])}\n\n{place[3]}"

    with atomic_file(page) as file:
        file.write(_PLACE.sub(table_of, text).encode())
    return [path for _, path, _ in named]


_PLACE = re.compile(r"(<!-- bench: (\S+) -->)\n.*?(<!-- end -->)", re.DOTALL)


def markdown(path: Path) -> str:
    """A stored benchmark as a page shows it: the machine, then a table of all rows.

    A share of the roofline above 1 is left out: the peak was that of an emulated type, and no roof.
    """
    stages = _stages(path)
    lines = [*_machines([stage.machine.model_dump() for stage in stages.values()]), ""]
    lines += ["| stage | case | size | dtype | busy s | n | roof | MiB | ratio | to reach |"]
    lines += ["|" + "---|" * 10]
    for row in (row for stage in stages.values() for row in stage.rows):
        cells = (
            *(row.stage, row.case, row.size, row.dtype, _short(row.busy), str(row.n or "")),
            "" if row.share is None or row.share > 1 else f"{100 * row.share:.0f}%",
            "" if row.memory is None else f"{row.memory:.0f}",
            "" if row.ratio is None else f"{row.ratio:.3g} = {row.of}",
            row.goal,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _machines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a machine; what it was measured to do before each stage, as a range."""
    same: dict[str, list[Mapping[str, Any]]] = {}
    for facts in found:
        named = (
            f"{facts.get('device', facts.get('processor'))}, {facts.get('cores')} cores, "
            f"{facts.get('memory_gib')} GiB, {facts.get('date')}, torch {facts.get('torch')}"
        )
        same.setdefault(named, []).append(facts)

    def span(values: Sequence[Any]) -> str:
        low, high = min(values), max(values)
        return f"{low}" if low == high else f"{low} to {high}"

    lines = []
    for named, all_of in same.items():
        names = dict.fromkeys(name for facts in all_of for name in facts.get("gemm_gflops", {}))
        peaks = (
            f"{name} {span([f['gemm_gflops'][name] for f in all_of if name in f['gemm_gflops']])}"
            for name in names
        )
        copies = [facts["copy_gbs"] for facts in all_of if facts.get("copy_gbs") is not None]
        copy = span(copies) if copies else "not measured"
        lines.append(f"{named}. GEMM in GFLOP/s: {', '.join(peaks)}; copy {copy} GB/s.")
    return lines


def summary(busy: Sequence[float], wall: Sequence[float]) -> dict[str, Any]:
    """Columns of a :class:`Row` that times give."""
    return {
        "seconds": statistics.median(wall),
        "fastest": min(wall),
        "busy": min(busy),
        "n": len(wall),
    }


def _short(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
