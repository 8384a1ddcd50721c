"""Two processes that share every batch compute what one computes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks_job
import torch

from driftlab.data.features import FeatureStore
from driftlab.data.text import Text
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.errors import ConfigError
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


GROUP = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": "two"}, r"says that two processes .* WORLD_SIZE not how \(got two\)"),
        ({"RANK": "x"}, r"RANK not how \(got x\)"),
        ({"MASTER_ADDR": ""}, r"MASTER_ADDR not how \(got nothing\)"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT not how \(got nothing\)"),
    ],
)
def test_what_a_job_left_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    for name, value in (GROUP | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said) as error:
        Ranks.joined()
    assert "unset WORLD_SIZE" in str(error.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_others_ends_at_once(number: int) -> None:
    code = "from driftlab.engines.distributed import Ranks; Ranks.joined()"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = GROUP | {"MASTER_PORT": str(free.getsockname()[1])}
    environment = {**os.environ, **group, "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stderr is not None
            said = waiting.stderr.readline()
            assert said.startswith("number 0 of 2 processes waits for the others at 127.0.0.1:")
            time.sleep(1)
            waiting.send_signal(number)
            assert waiting.wait(timeout=5) == -number
        finally:
            waiting.kill()


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
