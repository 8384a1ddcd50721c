"""Continuing many prompts side by side: a row that ends gives its place to the next prompt.

Prompts are read without padding masks (causal attention keeps padding on the right out), and
their keys and values are copied into a buffer where all rows end at one slot. So every step is
one token a row, the library's own masks hold (distances in slots are distances in positions),
and a row costs a step only while it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from driftlab.errors import DataError, NumericsError
from driftlab.models.generation import BufferLayer, new_cache

if TYPE_CHECKING:
    from driftlab.models.target import Target

PREFILL = 8192  # tokens, padding included, that are read in one pass
_REFILL = 8  # an eighth of the batch is free before prompts are read: reading has a fixed cost


@dataclass(frozen=True)
class Request:
    """A prompt to continue. The noise of its draws belongs to (seed, index) and nothing else."""

    tokens: Sequence[int]
    seed: int
    index: int


@dataclass
class _Row:
    request: Request
    start: int  # slot of its first token
    new: list[int] = field(default_factory=list)


def stream(
    target: Target,
    requests: Iterable[Request],
    *,
    max_new_tokens: int,
    temperature: float,
    batch: int,
    on_tokens: Callable[[int], object],
) -> Iterator[tuple[Request, list[int]]]:
    """See :meth:`Target.stream`."""
    if max_new_tokens < 1 or temperature < 0 or batch < 1:
        raise DataError(
            "generation needs max_new_tokens >= 1, temperature >= 0 and batch >= 1",
            got=f"{max_new_tokens}, {temperature}, {batch}",
        )
    waiting = iter(requests)
    rows = _Rows(target, max_new_tokens, temperature, batch)
    more = True
    while True:
        free = batch - len(rows)
        if more and (free == batch or free * _REFILL >= batch):
            taken = list(islice(waiting, free))
            more = len(taken) == free
            for request in taken:
                target.check_tokens(
                    request.tokens, what=f"prompt {request.index}", extra=max_new_tokens
                )
            ended = rows.admit(taken)
            new = len(taken)
        elif len(rows):
            new = len(rows)
            ended = rows.step()
        else:
            return
        on_tokens(new)
        for row in ended:
            yield row.request, row.new


class _Rows:
    """The rows that live now; row ``r`` holds slots ``rows[r].start`` to ``end`` of the buffers."""

    def __init__(self, target: Target, max_new_tokens: int, temperature: float, batch: int) -> None:
        self._target, self._max_new = target, max_new_tokens
        self._choose = _Chooser(target, temperature, batch)
        self._rows: list[_Row] = []
        self._batch = batch
        self._low = self._end = self._room = 0
        self._cache = new_cache(target.model.config, 0)
        self._slots: list[_Slots] = []
        for i, layer in enumerate(self._cache.layers):
            if isinstance(layer, BufferLayer):
                self._cache.layers[i] = slots = _Slots(self)
                self._slots.append(slots)
        device = target.device
        self._newest = torch.zeros(batch, dtype=torch.int64, device=device)
        self._starts = torch.zeros(batch, dtype=torch.int64, device=device)
        self._plain_mask = _takes_plain_mask(target.model)

    def __len__(self) -> int:
        return len(self._rows)

    # Where the rows lie; read by each layer's slots.

    @property
    def window(self) -> slice:
        """Slots that some row holds."""
        return slice(self._low, self._end)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> list[_Row]:
        """Read prompts and choose the first token of each. Returns the rows that ended by it."""
        by_length = sorted(requests, key=lambda request: len(request.tokens))
        ended: list[_Row] = []
        while by_length:
            # The longest first, with as many of like length as one pass takes.
            n = max(1, min(len(by_length), PREFILL // len(by_length[-1].tokens)))
            ended += self._read(by_length[-n:])
            del by_length[-n:]
        return ended

    def _read(self, requests: Sequence[Request]) -> list[_Row]:
        target, device = self._target, self._target.device
        lengths = [len(request.tokens) for request in requests]
        width = max(lengths)
        tokens = torch.zeros((len(requests), width), dtype=torch.int64)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.tokens)] = torch.tensor(request.tokens)
        cache = new_cache(target.model.config, width)
        positions = torch.arange(width, device=device)[None]
        states = target.run(tokens.to(device), cache=cache, position_ids=positions)
        last = torch.tensor(lengths, device=states.device) - 1
        states = states[torch.arange(len(requests), device=states.device), last]
        if not self._rows or self._end < width or self._end == self._room:
            self._move(width)
        first = len(self._rows)
        read = [layer for layer in cache.layers if isinstance(layer, BufferLayer)]
        for ours, theirs in zip(self._slots, read, strict=True):
            if theirs.is_initialized:  # not in layers that share another's cache
                ours.take(theirs, lengths, first)
        for request, length in zip(requests, lengths, strict=True):
            self._rows.append(_Row(request, self._end - length))
        self._low = min(row.start for row in self._rows)
        starts = [row.start for row in self._rows[first:]]
        self._starts[first : len(self._rows)] = torch.tensor(starts, device=device)
        return self._advance(states, first)

    @torch.inference_mode()
    def step(self) -> list[_Row]:
        """One more token for every row. Returns the rows that ended, EOS included."""
        n, device = len(self._rows), self._target.device
        if self._end == self._room:
            self._move(0)
        starts = self._starts[:n]
        self._end += 1
        mask: Tensor | None = None
        if self._plain_mask or any(row.start != self._low for row in self._rows):
            mask = torch.arange(self._low, self._end, device=device) >= starts[:, None]
            mask = mask[:, None, None] if self._plain_mask else mask
        states = self._target.run(
            self._newest[:n, None],
            cache=self._cache,
            position_ids=(self._end - 1 - starts)[:, None],
            attention_mask=mask,
        )
        return self._advance(states[:, -1], 0)

    def _advance(self, states: Tensor, first: int) -> list[_Row]:
        """Choose the next token of the rows from ``first`` on, and let go of those that ended."""
        target, rows = self._target, self._rows[first:]
        chosen, scores = self._choose(
            target.head(states).to(target.device), [row.request for row in rows]
        )
        self._newest[first : len(self._rows)] = chosen
        # The one transfer of a step.
        picked, finite = torch.stack([chosen, scores.isfinite().long()]).tolist()
        if not all(finite):
            row = rows[finite.index(0)]
            raise NumericsError(
                f"the logits of {target.name} are not finite at position "
                f"{len(row.request.tokens) + len(row.new) - 1} of prompt {row.request.index}",
                got=f"computed in {str(target.dtype).removeprefix('torch.')}",
                remedy="Load the target in bfloat16 or float32; if it is, its weights are damaged.",
            )
        for row, token in zip(rows, picked, strict=True):
            row.new.append(token)
        return self._drop(
            [len(row.new) == self._max_new or row.new[-1] in target.eos_ids for row in self._rows]
        )

    def _drop(self, ended: Sequence[bool]) -> list[_Row]:
        """Take out the rows that ended; the last ones take their places."""
        if not any(ended):
            return []
        gone = [row for row, end in zip(self._rows, ended, strict=True) if end]
        n = len(self._rows) - len(gone)
        holes = [r for r in range(n) if ended[r]]
        movers = [r for r in range(n, len(self._rows)) if not ended[r]]
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        del self._rows[n:]
        if holes:
            for layer in self._slots:
                layer.move_rows(movers, holes)
            source = torch.tensor(movers, device=self._newest.device)
            destination = torch.tensor(holes, device=self._newest.device)
            for x in (self._newest, self._starts):
                x[destination] = x[source]
        for row in gone:
            self._choose.forget(row.request)
        self._low = min((row.start for row in self._rows), default=self._end)
        return gone

    def _move(self, width: int) -> None:
        """New buffers: what lives is put where ``width`` slots fit before its end."""
        live = self._end - self._low if self._rows else 0
        end = max(width, live)
        room = end + self._max_new
        for layer in self._slots:
            layer.move(slice(self._end - live, self._end), end, room, len(self._rows))
        shift = end - self._end
        for row in self._rows:
            row.start += shift
        self._starts += shift
        self._end, self._low, self._room = end, end - live, room


class _Slots(DynamicLayer):
    """Keys and values [batch, heads, room, width] of one layer, all rows ending at one slot."""

    is_croppable = False
    keys: Any  # None before the first prompts are read
    values: Any

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._rows = rows
        self._buffers: list[Tensor] = []
        self._room = 0

    def take(self, layer: BufferLayer, lengths: Sequence[int], first: int) -> None:
        """Copy the first ``lengths`` positions of another layer's rows to rows ``first`` on."""
        new, end = (layer.keys, layer.values), self._rows.window.stop
        if not self._buffers:
            self._buffers = [
                x.new_zeros((self._rows._batch, x.shape[1], self._room, x.shape[-1])) for x in new
            ]
            self.lazy_initialization(*new)
        for buffer, x in zip(self._buffers, new, strict=True):
            for r, length in enumerate(lengths):
                buffer[first + r, :, end - length : end] = x[r, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        n, window = len(self._rows), self._rows.window
        for buffer, x in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:n, :, window.stop - 1] = x[:, :, 0]
        self.keys, self.values = (buffer[:n, :, window] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        window = self._rows.window  # the slot of the newest token is written in this step
        return max(0, window.stop - window.start - 1)

    def move_rows(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy rows ``source`` over rows ``destination``."""
        window = self._rows.window
        for buffer in self._buffers:
            for s, d in zip(source, destination, strict=True):
                buffer[d, :, window] = buffer[s, :, window]

    def move(self, window: slice, end: int, room: int, n: int) -> None:
        """New buffers of ``room`` slots, the ``window`` of the first ``n`` rows ending at ``end``.

        Slots that no row holds are 0: a mask takes away their weight, but 0 times NaN is NaN.
        """
        self._room = room
        live = window.stop - window.start
        for i, old in enumerate(self._buffers):
            new = old.new_zeros((*old.shape[:2], room, old.shape[-1]))
            new[:n, :, end - live : end] = old[:n, :, window]
            self._buffers[i] = new


def _takes_plain_mask(model: Any) -> bool:
    """Whether a mask [B, 1, 1, keys] can be handed over as it is.

    The library's own making of masks reads the mask back from the device, once a step.
    """
    text = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    return (
        type(model).__module__.startswith("transformers.")
        and model.config._attn_implementation == "sdpa"
        and kinds == {"full_attention"}
        and not window
        and not getattr(text, "alibi", False)  # Falcon counts its distances in a plain 2-d mask
    )


class _Chooser:
    """Greedy choice, or a draw whose noise belongs to (seed, index of the prompt, step).

    The draw is the argmax of ``logits / temperature + Gumbel noise``. Each prompt has its own
    generator, from which every step takes one vocabulary of exponentials; so neither the batch
    nor its order can change a draw, and rounding changes one only at a near tie. The generator
    lives on the logits' device, so a CPU and a GPU draw different texts from the same seed.
    """

    def __init__(self, target: Target, temperature: float, batch: int) -> None:
        self._temperature, self._device = temperature, target.device
        self._generators: dict[tuple[int, int], torch.Generator] = {}
        size = (batch, target.vocab_size) if temperature else (0, 0)
        self._noise = torch.empty(size, dtype=torch.float32, device=target.device)

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Chosen tokens [R] and their scores [R], not finite where a logit is NaN or +inf."""
        if self._temperature == 0:
            scores, chosen = logits.max(-1)
            return chosen, scores
        noise = self._noise[: len(requests)]
        for row, request in zip(noise, requests, strict=True):
            row.exponential_(generator=self._generator(request))
        scores, chosen = (logits.float() / self._temperature).sub_(noise.log_()).max(-1)
        return chosen, scores

    def forget(self, request: Request) -> None:
        self._generators.pop((request.seed, request.index), None)

    def _generator(self, request: Request) -> torch.Generator:
        key = request.seed, request.index
        generator = self._generators.get(key)
        if generator is None:
            # A Weyl step with an odd constant keeps (seed, prompt) pairs apart in 63 bits.
            mixed = (key[0] * 0x9E3779B97F4A7C15 + key[1] * 0xD1B54A32D192ED03 + 1) % 2**63
            generator = torch.Generator(self._device).manual_seed(mixed)
            self._generators[key] = generator
        return generator
