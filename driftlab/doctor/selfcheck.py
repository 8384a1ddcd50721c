"""Checks that need no alternative: does the pair compute what an EAGLE-3 drafter should?"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlab.config import DrafterConfig
from driftlab.data.text import Text
from driftlab.doctor.scoring import Score
from driftlab.engines.anchors import unroll
from driftlab.engines.habitat import SAME_TARGET, STATES
from driftlab.models.checkpoints.shapes import expected_shapes
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import attach, capture
from driftlab.models.target import Target
from driftlab.results.hints import CHECKLIST

LENGTH, DEPTH = 24, 3
COVERAGE = 0.5  # a draft vocabulary that misses half of the text is not this target's


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


def self_checks(target: Target, drafter: Drafter, texts: Sequence[Text]) -> list[Check]:
    """All checks, in the order in which a reader wants them.

    Raises ContractError when the target's own states do not make its logits, and what
    ``Target.forward`` raises.
    """
    text = max(texts, key=lambda t: len(t.tokens))
    size = min(LENGTH, len(text.tokens))
    found = [_finite(drafter), _shapes(drafter)]
    if not all(check.ok for check in found):
        return found  # nothing that is computed from such tensors means anything
    tokens = torch.tensor([text.tokens[:size]])
    target.self_check(text.tokens[:size])
    out = target.forward(tokens, torch.tensor([size]), drafter.config.boundaries, logits=False)
    aux = (out.aux if drafter.config.boundaries else out.last).to(drafter.norm.weight)
    tokens = tokens.to(aux.device)
    with torch.no_grad():
        found += [
            _boundaries(target, drafter.config),
            _final_norm(drafter, tokens, aux),
            _causal(drafter, tokens, aux),
            _pattern(drafter, tokens, aux),
            _vocabulary(drafter, texts),
            _head_rows(target, drafter),
            _embedding(target, drafter),
            _context(drafter, texts),
            _device(drafter, tokens, aux),
        ]
    return found


def drafts(score: Score, drafter: Drafter, texts: Sequence[Text]) -> Check:
    """Depth-1 acceptance against always drafting the text's most frequent token."""
    counts = Counter(t for text in texts for t in text.continuation)
    reachable = drafter.target_to_draft >= 0
    best = max((n for t, n in counts.items() if _within(reachable, t)), default=0)
    constant = best / sum(counts.values())
    first = score.acceptance[0]
    ok = first > constant
    detail = f"depth 1 accepts {first:.3f}; always the commonest token: {constant:.3f}"
    if not ok:
        detail += "; likely misconfigured: " + " ".join(CHECKLIST)
    return Check("drafts better than a constant", ok, detail)


def states_of_training(drafter: Drafter, differs: Sequence[str]) -> Check:
    """Captured states against the statistics that the training stored in the file."""
    name = "states as in the training"
    if STATES not in drafter.provenance:
        return Check(name, True, "n/a: the file holds no statistics of them")
    unlike = [line for line in differs if line.startswith("states of boundary")]
    ok = all(SAME_TARGET in line for line in unlike)  # other texts are no fault of the pair
    return Check(name, ok, "; ".join(unlike) or "means and deviations agree")


def _within(reachable: Tensor, token: int) -> bool:
    return token < len(reachable) and bool(reachable[token])


def _finite(drafter: Drafter) -> Check:
    bad = [n for n, t in drafter.named_parameters() if not bool(torch.isfinite(t).all())]
    count = sum(1 for _ in drafter.parameters())
    return Check("tensors finite", not bad, ", ".join(bad[:6]) or f"all {count}")


def _shapes(drafter: Drafter) -> Check:
    fields = {name: getattr(drafter.config, name) for name in DrafterConfig.model_fields}
    want = dict(expected_shapes(fields, len(drafter.config.boundaries)))
    have = {name: tuple(t.shape) for name, t in drafter.named_parameters()}
    odd = sorted(n for n in have.keys() | want.keys() if have.get(n) != want.get(n))
    listed = "; ".join(f"{n} {have.get(n)}, expected {want.get(n)}" for n in odd[:4])
    return Check("shapes", not odd, listed or "every tensor fits the contract")


def _boundaries(target: Target, config: DrafterConfig) -> Check:
    ids = config.boundaries
    detail = (
        f"{ids} of 0..{target.n_layers}; the target's logits follow from boundary "
        f"{target.n_layers} and from its last state"
    )
    return Check("boundaries capture what the target makes", True, detail)


