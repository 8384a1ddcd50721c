"""No silent fallback: a walk over every default of the loaders, and where each surfaces."""

from __future__ import annotations

import ast
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pairs
import pytest
import test_checkpoints as files
import tokenizers
import torch
from golden.cases import write_checkpoint
from transformers import PreTrainedTokenizerFast

import driftlab
from driftlab import cli
from driftlab.config import DrafterConfig, Origin
from driftlab.errors import AssumptionError, CheckpointError, DriftlabError
from driftlab.lab import Lab
from driftlab.models.checkpoints import inspect, load_drafter, save_drafter
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
MODELS = Path(driftlab.__file__).parent / "models"


def spelled(
    dialect: str, *drop: str, change: Callable[[Config, Tensors], Any] | None = None, **extra: Any
) -> tuple[Config, Tensors]:
    config, tensors = copy.deepcopy(files.spell(dialect))
    for place in (config, config.get("transformer_layer_config", {})):
        for name in drop:
            place.pop(name, None)
    config |= extra
    if change is not None:
        change(config, tensors)
    return config, tensors


def no_mask(config: Config, tensors: Tensors) -> None:
    """A map that would be valid as absolute ids too."""
    tensors["d2t"] = torch.arange(1, files.VD + 1)
    del tensors["t2d"]


def qk(config: Config, tensors: Tensors) -> None:
    """What the assumed class needs."""
    for stem in "qk":
        tensors[f"layers.0.self_attn.{stem}_norm.weight"] = files.random(files.HEAD)


ENGINE = "vllm"
# What is assumed, the function that assumes it, and files that make it do so.
CASES: dict[tuple[str, str], tuple[str, Callable[[], tuple[Config, Tensors]]]] = {
    ("dialects", "recognise"): ("dialect", lambda: spelled(ENGINE)),
    ("dialects", "_specforge_or_torchspec"): (
        "dialect",
        lambda: (
            files.sizes(architectures=["LlamaForCausalLMEagle3"]),
            files.mid(files.weights()) | files.maps(),
        ),
    ),
    ("fields", "positive"): (
        "rope.max_position",
        lambda: spelled(ENGINE, "max_position_embeddings"),
    ),
    ("sheet", "_layer_fields"): (
        "model_type",
        lambda: spelled("speculators", "model_type", change=qk),
    ),
    ("boundaries", "_convention"): ("boundary_convention", lambda: spelled(ENGINE)),
    ("boundaries", "_default"): ("boundaries", lambda: spelled(ENGINE, files.IDS)),
    ("fusion", "_guess_width"): ("target_hidden_size", lambda: spelled(ENGINE, files.IDS)),
    ("fusion", "_residual"): (
        "residual",
        lambda: spelled("speculators", "norm_before_residual"),
    ),
    ("fusion", "_feedback"): ("feedback", lambda: spelled(ENGINE, norm_output=True)),
    ("layers", "resolve_mlp"): ("norm_eps", lambda: spelled(ENGINE, "rms_norm_eps")),
    ("layers", "resolve_windows"): (
        "windows",
        lambda: spelled("specforge", layer_types=["sliding_attention"], sliding_window=8),
    ),
    ("resolve", "_rest"): ("double_hidden_norm", lambda: spelled("modelopt-hf")),
    ("rope", "_theta"): ("rope.theta", lambda: spelled(ENGINE, "rope_theta")),
    ("rope", "_as_trained"): ("rope.theta", lambda: spelled("angelslim", rope_theta=5e5)),
    ("vocabulary", "_table_map"): (
        "draft_to_target",
        lambda: spelled("torchspec-gqa", change=no_mask),
    ),
}
ALSO = {
    "hidden_act": lambda: spelled(ENGINE, "hidden_act"),
    "boundaries": lambda: spelled(ENGINE),
}


