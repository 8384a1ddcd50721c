"""Drafter files: every public dialect in, driftlab's own layout and the engines' out."""

from driftlab.models.checkpoints.load import load_drafter
from driftlab.models.checkpoints.write import save_drafter

__all__ = ["load_drafter", "save_drafter"]