def _final_norm(drafter: Drafter, tokens: Tensor, aux: Tensor) -> Check:
    """The head's input, rebuilt from the formula."""
    with capture(drafter, ["state.pre", "logits"]) as seen:
        _first(drafter, tokens, aux)
    config = drafter.config
    pre = seen["state.pre", 1].float()
    normed = pre * (pre.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt()
    normed = normed * drafter.norm.weight.float()
    gaps = {}
    for name, state in (("normed", normed), ("raw", pre)):
        logits = state @ drafter.lm_head.weight.float().T * config.logit_scale
        gaps[name] = float((logits - seen["logits", 1].float()).abs().max())
    wanted = "raw" if config.logits_from_raw else "normed"
    scale = max(1.0, float(seen["logits", 1].abs().max()))
    ok = gaps[wanted] <= 1e-3 * scale
    detail = f"head reads the {wanted} state, off by {gaps[wanted]:.1e}"
    return Check("final norm before the head", ok, detail)


def _first(drafter: Drafter, tokens: Tensor, aux: Tensor) -> Tensor:
    return next(iter(unroll(drafter, tokens, aux, depth=1, mode="forced"))).logits


def _free(drafter: Drafter, tokens: Tensor, aux: Tensor) -> list[Tensor]:
    return [s.logits for s in unroll(drafter, tokens, aux, depth=DEPTH, mode="free")]


def _causal(drafter: Drafter, tokens: Tensor, aux: Tensor) -> Check:
    """Other states and tokens after an anchor leave its chain alone; earlier ones do not."""
    cut = tokens.shape[1] // 2
    before = _free(drafter, tokens, aux)
    later_tokens, later, earlier = tokens.clone(), aux.clone(), aux.clone()
    later_tokens[:, cut + 1 :] = tokens[:, cut + 1 :].flip(1)
    later[:, cut:] = aux[:, cut:].flip(1)
    earlier[:, :cut] = -aux[:, :cut]
    pairs = zip(_free(drafter, later_tokens, later), before, strict=True)
    leak = max(float((a - b)[:, :cut].abs().max()) for a, b in pairs)
    pairs = zip(_free(drafter, tokens, earlier), before, strict=True)
    moved = max(float((a - b)[:, cut:].abs().max()) for a, b in pairs)
    scale = max(1.0, float(before[0].abs().max()))
    ok = leak <= 1e-4 * scale and moved > 0
    return Check("mask causal", ok, f"future moves logits by {leak:.1e}, the past by {moved:.1e}")


def _pattern(drafter: Drafter, tokens: Tensor, aux: Tensor) -> Check:
    before = _first(drafter, tokens, aux)
    with attach(drafter, "*attn.pattern", lambda value, moment: torch.zeros_like(value)):
        after = _first(drafter, tokens, aux)
    moved = float((after - before).abs().max())
    return Check("pattern changes the logits", moved > 0, f"by {moved:.2g} when it is zero")


def _vocabulary(drafter: Drafter, texts: Sequence[Text]) -> Check:
    config, reachable = drafter.config, drafter.target_to_draft >= 0
    tokens = [t for text in texts for t in text.continuation]
    share = sum(_within(reachable, t) for t in tokens) / len(tokens)
    detail = (
        f"{config.draft_vocab_size} of {config.vocab_size} ids, valid; they cover {share:.3f} of "
        "the text, which acceptance cannot exceed"
    )
    return Check("vocabulary map", share > COVERAGE, detail)


def _head_rows(target: Target, drafter: Drafter) -> Check:
    """Head rows against the target's: a head that was cut by the wrong table resembles others."""
    name = "head rows belong to the map"
    own = drafter.lm_head.weight.float()
    theirs = target.head_weight.to(own.device).float()
    if own.shape[1] != theirs.shape[1]:
        return Check(name, True, "n/a: drafter and target differ in width")
    gains = target.final_norm_weight
    ids = drafter.draft_to_target
    tables = {"the map": ids, "d2t taken as ids": ids - torch.arange(len(ids), device=ids.device)}
    kinds = [None] if gains is None else [None, gains.to(own.device).float()]
    means = {}
    for table, rows in tables.items():
        if int(rows.min()) < 0 or int(rows.max()) >= len(theirs):
            continue
        picked = theirs[rows]
        means[table] = max(
            float(torch.cosine_similarity(own, picked if g is None else picked * g).mean())
            for g in kinds
        )
    best = max(means, key=lambda table: means[table])
    ok = means[best] <= means["the map"] + 0.2
    listed = ", ".join(f"{table} {cosine:.2f}" for table, cosine in means.items())
    return Check(name, ok, f"mean cosine to the target's rows: {listed}")


def _embedding(target: Target, drafter: Drafter) -> Check:
    own, theirs = drafter.embed_tokens.weight, target.embedding_weight
    name = "embedding"
    if own.shape[1] != theirs.shape[1]:
        widths = f"{own.shape[1]} wide, the target's {theirs.shape[1]}"
        return Check(name, True, f"its own: {widths}")
    rows = min(len(own), len(theirs))
    theirs = theirs[:rows].to(own.device, own.dtype)
    gap = float((own[:rows] - theirs).abs().max())
    if gap == 0:
        return Check(name, True, "equal to the target's")
    cosine = float(torch.cosine_similarity(own[:rows], theirs).mean())
    detail = f"differs from the target's by up to {gap:.3g}, mean cosine {cosine:.4f}"
    return Check(name, True, detail)


def _context(drafter: Drafter, texts: Sequence[Text]) -> Check:
    longest, limit = max(len(t.tokens) for t in texts), drafter.config.rope.max_position
    detail = f"texts of up to {longest} tokens, max_position {limit}"
    return Check("context", longest <= limit, detail)


def known_bad(devices: Collection[str], version: str) -> str | None:
    """Why numbers of these devices cannot be trusted under a torch version, where it is known."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if "mps" in devices and release < (2, 9):
        return (
            f"torch {version}: linear layers were wrong in silence on MPS before 2.9 (measured "
            "elsewhere for 2.8, TransformerLens#1178); update torch, or use the CPU"
        )
    return None


def _device(drafter: Drafter, tokens: Tensor, aux: Tensor) -> Check:
    """The same logits on the CPU and on the device, when there is one."""
    here = drafter.norm.weight.device
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here.type != "cpu":
        other = torch.device("cpu")
    if other is None:
        return Check("device", True, "CPU only, nothing to compare")
    if why := known_bad({here.type, other.type}, torch.__version__):
        return Check("device", False, why)
    twin = copy.deepcopy(drafter).to(other)
    ours = [x.cpu() for x in _free(drafter, tokens, aux)]
    theirs = [x.cpu() for x in _free(twin, tokens.to(other), aux.to(other))]
    gap = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    scale = max(1.0, max(float(x.abs().max()) for x in ours))
    return Check("device", gap <= 1e-2 * scale, f"{here} and {other} differ by {gap:.1e}")
