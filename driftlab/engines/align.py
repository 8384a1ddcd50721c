"""The drafter's attention beside the target's: how alike they are, and training to make them so.

Both are rows over positions, averaged over heads: the target's row of one layer at position t,
and the drafter's row of anchor t at depth 1, whose query stands at the same position. The
target's rows are stored once for all drafters, without its other T x T maps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from driftlab.analysis.recorder import Columns
from driftlab.data.features import Batch
from driftlab.data.text import Text
from driftlab.errors import DataError
from driftlab.files import refuse_irregular
from driftlab.models.attention import Pattern
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Moment, attach, capture
from driftlab.models.target import Target
from driftlab.progress import progress_bar
from driftlab.results.shards import atomic_file, remove_dead

_TINY = 1e-12
_LEAST_KEYS = 3  # fewer points have no correlation worth the name


@dataclass(frozen=True)
class Rows:
    """Stored rows of a list of texts; see :func:`store_rows`."""

    folder: Path
    layers: tuple[int, ...]

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Text ``index``: positions [T] and rows [L, T, S] in fp32, each summing to 1.

        Keys beyond the layer's window are -1.
        """
        path = self.folder / _name(index)
        refuse_irregular(path, DataError)
        try:
            held = load_file(path)
            with safe_open(path, framework="pt") as file:
                place = (file.metadata() or {}).get("place")
        except Exception as error:  # safetensors raises its own and the system's errors
            raise DataError(
                f"attention rows in {path} cannot be read",
                got=error,
                remedy="Delete the file and run the same command again.",
            ) from None
        if place != _place(path):
            raise DataError(
                f"attention rows in {path} are those of another text",
                got=place,
                remedy="Delete the file and run the same command again.",
            )
        return held["positions"], held["rows"].float()


def store_rows(
    target: Target,
    texts: Sequence[Text],
    root: Path,
    *,
    layers: Sequence[int],
    positions: Sequence[Tensor] | None = None,
    progress: str = "",
) -> Rows:
    """Head-averaged rows of ``layers`` at ``positions`` of each text (None: all), in fp16.

    A row is divided by its mass on real keys, so that a learned sink logit drops out. Finished
    files are kept; the folder's name hashes target, layers, texts and positions.
    """
    digest = sha256(json.dumps([target.fingerprint, list(layers)]).encode())
    wanted = positions or [torch.arange(len(text.tokens)) for text in texts]
    for text, at in zip(texts, wanted, strict=True):
        digest.update(f"{text.tokens_sha} {at.tolist()}".encode())
    folder = root / digest.hexdigest()[:32]
    found = Rows(folder, tuple(layers))
    remove_dead(folder)
    todo = [i for i in range(len(texts)) if not (folder / _name(i)).exists()]
    for i in progress_bar(progress, iterable=todo, unit="text"):
        kept: dict[int, Tensor] = {}
        at = wanted[i]

        def keep(pattern: Pattern, at: Tensor = at, kept: dict[int, Tensor] = kept) -> None:
            rows = pattern.weights[0][:, at.to(pattern.weights.device)].mean(dim=0).cpu()
            rows = rows / rows.sum(dim=-1, keepdim=True).clamp(min=_TINY)
            past = torch.arange(rows.shape[-1]) <= at[:, None]
            rows[past & ~pattern.reach[0].cpu()[at]] = -1
            kept[pattern.layer] = rows

        tokens = torch.tensor([texts[i].tokens])
        target.attention(tokens, torch.tensor([tokens.shape[1]]), keep, layers=layers)
        rows = torch.stack([kept[layer] for layer in layers]).half()
        path = folder / _name(i)
        with atomic_file(path) as file:
            held = {"positions": at.clone(), "rows": rows}
            file.write(save(held, metadata={"place": _place(path)}))
    return found


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _name(index: int) -> str:
    return f"{index:06d}.safetensors"


# --- how alike they are -------------------------------------------------------------------------


