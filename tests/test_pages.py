"""Pages of a paper: verdicts follow intervals, numbers follow tables, nothing is typed twice."""

from __future__ import annotations

import csv
import importlib
import io
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from synthetic_run import make_run

from driftlab.errors import ConfigError
from driftlab.papers import committed, latex
from driftlab.papers.drawing import draw, looks
from driftlab.papers.items import ITEMS, measure
from driftlab.papers.note import compile_note
from driftlab.papers.numbers import Numbers, Panel
from driftlab.papers.pages import Claim, Paper, fill, find_paper, judge
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.stats import Estimate, Sample, estimate, ratio

ROOT = Path(__file__).resolve().parent.parent
PAPER = ROOT / "papers" / "attention-drift"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(
        tmp_path_factory.mktemp("run") / "r",
        prompts=tuple(f"p{i}" for i in range(8)),
        seeds=(0, 1),
        texts=("sampled", "greedy"),
        manifest={"name": "norms-micro"},
    )


@pytest.fixture(scope="module")
def tables(run: RunDirectory) -> Tables:
    return run.tables()


def claim(expects: str, **values: Any) -> Claim:
    words = {"agrees": "a", "differs": "d", "unsettled": "u"}
    return Claim.model_validate({"id": "c", "says": "s.", "expects": expects, **words, **values})


# --- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expects, low, high, unit, p, verdict",
    [
        ("above", 0.1, 0.3, "", math.nan, "agrees"),
        ("above", -0.3, -0.1, "", math.nan, "does not agree"),
        ("above", -0.1, 0.3, "", math.nan, "not settled"),
        ("above", 0.1, 0.3, "", 0.2, "not settled"),  # lost to Holm
        ("above", 0.1, 0.3, "", 0.01, "agrees"),
        ("below", 0.5, 0.9, "x", math.nan, "agrees"),
        ("below", 1.1, 1.9, "x", math.nan, "does not agree"),
        ("below", 0.9, 1.1, "x", math.nan, "not settled"),
        ("equal", -0.04, 0.04, "", math.nan, "agrees"),
        ("equal", 0.04, 0.2, "", math.nan, "not settled"),
        ("equal", 0.2, 0.3, "", math.nan, "does not agree"),
        ("equal", 0.96, 1.09, "x", math.nan, "agrees"),
        ("equal", 0.88, 0.95, "x", math.nan, "not settled"),
        ("open", 0.1, 0.3, "", math.nan, "up"),
        ("open", -0.3, -0.1, "", math.nan, "down"),
        ("open", -0.3, 0.1, "", math.nan, "not settled"),
        ("above", math.nan, math.nan, "", math.nan, "not run"),
    ],
)
def test_a_verdict_follows_its_interval(
    expects: str, low: float, high: float, unit: str, p: float, verdict: str
) -> None:
    e = Estimate((low + high) / 2, low, high, 8, unit)
    margin = 0.1 if unit == "x" else 0.05
    assert judge(claim(expects, margin=margin), e, p) == verdict


def test_what_was_not_measured_is_not_judged() -> None:
    assert judge(claim("above"), None) == "not run"


def test_holm_counts_the_page_s_statements(tables: Tables) -> None:
    paper = Paper(PAPER)
    page = replace(paper.pages["flagship"], measured={"micro": found("flagship", tables)})
    judged = [j["micro"] for j in page.judged.values() if j["micro"].claim.expects != "equal"]
    raw = {j.claim.id: j.estimate.p for j in judged if j.estimate}
    assert {"both-longer", "post-deep"} <= set(raw)
    assert not any(map(math.isnan, raw.values())), "a ratio of means is a statement like others"
    smallest = min(raw, key=lambda k: raw[k])
    adjusted = next(j.p for j in judged if j.claim.id == smallest)
    assert adjusted == pytest.approx(min(1.0, raw[smallest] * len(raw)))


def test_another_order_of_size_is_said() -> None:
    paper = Paper(PAPER)
    page = paper.pages["t1"]
    grows = next(c for c in page.text.claims if c.id == "grows")
    weak, alike = Estimate(1.1, 1.05, 1.15, 8, "x"), Estimate(3.0, 2.0, 4.0, 8, "x")
    for e, word in ((weak, "agrees, far weaker (1 seed)"), (alike, "agrees (1 seed)")):
        numbers = replace(found_t1(e), contrasts={"grows": e})
        judged = replace(page, measured={"micro": numbers}).judged[grows.id]["micro"]
        assert judged.words == word


