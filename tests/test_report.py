"""The page and its sentences: the answer first, nothing hidden, nothing loaded."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from matplotlib.figure import Figure

from driftlab.errors import ResourceError
from driftlab.results import answers as answers_room
from driftlab.results import figures
from driftlab.results.answers import basis, effects, registered_answers, summary
from driftlab.results.drawing import FigureSpec
from driftlab.results.hints import hints
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.report import Answer, _texts, answers, summary_table, write_report
from driftlab.results.slices import TextKind, take
from driftlab.results.stats import Estimate, estimate

EVIL = '<script>alert(1)</script>"><img src=http://evil.example/x.png onerror=alert(2)>'


class Page(HTMLParser):
    """Tags with their attributes, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return synthetic_run.make_run(
        tmp_path_factory.mktemp("run") / "r",
        seeds=(0, 1),
        prompts=[*synthetic_run.prompt_names(11), EVIL],
        anchors=8,
        loops=(EVIL,),
        manifest={"note": EVIL},
    ).tables()


@pytest.fixture(scope="module")
def found(tables: Tables) -> list[Answer]:
    return answers(tables)


@pytest.fixture(scope="module")
def page(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        # What the figures look like is test_figures.py's business.
        patch.setattr(FigureSpec, "figure", lambda *_: Figure(figsize=(1, 1)))
        write_report(tables, path)
    return path.read_text(encoding="utf-8")


def answer(found: list[Answer], words: str) -> Answer:
    return next(a for a in found if words in a.question)


def with_columns(tables: Tables, **columns: Any) -> Tables:
    return replace(tables, depths=tables.depths.assign(**columns), cache={})


# --- sentences --------------------------------------------------------------------------------


def test_the_first_sentence_is_the_growth_with_its_interval(found: list[Answer]) -> None:
    number = r"x\d\.\d+ \[\d\.\d+, \d\.\d+\]"
    assert re.fullmatch(
        rf"Post-norm feedback changes the growth of the hidden state from depth 1 to 8 from "
        rf"{number} to {number} \(2 of 2 seeds agree in sign\)\.",
        found[0].sentence,
    )
    before, after = found[0].estimates["before"], found[0].estimates["after"]
    assert before.value == pytest.approx(1.15**7, rel=0.02)
    assert after.value == pytest.approx(1, rel=0.02)
    effect = found[0].estimates["effect"]
    assert effect.value == pytest.approx(after.value / before.value)
    assert effect.n == 11
    assert found[0].p["effect"] < 0.05
    assert str(found[0]) == found[0].sentence


def test_nothing_found_is_an_answer_too(found: list[Answer]) -> None:
    nothing = answer(found, "Does the per-layer fusion norm stop the growth")
    assert nothing.sentence.startswith("No evidence that the per-layer fusion norm changes")
    assert "would see an effect of x1.0" in nothing.sentence
    assert nothing.p["effect"] > 0.05


def test_the_two_norms_are_asked_apart_and_together(found: list[Answer]) -> None:
    questions = [a.question for a in found]
    assert len(questions) == len(set(questions))
    for subject in ("post-norm feedback", "the per-layer fusion norm"):
        for verb in ("stop the growth", "keep deep drafts right", "make acceptance longer"):
            assert f"Does {subject} {verb}" in " ".join(questions)
    assert sum("depend on the per-layer fusion norm" in q for q in questions) == 3
    assert "balance the captured states" in questions[-1]
    assert "from 0.7" in found[-1].sentence
    assert "to 0.3" in found[-1].sentence


def test_each_answer_names_its_text_and_mode(found: list[Answer]) -> None:
    for a in found:
        assert "sampled text (temperature 1)" in a.basis
        assert "1 looping text left out" in a.basis
    assert answer(found, "deep drafts").basis.startswith("forced chains")
    assert answer(found, "acceptance longer").basis.startswith("free chains")


def test_what_a_correction_takes_away_is_weak_evidence(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_room, "holm", lambda family: dict.fromkeys(family, 0.2))
    sentence = answers(tables)[0].sentence
    assert sentence.startswith("Only weak evidence that post-norm feedback changes the growth")
    assert "lost when 14 comparisons are corrected for" in sentence


def test_an_interaction_that_exists_is_reported(tables: Tables) -> None:
    both = tables.depths["cell"].astype(str).str.startswith("per_layer+post")
    logs = tables.depths["log_rms_state_pre"] + np.where(both, 0.2, 0) * tables.depths["depth"]
    sentence = answer(
        answers(with_columns(tables, log_rms_state_pre=logs)), "on the growth"
    ).sentence
    assert sentence.startswith("With the per-layer fusion norm, the effect of post-norm feedback")
    assert re.search(r"is x4\.\d+ \[[34]\.\d+, 4\.\d+\] of that without", sentence)


def test_a_target_without_a_sink_is_said_plainly(tables: Tables) -> None:
    even = with_columns(tables, sink=tables.depths["uniform"] * 1.9)
    last = answers(even)[-1]
    assert last.sentence.startswith("No drafter here attends to a sink: ")
    assert "below 2 times the even share of one key" in last.sentence
    assert not any("move" in a.sentence for a in answers(even)[:-1])
    uneven = with_columns(tables, sink=tables.depths["uniform"] * 2.1)
    assert not any("attends to a sink" in a.sentence for a in answers(uneven))
    config: dict[str, Any] = {"drafter": {"windows": [5]}}
    some = replace(even, manifest={**even.manifest, "config": config}, cache={})
    assert answers(some)[-1].sentence.startswith("A drafter here sees a window of keys only")
    assert figures.sink_data(some)["even"].isna().all()
    assert figures.sink_data(even)["even"].notna().all()
    # Where no position counts as one, 0 is no measured mass.
    auto = replace(even, manifest={"config": {"measure": {"sink": "auto"}}}, cache={})
    pairs = auto.depths[["cell", "prompt"]].drop_duplicates()
    assert not hints(auto)
    other = auto.depths["prompt"] != pairs["prompt"].iloc[0]
    unmarked = with_columns(auto, sink=auto.depths["sink"].where(other, 0))
    (said,) = hints(unmarked)
    share = f"{(pairs['prompt'] == pairs['prompt'].iloc[0]).sum()} of {len(pairs)} pairs"
    assert share in said and "no position counts as sink" in said
    # The rule counts the keys of an explicit sink set.
    config = {"config": {"measure": {"sink": [0, 1], "bootstrap": 99}}}
    two = replace(uneven, manifest=config, cache={})
    assert "2 keys" in answers(two)[-1].sentence
    # A condition with longer contexts has another even share.
    far = even.cells["cell"].astype(str) == "per_layer+post_norm/s1"
    cells = even.cells.assign(condition=np.where(far, "far", ""))
    there = even.depths["cell"].isin(cells.loc[far, "cell"])
    some = with_columns(replace(even, cells=cells), uniform=even.depths["uniform"].mask(there, 0))
    assert "attends to a sink" in answers(some)[-1].sentence


def test_a_sink_that_is_left_is_measured(found: list[Answer]) -> None:
    a = answer(found, "Does post-norm feedback keep attention on the sink")
    assert a.estimates["before"].value == pytest.approx(0.45 * 0.8**7 - 0.45, abs=1e-6)
    assert a.estimates["after"].value == pytest.approx(0, abs=1e-9)


def test_one_drafter_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftlab.results.report._figures", lambda *_: "")
    run = synthetic_run.make_run(
        tmp_path / "r", variants=[("none", "pre_norm")], seeds=(0,), prompts=("a", "b", "c")
    )
    found = answers(run)
    text = "\n".join(a.sentence for a in found)
    assert "none+pre_norm: the growth of the hidden state from depth 1 to 8 is x2." in text
    assert "attention on the sink goes from 0.45" in text
    assert "against 0." in text
    assert effects(run) == {}
    tables = run.tables()
    lost = tables.depths["log_rms_state_pre"].mask(tables.depths["depth"] == 8)
    zeroed = answers(with_columns(tables, log_rms_state_pre=lost))[0].sentence
    assert zeroed.endswith("from depth 1 to 8 is n/a: nothing to average.")
    write_report(run, tmp_path / "r.html")
    assert "The two norms apart" not in (tmp_path / "r.html").read_text()


def test_strata_are_never_mixed(tables: Tables) -> None:
    """Two training lengths, one seed each: every comparison stays within its length."""
    cells = tables.cells.assign(ttt=np.where(tables.cells["seed"] == 1, 8, 2), seed=0)
    found = answers(replace(tables, cells=cells, cache={}))
    assert sum(a.sentence.startswith("[TTT 2] ") for a in found) == len(found) / 2
    assert sum(a.sentence.startswith("[TTT 8] ") for a in found) == len(found) / 2


def test_effects_say_which_seeds_they_are_of(tables: Tables) -> None:
    """per_layer lost a seed, or has none in common with none."""
    seed, fusion = tables.cells["seed"], tables.cells["fusion_norm"]
    for dropped, said in (
        ((fusion == "per_layer") & (seed == 1), "1 of 2 seeds: those of all cells compared"),
        ((fusion == "per_layer") == (seed == 1), "cannot be told: no prompt and seed was measured"),
    ):
        found = answers(replace(tables, cells=tables.cells[~dropped], cache={}))
        per_layer = [a for a in found if "the per-layer fusion norm" in a.question and a.estimates]
        shown = [a for a in per_layer if "evidence" not in a.sentence]
        assert shown and all(said in a.sentence for a in shown)
        assert len(shown) == len(per_layer) or "seeds" in said
        assert not any("one prompt" in a.sentence for a in found)
    deep = {"drafter": {"num_layers": 2}}
    two = replace(tables, manifest={**tables.manifest, "config": deep}, cache={})
    assert basis(two).endswith("; attention is that of the first of 2 layers")
    some = replace(tables, cells=tables.cells[~((fusion == "per_layer") & (seed == 1))], cache={})
    assert "x 1 to 2 seeds; " in basis(some)
    sink = figures.FIGURES["sink_by_depth"]
    assert "prompts x 1 to 2 seeds; " in sink.caption(sink.data(some, None))
    assert basis(some).endswith("where there are several, percentile, and BCa for one seed")
    split = replace(tables, cells=tables.cells[(fusion == "per_layer") != (seed == 1)], cache={})
    assert "x 1 seed each, not the same; " in basis(split)
    assert basis(split).endswith("over prompts, BCa (percentile where that has none)")


def test_what_so_few_prompts_cannot_show_is_not_called_no_evidence(tables: Tables) -> None:
    prompts = sorted(set(tables.depths["prompt"].astype(str)) - {EVIL})[:6]
    analysis = {
        "primary": {"measure": "growth", "factor": "feedback", "levels": ["pre_norm", "post_norm"]},
        "family": [
            {
                "measure": "forced accuracy",
                "factor": "feedback",
                "levels": ["pre_norm", "post_norm"],
                "depth": depth,
            }
            for depth in (8, 7, 99)
        ],
    }
    few = replace(
        tables,
        depths=tables.depths[tables.depths["prompt"].astype(str).isin(prompts)],
        manifest={**tables.manifest, "config": {"analysis": analysis}},
        cache={},
    )
    told = [a.sentence for a in registered_answers(few)]
    assert "the depth was not measured" in told[-1]
    for sentence in told[:-1]:
        assert "is of too few prompts to test" in sentence
        assert "corrected for 3 comparisons" in sentence
        assert "6 prompts cannot give a p below 0.094 among 3 comparisons" in sentence


def test_what_a_condition_leaves_is_told_for_each_training_length(tables: Tables) -> None:
    cells = tables.cells.astype({"cell": str, "axis": str, "condition": str})
    cells = cells.assign(ttt=np.where(cells["seed"] == 1, 8, 2), seed=0)
    cells = cells[cells["variant"] == "none+pre_norm"]
    pinned = cells.assign(cell=cells["cell"] + "/pin", axis="applied", condition="pin")
    depths = tables.depths.astype({"cell": str})
    both = [depths, depths.assign(cell=depths["cell"] + "/pin")]
    changed = replace(tables, cells=pd.concat([cells, pinned]), depths=pd.concat(both), cache={})
    (told,) = [a.sentence for a in answers(changed) if a.question.startswith("What does pin leave")]
    assert "none+pre_norm, TTT 2 1.00" in told and "none+pre_norm, TTT 8 1.00" in told


def test_applied_cells_take_no_part_in_the_2x2(tables: Tables) -> None:
    cells = tables.cells.copy()
    cells["axis"] = np.where(cells["seed"] == 1, "applied", "trained")
    cells["condition"] = np.where(cells["seed"] == 1, "pin", "")
    changed = replace(tables, cells=cells, cache={})
    assert {e.seeds for of in effects(changed).values() for e in of.values()} == {1}
    assert len(summary(changed)) == 8


# --- the summary ------------------------------------------------------------------------------


def test_the_summary_is_what_the_slices_give(tables: Tables) -> None:
    frame = summary_table(tables)
    assert list(frame.index) == [
        "none+pre_norm",
        "per_layer+pre_norm",
        "none+post_norm",
        "per_layer+post_norm",
    ]
    assert list(frame.columns) == [
        "acceptance length",
        "accepted drafts",
        "acceptance length, pooled",
        "forced accuracy @1",
        "forced accuracy @4",
        "forced accuracy @8",
        "growth 1-8, state",
        "growth 1-8, fed back",
        "sink @1",
        "sink @8",
        "own drafts @8",
    ]
    row: Any = frame.loc["none+post_norm"]
    assert isinstance(row["sink @1"], Estimate)
    length, drafts = row["acceptance length"], row["accepted drafts"]
    assert length.value == pytest.approx(drafts.value + 1)
    assert (length.low, length.high) == pytest.approx((drafts.low + 1, drafts.high + 1))
    free = take(tables, "free")
    expected = estimate(free.accepted_drafts(free.groups[2]), resamples=200)
    assert drafts.value == pytest.approx(expected.value)
    assert drafts.by_seed == pytest.approx(expected.by_seed)
    assert "0.45 [0.45, 0.45], n=11" in frame.to_string()


def test_other_text_is_summarised_apart(tables: Tables) -> None:
    sampled, greedy = summary(tables), summary(tables, TextKind("greedy"))
    a, b = (t["none+pre_norm"]["acceptance length"].value for t in (sampled, greedy))
    assert a != b


def test_effects_are_differences_and_ratios(tables: Tables) -> None:
    numbers = effects(tables)
    assert list(numbers) == [
        "post-norm feedback",
        "fusion norm per_layer",
        "feedback x per_layer",
    ]
    rows = summary(tables)
    means = {k: rows[k]["forced accuracy @8"].value for k in rows}
    by_hand = (
        means["none+post_norm"]
        + means["per_layer+post_norm"]
        - means["none+pre_norm"]
        - means["per_layer+pre_norm"]
    ) / 2
    assert numbers["post-norm feedback"]["forced accuracy @8"].value == pytest.approx(by_hand)
    assert numbers["post-norm feedback"]["growth 1-8, state"].unit == "x"


def test_missing_modes_are_not_available(tables: Tables) -> None:
    forced = replace(tables, depths=tables.depths[tables.depths["mode"] == "forced"], cache={})
    assert "acceptance length" not in summary_table(forced)
    assert not any("acceptance" in a.question for a in answers(forced))
    some = (tables.depths["mode"] == "free") & tables.depths["cell"].astype(str).str.startswith(
        "none+pre"
    )
    partly = replace(tables, depths=tables.depths[~some], cache={})
    value = summary(partly)["none+pre_norm"]["acceptance length"]
    assert math.isnan(value.value)
    assert str(value).startswith("n/a")


# --- the page ---------------------------------------------------------------------------------


def test_the_page_opens_with_the_answer(page: str, found: list[Answer]) -> None:
    text = re.sub(r"\s+", " ", Page(page).text)
    assert text.index("The answer") < text.index("What each variant does") < text.index("Figures")
    for a in found:
        assert a.question in text
        assert a.sentence in text
    assert text.index("Does post-norm feedback stop") < 400
    assert "No evidence that" in text
    for heading in ("The two norms apart", "Texts", "What was assumed", "How it was made"):
        assert heading in text
    assert "The same on greedy text" in text


def test_text_from_the_run_stays_text(page: str) -> None:
    parsed = Page(page)
    assert EVIL in parsed.text, "shown, as text"
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)


