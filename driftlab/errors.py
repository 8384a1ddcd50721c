"""One base error and a few kinds. Each says what is wrong, what was found and what to do."""

from __future__ import annotations


class DriftlabError(Exception):
    """Base of every error that driftlab raises on purpose.

    Parameters
    ----------
    what: the fault in one clause, naming the file, tensor, field or site.
    got: the value that was found, when there is one to show.
    remedy: what the user can do about it.

    The command line prints two lines (cause, remedy) and exits with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, what: str, *, got: object = None, remedy: str | None = None) -> None:
        self.what, self.got, self.remedy = what, got, remedy
        super().__init__(self.cause if remedy is None else f"{self.cause}\n{remedy}")

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


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line of at most 300 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch says in plain RuntimeErrors on a CPU."""
    said = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


class ConfigError(DriftlabError):
    """A setting or experiment file that cannot be used."""


class CheckpointError(DriftlabError):
    """A model file that is missing, damaged, or not what it says."""


class ContractError(DriftlabError):
    """A target and a drafter that do not belong together."""


class SiteError(DriftlabError):
    """A site that does not exist, or that did not fire."""


class DataError(DriftlabError):
    """Prompts or texts that cannot be used."""


class RunError(DriftlabError):
    """A run directory that is not what the command needs."""


class ResourceError(DriftlabError):
    """Too little disk or memory."""


class NumericsError(DriftlabError):
    """NaN or infinity where a number was expected."""


class AssumptionError(DriftlabError):
    """A value had to be assumed, and ``--strict`` forbids it."""
