"""Conditions on trained drafters: labelled, paired, resumed; each changes what it names only."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small

from driftlab.analysis.interventions import noise
from driftlab.config import Analysis, Axes, Experiment
from driftlab.data.features import FeatureStore
from driftlab.engines import cell
from driftlab.engines.habitat import PROMPTS, prompt_marks
from driftlab.errors import ConfigError, DataError, DriftlabError, RunError
from driftlab.experiment import applied as applied_room
from driftlab.experiment import plan, run_experiment
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.papers import committed
from driftlab.results.answers import answers
from driftlab.results.compare import compare, one_side
from driftlab.results.figures import FIGURES, sink_data
from driftlab.results.merge import merge
from driftlab.results.quantities import own_share
from driftlab.results.records import RunDirectory
from driftlab.results.registered import changed_since, registered
from driftlab.results.report import _figures, _headline, _texts
from driftlab.results.slices import TextKind, take, without_conditions
from driftlab.results.stats import estimate

CONDITIONS = """applied.conditions=[
 {name = "noisy", interventions = [{kind = "noise", alpha = 0.5}]},
 {name = "swapped", variants = ["none+pre_norm"],
  interventions = [{kind = "swap_norm", feedback = "post_norm"}]},
 {name = "bare", template = "never", bos = "never"},
 {name = "long", context = {tokens = 40}, interventions = [{kind = "window", size = 16}]},
 {name = "cool", temperature = 0.5},
 {name = "int4", quantize = "int4"},
 {name = "int4 own", quantize = "int4", writes = true}]""".replace("\n", "")
ANALYSIS = """analysis={primary = {measure = "accepted drafts", factor = "condition",
 levels = ["", "noisy"]}, family = [{measure = "forced accuracy", depth = 4,
 factor = "feedback", levels = ["pre_norm", "post_norm"]}]}""".replace("\n", "")
TRAINED = """analysis={primary = {measure = "accepted drafts", factor = "feedback",
 levels = ["pre_norm", "post_norm"]}}""".replace("\n", "")
NOISY = '{name="noisy", interventions=[{kind="noise", alpha=0.5}]}'
NAMES = ("noisy", "swapped", "bare", "long", "cool", "int4", "int4 own")


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with small.shrunk() as patch:
        yield patch


@cache
def applied() -> Path:
    """Conditions on the drafters of the shared small run, and agreement with the target."""
    with small.shrunk():
        out = small.home() / "applied"
        run_experiment(spec(), out, quiet=True)
    return out


def spec(*settings: str) -> Experiment:
    drafters = f"applied.drafters={json.dumps(str(small.home() / 'done'))}"
    return small.spec(
        *(drafters, 'applied.text="sampled"', CONDITIONS, ANALYSIS, "measure.agreement=true"),
        *settings,
    )


def steps(condition: str, variant: str = "none+pre_norm") -> pd.DataFrame:
    run = RunDirectory.open(applied())
    name = f"{variant}/s0" + (f"/{condition}" if condition else "")
    return run.steps[run.steps["cell"] == name].reset_index(drop=True)


def test_every_cell_says_what_it_is() -> None:
    cells = RunDirectory.open(applied()).cells.set_index("cell")
    assert set(cells["status"]) == {"done"}
    assert set(cells["condition"]) == {"", *NAMES}
    assert set(cells.loc[cells["condition"] == "", "axis"]) == {"trained"}
    assert set(cells.loc[cells["condition"] != "", "axis"]) == {"applied"}
    assert len(cells) == 2 + 2 * len(NAMES) - 1, "one condition is for one variant"
    assert (cells["train_steps"] == 4).all()


def test_the_unchanged_drafter_is_the_trained_one() -> None:
    there = RunDirectory.open(small.home() / "done").steps
    mine = there[(there["cell"] == small.CELLS[0]) & (there["text"] == "sampled")]
    pd.testing.assert_frame_equal(steps(""), mine.reset_index(drop=True))


def test_an_intervention_reads_the_same_text() -> None:
    plain, noisy = steps(""), steps("noisy")
    pd.testing.assert_series_equal(plain["truth"], noisy["truth"])
    assert not np.allclose(plain["logprob"], noisy["logprob"], atol=1e-3)


def test_a_changed_prompt_has_texts_of_its_own() -> None:
    run = RunDirectory.open(applied())
    texts: Any = run.table("texts").set_index(["condition", "prompt"])
    assert set(texts.index.unique("condition")) == {"bare", "long", "cool", "int4 own"}
    plain = run.prompts.set_index("prompt")
    for prompt in plain.index:
        assert texts.loc[("bare", prompt), "n_prompt"] == plain.loc[prompt, "n_prompt"] - 1
        assert texts.loc[("long", prompt), "n_prompt"] == plain.loc[prompt, "n_prompt"] + 40
    assert not texts.loc["bare", "bos"].any() and texts.loc["long", "bos"].all()
    assert texts.loc["cool", "temperature"].tolist() == pytest.approx([0.5] * 3)
    assert set(run.prompts["text"]) == {"sampled"}


def test_a_window_moves_the_mass_to_the_last_keys() -> None:
    long = steps("long")
    assert long["recent"].min() > 0.2 and (long["sink"] == 0).all()


def test_rounding_is_put_on_the_noise_scale() -> None:
    run = RunDirectory.open(applied())
    shift = run.table("shift")
    assert set(shift["cell"].str.split("/").str[-1]) == {"int4", "int4 own"}
    assert set(shift["place"]) == {"fuse.in.0", "fuse.in.1", "fuse.in.2", "fuse.out"}
    first = shift[shift["place"] == "fuse.in.0"]
    assert (first["alpha"] == 0).all(), "embeddings are not rounded"
    deep = shift[shift["place"] == "fuse.in.2"]
    assert deep["alpha"].between(0.01, 1).all()
    np.testing.assert_allclose(deep["alpha"], deep["rms_error"] / deep["rms"], rtol=0.3)
    pd.testing.assert_series_equal(steps("")["truth"], steps("int4")["truth"])


def test_agreement_lies_in_its_bounds_for_every_layer() -> None:
    found = RunDirectory.open(applied()).table("agreement")
    assert set(found["layer"]) == {0, 1} and set(found["cell"]) == set(small.CELLS)
    assert found["correlation"].between(-1, 1).all()
    assert found["divergence"].between(0, np.log(2)).all()


def test_a_finished_run_is_only_read_again(patch: pytest.MonkeyPatch) -> None:
    before = small.contents(applied())

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("this was done already")

    patch.setattr(cell, "probe", forbidden)
    run_experiment(spec(), applied(), quiet=True)
    assert small.contents(applied()) == before


def test_lost_shards_come_back_equal(tmp_path: Path) -> None:
    out = small.home() / "applied-again"
    shutil.copytree(applied(), out)
    for cell_name in ("noisy", "int4_own"):
        (folder,) = (out / "shards").glob(f"none_pre_norm_s0_{cell_name}-*")
        sorted(folder.iterdir())[0].unlink()
    run_experiment(spec(), out, quiet=True)
    assert small.contents(out) == small.contents(applied())
    shutil.rmtree(out)


def test_other_drafters_are_another_run(tmp_path: Path) -> None:
    out = small.home() / "applied-other"
    shutil.copytree(applied(), out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["drafters"]["sha256"]) == set(small.CELLS)
    manifest["inputs"]["drafters"][small.CELLS[0]] = "0" * 64
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="changed since: drafters"):
        run_experiment(spec(), out, quiet=True)
    shutil.rmtree(out)


def test_a_damaged_drafter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.copy("damaged-drafters")
    weights = run / "drafters" / small.CELLS[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-40] ^= 1
    weights.write_bytes(data)
    out = small.home() / "of-damaged"
    named = f"applied.drafters={json.dumps(str(run))}"
    with pytest.raises(RunError, match=r"none\+post_norm/s0 is not the one [^\n]*\nRun .*anew"):
        run_experiment(spec(named), out, quiet=True)
    assert not out.exists()
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (("applied.drafters=nowhere",), RunError, "neither .*nowhere nor nowhere is a run"),
        (("seeds=[0, 7]",), RunError, "lacks drafters .*seed 7"),
        (("train.steps=1",), ConfigError, r"train\.steps changes nothing: .*got 1, they"),
        (("drafter.num_heads=1",), ConfigError, r"drafter\.num_heads changes nothing"),
        *(
            ((setting, "text.measure_new_tokens=24"), ConfigError, f"text.{setting[5:9]}.* changes")
            for setting in (
                "text.train_tokens=99",
                "text.train_temperature=0.3",
                "text.train_prompts=train",
                "text.max_new_tokens=20",
            )
        ),
        (("axes.ttt=[1]",), ConfigError, r"axes\.ttt names what .* were not trained with .got 1"),
        (('applied.variants=["concat+pre_norm"]',), RunError, r"lacks drafters .*concat\+pre_norm"),
        (("target.boundaries=[0, 1, 1]",), RunError, "other boundaries"),
        (
            ('applied.conditions=[{name="x", interventions=[{kind="pim"}]}]',),
            ConfigError,
            "unknown intervention .*pim",
        ),
        (
            ('applied.conditions=[{name="x", interventions=[{kind="noise", beta=1}]}]',),
            ConfigError,
            "noise: unknown or missing .*beta, no alpha",
        ),
        (
            ('applied.conditions=[{name="x", temperature=1, variants=["none+none"]}]',),
            ConfigError,
            r"condition x names variants that are not there to be changed .*none\+none",
        ),
        *(
            ((f'applied.conditions=[{{name="x", interventions=[{{{one}}}]}}]',), ConfigError, said)
            for one, said in (
                (
                    'kind="drop_layer", layer=7',
                    "x does not fit none.post_norm: .*3 captured states",
                ),
                ('kind="drop_layer", layer=true', "layer must be a whole number"),
                ('kind="noise", alpha=1, seed=1.5', "seed must be a whole number"),
                ('kind="noise", alpha=true', "alpha must be a finite number"),
                ('kind="window", size=2.5', "size of a window must be a whole number"),
                ('kind="swap_norm", feedback="post_norm"', "x does not fit none.post_norm"),
                ('kind="knock_out_sink", positions=[500]', "changes nothing, a text of"),
                ('kind="window", size=400', "changes nothing, no text is longer"),
                ('kind="noise", alpha=0', "changes nothing, alpha is 0"),
            )
        ),
        *(
            (
                (f'applied.conditions=[{{name="x", {usual}}}]',),
                ConfigError,
                f"condition x changes nothing .got {said} auto, as they are without it",
            )
            for usual, said in (
                ('template="auto"', "template"),
                ('template="auto", bos="auto"', "template and bos"),
            )
        ),
        (
            (f"applied.conditions=[{NOISY[:-1]}, template='auto'}}, {NOISY.replace('sy', '')}]",),
            ConfigError,
            "the conditions noisy and noi are the same",
        ),
        (("measure.sink=[0, 500]",), ConfigError, "sink position 500 is not in every text"),
    ],
)
def test_a_run_that_cannot_begin_says_why(
    settings: tuple[str, ...], kind: type[Exception], said: str
) -> None:
    out = small.home() / "cannot"
    with pytest.raises(kind, match=said):
        run_experiment(spec(*settings, TRAINED), out, quiet=True)
    assert not out.exists()


def test_what_does_not_fit_is_found_before_a_text_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "write_corpus", lambda *_, **__: 1 / 0)
    layer = 'applied.conditions=[{name="x", interventions=[{kind="drop_layer", layer=7}]}]'
    filler = 'applied.conditions=[{name="x", context={tokens=9, filler="gone.txt"}}]'
    for one, said in (
        (small.spec(filler), "filler is not read"),
        (small.spec(layer), "3 captured states"),
        (spec(layer, TRAINED), "3 captured states"),
        (spec("target.boundaries=[0, 1, 1]", TRAINED), "read other boundaries"),
        (small.spec("drafter.draft_vocab_size=9000"), "draft_vocab_size 9000 exceeds"),
    ):
        with pytest.raises(DriftlabError, match=said):
            run_experiment(one, small.home() / "cannot", quiet=True)


def test_a_failed_condition_says_where_its_drafters_are(patch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no such change")

    patch.setattr(cell, "_probe_rows", fails)
    only = 'applied.conditions=[{name="pinned", interventions=[{kind="pin_norm"}]}]'
    with pytest.raises(RunError, match=r"another --out; applied.drafters=.*failed trains none"):
        run_experiment(small.spec(only), small.home() / "failed", quiet=True)


def test_shares_are_ratios_of_means() -> None:
    piece = take(RunDirectory.open(applied()).tables(), "free")
    changed = [g for g in piece.groups if g.condition]
    assert len(changed) == 2 * len(NAMES) - 1
    (group,) = [g for g in changed if (g.variant, g.condition) == ("none+pre_norm", "noisy")]
    share = estimate(own_share(piece, group)).value

    def drafts(condition: str) -> float:
        free = steps(condition)
        free = free[free["mode"] == "free"]
        rounds = free.query("depth == 1").groupby("prompt").size()
        return (free["accepted"].astype(float).groupby(free["prompt"]).sum() / rounds).mean()

    assert drafts("") > 0
    assert share == pytest.approx(drafts("noisy") / drafts(""), rel=1e-6)


def test_registered_comparisons_come_first() -> None:
    run = RunDirectory.open(applied())
    first, second = registered(run.tables())
    assert first.primary and first.contrast.levels == ("", "noisy")
    assert first.effect.value == pytest.approx(first.after.value - first.before.value)
    assert not second.primary and second.effect.n == 3
    assert run.manifest["registered"]["rows"] is False


def test_axes_that_nobody_named_are_not_asked_of_trained_drafters() -> None:
    """The default 2x2 is more than some runs trained."""
    held = RunDirectory.open(small.home() / "done")
    unnamed = small.spec().model_copy(update={"axes": Axes()})
    assert not set(unnamed.levels()["fusion_norm"]) <= set(small.spec().levels()["fusion_norm"])
    applied_room._refuse_idle(unnamed, held)


def test_the_length_of_measured_texts_is_no_setting_of_training() -> None:
    held = RunDirectory.open(small.home() / "done")
    applied_room._refuse_idle(small.spec("text.max_new_tokens=20"), held)
    unnamed = ("text.max_new_tokens=128", "text.measure_new_tokens=9")
    applied_room._refuse_idle(small.spec(*unnamed), held)


def test_a_report_says_which_texts_a_condition_of_another_temperature_has() -> None:
    page = _headline(RunDirectory.open(applied()).tables(), TextKind("sampled", 1.0), "x")
    assert "none+pre_norm, cool (applied), on sampled text (temperature 0.5)" in page
    assert "none+pre_norm, noisy (applied)<" in page
    assert (
        "3 prompts x 1 seed; bare, int4 own, long on sampled text (temperature 1) of its own; "
        in (page)
    )
    assert "own; cool on sampled text (temperature 0.5); brackets" in page


def test_numbers_of_a_condition_name_its_texts() -> None:
    tables = RunDirectory.open(applied()).tables()
    own = "; cool on sampled text (temperature 0.5)"
    for answer in answers(tables):
        assert (own in answer.basis) == answer.question.startswith("What does cool leave")
    (_, *left), (first, _) = answers(tables)[1:], registered(tables)
    assert len(left) == len(NAMES)
    assert first.basis == next(a.basis for a in left if "noisy" in a.question)
    piece = take(tables, "free")
    cool = next(g for g in piece.groups if g.condition == "cool")
    assert piece.basis_of([cool]).endswith(own)
    drawn = sink_data(tables).groupby("variant")["text"].unique()
    assert drawn[cool.label].tolist() == ["sampled text (temperature 0.5)"]
    assert drawn["none+pre_norm"].tolist() == ["sampled text (temperature 1)"]


def test_what_a_changed_drafter_fuses_of_a_rounded_target(tmp_path: Path) -> None:
    """The noise scale of a condition is that of the drafter that it measures."""
    swap = '[{kind = "swap_norm", fusion_norm = "per_layer"}]'
    conditions = f"""applied.conditions=[{{name = "swapped", interventions = {swap}}},
 {{name = "int4", quantize = "int4"}},
 {{name = "both", quantize = "int4", interventions = {swap}}}]"""
    chosen = 'applied.variants=["none+pre_norm"]'
    asked = spec(ANALYSIS.replace("noisy", "both"), conditions.replace("\n", ""), chosen)
    run = run_experiment(asked, tmp_path / "r", quiet=True)
    shift, rows = run.table("shift"), run.steps[run.steps["depth"] == 1]
    read = rows[rows["mode"] == "free"].groupby(["cell", "prompt"])["rms_input"].mean()
    out = shift[shift["place"] == "fuse.out"].set_index(["cell", "prompt"])["rms"]
    for prompt in run.prompts["prompt"]:
        for condition, unrounded in (("both", "/swapped"), ("int4", "")):
            there = out[f"none+pre_norm/s0/{condition}", prompt]
            assert there == pytest.approx(read[f"none+pre_norm/s0{unrounded}", prompt], rel=1e-5)


def test_a_filler_that_is_not_read_is_refused(tmp_path: Path) -> None:
    condition = 'applied.conditions=[{name = "f", context = {tokens = 9, filler = "no.txt"}}]'
    asked = spec(ANALYSIS.replace("noisy", "f"), condition)
    with pytest.raises(ConfigError, match=r"context.filler is not read.*\(got no.txt\)"):
        run_experiment(asked, tmp_path / "r", quiet=True)


def test_a_condition_whose_texts_are_the_runs_own_is_told_of() -> None:
    """As of a series of temperatures the one that the base samples at anyway."""
    made = '{name="same", temperature=1.0}, {name="cool", temperature=0.5}, {name="s", system=""}'
    asked = small.spec('applied.text="sampled"', f"applied.conditions=[{made}]")
    run = run_experiment(asked, small.home() / "series", quiet=True)
    assert run.manifest["warnings"] == [
        "condition same changes nothing here: its texts are those of the unchanged drafter",
        "condition s changes nothing here: its texts are those of the unchanged drafter",
    ]
    assert "warnings" not in RunDirectory.open(applied()).manifest


def test_variants_choose_among_the_drafters_that_the_run_trains() -> None:
    pinned = '{name="pinned", interventions=[{kind="pin_norm"}]'
    for settings, said in (
        (('applied.variants=["none"]',), r"applied.variants names .* \(got none\)"),
        (
            (
                'applied.variants=["none+pre_norm"]',
                f'applied.conditions=[{pinned}, variants=["none+post_norm"]}}]',
            ),
            r"condition pinned names .* \(got none\+post_norm\)\nThere are: none\+pre_norm\.",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            run_experiment(small.spec(*settings), small.home() / "cannot", quiet=True)
    chosen = ('applied.variants=["none+post_norm"]', f"applied.conditions=[{pinned}}}]")
    run = run_experiment(small.spec(*chosen), small.home() / "chosen", quiet=True)
    assert sorted(run.cells["cell"]) == sorted([*small.CELLS, "none+post_norm/s0/pinned"])


def test_prompts_that_given_drafters_learned_from_are_told_of(
    patch: pytest.MonkeyPatch,
) -> None:
    run = small.copy("learned from")
    key = RunDirectory.open(run).manifest["inputs"]["measure_states"]
    measured = FeatureStore(small.home() / "cache" / "states").open(key).texts
    learned = {"count": 3, "sha256": sorted(prompt_marks(measured))}
    for name in small.CELLS:
        drafter = load_drafter(run / "drafters" / name)
        assert drafter.provenance[PROMPTS].value["count"] == 8
        drafter.provenance[PROMPTS] = drafter.provenance[PROMPTS].model_copy(
            update={"value": learned}
        )
        save_drafter(drafter, run / "drafters" / name, replace=True)
    patch.setattr(RunDirectory, "drafter_of", lambda *_: None)  # else they are others
    asked = small.spec(f"applied.drafters={json.dumps(str(run))}", f"applied.conditions=[{NOISY}]")
    out = small.home() / "known"
    said = "3 of 3 measured prompts were also learned from"
    with pytest.raises(DataError, match=said):
        run_experiment(asked, out, quiet=True, strict=True)
    done = run_experiment(asked, out, quiet=True)
    assert done.manifest["warnings"] == [f"{said}: what is measured on them is no held-out number"]


def test_own_drafters_may_be_changed_in_the_run_that_trains_them() -> None:
    out = small.home() / "own"
    only = 'applied.conditions=[{name="pinned", interventions=[{kind="pin_norm"}]}]'
    run = run_experiment(small.spec(only), out, quiet=True)
    assert sorted(run.cells["cell"]) == sorted(
        [*small.CELLS, *(f"{name}/pinned" for name in small.CELLS)]
    )
    plain = run.steps[run.steps["cell"] == small.CELLS[0]]
    there = RunDirectory.open(small.home() / "done").steps
    there = there[there["cell"] == small.CELLS[0]]
    pd.testing.assert_frame_equal(plain.reset_index(drop=True), there.reset_index(drop=True))


# --- merging --------------------------------------------------------------------------------------


def test_two_seeds_merged_are_one_run_of_two_seeds() -> None:
    other = small.home() / "second"
    run_experiment(small.spec("seeds=[1]"), other, quiet=True)
    both = small.home() / "both"
    run_experiment(small.spec("seeds=[0, 1]"), both, quiet=True)
    merged = small.home() / "micro"  # the experiment's name, so that it is the run of that file
    merge([small.home() / "done", other], merged)
    assert small.contents(merged) == small.contents(both)
    assert small.drafters(merged) == small.drafters(both)
    again = run_experiment(small.spec("seeds=[0, 1]"), merged, quiet=True)
    assert small.contents(merged) == small.contents(both)
    assert len(again.manifest["merged"]) == 2


def test_unlike_runs_are_not_merged() -> None:
    other = small.home() / "unlike"
    run_experiment(small.spec("seeds=[1]", "measure.depth=3"), other, quiet=True)
    done = small.home() / "done"
    with pytest.raises(RunError, match=r"no parts of one run .*measure.depth: 4 and 3") as error:
        merge([done, other], small.home() / "never")
    assert "name, seeds, axes, question," in str(error.value.remedy)
    probed = copied("probed", "done")
    stored = json.loads((probed / "manifest.json").read_text())
    del stored["config"]["axes"]
    (probed / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(RunError, match="probed is a probe's run") as error:
        merge([done, probed], small.home() / "never")
    assert "beside" in str(error.value.remedy)
    with pytest.raises(RunError, match="both hold the cell none"):
        merge([done, done], small.home() / "never")
    with pytest.raises(RunError, match="two runs or more"):
        merge([done], small.home() / "never")
    assert not (small.home() / "never").exists()


def test_a_merge_names_the_drafters_of_all_its_runs(tmp_path: Path) -> None:
    """And so it is the run of an experiment on drafters that were merged before."""
    trained = small.home() / "seed 1"
    run_experiment(small.spec("seeds=[1]", 'name="seed-1"'), trained, quiet=True)
    noisy = f"applied.conditions=[{NOISY}]"
    parts = []
    for seed, run in enumerate((small.home() / "done", trained)):
        asked = spec(f"seeds=[{seed}]", f"applied.drafters={json.dumps(str(run))}", noisy)
        parts.append(run_experiment(asked, small.home() / f"noisy {seed}", quiet=True))
    merged = merge([part.path for part in parts], small.home() / "noisy").manifest
    names = {"none+pre_norm/s0", "none+post_norm/s0", "none+pre_norm/s1", "none+post_norm/s1"}
    assert set(merged["inputs"]["drafters"]) == names
    assert merged["drafters"]["sha256"] == merged["inputs"]["drafters"]
    assert merged["drafters"]["run"] == "micro, seed-1"
    assert merged["conditions"]["noisy"]["drafters"] == 4
    beside = compare(f"{parts[0].path}:none+pre_norm", f"{small.home() / 'noisy'}:none+pre_norm")
    assert any("(A), micro, seed-1 (B)" in line for line in beside.differences)
    both = merge([small.home() / "done", trained], small.home() / "drafters of both").path
    again = spec("seeds=[0, 1]", f"applied.drafters={json.dumps(str(both))}", noisy)
    again = again.model_copy(update={"name": "noisy"})
    done = run_experiment(again, small.home() / "noisy", quiet=True)
    assert set(done.cells["status"]) == {"done"}


def copied(name: str, source: str, **changes: Any) -> Path:
    """A run of ``source`` with another manifest."""
    path = small.home() / name
    shutil.copytree(small.home() / source, path)
    stored = json.loads((path / "manifest.json").read_text())
    stored["config"] |= changes.pop("config", {})
    (path / "manifest.json").write_text(json.dumps({**stored, **changes}))
    return path


def test_runs_made_anew_are_not_merged_into_the_old_rows() -> None:
    """Their settings are the same: the rows, or the models and texts, are not."""
    other = small.home() / "anew"
    run_experiment(small.spec("seeds=[1]"), other, quiet=True)
    merged = small.home() / "merged-anew"
    merge([small.home() / "done", other], merged)
    before = small.contents(merged)
    next(merged.rglob("*.shard")).unlink()
    merge([small.home() / "done", other], merged)
    assert small.contents(merged) == before, "a merge that was killed goes on"
    target = {**RunDirectory.open(other).manifest["inputs"], "target": "f" * 64}
    retargeted = [copied(f"target {i}", n, inputs=target) for i, n in enumerate(("done", "anew"))]
    manifest = (merged / "manifest.json").read_bytes()
    with pytest.raises(RunError, match=r"runs of other models or texts .got changed since: target"):
        merge(retargeted, merged)
    shard = next((merged / "shards").rglob("*.shard"))
    kept = shard.read_bytes()
    shard.write_bytes((small.home() / "done" / "rows" / "prompts.shard").read_bytes())
    with pytest.raises(RunError, match=r"other rows .got shards/.*now differs") as error:
        merge([small.home() / "done", other], merged)
    assert error.value.remedy
    shard.write_bytes(kept)
    shutil.copy(shard, stray := shard.with_stem("stray"))
    with pytest.raises(RunError, match=r"other rows .got shards/.*none of the runs holds"):
        merge([small.home() / "done", other], merged)
    stray.unlink()
    assert (merged / "manifest.json").read_bytes() == manifest
    assert small.contents(merged) == before


@pytest.mark.parametrize("lost", ["shards/*/*.shard", "rows/cells/*.shard", "rows/prompts.shard"])
def test_a_run_that_lacks_pieces_is_not_merged(lost: str) -> None:
    """Its tables are whole: what is merged comes of its pieces."""
    other = small.home() / "of seed 1"
    run_experiment(small.spec("seeds=[1]"), other, quiet=True)
    part = copied(f"lacks {Path(lost).parent.name}", "done")
    piece = next(part.glob(lost))
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(RunError, match=f"of {re.escape(str(part))} are damaged"):
        merge([part, other], small.home() / "never")
    piece.unlink()
    with pytest.raises(RunError, match=f"pieces of {re.escape(str(part))} are not those"):
        merge([part, other], small.home() / "never")
    assert not (small.home() / "never").exists()


def test_a_merged_run_says_what_its_parts_say() -> None:
    run_experiment(small.spec("seeds=[1]"), other := small.home() / "said", quiet=True)
    analysis = Analysis.model_validate(
        {
            "primary": {
                "measure": "accepted drafts",
                "factor": "feedback",
                "levels": ["pre_norm", "post_norm"],
            }
        }
    ).model_dump(mode="json")
    fixed = {"config": {"analysis": analysis}, "warnings": ["once", "twice"]}
    early = {"analysis": analysis, "rows": False}
    a = copied("early", "done", **copy.deepcopy(fixed), registered=early)
    again: dict[str, Any] = {"registered": {**early, "rows": True}}
    again["resumed"] = [{"time": "T", "git": None}]
    read = RunDirectory.open(other).manifest["resolved"]
    guessed = {"target.attention": {**read["target.attention"], "origin": "assumed"}}
    again |= {"assumed": guessed, "resolved": {**read, **guessed}}
    late = copied("late", "said", **copy.deepcopy(fixed), **again)
    with pytest.raises(RunError, match=r"registered other comparisons .got accepted drafts by fee"):
        merge([a, other], small.home() / "never")
    merged = merge([a, late], small.home() / "two")
    assert changed_since(merged.tables()) == "some rows were there when the comparisons were fixed"
    assert merged.manifest["precision"] == RunDirectory.open(a).manifest["precision"]
    assert merged.manifest["supervised"] == RunDirectory.open(a).manifest["supervised"]
    assert merged.manifest["warnings"] == ["once", "twice"]
    assert [m["registered"]["rows"] for m in merged.manifest["merged"]] == [False, True]
    assert merged.manifest["merged"][1]["resumed"] == again["resumed"]
    assert all(m["hardware"] for m in merged.manifest["merged"])
    assert merged.manifest["assumed"] == guessed
    assert merged.manifest["resolved"] == again["resolved"]
    eager = {**read, "target.attention": {**read["target.attention"], "value": "eager"}}
    moved_target = copied("resolved", "late", resolved=eager)
    with pytest.raises(RunError, match=r"got resolved.target.attention: sdpa and eager"):
        merge([a, moved_target], small.home() / "never")
    moved = {"analysis": {"primary": None}, "rows": False}
    other_way = copied("moved", "said", **copy.deepcopy(fixed), registered=moved)
    merged = merge([a, other_way], small.home() / "three")
    assert "changed after the run began" in changed_since(merged.tables())


def test_conditions_are_compared_on_the_texts_that_they_were_measured_on() -> None:
    run = str(applied())
    plain = f"{run}:{small.CELLS[0]}"
    with pytest.raises(RunError, match=r"no kind of text .*s0/cool: sampled text .temperature 0.5"):
        compare(plain, f"{plain}/cool")
    with pytest.raises(RunError, match="text of 3 of 3 prompts") as error:
        compare(plain, f"{plain}/bare")
    assert f"{plain} and {plain}/bare are not alike" in str(error.value)
    noisy = compare(plain, f"{plain}/noisy")
    assert noisy.basis.startswith("sampled text (temperature 1), 3 prompts x 1 seed")
    assert not any(row.shown for row in noisy.rows)
    cool = compare(f"{plain}/cool", f"{run}:{small.CELLS[1]}/cool")
    assert cool.basis.startswith("sampled text (temperature 0.5), 3 prompts x 1 seed")
    with pytest.raises(RunError, match="no greedy text is in both runs"):
        compare(f"{plain}/cool", f"{run}:{small.CELLS[1]}/cool", kind="greedy")
    side, kind, _ = one_side(f"{plain}/cool", None)
    assert (side.group.condition, str(kind)) == ("cool", "sampled text (temperature 0.5)")
    assert str(one_side(plain, None)[1]) == "sampled text (temperature 1)"


def test_noise_is_the_same_object_either_way() -> None:
    assert cell.from_settings({"kind": "noise", "alpha": 0.5}) == noise(0.5)


def test_a_loop_is_left_out_of_the_condition_that_it_is_in() -> None:
    tables = RunDirectory.open(applied()).tables()
    texts = tables.extra["texts"].copy()
    prompt = str(texts["prompt"].iloc[0])
    plain = np.isfinite(take(tables, "free").cube("n")[..., 0]).sum()
    texts["loops"] = (texts["condition"] == "bare") & (texts["prompt"] == prompt)
    looping = replace(tables, extra={**tables.extra, "texts": texts}, cache={})
    piece = take(looping, "free")
    assert (piece.texts[""].left_out, piece.texts["bare"].left_out) == (0, 1)
    assert piece.over(piece.groups).startswith("sampled text (temperature 1), 3 prompts x 1 seed; ")
    own = "bare on sampled text (temperature 1) of its own, 2 prompts, 1 looping text left out"
    assert f"; {own}" in piece.basis
    (told,) = (a for a in answers(looping) if a.question.startswith("What does bare leave"))
    assert told.basis.endswith("left out; paired over 2 prompts x 1 seed")
    page = " ".join(_texts(looping).split())
    assert "texts loop. Looping text" in page and f"{prompt} (sampled, bare)" in page
    row = _headline(looping, TextKind("sampled", 1.0), "x")
    assert "bare (applied), on sampled text (temperature 1) of its own, 2 prompts, 1 " in row
    for group in piece.groups:
        there = np.isfinite(piece.at(group, "n", 1))[0, piece.prompts.index(prompt)]
        assert there == (group.condition != "bare"), group.label
    left = np.isfinite(piece.cube("n")[..., 0]).sum()
    assert left == plain - 2, "one text, two drafters"


def test_figures_show_the_drafters_without_conditions() -> None:
    tables = RunDirectory.open(applied()).tables()
    plain = without_conditions(tables)
    assert set(plain.cells["condition"]) == {""} and set(plain.depths["cell"]) == set(small.CELLS)
    other = RunDirectory.open(small.home() / "done").tables()
    assert without_conditions(other) is other


def test_what_is_published_keeps_the_conditions_own_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which texts loop and at which temperature stands in a table that only such runs have."""
    monkeypatch.setattr(committed, "save_figures", lambda run, out: {})
    item = committed.publish(applied(), tmp_path / "item")
    kept, own = RunDirectory.open(item / "tables"), RunDirectory.open(applied())
    pd.testing.assert_frame_equal(kept.tables().extra["texts"], own.tables().extra["texts"])
    assert committed.changed_tables(kept) == []
    (item / "tables" / "texts.parquet").unlink()
    assert committed.changed_tables(kept) == ["texts.parquet (missing)"]


