"""What a probe found: the tables of a stored run before they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from driftlab.errors import DataError
from driftlab.results.figures import Plots
from driftlab.results.records import SMALL, RunDirectory, Tables, to_pandas
from driftlab.results.schema import MEASURED

if TYPE_CHECKING:
    import pandas as pd


class ProbeRun:
    """What a probe found: tables as DataFrames, and figures.

    Attributes
    ----------
    steps, depths, heads, fused, prompts, cells: the tables of a stored run
        (:mod:`driftlab.results.schema` has columns, units and meanings).
    plot: ``run.plot.sink_by_depth()`` and the like, each on matplotlib Axes.
    manifest: settings, hashes of the models and texts, interventions, assumed values.
    """

    def __init__(self, arrow: Mapping[str, pa.Table], manifest: Mapping[str, Any]) -> None:
        self._arrow, self.manifest = dict(arrow), dict(manifest)

    @cached_property
    def steps(self) -> pd.DataFrame:
        return to_pandas(self._arrow["steps"], False)

    @cached_property
    def depths(self) -> pd.DataFrame:
        return to_pandas(self._arrow["depths"], False)

    @cached_property
    def heads(self) -> pd.DataFrame:
        return to_pandas(self._arrow["heads"], False)

    @cached_property
    def fused(self) -> pd.DataFrame:
        return to_pandas(self._arrow["fused"], False)

    @cached_property
    def prompts(self) -> pd.DataFrame:
        return to_pandas(self._arrow["prompts"], False)

    @cached_property
    def cells(self) -> pd.DataFrame:
        return to_pandas(self._arrow["cells"], False)

    @cached_property
    def _tables(self) -> Tables:
        frames: dict[str, Any] = {n: to_pandas(self._arrow[n], True) for n in SMALL}
        return Tables(**frames, manifest=self.manifest)

    def tables(self) -> Tables:
        """The small tables, as statistics, figures and the report read them."""
        return self._tables

    @property
    def plot(self) -> Plots:
        return Plots(self._tables)

    def beside(self, *others: ProbeRun) -> ProbeRun:
        """This run and ``others`` as one, to be drawn in one figure, paired by prompt.

        Raises DataError when they measured other texts, or measured them otherwise (depth, sink,
        recent keys, target), or hold the same cell twice.
        """
        for other in others:
            if apart := _unlike(self.manifest, other.manifest):
                raise DataError(
                    "the runs were not measured alike",
                    got=", ".join(apart),
                    remedy="Probe with the same settings; only the drafter or its interventions "
                    "may differ.",
                )
            if not self._arrow["prompts"].equals(other._arrow["prompts"]):
                raise DataError(
                    "the runs were measured on different texts or anchors",
                    remedy="Probe the same prompts with the same settings; only the drafter or "
                    "its interventions may differ.",
                )
        runs = (self, *others)
        cells = [c for run in runs for c in run._arrow["cells"]["cell"].to_pylist()]
        if len(set(cells)) < len(cells):
            raise DataError(
                "two runs have the same cell",
                got=", ".join(sorted({c for c in cells if cells.count(c) > 1})),
                remedy="Each needs another drafter variant or intervention.",
            )
        arrow = {
            n: table if n == "prompts" else pa.concat_tables(run._arrow[n] for run in runs)
            for n, table in self._arrow.items()
        }
        config, inputs = dict(self.manifest["config"]), dict(self.manifest["inputs"])
        # One contract where the drafters have one, and those that there are side by side.
        stated: list[Any] = []
        for run in runs:
            each = run.manifest["config"]["drafter"]
            stated += [c for c in (each if isinstance(each, list) else [each]) if c not in stated]
        config["drafter"] = stated if len(stated) > 1 else stated[0]
        for key, place in (("interventions", config), ("drafters", inputs)):
            name = "config" if place is config else "inputs"
            place[key] = {k: v for run in runs for k, v in run.manifest[name][key].items()}
        told = {
            key: list(dict.fromkeys(x for run in runs for x in run.manifest.get(key) or []))
            for key in ("warnings", "differs")
        }
        known = {key: _together(runs, key) for key in ("resolved", "assumed")}
        manifest = {**self.manifest, "config": config, "inputs": inputs, **told, **known}
        return ProbeRun(arrow, manifest)

    def save(self, path: str | Path) -> RunDirectory:
        """Store the run in a folder; ``driftlab.load_run`` and the command line read it.

        Raises RunError when ``path`` holds another run.
        """
        with RunDirectory.create(path, self.manifest) as run:
            for cell in self._arrow["cells"].to_pylist():
                run.write_cell(cell)
                for prompt in sorted(set(self._arrow["steps"]["prompt"].to_pylist())):
                    run.write(
                        cell["cell"],
                        prompt,
                        {
                            n: _part(self._arrow[n], cell["cell"], prompt)
                            for n in MEASURED
                            if n in self._arrow
                        },
                    )
            run.write_prompts(_columns(self._arrow["prompts"]))
            run.finish(self._arrow["cells"]["cell"].to_pylist())
        return RunDirectory.open(path)

    def __repr__(self) -> str:
        cells = ", ".join(self.cells["cell"])
        texts = self._arrow["prompts"]
        return (
            f"ProbeRun({cells}: {texts.num_rows} texts, "
            f"{sum(texts['n_anchors'].to_pylist())} anchors, "
            f"depths 1..{int(self.depths['depth'].max())})"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.overview().to_html(float_format='{:.3g}'.format)}"

    def overview(self) -> pd.DataFrame:
        """Means over prompts by cell, text, mode and depth: accuracy, attention, size."""
        frame = self.depths.assign(correct=self.depths["n_correct"] / self.depths["n"])
        shown = ["correct", "sink", "draft_mass", "self_mass", "entropy", "rms_state_pre"]
        shown += ["rms_feedback", "tv"]
        return frame.groupby(["cell", "text", "mode", "depth"])[shown].mean()


def _unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that the rows of a probe depend on beside its drafter, where the two differ."""
    measure = [manifest["config"]["measure"] for manifest in (first, other)]
    pairs = {f"measure.{n}": [m.get(n) for m in measure] for n in {**measure[0], **measure[1]}}
    for name in ("temperatures", "max_new_tokens", "seed"):
        pairs[name] = [manifest["config"].get(name) for manifest in (first, other)]
    pairs["target"] = [str(m["inputs"]["target"])[:12] for m in (first, other)]
    return [f"{n}: {a} and {b}" for n, (a, b) in sorted(pairs.items()) if a != b]


def _together(runs: Sequence[ProbeRun], key: str) -> dict[str, Any]:
    """Resolved or assumed values of all runs; one that is not the first's names its cells."""
    found: dict[str, Any] = {}
    for run in runs:
        cells = ", ".join(run._arrow["cells"]["cell"].to_pylist())
        for name, value in (run.manifest.get(key) or {}).items():
            same = found.get(name) == value
            found[name if name not in found or same else f"{name} of {cells}"] = value
    return found


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {name: table[name] for name in table.column_names}


def _part(table: pa.Table, cell: str, prompt: str) -> dict[str, pa.ChunkedArray]:
    keep = pc.and_(pc.equal(table["cell"], cell), pc.equal(table["prompt"], prompt))
    return _columns(table.filter(keep))
