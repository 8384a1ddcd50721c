"""The command line: one verb a command. Every error is two lines, cause and remedy."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftlab.errors import ConfigError, RunError, first_fault, wants_traceback

if TYPE_CHECKING:
    import pandas as pd

    from driftlab.config import Experiment
    from driftlab.models.target import Target as LoadedTarget
    from driftlab.results.records import RunDirectory

# Each verb imports what it needs: torch takes seconds, and even the settings take a quarter.

app = typer.Typer(
    epilog="Begin with `driftlab ablate`: minutes on a CPU, no download. COMMAND --help says more.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option(help="Folder, GGUF file, hub id, or 'micro'.")]
DrafterPath = Annotated[str, typer.Option(help="Folder or hub id of a drafter.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="Place the target's layers: auto, cuda:0 (HuggingFace's).")
]
TpPlan = Annotated[
    str | None, typer.Option(help="'auto': split the target over torchrun's processes.")
]
Out = Annotated[
    Path | None, typer.Option(help="Run directory, runs/NAME by default; the same one resumes.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: train.steps=50")
]
Strict = Annotated[bool, typer.Option(help="Refuse values that were assumed and not read.")]


def _version(asked: bool) -> None:
    if asked:
        from driftlab import __version__

        typer.echo(f"driftlab {__version__}")
        raise typer.Exit


@app.callback()
def _driftlab(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and exit.")
    ] = False,
) -> None:
    """Measure why drafted tokens stop being accepted as a drafter drafts deeper."""


@app.command()
def ablate(
    context: typer.Context,
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file (.toml).")] = None,
    suite: Annotated[
        str | None, typer.Option(help="Packaged experiment; micro when no file is named.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Run it on another target: micro, smollm2, or a file.")
    ] = None,
    redo: Annotated[
        Path | None, typer.Option("--from", help="Run again what this manifest.json describes.")
    ] = None,
    other_code: Annotated[
        bool, typer.Option(help="With --from: also when other code made it.")
    ] = False,
    out: Out = None,
    settings: Settings = None,
    strict: Strict = False,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster for the cells, or 'local'.")
    ] = None,
) -> None:
    """Train and measure every cell of an experiment. Ends with its answers and one report."""
    if experiment is None and redo is None and base is not None:
        raise ConfigError(
            "--base puts an experiment file on another target, and no file is named",
            got=f"--base {base}",
            remedy="For example: driftlab ablate experiments/norms.toml --base smollm2.",
        )
    if experiment is not None and suite is not None:
        raise ConfigError(
            "an experiment file and a suite are named",
            got=f"{experiment} and {suite}",
            remedy="Give one of the two.",
        )
    from driftlab.config import read_experiment

    overrides = tuple(settings or ())
    if redo is not None:
        if (experiment, suite, base) != (None, None, None):
            raise ConfigError(
                "--from names the experiment",
                remedy="Leave file, --suite and --base away; --set may change settings.",
            )
        _redo(
            redo, overrides, out, other_code=other_code, strict=strict, command=context.obj, ray=ray
        )
        return
    if other_code:
        raise ConfigError("--other-code is for --from", remedy="Name a manifest with --from.")
    spec = (
        _suite("micro" if suite is None else suite, overrides)
        if experiment is None
        else read_experiment(experiment, overrides, base=base)
    )
    _run(spec, out or Path("runs") / spec.name, strict=strict, command=context.obj, ray=ray)


@app.command()
def train(
    context: typer.Context,
    target: Target,
    data: Annotated[
        str,
        typer.Option(
            help="Prompts that the target continues: train, micro (target micro only) or a .jsonl "
            "file; with --given, texts."
        ),
    ],
    fusion_norm: Annotated[str, typer.Option(help="none, per_layer or concat.")] = "none",
    feedback: Annotated[str, typer.Option(help="pre_norm or post_norm.")] = "pre_norm",
    seed: Annotated[int, typer.Option(min=0, help="Of the training; texts have text.seed.")] = 0,
    given: Annotated[
        bool,
        typer.Option(
            help='Learn from the texts of the .jsonl file DATA as they are: {"prompt", "response"} '
            'a line, or {"messages"} with an answer.'
        ),
    ] = False,
    out: Out = None,
    settings: Settings = None,
    strict: Strict = False,
) -> None:
    """Train one drafter and measure it on held-out prompts."""
    from driftlab.config import build_experiment

    name = f"{fusion_norm}-{feedback}-s{seed}"
    micro = target == "micro"
    source = {"given": data} if given else {"train_prompts": data}
    text = {**source, "measure_prompts": "micro" if micro else "held-out"}
    raw = {
        "name": name,
        "seeds": [seed],
        "workers": 1,
        "target": {"source": target, **({"boundaries": [0, 1, 2]} if micro else {})},
        "text": {**text, "train_tokens": 16_000 if micro else 150_000},
        "axes": {"fusion_norm": [fusion_norm], "feedback": [feedback]},
    }
    spec = build_experiment(raw, tuple(settings or ()), where="driftlab train")
    made = spec.model_dump(mode="json")
    for setting, asked, value in (
        ("seeds", seed, made["seeds"]),
        ("axes.fusion_norm", fusion_norm, made["axes"]["fusion_norm"]),
        ("axes.feedback", feedback, made["axes"]["feedback"]),
    ):
        if value != [asked]:
            raise ConfigError(
                f"--set {setting} contradicts the option of its own, which names the run",
                got=f"{value} and {[asked]}",
                remedy="Use --seed, --fusion-norm and --feedback; ablate trains several.",
            )
    out = out or Path("runs") / spec.name
    _run(spec, out, strict=strict, command=context.obj)
    for config in sorted((out / "drafters").rglob("config.json")):
        typer.echo(f"drafter: {config.parent}")


@app.command()
def probe(
    target: Target,
    drafter: DrafterPath,
    prompts: Annotated[
        str,
        typer.Option(help="held-out, train, micro (target micro only) or a .jsonl file."),
    ] = "held-out",
    depth: Annotated[int, typer.Option(min=1, help="Drafted tokens of a chain.")] = 8,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Of the measured text; 0 is greedy, which loops on small models."),
    ] = 0.0,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens for each prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts.")] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Texts at a time; memory and sampled text change with it.")
    ] = 16,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31 - 2,
            help="Of sampled text; with text.seed and text.batch of a run, its.",
        ),
    ] = 0,
    out: Out = None,
    strict: Strict = False,
    device_map: DeviceMap = None,
    tp_plan: TpPlan = None,
) -> None:
    """Measure one drafter on the target's own text."""
    from driftlab import lab
    from driftlab.data.corpus import MEASURED_SEED
    from driftlab.results.quantities import accepted_by_context

    out = out or Path("runs") / "probe"
    asked = [target, drafter, prompts, depth, temperature, tokens, limit, seed]
    asked.append(batch if temperature else None)  # which sampled text depends on
    _refuse_other_probe(out, asked)
    cache = out.parent / "cache"
    placed = device_map is not None or tp_plan is not None
    opened = _open_target(target, device_map, tp_plan, cache=cache) if placed else target
    pair = lab.open(opened, drafter, strict=strict, cache=cache)
    measured = pair.probe(
        prompts,
        depth=depth,
        temperature=temperature,
        max_new_tokens=tokens,
        limit=limit,
        seed=MEASURED_SEED + seed,
        batch=batch,
    )
    measured.manifest["asked"] = asked
    _finish(measured.save(out))
    row: Any  # of columns that pandas cannot tell the types of
    for row in accepted_by_context(measured.steps, measured.prompts).itertuples():
        typer.echo(
            f"context of {row.low} to {row.high - 1} tokens: {row.accepted:.2f} accepted drafts a "
            f"round ({row.text}, {row.anchors} rounds)"
        )


