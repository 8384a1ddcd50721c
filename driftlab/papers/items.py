"""What each item of the paper is in our tables: rows of a table, contrasts, curves.

An item reads one or several runs of one base. Contrasts carry the ids of the claims in
``paper.toml``. "Pre-norm" is ``none+pre_norm`` (EAGLE-3); "post-norm" is ``per_layer+post_norm``
(EAGLE-3.1), because no source says that the paper's post-norm drafters lack the fusion norm; the
two switches apart are the flagship's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from driftlab.papers.beyond import BUDGET, CHANGED, TRAINED, agreement, budget, changed, trained
from driftlab.papers.explained import OWED, owed
from driftlab.papers.numbers import (
    BOTH,
    CONCAT,
    CONCAT_BOTH,
    NEITHER,
    PAIR,
    POST,
    SHALLOW,
    SWITCHES,
    Found,
    Measured,
    Numbers,
    Panel,
    points,
    present,
    relative,
    together,
)
from driftlab.results.answers import registered_answers
from driftlab.results.explanations import Explained
from driftlab.results.records import Tables
from driftlab.results.slices import Group
from driftlab.results.stats import Estimate, Sample, ratio

# --- T1 and T2: size and attention by depth -----------------------------------------------------


def stages(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["norms"]
    g = run.group(NEITHER)
    if g is None:
        return None
    free, fused = run.free, run.fused
    depths = [d for d in (1, 2, 3, run.deep) if d in free.index]
    row = {
        name: run.number(fused.mean(g, "rms_in", i))
        for name, i in zip(
            ("low", "mid", "high"),
            (fused.index[0], fused.index[len(fused.index) // 2], fused.index[-1]),
            strict=True,
        )
    }
    row["h_FC"] = run.number(free.mean(g, "rms_input", 1))
    row |= {f"h*{d}": run.level(g, "log_rms_state_pre", d) for d in depths}
    row[f"h*{run.deep}/h*1"] = run.growth(g, 1, run.deep)
    logs = [Sample(np.log(fused.at(g, "rms_in", i))) for i in (fused.index[-1], fused.index[0])]
    contrasts = present(
        grows=run.growth(g, 1, run.deep),
        second=run.growth(g, 1, 2) if 2 in free.index else None,
        third=run.growth(g, 2, 3) if 3 in free.index else None,
        unbalanced=run.less(*logs, ratio=True),
    )
    lines = {g.label: g}
    frame = run.means("RMS of the state", "log_rms_state_pre", lines)
    layers = [("captured states and fused input", n, e) for n, e in list(row.items())[:4]]
    return {g.label: row}, contrasts, together([points("RMS by stage", layers), frame])


_T2 = {"log_rms_state_pre": "RMS", "entropy": "entropy", "sink": "sink", "recent": "recent"}


def architectures(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["norms"]
    pre, post = run.group(NEITHER), run.group(BOTH)
    if pre is None or post is None:
        return None
    named = [(run, {"pre-norm": pre, "post-norm": post})]
    deep, free = run.deep, run.free
    gate_contrasts: dict[str, Estimate | None] = {}
    if gates := runs.get("gated"):
        # A gate is compared with the drafters that were trained beside it.
        plain, gated, both = (
            gates.group(v, gate=g) for v, g in ((NEITHER, False), (NEITHER, True), (POST, True))
        )
        there = {"gated attention": gated, "gated + post-norm": both}
        named.append((gates, {n: g for n, g in there.items() if g is not None}))
        if plain and gated:
            sinks = (gates.free.mean(g, "sink", 1) for g in (gated, plain))
            moved = (
                gates.free.change(g, "log_rms_state_pre", 1, gates.deep) for g in (gated, plain)
            )
            gate_contrasts |= {
                "gate_grows": gates.less(*moved, ratio=True),
                "gate_no_sink": gates.less(*sinks),
            }
        gate_contrasts["gate_post_flat"] = gates.growth(both, 1, gates.deep) if both else None
    rows = {
        f"{name}: {g.label}": {
            f"{short} @{d}": of.level(g, column, d)
            for column, short in _T2.items()
            for d in (1, deep)
        }
        for of, lines in named
        for name, g in lines.items()
    }

    def at(g: Group, column: str, d: int = 1) -> Sample:
        return free.mean(g, column, d)

    def moves(g: Group) -> Sample:
        return free.change(g, "log_rms_state_pre", 1, deep)

    contrasts = present(
        sink_falls=run.change(pre, "sink", 1, deep),
        entropy_rises=run.change(pre, "entropy", 1, deep),
        recent_rises=run.change(pre, "recent", 1, deep),
        post_bounds=run.less(moves(post), moves(pre), ratio=True),
        post_low_sink=run.less(at(post, "sink"), at(pre, "sink")),
        post_flat_sink=run.change(post, "sink", 1, deep),
        post_recent=run.less(at(post, "recent"), at(pre, "recent")),
        **gate_contrasts,
    )
    panels = {
        "RMS of the state": "log_rms_state_pre",
        "entropy (nats)": "entropy",
        "attention on the sink": "sink",
        "attention on recent keys": "recent",
    }
    drawn = (of.means(p, c, lines) for p, c in panels.items() for of, lines in named)
    return rows, contrasts, together(drawn)


# --- the flagship: the two switches apart -------------------------------------------------------


def flagship(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["norms"]
    four = {name: run.group(v) for name, v in SWITCHES.items()}
    if any(g is None for g in four.values()):
        return None
    more = {"concat alone": run.group(CONCAT), "concat and post_norm": run.group(CONCAT_BOTH)}
    named: dict[str, Group] = {n: g for n, g in (four | more).items() if g is not None}
    neither, fc, post, both = (named[n] for n in SWITCHES)
    free, forced, deep, last = run.free, run.forced, run.deep, run.deepest
    shares = run.fused
    top, first = shares.index[-1], free.index[0]
    spots = [d for d in (1, SHALLOW, 8, 16) if d in forced.index]

    def values(g: Group) -> dict[str, Estimate]:
        return {
            f"drafts, k={SHALLOW}": run.number(run.drafts(g, SHALLOW)),
            f"drafts, k={last}": run.number(run.drafts(g)),
            **{f"forced @{d}": run.number(forced.accuracy(g, d)) for d in spots},
            f"growth 1-{deep}": run.growth(g, 1, deep),
            "sink @1": run.level(g, "sink", first),
            f"sink @{last}": run.level(g, "sink", last),
            f"own drafts @{last}": run.level(g, "draft_mass", last),
            "top layer": run.number(shares.mean(g, "share", top)),
        }

    rows = {f"{name}: {g.label}": values(g) for name, g in named.items()}

    def effect(
        plus: Sequence[Group], minus: Sequence[Group], of: Callable[[Group], Sample], **how: Any
    ) -> Estimate:
        weights = [1 / len(plus)] * len(plus) + [-1 / len(minus)] * len(minus)
        return run.number(*map(of, (*plus, *minus)), contrast=weights, **how)

    switches = {
        "post_norm": ((post, both), (neither, fc)),
        "fc_norm": ((fc, both), (neither, post)),
    }

    def moves(g: Group) -> Sample:
        return free.change(g, "log_rms_state_pre", 1, deep)

    def accuracy(d: int) -> Callable[[Group], Sample]:
        return lambda g: forced.accuracy(g, d)

    for name, (plus, minus) in switches.items():
        rows[f"effect of {name}"] = {
            f"drafts, k={SHALLOW}": effect(plus, minus, lambda g: run.drafts(g, SHALLOW)),
            f"drafts, k={last}": effect(plus, minus, run.drafts),
            **{f"forced @{d}": effect(plus, minus, accuracy(d)) for d in spots},
            f"growth 1-{deep}": effect(plus, minus, moves, ratio=True),
        }

    def interaction(of: Callable[[Group], Sample], **how: Any) -> Estimate:
        four = [of(g) for g in (both, neither, fc, post)]
        return run.number(*four, contrast=(1, 1, -1, -1), **how)

    rows["interaction"] = {
        f"drafts, k={SHALLOW}": interaction(lambda g: run.drafts(g, SHALLOW)),
        f"drafts, k={last}": interaction(run.drafts),
        **{f"forced @{d}": interaction(accuracy(d)) for d in spots},
        f"growth 1-{deep}": interaction(moves, ratio=True),
    }
    posts, pres = switches["post_norm"]
    norms, raws = switches["fc_norm"]
    whole = run.drafts(neither)
    contrasts = present(
        both_longer=relative(run, ratio(run.drafts(both), whole)),
        shallow=relative(run, ratio(run.drafts(both, SHALLOW), run.drafts(neither, SHALLOW))),
        post_growth=effect(posts, pres, moves, ratio=True),
        fc_growth=effect(norms, raws, moves, ratio=True),
        post_shallow=effect(posts, pres, lambda g: run.drafts(g, SHALLOW)),
        fc_shallow=effect(norms, raws, lambda g: run.drafts(g, SHALLOW)),
        post_length=effect(posts, pres, run.drafts),
        fc_length=effect(norms, raws, run.drafts),
        post_deep=effect(posts, pres, accuracy(spots[-1])),
        fc_deep=effect(norms, raws, accuracy(spots[-1])),
        interaction_deep=interaction(accuracy(spots[-1])),
        fc_balances=effect(norms, raws, lambda g: shares.mean(g, "share", top)),
    )
    right = {
        n: c / run.of(forced, "n", named)[n] for n, c in run.of(forced, "n_correct", named).items()
    }
    apart = {
        "effect of post_norm": (
            right["post_norm alone"] + right["both"] - right["neither"] - right["fc_norm alone"]
        )
        / 2,
        "effect of fc_norm": (
            right["fc_norm alone"] + right["both"] - right["neither"] - right["post_norm alone"]
        )
        / 2,
        "interaction": (
            right["both"] + right["neither"] - right["fc_norm alone"] - right["post_norm alone"]
        ),
    }
    frame = together(
        [
            run.accuracy("forced accuracy", named),
            run.curve("effect on accuracy", forced, apart),
            run.means("RMS of the state", "log_rms_state_pre", named),
        ]
    )
    return rows, contrasts, frame


# --- T3 and T4: applied to trained drafters -----------------------------------------------------


def only(condition: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Parameters of the condition's one intervention, if it is of that kind and nothing else."""
    made: Sequence[Mapping[str, Any]] = condition.get("interventions") or ()
    changes = [n for n in _TEXT if condition.get(n) is not None]
    if len(made) != 1 or made[0].get("kind") != kind or changes:
        return None
    parameters: Mapping[str, Any] = made[0]
    return parameters


