"""driftlab: why drafted tokens stop being accepted as a speculative decoder drafts deeper.

``open(target, drafter)`` gives a laboratory for a pair of models, ``load_run(path)`` the tables
and figures of a stored run, ``compare(run, other)`` what differs between two. Importing driftlab
loads no model library; the first call of ``open`` does, the others never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from driftlab.lab import open as open
    from driftlab.results.compare import Comparison, Source
    from driftlab.results.records import RunDirectory
    from driftlab.results.served import ServedComparison

    __version__: str

__all__ = ["__version__", "compare", "load_run", "open"]


def load_run(path: str | Path) -> RunDirectory:
    """A stored run: ``.steps .depths .heads .fused .prompts .cells``, ``.plot``, ``.manifest``.

    Raises RunError when ``path`` holds no run, or one of another version.
    """
    from driftlab.results.records import RunDirectory

    return RunDirectory.open(path)


def compare(
    run: Source, other: Source, *, kind: str | None = None, depth: int | None = None
) -> Comparison | ServedComparison:
    """Two runs (or ``RUN:CELL``) paired; or a run beside a file that a serving engine wrote.

    See :func:`driftlab.results.served.beside`.
    """
    from driftlab.results.served import beside

    return beside(run, other, kind=kind, depth=depth)


def __getattr__(name: str) -> Any:
    if name == "open":
        from driftlab.lab import open as found

        return found
    if name == "__version__":
        from importlib.metadata import version

        return version("driftlab")
    raise AttributeError(f"module 'driftlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