def found_t1(e: Estimate) -> Any:
    from driftlab.papers.numbers import Measured

    return Measured(("norms-micro",), {"r": {"c": e}}, {}, pd.DataFrame(), "text", "8 prompts")


# --- numbers ------------------------------------------------------------------------------------


def found(item: str, tables: Tables, experiment: str = "norms") -> Any:
    numbers = measure(item, {experiment: tables}, "micro")
    assert numbers is not None
    return numbers


def test_a_ratio_of_means_is_one() -> None:
    rng = np.random.default_rng(0)
    part, whole = rng.uniform(0, 2, (2, 5)), rng.uniform(1, 3, (2, 5))
    whole[0, 0] = 0.0  # a prompt of which nothing was accepted still counts
    value = estimate(ratio(Sample(part), Sample(whole))).value
    assert value == pytest.approx(part.sum() / whole.sum())


def test_accepted_drafts_equal_the_steps(run: RunDirectory, tables: Tables) -> None:
    numbers = Numbers(tables)
    group = numbers.group("none+pre_norm")
    assert group is not None
    steps = run.table("steps", filters=[("mode", "==", "free"), ("text", "==", "sampled")])
    steps = steps[steps["cell"].str.startswith("none+pre_norm/")]
    for k in (3, 8):
        kept = steps[steps["depth"] <= k].groupby(["cell", "prompt", "anchor"])["accepted"].sum()
        by_hand = kept.groupby(["cell", "prompt"]).mean().mean()
        assert numbers.number(numbers.drafts(group, k)).value == pytest.approx(by_hand)


def test_t1_reads_the_tables(run: RunDirectory, tables: Tables) -> None:
    row = found("t1", tables).rows["none+pre_norm"]
    fused = run.table("fused", filters=[("text", "==", "sampled")])
    fused = fused[fused["cell"].str.startswith("none+pre_norm/")]
    assert row["high"].value == pytest.approx(fused.loc[fused["layer"] == 2, "rms_in"].mean())
    depths = run.table("depths", filters=[("text", "==", "sampled"), ("mode", "==", "free")])
    logs = depths[depths["cell"].str.startswith("none+pre_norm/")].groupby("depth")
    mean = logs["log_rms_state_pre"].mean()
    assert row["h*3"].value == pytest.approx(math.exp(mean[3]))
    assert row["h*8/h*1"].value == pytest.approx(math.exp(mean[8] - mean[1]))


def test_the_switches_are_told_apart(run: RunDirectory, tables: Tables) -> None:
    contrasts = found("flagship", tables).contrasts
    depths = run.table("depths", filters=[("text", "==", "sampled"), ("mode", "==", "forced")])
    last = depths[depths["depth"] == 8]
    right = (last["n_correct"] / last["n"]).groupby(last["cell"].str.partition("/")[0]).mean()
    post = (right["none+post_norm"] + right["per_layer+post_norm"]) / 2
    pre = (right["none+pre_norm"] + right["per_layer+pre_norm"]) / 2
    assert contrasts["post-deep"].value == pytest.approx(post - pre)
    assert contrasts["post-deep"].value > 0.1  # the synthetic run is made so
    crossed = right["per_layer+post_norm"] + right["none+pre_norm"]
    crossed -= right["per_layer+pre_norm"] + right["none+post_norm"]
    assert contrasts["interaction-deep"].value == pytest.approx(crossed)


def applied(tables: Tables, conditions: dict[str, tuple[dict[str, Any], float]]) -> Tables:
    """``tables`` with conditions that keep a part of what was accepted."""
    depths, cells = [tables.depths], [tables.cells]
    for name, (_, kept) in conditions.items():
        depths.append(
            tables.depths.assign(
                cell=tables.depths["cell"].astype(str) + f"/{name}",
                n_accepted=(tables.depths["n_accepted"].astype("Float64") * kept),
            )
        )
        cells.append(
            tables.cells.assign(
                cell=tables.cells["cell"].astype(str) + f"/{name}", condition=name, axis="applied"
            )
        )
    config = dict(tables.manifest["config"])
    config["applied"] = {"conditions": [{"name": n, **s} for n, (s, _) in conditions.items()]}
    return replace(
        tables,
        depths=pd.concat(depths, ignore_index=True).astype({"text": "category"}),
        cells=pd.concat(cells, ignore_index=True),
        manifest={**tables.manifest, "config": config},
        cache={},
    )


