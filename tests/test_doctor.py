"""The doctor on trained micro pairs: clean ones are left in peace, planted faults are named."""

from __future__ import annotations

import json
import math
import runpy
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file

from driftlab import doctor
from driftlab.config import Feedback, FusionNorm, Origin, Residual, Rope, Sourced
from driftlab.doctor import Diagnosis, Limits, Outcome, Verdict, scoring
from driftlab.doctor.candidates import alternatives, changes
from driftlab.doctor.diagnosis import FILE
from driftlab.doctor.ruling import hopeless, outcome
from driftlab.doctor.scoring import Bench, margins, own_texts, paired_p
from driftlab.engines.anchors import unroll
from driftlab.engines.chain import speculate
from driftlab.errors import (
    AssumptionError,
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
)
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.profiles import (
    EMBED,
    Facts,
    Patch,
    Profile,
    Reading,
    Served,
    build,
    gather_facts,
    serve,
)
from driftlab.models.drafter import Drafter
from driftlab.results.stats import Estimate, Sample

# The others take the same way and run with the slow tests; feedback, residual and fusion norm
# stand below as well, where copies are corrected and profiles examined.
QUICK = {
    "none+pre_norm",
    "boundaries one too high",
    "offsets of d2t taken as ids",
    "rope base 100 for 10000",
    "two at once: a 3.1 drafter read as 3",
}


def chosen(names: Iterable[str]) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def examined(drafter: Drafter, variant: str = faults.PLAIN, **settings: Any) -> Diagnosis:
    defaults: dict[str, Any] = {"tokens": faults.TOKENS, "prompts": faults.prompts(variant)}
    settings = defaults | settings
    return doctor.examine(faults.target(variant), drafter, **settings)


@pytest.fixture(scope="module")
def clean() -> Diagnosis:
    return examined(faults.drafter())


@pytest.fixture(scope="module")
def ill() -> Diagnosis:
    return examined(faults.FAULTS["raw feedback read as normed"].planted())


# Findings


@pytest.mark.parametrize("variant", chosen(faults.CLEAN))
def test_a_clean_pair_is_clean(variant: str) -> None:
    found = examined(faults.drafter(variant), variant)
    assert found.verdict is Verdict.clean, found.reasons
    assert found.exit_code == 0
    assert found.winner is None
    assert all(check.ok for check in found.checks)


@pytest.mark.parametrize("name", chosen(faults.FAULTS))
def test_a_planted_fault_is_named(name: str) -> None:
    fault = faults.FAULTS[name]
    found = examined(fault.planted(), fault.variant)
    assert found.verdict is Verdict.wrong
    assert found.exit_code == 4
    assert found.winner is not None, found.reasons
    # `faults.EQUALS` compute as well as their cure: both are named, in any order.
    named = [found.winner, *(found.rivals if name in faults.EQUALS else ())]
    assert fault.cure in [c.patch for c in named]
    assert found.limits is not None
    won = found.winner.margin, found.winner.accepted
    assert any(e.low > 0 and e.value >= found.limits.found(e.unit) for e in won)
    assert not any(e.high < 0 for e in won)


def test_two_faults_that_hide_each_other_are_named() -> None:
    """Under the normed residual the feedback's norm changes nothing, and the raw residual is
    worse without it: neither cure helps alone."""
    variant = "none+post_norm"
    made = faults.drafter(variant)
    layer: Any = made.layers[0]
    gains, width = faults._lognormal(made, 0, 0.8), made.config.hidden_size
    tensors = {"layers.0.hidden_norm.weight": layer.hidden_norm.weight * gains}
    for name, module in layer.self_attn.named_children():  # the same function for these gains
        if module in layer.self_attn.readers():
            tensors[f"layers.0.self_attn.{name}.weight"] = module.weight.clone()
            tensors[f"layers.0.self_attn.{name}.weight"][:, width:] /= gains
    twin = Reading(made.config, made.draft_to_target, tensors)
    wrong = twin.change(feedback=Feedback.pre_norm, residual=Residual.normed)
    found = examined(build(made, wrong), variant)
    assert found.verdict is Verdict.wrong
    first = [c for c in found.candidates if c.against == FILE]
    (pair,) = [c for c in first if c.outcome is Outcome.better]
    assert pair.name == "feedback post_norm + residual raw"
    assert found.winner is not None
    assert found.winner.patch == {"feedback": Feedback.post_norm, "residual": Residual.raw}


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.ALIKE)
def test_what_does_not_matter_is_clean_and_bounded(name: str) -> None:
    fault = faults.ALIKE[name]
    found = examined(fault.planted(), fault.variant)
    assert found.verdict is Verdict.clean, found.reasons
    assert found.limits is not None
    (cure,) = [c for c in found.candidates if c.patch == fault.cure]
    assert cure.outcome is Outcome.no_better
    assert all(e.high < found.limits.matters(e.unit) for e in (cure.margin, cure.accepted))
    assert f"{cure.name} (at most {cure.margin.high:.3f} nats" in found.reasons[0]


