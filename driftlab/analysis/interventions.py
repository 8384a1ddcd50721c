"""Changes that are applied to a trained drafter: pin, noise, sink, keys, window, layers, norms.

Each is a small frozen object. ``with apply(drafter, [noise(0.5)]) as changed:`` gives the
drafter to run; the original is as before when the context closes. What comes of it is a row
labelled ``applied``: toggling is not retraining.

Every change is a pure function of (tokens 0..t+1, captured states 0..t) of a chain, so that all
anchors at once and one chain at a time still agree. Values that need the past (a mean, a
shuffle) therefore take only positions up to the anchor.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from driftlab.analysis.measures import rms
from driftlab.config import DrafterConfig, Feedback, FusionNorm, is_number, is_whole
from driftlab.errors import ConfigError, ContractError
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import Moment, attach

Spans = Sequence[tuple[int, int]]
"""First measured anchor, and number of tokens, of each text."""
FIRST = (0,)
"""The sink of most targets: the first position. Others are given as positions."""

# A drafter of several layers has these sites in each of them.
_SCORES, _PATTERN = "*attn.scores", "*attn.pattern"
_TINY = 1e-20


class Intervention:
    """Base of the objects below. ``change`` may build another drafter, ``hook`` attaches to it."""

    def fit(self, config: DrafterConfig) -> DrafterConfig:
        """The contract of a drafter of ``config`` under the change; ConfigError: it has none."""
        return config

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        """Why nothing changes in chains of ``depth`` of a drafter of ``config`` on texts of
        ``spans``, or None.

        A position that some text does not have is a reason too: its rows would be unchanged ones.
        """
        return None

    def change(self, drafter: Drafter) -> Drafter:
        """The drafter to run: ``drafter``, or a copy that shares its weights."""
        return drafter

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        """Hooks that are in force while the context is open."""
        return nullcontext()

    def record(self) -> dict[str, Any]:
        """Name and every parameter, for the manifest."""
        return {"name": type(self).__name__, **_parameters(self)}

    def __str__(self) -> str:
        """Name and the parameters that are not the default, as condition of a table's cell."""
        default = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        shown = (f"{n}={v}" for n, v in _parameters(self).items() if v != default[n])
        return f"{type(self).__name__}({', '.join(shown)})"


def _parameters(intervention: Any) -> dict[str, Any]:
    return {f.name: getattr(intervention, f.name) for f in dataclasses.fields(intervention)}


@contextmanager
def apply(drafter: Drafter, interventions: Sequence[Intervention]) -> Iterator[Drafter]:
    """Run ``drafter`` under ``interventions``; hooks act in the order in which they are given.

    Yields the drafter to use, which is another object when a norm is swapped. It shares the
    weights, and hooks that were attached before stay attached to it.

    Raises
    ------
    ConfigError: an intervention does not fit this drafter.
    SiteError: on a clean exit, when the drafter was never run.
    """
    changed = drafter
    for intervention in interventions:
        changed = intervention.change(changed)
    with ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention.hook(changed))
        yield changed


# --- the state that is handed on ----------------------------------------------------------------


@dataclass(frozen=True)
class pin_norm(Intervention):
    """Rescale what each depth receives to the RMS of its anchor's fused input.

    The magnitude pin of arXiv 2605.09992: ``u <- u * rms(g_t) / rms(u)`` at every depth >= 2.
    """

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        return "depth 1 is handed no state" if depth == 1 else None

    @contextmanager
    def hook(self, drafter: Drafter) -> Iterator[None]:
        wanted = torch.empty(0)  # [B, rows of the last depth-1 step]
        first = 0

        def pin(u: Tensor, moment: Moment) -> Tensor | None:
            nonlocal wanted, first
            if moment.depth == 1:
                wanted, first = rms(u), int(moment.anchors[0])
                return None
            rows = moment.anchors - first
            if int(rows[0]) < 0:
                raise ContractError(
                    "the pin has not seen the fused input of every anchor",
                    got=f"anchor {int(moment.anchors[0])} before {first}",
                    remedy="Draft from anchors of the newest depth-1 step.",
                )
            factor = wanted[:, rows] / rms(u).clamp(min=_TINY)
            return (u.float() * factor[..., None]).to(u.dtype)

        with attach(drafter, "feedback.in", pin):
            yield


