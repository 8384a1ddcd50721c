"""How far a target in half precision is from the same weights computed in float32, on a sample.

Rounding moves logits, and where the two best are close it moves the choice: greedy text, and with
it acceptance, may then differ from float32 without any fault. A run says where and by how much.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from driftlab.data.text import Text
from driftlab.errors import ContractError, ResourceError, first_line
from driftlab.models.memory import free_bytes, size
from driftlab.models.target import Target

SAMPLE = 4  # texts
ROUNDING = 32  # gaps up to so many units in the last place of the largest logit are rounding


def against_float32(
    target: Target, texts: Sequence[Text], boundaries: Sequence[int]
) -> dict[str, Any]:
    """What the manifest holds under ``precision``.

    dtype, texts, positions, and ``ties``: positions whose two best logits are equal. For a target
    in half precision also ``largest_logit_difference``; ``states_difference`` (relative, RMS, by
    boundary); ``other_choices``: positions whose best token differs from float32's; and
    ``first_other_choice``: text, index in it, both tokens, the gap of float32's two best logits,
    and whether that gap is within rounding. ``not_compared`` says why nothing was compared.
    """
    sample = [t for t in texts if len(t.tokens) > 1][:SAMPLE]
    name = str(target.dtype).removeprefix("torch.")
    found: dict[str, Any] = {"dtype": name, "texts": len(sample), "positions": 0, "ties": 0}
    exact = None
    if target.dtype != torch.float32:
        need = 4 * sum(p.numel() for p in target.model.parameters())
        free = free_bytes()
        if getattr(target.model, "hf_device_map", None) is not None:
            found["not_compared"] = "the target is placed over devices"
        elif target.device.type == "cpu" and free is not None and need > free:
            found["not_compared"] = f"a copy in float32 needs {size(need)}, {size(free)} are free"
        else:
            try:
                copied = copy.deepcopy(target.model).float()
                exact = Target.from_model(copied, name=target.name, eos_ids=sorted(target.eos_ids))
            except (ContractError, ResourceError, RuntimeError, ValueError, TypeError) as error:
                found["not_compared"] = first_line(error)  # no memory, quantised weights
    if exact is not None:
        found |= {"largest_logit_difference": 0.0, "other_choices": 0, "first_other_choice": None}
    apart = [[0.0, 0.0] for _ in boundaries]
    for text in sample:
        ids, n = torch.tensor([text.tokens]), torch.tensor([len(text.tokens)])
        own = target.forward(ids, n, boundaries)
        assert own.logits is not None  # asked for by default
        logits = own.logits[0].float().cpu()
        best = logits.amax(-1, keepdim=True)
        found["positions"] += len(text.tokens)
        found["ties"] += int(((logits == best).sum(-1) > 1).sum())
        if exact is None:
            continue
        true = exact.forward(ids, n, boundaries)
        assert true.logits is not None
        want = true.logits[0].cpu()
        difference = float((logits - want).abs().max())
        found["largest_logit_difference"] = max(found["largest_logit_difference"], difference)
        for k, (a, b) in enumerate(
            zip(
                own.aux[0].float().cpu().split(target.hidden_size, -1),
                true.aux[0].cpu().split(target.hidden_size, -1),
                strict=True,
            )
        ):
            apart[k][0] += float((a - b).double().square().sum())
            apart[k][1] += float(b.double().square().sum())
        other = (logits.argmax(-1) != want.argmax(-1)).nonzero()[:, 0].tolist()
        found["other_choices"] += len(other)
        if other and found["first_other_choice"] is None:
            top = want[other[0]].topk(2).values
            gap = float(top[0] - top[1])
            unit = torch.finfo(target.dtype).eps * float(want[other[0]].abs().max())
            found["first_other_choice"] = {
                "text": text.prompt_id,
                "index": other[0],
                "token": int(logits[other[0]].argmax()),
                "token_float32": int(want[other[0]].argmax()),
                "gap": gap,
                "within_rounding": gap <= ROUNDING * unit,
            }
    if exact is not None:
        found["states_difference"] = {
            str(b): (a / max(z, 1e-30)) ** 0.5 for b, (a, z) in zip(boundaries, apart, strict=True)
        }
    return found
