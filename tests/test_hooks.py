"""Sites: a frozen list, hooks that leave no trace, and errors that name what is near."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pairs
import pytest
import torch
from torch import Tensor

from driftlab.engines.anchors import unroll
from driftlab.errors import SiteError
from driftlab.models import drafter as drafter_module
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import SITES, Moment, attach, capture, points

# Name, shape, first words of the meaning. A change here changes the public vocabulary.
GOLDEN = [
    ("fuse.in.{i}", "[B, T, Ht]", "captured state i"),
    ("fuse.normed.{i}", "[B, T, Ht]", "captured state i after the fusion norm"),
    ("fuse.part.{i}", "[B, T, H]", "W_i N(a)_i"),
    ("fuse.out", "[B, T, H]", "fused input g"),
    ("token.embed", "[B, T, H]", "embedding of token t + depth"),
    ("token.normed", "[B, T, H]", "the embedding after its norm"),
    ("feedback.in", "[B, T, H]", "g at depth 1, the fed-back state at depth >= 2"),
    ("feedback.normed", "[B, T, H]", "the same after hidden_norm"),
    ("attn.q", "[B, h, T, e]", "queries after rotation"),
    ("attn.k", "[B, g, T, e]", "this depth's keys after rotation"),
    ("attn.v", "[B, g, T, e]", "this depth's values"),
    ("attn.scores", "[B, h, T, K]", "scaled, masked logits"),
    ("attn.pattern", "[B, h, T, K]", "softmax of the scores"),
    ("attn.out", "[B, T, H]", "what attention writes to the residual stream"),
    ("resid.mid", "[B, T, H]", "residual stream between attention and MLP"),
    ("mlp.out", "[B, T, H]", "what the MLP writes"),
    ("state.pre", "[B, T, H]", "the drafter's output before the final norm"),
    ("state.post", "[B, T, H]", "the same after the final norm"),
    ("logits", "[B, T, Vd]", "scores over the draft vocabulary"),
]
TEXTS, SIZE, DEPTH = 2, 9, 3


@pytest.fixture
def made() -> Any:
    return pairs.drafter(fusion_norm="per_layer", feedback="post_norm")


def run(drafter: Drafter, *, depth: int = DEPTH, anchors: Tensor | None = None) -> list[Tensor]:
    """Logits of every depth on a fixed random text."""
    tokens = pairs.ids(TEXTS, SIZE)
    aux = pairs.states(pairs.target(), tokens)
    steps = unroll(drafter, tokens, aux, depth=depth, mode="free", anchors=anchors)
    return [step.logits for step in steps]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def names(drafter: Drafter) -> list[str]:
    return list(points(drafter))


def attached(drafter: Drafter) -> int:
    return sum(p.hooked for p in points(drafter).values())


def test_the_sites_are_the_documented_ones(made: Any) -> None:
    assert [(s.name, s.shape) for s in SITES] == [(n, shape) for n, shape, _ in GOLDEN]
    for site, (_, _, meaning) in zip(SITES, GOLDEN, strict=True):
        assert site.meaning.startswith(meaning)
    expected = {n.replace("{i}", str(i)) for n, _, _ in GOLDEN for i in range(3)}
    assert set(names(made)) == expected


def test_every_site_fires_at_every_depth_with_its_shape(made: Any) -> None:
    size = {"B": TEXTS, "T": SIZE - 1, "Ht": 32, "H": 32, "h": 4, "g": 2, "e": 8, "Vd": 40}
    with torch.no_grad(), capture(made, "*") as kept:
        run(made)
    wanted = {}
    for name, shape, _ in GOLDEN:
        for i in range(3) if "{i}" in name else (0,):
            for depth in (1,) if name.startswith("fuse.") else range(1, DEPTH + 1):
                sizes = size | {"K": SIZE - 1 + depth - 1}
                wanted[name.format(i=i), depth] = tuple(sizes[x] for x in shape[1:-1].split(", "))
    assert {key: tuple(value.shape) for key, value in kept.items()} == wanted


def test_sites_hold_what_their_meaning_says(made: Any) -> None:
    """Values against the equations of the module's docstring, written out here."""
    tokens = pairs.ids(TEXTS, SIZE)
    aux = pairs.states(pairs.target(), tokens)
    with torch.no_grad(), capture(made, "*") as at:
        steps = list(unroll(made, tokens, aux, depth=2, mode="forced"))
    layer = made.layers[0]

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def equal(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)

    for i in range(3):
        assert torch.equal(at[f"fuse.in.{i}", 1], aux[:, :-1, 32 * i : 32 * i + 32])
        equal(at[f"fuse.normed.{i}", 1], rms(at[f"fuse.in.{i}", 1], made.fc_norm[i].weight))
        block = made.fc.weight[:, 32 * i : 32 * i + 32]
        equal(at[f"fuse.part.{i}", 1], at[f"fuse.normed.{i}", 1] @ block.T)
    parts = torch.stack([at[f"fuse.part.{i}", 1] for i in range(3)])
    equal(parts.sum(0), at["fuse.out", 1])
    assert torch.equal(at["feedback.in", 1], at["fuse.out", 1])
    assert torch.equal(at["feedback.in", 2], at["state.post", 1])  # post-norm feedback
    for d, step in enumerate(steps, start=1):
        embedded = made.embed_tokens(step.tokens)
        assert torch.equal(at["token.embed", d], embedded)
        equal(at["token.normed", d], rms(embedded, layer.input_layernorm.weight))
        equal(at["feedback.normed", d], rms(at["feedback.in", d], layer.hidden_norm.weight))
        equal(at["attn.pattern", d], at["attn.scores", d].softmax(-1))
        equal(at["resid.mid", d], at["feedback.in", d] + at["attn.out", d])
        equal(at["state.pre", d], at["resid.mid", d] + at["mlp.out", d])
        equal(at["state.post", d], rms(at["state.pre", d], made.norm.weight))
        equal(at["logits", d], at["state.post", d] @ made.lm_head.weight.T)
        x = torch.cat([at["token.normed", d], at["feedback.normed", d]], dim=-1)
        v = x @ layer.self_attn.v_proj.weight.T
        equal(at["attn.v", d], v.unflatten(-1, (2, 8)).transpose(1, 2))


