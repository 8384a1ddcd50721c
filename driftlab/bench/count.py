"""Operations and bytes of a stage, by formula. A multiplication and its addition are two.

Counted is what the result needs, and not what an implementation does beside it: the embedding's
half of a forced chain's projections once, keys up to a query's anchor only, the head where a loss
is asked for. So all rivals at one stage are held to one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from driftlab.config import DrafterConfig


@dataclass(frozen=True)
class Work:
    """Floating point operations, and bytes that must be moved at least once."""

    operations: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def times(self, n: float) -> Work:
        return Work(self.operations * n, self.bytes * n)

    def least_seconds(self, peak: float, bandwidth: float) -> float:
        """The roofline: no machine with these two limits is faster."""
        return max(self.operations / peak, self.bytes / bandwidth)


def product(rows: float, inner: float, outer: float, size: int = 4) -> Work:
    """[rows, inner] x [inner, outer] in numbers of ``size`` bytes; the weights are read once."""
    return Work(2 * rows * inner * outer, size * (rows * (inner + outer) + inner * outer))


def attention(queries: float, keys: float, heads: int, width: int) -> Work:
    """Scores and mixture of ``queries`` over ``keys`` each; no pattern is counted as moved."""
    return Work(4 * queries * keys * heads * width)


def fusion(config: DrafterConfig, rows: float, size: int = 4) -> Work:
    inner = len(config.boundaries) * config.target_hidden_size
    return product(rows, inner, config.hidden_size, size)


def drafter_step(
    config: DrafterConfig, rows: float, keys: float, *, halves: int = 2, size: int = 4
) -> Work:
    """One depth of one layer for ``rows`` rows that see ``keys`` keys on average.

    ``halves``: 2 reads embedding and state, 1 the state only (the embedding's part is known).
    """
    h, e = config.num_heads, config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    readers = (h + 2 * config.num_kv_heads) * e
    return (
        product(rows, halves * width, readers, size)
        + attention(rows, keys, h, e)
        + product(rows, h * e, width, size)
        + product(rows, width, 2 * inner, size)
        + product(rows, inner, width, size)
    )


def head(config: DrafterConfig, rows: float, size: int = 4) -> Work:
    return product(rows, config.hidden_size, config.draft_vocab_size, size)


def ttt_step(
    config: DrafterConfig, *, texts: int, tokens: int, first: int, learned: int, depth: int
) -> Work:
    """Loss and gradients of a training step. Backward counts twice the forward.

    ``first`` is the anchor from which chains are drafted, ``learned`` how many positions of the
    batch bear loss at every depth; the target's head is asked once for each of them.
    """
    prefix = tokens - 1
    read = product(texts * prefix, config.hidden_size, _readers(config))
    total = fusion(config, texts * prefix) + read
    for d in range(1, depth + 1):
        rows = texts * (prefix - d - first)
        total += drafter_step(config, rows, (first + prefix) / 2 + d - 1, halves=1)
    skipped = product(texts * first, config.hidden_size, 2 * config.num_kv_heads * config.head_dim)
    total += skipped + head(config, learned * depth)
    return total.times(3) + product(learned, config.target_hidden_size, config.draft_vocab_size)


def _readers(config: DrafterConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def unrolled(config: DrafterConfig, *, tokens: int, depth: int, modes: int) -> Work:
    """All anchors of a text to ``depth``, in ``modes`` modes, with logits at every depth."""
    rows = tokens - 1
    total = fusion(config, rows)
    for d in range(1, depth + 1):
        total += drafter_step(config, rows, rows / 2 + d - 1) + head(config, rows)
    return total.times(modes)


@dataclass(frozen=True)
class TargetShape:
    """A Llama's sizes."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        own = self.width * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * (own + 3 * self.width * self.inner) + self.vocabulary * self.width


def target_forward(
    shape: TargetShape, rows: float, keys: float, *, logits: float, size: int = 4
) -> Work:
    """``rows`` positions that see ``keys`` keys on average; ``logits`` of them pass the head."""
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = (
        product(rows, shape.width, wide, size)
        + attention(rows, keys, shape.heads, shape.head_dim)
        + product(rows, shape.heads * shape.head_dim, shape.width, size)
        + product(rows, shape.width, 2 * shape.inner, size)
        + product(rows, shape.inner, shape.width, size)
    )
    kept = 2 * size * keys * shape.kv_heads * shape.head_dim  # keys and values of one sequence
    layer += Work(bytes=kept)
    return layer.times(shape.layers) + product(logits, shape.width, shape.vocabulary, size)
