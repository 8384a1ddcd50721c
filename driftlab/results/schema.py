"""Columns of the result tables: type, unit, meaning. Stored in every file that is written."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

SCHEMA_VERSION = 1

REGIONS = ("sink", "prompt_mass", "generated", "draft_mass", "self_mass", "null_mass")
"""The six parts of a query's attention; they sum to 1 in every row of ``steps`` and ``heads``."""

ATTENTION = (*REGIONS, "recent", "entropy", "sink_rate")
NORMS = (
    "rms_input",
    "rms_state_pre",
    "rms_state_post",
    "rms_feedback",
    "rms_attn_out",
    "rms_mlp_out",
    "l2_state_pre",
    "l2_state_post",
    "l2_feedback",
)
LOGGED = ("rms_state_pre", "rms_state_post", "rms_feedback")
"""Norms whose mean logarithm is kept as well, for growth as a ratio of geometric means."""

_S, _B = pa.string(), pa.bool_()
_I2, _I4, _I8 = pa.int16(), pa.int32(), pa.int64()
_F4, _F8 = pa.float32(), pa.float64()

_ATTENTION_TEXT = {
    "sink": "attention mass on the sink set",
    "prompt_mass": "attention mass on the rest of the prompt",
    "generated": "attention mass on accepted tokens after the prompt",
    "draft_mass": "attention mass on the chain's earlier drafts",
    "self_mass": "attention mass on the query's own position",
    "null_mass": "attention mass on a learned sink logit",
    "recent": "attention mass on the last w keys (w in the manifest)",
    "entropy": "entropy of the attention row",
    "sink_rate": "share of the row's (anchor, head) pairs with more than 0.3 of the mass there",
}
_NORM_TEXT = {
    "rms_input": "depth 1: fused input; then what was fed back; after interventions",
    "rms_state_pre": "drafter state before the final norm",
    "rms_state_post": "drafter state after the final norm",
    "rms_feedback": "what is handed to the next depth, before interventions on its way",
    "rms_attn_out": "what the attention block writes",
    "rms_mlp_out": "what the MLP writes",
    "l2_state_pre": "drafter state before the final norm",
    "l2_state_post": "drafter state after the final norm",
    "l2_feedback": "what is handed to the next depth, before interventions on its way",
}


def _field(name: str, kind: pa.DataType, unit: str, text: str, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"unit": unit, "description": text})


def _attention(kind: pa.DataType) -> list[pa.Field]:
    units = {"entropy": "nats", "sink_rate": "share"}
    return [_field(n, kind, units.get(n, "probability"), _ATTENTION_TEXT[n]) for n in ATTENTION]


def _norms(kind: pa.DataType) -> list[pa.Field]:
    return [_field(n, kind, "rms" if n.startswith("rms") else "l2", _NORM_TEXT[n]) for n in NORMS]


def _schema(table: str, rows: str, fields: Iterable[pa.Field]) -> pa.Schema:
    meta = {
        "driftlab.table": table,
        "driftlab.schema_version": str(SCHEMA_VERSION),
        "driftlab.rows": rows,
    }
    return pa.schema(list(fields), metadata=meta)


_CELL = _field("cell", _S, "id", "variant, seed and condition")
_PROMPT = _field("prompt", _S, "id", "prompt")
_TEXT = _field("text", _S, "greedy|sampled|given", "how the measured text was made")
_TEMPERATURE = _field("temperature", _F4, "1", "temperature of the measured text", null=True)
_MODE = _field("mode", _S, "free|forced", "the chain reads its own drafts, or the text's tokens")
_DEPTH = _field("depth", _I2, "drafted tokens", "1 is the first draft of a chain")

