"""Is this drafter run the way it was trained? The contract check of a target + drafter pair.

The files of a drafter do not say everything, and what they say is read in more than one way
(docs/checkpoints.md). The doctor scores the readings that the files allow on text that the target
itself wrote, and says which one the weights support. It changes nothing: :func:`fix` writes a
corrected copy when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlab.config import DrafterConfig, Origin, Provenance, Sourced, refuse_assumptions
from driftlab.doctor.candidates import Alternative, alternatives, both, changes, same, tried
from driftlab.doctor.diagnosis import (
    FILE,
    Candidate,
    Diagnosis,
    Limits,
    Outcome,
    Row,
    Runtime,
    Verdict,
)
from driftlab.doctor.ruling import hopeless, judge, outcome
from driftlab.doctor.scoring import Bench, Prompts, Score, margins, own_texts, saved
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
from driftlab.results.stats import holm

__all__ = [
    "Bench",
    "Candidate",
    "Check",
    "Diagnosis",
    "Limits",
    "Outcome",
    "Verdict",
    "bench",
    "correction",
    "examine",
    "fix",
    "refuse_served",
]

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
    ConfigError: nothing to correct (see :func:`correction`), a runtime's reading was checked, or
        ``folder`` is the drafter's own: the original is never changed.
    CheckpointError: ``folder`` is not empty.
    """
    winner, subject = correction(diagnosis), diagnosis.subject
    if winner is None or subject is None:
        raise ConfigError(
            "there is no better reading to write",
            got=f"verdict {diagnosis.verdict}",
            remedy="A corrected copy is written when a candidate won.",
        )
    refuse_served(diagnosis.profile)
    if diagnosis.source is not None and Path(folder).resolve() == diagnosis.source.resolve():
        raise ConfigError(
            "the corrected copy would replace the drafter", got=folder, remedy="Give a new folder."
        )
    made = build(subject, winner.reading)
    for name, value in winner.patch.items():
        old = subject.provenance.get(name)
        was = f", the file: {old.value}" if old is not None else ""
        others = ", ".join(other for other in winner.patch if other != name)
        found = f"saves {winner.margin.short} nats a token"
        if others:
            found += f" together with {others}"
        if diagnosis.winner is None:
            found = f"as good here ({winner.margin.short} nats a token), and what engines compute"
        made.provenance[name] = Sourced(
            value=value, origin=Origin.derived, where=f"driftlab doctor: {found}{was}"
        )
    save_drafter(made, folder)
    return made


def refuse_served(profile: str) -> None:
    """Raise ConfigError for a runtime's profile: its reading corrects no file."""
    if profile != Profile.trained:
        raise ConfigError(
            f"a copy is corrected by the file's own reading, not by that of {profile}",
            remedy="Run the doctor as trained to correct the file.",
        )


