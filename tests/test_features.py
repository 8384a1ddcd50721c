"""Stored states: equal to the target's own, found again, and whole after every accident."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from driftlab.data import features
from driftlab.data.features import Features, FeatureStore
from driftlab.data.text import Text
from driftlab.errors import ContractError, DataError, NumericsError, ResourceError
from driftlab.models import memory
from driftlab.models.target import Target

WIDTH, BOUNDARIES = 4, (0, 2, 3)
ROW_BYTES = (len(BOUNDARIES) + 1) * WIDTH * 4  # float32; the last state is stored, too


class Counting:
    """States that can be checked by hand: position, boundary and token, in every component."""

    name, hidden_size, fingerprint, dtype = "counting", WIDTH, "f" * 64, torch.float32
    device = torch.device("cpu")
    shape: Any = SimpleNamespace(intermediate_size=8)

    def __init__(self, fail_after: int = 10**9, pause: float = 0.0) -> None:
        self.calls, self.fail_after, self.pause = 0, fail_after, pause
        self.checked: list[list[int]] = []

    def check_boundaries(self, boundaries: Sequence[int]) -> None:
        if any(b > 3 for b in boundaries):
            raise ContractError("boundary outside 0..3")

    def self_check(self, tokens: Sequence[int]) -> None:
        self.checked.append(list(tokens))

    def forward(
        self, tokens: Tensor, lengths: Tensor, boundaries: Sequence[int], *, logits: bool
    ) -> Any:
        assert not logits
        self.calls += 1
        if self.calls > self.fail_after:
            raise KeyboardInterrupt
        time.sleep(self.pause)
        where = torch.arange(tokens.shape[1])[None, :, None].expand(*tokens.shape, WIDTH)
        base = tokens[..., None] + 0.001 * where
        aux = torch.cat([base[..., :0], *(base + 100 * b for b in boundaries)], -1)
        return SimpleNamespace(aux=aux, last=-base)


def texts(n: int = 12, seed: int = 0) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        size = int(torch.randint(6, 20, (), generator=generator))
        ids = torch.randint(0, 97, (size,), generator=generator).tolist()
        made.append(
            Text.of(f"p{i}", "c", ids[:4], ids[4:], kind="sampled", temperature=1.0, origin="here")
        )
    return made


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """About three texts a shard."""
    monkeypatch.setattr(features, "SHARD_BYTES", 36 * ROW_BYTES)


def build(root: Path, target: Any = None, **options: Any) -> Features:
    options = {"dtype": "float32", "batch": 2, **options}
    return FeatureStore(root).build(target or Counting(), texts(), BOUNDARIES, **options)


def same(a: Features, b: Features) -> bool:
    assert a.texts == b.texts
    pairs = [(a.item(i), b.item(i)) for i in range(len(a))]
    return all(torch.equal(x[k], y[k]) for x, y in pairs for k in ("tokens", "aux", "last"))


@pytest.mark.usefixtures("small_shards")
def test_items_are_the_states_of_their_text(tmp_path: Path) -> None:
    made = build(tmp_path)
    assert made.texts == tuple(texts())
    assert len(made) == 12
    assert len(made.manifest["shards"]) > 3
    for i, text in enumerate(texts()):
        item = made.item(i)
        assert item["tokens"].tolist() == list(text.tokens)
        assert item["tokens"].dtype == torch.int64
        assert item["prompt_len"] == 4
        base = item["tokens"][:, None] + 0.001 * torch.arange(len(text.tokens))[:, None]
        base = base.expand(-1, WIDTH)
        torch.testing.assert_close(item["aux"], torch.cat([base + 100 * b for b in BOUNDARIES], -1))
        torch.testing.assert_close(item["last"], -base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_states_are_kept_as_the_target_computes_them(tmp_path: Path, dtype: str) -> None:
    """Float16 states rounded to bfloat16 are twice as far from float32's."""
    source: Any = Counting()
    source.dtype = getattr(torch, dtype)
    stored = FeatureStore(tmp_path).build(source, texts(), BOUNDARIES)
    kept = "float32" if dtype == "float64" else dtype
    assert stored.manifest["dtype"] == kept
    assert stored.item(0)["aux"].dtype == getattr(torch, kept)


