"""The benchmark: its counts against FLOPs that torch counts, its table, and a run of each kind."""

from __future__ import annotations

import copy
import csv
import functools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_run import make_run
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from driftlab.bench import STAGES, count, drafting, machine, peers, run, shapes
from driftlab.bench.shapes import Bench
from driftlab.bench.timing import Sample, race, ratio
from driftlab.cli import app
from driftlab.config import TrainSpec
from driftlab.engines.train import SoftTargets, supervised, ttt_loss
from driftlab.errors import ConfigError, DataError, ResourceError, RunError
from driftlab.results import bench_figure, bench_rows
from driftlab.results.bench_rows import Row

CPU = torch.device("cpu")
NOWHERE = Path("nowhere")


def bench(tmp_path: Path, **changes: Any) -> Bench:
    found = machine.Machine({}, {("float32", 1): 1e9, ("bfloat16", 1): 1e9}, 1e9)
    given: dict[str, Any] = {
        "machine": found,
        "device": CPU,
        "full": False,
        "repeats": 1,
        "work": tmp_path,
    }
    return Bench(**{**given, "stored": NOWHERE, "say": lambda line: None, **changes})


def test_operations_of_a_target_are_those_that_torch_counts() -> None:
    """At a length where causal halves do not matter: torch counts whole square attention."""
    shape = shapes.SMALL_TARGET
    target = shapes.random_target(shape)
    target.model.set_attn_implementation("eager")  # torch does not count the CPU's fused kernel
    tokens = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    ours = count.target_forward(shape, tokens, tokens, logits=tokens)
    assert ours.operations == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_operations_of_a_training_step_are_those_that_torch_counts() -> None:
    """torch does not see the drafter's own gradients of attention, nor half of a causal square:
    with few keys, the products of the layer and the head are what is left."""
    config = shapes.config_of((64, 2, 2, 256, 512, 256))
    drafter, teacher = shapes.random_pair(config, CPU)
    spec, tokens = TrainSpec(ttt=3), 24
    batch = drafting.step_batch(config, tokens, 2, 1, spec.ttt)
    targets = SoftTargets(teacher, drafter.draft_to_target)
    with FlopCounterMode(display=False) as counter:
        ttt_loss(drafter, batch, targets, spec)[0].backward()
    learned = len(supervised(drafter, batch, spec, 0).at)
    ours = count.ttt_step(config, texts=2, tokens=tokens, first=0, learned=learned, depth=3)
    assert ours.operations == pytest.approx(counter.get_total_flops(), rel=0.08)


def test_a_step_for_peers_learns_the_same_tokens_at_every_depth() -> None:
    config = shapes.config_of(shapes.SMALL)
    drafter, _ = shapes.random_pair(config, CPU)
    for prompt in (1, 20):
        batch = drafting.step_batch(config, 40, 2, prompt, 4)
        found = supervised(drafter, batch, TrainSpec(ttt=4), max(0, prompt - 2))
        assert bool((found.weight > 0).all())
        assert len(found.at) == 2 * (40 - max(2, prompt) - 3)


PEER = """
import json, sys, torch
for line in sys.stdin:
    order = json.loads(line)
    if "load" in order:
        job = torch.load(order["load"], weights_only=True)
        answer = {"ready": "it"}
    elif "check" in order:
        torch.save({"a": torch.ones(2)}, order["check"])
        answer = {"loss": float(job["decay"])}
    else:
        answer = {"wall": 2.0, "busy": 1.0}
    print(json.dumps(answer), flush=True)
"""


def test_a_peer_is_asked_by_lines(tmp_path: Path) -> None:
    script, job = tmp_path / "peer.py", tmp_path / "job.pt"
    script.write_text(PEER)
    config = shapes.config_of(shapes.SMALL)
    drafter, teacher = shapes.random_pair(config, CPU)
    batch = drafting.step_batch(config, 16, 1, 1, 4)
    learned = torch.ones(1, 16, dtype=torch.bool)
    peers.save_job(
        job, drafter, batch, learned, teacher.head_weight, TrainSpec(decay=0.5), autocast=False
    )
    with peers.Peer("it", f"{sys.executable} {script}", job) as peer:
        theirs = peer.check(tmp_path / "out.pt")
        assert peer.step() == Sample(2.0, 1.0)
    assert peers.disagreement((0.5, {"a": torch.ones(2)}), theirs) == 0
    assert peers.disagreement((0.5, {"a": torch.full((2,), 0.5)}), theirs) == pytest.approx(1.0)
    with pytest.raises(ResourceError, match="failed at load"):
        peers.Peer("it", f"{sys.executable} -c pass", job)
    for command in (str(tmp_path / "absent"), "python 'a"):
        with pytest.raises(ResourceError, match="does not start"):
            peers.Peer("it", command, job)
    echo = "import sys\nfor line in sys.stdin: print(line, flush=True)"
    script.write_text(echo)
    peer = peers.Peer("it", f"{sys.executable} {script}", job)
    with pytest.raises(ResourceError, match="failed at check"):
        peer.check(tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ('"loss": NaN, "wall": 1, "busy": 1', "failed at check"),
        ('"loss": 1, "wall": null', r"failed at step .got \{"),
        ('"loss": 1, "wall": 1, "busy": 0', "took no time"),
        ('"loss": 1, "wall": Infinity, "busy": 1', "failed at step"),
        ('"loss": 1, "wall": 1, "busy": 1', "wrote no gradients"),
    ],
)
def test_what_a_peer_answers_must_be_numbers(said: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(f"import sys\nfor line in sys.stdin: print('{{{said}}}', flush=True)")
    peer = peers.Peer("it", f"{sys.executable} {script}", tmp_path / "job.pt")
    (tmp_path / "out.pt").write_bytes(b"no tensors" if "gradients" in fault else b"")
    checked = "check" in fault or "gradients" in fault
    ask = functools.partial(peer.check, tmp_path / "out.pt") if checked else peer.step
    with peer, pytest.raises(ResourceError, match=f"peer it {fault}"):
        ask()


def test_a_peer_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.2)
    script = tmp_path / "peer.py"
    script.write_text("import time\ntime.sleep(600)")
    with pytest.raises(ResourceError, match=r"failed at load .got no answer in 0\.2 s"):
        peers.Peer("it", f"{sys.executable} {script}", tmp_path / "job.pt")