def correction(diagnosis: Diagnosis) -> Candidate | None:
    """The reading that a corrected copy gets: the winner's.

    Without one there is one thing that a copy can settle: where two hidden norms were assumed and
    the text cannot tell them from one, the copy says one, which engines can serve.
    """
    if diagnosis.winner is not None:
        return diagnosis.winner
    if diagnosis.verdict is not Verdict.clean:
        return None
    for c in diagnosis.candidates:
        alike = c.against == FILE and c.outcome is Outcome.no_better and not c.settled
        if alike and c.patch == {"double_hidden_norm": False}:
            return c
    return None


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
        checks = self_checks(self.target, drafter, texts)
        common = {
            "target": self.target.name,
            "drafter": str(self.source) if self.source is not None else "in memory",
            "profile": self.served.profile,
            "texts": len(texts),
            "tokens": sum(len(t.continuation) for t in texts),
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
                limits=None,
                candidates=(),
                winner=None,
                rivals=(),
                verdict=Verdict.wrong,
                reasons=("its tensors are damaged, nothing was scored",),
                runtimes=(),
                notes=notes,
            )
        own, limits, candidates, winner, rivals = self._candidates()
        checks.append(useful := drafts(own, drafter, texts))
        if winner is not None and not useful.ok:
            better = drafts(winner.score, build(self.subject, winner.reading), texts)
            if not better.ok:  # the better of two readings that draft nothing says nothing
                winner, rivals = None, ()
        differs = self._differences()
        checks.append(states_of_training(self.subject, differs))
        notes = (*notes, *differs)
        verdict, reasons = judge(limits, checks, candidates, winner, [c.name for c in rivals])
        best = winner.reading if winner is not None else self.base
        return Diagnosis(
            **common,  # type: ignore[arg-type]
            checks=tuple(checks),
            score=own,
            limits=limits,
            candidates=tuple(candidates),
            winner=winner,
            rivals=rivals,
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

    def _score(
        self, readings: dict[str, Reading], label: str, *, first: bool = False
    ) -> dict[str, Score]:
        built = {name: build(self.subject, reading) for name, reading in readings.items()}
        return self.bench.score(built, first=first, progress=label if self.progress else "")

    def _candidates(
        self,
    ) -> tuple[Score, Limits, list[Candidate], Candidate | None, tuple[Candidate, ...]]:
        """One patch at a time; then the best ones with each of the others, while margins stay.

        Where none is better, two at a time may be: of pairs only those that are, are named.
        Readings that cannot be told apart go on side by side: a second fault can part them.
        """
        options = alternatives(
            self.base, self.subject.provenance, self.facts, self.target.shape.rope
        )
        self.bench.prepare(b for o in options for b in tried(o.apply, self.base).config.boundaries)
        own = self._score({FILE: self.base}, "the file's reading")[FILE]
        limits = Limits.of(own)
        found: list[Candidate] = []
        best: list[Candidate] = []
        stems: list[tuple[str, Reading, Score]] = [(FILE, self.base, own)]
        for round_ in range(FAULTS):
            made = self._extend(options, stems, limits, f"readings, pass {round_ + 1}")
            found += made
            better = [c for c in made if c.outcome is Outcome.better]
            if not better and round_ == 0:
                made = self._extend(_pairs(options, made, limits), stems, limits, "readings, pairs")
                # So many pairs that some are unclear by chance: that alone is no doubt.
                better = [c for c in made if c.outcome is Outcome.better]
                found += better
            if not better:
                break
            best = self._front([*best, *better], limits, 2 * len(found))
            new = {c.name for c in better}
            stems = [(c.name, c.reading, c.score) for c in best if c.name in new]
            if not stems:
                break
        if not best:
            return own, limits, found, None, ()
        winner, *rivals = best
        if winner.against != FILE:
            # Its own margin was over the reading before it; the file's reading is what counts.
            margin, accepted = margins(own, winner.score, seed=self.seed)
            winner = replace(winner, margin=margin, accepted=accepted)
        return own, limits, found, winner, tuple(rivals)

    def _extend(
        self,
        options: Sequence[Alternative],
        stems: Sequence[tuple[str, Reading, Score]],
        limits: Limits,
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
        scores = self._score({name: t[2] for name, t in tries.items()}, label, first=True)
        over = {name: margins(t[3], scores[name], seed=self.seed) for name, t in tries.items()}
        left = [name for name in tries if not hopeless(*over[name])]
        best = max(left, key=lambda n: saved(stems[0][2], scores[n]), default="")
        # Next to the best reading of the first look, most are hopeless. Without them it may turn
        # out that it is not better at all: then they have to be scored after all.
        near = [n for n in left if not hopeless(*margins(scores[best], scores[n], seed=self.seed))]
        for part in (near, left):
            scores |= self._score({name: tries[name][2] for name in part}, label)
            over |= {n: margins(tries[n][3], scores[n], seed=self.seed) for n in part}
            adjusted = holm({f"{e.unit} {n}": e for n, pair in over.items() for e in pair})
            outcomes = {
                n: outcome(limits, *(replace(e, p=adjusted[f"{e.unit} {n}"]) for e in pair))
                for n, pair in over.items()
            }
            for n in tries:  # a first look is enough to give up, and never to win
                if outcomes[n] is Outcome.better and scores[n].texts < stems[0][2].texts:
                    outcomes[n] = Outcome.unclear
            if part == left or Outcome.better in (outcomes[name] for name in part):
                break
        return [
            Candidate(
                name=name,
                against=against,
                patch=changes(self.base, reading),
                why=option.why,
                settled=option.settled,
                score=scores[name],
                margin=over[name][0],
                accepted=over[name][1],
                outcome=outcomes[name],
                reading=reading,
            )
            for name, (option, against, reading, _) in tries.items()
        ]

    def _front(self, better: Sequence[Candidate], limits: Limits, tests: int) -> list[Candidate]:
        """The best reading and at most two that cannot be told apart from it: the simplest.

        The best one was picked after so many tests, for which its p values are corrected.
        """
        ordered = sorted(better, key=lambda c: sum(c.score.cross_entropy))
        first = ordered[0]
        near = []
        for c in ordered[1:]:
            over = margins(c.score, first.score, seed=self.seed)
            corrected = (replace(e, p=min(1.0, tests * e.p)) for e in over)
            if outcome(limits, *corrected) is not Outcome.better:
                near.append(c)
        near.sort(key=_faults)
        return [first, *near[:2]]

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


def _pairs(
    options: Sequence[Alternative], made: Sequence[Candidate], limits: Limits
) -> list[Alternative]:
    """Every change that costs nothing that matters with every other one.

    Of two faults one may hide the other, so that neither shows alone.
    """
    cheap = {
        c.name
        for c in made
        if all(e.value > -limits.matters(e.unit) for e in (c.margin, c.accepted))
    }
    return [both(a, b) for a in options if a.name in cheap for b in options if a.field != b.field]


def _name(against: str, option: Alternative) -> str:
    return option.name if against == FILE else f"{against} + {option.name}"


def _faults(candidate: Candidate) -> int:
    return candidate.name.count(" + ")


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
        patch, said = served.get(name), known.get(name)
        if patch is not None:
            rows.append(Row(name, patch.served, "derived", f"{patch.row}: {patch.why}"))
        elif said is not None:
            rows.append(Row(name, said.value, str(said.origin), said.where))
    rows += [
        Row(f"target.{name}", s.value, str(s.origin), s.where)
        for name, s in target.provenance.items()
        if name in {"dtype", "quantization", "revision", "attention"}
    ]
    return rows