def test_the_page_loads_nothing(page: str) -> None:
    parsed = Page(page)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    for tag, attrs in parsed.tags:
        for name, value in attrs.items():
            if name in ("src", "href", "srcset", "action", "data", "style"):
                assert tag == "img"
                assert str(value).startswith("data:image/png;base64,")
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_the_page_fits_phone_and_paper(page: str) -> None:
    parsed = Page(page)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        parsed.tags
    )
    assert "@media print" in page
    images = [a for t, a in parsed.tags if t == "img"]
    assert len(images) == 7
    assert all(a["alt"] for a in images)
    assert parsed.tags.count(("table", {})) == parsed.tags.count(("div", {"class": "scroll"}))


def test_looping_texts_are_flagged(page: str) -> None:
    text = Page(page).text
    assert "2 of 24 texts loop" in text
    assert f"{EVIL} (sampled)" in text
    assert "left out of the numbers above:" in text


def test_loops_that_could_not_be_left_out_are_not_said_to_be(tmp_path: Path) -> None:
    names = synthetic_run.prompt_names(3)
    run = synthetic_run.make_run(
        tmp_path / "r", seeds=(0,), texts=("sampled",), prompts=names, loops=names
    )
    said = " ".join(Page(_texts(run.tables())).text.split())
    assert "3 of 3 texts loop." in said
    assert "numbers above, but for sampled text (temperature 1), of which all texts loop:" in said


