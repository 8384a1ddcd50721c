"""The share of a drafter's own length that is left under a condition, and acceptance by length of
the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from driftlab.errors import DataError
from driftlab.results.slices import Group, Slice
from driftlab.results.stats import Sample, ratio

if TYPE_CHECKING:
    import pandas as pd


def unchanged(piece: Slice, group: Group) -> Group | None:
    """The group of the same drafters without a condition, where it was measured."""
    for other in piece.groups:
        if not other.condition and (other.variant, other.ttt) == (group.variant, group.ttt):
            return other
    return None


def own_share(piece: Slice, group: Group) -> Sample:
    """Accepted drafts under the group's condition / those of the same drafters unchanged.

    A ratio of means over (seed, prompt), without the bonus token, as in T3 of arXiv 2605.09992.
    Written as a weighted mean, so that differences between groups are contrasts of means.
    ``piece`` holds free chains.

    Raises DataError when the unchanged drafters were not measured.
    """
    own = unchanged(piece, group)
    if own is None:
        raise DataError(
            f"{group.label} has no unchanged drafter beside it",
            remedy="Measure the same drafters without a condition in the same run.",
        )
    return ratio(piece.accepted_drafts(group), piece.accepted_drafts(own))


def accepted_by_context(steps: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    """Accepted drafts a round by the length of the context: one row a (cell, text, bucket).

    ``steps`` and ``prompts`` are the tables of these names. Free chains are read, those anchors
    whose chain reaches the deepest depth; looping texts are left out unless all of a kind loop.
    Columns: cell, text, low, high (tokens that the drafter has read, low <= n < high, powers of
    two), anchors, accepted.
    """
    import pandas as pd

    fit = prompts[prompts["n_anchors"] > 0]
    fit = fit[~fit["loops"] | fit.groupby("text", observed=True)["loops"].transform("all")]
    kept = pd.MultiIndex.from_frame(fit[["prompt", "text"]].astype(str))
    free = steps[steps["mode"] == "free"]
    free = free[pd.MultiIndex.from_frame(free[["prompt", "text"]].astype(str)).isin(kept)]
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
