"""What somebody tried who did not know the program: each was once a wrong number or a crash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from driftlab.config import SUITES, read_experiment
from driftlab.data.prompts import load_prompts
from driftlab.errors import ConfigError, DataError, RunError
from driftlab.papers.committed import changed_tables
from driftlab.results.figures import save_figures
from driftlab.results.records import RunDirectory
from driftlab.results.schema import SCHEMA_VERSION
from driftlab.results.served import read_served

# --- metrics pages and logs -------------------------------------------------------------------

_V = "vllm:spec_decode_num_"
PAGE = f"{_V}drafts_total 100\n{_V}draft_tokens_total 300\n{_V}accepted_tokens_total 90\n"

ROOT = Path(__file__).resolve().parent.parent


def _position(place: str) -> str:
    return f'{PAGE}{_V}accepted_tokens_per_pos_total{{position="{place}"}} 90\n'


@pytest.mark.parametrize(
    ("page", "said"),
    [
        pytest.param(_position("3000000000"), "names no position", id="a position of billions"),
        pytest.param(_position("9" * 5000), "names no position", id="a number too long to read"),
        pytest.param(_position("²"), "names no position", id="a digit that is no number"),
        pytest.param(PAGE * 2, "twice", id="a page saved twice"),
        pytest.param("sglang:spec_accept_length +Inf\n", "contradict", id="endless"),
        pytest.param(
            "sglang:spec_accept_length 2\nsglang:spec_num_steps +Inf\n", "no count", id="steps"
        ),
        pytest.param(
            "sglang:spec_accept_length 9\nsglang:spec_num_steps 3\n",
            "accept length 9, drafts a round 3",
            id="more accepted than drafted, by its page",
        ),
        pytest.param(
            "speculative_num_steps=3\naccept len: 2.5\naccept len: 4.5\n",
            "accept length 4.5, drafts a round 3",
            id="more accepted than drafted, by its log",
        ),
        pytest.param("speculative_num_steps=0\naccept len: 2.5\n", "contradict", id="none drafted"),
        pytest.param("accept len: 2.5.1\n", "1 without plain numbers", id="no number"),
    ],
)
def test_counts_that_no_engine_gives(tmp_path: Path, page: str, said: str) -> None:
    path = tmp_path / "page"
    path.write_text(page, encoding="utf-8")
    with pytest.raises(RunError, match=said) as caught:
        read_served(path)
    assert caught.value.remedy


def test_counts_that_engines_do_give(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text(f"\ufeff{PAGE}", encoding="utf-8")  # as an editor saves it
    assert (read_served(path).accepted_drafts, read_served(path).depth) == (0.9, 3)
    apart = [line.replace(" ", f'{{engine="{e}"}} ') for e in "01" for line in PAGE.splitlines()]
    path.write_text("\n".join(apart))  # several engines of one server: added up
    assert read_served(path).rounds == 200
    path.write_text(f"speculative_num_steps={'9' * 5000}\naccept len: 2.5, #running-req: 4\n")
    assert (read_served(path).accepted_drafts, read_served(path).depth) == (1.5, None)


# --- files of settings, prompts and runs ------------------------------------------------------


def test_a_base_s_misspelt_table_is_not_dropped(tmp_path: Path) -> None:
    base = (SUITES / "micro.toml").read_text(encoding="utf-8")
    (tmp_path / "base.toml").write_text(base.replace("[train]", "[trian]"), encoding="utf-8")
    own = 'name = "own"\n[axes]\nfusion_norm = ["none"]\n'
    (tmp_path / "own.toml").write_text(own, encoding="utf-8-sig")  # as some editors save it
    with pytest.raises(ConfigError, match="has no key trian"):
        read_experiment(tmp_path / "own.toml", base=tmp_path / "base.toml")
    assert read_experiment(tmp_path / "own.toml", base="micro").name == "own-micro"


def test_a_folder_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('name = "own"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="Known: micro"):
        read_experiment(tmp_path / "own.toml", base=tmp_path)


@pytest.mark.parametrize("id", ['""', "null", "true", "1e400", '{"a": 1}', "[1]"])
@pytest.mark.parametrize("field", ["id", "question_id"])
def test_an_id_is_a_word_or_a_number(tmp_path: Path, field: str, id: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a", "{field}": {id}}}', encoding="utf-8")
    with pytest.raises(DataError, match=f"line 1: {field} is neither"):
        load_prompts(path)


def test_a_category_can_be_stored(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "category": "\\ud800"}', encoding="utf-8")
    with pytest.raises(DataError, match="category holds half a surrogate"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        pytest.param("[" * 100_000, "cannot be read", id="nested too deep"),
        pytest.param('{"schema_version": "1"}', "version '1', this driftlab reads 1", id="a word"),
    ],
)
def test_a_manifest_that_was_edited(tmp_path: Path, manifest: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(RunError, match=said):
        RunDirectory.open(tmp_path)


def test_a_run_that_was_explained_is_current(tmp_path: Path) -> None:
    def note(**explained: str) -> None:
        manifest = {"schema_version": SCHEMA_VERSION, "tables": {"cells": digest(b"cells")}}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        (tmp_path / "explained").mkdir(exist_ok=True)
        text = json.dumps({"table": explained})
        (tmp_path / "explained" / "manifest.json").write_text(text, encoding="utf-8")

    def digest(content: bytes) -> dict[str, str]:
        return {"sha256": hashlib.sha256(content).hexdigest()}

    for name in ("cells", "explained"):
        (tmp_path / f"{name}.parquet").write_bytes(name.encode())
    note(**digest(b"explained"))
    assert changed_tables(RunDirectory.open(tmp_path)) == []
    note(**digest(b"something else"))
    assert changed_tables(RunDirectory.open(tmp_path)) == ["explained.parquet"]
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema_version": SCHEMA_VERSION, "tables": ["cells"]}), encoding="utf-8"
    )
    with pytest.raises(RunError, match="is damaged: tables"):  # a list where a table was
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("run", "said"),
    [("pin-micro", "have no prompt_mass"), ("explained-micro", "no measured chains")],
)
def test_a_published_run_is_not_drawn_like_a_whole_one(run: str, said: str, tmp_path: Path) -> None:
    published = RunDirectory.open(ROOT / "papers" / "attention-drift" / "runs" / run)
    with pytest.raises(RunError, match=said):
        save_figures(published, tmp_path)
