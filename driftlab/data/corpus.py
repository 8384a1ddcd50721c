"""Texts that the target writes itself: to learn from (many, sampled) and to measure on.

Texts are content-addressed: the same target, prompts and settings give the same file. They are
written in chunks, so a kill costs one chunk, and a chunk's draws depend on its own number only.
A chunk carries its checksum; a damaged one is written again.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from driftlab.data.prompts import Prompt, Rendered, Rendering, load_prompts, render
from driftlab.data.text import Text
from driftlab.errors import DataError
from driftlab.models.target import Target
from driftlab.results.shards import atomic_file, remove_leftovers


@dataclass(frozen=True)
class Source:
    """A prompt as the target reads it; ``rendered`` is None for prompts that are token ids."""

    id: str
    category: str
    tokens: tuple[int, ...]
    rendered: Rendered | None


def sources(
    prompts: Sequence[Prompt], tokenizer: Any, rendering: Rendering, *, limit: int | None = None
) -> list[Source]:
    """Render ``prompts`` for a target. ``limit`` is the longest allowed prompt in tokens."""
    found = []
    for prompt in prompts:
        rendered = rendering(prompt, tokenizer, limit=limit)
        found.append(Source(prompt.id, prompt.category, rendered.tokens, rendered))
    return found


@dataclass(frozen=True)
class Writing:
    """How a corpus is written.

    max_new_tokens: longest continuation. temperature: 0 is greedy. min_tokens: go round the
    prompts again, with new draws, until the continuations hold so many tokens (0: once).
    """

    max_new_tokens: int
    temperature: float
    seed: int
    batch: int
    min_tokens: int = 0


def write_corpus(
    target: Target,
    prompts: Sequence[Source],
    writing: Writing,
    folder: Path,
    *,
    progress: str = "",
) -> list[Text]:
    """Let ``target`` continue ``prompts``; finished chunks below ``folder`` are read, not redone.

    Processes that write the same corpus wait for one another.

    Raises
    ------
    DataError: no prompts, a prompt that leaves no room to continue, or greedy text that should
        go round the prompts more than once (it would repeat itself).
    """
    if not prompts:
        raise DataError("no prompts to continue", remedy="Name a set or a file with prompts.")
    home = folder / _key(target, prompts, writing)
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home):
        remove_leftovers(home)
        return _texts(target, prompts, writing, home, progress)


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    """Hold the right to write below ``home``, waiting for it. The system frees it at death."""
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _texts(
    target: Target, prompts: Sequence[Source], writing: Writing, home: Path, progress: str
) -> list[Text]:
    texts: list[Text] = []
    written = 0
    total = writing.min_tokens or len(prompts) * writing.max_new_tokens
    with tqdm(
        total=total,
        desc=progress,
        unit="token",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for number, (round_, chunk) in enumerate(_chunks(prompts, writing.batch)):
            if round_ and (not writing.min_tokens or written >= writing.min_tokens):
                break
            if writing.min_tokens and written >= writing.min_tokens:
                break
            if round_ and writing.temperature == 0:
                raise DataError(
                    f"greedy continuations of {len(prompts)} prompts hold {written} tokens",
                    got=f"{writing.min_tokens} asked for",
                    remedy="Sample (temperature above 0), give more prompts or ask for less.",
                )
            path = home / f"{number:05d}.texts"
            made = _read(path)
            if made is None:
                made = _write(target, chunk, writing, number, round_)
                data = json.dumps([asdict(t) for t in made]).encode()
                with atomic_file(path) as file:
                    file.write(sha256(data).hexdigest().encode() + b"\n" + data)
            texts += made
            new = sum(len(t.continuation) for t in made)
            written += new
            bar.update(min(new, max(0, total - bar.n)))
    return texts


def read_given(
    path: str | Path, tokenizer: Any, *, max_tokens: int, limit: int | None = None
) -> list[Text]:
    """Whole texts from a .jsonl file, up to ``max_tokens`` tokens in all, in the file's order.

    Each line holds ``prompt`` and ``response``, or ``messages`` that end with the assistant's;
    the prompt is rendered with the chat template where there is one. ``limit`` is the longest
    text allowed, in tokens.

    Raises
    ------
    DataError: as `load_prompts`, a line without a response, or a text that is longer than
        ``limit``; the line's number is given.
    """
    prompts = load_prompts(path)
    responses = _responses(Path(path))
    texts: list[Text] = []
    total = 0
    for prompt, (number, response) in zip(prompts, responses, strict=True):
        if not response:
            raise DataError(
                f"{path}, line {number}: no response to learn from",
                remedy='Give "response", or "messages" with the assistant\'s answer.',
            )
        source = render(prompt, tokenizer)
        answer = tokenizer.encode(response, add_special_tokens=False, split_special_tokens=True)
        text = Text.of(
            prompt.id,
            prompt.category,
            source.tokens,
            answer,
            kind="given",
            temperature=None,
            origin=str(path),
        )
        if limit is not None and len(text.tokens) > limit:
            raise DataError(
                f"{path}, line {number}: the text is longer than the target's context of {limit}",
                got=f"{len(text.tokens)} tokens",
                remedy="Shorten or remove it.",
            )
        texts.append(text)
        total += len(text.tokens)
        if total >= max_tokens:
            break
    return texts


def _responses(path: Path) -> Iterator[tuple[int, str | None]]:
    """(line number, response) of every line that holds a record; `load_prompts` checked them."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        record = json.loads(line)
        answer = record.get("response")
        if answer is None:
            said = [m for m in record.get("messages", []) if m.get("role") == "assistant"]
            answer = said[0].get("content") if said else None
        yield number, answer if isinstance(answer, str) else None


def _chunks(prompts: Sequence[Source], size: int) -> Iterator[tuple[int, Sequence[Source]]]:
    """(round, chunk) without end. Prompts of like length share a chunk: less padding."""
    order = sorted(prompts, key=lambda p: (len(p.tokens), p.id))
    round_ = 0
    while True:
        for start in range(0, len(order), size):
            yield round_, order[start : start + size]
        round_ += 1


def _write(
    target: Target, chunk: Sequence[Source], writing: Writing, number: int, round_: int
) -> list[Text]:
    made = target.generate(
        [list(p.tokens) for p in chunk],
        max_new_tokens=writing.max_new_tokens,
        temperature=writing.temperature,
        seed=writing.seed * 1_000_003 + number,
        batch=writing.batch,
    )
    return [
        Text.of(
            p.id if not round_ else f"{p.id}~{round_ + 1}",
            p.category,
            p.tokens,
            continuation,
            kind="greedy" if writing.temperature == 0 else "sampled",
            temperature=writing.temperature,
            origin=target.name,
        )
        for p, continuation in zip(chunk, made, strict=True)
    ]


def _read(path: Path) -> list[Text] | None:
    """A finished chunk; None when it is absent or damaged."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if sha256(data).hexdigest().encode() != digest:
        return None
    return [Text(**{**row, "tokens": tuple(row["tokens"])}) for row in json.loads(data)]


def _key(target: Target, prompts: Sequence[Source], writing: Writing) -> str:
    facts = [target.fingerprint, asdict(writing), [(p.id, p.category, p.tokens) for p in prompts]]
    return sha256(json.dumps(facts).encode()).hexdigest()[:24]