@pytest.mark.parametrize(
    ("residual", "base"), [("raw", "feedback.in"), ("normed", "feedback.normed")]
)
def test_attention_writes_to_the_residual_that_is_named(residual: str, base: str) -> None:
    made = pairs.drafter(residual=residual)
    with torch.no_grad(), capture(made, ["feedback.*", "attn.out", "resid.mid"]) as at:
        run(made)
    for depth in range(1, DEPTH + 1):
        wanted = at[base, depth] + at["attn.out", depth]
        torch.testing.assert_close(at["resid.mid", depth], wanted, atol=1e-5, rtol=0)
        gap = (at["feedback.in", depth] - at["feedback.normed", depth]).abs().max()
        assert gap > 0.1, "the two kinds cannot be told apart here"


def test_grouped_heads_pair_as_the_model_pairs_them(made: Any) -> None:
    """Report 38: query head h reads key/value head h // (heads / kv_heads), not h % kv_heads."""
    with torch.no_grad(), capture(made, "attn.*") as at:
        run(made, depth=1)
    q, k, v = at["attn.q", 1], at["attn.k", 1], at["attn.v", 1]
    hidden = torch.ones(SIZE - 1, SIZE - 1).triu(1).bool()

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(hidden, float("-inf"))
        pattern = scores.softmax(-1)
        mixed = (pattern @ v).transpose(1, 2).flatten(2)
        return pattern, mixed @ made.layers[0].self_attn.o_proj.weight.T

    pattern, out = attend(k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(pattern, at["attn.pattern", 1], atol=1e-5, rtol=0)
    torch.testing.assert_close(out, at["attn.out", 1], atol=1e-5, rtol=0)
    tiled, _ = attend(k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    assert (tiled - at["attn.pattern", 1]).abs().max() > 0.05


@pytest.mark.parametrize("grad", [False, True])
def test_hooks_that_only_read_change_no_bit(made: Any, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        bare = run(made)
        seen: list[str] = []
        with attach(made, "*", lambda value, moment: seen.append(moment.site)):
            watched = run(made)
        with capture(made, "*"):
            kept = run(made)
        again = run(made)
    assert set(seen) == set(names(made))
    assert same(bare, watched) and same(bare, kept) and same(bare, again)


def test_parts_that_are_watched_still_carry_their_gradient() -> None:
    """Captum differentiates by a site's value, so watching must not cut the graph."""
    made: Any = pairs.drafter(fc_bias=True).requires_grad_(True)
    aux = pairs.states(pairs.target(), pairs.ids(1, 5)).requires_grad_(True)
    probe = torch.randn(32, generator=torch.Generator().manual_seed(1))
    parts: list[Tensor] = []

    def keep(value: Tensor, moment: Moment) -> None:
        value.retain_grad()
        parts.append(value)

    with attach(made, "fuse.part.*", keep):
        (made.fuse(aux) @ probe).sum().backward()
    watched = [aux.grad, made.fc.weight.grad, made.fc.bias.grad]
    assert all(torch.equal(p.grad, probe.expand_as(p)) for p in parts if p.grad is not None)
    assert all(p.grad is not None for p in parts) and len(parts) == 3
    aux.grad = None
    made.zero_grad()
    (made.fuse(aux) @ probe).sum().backward()
    bare = [aux.grad, made.fc.weight.grad, made.fc.bias.grad]
    for found, wanted in zip(watched, bare, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


REPLACEABLE = sorted({s.name.replace("{i}", "1") for s in SITES} - {"attn.scores", "attn.pattern"})


@pytest.mark.parametrize("site", REPLACEABLE)
def test_what_a_hook_returns_takes_the_value_s_place(made: Any, site: str) -> None:
    bare = run(made)
    with attach(made, site, lambda value, moment: value * 1.5 + 0.1, depths=[1]):
        changed = run(made)
    assert not torch.equal(bare[0], changed[0])
    assert same(bare, run(made))


@pytest.mark.parametrize(
    "returned",
    [
        lambda v: v[..., :1],  # would be broadcast
        lambda v: v.mean(),
        lambda v: v[:, :2],
        lambda v: v.double(),
        lambda v: v.int(),  # would be rounded
        lambda v: v.numpy(),
        lambda v: 1.0,
    ],
)
def test_what_cannot_take_a_value_s_place_is_refused(made: Any, returned: Any) -> None:
    said = r"the place of attn\.out at depth 2 .*\n.*torch\.float32 \(2, 8, 32\)"
    with (
        torch.no_grad(),
        pytest.raises(SiteError, match=said),
        attach(made, "attn.out", lambda value, moment: returned(value), depths=[2]),
    ):
        run(made)
    assert attached(made) == 0


@pytest.mark.parametrize("globs", [[], (), 3, [3], b"logits", None])
def test_no_site_is_named(made: Any, globs: Any) -> None:
    with pytest.raises(SiteError, match="no site is named"):
        attach(made, globs, ignore).__enter__()


@pytest.mark.parametrize("depths", [2, "12", [2.0], [True], [None]])
def test_depths_are_whole_numbers(made: Any, depths: Any) -> None:
    with pytest.raises(SiteError, match="depths are no whole numbers"):
        attach(made, "logits", ignore, depths=depths).__enter__()


def test_a_change_at_one_depth_leaves_the_depths_before_it(made: Any) -> None:
    bare = run(made)
    with attach(made, "feedback.in", lambda value, moment: value + 1, depths=[2]):
        changed = run(made)
    assert torch.equal(bare[0], changed[0])
    assert not torch.equal(bare[1], changed[1]) and not torch.equal(bare[2], changed[2])


def test_a_replaced_pattern_is_what_values_are_mixed_with(made: Any) -> None:
    """All mass on the first key gives every row that key's value."""

    def first_only(value: Tensor, moment: Moment) -> Tensor:
        return torch.zeros_like(value).index_fill_(-1, torch.tensor([0]), 1.0)

    with torch.no_grad(), attach(made, "attn.pattern", first_only), capture(made, "attn.*") as at:
        run(made, depth=1)
    first = at["attn.v", 1][:, :, :1].repeat_interleave(2, 1).transpose(1, 2).flatten(2)
    wanted = (first @ made.layers[0].self_attn.o_proj.weight.T).expand(-1, SIZE - 1, -1)
    torch.testing.assert_close(at["attn.out", 1], wanted)


def test_plain_torch_hooks_work_on_sites(made: Any) -> None:
    seen: list[Tensor] = []
    handle = points(made)["state.post"].register_forward_hook(lambda m, a, out: seen.append(out))
    run(made)
    handle.remove()
    assert len(seen) == DEPTH


def test_no_hook_and_no_tensor_stays(made: Any) -> None:
    """Also after an exception, and a second run captures as much as the first (report 36)."""

    def fail(value: Tensor, moment: Moment) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attach(made, ["logits", "fuse.*"], fail):
        run(made)
    assert attached(made) == 0
    counts = []
    for _ in range(2):
        with torch.no_grad(), capture(made, "*") as kept:
            run(made)
        counts.append(len(kept))
    assert counts[0] == counts[1]
    gone = [weakref.ref(value) for value in kept.values()]
    del kept
    gc.collect()
    assert gone and all(ref() is None for ref in gone)


def test_an_unknown_site_lists_its_neighbours(made: Any) -> None:
    with pytest.raises(SiteError, match=r"no site matches 'atn\.patern'.*\n.*attn\.pattern"):
        capture(made, "atn.patern").__enter__()
    with pytest.raises(SiteError, match=r"fuse\.nrmed"):
        attach(made, ["logits", "fuse.nrmed.*"], ignore).__enter__()
    assert attached(made) == 0


def ignore(value: Tensor, moment: Moment) -> None:
    return None


@pytest.mark.parametrize(
    "site, depths, words",
    [
        ("fuse.out", [2], r"fuse\.out"),  # a site that does not exist so deep
        ("logits", [2, 9], r"depth 9: logits\n.*logits"),  # one of the depths is not reached
        ("logits", [9], r"at depth 9"),
    ],
)
def test_a_site_that_does_not_fire_is_an_error(
    made: Any, site: str, depths: list[int], words: str
) -> None:
    with pytest.raises(SiteError, match=words), capture(made, site, depths=depths):
        run(made)


def test_a_site_is_silent_when_nothing_runs(made: Any) -> None:
    silent = capture(made, "state.pre")
    silent.__enter__()
    with pytest.raises(SiteError, match=r"1 site\(s\) never fired: state\.pre"):
        silent.__exit__(None, None, None)


def test_a_missing_key_lists_what_was_captured(made: Any) -> None:
    with torch.no_grad(), capture(made, "state.*") as kept:
        run(made)
    with pytest.raises(SiteError, match=r"state\.pre at depth 7\n.*state\.pre@"):
        kept["state.pre", 7]


def test_moments_name_depth_rows_and_anchors(made: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafter_module, "SCORE_BUDGET", 2 * 4 * (SIZE + 1) * 2)
    moments: dict[tuple[str, int], list[list[int]]] = {}

    def note(value: Tensor, moment: Moment) -> None:
        row = 2 if moment.site.startswith("attn.") and moment.site != "attn.out" else 1
        assert value.shape[row] == moment.rows.stop - moment.rows.start == len(moment.anchors)
        moments.setdefault((moment.site, moment.depth), []).append(moment.anchors.tolist())

    with torch.no_grad(), attach(made, "*", note):
        run(made, anchors=torch.tensor([1, 4, 5]))
    every, some = list(range(SIZE - 1)), [1, 4, 5]
    assert moments["fuse.out", 1] == [every] and moments["state.pre", 1] == [every]
    assert moments["state.pre", 2] == [some] and moments["logits", 3] == [some]
    assert len(moments["attn.pattern", 1]) > 1  # blocks of rows, together all of them
    assert [a for block in moments["attn.pattern", 1] for a in block] == every


@pytest.mark.parametrize("changes", [{}, {"windows": (3,)}, {"num_layers": 2}])
def test_blocks_of_rows_change_nothing(monkeypatch: Any, changes: dict[str, Any]) -> None:
    """Attention in blocks equals attention in one, and captures are put together again."""
    made = pairs.drafter(**changes)
    with torch.no_grad(), capture(made, "*") as whole:
        bare = run(made)
    monkeypatch.setattr(drafter_module, "SCORE_BUDGET", 150)
    with torch.no_grad(), capture(made, "*") as blocks:
        cut = run(made)
    for a, b in zip(bare, cut, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert whole.keys() == blocks.keys()
    for key, value in whole.items():
        torch.testing.assert_close(blocks[key], value, atol=1e-5, rtol=1e-6, msg=str(key))


def test_deeper_layers_have_sites_of_their_own() -> None:
    made = pairs.drafter(num_layers=2)
    with torch.no_grad(), capture(made, ["layer.1.*", "attn.pattern"]) as kept:
        run(made)
    assert kept["layer.1.attn.pattern", 2].shape == kept["attn.pattern", 2].shape
    assert not torch.equal(kept["layer.1.attn.pattern", 2], kept["attn.pattern", 2])
    assert ("layer.1.mlp.out", DEPTH) in kept
