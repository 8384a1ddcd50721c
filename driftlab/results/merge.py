"""What a run is known by, and several runs of one kind made into one."""

from __future__ import annotations

from typing import Any

from driftlab.config import Experiment

_UNMOVED = ("question", "base", "analysis", "workers")


def identity(experiment: Experiment) -> dict[str, Any]:
    """The settings that rows depend on. A run may be resumed with others changed.

    Settings that were added later are left out while they are off, so that runs which were begun
    before can be resumed.
    """
    config = experiment.model_dump(
        mode="json",
        exclude={
            **dict.fromkeys(_UNMOVED, True),
            "train": {"checkpoint_every"},
            "measure": {"bootstrap"},
            "applied": {"drafters"},
        },
    )
    off: dict[tuple[str, str], Any] = {("train", "alignment"): 0.0, ("train", "align_layer"): None}
    off |= {("measure", "agreement"): False, ("axes", "alignment"): []}
    for (table, name), value in off.items():
        if config[table][name] == value:
            del config[table][name]
    if experiment.applied is None:
        del config["applied"]
    return config
