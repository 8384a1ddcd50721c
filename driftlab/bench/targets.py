"""Stages of the target: writing text, and capturing states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlab.bench import count, shapes
from driftlab.bench.drafting import work
from driftlab.bench.shapes import Bench
from driftlab.bench.timing import Call, ratio
from driftlab.models.target import Target
from driftlab.results.bench_rows import Row


def continuation(bench: Bench) -> Iterator[Row]:
    """Greedy text of many prompts side by side, against the library's own ``generate``."""
    full = bench.full
    shape = shapes.MIDDLE_TARGET if full else shapes.SMALL_TARGET
    rows, new = (64, 24) if full else (16, 16)
    for dtype in (torch.float32, torch.bfloat16):
        yield from _continued(bench, shape, dtype, rows, new)


def _continued(
    bench: Bench, shape: count.TargetShape, dtype: torch.dtype, rows: int, new: int
) -> Iterator[Row]:
    target = shapes.random_target(shape, dtype, bench.device)
    lengths = [16 + (i * 7) % 33 for i in range(rows)]
    prompts = [
        list(shapes.random_text(n, shape.vocabulary, seed=i).tokens) for i, n in enumerate(lengths)
    ]
    # The library takes one length: padding on the left, masked.
    width = max(lengths)
    ids = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    ids, mask = ids.to(bench.device), mask.to(bench.device)

    said: dict[str, Any] = {}

    def ours() -> None:
        said["driftlab"] = target.generate(prompts, max_new_tokens=new, batch=rows)

    def library() -> None:
        said["generate"] = _generate(target, ids, mask, new)

    found = bench.race({"driftlab": ours, "generate": library})
    same = _agreement(said["driftlab"], said["generate"], width)
    keys = sum(lengths) / rows
    one = count.target_forward(shape, rows, keys + new / 2, logits=rows, size=dtype.itemsize)
    one += count.Work(
        bytes=2
        * dtype.itemsize
        * (rows - 1)
        * keys
        * shape.layers
        * shape.kv_heads
        * shape.head_dim
    )
    done = one.times(new - 1) + count.target_forward(
        shape, sum(lengths), keys / 2, logits=rows, size=dtype.itemsize
    )
    size = f"batch={rows} new={new} layers={shape.layers} H={shape.width}"
    name = str(dtype).removeprefix("torch.")
    common: dict[str, Any] = {"stage": "continuation", "size": size, "dtype": name}
    yield Row(**common, case="HF generate", **work(bench, done, found["generate"], dtype))
    yield Row(
        **common,
        case="driftlab",
        **work(bench, done, found["driftlab"], dtype),
        ratio=ratio(found["generate"], found["driftlab"]),
        of="HF generate / driftlab",
        goal="2 or more (bf16)",
        note=f"{100 * same:.1f}% of the tokens are the same",
    )


def _generate(target: Target, ids: Tensor, mask: Tensor, new: int) -> Tensor:
    with torch.inference_mode():
        return target.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )


def _decode(target: Target, ids: Tensor) -> None:
    with torch.no_grad():
        target.model.get_decoder()(input_ids=ids, use_cache=False)


def _agreement(ours: list[list[int]], library: Tensor, width: int) -> float:
    """Share of new tokens before each row's first difference."""
    same = total = 0
    for mine, row in zip(ours, library[:, width:].tolist(), strict=True):
        total += len(mine)
        same += next(
            (i for i, (a, b) in enumerate(zip(mine, row, strict=False)) if a != b), len(mine)
        )
    return same / total


def states(bench: Bench) -> Iterator[Row]:
    """Forward with three captured boundaries, against the library's decoder without capture."""
    full = bench.full
    shape = shapes.SMOLLM2_TARGET if full else shapes.SMALL_TARGET
    target = shapes.random_target(shape, device=bench.device)
    n = shape.layers
    boundaries = (2, n // 2, n - 3) if full else (0, 1, 2)
    for tokens in (128, 256):
        ids = torch.tensor([shapes.random_text(tokens, shape.vocabulary).tokens] * 2)
        lengths, placed = torch.tensor([tokens, tokens]), ids.to(bench.device)

        calls: dict[str, Call] = {
            "captured": partial(target.forward, ids, lengths, boundaries, logits=False),
            "HF forward": partial(_decode, target, placed),
        }
        found = bench.race(calls)
        done = count.target_forward(shape, 2 * tokens, tokens / 2, logits=0)
        common: dict[str, Any] = {
            "stage": "captured states",
            "size": f"T={tokens} batch=2 layers={n} H={shape.width}",
            "dtype": "float32",
        }
        f32 = torch.float32
        yield Row(**common, case="HF forward", **work(bench, done, found["HF forward"], f32))
        yield Row(
            **common,
            case="captured",
            **work(bench, done, found["captured"], f32),
            ratio=ratio(found["captured"], found["HF forward"]),
            of="captured / HF forward",
            goal="at most 1.1",
        )
