"""docs/reports.md names a test for every public report, and every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reports.md"
NUMBERS = {
    *(1, 3, 4, 5, 7, 9, 11, 12, 13, 14, 16, 17, 19, 20, 22, 23, 24, 26, 27, 28, 30, 31),
    *(33, 35, 36, 37, 38, 39, 40, 42, 43, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56),
}


MORE = 9  # threads that are not on the list


def test_every_report_has_tests_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+|[\w.-]+/[\w.-]+#\d+) \|.*\| ([^|]+) \|$", page, re.M)
    listed = [int(name) for name, _ in rows if name.isdigit()]
    assert sorted(listed) == sorted(NUMBERS) and len(NUMBERS) == 43
    assert len({name for name, _ in rows}) == len(rows) == 43 + MORE
    for number, named in rows:
        found = re.findall(r"(test_\w+)::(test_\w+)", named)
        assert len(found) == named.count("::") > 0, number
        for file, name in found:
            source = (TESTS / f"{file}.py").read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.M), f"report {number}: {file}::{name}"
