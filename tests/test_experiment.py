"""Runs that are killed, resumed or starved end with the same tables, or say why not."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from driftlab import experiment
from driftlab.config import Origin
from driftlab.data import grammar
from driftlab.data.features import Features
from driftlab.engines import cell
from driftlab.errors import (
    AssumptionError,
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    NumericsError,
    ResourceError,
    RunError,
)
from driftlab.experiment import plan, run_experiment, texts
from driftlab.experiment.plan import cell_name, variants
from driftlab.models.anatomy import Anatomy
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.frozen import Frozen
from driftlab.results import merge as merge_room
from driftlab.results.records import RunDirectory
from driftlab.results.schema import SCHEMAS
from driftlab.results.shards import read_shard, write_shard
from driftlab.results.slices import Group


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with small.shrunk() as patch:
        yield patch


@pytest.fixture
def out(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A run directory beside the shared cache."""
    path = small.home() / f"run-{abs(hash(request.node.nodeid))}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run(out: Path, *settings: str, **options: Any) -> RunDirectory:
    return run_experiment(small.spec(*settings), out, quiet=True, **options)


def done() -> Path:
    return small.home() / "done"


def fresh(out: Path) -> Path:
    return Path(shutil.copytree(done(), out))


def forbidden(*_: object, **__: object) -> Any:
    raise AssertionError("this was done already")


# --- resuming -------------------------------------------------------------------------------------


def test_a_finished_run_is_only_read_again(out: Path, patch: pytest.MonkeyPatch) -> None:
    fresh(out)
    patch.setattr(experiment, "run_jobs", forbidden)
    patch.setattr(texts, "pretrain", forbidden)
    found = run(out)
    assert small.contents(out) == small.contents(done())
    assert len(found.manifest["resumed"]) == 1
    assert small.status(out) == dict.fromkeys(small.CELLS, "done")


def test_a_run_stays_that_of_the_code_that_began_it(out: Path) -> None:
    """What resumed it is noted, and told of for good."""
    fresh(out)
    path = out / "manifest.json"
    begun = json.loads(path.read_text())
    begun["versions"]["torch"] = "1.0"
    begun |= {"git": {"commit": "a" * 40, "changed": False}, "command": "first"}
    begun["resumed"] = ["2026-01-01T00:00:00+00:00"]  # as older runs say it
    path.write_text(json.dumps(begun))
    run(out, command="second")
    found = run(out, command="first").manifest
    made_by = ("versions", "git", "hardware", "command")
    assert [found[n] for n in made_by] == [begun[n] for n in made_by]
    before, second, third = found["resumed"]
    assert before == begun["resumed"][0]
    assert set(second) == {"time", "versions", "git", "command"} and second["command"] == "second"
    assert second["versions"]["torch"] == torch.__version__ and "command" not in third
    told = [line for line in found["warnings"] if "by other code than began the run" in line]
    assert len(told) == 2 and f"torch 1.0 and then {torch.__version__}; commit aaaa" in told[0]
    assert second["time"] in told[0]


