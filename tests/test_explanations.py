"""Sentences and figures of explained runs, on rows whose truth is known."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic_run

from driftlab.errors import DataError, NumericsError, RunError
from driftlab.results.drawing import save_frame
from driftlab.results.explain_figures import EXPLAIN_FIGURES, available, save_explain_figures
from driftlab.results.explanations import (
    MEASURES,
    Explained,
    ExplainedFolder,
    answers,
    boundary_part,
)
from driftlab.results.schema import SCHEMAS
from driftlab.results.shards import make_table
from driftlab.results.stats import estimate

DEPTHS = (1, 2, 4)
PROMPTS = synthetic_run.prompt_names(12)
FEEDBACK = ("pre_norm", "post_norm")


def level(measure: str, part: str, depth: int, feedback: str) -> float:
    """What a cell's prompts scatter around: mass and effect agree, unless a test changes it."""
    stacked = feedback == "pre_norm"
    return {
        ("mass", "sink"): 0.4,
        ("mass", "prompt_mass"): 0.3,
        ("mass", "generated"): 0.2,
        ("mass", "draft_mass"): 0.1,
        ("effect", "sink"): 0.8,
        ("effect", "prompt_mass"): 0.6,
        ("effect", "generated"): 0.4,
        ("effect", "draft_mass"): 0.2,
        ("share", "boundary 2"): 0.1,
        ("share", "boundary 15"): 0.3,
        ("share", "boundary 27"): 0.6,
        ("shapley", "boundary 2"): 0.2,
        ("shapley", "boundary 15"): 0.5,
        ("shapley", "boundary 27"): 1.0,
        ("cosine", "previous"): 0.9 if stacked else 0.3,
        ("cosine", "same_token"): 0.4 if stacked else 0.7,
        ("cosine", "write_previous"): 0.2,
        ("cosine", "write_same_token"): 0.6,
        ("cosine", "other"): 0.1,
        ("geometry", "token"): 0.5,
        ("geometry", "anchor"): 0.2,
        ("rank", "state"): 20.0 - depth,
        ("lens_draft", "feedback.in"): 0.3,
        ("lens_draft", "resid.mid"): 0.6,
        ("lens_read", "feedback.in"): 0.4,
        ("gradients", "embedding"): 2.0,
        ("gradients", "feedback"): 1.0,
        ("gap", "shapley"): 1e-7,
    }[measure, part]


KEYS = [
    *[("mass", r) for r in ("sink", "prompt_mass", "generated", "draft_mass")],
    *[("effect", r) for r in ("sink", "prompt_mass", "generated", "draft_mass")],
    *[(m, boundary_part(b)) for m in ("share", "shapley") for b in (2, 15, 27)],
    *[("cosine", p) for p in ("previous", "same_token", "other")],
    *[("cosine", f"write_{p}") for p in ("previous", "same_token")],
    *[("geometry", p) for p in ("token", "anchor")],
    ("rank", "state"),
    *[("lens_draft", p) for p in ("feedback.in", "resid.mid")],
    ("lens_read", "feedback.in"),
    *[("gradients", p) for p in ("embedding", "feedback")],
    ("gap", "shapley"),
]


def made(
    changes: dict[tuple[str, str], float] | None = None,
    *,
    seeds: tuple[int, ...] = (0, 1),
    noise: float = 0.01,
    prompts: list[str] = PROMPTS,
) -> Explained:
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    cells = []
    for feedback in FEEDBACK:
        for seed in seeds:
            cell = synthetic_run.cell_row("none", feedback, seed)
            cells.append(cell)
            for (measure, part), depth in itertools.product(KEYS, DEPTHS):
                if part == "draft_mass" and measure == "effect" and depth < 3:
                    continue
                if measure == "share" and depth > 1:
                    continue
                value = level(measure, part, depth, feedback)
                value = (changes or {}).get((measure, part), value)
                spread = rng.standard_normal(len(prompts))
                spread -= spread.mean()  # the mean over prompts is the level
                for prompt, off in zip(prompts, spread, strict=True):
                    rows.append(
                        {
                            "cell": cell["cell"],
                            "prompt": prompt,
                            "depth": depth,
                            "measure": measure,
                            "part": part,
                            "value": value * (1 + noise * off),
                        }
                    )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    table = make_table("explained", {**columns, "text": "sampled", "n": 7}, "all")
    frame = pd.DataFrame([{n: c.get(n) for n in SCHEMAS["cells"].names} for c in cells])
    return Explained.build(table, frame, {"config": {"measure": {"bootstrap": 300}}}, left_out=2)


@pytest.fixture(scope="module")
def agreed() -> Explained:
    return made()