def test_a_reduced_run_answers_as_the_run_does(tmp_path: Path) -> None:
    """Rows of a condition of another temperature count by its texts, greedy ones too."""
    run = RunDirectory.open(applied())
    tables = run.tables()
    texts = tables.extra["texts"].astype({"text": str})
    texts.loc[texts["condition"] == "cool", "text"] = "greedy"
    texts.loc[texts["condition"] == "cool", "temperature"] = 0.0
    depths = tables.depths.astype({"text": str})
    depths.loc[depths["cell"].astype(str).str.endswith("/cool"), "text"] = "greedy"
    shutil.copytree(run.path, tmp_path / "run")
    for name, frame in (("texts", texts), ("depths", depths)):
        schema = pq.read_schema(run.path / f"{name}.parquet")
        table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
        pq.write_table(table, tmp_path / "run" / f"{name}.parquet")
    manifest = json.loads((run.path / "manifest.json").read_text())
    for name in ("texts", "depths"):
        file = tmp_path / "run" / f"{name}.parquet"
        manifest["tables"][name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    whole = RunDirectory.open(tmp_path / "run")
    committed.reduce(whole, tmp_path / "kept")
    kept = RunDirectory.open(tmp_path / "kept")
    told = [[a for a in answers(r.tables()) if "cool" in a.question] for r in (whole, kept)]
    assert len(told[0]) == len(told[1]) == 1
    assert "cool, on greedy text: share" in told[0][0].sentence
    assert told[0][0].basis == told[1][0].basis
    for one, other in zip(*(t[0].estimates.values() for t in told), strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-3) and one.n == other.n


def test_captions_are_of_what_is_drawn() -> None:
    """Figures of a run with conditions show the unchanged drafters; so do their captions."""
    tables = RunDirectory.open(applied()).tables()
    drawn = without_conditions(tables)
    page = _figures(tables, {})
    for name in ("sink_by_depth", "forced_accuracy"):
        assert escape(FIGURES[name].caption(FIGURES[name].data(drawn, None))) in page
    assert "temperature 0.5" not in page


def test_the_levels_of_a_comparison_are_over_the_prompts_of_its_effect() -> None:
    """Else a prompt that loops on one side moves that side's level and not the difference."""
    tables = RunDirectory.open(applied()).tables()
    texts = tables.extra["texts"].copy()
    prompt = str(texts["prompt"].iloc[0])
    texts["loops"] = (texts["condition"] == "bare") & (texts["prompt"] == prompt)
    contrast = {"measure": "accepted drafts", "factor": "condition", "levels": ["", "bare"]}
    config = tables.manifest["config"] | {"analysis": {"primary": contrast, "family": []}}
    looping = replace(
        tables,
        extra={**tables.extra, "texts": texts},
        manifest={**tables.manifest, "config": config},
        cache={},
    )
    (one,) = registered(looping)
    assert one.before.n == one.after.n == one.effect.n == 2
    assert one.effect.value == pytest.approx(one.after.value - one.before.value)
