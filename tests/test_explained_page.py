"""The page of what a drafted token owes to what: it says what the run's own report says."""

from __future__ import annotations

import itertools
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from synthetic_run import FACTORIAL, cell_row, make_run

from driftlab.config import ExplainSpec
from driftlab.errors import RunError
from driftlab.papers import committed
from driftlab.papers.latex import page_latex
from driftlab.papers.pages import Paper
from driftlab.results.explanations import Explained, ExplainedFolder
from driftlab.results.records import RunDirectory

PAPER = Path(__file__).resolve().parent.parent / "papers" / "attention-drift"
# Ten: with fewer, the signs of the prompts cannot give a p that ten comparisons leave below 5%.
PROMPTS, SEEDS, DEPTHS = tuple(f"p{i}" for i in range(10)), (0, 1), (1, 2, 3, 4)
REGIONS = ("sink", "prompt_mass", "generated", "draft_mass")

LEVELS: dict[str, dict[str, float]] = {
    "share": {"boundary 2": 0.1, "boundary 15": 0.3, "boundary 27": 0.6},
    "shapley": {"boundary 2": 0.2, "boundary 15": 0.5, "boundary 27": 1.0},
    "logprob": {"all layers": -1.0, "no layer": -2.7},
    "mass": dict(zip(REGIONS, (0.4, 0.3, 0.2, 0.1), strict=True)),
    # The rest of the prompt has less of the mass than the sink, and more of the effect.
    "effect": dict(zip(REGIONS, (0.2, 0.6, 0.1, 0.05), strict=True)),
    "cosine": {"previous": 0.9, "same_token": 0.4, "other": 0.1, "target": 0.3}
    | {"write_previous": 0.2, "write_same_token": 0.6},
    "rank": {"state": 20.0, "target": 30.0},
    "geometry": {"token": 0.5, "anchor": 0.2},
    "lens_draft": {"feedback.in": 0.3, "resid.mid": 0.6},
    "gradients": {"fused": 3.0, "embedding": 2.0, "feedback": 1.0, "all": 6.0},
    "effect_chain": {"sink": 0.5},
    "gap": {"split": 1e-7, "shapley": 1e-6},
}


