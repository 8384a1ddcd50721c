"""The list of mutations fits the code; `make mutation` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "reliability"))

import mutations


def test_every_mutation_has_its_place_and_its_tests() -> None:
    listed = mutations.mutations()
    assert mutations.misfits(listed) == []
    assert len(listed) >= 30
    assert len({m["what"] for m in listed}) == len(listed)
    assert all(m["tests"] and m["old"] != m["new"] for m in listed)
