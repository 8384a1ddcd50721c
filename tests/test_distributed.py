"""Two processes that share every batch compute what one computes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_job
import torch

from driftlab.data.features import FeatureStore
from driftlab.data.text import Text
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.models.frozen import freeze
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama


def corpus(folder: Path) -> str:
    """Five texts of unlike lengths and prompts: a batch of four, and one of one."""
    target = Target.from_model(
        tiny_llama(vocab_size=40, hidden_size=16, heads=2, kv_heads=1, max_position=32),
        name="tiny",
        eos_ids=(),
    )
    g = torch.Generator().manual_seed(3)
    texts = []
    for i, (prompt, new) in enumerate(((3, 9), (6, 12), (2, 5), (5, 11), (4, 7))):
        tokens = torch.randint(40, (prompt + new,), generator=g).tolist()
        texts.append(
            Text.of(
                f"p{i}", "c", tokens[:prompt], tokens[prompt:],
                kind="sampled", temperature=1.0, origin="tiny",
            )
        )  # fmt: skip
    freeze(target, folder / ranks_job.FROZEN)
    return FeatureStore(folder / "states").build(target, texts, (0, 1), dtype="float32").key


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    key = corpus(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, ranks_job.__file__, str(tmp_path), key],
            env={
                **os.environ, **group,
                "RANK": str(r), "LOCAL_RANK": str(r), "ACCELERATE_USE_CPU": "true",
            },
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        drafter, alone = ranks_job.learn(tmp_path, key)
        assert [process.wait(timeout=600) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    (first, losses, size), (second, same, _) = (
        torch.load(tmp_path / f"rank-{r}.pt", weights_only=True) for r in range(2)
    )
    assert size == 2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone.losses))
    assert losses == same
    before = ranks_job.initial(tmp_path).state_dict()
    moved = 0
    for name, weight in drafter.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, atol=1e-5, rtol=1e-4)
        moved += int(weight.is_floating_point() and not torch.equal(weight, before[name]))
    assert moved > 5
    saved = [torch.load(tmp_path / f"of-{n}.pt", weights_only=True)["losses"] for n in (1, 2)]
    torch.testing.assert_close(*map(torch.tensor, saved))


def test_a_batch_is_dealt_out_whole() -> None:
    texts = list(range(5))
    for size in (1, 2, 3, 7):
        parts = [texts[Ranks(r, size).mine] for r in range(size)]
        assert sorted(i for part in parts for i in part) == texts
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_nothing_is_sent() -> None:
    value = torch.ones(2)
    assert ALONE.total(value) is value
    assert Ranks.joined() is ALONE
    ALONE.announce("work")
    weight = torch.ones(3, requires_grad=True)
    ALONE.sum_gradients([weight])
    assert weight.grad is None
