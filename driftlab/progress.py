"""How far a long piece of work is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

EVERY = 30.0
"""Seconds between two lines where no terminal shows a bar; shorter work says nothing."""


def progress_bar(title: str, **options: Any) -> tqdm:
    """A bar of tqdm with ``options``; an empty ``title`` shows none."""
    if not title or sys.stderr is None:
        return tqdm(**options, disable=True)
    if sys.stderr.isatty():
        return tqdm(**options, desc=title)
    seldom = dict.fromkeys(("mininterval", "maxinterval", "delay"), EVERY)
    # No time that remains: of a few steps, with the start of workers, it would be wrong by hours.
    line = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}]"
    return tqdm(**options, **seldom, desc=title, bar_format=line, file=_Lines())


class _Lines:
    """stderr, with a line for every state of a bar that would be written over the last one."""

    encoding = "ascii"

    def write(self, text: str) -> None:
        if line := text.strip():
            # Nobody may be reading, and a log's disk may be full: the work itself goes on.
            with suppress(OSError, ValueError):
                print(line, file=sys.stderr)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
