"""Training: other trainers' losses and gradients, hand-made losses, resume, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from golden import cases
from test_golden import Shape
from torch import Tensor
from torch.nn import functional

from driftlab.config import TrainSpec
from driftlab.data.features import Batch, Features, FeatureStore
from driftlab.data.text import Text
from driftlab.engines import train as train_module
from driftlab.engines.anchors import unroll
from driftlab.engines.train import (
    SoftTargets,
    TrainResult,
    choose_vocabulary,
    initialise,
    train,
    ttt_loss,
)
from driftlab.errors import CheckpointError, ContractError, DataError, NumericsError
from driftlab.models import drafter as drafter_module
from driftlab.models.checkpoints import load_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.frozen import Frozen, freeze
from driftlab.models.hooks import attach
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama

# --- other trainers -----------------------------------------------------------------------------


def peer_losses(case: cases.Case, made: Drafter) -> list[Tensor]:
    """Loss of each depth as the case's trainer takes it (tests/golden/README.md)."""
    ids, aux = case.inputs["ttt.input_ids"], case.inputs["ttt.aux_hidden"]
    if ids.dim() == 1:
        ids, aux = ids[None], aux[None]
    # Their row j is our anchor j, for the last state too: a token before and a state after.
    tokens, states = functional.pad(ids, (1, 0)), functional.pad(aux, (0, 0, 0, 1))
    mask = case.inputs["ttt.loss_mask"].float().reshape(ids.shape)
    if "ttt.target_logits_shifted_fp32" in case.expected:
        logits = case.expected["ttt.target_logits_shifted_fp32"]
    else:
        last = case.inputs["ttt.verifier_last_hidden_prenorm"].reshape(*ids.shape, -1).float()
        parts = cases.verifier()
        logits = functional.rms_norm(last, last.shape[-1:], parts["norm"], 1e-5) @ parts["head"].T
    p = logits[..., made.draft_to_target].softmax(-1)
    reachable = (made.target_to_draft[logits.argmax(-1)] >= 0).float()
    size, losses = ids.shape[1], []
    for i, step in enumerate(unroll(made, tokens, states, depth=8, mode="forced")):
        log_q = step.logits.log_softmax(-1)

        def shifted(x: Tensor, fill: float = 0.0, by: int = i) -> Tensor:
            return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], dim=1)

        if case.peer == "speculators":
            kl = (p[:, i:] * (p[:, i:].log() - log_q[:, : size - i])).sum(-1)
            losses.append((kl * mask[:, i:]).sum() / mask[:, i:].sum())
            continue
        keep = shifted(mask * reachable)
        fill = 0.0 if case.peer.startswith("SafeAILab") else 1 / p.shape[-1]
        entropy = -(shifted(p, fill) * log_q).sum(-1) * keep
        per_row = case.peer.startswith("torchspec")
        losses.append(entropy.sum() / keep.sum() if per_row else entropy.mean())
    return losses


@pytest.mark.parametrize("name", [n for n in cases.names() if cases.case(n).losses])
def test_losses_and_gradients_of_other_trainers(name: str, tmp_path: Path) -> None:
    """Per-depth loss and every gradient, to 2e-5 relative."""
    case = cases.case(name)
    assert case.losses is not None
    made = load_drafter(case.write(tmp_path / "drafter"), target=Shape()).requires_grad_(True)
    losses = peer_losses(case, made)
    if case.peer == "speculators":  # stored with the step's weight in it
        stored = [case.losses["kl_div"][f"loss_{i}_sum"] / 0.8**i for i in range(8)]
    else:
        stored = case.losses["per_depth"]
    assert [loss.item() for loss in losses] == pytest.approx(stored, rel=2e-5)
    torch.stack([0.8**i * loss for i, loss in enumerate(losses)]).sum().backward()
    step = cases.packed()["gradient_step"]
    ours = {n: p.grad.flatten()[::step] for n, p in made.named_parameters() if p.grad is not None}
    compared = 0
    for key, wanted in case.expected.items():
        if key.startswith("grad."):
            found = ours[key.removeprefix("grad.").replace("midlayer.", "layers.0.")]
            assert float((found - wanted).norm() / wanted.norm()) < 2e-5, key
            compared += 1
    assert compared >= 12