def noise(path: str, alpha: float) -> dict[str, Any]:
    return {"interventions": [{"kind": "noise", "path": path, "alpha": alpha}]}


def test_noise_is_in_per_cent_of_the_drafter_s_own(tables: Tables) -> None:
    made = applied(
        tables,
        {"a": (noise("hidden", 0.5), 0.25), "b": (noise("embedding", 0.5), 0.75)},
    )
    numbers = found("t3", made, "noise")
    assert set(numbers.rows) == {f"{d}-norm, {p}" for d in ("pre", "post") for p in
                                 ("hidden", "embedding")}  # fmt: skip
    assert numbers.rows["pre-norm, hidden"]["0.5"].value == pytest.approx(25)
    assert numbers.rows["post-norm, embedding"]["0.5"].value == pytest.approx(75)
    assert numbers.contrasts["hidden-worse"].value == pytest.approx(-50)
    assert numbers.contrasts["post-sturdier"].value == pytest.approx(0)


def test_what_is_trained_and_what_is_applied_never_share_a_row(tables: Tables) -> None:
    made = applied(tables, {"a": (noise("hidden", 0.5), 0.25)})
    with_noise, without = found("t1", made), found("t1", tables)
    assert repr(with_noise.rows) == repr(without.rows)  # NaN is not itself


def test_the_pin_and_the_texts_are_known_by_their_settings(tables: Tables) -> None:
    pinned = applied(tables, {"x": ({"interventions": [{"kind": "pin_norm"}]}, 0.5)})
    numbers = found("t4", pinned, "pin")
    assert numbers.rows["pre-norm"]["ratio"].value == pytest.approx(0.5)
    conditions = {
        "no bos": ({"bos": "never"}, 0.9),
        "bare": ({"template": "never", "bos": "never"}, 0.5),
        "other": ({"system": "You are a pirate."}, 0.1),
    }
    numbers = found("s5-2", applied(tables, conditions), "template")
    row = numbers.rows["pre-norm"]
    assert row["neither / trained"].value == pytest.approx(0.5)
    assert row["template, no BOS"].value == pytest.approx(0.9 * row["template + BOS"].value)
    assert numbers.contrasts["pre-falls"].value == pytest.approx(0.5)
    window = {"kind": "window", "size": 32}
    reach: dict[str, tuple[dict[str, Any], float]] = {
        "long": ({"context": {"tokens": 512}}, 0.2),
        "w": ({"context": {"tokens": 512}, "interventions": [window]}, 0.6),
        "ws": ({"context": {"tokens": 512}, "interventions": [{**window, "keep": 1}]}, 0.7),
    }
    numbers = found("s5-3", applied(tables, reach), "context")
    row = numbers.rows["pre-norm, 512 tokens before"]
    assert numbers.contrasts["window-helps"].value == pytest.approx(
        row["window"].value - row["full"].value
    )
    assert numbers.contrasts["window-helps"].value > 0


def test_training_lengths_beyond_the_trained_depth(tables: Tables) -> None:
    cells = tables.cells.assign(ttt=2)
    longer = tables.cells.assign(ttt=8, cell=tables.cells["cell"].astype(str) + "-8")
    depths = tables.depths.assign(cell=tables.depths["cell"].astype(str) + "-8")
    both = replace(
        tables,
        depths=pd.concat([tables.depths, depths], ignore_index=True).astype({"text": "category"}),
        cells=pd.concat([cells, longer], ignore_index=True),
        cache={},
    )
    numbers = found("f10", both, "ttt")
    assert set(numbers.rows) == {f"{d}-norm / {t}" for d in ("pre", "post") for t in (2, 8)}
    assert numbers.contrasts["short-fails"].value == pytest.approx(0)
    assert numbers.contrasts["post-helps"].value > 0
    curve = numbers.frame.query("panel == 'conditional acceptance' and line == 'pre-norm, TTT 2'")
    rows = tables.depths[tables.depths["cell"].astype(str).str.startswith("none+pre_norm")]
    rows = rows[(rows["mode"] == "free") & (rows["text"] == "sampled")]
    chances = rows[rows["n_opportunities"] > 0].groupby("depth")["prompt"].nunique()
    assert list(curve["prompts"]) == [chances[d] for d in curve["x"]]
    assert min(curve["prompts"]) < 8