def _resolved(asked: object) -> list[object]:
    """Options with the paths among them in one spelling."""
    words = asked if isinstance(asked, list) else []
    return [os.path.realpath(w) if isinstance(w, str) and os.path.exists(w) else w for w in words]


def _refuse_other_probe(out: Path, asked: list[object]) -> None:
    """Measuring takes minutes, so that a folder which is taken is refused before, not after."""
    from driftlab.results.records import RunDirectory, refuse_foreign

    refuse_foreign(out)
    if not (out / "manifest.json").exists():
        return
    held = RunDirectory.open(out).manifest
    if _resolved(held.get("asked")) != _resolved(asked):
        raise RunError(
            f"{out} already holds another run",
            got=held.get("name"),
            remedy="Choose another folder with --out, or delete that run.",
        )


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="A run directory with its drafters.")],
    limit: Annotated[int, typer.Option(min=1, help="At most this many prompts.")] = 24,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: depth=4")
    ] = None,
) -> None:
    """Explain what a run's drafters use. Layers, inputs, states, attention mass and its effect."""
    from driftlab.config import build_explain
    from driftlab.engines.explain import explain_run
    from driftlab.results.explain_figures import save_explain_figures

    spec = build_explain(tuple(settings), where="driftlab explain") if settings else None
    found = explain_run(run, spec, limit=limit)
    drawn = save_explain_figures(found, run / "explained" / "figures")
    for answer in found.answers():
        typer.echo(f"- {answer.sentence}")
    typer.echo("")
    typer.echo(f"basis:   {found.basis}")
    typer.echo(f"figures: {run / 'explained' / 'figures'} ({', '.join(drawn)})")
    typer.echo(f"table:   {run / 'explained.parquet'}")