# --- the loss -----------------------------------------------------------------------------------


def made_batch(lengths: list[int], prompt_lens: list[int]) -> Batch:
    texts = [pairs.ids(n, seed=n) for n in lengths]
    of = pairs.target()
    outs = [of.forward(t[None], torch.tensor([len(t)]), pairs.BOUNDARIES) for t in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        pad(texts, batch_first=True),
        torch.tensor(lengths),
        torch.tensor(prompt_lens),
        pad([o.aux[0] for o in outs], batch_first=True),
        pad([o.last[0] for o in outs], batch_first=True),
        tuple(range(len(lengths))),
    )


@pytest.mark.parametrize("prompt_lens", [[1, 1, 1], [1, 3, 4], [2, 4, 8]])
def test_the_loss_is_the_one_that_is_described(prompt_lens: list[int]) -> None:
    """Text by text and anchor by anchor, with the target's distributions from its own logits."""
    batch, made = made_batch([3, 6, 9], prompt_lens), pairs.drafter()
    spec = TrainSpec(ttt=4, decay=0.7)
    targets = SoftTargets(pairs.target(), made.draft_to_target)
    with torch.no_grad():
        loss, counted = ttt_loss(made, batch, targets, spec)
    terms: list[list[float]] = [[] for _ in range(spec.ttt)]
    for b, n in enumerate(batch.lengths.tolist()):
        tokens, aux = batch.tokens[b, :n], batch.aux[b, :n]
        logits = pairs.target().head(batch.last[b, :n])[:, made.draft_to_target]
        with torch.no_grad():
            steps = list(unroll(made, tokens[None], aux[None], depth=spec.ttt, mode="forced"))
        for t in range(n - 1):
            for k in range(spec.ttt):
                guessed = t + 2 + k  # the position whose token step k of anchor t guesses
                if guessed >= n or guessed < prompt_lens[b]:
                    continue
                if int(tokens[guessed]) not in made.draft_to_target.tolist():
                    continue
                p = logits[guessed - 1].double().softmax(-1)
                log_q = steps[k].logits[0, t].double().log_softmax(-1)
                terms[k].append(float(-(p * log_q).sum()))
    wanted = sum(0.7**k * sum(x) / len(x) for k, x in enumerate(terms) if x)
    assert counted == sum(map(len, terms)) > 0
    assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_texts_shorter_than_the_depths_bear_what_they_can() -> None:
    """Report 45: two tokens have one anchor and nothing to guess."""
    made = pairs.drafter(draft_vocab_size=97)
    batch = made_batch([2, 3], [1, 1])
    targets = SoftTargets(pairs.target(), made.draft_to_target)
    loss, counted = ttt_loss(made, batch, targets, TrainSpec(ttt=6))
    assert counted == 1 and math.isfinite(loss.item())


def test_soft_targets_keep_scale_and_cap() -> None:
    """A restricted head gives the same distribution as the whole one restricted."""

    class Capped:
        logit_scale = 0.25
        softcap: float | None = 2.0
        head_weight = embedding_weight = torch.randn(
            97, 32, generator=torch.Generator().manual_seed(0)
        )
        final_norm_weight = None

        def head(self, last: Tensor) -> Tensor:
            return 2.0 * torch.tanh(last @ self.head_weight.T * 0.25 / 2.0)

    last = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)) * 3
    teacher, kept = Capped(), torch.tensor([1, 5, 90])
    wanted = teacher.head(last)[..., kept].softmax(-1)
    torch.testing.assert_close(SoftTargets(teacher, kept)(last), wanted)
    everything = torch.arange(97)
    whole = SoftTargets(teacher, everything)(last)
    torch.testing.assert_close(whole, teacher.head(last).softmax(-1))