def functions_that_assume() -> set[tuple[str, str]]:
    """(module, function) of every place in the drafter's loaders that says `assumed`."""
    found = set()
    for path in (MODELS / "checkpoints").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            for node in ast.walk(function):
                stated = isinstance(node, ast.Attribute) and ast.unparse(node) == "Origin.assumed"
                called = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("assumed")
                compared = any(
                    isinstance(c, ast.Compare) and any(d is node for d in ast.walk(c))
                    for c in ast.walk(function)
                )
                if (stated and not compared) or called:
                    found.add((path.stem, function.name))
    return found - {("dialects", "_assumed"), ("fields", "assumed")}  # which only pass it on


def test_every_place_that_assumes_has_a_case() -> None:
    """A new default without a case fails here."""
    exporters = {f for f in functions_that_assume() if f[0] in {"layouts", "profiles", "write"}}
    assert functions_that_assume() - exporters == set(CASES)


ALL = [*CASES.values(), *ALSO.items()]


@pytest.mark.parametrize(("name", "make"), ALL, ids=[f"{i}-{c[0]}" for i, c in enumerate(ALL)])
def test_what_is_assumed_is_listed_and_refused_under_strict(
    name: str, make: Callable[[], tuple[Config, Tensors]], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "d", *make())
    alone = name == "target_hidden_size"  # known from the target, where there is one
    found = inspect(folder, target=None if alone else files.TARGET)
    stated = found.provenance[name]
    assert stated.origin is Origin.assumed
    assert stated.where, "says why"
    if alone:
        return
    made = load_drafter(folder, target=files.TARGET)
    assert made.provenance[name] == stated, "the drafter carries it to every manifest"
    with pytest.raises(AssumptionError) as caught:
        load_drafter(folder, target=files.TARGET, strict=True)
    assert f"{name} = {stated.value} ({stated.where})" in str(caught.value)


@pytest.mark.parametrize("dialect", files.SPELLINGS)
def test_a_key_that_is_dropped_is_missed_aloud(dialect: str, tmp_path: Path) -> None:
    """Drop each key of each producer's config: an error, or a value whose origin says so."""
    whole = inspect(write_checkpoint(tmp_path / "w", *spelled(dialect)), target=files.TARGET)
    config, tensors = spelled(dialect)
    nested = config.get("transformer_layer_config")
    keys = [(None, k) for k in config] + [("transformer_layer_config", k) for k in nested or {}]
    for place, key in keys:
        changed = copy.deepcopy(config)
        del (changed if place is None else changed[place])[key]
        try:
            found = inspect(write_checkpoint(tmp_path / "d", changed, tensors), target=files.TARGET)
        except DriftlabError:
            continue
        for name, before in whole.provenance.items():
            now = found.provenance.get(name)
            if name == "source":
                continue
            if name == "boundary_convention" and key in {files.IDS, "eagle_config"}:
                # Without ids they have no convention; but then they were not read, either.
                assert found.provenance["boundaries"].origin is not Origin.read
                continue
            assert now is not None, f"{name} has no origin without {key}"
            if now.value != before.value and name != "notes":
                assert now.origin is not Origin.read, f"{name} without {key}"


def test_every_field_of_the_contract_has_an_origin() -> None:
    for dialect in files.SPELLINGS:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            found = inspect(write_checkpoint(Path(folder), *spelled(dialect)), target=files.TARGET)
        fields = set(DrafterConfig.model_fields) - {"rope", "mla"}
        fields |= {f"rope.{n}" for n in ("rope_type", "theta", "parameters", "max_position")}
        assert fields - set(found.provenance) == set(), dialect


# --- the target -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tiny_llama(vocab_size=97, hidden_size=32, layers=4, max_position=64)
    made.save_pretrained(tmp_path / "t")
    return tmp_path / "t"