@pytest.mark.parametrize(
    ("theirs", "fault"),
    [
        ([torch.ones(2)], "have no names"),
        ({"b": torch.ones(2)}, r"other parameters .got \['a', 'b'\]"),
        ({"a": torch.ones(3)}, "other parameters"),
        ({"a": 1.0}, "other parameters"),
        ({"a": torch.tensor([1.0, math.nan])}, "not finite"),
    ],
)
def test_gradients_of_a_peer_must_be_those_of_the_step(theirs: Any, fault: str) -> None:
    with pytest.raises(ResourceError, match=fault):
        peers.disagreement((0.5, {"a": torch.ones(2)}), (0.5, theirs))


def test_rivals_take_turns_and_a_ratio_is_of_busy_time() -> None:
    order: list[str] = []
    found = race({"a": lambda: order.append("a"), "b": lambda: Sample(9.0, 3.0)}, 2, CPU)
    assert order == ["a"] * 3  # the first only warms up
    assert found["b"] == [Sample(9.0, 3.0)] * 2
    assert ratio([Sample(1, 6), Sample(1, 8), Sample(1, 2)], [Sample(5, 2)] * 3) == 3


@pytest.mark.parametrize(
    ("given", "turns"), [({"budget": 8.0}, 2), ({"budget": 1.0}, 1), ({"until": 0.0}, 1), ({}, 5)]
)
def test_where_time_is_short_there_are_fewer_turns(given: dict[str, float], turns: int) -> None:
    found = race({"b": lambda: Sample(9.0, 3.0)}, 5, CPU, **given)
    assert found == {"b": [Sample(9.0, 3.0)] * turns}


def test_a_stage_keeps_the_rows_that_its_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(bench: Bench) -> Any:
        yield from (Row("a", str(i), "") for i in range(3))

    monkeypatch.setitem(STAGES, "records", rows)
    said: list[str] = []
    given: dict[str, Any] = {"smoke": True, "repeats": 1, "peers": {}, "stored": None}
    found = list(run(["records"], **given, say=said.append, limit=0.0))
    assert [row.case for _, row in found] == ["0"]
    assert any("limit" in line for line in said)
    assert len(list(run(["records"], **given, say=said.append))) == 3


def test_training_is_timed_and_counted(tmp_path: Path) -> None:
    peak, row, _, shorter, against = drafting.training(bench(tmp_path))
    assert row.case == shorter.case == "driftlab"
    assert row.busy is not None and row.busy > 0
    assert row.share is not None and row.gflop is not None
    assert "tokens a busy second" in row.note
    assert peak.case.startswith("GEMM") and peak.ratio == pytest.approx(row.share)
    assert shorter.busy and against.ratio == pytest.approx(row.busy / shorter.busy)


