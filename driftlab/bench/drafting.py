"""Stages of the drafter: probing all anchors, a training step, region masses of a long text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from driftlab.bench import count, shapes
from driftlab.bench.files import PEAK
from driftlab.bench.machine import gemm
from driftlab.bench.peers import Peer, disagreement, save_job
from driftlab.bench.shapes import Bench
from driftlab.bench.timing import Sample, ratio
from driftlab.config import DrafterConfig, MeasureSpec, TrainSpec
from driftlab.data.features import Batch
from driftlab.engines.anchors import unroll
from driftlab.engines.chain import speculate
from driftlab.engines.probe import measurable_anchors, probe, target_probabilities
from driftlab.engines.train import SoftTargets, supervised, ttt_loss
from driftlab.models.drafter import Drafter
from driftlab.models.target import Target
from driftlab.results.bench_rows import Row, summary


def times(found: list[Sample]) -> dict:
    return summary([x.busy for x in found], [x.wall for x in found])


def work(bench: Bench, done: count.Work, found: list[Sample], dtype: torch.dtype) -> dict:
    """Columns of a row that follow from what had to be done."""
    least = done.least_seconds(bench.peak(dtype), bench.machine.bandwidth)
    return {
        "gflop": done.operations / 1e9,
        "gbyte": done.bytes / 1e9,
        "share": least / min(x.busy for x in found),
        **times(found),
    }


# --- probing ------------------------------------------------------------------------------------


def probing(bench: Bench) -> Iterator[Row]:
    """All anchors at once with the default measures; hooks off; the chain, anchor by anchor."""
    shape, target_shape = (
        (shapes.SMOLLM2, shapes.SMOLLM2_TARGET)
        if bench.full
        else (shapes.SMALL, shapes.SMALL_TARGET)
    )
    target = shapes.random_target(target_shape, device=bench.device)
    drafter, _ = shapes.random_pair(shapes.config_of(shape), bench.device)
    sizes = ((128, 8), (512, 4), (512, 8)) if bench.full else ((96, 4), (96, 8))
    for tokens, depth in sizes:
        # The chain is slow: it is run at the largest size only.
        chain = (tokens, depth) == sizes[-1]
        yield from _probed(bench, target, target_shape, drafter, tokens, depth, chain=chain)


def _probed(
    bench: Bench,
    target: Target,
    target_shape: count.TargetShape,
    drafter: Drafter,
    tokens: int,
    depth: int,
    *,
    chain: bool,
) -> Iterator[Row]:
    config, dtype = drafter.config, drafter.norm.weight.dtype
    text = shapes.random_text(tokens, config.vocab_size)
    ids, lengths = torch.tensor([text.tokens]), torch.tensor([tokens])
    spec = MeasureSpec(depth=depth)
    anchors = measurable_anchors(text, spec)

    def read() -> tuple[Tensor, Tensor]:
        out = target.forward(ids, lengths, config.boundaries, logits=False)
        return out.aux[0], out.last[0]

    aux, last = read()

    def chances(last: Tensor) -> Tensor:
        return target_probabilities(target, last, drafter.draft_to_target)

    def measure(aux: Tensor, chances: Tensor) -> None:
        probe(drafter, [text], [aux], spec, target_probabilities=[chances])

    def everything() -> None:
        aux, last = read()
        measure(aux, chances(last))

    known = chances(last)

    def bare() -> None:
        with torch.inference_mode():
            for mode in spec.modes:
                for _ in unroll(
                    drafter,
                    ids.to(bench.device),
                    aux[None],
                    depth=depth,
                    mode=mode,
                    anchors=anchors.to(bench.device),
                ):
                    pass

    off, full = "all anchors, hooks off", "all anchors, measured"
    given, whole = "the target's probabilities", "target and all anchors, measured"
    calls: dict[str, Callable[[], object]] = {
        off: bare,
        full: lambda: measure(aux, known),
        given: lambda: chances(last),
    }
    if chain:
        calls[whole] = everything
    rounds = 0
    if chain:
        start = tokens // 2  # the middle of the text stands for all of its anchors
        wanted = 16 if bench.full else 8
        prompt = list(text.tokens[:start])

        def chained(new: int) -> int:
            done = speculate(target, drafter, prompt, depth=depth, max_new_tokens=new)
            return len(done.rounds)

        # The first round also reads the prompt, with both models: it is taken off below.
        rounds = chained(wanted) - chained(2)
        calls |= {"chain": lambda: chained(wanted), "its first round": lambda: chained(2)}
    found = bench.race(calls, budget=130 if chain else 25)
    size = f"T={tokens} depth={depth} heads={config.num_heads} Vd={config.draft_vocab_size}"
    common: dict[str, Any] = {"stage": "probing", "size": size, "dtype": "float32"}
    unrolled = count.unrolled(config, tokens=tokens, depth=depth, modes=len(spec.modes))
    vocabulary = count.product(tokens, target_shape.width, target_shape.vocabulary)
    passed = count.target_forward(target_shape, tokens, tokens / 2, logits=0)
    yield Row(**common, case=off, **work(bench, unrolled, found[off], dtype))
    yield Row(
        **common,
        case=full,
        **work(bench, unrolled, found[full], dtype),
        ratio=ratio(found[full], found[off]),
        of="measured / hooks off",
        goal="at most 1.15",
        note="free and forced, all measures, total variation; the target's probabilities are given",
    )
    both = [
        Sample(m.wall + g.wall, m.busy + g.busy)
        for m, g in zip(found[full], found[given], strict=True)
    ]
    yield Row(
        **common,
        case=given,
        **work(bench, vocabulary, found[given], dtype),
        ratio=ratio(both, found[off]),
        of="(measured + the target's probabilities) / hooks off",
        goal="at most 1.15",
        note="one product with the target's head over its whole vocabulary, for both modes",
    )
    if not chain:
        return
    done = work(bench, unrolled + vocabulary + passed, found[whole], dtype)
    each = [
        Sample((a.wall - b.wall) / rounds * len(anchors), (a.busy - b.busy) / rounds * len(anchors))
        for a, b in zip(found["chain"], found["its first round"], strict=True)
    ]
    yield Row(
        **common,
        case="verified chain, anchor by anchor",
        **times(each),
        note=f"{rounds} anchors of the text's middle were timed and scaled to {len(anchors)}",
    )
    yield Row(
        **common,
        case=whole,
        **done,
        ratio=ratio(each, found[whole]),
        of="chain / target and all anchors measured",
        goal="30 or more",
    )


# --- training -----------------------------------------------------------------------------------


def training(bench: Bench) -> Iterator[Row]:
    """Loss and gradients of one TTT step, against other trainers and against the peak."""
    dtypes = (False, True)
    if not bench.full:
        config = shapes.config_of(shapes.SMALL)
        yield from _masked(_trained(bench, config, 96, 2, n, False) for n in (1, 48))
        return
    if bench.device.type == "cuda":
        for half in dtypes:
            yield from _trained(bench, shapes.config_of(shapes.LLAMA_8B), 2048, 1, 1, half)
        return
    step = shapes.config_of(shapes.STEP)
    yield from _masked(_trained(bench, step, 512, 2, n, False) for n in (1, 256))
    yield from _trained(bench, shapes.config_of(shapes.SMOLLM2), 512, 2, 1, False)
    # Last, since it is the slowest where bf16 is emulated.
    yield from _trained(bench, step, 512, 2, 1, True)


def _masked(cases: Iterable[Iterator[Row]]) -> Iterator[Row]:
    """Rows of all cases; our own of later ones beside the first, whose texts have no prompt."""
    whole: Row | None = None
    for rows in cases:
        for row in rows:
            yield row
            if row.case != "driftlab":
                continue
            if whole is not None and whole.busy and row.busy:
                yield replace(
                    row,
                    case="driftlab, half left out",
                    ratio=whole.busy / row.busy,
                    of="every token learned / half of them",
                    goal="more than 1",
                    note="the loss mask leaves the first half of each text out",
                )
            whole = whole or row


def grown_training(bench: Bench) -> Iterator[Row]:
    """How a training step grows with T, depth, heads and vocabulary; without other trainers."""
    alone = replace(bench, peers={})
    shape = shapes.STEP if bench.full else shapes.SMALL
    base = 512 if bench.full else 96
    plain = shapes.config_of(shape)
    cases = [(plain, n, 4) for n in (base // 2, base, base * 2)]
    cases += [(plain, base, ttt) for ttt in (2, 8)]
    cases += [(shapes.config_of(shape, heads=n), base, 4) for n in (2, 8)]
    cases += [
        (plain.model_copy(update={"draft_vocab_size": plain.draft_vocab_size // n}), base, 4)
        for n in (2, 4)
    ]
    for config, tokens, ttt in cases:
        for row in _trained(alone, config, tokens, 2, 1, False, ttt=ttt, budget=8):
            if row.case == "driftlab":
                yield replace(row, stage="training step, growth")


def step_batch(config: DrafterConfig, tokens: int, texts: int, prompt: int, ttt: int) -> Batch:
    """Texts of which every token after the prompt is learned at every depth, or at none.

    The first ``ttt`` - 1 tokens that a trainer would guess from inside the prompt at one depth
    and not at another are outside the draft vocabulary: then all trainers learn the same ones.
    """
    rng = torch.Generator().manual_seed(2)
    step = config.vocab_size // config.draft_vocab_size
    ids = torch.randint(config.draft_vocab_size, (texts, tokens), generator=rng) * step
    start = max(2, prompt)
    ids[:, start : start + ttt - 1] = 1  # no multiple of step
    width = config.target_hidden_size
    return Batch(
        ids,
        torch.full((texts,), tokens),
        torch.full((texts,), prompt),
        torch.randn(texts, tokens, len(config.boundaries) * width, generator=rng),
        torch.randn(texts, tokens, width, generator=rng),
        tuple(range(texts)),
    )


def _trained(
    bench: Bench,
    config: DrafterConfig,
    tokens: int,
    texts: int,
    prompt: int,
    half: bool,
    *,
    ttt: int = 4,
    budget: float = 30,
) -> Iterator[Row]:
    spec = TrainSpec(ttt=ttt, decay=0.8)
    drafter, teacher = shapes.random_pair(config, bench.device)
    drafter.train()
    weights = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    batch = step_batch(config, tokens, texts, prompt, spec.ttt)
    targets = SoftTargets(teacher, drafter.draft_to_target)

    def step() -> Tensor:
        for weight in weights.values():
            weight.grad = None
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=half):
            loss, _ = ttt_loss(drafter, batch, targets, spec)
        loss.backward()
        return loss

    dtype = torch.bfloat16 if half else torch.float32
    name = "bfloat16 autocast" if half else "float32"
    first = max(0, prompt - 2)
    asked = supervised(drafter, batch, spec, first)
    learned = torch.zeros(texts, tokens, dtype=torch.bool)
    learned[asked.text, asked.at] = True
    apart: dict[str, float] = {}
    square = 4096 if bench.device.type == "cuda" else 512 if bench.full else 128
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {"driftlab": step}
        if bench.peers:
            ours = (
                float(step().detach()),
                {n: p.grad.cpu() for n, p in weights.items() if p.grad is not None},
            )
            job = bench.work / "step.pt"
            save_job(job, drafter, batch, learned, teacher.head_weight, spec, autocast=half)
            for peer, command in bench.peers.items():
                bench.say(f"{peer}: asked for its loss and gradients")
                running = stack.enter_context(Peer(peer, command, job))
                apart[peer] = disagreement(ours, running.check(bench.work / f"{peer}.pt"))
                bench.say(f"{peer}: loss and gradients within {apart[peer]:.1e} of ours")
                calls[peer] = running.step
        calls["GEMM"] = gemm(square, dtype, bench.device)
        found = bench.race(calls, budget=budget * len(calls) / 2)
    done = count.ttt_step(
        config, texts=texts, tokens=tokens, first=first, learned=len(asked.at), depth=spec.ttt
    )
    # The peak of this very moment: a neighbour's load moves both.
    products = found.pop("GEMM")
    peak = 2 * square**3 / min(x.busy for x in products)
    size = (
        f"T={tokens} batch={texts} depth={ttt} prompt={prompt} H={config.hidden_size} "
        f"heads={config.num_heads} Vd={config.draft_vocab_size}"
    )
    common: dict[str, Any] = {"stage": "training step", "size": size, "dtype": name}
    best = min(apart, key=lambda p: min(x.busy for x in found[p]), default=None)
    yield Row(
        **common,
        case=f"GEMM of {square}",
        **summary([x.busy for x in products], [x.wall for x in products]),
        ratio=done.operations / peak / min(x.busy for x in found["driftlab"]),
        of="the step's operations at a GEMM's speed / driftlab",
        goal="0.6 or more",
    )
    for case, samples in found.items():
        row = Row(
            **common,
            case=case,
            **{
                **work(bench, done, samples, dtype),
                "share": done.operations / peak / min(x.busy for x in samples),
            },
            note=f"{texts * tokens / min(x.busy for x in samples):.0f} tokens a busy second"
            + (f"; loss and gradients within {apart[case]:.1e} of ours" if case in apart else ""),
        )
        if case == "driftlab" and best is not None:
            goal = "2 or more" if half else "1.15 or more"
            yield replace(
                row, ratio=ratio(found[best], samples), of=f"{best} / driftlab", goal=goal
            )
        else:
            yield row


# --- region masses of a long text ---------------------------------------------------------------

_MASSES = (
    PEAK
    + """
