"""One sequence with a key-value cache that can be extended by blocks and rewound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from driftlab.errors import ContractError

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