def rewrite(folder: Path, *drop: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def assumed(target: Target) -> set[str]:
    return {n for n, s in target.provenance.items() if s.origin is Origin.assumed}


@pytest.mark.parametrize(
    ("drop", "names"),
    [
        (("rms_norm_eps",), {"config.rms_norm_eps"}),
        (("hidden_act",), {"config.hidden_act"}),
        (("max_position_embeddings",), {"config.max_position_embeddings", "max_position"}),
        (("rope_parameters", "rope_theta", "rope_scaling"), {"config.rope_parameters"}),
    ],
)
def test_what_a_target_s_config_leaves_out_is_assumed(
    folder: Path, drop: tuple[str, ...], names: set[str]
) -> None:
    assert assumed(Target.load(str(folder))) == {"eos_ids"}, "nothing says where a text ends"
    rewrite(folder, *drop)
    found = Target.load(str(folder))
    assert assumed(found) == {"eos_ids", *names}
    for name in names:
        assert "absent from config.json" in found.provenance[name].where


def test_a_hub_id_tells_what_its_folder_would(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the commit that was loaded, though the name has moved on since in the cache."""
    rewrite(folder, "hidden_act", "max_position_embeddings")
    words = {f"w{i}": i for i in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)
    commit, store = "a" * 40, tmp_path / "hub" / "models--o--n"
    for revision, drop in ((commit, ()), ("b" * 40, ("dtype", "rms_norm_eps"))):
        shutil.copytree(folder, store / "snapshots" / revision)
        rewrite(store / "snapshots" / revision, *drop)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    local, hub = Target.load(str(folder)), Target.load("o/n", revision=commit)
    said = {"source", "revision"}
    assert {n: s for n, s in hub.provenance.items() if n not in said} == {
        n: s for n, s in local.provenance.items() if n not in said
    }
    assert hub.provenance["revision"].value == commit
    assert hub.provenance["dtype"].where == "argument; stored as float32"
    assert {"config.hidden_act", "max_position"} <= assumed(hub)
    newest = Target.load("o/n")
    assert newest.provenance["revision"].value == "b" * 40
    assert newest.provenance["dtype"].where == "argument; stored as unstated"
    assert assumed(newest) == assumed(hub) | {"config.rms_norm_eps"}
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "o" / "n")
    with pytest.raises(CheckpointError, match="local folder and has no revision"):
        Target.load("o/n", revision=commit)


def test_a_context_without_a_limit_is_assumed() -> None:
    class Endless:
        max_position_embeddings = None

    made = Target.from_model(
        tiny_llama(vocab_size=40, hidden_size=16, layers=1, max_position=32), name="x", eos_ids=()
    )
    made.model.config.get_text_config = lambda decoder: Endless()
    made._find_context()
    assert assumed(made) == {"max_position"}


# --- where it surfaces ----------------------------------------------------------------------------


def test_a_probe_stores_what_was_assumed_and_strict_ends_it(folder: Path, tmp_path: Path) -> None:
    save_drafter(pairs.drafter(), tmp_path / "d", dialect="vllm")
    rewrite(folder, "rms_norm_eps")
    teacher = Target.load(str(folder))
    teacher.eos_ids = frozenset()
    made = load_drafter(tmp_path / "d", target=teacher)
    lab = Lab(teacher, made, cache=tmp_path / "cache")
    expected = {f"target.{n}" for n in assumed(teacher)}
    expected |= {f"drafter.{n}" for n, s in made.provenance.items() if s.origin is Origin.assumed}
    found = {n for n, s in lab.contract.items() if s.origin is Origin.assumed}
    assert "target.config.rms_norm_eps" in expected
    assert found == expected, "which is what goes into a manifest, the page and the closing lines"
    with pytest.raises(AssumptionError, match=r"config\.rms_norm_eps"):
        driftlab.open(str(folder), tmp_path / "d", strict=True)


def test_the_command_line_prints_each_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import synthetic_run

    run = synthetic_run.make_run(
        tmp_path / "run", seeds=(0,), prompts=synthetic_run.prompt_names(2), depth=4, anchors=4
    )
    run._role = "owner"
    run.update_manifest(
        assumed={"rope.theta": {"value": 1e4, "where": "absent", "origin": "assumed"}}
    )
    monkeypatch.setattr("driftlab.results.figures.save_figures", lambda *_: {})
    monkeypatch.setattr("driftlab.results.report.write_report", lambda *_, **__: "page")
    cli._finish(run)
    assert capsys.readouterr().out.count("assumed: rope.theta = 10000.0 (absent)") == 1