import resource, sys, torch
from driftlab.bench.drafting import region_job
torch.set_num_threads(1)
job = region_job(int(sys.argv[1]), sys.argv[2] == "stored", int(sys.argv[3]))
before = peak()
job()
print(before, peak(), resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""
)


def region_job(tokens: int, stored: bool, width: int) -> Callable[[], None]:
    """Depth 1 of a text of ``tokens``, its region masses; ``stored`` keeps the pattern first."""
    from driftlab.analysis import measures
    from driftlab.models.hooks import Moment, attach

    config = shapes.config_of((width, 4, 2, 2 * width, 512, 64))
    drafter, _ = shapes.random_pair(config, torch.device("cpu"))
    ids = torch.randint(512, (1, tokens))
    aux = torch.randn(1, tokens, 3 * width)
    sink, prompt = measures.first_sink(1, tokens), torch.tensor([1])
    whole = torch.empty(1, 4, tokens - 1, tokens - 1) if stored else torch.empty(0)
    kept: list[Tensor] = []

    def see(pattern: Tensor, moment: Moment) -> None:
        if stored:
            whole[:, :, moment.rows] = 0
            whole[:, :, moment.rows, : pattern.shape[-1]] = pattern
        else:
            kept.append(measures.region_masses(pattern, moment.anchors, 1, sink, prompt))

    def run() -> None:
        with torch.inference_mode(), attach(drafter, "attn.pattern", see):
            drafter.step(ids[:, 1:], drafter.fuse(aux[:, :-1]), drafter.new_memory(), depth=1)
            if stored:
                measures.region_masses(whole, torch.arange(tokens - 1), 1, sink, prompt)

    return run