def test_the_scores_are_those_of_the_verified_rounds() -> None:
    """Accepted drafts on the target's greedy text, against the engine that verifies, by anchor."""
    target, drafter = faults.target(), faults.drafter()
    prompts = faults.prompts(n=4)
    made = target.generate(prompts, max_new_tokens=12)
    texts = faults._texts([p + m for p, m in zip(prompts, made, strict=True)])
    found = Bench(target, texts).score({"own": drafter})["own"]
    accepted = []
    for text in texts:
        for anchor in range(text.prompt_len - 1, len(text.tokens) - 5):
            known = list(text.tokens[: anchor + 1])
            spoken = speculate(target, drafter, known, depth=4, max_new_tokens=6)
            assert spoken.rounds[0].anchor == anchor
            accepted.append(spoken.rounds[0].accepted)
    assert found.anchors == len(accepted) > 10
    assert found.accepted_drafts == pytest.approx(sum(accepted) / len(accepted))
    shares = [sum(n >= d for n in accepted) / len(accepted) for d in (1, 2, 3, 4)]
    assert found.acceptance == pytest.approx(shares)
    assert 0 < sum(accepted) < 4 * len(accepted)


def test_a_forced_chain_accepts_what_a_free_one_does() -> None:
    """Counts of free chains, and the last draft of each weighed by the target's own forward."""
    target, drafter = faults.target(), faults.drafter()
    texts = own_texts(target, faults.prompts(), tokens=400, seed=3)
    found = Bench(target, texts).score({"own": drafter})["own"]
    counts, expected, n = torch.zeros(4), 0.0, 0
    for text in texts:
        tokens = torch.tensor([text.tokens])
        out = target.forward(tokens, torch.tensor([tokens.shape[1]]), drafter.config.boundaries)
        assert out.logits is not None
        p = out.logits[0].softmax(-1)
        anchors = torch.arange(text.prompt_len - 1, tokens.shape[1] - 5)
        alive = torch.ones(len(anchors), dtype=torch.bool)
        for step in unroll(drafter, tokens, out.aux, depth=4, mode="free", anchors=anchors):
            mass = p[anchors + step.depth].gather(-1, step.draft[0][:, None])[:, 0]
            expected += float((alive * mass).sum())
            alive = alive & (step.draft == step.truth)[0]
            counts[step.depth - 1] += alive.sum()
        n += len(anchors)
    assert found.anchors == n
    assert found.acceptance == pytest.approx((counts / n).tolist())
    assert found.accepted_drafts == pytest.approx(float(counts.sum()) / n)
    assert found.expected_drafts == pytest.approx(expected / n, rel=1e-5)


def test_a_first_look_is_a_quarter_of_the_texts() -> None:
    target, drafter = faults.target(), faults.drafter()
    texts = own_texts(target, faults.prompts(), tokens=600, seed=0)
    on = Bench(target, texts)
    first = on.score({"own": drafter}, first=True)["own"]
    assert first.texts == len(texts[::4]) < len(texts)
    part = Bench(target, texts[::4]).score({"own": drafter})["own"]
    assert first.cross_entropy == pytest.approx(part.cross_entropy)
    assert first.expected_drafts == pytest.approx(part.expected_drafts)
    whole = on.score({"own": drafter})["own"]
    assert whole.texts == len(texts)
    assert on.score({"own": drafter}, first=True)["own"].texts == len(texts)
    shares = [s.anchors for s in (first, whole)]
    means = [s.expected_drafts for s in (first, whole)]
    rest = [t for i, t in enumerate(texts) if i % 4]
    other = Bench(target, rest).score({"own": drafter})["own"]
    joined = (means[0] * shares[0] + other.expected_drafts * other.anchors) / shares[1]
    assert whole.expected_drafts == pytest.approx(joined)
    few = Bench(target, texts[:8]).score({"own": drafter}, first=True)["own"]
    assert few.texts == 8  # too few to look at a part of them


