"""Drafter files: every public dialect in, driftlab's own layout and the engines' out."""

from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.load import inspect, load_drafter
from driftlab.models.checkpoints.native import stated_config
from driftlab.models.checkpoints.resolve import Resolved
from driftlab.models.checkpoints.write import refuse_occupied, save_drafter

__all__ = [
    "Dialect",
    "Resolved",
    "inspect",
    "load_drafter",
    "refuse_occupied",
    "save_drafter",
    "stated_config",
]
