"""A training that one process or several do; run as a file, it is one of several."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from driftlab.config import DrafterConfig, FusionNorm, TrainSpec
from driftlab.data.features import FeatureStore
from driftlab.engines.distributed import ALONE, Ranks
from driftlab.engines.train import TrainResult, initialise, train
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Frozen

FROZEN = "frozen.safetensors"
SPEC = TrainSpec(ttt=3, steps=5, batch=4, max_length=20, lr=1e-2, checkpoint_every=2)


def initial(folder: Path) -> Drafter:
    """The drafter before it has learned anything."""
    config = DrafterConfig(
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=40,
        draft_vocab_size=40,
        boundaries=(0, 1),
        fusion_norm=FusionNorm.per_layer,
    )
    return initialise(config, Frozen(folder / FROZEN), None, seed=0, head_init=1.0)


def learn(folder: Path, key: str, ranks: Ranks = ALONE) -> tuple[Drafter, TrainResult]:
    drafter, teacher = initial(folder), Frozen(folder / FROZEN)
    corpus = FeatureStore(folder / "states").open(key)
    checkpoint = folder / f"of-{ranks.size}.pt"
    done = train(drafter, corpus, teacher, SPEC, seed=0, checkpoint=checkpoint, ranks=ranks)
    return drafter, done


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, ranks = Path(sys.argv[1]), Ranks.joined()
    drafter, done = learn(place, sys.argv[2], ranks)
    torch.save((drafter.state_dict(), done.losses, ranks.size), place / f"rank-{ranks.rank}.pt")
    torch.distributed.destroy_process_group()
