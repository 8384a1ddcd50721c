"""What a reader must be told before he believes a number, found in the tables alone."""

from __future__ import annotations

from driftlab.results.records import Tables
from driftlab.results.slices import TextKind, setting, text_kinds

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


def all_loop(kind: TextKind, texts: int) -> str:
    """That no text of ``kind`` is fit to measure on."""
    every = f"all {texts} texts run" if texts > 1 else "the one text runs"
    return (
        f"{kind}: {every} in a loop, which flatters every drafter, and none could be left out: "
        "sample (a temperature above 0) or take other prompts"
    )


def hints(tables: Tables) -> list[str]:
    """One line for each kind of text that loops throughout, for texts in which no position counts
    as sink, and for each unchanged drafter whose free chains never had a draft accepted."""
    found = []
    for kind in text_kinds(tables) if len(tables.prompts) else ():
        texts = tables.prompts[tables.prompts["text"].astype(str) == kind.text]
        if len(texts) and texts["loops"].all():
            found.append(all_loop(kind, len(texts)))
    if setting(tables, "config", "measure", "sink") == "auto":
        mass = tables.depths[tables.depths["depth"] == 1].groupby(["cell", "prompt"])["sink"].max()
        if none := int((mass == 0).sum()):
            found.append(
                f'measure.sink = "auto": for {none} of {len(mass)} pairs of drafter and text no '
                "position counts as sink, and their mass on it is 0"
            )
    plain = set(tables.cells.loc[tables.cells["condition"] == "", "cell"])
    depths = tables.depths
    first = depths[(depths["mode"] == "free") & (depths["depth"] == 1)]
    first = first[first["cell"].isin(plain)]
    for cell, rows in first.groupby("cell", sort=True):
        said = misconfigured(int(rows["n"].sum()), int(rows["n_accepted"].sum()), who=str(cell))
        if said is not None:
            found.append(said)
    return found
