"""Quantities of their own, as tables for figures: acceptance by depth, and the share of a
drafter's own length that is left under a condition.

Each row is one group (cells that differ by seed only), with its interval; see
:mod:`driftlab.results.stats` for what the interval is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from driftlab.errors import DataError
from driftlab.results.records import Tables
from driftlab.results.slices import Group, Slice, TextKind, modes, take
from driftlab.results.stats import Estimate, Sample, estimate

if TYPE_CHECKING:
    import pandas as pd

_NOTHING = 1e-9  # stands for a length of 0, so that a ratio of means keeps its numerator
_NAMES = ("variant", "fusion_norm", "feedback", "residual", "attention_gate", "ttt", "alignment")


def unchanged(piece: Slice, group: Group) -> Group:
    """The group of the same drafters without a condition.

    Raises DataError when it was not measured.
    """
    for other in piece.groups:
        if not other.condition and (other.variant, other.ttt) == (group.variant, group.ttt):
            return other
    raise DataError(
        f"{group.label} has no unchanged drafter beside it",
        remedy="Measure the same drafters without a condition in the same run.",
    )


def own_share(piece: Slice, group: Group) -> Sample:
    """Accepted drafts under the group's condition / those of the same drafters unchanged.

    A ratio of means over (seed, prompt), without the bonus token, as in T3 of arXiv 2605.09992.
    Written as a weighted mean, so that differences between groups are contrasts of means.
    ``piece`` holds free chains.
    """
    own = piece.accepted_drafts(unchanged(piece, group)).values
    weights = np.maximum(own, _NOTHING)
    return Sample(piece.accepted_drafts(group).values / weights, weights)


def conditional_by_depth(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """Conditional acceptance at every depth (F10): one row a group and depth.

    Columns: label, variant, its switches, ttt, axis, condition, depth, value, low, high, prompts,
    seeds, opportunities (0: n/a, value is NaN), trained (whether TTT reached that depth), text.
    Empty when no free chains were measured.
    """
    import pandas as pd

    if "free" not in modes(tables):
        return pd.DataFrame()
    piece = take(tables, "free", kind)
    rows = []
    for group in piece.groups:
        for depth in piece.index:
            value = estimate(piece.conditional(group, depth), resamples=piece.resamples)
            chances = np.nansum(piece.at(group, "n_opportunities", depth))
            rows.append(
                {
                    **_named(group),
                    "depth": depth,
                    **_numbers(value),
                    "opportunities": int(chances),
                    "trained": None if group.ttt is None else depth <= group.ttt,
                    "text": str(piece.kind),
                }
            )
    return pd.DataFrame(rows)


def shares_of_own_length(tables: Tables, kind: TextKind | None = None) -> pd.DataFrame:
    """What is left of each drafter's own length under each condition (T3): one row a group.

    Columns: label, variant, its switches, ttt, axis, condition, own (accepted drafts unchanged),
    accepted (under the condition), then share = accepted / own as value, low, high, prompts,
    seeds, text. Groups without a condition are left out; empty when there are none.
    """
    import pandas as pd

    if "free" not in modes(tables):
        return pd.DataFrame()
    piece = take(tables, "free", kind)
    rows = []
    for group in piece.groups:
        if group.axis != "applied":
            continue
        share = estimate(own_share(piece, group), resamples=piece.resamples)
        before, after = (
            float(np.nanmean(piece.accepted_drafts(g).values))
            for g in (unchanged(piece, group), group)
        )
        rows.append(
            {
                **_named(group),
                "own": before,
                "accepted": after,
                **_numbers(share),
                "text": str(piece.kind),
            }
        )
    return pd.DataFrame(rows)


def accepted_by_context(steps: pd.DataFrame) -> pd.DataFrame:
    """Accepted drafts a round by the length of the context: one row a (cell, text, bucket).

    ``steps`` is the table of that name; its free chains are read, those anchors whose chain
    reaches the deepest depth. Columns: cell, text, low, high (tokens that the drafter has read,
    low <= n < high, powers of two), anchors, accepted.
    """
    import pandas as pd

    free = steps[steps["mode"] == "free"]
    chain = ["cell", "prompt", "text", "anchor"]
    rounds = free.groupby(chain, sort=True).agg(
        depth=("depth", "max"), accepted=("accepted", "sum")
    )
    if rounds.empty:
        return pd.DataFrame(columns=["cell", "text", "low", "high", "anchors", "accepted"])
    deepest = rounds.groupby("cell")["depth"].transform("max")
    rounds = rounds[rounds["depth"] == deepest].reset_index()
    context = rounds["anchor"].astype(int) + 2  # tokens 0 .. anchor + 1 are known
    rounds["low"] = 2 ** np.floor(np.log2(context)).astype(int)
    grouped = rounds.groupby(["cell", "text", "low"], sort=True)["accepted"]
    found = grouped.agg(anchors="size", accepted=lambda x: x.astype(float).mean()).reset_index()
    found.insert(3, "high", 2 * found["low"])
    return found


def _named(group: Group) -> dict[str, object]:
    named = {name: getattr(group, name) for name in _NAMES}
    return {"label": group.label, **named, "axis": group.axis, "condition": group.condition}


def _numbers(e: Estimate) -> dict[str, object]:
    return {"value": e.value, "low": e.low, "high": e.high, "prompts": e.n, "seeds": e.seeds}