SCHEMAS: dict[str, pa.Schema] = {
    "steps": _schema(
        "steps",
        "one per (cell, prompt, text, mode, anchor, depth); of several layers, attention and what "
        "blocks write are the first's",
        [
            *(_CELL, _PROMPT, _TEXT, _TEMPERATURE, _MODE),
            _field("anchor", _I4, "position", "last position with true aux states"),
            _DEPTH,
            _field("draft", _I4, "token id", "the drafted token"),
            _field("truth", _I4, "token id", "the text's token at that position"),
            _field("correct", _B, "bool", "draft equals truth"),
            _field("accepted", _B, "bool", "free: drafts 1..depth are all correct", null=True),
            _field("in_vocab", _B, "bool", "truth is in the draft vocabulary"),
            _field("logprob", _F4, "nats", "drafter's log-probability of truth", null=True),
            _field("rank", _I4, "1", "rank of truth, 0 the best; ties count against it", null=True),
            _field(
                "tv",
                _F4,
                "1",
                "total variation to the measured target at temperature 1",
                null=True,
            ),
            *_attention(_F4),
            *_norms(_F4),
        ],
    ),
    "heads": _schema(
        "heads",
        "one per (cell, prompt, text, mode, depth, head), means over anchors",
        [
            *(_CELL, _PROMPT, _TEXT, _MODE, _DEPTH),
            _field("head", _I2, "index", "query head"),
            _field("n", _I4, "anchors", "anchors in the mean"),
            *_attention(_F4),
        ],
    ),
    "fused": _schema(
        "fused",
        "one per (cell, prompt, text, captured state), means over anchors",
        [
            *(_CELL, _PROMPT, _TEXT),
            _field("layer", _I2, "index", "position among the captured states, ascending"),
            _field("boundary", _I2, "blocks", "residual stream after that many blocks"),
            _field("n", _I4, "anchors", "anchors in the mean"),
            _field("rms_in", _F4, "rms", "captured state"),
            _field("l2_in", _F4, "l2", "captured state"),
            _field("rms_normed", _F4, "rms", "captured state after fusion norm and interventions"),
            _field("rms_part", _F4, "rms", "part_i = W_i N(a)_i"),
            _field("share", _F4, "1", "<part_i, g> / <g, g>; all and fc's bias sum to 1"),
            _field("cosine", _F4, "1", "cosine of part_i and the fused input g"),
            _field("shapley", _F4, "nats", "Shapley value for log p(truth)", null=True),
        ],
    ),
    "prompts": _schema(
        "prompts",
        "one per (prompt, text)",
        [
            _PROMPT,
            _field("category", _S, "name", "category of the prompt set"),
            *(_TEXT, _TEMPERATURE),
            _field("n_prompt", _I4, "tokens", "length of the rendered prompt"),
            _field("n_text", _I4, "tokens", "length of prompt and continuation"),
            _field("n_anchors", _I4, "anchors", "measured anchors"),
            _field("first_token", _I4, "token id", "first token of the prompt", null=True),
            _field("bos", _B, "bool", "the prompt starts with BOS"),
            _field("template_sha", _S, "sha256", "hash of the chat template", null=True),
            _field("loops", _B, "bool", "degenerate looping text"),
            _field("tokens_sha", _S, "sha256", "hash of the text's tokens"),
        ],
    ),
    "cells": _schema(
        "cells",
        "one per cell",
        [
            _CELL,
            _field("variant", _S, "name", "fusion norm + feedback (+ what else was trained)"),
            _field("fusion_norm", _S, "enum", "norm before fc, as trained"),
            _field("feedback", _S, "enum", "what depth d+1 receives, as trained"),
            _field("residual", _S, "enum", "what the attention output is added to"),
            _field("attention_gate", _B, "bool", "gated attention"),
            _field("ttt", _I2, "steps", "unrolled training steps", null=True),
            _field("seed", _I4, "1", "training seed", null=True),
            _field("axis", _S, "trained|applied", "retrained, or toggled on a trained drafter"),
            _field("condition", _S, "name", "applied condition; empty for none"),
            _field("status", _S, "name", "done, or why not"),
            _field("n_parameters", _I8, "1", "all but the embedding's", null=True),
            _field("train_steps", _I4, "steps", "taken; some follow the kept weights", null=True),
            _field("train_tokens", _I8, "tokens", "tokens seen in these steps", null=True),
            _field(
                *("train_loss", _F8, "nats"),
                "what was minimised (the sum over the unrolled depths, weighted decay^k, and any "
                "alignment loss), mean of the last 20 supervised batches up to the kept weights",
                null=True,
            ),
            _field("coverage", _F8, "share", "draft vocabulary's share of the text", null=True),
            _field("train_seconds", _F8, "s", "wall time of training", null=True),
            _field("note", _S, "text", "anything a reader must know", null=True),
        ],
    ),
}