def test_without_boundaries_the_last_state_is_what_is_read(tmp_path: Path) -> None:
    stored = FeatureStore(tmp_path).build(Counting(), texts(), (), dtype="float32")
    assert stored.manifest["boundaries"] == []
    item = stored.item(3)
    assert item["aux"].shape == (len(texts()[3].tokens), WIDTH)
    assert torch.equal(item["aux"], item["last"])
    batch = next(stored.batches(4, seed=0, epoch=0, max_length=99))
    assert torch.equal(batch.aux, batch.last) and batch.aux.abs().sum() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_are_those_of_huggingface(tmp_path: Path, dtype: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    target = Target.from_model(model, name="tiny")
    stored = FeatureStore(tmp_path).build(target, texts(), (1, 2, 3), dtype=dtype, batch=5)
    assert stored.manifest["last_state"] == "post_final_norm"
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    for i in range(len(stored)):
        item = stored.item(i)
        assert item["aux"].dtype == item["last"].dtype == getattr(torch, dtype)
        with torch.no_grad():
            out = model(item["tokens"][None], output_hidden_states=True)
        aux = torch.cat(out.hidden_states[1:4], -1)[0]
        torch.testing.assert_close(item["aux"].float(), aux, atol=tolerance, rtol=tolerance)
        logits = model.lm_head(item["last"].float())
        torch.testing.assert_close(logits, out.logits[0], atol=tolerance, rtol=tolerance)


def test_the_second_build_computes_nothing(tmp_path: Path) -> None:
    first = build(tmp_path)
    again = Counting()
    second = build(tmp_path, again)
    assert again.calls == 0
    assert second.key == first.key
    assert same(first, second)
    assert same(first, FeatureStore(tmp_path).open(first.key))


def test_the_self_check_runs_before_states_are_stored(tmp_path: Path) -> None:
    target = Counting()
    build(tmp_path, target)
    assert target.checked == [list(texts()[0].tokens)]


def test_whatever_states_are_made_of_is_in_the_key(tmp_path: Path) -> None:
    store, target, given = FeatureStore(tmp_path), Counting(), texts(2)
    other = Counting()
    other.fingerprint = "e" * 64
    longer = replace(given[0], prompt_len=5)
    renamed = replace(given[0], prompt_id="other")
    keys = [
        store.build(target, given, BOUNDARIES).key,
        store.build(other, given, BOUNDARIES).key,
        store.build(target, given, (0, 1, 3)).key,
        store.build(target, given, BOUNDARIES, dtype="bfloat16").key,
        store.build(target, given[::-1], BOUNDARIES).key,
        store.build(target, [longer, given[1]], BOUNDARIES).key,
        store.build(target, [renamed, given[1]], BOUNDARIES).key,
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("calls", range(6))
def test_an_interrupted_build_goes_on_and_ends_equal(tmp_path: Path, calls: int) -> None:
    whole = build(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "b", Counting(fail_after=calls))
    (folder,) = [p for p in (tmp_path / "b").iterdir() if p.is_dir()] or [tmp_path / "b" / "none"]
    kept = sorted(p.name for p in folder.glob("shard-*"))
    with pytest.raises(DataError, match="no finished states"):
        FeatureStore(tmp_path / "b").open(whole.key)
    rest = Counting()
    assert same(whole, build(tmp_path / "b", rest))
    everything = Counting()
    build(tmp_path / "c", everything)
    assert (rest.calls < everything.calls) is bool(kept)
    for path in (tmp_path / "a" / whole.key).iterdir():
        assert path.read_bytes() == (tmp_path / "b" / whole.key / path.name).read_bytes()


# Python 3.12 warns of fork in a process that has threads; the children here use none of them.
FORK = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def _build_slowly(root: Path, pause: float) -> None:
    features.SHARD_BYTES = 36 * ROW_BYTES
    build(root, Counting(pause=pause))


@FORK
@pytest.mark.usefixtures("small_shards")
def test_a_killed_process_leaves_nothing_half_written(tmp_path: Path) -> None:
    whole = build(tmp_path / "a")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_build_slowly, args=(tmp_path / "b", 0.1))
    process.start()
    folder = tmp_path / "b" / whole.key
    while not list(folder.glob("shard-*")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (folder / "manifest.json").exists()
    (folder / f".shard-00001.{process.pid}.99.tmp").write_bytes(b"half")
    assert same(whole, build(tmp_path / "b"))
    assert not list(folder.glob(".*tmp"))


@FORK
@pytest.mark.usefixtures("small_shards")
def test_two_processes_build_one_key_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_build_slowly, args=(tmp_path / "b", 0.02)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0, 0]
    idle = Counting()
    assert same(build(tmp_path / "a"), build(tmp_path / "b", idle))
    assert idle.calls == 0


def damage(path: Path, position: int = 10) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.usefixtures("small_shards")
def test_a_flipped_bit_is_found_and_only_that_shard_is_made_again(tmp_path: Path) -> None:
    made = build(tmp_path)
    shard = tmp_path / made.key / "shard-00001"
    sound = shard.read_bytes()
    damage(shard)
    with pytest.raises(DataError, match=r"shard-00001 is damaged.*\nDelete .*manifest\.json"):
        FeatureStore(tmp_path).open(made.key)
    (tmp_path / made.key / "manifest.json").unlink()
    repair = Counting()
    build(tmp_path, repair)
    assert repair.calls == 2  # three texts in batches of two
    assert shard.read_bytes() == sound


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("name", ["shard-00002", "texts.parquet"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped at the end"])
def test_damaged_files_are_refused(tmp_path: Path, name: str, how: str) -> None:
    made = build(tmp_path)
    path = tmp_path / made.key / name
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        damage(path, -1)
    with pytest.raises(DataError, match=f"{name} is damaged or missing"):
        FeatureStore(tmp_path).open(made.key)


@pytest.mark.usefixtures("small_shards")
def test_a_manifest_without_a_checksum_is_damaged(tmp_path: Path) -> None:
    made = build(tmp_path)
    path = tmp_path / made.key / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["shards"][2]["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json is damaged or missing"):
        FeatureStore(tmp_path).open(made.key)


@pytest.mark.usefixtures("small_shards")
def test_a_manifest_whose_numbers_are_no_integers(tmp_path: Path) -> None:
    """1.0 and true equal 1: shards are taken from the texts; a width is refused."""
    made = build(tmp_path)
    path = tmp_path / made.key / "manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        shard |= {"first": float(shard["first"]), "tokens": float(shard["tokens"])}
    path.write_text(json.dumps(manifest))
    found = FeatureStore(tmp_path).open(made.key)
    assert all(torch.equal(found.item(i)["aux"], made.item(i)["aux"]) for i in range(len(texts())))
    path.write_text(json.dumps(manifest | {"hidden_size": float(WIDTH)}))
    with pytest.raises(DataError, match=r"manifest\.json is damaged or missing"):
        FeatureStore(tmp_path).open(made.key)


@pytest.mark.parametrize("field", ["last_state", "format", "key"])
@pytest.mark.parametrize("value", ["pre_final_norm", None])
def test_states_of_another_kind_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    made = build(tmp_path)
    path = tmp_path / made.key / "manifest.json"
    manifest = json.loads(path.read_text())
    if value is None:
        del manifest[field]
    else:
        manifest[field] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=f"of another kind: {field}"):
        FeatureStore(tmp_path).open(made.key)
    path.write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        FeatureStore(tmp_path).open(made.key)


def test_a_store_larger_than_the_disk_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sum(len(t.tokens) for t in texts())
    need = tokens * ROW_BYTES
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need - 1))
    target = Counting()
    with pytest.raises(ResourceError, match=r"states need .* KiB"):
        build(tmp_path, target)
    assert target.calls == 0
    assert not list(tmp_path.rglob("shard-*"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need))
    assert len(build(tmp_path)) == 12