_TEXT = ("template", "bos", "system", "temperature", "context", "quantize")


def noise(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["noise"]
    rows: dict[str, dict[str, Estimate]] = {}
    kept: dict[tuple[str, str, float], Sample] = {}
    frames = []
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        for condition, g in run.conditions(own):
            if (made := only(condition, "noise")) is not None:
                setting = (str(made.get("path", "hidden")), float(made["alpha"]))
                kept[name, *setting] = run.kept(g, own)
        for path in ("hidden", "embedding"):
            here = {a: s for (n, p, a), s in sorted(kept.items()) if (n, p) == (name, path)}
            if not here:
                continue
            part = {a: run.number(s) for a, s in here.items()}
            rows[f"{name}, {path}"] = {
                "drafts": run.number(run.drafts(own)),
                **{f"{a:g}": per_cent(e) for a, e in part.items()},
            }
            frames.append(points(f"kept, {path} path", ((name, a, e) for a, e in part.items())))
    if not rows:
        return None

    def gap(a: tuple[str, str], b: tuple[str, str], alpha: float = 0.5) -> Estimate | None:
        left, right = kept.get((*a, alpha)), kept.get((*b, alpha))
        return per_cent(run.less(left, right)) if left and right else None

    hidden, embedding = ("pre-norm", "hidden"), ("pre-norm", "embedding")
    contrasts = present(
        hidden_worse=gap(hidden, embedding),
        post_sturdier=gap(("post-norm", "hidden"), hidden),
        paths_alike=gap(("post-norm", "embedding"), embedding),
    )
    return rows, contrasts, together(frames)


def per_cent(e: Estimate) -> Estimate:
    """100 times ``e``."""
    return replace(
        e,
        value=100 * e.value,
        low=100 * e.low,
        high=100 * e.high,
        smallest=100 * e.smallest,
        by_seed=tuple(100 * v for v in e.by_seed),
        over_prompts=(100 * e.over_prompts[0], 100 * e.over_prompts[1]),
        unit="%",
    )


def pin(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["pin"]
    rows: dict[str, dict[str, Estimate]] = {}
    kept: dict[str, Sample] = {}
    deep: dict[str, Estimate] = {}
    drawn = []
    last = run.deepest
    for name, variant in PAIR.items():
        own = run.group(variant)
        found = run.conditions(own) if own else ()
        pinned = next((g for c, g in found if only(c, "pin_norm") is not None), None)
        if own is None or pinned is None:
            continue
        kept[name] = run.kept(pinned, own)
        rows[name] = {
            "plain": run.number(run.drafts(own)),
            "pinned": run.number(run.drafts(pinned)),
            "ratio": relative(run, kept[name]),
        }
        lines: dict[str, Group | None] = {f"{name}, plain": own, f"{name}, pinned": pinned}
        drawn.append(run.means("RMS of the state", "log_rms_state_pre", lines))
        if run.has_forced:
            was, now = (run.forced.accuracy(g, last) for g in (own, pinned))
            deep[name] = run.less(now, was)
            rows[name] |= {
                f"forced @{last}, plain": run.number(was),
                f"forced @{last}, pinned": run.number(now),
            }
            drawn.append(run.accuracy("forced accuracy", lines))
    if not rows:
        return None
    pre, post = kept.get("pre-norm"), kept.get("post-norm")
    contrasts = present(
        pin_hurts=relative(run, pre) if pre else None,
        pin_hurts_post=relative(run, post) if post else None,
        post_keeps_more=run.less(post, pre) if pre and post else None,
        pin_deep=deep.get("pre-norm"),
    )
    return rows, contrasts, together(drawn)


# --- F10: TTT extrapolation ---------------------------------------------------------------------


def extrapolation(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["ttt"]
    last, forced = run.deepest, run.has_forced
    named: dict[tuple[str, int], Group] = {}
    for name, variants in {"pre-norm": (NEITHER,), "post-norm": (BOTH, POST)}.items():
        for g in run.free.groups:
            if g.norms in variants and g.ttt is not None and not g.condition:
                named.setdefault((name, g.ttt), g)
    if not named:
        return None
    rows = {
        f"{name} / {ttt}": {
            "k=1": run.conditional(g, 1),
            f"k={last}": run.conditional(g, last),
            "drafts": run.number(run.drafts(g)),
            **({f"forced @{last}": run.number(run.forced.accuracy(g, last))} if forced else {}),
        }
        for (name, ttt), g in sorted(named.items(), key=lambda i: (i[0][0] != "pre-norm", i[0][1]))
    }

    def gap(a: tuple[str, int], b: tuple[str, int], of: Callable[[Group], Sample]) -> Any:
        left, right = named.get(a), named.get(b)
        return run.less(of(left), of(right)) if left and right else None

    def deep(g: Group) -> Sample:
        return run.forced.accuracy(g, last)

    pre, post = "pre-norm", "post-norm"
    contrasts = present(
        short_fails=gap((pre, 2), (pre, 8), run.drafts),
        post_helps=gap((post, 2), (pre, 2), run.drafts),
        post_helps_deep=gap((post, 2), (pre, 2), deep) if forced else None,
        long_wins=gap((post, 2), (pre, 8), run.drafts),
        never_shown=gap((post, 8), (pre, 8), run.drafts),
        never_shown_deep=gap((post, 8), (pre, 8), deep) if forced else None,
    )
    lines: dict[str, Group | None] = {
        f"{name}, TTT {ttt}": g for (name, ttt), g in sorted(named.items())
    }
    return (
        rows,
        contrasts,
        together(
            [
                run.acceptance("conditional acceptance", lines),
                run.accuracy("forced accuracy", lines),
            ]
        ),
    )


# --- S5.2 and S5.3: other text ------------------------------------------------------------------


TEMPLATE = ("template + BOS", "template, no BOS", "no template, BOS", "neither")


def template_of(condition: Mapping[str, Any]) -> str | None:
    """Which of the four conditions it is; None for a changed system prompt or anything else."""
    others = [n for n in _TEXT if n not in ("template", "bos") and condition.get(n) is not None]
    if others or condition.get("interventions"):
        return None
    return TEMPLATE[2 * (condition.get("template") == "never") + (condition.get("bos") == "never")]


def template(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["template"]
    rows: dict[str, dict[str, Estimate]] = {}
    samples: dict[tuple[str, str], Sample] = {}
    drawn = []
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        found = {TEMPLATE[0]: own}
        found |= {label: g for c, g in run.conditions(own) if (label := template_of(c))}
        for label in (t for t in TEMPLATE if t in found):
            samples[name, label] = run.drafts(found[label])
            rows.setdefault(name, {})[label] = run.number(samples[name, label])
            drawn.append((name, label, rows[name][label]))
    if not drawn:
        return None
    first, last = TEMPLATE[0], TEMPLATE[-1]

    def fall(name: str) -> Sample | None:
        a, b = samples.get((name, last)), samples.get((name, first))
        return ratio(a, b) if a and b else None

    pre, post = fall("pre-norm"), fall("post-norm")
    home = [samples.get((n, first)) for n in ("post-norm", "pre-norm")]
    for name, s in (("pre-norm", pre), ("post-norm", post)):
        if s is not None:
            rows[name]["neither / trained"] = relative(run, s)
    contrasts = present(
        pre_falls=relative(run, pre) if pre else None,
        post_holds=run.less(post, pre) if pre and post else None,
        post_unmoved=relative(run, post) if post else None,
        equal_at_home=relative(run, ratio(home[0], home[1])) if home[0] and home[1] else None,
    )
    return rows, contrasts, points("accepted drafts", drawn)


REACH = ("full", "window", "window + sink", "window + prompt")


def reach_of(condition: Mapping[str, Any]) -> tuple[int, str] | None:
    """Tokens put before the prompt, and what of the text the drafter may attend to."""
    before = (condition.get("context") or {}).get("tokens", 0)
    made = condition.get("interventions") or ()
    if not made:
        return (before, REACH[0]) if before else None
    if len(made) != 1 or made[0].get("kind") != "window":
        return None
    return before, REACH[1 + min(2, int(made[0].get("keep", 0)))]


def context(runs: Mapping[str, Numbers]) -> Found | None:
    run = runs["context"]
    samples: dict[tuple[str, int, str], Sample] = {}
    for name, variant in PAIR.items():
        own = run.group(variant)
        if own is None:
            continue
        samples[name, 0, "full"] = run.drafts(own)
        for condition, g in run.conditions(own):
            if (reach := reach_of(condition)) is not None:
                samples[name, *reach] = run.drafts(g)
    if not samples:
        return None
    lengths = sorted({length for _, length, _ in samples})
    rows: dict[str, dict[str, Estimate]] = {}
    drawn = []
    for (name, length, kept), sample in samples.items():
        e = run.number(sample)
        rows.setdefault(f"{name}, {length} tokens before", {})[kept] = e
        drawn.append((f"{name}, {kept}", length, e))
    longest = lengths[-1]

    def gap(a: tuple[str, str], b: tuple[str, str]) -> Estimate | None:
        left, right = (samples.get((n, longest, reach)) for n, reach in (a, b))
        return run.less(left, right) if left and right else None

    pre, post = "pre-norm", "post-norm"
    contrasts = present(
        post_longer=gap((post, "full"), (pre, "full")),
        window_helps=gap((pre, "window"), (pre, "full")),
        sink_helps=gap((pre, "window + sink"), (pre, "window")),
        post_windowed=gap((post, "window"), (pre, "window")),
    )
    return rows, contrasts, points("accepted drafts", drawn)


# --- all of them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """How an item is measured and which panels its figure has."""

    run: str
    """The experiment that it cannot do without."""
    find: Callable[[Mapping[str, Numbers]], Found | None]
    panels: tuple[Panel, ...] = ()


ITEMS: dict[str, Item] = {
    "flagship": Item(
        "norms",
        flagship,
        (
            Panel("forced accuracy"),
            Panel("effect on accuracy", zero=True),
            Panel("RMS of the state", log=True),
        ),
    ),
    "t1": Item(
        "norms",
        stages,
        (Panel("RMS by stage", "stage", log=True), Panel("RMS of the state", log=True)),
    ),
    "t2": Item(
        "norms",
        architectures,
        (
            Panel("RMS of the state", log=True),
            Panel("entropy (nats)"),
            Panel("attention on the sink"),
            Panel("attention on recent keys"),
        ),
    ),
    "t3": Item(
        "noise",
        noise,
        tuple(Panel(f"kept, {p} path", "alpha", per_cent=True) for p in ("hidden", "embedding")),
    ),
    "t4": Item("pin", pin, (Panel("forced accuracy"), Panel("RMS of the state", log=True))),
    "f7": Item("mtp", lambda runs: None),
    "f10": Item("ttt", extrapolation, (Panel("conditional acceptance"), Panel("forced accuracy"))),
    "s5-2": Item("template", template, (Panel("accepted drafts", "condition"),)),
    **{
        name: Item(name, changed(name), CHANGED)
        for name in ("swap", "sink", "self-keys", "layers", "quantized", "temperature")
    },
    "agreement": Item(
        "agreement",
        agreement,
        (
            Panel("correlation", "target layer"),
            Panel("divergence", "target layer"),
        ),
    ),
    **{name: Item(name, trained(name), TRAINED) for name in ("residual", "alignment", "rate")},
    "budget": Item("budget", budget, BUDGET),
    "s5-3": Item("context", context, (Panel("accepted drafts", "tokens before the prompt"),)),
    "explained": Item("explained", owed, OWED),
}


def measure(
    item: str,
    runs: Mapping[str, Tables],
    base: str,
    explained: Mapping[str, Explained] | None = None,
) -> Measured | None:
    """The numbers of ``item`` from the runs of one base; None when they do not hold it.

    ``explained``: those of ``runs`` of which only the explanation is kept.
    """
    kept = explained or {}
    numbers = {name: Numbers(tables, kept.get(name)) for name, tables in runs.items()}
    if ITEMS[item].run not in numbers:
        return None
    found = ITEMS[item].find(numbers)
    if found is None:
        return None
    rows, contrasts, frame = found
    first = numbers[ITEMS[item].run]
    told = first.explained
    return Measured(
        tuple(f"{name}-{base}" for name in runs),
        rows,
        contrasts,
        frame,
        first.basis,
        first.size,
        told is not None or first.has_sink,
        tuple(told.answers() if told else registered_answers(first.tables)),
    )