@app.command()
def doctor(
    target: Target,
    drafter: DrafterPath,
    profile: Annotated[
        str, typer.Option("--as", help="Compute as this runtime: vllm, sglang, trtllm, llamacpp.")
    ] = "trained",
    tokens: Annotated[int, typer.Option(min=200, help="Length of the target's text.")] = 2000,
    fix: Annotated[
        Path | None, typer.Option(help="New folder for a corrected copy, if one is called for.")
    ] = None,
    strict: Strict = False,
    device_map: DeviceMap = None,
    tp_plan: TpPlan = None,
) -> None:
    """Check that a drafter is read as it was trained. Exit 0 clean, 3 doubtful, 4 wrong."""
    from driftlab import doctor as checks
    from driftlab.models.checkpoints import refuse_occupied

    if fix is not None:
        checks.refuse_served(profile)  # before the text is written, which takes minutes
        refuse_occupied(fix)
    found = checks.examine(
        _open_target(target, device_map, tp_plan),
        drafter,
        tokens=tokens,
        strict=strict,
        as_profile=profile,
        progress=True,
    )
    typer.echo(str(found))
    if fix is not None and checks.correction(found) is None:
        typer.echo("corrected copy: none, no other reading is surely better")
    elif fix is not None:
        checks.fix(found, fix)
        typer.echo(f"corrected copy: {fix}")
    raise typer.Exit(found.exit_code)


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id of a drafter.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators, safeailab or driftlab.")],
    out: Annotated[Path, typer.Option(help="Folder for the written drafter.")],
    target: Annotated[
        str | None, typer.Option(help="Target, for files that leave parts to it.")
    ] = None,
    strict: Strict = False,
) -> None:
    """Write a drafter as another engine or trainer reads it."""
    from driftlab.models.checkpoints import load_drafter, refuse_occupied, save_drafter

    refuse_occupied(out, source=drafter, dialect=to)
    opened = None if target is None else _open_target(target)
    made = load_drafter(drafter, target=opened, strict=strict)
    for name, source in made.provenance.items():
        if source.origin == "assumed":
            _say_assumed(name, source.value, source.where)
    read = made.provenance.get("notes")
    written = save_drafter(made, out, dialect=to, target=opened, source=drafter)
    for note in [*(read.value if read is not None else []), *written]:
        typer.echo(f"note: {note}")
    typer.echo(f"written: {out}")


