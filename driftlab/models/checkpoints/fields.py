"""Typed reading of a config, and the ledger of where every resolved value came from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from driftlab.config import Origin, Provenance, Sourced
from driftlab.errors import CheckpointError

_KINDS: dict[type, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
}


class Fields:
    """A dictionary of a config file. A null counts as absent, a wrong type as an error.

    ``defaults`` are values that the format itself defines for absent keys, ``default_of``
    says whose they are.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str,
        *,
        defaults: Mapping[str, Any] | None = None,
        default_of: str = "",
    ) -> None:
        self.data, self.where = data, where
        self.defaults, self.default_of = defaults or {}, default_of

    def child(self, name: str) -> Fields:
        value = self.data.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {name} is no object", got=repr(value))
        return Fields(value or {}, f"{self.where}: {name}")

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str, kind: type) -> Sourced | None:
        """The value (read, or the format's default), or None when it is absent."""
        value, origin, where = self.data.get(name), Origin.read, f"{self.where}, {name}"
        if value is None:
            value, origin = self.defaults.get(name), Origin.derived
            where = f"{name} is absent, default of {self.default_of}"
        if value is None:
            return None
        right = isinstance(value, _KINDS[kind]) and (kind is bool or not isinstance(value, bool))
        if not right:
            raise CheckpointError(
                f"{self.where}: {name} has the wrong type", got=f"{value!r}, not {kind.__name__}"
            )
        # An integer of JSON may be larger than any float.
        if kind is float and not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{self.where}: {name} is no finite number", got=value)
        return Sourced(value=value, origin=origin, where=where)

    def need(self, name: str, kind: type) -> Sourced:
        found = self.get(name, kind)
        if found is None:
            raise CheckpointError(
                f"{self.where}: {name} is missing", remedy=f"Add {name} to the config."
            )
        return found

    def positive(self, name: str, *, default: int | None = None, why: str = "") -> Sourced:
        """An integer above zero; ``default`` is assumed when the config has none."""
        found = self.get(name, int)
        if found is None and default is not None:
            return Sourced(value=default, origin=Origin.assumed, where=f"{name} is absent, {why}")
        found = found or self.need(name, int)
        if found.value <= 0:
            raise CheckpointError(f"{self.where}: {name} must be above 0", got=found.value)
        return found


class Ledger:
    """Resolved values by name, with origins, notes and contradictions of one file.

    A value that the caller overrides is taken as read, whatever the file says.
    """

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self.overrides = dict(overrides)
        self.provenance: Provenance = {}
        self.notes: list[str] = []
        self.conflicts: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self.provenance[name].value

    def overridden(self, name: str) -> bool:
        return name in self.overrides

    def put(self, name: str, value: Any, origin: Origin, where: str) -> Any:
        if name in self.overrides:
            value, origin, where = self.overrides[name], Origin.read, "overrides"
        self.provenance[name] = Sourced(value=value, origin=origin, where=where)
        return value

    def take(self, name: str, found: Sourced) -> Any:
        return self.put(name, found.value, found.origin, found.where)

    def derived(self, name: str, value: Any, where: str) -> Any:
        return self.put(name, value, Origin.derived, where)

    def assumed(self, name: str, value: Any, where: str) -> Any:
        return self.put(name, value, Origin.assumed, where)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def conflict(self, text: str) -> None:
        """The file contradicts itself: a note, and an error under ``strict``."""
        self.notes.append(text)
        self.conflicts.append(text)