def said(found: Explained, question: str) -> list[str]:
    return [a.sentence for a in answers(found) if question in a.question]


def test_cubes_hold_the_rows(agreed: Explained) -> None:
    assert [g.label for g in agreed.groups] == ["none+pre_norm", "none+post_norm"]
    assert (agreed.seeds, agreed.depths, agreed.prompts) == ((0, 1), DEPTHS, tuple(PROMPTS))
    cube = agreed.cube("effect", "draft_mass")
    assert cube.shape == (2, 2, 12, 3)
    assert np.isnan(cube[..., :2]).all() and np.isfinite(cube[..., 2]).all()
    table = agreed.table
    row = table[
        (table["cell"] == "none+post_norm/s1")
        & (table["prompt"] == PROMPTS[3])
        & (table["measure"] == "mass")
        & (table["part"] == "sink")
        & (table["depth"] == 2)
    ]
    assert agreed.cube("mass", "sink")[1, 1, 3, 1] == row["value"].item()


def test_estimates_are_those_of_the_statistics(agreed: Explained) -> None:
    group = agreed.groups[0]
    mine = agreed.estimate(group, "mass", "sink", 4)
    values = agreed.cube("mass", "sink")[0, :, :, 2]
    assert mine.value == pytest.approx(values.mean())
    again = estimate(agreed.sample(group, "mass", "sink", 4), resamples=300)
    assert (mine.low, mine.high) == (again.low, again.high)
    assert (mine.n, mine.seeds) == (12, 2)
    difference = agreed.difference(group, ("mass", "sink"), ("mass", "generated"), 4)
    other = agreed.cube("mass", "generated")[0, :, :, 2]
    assert difference.value == pytest.approx((values - other).mean())


def test_layers_stand_in_order(agreed: Explained) -> None:
    assert agreed.parts("shapley") == ("boundary 2", "boundary 15", "boundary 27")


def test_the_basis_says_what_was_left_out(agreed: Explained) -> None:
    assert agreed.basis == (
        "forced chains on sampled text, 12 prompts x 2 seeds, 7 anchors a text at most; "
        "2 looping texts left out"
    )
    assert "one seed: training noise not counted" in made(seeds=(0,)).basis
    unlike = agreed.table.assign(n=np.where(agreed.table["measure"] == "mass", 5, 7))
    assert "5 to 7 anchors a text at most" in replace(agreed, table=unlike).basis


def test_agreement_is_said_and_not_embellished(agreed: Explained) -> None:
    (sentence,) = said(agreed, "mass and causal effect")
    assert "no disagreement is left after correction." in sentence
    # Three pairs at depth 1 and six at 4, three and four harms, three pairs of layers; two groups.
    assert sentence.startswith("38 comparisons")


def test_more_attention_and_less_effect_is_a_disagreement() -> None:
    found = made({("effect", "sink"): 0.1, ("effect", "generated"): 0.9})
    first = next(a for a in answers(found) if "causal effect" in a.question)
    assert "the sink holds more attention than the generated text (0.40" in first.sentence
    assert "yet hiding it costs the target's token less (0.1" in first.sentence
    assert first.sentence.endswith("mass is not effect.")
    assert first.estimates["less"].value == pytest.approx(-0.8, abs=0.02)
    assert first.p["disagreement"] < 0.05
    # Two drafters at two depths, the strongest pair of each.
    assert sum("mass is not effect" in s for s in said(found, "causal effect")) == 4


def test_layers_whose_size_is_not_their_worth() -> None:
    found = made({("shapley", "boundary 2"): 2.0})
    sentences = [s for s in said(found, "causal effect") if "size is not worth" in s]
    assert len(sentences) == 2
    wanted = "the state at boundary 15 is a larger part of the fused input than the state at "
    assert all(f"{wanted}boundary 2 (0.3" in s for s in sentences)


def test_keys_that_harm_are_told() -> None:
    found = made({("effect", "prompt_mass"): -0.3})
    sentences = [s for s in said(found, "causal effect") if "likelier" in s]
    assert len(sentences) == 4
    assert "the rest of the prompt holds 0.30" in sentences[0]
    assert "its effect is -0.30" in sentences[0]


def test_much_attention_without_effect_is_told() -> None:
    found = made({("effect", "sink"): 0.005, ("mass", "sink"): 0.25})
    sentences = [s for s in said(found, "causal effect") if "no more than" in s]
    assert len(sentences) == 4 and "the sink holds 0.25" in sentences[0]


def test_noise_is_no_disagreement() -> None:
    found = made({("effect", "sink"): 0.59}, noise=3.0)
    assert [s for s in said(found, "causal effect") if "mass is not effect" in s] == []