@app.command()
def bench(
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this stage; may be given several times: probing, training, growth, "
            "continuation, states, masses, records, startup, ablate (only when named)."
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option(help="Small sizes, about a minute.")] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Turns of each case; fewer where one is long.")
    ] = 5,
    limit: Annotated[float, typer.Option(min=0, help="Seconds after which a stage ends.")] = 900,
    peer: Annotated[
        list[str] | None, typer.Option(help="NAME=COMMAND of another trainer to time.")
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option(help="The finished run of which stage startup draws figures (runs/micro)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for table and figure; else printed.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Only put stored tables into this page, where it names them."),
    ] = None,
) -> None:
    """Time every stage beside its alternatives and this machine."""
    from driftlab.results import bench_figure, bench_rows

    if page is not None:
        if stage or smoke or peer or stored or out:
            raise ConfigError("--page stands alone: nothing is measured", got=f"--page {page}")
        for path in bench_rows.fill(page):
            typer.echo(f"{page}: {path}")
        return
    from driftlab.bench import machine, run

    named = [_named(word) for word in peer or ()]
    peers = dict(named)
    if len(peers) < len(named):
        raise ConfigError("--peer gives one name to two commands", got=", ".join(peer or ()))
    # What cannot be added to is said before minutes of measuring.
    held = {} if out is None else bench_rows.stored(out)
    done: list[bench_rows.Row] = []
    measured: list[bench_rows.Row] = []
    for found, row in run(
        stage or (),
        smoke=smoke,
        repeats=repeats,
        peers=peers,
        stored=stored,
        say=typer.echo,
        limit=limit,
    ):
        done.append(row)
        if out is not None:
            if old := held.pop(row.stage, None):
                typer.echo(f"{out}: its {len(old.rows)} rows of {row.stage} are replaced")
            # A stage that is killed leaves the rows that it has.
            own = [x for x in done if x.stage == row.stage]
            measured = bench_rows.store(out, machine.stored(found), own)
    typer.echo(f"\n{bench_rows.table(done)}\n\n{bench_rows.goals(done)}")
    if out is not None:
        bench_figure.draw(out, measured)
        typer.echo(f"\n{out}: bench.json, bench.csv, bench.png, bench.pdf")


def _named(word: str) -> tuple[str, str]:
    name, equals, command = word.partition("=")
    if not (name and equals and command):
        raise ConfigError("--peer is NAME=COMMAND", got=word, remedy="See docs/benchmarks.md.")
    return name, command


@app.command()
def sites(
    boundaries: Annotated[int, typer.Option(min=0, help="Number of captured states.")] = 3,
) -> None:
    """List the places in a drafter that can be read or replaced."""
    from driftlab.models.hooks import SITES

    rows = [
        (site.name.replace("{i}", str(i)), site.shape, site.meaning)
        for site in SITES
        for i in (range(boundaries) if "{i}" in site.name else range(1))
    ]
    widths = [max(len(row[c]) for row in rows) for c in range(2)]
    for name, shape, meaning in rows:
        typer.echo(f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {meaning}")
    typer.echo(
        "\nB batch, T anchors, A captured states, H drafter width, Ht target width, h query heads,"
        "\ng key/value heads, e head width, K prefix keys + own chain keys, Vd draft vocabulary."
        "\nLayers after the first have the same attn, resid and mlp sites under layer.{i}."
    )


@app.command()
def figures(
    source: Annotated[Path, typer.Argument(help="A run, or a folder of a paper.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; figures in the run.")
    ] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Copy the small tables there and draw from the copy.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Only prove that stored files are current.")] = False,
) -> None:
    """Draw the figures of a run or of a paper. PNG, PDF, and the CSV of what is drawn."""
    from driftlab.papers import committed
    from driftlab.results.drawn import note, unchanged
    from driftlab.results.figures import save_figures
    from driftlab.results.records import RunDirectory, refuse_inside_run

    if publish is not None:
        if check or out is not None:
            raise ConfigError(
                "--publish stands alone", remedy="Publish first, then check the paper's folder."
            )
        typer.echo(f"published: {committed.publish(source, publish)}")
        return
    if committed.is_paper(source):
        if out is not None:
            raise ConfigError(
                "a paper's figures stand beside their tables", remedy="Leave --out away."
            )
        stale = committed.draw(source, check=check)
    else:
        run, folder = RunDirectory.open(source), out or source / "figures"
        stale = committed.changed_tables(run) + committed.stale(run, folder) if check else []
        if not check:
            refuse_inside_run(folder, but=run.path)
            kept = unchanged(run, folder)
            drawn = kept or save_figures(run, folder, processes=_cores())
            if not kept:
                note(run, folder, drawn)
            for name, paths in drawn.items():
                typer.echo(f"{name}: {paths['png']}{' (unchanged)' if kept else ''}")
    if stale:
        raise RunError(
            f"{len(stale)} file(s) are not what the tables give: {', '.join(stale)}",
            remedy=f"Delete them, then: driftlab figures {source}. A changed table needs its run.",
        )
    typer.echo(f"{source}: {'current' if check else 'drawn'}")


@app.command()
def compare(
    run: Annotated[str, typer.Argument(help="A run, or RUN:CELL for one cell of it.")],
    other: Annotated[
        str,
        typer.Argument(help="Another run or RUN:CELL; or a vLLM /metrics page or SGLang log."),
    ],
    text: Annotated[
        str | None, typer.Option(help="sampled, greedy or given; the headline's text.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Drafts a round, when the engine's file does not say.")
    ] = None,
) -> None:
    """Compare two runs, or a run with an engine. Runs are paired by prompt and seed."""
    from driftlab.results.served import beside

    typer.echo(str(beside(run, other, kind=text, depth=depth)))


@app.command()
def merge(
    runs: Annotated[list[Path], typer.Argument(help="Runs that differ in seeds or variants.")],
    out: Annotated[Path, typer.Option(help="Folder of the one run that they become.")],
) -> None:
    """Make one run of several that differ only in seeds and variants."""
    from driftlab.results.merge import merge as joined

    _finish(joined(runs, out))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The page, a .html file; report.html in the run.")
    ] = None,
) -> None:
    """Write the one-page report of a run."""
    from driftlab.results.records import RunDirectory, refuse_inside_run
    from driftlab.results.report import write_report

    out = out or run / "report.html"
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise ConfigError(
            "the page would not be a .html file",
            got=out,
            remedy="Give --out a name that ends in .html; nothing else is written over.",
        )
    found = RunDirectory.open(run)
    refuse_inside_run(out, but=found.path)
    typer.echo(str(write_report(found, out)))


