"""Look the pinned packages up in the list of known faults, where that list is at hand.

    python tests/reliability/audit.py [--must]

pip-audit, in an environment of its own, asks the package index for each pin of requirements.lock.
An index that does not answer, or that knows none of the pins (a mirror without that service), is
no audit: this is said, and is an error under ``--must`` only. A known fault is always an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / ".cache" / "audit"
TOOL = "pip-audit==2.10.1"
PATIENCE = 600  # seconds for all pins


def call(words: Sequence[str]) -> tuple[str, str]:
    """(what it printed, what it complained of)."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PATIENCE} s"
    return done.stdout, done.stderr


def installed(python: Path) -> bool:
    """Whether the tool is there; by the exit status, since a warning is no failure."""
    words = [str(python), "-c", "import pip_audit"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def prepared() -> str:
    """Make the environment; "" or why it cannot be made."""
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
    words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TOOL]
    if not installed(python):
        _, complaint = call(words)
        if not installed(python):
            return f"{TOOL} cannot be installed: {last(complaint)}"
    return ""


def last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:200]


def judged(printed: str, complaint: str) -> tuple[str, list[str]]:
    """(why this was no audit or "", known faults as text) of what pip-audit printed as JSON."""
    try:
        packages: list[dict[str, Any]] = json.loads(printed)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return last(complaint), []
    answered = [p for p in packages if "skip_reason" not in p]
    if not answered:
        return f"the index has no list of faults for any of {len(packages)} pins", []
    faults = [
        f"{p['name']} {p['version']}: {fault['id']}, mended in "
        + (", ".join(fault["fix_versions"]) or "no version yet")
        for p in answered
        for fault in p["vulns"]
    ]
    skipped = len(packages) - len(answered)
    print(f"{len(answered)} pins looked up, {skipped} not known to the index")
    return "", faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--must", action="store_true", help="no answer is an error, too")
    asked = parser.parse_args()
    why = prepared()
    faults: list[str] = []
    if not why:
        words = [str(HOME / "bin" / "python"), "-m", "pip_audit", "--disable-pip", "--no-deps"]
        words += ["--requirement", str(ROOT / "requirements.lock"), "--format", "json"]
        words += ["--progress-spinner", "off", "--timeout", "10"]
        why, faults = judged(*call(words))
    if why:
        print(f"NOT AUDITED: the data is not at hand ({why})")
        sys.exit(2 if asked.must else 0)
    print("\n".join(faults) or "no known faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