def agreement(drafter: Drafter, text: Text, aux: Tensor, rows: tuple[Tensor, Tensor]) -> Columns:
    """One row a stored layer: means over positions of correlation and divergence.

    ``aux`` [S, A*Ht]. The shared keys of position t are 0..t, less those out of the target's
    reach. Correlation needs three keys and rows that vary.
    """
    positions, target_rows = rows
    tokens = torch.tensor([text.tokens])
    with torch.inference_mode(), capture(drafter, "attn.pattern", depths=[1]) as seen:
        memory = drafter.new_memory()
        drafter.step(tokens[:, 1:], drafter.fuse(aux[None, :-1]), memory, depth=1)
        own = seen["attn.pattern", 1][0].float().mean(dim=0)  # [S-1, S-1]
    found = np.array(
        [
            _alike(own[t, : t + 1], target_rows[:, i, : t + 1])
            for i, t in enumerate(positions.tolist())
        ]
    )  # [T, 2, L]
    with np.errstate(invalid="ignore"):
        means = np.ma.masked_invalid(found).mean(axis=0)
    return {
        "n": np.full(found.shape[2], len(found)),
        "correlation": means[0],
        "divergence": means[1],
    }


def _alike(own: Tensor, rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Correlation and Jensen-Shannon divergence (nats) of ``own`` [K] with each of rows [L, K]."""
    reach = rows >= 0
    p, q = (torch.where(reach, x.double(), 0) for x in (own, rows))
    p, q = (x / x.sum(dim=-1, keepdim=True).clamp(min=_TINY) for x in (p, q))
    middle = (p + q) / 2
    js = 0.5 * (torch.xlogy(p, p) - torch.xlogy(p, middle)).sum(-1)
    js = js + 0.5 * (torch.xlogy(q, q) - torch.xlogy(q, middle)).sum(-1)
    count = reach.sum(dim=-1, keepdim=True)
    a, b = (torch.where(reach, x - x.sum(dim=-1, keepdim=True) / count, 0) for x in (p, q))
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    known = (scale > _TINY) & (count[:, 0] >= _LEAST_KEYS)
    r = torch.where(known, (a * b).sum(-1) / scale.clamp(min=_TINY), torch.nan)
    return r.numpy(), js.clamp(min=0).numpy()


# --- training for it ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Alignment:
    """An attention-alignment loss: KL(target's row || drafter's row) at depth 1.

    ``rows`` holds one layer at all positions of the texts that are learned from. The loss is
    ``weight`` x the mean over the anchors that training supervises.
    """

    rows: Rows
    weight: float

    def add(
        self, loss: Callable[[], tuple[Tensor, int]], drafter: Drafter, batch: Batch
    ) -> tuple[Tensor, int]:
        """``loss()`` with this loss added; ``loss`` runs the drafter on ``batch``."""
        blocks: list[Tensor] = []
        anchors: list[Tensor] = []

        def keep(pattern: Tensor, moment: Moment) -> None:
            blocks.append(pattern.float().mean(dim=1))  # [B, rows, K]
            anchors.append(moment.anchors)

        with attach(drafter, "attn.pattern", keep, depths=[1]):
            total, counted = loss()
        if not counted:
            return total, counted
        terms: list[Tensor] = []
        for b, text in enumerate(batch.rows):
            _, stored = self.rows.item(text)
            wanted = stored[0].clamp(min=0).to(total.device)  # [S, S]
            first, last = int(batch.prompt_lens[b]) - 2, int(batch.lengths[b]) - 2
            for pattern, at in zip(blocks, anchors, strict=True):
                inside = (at >= first) & (at <= last)
                if bool(inside.any()):
                    keys = pattern.shape[-1]
                    p = wanted[at[inside], :keys]
                    q = pattern[b, inside].clamp(min=_TINY)
                    p = torch.nn.functional.pad(p, (0, keys - p.shape[-1]))
                    terms.append((torch.xlogy(p, p) - p * q.log()).sum(-1))
        if not terms:
            return total, counted
        return total + self.weight * torch.cat(terms).mean(), counted
