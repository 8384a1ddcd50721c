"""Texts that the target writes: found again, damaged ones made anew, bad ones named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pairs
import pytest
import torch
from test_prompts import tokenizer

from driftlab.data.corpus import Source, Writing, read_given, write_corpus
from driftlab.data.grammar import WordTokenizer, stories
from driftlab.data.text import Text
from driftlab.errors import DataError, ResourceError
from driftlab.models import memory
from driftlab.models.continuation import Request
from driftlab.models.target import Target


class Scribe:
    """Continues prompts by draws of (seed, index), and counts the chunks that it is asked for.

    As the target does, it takes prompts when rows are free and ends later ones before earlier.
    """

    name, fingerprint = "scribe", "f" * 64
    device, dtype, shape = torch.device("cpu"), torch.float32, pairs.target().shape
    hidden_size, n_layers, vocab_size = pairs.WIDTH, pairs.LAYERS, pairs.VOCAB

    def __init__(self) -> None:
        self.seeds: set[int] = set()

    @property
    def asked(self) -> int:
        return len(self.seeds)

    def stream(
        self,
        requests: Iterable[Request],
        *,
        max_new_tokens: int,
        temperature: float,
        batch: int,
        on_tokens: Callable[[int], object],
    ) -> Iterator[tuple[Request, list[int]]]:
        waiting = iter(requests)
        while rows := list(islice(waiting, 1 + batch)):
            for request in reversed(rows):
                self.seeds.add(request.seed)
                rng = np.random.default_rng([request.seed, request.index])
                on_tokens(max_new_tokens)
                yield request, rng.integers(0, 50, max_new_tokens).tolist()


PROMPTS = [Source(f"p{i}", "c", tuple(range(1, 2 + i % 3)), None) for i in range(5)]
SAMPLED = Writing(max_new_tokens=6, temperature=1.0, seed=3, batch=2)


def write(folder: Path, writing: Writing = SAMPLED, scribe: Scribe | None = None) -> list[Text]:
    return write_corpus(cast(Target, scribe or Scribe()), PROMPTS, writing, folder)


def test_a_batch_that_does_not_fit_is_refused_before_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written already is read whatever is free."""
    scribe = Scribe()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: 1000)
        with pytest.raises(ResourceError, match=r"^writing 2 texts of up to 9 tokens at once"):
            write(tmp_path, scribe=scribe)
        assert not scribe.asked
    texts = write(tmp_path)
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    assert write(tmp_path, scribe=scribe) == texts
    assert not scribe.asked


def test_memory_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the batch's own buffers are a part of what is taken."""
    free = iter([1 << 40])
    monkeypatch.setattr(memory, "free_bytes", lambda: next(free, 0))
    scribe = Scribe()
    assert len(write(tmp_path, scribe=scribe)) == 5
    assert scribe.asked == 3 and next(free, None) is None