def test_what_was_assumed_and_how_it_was_made(page: str) -> None:
    text = Page(page).text
    for part in (
        "boundaries",
        "[2, 15, 27]",
        "default of EAGLE-3",
        "driftlab ablate synthetic.toml",
        "config_hash",
        '"numpy"',
        "none+pre_norm/s1",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "assumed, shown",
    [
        (None, "Nothing: every value was read or derived."),
        ({}, "Nothing"),
        (["rope theta 10000 <assumed>"], "rope theta 10000 <assumed>"),
        ({"rope": "default"}, "default"),
    ],
)
def test_assumptions_in_any_form(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assumed: Any, shown: str
) -> None:
    for part in ("_figures", "_answers", "_headline", "_effects"):
        monkeypatch.setattr(f"driftlab.results.report.{part}", lambda *_: "")
    monkeypatch.setattr("driftlab.results.report.answers", lambda _: [])
    manifest = {k: v for k, v in tables.manifest.items() if k != "assumed"} | {"assumed": assumed}
    path = write_report(replace(tables, manifest=manifest, cache={}), tmp_path / "r.html")
    assert shown in Page(path.read_text()).text


def test_images_that_exist_are_not_drawn_again(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "driftlab.results.report.available", lambda _: {"rms_by_depth": "", "forced_accuracy": "x"}
    )
    (tmp_path / "rms.png").write_bytes(b"png bytes")
    images = {"rms_by_depth": {"png": tmp_path / "rms.png"}}
    html = write_report(tables, tmp_path / "r.html", images=images).read_text()
    assert "base64,cG5nIGJ5dGVz" in html
    assert "not drawn, x." in html


