"""Damaged and senseless input ends in driftlab's own errors: never a hang, a crash or a number.

A few inputs of every target of tests/reliability/fuzz.py, which tries many more, and whatever
hypothesis thinks of.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "reliability"))

import fuzz

from driftlab.config import Experiment, build_experiment, read_experiment
from driftlab.data.prompts import load_prompts
from driftlab.errors import CheckpointError, ConfigError, DataError, DriftlabError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_damage_is_refused_or_harmless(name: str) -> None:
    found = {fuzz.one(name, f"fast {i}") for i in range(6)}
    assert found <= {"read", "refused"}


@QUICK
@given(st.text() | st.binary(max_size=200))
def test_any_text_as_an_experiment_file(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError):
        read_experiment(path)


@QUICK
@given(
    st.sampled_from(sorted(Experiment.model_fields)),
    st.none() | st.sampled_from(["source", "steps", "depth", "lr", "ttt", "seed", "new"]),
    JSON,
)
def test_any_value_of_a_setting(field: str, inner: str | None, value: Any) -> None:
    data = read_experiment(fuzz.SUITE).model_dump(mode="json")
    if inner is not None and isinstance(data[field], dict):
        data[field][inner] = value
    else:
        data[field] = value
    with contextlib.suppress(ConfigError):
        found = build_experiment(data, where="t")
        assert Experiment.model_validate(found.model_dump()) == found


@QUICK
@given(st.text(max_size=40))
def test_any_override(text: str) -> None:
    data = read_experiment(fuzz.SUITE).model_dump(mode="json")
    with contextlib.suppress(ConfigError):
        build_experiment(data, (text,), where="t")


@QUICK
@given(st.lists(JSON | st.dictionaries(st.sampled_from(["prompt", "text", "id", "turns"]), JSON)))
def test_any_rows_as_prompts(tmp_path: Path, rows: list[Any]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with contextlib.suppress(DataError):
        found = load_prompts(path)
        assert len({p.id for p in found}) == len(found) > 0
        assert all(p.text.strip() for p in found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "' + b"9" * 10 + b'", "id": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "half \\ud800"}', "half a surrogate pair"),
        (b'{"prompt": "x", "system": "\\udc00"}', "half a surrogate pair"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_prompts_that_no_reader_takes(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=said):
        load_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_an_integer_beyond_every_float_is_no_number(tmp_path: Path, name: str) -> None:
    config, _, data = fuzz.spelled("vllm")
    (tmp_path / "config.json").write_text(json.dumps({**config, name: 10**400}))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is no finite number"):
        fuzz.load_drafter(tmp_path, target=fuzz.drafters.TARGET)


@pytest.mark.parametrize("kind", [["llama3"], {}, 1, True])
def test_a_rotation_whose_type_is_no_name_is_unknown(tmp_path: Path, kind: Any) -> None:
    config, _, data = fuzz.spelled("vllm")
    block = {"rope_type": kind, "rope_theta": 1e4}
    config = {k: v for k, v in config.items() if not k.startswith("rope_")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": block}))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="unknown rope_type"):
        fuzz.load_drafter(tmp_path, target=fuzz.drafters.TARGET)


def test_more_layers_than_any_file_holds(tmp_path: Path) -> None:
    """Nothing is counted up to a number that stands in a file."""
    text, weights, _ = fuzz.own()
    config = json.loads(text)
    config["config"]["num_layers"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="1000000000000 layers cannot be in the file"):
        fuzz.load_drafter(tmp_path)


def test_every_fault_names_a_remedy_or_the_thing_itself() -> None:
    """Over one input of every target: a cause of one line that is not empty."""
    said = []
    for name, target in fuzz.TARGETS.items():
        for seed in range(3):
            rng = fuzz.random.Random(f"said {name} {seed}")
            with fuzz.tempfile.TemporaryDirectory() as folder:
                try:
                    target(rng, Path(folder))
                except DriftlabError as error:
                    said.append(error)
    assert len(said) > len(fuzz.TARGETS)
    assert [e for e in said if not e.what.strip()] == []