@pytest.mark.parametrize(("min_tokens", "rows"), [(0, 5), (70, 100)])
def test_no_more_texts_are_compared_than_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_tokens: int, rows: int
) -> None:
    """Rounds over the prompts fill any batch; one round has as many as there are prompts."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match=f"^writing {rows} texts") as caught:
        write(tmp_path, replace(SAMPLED, batch=100, min_tokens=min_tokens))
    assert caught.value.remedy == (
        "Not even a batch of 1 fits: use a larger machine or shorter texts."
    )


def test_every_prompt_is_continued_once_and_found_again(tmp_path: Path) -> None:
    first = Scribe()
    texts = write(tmp_path, scribe=first)
    assert first.asked == 3
    assert sorted(t.prompt_id for t in texts) == [p.id for p in PROMPTS]
    assert {t.kind for t in texts} == {"sampled"} and {t.origin for t in texts} == {"scribe"}
    by_id = {p.id: p.tokens for p in PROMPTS}
    assert all(t.tokens[: t.prompt_len] == by_id[t.prompt_id] for t in texts)
    again = Scribe()
    assert write(tmp_path, scribe=again) == texts
    assert again.asked == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_chunk_is_written_again(tmp_path: Path, damage: str) -> None:
    texts = write(tmp_path)
    chunk = sorted(tmp_path.rglob("*.texts"))[1]
    whole = chunk.read_bytes()
    digit = whole.rindex(b"tokens") + 10
    spoiled = {
        "cut": whole[:-5],
        "flipped": whole[:digit] + bytes([whole[digit] ^ 1]) + whole[digit + 1 :],
        "empty": b"",
    }
    chunk.unlink() if damage == "gone" else chunk.write_bytes(spoiled[damage])
    scribe = Scribe()
    assert write(tmp_path, scribe=scribe) == texts
    assert scribe.asked == 1
    assert chunk.read_bytes() == whole


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    texts = write(tmp_path)
    (home,) = tmp_path.iterdir()
    left = home / f".00001.texts.{2**22 + 1}.77.tmp"
    left.write_bytes(b"half")
    assert write(tmp_path) == texts
    assert not left.exists()


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"temperature": 0.5}, {"max_new_tokens": 7}, {"batch": 3}]
)
def test_other_settings_are_another_corpus(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path)
    scribe = Scribe()
    write(tmp_path, replace(SAMPLED, **change), scribe)
    assert scribe.asked > 0


def test_rounds_go_on_until_there_is_enough(tmp_path: Path) -> None:
    texts = write(tmp_path, replace(SAMPLED, min_tokens=70))
    written = sum(len(t.continuation) for t in texts)
    assert 70 <= written < 70 + SAMPLED.batch * SAMPLED.max_new_tokens
    assert len({t.prompt_id for t in texts}) == len(texts)
    assert {"p0", "p0~2", "p0~3"} <= {t.prompt_id for t in texts}
    firsts = {t.prompt_id: t.continuation for t in texts}
    assert firsts["p0"] != firsts["p0~2"], "a round draws anew"


def test_greedy_text_never_repeats_itself(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="greedy continuations of 5 prompts hold 30 tokens"):
        write(tmp_path, replace(SAMPLED, temperature=0.0, min_tokens=31))
    assert write(tmp_path, replace(SAMPLED, temperature=0.0, min_tokens=30))


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompts"):
        write_corpus(cast(Target, Scribe()), [], SAMPLED, tmp_path)


def given_file(tmp_path: Path, *records: dict[str, Any]) -> Path:
    path = tmp_path / "given.jsonl"
    path.write_text("\n\n".join(map(json.dumps, records)))
    return path


def said(n: int) -> str:
    words = WordTokenizer()
    return words.decode(stories(1, 0)[0][1 : n + 1])


def test_given_texts_are_read_in_order_up_to_a_count(tmp_path: Path) -> None:
    path = given_file(
        tmp_path,
        {"prompt": said(3), "response": said(5)},
        {
            "messages": [
                {"role": "user", "content": said(4)},
                {"role": "assistant", "content": said(2)},
            ]
        },
        {"prompt": said(3), "response": said(6)},
    )
    texts, templates = read_given(path, WordTokenizer(), max_tokens=10)
    assert templates == {None}
    assert [(t.kind, t.temperature, t.prompt_len, len(t.tokens)) for t in texts] == [
        ("given", None, 4, 9),
        ("given", None, 5, 7),
    ]
    assert len(read_given(path, WordTokenizer(), max_tokens=1000)[0]) == 3


def test_given_texts_name_their_chat_templates(tmp_path: Path) -> None:
    path = given_file(tmp_path, {"prompt": "Hi", "response": "Hello"})
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (text,), templates = read_given(path, tokenizer(template), max_tokens=1000)
    assert text.prompt_len == 4  # in brackets
    assert templates == {hashlib.sha256(template.encode()).hexdigest()}


def test_lines_end_where_the_prompts_say(tmp_path: Path) -> None:
    """A carriage return inside an object is white space, for prompt and response alike."""
    path = tmp_path / "given.jsonl"
    path.write_bytes(f'{{"prompt": "{said(3)}",\r"response": "{said(1)}"}}\r\n'.encode())
    (text,), _ = read_given(path, WordTokenizer(), max_tokens=1000)
    assert len(text.tokens) == text.prompt_len + 1


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"prompt": "x"}, "line 3: no response"),
        ({"prompt": "x", "response": "\ud800"}, "line 3: response holds half a surrogate"),
        ({"prompt": "x", "response": 7}, "line 3: no response"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 3: no response"),
        ({"prompt": said(8), "response": said(8)}, "line 3: the text is longer .* 12"),
    ],
)
def test_a_line_that_gives_no_text_is_named(
    tmp_path: Path, second: dict[str, Any], named: str
) -> None:
    path = given_file(tmp_path, {"prompt": said(3), "response": said(5)}, second)
    with pytest.raises(DataError, match=named):
        read_given(path, WordTokenizer(), max_tokens=1000, limit=12)