def test_all_that_a_bench_holds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions alone would fit; with states and the part of the draft vocabulary not."""
    target, drafter = faults.target(), faults.drafter()
    texts = own_texts(target, faults.prompts(), tokens=100, seed=0)
    on = Bench(target, texts)
    before = on.score({"own": drafter})["own"]
    held = [b for look in on._looks for b in look]
    p = sum(b.p.numel() for b in held if b.p is not None)
    mapped = sum(b.mapped[1].numel() for b in held if b.mapped is not None)
    states = sum(b.tokens.numel() for b in held) * target.hidden_size
    assert p > 0 and mapped > 0
    assert sum(b.held for b in held) >= p + mapped + states * len(drafter.config.boundaries)
    monkeypatch.setattr(scoring, "KEEP", p)
    again = Bench(target, texts)
    assert again.score({"own": drafter})["own"].cross_entropy == before.cross_entropy
    assert sum(b.held for look in again._looks for b in look) <= p


def test_margins_are_paired_over_texts() -> None:
    drafter = faults.drafter()
    texts = own_texts(faults.target(), faults.prompts(), tokens=200, seed=0)
    base = Reading(drafter.config, drafter.draft_to_target)
    other = build(drafter, base.change(feedback=Feedback.post_norm))
    found = Bench(faults.target(), texts).score({"a": drafter, "b": other})
    saved, gained = margins(found["a"], found["b"])
    by_hand = np.mean(found["a"].cross_entropy) - np.mean(found["b"].cross_entropy)
    assert saved.value == pytest.approx(by_hand)
    more = found["b"].expected_drafts - found["a"].expected_drafts
    assert gained.value == pytest.approx(more)
    nothing, _ = margins(found["a"], found["a"])
    assert (nothing.value, nothing.low, nothing.high, nothing.p) == (0, 0, 0, 1)


def test_p_is_students() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1, 12))
    plain = Sample(a, np.full((1, 12), 3.0)), Sample(b, np.full((1, 12), 3.0))
    assert paired_p(*plain) == pytest.approx(scipy.stats.ttest_rel(a[0], b[0]).pvalue)
    # A text of three anchors that was not scored on both sides says nothing.
    gone = np.array([[math.nan, *b[0, 1:]]])
    rest = scipy.stats.ttest_rel(a[0, 1:], b[0, 1:]).pvalue
    assert paired_p(Sample(a, np.ones((1, 12))), Sample(gone, np.ones((1, 12)))) == (
        pytest.approx(rest)
    )
    # A text that weighs nearly all decides alone, and one text decides nothing.
    heavy = np.where(np.arange(12) == 0, 1e6, 1.0)[None]
    assert paired_p(Sample(a, heavy), Sample(a - 0.1 * (heavy == 1), heavy)) > 0.1
    assert paired_p(Sample(a + 1, heavy), Sample(a, heavy)) == 0.0


def test_cross_entropy_by_hand() -> None:
    """Against a plain softmax over the whole vocabulary, one text, one depth."""
    target, drafter = faults.target(), faults.drafter()
    text = own_texts(target, faults.prompts(), tokens=60, seed=1)[0]
    found = Bench(target, [text]).score({"own": drafter})["own"]
    tokens = torch.tensor([text.tokens])
    out = target.forward(tokens, torch.tensor([tokens.shape[1]]), drafter.config.boundaries)
    assert out.logits is not None
    p = out.logits[0].softmax(-1)
    state = drafter.step(
        tokens[:, 1:], drafter.fuse(out.aux[:, :-1]), drafter.new_memory(), depth=1
    )
    q = torch.full((tokens.shape[1] - 1, target.vocab_size), 0.01 / target.vocab_size)
    q[:, drafter.draft_to_target] += 0.99 * drafter.logits(state)[0].softmax(-1)
    anchors = range(text.prompt_len - 1, tokens.shape[1] - 5)
    losses = [-float((p[t + 1] * q[t].log()).sum()) for t in anchors]
    assert found.cross_entropy[0] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_same_seed_gives_the_same_page() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    page = str(examined(faults.drafter(), tokens=300))
    assert str(examined(faults.drafter(), tokens=300)) == page
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", faults.FAINT)
def test_what_the_text_cannot_tell_is_doubtful(name: str) -> None:
    fault = faults.FAINT[name]
    found = examined(fault.planted(), fault.variant)
    assert found.verdict is Verdict.doubtful, found.reasons
    assert found.exit_code == 3
    assert found.winner is None
    assert any(r.startswith("cannot tell from this text: rope base 10000") for r in found.reasons)


def test_an_untrained_drafter_gets_the_checklist() -> None:
    drafter = faults.drafter()
    rng = torch.Generator().manual_seed(2)
    head = torch.randn(drafter.lm_head.weight.shape, generator=rng)
    reading = Reading(drafter.config, drafter.draft_to_target, {"lm_head.weight": 3 * head})
    found = examined(build(drafter, reading))
    assert found.verdict is Verdict.wrong
    assert any("likely misconfigured" in r and "boundaries" in r for r in found.reasons)
    assert any(c.outcome is Outcome.better for c in found.candidates)
    assert found.winner is None and doctor.correction(found) is None, "none drafts anything"


def sure(value: float, unit: str, p: float = 0.01, reach: float = 0.01) -> Estimate:
    return Estimate(value, value - reach, value + reach, 20, unit, p=p)


@pytest.mark.parametrize(
    ("nats", "p", "drafts", "q", "expected"),
    [
        (0.1, 0.01, 0.0, 0.5, Outcome.better),
        (0.0, 0.5, 0.1, 0.01, Outcome.better),  # either measure is enough
        (0.1, 0.01, -0.1, 0.01, Outcome.unclear),  # the two contradict each other
        (0.004, 0.01, -0.1, 0.01, Outcome.no_better),  # or would, if it mattered
        (0.1, 0.01, -0.1, 0.2, Outcome.better),
        (0.004, 0.01, 0.0, 0.5, Outcome.no_better),  # sure, and too small to be a finding
        (0.0, 0.5, 0.019, 0.01, Outcome.no_better),
        (0.009, 0.2, 0.0, 0.5, Outcome.no_better),  # its upper end does not matter
        (0.011, 0.2, 0.0, 0.5, Outcome.unclear),
        (0.0, 0.5, 0.031, 0.2, Outcome.unclear),
        (-0.1, 0.01, 0.0, 0.5, Outcome.worse),
        (0.0, 0.5, -0.1, 0.01, Outcome.worse),
        (-0.1, 0.2, -0.1, 0.2, Outcome.no_better),
    ],
)
def test_outcomes(nats: float, p: float, drafts: float, q: float, expected: Outcome) -> None:
    """Of an acceptance length of 2: 0.02 drafts are a finding, 0.04 matter; 0.005, 0.02 nats."""
    limits = Limits(2.0)
    assert outcome(limits, sure(nats, "nats", p), sure(drafts, "drafts", q)) is expected


def test_a_first_look_gives_up_what_is_worse_only() -> None:
    assert hopeless(sure(-0.1, "nats"), sure(0.0, "drafts", 0.5))
    assert hopeless(sure(0.0, "nats", 0.5), sure(-0.1, "drafts"))
    assert not hopeless(sure(-0.1, "nats"), sure(0.001, "drafts", 0.5))
    assert not hopeless(sure(-0.1, "nats", 0.1), sure(-0.1, "drafts", 0.1))
    assert not hopeless(sure(0.1, "nats"), sure(0.0, "drafts", 0.5))


def test_a_clean_page_says_what_it_could_have_seen(clean: Diagnosis) -> None:
    """Four of five runs: 80% power of the test that the family of readings leaves."""
    assert clean.limits is not None and clean.score is not None
    assert clean.limits.length == 1 + clean.score.expected_drafts
    even = [c for c in clean.candidates if c.outcome is Outcome.no_better]
    assert even
    near, seen = clean.reasons
    assert all(f"{c.name} (at most {max(c.margin.high, 0):.3f} nats" in near for c in even)
    level = 0.05 / (2 * len(clean.candidates))
    alone, power = (-scipy.stats.norm.ppf(x) for x in (0.025, 0.2))
    wide = []
    for c in clean.candidates:
        if c.outcome is Outcome.worse:
            continue
        tail = -scipy.stats.t.ppf(level / 2, c.score.texts - 1)
        error = c.margin.smallest / (alone + power)
        share = scipy.stats.nct.sf(tail, c.score.texts - 1, tail + power)
        assert share == pytest.approx(0.8, abs=0.08)  # the normal power is near Student's
        wide.append(error * (tail + power))
    assert f"saves {max(wide):.3f} nats" in seen and "0.02 nats or 2% would matter" in seen


def test_nothing_is_better_on_a_first_look() -> None:
    """Next to the best reading this one is hopeless, though it beats the file's as well."""
    fault = faults.FAULTS["normed residual read as raw"]
    found = examined(fault.planted(), fault.variant)
    early = {c.name: c for c in found.candidates if c.score.texts < found.texts}
    assert early["fusion_norm per_layer"].margin.low > 0.02
    assert early["fusion_norm per_layer"].outcome is Outcome.unclear
    assert not any(c.outcome is Outcome.better for c in early.values())


