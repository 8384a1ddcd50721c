"""One base error and a few kinds. Each says what is wrong, what was found and what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class DriftlabError(Exception):
    """Base of every error that driftlab raises on purpose.

    Parameters
    ----------
    what: the fault in one clause, naming the file, tensor, field or site.
    got: the value that was found, when there is one to show.
    remedy: what the user can do about it; what is usual for the kind when nothing better is known.

    The command line prints two lines (cause, remedy) and exits with ``exit_code``.
    """

    exit_code = 2
    usual = "Please report this: it should not happen."

    def __init__(self, what: str, *, got: object = None, remedy: str | None = None) -> None:
        self.what, self.got, self.remedy = what, got, remedy or self.usual
        super().__init__(f"{self.cause}\n{self.remedy}")

    @property
    def cause(self) -> str:
        return self.what if self.got is None else f"{self.what} (got {self.got})"

    def __reduce__(self) -> tuple:
        # Keyword arguments do not survive the default pickling, and errors cross processes.
        return _rebuild, (type(self), self.what, self.got, self.remedy)


def _rebuild(
    kind: type[DriftlabError], what: str, got: object, remedy: str | None
) -> DriftlabError:
    return kind(what, got=got, remedy=remedy)


def wants_traceback() -> bool:
    """Whether DRIFTLAB_TRACEBACK asks to see where an error comes from."""
    return os.environ.get("DRIFTLAB_TRACEBACK", "0") not in ("", "0")


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line of at most 300 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def first_fault(error: ValidationError) -> str:
    """The first value that was refused: its place, if it has one, and why."""
    return faults(error)[0]


def faults(error: ValidationError) -> list[str]:
    """Every value that was refused, without the kind that pydantic puts before our own words."""
    said = []
    for found in error.errors():
        place, why = ".".join(map(str, found["loc"])), found["msg"].removeprefix("Value error, ")
        said.append(f"{place}: {why}" if found["loc"] else why)
    return said


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch says in plain RuntimeErrors on a CPU."""
    words = ("allocate memory", "out of memory", "failed to map segment")  # the last: libraries
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


class ConfigError(DriftlabError):
    """A setting or experiment file that cannot be used."""

    usual = "Correct that setting."


class CheckpointError(DriftlabError):
    """A model file that is missing, damaged, or not what it says."""

    usual = "Correct the file, or fetch it again from its source."


class ContractError(DriftlabError):
    """A target and a drafter that do not belong together."""

    usual = "Give what belongs together: driftlab doctor shows how a drafter is read."


class SiteError(DriftlabError):
    """A site that does not exist, or that did not fire."""

    usual = "Sites are those that driftlab sites lists."


class DataError(DriftlabError):
    """Prompts or texts that cannot be used."""

    usual = "Correct what was given."


class RunError(DriftlabError):
    """A run directory that is not what the command needs."""

    usual = "Give the folder of another run, or make the run again."


class ResourceError(DriftlabError):
    """Too little disk or memory."""

    usual = "Free some, or use a larger machine."


class NumericsError(DriftlabError):
    """NaN or infinity where a number was expected."""

    usual = "Compute in float32; if that is so already, the weights are damaged."


class AssumptionError(DriftlabError):
    """A value had to be assumed, and ``--strict`` forbids it."""

    usual = "State it, or drop --strict."