def test_conditions_beyond_the_paper_stand_beside_their_own_drafter(tables: Tables) -> None:
    removed = {"interventions": [{"kind": "knock_out_sink"}]}
    numbers = found("sink", applied(tables, {"sink removed": (removed, 0.5)}), "sink")
    assert numbers.rows["none+pre_norm, sink removed"]["of its own"].value == pytest.approx(0.5)
    assert numbers.rows["none+pre_norm, sink removed"]["difference"].value == 0
    assert numbers.size == "8 prompts x 2 seeds"
    gone = [f"p{i}" for i in range(3)]
    made = applied(tables, {"sink removed": (removed, 0.5)})
    lost = made.depths["cell"].astype(str).str.endswith("removed") & made.depths["prompt"].isin(
        gone
    )
    fewer = found("sink", replace(made, depths=made.depths[~lost], cache={}), "sink")
    assert fewer.size == "5 to 8 prompts x 2 seeds"
    assert set(numbers.frame["x"]) == {"sink removed"}
    assert set(found("residual", tables, "residual").rows) == set(tables.cells["variant"])


def test_agreement_with_the_target_is_by_layer(tables: Tables) -> None:
    rows = tables.cells[["cell"]].merge(tables.prompts.loc[:, ["prompt", "text"]], how="cross")
    rows = rows.merge(pd.DataFrame({"layer": [0, 1], "correlation": [0.2, 0.6]}), how="cross")
    rows = rows.assign(divergence=0.7 - rows["correlation"])
    numbers = found("agreement", replace(tables, extra={"agreement": rows}), "agreement")
    row = numbers.rows["per_layer+pre_norm"]
    assert row["highest correlation"].value == pytest.approx(0.6)
    assert row["lowest divergence (nats)"].value == pytest.approx(0.1)
    curve = numbers.frame.query("panel == 'correlation' and line == 'none+pre_norm'")
    assert dict(zip(curve["x"], curve["value"].round(6), strict=True)) == {0: 0.2, 1: 0.6}


# --- tables that are committed ------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper(run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paper with the real text, one item and one run."""
    folder = tmp_path_factory.mktemp("paper") / "paper"
    folder.mkdir()
    text = (PAPER / "paper.toml").read_text(encoding="utf-8")
    head, *items = text.split("\n[items.")
    kept = [i for i in items if i.startswith(("t1]", "t3]"))]
    (folder / "paper.toml").write_text("\n[items.".join([head, *kept]))
    for name in ("page.md", "front.md"):
        shutil.copy(PAPER / name, folder)
    committed.publish(run.path, folder / "runs" / "norms-micro")
    assert committed.draw(folder) == []
    return folder


def test_reduced_tables_say_the_same(run: RunDirectory, paper: Path) -> None:
    small = RunDirectory.open(paper / "runs" / "norms-micro")
    assert committed.changed_tables(small) == []
    assert len(small.heads) == 0
    assert "reduced" in small.manifest
    whole, kept = run.depths, small.depths
    whole = whole[whole["text"] == "sampled"].reset_index(drop=True)
    assert set(kept["text"]) == {"sampled"}
    for name in kept.columns:
        if kept[name].dtype == np.float32 and name != "temperature":
            np.testing.assert_allclose(kept[name], whole[name], rtol=1.3e-4)
        else:
            pd.testing.assert_series_equal(kept[name], whole[name], check_dtype=False)
    unit = pq.read_schema(small.path / "depths.parquet").field("entropy").metadata[b"unit"]
    assert unit == b"nats"


def test_pages_are_current_until_they_are_changed(paper: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(paper, tmp_path / "paper"))
    page = copy / "t1" / "README.md"
    said = page.read_text()
    growth = Paper(copy).values["t1.micro.none+pre_norm.h*8/h*1"].removeprefix("x")
    value = growth.split()[0]
    assert value in said
    page.write_text(said.replace(value, f"{float(value) + 0.5:.2f}"))
    (copy / "t1" / "old.txt").write_text("x")
    (copy / "t3" / "table.tex").unlink()
    named = ["t1/README.md", "t3/table.tex", "t1/old.txt (no table gives it)"]
    assert committed.draw(copy, check=True) == named
    committed.draw(copy)
    (copy / "t1" / "old.txt").unlink()
    assert committed.draw(copy, check=True) == []


