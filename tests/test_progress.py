"""How far a long piece of work is, where no terminal shows a bar."""

from __future__ import annotations

import io
import sys
import time

import pytest

from driftlab import progress
from driftlab.progress import progress_bar


class Full(io.StringIO):
    """A log on a full disk, or one that nobody reads any more."""

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def worked(title: str, steps: int = 5) -> None:
    with progress_bar(title, total=steps, unit="step") as bar:
        for _ in range(steps):
            time.sleep(0.02)
            bar.update(1)


def test_a_log_gets_lines_and_short_work_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    worked("short")
    assert log.getvalue() == ""
    monkeypatch.setattr(progress, "EVERY", 0.03)
    worked("long")
    lines = log.getvalue().splitlines()
    assert 2 <= len(lines) <= 5
    assert all(line.startswith("long: ") for line in lines)
    assert "5/5" in lines[-1] and "\r" not in log.getvalue()
    worked("")
    assert log.getvalue().splitlines() == lines


@pytest.mark.parametrize("stderr", [Full(), None])
def test_work_goes_on_where_nothing_can_be_said(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "EVERY", 0.03)
    worked("long")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    worked("long")
    assert terminal.getvalue().count("\r") >= 2
