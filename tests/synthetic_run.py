"""A run made of known numbers, for tests of everything that reads tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from driftlab.results.records import RunDirectory
from driftlab.results.schema import NORMS

FACTORIAL = tuple((f, b) for b in ("pre_norm", "post_norm") for f in ("none", "per_layer"))

# Forced accuracy at depth 1 and its decay a depth; growth of the state a depth.
DECAY = {"pre_norm": 0.88, "post_norm": 0.97}
GROWTH = {"pre_norm": 1.15, "post_norm": 1.0}


def steps(
    rng: np.random.Generator,
    *,
    feedback: str,
    fusion_norm: str = "none",
    anchors: int = 12,
    depth: int = 8,
    text: str = "sampled",
    mode: str = "free",
    first_anchor: int = 6,
    level: float = 0.6,
    sink: bool = True,
) -> dict[str, Any]:
    """Columns of ``steps`` for one (cell, prompt)."""
    anchor = np.repeat(np.arange(first_anchor, first_anchor + anchors), depth)
    d = np.tile(np.arange(1, depth + 1), anchors)
    n = len(d)
    accuracy = level * DECAY[feedback] ** (d - 1.0)
    correct = rng.random(n) < accuracy
    accepted = np.logical_and.accumulate(correct.reshape(anchors, depth), axis=1).ravel()
    truth = rng.integers(0, 50, n)
    state = 2.0 * GROWTH[feedback] ** (d - 1.0) * np.exp(rng.normal(0, 0.05, n))
    if fusion_norm != "none":
        state *= 0.5
    keys = anchor + d
    if sink:
        at_sink = 0.45 * (0.8 if feedback == "pre_norm" else 1.0) ** (d - 1.0)
    else:
        at_sink = 1.0 / keys
    drafts = (1 - at_sink) * (d - 1.0) / keys
    left = 1 - at_sink - drafts
    norms: dict[str, Any] = {name: rng.uniform(0.9, 1.1, n) for name in NORMS}
    norms |= {"rms_state_pre": state, "l2_state_pre": 8 * state}
    norms["rms_feedback"] = state if feedback == "pre_norm" else norms["rms_state_post"]
    return {
        "text": text,
        "temperature": {"sampled": 1.0, "greedy": 0.0}.get(text),
        "mode": mode,
        "anchor": anchor,
        "depth": d,
        "draft": np.where(correct, truth, truth + 1),
        "truth": truth,
        "correct": correct,
        "accepted": accepted if mode == "free" else None,
        "in_vocab": np.ones(n, bool),
        "logprob": np.ma.masked_array(np.log(rng.uniform(0.1, 1, n)), mask=rng.random(n) < 0.1),
        "sink": at_sink,
        "prompt_mass": 0.3 * left,
        "generated": 0.5 * left,
        "draft_mass": drafts,
        "self_mass": 0.2 * left,
        "null_mass": 0.0,
        "recent": 0.5 * left,
        "entropy": rng.uniform(2.0, 2.5, n),
        "sink_rate": (at_sink > 0.3).astype(float),
        **norms,
    }


def heads(rng: np.random.Generator, *, text: str, mode: str, depth: int, heads: int = 4) -> Any:
    n = depth * heads
    masses = rng.dirichlet(np.ones(6), n).astype(np.float32)
    names = ("sink", "prompt_mass", "generated", "draft_mass", "self_mass", "null_mass")
    return {
        "text": text,
        "mode": mode,
        "depth": np.repeat(np.arange(1, depth + 1), heads),
        "head": np.tile(np.arange(heads), depth),
        "n": 12,
        **dict(zip(names, masses.T, strict=True)),
        "recent": rng.random(n),
        "entropy": rng.random(n),
        "sink_rate": rng.random(n),
    }


def fused(rng: np.random.Generator, *, fusion_norm: str, text: str) -> dict[str, Any]:
    share = np.array([0.08, 0.2, 0.72] if fusion_norm == "none" else [0.3, 0.34, 0.36])
    share = share + rng.normal(0, 0.01, 3)
    share /= share.sum()
    return {
        "text": text,
        "layer": np.arange(3),
        "boundary": np.array([2, 15, 27]),
        "n": 12,
        "rms_in": np.array([0.5, 2.0, 9.0]) * rng.uniform(0.95, 1.05, 3),
        "l2_in": np.array([4.0, 16.0, 72.0]),
        "rms_normed": np.ones(3) if fusion_norm != "none" else np.array([0.5, 2.0, 9.0]),
        "rms_part": share,
        "share": share,
        "cosine": np.full(3, 0.5),
    }


def cell_row(fusion_norm: str, feedback: str, seed: int, **changes: Any) -> dict[str, Any]:
    variant = f"{fusion_norm}+{feedback}"
    return {
        "cell": f"{variant}/s{seed}",
        "variant": variant,
        "fusion_norm": fusion_norm,
        "feedback": feedback,
        "residual": "raw",
        "attention_gate": False,
        "ttt": 3,
        "seed": seed,
        "axis": "trained",
        "condition": "",
        "status": "done",
        "n_parameters": 1000,
        "train_steps": 100,
        "train_tokens": 5000,
        "train_loss": 1.5,
        "coverage": 0.99,
        "train_seconds": 2.0,
        **changes,
    }


def prompt_names(n: int) -> list[str]:
    return [f"story-{i:02d}" for i in range(n)]


def make_run(
    path: Path,
    *,
    variants: Sequence[tuple[str, str]] = FACTORIAL,
    seeds: Sequence[int] = (0, 1, 2),
    prompts: Sequence[str] = tuple(prompt_names(8)),
    texts: Sequence[str] = ("sampled", "greedy"),
    modes: Sequence[str] = ("free", "forced"),
    depth: int = 8,
    anchors: int = 12,
    sink: bool = True,
    loops: Sequence[str] = (),
    finish: bool = True,
    skip: Sequence[tuple[str, str]] = (),
    manifest: dict[str, Any] | None = None,
) -> RunDirectory:
    """A run of ``variants`` x ``seeds``; numbers depend on (cell, prompt) alone."""
    base: dict[str, Any] = {
        "config": {"name": "synthetic", "measure": {"bootstrap": 200, "depth": depth}},
        "command": "driftlab ablate synthetic.toml",
        "versions": {"driftlab": "0.1.0", "numpy": np.__version__},
        "assumed": {
            "boundaries": {"value": [2, 15, 27], "origin": "assumed", "where": "default of EAGLE-3"}
        },
        "seeds": list(seeds),
    }
    with RunDirectory.create(path, base | (manifest or {})) as run:
        run.write_prompts(
            {
                "prompt": [p for p in prompts for _ in texts],
                "category": "story",
                "text": list(texts) * len(prompts),
                "temperature": [1.0 if t == "sampled" else 0.0 for t in texts] * len(prompts),
                "n_prompt": 6,
                "n_text": 6 + anchors + depth,
                "n_anchors": anchors,
                "first_token": 1,
                "bos": True,
                "loops": [p in loops for p in prompts for _ in texts],
                "tokens_sha": "0" * 64,
            }
        )
        for v, (fusion_norm, feedback) in enumerate(variants):
            for seed in seeds:
                row = cell_row(fusion_norm, feedback, seed)
                for p, prompt in enumerate(prompts):
                    if (row["cell"], prompt) in skip or run.has(row["cell"], prompt):
                        continue
                    rng = np.random.default_rng([v, seed, p])
                    level = 0.6 + 0.02 * seed + 0.1 * np.sin(p)
                    options: dict[str, Any] = {
                        "feedback": feedback,
                        "fusion_norm": fusion_norm,
                        "depth": depth,
                        "anchors": anchors,
                        "sink": sink,
                        "level": level,
                    }
                    parts = [steps(rng, text=t, mode=m, **options) for t in texts for m in modes]
                    run.write(
                        row["cell"],
                        prompt,
                        {
                            "steps": _stack(parts),
                            "heads": _stack(
                                [
                                    heads(rng, text=t, mode=m, depth=depth)
                                    for t in texts
                                    for m in modes
                                ]
                            ),
                            "fused": _stack(
                                [fused(rng, fusion_norm=fusion_norm, text=t) for t in texts]
                            ),
                        },
                    )
                run.write_cell(row)
        if finish:
            run.finish()
    return RunDirectory.open(path)


def _stack(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate columns; scalars are repeated to the length of their part."""
    lengths = [len(next(v for v in part.values() if np.ndim(v))) for part in parts]
    out: dict[str, Any] = {}
    for name in parts[0]:
        columns: list[Any] = [
            [None] * n if part[name] is None else np.broadcast_to(part[name], n)
            for part, n in zip(parts, lengths, strict=True)
        ]
        if any(isinstance(part[name], np.ma.MaskedArray) for part in parts):
            out[name] = np.ma.concatenate([part[name] for part in parts])
        elif any(part[name] is None for part in parts):
            out[name] = [None if v is None else v.item() for c in columns for v in c]
        else:
            out[name] = np.concatenate(columns)
    return out
