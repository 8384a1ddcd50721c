"""Micro pairs that the doctor can examine: clean ones of every variant, and planted faults.

``mixer``: both models are random networks whose heads are fitted, then the drafter is trained.
Every weight of a random network takes part, so a misreading shows after seconds of training.
``copier``: the target repeats what stood three places before, so that its drafter must attend
by distance, and rotations and positions matter.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from driftlab.config import (
    DrafterConfig,
    Feedback,
    FusionNorm,
    Origin,
    Provenance,
    Residual,
    Rope,
    Sourced,
    TrainSpec,
)
from driftlab.data.features import FeatureStore
from driftlab.data.text import Text
from driftlab.engines.anchors import unroll
from driftlab.engines.pretrain import pretrain
from driftlab.engines.train import initialise, train
from driftlab.models.checkpoints.profiles import Reading, build
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import capture
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama

VOCAB, WIDTH, LAYERS, LENGTH = 80, 32, 4, 32
SYMBOLS = tuple(range(2, 50, 2))
BOUNDARIES = (0, 2, 3)
TOKENS = 2000
YARN = {"factor": 32.0, "original_max_position_embeddings": 128}

PLAIN, COPIER, DOUBLE = "none+pre_norm", "copier", "none+pre_norm+double"
CLEAN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "none+post_norm": {"feedback": Feedback.post_norm},
    "per_layer+pre_norm": {"fusion_norm": FusionNorm.per_layer},
    "per_layer+post_norm": {"fusion_norm": FusionNorm.per_layer, "feedback": Feedback.post_norm},
    "concat+pre_norm": {"fusion_norm": FusionNorm.concat},
    "none+pre_norm+normed": {"residual": Residual.normed},
    DOUBLE: {"double_hidden_norm": True},
    COPIER: {},
}


def config(**changes: Any) -> DrafterConfig:
    fields: dict[str, Any] = {
        "hidden_size": WIDTH,
        "target_hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(SYMBOLS),
        "boundaries": BOUNDARIES,
        "rope": Rope(max_position=256),
    }
    return DrafterConfig(**fields | changes)


def target(variant: str = PLAIN) -> Target:
    """The target of a variant's pair."""
    return copier_target() if variant == COPIER else mixer_target()


def prompts(variant: str = PLAIN, n: int = 72) -> list[list[int]]:
    made = copies if variant == COPIER else stories
    return made(n, seed=5)[:, :4].tolist()


def drafter(variant: str = PLAIN) -> Drafter:
    """The trained drafter of a variant."""
    if variant == COPIER:
        return copier_drafter()
    return mixer_drafter() if variant == PLAIN else _variant(variant)


def _learn(made: Drafter, teacher: Target, texts: Sequence[Text], steps: int, lr: float) -> Drafter:
    made.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
    spec = TrainSpec(ttt=4, steps=steps, batch=16, lr=lr, decay=1.0)
    with tempfile.TemporaryDirectory() as folder:
        corpus = FeatureStore(folder).build(teacher, texts, BOUNDARIES, dtype="float32")
        train(made, corpus, teacher, spec, seed=0)
    return made.eval().requires_grad_(False)


def _texts(tokens: Sequence[Sequence[int]]) -> list[Text]:
    facts: Any = {"kind": "given", "temperature": None, "origin": "faults"}
    return [Text.of(f"s{i}", "", row[:4], row[4:], **facts) for i, row in enumerate(tokens)]


# Mixer


def stories(n: int, *, seed: int) -> Tensor:
    """[n, LENGTH] texts: each symbol has two successors, the symbol two places back chooses."""
    rng = torch.Generator().manual_seed(seed)
    size = len(SYMBOLS)
    law = torch.Generator().manual_seed(7)
    after = torch.stack([torch.randperm(size, generator=law) for _ in range(2)])
    drawn = torch.randint(size, (n, LENGTH), generator=rng)
    fresh = torch.rand(n, LENGTH, generator=rng) < 0.1
    for t in range(2, LENGTH):
        follows = after[drawn[:, t - 2] % 2, drawn[:, t - 1]]
        drawn[:, t] = torch.where(fresh[:, t], drawn[:, t], follows)
    return torch.tensor(SYMBOLS)[drawn]


