"""Damage what driftlab reads and look at what comes out: its own errors, or what was stored.

    python tests/reliability/fuzz.py [--seconds 120] [--seed 0] [--only NAME]

Every target writes one damaged input from a seed and reads it. It fails when anything but a
DriftlabError comes out, when a file with a checksum gives other content than was stored, when a
file without one gives numbers that are not finite, when it takes longer than LIMIT, or when the
process dies. Inputs run in forked children, so that a crash is seen and named by its seed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import string
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pairs
import synthetic_run
import test_checkpoints as drafters
import test_target
import torch
from golden.cases import write_checkpoint

from driftlab.config import Experiment, build_experiment, read_experiment
from driftlab.data import corpus
from driftlab.data.features import FeatureStore
from driftlab.data.grammar import WordTokenizer
from driftlab.data.prompts import load_prompts
from driftlab.engines import train
from driftlab.errors import ConfigError, DataError, DriftlabError
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.frozen import Frozen, freeze
from driftlab.models.gguf_header import read_gguf_header
from driftlab.results.records import RunDirectory
from driftlab.results.shards import read_shard

LIMIT = 20  # seconds of processor time for one input
STUCK = 600  # seconds by the clock: it waits for something that does not come
Rng = random.Random
SUITE = Path(train.__file__).parent.parent / "data" / "suites" / "micro.toml"

JUNK: tuple[Any, ...] = (
    *(None, 0, -1, 1, 2, 3, 7, 10**6, 10**12, 2**63, -(2**63), 10**400, 0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), True, False, "", "x", "micro", "../../etc/passwd", "\0", "é" * 9),
    *([], [1], [0, 0], [None], ["a"], [[]], [[1]], {}, {"a": 1}, {"a": {}}, "1e9", "\ud800"),
)


@cache
def home() -> Path:
    """Whole files, made once."""
    folder, owner = Path(tempfile.mkdtemp(prefix="driftlab-fuzz-")), os.getpid()

    def clear() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clear)
    return folder


def bent(rng: Rng, data: bytes, *, head: int | None = None) -> bytes:
    """``data`` with one to four wounds: flipped bits, cuts, doubled or lost parts, noise."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size = len(out) if head is None or rng.random() < 0.5 else min(head, len(out))
        if not size:
            return bytes(out)
        a = rng.randrange(size)
        n = min(rng.choice((1, 1, 2, 8, 60)), len(out) - a)
        match rng.randrange(7):
            case 0 | 1 | 2:
                out[a] ^= 1 << rng.randrange(8)
            case 3:
                del out[a:]
            case 4:
                out[a:a] = out[a : a + n]
            case 5:
                del out[a : a + n]
            case _:
                out[a : a + n] = rng.randbytes(n)
    return bytes(out)


