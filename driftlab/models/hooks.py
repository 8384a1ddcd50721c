"""Named places in the drafter where a value can be read or replaced.

One layer runs once per depth, so a name alone would keep only the last value: what a
hook sees is keyed by ``(site, depth)``. Sites are modules that return their input, so
captum and plain torch hooks work on them as well, and a site without hooks does nothing.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from driftlab.config import is_whole
from driftlab.errors import SiteError


@dataclass(frozen=True)
class Site:
    """A documented place. ``{i}`` in ``name`` stands for a captured state's index."""

    name: str
    shape: str
    meaning: str
    rows_dim: int = 1


# Shapes: B batch, T anchors (rows), A captured states, H drafter width, Ht target width,
# h query heads, g key/value heads, e head width, K prefix keys + depth - 1 chain keys.
SITES: tuple[Site, ...] = (
    Site("fuse.in.{i}", "[B, T, Ht]", "captured state i, as the target made it; depth 1 only"),
    Site("fuse.normed.{i}", "[B, T, Ht]", "captured state i after the fusion norm; depth 1 only"),
    Site("fuse.part.{i}", "[B, T, H]", "W_i N(a)_i, its part of the fused input; depth 1 only"),
    Site("fuse.out", "[B, T, H]", "fused input g; depth 1 only"),
    Site("token.embed", "[B, T, H]", "embedding of token t + depth"),
    Site("token.normed", "[B, T, H]", "the embedding after its norm"),
    Site("feedback.in", "[B, T, H]", "g at depth 1, the fed-back state at depth >= 2"),
    Site("feedback.normed", "[B, T, H]", "the same after hidden_norm"),
    Site("attn.q", "[B, h, T, e]", "queries after rotation", 2),
    Site("attn.k", "[B, g, T, e]", "this depth's keys after rotation", 2),
    Site("attn.v", "[B, g, T, e]", "this depth's values", 2),
    Site(
        "attn.scores",
        "[B, h, T, K]",
        "scaled, masked logits; last depth - 1 columns: own chain",
        2,
    ),
    Site("attn.pattern", "[B, h, T, K]", "softmax of the scores, same columns", 2),
    Site("attn.out", "[B, T, H]", "what attention writes to the residual stream"),
    Site("resid.mid", "[B, T, H]", "residual stream between attention and MLP"),
    Site("mlp.out", "[B, T, H]", "what the MLP writes"),
    Site("state.pre", "[B, T, H]", "the drafter's output before the final norm"),
    Site("state.post", "[B, T, H]", "the same after the final norm"),
    Site("logits", "[B, T, Vd]", "scores over the draft vocabulary"),
)


@dataclass(frozen=True)
class Moment:
    """When a hook fires. ``rows`` are the rows of this call among the step's rows.

    Attention runs in blocks of rows when it is long, and then ``attn.scores`` and
    ``attn.pattern`` fire once per block; every other site fires once per step.
    """

    site: str
    depth: int
    rows: slice
    anchors: Tensor  # [rows] anchor of each row of this call


@dataclass
class Clock:
    """What the drafter is computing now; shared by its sites."""

    depth: int = 1
    rows: slice = field(default_factory=lambda: slice(0, 0))
    anchors: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))

    def skip(self, rows: int) -> None:
        """Go on without the first ``rows`` rows."""
        if rows:
            self.anchors = self.anchors[rows:]
            self.rows = slice(0, len(self.anchors))


HookFn = Callable[[Tensor, Moment], Tensor | None]


