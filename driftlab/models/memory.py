"""What a piece of work needs in bytes, what is free, and the refusal before it begins.

Estimates count the tensors that are alive at the same time at the peak, in float32. They are
meant to be right within a factor of two (tests/test_memory.py measures them), so only work that
clearly does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from driftlab.config import DrafterConfig, TrainSpec
from driftlab.errors import ResourceError

PROCESS = 400 << 20  # Python with torch and transformers, before it does anything
_ITEM = 4  # bytes of a float32
_SCORES = 2**24  # elements of one block of attention scores, drafter.SCORE_BUDGET
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def system_bytes() -> int | None:
    """Memory that the system could give, whatever a container allows; None unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None  # not Linux: nothing known to compare with


def free_bytes() -> int | None:
    """Memory that a new process may take: the system's, or what a container leaves; None unknown.

    Memory of a container counts file caches as used, so its limit is a lower bound.
    """
    free = system_bytes()
    if free is None:
        return None
    for limit, used in zip(_LIMITS, _USED, strict=True):
        try:
            bound = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue
        free = min(free, max(0, bound))
    return free


def drafter_numbers(config: DrafterConfig) -> tuple[int, int]:
    """(all parameters, those that training moves), by shapes; low-rank attention as if it were
    full, which is an upper bound."""
    h, heads, e = config.hidden_size, config.num_heads, config.head_dim
    embedding = config.vocab_size * h
    wide = len(config.boundaries) * config.target_hidden_size
    attention = 2 * h * e * (heads + 2 * config.num_kv_heads) + heads * e * h
    layer = attention + 3 * h * config.intermediate_size + 3 * h
    own = wide * h + layer * config.num_layers + config.draft_vocab_size * h + h
    frozen = h == config.target_hidden_size
    return embedding + own, own + (0 if frozen else embedding)


def _per_token(config: DrafterConfig) -> int:
    """Numbers that one token of one depth leaves alive when gradients are kept."""
    h, heads, e = config.hidden_size, config.num_heads, config.head_dim
    block = 14 * h + 4 * e * (heads + 2 * config.num_kv_heads) + 5 * config.intermediate_size
    return block * config.num_layers


def training_bytes(config: DrafterConfig, spec: TrainSpec, longest: int) -> int:
    """Peak of training one drafter: weights, gradients, AdamW's two moments, the unrolled graph.

    longest: tokens of the longest text, before ``spec.max_length`` cuts it.
    """
    every, moved = drafter_numbers(config)
    size = min(longest, spec.max_length)
    tokens = spec.batch * size
    scores = 3 * config.num_heads * (size + spec.ttt) * config.num_layers
    graph = spec.ttt * (_per_token(config) + 3 * config.draft_vocab_size + scores)
    aux = (len(config.boundaries) + 1) * config.target_hidden_size
    # The targets' probabilities, their logits, and the gradient of one depth's logits.
    fixed = 2 * aux + 3 * config.draft_vocab_size
    teacher = 2 * config.vocab_size * config.target_hidden_size
    return _ITEM * (every + 3 * moved + teacher + tokens * (graph + fixed))


def probing_bytes(config: DrafterConfig, texts: int, longest: int, depth: int) -> int:
    """Peak of measuring ``texts`` texts of at most ``longest`` tokens at once."""
    every, _ = drafter_numbers(config)
    tokens = texts * longest
    aux = (len(config.boundaries) + 1) * config.target_hidden_size
    keys = 2 * depth * config.num_kv_heads * config.head_dim * config.num_layers
    seen = tokens * config.num_heads * (longest + depth)
    recorded = depth * (8 * config.num_heads + 24)
    each = _per_token(config) + 4 * config.draft_vocab_size + 2 * aux + keys + recorded
    teacher = 2 * config.vocab_size * config.target_hidden_size
    full = 2 * 256 * config.vocab_size  # the target's logits, 256 positions at a time
    return _ITEM * (every + teacher + full + tokens * each + 4 * min(seen, _SCORES))


def capturing_bytes(
    batch: int, longest: int, *, hidden: int, intermediate: int, boundaries: int
) -> int:
    """Peak of one forward of a target whose states are kept, besides its weights."""
    return _ITEM * batch * longest * ((2 * boundaries + 10) * hidden + 3 * intermediate)


def size(n: int) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 // 10 else f"{n / 2**20:.0f} MB"


def refuse_too_large(
    what: str, need: Callable[[int], int], now: int, setting: str, *, free: int | None = None
) -> int:
    """Compare ``need(now)`` bytes with what is free; returns the need.

    ``need`` maps a setting (a batch, a number of workers) to bytes; the largest value of it that
    fits goes into the message as ``setting VALUE``.

    Raises ResourceError: it does not fit.
    """
    free = free_bytes() if free is None else free
    needed = need(now)
    if free is None or needed <= free:
        return needed
    fits = next((n for n in range(now - 1, 0, -1) if need(n) <= free), None)
    raise ResourceError(
        f"{what} needs {size(needed)} of memory",
        got=f"{size(free)} free",
        remedy=f"Use {setting} {fits}."
        if fits
        else f"Not even {setting} 1 fits: use a larger "
        "machine, shorter texts, or a smaller draft vocabulary.",
    )
