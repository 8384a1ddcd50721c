"""What a reader must be told before he believes a number, found in the tables alone."""

from __future__ import annotations

from driftlab.results.records import Tables

ROUNDS = 50
"""So many rounds without one accepted draft are no accident."""

CHECKLIST = (
    "is it a drafter of this very target (fine-tune, quantisation, adapter)?",
    "are the captured boundaries the trained ones?",
    "did every fusion norm of the training reach the file?",
    "does the vocabulary map belong to this head?",
    "is the text rendered with the template of the training?",
)


def misconfigured(rounds: int, accepted: int, *, who: str = "the drafter") -> str | None:
    """A hint when none of more than ``ROUNDS`` rounds accepted a draft; None otherwise."""
    if accepted or rounds <= ROUNDS:
        return None
    return (
        f"{who} accepted no draft in {rounds} rounds: likely misconfigured. {' '.join(CHECKLIST)} "
        "driftlab doctor looks for the cause"
    )


def hints(tables: Tables) -> list[str]:
    """One line for each unchanged drafter whose free chains never had a draft accepted."""
    plain = set(tables.cells.loc[tables.cells["condition"] == "", "cell"])
    depths = tables.depths
    first = depths[(depths["mode"] == "free") & (depths["depth"] == 1)]
    first = first[first["cell"].isin(plain)]
    found = []
    for cell, rows in first.groupby("cell", sort=True):
        said = misconfigured(int(rows["n"].sum()), int(rows["n_accepted"].sum()), who=str(cell))
        if said is not None:
            found.append(said)
    return found