def test_a_page_whose_run_is_missing_says_so(paper: Path) -> None:
    said = (paper / "t3" / "README.md").read_text()
    assert "**Not run.**" in said
    assert "make reproduce ONLY=noise-micro" in said
    assert "| pre-norm, hidden | 3.06 | 82 | 28 | 5 | 0 | 0 | two sources |" in said
    assert not (paper / "t3" / "figures").exists()
    front = (paper / "README.md").read_text()
    assert "| norms-micro | 8 | 8 prompts x 2 seeds |" in front
    assert "| [T3. Noise on the two paths](t3) | not run |" in front


def test_a_page_holds_the_numbers_with_their_size(paper: Path) -> None:
    said = (paper / "t1" / "README.md").read_text()
    assert "8 prompts x 2 seeds" in said
    assert "agrees" in said
    rows = list(csv.DictReader(io.StringIO((paper / "t1" / "table.csv").read_text())))
    ours = [r for r in rows if r["base"] == "micro" and r["block"] == "statement"]
    assert {r["row"] for r in ours} == {"grows", "second", "third", "unbalanced"}
    grows = next(r for r in ours if r["row"] == "grows")
    assert float(grows["low"]) <= float(grows["value"]) <= float(grows["high"])
    assert (grows["prompts"], grows["seeds"]) == ("8", "2")
    drawn = pd.read_csv(paper / "t1" / "figures" / "t1.csv")
    assert {"base", "panel", "line", "x", "value", "low", "high", "prompts", "seeds"} <= {*drawn}


def test_papers_are_found_by_their_description(paper: Path) -> None:
    assert find_paper(paper) == paper
    assert find_paper(paper / "runs" / "new") == paper
    assert find_paper(paper.parent / "elsewhere" / "x" / "y") is None
    assert committed.is_paper(paper)


@pytest.mark.parametrize("break_", ["marks = 3", "[items.t99]\ntitle = 'x'", "[bases"])
def test_a_wrong_description_is_refused(paper: Path, tmp_path: Path, break_: str) -> None:
    (tmp_path / "paper.toml").write_text((paper / "paper.toml").read_text() + "\n" + break_)
    with pytest.raises(ConfigError, match=r"paper\.toml"):
        Paper(tmp_path)


# --- text ---------------------------------------------------------------------------------------


def test_templates_take_numbers_by_name() -> None:
    values = {"t1.micro.grows": "x1.5 [1.4, 1.6]", "title": "T"}
    text = fill("{{title}}: {{t1.micro.grows}}, {{t3.micro.x}}", values, where="here")
    assert text == "T: x1.5 [1.4, 1.6], n/a (not run)"
    with pytest.raises(ConfigError, match="here asks for 'titel'"):
        fill("{{titel}}", values, where="here")


def test_numbers_may_differ_in_the_last_digit_only(tmp_path: Path) -> None:
    a, b = tmp_path / "a.md", tmp_path / "b.md"
    a.write_text("grows x1.57 [1.54, 1.61] in 12 prompts")
    for other, same in (
        ("grows x1.58 [1.54, 1.61] in 12 prompts", True),
        ("grows x1.59 [1.54, 1.61] in 12 prompts", False),
        ("grows x1.57 [1.54, 1.61] in 13 prompts", False),
        ("grew x1.57 [1.54, 1.61] in 12 prompts", False),
    ):
        b.write_text(other)
        assert committed._same(a, b) == same, other


def test_latex_is_escaped_and_ruled() -> None:
    assert latex.escape("none+pre_norm 50% h*1") == r"none+pre\_norm 50\% h*1"
    e = Estimate(1.571, 1.536, 1.612, 8, "x")
    assert latex.number(e) == r"$\times 1.57_{[1.54,\,1.61]}$"
    assert latex.number(replace(e, low=math.nan, high=math.nan)) == "x1.57"
    made = latex.booktabs(["", "a_b"], [("g", [["r", "1"]])], "c & d", "t9")
    assert made.count(r"\midrule") == 1
    assert made.index(r"\toprule") < made.index(r"a\_b \\") < made.index(r"r & 1 \\")
    assert r"\caption{c \& d}" in made


