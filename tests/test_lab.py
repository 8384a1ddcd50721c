"""The Python interface: open, probe, hook, intervene, speculate, store, load."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes

import driftlab
from driftlab.analysis.attribution import shapley
from driftlab.analysis.interventions import knock_out_sink, noise, pin_norm, swap_norm
from driftlab.config import DrafterConfig, ExplainSpec, Origin, Sourced
from driftlab.data.grammar import VOCABULARY, WordTokenizer, stories
from driftlab.data.prompts import Prompt, Rendering
from driftlab.engines import habitat
from driftlab.engines.anchors import unroll
from driftlab.errors import (
    AssumptionError,
    ConfigError,
    ContractError,
    DataError,
    RunError,
    SiteError,
)
from driftlab.experiment import texts
from driftlab.experiment.texts import find_prompts
from driftlab.lab import Lab, ProbeRun
from driftlab.models.checkpoints import save_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Moment
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama
from driftlab.results.answers import answers, basis
from driftlab.results.compare import compare
from driftlab.results.figures import sink_data
from driftlab.results.schema import SCHEMAS

WORDS = len(VOCABULARY)
PROMPTS = ["once upon a time there", "one morning the", "once upon a time"]
SETTINGS: dict[str, Any] = {"depth": 3, "max_new_tokens": 12, "temperature": 1.0}
TABLES = ("steps", "depths", "heads", "fused", "prompts", "cells")


def make_target(hidden_size: int = 16) -> Target:
    model = tiny_llama(
        vocab_size=WORDS, hidden_size=hidden_size, layers=3, heads=2, kv_heads=1, max_position=64
    )
    return Target.from_model(model, WordTokenizer(), name="words", eos_ids=())


def make_drafter(**changes: Any) -> Drafter:
    """Random, for half of the words."""
    fields: dict[str, Any] = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "vocab_size": WORDS,
        "draft_vocab_size": WORDS // 2,
        "boundaries": (0, 1, 3),
    }
    config = DrafterConfig(**fields | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Drafter(config, torch.arange(0, WORDS, 2)[: config.draft_vocab_size])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return driftlab.open(make_target(), make_drafter(), cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def plain(lab: Lab) -> ProbeRun:
    return lab.probe(PROMPTS, **SETTINGS)


@pytest.fixture(autouse=True)
def _no_figures_left() -> Iterator[None]:
    yield
    plt.close("all")


# -- the package


def test_the_package_names_its_interface() -> None:
    assert {"open", "load_run", "__version__"} <= set(dir(driftlab))
    assert driftlab.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="'driftlab' has no attribute 'opne'"):
        getattr(driftlab, "opne")  # noqa: B009


def test_importing_is_quick_and_a_stored_run_needs_no_torch(
    plain: ProbeRun, tmp_path: Path
) -> None:
    plain.save(tmp_path / "run")
    code = (
        "import sys, time; t = time.process_time(); import driftlab; "
        "print(time.process_time() - t); "
        f"run = driftlab.load_run({str(tmp_path / 'run')!r}); run.steps; "
        "run.plot.sink_by_depth(); print('torch' in sys.modules)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 110
    seconds, torch_loaded = done.stdout.split()
    assert float(seconds) < 0.3
    assert torch_loaded == "False"


# -- open


def test_a_probe_tells_of_prompts_that_the_drafter_learned_from(lab: Lab) -> None:
    marks = sorted(habitat.prompt_marks(lab.states(PROMPTS[:1], max_new_tokens=12).texts))
    drafter = make_drafter()
    drafter.provenance[habitat.PROMPTS] = Sourced(
        value={"count": 1, "sha256": marks}, origin=Origin.derived, where="the drafter's training"
    )
    known = driftlab.open(lab.target, drafter, cache=lab.cache).probe(PROMPTS, **SETTINGS)
    (said,) = known.manifest["differs"]
    assert said.startswith("1 of 3 measured prompts were also learned from: ")


def test_a_stored_drafter_is_opened_and_measures_alike(
    lab: Lab, plain: ProbeRun, tmp_path: Path
) -> None:
    save_drafter(lab.drafter, tmp_path / "drafter")
    again = driftlab.open(lab.target, str(tmp_path / "drafter"), cache=lab.cache)
    run = again.probe(PROMPTS, **SETTINGS)
    pd.testing.assert_frame_equal(run.steps, plain.steps)
    assert run.cells["note"][0] == f"drafter {tmp_path / 'drafter'}"


def test_micro_is_trained_once_for_each_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MICRO_STORIES", 30)
    monkeypatch.setattr(texts, "MICRO_STEPS", 2)
    drafter = make_drafter(
        hidden_size=64, target_hidden_size=64, boundaries=(0, 1, 2), draft_vocab_size=WORDS // 2
    )
    first = driftlab.open("micro", drafter, cache=tmp_path)
    (file,) = (tmp_path / "targets").iterdir()
    made = file.stat().st_mtime_ns
    second = driftlab.open("micro", drafter, cache=tmp_path)
    assert file.stat().st_mtime_ns == made
    assert second.target.fingerprint == first.target.fingerprint
    run = second.probe("micro", depth=2, limit=2, max_new_tokens=6)
    assert run.prompts["prompt"].tolist() == ["story-000", "story-032"]
    assert second.decode(second.speculate("once upon a time", max_new_tokens=3, depth=2).tokens)
    with pytest.raises(ConfigError, match="dtype"):
        driftlab.open("micro", drafter, dtype="bfloat16", cache=tmp_path)


def test_a_pair_that_does_not_belong_together(lab: Lab) -> None:
    with pytest.raises(ContractError, match="width 32"):
        driftlab.open(make_target(32), lab.drafter)
    with pytest.raises(ContractError, match="boundary 4"):
        driftlab.open(lab.target, make_drafter(boundaries=(0, 1, 4)))
    with pytest.raises(ConfigError, match="words and float16"):
        driftlab.open(lab.target, lab.drafter, dtype="float16")


def test_strict_refuses_what_was_assumed(lab: Lab) -> None:
    drafter = make_drafter()
    drafter.provenance["boundaries"] = Sourced(
        value=(0, 1, 3), origin=Origin.assumed, where="nothing said"
    )
    relaxed = driftlab.open(lab.target, drafter)
    assert relaxed.contract["drafter.boundaries"].origin is Origin.assumed
    assert "1 assumed" in relaxed._repr_html_()
    assert "background" in relaxed._repr_html_()
    with pytest.raises(AssumptionError, match="boundaries"):
        driftlab.open(lab.target, drafter, strict=True)
    driftlab.open(lab.target, lab.drafter, strict=True)


def test_it_shows_contract_sites_and_sizes(lab: Lab) -> None:
    assert "background" not in lab._repr_html_()
    for shown in (repr(lab), lab._repr_html_()):
        for wanted in ("none+pre_norm", "drafter.feedback", "state.post", "target.eos_ids"):
            assert wanted in shown
        assert f"{lab.sizes['drafter parameters']:,}" in shown
    numbers = {n: p.numel() for n, p in lab.drafter.named_parameters()}
    assert lab.sizes["drafter parameters"] == sum(numbers.values())
    assert lab.sizes["drafter cache, bytes a token"] == 2 * 1 * 8 * 4  # k and v, head, width, fp32


# -- probe


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_the_columns_of_a_stored_run(name: str, plain: ProbeRun) -> None:
    frame = getattr(plain, name)
    assert list(frame.columns) == SCHEMAS[name].names
    assert len(frame) > 0


def test_the_text_is_the_targets_and_the_rows_are_the_engines(lab: Lab, plain: ProbeRun) -> None:
    features = lab.states(PROMPTS, temperature=1.0, max_new_tokens=12)
    assert [t.prompt_id for t in features.texts] == ["prompt-000", "prompt-001", "prompt-002"]
    item = features.item(1)
    assert lab.decode(item["tokens"]).startswith("<bos> one morning the ")
    assert len(item["tokens"]) == 4 + 12
    with torch.no_grad():
        steps = list(
            unroll(lab.drafter, item["tokens"][None], item["aux"][None], depth=3, mode="free")
        )
    rows = plain.steps[(plain.steps["prompt"] == "prompt-001") & (plain.steps["mode"] == "free")]
    assert rows["anchor"].min() == 3  # the newest token is the first generated one
    for row in rows.to_dict("records"):
        step = steps[row["depth"] - 1]
        assert row["draft"] == int(step.draft[0, row["anchor"]])
        assert row["truth"] == int(item["tokens"][row["anchor"] + 1 + row["depth"]])
        size = float(step.state.pre[0, row["anchor"]].pow(2).mean().sqrt())
        assert row["rms_state_pre"] == pytest.approx(size, rel=1e-4)


def test_what_a_draft_cannot_name_has_no_logprob(lab: Lab, plain: ProbeRun) -> None:
    steps = plain.steps
    named = lab.drafter.target_to_draft[torch.tensor(steps["truth"])] >= 0
    assert steps["in_vocab"].tolist() == named.tolist()
    assert 0 < int(named.sum()) < len(steps)
    assert steps["logprob"].notna().tolist() == named.tolist()
    assert steps["rank"].notna().tolist() == named.tolist()


def test_both_kinds_of_text_stand_side_by_side(lab: Lab) -> None:
    run = lab.probe(PROMPTS, **{**SETTINGS, "temperature": (0.0, 1.0), "modes": ["forced"]})
    assert sorted(set(run.steps["text"])) == ["greedy", "sampled"]
    assert set(run.steps["mode"]) == {"forced"}
    assert len(run.prompts) == 2 * len(PROMPTS)
    (source,) = lab._sources(PROMPTS[:1], texts.RENDERING, 0)
    text = lab.states(PROMPTS[:1], max_new_tokens=12).texts[0]
    assert list(text.continuation) == lab.target.generate([source.tokens], max_new_tokens=12)[0]


def test_shapley_is_filled_when_asked(lab: Lab, plain: ProbeRun) -> None:
    assert plain.fused["shapley"].isna().all()
    run = lab.probe(PROMPTS, **SETTINGS, shapley=True)
    item = lab.states(PROMPTS, temperature=1.0, max_new_tokens=12).item(1)
    mine = run.steps[run.steps["prompt"] == "prompt-001"]
    anchors = torch.tensor(sorted(set(mine["anchor"])))
    wanted = shapley(lab.drafter, item["tokens"], item["aux"], anchors=anchors).mean()[:, 0]
    found = run.fused[run.fused["prompt"] == "prompt-001"]
    np.testing.assert_allclose(found["shapley"], wanted, rtol=1e-4, atol=1e-6)
    kept = [c for c in run.fused.columns if c != "shapley"]
    pd.testing.assert_frame_equal(run.fused[kept], plain.fused[kept])


def test_prompts_come_as_text_objects_or_a_file(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"id": "a", "prompt": "once upon a time"}\n{"id": "b", "text": "one morning"}\n'
    )
    assert lab.states(file, max_new_tokens=4).texts[1].category == "plain"
    given: list[str | Prompt] = [Prompt("a", "chat", "once upon a time"), "one morning"]
    texts = lab.states(given, max_new_tokens=4).texts
    assert [(t.prompt_id, t.category) for t in texts] == [("a", "chat"), ("prompt-001", "given")]
    assert len(lab.states(PROMPTS, limit=2, max_new_tokens=4).texts) == 2
    with pytest.raises(DataError, match="occur twice"):
        lab.probe([given[0], given[0]], **SETTINGS)
    with pytest.raises(DataError, match="does not know a word"):
        lab.probe(["EAGLE"], **SETTINGS)
    with pytest.raises(DataError, match="no such set or file"):
        lab.probe("once upon a time", **SETTINGS)
    with pytest.raises(DataError, match="longer than the limit of 4"):
        lab.probe(PROMPTS, max_new_tokens=60)


def test_another_rendering_is_an_applied_change(lab: Lab) -> None:
    bare = Rendering("bare", template="never", bos="never")
    run = lab.probe(PROMPTS, **SETTINGS, rendering=bare)
    assert run.cells["condition"][0] == "rendering bare"
    assert run.cells["axis"][0] == "applied"
    assert not run.prompts["bos"].any()


@pytest.mark.parametrize(
    "change,error,says",
    [
        ({"temperature": (0.5, 1.0)}, ConfigError, "temperature"),
        ({"temperature": ()}, ConfigError, "temperature"),
        ({"temperature": -1.0}, ConfigError, "temperature"),
        ({"depth": 0}, ConfigError, "depth"),
        ({"modes": ("guided",)}, ConfigError, "modes"),
        ({"depth": 12}, DataError, "Ask for more new tokens"),
        ({"temperature": float("nan")}, ConfigError, "finite"),
        ({"temperature": 1e-40}, ConfigError, "from 0.0001 on"),
        ({"temperature": True}, ConfigError, "finite"),
        ({"seed": 2**70}, ConfigError, "seed"),
        ({"seed": 0.5}, ConfigError, "seed"),
        ({"sink": (0, 0)}, ConfigError, "twice"),
        ({"sink": ()}, ConfigError, "empty"),
        ({"sink": (0, 500)}, ConfigError, "sink position 500 is not in every text"),
        ({"depth": True}, ConfigError, "depth is no whole number"),
        ({"depth": "3"}, ConfigError, "depth is no whole number"),
        ({"max_new_tokens": 12.5}, ConfigError, "max_new_tokens is no whole number"),
        ({"limit": 0}, ConfigError, "limit is no whole number from 1 to"),
        ({"limit": 2.5}, ConfigError, "limit is no whole number"),
        ({"batch": "4"}, ConfigError, "batch is no whole number"),
        ({"batch": None}, ConfigError, "batch is no whole number"),
    ],
)
def test_impossible_settings(
    lab: Lab, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        lab.probe(PROMPTS, **{**SETTINGS, **change})


@pytest.mark.parametrize("prompts", [5, None, [1, 2], [[1, 2]], [b"once"]])
def test_what_is_no_prompt_is_refused(lab: Lab, prompts: Any) -> None:
    with pytest.raises(DataError, match="neither text nor a Prompt"):
        lab.probe(prompts, **SETTINGS)


def test_a_prompt_counts_once(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"2 of 4 prompts .*prompt-002 repeats prompt-000, ") as e:
        lab.probe([PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[1]], **SETTINGS)
    assert e.value.remedy
    run = lab.probe([PROMPTS[0], PROMPTS[1], PROMPTS[0]], **{**SETTINGS, "limit": 2})
    assert list(run.prompts.prompt.unique()) == ["prompt-000", "prompt-001"]


def test_new_tokens_that_leave_no_room_for_a_prompt_are_named(lab: Lab) -> None:
    context = lab.target.max_position
    with pytest.raises(ConfigError, match=rf"{context} new tokens leave no room .* {context} to"):
        lab.probe(PROMPTS, **{**SETTINGS, "max_new_tokens": context})


def test_the_embedded_prompts_differ() -> None:
    target = Target.from_model(
        tiny_llama(vocab_size=WORDS, hidden_size=16, layers=3, heads=2, kv_heads=1), name="t"
    )
    found = find_prompts("micro", target, "held-out", 100)
    assert len({p.tokens for p in found}) == len({p.id for p in found}) == 64
    plain = [s[:14] for s in stories(64, 1, stream="held-out")]
    others = [p.id for p, opening in zip(found, plain, strict=True) if p.tokens != opening]
    assert others == ["story-038"]  # which opens like another


def test_a_target_without_words_takes_token_ids_only() -> None:
    model = tiny_llama(vocab_size=WORDS, hidden_size=16, layers=3, heads=2, kv_heads=1)
    target = Target.from_model(model, name="mute", eos_ids=())
    mute = driftlab.open(target, make_drafter())
    with pytest.raises(ConfigError, match="mute has no tokenizer"):
        mute.probe(PROMPTS)
    assert len(mute.speculate([1, 2, 3], depth=2, max_new_tokens=4).tokens) == 7


def test_speculation_says_what_the_target_says(lab: Lab) -> None:
    said = lab.speculate(PROMPTS[0], depth=3, max_new_tokens=8)
    prompt = [0, *WordTokenizer().encode(PROMPTS[0], add_special_tokens=False)]
    assert list(said.tokens[: said.prompt_len]) == prompt
    assert list(said.continuation) == lab.target.generate([prompt], max_new_tokens=8)[0]
    with lab.intervene(noise(3.0)):
        assert lab.speculate(prompt, depth=3, max_new_tokens=8).tokens == said.tokens


def test_a_drafter_that_fuses_nothing_drafts_from_the_last_state(tmp_path: Path) -> None:
    """The probe's drafts are those of verified speculation, which reads the target itself."""
    bare = driftlab.open(make_target(), make_drafter(boundaries=()), cache=tmp_path)
    rows = bare.probe(PROMPTS[:1], depth=3, max_new_tokens=12).steps
    free = rows[rows["mode"] == "free"].set_index(["anchor", "depth"])["draft"]
    rounds = bare.speculate(PROMPTS[0], depth=3, max_new_tokens=12).rounds
    seen = [r for r in rounds if (r.anchor, 1) in free.index]
    assert len(seen) >= 6
    for r in seen:
        assert free.loc[r.anchor].tolist() == list(r.drafted)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"draft": "Greedy"}, ConfigError, "unknown draft .*Greedy"),
        ({"draft": "x", "temperature": 1.0}, ConfigError, "greedy, sampled"),
        ({"temperature": float("nan")}, ConfigError, "finite"),
        ({"temperature": float("inf")}, ConfigError, "finite"),
        ({"temperature": 1e-40}, ConfigError, "from 0.0001 on"),
        ({"seed": 2**70}, ConfigError, "seed"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"depth": 1.5}, DataError, "depth >= 1"),
    ],
)
def test_impossible_speculation(
    lab: Lab, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        lab.speculate([0, 5, 6, 7], **{"depth": 2, "max_new_tokens": 6, **change})


@pytest.mark.parametrize("prompt", [[0, 5.5], [0, True], [0, "6"]])
def test_what_is_no_token_id_is_refused(lab: Lab, prompt: list[Any]) -> None:
    with pytest.raises(DataError, match="no token id"):
        lab.speculate(prompt, depth=2, max_new_tokens=6)


def test_no_round_drafts_more_than_what_is_asked_for(lab: Lab) -> None:
    said = lab.speculate([0, 5, 6, 7], depth=100_000, max_new_tokens=6)
    assert {len(one.drafted) for one in said.rounds} <= set(range(1, 7))
    assert said.tokens == lab.speculate([0, 5, 6, 7], depth=2, max_new_tokens=6).tokens


# -- hooks and interventions


def test_an_intervention_that_changes_nothing_is_no_condition(lab: Lab) -> None:
    with (
        pytest.raises(ConfigError, match=r"changes nothing: a text of .* has no position 500"),
        lab.intervene(knock_out_sink(positions=(500,))),
    ):
        lab.probe(PROMPTS, **SETTINGS)
    with (
        pytest.raises(ConfigError, match="changes nothing"),
        lab.intervene(knock_out_sink(positions=(500,))),
    ):
        lab.explain(PROMPTS, spec=ExplainSpec(depth=2), max_new_tokens=12)
    with pytest.raises(DataError, match="Ask for more new tokens"):
        lab.explain(PROMPTS, spec=ExplainSpec(depth=12), max_new_tokens=12)


@pytest.mark.parametrize("given", [pin_norm, "pin_norm", None, [pin_norm()]])
def test_what_is_no_intervention_is_refused(lab: Lab, given: Any) -> None:
    with pytest.raises(ConfigError, match="no intervention is named"), lab.intervene(given):
        pass


def negate(value: torch.Tensor, moment: Moment) -> torch.Tensor:
    return -value


def negate_in_place(value: torch.Tensor, moment: Moment) -> None:
    value.neg_()


@pytest.mark.parametrize("change", [negate, negate_in_place])
def test_what_a_hook_replaced_is_no_trained_drafter_s(
    lab: Lab, plain: ProbeRun, change: Any
) -> None:
    with lab.hook("logits", lambda value, moment: None), lab.hook("state.pre", change):
        run = lab.probe(PROMPTS, **SETTINGS)
    row = run.cells[["axis", "condition", "cell"]].iloc[0].tolist()
    assert row[:2] == ["applied", "replaced state.pre"] and row[2] == run.steps["cell"][0]
    assert len(plain.beside(run).cells) == 2
    pd.testing.assert_frame_equal(lab.probe(PROMPTS, **SETTINGS).cells, plain.cells)


def test_a_drafter_is_of_one_lab_and_one_thread_at_a_time(lab: Lab, plain: ProbeRun) -> None:
    """What one changes, the other would measure and call its own."""
    other = driftlab.open(lab.target, lab.drafter, cache=lab.cache)
    found: list[BaseException | None] = []

    def elsewhere() -> None:
        try:
            lab.probe(PROMPTS, **SETTINGS)
        except BaseException as error:
            found.append(error)

    with lab.intervene(pin_norm()):
        with pytest.raises(ConfigError, match="another lab"):
            other.probe(PROMPTS, **SETTINGS)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        lab.probe(PROMPTS, **SETTINGS)
    assert [type(error) for error in found] == [ConfigError]
    pd.testing.assert_frame_equal(other.probe(PROMPTS, **SETTINGS).steps, plain.steps)


def test_interventions_are_closed_in_order(lab: Lab, plain: ProbeRun) -> None:
    """The label of one that is gone must not stay."""
    first, second = lab.intervene(pin_norm()), lab.intervene(noise(0.5))
    first.__enter__()
    second.__enter__()
    lab.probe(PROMPTS, **SETTINGS)
    for context in (first, second):
        with pytest.raises(ConfigError, match="another order"):
            context.__exit__(None, None, None)
    pd.testing.assert_frame_equal(lab.probe(PROMPTS, **SETTINGS).cells, plain.cells)


def test_what_a_reader_remarked_is_said(lab: Lab) -> None:
    remarked = make_drafter()
    remarked.provenance["notes"] = Sourced(
        value=["two bases, the first was taken"], origin=Origin.derived, where="the remarks"
    )
    run = driftlab.open(lab.target, remarked, cache=lab.cache).probe(PROMPTS, **SETTINGS)
    assert run.manifest["warnings"] == ["two bases, the first was taken"]


def test_a_hook_reads_and_replaces(lab: Lab, plain: ProbeRun) -> None:
    seen = []
    with lab.hook("attn.*", lambda value, moment: seen.append((moment.site, moment.depth))):
        read = lab.probe(PROMPTS, **SETTINGS)
    pd.testing.assert_frame_equal(read.steps, plain.steps)
    assert {("attn.scores", 1), ("attn.pattern", 3)} <= set(seen)
    with lab.hook("logits", lambda value, moment: -value, depths=[2]):
        changed = lab.probe(PROMPTS, **SETTINGS)
    same = (changed.steps["draft"] == plain.steps["draft"]).groupby(plain.steps["depth"]).all()
    assert bool(same[1]) and not bool(same[2])
    with (
        pytest.raises(SiteError, match=r"attn\.pattern"),
        lab.hook("attn.patern", lambda v, m: None),
    ):
        pass


def test_what_is_captured_is_what_is_measured(lab: Lab) -> None:
    with lab.capture(["attn.pattern", "state.pre"], depths=[2]) as kept:
        run = lab.probe(PROMPTS[:1], **SETTINGS, modes=["forced"])
    rows = run.steps[run.steps["depth"] == 2]
    own = kept["attn.pattern", 2][0, :, :, -1].mean(0)
    np.testing.assert_allclose(rows["self_mass"], own, rtol=1e-5)
    size = kept["state.pre", 2][0].pow(2).mean(-1).sqrt()
    np.testing.assert_allclose(rows["rms_state_pre"], size, rtol=1e-5)


def test_an_intervention_is_labelled_and_ends(lab: Lab, plain: ProbeRun) -> None:
    drafter = lab.drafter
    with lab.intervene(pin_norm()) as same:
        assert same is lab
        assert "pin_norm()" in repr(lab)
        pinned = lab.probe(PROMPTS, **SETTINGS)
        with lab.intervene(noise(0.5)):
            both = lab.probe(PROMPTS, **SETTINGS)
    assert pinned.cells[["axis", "condition"]].iloc[0].tolist() == ["applied", "pin_norm()"]
    assert both.cells["condition"][0] == "pin_norm() + noise(alpha=0.5)"
    assert plain.cells[["axis", "condition"]].iloc[0].tolist() == ["trained", ""]
    (recorded,) = both.manifest["config"]["interventions"].values()
    assert recorded[1] == {"name": "noise", "alpha": 0.5, "path": "hidden", "seed": 0}
    deep = pinned.steps[pinned.steps["depth"] == 3].set_index(["prompt", "mode", "anchor"])
    first = pinned.steps[pinned.steps["depth"] == 1].set_index(["prompt", "mode", "anchor"])
    np.testing.assert_allclose(deep["rms_input"], first["rms_input"], rtol=1e-4)
    assert lab.drafter is drafter and not lab.condition
    pd.testing.assert_frame_equal(lab.probe(PROMPTS, **SETTINGS).steps, plain.steps)


def test_a_swapped_drafter_keeps_the_name_of_what_it_was_trained_as(lab: Lab) -> None:
    drafter = lab.drafter
    swap = swap_norm("per_layer", "post_norm")
    with lab.intervene(swap):
        run = lab.probe(PROMPTS, **SETTINGS)
        assert lab.drafter is not drafter
    assert lab.drafter is drafter
    with pytest.raises(ZeroDivisionError), lab.intervene(swap):
        raise ZeroDivisionError
    assert lab.drafter is drafter
    assert run.cells[["fusion_norm", "feedback"]].iloc[0].tolist() == ["none", "pre_norm"]
    assert run.cells["axis"][0] == "applied" and "swap_norm" in run.cells["condition"][0]
    for name in ("fusion_norm", "feedback"):
        said = run.manifest["resolved"][f"drafter.{name}"]
        assert said["value"] == run.manifest["config"]["drafter"][name] == swap.record()[name]
        assert said["origin"] == "derived" and said["where"].startswith("swapped by swap_norm(")
    with pytest.raises(ConfigError, match="no intervention"), lab.intervene():
        pass


# -- runs


def test_runs_stand_beside_each_other(lab: Lab, plain: ProbeRun) -> None:
    with lab.intervene(pin_norm()):
        pinned = lab.probe(PROMPTS, **SETTINGS)
        shorter = lab.probe(PROMPTS, **{**SETTINGS, "depth": 2})
    both = plain.beside(pinned)
    assert both.cells["cell"].tolist() == ["none+pre_norm", "none+pre_norm/pin_norm()"]
    assert len(both.steps) == 2 * len(plain.steps)
    assert len(both.prompts) == len(plain.prompts)
    assert len(both.manifest["inputs"]["drafters"]) == 2
    labels = [line.get_label() for line in both.plot.forced_accuracy().lines]
    assert labels[:2] == ["none+pre_norm", "none+pre_norm, pin_norm() (applied)"]
    with pytest.raises(DataError, match="same cell"):
        plain.beside(plain)
    with pytest.raises(DataError, match=r"measure\.depth: 3 and 2"):
        plain.beside(shorter)
    with lab.intervene(pin_norm()):
        for change in ({"sink": (0, 1)}, {"recent": 1}, {"seed": 1}):
            with pytest.raises(DataError, match=f"not measured alike .*{next(iter(change))}"):
                plain.beside(lab.probe(PROMPTS, **{**SETTINGS, **change}))


def test_a_changed_drafter_beside_itself_is_paired(lab: Lab, plain: ProbeRun) -> None:
    with lab.intervene(pin_norm()):
        pinned = lab.probe(PROMPTS, **SETTINGS)
    found = compare(plain, pinned)
    assert "one seed: the noise of training is not in the intervals" in found.notes
    assert not any("no seed" in note for note in found.notes)
    (differs,) = found.differences
    assert differs.startswith("interventions.none+pre_norm/pin_norm(): not set (A)")


def test_a_changed_drafter_alone_is_described(lab: Lab) -> None:
    with lab.intervene(knock_out_sink()):
        alone = lab.probe(PROMPTS, **SETTINGS)
    told = answers(alone.tables())
    assert told and not any("of the drafter's own" in a.sentence for a in told)
    assert not any("attends to a sink" in a.sentence for a in told), "it was hidden"
    assert "3 prompts, seed unknown" in told[0].basis


def test_a_swapped_drafter_is_set_beside_what_it_was(lab: Lab, plain: ProbeRun) -> None:
    with lab.intervene(swap_norm(feedback="post_norm")):
        swapped = lab.probe(PROMPTS, **SETTINGS)
    other = driftlab.open(lab.target, make_drafter(feedback="post_norm"), cache=lab.cache)
    both = plain.beside(swapped, other.probe(PROMPTS, **SETTINGS))
    (told,) = (a for a in answers(both.tables()) if "of the drafter's own" in a.sentence)
    (label,) = told.estimates
    assert label.startswith("none+pre_norm, swap_norm(")


def test_drafters_side_by_side_keep_what_each_is(lab: Lab, plain: ProbeRun) -> None:
    deep = make_drafter(num_layers=2, feedback="post_norm", windows=(4, None))
    deep.provenance["norm_eps"] = Sourced(value=1e-5, origin=Origin.assumed, where="a guess")
    beside = plain.beside(
        driftlab.open(lab.target, deep, cache=lab.cache).probe(PROMPTS, **SETTINGS)
    )
    assert "the first of 2 layers" in basis(beside.tables())
    assert list(beside.manifest["assumed"]) == ["drafter.norm_eps"]
    assert "drafter.feedback of none+post_norm" in beside.manifest["resolved"]
    assert sink_data(beside.tables())["even"].isna().all()


@pytest.mark.parametrize(
    "name",
    [
        "sink_by_depth",
        "rms_by_depth",
        "regions_by_depth",
        "layer_shares",
        "conditional_acceptance",
        "forced_accuracy",
    ],
)
def test_every_plot_is_drawn_on_axes(name: str, plain: ProbeRun) -> None:
    given = plt.figure().add_subplot()
    axes = getattr(plain.plot, name)(given)
    assert isinstance(axes, Axes) and axes is given
    assert axes.lines


def test_the_plot_shows_the_tables_numbers(plain: ProbeRun) -> None:
    line = plain.plot.forced_accuracy().lines[0]
    depths = plain.depths[plain.depths["mode"] == "forced"]
    wanted = (depths["n_correct"] / depths["n"]).groupby(depths["depth"]).mean()
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), wanted, atol=1e-12)