def test_stack_and_autoregressor_are_told_apart(agreed: Explained) -> None:
    pre, post = said(agreed, "layer of a stack")
    assert pre.startswith("none+pre_norm, depth 4:") and "on a residual stream" in pre
    assert post.startswith("none+post_norm, depth 4:") and ": an autoregressor. What" in post
    assert "effective rank goes from 19.0" in pre and "to 16.0" in pre
    refines = made({("cosine", "write_previous"): 0.9})
    pre, post = said(refines, "layer of a stack")
    assert ": a layer of a stack. What" in pre and ": undecided" in post
    unsure = said(made(noise=8.0), "layer of a stack")
    assert all(": no evidence either way." in s for s in unsure)


def test_what_the_norms_change(agreed: Explained) -> None:
    (sentence,) = [a.sentence for a in answers(agreed) if a.question.startswith("What does")]
    assert sentence.startswith("Post-norm feedback changes how much closer the state at depth 4")
    assert sentence.split(" by ")[-1].startswith("0.90")  # (0.7 - 0.3) - (0.4 - 0.9)
    one, other = agreed.groups
    double = replace(other, fusion_norm="concat_per_layer", feedback="pre_norm")
    (sentence,) = (
        a.sentence
        for a in answers(replace(agreed, groups=(one, double)))
        if a.question.startswith("What does")
    )
    assert sentence.startswith("The double fusion norm changes how much closer the state")


def test_debts_and_gaps(agreed: Explained) -> None:
    layers = said(agreed, "captured layer")
    assert (
        len(layers) == 2
        and "2, 15, 27 are worth, to the target's token, at depth 1 0.20" in (layers[0])
    )
    inputs = said(agreed, "Which input")
    assert "2.0" in inputs[0] and "to the token that is read" in inputs[0]
    assert "fused" not in inputs[0]
    assert (
        said(agreed, "add up")
        == ["The largest error of a sum, over all texts: shapley 1e-07 nats."]
        or "shapley 1" in said(agreed, "add up")[0]
    )


def test_one_drafter_one_prompt() -> None:
    found = made(seeds=(0,), prompts=PROMPTS[:1])
    sentences = [a.sentence for a in answers(found)]
    assert any("1 prompt cannot show a disagreement among so many" in s for s in sentences)
    assert all("nan" not in s for s in sentences)


def test_few_prompts_are_no_evidence_of_agreement() -> None:
    """Three cannot give a p below .25; a large mass with a small effect is a bound all the same."""
    found = made({("effect", "sink"): 0.001}, seeds=(0,), prompts=PROMPTS[:3])
    told = said(found, "mass and causal effect")
    assert "3 prompts cannot show a disagreement among so many; large masses of" in told[-1]
    assert told[-1].endswith(f"({len(told) - 1}) are bounds and no tests.")
    assert len(told) > 1 and all("no more than 0.0" in sentence for sentence in told[:-1])
    assert all("too few prompts to say which" in s for s in said(found, "layer of a stack"))


def test_nothing_explained_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing was explained"):
        Explained.build(SCHEMAS["explained"].empty_table(), pd.DataFrame(), {})


# -- the folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "run"
    synthetic_run.make_run(path, seeds=(0,), prompts=PROMPTS[:2], texts=("sampled",), depth=3)
    return path


def columns(value: float = 1.0) -> dict[str, Any]:
    return {
        "text": "sampled",
        "depth": [1, 2],
        "measure": "mass",
        "part": "sink",
        "n": 3,
        "value": [value, value / 2],
    }


CELLS = ("none+pre_norm/s0", "none+post_norm/s0")


def test_a_folder_goes_on_and_refuses_other_settings(stored: Path) -> None:
    folder = ExplainedFolder(stored)
    with pytest.raises(RunError, match="was not explained"):
        Explained.of(stored)
    before = {p: p.read_bytes() for p in stored.rglob("*") if p.is_file()}
    with folder.begin({"hash": "a", "spec": {"depth": 2}}) as own:
        own.write(CELLS[0], PROMPTS[0], columns())
        with pytest.raises(RunError, match="in use by another"), folder.begin({"hash": "a"}):
            pass
    assert folder.has(CELLS[0], PROMPTS[0]) and not folder.has(CELLS[1], PROMPTS[0])
    with pytest.raises(RunError, match="other settings"), folder.begin({"hash": "b"}):
        pass
    with folder.begin({"hash": "a", "spec": {"depth": 2}, "left_out": 1}) as own:
        own.write(CELLS[1], PROMPTS[0], columns(3.0))
        own.finish(CELLS, PROMPTS[:1])
    found = Explained.of(stored)
    assert found.left_out == 1 and len(found.table) == 4
    assert found.table["cell"].tolist() == sorted(found.table["cell"])
    assert found.estimate(found.groups[1], "mass", "sink", 2).value == 1.5
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_table_that_its_manifest_does_not_note_is_refused(stored: Path) -> None:
    """A flipped bit reads as another number; an explanation that was stopped has an older table."""
    folder = ExplainedFolder(stored)
    with folder.begin({"hash": "a"}) as own:
        own.write(CELLS[0], PROMPTS[0], columns())
        own.finish(CELLS[:1], PROMPTS[:1])
    whole = folder.table.read_bytes()
    for place in range(4, len(whole), 97):
        folder.table.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RunError, match="cannot be read"):
            Explained.of(stored)
    folder.table.write_bytes(whole)
    assert len(Explained.of(stored).table) == 2
    with folder.begin({"hash": "a", "left_out": 7}):
        pass
    with pytest.raises(RunError, match="not the table that its manifest notes"):
        Explained.of(stored)