SCHEMAS["depths"] = _schema(
    "depths",
    "one per (cell, prompt, text, mode, depth): steps reduced over the anchors whose chain "
    "reaches the deepest depth of its (cell, prompt, text, mode), so that depths are compared "
    "at fixed anchors",
    [
        *(_CELL, _PROMPT, _TEXT, _TEMPERATURE, _MODE, _DEPTH),
        _field("n", _I4, "anchors", "anchors in the mean"),
        _field("n_correct", _I4, "anchors", "draft equals truth"),
        _field("n_opportunities", _I4, "anchors", "drafts 1..depth-1 all accepted", null=True),
        _field("n_accepted", _I4, "anchors", "drafts 1..depth all accepted", null=True),
        _field("n_in_vocab", _I4, "anchors", "truth is in the draft vocabulary"),
        _field(
            "uniform",
            _F8,
            "probability",
            "1 / (anchor + depth), as if all keys were in sight",
        ),
        _field("logprob", _F8, "nats", "mean over anchors with truth in vocabulary", null=True),
        _field("tv", _F8, "1", "mean total variation to the target at temperature 1", null=True),
        *_attention(_F8),
        *_norms(_F8),
        *(_field(f"log_{n}", _F8, "ln rms", f"mean logarithm of {n}", null=True) for n in LOGGED),
    ],
)

SCHEMAS["explained"] = _schema(
    "explained",
    "one per (cell, prompt, text, depth, measure, part): means over anchors of forced chains; "
    "measures and their units are listed in driftlab.results.explanations.MEASURES",
    [
        *(_CELL, _PROMPT, _TEXT, _DEPTH),
        _field("measure", _S, "name", "what is explained"),
        _field("part", _S, "name", "a captured layer, a region, an input, a site, or a state"),
        _field("n", _I4, "anchors", "anchors in the mean"),
        _field("value", _F8, "see measure", "the mean"),
    ],
)

SCHEMAS["texts"] = _schema(
    "texts",
    "one per (condition, prompt, text): texts of the applied conditions that change them",
    [
        _field("condition", _S, "name", "applied condition"),
        *(SCHEMAS["prompts"].field(i) for i in range(len(SCHEMAS["prompts"]))),
    ],
)
SCHEMAS["agreement"] = _schema(
    "agreement",
    "one per (cell, prompt, text, target layer), means over anchors: the drafter's attention row "
    "at depth 1 beside the target's row at the same position, both averaged over heads and "
    "scaled to sum to 1 over the keys that both can see",
    [
        *(_CELL, _PROMPT, _TEXT),
        _field("layer", _I2, "index", "block of the target; it reads boundary `layer`"),
        _field("n", _I4, "anchors", "anchors in the mean"),
        _field("correlation", _F4, "1", "Pearson's, where 3 keys or more are shared", null=True),
        _field("divergence", _F4, "nats", "Jensen-Shannon divergence; at most ln 2"),
    ],
)
SCHEMAS["shift"] = _schema(
    "shift",
    "one per (cell, prompt, text, place): how far the rounded target's states lie from those of "
    "the unchanged target on the same tokens, and what the condition's drafter fuses of either",
    [
        *(_CELL, _PROMPT, _TEXT),
        _field("place", _S, "name", "fuse.in.{i}, or fuse.out: the fused input"),
        _field("n", _I4, "anchors", "anchors in the mean"),
        _field("rms", _F4, "rms", "of the unchanged target"),
        _field("rms_error", _F4, "rms", "the difference to it"),
        _field("alpha", _F4, "1", "mean of rms_error / rms: the scale of noise()"),
    ],
)

KEYS: dict[str, tuple[str, ...]] = {
    "steps": ("cell", "prompt", "text", "mode", "anchor", "depth"),
    "depths": ("cell", "prompt", "text", "mode", "depth"),
    "heads": ("cell", "prompt", "text", "mode", "depth", "head"),
    "fused": ("cell", "prompt", "text", "layer"),
    "prompts": ("prompt", "text"),
    "cells": ("cell",),
    "explained": ("cell", "prompt", "text", "depth", "measure", "part"),
    "texts": ("condition", "prompt", "text"),
    "agreement": ("cell", "prompt", "text", "layer"),
    "shift": ("cell", "prompt", "text", "place"),
}
"""Columns that name a row; tables are sorted by them and hold each combination once."""

MEASURED = ("steps", "heads", "fused", "agreement", "shift")
"""Tables that :meth:`RunDirectory.write` takes; ``depths`` is derived from ``steps``."""

TABLES = ("steps", "depths", "heads", "fused", "prompts", "cells")
OPTIONAL = ("texts", "agreement", "shift")
"""Tables that a run has only when it has rows for them."""
