"""What a piece of work needs in bytes, what is free, and the refusal before it begins.

Estimates count the tensors that are alive at the same time at the peak, a drafter's in float32, a
target's in its own dtype. They are upper bounds, and less than about twice what is taken:
tests/reliability/peaks.py measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from driftlab.config import DrafterConfig, TrainSpec
from driftlab.errors import ResourceError
from driftlab.models.continuation import PREFILL
from driftlab.models.drafter import BLOCK_ROWS, SCORE_BUDGET

if TYPE_CHECKING:
    from driftlab.models.anatomy import Shape

PROCESS = 500 << 20  # Python with torch and transformers, before it does anything
_ITEM = 4  # bytes of a float32
TEXTS = "a larger machine or shorter texts"  # where no draft vocabulary takes part
_LOSS = 2**21  # elements of one block of logits in training, on a CPU
# Limit, use and statistics of a container, in both versions of control groups. File caches count as
# used there; those that nobody has read lately are given up for whoever needs memory.
_CONTAINERS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a new process may take: the system's, or what a container leaves; None unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None  # not Linux: nothing known to compare with
    for limit, used, cache in _CONTAINERS:
        try:
            bound = int((groups / limit).read_text()) - int((groups / used).read_text())
            facts = ((groups / limit).parent / "memory.stat").read_text().split()
            bound += int(facts[facts.index(cache) + 1])
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


def _scores(config: DrafterConfig, texts: int, longest: int, depth: int) -> int:
    """Elements of one block of attention scores."""
    keys = longest + depth
    return max(
        min(SCORE_BUDGET, texts * config.num_heads * min(longest, BLOCK_ROWS) * keys),
        texts * config.num_heads * keys,  # one row
    )


def training_bytes(config: DrafterConfig, spec: TrainSpec, longest: int) -> int:
    """Peak of training one drafter: weights, gradients, AdamW's two moments, the unrolled graph.

    longest: tokens of the longest text, before ``spec.max_length`` cuts it.
    """
    every, moved = drafter_numbers(config)
    size = min(longest, spec.max_length)
    tokens = spec.batch * size
    wide = len(config.boundaries) * config.target_hidden_size
    # Captured states as they are read, cast, normed and joined, and those after the final norm.
    graph = spec.ttt * _per_token(config) + 4 * wide + 2 * config.target_hidden_size
    # Embedding and head, the head's rows that are learned, and the gradient of the drafter's head.
    teacher = 2 * config.vocab_size + config.draft_vocab_size
    head = 2 * config.draft_vocab_size * config.hidden_size
    # Logits are made in blocks of positions, beside the target's probabilities.
    rows = min(tokens * spec.ttt, max(256, _LOSS // config.draft_vocab_size))
    block = 2 * rows * config.draft_vocab_size
    block += 6 * _scores(config, spec.batch, size, spec.ttt)
    kept = every if spec.evaluate_every else 0
    fixed = every + 3 * moved + kept + teacher * config.target_hidden_size + head
    return _ITEM * (fixed + block + tokens * graph)


def probing_bytes(config: DrafterConfig, texts: int, longest: int, depth: int) -> int:
    """Peak of measuring ``texts`` texts of at most ``longest`` tokens at once."""
    every, _ = drafter_numbers(config)
    tokens = texts * longest
    wide = len(config.boundaries) * config.target_hidden_size
    keys = 2 * depth * config.num_kv_heads * config.head_dim * config.num_layers
    # Six regions, entropy, recent mass and sink rate of each head, and the columns of a row:
    # as measured, side by side, and as the doubles that go to the host in one piece.
    recorded = depth * (60 * config.num_heads + 150)
    each = _per_token(config) + 6 * config.draft_vocab_size + 5 * wide + keys + recorded
    teacher = 2 * config.vocab_size * config.target_hidden_size
    full = 3 * 256 * config.vocab_size  # the target's logits, 256 positions at a time
    block = 6 * _scores(config, texts, longest, depth)
    return _ITEM * (every + teacher + full + block + tokens * each)


def _widened(itemsize: int, rows: int, width: int, height: int) -> int:
    """Bytes of one layer of a target in half precision that is multiplied in float32, as on a CPU
    without units for halves (driftlab.models.wide): its input, its output and its weights."""
    return 0 if itemsize >= _ITEM else _ITEM * (rows * (width + height) + width * height)


def capturing_bytes(
    batch: int, longest: int, *, hidden: int, intermediate: int, boundaries: int, itemsize: int
) -> int:
    """Peak of one forward of a target whose states are kept, besides its weights.

    itemsize: bytes of a number, in the target or as it is kept.
    """
    tokens = batch * longest
    wide = _widened(itemsize, tokens, hidden, intermediate)
    return itemsize * tokens * ((2 * boundaries + 10) * hidden + 3 * intermediate) + wide


def writing_bytes(
    batch: int,
    prompt: int,
    new: int,
    *,
    shape: Shape,
    hidden: int,
    layers: int,
    vocabulary: int,
    itemsize: int,
) -> int:
    """Peak of a target that continues ``batch`` prompts of at most ``prompt`` tokens by ``new``,
    besides its weights: keys and values of every layer, a pass over prompts, one step's logits.

    itemsize: bytes of the target's numbers; tokens are drawn in float32.
    """
    keys = 2 * shape.num_kv_heads * shape.head_dim * layers
    read = min(batch * prompt, max(prompt, PREFILL))
    block = 10 * hidden + 3 * shape.intermediate_size + keys
    wide = 2 * shape.num_heads * shape.head_dim  # one layer's keys and values, one for each head
    slots = batch * (prompt + new)
    widened = max(
        _widened(itemsize, read, hidden, shape.intermediate_size),
        _widened(itemsize, batch, hidden, vocabulary),
    )
    drawn = _ITEM * 4 * batch * vocabulary
    return itemsize * (slots * (keys + wide) + read * block) + widened + drawn


def size(n: int) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 // 10 else f"{n / 2**20:.0f} MB"


def refuse_too_large(
    what: str,
    need: Callable[[int], int],
    now: int,
    setting: str | None,
    otherwise: str = "a larger machine, shorter texts, or a smaller draft vocabulary",
) -> None:
    """Compare ``need(now)`` bytes with what is free.

    ``need`` maps a setting (a batch, a number of workers) to bytes; the largest value of it that
    fits goes into the message as ``setting VALUE``. ``otherwise`` is what helps when none fits, or
    when the caller can set nothing (None).

    Raises ResourceError: it does not fit.
    """
    free, needed = free_bytes(), need(now)
    if free is None or needed <= free:
        return
    remedy = f"Use {otherwise}."
    if setting is not None:
        fits = next((n for n in range(now - 1, 0, -1) if need(n) <= free), None)
        remedy = (
            f"Use {setting} {fits}." if fits else f"Not even {setting} 1 fits: use {otherwise}."
        )
    raise ResourceError(
        f"{what} needs {size(needed)} of memory", got=f"{size(free)} free", remedy=remedy
    )