def test_the_supervised_share_is_of_what_is_learned_from(out: Path) -> None:
    found = run(out, "train.evaluate_every=2", "train.ttt=2", "drafter.draft_vocab_size=20")
    made = plan.Plan(small.spec("drafter.draft_vocab_size=20"), small.home() / "cache", quiet=True)
    texts = made.texts_to_learn()
    lessons = texts[: -max(1, len(texts) // 10)]
    mapping = made.vocabulary(lessons)
    assert mapping is not None and mapping != made.vocabulary(texts)
    assert found.manifest["supervised"] == made.supervised(lessons, mapping)
    drafter = load_drafter(out / "drafters" / small.CELLS[0])
    assert tuple(drafter.draft_to_target.tolist()) == mapping


def test_given_texts_that_the_limit_leaves_out_are_counted(
    out: Path, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [grammar.decode(story[1:30]) for story in grammar.stories(6, 5)]
    lines = [json.dumps({"prompt": w[:40].rsplit(" ", 1)[0], "response": w}) for w in words]
    (tmp_path / "given.jsonl").write_text("\n".join(lines))
    target = texts.open_target(small.spec().target, small.home() / "cache")
    target.tokenizer = grammar.WordTokenizer()
    patch.setattr(plan, "open_target", lambda *_, **__: target)
    spec = small.spec("text.train_tokens=60", f"text.measure_prompts={tmp_path}/given.jsonl")
    given = {"given": f"{tmp_path}/given.jsonl", "train_prompts": None}
    spec = spec.model_copy(update={"text": spec.text.model_copy(update=given)})
    kept = tmp_path / "cache"  # the shared one holds the suite's own texts
    said = run_experiment(spec, out, cache=kept, quiet=True).manifest["warnings"]
    assert f"4 of 6 texts of {tmp_path}/given.jsonl are not learned from" in said[0]
    patch.setattr(plan, "write_corpus", forbidden)
    (bare := tmp_path / "bare.jsonl").write_text(json.dumps({"prompt": words[0]}))
    for name, fault in (("gone.jsonl", r"gone\.jsonl: no such"), (str(bare), "no response")):
        other = spec.text.model_copy(update={"given": name})
        with pytest.raises(DataError, match=fault):
            run_experiment(spec.model_copy(update={"text": other}), out.with_name("gone"))


@pytest.mark.parametrize("lost", ["shard", "cut", "row", "table"])
def test_what_is_lost_is_measured_again_without_training(
    out: Path, patch: pytest.MonkeyPatch, lost: str
) -> None:
    fresh(out)
    piece = sorted((out / "shards").rglob("*.shard"))[0]
    if lost == "shard":
        piece.unlink()
    elif lost == "cut":
        piece.write_bytes(piece.read_bytes()[:-3])
    elif lost == "table":
        (out / "steps.parquet").unlink()
    if lost != "row":
        patch.setattr(cell, "train", forbidden)
    else:
        next((out / "rows" / "cells").iterdir()).unlink()
    run(out)
    assert small.contents(out) == small.contents(done())
    assert small.leftovers(out) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["gone", "no weights", "flipped", "config"])
def test_a_lost_drafter_is_trained_to_the_same_bytes(out: Path, damage: str) -> None:
    """Of a finished run, in which nobody needs it."""
    before = small.drafters(fresh(out))
    folder = out / "drafters" / small.CELLS[0]
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "flipped":
        flip(folder / "model.safetensors", -40)
    else:
        flip(folder / "config.json", (folder / "config.json").read_bytes().index(b"trained."))
    run(out)
    assert small.drafters(out) == before
    assert small.contents(out) == small.contents(done())


def test_pieces_of_another_run_are_made_anew(out: Path, tmp_path: Path) -> None:
    """One of other settings has the same cells and prompts, and other numbers."""
    fresh(out)
    other = tmp_path / "other"
    run(other, "train.steps=2", cache=out.parent / "cache")
    shutil.rmtree(out / "shards")
    shutil.copytree(other / "shards", out / "shards")
    run(out)
    assert small.contents(out) == small.contents(done())


def test_pieces_that_belong_to_no_cell_are_refused(out: Path) -> None:
    fresh(out)
    cells = sorted((out / "shards").iterdir())
    stray = out / "shards" / "x-0123456789abcdef"
    shutil.copytree(cells[0], stray)
    with pytest.raises(RunError, match=r"belong to no cell of this run .*x-0123456789abcdef/"):
        run(out)
    shutil.rmtree(stray)
    (out / "shards" / "extra.shard").write_bytes(b"")
    with pytest.raises(RunError, match=r"belong to no cell of this run .*got shards/extra\.shard"):
        run(out)
    (out / "shards" / "extra.shard").unlink()
    run(out)
    assert small.contents(out) == small.contents(done())


def test_a_pipe_or_a_folder_in_place_of_a_piece(out: Path) -> None:
    fresh(out)
    one, other = sorted((out / "shards").glob("*/*.shard"))[:2]
    one.unlink()
    os.mkfifo(one)
    run(out)
    assert one.is_file()
    other.unlink()
    other.mkdir()
    with pytest.raises(RunError, match=r"are damaged, or another run's .*\n.*Delete what stays"):
        run(out)


def test_what_a_killed_run_left_in_the_cache_goes_away(tmp_path: Path) -> None:
    """Half-written: the target, its frozen parts, attention rows (a process that is long gone)."""
    cache = tmp_path / "cache"
    for folder in ("targets", "frozen"):
        shutil.copytree(done().parent / "cache" / folder, cache / folder)
        for path in list((cache / folder).iterdir()):
            path.rename(path.with_name(f".{path.name}.{2**22 + 1}.7.tmp"))
    run(tmp_path / "run", cache=cache)
    assert not list(cache.rglob("*.tmp"))
    assert small.contents(tmp_path / "run") == small.contents(done())


def test_pieces_of_the_cache_in_another_s_place_are_made_anew(tmp_path: Path) -> None:
    """Texts of other prompts, another target's weights and frozen parts, and a pipe."""
    cache = tmp_path / "cache"
    shutil.copytree(done().parent / "cache", cache)
    one, other = sorted((cache / "texts").glob("*/*.texts"))[:2]
    one.write_bytes(other.read_bytes())
    for folder in ("targets", "frozen"):
        (held,) = (p for p in (cache / folder).iterdir() if p.is_file())
        moved = held.with_name(f"{'0' * 8}{held.name[8:]}")
        held.rename(moved)
        shutil.copy(moved, held)
        assert held.read_bytes() == moved.read_bytes()
    pipe = sorted((cache / "texts").glob("*/*.texts"))[-1]
    pipe.unlink()
    os.mkfifo(pipe)
    shutil.rmtree(cache / "states")
    run(tmp_path / "run", cache=cache)
    assert pipe.is_file()
    assert small.contents(tmp_path / "run") == small.contents(done())


def test_frozen_parts_of_another_target_are_not_read(tmp_path: Path) -> None:
    (held,) = (done().parent / "cache" / "frozen").glob("*.safetensors")
    assert Frozen(held).embedding_weight.shape[0] > 1
    other = tmp_path / f"0{held.name[1:]}"
    shutil.copy(held, other)
    with pytest.raises(CheckpointError, match="another target's"):
        Frozen(other)


def exchange(out: Path) -> None:
    """Put each drafter in the other's place."""
    one, other = (out / "drafters" / name for name in small.CELLS)
    one.rename(out / "drafters" / "x")
    other.rename(one)
    (out / "drafters" / "x").rename(other)


def forget_hashes(out: Path) -> None:
    """As runs were written before a cell's row kept its drafter's hash."""
    own = json.loads((out / "manifest.json").read_text())["config_hash"]
    for path in (out / "rows" / "cells").iterdir():
        shard = read_shard(path, owners=[own])
        assert shard is not None
        table = shard.table("cells").replace_schema_metadata(SCHEMAS["cells"].metadata)
        write_shard(path, shard.key, {"cells": table}, owner=own)


@pytest.mark.parametrize("hashes", [True, False])
def test_exchanged_drafters_are_trained_again(out: Path, hashes: bool) -> None:
    before = small.drafters(fresh(out))
    exchange(out)
    shutil.rmtree(out / "shards")
    if not hashes:
        forget_hashes(out)
    run(out)
    assert small.drafters(out) == before
    assert small.contents(out) == small.contents(done())


def test_a_drafter_of_another_training_is_not_the_cell_s(out: Path) -> None:
    """Whole, and of the same contract: only the stored hash tells."""
    before = small.drafters(fresh(out))
    folder = out / "drafters" / small.CELLS[0]
    other = load_drafter(folder)
    with torch.no_grad():
        other.norm.weight.mul_(2)
    save_drafter(other, folder, replace=True)
    run(out)
    assert small.drafters(out) == before
    assert small.contents(out) == small.contents(done())


def test_drafters_of_runs_without_hashes_are_kept(out: Path, patch: pytest.MonkeyPatch) -> None:
    fresh(out)
    forget_hashes(out)
    patch.setattr(cell, "train", forbidden)
    run(out)
    assert small.contents(out) == small.contents(done())


def test_folders_of_others_are_left_alone(out: Path) -> None:
    fresh(out)
    notes = out / "drafters" / ".git" / "none+pre_norm"
    notes.mkdir(parents=True)
    kept = [notes / "HEAD", out / ".notes.tmp", out / "drafters" / ".s0.abcdefgh" / "notes"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    run(out)
    assert [path.read_text() for path in kept] == ["mine"] * 3


def killed(out: Path, moment: Callable[[], bool]) -> None:
    """Run until ``moment``, then SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            run(out)
        finally:
            os._exit(0)
    while not moment():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before the moment came"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_run_that_is_killed_twice_ends_with_equal_tables(out: Path) -> None:
    trainings = out / "training"
    killed(out, lambda: trainings.exists() and any(trainings.glob("*.pt")))
    assert not (out / "steps.parquet").exists()
    first = out / "shards"
    killed(out, lambda: first.exists() and len(list(first.rglob("*.shard"))) >= 2)
    # What a kill inside a write leaves behind.
    staged = out / "drafters" / "none+pre_norm" / ".s0.abcdef_9"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(b"half")
    (out / "shards" / f".x.shard.{2**22 + 1}.1.tmp").write_bytes(b"half")
    run(out)
    assert small.contents(out) == small.contents(done())
    assert small.drafters(out) == small.drafters(done())
    assert small.leftovers(out) == []


def test_batches_do_not_depend_on_what_is_there(patch: pytest.MonkeyPatch, out: Path) -> None:
    """Texts of one batch are padded to the longest: its last bits depend on its members."""
    fresh(out)
    seen: list[int] = []
    plain = cell._probe_rows

    def count(*args: Any) -> Any:
        seen.append(len(args[3]))
        return plain(*args)

    patch.setattr(cell, "_probe_rows", count)
    next((out / "shards").rglob("*.shard")).unlink()
    run(out)
    assert seen == [6], "three prompts, two texts each"


# --- what a run is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["workers=3", "measure.bootstrap=60", "question=why", "train.checkpoint_every=3"]
)
def test_settings_that_move_no_row_may_change(out: Path, setting: str) -> None:
    fresh(out)
    found = run(out, setting)
    assert small.contents(out) == small.contents(done())
    assert found.manifest["config"] == small.spec(setting).model_dump(mode="json")


@pytest.mark.parametrize("setting", ["train.lr=1e-3", "threads=2", "text.seed=1", "seeds=[1]"])
def test_other_settings_are_another_run(setting: str) -> None:
    before = small.contents(done())
    with pytest.raises(RunError, match="already holds another run"):
        run(done(), setting)
    assert small.contents(done()) == before


def test_other_models_or_texts_are_another_run(out: Path) -> None:
    fresh(out)
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"]["target"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"other models or texts .*changed since: target"):
        run(out)
    assert small.contents(out) == small.contents(done())


def test_cells_are_named_apart() -> None:
    grown = small.spec(
        'axes.fusion_norm=["none", "per_layer", "concat"]',
        'axes.residual=["raw", "normed"]',
        "axes.attention_gate=[false, true]",
        "axes.ttt=[2, 3]",
        "seeds=[0, 1]",
    )
    names = [cell_name(grown, v, s) for v in variants(grown) for s in grown.seeds]
    assert len(names) == len(set(names)) == 3 * 2 * 2 * 2 * 2 * 2
    assert len({n.replace("/", "_") for n in names}) == len(names), "training checkpoints"
    assert all(".." not in n and not n.startswith("/") for n in names)


def test_scales_of_training_are_in_the_names_and_come_back_from_them() -> None:
    scaled = small.spec("axes.steps_scale=[0.5, 1, 2.25]", "axes.lr_scale=[0.25, 1]")
    made = variants(scaled)
    assert len({v.name for v in made}) == len(made) == 2 * 3 * 2
    for v in made:
        group = Group(
            *("", v.name, v.fusion_norm, v.feedback, v.residual, v.attention_gate, v.ttt),
            *("trained", ""),
        )
        assert (group.steps_scale, group.lr_scale) == (v.steps_scale, v.lr_scale)
        learning = v.training(scaled.train)
        assert learning.steps == {0.5: 2, 1: 4, 2.25: 9}[v.steps_scale]
        assert learning.lr == v.lr_scale * scaled.train.lr
    assert "none+pre_norm" in {v.name for v in made}, "the usual training has its usual name"
    with pytest.raises(ConfigError, match="six digits"):
        small.spec("axes.lr_scale=[0.33333333333]")


def test_merged_runs_name_the_level_that_one_of_them_left_to_its_training() -> None:
    plain = small.spec('axes.feedback=["pre_norm"]')
    half = small.spec('axes.feedback=["pre_norm"]', "axes.steps_scale=[0.5]")
    assert merge_room._union([plain, half], "both").axes.steps_scale == (0.5, 1.0)
    assert merge_room._union([plain, plain], "both").axes.steps_scale == ()


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_for_terminals(
    out: Path, patch: pytest.MonkeyPatch, terminal: bool, tmp_path: Path
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    patch.setattr(sys, "stderr", screen := Screen())
    run_experiment(small.spec('axes.feedback=["pre_norm"]'), out, cache=tmp_path)
    shown = screen.getvalue()
    labels = ("target learns", "texts to learn from", "states to measure on", "1 cell")
    assert [label for label in labels if (label in shown) is not terminal] == []
    assert terminal or not shown


# --- faults ---------------------------------------------------------------------------------------


def test_a_cell_that_fails_leaves_the_others(out: Path, patch: pytest.MonkeyPatch) -> None:
    plain = cell.train

    def diverge(drafter: Any, *args: Any, **options: Any) -> Any:
        if drafter.config.feedback == "post_norm":
            raise NumericsError("the training loss is not finite", got="inf")
        return plain(drafter, *args, **options)

    patch.setattr(cell, "train", diverge)
    said = r"1 of 2 cells failed: the training loss .*\[none\+post_norm/s0\]"
    with pytest.raises(RunError, match=said):
        run(out)
    assert small.status(out) == {
        "none+pre_norm/s0": "done",
        "none+post_norm/s0": "failed: the training loss is not finite (got inf)",
    }
    assert set(RunDirectory.open(out).steps["cell"]) == {"none+pre_norm/s0"}
    patch.setattr(cell, "train", plain)
    run(out)
    assert small.contents(out) == small.contents(done())


def test_a_state_that_is_not_finite_is_named(out: Path, patch: pytest.MonkeyPatch) -> None:
    plain = Features.item

    def spoiled(self: Features, index: int) -> Any:
        item = plain(self, index)
        if self.texts[index].kind == "greedy" and index == 1:
            item["aux"] = item["aux"].clone()
            item["aux"][3] = float("inf")
        return item

    patch.setattr(Features, "item", spoiled)
    with pytest.raises(RunError, match=r"2 of 2 cells failed: .* not finite at depth"):
        run(out)
    assert all(s.startswith("failed: ") for s in small.status(out).values())
    patch.setattr(Features, "item", plain)
    patch.setattr(cell, "train", forbidden)
    run(out)
    assert small.contents(out) == small.contents(done())


@pytest.mark.parametrize("what", ["shard", "drafter", "training"])
def test_a_full_disk_loses_nothing(out: Path, patch: pytest.MonkeyPatch, what: str) -> None:
    """The disk is full when the second file of a kind is to be written."""
    plain, count = os.replace, 0

    def full(source: Any, target: Any) -> None:
        nonlocal count
        name = str(target)
        kinds = {"shard": ".shard", "drafter": "/s0", "training": ".pt"}
        count += name.endswith(kinds[what])
        if count > 1:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        plain(source, target)

    patch.setattr(os, "replace", full)
    with pytest.raises(ResourceError, match="no space left"):
        run(out)
    patch.setattr(os, "replace", plain)
    run(out)
    assert small.contents(out) == small.contents(done())
    assert small.leftovers(out) == []


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (("target.boundaries=[0, 9]",), ContractError, "boundary 9 is outside 0..2"),
        (("text.max_new_tokens=5000",), ConfigError, "leave no room for a prompt"),
        (("measure.depth=24",), ConfigError, "needs texts of 25 new tokens .got 24 at most"),
        (("text.measure_prompts=held-out",), ConfigError, "no tokenizer"),
        (("drafter.draft_vocab_size=9000",), ConfigError, "9000 exceeds vocab_size 215"),
        (("drafter.num_heads=3",), ConfigError, "not a multiple of num_kv_heads"),
        (("drafter.hidden_size=32",), ConfigError, r"train\.head_init changes nothing: .*got 0.5"),
        (("target.source=nowhere",), Exception, "neither a folder"),
    ],
)
def test_a_run_that_cannot_begin_leaves_its_folder_free(
    out: Path, settings: tuple[str, ...], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        run(out, *settings)
    assert not out.exists()


def test_a_run_that_was_begun_is_kept(out: Path, patch: pytest.MonkeyPatch) -> None:
    fresh(out)
    patch.setattr(plan, "open_target", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(out)
    assert small.contents(out) == small.contents(done())


def test_strict_refuses_what_was_assumed(out: Path, patch: pytest.MonkeyPatch) -> None:
    run(fresh(out), strict=True)  # the embedded suite assumes nothing
    shutil.rmtree(out)
    plain = plan.open_target

    def assuming(*args: Any, **options: Any) -> Any:
        target = plain(*args, **options)
        eos = target.provenance["eos_ids"].model_copy(update={"origin": Origin.assumed})
        target.provenance["eos_ids"] = eos
        return target

    patch.setattr(plan, "open_target", assuming)
    with pytest.raises(AssumptionError, match="eos_ids"):
        run(out, strict=True)
    assert not out.exists()
    assert set(run(out).manifest["assumed"]) == {"target.eos_ids"}


def test_strict_refuses_what_a_drafter_takes_over_and_the_target_lacks(out: Path) -> None:
    """In the run that trains it, and in runs on the drafters of that run."""
    stated = vars(Anatomy)["shape"].fget
    lacking = property(lambda target: replace(stated(target), assumed=("norm_eps", "rope")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Anatomy, "shape", lacking)
        with pytest.raises(AssumptionError, match=r"2 value.s. were .*norm_eps.*drafter\.rope"):
            run(out, strict=True)
        assert not out.exists()
        assumed = run(out).manifest["assumed"]
    assert set(assumed) == {"drafter.norm_eps", "drafter.rope"}
    noisy = 'applied.conditions=[{name="noisy", interventions=[{kind="noise", alpha=0.5}]}]'
    on_them = (f"applied.drafters={json.dumps(str(out))}", noisy)
    later = small.home() / "on assuming drafters"
    with pytest.raises(AssumptionError, match=r"drafter\.norm_eps"):
        run(later, *on_them, strict=True)
    manifest = run(later, *on_them).manifest
    shutil.rmtree(later)
    assert manifest["assumed"] == assumed
    assert "drafter.hidden_size" in manifest["resolved"]


def test_a_second_owner_is_refused(out: Path) -> None:
    fresh(out)
    config = RunDirectory.open(out).manifest
    with RunDirectory.create(out, config), pytest.raises(RunError, match="in use by another"):
        run(out)


def test_a_damaged_embedded_target_is_made_again(tmp_path: Path) -> None:
    first = texts._micro_target(tmp_path, "")
    (path,) = (tmp_path / "targets").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:-9] + b"123456789", b""):
        path.write_bytes(damaged)
        assert texts._micro_target(tmp_path, "").fingerprint == first.fingerprint
        assert path.read_bytes() == whole


def test_code_of_another_checkout_is_not_taken_for_ours(patch: pytest.MonkeyPatch) -> None:
    state = experiment._git_state()
    assert state is None or len(state["commit"]) == 40
    patch.setattr(experiment, "__file__", str(done() / "driftlab" / "experiment" / "__init__.py"))
    assert experiment._git_state() is None


# --- real processes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigkill_of_the_group_at_random_moments(tmp_path: Path) -> None:
    """Processes that are started as a user starts them; reliability/kill.py has more moments.

    Every other time the embedded target, texts and states are made in the run, too.
    """
    rng = random.Random(0)
    out, command = tmp_path / "run", small.command(tmp_path / "run", "workers=2")
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - started
    for i in range(4):
        shutil.rmtree(out)
        if i % 2:
            shutil.rmtree(tmp_path / "cache")
        process = subprocess.Popen(
            command,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Importing takes the first third, drawing the last.
        time.sleep(rng.uniform(0.25, 0.9) * whole)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run(command, check=True, capture_output=True)
        assert small.contents(out) == small.contents(done())
        assert small.drafters(out) == small.drafters(done())
        assert small.leftovers(out) == []
        assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "said"), [("700k", "KiB free)"), ("1900k", "no space left")], ids=["seen", "met"]
)
def test_a_disk_that_is_really_full(tmp_path: Path, size: str, said: str) -> None:
    """Too small for the states, which is seen before they are written; or for the training."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        out = disk / "run"
        cut = subprocess.run(small.command(out), capture_output=True, text=True)
        assert cut.returncode == 2
        assert said in cut.stderr and "Traceback" not in cut.stderr
        subprocess.run(["mount", "-o", "remount,size=90m", str(disk)], check=True)
        subprocess.run(small.command(out), check=True, capture_output=True)
        assert small.contents(out) == small.contents(done())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