Path = Literal["hidden", "embedding"]
_NOISY: dict[str, str] = {"hidden": "feedback.in", "embedding": "token.embed"}


@dataclass(frozen=True)
class noise(Intervention):
    """``x <- x + alpha * rms(x) * eps`` at every depth, on the hidden or the embedding path.

    ``hidden`` is what the layer receives (the fused input at depth 1, then the fed-back state),
    ``embedding`` the token's embedding. ``eps`` is standard normal and depends on (seed, path,
    depth, anchor) only: not on the batch, the block, or the engine, and it is the same for
    every text.
    """

    alpha: float
    path: Path = "hidden"
    seed: int = 0

    def __post_init__(self) -> None:
        _number("alpha", self.alpha, least=0)
        _choice("noise path", self.path, get_args(Path))
        _whole("seed", self.seed)

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        return None if self.alpha else "alpha is 0"

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        kind = get_args(Path).index(self.path)

        def add(x: Tensor, moment: Moment) -> Tensor:
            key = (self.seed, kind, moment.depth)
            eps = torch.stack([_normal((*key, a), x.shape[-1]) for a in moment.anchors.tolist()])
            noisy = x.float() + self.alpha * rms(x)[..., None] * eps.to(x.device)
            return noisy.to(x.dtype)

        return attach(drafter, _NOISY[self.path], add)


def _normal(key: Sequence[int], size: int) -> Tensor:
    """Standard normal [size] in fp32, a function of ``key`` alone."""
    return torch.from_numpy(np.random.default_rng(list(key)).standard_normal(size, np.float32))


# --- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class knock_out_sink(Intervention):
    """Take the sink's keys out of the attention, in every head.

    ``remove`` hides them before the softmax, so that the other keys share the mass in their own
    proportions. ``redirect`` hands their mass to the query's own key. A sink position that is
    the query's own key at depth 1 stays, as in the measures, where it counts as ``self``.
    """

    mode: Literal["remove", "redirect"] = "remove"
    positions: tuple[int, ...] = FIRST

    def __post_init__(self) -> None:
        _choice("mode", self.mode, ("remove", "redirect"))
        _positions(self.positions)

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        return _unseen(self.positions, config, spans)

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        def remove(scores: Tensor, moment: Moment) -> Tensor:
            return scores.masked_fill(_sink(scores, moment, self.positions), float("-inf"))

        def redirect(pattern: Tensor, moment: Moment) -> Tensor:
            sink = _sink(pattern, moment, self.positions)
            moved = pattern.masked_fill(~sink, 0).sum(dim=-1, keepdim=True)
            own = _own(pattern, moment)
            return pattern.masked_fill(sink, 0) + torch.where(own, moved, torch.zeros_like(moved))

        if self.mode == "remove":
            return attach(drafter, _SCORES, remove)
        return attach(drafter, _PATTERN, redirect)


@dataclass(frozen=True)
class raise_sink(Intervention):
    """Add ``delta`` to the logits of the sink's keys before the softmax, in every head."""

    delta: float
    positions: tuple[int, ...] = FIRST

    def __post_init__(self) -> None:
        _number("delta", self.delta)
        _positions(self.positions)

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        return _unseen(self.positions, config, spans) if self.delta else "delta is 0"

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        def lift(scores: Tensor, moment: Moment) -> Tensor:
            return scores + self.delta * _sink(scores, moment, self.positions).to(scores.dtype)

        return attach(drafter, _SCORES, lift)


