"""The target of an experiment, and the prompts that it continues, as they are or changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save

from driftlab.config import Condition, Context, MeasureSpec, TargetSpec
from driftlab.data import grammar
from driftlab.data.corpus import Source, sources
from driftlab.data.prompts import Rendered, Rendering, load_filler, load_prompts
from driftlab.data.text import Text
from driftlab.engines.pretrain import pretrain
from driftlab.engines.probe import measurable_anchors
from driftlab.errors import ConfigError
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama
from driftlab.results.shards import read_sealed, write_sealed

MICRO = "micro"
RENDERING = Rendering("default")
# The embedded target: about ten CPU-seconds.
MICRO_STORIES, MICRO_STEPS, MICRO_BATCH, MICRO_LENGTH, MICRO_LR = 1500, 200, 8, 104, 1e-2
MICRO_TRAIN_PROMPTS, MICRO_PROMPT_TOKENS = 400, 14
_FILLER_SEED = 2  # stories that are neither learned from nor measured on

T = TypeVar("T")


# --- targets ------------------------------------------------------------------------------------


def open_target(spec: TargetSpec, cache: Path, *, label: str = "") -> Target:
    """Load a target; ``micro`` is the embedded one, trained once for each ``cache``.

    ``label`` is that of the progress bar; empty shows none.
    """
    if spec.source == MICRO:
        return _micro_target(cache, label)
    return Target.load(
        spec.source,
        revision=spec.revision,
        dtype=spec.dtype,
        device_map=spec.device_map,
        tp_plan=spec.tp_plan,
        trust_remote_code=spec.trust_remote_code,
    )


def _micro_target(cache: Path, label: str) -> Target:
    words = len(grammar.VOCABULARY)
    path = cache / "targets" / f"micro-{_micro_key(words)}.weights"
    model = _read_micro(path, words)
    if model is None:
        model = pretrain(
            grammar.stories(MICRO_STORIES, 0),
            vocab_size=words,
            steps=MICRO_STEPS,
            batch=MICRO_BATCH,
            length=MICRO_LENGTH,
            lr=MICRO_LR,
            seed=0,
            progress=label,
        )
        write_sealed(path, save({n: t.contiguous() for n, t in model.state_dict().items()}))
    return Target.from_model(model, name=MICRO, eos_ids=[grammar.VOCABULARY.index(grammar.EOS)])


def _micro_key(words: int) -> str:
    """Names what the embedded target is made of: recipe, stories, and where training starts."""
    recipe = [MICRO_STORIES, MICRO_STEPS, MICRO_BATCH, MICRO_LENGTH, MICRO_LR, version("torch")]
    start = tiny_llama(vocab_size=words)
    digest = sha256(json.dumps(recipe).encode())
    digest.update(json.dumps(grammar.stories(MICRO_STORIES, 0)).encode())
    digest.update(start.config.to_json_string().encode())
    digest.update(save({n: t.contiguous() for n, t in start.state_dict().items()}))
    return digest.hexdigest()[:16]


def _read_micro(path: Path, words: int) -> torch.nn.Module | None:
    """The stored embedded target; None when it is absent or damaged, so that it is made anew."""
    data = read_sealed(path)
    if data is None:
        return None
    model = tiny_llama(vocab_size=words)
    model.load_state_dict(load(data))
    return model


# --- prompts ------------------------------------------------------------------------------------


def find_prompts(
    name: str,
    target: Target,
    stream: grammar.Stream,
    room: int,
    rendering: Rendering = RENDERING,
) -> list[Source]:
    """The prompts ``name`` (``micro``, a packaged set, a file) as ``target`` reads them.

    ``stream`` is that of the embedded suite's stories. ``room``: longest prompt, in tokens.

    Raises
    ------
    ConfigError: ``micro`` with another target, or a target without a tokenizer.
    DataError: see :func:`load_prompts` and :func:`driftlab.data.prompts.render`.
    """
    if name == MICRO:
        if target.tokenizer is not None:
            raise ConfigError(
                "the prompts 'micro' are for the target 'micro'",
                got=target.name,
                remedy="Name a packaged set (held-out, train) or a .jsonl file.",
            )
        learned = stream == "train"
        stories = grammar.stories(MICRO_TRAIN_PROMPTS, 1) if learned else _held_out_stories()
        return [_opening(i, story, rendering) for i, story in enumerate(stories)]
    if target.tokenizer is None:
        raise ConfigError(
            f"the target {target.name} has no tokenizer for the prompts {name!r}",
            remedy="Use the prompts 'micro' with the target 'micro'.",
        )
    return sources(load_prompts(name), target.tokenizer, rendering, limit=room)


def _held_out_stories() -> list[tuple[int, ...]]:
    """64 stories that open differently. In the place of one that does not stands the next after
    these 64."""
    stories = grammar.stories(80, 1, stream="held-out")
    kept: dict[tuple[int, ...], tuple[int, ...]] = {}
    spare = iter(stories[64:])
    for story in stories[:64]:
        while story[:MICRO_PROMPT_TOKENS] in kept:
            story = next(spare)
        kept[story[:MICRO_PROMPT_TOKENS]] = story
    return list(kept.values())


def _opening(index: int, story: tuple[int, ...], rendering: Rendering) -> Source:
    """The first words of a story as a prompt.

    Micro has no chat template. What every text that its models learned from opens with is the
    first sentence, so ``template = never`` starts after it.
    """
    start = 1
    if rendering.template == "never":
        start += story.index(grammar.encode(".")[0])
    words = story[start : start + MICRO_PROMPT_TOKENS - 1]
    front = grammar.encode(" ".join(filter(None, (rendering.system, rendering.before))))
    bos = rendering.bos != "never"
    tokens = (*([grammar.BOS_ID] if bos else []), *front, *words)
    made = Rendered(tokens, tokens[0], bos, None, rendering.template != "never")
    return Source(f"story-{index:03d}", MICRO, tokens, made)


def rendering_of(condition: Condition, target: Target) -> Rendering:
    """How prompts are rendered under ``condition``."""
    return replace(
        RENDERING,
        name=condition.name,
        template=condition.template or RENDERING.template,
        bos=condition.bos or RENDERING.bos,
        system=condition.system,
        before="" if condition.context is None else _filler(condition.context, target),
    )


def _filler(context: Context, target: Target) -> str:
    """About ``context.tokens`` tokens of text, the same for every prompt."""
    if target.tokenizer is None:
        if context.filler != Context.model_fields["filler"].default:
            raise ConfigError(
                f"context.filler is not read: {target.name} has no tokenizer",
                got=context.filler,
                remedy="Leave it out: its context is made of stories of its own.",
            )
        ids: list[int] = []
        for story in grammar.stories(1 + context.tokens // 40, _FILLER_SEED):
            ids += story[1:-1]
        return grammar.decode(ids[: context.tokens])
    return load_filler(context.filler, target.tokenizer, context.tokens)


def spread(items: list[T], limit: int | None) -> list[T]:
    """``limit`` items at even distances, so that every category stays; all when None."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def prompt_rows(
    texts: Sequence[Text], found: Sequence[Source], spec: MeasureSpec
) -> dict[str, list[Any]]:
    """Columns of the table ``prompts`` for measured ``texts``, which continue ``found``."""
    rendered = {source.id: source.rendered for source in found}
    rows = []
    for text in texts:
        made = rendered[text.prompt_id]
        rows.append(
            {
                "prompt": text.prompt_id,
                "category": text.category,
                "text": text.kind,
                "temperature": text.temperature,
                "n_prompt": text.prompt_len,
                "n_text": len(text.tokens),
                "n_anchors": len(measurable_anchors(text, spec)),
                "first_token": text.tokens[0],
                "bos": made.bos if made else True,
                "template_sha": made.template_sha if made else None,
                "loops": text.loops,
                "tokens_sha": text.tokens_sha,
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}
