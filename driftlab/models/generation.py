"""Continuing token sequences with a key-value cache. HuggingFace's own ``generate`` is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from driftlab.errors import ContractError, DataError

if TYPE_CHECKING:
    from driftlab.models.target import Forward, Target


class BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer that is written in place.

    HuggingFace's layer concatenates, which copies the whole cache for every token. It also
    forgets what left a sliding window, so that a rewind across the window's edge needs past
    recording switched on beforehand. This layer keeps every position and leaves the window to
    the mask; cutting it back is a matter of taking a shorter view.
    """

    is_croppable = True
    keys: Any  # None before the first update
    values: Any

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        new = (key_states, value_states)
        if not self._buffers or end > self._buffers[0].shape[-2]:
            room = max(self._capacity, end if not self._buffers else 2 * end)
            old = (self.keys, self.values)
            self._buffers = [x.new_empty((*x.shape[:-2], room, x.shape[-1])) for x in new]
            if start:
                for buffer, past in zip(self._buffers, old, strict=True):
                    buffer[..., :start, :] = past
        rows = key_states.shape[0]
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:rows, :, start:end] = x
        self.keys, self.values = (buffer[:rows, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def move_rows(self, source: Tensor, destination: Tensor, rows: int) -> None:
        """Copy batch rows ``source`` over ``destination`` and keep the first ``rows`` rows."""
        if len(source):
            self.keys[destination] = self.keys[source]
            self.values[destination] = self.values[source]
        self.keys, self.values = self.keys[:rows], self.values[:rows]


def new_cache(config: Any, capacity: int) -> DynamicCache:
    """Empty cache for a model with ``config``, with room for ``capacity`` positions at once.

    Raises
    ------
    ContractError: the model keeps a state that is not keys and values (linear attention).
    """
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[i] = BufferLayer(capacity)
        elif not isinstance(
            layer, DummyLayer
        ):  # dummies belong to layers that share another's cache
            raise ContractError(
                f"layer {i} of the target keeps a state that cannot be rewound",
                got=type(layer).__name__,
                remedy="driftlab works with attention layers (full, sliding or chunked) only.",
            )
    return cache


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch: int,
    progress: str,
) -> list[list[int]]:
    """See :meth:`Target.generate`."""
    for i, prompt in enumerate(prompts):
        target.check_tokens(prompt, what=f"prompt {i}", extra=max_new_tokens)
    if max_new_tokens < 1 or temperature < 0 or batch < 1:
        raise DataError(
            "generation needs max_new_tokens >= 1, temperature >= 0 and batch >= 1",
            got=f"{max_new_tokens}, {temperature}, {batch}",
        )
    # Like lengths together: less padding, and the order cannot matter to any result.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: list[list[int]] = [[] for _ in prompts]
    bar = tqdm(
        total=len(prompts) * max_new_tokens,
        desc=progress,
        unit="tok",
        disable=None if progress else True,
    )
    with bar, torch.inference_mode():
        for start in range(0, len(order), batch):
            _continue_batch(
                target,
                {i: prompts[i] for i in order[start : start + batch]},
                texts,
                max_new_tokens,
                _Chooser(temperature, seed, target.device),
                bar,
            )
    return texts


def _continue_batch(
    target: Target,
    prompts: dict[int, Sequence[int]],
    texts: list[list[int]],
    max_new_tokens: int,
    choose: _Chooser,
    bar: tqdm,
) -> None:
    """Append the continuation of each of ``prompts`` to its entry of ``texts``.

    Prompts are padded on the left, so that all rows write the same cache slot. A row that
    ended gives its place to the last row, and the batch shrinks.
    """
    rows = list(prompts)
    width, device = max(map(len, prompts.values())), target.device
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.ones((len(rows), width + max_new_tokens), dtype=torch.int64)
    for r, i in enumerate(rows):
        pad = width - len(prompts[i])
        tokens[r, pad:] = torch.tensor(prompts[i])
        mask[r, :pad] = 0
    padding = width - mask[:, :width].sum(-1)
    padded = bool(padding.any())
    tokens, mask, padding = tokens.to(device), mask.to(device), padding.to(device)
    positions = (torch.arange(width, device=device) - padding[:, None]).clamp(min=0)
    cache = new_cache(target.model.config, width + max_new_tokens)

    for step in range(max_new_tokens):
        end = width + step
        states = target.run(
            tokens,
            cache=cache,
            position_ids=positions,
            attention_mask=mask[:, :end] if padded else None,
        )
        chosen = choose(target.head(states[:, -1]).to(device), rows)
        picked = chosen.tolist()
        for i, token in zip(rows, picked, strict=True):
            texts[i].append(token)
        bar.update(len(rows))
        ended = [token in target.eos_ids for token in picked]
        if any(ended):
            left = max_new_tokens - step - 1
            bar.update(left * sum(ended))
            n = len(rows) - sum(ended)
            if n == 0 or left == 0:
                return
            holes = [r for r in range(n) if ended[r]]
            movers = [r for r in range(n, len(rows)) if not ended[r]]
            for hole, mover in zip(holes, movers, strict=True):
                rows[hole] = rows[mover]
            del rows[n:]
            source = torch.tensor(movers, dtype=torch.int64, device=device)
            destination = torch.tensor(holes, dtype=torch.int64, device=device)
            for layer in cache.layers:
                if isinstance(layer, BufferLayer) and layer.is_initialized:
                    at = layer.keys.device  # a model split over devices has its cache split too
                    layer.move_rows(source.to(at), destination.to(at), n)
            for x in (chosen, mask, padding):
                x[destination] = x[source]
            chosen, mask, padding = chosen[:n], mask[:n], padding[:n]
        tokens = chosen[:, None]
        positions = end - padding[:, None]


class _Chooser:
    """Greedy choice, or a draw whose noise belongs to (seed, prompt index, step).

    The draw is the argmax of ``logits / temperature + Gumbel noise``. Each prompt has its own
    generator, from which every step takes one vocabulary of exponentials; so neither the batch
    nor its order can change a draw, and rounding changes one only at a near tie. The generator
    lives on the logits' device, so a CPU and a GPU draw different texts from the same seed.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self._temperature, self._seed, self._device = temperature, seed, device
        self._generators: dict[int, torch.Generator] = {}

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        if self._temperature == 0:
            return logits.argmax(-1)
        noise = torch.empty(logits.shape, dtype=torch.float32, device=self._device)
        for row, i in zip(noise, rows, strict=True):
            row.exponential_(generator=self._generator(i))
        return (logits.float() / self._temperature).sub_(noise.log_()).argmax(-1)

    def _generator(self, i: int) -> torch.Generator:
        generator = self._generators.get(i)
        if generator is None:
            # A Weyl step with an odd constant keeps (seed, prompt) pairs apart in 63 bits.
            mixed = (self._seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03 + 1) % 2**63
            generator = torch.Generator(self._device).manual_seed(mixed)
            self._generators[i] = generator
        return generator


class Session:
    """One sequence and its cache. ``length`` tokens are in it.

    ``aux`` [1, N, A*Ht], ``last`` [1, N, Ht] and ``logits`` belong to the newest block of N
    tokens; after a rewind there is no newest block until the next :meth:`extend`. Logits of the
    first block are kept for its last token only, [1, 1, V]: a long prompt's are large.
    """

    def __init__(self, target: Target, tokens: Sequence[int], boundaries: Sequence[int]) -> None:
        target.check_boundaries(boundaries)
        self.target, self.boundaries = target, tuple(boundaries)
        self.length = 0
        self._cache = new_cache(target.model.config, len(tokens) + 64)
        self._newest: Forward | None = None
        self._extend(tokens, logits_from=-1)

    def extend(self, tokens: Sequence[int]) -> Forward:
        """Append ``tokens``; return their states, with logits [1, N, V]."""
        return self._extend(tokens, logits_from=0)

    def _extend(self, tokens: Sequence[int], *, logits_from: int) -> Forward:
        target, start = self.target, self.length
        target.check_tokens(tokens, what=f"a block after {start} tokens")
        end = start + len(tokens)
        if end > target.max_position:
            raise target.too_long("the session", start, len(tokens))
        ids = torch.tensor([list(tokens)], device=target.device)
        positions = torch.arange(start, end, device=target.device)[None]
        with torch.no_grad(), target.capture(self.boundaries) as states:
            last = target.run(ids, cache=self._cache, position_ids=positions)
            self._newest = target.collect(
                states, self.boundaries, last, logits=last[:, logits_from:]
            )
        self.length = end
        self._check_cache()
        return self._newest

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens and forget the rest.

        Raises
        ------
        ContractError: ``length`` outside 0..self.length.
        """
        if not 0 <= length <= self.length:
            raise ContractError(
                f"a session of {self.length} tokens cannot be rewound to {length}",
                remedy="Give how many tokens to keep, not how many to drop.",
            )
        if length < self.length:
            # crop takes the number to drop, negated; a positive number is refused.
            self._cache.crop(length - self.length)
            self.length, self._newest = length, None
        self._check_cache()

    def _check_cache(self) -> None:
        for layer in self._cache.layers:
            if (
                isinstance(layer, BufferLayer)
                and layer.is_initialized
                and layer.get_seq_length() != self.length
            ):
                raise ContractError(
                    "the cache does not hold what the session holds",
                    got=f"{layer.get_seq_length()} positions, {self.length} tokens",
                    remedy="The target writes its cache in a way that driftlab does not know.",
                )

    def _block(self) -> Forward:
        if self._newest is None:
            raise ContractError(
                "the session was rewound and has no newest block", remedy="Extend it first."
            )
        return self._newest

    @property
    def aux(self) -> Tensor:
        return self._block().aux

    @property
    def last(self) -> Tensor:
        return self._block().last

    @property
    def logits(self) -> Tensor:
        logits = self._block().logits
        assert logits is not None  # sessions always ask for them
        return logits