def rows(cell: str, prompt: str) -> dict[str, Any]:
    """Columns of one (cell, prompt): the levels with some noise, doubled under both norms."""
    rng = np.random.default_rng(sum(map(ord, cell + prompt)))
    keys = [
        (d, m, part)
        for d, (m, parts) in itertools.product(DEPTHS, LEVELS.items())
        for part in parts
        if not (m == "share" and d > 1)
        and not (m == "effect" and part == "draft_mass" and d < 3)
        and not (m == "gradients" and (d not in (1, 4) or (part == "feedback" and d == 1)))
    ]
    scale = 2.0 if cell.startswith("per_layer+post_norm") else 1.0
    values = [scale * LEVELS[m][part] * (1 + 0.05 * rng.standard_normal()) for _, m, part in keys]
    depth, measure, part = (list(column) for column in zip(*keys, strict=True))
    return {"text": "sampled", "n": 7, "depth": depth, "measure": measure, "part": part} | {
        "value": values
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explained") / "micro"
    named = {"name": "micro", "command": "driftlab ablate --out runs/micro"}
    size: dict[str, Any] = {"depth": 4, "anchors": 4, "texts": ("sampled",)}
    make_run(path, seeds=SEEDS, prompts=(*PROMPTS, "p10"), manifest=named, **size)
    cells = [cell_row(*norms, seed)["cell"] for norms in FACTORIAL for seed in SEEDS]
    spec = ExplainSpec(depth=4, sink="auto").model_dump(mode="json")
    facts = {"hash": "a", "spec": spec, "prompts": PROMPTS, "texts": ["sampled"], "left_out": 1}
    with ExplainedFolder(path).begin(facts) as folder:
        for cell, prompt in itertools.product(cells, PROMPTS):
            folder.write(cell, prompt, rows(cell, prompt))
        folder.finish(cells, PROMPTS)
    return path


@pytest.fixture(scope="module")
def paper(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paper with this page alone, published from the run."""
    folder = tmp_path_factory.mktemp("paper") / "paper"
    folder.mkdir()
    head, *items = (PAPER / "paper.toml").read_text(encoding="utf-8").split("\n[items.")
    kept = [item for item in items if item.startswith("explained]")]
    (folder / "paper.toml").write_text("\n[items.".join([head, *kept]))
    for name in ("page.md", "front.md"):
        shutil.copy(PAPER / name, folder)
    committed.publish(run, folder / "runs" / "explained-micro")
    assert committed.draw(folder) == []
    return folder


@pytest.fixture(scope="module")
def read(paper: Path) -> Paper:
    return Paper(paper)


def test_the_explanation_alone_is_published(run: Path, paper: Path) -> None:
    small = RunDirectory.open(paper / "runs" / "explained-micro")
    assert committed.changed_tables(small) == []
    assert [len(t) for t in (small.depths, small.heads, small.fused)] == [0, 0, 0]
    assert len(small.cells) == 8 and set(small.prompts["prompt"]) == set(PROMPTS)
    table = Explained.of(small).table
    assert not set(table["measure"]) & {"effect_chain"}
    assert set(table.loc[table["measure"] == "mass", "depth"]) == {1, 4}
    assert set(table.loc[table["measure"] == "shapley", "depth"]) == set(DEPTHS)
    whole = Explained.of(run).table
    both = whole.merge(table, on=["cell", "prompt", "text", "depth", "measure", "part"])
    assert len(both) == len(table) and (both["value_x"] == both["value_y"]).all()


def test_the_page_says_what_the_report_says(run: Path, paper: Path) -> None:
    page = (paper / "explained" / "README.md").read_text()
    told = [f"- {answer.sentence}\n" for answer in Explained.of(run).answers()]
    assert len(told) > 10 and [line for line in told if line not in page] == []
    assert "comparisons of mass with effect" in page and "a layer of a stack" in page
    assert "10 prompts x 2 seeds, 7 anchors a text at most; 1 looping text left out" in page
    command = "`driftlab ablate --out runs/micro && driftlab explain runs/micro --limit 10"
    assert f"{command} --set 'depth=4'`" in page
    assert "not timed" in (paper / "README.md").read_text()


def test_every_number_is_the_explanation_s(run: Path, read: Paper) -> None:
    found, values = Explained.of(run), read.values
    names = ("neither", "fc_norm alone", "post_norm alone", "both")
    assert [g.label for g in found.groups] == [f"{f}+{b}" for f, b in FACTORIAL]
    for g, name in zip(found.groups, names, strict=True):
        at = f"explained.micro.{name}: {g.label}"
        estimate = found.estimate
        shown = {
            ", boundary 27.share": estimate(g, "share", "boundary 27", 1),
            ", boundary 2.worth @4": estimate(g, "shapley", "boundary 2", 4),
            ", the sink.mass @1": estimate(g, "mass", "sink", 1),
            ", the chain's own drafts.effect @4": estimate(g, "effect", "draft_mass", 4),
            ".rank @4": estimate(g, "rank", "state", 4),
            ".lens": estimate(g, "lens_draft", "feedback.in", 4),
            ", its logit.fed-back state @4": estimate(g, "gradients", "feedback", 4),
        }
        pairs = {
            ".state": ("cosine", "same_token", "previous"),
            ".written": ("cosine", "write_same_token", "write_previous"),
            ".geometry": ("geometry", "token", "anchor"),
        }
        for column, (measure, one, other) in pairs.items():
            shown[column] = found.difference(g, (measure, one), (measure, other), 4)
        for column, e in shown.items():
            assert values[at + column] == e.short, column
        assert f"{at}, the chain's own drafts.effect @1" not in values
    drawn = pd.read_csv(read.folder / "explained" / "figures" / "explained.csv")
    worth = drawn[(drawn["panel"] == "worth of mid (nats)") & (drawn["line"] == "both")]
    cube = found.cube("shapley", "boundary 15")[3]
    np.testing.assert_allclose(worth["value"], cube.mean(axis=(0, 1)), rtol=1e-4)
    assert {"sink @1", "draft @4"} <= set(drawn.loc[drawn["panel"] == "effect (nats)", "x"])
    assert "draft @1" not in set(drawn["x"])


def test_open_questions_are_answered(read: Paper) -> None:
    judged = {c: j["micro"] for c, j in read.pages["explained"].judged.items()}
    assert {c: j.verdict for c, j in judged.items()} == {
        "mass-first": "down",  # the sink has the most mass, the prompt the most effect
        "mass-last": "down",
        "mass-last-both": "down",
        "size-worth": "up",
        "worth-last": "up",
        "worth-last-both": "up",
        "state": "down",
        "state-both": "down",
        "written": "up",
        "written-both": "up",
    }
    expected = {"mass-first": -0.4, "size-worth": 0.5, "worth-last": 1.7, "state-both": -1.0}
    for claim, value in expected.items():
        e = judged[claim].estimate
        assert e is not None and e.value == pytest.approx(value, rel=0.1), claim


def test_rows_that_share_no_column_are_tables_of_their_own(read: Paper) -> None:
    made = read.pages["explained"]
    blocks = made.measured["micro"].blocks
    assert [len(block) for block in blocks] == [12, 16, 4, 4]
    assert [next(iter(next(iter(b.values())))) for b in blocks] == [
        "share",
        "mass @1",
        "state",
        "fused input @1",
    ]
    latex = page_latex(made)
    assert [latex.count(rf"\label{{tab:explained{n}}}") for n in ("", "-2", "-3", "-4")] == [1] * 4
    assert latex.count(r"\begin{tabular}{lrrrr}") == 1
    page = (read.folder / "explained" / "README.md").read_text()
    assert page.count("|  | mass @1 | effect @1 | mass @4 | effect @4 |") == 1


def test_a_changed_explanation_is_found(paper: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(paper, tmp_path / "paper"))
    folder = ExplainedFolder(copy / "runs" / "explained-micro")
    table = pq.read_table(folder.table)
    twice = pc.if_else(pc.equal(table["measure"], "shapley"), 2.0, 1.0)
    place = table.schema.get_field_index("value")
    table = table.set_column(place, table.schema.field(place), pc.multiply(table["value"], twice))
    pq.write_table(table, folder.table)
    assert committed.changed_tables(RunDirectory.open(folder.path.parent)) == ["explained.parquet"]
    with pytest.raises(RunError, match=r"explained.parquet cannot be read .*its manifest"):
        committed.draw(copy, check=True)
    # A manifest that vouches for the other table does not make the pages current.
    facts = folder.manifest
    facts["table"]["sha256"] = sha256(folder.table.read_bytes()).hexdigest()
    (folder.path / "manifest.json").write_text(json.dumps(facts))
    found = committed.draw(copy, check=True)
    pages = {f"explained/{n}" for n in ("README.md", "table.csv", "figures/explained.csv")}
    assert "runs/explained-micro/explained.parquet" not in found and pages <= set(found)


def test_what_was_not_explained_is_not_published(run: Path, paper: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(run, tmp_path / "bare"))
    shutil.rmtree(bare / "explained")
    copy = Path(shutil.copytree(paper, tmp_path / "paper"))
    with pytest.raises(RunError, match="was not explained"):
        committed.publish(bare, copy / "runs" / "explained-micro")
    # Nor is it in the way of what a run measured.
    committed.publish(run, copy / "runs" / "norms-micro")
    assert not (copy / "runs" / "norms-micro" / "explained.parquet").exists()


def test_a_drafter_that_fuses_nothing_has_no_layers(run: Path) -> None:
    from driftlab.papers.explained import owed
    from driftlab.papers.numbers import Numbers

    stored = RunDirectory.open(run)
    table = pq.read_table(ExplainedFolder(run).table)
    fused = pa.array(["share", "shapley", "logprob", "gradients"])
    bare = table.filter(pc.invert(pc.is_in(table["measure"], fused)))
    built = Explained.build(bare, stored.cells, stored.manifest)
    found = owed({"explained": Numbers(stored.tables(), built)})
    assert found is not None
    names, contrasts, frame = found
    assert len(names) == 16 + 4
    assert set(contrasts) == {
        *("mass-first", "mass-last", "mass-last-both"),
        *("state", "state-both", "written", "written-both"),
    }
    assert set(frame["panel"]) == {"attention mass", "effect (nats)"}
