"""Paired comparison of runs, and served acceptance beside measured acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_run import make_run, prompt_names

from driftlab.errors import ConfigError, DataError, RunError
from driftlab.results.compare import Comparison, _Run, _sides, compare, split_cell
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.served import Served, compare_served, read_served
from driftlab.results.slices import TextKind, take

PRE, POST = ("none", "pre_norm"), ("none", "post_norm")
Make = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def made(**options: Any) -> RunDirectory:
        defaults: dict[str, Any] = {
            "variants": [PRE],
            "seeds": (0, 1),
            "texts": ("sampled",),
            "anchors": 10,
        }
        return make_run(tmp_path_factory.mktemp("run") / "r", **(defaults | options))

    return made


@pytest.fixture(scope="module")
def pre(make: Make) -> RunDirectory:
    return make()


@pytest.fixture(scope="module")
def post(make: Make) -> RunDirectory:
    return make(variants=[POST])


@pytest.fixture(scope="module")
def both(make: Make) -> RunDirectory:
    return make(variants=[PRE, POST])


def row(found: Comparison, measure: str) -> Any:
    return next(r for r in found.rows if r.measure == measure)


# Two runs


def test_differences_are_paired_means(pre: RunDirectory, post: RunDirectory) -> None:
    """Against pandas by hand: per prompt and seed, then the mean."""
    found = compare(pre.path, post.path)
    frames = []
    for run in (pre, post):
        d = run.depths
        d = d[(d["mode"] == "forced") & (d["depth"] == 4)]
        d = d.assign(seed=d["cell"].str[-1])
        frames.append((d["n_correct"] / d["n"]).groupby([d["seed"], d["prompt"]]).mean())
    accuracy = row(found, "forced accuracy @4")
    assert accuracy.a.value == pytest.approx(frames[0].mean())
    assert accuracy.b.value == pytest.approx(frames[1].mean())
    assert accuracy.effect.value == pytest.approx((frames[1] - frames[0]).mean())
    assert accuracy.effect.n == 8
    assert accuracy.effect.seeds == 2
    growth = row(found, "growth 1-8, state")
    assert growth.effect.unit == "x"
    assert growth.effect.value == pytest.approx(1.15**-7, rel=0.03)
    family = sum(not np.isnan(r.effect.p) for r in found.rows)
    assert growth.p == pytest.approx(family * 2**-7), "eight prompts, all on one side"
    assert not growth.shown
    assert f"8 prompts are too few to show a difference among {family} comparisons" in str(found)
    cell: Any = found.table().loc[("none+post_norm against none+pre_norm", "sink @8"), "b"]
    assert cell.n == 8


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (1, "one prompt: no test."),
        (5, "5 prompts are too few to show a difference among "),
        (12, "growth 1-8, state goes from "),
    ],
)
def test_what_so_many_prompts_can_show(make: Make, prompts: int, said: str) -> None:
    options: dict[str, Any] = {"prompts": prompt_names(prompts), "seeds": (0,), "modes": ("free",)}
    found = compare(make(**options), make(variants=[POST], **options))
    assert any(sentence.startswith(said) for sentence in found.sentences)
    assert any(row.shown for row in found.rows) == (prompts > 5)
    assert ("one prompt has no interval" in found.basis) == (prompts == 1)
    if prompts == 1:
        assert {row.p for row in found.rows if not np.isnan(row.p)} == set()


def test_conditional_acceptance_pools_opportunities(pre: RunDirectory, post: RunDirectory) -> None:
    found = row(compare(pre, post), "conditional acceptance @2")
    d = post.depths
    d = d[(d["mode"] == "free") & (d["depth"] == 2)]
    assert found.b.value == pytest.approx(d["n_accepted"].sum() / d["n_opportunities"].sum())
    length = row(compare(pre, post), "acceptance length (bonus included)")
    assert length.a.value > 1
    # A seed without a chance on one side is not in the effect, and so in neither level.
    t = pre.tables()
    gone = (t.depths["cell"].astype(str) == "none+pre_norm/s1") & (t.depths["depth"] == 2)
    left = {n: t.depths[n].mask(gone, 0) for n in ("n_opportunities", "n_accepted")}
    fewer = replace(t, depths=t.depths.assign(**left), cache={})
    one = row(compare(fewer, pre), "conditional acceptance @2")
    assert one.effect.seeds == one.a.seeds == one.b.seeds == 1
    assert one.effect.value == pytest.approx(one.b.value - one.a.value)


def test_a_run_equals_itself(pre: RunDirectory) -> None:
    found = compare(pre, pre)
    assert found.rows
    assert all(r.effect.value == r.effect.null and not r.shown for r in found.rows)
    assert found.sentences == ("no measure differs beyond chance.",)
    assert found.differences == ()


def test_p_values_are_corrected_over_the_whole_family(
    pre: RunDirectory, post: RunDirectory
) -> None:
    found = compare(pre, post)
    known = sorted((r.effect.p, r.p) for r in found.rows if np.isfinite(r.p))
    running = 0.0
    for i, (raw, adjusted) in enumerate(known):
        running = max(running, min(1.0, raw * (len(known) - i)))
        assert adjusted == pytest.approx(running)
    assert f"{len(known)} comparisons (Holm)" in found.basis


def test_cells_of_one_run_are_compared(both: RunDirectory) -> None:
    found = compare(f"{both.path}:none+pre_norm/s0", f"{both.path}:none+post_norm/s0")
    assert row(found, "growth 1-8, state").effect.seeds == 1
    assert any("noise of training" in note for note in found.notes)
    whole = compare(f"{both.path}:none+pre_norm", f"{both.path}:none+post_norm")
    assert row(whole, "growth 1-8, state").effect.seeds == 2


def test_variants_meet_by_name(both: RunDirectory, pre: RunDirectory) -> None:
    found = compare(both, both)
    assert [a.group.label for a, _ in found.pairs] == ["none+pre_norm", "none+post_norm"]
    assert len(compare(both, pre).pairs) == 1
    with pytest.raises(RunError, match="several variants, and the other side is one cell") as e:
        compare(both.path, f"{both.path}:none+pre_norm/s0")
    assert "RUN" not in str(e.value)
    assert f"{both.path}:CELL" in str(e.value)
    with pytest.raises(RunError, match="no finished cell 'x' with sampled"):
        compare(f"{both.path}:x", both.path)


def test_no_common_seed_compares_means_over_seeds(make: Make, pre: RunDirectory) -> None:
    other = make(variants=[POST], seeds=(5, 6, 7))
    found = compare(pre, other)
    accuracy = row(found, "forced accuracy @1")
    assert accuracy.effect.seeds == 1
    d = other.depths
    d = d[(d["mode"] == "forced") & (d["depth"] == 1)]
    assert accuracy.b.value == pytest.approx((d["n_correct"] / d["n"]).mean())
    assert any("no seed known to be in common" in note for note in found.notes)


def test_what_was_probed_has_no_known_seed(make: Make, both: RunDirectory) -> None:
    """It may be the drafter of any seed: nothing is paired by one."""

    def probed(run: RunDirectory) -> Tables:
        tables = run.tables()
        return replace(tables, cells=tables.cells.assign(seed=float("nan")), cache={})

    one, other = probed(make(seeds=(1,))), probed(make(seeds=(0,)))
    run = make(seeds=(0, 1, 2))
    for a, b in ((one, other), (run, one), (one, run)):
        found = compare(a, b)
        assert any("no seed known to be in common" in note for note in found.notes)
        assert "seed unknown" in str(found)
    cells = probed(both).cells["cell"]
    assert len(cells) == 4  # two of each variant, which an unknown seed cannot tell apart
    with pytest.raises(DataError, match="same variant, condition and seed"):
        compare(probed(both), run)


def test_a_page_names_the_seeds_that_were_compared(make: Make) -> None:
    found = compare(make(seeds=(0, 1, 2)), make(variants=[POST], seeds=(2, 5)))
    labels = [side.label for side in found.pairs[0]]
    assert labels == ["none+pre_norm, seed 2", "none+post_norm, seed 2"]
    assert any("paired by seeds 2, which both have" in note for note in found.notes)


def test_the_variant_that_has_one_seed_is_named(make: Make) -> None:
    tables = make(variants=[PRE, POST], seeds=(0, 1)).tables()
    gone = tables.cells["cell"].astype(str) == "none+post_norm/s1"
    depths = tables.depths[tables.depths["cell"].astype(str) != "none+post_norm/s1"]
    fewer = replace(tables, cells=tables.cells[~gone], depths=depths, cache={})
    notes = compare(fewer, fewer).notes
    said = "one seed: the noise of training is not in the intervals"
    assert notes == (f"none+post_norm: {said}",)
    piece = take(fewer, "free")
    assert ["x 2 seeds" in piece.basis_of([g]) for g in piece.groups] == [True, False]
    alone = make(seeds=(3,))
    assert compare(alone, alone).notes == (said,)


def test_a_variant_beside_its_conditions_is_the_unchanged_one(both: RunDirectory) -> None:
    tables = both.tables()
    cells = tables.cells.astype({"cell": str, "condition": str, "axis": str})
    more = cells.assign(cell=cells["cell"] + "/pin", condition="pin", axis="applied")
    depths = tables.depths.astype({"cell": str})
    run = replace(
        tables,
        cells=pd.concat([cells, more]),
        depths=pd.concat([depths, depths.assign(cell=depths["cell"] + "/pin")]),
        fused=tables.fused[:0],
        cache={},
    )
    named, kind = _Run("r", run, "none+pre_norm", None), TextKind("sampled", 1.0)
    (side,) = _sides(named, kind)
    assert side.group.label == "none+pre_norm" and side.seeds == (0, 1)
    (pinned,) = _sides(named._replace(cell="none+pre_norm, pin (applied)"), kind)
    assert pinned.group.condition == "pin"


def test_a_text_must_count_on_both_sides(make: Make) -> None:
    """A looping text counts where no other is, and is left out where another does not loop."""
    first, *rest = prompt_names(3)
    alone = make(prompts=[first], loops=[first])
    assert (
        "all compared texts run in a loop, which flatters every drafter"
        in compare(alone, alone).notes
    )
    beside = make(prompts=[first, *rest], loops=[first])
    with pytest.raises(RunError, match=r"no text counts in both \(got 1 and 2 that count in one"):
        compare(alone, beside)
    assert compare(beside, beside).notes == ("texts left out because they run in a loop: 1",)


def test_runs_without_chains_of_one_kind_are_refused(make: Make) -> None:
    free, forced = make(modes=["free"]), make(modes=["forced"])
    with pytest.raises(RunError, match="chains: free and forced"):
        compare(free, forced)


def test_seeds_and_prompts_that_both_have(make: Make, pre: RunDirectory) -> None:
    other = make(variants=[POST], seeds=(1, 9), prompts=prompt_names(6))
    found = compare(pre, other)
    assert row(found, "sink @8").effect.n == 6
    assert any("2 of A and 0 of B were left out" in note for note in found.notes)
    assert any("paired by seeds 1, which both have" in note for note in found.notes)


def _config(**measure: Any) -> dict[str, Any]:
    return {"config": {"measure": {"bootstrap": 200, "depth": 8, **measure}}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depth": 4, "manifest": _config(depth=4)}, "measured depth: 8 and 4"),
        ({"manifest": _config(sink=[0, 1])}, r"sink set: None and \[0, 1\]"),
        ({"manifest": _config(max_anchors=4)}, "anchors of a text: None and 4"),
        ({"manifest": _config() | {"inputs": {"target": "feed"}}}, "target: .*unnamed .feed."),
        ({"prompts": ["other"]}, "prompts, none in common"),
        ({"anchors": 7}, "anchors of 8 of 8 prompts, first story-00: 10 and 7"),
    ],
)
def test_unlike_runs_are_refused_by_the_setting(
    make: Make, pre: RunDirectory, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunError, match=f"are not alike .got .*{said}") as error:
        compare(pre, make(**options))
    assert error.value.remedy


def test_every_unlike_setting_is_named(make: Make, pre: RunDirectory) -> None:
    other = make(depth=4, manifest=_config(depth=4, sink="auto"))
    with pytest.raises(RunError, match="measured depth: 8 and 4; sink set: None and auto"):
        compare(pre, other)


def test_other_texts_are_refused(make: Make, pre: RunDirectory) -> None:
    tables = pre.tables()
    prompts = tables.prompts.assign(tokens_sha="1" * 64)
    from dataclasses import replace

    with pytest.raises(RunError, match="text of 8 of 8 prompts, first story-00"):
        compare(tables, replace(tables, prompts=prompts, cache={}))


def test_kinds_of_text_must_be_in_both(make: Make, pre: RunDirectory) -> None:
    greedy = make(texts=("greedy",))
    with pytest.raises(RunError, match="no kind of text is in both runs") as error:
        compare(pre, greedy)
    assert "sampled text (temperature 1)" in str(error.value)
    with pytest.raises(RunError, match="no greedy text is in both"):
        compare(pre, pre, kind="greedy")
    with pytest.raises(ConfigError, match=r"no such kind of text .*got xyz"):
        compare(pre, pre, kind="xyz")


def test_settings_that_may_differ_are_listed(make: Make, pre: RunDirectory) -> None:
    other = make(variants=[POST], manifest={"config": {**_config()["config"], "train": {"lr": 1}}})
    assert compare(pre, other).differences == ("train.lr: not set (A), 1 (B)",)
    told = make(manifest={"config": {**_config()["config"], "axes": {}, "text": {"limit": 3}}})
    assert compare(pre, told).differences == ()  # a probe names its settings otherwise


def test_a_path_with_a_colon(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert split_cell(f"{tmp_path}/a:b") == (tmp_path / "a:b", None)
    assert split_cell(f"{tmp_path}/a:b:none+pre_norm/s0") == (tmp_path / "a:b", "none+pre_norm/s0")


# What engines write

LABELS = 'engine="0",model_name="m"'


def page(rounds: int, positions: list[int], drafted: int | None = None) -> str:
    drafted = rounds * len(positions) if drafted is None else drafted
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {rounds}.0",
        f"vllm:spec_decode_num_drafts_created{{{LABELS}}} 1.7802746209391222e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {drafted}.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {sum(positions)}.0",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="{i}"}} {n}.0'
        for i, n in enumerate(positions)
    ]
    return "\n".join([*lines, 'vllm:cache_config_info{note="a b}"} 1.0', ""])


def wrote(folder: Path, text: str) -> Path:
    path = folder / "page.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_vllm_page_counts_positions_over_all_rounds(tmp_path: Path) -> None:
    """Four rounds that accept 4, 2, 0 and 1 of 4."""
    found = read_served(wrote(tmp_path, page(4, [3, 2, 1, 1])))
    assert found.source == "vLLM metrics page"
    assert found.marginal == (0.75, 0.5, 0.25, 0.25)
    assert found.accepted_drafts == 1.75
    assert found.acceptance_length == 2.75
    assert (found.rounds, found.drafted, found.depth) == (4, 16, 4)
    assert found.error == pytest.approx(np.std([4, 2, 0, 1]) / 2)


def test_a_page_without_positions_has_the_largest_error_there_can_be(
    tmp_path: Path, make: Make
) -> None:
    text = "\n".join(line for line in page(20, [8, 7, 5]).splitlines() if "per_pos" not in line)
    found = compare_served(make(seeds=(0,)), read_served(wrote(tmp_path, text)), depth=3)
    assert found.rows[1].served == 1.0
    assert found.rows[1].error == pytest.approx(math.sqrt(1.0 * 2.0 / 20))


def test_engines_of_one_server_are_summed(tmp_path: Path) -> None:
    two = page(4, [3, 1]) + page(6, [2, 0]).replace('engine="0"', 'engine="1"')
    found = read_served(wrote(tmp_path, two))
    assert (found.rounds, found.accepted_drafts) == (10, 0.6)
    assert found.marginal == (0.5, 0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm:num_requests_running 3.0\n", "holds no counts of speculative decoding"),
        ("", "holds no counts of speculative decoding"),
        (page(0, [0, 0]), "counts no drafted token"),
        (page(4, [3, 2]).replace("accepted_tokens_total", "x"), "lacks spec_decode_num_accepted"),
        (page(4, [2, 3]), "contradict each other"),
        (page(4, [5, 3]), "contradict each other"),
        (page(4, [3, 2]).replace(" 5.0", " 6.0"), "contradict each other"),
        (page(4, [3, 2]).replace(" 4.0", " NaN"), "is no count"),
        (page(4, [3]) + page(4, [3]).replace('"m"', '"n"'), "counts several models"),
        (page(4, [3, 2]).replace(" 4.0", " 4.5"), "is no count"),
        (page(4, [3, 2]).replace(" 5.0", " 5_0.0"), "is no number .*'5_0.0'"),
        (page(4, [3, 2]).replace(" 8.0", " 20.0"), "contradict each other .*20 drafted"),
        (page(9, [2, 1]).replace(" 18.0", " 8.0"), "contradict each other .*9 drafts, 8 drafted"),
        (
            "Decode batch, #running-req: 1, accept len: 0.00\n#running-req: 0, accept len: 2.2\n",
            "no window has running requests .*got 2 in which nothing ran, 0 without",
        ),
        ('sglang:spec_accept_length{tp_rank="0"} 0.0\n', "nothing was drafted"),
    ],
)
def test_a_page_without_counts_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RunError, match=said) as error:
        read_served(wrote(tmp_path, text))
    assert "page.txt" in error.value.cause


SGLANG = """\
[2026-08-01 10:00:00] server_args=ServerArgs(speculative_num_steps=3, speculative_eagle_topk=1)
[2026-08-01 10:00:01 TP0] Decode batch, #running-req: 3, #token: 99, token usage: 0.01, \
accept len: 2.00, accept rate: 0.33, cuda graph: True, gen throughput (token/s): 9.00, #queue-req: 0
[2026-08-01 10:00:02 TP0] Prefill batch, #new-seq: 1, #new-token: 9
[2026-08-01 10:00:03 TP0] Decode batch. #running-req: 1, #token: 99, accept len: 3.00, cuda graph: x
[2026-08-01 10:00:04 TP0] Decode batch, #running-req: 0, accept len: 0.00, accept rate: 0.00
"""


def test_an_sglang_log_has_the_bonus_in_its_length(tmp_path: Path) -> None:
    found = read_served(wrote(tmp_path, SGLANG))
    assert found.acceptance_length == pytest.approx((3 * 2.0 + 1 * 3.0) / 4)
    assert found.accepted_drafts == pytest.approx(1.25)
    assert found.depth == 3
    assert found.marginal == ()
    assert any("not compared" in note for note in found.notes)
    tree = SGLANG.replace("topk=1", "topk=4")
    assert any("trees" in note for note in read_served(wrote(tmp_path, tree)).notes)


def test_windows_without_plain_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = ["2,20", "nan", "1e0", "2.5e-1", "1_0.0", "-2.0"]
    log = [f"Decode batch, #running-req: 2, accept len: {x}, accept rate: 0,5" for x in odd]
    log.append("Decode batch, #running-req: 1e3, accept len: 4.00")
    log.append("Decode batch (#running-req: 1, accept len: 2.25)")
    found = read_served(wrote(tmp_path, "\n".join(log)))
    assert found.acceptance_length == 2.25
    assert "mean of 1 logging windows" in found.notes[0]
    assert found.notes[1] == "7 windows are left out: their numbers are not plain ones"
    assert len(found.notes) == 2  # no rate of half a number
    two = "#running-req: 2, accept len: 2.2, accept rate: 0.55\n#running-req: 4, accept len: 2.5, "
    two = read_served(wrote(tmp_path, f"{two}accept rate: 0.60\n")).notes[1]
    assert two.startswith("accept rate 0.58, of 2 windows with the same weights")
    idle = read_served(wrote(tmp_path, SGLANG)).notes
    assert "1 windows in which nothing ran are left out" in idle


@pytest.mark.parametrize(
    "arguments",
    [
        "{'speculative_num_steps': 3, 'speculative_eagle_topk': 8}",
        '{"speculative_num_steps": 3, "speculative_eagle_topk": 8}',
        "--speculative-num-steps 3 --speculative-eagle-topk 8",
    ],
)
def test_the_settings_of_a_server_in_any_spelling(tmp_path: Path, arguments: str) -> None:
    found = read_served(wrote(tmp_path, f"{arguments}\n#running-req: 1, accept len: 2.0\n"))
    assert found.depth == 3
    assert any("topk 8" in note for note in found.notes)


def test_examples_and_times_of_openmetrics_are_no_counts(tmp_path: Path) -> None:
    """Of the specification: NAME{LABELS} VALUE TIME # {LABELS} VALUE TIME."""
    lines = page(4, [3, 2]).splitlines()
    for more in (' # {trace_id="a b}"} 1.0', " 1712345678.123", ' 17 # {t="x"} 0.5 17.25'):
        found = read_served(wrote(tmp_path, "\n".join(line + more for line in lines)))
        assert (found.rounds, found.marginal) == (4, (0.75, 0.5))