@dataclass(frozen=True)
class mask_chain_keys(Intervention):
    """Hide the chain's own keys of earlier depths; the query's own key stays.

    The depth-1 key of the anchor is no drafted key and stays as well, so depths 1 and 2 are
    unchanged.
    """

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        if depth < 3:
            return "depths 1 and 2 have no such keys"
        if config.window_moves and set(config.windows) == {1}:
            return "the drafter's own window hides them already"
        return None

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        def mask(scores: Tensor, moment: Moment) -> Tensor | None:
            if moment.depth < 3:
                return None
            changed = scores.clone()
            changed[..., scores.shape[-1] - (moment.depth - 1) : -1] = float("-inf")
            return changed

        return attach(drafter, _SCORES, mask)


@dataclass(frozen=True)
class window(Intervention):
    """Let each query see the last ``size`` keys only, and the first ``keep`` ones.

    ``keep`` 0 is a plain sliding window, 1 keeps the first position (a sink), and the length of
    a system prompt keeps that. The window counts positions back from the query's own, the
    chain's drafted keys among them; the query's own key is one of ``size``.
    """

    size: int
    keep: int = 0

    def __post_init__(self) -> None:
        _whole("size of a window", self.size, least=1)
        _whole("keep of a window", self.keep)

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        # The last anchor has ``depth`` true tokens after the newest one: its deepest query stands
        # at S - 3 and hides up to S - 3 - size, of its own chain the keys ``size`` and more back.
        longest = max(length for _, length in spans)
        if self.size + self.keep > longest - 3 and self.size > depth - 2:
            return f"no text is longer than its {self.size + self.keep} keys"
        own = max((w or math.inf for w in config.windows), default=math.inf)
        if self.size >= (own if config.window_moves else own + depth - 1):
            return f"the drafter's own window of {own} keys hides all that it would"
        return None

    def hook(self, drafter: Drafter) -> AbstractContextManager[None]:
        def mask(scores: Tensor, moment: Moment) -> Tensor:
            chain = moment.depth - 1
            prefix = scores.shape[-1] - chain
            position = torch.arange(prefix, device=scores.device)
            own = moment.anchors.to(scores.device)[:, None] + chain  # [T, 1] the query's position
            far = (position <= own - self.size) & (position >= self.keep)  # [T, prefix]
            # The chain's key of depth e stands at anchor + e - 1; depth 1 is in the prefix.
            back = torch.arange(chain - 1, -1, -1, device=scores.device)
            drafted = (back >= self.size).expand(len(own), -1)
            return scores.masked_fill(torch.cat([far, drafted], dim=1), float("-inf"))

        return attach(drafter, _SCORES, mask)


def _sink(values: Tensor, moment: Moment, positions: Sequence[int]) -> Tensor:
    """Which columns of values [B, h, T, K] are sink keys and not the row's own. -> [T, K]"""
    seen = values.shape[-1] - (moment.depth - 1)
    marked = torch.zeros(values.shape[-2:], dtype=torch.bool, device=values.device)
    marked[:, [p for p in positions if p < seen]] = True
    return marked & ~_own(values, moment)


def _own(values: Tensor, moment: Moment) -> Tensor:
    """The column of each row's own key: the anchor's at depth 1, then the newest. -> [T, K]"""
    keys = torch.arange(values.shape[-1], device=values.device)
    newest = torch.full_like(moment.anchors, values.shape[-1] - 1)
    return keys == (moment.anchors if moment.depth == 1 else newest)[:, None]


# --- the fused input and the norms --------------------------------------------------------------

How = Literal["zero", "mean", "shuffle"]


