"""The engine of explanations: rows against the functions that they come from, runs that resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pairs
import pytest
import small
import torch

from driftlab.analysis import attribution
from driftlab.analysis.interventions import apply, knock_out_sink
from driftlab.cli import main
from driftlab.config import ExplainSpec, build_explain
from driftlab.data.features import FeatureStore, Item
from driftlab.data.text import Text
from driftlab.engines import explain as engine
from driftlab.engines.explain import Columns, explain, explain_run, explainable
from driftlab.errors import ConfigError, DataError, NumericsError, RunError
from driftlab.experiment import run_experiment
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import HookFn, attach
from driftlab.results.explanations import MEASURES, Explained, ExplainedFolder
from driftlab.results.schema import REGIONS
from driftlab.results.shards import make_table

SPEC = ExplainSpec(depth=4, anchors=5, state_anchors=7, gradient_depths=(1, 4, 9))
PROMPT_LEN, SIZE = 4, 20


@pytest.fixture(scope="module")
def pair() -> tuple[Drafter, Text, Item]:
    """A drafter, one text of which a draft can name the half, and the states."""
    drafter = pairs.drafter(fusion_norm="per_layer", feedback="post_norm")
    ids = pairs.ids(1, SIZE, seed=9)
    ids[0, ::2] = drafter.draft_to_target[: SIZE // 2]
    tokens = ids[0].tolist()
    text = pairs.as_text(tokens[:PROMPT_LEN], tokens[PROMPT_LEN:])
    out = pairs.target().forward(ids, torch.tensor([SIZE]), pairs.BOUNDARIES, logits=False)
    item = Item(tokens=ids[0], prompt_len=PROMPT_LEN, aux=out.aux[0], last=out.last[0])
    return drafter, text, item


@pytest.fixture(scope="module")
def rows(pair: tuple[Drafter, Text, Item]) -> Columns:
    drafter, text, item = pair
    (columns,) = explain(drafter, [text], [item], SPEC)
    return columns


def value(rows: Columns, measure: str, part: str, depth: int) -> float:
    keys = zip(rows["measure"], rows["part"], rows["depth"], strict=True)
    return float(rows["value"][list(keys).index((measure, part, depth))])


def test_rows_fit_the_schema_and_are_described(rows: Columns) -> None:
    table = make_table("explained", {"cell": "c", "prompt": "p", **rows}, "c, p")
    assert table.num_rows == len(rows["value"])
    assert set(rows["measure"]) == set(MEASURES)
    assert set(rows["depth"]) == {1, 2, 3, 4}
    assert {d for d, m in zip(rows["depth"], rows["measure"], strict=True) if m == "gradients"} == {
        1,
        4,
    }


def test_rows_are_means_of_the_functions(rows: Columns, pair: tuple[Drafter, Text, Item]) -> None:
    drafter, text, item = pair
    anchors = explainable(text, SPEC)
    assert len(anchors) == 5 and int(anchors[0]) == PROMPT_LEN - 1
    given = item["tokens"], item["aux"]
    shapley = attribution.shapley(drafter, *given, depth=4, anchors=anchors)
    for i, boundary in enumerate(pairs.BOUNDARIES):
        found = value(rows, "shapley", f"boundary {boundary}", 3)
        assert found == pytest.approx(float(shapley.mean()[i, 2]), abs=1e-4)
    effects = attribution.attention_effects(
        drafter,
        *given,
        depth=4,
        sink=torch.arange(SIZE) < 1,
        prompt_len=PROMPT_LEN,
        anchors=anchors,
    )
    known = effects.known[:, 3]
    assert bool(known.any()) and not bool(effects.known.all())
    for i, region in enumerate(REGIONS):
        wanted = float(effects.mass[i, known, 3].mean())
        assert value(rows, "mass", region, 4) == pytest.approx(wanted, abs=1e-5)
    wanted = float(effects.direct[0, known, 3].mean())
    assert value(rows, "effect", "sink", 4) == pytest.approx(wanted, abs=1e-4)
    keys = zip(rows["measure"], rows["part"], rows["depth"], strict=True)
    n = dict(zip(keys, rows["n"], strict=True))
    assert n["effect", "sink", 4] == int(known.sum()) and n["lens_draft", "resid.mid", 4] == 5
    states = attribution.state_geometry(
        drafter, *given, depth=4, last=item["last"], anchors=explainable(text, SPEC, 7)
    )
    found = value(rows, "cosine", "same_token", 4)
    assert found == pytest.approx(states["cosine_same_token"][3], abs=1e-5)


def test_sums_are_closed(rows: Columns) -> None:
    assert value(rows, "gap", "split", 1) < 1e-5
    assert value(rows, "gap", "shapley", 4) < 1e-4
    assert value(rows, "gap", "gradients", 4) <= SPEC.gradient_gap
    layers = sum(value(rows, "shapley", f"boundary {b}", 2) for b in pairs.BOUNDARIES)
    whole = value(rows, "logprob", "all layers", 2) - value(rows, "logprob", "no layer", 2)
    assert layers == pytest.approx(whole, abs=1e-4)
    assert sum(value(rows, "share", f"boundary {b}", 1) for b in pairs.BOUNDARIES) == (
        pytest.approx(1, abs=1e-4)
    )
    assert sum(value(rows, "mass", r, 3) for r in REGIONS) == pytest.approx(1, abs=1e-5)
    lens = value(rows, "lens_logprob", "state.pre", 3)
    assert lens == pytest.approx(value(rows, "logprob", "all layers", 3), abs=1e-4)


def test_what_does_not_exist_has_no_row(rows: Columns) -> None:
    keys = set(zip(rows["measure"], rows["part"], rows["depth"], strict=True))
    assert ("effect", "draft_mass", 3) in keys and ("effect", "draft_mass", 2) not in keys
    assert ("cosine", "same_token", 2) in keys and ("cosine", "same_token", 1) not in keys
    assert ("gradients", "feedback", 4) in keys and ("gradients", "feedback", 1) not in keys


def test_a_drafter_that_fuses_nothing_and_a_short_text(pair: tuple[Drafter, Text, Item]) -> None:
    _, text, item = pair
    plain = pairs.drafter(boundaries=())
    narrow = Item(**{**item, "aux": item["aux"][:, : pairs.WIDTH]})
    (found,) = explain(plain, [text], [narrow], SPEC)
    assert "shapley" not in found["measure"] and "effect" in found["measure"]
    short = pairs.as_text(text.tokens[:PROMPT_LEN], text.tokens[PROMPT_LEN : PROMPT_LEN + 4])
    assert explain(plain, [short], [narrow], SPEC) == [{}]


def test_interventions_act_here_as_well(rows: Columns, pair: tuple[Drafter, Text, Item]) -> None:
    drafter, text, item = pair
    with apply(drafter, [knock_out_sink()]):
        (changed,) = explain(drafter, [text], [item], SPEC)
    assert value(changed, "mass", "sink", 2) == 0
    assert value(changed, "effect", "sink", 2) == pytest.approx(0, abs=1e-5)
    assert value(rows, "mass", "sink", 2) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda pattern, moment: pattern * 0.9, "a sum of 0.9"),
        (lambda pattern, moment: 1.5 * pattern - 0.5 / pattern.shape[-1], "the least weight -"),
    ],
)
def test_attention_that_is_none_is_not_explained(
    pair: tuple[Drafter, Text, Item], change: HookFn, said: str
) -> None:
    """As a probe refuses it: a share of what does not sum to 1 is no share."""
    drafter, text, item = pair
    token = text.tokens[PROMPT_LEN + 1]  # what depth 2 of the first anchor reads
    where = f"depth 2, anchor {PROMPT_LEN - 1}, reading token {token} of {text.kind} text "
    with (
        attach(drafter, "attn.pattern", change, depths=[2]),
        pytest.raises(NumericsError, match=f"is no attention at {where}{text.prompt_id}.*{said}"),
    ):
        explain(drafter, [text], [item], SPEC)


# -- runs

ASKED = ExplainSpec(depth=3, anchors=4, state_anchors=6, gradient_depths=(1, 3))


@pytest.fixture(scope="module")
def run() -> Path:
    return small.copy("explained")


@pytest.fixture(autouse=True)
def _serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_jobs", small.serial)


def test_a_run_is_explained_goes_on_and_keeps_what_it_had(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    written: list[str] = []
    write = ExplainedFolder.write

    def dying(self: Any, cell: str, prompt: str, columns: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(prompt)
        write(self, cell, prompt, columns)

    monkeypatch.setattr(ExplainedFolder, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        explain_run(run, ASKED, quiet=True)
    monkeypatch.setattr(ExplainedFolder, "write", write)
    shards = {p: p.stat().st_mtime_ns for p in (run / "explained").rglob("*.shard")}
    assert len(shards) == 2
    found = explain_run(run, ASKED, quiet=True)
    assert all(path.stat().st_mtime_ns == when for path, when in shards.items())
    assert [g.label for g in found.groups] == ["none+pre_norm", "none+post_norm"]
    assert len(found.prompts) == 3 and found.depths == (1, 2, 3)
    assert all(path.read_bytes() == data for path, data in before.items())
    table = (run / "explained.parquet").read_bytes()
    for path in (run / "explained").rglob("*.shard"):
        path.unlink()
    explain_run(run, ASKED, quiet=True)
    assert (run / "explained.parquet").read_bytes() == table
    assert len(Explained.of(run).table) == len(found.table)
    with pytest.raises(RunError, match="other settings"):
        explain_run(run, ExplainSpec(depth=2), quiet=True)


def test_the_command_line_says_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["depth=3", "anchors=4", "state_anchors=6", "gradient_depths=[1, 3]"]
    settings = [w for word in words for w in ("--set", word)]
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--limit", "2", *settings])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "The largest error of a sum" in said and "2 prompts x 1 seed" in said
    assert (run / "explained" / "figures" / "explain_effect.pdf").exists()


def test_conditions_are_left_out(tmp_path: Path) -> None:
    only = 'applied.conditions=[{name="pinned", interventions=[{kind="pin_norm"}]}]'
    with small.shrunk():
        there = run_experiment(small.spec(only), small.home() / "conditions", quiet=True)
        found = explain_run(there.path, ASKED, quiet=True, limit=1)
    assert set(found.table["cell"]) == set(small.CELLS)


def test_a_sink_that_no_text_has_is_not_explained() -> None:
    asked = ExplainSpec(depth=2, sink=(0, 500))
    with pytest.raises(ConfigError, match="sink position 500"):
        explain_run(small.home() / "done", asked, quiet=True)


def test_runs_that_cannot_be_explained(run: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(small.home() / "done", tmp_path / "alone"))
    with pytest.raises(DataError, match=r"states that .* was measured on"):
        explain_run(alone, ASKED, quiet=True)
    shutil.rmtree(alone / "drafters")
    with pytest.raises(RunError, match="holds no drafters"):
        explain_run(alone, ASKED, quiet=True)
    with pytest.raises(DataError, match="no text has 500 tokens"):
        explain_run(small.home() / "done", ExplainSpec(depth=500), quiet=True)


def test_exchanged_drafters_are_not_explained() -> None:
    run = small.copy("exchanged")
    one, other = (run / "drafters" / name for name in small.CELLS)
    one.rename(run / "x")
    other.rename(one)
    (run / "x").rename(other)
    with pytest.raises(RunError, match=r"drafter of none\+p.* is not the one [^\n]*\nRun .*anew"):
        explain_run(run, ASKED, quiet=True)
    shutil.rmtree(run)


def test_gradients_need_a_depth_of_the_chain(run: Path) -> None:
    asked = ASKED.model_copy(update={"gradient_depths": (9, 12)})
    with pytest.raises(ConfigError, match=r"exceeds depth = 3 .*\[9, 12\]"):
        explain_run(run, asked, quiet=True)
    with pytest.raises(ConfigError, match=r"exceeds depth = 3"):
        engine.explain(pairs.drafter(), [], [], asked)


def test_the_sink_is_the_run_s_unless_another_is_named() -> None:
    """Whatever else is asked for: regions of a run and of its explanation are the same."""
    run = small.copy("own-sink")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["measure"]["sink"] = [0, 1]
    (run / "manifest.json").write_text(json.dumps(manifest))
    explain_run(run, ASKED, quiet=True, limit=1)
    assert ExplainedFolder(run).manifest["spec"]["sink"] == [0, 1]
    with pytest.raises(RunError, match="other settings"):
        explain_run(run, ASKED.model_copy(update={"sink": "first"}), quiet=True, limit=1)
    shutil.rmtree(run)


def test_states_are_read_from_the_cache(run: Path) -> None:
    assert Explained.of(run)
    key = ExplainedFolder(run).manifest["states"]
    assert FeatureStore(small.home() / "cache" / "states").open(key).key == key


def test_settings_are_checked() -> None:
    assert build_explain(("depth=4", "sink=auto"), where="here").sink == "auto"
    with pytest.raises(ConfigError, match=r"here: 1 wrong setting\(s\): depht"):
        build_explain(("depht=4",), where="here")
    with pytest.raises(ConfigError, match="sink position"):
        build_explain(("sink=[-1]",), where="here")
