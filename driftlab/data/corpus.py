"""Texts that the target writes itself: to learn from (many, sampled) and to measure on.

Texts are content-addressed: the same target, prompts and settings give the same file. They are
written in chunks, so a kill costs the chunks that have rows in the batch (one or two), and a
chunk's draws depend on its own number only.
A chunk carries its checksum; a damaged one is written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from driftlab.data.prompts import (
    Prompt,
    Rendered,
    Rendering,
    joined,
    load_prompts,
    records,
    render,
    whole,
)
from driftlab.data.text import Text
from driftlab.errors import DataError
from driftlab.models import memory
from driftlab.models.continuation import Request
from driftlab.models.target import Target
from driftlab.progress import progress_bar
from driftlab.results.shards import (
    read_sealed,
    remove_dead,
    waiting_lock,
    write_sealed,
)


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


def refuse_repeated(prompts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Raise DataError when two prompts to measure on are the same tokens.

    Prompts are what intervals and tests draw, and count: copies would pass for evidence.
    """
    first: dict[tuple[int, ...], str] = {}
    copies = [
        f"{name} repeats {first[tuple(prompt)]}"
        for name, prompt in zip(names, prompts, strict=True)
        if first.setdefault(tuple(prompt), name) != name
    ]
    if copies:
        raise DataError(
            f"{len(copies)} of {len(prompts)} prompts to measure on are read as an earlier one is",
            got=", ".join(copies[:3]) + (", ..." if len(copies) > 3 else ""),
            remedy="Leave the copies out: each would count as a prompt of its own.",
        )


