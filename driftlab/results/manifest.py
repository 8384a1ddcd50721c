"""What a run's manifest.json holds, read and checked: a person may have edited it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from driftlab.config import Sourced
from driftlab.errors import RunError, first_fault
from driftlab.files import refuse_irregular


class _Part(BaseModel):
    """Named values have these types; others may stand beside them."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Stage(_Part):
    seconds: float
    peak_mib: float


class _Table(_Part):
    sha256: str
    rows: int = 0


class _Choice(_Part):
    index: int
    text: str
    gap: float
    within_rounding: bool


class _Precision(_Part):
    dtype: str
    positions: int
    ties: int
    not_compared: str | None = None
    largest_logit_difference: float | None = None
    other_choices: int | None = None
    first_other_choice: _Choice | None = None

    @model_validator(mode="after")
    def _is_compared(self) -> Self:
        known = self.largest_logit_difference, self.other_choices
        if self.dtype != "float32" and not self.not_compared and None in known:
            raise ValueError("says neither how far from float32 it is nor why that is unknown")
        return self


class _Merged(_Part):
    name: str
    command: str | None
    cells: list[str]


class _Registered(_Part):
    analysis: dict[str, Any]
    rows: bool


class _Resumed(_Part):
    time: str
    versions: dict[str, str] = {}
    git: dict[str, Any] | None = None


class _Measure(_Part):
    bootstrap: int = 0


class _Drafter(_Part):
    windows: list[int | None] | None = None
    num_layers: int | None = None


class _Config(_Part):
    name: str | None = None
    question: str | None = None
    measure: _Measure | None = None
    applied: dict[str, Any] | None = None
    analysis: dict[str, Any] | None = None
    axes: dict[str, list[Any]] | None = None
    drafter: _Drafter | list[_Drafter] | None = None  # of drafters side by side
    interventions: dict[str, list[dict[str, Any]]] | None = None


class _Manifest(_Part):
    name: str = ""
    question: str = ""
    command: str | None = None
    created: str = ""
    finished: str = ""
    resumed: list[_Resumed | str] = []  # in older runs a time alone
    config: _Config | None = None
    config_hash: str = ""
    versions: dict[str, str] = {}
    git: dict[str, Any] | None = None
    hardware: dict[str, Any] = {}
    stages: dict[str, _Stage] = {}
    inputs: dict[str, str | dict[str, str]] = {}
    assumed: dict[str, Sourced] = {}
    resolved: dict[str, Sourced] = {}
    coverage: float | None = None
    supervised: float | None = None
    tables: dict[str, _Table] = {}
    table: _Table | None = None  # of an explanation
    warnings: list[str] = []
    differs: list[str] = []
    precision: _Precision | None = None
    registered: _Registered | None = None
    drafters: dict[str, Any] | None = None
    conditions: dict[str, dict[str, Any]] | None = None
    merged: list[_Merged] | None = None
    owners: list[str] = []
    reduced: str | None = None


def read_manifest(
    file: Path, remedy: str = "Restore it, or start the run in another folder."
) -> dict[str, Any]:
    """The manifest in ``file``, as it stands there.

    Raises RunError when it cannot be read, or holds a value of another type than runs write.
    """
    refuse_irregular(file, RunError)
    try:
        text = file.read_text(encoding="utf-8")
        manifest: dict[str, Any] = json.loads(text)
        _Manifest.model_validate_json(text)
    except ValidationError as error:
        raise RunError(
            f"{file} is damaged: {first_fault(error)}",
            got=f"{error.errors()[0]['input']!r:.60}",
            remedy=remedy,
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read", got=error, remedy=remedy) from None
    return manifest
