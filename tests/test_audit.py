"""What the dependency audit makes of pip-audit's answers, and of none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "reliability"))

import audit


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


SOUND = {"name": "a", "version": "1.0", "vulns": []}
FAULTY = {
    "name": "b",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"], "aliases": [], "description": ""}],
}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


def test_faults_are_named_with_their_mend(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.judged(answer(SOUND, FAULTY, UNKNOWN), "") == (
        "",
        ["b 2.0: PYSEC-1, mended in 2.1"],
    )
    assert capsys.readouterr().out == "2 pins looked up, 1 not known to the index\n"
    assert audit.judged(answer(SOUND), "") == ("", [])


def test_no_answer_is_no_clean_bill() -> None:
    """A mirror that knows no pin gives a list without faults, too."""
    why, faults = audit.judged(answer(UNKNOWN, UNKNOWN), "No known vulnerabilities found")
    assert why == "the index has no list of faults for any of 2 pins" and not faults
    why, faults = audit.judged("", "a\nERROR: could not connect\n")
    assert why == "ERROR: could not connect" and not faults


@pytest.mark.parametrize("words, code", [([], 0), (["--must"], 2)])
def test_no_answer_fails_only_where_one_is_demanded(
    words: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit.py", *words])
    monkeypatch.setattr(audit, "prepared", lambda: "no index")
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == code
    assert "NOT AUDITED: the data is not at hand (no index)" in capsys.readouterr().out