def test_states_that_are_not_finite_are_named(tmp_path: Path) -> None:
    class Large(Counting):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.aux[0, 2, 5] = 70000.0  # more than float16 holds
            return out

    with pytest.raises(NumericsError, match=r"boundary 2 .*not finite in float16 at position 2"):
        build(tmp_path, Large(), dtype="float16")
    assert len(build(tmp_path, Large(), dtype="bfloat16")) == 12


TOKEN = 4 * ((2 * len(BOUNDARIES) + 10) * WIDTH + 3 * 8)  # bytes of a pass, by hand


@pytest.mark.parametrize(
    ("batch", "rows", "fit", "remedy"),
    [
        (5, 5, 3, "Use a batch of 3."),
        (99, 12, 3, "Use a batch of 3."),
        (5, 5, 0, "Not even a batch of 1 fits: use a larger machine or shorter texts."),
        (None, 12, 3, "Use a larger machine or shorter texts."),
    ],
)
def test_a_pass_that_does_not_fit_is_refused_before_it_is_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int | None,
    rows: int,
    fit: int,
    remedy: str,
) -> None:
    longest = max(len(text.tokens) for text in texts())
    monkeypatch.setattr(memory, "free_bytes", lambda: fit * longest * TOKEN)
    target = Counting()
    said = f"^capturing states of {rows} texts of up to {longest} tokens at once needs"
    with pytest.raises(ResourceError, match=said) as caught:
        build(tmp_path, target, batch=batch)
    assert caught.value.remedy == remedy
    assert not target.calls and not list(tmp_path.rglob("shard-*"))
    if fit:
        assert len(build(tmp_path, target, batch=fit)) == 12
    target.device = torch.device("cuda")
    assert len(build(tmp_path / "gpu", target, batch=batch)) == 12


