"""Files that others name: which of them may be opened, their JSON, and the hash of one."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from driftlab.errors import DriftlabError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def refuse_irregular(path: Path, kind: type[DriftlabError]) -> None:
    """Raise ``kind`` when ``path`` is there and is no regular file.

    A pipe would be waited for and a device may never end. A path that is not there, or may not be
    looked at, is left to whoever opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise kind(
            f"{path} is no regular file",
            got=next((word for of, word in _KINDS if of(mode)), None),
            remedy="Give a file; what comes out of a pipe must be saved to one first.",
        )


def refuse_file_above(path: Path, kind: type[DriftlabError]) -> None:
    """Raise ``kind`` when ``path``, which is to be a folder, is or lies under a file."""
    above = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
    if os.path.lexists(above) and not above.is_dir():
        raise kind(f"{above} is a file", remedy="Give the path of a folder.")


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of a name that stands twice the reader would take the last in silence.

    Raises ValueError where the values of such a name differ.
    """
    found = dict(pairs)
    for name, value in pairs if len(found) < len(pairs) else ():
        if value != found[name]:
            raise ValueError(f"{name!r} stands twice in one object, as {value!r:.40} and otherwise")
    return found


def file_hash(path: Path) -> str:
    """SHA-256 (hex), computed once for each state of the file.

    Raises OSError when it cannot be read or is no regular file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return _hash_of(path, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _hash_of(path: Path, inode: int, size: int, changed: int) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
