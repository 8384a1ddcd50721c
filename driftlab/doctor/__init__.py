"""Is this drafter run the way it was trained? The contract check of a target + drafter pair.

The files of a drafter do not say everything, and what they say is read in more than one way
(reference: checkpoints.md, sections 2 and 8). The doctor scores the readings that the files
allow on text that the target itself wrote, and says which one the weights support. It changes
nothing: :func:`fix` writes a corrected copy when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.config import DrafterConfig, Origin, Provenance, Sourced, refuse_assumptions
from driftlab.doctor.candidates import Alternative, alternatives, changes, same, tried
from driftlab.doctor.diagnosis import FILE, Candidate, Diagnosis, Outcome, Row, Runtime, Verdict
from driftlab.doctor.scoring import Bench, Prompts, Score, margins, own_texts
from driftlab.doctor.selfcheck import Check, drafts, self_checks, states_of_training
from driftlab.engines.chain import check_pair
from driftlab.engines.habitat import STATES, differences, statistics
from driftlab.errors import ConfigError, ContractError
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.checkpoints.profiles import (
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
from driftlab.models.target import Target
from driftlab.results.stats import Estimate

__all__ = [
    "MINIMUM",
    "Bench",
    "Candidate",
    "Check",
    "Diagnosis",
    "Outcome",
    "Verdict",
    "bench",
    "examine",
    "fix",
]

MINIMUM = 0.005
"""Nats a token that another reading must save to be called better."""
FAULTS = 3
"""How many faults at once are looked for."""


def bench(target: Target, *, tokens: int = 2000, prompts: Prompts = None, seed: int = 0) -> Bench:
    """Texts of a target to examine several drafters on, its states computed once.

    See :func:`examine` for the arguments and :class:`driftlab.doctor.scoring.Bench`.
    """
    return Bench(target, own_texts(target, prompts, tokens=tokens, seed=seed))


def examine(
    target: Target,
    drafter: Drafter | str | Path,
    *,
    tokens: int = 2000,
    prompts: Prompts = None,
    seed: int = 0,
    strict: bool = False,
    as_profile: str = "trained",
    revision: str | None = None,
    on: Bench | None = None,
    progress: bool = False,
) -> Diagnosis:
    """Check the contract of a pair on about ``tokens`` tokens of the target's own text.

    Parameters
    ----------
    drafter: a folder, a hub id (pin it with ``revision``), or a drafter in memory.
    prompts: what the target continues; see :func:`driftlab.doctor.scoring.own_texts`.
    strict: refuse values that were assumed and not read.
    as_profile: the reading that is checked: ``trained``, or a runtime's
        (:class:`driftlab.models.checkpoints.profiles.Profile`).
    on: texts of ``target`` made before by :func:`bench`, in place of ``tokens`` and ``prompts``.

    Raises
    ------
    CheckpointError, ContractError, AssumptionError: as ``load_drafter`` raises them.
    ContractError: the runtime of ``as_profile`` cannot load the file.
    DataError: prompts that cannot be used, or too little text.
    """
    source = None if isinstance(drafter, Drafter) else drafter
    if isinstance(drafter, Drafter):
        if strict:
            refuse_assumptions(drafter.provenance, owner="the drafter")
        subject = drafter
    else:
        subject = load_drafter(drafter, target=target, revision=revision, strict=strict)
        subject = subject.to(target.device).eval().requires_grad_(False)
    check_pair(target, subject)
    facts = gather_facts(
        subject,
        target,
        source=source,
        revision=revision,
        target_type=str(target.model.config.model_type),
    )
    trained = Reading(subject.config, subject.draft_to_target)
    served = serve(as_profile, trained, facts)
    if served.refused is not None:
        raise ContractError(f"{served.profile} cannot load this drafter", got=served.refused)
    if on is None:
        on = bench(target, tokens=tokens, prompts=prompts, seed=seed)
    return _Case(on, subject, facts, served, source, seed, progress).run()


def fix(diagnosis: Diagnosis, folder: str | Path) -> Drafter:
    """Write the drafter with the winner's reading to ``folder``, in driftlab's own layout.

    Raises
    ------
    ConfigError: nothing to correct, a runtime's reading was checked, or ``folder`` is the
        drafter's own: the original is never changed.
    """
    winner, subject = diagnosis.winner, diagnosis.subject
    if winner is None or subject is None:
        raise ConfigError(
            "there is no better reading to write",
            got=f"verdict {diagnosis.verdict}",
            remedy="A corrected copy is written when a candidate won.",
        )
    if diagnosis.profile is not Profile.trained:
        raise ConfigError(
            f"the reading of {diagnosis.profile} was checked, not the file's",
            remedy="Run the doctor as trained to correct the file.",
        )
    if diagnosis.source is not None and Path(folder).resolve() == diagnosis.source.resolve():
        raise ConfigError(
            "the corrected copy would replace the drafter", got=folder, remedy="Give a new folder."
        )
    made = build(subject, winner.reading)
    for name, value in winner.patch.items():
        old = subject.provenance.get(name)
        was = f", the file: {old.value}" if old is not None else ""
        where = f"driftlab doctor: saves {winner.margin.short} nats a token{was}"
        made.provenance[name] = Sourced(value=value, origin=Origin.derived, where=where)
    save_drafter(made, folder)
    return made


class _Case:
    """One pair under examination."""

    def __init__(
        self,
        bench: Bench,
        subject: Drafter,
        facts: Facts,
        served: Served,
        source: str | Path | None,
        seed: int,
        progress: bool,
    ) -> None:
        self.bench, self.subject, self.facts = bench, subject, facts
        self.target, self.texts = bench.target, bench.texts
        self.served, self.base, self.source = served, served.reading, source
        self.seed, self.progress = seed, progress

    def run(self) -> Diagnosis:
        texts = self.texts
        drafter = build(self.subject, self.base)
        checks = self_checks(self.target, drafter, texts, self.facts)
        common = {
            "target": self.target.name,
            "drafter": str(self.source) if self.source is not None else "in memory",
            "profile": self.served.profile,
            "texts": len(texts),
            "tokens": sum(len(t.continuation) for t in texts),
            "minimum": MINIMUM,
            "contract": tuple(_contract(drafter, self.target, self.served.patches)),
            "source": Path(self.source) if self.source is not None else None,
            "subject": self.subject,
        }
        notes = self._notes()
        if not all(check.ok for check in checks[:2]):
            return Diagnosis(
                **common,  # type: ignore[arg-type]
                checks=tuple(checks),
                score=None,
                candidates=(),
                winner=None,
                verdict=Verdict.wrong,
                reasons=("its tensors are damaged, nothing was scored",),
                runtimes=(),
                notes=notes,
            )
        own, candidates, winner, rivals = self._candidates()
        checks.append(drafts(own, drafter, texts))
        differs = self._differences()
        checks.append(states_of_training(self.subject, differs))
        notes = (*notes, *differs)
        verdict, reasons = judge(checks, candidates, winner, rivals)
        best = winner.reading if winner is not None else self.base
        return Diagnosis(
            **common,  # type: ignore[arg-type]
            checks=tuple(checks),
            score=own,
            candidates=tuple(candidates),
            winner=winner,
            verdict=verdict,
            reasons=reasons,
            runtimes=tuple(self._runtimes(best)),
            notes=notes,
        )

    def _notes(self) -> tuple[str, ...]:
        said = self.subject.provenance.get("notes")
        notes = list(said.value) if said is not None else []
        if any(text.loops for text in self.texts):
            notes.append(f"{sum(t.loops for t in self.texts)} of the texts run in a loop")
        return (*notes, *self.served.notes)

    def _differences(self) -> list[str]:
        """What is not as it was in the drafter's training, as far as its file tells."""
        boundaries = self.subject.config.boundaries
        now: list[dict[str, Any]] = []
        if STATES in self.subject.provenance:
            now = statistics(self._states(boundaries), boundaries, self.target.hidden_size)
        longest = max(len(text.tokens) for text in self.texts)
        return differences(self.subject, self.target, now, longest=longest)

    def _states(self, boundaries: Sequence[int]) -> Iterator[Tensor]:
        """States [S, A*Ht] of texts of about a thousand tokens."""
        tokens = 0
        for text in self.texts:
            ids = torch.tensor([text.tokens])
            yield self.target.forward(
                ids, torch.tensor([ids.shape[1]]), boundaries, logits=False
            ).aux[0]
            tokens += ids.shape[1]
            if tokens > 1000:
                break

    def _score(self, readings: dict[str, Reading], label: str) -> dict[str, Score]:
        built = {name: build(self.subject, reading) for name, reading in readings.items()}
        return self.bench.score(built, progress=label if self.progress else "")

    def _candidates(self) -> tuple[Score, list[Candidate], Candidate | None, tuple[str, ...]]:
        """One patch at a time; then the best ones with each of the others, while margins stay.

        Readings that cannot be told apart go on side by side: a second fault can part them.
        """
        options = alternatives(
            self.base, self.subject.provenance, self.facts, self.target.shape.rope
        )
        own = self._score({FILE: self.base}, "the file's reading")[FILE]
        found: list[Candidate] = []
        best: list[Candidate] = []
        stems: list[tuple[str, Reading, Score]] = [(FILE, self.base, own)]
        for round_ in range(FAULTS):
            made = self._extend(options, stems, f"readings, pass {round_ + 1}")
            found += made
            better = [c for c in made if c.outcome is Outcome.better]
            if not better:
                break
            best = self._front(better)
            stems = [(c.name, c.reading, c.score) for c in best]
        if not best:
            return own, found, None, ()
        winner, *rivals = best
        if winner.against != FILE:
            # Its own margin was over the reading before it; the file's reading is what counts.
            margin, accepted = margins(own, winner.score, seed=self.seed)
            winner = replace(winner, margin=margin, accepted=accepted)
        return own, found, winner, tuple(c.name for c in rivals)

    def _extend(
        self,
        options: Sequence[Alternative],
        stems: Sequence[tuple[str, Reading, Score]],
        label: str,
    ) -> list[Candidate]:
        """Every stem with every option that changes something else than the stem did."""
        tries: dict[str, tuple[Alternative, str, Reading, Score]] = {}
        for against, stem, old in stems:
            changed = changes(self.base, stem)
            for option in options:
                reading = tried(option.apply, stem)
                known = any(same(reading, t[2]) for t in tries.values())
                if option.field in changed or same(reading, stem) or known:
                    continue
                tries[_name(against, option)] = (option, against, reading, old)
        scores = self._score({name: t[2] for name, t in tries.items()}, label)
        return [
            self._judge(option, against, reading, old, scores[name])
            for name, (option, against, reading, old) in tries.items()
        ]

    def _front(self, better: Sequence[Candidate]) -> list[Candidate]:
        """The best reading, and at most two that cannot be told apart from it."""
        ordered = sorted(better, key=lambda c: sum(c.score.cross_entropy))
        first = ordered[0]
        near = [c for c in ordered[1:] if margins(c.score, first.score, seed=self.seed)[0].low <= 0]
        return [first, *near[:2]]

    def _judge(
        self, option: Alternative, against: str, reading: Reading, old: Score, new: Score
    ) -> Candidate:
        margin, accepted = margins(old, new, seed=self.seed)
        return Candidate(
            name=_name(against, option),
            against=against,
            patch=changes(self.base, reading),
            why=option.why,
            settled=option.settled,
            score=new,
            margin=margin,
            accepted=accepted,
            outcome=outcome(margin, accepted),
            reading=reading,
        )

    def _runtimes(self, best: Reading) -> list[Runtime]:
        """Every profile, against the reading that the text supports."""
        trained = Reading(self.subject.config, self.subject.draft_to_target)
        served = [serve(profile, trained, self.facts) for profile in Profile]
        loaded = {str(s.profile): s.reading for s in served if s.refused is None}
        scores = self._score(loaded, "runtimes")
        return [
            Runtime(
                profile=s.profile,
                as_trained=s.refused is None and same(s.reading, best),
                patches=s.patches,
                refused=s.refused,
                notes=s.notes,
                score=scores.get(str(s.profile)),
            )
            for s in served
        ]