# --- how it is computed -------------------------------------------------------------------------


def gradients(made: Drafter, loss: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def assert_close_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert float((found[name] - grad).norm()) <= 2e-5 * float(grad.norm()) + 1e-7, name


VARIED: list[dict[str, Any]] = [
    {"fusion_norm": "per_layer", "feedback": "post_norm"},
    {"attention_gate": True, "qkv_bias": True, "residual": "normed"},
    {"num_layers": 2, "windows": (None, 2), "logit_scale": 0.5},
    {"windows": (2,), "window_moves": True, "logits_from_raw": True},
    {
        "num_kv_heads": 4,
        "mla": {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 6}
        | {"qk_rope_head_dim": 4, "v_head_dim": 5},
    },
]


@pytest.mark.parametrize("changes", VARIED, ids=str)
@pytest.mark.parametrize("prompt_lens", [[1, 3, 4], [4, 5, 6]])
def test_gradients_are_those_of_the_plain_unroll(
    changes: dict[str, Any], prompt_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch differentiates `unroll` and its own cross entropy; blocks of few rows, either way."""
    monkeypatch.setattr(drafter_module, "BLOCK_ROWS", 3)
    monkeypatch.setattr(train_module, "_block_rows", lambda device, vocabulary: 8)
    batch, made = made_batch([5, 8, 11], prompt_lens), pairs.drafter(**changes)
    made.requires_grad_(True)
    spec = TrainSpec(ttt=4, decay=0.7)
    targets = SoftTargets(pairs.target(), made.draft_to_target)
    loss, counted = ttt_loss(made, batch, targets, spec)
    ours = gradients(made, loss)
    first = min(prompt_lens) - 2 if min(prompt_lens) > 2 else 0
    anchors = torch.arange(first, 10)
    total, n = torch.zeros(()), 0
    with attach(made, "*attn.pattern", lambda value, moment: None):  # torch's own gradient
        steps = unroll(
            *(made, batch.tokens, batch.aux),
            depth=4,
            mode="forced",
            lengths=batch.lengths,
            anchors=anchors,
        )
        for k, step in enumerate(steps):
            position = anchors + 2 + k
            known = (step.truth >= 0) & (position >= batch.prompt_lens[:, None])
            keep = known & (made.target_to_draft[step.truth.clamp(min=0)] >= 0)
            p = targets(batch.last)[:, (position - 1).clamp(max=10)]
            if keep.any():
                total = total + 0.7**k * functional.cross_entropy(step.logits[keep], p[keep])
                n += int(keep.sum())
    assert counted == n and loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert_close_gradients(ours, gradients(made, total))


def test_a_hook_that_reads_the_embedding_changes_nothing() -> None:
    """It is then computed at every depth, and not once for all."""
    batch, made = made_batch([5, 8, 11], [1, 2, 3]), pairs.drafter().requires_grad_(True)
    targets = SoftTargets(pairs.target(), made.draft_to_target)
    bare, _ = ttt_loss(made, batch, targets, TrainSpec())
    depths: list[int] = []
    with attach(made, "token.*", lambda value, moment: depths.append(moment.depth)):
        watched, _ = ttt_loss(made, batch, targets, TrainSpec())
    assert sorted(set(depths)) == [1, 2, 3, 4]
    assert watched.item() == pytest.approx(bare.item(), rel=1e-6)
    assert_close_gradients(gradients(made, watched), gradients(made, bare))


def test_what_a_step_keeps_for_its_gradient_grows_with_the_text() -> None:
    """Neither patterns nor logits: twice the text keeps twice as much."""
    made = pairs.drafter(feedback="post_norm").requires_grad_(True)
    targets = SoftTargets(pairs.target(), made.draft_to_target)

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        batch = made_batch([length], [1])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ttt_loss(made, batch, targets, TrainSpec())
        return sum(sizes.values())

    small, large = kept(120), kept(240)
    assert large < 2.1 * small


# --- frozen parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parts_are_the_target_s(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(vocab_size=97, hidden_size=32, layers=4)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    of = Target.from_model(model, name="T", eos_ids=())
    path = tmp_path / "frozen.safetensors"
    freeze(of, path)
    size = path.stat().st_size
    freeze(of, path)  # there already
    parts = Frozen(path)
    last = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(parts.head(last), of.head(last))
    assert torch.equal(parts.embedding_weight, of.embedding_weight)
    assert of.final_norm_weight is not None and parts.final_norm_weight is not None
    assert torch.equal(parts.final_norm_weight, of.final_norm_weight)
    assert (size < 1.5 * 97 * 32 * 4) == tied  # tied weights are stored once
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Frozen(path)


def test_a_head_with_a_bias_is_not_frozen(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=97, hidden_size=32, layers=4)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 97))
    of = Target.from_model(model, name="T", eos_ids=())
    with pytest.raises(ContractError, match="not a product of its weight alone"):
        freeze(of, tmp_path / "frozen.safetensors")
    assert not (tmp_path / "frozen.safetensors").exists()


# --- starting values ----------------------------------------------------------------------------


def test_a_fresh_drafter_starts_from_the_target() -> None:
    of, kept = pairs.target(), torch.arange(3, 43)
    made = initialise(pairs.config(fusion_norm="concat"), of, kept, seed=0, head_init=0.3)
    assert torch.equal(made.embed_tokens.weight, of.embedding_weight)
    assert not made.embed_tokens.weight.requires_grad
    assert of.final_norm_weight is not None
    wanted = 0.3 * of.head_weight[kept] * of.final_norm_weight
    torch.testing.assert_close(made.lm_head.weight.detach(), wanted)
    assert bool((made.input_norm.weight == 1).all()) and bool((made.norm.weight == 1).all())
    assert made.fc.weight.std().item() == pytest.approx(96**-0.5, rel=0.1)
    random_head = initialise(pairs.config(), of, kept, seed=0, head_init=0)
    assert random_head.lm_head.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_a_drafter_of_another_width_learns_its_embedding() -> None:
    wide = pairs.config(hidden_size=40, head_dim=10)
    made = initialise(wide, pairs.target(), torch.arange(40), seed=0, head_init=1.0)
    assert made.embed_tokens.weight.requires_grad
    assert made.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_seed_alone_decides_the_start() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        made = initialise(pairs.config(), pairs.target(), torch.arange(40), seed=seed, head_init=1)
        return made.state_dict()

    first = weights(0)
    torch.rand(3)  # the global state moves
    again, other = weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_the_draft_vocabulary_is_the_most_frequent_one() -> None:
    texts = [[5, 5, 5, 2, 2, 9], [7, 9, 2]]
    assert choose_vocabulary(texts, 2, 12).tolist() == [2, 5]
    # 7 comes once; then ids that never occur, from the lowest: always as many as asked for.
    assert choose_vocabulary(texts, 6, 12).tolist() == [0, 1, 2, 5, 7, 9]
    assert choose_vocabulary([], 3, 12).tolist() == [0, 1, 2]
    for size in (0, -1, 13):
        with pytest.raises(DataError, match="1 to 12 ids"):
            choose_vocabulary(texts, size, 12)


# --- training -----------------------------------------------------------------------------------

SPEC = TrainSpec(ttt=3, steps=7, batch=3, lr=1e-2, checkpoint_every=3)


def given(n: int, *, first: int = 0) -> list[Text]:
    texts = []
    for i in range(first, first + n):
        tokens = pairs.ids(8 + i % 3, seed=i).tolist()
        texts.append(pairs.as_text(tokens[:2], tokens[2:], f"p{i}"))
    return texts


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return FeatureStore(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def corpus(store: FeatureStore) -> Features:
    return store.build(pairs.target(), given(8), pairs.BOUNDARIES, dtype="float32")


def fresh(*, seed: int = 0, draft_vocab_size: int = pairs.VOCAB, **changes: Any) -> Drafter:
    settings = pairs.config(draft_vocab_size=draft_vocab_size, **changes)
    kept = torch.arange(draft_vocab_size)
    return initialise(settings, pairs.target(), kept, seed=seed, head_init=0.3)


def learn(
    made: Drafter,
    corpus: Features,
    spec: TrainSpec = SPEC,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_step: Callable[[int], None] = lambda n: None,
) -> TrainResult:
    return train(
        made, corpus, pairs.target(), spec, seed=seed, checkpoint=checkpoint, on_step=on_step
    )


def equal_weights(a: Drafter, b: Drafter) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return all(torch.equal(mine[name], other[name]) for name in mine)


class Killed(Exception):
    pass


def killer(after: int) -> Callable[[int], None]:
    done = [0]

    def on_step(n: int) -> None:
        done[0] += n
        if done[0] >= after:
            raise Killed

    return on_step


@pytest.mark.parametrize("killed_after", [2, 3, 5, 6])
def test_a_killed_training_goes_on_bit_for_bit(
    corpus: Features, tmp_path: Path, killed_after: int
) -> None:
    whole, cut = fresh(), fresh()
    undisturbed = learn(whole, corpus)
    path = tmp_path / "training.pt"
    with pytest.raises(Killed):
        learn(cut, corpus, checkpoint=path, on_step=killer(killed_after))
    resumed = fresh()
    told: list[int] = []
    oftener = SPEC.model_copy(update={"checkpoint_every": 2})  # moves no number
    result = learn(resumed, corpus, oftener, checkpoint=path, on_step=told.append)
    assert equal_weights(whole, resumed)
    assert result.losses == undisturbed.losses and result.tokens == undisturbed.tokens
    kept = killed_after // 3 * 3 - (3 if killed_after % 3 == 0 else 0)  # killed before it was saved
    assert told == [kept] + [1] * (SPEC.steps - kept)
    # Finished: nothing is left to train.
    again = fresh()
    assert learn(again, corpus, checkpoint=path).losses == undisturbed.losses
    assert equal_weights(whole, again)


def test_same_seed_same_bytes(corpus: Features) -> None:
    """Report 54."""
    a, b, c = fresh(), fresh(), fresh(seed=1)
    first, second, third = learn(a, corpus), learn(b, corpus), learn(c, corpus, seed=1)
    assert first.losses == second.losses and equal_weights(a, b)
    assert first.losses != third.losses and not equal_weights(a, c)
    assert len(first.losses) == SPEC.steps and first.skipped == 0
    assert first.precision == "float32 (train.autocast = off)"
    assert not a.training


def test_embeddings_stay_and_everything_else_moves(corpus: Features) -> None:
    made = fresh(fusion_norm="per_layer", attention_gate=True)
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    learn(made, corpus)
    for name, weight in made.named_parameters():
        assert torch.equal(weight, before[name]) == (name == "embed_tokens.weight"), name
    assert torch.equal(made.embed_tokens.weight, pairs.target().embedding_weight)


def test_the_loss_decreases_until_the_pair_is_memorised() -> None:
    losses = pairs.memorised().losses
    assert sum(losses[-10:]) / 10 < 0.1 * losses[0]


def test_bfloat16_autocast_trains_and_says_so(corpus: Features) -> None:
    made = fresh()
    plain = learn(fresh(), corpus)
    mixed = learn(made, corpus, SPEC.model_copy(update={"autocast": "bfloat16"}))
    assert mixed.precision == "bfloat16 autocast (train.autocast = bfloat16)"
    assert mixed.losses != plain.losses
    assert mixed.losses == pytest.approx(plain.losses, rel=0.05)
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    auto = learn(fresh(), corpus, SPEC.model_copy(update={"autocast": "auto", "steps": 1}))
    capability = torch.backends.cpu.get_cpu_capability()
    assert auto.precision in {f"{x} (auto: CPU is {capability})" for x in PRECISIONS}


PRECISIONS = ("float32", "bfloat16 autocast")


@pytest.mark.parametrize("fusion", ["none", "per_layer", "concat"])
def test_states_in_bfloat16_train_a_float32_drafter(store: FeatureStore, fusion: str) -> None:
    half = store.build(pairs.target(), given(8), pairs.BOUNDARIES, dtype="bfloat16")
    result = learn(fresh(fusion_norm=fusion), half, SPEC.model_copy(update={"steps": 2}))
    assert all(map(math.isfinite, result.losses))


def test_a_loss_that_is_not_finite_stops_the_training(corpus: Features) -> None:
    made = fresh()
    with torch.no_grad():
        made.fc.weight[0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"not finite at step 0 \(got nan\)"):
        learn(made, corpus)


def test_nothing_to_learn_from_is_an_error(store: FeatureStore) -> None:
    """Report 47: responses outside the draft vocabulary, and texts that are all prompt."""
    texts = [pairs.as_text([1, 2], [80, 81, 82, 83, 84, 85], f"p{i}") for i in range(3)]
    far = store.build(pairs.target(), texts, pairs.BOUNDARIES, dtype="float32")
    with pytest.raises(DataError, match="no position is supervised"):
        learn(fresh(draft_vocab_size=40), far, SPEC.model_copy(update={"steps": 2}))
    prompts = [pairs.as_text([1, 2, 3], [], "p")]
    bare = store.build(pairs.target(), prompts, pairs.BOUNDARIES, dtype="float32")
    with pytest.raises(DataError, match="no position is supervised"):
        learn(fresh(), bare)


def test_batches_without_a_supervised_position_are_counted(store: FeatureStore) -> None:
    mixed = [*given(3), pairs.as_text([1], [2], "short")]
    some = store.build(pairs.target(), mixed, pairs.BOUNDARIES, dtype="float32")
    spec = SPEC.model_copy(update={"batch": 1, "steps": 4})
    result = learn(fresh(), some, spec)
    assert result.skipped == 1 and sum(map(math.isnan, result.losses)) == 1
    learned = [loss for loss in result.losses if not math.isnan(loss)]
    assert result.loss == sum(learned) / 3


def test_the_loss_is_that_of_the_last_supervised_batches_up_to_the_kept_weights() -> None:
    losses = (math.nan, *(float(n) for n in range(30)), math.nan)
    plain = TrainResult(losses, 0, 0.0, 2, "float32")
    assert plain.loss == sum(range(10, 30)) / 20
    assert replace(plain, evaluations=((4, 0.5), (32, 0.2))).loss == (0 + 1 + 2) / 3
    assert replace(plain, evaluations=((1, 0.5),)).loss is None


def test_a_checkpoint_of_another_training_is_refused(
    corpus: Features, store: FeatureStore, tmp_path: Path
) -> None:
    path, short = tmp_path / "training.pt", SPEC.model_copy(update={"steps": 1})
    learn(fresh(draft_vocab_size=40), corpus, short, checkpoint=path)

    def refused(
        made: Drafter, states: Features = corpus, spec: TrainSpec = short, seed: int = 0
    ) -> None:
        before = made.fc.weight.clone()
        with pytest.raises(CheckpointError, match="belongs to another training"):
            learn(made, states, spec, seed=seed, checkpoint=path)
        assert torch.equal(made.fc.weight, before)

    refused(fresh(draft_vocab_size=40), seed=1)
    refused(fresh(draft_vocab_size=40), spec=short.model_copy(update={"lr": 1e-3}))
    refused(fresh(draft_vocab_size=40, feedback="post_norm"))
    settings = pairs.config(draft_vocab_size=40)
    refused(initialise(settings, pairs.target(), torch.arange(40) + 1, seed=0, head_init=0.3))
    others = store.build(pairs.target(), given(8, first=50), pairs.BOUNDARIES, dtype="float32")
    refused(fresh(draft_vocab_size=40), others)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        learn(fresh(draft_vocab_size=40), corpus, short, checkpoint=path)
