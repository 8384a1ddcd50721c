"""Other trainers on the same step, each in a process and an environment of its own.

A peer is any command that speaks lines of JSON: it is told ``{"load": FILE}``, ``{"check": FILE}``
and ``{"step": true}``, and answers ``{"ready": NAME}``, ``{"loss": x}`` and ``{"wall": s,
"busy": s}``. Between its turns it waits for a line and takes no time from others.
FILE is what `torch.save` wrote: a job as `save_job` describes it, and gradients by our names.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from driftlab.bench.timing import Sample
from driftlab.config import TrainSpec
from driftlab.data.features import Batch
from driftlab.errors import ResourceError, first_line
from driftlab.models.drafter import Drafter

_PROTOCOL = "Run its command by hand: driftlab/bench/peers.py tells what it is asked and answers."


PATIENCE = 900.0
"""Seconds that a peer has for one answer."""


def save_job(
    path: Path,
    drafter: Drafter,
    batch: Batch,
    learned: Tensor,
    teacher_head: Tensor,
    spec: TrainSpec,
    *,
    autocast: bool,
) -> None:
    """Write one training step for a peer.

    learned: bool [B, S], positions whose guess bears loss. Row j of a peer is our anchor j: it
    reads token j+1 and guesses j+2. teacher_head: [V, Ht]. ``last`` is after the final norm.
    """
    config = drafter.config
    job = {
        "weights": {k: v for k, v in drafter.state_dict().items() if k != "draft_to_target"},
        "draft_to_target": drafter.draft_to_target,
        "config": {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope.theta,
            "max_position_embeddings": config.rope.max_position,
        },
        "ids": batch.tokens[:, 1:],
        "aux": batch.aux[:, :-1],
        "last": batch.last[:, 1:],
        "mask": torch.cat([learned[:, 2:], torch.zeros(len(learned), 1, dtype=torch.bool)], dim=1),
        "head": teacher_head,
        "depth": spec.ttt,
        "decay": spec.decay,
        "autocast": autocast,
    }
    torch.save(job, path)


class Peer:
    """One running peer. Raises ResourceError when its command fails or says something else."""

    def __init__(self, name: str, command: str, job: Path) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
        except (OSError, ValueError) as error:  # a quotation that does not end
            self._log.close()
            raise ResourceError(
                f"peer {name} does not start", got=error, remedy="Make it with `make bench-peers`."
            ) from None
        self._ask(load=str(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        """It ends when nothing more is to be said to it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def check(self, path: Path) -> tuple[float, Mapping[str, Tensor]]:
        """The peer's loss and its gradients, by our parameters' names."""
        (loss,) = self._ask("loss", check=str(path))
        try:
            found = torch.load(path, weights_only=True)
        except Exception as error:  # of a file that is not torch's, torch raises many kinds
            raise ResourceError(
                f"peer {self.name} wrote no gradients", got=first_line(error), remedy=_PROTOCOL
            ) from None
        return loss, found

    def step(self) -> Sample:
        """One step of loss and gradients, timed by the peer itself."""
        wall, busy = self._ask("wall", "busy", step=True)
        if min(wall, busy) <= 0:
            raise ResourceError(
                f"peer {self.name} took no time", got=f"{wall}, {busy}", remedy=_PROTOCOL
            )
        return Sample(wall, busy)

    def _ask(self, *wanted: str, **what: Any) -> list[float]:
        """Send one line; the numbers ``wanted`` of the line that comes back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                raise TimeoutError
            found = json.loads(line := self._process.stdout.readline())
            numbers = [float(found[name]) for name in wanted]
            if not all(map(math.isfinite, numbers)):
                raise ValueError
            return numbers
        except (ValueError, KeyError, TypeError, BrokenPipeError, TimeoutError) as error:
            waited = f"no answer in {PATIENCE:g} s" if isinstance(error, TimeoutError) else ""
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            self._process.kill()
            self._end()
            raise ResourceError(
                f"peer {self.name} failed at {next(iter(what))}",
                got=next(filter(None, (waited, *said[-1:], line.strip()[:100])), "no message"),
                remedy=_PROTOCOL,
            ) from None


def disagreement(
    ours: tuple[float, Mapping[str, Tensor]], theirs: tuple[float, Mapping[str, Tensor]]
) -> float:
    """Largest relative difference: of the losses, and of each gradient in L2.

    Raises ResourceError when the peer has other gradients than ours, or such as are not finite.
    """
    own, found = ours[1], theirs[1]
    if not isinstance(found, dict):
        raise ResourceError(
            "a peer's gradients have no names", got=type(found).__name__, remedy=_PROTOCOL
        )
    sizes = [{n: getattr(g, "shape", None) for n, g in each.items()} for each in (own, found)]
    if sizes[0] != sizes[1]:
        other = [str(n) for n in {**own, **found} if sizes[0].get(n) != sizes[1].get(n)]
        raise ResourceError("a peer learns other parameters", got=other[:4], remedy=_PROTOCOL)
    apart = [abs(ours[0] - theirs[0]) / abs(ours[0])]
    apart += [float((found[n] - g).norm() / g.norm()) for n, g in own.items()]
    if not all(map(math.isfinite, apart)):
        raise ResourceError("a peer's gradients are not finite", remedy=_PROTOCOL)
    return max(apart)