def test_a_drafter_looks_alike_under_either_name() -> None:
    words = {
        "neither": "none+pre_norm",
        "fc_norm alone": "per_layer+pre_norm",
        "post_norm alone": "none+post_norm",
        "both": "per_layer+post_norm",
        "concat alone": "concat+pre_norm",
        "concat and post_norm": "concat+post_norm",
    }
    told, plain = looks(list(words)), looks(list(reversed(words.values())))
    assert [told[name] for name in words] == [plain[label] for label in words.values()]


def test_names_without_room_are_turned() -> None:
    def angles(places: list[str]) -> set[float]:
        rows = pd.DataFrame({"base": "micro", "panel": "acceptance", "line": "both", "x": places})
        rows = rows.assign(value=1.0, low=0.5, high=1.5)
        figure = draw(rows, [Panel("acceptance", "condition")], {"micro": "micro"})
        return {label.get_rotation() for label in figure.axes[0].get_xticklabels()}

    assert angles(["int4", "int8", "int4, own text", "int8, own text"]) == {0}
    assert angles([f"temperature {t}" for t in (0.4, 0.6, 1.0, 1.4)]) == {35}
    assert angles([f"state {i}" for i in range(9)]) == {35}


def test_lines_of_one_figure_look_different() -> None:
    for item in Paper(PAPER).pages.values():
        for numbers in item.measured.values():
            style = looks(list(dict.fromkeys(numbers.frame["line"])))
            assert len(set(map(str, style.values()))) == len(style), item.id


# --- the committed paper ------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_the_committed_paper_is_what_its_tables_give() -> None:
    assert committed.draw(PAPER, check=True) == []


def test_the_committed_note_is_what_its_source_gives(tmp_path: Path) -> None:
    for source in [PAPER / "note.typ", *PAPER.glob("*/figures/*.png")]:
        (tmp_path / source.relative_to(PAPER)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / source.relative_to(PAPER))
    made = compile_note(tmp_path).read_bytes()
    assert made.startswith(b"%PDF")
    assert made == (PAPER / "note.pdf").read_bytes(), "build it again: make note"


def test_every_item_of_the_paper_has_a_page() -> None:
    named = {"flagship", "t1", "t2", "t3", "t4", "f7", "f10", "s5-2", "s5-3"}
    assert named <= set(ITEMS)
    text = Paper(PAPER).text
    assert named <= set(text.items)
    for name, item in text.items.items():
        assert (PAPER / name / "README.md").is_file(), name
        for row in item.rows:
            assert len(row.values) == len(item.columns), (name, row.row)
            assert row.mark in ("one source", "two sources")


def test_committed_results_stay_small() -> None:
    size = sum(p.stat().st_size for p in PAPER.rglob("*") if p.is_file())
    assert size < 10_000_000


# --- make reproduce -----------------------------------------------------------------------------


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PAPER))
    yield importlib.import_module("reproduce")
    del sys.modules["reproduce"]


def test_a_plan_names_every_run_and_its_time(reproduce: Any, tmp_path: Path) -> None:
    jobs = reproduce.jobs()
    names = [job.name for job in jobs]
    assert names.index("norms-micro") < names.index("noise-micro") < names.index("norms-smollm2")
    by_name = {job.name: job for job in jobs}
    assert (by_name["norms-micro"].trained, by_name["norms-micro"].applied) == (18, 0)
    noisy = by_name["noise-micro"]
    assert (noisy.trained, noisy.applied) == (0, 4 * 3 * 11)
    said = reproduce.plan([by_name["norms-micro"]], tmp_path, rate=5.0, theirs=10.0)
    twice = reproduce.plan([by_name["norms-micro"]], tmp_path, rate=2.5, theirs=10.0)
    assert "norms-micro" in said and "recorded" in said
    assert said != twice
    said = reproduce.plan([by_name["explained-micro"]], tmp_path, rate=5.0, theirs=10.0)
    assert "norms-micro, 12 prompts" in said and "1 runs whose time is not known" in said
    assert names.index("norms-micro") < names.index("explained-micro")
    assert reproduce.told(30) == "30 s"
    assert reproduce.told(7200) == "2.0 h"
    assert reproduce.gemm_rate(0.02) > 0
    assert not reproduce.finished(by_name["norms-micro"], tmp_path / "norms-micro")