@dataclass(frozen=True)
class drop_layer(Intervention):
    """Replace captured state ``layer`` (position among the captured ones) after its norm.

    ``zero`` leaves nothing of it; ``mean`` puts the mean of the positions up to the anchor in
    its place, which keeps its constant part; ``shuffle`` the state of one position drawn from
    them by (seed, anchor), which keeps its distribution. With a norm over the concatenation the
    other states are normed as if it were there.
    """

    layer: int
    how: How = "zero"
    seed: int = 0

    def __post_init__(self) -> None:
        _whole("layer", self.layer)
        _choice("how", self.how, get_args(How))
        _whole("seed", self.seed)

    def fit(self, config: DrafterConfig) -> DrafterConfig:
        count = len(config.boundaries)
        if self.layer >= count:
            raise ConfigError(
                f"the drafter has {count} captured states, 0..{count - 1}",
                got=self.layer,
                remedy="Name one by its position among the captured states.",
            )
        return config

    @contextmanager
    def hook(self, drafter: Drafter) -> Iterator[None]:
        self.fit(drafter.config)
        past = torch.empty(0)  # [B, positions so far, Ht]; only where the past is needed

        def drop(value: Tensor, moment: Moment) -> Tensor:
            nonlocal past
            if self.how == "zero":
                return torch.zeros_like(value)
            first = int(moment.anchors[0])
            past = torch.cat([past[:, :first], value], dim=1) if first else value
            if past.shape[1] != first + value.shape[1]:
                raise ContractError(
                    "states are fused in order, from the first position on",
                    got=f"position {first} after {past.shape[1] - value.shape[1]}",
                )
            if self.how == "mean":
                count = (moment.anchors + 1).to(value.device)[:, None]
                return (past.float().cumsum(dim=1)[:, first:] / count).to(value.dtype)
            drawn = [_drawn(self.seed, a) for a in moment.anchors.tolist()]
            return past[:, drawn]

        with attach(drafter, f"fuse.normed.{self.layer}", drop):
            yield


def _drawn(seed: int, anchor: int) -> int:
    return int(np.random.default_rng([seed, anchor]).integers(anchor + 1))


@dataclass(frozen=True)
class swap_norm(Intervention):
    """Toggle the fusion norm, the feedback, or both, without retraining.

    The changed drafter shares every weight; a fusion norm that the drafter did not have gets
    gains of 1, and one that it loses takes its trained gains with it. A drafter that was
    trained with the other setting is off its training distribution here.
    """

    fusion_norm: FusionNorm | str | None = None
    feedback: Feedback | str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("fusion_norm", FusionNorm), ("feedback", Feedback)):
            value = getattr(self, name)
            if value is not None:
                _choice(name, value, tuple(kind))
                object.__setattr__(self, name, kind(value))
        if self.fusion_norm is None and self.feedback is None:
            raise ConfigError(
                "swap_norm changes nothing", remedy="Give fusion_norm, feedback, or both."
            )

    def idle(self, config: DrafterConfig, spans: Spans, depth: int) -> str | None:
        alone = self.fusion_norm is None and depth == 1
        return "depth 1 is handed no state" if alone else None

    def fit(self, config: DrafterConfig) -> DrafterConfig:
        wanted = {n: v for n, v in _parameters(self).items() if v is not None}
        same = [n for n, v in wanted.items() if getattr(config, n) == v]
        if same:
            raise ConfigError(
                f"the drafter's {same[0]} is {wanted[same[0]]} already",
                remedy="A swap that changes nothing would be labelled as one that does.",
            )
        if "fusion_norm" in wanted and not config.boundaries:
            raise ConfigError("a drafter without captured states has no fusion norm")
        return config.model_copy(update=wanted)

    def change(self, drafter: Drafter) -> Drafter:
        config = self.fit(drafter.config)
        kept = [*drafter.parameters(), *drafter.buffers()]
        # Hooks that are attached stay on the copy: functions are not copied.
        changed = copy.deepcopy(drafter, {id(tensor): tensor for tensor in kept})
        changed.config = config
        if self.fusion_norm is not None:
            _fit_norms(changed)
        return changed