def _fit(states: Tensor, wanted: Tensor) -> Tensor:
    """Head [classes, H] of the least cross entropy from states [N, H] to wanted [N, classes]."""
    head = torch.zeros(wanted.shape[1], states.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([head], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -(wanted * (states @ head.T).log_softmax(-1)).sum(-1).mean()
        value = value + 1e-6 * head.pow(2).sum()
        value.backward()
        return value

    optimiser.step(loss)
    return head.detach()


@cache
def mixer_target() -> Target:
    model = tiny_llama(vocab_size=VOCAB, hidden_size=WIDTH, layers=LAYERS, max_position=256)
    with torch.no_grad():
        # As large as what the layers add, and of many lengths, so that a norm is no mere scale.
        steps = (torch.arange(VOCAB) // 2).clamp(max=24)
        lengths = torch.logspace(-0.7, 0.7, 25)[steps][:, None]
        model.model.embed_tokens.weight.mul_(WIDTH**0.5 * lengths)
        texts = stories(300, seed=1)
        states = model.model(texts, use_cache=False).last_hidden_state[:, 2:-1].reshape(-1, WIDTH)
    head = _fit(states, torch.nn.functional.one_hot(texts[:, 3:].reshape(-1), VOCAB).float())
    model.lm_head.weight.data.copy_(head)
    return Target.from_model(model, name="mixer", eos_ids=())


@cache
def _lessons() -> list[Text]:
    opened = stories(120, seed=2)[:, :4].tolist()
    made = mixer_target().generate(opened, max_new_tokens=LENGTH - 4, temperature=1.0, batch=120)
    return _texts([p + m for p, m in zip(opened, made, strict=True)])


@cache
def mixer_drafter() -> Drafter:
    teacher, mapping = mixer_target(), torch.tensor(SYMBOLS)
    made = initialise(config(), teacher, mapping, seed=0, head_init=0.0)
    layer: Any = made.layers[0]
    with torch.no_grad():
        # Gains that differ, or a second norm with them would change nothing; and attention, MLP
        # and captured states are made loud, so that none of them can be misread in silence.
        layer.input_layernorm.weight.copy_(torch.linspace(0.3, 2.0, WIDTH))
        layer.self_attn.o_proj.weight.mul_(3)
        layer.mlp.down_proj.weight.mul_(2)
        made.fc.weight[:, :WIDTH].mul_(6)
        made.fc.weight[:, WIDTH : 2 * WIDTH].mul_(4)
        made.fc.weight[:, 2 * WIDTH :].mul_(2)
        layer.self_attn.q_proj.weight.mul_(2)
        layer.self_attn.k_proj.weight.mul_(2)
        texts = torch.tensor([t.tokens for t in _lessons()])
        out = teacher.forward(texts, torch.full((len(texts),), LENGTH), BOUNDARIES)
        assert out.logits is not None
        p = out.logits[..., mapping].softmax(-1)
        anchors = torch.arange(3, LENGTH - 5)
        states, wanted = [], []
        for step in unroll(made, texts, out.aux, depth=4, mode="forced", anchors=anchors):
            states.append(step.state.post.reshape(-1, WIDTH))
            wanted.append(p[:, anchors + step.depth].reshape(-1, len(mapping)))
    made.lm_head.weight.data.copy_(_fit(torch.cat(states), torch.cat(wanted)))
    return _learn(made, teacher, _lessons(), 90, 1e-2)


@cache
def _variant(variant: str) -> Drafter:
    """The plain drafter, trained on under another arithmetic."""
    made = build(mixer_drafter(), Reading(config(**CLEAN[variant]), torch.tensor(SYMBOLS)))
    for weight in made.parameters():
        weight.data = weight.data.clone()  # the plain one is trained no further
    return _learn(made, mixer_target(), _lessons(), 30, 1e-2)


# Copier


def copies(n: int, *, seed: int) -> Tensor:
    """[n, LENGTH + 1] texts of eight symbols in which a token repeats the third one before it."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.tensor(SYMBOLS[:8])
    drawn = ids[torch.randint(len(ids), (n, LENGTH + 1), generator=rng)]
    fresh = torch.rand(n, LENGTH + 1, generator=rng) < 0.04
    for t in range(3, LENGTH + 1):
        drawn[:, t] = torch.where(fresh[:, t], drawn[:, t], drawn[:, t - 3])
    return drawn


@cache
def copier_target() -> Target:
    model = pretrain(
        copies(400, seed=1).tolist(),
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        layers=LAYERS,
        steps=110,
        batch=16,
        length=LENGTH,
        lr=1e-2,
        seed=0,
    )
    return Target.from_model(model, name="copier", eos_ids=())


@cache
def copier_drafter() -> Drafter:
    teacher = copier_target()
    made = initialise(config(), teacher, torch.tensor(SYMBOLS), seed=0, head_init=0.3)
    return _learn(made, teacher, _texts(copies(400, seed=2)[:, :LENGTH].tolist()), 80, 2e-2)


# Twins: other weights, the same function, and a reading that the first ones cannot show


def spread(made: Drafter, *, seed: int = 0, sigma: float = 0.5) -> Drafter:
    """The function of ``made`` under one hidden norm, its gains of ``input_layernorm`` unlike.

    The projections' columns for the embedding are divided by what its gains are multiplied with.
    Two norms then compute something else, which they hardly do while the gains are alike.
    """
    return _twin(made, _lognormal(made, seed, sigma))


def twice(made: Drafter, states: Tensor, *, seed: int = 0, sigma: float = 0.3) -> Drafter:
    """``made`` for two hidden norms: nearly its function under them, another one under one.

    The second norm divides by the RMS of states [N, H] times new gains, which is the states' own
    but for a factor that varies little; its mean goes into the gains of ``hidden_norm``.
    """
    gains = _lognormal(made, seed, sigma)
    layer: Any = made.layers[0]
    factor = (states * gains).pow(2).mean(-1).sqrt() / states.pow(2).mean(-1).sqrt()
    hidden = layer.hidden_norm.weight * factor.log().mean().exp() / gains
    twin = _twin(made, gains / layer.input_layernorm.weight)
    reading = Reading(
        made.config, made.draft_to_target, {"layers.0.hidden_norm.weight": hidden}
    ).change(double_hidden_norm=True)
    return build(twin, reading)


def _lognormal(made: Drafter, seed: int, sigma: float) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (sigma * torch.randn(made.config.hidden_size, generator=rng)).exp()


def _twin(made: Drafter, scale: Tensor) -> Drafter:
    layer: Any = made.layers[0]
    tensors = {"layers.0.input_layernorm.weight": layer.input_layernorm.weight * scale}
    for name, module in layer.self_attn.named_children():
        if module in layer.self_attn.readers():
            weight = module.weight.clone()
            weight[:, : len(scale)] /= scale
            tensors[f"layers.0.self_attn.{name}.weight"] = weight
    return build(made, Reading(made.config, made.draft_to_target, tensors))


def fed(made: Drafter, teacher: Target, texts: Sequence[Text]) -> Tensor:
    """What reaches the hidden norm of ``made`` on some texts at depths 1 to 4, [N, H]."""
    found = []
    for text in texts:
        ids = torch.tensor([text.tokens])
        aux = teacher.forward(ids, torch.tensor([ids.shape[1]]), made.config.boundaries).aux
        with torch.no_grad(), capture(made, ["feedback.in"]) as seen:
            list(unroll(made, ids, aux, depth=4, mode="forced"))
        found += [seen["feedback.in", d].flatten(0, 1) for d in (1, 2, 3, 4)]
    return torch.cat(found)


def apart(made: Drafter, texts: Sequence[Text]) -> Drafter:
    """``made`` with fewer draft ids: no two neighbours, so that wrong maps are maps as well.

    Of neighbours the one that stands in ``texts`` more often is kept.
    """
    counts = Counter(t for text in texts for t in text.continuation)
    ids = made.draft_to_target.tolist()
    kept: set[int] = set()
    for i in sorted(ids, key=lambda i: -counts[i]):
        if not {i - 1, i + 1} & kept and i < made.config.vocab_size - len(ids):
            kept.add(i)
    rows = torch.tensor([k for k, i in enumerate(ids) if i in kept])
    head = {"lm_head.weight": made.lm_head.weight[rows]}
    reading = Reading(made.config, made.draft_to_target[rows], head)
    return build(made, reading.change(draft_vocab_size=len(rows)))


# Faults


@dataclass(frozen=True)
class Fault:
    """A trained drafter that is read wrongly. ``cure`` is the patch that undoes it."""

    variant: str
    plant: Callable[[Reading], Reading]
    cure: dict[str, Any]
    said: Provenance = field(default_factory=dict)

    def planted(self) -> Drafter:
        made = drafter(self.variant)
        found = build(made, self.plant(Reading(made.config, made.draft_to_target)))
        found.provenance |= self.said
        return found


def _fault(variant: str, cure: dict[str, Any], **changes: Any) -> Fault:
    return Fault(variant, lambda r: r.change(**changes), cure)


def _map(step: int) -> Callable[[Reading], Reading]:
    shift = step * torch.arange(len(SYMBOLS))
    return lambda r: Reading(r.config, r.draft_to_target + shift)


RIGHT_MAP = {"draft_to_target": f"[{', '.join(map(str, SYMBOLS[:4]))}, ...]"}
BOTH = "per_layer+post_norm"
FAULTS: dict[str, Fault] = {
    "boundaries one too high": _fault(PLAIN, {"boundaries": BOUNDARIES}, boundaries=(1, 3, 4)),
    "middle boundary one too low": _fault(PLAIN, {"boundaries": BOUNDARIES}, boundaries=(0, 1, 3)),
    "raw feedback read as normed": _fault(
        PLAIN, {"feedback": Feedback.pre_norm}, feedback=Feedback.post_norm
    ),
    "normed feedback read as raw": _fault(
        "none+post_norm", {"feedback": Feedback.post_norm}, feedback=Feedback.pre_norm
    ),
    "raw residual read as normed": _fault(
        PLAIN, {"residual": Residual.raw}, residual=Residual.normed
    ),
    "normed residual read as raw": _fault(
        "none+pre_norm+normed", {"residual": Residual.normed}, residual=Residual.raw
    ),
    "fc_norm dropped": _fault(
        "per_layer+pre_norm", {"fusion_norm": FusionNorm.per_layer}, fusion_norm=FusionNorm.none
    ),
    "fc_norm of ones added": _fault(
        PLAIN, {"fusion_norm": FusionNorm.none}, fusion_norm=FusionNorm.per_layer
    ),
    "input_norm dropped": _fault(
        "concat+pre_norm", {"fusion_norm": FusionNorm.concat}, fusion_norm=FusionNorm.none
    ),
    "offsets of d2t taken as ids": Fault(PLAIN, _map(-1), RIGHT_MAP),
    "ids of d2t taken as offsets": Fault(PLAIN, _map(1), RIGHT_MAP),
    "rope base 100 for 10000": _fault(
        PLAIN, {"rope.theta": 10000.0}, rope=Rope(theta=100.0, max_position=256)
    ),
    "rope block yarn x32 for none": _fault(
        PLAIN,
        {"rope.rope_type": "default", "rope.parameters": {}},
        rope=Rope(rope_type="yarn", parameters=YARN, max_position=4096),
    ),
    "double hidden norm read as single": _fault(
        DOUBLE, {"double_hidden_norm": True}, double_hidden_norm=False
    ),
    "single hidden norm read as double": _fault(
        PLAIN, {"double_hidden_norm": False}, double_hidden_norm=True
    ),
    "drafted positions one too far": _fault(
        COPIER, {"draft_position_offset": 0}, draft_position_offset=1
    ),
    "two at once: boundaries, feedback": _fault(
        PLAIN,
        {"boundaries": BOUNDARIES, "feedback": Feedback.pre_norm},
        boundaries=(1, 3, 4),
        feedback=Feedback.post_norm,
    ),
    "two at once: a 3.1 drafter read as 3": _fault(
        BOTH,
        {"fusion_norm": FusionNorm.per_layer, "feedback": Feedback.post_norm},
        fusion_norm=FusionNorm.none,
        feedback=Feedback.pre_norm,
    ),
}

# Normed feedback and a norm before fc do for these weights what a normed residual does.
EQUALS = {"normed residual read as raw"}

# These weights compute nearly the same under both: no finding, and none that would matter.
ALIKE = {
    "fc_norm read as input_norm": _fault(
        "per_layer+pre_norm", {"fusion_norm": FusionNorm.per_layer}, fusion_norm=FusionNorm.concat
    ),
}

# Too faint for texts of 32 tokens, and the file is silent: a doubt, not a finding, and never clean.
FAINT = {
    "rope base 10500 for 10000": Fault(
        PLAIN,
        lambda r: r.change(rope=Rope(theta=10500.0, max_position=256)),
        {"rope.theta": 10000.0},
        {"rope.theta": Sourced(value=10500.0, origin=Origin.assumed, where="not in the file")},
    ),
}