def _name(against: str, option: Alternative) -> str:
    return option.name if against == FILE else f"{against} + {option.name}"


def outcome(margin: Estimate, accepted: Estimate) -> Outcome:
    """What an interval says of a candidate; see :class:`Outcome`."""
    if margin.high < 0:
        return Outcome.worse
    if margin.low > 0 and margin.value >= MINIMUM and not accepted.high < 0:
        return Outcome.better
    if margin.high < MINIMUM:
        return Outcome.no_better
    return Outcome.unclear


def judge(
    checks: Sequence[Check],
    candidates: Sequence[Candidate],
    winner: Candidate | None,
    rivals: Sequence[str] = (),
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and what it rests on."""
    reasons = []
    if winner is not None:
        patch = ", ".join(f"{name} = {value}" for name, value in winner.patch.items())
        reasons.append(
            f"the weights support another reading: {patch} saves {winner.margin.short} nats a "
            f"token and accepts {winner.accepted.short} more drafts a round"
        )
    if rivals:
        reasons.append(f"as good as the winner on this text: {', '.join(rivals)}")
    reasons += [f"failed: {check.name} ({check.detail})" for check in checks if not check.ok]
    if reasons:
        return Verdict.wrong, tuple(reasons)
    doubts = [c for c in candidates if c.outcome is Outcome.unclear]
    # A rotation matters more the longer the text: equal here is not equal everywhere.
    blind = [
        c
        for c in candidates
        if c.outcome is Outcome.no_better
        and not c.settled
        and any(name.startswith("rope.") for name in c.patch)
    ]
    reasons += [f"{c.name} may be better: {c.margin.short} nats ({c.why})" for c in doubts]
    reasons += [f"cannot tell from this text: {c.name} ({c.why})" for c in blind]
    if reasons:
        return Verdict.doubtful, tuple(reasons)
    even = [c.name for c in candidates if c.outcome is Outcome.no_better]
    if even:
        return Verdict.clean, (f"no other reading is better; as good here: {', '.join(even)}",)
    return Verdict.clean, ("every other reading is worse",)


def _contract(drafter: Drafter, target: Target, patches: Sequence[Patch]) -> list[Row]:
    """Every field of the contract, then where the rest came from, then the target."""
    served = {p.field: p for p in patches}
    known: Provenance = drafter.provenance
    rows = []
    for name in DrafterConfig.model_fields:
        value = getattr(drafter.config, name)
        parts = {f"rope.{n}": v for n, v in value} if name == "rope" else {name: value}
        for part, own in parts.items():
            patch = served.get(name)
            said = known.get(part)
            if patch is not None:
                rows.append(Row(part, own, "derived", f"{patch.row}: {patch.why}"))
            elif said is not None:
                rows.append(Row(part, own, str(said.origin), said.where))
            else:
                rows.append(Row(part, own, "read", "the drafter's own config"))
    for name in ("dialect", "embed_tokens", "lm_head", "draft_to_target", "boundary_convention"):
        said = known.get(name)
        if said is not None:
            rows.append(Row(name, said.value, str(said.origin), said.where))
    rows += [
        Row(f"target.{name}", s.value, str(s.origin), s.where)
        for name, s in target.provenance.items()
        if name in {"dtype", "quantization", "revision", "attention"}
    ]
    return rows
