"""Damaged and senseless input ends in driftlab's own errors: never a hang, a crash or a number.

A few inputs of every target of tests/reliability/fuzz.py, which tries many more, and whatever
hypothesis thinks of.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

sys.path.insert(0, str(Path(__file__).parent / "reliability"))

import fuzz

from driftlab.config import Experiment, build_experiment, read_experiment
from driftlab.data.prompts import _limited, load_filler, load_prompts
from driftlab.errors import CheckpointError, ConfigError, DataError, DriftlabError
from driftlab.experiment.redo import manifest_of
from driftlab.files import file_hash
from driftlab.models.checkpoints import inspect
from driftlab.models.checkpoints.native import contract_hash
from driftlab.models.checkpoints.tokens import compare_tokens
from driftlab.models.loading import load_model
from driftlab.models.tiny import tiny_llama
from driftlab.results.bench_rows import fill
from driftlab.results.records import RunDirectory
from driftlab.results.served import beside, read_served

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


def public(folder: Path, **changes: Any) -> Path:
    """A drafter of vLLM's spelling, with other fields in its config."""
    config, _, data = fuzz.spelled("vllm")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "model.safetensors").write_bytes(data)
    return folder


def native(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A drafter of the own layout with other fields or tensors, and checksums that agree."""
    text, weights, _ = fuzz.own()
    config = json.loads(text)
    config["config"] |= changes
    config["contract_sha256"] = contract_hash(config)
    (folder / "model.safetensors").write_bytes(save({**load(weights), **(tensors or {})}))
    config["sha256"] = file_hash(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logit_scale": 0}, "logit_scale"),
        ({"logit_scale": -1.0}, "logit_scale"),
        ({"windows": [0]}, r"windows\.0"),
        ({"windows": [10**30]}, r"windows\.0"),
        ({"draft_position_offset": 10**30}, "draft_position_offset"),
        ({"rope": {"rope_type": "linear", "parameters": {"factor": -3}}}, "cannot be built"),
        ({"rope": {"rope_type": "linear", "parameters": {"factor": 0}}}, "cannot be built"),
    ],
)
def test_impossible_contracts_of_the_own_layout(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert fuzz.load_drafter(native(tmp_path)).config.logit_scale == 1.0
    with pytest.raises(DriftlabError, match=said):
        fuzz.load_drafter(native(tmp_path, **changes))


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_weights_that_are_no_numbers(tmp_path: Path, kind: torch.dtype) -> None:
    shape = fuzz.own()[2]["fc.weight"].shape
    folder = native(tmp_path, {"fc.weight": torch.ones(shape, dtype=kind)})
    with pytest.raises(CheckpointError, match=r"fc\.weight \(torch"):
        fuzz.load_drafter(folder)
    ids = fuzz.own()[2]["draft_to_target"]
    with pytest.raises(CheckpointError, match="holds no token ids"):
        fuzz.load_drafter(native(tmp_path, {"draft_to_target": ids.float() + 0.5}))


@pytest.mark.parametrize("scale", [0, -2.0])
def test_a_scale_that_is_not_above_zero(tmp_path: Path, scale: float) -> None:
    with pytest.raises(CheckpointError, match="logit_scale must be above 0"):
        inspect(public(tmp_path, logit_scale=scale), target=fuzz.drafters.TARGET)


def test_a_rotation_that_cannot_be_computed(tmp_path: Path) -> None:
    block = {
        **{"rope_type": "yarn", "rope_theta": 1, "factor": 4.0},
        "original_max_position_embeddings": 64,
    }
    public(tmp_path, rope_parameters=block, rope_theta=1)
    with pytest.raises(ConfigError, match="'yarn' cannot be built"):
        fuzz.load_drafter(tmp_path, target=fuzz.drafters.TARGET)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope.theta": -1},
        {"rope.parameters": 3},
        {"num_layers": "x"},
        {"mla": 5},
        {"dialect": "x"},
        {"norm_eps": -1.0},
    ],
)
def test_impossible_overrides(tmp_path: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"override of {next(iter(overrides))} is impossible"):
        inspect(public(tmp_path), target=fuzz.drafters.TARGET, overrides=overrides)


@pytest.mark.parametrize("boundaries", [5, "257", [1.0], [None]])
def test_boundaries_that_are_no_list(tmp_path: Path, boundaries: Any) -> None:
    with pytest.raises(ConfigError, match="no list of integers"):
        inspect(public(tmp_path), target=fuzz.drafters.TARGET, boundaries=boundaries)


def test_numbers_beyond_float32(tmp_path: Path) -> None:
    config, tensors, _ = fuzz.spelled("vllm")
    (tmp_path / "config.json").write_text(json.dumps(config))
    huge = {**tensors, "fc.weight": tensors["fc.weight"].double() * 1e200}
    (tmp_path / "model.safetensors").write_bytes(save({n: t.contiguous() for n, t in huge.items()}))
    with pytest.raises(CheckpointError, match=r"NaN or infinity \(got fc\.weight"):
        fuzz.load_drafter(tmp_path, target=fuzz.drafters.TARGET)


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"a": ' + "9" * 6000 + "}", "not a JSON file"), (None, "no regular file")],
)
def test_configs_that_no_reader_takes(tmp_path: Path, text: str | None, said: str) -> None:
    public(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is None:
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        fuzz.load_drafter(tmp_path)


def test_a_pipe_in_the_folder_of_a_target(tmp_path: Path) -> None:
    public(tmp_path)
    os.mkfifo(tmp_path / "generation_config.json")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "trust_remote_code": False}
    nowhere: dict[str, Any] = {"revision": None, "device_map": None, "tp_plan": None}
    with pytest.raises(CheckpointError, match=r"generation_config\.json is no regular file"):
        load_model(str(tmp_path), **options, **nowhere)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model("~nosuchuser/x", **options, **nowhere)


# --- what is no file: a pipe is waited for, /dev/zero never ends ---------------------------------


def gguf(place: Path) -> object:
    return load_target(place.rename(place.with_suffix(".gguf")))


def manifest_of_a_run(place: Path) -> object:
    return RunDirectory.open(place.rename(place.with_name("manifest.json")).parent)


def part_of_a_target(place: Path) -> object:
    tiny_llama(vocab_size=9, hidden_size=8, heads=2, layers=1).save_pretrained(place.parent)
    weights = place.parent / "model.safetensors"
    weights.unlink()
    place.rename(weights)
    return load_target(place.parent)


def part_of_a_drafter(place: Path, name: str) -> object:
    folder = public(place.parent)
    (folder / name).unlink(missing_ok=True)
    place.rename(folder / name)
    return fuzz.load_drafter(folder, target=fuzz.drafters.TARGET)


def shard_of_a_drafter(place: Path) -> object:
    index = {"weight_map": {"fc.weight": place.name}}
    folder = public(place.parent)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return inspect(folder)


def tokens_of_a_drafter(place: Path) -> object:
    class Known:
        tokenizer = object()

    place.rename(place.with_name("tokenizer.json"))
    return compare_tokens(place.parent, cast(Any, Known()))


def load_target(source: Path) -> object:
    nowhere: dict[str, Any] = {"revision": None, "device_map": None, "tp_plan": None}
    return load_model(
        str(source), dtype="float32", device="cpu", trust_remote_code=False, **nowhere
    )


READERS: dict[str, Callable[[Path], object]] = {
    "prompts": load_prompts,
    "filler": lambda place: load_filler(place.rename(place.with_suffix(".txt")), None, 9),
    "experiment": read_experiment,
    "manifest": manifest_of,
    "manifest of a run": manifest_of_a_run,
    "page of an engine": read_served,
    "page beside a run": lambda place: beside("run", place),
    "page of benchmarks": fill,
    "GGUF file": gguf,
    "part of a target": part_of_a_target,
    **{
        name: functools.partial(part_of_a_drafter, name=name)
        for name in ("config.json", "model.safetensors", "pytorch_model.bin", "eagle_meta.pt")
    },
    "shard": shard_of_a_drafter,
    "tokenizer": tokens_of_a_drafter,
}


FOLDERS = {"manifest", "page beside a run"}  # of runs


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (reader, kind)
        for reader in READERS
        for kind in ("a pipe", "a folder", "a device", "a socket")
        if kind != "a folder" or reader not in FOLDERS
    ],
)
def test_what_is_no_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    place = Path("thing")
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    elif kind == "a device":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(place))
    with _limited(10), pytest.raises(DriftlabError, match=f"is no regular file \\(got {kind}\\)"):
        READERS[reader](place.absolute())


@pytest.mark.parametrize("source", ["~nosuchuser/x", "x" * 300, "a\0b"])
def test_sources_that_no_system_knows(source: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect(source)


def test_a_shard_whose_name_is_too_long(tmp_path: Path) -> None:
    public(tmp_path)
    index = {"weight_map": {"fc.weight": "x" * 300}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="do not exist"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_tensors_without_a_block_of_numbers(tmp_path: Path, tensor: torch.Tensor) -> None:
    config, tensors, _ = fuzz.spelled("vllm")
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({**tensors, "fc.weight": tensor}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        fuzz.load_drafter(tmp_path, target=fuzz.drafters.TARGET)


@pytest.mark.parametrize("data", [b'{"fc.weight": [1, 2]}', gzip.compress(b"x" * 99), b""])
def test_a_bin_that_torch_did_not_write_is_not_called_dangerous(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged or no torch file"):
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