def test_a_stored_run_is_the_probe(lab: Lab, plain: ProbeRun, tmp_path: Path) -> None:
    with lab.intervene(pin_norm()):
        both = plain.beside(lab.probe(PROMPTS, **SETTINGS))
    stored = both.save(tmp_path / "run")
    loaded = driftlab.load_run(tmp_path / "run")
    assert loaded.path == stored.path
    for name in TABLES:
        keys = [c for c in ("cell", "prompt", "text", "mode") if c in getattr(both, name)]
        mine = getattr(both, name).sort_values(keys, kind="stable", ignore_index=True)
        pd.testing.assert_frame_equal(getattr(loaded, name), mine)
    assert loaded.manifest["inputs"]["target"] == lab.target.fingerprint
    both.save(tmp_path / "run")  # the same run again is no fault
    with pytest.raises(RunError, match="another run"):
        plain.save(tmp_path / "run")
    with pytest.raises(RunError, match="holds no run"):
        driftlab.load_run(tmp_path)


def test_a_run_shows_itself(plain: ProbeRun) -> None:
    assert repr(plain).startswith("ProbeRun(none+pre_norm: 3 texts, ")
    assert "<table" in plain._repr_html_()
    overview = plain.overview()
    at = overview.xs(("none+pre_norm", "sampled", "forced", 2))
    rows = plain.steps[(plain.steps["mode"] == "forced") & (plain.steps["depth"] == 2)]
    by_prompt = rows.groupby("prompt")["rms_state_pre"].mean()
    assert at["rms_state_pre"] == pytest.approx(by_prompt.mean(), rel=1e-5)