def test_an_sglang_page(tmp_path: Path) -> None:
    text = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_num_steps 4.0\n'
    found = read_served(wrote(tmp_path, text))
    assert (found.accepted_drafts, found.depth) == (1.5, 4)
    found = read_served(wrote(tmp_path, text + 'sglang:spec_accept_length{tp_rank="1"} 3.5\n'))
    assert found.accepted_drafts == 2.0
    assert any("mean of 2 ranks" in note for note in found.notes)


GAUGE = 'sglang:spec_accept_length{model_name="m"} 2.5\nsglang:spec_num_steps 4.0\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GAUGE + GAUGE.splitlines()[0].replace('"m"', '"n"'), "several models .*m, n"),
        (GAUGE + GAUGE.splitlines()[0].replace("2.5", "3.5"), "spec_accept_length twice"),
        (SGLANG + SGLANG.replace("steps=3", "steps=4"), "unlike settings .*num_steps 3 and 4"),
        (SGLANG.replace("topk=1", "topk=8") + SGLANG, "unlike settings .*eagle_topk 8 and 1"),
    ],
)
def test_several_servers_in_one_file_are_not_averaged(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        read_served(wrote(tmp_path, text))


# Served beside measured


def walked(run: RunDirectory, k: int) -> tuple[int, np.ndarray]:
    """Rounds and accepted by position, walked in plain Python."""
    steps = run.steps
    steps = steps[(steps["mode"] == "free") & (steps["depth"] <= k)]
    rounds, counts = 0, np.zeros(k, dtype=int)
    for _, part in steps.groupby(["cell", "prompt"]):
        by_anchor: dict[Any, list[Any]] = {
            a: list(p.sort_values("depth")["accepted"]) for a, p in part.groupby("anchor")
        }
        at = min(by_anchor)
        while at in by_anchor:
            taken = by_anchor[at]
            rounds += 1
            counts += np.array(taken, dtype=int)
            at += sum(map(bool, taken)) + 1
    return rounds, counts


def test_rounds_are_walked_as_an_engine_does(pre: RunDirectory, tmp_path: Path) -> None:
    rounds, counts = walked(pre, 3)
    found = compare_served(pre, wrote(tmp_path, page(rounds, counts.tolist())))
    assert found.agrees
    for beside in found.rows:
        assert beside.measured.value == pytest.approx(beside.served), beside.name
    assert "walked as an engine does" in found.basis
    assert "agree" in found.sentence
    text = str(found)
    assert "acceptance length (bonus included)" in text
    assert "accepted drafts (no bonus)" in text
    assert "unconditional" in text


def test_a_served_shortfall_is_said_in_words(pre: RunDirectory, tmp_path: Path) -> None:
    found = compare_served(pre, wrote(tmp_path, page(4000, [400, 40, 4])))
    assert not found.agrees
    assert "Served acceptance length is lower than the measured one" in found.sentence
    assert "driftlab doctor --as vllm" in found.sentence
    assert found.rows[2].verdict.startswith("served is lower by")


def test_anchors_with_gaps_start_rounds_everywhere(pre: RunDirectory) -> None:
    """Published tables have no steps: pooled over anchors, and said."""
    d = pre.depths
    d = d[d["mode"] == "free"]
    share = d.loc[d["depth"] == 1, "n_accepted"].sum() / d.loc[d["depth"] == 1, "n"].sum()
    served = Served("vLLM metrics page", "p", share, "c", (float(share),), 1000, 1000, 1)
    found = compare_served(pre.tables(), served)
    assert found.rows[2].measured.value == pytest.approx(share)
    assert "every anchor" in found.basis


def test_drafts_of_a_round_must_be_known_and_measured(
    pre: RunDirectory, both: RunDirectory, tmp_path: Path
) -> None:
    log = wrote(tmp_path, SGLANG.replace("speculative_num_steps=3", "x=3"))
    with pytest.raises(RunError, match="does not say how many tokens a round drafts"):
        compare_served(pre, log)
    assert compare_served(pre, log, depth=3).served.depth is None
    deep = Served("vLLM metrics page", "p", 1.0, "c", depth=9)
    with pytest.raises(RunError, match="drafts 9 tokens a round, the run measured 8"):
        compare_served(pre, deep)
    with pytest.raises(RunError, match="several variants"):
        compare_served(both, deep)


def test_one_door_for_both(
    pre: RunDirectory, post: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import driftlab
    from driftlab.cli import main

    served = wrote(tmp_path, page(40, [20, 10]))
    assert isinstance(driftlab.compare(pre, post), Comparison)
    assert "rounds" in str(driftlab.compare(pre.path, served))
    for other in (str(post.path), str(served)):
        with pytest.raises(SystemExit) as done:
            main(["compare", str(pre.path), other])
        assert done.value.code == 0
    said = capsys.readouterr().out
    assert "p corrected for" in said
    assert "num_accepted_tokens_per_pos / num_drafts" in said
    with pytest.raises(SystemExit) as failed:
        main(["compare", str(pre.path), str(post.path), "--depth", "3"])
    assert failed.value.code == 2
    assert "depth belongs to an engine's file" in capsys.readouterr().err