@pytest.mark.usefixtures("small_shards")
def test_only_what_is_missing_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass holds texts of one shard, so a shard of few texts needs as little."""
    whole = build(tmp_path, batch=99)
    manifest = tmp_path / whole.key / "manifest.json"
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    assert same(whole, build(tmp_path, batch=99))
    manifest.unlink()
    assert same(whole, build(tmp_path, batch=99))
    manifest.unlink()
    lost = whole.manifest["shards"][-1]
    (tmp_path / whole.key / lost["name"]).unlink()
    part = texts()[lost["first"] :]
    need = len(part) * max(len(text.tokens) for text in part) * TOKEN
    monkeypatch.setattr(memory, "free_bytes", lambda: need - 1)
    with pytest.raises(ResourceError, match=f"^capturing states of {len(part)} texts"):
        build(tmp_path, batch=99)
    monkeypatch.setattr(memory, "free_bytes", lambda: need)
    assert same(whole, build(tmp_path, batch=99))


def test_bad_requests(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path)
    with pytest.raises(DataError, match="no texts"):
        store.build(Counting(), [], BOUNDARIES)
    with pytest.raises(DataError, match="unknown dtype"):
        store.build(Counting(), texts(), BOUNDARIES, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ContractError):
        store.build(Counting(), texts(), (0, 4))
    with pytest.raises(DataError, match="no finished states"):
        store.open("nothing")


# Batches


@pytest.mark.parametrize("bucket", [1, 8])
def test_a_pass_gives_every_text_once_padded_on_the_right(tmp_path: Path, bucket: int) -> None:
    made = build(tmp_path)
    rows: list[int] = []
    for b in made.batches(5, seed=0, epoch=0, max_length=100, bucket=bucket):
        rows += b.rows
        assert b.tokens.shape[1] == int(b.lengths.max())
        for k, i in enumerate(b.rows):
            item, n = made.item(i), int(b.lengths[k])
            assert n == len(made.texts[i].tokens)
            assert int(b.prompt_lens[k]) == made.texts[i].prompt_len
            for name, padded in (("tokens", b.tokens), ("aux", b.aux), ("last", b.last)):
                assert torch.equal(padded[k, :n], item[name])  # type: ignore[literal-required]
                assert not padded[k, n:].any()
    assert sorted(rows) == list(range(12))


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    made, again = build(tmp_path / "a"), build(tmp_path / "b")

    def order(source: Features, seed: int, epoch: int) -> list[tuple[int, ...]]:
        return [b.rows for b in source.batches(4, seed=seed, epoch=epoch, max_length=100)]

    assert order(made, 0, 0) == order(again, 0, 0)
    assert order(made, 0, 0) != order(made, 0, 1)
    assert order(made, 0, 0) != order(made, 1, 0)


def test_buckets_pad_less(tmp_path: Path) -> None:
    made = build(tmp_path)

    def padding(bucket: int) -> int:
        passes = made.batches(4, seed=0, epoch=0, max_length=100, bucket=bucket)
        return sum(b.tokens.numel() - int(b.lengths.sum()) for b in passes)

    assert padding(8) < padding(1)


def test_truncation_leaves_out_texts_without_loss(tmp_path: Path) -> None:
    given = [
        Text("p", "c", tuple(range(10)), prompt, "given", None, False, "o")
        for prompt in (4, 6, 10, 4)
    ]
    made = FeatureStore(tmp_path).build(Counting(), given, BOUNDARIES)
    assert made.unusable(100) == 1
    assert made.unusable(6) == 2
    (batch,) = made.batches(9, seed=0, epoch=0, max_length=6)
    assert set(batch.rows) == {0, 3}
    assert batch.lengths.tolist() == [6, 6]
    with pytest.raises(DataError, match="nothing can be learned"):
        list(made.batches(9, seed=0, epoch=0, max_length=4))


@pytest.mark.usefixtures("small_shards")
def test_memory_does_not_grow_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_OPEN_SHARDS", 2)
    made = build(tmp_path)
    first = made.item(0)["aux"]
    for i in range(len(made)):
        made.item(i)
    assert len(made._mapped) == 2
    assert torch.equal(first, made.item(0)["aux"])  # a view outlives the map's place in the list