@pytest.mark.parametrize("kind", ["spread", "twice"])
def test_twins_compute_the_same(kind: str) -> None:
    """Other gains and columns: equal under one norm, or nearly equal under two."""
    target, drafter = faults.target(), faults.drafter()
    texts = own_texts(target, faults.prompts(), tokens=200, seed=0)
    twin = faults.spread(drafter)
    if kind == "twice":
        twin = faults.twice(drafter, faults.fed(drafter, target, texts[:4]))
        assert twin.config.double_hidden_norm
    flip = {"double_hidden_norm": not twin.config.double_hidden_norm}
    wrong = build(twin, Reading(twin.config, twin.draft_to_target).change(**flip))
    found = Bench(target, texts).score({"own": drafter, "twin": twin, "wrong": wrong})
    own, same, other = (sum(found[name].cross_entropy) for name in ("own", "twin", "wrong"))
    assert abs(same - own) <= (1e-4 if kind == "spread" else 0.1 * (other - own))
    assert other > own + 0.1


def test_the_table_names_the_equals_of_a_winner(
    ill: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "experiments" / "doctor_table.py"
    table = runpy.run_path(str(path))["Table"]()
    (equal,) = [c for c in ill.candidates if c.name == "residual normed"]
    cure = {"feedback": Feedback.pre_norm}
    table.add("pair", "fault", replace(ill, rivals=(equal,)), cure)
    assert "| feedback = pre_norm; as good: residual = normed |" in capsys.readouterr().out


# Self-checks


def _with(drafter: Drafter, **tensors: torch.Tensor) -> Drafter:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return build(drafter, Reading(drafter.config, drafter.draft_to_target, named))


def test_nan_is_named_and_nothing_is_scored() -> None:
    drafter = faults.drafter()
    broken = drafter.norm.weight.clone()
    broken[3] = float("nan")
    found = examined(_with(drafter, norm__weight=broken))
    assert found.verdict is Verdict.wrong
    assert found.score is None and not found.candidates
    assert "norm.weight" in str(found)


def test_attention_that_does_nothing_fails_its_checks() -> None:
    drafter = faults.drafter()
    name = "layers.0.self_attn.o_proj.weight"
    silent = torch.zeros_like(drafter.get_parameter(name))
    reading = Reading(drafter.config, drafter.draft_to_target, {name: silent})
    found = examined(build(drafter, reading), tokens=300)
    failed = {check.name for check in found.checks if not check.ok}
    assert "pattern changes the logits" in failed


def test_a_head_cut_by_the_wrong_table_is_seen() -> None:
    """TorchSpec's pruned exports index the head with the offsets (X20)."""
    drafter, target = faults.drafter(), faults.target()
    offsets = drafter.draft_to_target - torch.arange(len(drafter.draft_to_target))
    found = examined(_with(drafter, lm_head__weight=target.head_weight[offsets]), tokens=300)
    (check,) = [c for c in found.checks if c.name == "head rows belong to the map"]
    assert not check.ok
    assert "d2t taken as ids 1.00" in check.detail


def test_an_embedding_of_its_own_is_measured() -> None:
    drafter = faults.drafter()
    other = drafter.embed_tokens.weight.clone()
    other[5] += 0.25
    found = examined(_with(drafter, embed_tokens__weight=other), tokens=300)
    (check,) = [c for c in found.checks if c.name == "embedding"]
    assert check.ok and "up to 0.25" in check.detail
    runtimes = {r.profile: r for r in found.runtimes}
    assert [p.row for p in runtimes[Profile.sglang].patches] == ["X11"]
    assert not runtimes[Profile.sglang].as_trained
    assert runtimes[Profile.vllm].as_trained


def test_a_replaced_embedding_is_that_of_the_reading() -> None:
    """As SGLang the target's rows are computed, so the page says so and checks them."""
    drafter = faults.drafter()
    other = drafter.embed_tokens.weight.clone()
    other[5] += 0.25
    found = examined(_with(drafter, embed_tokens__weight=other), as_profile="sglang", tokens=300)
    (check,) = [c for c in found.checks if c.name == "embedding"]
    assert check.detail == "equal to the target's"
    (row,) = [row for row in found.contract if row.field == "embed_tokens"]
    assert row.value == "the target's" and row.where.startswith("X11")


def test_the_contract_names_every_field_and_its_source(clean: Diagnosis) -> None:
    rows = {row.field: row for row in clean.contract}
    assert rows["boundaries"].value == faults.BOUNDARIES
    assert rows["rope.theta"].value == 10000.0
    page = str(clean)
    assert page.startswith("driftlab doctor: CLEAN")
    assert all(row.field in page for row in clean.contract)
    assert max(map(len, page.splitlines())) <= 120


# Files


def test_fix_writes_a_copy_that_is_clean(ill: Diagnosis, tmp_path: Path) -> None:
    made = doctor.fix(ill, tmp_path / "fixed")
    again = load_drafter(tmp_path / "fixed")
    assert again.config == made.config == faults.drafter().config
    source = again.provenance["feedback"]
    assert source.origin is Origin.derived and "driftlab doctor" in source.where
    assert ill.subject is not None
    assert ill.subject.config.feedback is Feedback.post_norm  # the original stays as it was
    assert examined(again).verdict is Verdict.clean


def test_margins_of_two_faults_say_what_they_are_over(tmp_path: Path) -> None:
    fault = faults.FAULTS["two at once: a 3.1 drafter read as 3"]
    found = examined(fault.planted(), fault.variant)
    by_name = {c.name: c for c in found.candidates}
    later = [c for c in found.candidates if c.against in by_name]
    assert later
    for c in later:
        assert c.margin.value == margins(by_name[c.against].score, c.score)[0].value
        assert f"  on top of {c.against}, and against it:\n" in str(found)
    assert found.winner is not None and found.score is not None
    total = found.winner.margin
    assert total.value == margins(found.score, found.winner.score)[0].value
    made = doctor.fix(found, tmp_path / "fixed")
    first, second = found.winner.patch
    for name, other in ((first, second), (second, first)):
        where = made.provenance[name].where
        assert where.endswith(f"saves {total.short} nats a token together with {other}")


def test_fix_refuses_where_there_is_nothing_to_correct(clean: Diagnosis, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no better reading"):
        doctor.fix(clean, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


def test_fix_never_replaces_the_drafter(tmp_path: Path) -> None:
    save_drafter(faults.FAULTS["raw residual read as normed"].planted(), tmp_path / "d")
    files = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()}
    found = doctor.examine(faults.target(), tmp_path / "d", tokens=600, prompts=faults.prompts())
    assert found.winner is not None
    with pytest.raises(ConfigError, match="replace"):
        doctor.fix(found, tmp_path / "d")
    other = tmp_path / "other"  # neither does a copy replace another drafter
    shutil.copytree(tmp_path / "d", other)
    with pytest.raises(CheckpointError, match="not empty, and is not replaced"):
        doctor.fix(found, other)
    for folder in (tmp_path / "d", other):
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == files


def modelopt(drafter: Drafter, folder: Path) -> Path:
    """``drafter`` as ModelOpt's HF trainer writes it: no embeddings, no word on hidden norms."""
    save_drafter(drafter, folder, dialect="vllm")
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if "driftlab" not in k and k != IDS}
    ids = [b - 1 for b in drafter.config.boundaries]
    config["eagle_config"] = {"next_layer_regular": True, "use_aux_hidden_state": True, IDS: ids}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    dropped = {"embed_tokens.weight", "t2d"}
    kept = {n: t for n, t in tensors.items() if n not in dropped}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("alike", [False, True])
def test_a_file_that_says_nothing_of_norms_is_settled_and_exported(
    alike: bool, tmp_path: Path
) -> None:
    """X4: two norms are assumed. The copy that the doctor writes says one, and engines take it."""
    drafter = faults.drafter()
    if alike:  # gains that are all one, so that a second norm is none
        layer: Any = drafter.layers[0]
        drafter = faults._twin(drafter, 1 / layer.input_layernorm.weight)
    source = modelopt(drafter, tmp_path / "modelopt")
    target = faults.target()
    read = load_drafter(source, target=target)
    assert read.provenance["dialect"].value == "modelopt-hf" and read.config.double_hidden_norm
    with pytest.raises(CheckpointError, match="cannot hold the double hidden norm") as caught:
        save_drafter(read, tmp_path / "served", dialect="vllm")
    for word in ("driftlab doctor --target", "--fix FOLDER", "driftlab export FOLDER --to vllm"):
        assert word in str(caught.value)
    found = doctor.examine(target, source, tokens=faults.TOKENS, prompts=faults.prompts())
    assert found.verdict is (Verdict.clean if alike else Verdict.wrong)
    doctor.fix(found, tmp_path / "fixed")
    again = load_drafter(tmp_path / "fixed")
    assert again.provenance["double_hidden_norm"].origin is Origin.derived
    save_drafter(again, tmp_path / "served", dialect="vllm")
    assert load_drafter(tmp_path / "served").config == drafter.config


def test_an_exported_file_is_served_as_trained(tmp_path: Path) -> None:
    target = faults.target()
    drafter = faults.drafter("per_layer+post_norm")
    save_drafter(drafter, tmp_path / "d", dialect="vllm")
    found = doctor.examine(target, tmp_path / "d", tokens=300, prompts=faults.prompts())
    runtimes = {r.profile: r for r in found.runtimes}
    assert runtimes[Profile.vllm].as_trained
    # vLLM's list stands at top level, which SGLang ignores (X1).
    assert not runtimes[Profile.sglang].as_trained
    ran = runtimes[Profile.vllm].score
    assert ran is not None and found.score is not None
    assert ran.acceptance == found.score.acceptance


def test_strict_refuses_what_was_assumed() -> None:
    drafter = faults.drafter()
    assumed = Sourced(value="silu", origin=Origin.assumed, where="hidden_act is absent")
    twin = Drafter(drafter.config, drafter.draft_to_target, {"hidden_act": assumed})
    with pytest.raises(AssumptionError, match="hidden_act"):
        examined(twin, strict=True)


# Bad input


def test_prompts_that_cannot_be_used() -> None:
    with pytest.raises(DataError, match="no prompts"):
        examined(faults.drafter(), prompts=[])
    with pytest.raises(DataError, match="no tokenizer"):
        examined(faults.drafter(), prompts="held-out")
    with pytest.raises(DataError, match="context"):
        examined(faults.drafter(), prompts=[[2] * 300, [4] * 300])
    with pytest.raises(DataError, match="1 text"):
        examined(faults.drafter(), prompts=[[2, 4]], tokens=10)


def test_a_drafter_for_another_target_is_refused() -> None:
    twin = Drafter(faults.config(target_hidden_size=48), torch.tensor(faults.SYMBOLS))
    with pytest.raises(ContractError, match="width 32"):
        examined(twin)


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown profile"):
        examined(faults.drafter(), as_profile="tgi")


def test_a_profile_that_cannot_load_says_why() -> None:
    with pytest.raises(ContractError, match="trtllm cannot load"):
        examined(faults.drafter(), as_profile="trtllm")


def test_a_profile_is_examined_as_the_file(tmp_path: Path) -> None:
    """SGLang drops the normed residual: as SGLang the file is wrong, and X3 says why."""
    found = examined(faults.drafter("none+pre_norm+normed"), as_profile="sglang", tokens=600)
    assert found.verdict is Verdict.wrong
    assert found.winner is not None
    # 600 tokens cannot tell it from two switches changed together; the page names both.
    assert {"residual": Residual.normed} in [c.patch for c in (found.winner, *found.rivals)]
    (row,) = [row for row in found.contract if row.field == "residual"]
    assert row.value is Residual.raw and "X3" in row.where
    with pytest.raises(ConfigError, match="sglang"):
        doctor.fix(found, tmp_path / "fixed")


# Candidates


def _names(**changes_: Any) -> set[str]:
    drafter = faults.drafter()
    reading = Reading(drafter.config, drafter.draft_to_target).change(**changes_)
    facts = gather_facts(drafter, faults.target())
    return {a.name for a in alternatives(reading, {}, facts, Rope(theta=500000.0))}


def test_candidates_are_the_ambiguous_fields_only() -> None:
    assert _names() == {
        "boundaries +1: (1, 3, 4)",
        "boundaries middle -1: (0, 1, 3)",
        "fusion_norm per_layer",
        "fusion_norm concat",
        "residual normed",
        "feedback post_norm",
        "double_hidden_norm True",
        "draft_position_offset 1",
        "rope base 500000 (the target's)",
        "d2t as absolute ids",
        "d2t as offsets",
    }
    scaled = _names(rope=Rope(theta=1e6, rope_type="linear", parameters={"factor": 2.0}))
    assert {"rope unscaled", "rope base 10000 (everyone's default)"} <= scaled


def test_origin_decides_whether_a_field_is_settled() -> None:
    drafter = faults.drafter()
    facts = gather_facts(drafter, faults.target())
    reading = Reading(drafter.config, drafter.draft_to_target)
    said = {
        "feedback": Sourced(value="pre_norm", origin=Origin.read, where="config.json"),
        "residual": Sourced(value="raw", origin=Origin.assumed, where="absent"),
        "double_hidden_norm": Sourced(value=False, origin=Origin.read, where="overrides"),
    }
    found = {a.field: a for a in alternatives(reading, said, facts, Rope())}
    assert found["feedback"].settled and "X2" in found["feedback"].why
    assert not found["residual"].settled and found["residual"].why == "assumed: absent"
    assert not found["double_hidden_norm"].settled
    # Drafters in memory and driftlab's own files state every field.
    assert found["draft_position_offset"].settled


def test_changes_are_the_patch() -> None:
    drafter = faults.drafter()
    old = Reading(drafter.config, drafter.draft_to_target)
    new = old.change(feedback=Feedback.post_norm, rope=Rope(theta=5.0, max_position=256))
    assert changes(old, new) == {"feedback": Feedback.post_norm, "rope.theta": 5.0}


def test_a_reading_shares_the_weights_and_fills_gains() -> None:
    drafter = faults.drafter("per_layer+pre_norm")
    base = Reading(drafter.config, drafter.draft_to_target)
    twin = build(drafter, base)
    assert twin.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    joined = build(drafter, base.change(fusion_norm=FusionNorm.concat))
    gains = torch.cat([norm.weight for norm in drafter.fc_norm])  # type: ignore[misc]
    assert torch.equal(joined.input_norm.weight, gains)
    plain = faults.drafter()
    filled = build(
        plain,
        Reading(plain.config, plain.draft_to_target).change(fusion_norm=FusionNorm.per_layer),
    )
    ones: list[Any] = [norm.weight for norm in filled.fc_norm]
    assert all(torch.equal(g, torch.ones_like(g)) for g in ones)


# Profiles: one file, what each runtime computes, and the row that says so


def served(
    profile: str,
    raw: dict[str, Any] | None = None,
    dialect: Dialect = Dialect.vllm,
    *,
    n_layers: int = 12,
    target_type: str = "llama",
    embedding: torch.Tensor | None = None,
    **config_changes: Any,
) -> Served:
    config = faults.config(**({"boundaries": (2, 6, 9)} | config_changes))
    own = torch.ones(faults.VOCAB, faults.WIDTH)
    facts = Facts(dialect, raw, n_layers, target_type, own if embedding is None else embedding, own)
    if raw is not None:
        raw.setdefault("max_position_embeddings", 256)
        raw.setdefault("rope_theta", 10000.0)
    return serve(profile, Reading(config, torch.tensor(faults.SYMBOLS)), facts)


def rows(found: Served) -> dict[str, tuple[str, Any]]:
    return {p.field: (p.row, p.served) for p in found.patches}


@pytest.mark.parametrize("profile", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_a_target_too_shallow_for_the_default_is_refused(profile: str) -> None:
    """(2, n//2, n-3) of two layers holds a boundary below 0, as in the embedded suite."""
    found = served(profile, {}, n_layers=2, boundaries=(0, 1, 2))
    assert found.refused is not None and found.refused.startswith(("X1:", "X12:"))


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("profile", "raw", "more", "expected"),
    [
        ("vllm", {IDS: [2, 6, 9]}, {}, {}),
        ("vllm", {"eagle_config": {IDS: [1, 5, 8]}}, {}, {"boundaries": ("X1", (1, 5, 8))}),
        ("vllm", {}, {"boundaries": (1, 5, 8)}, {"boundaries": ("X1", (2, 6, 9))}),
        ("sglang", {"eagle_config": {IDS: [1, 5, 8]}}, {}, {}),
        ("sglang", {IDS: [1, 5, 8]}, {"boundaries": (1, 5, 8)}, {"boundaries": ("X1", (2, 6, 9))}),
        (
            "sglang",
            {"eagle_config": {IDS: [2, 6, 9]}},
            {"target_type": "gpt_oss"},
            {},
        ),
        ("sglang", {"eagle_config": {IDS: [2, 6, 9]}}, {"target_type": "deepseek_v3"}, {}),
        ("trtllm", {IDS: [1, 5, 8]}, {"boundaries": (1, 5, 8)}, {"boundaries": ("X1", (2, 6, 9))}),
        (
            "llamacpp",
            {IDS: [1, 5, 8]},
            {"boundaries": (1, 5, 8)},
            {"boundaries": ("X1", (2, 6, 9))},
        ),
        ("vllm", {"norm_output": True}, {}, {"feedback": ("X2", Feedback.post_norm)}),
        ("vllm", {}, {"logits_from_raw": True}, {"logits_from_raw": ("X2", False)}),
        (
            "vllm",
            {IDS: [2, 6, 9]},
            {"dialect": Dialect.speculators},
            {"residual": ("X3", Residual.normed)},
        ),
        (
            "sglang",
            {"norm_before_residual": True},
            {"residual": Residual.normed},
            {"residual": ("X3", Residual.raw)},
        ),
        ("vllm", {}, {"double_hidden_norm": True}, {"double_hidden_norm": ("X4", False)}),
        ("vllm", {}, {"draft_position_offset": 1}, {"draft_position_offset": ("X7", 0)}),
        (
            "trtllm",
            {"norm_before_fc": True},
            {"fusion_norm": FusionNorm.concat},
            {"fusion_norm": ("X8", FusionNorm.none)},
        ),
        (
            "trtllm",
            {"eagle_config": {"norm_before_fc": True}},
            {"fusion_norm": FusionNorm.concat},
            {},
        ),
        (
            "trtllm",
            {"norm_before_fc": True, "fc_norm": True},
            {"fusion_norm": FusionNorm.concat_per_layer},
            {"fusion_norm": ("X10", FusionNorm.per_layer)},
        ),
        (
            "llamacpp",
            {"fc_norm": True, "norm_output": True},
            {"fusion_norm": FusionNorm.per_layer, "feedback": Feedback.post_norm},
            {"fusion_norm": ("X9", FusionNorm.none), "feedback": ("X9", Feedback.pre_norm)},
        ),
        (
            "sglang",
            {"sliding_window": 8, "layer_types": ["sliding_attention"]},
            {"windows": (8,)},
            {"windows": ("X16", ())},
        ),
        (
            "vllm",
            {"sliding_window": 8, "layer_types": ["sliding_attention"]},
            {"windows": (8,)},
            {"window_moves": ("X16", True)},
        ),
        ("sglang", {}, {"qkv_bias": True}, {"qkv_bias": ("X14", False)}),
    ],
)
def test_profiles(
    profile: str, raw: dict[str, Any], more: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = served(profile, raw, **more)
    assert found.refused is None
    assert rows(found) == expected


def test_the_block_that_modelopt_writes_is_computed_by_engines() -> None:
    block = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    for profile in ("vllm", "sglang", "trtllm", "llamacpp"):
        found = served(profile, {"rope_scaling": block}, Dialect.modelopt_hf)
        (patch,) = found.patches
        assert isinstance(patch, Patch) and patch.row == "X5"
        assert found.reading.config.rope.rope_type == "yarn"
    assert rows(served("vllm", {"rope_theta": 5e5}))["rope"][0] == "X6"


@pytest.mark.parametrize(
    ("profile", "raw", "more", "row"),
    [
        ("vllm", {}, {"dialect": Dialect.automodel}, "X18"),
        ("vllm", {"model_type": "deepseek_v3"}, {}, "X17"),
        ("vllm", {IDS: [1, 2, 6, 9]}, {"boundaries": (1, 2, 6, 9)}, "X19"),
        ("vllm", {IDS: [2, 6]}, {}, "X19"),
        ("sglang", {"eagle_config": {IDS: [1, 5, 11]}}, {}, "X1"),
        ("trtllm", {}, {"n_layers": 5, "boundaries": (2,)}, "X1"),
    ],
)
def test_profiles_that_cannot_load(
    profile: str, raw: dict[str, Any], more: dict[str, Any], row: str
) -> None:
    refused = served(profile, raw, **more).refused
    assert refused is not None and refused.startswith(row)


def test_vllm_notes_what_its_other_runner_does() -> None:
    found = served("vllm", {"eagle_config": {IDS: [1, 5, 8]}}, boundaries=(1, 5, 8))
    assert "V2" in found.notes[0] and "(2, 6, 9)" in found.notes[0]


def test_only_equal_widths_replace_the_embedding() -> None:
    narrow = torch.zeros(faults.VOCAB, faults.WIDTH // 2)
    other = torch.zeros(faults.VOCAB, faults.WIDTH)
    assert rows(served("sglang", {}, embedding=narrow)) == {}
    found = served("trtllm", {}, embedding=other)
    assert rows(found)["embed_tokens"][0] == "X11"
    assert torch.equal(found.reading.tensors[EMBED], other)
    assert rows(served("vllm", {}, embedding=other)) == {}


def test_trained_changes_nothing() -> None:
    found = served("trained", {"norm_output": True, IDS: [1, 2, 3]}, double_hidden_norm=True)
    assert found.patches == () and found.refused is None


def test_facts_are_read_from_the_config(tmp_path: Path) -> None:
    save_drafter(faults.drafter(), tmp_path / "d", dialect="vllm")
    drafter = load_drafter(tmp_path / "d", target=faults.target())
    facts = gather_facts(drafter, faults.target(), source=tmp_path / "d")
    assert facts.raw == json.loads((tmp_path / "d" / "config.json").read_text())
    save_drafter(drafter, tmp_path / "native")
    assert gather_facts(drafter, faults.target(), source=tmp_path / "native").raw is None