def _cores() -> int:
    """Cores that this process may use."""
    count = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


def _open_target(
    source: str,
    device_map: str | None = None,
    tp_plan: str | None = None,
    *,
    cache: Path = Path("runs") / "cache",
) -> LoadedTarget:
    from pydantic import ValidationError

    from driftlab.config import TargetSpec
    from driftlab.experiment.texts import open_target

    try:
        spec = TargetSpec.model_validate(
            {"source": source, "device_map": device_map, "tp_plan": tp_plan}
        )
    except ValidationError as error:
        raise ConfigError(
            f"the target {source} cannot be placed so: {first_fault(error)}",
            got=f"--device-map {device_map}, --tp-plan {tp_plan}",
            remedy="See docs/scale.md.",
        ) from None
    return open_target(spec, cache, label="target")


def _suite(name: str, overrides: tuple[str, ...]) -> Experiment:
    from importlib import resources

    from driftlab.config import read_experiment

    folder = resources.files("driftlab.data") / "suites"
    known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".toml"))
    if name not in known:
        raise ConfigError(
            f"no packaged suite {name!r}",
            remedy=f"Packaged: {', '.join(known)}. Or give the path of an experiment file.",
        )
    with resources.as_file(folder / f"{name}.toml") as path:
        return read_experiment(path, overrides)


def _run(
    spec: Experiment, out: Path, *, strict: bool, command: str, ray: str | None = None
) -> None:
    from driftlab.engines.cell import follow
    from driftlab.engines.distributed import Ranks
    from driftlab.experiment import run_experiment
    from driftlab.experiment.checks import unmeasured

    ranks = Ranks.joined()
    if ranks.rank:  # one of `accelerate launch`: it helps the first, which owns the run
        follow(ranks)
        raise typer.Exit
    for said in unmeasured(spec):
        typer.echo(f"warning: {said}")
    try:
        run = run_experiment(spec, out, strict=strict, command=command, ray=ray, ranks=ranks)
    finally:
        ranks.announce(None)
    _finish(run)


def _redo(
    manifest: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    *,
    other_code: bool,
    strict: bool,
    command: str,
    ray: str | None,
) -> None:
    from driftlab.experiment import code_in_use
    from driftlab.experiment.redo import cells_of, experiment_of, refuse_same, verdict
    from driftlab.results.records import RunDirectory

    spec, stored, apart = experiment_of(
        manifest, *code_in_use(), other_code=other_code, overrides=overrides
    )
    for difference in apart:
        typer.echo(f"other code: {difference}")
    out = out or Path("runs") / f"{spec.name}-again"
    refuse_same(manifest, out)
    kept = cells_of(out)
    _run(spec, out, strict=strict, command=command, ray=ray)
    typer.echo(f"against {manifest}: {verdict(stored, RunDirectory.open(out), kept)}")