def masses(bench: Bench) -> Iterator[Row]:
    """Peak memory of region masses at growing T, each in a fresh process, on the CPU."""
    sizes = (2048, 4096, 8192) if bench.full else (1024, 2048)
    grown: dict[tuple[str, int], float] = {}
    for tokens in sizes:
        for case in ("by block", "stored"):
            done = subprocess.run(
                [sys.executable, "-c", _MASSES, str(tokens), case, "64"],
                check=True,
                capture_output=True,
                text=True,
                # glibc keeps freed blocks that the next, larger one does not fit into; without
                # this the process shows them, and not what is held.
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"},
            )
            before, after, busy = map(float, done.stdout.split())
            grown[case, tokens] = after - before
            row = Row(
                stage="region masses",
                case=case,
                size=f"T={tokens} heads=4",
                dtype="float32",
                busy=busy,
                n=1,
                memory=after - before,
                note="MiB above what the inputs need; busy is the whole process",
            )
            if case == "stored":
                yield replace(
                    row,
                    ratio=(after - before) / max(grown["by block", tokens], 1e-9),
                    of="memory stored / by block",
                )
            elif tokens == sizes[0]:
                yield row
            else:
                yield replace(
                    row,
                    ratio=(after - before) / max(grown[case, sizes[0]], 1e-9),
                    of=f"memory at T={tokens} / T={sizes[0]}",
                    goal=f"about {tokens // sizes[0]} (linear)",
                )
