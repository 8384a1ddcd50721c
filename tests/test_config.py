"""Experiment files: what is accepted means what it says, the rest is one ConfigError."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftlab.analysis.interventions import from_settings
from driftlab.config import (
    DrafterConfig,
    Experiment,
    Origin,
    Sourced,
    build_experiment,
    read_experiment,
    refuse_assumptions,
)
from driftlab.errors import AssumptionError, ConfigError
from driftlab.experiment.checks import check_experiment, unmeasured
from driftlab.results.merge import identity
from driftlab.results.records import config_hash

ROOT = Path(__file__).resolve().parent.parent
MICRO = ROOT / "driftlab" / "data" / "suites" / "micro.toml"


def small() -> dict[str, Any]:
    return {
        "name": "x",
        "target": {"source": "micro"},
        "text": {"train_prompts": "micro", "measure_prompts": "micro", "train_tokens": 10},
    }


SHIPPED = [MICRO, *sorted((ROOT / "experiments").glob("*.toml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_what_is_shipped_is_read(path: Path) -> None:
    for base in (None, "micro", "llama-3.1-8b") if path != MICRO else (None,):
        spec = read_experiment(path, base=base)
        assert spec.seeds
        if spec.analysis is not None and spec.applied is not None:
            names = {"", *(c.name for c in spec.applied.conditions)}
            for contrast in (spec.analysis.primary, *spec.analysis.family):
                levels = contrast.levels if contrast.factor == "condition" else ()
                assert {*levels, contrast.at.get("condition", "")} <= names
        for condition in spec.applied.conditions if spec.applied else ():
            assert all(from_settings(one) for one in condition.interventions)


def test_smollm2_and_micro_are_the_runs_that_they_were() -> None:
    """Runs that were begun before bases, conditions and alignment can be resumed."""
    known = {
        MICRO: "84c78c44dddf18bbae1875c484c14ef38eef8f7c3c9008731d532472849ce193",
        ROOT / "experiments" / "smollm2.toml": (
            "fc94d90083b3b1ad68b4255e0745399bfd97da4018258a2904ca7665a20d29e7"
        ),
    }
    for path, digest in known.items():
        assert config_hash(identity(read_experiment(path))) == digest


def test_an_experiment_lies_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    base = tmp_path / "targets" / "tiny.toml"
    base.write_text(
        'name = "not this"\nworkers = 5\n[target]\nsource = "micro"\nboundaries = [0, 1]\n'
        '[text]\ntrain_prompts = "micro"\nmeasure_prompts = "micro"\ntrain_tokens = 10\n'
        "[axes]\nttt = [7]\n[measure]\ndepth = 4\nrecent = 3\n"
    )
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\nbase = "targets/tiny.toml"\n[measure]\ndepth = 9\n')
    spec = read_experiment(path, ("measure.recent=2",))
    assert (spec.name, spec.base, spec.workers) == ("x-tiny", "tiny", 5)
    assert (spec.measure.depth, spec.measure.recent) == (9, 2)
    assert spec.target.boundaries == (0, 1)
    assert spec.axes.ttt == (), "a base gives no axes"
    assert read_experiment(path, base="micro").name == "x-micro"
    assert read_experiment(path, base=base) == read_experiment(path)
    with pytest.raises(ConfigError, match=r"(?s)no base 'nobody'.*Known: micro, tiny"):
        read_experiment(path, base="nobody")
    path.write_text('name = "tiny"\nbase = "targets/tiny.toml"\n')
    assert read_experiment(path).name == "tiny"
    path.write_text('name = "x"\nbase = "tiny"\n[measure]\ndepth = 9\n')
    assert read_experiment(path, ("measure.recent=2",)) == spec, "a name in the file, too"
    path.write_text('name = "x"\nbase = "micro"\n')
    assert read_experiment(path).target.source == "micro"
    path.write_text('name = "x"\nbase = "gone.toml"\n')
    with pytest.raises(ConfigError, match=r"gone.toml does not exist"):
        read_experiment(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('applied.conditions=[{name="x"}]', "changes nothing"),
        ('applied.conditions=[{name="x", writes=true}]', "for a target that is quantized"),
        (
            'applied.conditions=[{name="x", temperature=1}, {name="x", temperature=0}]',
            "the same name",
        ),
        ('applied.conditions=[{name="/x", temperature=1}]', "name"),
        (
            'analysis.primary={measure="sink", factor="ttt", levels=[2, 2]}',
            "a contrast needs two levels",
        ),
        (
            'analysis.primary={measure="sink", factor="ttt", levels=[2, 4], at={ttt=2}}',
            "cannot be held and compared",
        ),
        ('analysis.primary={measure="joy", factor="ttt", levels=[2, 4]}', "measure"),
    ],
)
def test_a_condition_or_contrast_that_says_nothing_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_experiment(MICRO, (override,))


COOL = 'applied.conditions=[{{name="cool", temperature=0.5, {}}}]'
LEFT_OUT = "condition cool is measured on none.pre_norm, not on feedback post_norm"
PRIMARY = {"measure": "forced accuracy", "factor": "feedback", "levels": ["pre_norm", "post_norm"]}


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"depth": 99}, (), "depth 99 is beyond measure.depth = 16"),
        ({"at": {"feedback": "x"}, "factor": "ttt", "levels": [2, 4]}, (), "feedback has no level"),
        ({"levels": ["pre_norm", "bogus"]}, (), "has no level 'bogus', only pre_norm, post_norm"),
        ({"factor": "condition", "levels": ["", "nope"]}, (), "condition has no level 'nope'"),
        ({"factor": "fusion_norm", "levels": ["none", "concat_per_layer"]}, (), "has no level"),
        ({"factor": "ttt", "levels": [True, 4]}, (), "it is a number"),
        ({"at": {"lr_scale": "fast"}}, (), "it is a number"),
        ({"measure": "growth", "depth": 1}, (), "growth from depth 1"),
        ({"measure": "accepted drafts", "depth": 8}, (), "a length has no depth, and depth 8"),
        ({"measure": "share of own length"}, (), "names no condition"),
        ({}, ('measure.modes=["free"]',), "no forced chains are measured"),
        ({"at": {"condition": "cool"}}, (COOL.format('variants=["none+pre_norm"]'),), LEFT_OUT),
        (
            {"factor": "condition", "levels": ["", "cool"], "at": {"feedback": "post_norm"}},
            (COOL.format("writes=false"), 'applied.variants=["none+pre_norm"]'),
            LEFT_OUT,
        ),
    ],
)
def test_a_comparison_that_no_run_could_answer_is_refused(
    changes: dict[str, Any], overrides: tuple[str, ...], said: str
) -> None:
    data = {**tomllib.loads(MICRO.read_text()), "analysis": {"primary": {**PRIMARY, **changes}}}
    spec = build_experiment(data, overrides, where="test")  # a manifest with it is still read
    with pytest.raises(ConfigError, match=said):
        check_experiment(spec)


def test_a_level_that_another_part_of_the_run_trains_is_named() -> None:
    data = {**tomllib.loads(MICRO.read_text()), "analysis": {"primary": PRIMARY}}
    assert unmeasured(build_experiment(data, where="test")) == []
    spec = build_experiment(data, ('axes.feedback=["pre_norm"]',), where="test")
    check_experiment(spec)
    (said,) = unmeasured(spec)
    assert "name feedback post_norm, which this run does not train" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("axes.steps_scale=[0.05, 0.1]", "train.steps=10"), "trains no step"),
        (("axes.steps_scale=[0.24, 0.25]", "train.steps=8"), "trains 2 steps, as 0.24 does"),
        (
            (
                'applied.conditions=[{name="a", interventions=[{kind="noise", alpha=1}]}, '
                '{name="b", interventions=[{kind="noise", alpha=1.0, seed=0}]}]',
            ),
            "conditions a and b are the same",
        ),
        (("train.align_layer=0",), r"train\.align_layer changes nothing"),
        (("train.align_layer=0", "axes.alignment=[0.0]"), r"align_layer changes nothing"),
    ],
)
def test_two_names_of_one_thing_and_settings_without_effect_are_refused(
    settings: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_experiment(read_experiment(MICRO, settings))


@pytest.mark.parametrize(
    ("axes", "settings", "dropped"),
    [
        ("ttt = [1, 2]", (), False),  # micro trains 3, which is laid under
        ("ttt = [1, 2]", ("train.ttt=2",), False),
        ("ttt = [1, 2]", ("train.ttt=7",), True),
        ("ttt = [1, 2]", ("train = {ttt = 7}",), True),
        ("ttt = [1, 2]\ntrain.ttt = 7", (), True),
        ("ttt = [1, 2]\ntrain.ttt = 7", ("axes.ttt=[7, 8]",), False),
        ("", ("train.ttt=7",), False),
        ("", ("train.ttt=7", "axes.ttt=[1]"), True),
        ("alignment = [0.0]", ("train.alignment=0.9",), True),
    ],
)
def test_a_value_that_an_axis_drops_is_refused(
    axes: str, settings: tuple[str, ...], dropped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.toml"
    axes, _, train = axes.partition("\n")
    path.write_text(f'name = "x"\nbase = "micro"\n{train}\n[axes]\n{axes}\n')
    if not dropped:
        check_experiment(read_experiment(path, settings))
        return
    with pytest.raises(ConfigError, match=r"train\.\w+ changes nothing: axes\.\w+ names"):
        read_experiment(path, settings)


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*.toml")), ids=lambda p: p.stem)
def test_what_is_shipped_can_be_answered(path: Path) -> None:
    for base in (None, "micro"):
        for narrowed in ((), ("seeds=[0]",), ('axes.fusion_norm=["none"]',)):
            check_experiment(read_experiment(path, narrowed, base=base))
    for stored in ROOT.glob(f"papers/*/runs/{path.stem}-*/manifest.json"):
        config = json.loads(stored.read_text())["config"]
        check_experiment(build_experiment(config, where=str(stored)))


def test_a_manifest_gives_the_experiment_back() -> None:
    spec = read_experiment(MICRO, ("measure.sink=[0, 3]", "drafter.draft_vocab_size=30"))
    assert build_experiment(spec.model_dump(mode="json"), where="manifest") == spec


def test_overrides_take_toml_and_bare_words() -> None:
    spec = read_experiment(
        MICRO,
        (
            "train.steps=7",
            "train.lr = 1",
            "seeds=[4, 5]",
            "text.measure_prompts=held-out",
            'question="why = how?"',
            "drafter.head_dim=8",  # a table that the file leaves out
            "train.steps=9",  # the last one counts
        ),
    )
    assert (spec.train.steps, spec.train.lr, spec.seeds) == (9, 1.0, (4, 5))
    assert (spec.text.measure_prompts, spec.question) == ("held-out", "why = how?")
    assert spec.drafter.head_dim == 8


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.stepps=3", "train.stepps"),
        ("steps=3", "steps"),
        ("train.steps=true", "train.steps: .*integer, found True"),
        ('train.steps="3"', "train.steps: .*integer, found '3'"),
        ("train.steps=3.0", "train.steps: .*integer, found 3.0"),
        ("train.steps=0", "train.steps"),
        ("train.steps=99999999999", "train.steps"),
        ("train.lr=nan", "train.lr: .*finite"),
        ("train.lr=inf", "train.lr: .*finite"),
        ("train=3", "train"),
        ("train.steps.x=3", "steps is not a table"),
        ("seeds=[]", "seeds is empty"),
        ("seeds=[1, 1]", "seeds holds a value twice"),
        ("seeds=[-1]", "seeds.0"),
        ("seeds=3", "seeds"),
        ('axes.feedback=["pre_norm", "pre_norm"]', "feedback holds a value twice"),
        ("axes.residual=[]", "residual is empty"),
        ('axes.fusion_norm=["both"]', "axes.fusion_norm.0"),
        ('axes.fusion_norm=["concat_per_layer"]', "not trained"),
        ("measure.modes=[]", "modes is empty"),
        ("measure.sink=[]", "sink is empty"),
        ("measure.sink=[0, 0]", "sink holds a value twice"),
        ("text.temperatures=[0.0, 1e-45]", "at least 0.0001"),
        ("text.train_temperature=1e-9", "at least 0.0001"),
        ("seeds=[0]\nworkers=7", "sets more than one key .*workers"),
        ("measure.sink=[-1]", "negative"),
        ("measure.sink=last", "measure.sink"),
        ("target.boundaries=[]", "boundaries is empty"),
        ("text.given=x.jsonl", "either train_prompts or given"),
        ("text.temperatures=[0.5, 1]", "temperatures"),
        ("name=../x", "name"),
        ("name=a/b", "name"),
        ("name=.hidden", "name"),
        ("name=2026-01-31", "no setting is a date"),
        ("=3", "--set needs key=value"),
        ("train.steps", "--set needs key=value"),
    ],
)
def test_a_wrong_setting_is_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_experiment(MICRO, (override,))
    assert re.search(named, caught.value.cause)
    assert caught.value.remedy


def test_every_wrong_key_is_listed() -> None:
    with pytest.raises(ConfigError, match=r"2 wrong setting.*train\.a.*measure\.b"):
        read_experiment(MICRO, ("train.a=1", "measure.b=2"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name = ", "is not a TOML file"),
        (b"a = 1\na = 2", "is not a TOML file"),
        (b"\xff\xfe", "is not a TOML file"),
        (b"a = " + b"[" * 100_000, "is not a TOML file"),
        (b"a" + b".a" * 20_000 + b" = 1", "too deep"),
        (b"", "name: Field required"),
        (b"name = 1979-05-27", "no setting is a date"),
    ],
)
def test_a_file_that_is_no_experiment(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_experiment(path)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_experiment(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"no regular file \(got a folder"):
        read_experiment(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_experiment(MICRO / "below-a-file.toml")


KEYS = st.sampled_from(
    [*Experiment.model_fields, *Experiment.model_fields["text"].annotation.model_fields]  # type: ignore[union-attr]
) | st.text(max_size=6)
LEAVES = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.datetimes()
    | st.sampled_from(["micro", "first", "none", "pre_norm", "float32"])
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=5,
)


@settings(max_examples=60)
@given(tree=TREES, begun=st.booleans())
def test_any_tree_gives_an_experiment_or_a_config_error(tree: dict[str, Any], begun: bool) -> None:
    data = {**small(), **tree} if begun else tree
    try:
        spec = build_experiment(data, where="x.toml")
    except ConfigError:
        return
    assert json.loads(spec.model_dump_json())["name"] == data["name"]


@settings(max_examples=60)
@given(key=st.text(max_size=12) | KEYS, value=st.text(max_size=12))
def test_any_override_gives_an_experiment_or_a_config_error(key: str, value: str) -> None:
    try:
        spec = build_experiment(small(), (f"{key}={value}",), where="x.toml")
    except ConfigError:
        return
    assert spec.name == "x" or key.strip() == "name"


@settings(max_examples=50)
@given(content=st.binary(max_size=40) | st.text(alphabet='[]{}"=.\n #a1', max_size=40))
def test_any_file_gives_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError):
        read_experiment(path)


def test_dates_in_lists_are_found() -> None:
    with pytest.raises(ConfigError, match="no setting is a date"):
        build_experiment({**small(), "seeds": [datetime.time(1, 2)]}, where="x")


DRAFTER: dict[str, Any] = {
    "hidden_size": 8,
    "target_hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "vocab_size": 9,
    "draft_vocab_size": 5,
    "boundaries": (1, 2),
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"boundaries": (2, 1)}, "ascend"),
        ({"boundaries": (-1, 1)}, ">= 0"),
        ({"draft_vocab_size": 10}, "exceeds vocab_size"),
        ({"windows": (4, 4)}, "2 windows for 1 layers"),
        ({"boundaries": (), "fusion_norm": "per_layer"}, "no fusion norm"),
        ({"norm_eps": float("inf")}, "finite"),
        ({"norm_output": True}, "norm_output"),
    ],
)
def test_drafters_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DrafterConfig(**DRAFTER | changes)


def test_a_variant_is_named_by_its_enums() -> None:
    assert DrafterConfig(**DRAFTER).variant == "none+pre_norm"
    normed = DRAFTER | {"fusion_norm": "concat", "feedback": "post_norm", "residual": "normed"}
    assert DrafterConfig(**normed).variant == "concat+post_norm+normed"


def test_strict_lists_what_was_assumed_and_nothing_else() -> None:
    read = Sourced(value=1, origin=Origin.read, where="config")
    refuse_assumptions(
        {"a": read, "b": read.model_copy(update={"origin": Origin.derived})}, owner="m"
    )
    assumed = Sourced(value=7, origin=Origin.assumed, where="nowhere")
    with pytest.raises(AssumptionError, match=r"m: 1 value.*c = 7 \(nowhere\)"):
        refuse_assumptions({"a": read, "c": assumed}, owner="m")