def test_the_command_prints_and_stores(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["bench", "--smoke", "--repeats", "1", "--stage", "states", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "captured / HF forward" in done.output
    assert "to reach at most 1.1" in done.output
    kept = json.loads((out / "bench.json").read_text())["stages"]["captured states"]
    assert kept["machine"]["gemm_gflops"]["float32, 1 threads"] > 0
    assert len(kept["rows"]) == 4
    with (out / "bench.csv").open() as file:
        assert [row["case"] for row in csv.DictReader(file)][:2] == ["HF forward", "captured"]
    assert (out / "bench.png").stat().st_size > 1000


def test_stages_of_an_earlier_run_stay(tmp_path: Path) -> None:
    first = Row("a", "x", "T=1", busy=1.0, n=1)
    bench_rows.store(tmp_path, {"load": 1}, [first, Row("b", "y", "", ratio=2.0, of="p / q")])
    kept = bench_rows.store(tmp_path, {"load": 2}, [Row("a", "z", "T=2", busy=2.0, goal="1")])
    assert [(row.stage, row.case) for row in kept] == [("a", "z"), ("b", "y")]
    assert "2.00 = p / q" in bench_rows.table(kept)
    good = json.loads((tmp_path / "bench.json").read_text())
    spoilt: list[Any] = [[], {"stages": {"a": []}}, {"stages": {"a": {"rows": []}}}]
    for change in ({"old_field": 2}, {"size": None}, {"busy": "fast"}):
        spoilt.append(copy.deepcopy(good))
        spoilt[-1]["stages"]["a"]["rows"][0] |= change
    for made in spoilt:
        (tmp_path / "bench.json").write_text(json.dumps(made))
        with pytest.raises(DataError, match="no benchmark of this version"):
            bench_rows.store(tmp_path, {}, [first])
        told = CliRunner().invoke(app, ["bench", "--smoke", "--out", str(tmp_path)])
        assert isinstance(told.exception, DataError), "before anything is measured"
    with pytest.raises(DataError, match=r"bench\.json is a file"):
        bench_rows.stored(tmp_path / "bench.json" / "x")


def test_a_page_is_filled_from_what_is_stored(tmp_path: Path) -> None:
    machine_facts = {"processor": "P", "cores": 2, "gemm_gflops": {"float32, 1 threads": 3.0}}
    row = Row("a", "x", "T=1", "float32", busy=1.5, n=3, share=0.5, ratio=2.0, of="p / q")
    bench_rows.store(tmp_path / "b", machine_facts, [row])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: b/bench.json -->\nold\n<!-- end -->\nafter\n")
    refused = CliRunner().invoke(app, ["bench", "--page", str(page), "--smoke"])
    assert isinstance(refused.exception, ConfigError), "it would measure nothing"
    done = CliRunner().invoke(app, ["bench", "--page", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "| a | x | T=1 | float32 | 1.5 | 3 | 50% |  | 2 = p / q |  |" in text
    assert "P, 2 cores" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n")
    assert bench_rows.fill(page) == ["b/bench.json"] and page.read_text() == text
    page.write_bytes(b"\xff")
    with pytest.raises(DataError, match="is no text"):
        bench_rows.fill(page)
    page.write_text("nothing")
    with pytest.raises(DataError, match="no place for a table"):
        bench_rows.fill(page)


def test_the_tables_of_the_docs_are_those_that_are_stored(root: Path, tmp_path: Path) -> None:
    page = root / "docs" / "benchmarks.md"
    copy = shutil.copytree(root / "papers" / "benchmarks", tmp_path / "papers" / "benchmarks")
    assert copy.is_dir()
    (tmp_path / "docs").mkdir()
    again = Path(shutil.copy(page, tmp_path / "docs"))
    assert bench_rows.fill(again)
    assert again.read_text() == page.read_text()


def test_a_figure_of_rows_without_a_time_is_none(tmp_path: Path) -> None:
    assert bench_figure.draw(tmp_path, [Row("a", "x", "", ratio=1.0)]) == []


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stage 'probe'"):
        list(run(["probe"], smoke=True, repeats=1, peers={}, stored=None, say=print))
    assert "ablate" in STAGES


def test_peers_that_no_stage_asks_are_refused() -> None:
    stages = ["records", "startup"]
    given: dict[str, Any] = {"smoke": True, "repeats": 1, "stored": None, "say": print}
    with pytest.raises(ConfigError, match=r"stage training, .* .got nobody and the stages records"):
        next(run(stages, peers={"nobody": "false"}, **given))
    twice = CliRunner().invoke(app, ["bench", "--peer", "a=x", "--peer", "a=y"])
    assert isinstance(twice.exception, ConfigError) and "one name" in twice.exception.cause


def test_a_stored_run_that_is_not_there_or_that_no_stage_asks_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"smoke": True, "repeats": 1, "peers": {}, "say": print}
    with pytest.raises(ConfigError, match=r"in the stage startup, .* the stages records"):
        next(run(["records"], stored=NOWHERE, **given))
    with pytest.raises(RunError):
        next(run(["startup"], stored=NOWHERE, **given))
    with pytest.raises(ConfigError, match="no number of seconds"):
        next(run(["startup"], stored=None, limit=math.nan, **given))
    make_run(tmp_path / "begun", finish=False, prompts=("p0",), seeds=(0,), depth=2, anchors=2)
    with pytest.raises(RunError, match="is not finished"):
        next(run(["startup"], stored=tmp_path / "begun", **given))


def test_a_goal_names_its_case() -> None:
    row = Row("startup", "driftlab --help", "", ratio=0.4, of="busy time / 0.5 s", goal="at most 1")
    assert (
        bench_rows.goals([row])
        == "startup: busy time / 0.5 s, driftlab --help: 0.40, to reach at most 1"
    )


def test_rows_are_read_without_torch() -> None:
    code = (
        "import sys, driftlab.results.bench_rows, driftlab.results.bench_figure; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