def bent_json(rng: Rng, value: Any) -> Any:
    """``value`` with one part replaced by junk, dropped, or added."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict | list):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                walk(node[key])

    value = json.loads(json.dumps(value))
    walk(value)
    for _ in range(rng.choice((1, 1, 2))):
        node, key = rng.choice(places)
        action = rng.randrange(4)
        if action == 0 and isinstance(node, dict):
            node.pop(key, None)
        elif action == 1 and isinstance(node, dict):
            node["".join(rng.choices(string.ascii_letters, k=5))] = rng.choice(JUNK)
        elif isinstance(node, dict) or key < len(node):
            node[key] = rng.choice(JUNK)
    return value


# --- targets ------------------------------------------------------------------------------------


def toml(rng: Rng, folder: Path) -> None:
    path = folder / "e.toml"
    path.write_bytes(bent(rng, SUITE.read_bytes()))
    found = read_experiment(path)
    assert Experiment.model_validate(found.model_dump()) == found


def settings(rng: Rng, folder: Path) -> None:
    data = bent_json(rng, read_experiment(SUITE).model_dump(mode="json"))
    key = rng.choice(("train.lr", "seeds", "text", "axes.ttt", "a.b.c", "", "train..lr", "=", "v"))
    sets = (f"{key}={rng.choice(JUNK)!r}",) if rng.random() < 0.3 else ()
    found = build_experiment(data, sets, where="fuzz")
    assert Experiment.model_validate(found.model_dump()) == found


def prompts(rng: Rng, folder: Path) -> None:
    rows = [
        {"id": "a", "prompt": "Say so.", "category": "chat", "system": "Be brief."},
        {"turns": ["one", "two"], "question_id": 7},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"text": "Once upon a time", "response": "there was"},
    ]
    if rng.random() < 0.5:
        rows = bent_json(rng, rows)
    lines = [json.dumps(row).encode() for row in rows] if isinstance(rows, list) else [b"[]"]
    data = b"\n".join(lines)
    if rng.random() < 0.6:
        data = bent(rng, data)
    if rng.random() < 0.05:
        data = rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 9000))
    path = folder / "p.jsonl"
    path.write_bytes(data)
    found = load_prompts(path)
    assert found and all(p.text.strip() for p in found)
    assert all("/" not in p.id and p.id not in {".", ".."} for p in found)
    with contextlib.suppress(DataError):  # most of these rows have no response
        corpus.read_given(path, WordTokenizer(), max_tokens=100)


@cache
def spelled(dialect: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    config, tensors = drafters.spell(dialect)
    folder = write_checkpoint(home() / dialect, config, tensors)
    return config, tensors, (folder / "model.safetensors").read_bytes()


def _load(folder: Path) -> None:
    made = load_drafter(folder, target=drafters.TARGET)
    with torch.inference_mode():
        out = drafters.chain(made, depth=2)
    # Junk weights may overflow on the way: what probes says so (tests/test_numerics.py).
    assert out.shape[-1] == made.config.draft_vocab_size


def configs(rng: Rng, folder: Path) -> None:
    config, _, data = spelled(rng.choice(drafters.SPELLINGS))
    text = json.dumps(bent_json(rng, config)).encode()
    (folder / "config.json").write_bytes(bent(rng, text) if rng.random() < 0.3 else text)
    (folder / "model.safetensors").write_bytes(data)
    _load(folder)


def safetensors(rng: Rng, folder: Path) -> None:
    config, _, data = spelled(rng.choice(drafters.SPELLINGS))
    head = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:  # a header that lies
        table = bent_json(rng, json.loads(data[8:head]))
        text = json.dumps(table).encode()
        data = len(text).to_bytes(8, "little") + text + data[head:]
    else:
        data = bent(rng, data, head=head)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data)
    _load(folder)


def indexes(rng: Rng, folder: Path) -> None:
    config, tensors, data = spelled("vllm")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data)
    text = json.dumps(bent_json(rng, index)).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)
    _load(folder)


@cache
def pickled() -> bytes:
    path = home() / "w.bin"
    torch.save(drafters.spell("vllm")[1], path)
    return path.read_bytes()


def torch_files(rng: Rng, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(drafters.spell("vllm")[0]))
    (folder / "pytorch_model.bin").write_bytes(bent(rng, pickled()))
    _load(folder)


@cache
def own() -> tuple[bytes, bytes, dict[str, torch.Tensor]]:
    folder = home() / "own"
    made = pairs.drafter()
    save_drafter(made, folder)
    config, weights = (folder / n for n in ("config.json", "model.safetensors"))
    return config.read_bytes(), weights.read_bytes(), dict(load_drafter(folder).state_dict())


def own_layout(rng: Rng, folder: Path) -> None:
    config, weights, _ = own()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(bent(rng, weights, head=4000))
    if (folder / "model.safetensors").read_bytes() == weights:
        return
    load_drafter(folder)
    raise AssertionError("weights that were changed came through their checksum")


def own_config(rng: Rng, folder: Path) -> None:
    config, weights, whole = own()
    text = json.dumps(bent_json(rng, json.loads(config)))
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(weights)
    made = load_drafter(folder)
    assert all(torch.equal(t, whole[n]) for n, t in made.state_dict().items())


@cache
def run() -> Path:
    return synthetic_run.make_run(
        home() / "run", seeds=(0,), prompts=synthetic_run.prompt_names(2), depth=4, anchors=4
    ).path


def shards(rng: Rng, folder: Path) -> None:
    whole = rng.choice(sorted((run() / "shards").rglob("*.shard")))
    path = folder / "x.shard"
    path.write_bytes(bent(rng, whole.read_bytes(), head=400))
    owners = [json.loads((run() / "manifest.json").read_text())["config_hash"]]
    shard, true = read_shard(path, owners=owners), read_shard(whole, owners=owners)
    assert true is not None
    if shard is not None and shard.key == true.key:
        for name in true.blobs:
            if shard.table(name) != true.table(name):
                raise AssertionError(f"{name} of a damaged shard was read")


def tables(rng: Rng, folder: Path) -> None:
    """A flipped bit anywhere in the tables or the manifest of a run."""
    shutil.copytree(run(), folder / "run")
    name = rng.choice(("steps", "depths", "heads", "fused", "prompts", "cells"))
    path = folder / "run" / f"{name}.parquet"
    path.write_bytes(bent(rng, path.read_bytes()))
    found = RunDirectory.open(folder / "run").table(name)
    if not found.equals(RunDirectory.open(run()).table(name)):
        raise AssertionError(f"other numbers were read from a damaged {name}.parquet")


def manifests(rng: Rng, folder: Path) -> None:
    shutil.copytree(run(), folder / "run")
    path = folder / "run" / "manifest.json"
    data = path.read_bytes()
    data = (
        bent(rng, data)
        if rng.random() < 0.5
        else json.dumps(bent_json(rng, json.loads(data))).encode()
    )
    path.write_bytes(data)
    found = RunDirectory.open(folder / "run").tables()
    assert found.depths.equals(RunDirectory.open(run()).tables().depths)


@cache
def stored() -> tuple[Path, str]:
    store = FeatureStore(home() / "states")
    texts = pairs.lessons(6)
    return home() / "states", store.build(
        pairs.target(), texts, pairs.BOUNDARIES, dtype="float32"
    ).key


def features(rng: Rng, folder: Path) -> None:
    root, key = stored()
    shutil.copytree(root, folder / "states")
    path = folder / "states" / key
    chosen = path / rng.choice(("manifest.json", "texts.parquet", "shard-00000"))
    data = chosen.read_bytes()
    if chosen.suffix == ".json" and rng.random() < 0.5:
        chosen.write_text(json.dumps(bent_json(rng, json.loads(data))))
    else:
        chosen.write_bytes(bent(rng, data))
    found, true = FeatureStore(folder / "states").open(key), FeatureStore(root).open(key)
    assert found.texts == true.texts
    for i in range(len(true)):
        a, b = found.item(i), true.item(i)
        if not (torch.equal(a["aux"], b["aux"]) and torch.equal(a["last"], b["last"])):
            raise AssertionError("other states were read from a damaged store")


@cache
def begun() -> bytes:
    path = home() / "t.pt"
    drafter = pairs.drafter()
    state = {"identity": "x", "drafter": drafter.state_dict(), "losses": [1.0, 2.0]}
    train._save(path, {**state, "optimiser": {}, "tokens": 3, "skipped": 0, "seconds": 1.0})
    return path.read_bytes()


def trainings(rng: Rng, folder: Path) -> None:
    path = folder / "t.pt"
    path.write_bytes(bent(rng, begun()))
    found = train._load(path, "x")
    true = pairs.drafter().state_dict()
    if found["losses"] != [1.0, 2.0] or any(
        not torch.equal(t, found["drafter"][n]) for n, t in true.items()
    ):
        raise AssertionError("another training was read from a damaged checkpoint")


@cache
def parts() -> bytes:
    path = home() / "f.safetensors"
    freeze(pairs.target(), path)
    return path.read_bytes()


def frozen(rng: Rng, folder: Path) -> None:
    path = folder / "f.safetensors"
    path.write_bytes(bent(rng, parts(), head=500))
    found, teacher = Frozen(path), pairs.target()
    same = torch.equal(found.embedding_weight, teacher.embedding_weight)
    same &= torch.equal(found.head_weight, teacher.head_weight)
    if not same or found.softcap != teacher.softcap or found.logit_scale != teacher.logit_scale:
        raise AssertionError("other weights were read from a damaged file")


@cache
def gguf_file() -> bytes:
    path = home() / "x.gguf"
    test_target._tiny_gguf(path)
    return path.read_bytes()


def gguf(rng: Rng, folder: Path) -> None:
    data = bytearray(bent(rng, gguf_file(), head=700))
    if rng.random() < 0.4 and len(data) > 40:  # a count or a length that lies
        at = rng.randrange(8, len(data) - 8)
        n = rng.choice((0, 1, 2**31, 2**40, 2**62, 2**64 - 1))
        data[at : at + 8] = n.to_bytes(8, "little")
    path = folder / "x.gguf"
    path.write_bytes(bytes(data))
    assert read_gguf_header(path).elements >= 0


TARGETS: dict[str, Callable[[Rng, Path], None]] = {
    f.__name__: f
    for f in (
        *(toml, settings, prompts, configs, safetensors, indexes, torch_files, own_layout),
        *(own_config, shards, tables, manifests, features, trainings, frozen, gguf),
    )
}


# --- running ------------------------------------------------------------------------------------


class Hang(BaseException):
    """Not an Exception, so that nothing of the code under test catches it."""


def _alarm(*_: object) -> None:
    raise Hang


def one(name: str, seed: object) -> str:
    """Run one input. Returns "read" or "refused"; raises whatever should not have come out."""
    rng = random.Random(f"{name} {seed}")
    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory(dir=home()) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            TARGETS[name](rng, Path(folder))
        except DriftlabError as error:
            if not isinstance(error, ConfigError) or error.what:
                return "refused"
            raise
    return "read"


def _child(name: str, seeds: range, pipe: int) -> None:
    """Run inputs; write one byte for each: r, x, or ! and then the fault as text."""
    faulthandler.disable()
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, _alarm)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        signal.setitimer(signal.ITIMER_REAL, STUCK)
        try:
            said = {"read": b"r", "refused": b"x"}[one(name, seed)]
        except Hang:
            said = f"!{seed} took more than {LIMIT} s".encode()
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            said = f"!{seed} {where} {type(error).__name__}: {str(error)[:200]}".encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(pipe, said.replace(b"\n", b" "))
        if said[:1] == b"!":
            break
    os._exit(0)


def batch(name: str, seeds: range) -> tuple[int, int, str]:
    """(inputs read, inputs refused, the fault that ended the batch or "")."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(name, seeds, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    good, _, fault = said.partition("!")
    if code and not fault:
        fault = f"{seeds[len(good)]} the process died, {code}"
    return good.count("r"), good.count("x"), fault


def spent() -> float:
    """Processor time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=120, help="of processor time, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TARGETS)
    asked = parser.parse_args()
    names = [asked.only] if asked.only else list(TARGETS)
    each, faults = asked.seconds / len(names), 0
    total_read = total_refused = 0
    print(f"{'target':12} {'inputs':>7} {'refused':>8} {'read':>7}")
    for name in names:
        read = refused = 0
        with contextlib.suppress(Exception):
            one(name, "first")  # makes the whole files, which the children then share
        at, end = asked.seed * 10**7, spent() + each
        while spent() < end:
            r, x, fault = batch(name, range(at, at + 20))
            read, refused = read + r, refused + x
            at += r + x
            if fault:
                faults += 1
                at += 1
                print(f"  FAULT {name} {fault}", flush=True)
                if faults > 60:
                    sys.exit(1)
        total_read, total_refused = total_read + read, total_refused + refused
        print(f"{name:12} {read + refused:7} {refused:8} {read:7}", flush=True)
    print(f"{'all':12} {total_read + total_refused:7} {total_refused:8} {total_read:7}")
    print(f"{faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