def _fit_norms(drafter: Drafter) -> None:
    config = drafter.config
    width, count = config.target_hidden_size, len(config.boundaries)
    like = drafter.norm.weight
    rms_norm = type(drafter.norm)

    def fresh(size: int) -> nn.Module:
        return rms_norm(size, config.norm_eps).to(like.device, like.dtype)

    norms = {
        "input_norm": (FusionNorm.concat, lambda: fresh(count * width)),
        "fc_norm": (
            FusionNorm.per_layer,
            lambda: nn.ModuleList(fresh(width) for _ in range(count)),
        ),
    }
    for name, (kind, make) in norms.items():
        needed = config.fusion_norm in (kind, FusionNorm.concat_per_layer)
        if needed and not hasattr(drafter, name):
            setattr(drafter, name, make())
        elif not needed and hasattr(drafter, name):
            delattr(drafter, name)


# --- by name ------------------------------------------------------------------------------------

KINDS: dict[str, type[Intervention]] = {
    kind.__name__: kind
    for kind in (
        *(pin_norm, noise, knock_out_sink, raise_sink, mask_chain_keys, window, drop_layer),
        swap_norm,
    )
}
"""Interventions by the ``kind`` that an experiment file names."""


def first_idle(
    changes: Iterable[Intervention], config: DrafterConfig, spans: Spans, depth: int
) -> tuple[Intervention, str] | None:
    """The first of ``changes`` that is idle (:meth:`Intervention.idle`), and why; None: none is,
    or there is no text to tell by."""
    found = ((one, one.idle(config, spans, depth)) for one in changes) if spans else ()
    return next(((one, why) for one, why in found if why), None)


def from_settings(settings: Mapping[str, Any]) -> Intervention:
    """``{kind = "noise", alpha = 0.5}`` -> ``noise(alpha=0.5)``.

    Raises ConfigError for an unknown kind, a parameter that it does not have, lacks or refuses.
    """
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    name = values.pop("kind", None)
    kind = KINDS.get(str(name))
    if kind is None:
        raise ConfigError("unknown intervention", got=name, remedy=f"Known: {', '.join(KINDS)}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if (unknown := sorted(set(values) - set(fields))) or missing:
        raise ConfigError(
            f"intervention {name}: unknown or missing parameters",
            got=", ".join([*unknown, *(f"no {n}" for n in missing)]),
            remedy=f"It takes {', '.join(fields) or 'none'}.",
        )
    return kind(**values)


def _whole(what: str, value: Any, *, least: int = 0) -> None:
    """Refuse what is no whole number from ``least`` on."""
    if not is_whole(value) or value < least:
        raise ConfigError(f"{what} must be a whole number from {least} on", got=repr(value))


def _number(what: str, value: Any, *, least: float = -math.inf) -> None:
    """Refuse what is no finite number from ``least`` on."""
    if not is_number(value) or value < least:
        above = "" if least == -math.inf else f" of {least:g} or more"
        raise ConfigError(f"{what} must be a finite number{above}", got=repr(value))


def _choice(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"unknown {what}", got=value, remedy=f"One of {', '.join(map(str, known))}."
        )


def _positions(positions: object) -> None:
    if not isinstance(positions, tuple | list) or not positions:
        raise ConfigError("sink positions are one or more whole numbers", got=repr(positions))
    for position in positions:
        _whole("a sink position", position)
    if len(set(positions)) < len(positions):
        raise ConfigError("a sink position is named twice", got=repr(positions))


def _unseen(positions: Sequence[int], config: DrafterConfig, spans: Spans) -> str | None:
    """Why a query does not see a key at one of ``positions``, or none sees any, or None."""
    last = max(positions)
    short = min(length for _, length in spans)
    if last >= short:
        return f"a text of {short} tokens has no position {last}"
    # What one layer sees of a position, the next sees of that layer: their windows add up.
    reach = sum((w or math.inf) - 1 for w in config.windows) if config.windows else math.inf
    if min(anchor for anchor, _ in spans) - last > reach:
        return f"the drafter's own window reaches back to position {last} in no chain"
    return None