MEASURED_SEED = 1
"""Texts that a run measures on are drawn with its ``text.seed`` plus this, not as those that it
learns from."""


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
    ResourceError: a batch does not fit in the memory that is free.
    """
    if not prompts:
        raise DataError("no prompts to continue", remedy="Name a set or a file with prompts.")
    home = folder / _key(target, prompts, writing)
    home.mkdir(parents=True, exist_ok=True)
    with waiting_lock(home / "lock"):
        remove_dead(home)
        most = writing.min_tokens or len(prompts) * writing.max_new_tokens
        with progress_bar(progress, total=most, unit="token", unit_scale=True) as bar:
            return _Corpus(target, prompts, writing, home, bar).write()


@dataclass
class _Chunk:
    """Prompts that share a file, and what is known of their texts."""

    number: int
    round: int
    prompts: Sequence[Source]
    path: Path
    texts: list[Text | None]

    @property
    def tokens(self) -> int:
        """New tokens of the texts that are complete."""
        return sum(len(text.continuation) for text in self.texts if text is not None)


class _Corpus:
    """Chunks in order, begun while earlier ones still have rows that run."""

    def __init__(
        self, target: Target, prompts: Sequence[Source], writing: Writing, home: Path, bar: tqdm
    ) -> None:
        self._target, self._prompts, self._writing = target, prompts, writing
        self._home, self._bar = home, bar
        self._chunks: list[_Chunk] = []
        self._at: dict[tuple[int, int], tuple[_Chunk, int]] = {}  # by the request's seed and index
        self._checked = False  # whether a batch fits
        self._tokens = 0  # made or read so far, in complete and in running texts

    def write(self) -> list[Text]:
        """Begin chunks until there is enough, store each when it is complete."""
        writing, needed = self._writing, None
        for request, continuation in self._target.stream(
            self._requests(),
            max_new_tokens=writing.max_new_tokens,
            temperature=writing.temperature,
            batch=writing.batch,
            on_tokens=self._count,
        ):
            chunk, i = self._at.pop((request.seed, request.index))
            chunk.texts[i] = self._text(chunk, chunk.prompts[i], continuation)
            if None not in chunk.texts:
                data = json.dumps([asdict(t) for t in chunk.texts if t is not None]).encode()
                write_sealed(chunk.path, data)
                if (needed := self._enough()) is not None:
                    break  # what was begun beyond is not needed
        needed = self._enough() if needed is None else needed
        if needed is None:
            written = sum(chunk.tokens for chunk in self._chunks)
            raise DataError(
                f"greedy continuations of {len(self._prompts)} prompts hold {written} tokens",
                got=f"{writing.min_tokens} asked for",
                remedy="Sample (temperature above 0), give more prompts or ask for less.",
            )
        texts = [text for chunk in self._chunks[:needed] for text in chunk.texts]
        return [text for text in texts if text is not None]

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self._bar.update(min(tokens, max(0, self._bar.total - self._bar.n)))

    def _requests(self) -> Iterator[Request]:
        """Prompts of the chunks that are not stored, taken when a row of the batch is free."""
        writing = self._writing
        for number, (round_, prompts) in enumerate(_chunks(self._prompts, writing.batch)):
            # Rows that still run can only add to what is counted.
            if self._tokens >= writing.min_tokens if writing.min_tokens else round_:
                return
            if round_ and writing.temperature == 0:
                return  # it would repeat itself
            path = self._home / f"{number:05d}.texts"
            stored = _read(path)
            chunk = _Chunk(number, round_, prompts, path, [None] * len(prompts))
            self._chunks.append(chunk)
            if stored is not None:
                chunk.texts[:] = stored
                self._count(chunk.tokens)
                continue
            if not self._checked:
                self._check_memory()
                self._checked = True
            seed = writing.seed * 1_000_003 + number
            for i, prompt in enumerate(prompts):
                self._at[seed, i] = chunk, i
                yield Request(prompt.tokens, seed, i)

    def _check_memory(self) -> None:
        """Refuse a batch that does not fit; memory of another device than the CPU is not known."""
        target, writing = self._target, self._writing
        if target.device.type != "cpu":
            return
        longest = max(len(prompt.tokens) for prompt in self._prompts)
        at_once = writing.batch if writing.min_tokens else min(writing.batch, len(self._prompts))
        shape = target.shape
        memory.refuse_too_large(
            f"writing {at_once} texts of up to {longest + writing.max_new_tokens} tokens at once",
            lambda n: memory.writing_bytes(
                *(n, longest, writing.max_new_tokens),
                shape=shape,
                hidden=target.hidden_size,
                layers=target.n_layers,
                vocabulary=target.vocab_size,
                itemsize=target.dtype.itemsize,
            ),
            at_once,
            "a batch of",
            memory.TEXTS,
        )

    def _enough(self) -> int | None:
        """How many chunks are taken, or None while one of these is missing or more are needed."""
        least, written = self._writing.min_tokens, 0
        for n, chunk in enumerate(self._chunks, start=1):
            if None in chunk.texts:
                return None
            written += chunk.tokens
            if least and written >= least:
                return n
        whole = sum(len(chunk.prompts) for chunk in self._chunks) == len(self._prompts)
        return len(self._chunks) if not least and whole else None

    def _text(self, chunk: _Chunk, prompt: Source, continuation: Sequence[int]) -> Text:
        return Text.of(
            prompt.id if not chunk.round else f"{prompt.id}~{chunk.round + 1}",
            prompt.category,
            prompt.tokens,
            continuation,
            kind="greedy" if self._writing.temperature == 0 else "sampled",
            temperature=self._writing.temperature,
            origin=self._target.name,
        )


def read_given(
    path: str | Path, tokenizer: Any, *, max_tokens: int, limit: int | None = None
) -> tuple[list[Text], set[str | None]]:
    """Whole texts from a .jsonl file, up to ``max_tokens`` tokens in all, in the file's order; and
    the hashes of their prompts' chat templates, None for a prompt without one.

    Each line holds a prompt as in `load_prompts` and its ``response``, or ``messages`` with the
    assistant's, of which the first answers the first user turn. The prompt is rendered with the
    chat template where there is one. ``limit`` is the longest text allowed, in tokens.

    Raises
    ------
    DataError: as `load_prompts`, a line without a response, or a text that is longer than
        ``limit``; the line's number is given.
    """
    prompts = load_prompts(path)
    responses = _responses(Path(path).read_bytes(), str(path))
    texts: list[Text] = []
    templates: set[str | None] = set()
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
        templates.add(source.template_sha)
        total += len(text.tokens)
        if total >= max_tokens:
            break
    return texts, templates


def _responses(raw: bytes, where: str) -> Iterator[tuple[int, str | None]]:
    """(line number, response) of every line that holds a record; `load_prompts` checked them."""
    for number, record in records(raw, where):
        answer = record.get("response")
        if answer is None:
            said = [m for m in record.get("messages", []) if m.get("role") == "assistant"]
            answer = joined(said[0].get("content"), f"{where}, line {number}") if said else None
        if isinstance(answer, str):
            whole("response", answer, f"{where}, line {number}")
        yield number, answer if isinstance(answer, str) else None


def _chunks(prompts: Sequence[Source], size: int) -> Iterator[tuple[int, Sequence[Source]]]:
    """(round, chunk) without end. Prompts of like length share a chunk: less padding."""
    order = sorted(prompts, key=lambda p: (len(p.tokens), p.id))
    round_ = 0
    while True:
        for start in range(0, len(order), size):
            yield round_, order[start : start + size]
        round_ += 1


def _read(path: Path) -> list[Text] | None:
    """A finished chunk; None when it is absent, damaged or another's."""
    data = read_sealed(path)
    if data is None:
        return None
    return [Text(**{**row, "tokens": tuple(row["tokens"])}) for row in json.loads(data)]


def _key(target: Target, prompts: Sequence[Source], writing: Writing) -> str:
    facts = [target.fingerprint, asdict(writing), [(p.id, p.category, p.tokens) for p in prompts]]
    return sha256(json.dumps(facts).encode()).hexdigest()[:24]