def test_a_full_disk_is_said(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("driftlab.results.report._figures", lambda *_: "")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        write_report(tables, tmp_path / "r.html")
    assert not [*tmp_path.iterdir()]


def test_missing_numbers_leave_no_traces_of_pandas(page: str, tables: Tables) -> None:
    text = Page(page).text
    assert "<NA>" not in text
    assert not re.search(r"\bnan\b|\bNone\b", text)
    assert isinstance(tables.cells, pd.DataFrame)


def test_a_run_directory_does_as_well(tmp_path: Path) -> None:
    run = synthetic_run.make_run(tmp_path / "r", seeds=(0,), prompts=("a", "b"), depth=2)
    assert isinstance(run, RunDirectory)
    assert answers(run)[0].sentence == answers(run.tables())[0].sentence


def test_one_seed_and_overlapping_intervals_are_qualified(tables: Tables) -> None:
    alone = tables.cells[tables.cells["seed"] == 0]
    found = answers(replace(tables, cells=alone, cache={}))
    assert found[0].sentence.endswith("(one seed: training noise not counted).")
    # A shift far smaller than the spread over prompts, the same for every prompt.
    better = tables.depths["cell"].astype(str).str.contains("post_norm")
    chains = tables.depths["mode"] == "free"
    accepted = tables.depths["n"] * 0.5 * (tables.depths["depth"] == 1)
    level = tables.depths["prompt"].astype(str).str[-1].map(lambda c: 0.05 * (ord(c) % 9))
    drafts = accepted * (1 + level + 0.05 * better)
    shifted = answers(with_columns(tables, n_accepted=drafts.where(chains)))
    sentence = answer(shifted, "post-norm feedback make acceptance longer").sentence
    assert "(paired difference 0.025 [0.025, 0.025]; 2 of 2 seeds agree in sign)" in sentence


def test_what_a_killed_process_left_goes_away(tables: Tables, tmp_path: Path) -> None:
    """A process of that number is long gone; this one's owner writes at the same time."""
    dead, living = 2**22 + 1, os.getppid()  # above the largest id that Linux gives
    left = [
        *(tmp_path / f".r[1].html.{process}.7.tmp" for process in (dead, living)),
        *(tmp_path / "drawn" / f".sink_by_depth.pdf.{process}.7.tmp" for process in (dead, living)),
    ]
    other = tmp_path / f".other.html.{dead}.7.tmp"
    (tmp_path / "drawn").mkdir()
    for path in (*left, other):
        path.write_bytes(b"half")
    write_report(tables, tmp_path / "r[1].html", images={})
    figures.save_figure(tables, "sink_by_depth", tmp_path / "drawn")
    assert [path.exists() for path in left] == [False, True, False, True]
    assert other.exists()  # of another page