def _finish(run: RunDirectory) -> None:
    """Draw, report, and print the answers with the paths of what was written."""
    from driftlab.results.answers import answers, basis, summary_table
    from driftlab.results.drawn import note
    from driftlab.results.figures import save_figures
    from driftlab.results.hints import hints
    from driftlab.results.precision import precision_note
    from driftlab.results.report import write_report
    from driftlab.results.slices import without_conditions

    tables = run.tables()
    drawn = save_figures(tables, run.path / "figures")
    note(run, run.path / "figures", drawn)
    page = write_report(tables, run.path / "report.html", images=drawn)
    assumed = run.manifest.get("assumed") or {}
    for name, source in assumed.items():
        _say_assumed(name, source["value"], source["where"])
    if said := precision_note(run.manifest.get("precision")):
        typer.echo(f"precision: {said}")
    if (share := run.manifest.get("supervised")) is not None:
        typer.echo(f"supervised: {share:.1%} of the tokens to learn from")
    warned = [*run.manifest.get("warnings", []), *run.manifest.get("differs", [])]
    for said in [*warned, *hints(tables)]:
        typer.echo(f"warning: {said}")
    typer.echo("")
    plain = without_conditions(tables)
    typer.echo(_table(summary_table(plain)))
    typer.echo(basis(plain))
    typer.echo("")
    for answer in answers(tables):
        typer.echo(f"- {answer.sentence}")
    typer.echo("")
    typer.echo(f"report:  {page}")
    typer.echo(f"figures: {run.path / 'figures'} ({', '.join(drawn)})")
    typer.echo(f"tables:  {run.path}/*.parquet, settings and assumptions in manifest.json")


def _say_assumed(name: str, value: object, where: str) -> None:
    typer.echo(f"assumed: {name} = {value} ({where})")


def _table(frame: pd.DataFrame) -> str:
    """A measure a row, a variant a column, as text."""
    return frame.map(lambda e: getattr(e, "short", str(e))).T.to_string()


_RESUMED = {"ablate", "train", "probe", "explain", "merge"}
"""Verbs that go on where they were ended."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: run a verb and turn every failure into two lines and an exit code.

    0 done, 1 nobody reads what is printed, 2 a fault, 3 and 4 what doctor found, 128 and the
    signal's number where one interrupted (130: Ctrl-C).
    """
    # Read by torch when it is imported: on few cores a spinning thread takes another's core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Files are drawn without a window; a backend that matplotlib does not know ends its import.
    os.environ["MPLBACKEND"] = "agg"
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        os.getcwd()
    except OSError:
        _say("the working folder is gone", "Change to one that is there.")
        raise SystemExit(2) from None
    with _interruptible() as signals:
        try:
            code = app(
                args=words,
                standalone_mode=False,
                prog_name="driftlab",
                obj=shlex.join(["driftlab", *words]),
            )
        except BaseException as error:
            # Libraries may turn an interruption into an error of their own.
            code = 130 if signals else _answer(error)
    if code == 130:
        kept = "What is finished is kept: the same command goes on from there."
        _say("interrupted", kept if {*words[:1]} & _RESUMED else "Run the same command again.")
        code = 128 + (signals or [signal.SIGINT])[0]
    raise SystemExit(code or 0)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does; gives those that came."""
    signals: list[int] = []
    ours = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() != ours:  # forked meanwhile: the first process answers for all
            os._exit(128 + number)
        signals.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup asked to go on
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer(error: BaseException) -> int:
    """Say what went wrong. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return 130
    if isinstance(error, SystemExit | typer.Exit):
        raise error
    if (show := getattr(error, "show", None)) is not None:  # a wrong option
        show()
        return int(getattr(error, "exit_code", 2))
    if wants_traceback():
        raise error
    from driftlab.engines.pool import understood

    known = understood(error)
    _say(known.cause, known.remedy)
    return known.exit_code


def _say(cause: str, remedy: str) -> None:
    """Two lines on stderr, whatever an error of a library holds."""
    with suppress(OSError):  # nowhere to say it; the exit code says that there was a fault
        print(f"driftlab: {' '.join(cause.split())}", file=sys.stderr)
        print(f"          {' '.join(remedy.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