class HookPoint(nn.Module):
    """Identity with a name. Returns its input, or what the last attached hook returned."""

    def __init__(self, site: str, clock: Clock) -> None:
        super().__init__()
        self.site, self._clock = site, clock

    @property
    def hooked(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def forward(self, value: Tensor) -> Tensor:
        return value

    def moment(self) -> Moment:
        clock = self._clock
        return Moment(self.site, clock.depth, clock.rows, clock.anchors[clock.rows])

    def extra_repr(self) -> str:
        return self.site


def points(root: nn.Module) -> dict[str, HookPoint]:
    """Every site under ``root`` by name, in the order in which the model declares them."""
    return {m.site: m for m in root.modules() if isinstance(m, HookPoint)}


def match(root: nn.Module, globs: str | Iterable[str]) -> list[HookPoint]:
    """Sites whose names match any glob.

    Raises
    ------
    SiteError: no glob is given, or one matches nothing; near names are listed.
    """
    known = points(root)
    found: dict[str, HookPoint] = {}
    asked = list(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
    if not asked or not all(isinstance(glob, str) for glob in asked):
        raise SiteError(
            "no site is named", got=globs, remedy="Give a name with wildcards, or several."
        )
    for glob in asked:
        names = fnmatch.filter(known, glob)
        if not names:
            near = difflib.get_close_matches(glob, known, n=3, cutoff=0.4) or sorted(known)[:3]
            raise SiteError(
                f"no site matches {glob!r}",
                remedy=f"Near matches: {', '.join(near)}. `driftlab sites` lists all.",
            )
        found |= {name: known[name] for name in names}
    return list(found.values())


@contextmanager
def attach(
    root: nn.Module,
    globs: str | Iterable[str],
    fn: HookFn,
    *,
    depths: Iterable[int] | None = None,
) -> Iterator[None]:
    """Call ``fn(value, moment)`` at every matching site while the context is open.

    ``fn`` returns None to leave the value, or a tensor of its shape and dtype that takes its
    place. All hooks are gone afterwards, also after an exception.

    Raises
    ------
    SiteError: ``fn`` returns anything else, a glob matches nothing, a matched site fired at
        none of the wanted depths, or at a wanted depth no matched site fired (raised on a clean
        exit only, so that it hides no other error). Near sites that would have fired are listed.
    """
    sites = match(root, globs)
    wanted = None if depths is None else _checked(depths)
    fired: set[tuple[str, int]] = set()

    def call(module: nn.Module, _args: object, value: Tensor) -> Tensor | None:
        assert isinstance(module, HookPoint)
        moment = module.moment()
        if wanted is not None and moment.depth not in wanted:
            return None
        fired.add((module.site, moment.depth))
        new = fn(value, moment)
        if new is not None:
            _check_like(new, value, moment)
        return new

    handles = [site.register_forward_hook(call) for site in sites]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    heard = {site for site, _ in fired}
    silent = [s.site for s in sites if s.site not in heard]
    missed = sorted((wanted or set()) - {depth for _, depth in fired})
    if silent or missed:
        at = f" at depth {', '.join(map(str, missed or sorted(wanted or ())))}" if wanted else ""
        names = silent or [s.site for s in sites]
        every_depth = [name for name in points(root) if not name.startswith("fuse.")]
        near = difflib.get_close_matches(names[0], every_depth, n=3, cutoff=0.3)
        raise SiteError(
            f"{len(names)} site(s) never fired{at}: {', '.join(names)}",
            remedy="Run the drafter that deep inside the context. fuse.* fire at depth 1 only; "
            f"near matches that fire at every depth: {', '.join(near or every_depth[:3])}.",
        )


def _checked(depths: Iterable[int]) -> frozenset[int]:
    wanted = list(depths) if isinstance(depths, Iterable) else [None]
    if not all(map(is_whole, wanted)):
        raise SiteError("depths are no whole numbers", got=depths, remedy="For example [1, 2].")
    return frozenset(wanted)


def _check_like(new: object, value: Tensor, moment: Moment) -> None:
    """A value of another shape would be broadcast, one of another dtype rounded."""
    if isinstance(new, Tensor) and (new.shape, new.dtype) == (value.shape, value.dtype):
        return
    shown = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
    raise SiteError(
        f"what a hook returns cannot take the place of {moment.site} at depth {moment.depth}",
        got=shown,
        remedy=f"Return None, or a tensor of {value.dtype} {tuple(value.shape)}.",
    )


class Captured(dict[tuple[str, int], Tensor]):
    """Values by ``(site, depth)``. A missing key lists the keys that are near."""

    def __missing__(self, key: tuple[str, int]) -> Tensor:
        have = [f"{site}@{depth}" for site, depth in self]
        near = difflib.get_close_matches(f"{key[0]}@{key[1]}", have, n=3, cutoff=0.3)
        raise SiteError(
            f"nothing captured for {key[0]} at depth {key[1]}",
            remedy=f"Captured: {', '.join(near or have[:8]) or 'nothing'}.",
        )


_ROWS_DIM = {site.name.split("{")[0]: site.rows_dim for site in SITES}


def _rows_dim(site: str) -> int:
    return next((d for stem, d in _ROWS_DIM.items() if stem and site.endswith(stem)), 1)


@contextmanager
def capture(
    root: nn.Module, globs: str | Iterable[str], *, depths: Iterable[int] | None = None
) -> Iterator[Captured]:
    """Keep the detached values of the matching sites.

    Attention that ran in blocks is put together again; blocks are widened to the same
    number of prefix keys with zeros (scores: -inf), where no row may look anyway.
    """
    kept = Captured()
    blocks: dict[tuple[str, int], list[Tensor]] = {}

    def keep(value: Tensor, moment: Moment) -> None:
        key = (moment.site, moment.depth)
        if moment.rows.start == 0:
            blocks[key] = []
        blocks[key].append(value.detach())
        kept[key] = _join(blocks[key], moment)

    with attach(root, globs, keep, depths=depths):
        yield kept


def _join(parts: list[Tensor], moment: Moment) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    chain = moment.depth - 1
    fill = float("-inf") if moment.site.endswith("attn.scores") else 0.0
    width = max(p.shape[-1] for p in parts)
    wide = [
        torch.cat(
            [
                p[..., : p.shape[-1] - chain],
                p.new_full((*p.shape[:-1], width - p.shape[-1]), fill),
                p[..., p.shape[-1] - chain :],
            ],
            dim=-1,
        )
        for p in parts
    ]
    return torch.cat(wide, dim=_rows_dim(moment.site))