def test_a_damaged_piece_is_not_there(stored: Path) -> None:
    folder = ExplainedFolder(stored)
    with folder.begin({"hash": "a"}) as own:
        own.write("x", "y", columns())
        path = own._shard("x", "y")
        path.write_bytes(path.read_bytes()[:-3])
    assert not folder.has("x", "y")


def test_nan_is_refused(stored: Path) -> None:
    with pytest.raises(NumericsError, match="NaN"):
        ExplainedFolder(stored).write("x", "y", columns(float("nan")))


# -- figures


def test_every_figure_draws_what_its_csv_holds(agreed: Explained) -> None:
    assert available(agreed) == list(EXPLAIN_FIGURES)
    for spec in EXPLAIN_FIGURES.values():
        frame = pd.read_csv(io.StringIO(spec.data(agreed).to_csv(index=False)))
        assert frame["prompts"].max() == 12 and frame["seeds"].max() == 2
        figure = spec.figure(frame)
        assert len([ax for ax in figure.axes if ax.get_visible()]) == 2
        assert "12 prompts x 2 seeds; 2 looping" in spec.caption(frame)


def test_saved_figures_are_the_same_bytes_again(agreed: Explained, tmp_path: Path) -> None:
    spec = EXPLAIN_FIGURES["explain_effect"]
    frame = spec.data(agreed)
    first, again = (save_frame(spec, frame, tmp_path / name) for name in "ab")
    assert list(first) == ["png", "pdf", "csv"]
    assert all(first[f].read_bytes() == again[f].read_bytes() for f in first)
    assert set(pd.read_csv(first["csv"]).columns) == set(frame.columns)


def test_effect_data_pairs_mass_with_effect(agreed: Explained) -> None:
    frame = EXPLAIN_FIGURES["explain_effect"].data(agreed)
    assert sorted(frame["depth"].unique()) == [1, 4]
    row = frame[(frame["variant"] == "none+pre_norm") & (frame["part"] == "sink")].iloc[0]
    assert row["mass"] == pytest.approx(0.4, rel=0.02)
    assert row["value"] == pytest.approx(0.8, rel=0.02)
    assert not ((frame["part"] == "draft_mass") & (frame["depth"] == 1)).any()


def test_figures_without_rows_are_left_out(agreed: Explained) -> None:
    table = agreed.table[agreed.table["measure"] != "shapley"]
    frame = pd.DataFrame(
        [
            {n: c.get(n) for n in SCHEMAS["cells"].names}
            for c in (synthetic_run.cell_row("none", f, s) for f in FEEDBACK for s in (0, 1))
        ]
    )
    plain = {n: table[n].tolist() for n in table.columns}
    part = Explained.build(make_table("explained", plain, "all"), frame, {})
    assert available(part) == ["explain_lens", "explain_states", "explain_effect"]
    assert said(part, "captured layer") == []


def test_a_figure_without_a_value_is_not_drawn(agreed: Explained, tmp_path: Path) -> None:
    """As where every chain is one draft deep: there is nothing before to resemble."""
    table = agreed.table
    kept = table[(table["measure"] == "cosine") & table["part"].astype(str).str.startswith("write")]
    part = replace(agreed, table=kept, _cubes={})
    assert available(part) == ["explain_states"]
    assert save_explain_figures(part, tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_measures_are_described(agreed: Explained) -> None:
    assert set(agreed.table["measure"]) <= set(MEASURES)
    assert all(m.unit and m.parts and m.meaning for m in MEASURES.values())


def test_reading_explanations_loads_no_model_library() -> None:
    code = (
        "import sys, driftlab.results.explain_figures; "
        "sys.exit(bool({'torch', 'transformers', 'matplotlib', 'captum'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
