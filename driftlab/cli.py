"""The command line: one verb a command. Every error is two lines, cause and remedy."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftlab.config import Experiment, Feedback, FusionNorm, build_experiment, read_experiment
from driftlab.errors import ConfigError, DriftlabError, ResourceError

if TYPE_CHECKING:
    from driftlab.models.target import Target as LoadedTarget
    from driftlab.results.records import RunDirectory

# torch and transformers take seconds to import, so each verb imports what it needs.

app = typer.Typer(
    help="Measure why drafted tokens stop being accepted as a drafter drafts deeper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option(help="Folder, GGUF file, hub id, or 'micro'.")]
DrafterPath = Annotated[str, typer.Option(help="Folder or hub id of a drafter.")]
Out = Annotated[Path | None, typer.Option(help="Run directory; the same one resumes.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: train.steps=50")
]
Strict = Annotated[bool, typer.Option(help="Refuse values that were assumed and not read.")]


@app.command()
def ablate(
    experiment: Annotated[Path | None, typer.Argument(help="Experiment file (.toml).")] = None,
    suite: Annotated[str, typer.Option(help="Packaged experiment, when no file is named.")] = (
        "micro"
    ),
    out: Out = None,
    settings: Settings = None,
    strict: Strict = False,
) -> None:
    """Train and measure every cell of an experiment, and answer its questions."""
    spec = (
        read_experiment(experiment, tuple(settings or ()))
        if experiment is not None
        else _suite(suite, tuple(settings or ()))
    )
    _run(spec, out or Path("runs") / spec.name, strict=strict)


@app.command()
def train(
    target: Target,
    data: Annotated[str, typer.Option(help="Prompts that the target continues, or texts.")],
    fusion_norm: FusionNorm = FusionNorm.none,
    feedback: Feedback = Feedback.pre_norm,
    seed: int = 0,
    given: Annotated[
        bool, typer.Option(help="DATA holds whole texts; learn from them as they are.")
    ] = False,
    out: Out = None,
    settings: Settings = None,
    strict: Strict = False,
) -> None:
    """Train one drafter and measure it on held-out prompts."""
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
        "axes": {"fusion_norm": [fusion_norm.value], "feedback": [feedback.value]},
    }
    spec = build_experiment(raw, tuple(settings or ()), where="driftlab train")
    out = out or Path("runs") / name
    _run(spec, out, strict=strict)
    typer.echo(f"drafter: {out / 'drafters' / f'{fusion_norm}+{feedback}' / f's{seed}'}")


@app.command()
def probe(
    target: Target,
    drafter: DrafterPath,
    prompts: Annotated[str, typer.Option(help="Packaged set or .jsonl file.")] = "held-out",
    depth: Annotated[int, typer.Option(min=1, help="Drafted tokens of a chain.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of the measured text.")] = 0.0,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens for each prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts.")] = None,
    out: Out = None,
    strict: Strict = False,
) -> None:
    """Measure one drafter on the target's own text."""
    from driftlab import lab

    out = out or Path("runs") / "probe"
    pair = lab.open(target, drafter, strict=strict, cache=out.parent / "cache")
    measured = pair.probe(
        prompts, depth=depth, temperature=temperature, max_new_tokens=tokens, limit=limit
    )
    _finish(measured.save(out))


@app.command()
def doctor(
    target: Target,
    drafter: DrafterPath,
    profile: Annotated[
        str, typer.Option("--as", help="Compute as this runtime: vllm, sglang, trtllm, llamacpp.")
    ] = "trained",
    tokens: Annotated[int, typer.Option(min=200, help="The target's own text.")] = 2000,
    fix: Annotated[Path | None, typer.Option(help="Write a corrected copy there.")] = None,
    strict: Strict = False,
) -> None:
    """Check that a drafter is read as it was trained: exit 0 clean, 3 doubtful, 4 wrong."""
    from driftlab import doctor as checks

    found = checks.examine(
        _open_target(target),
        drafter,
        tokens=tokens,
        strict=strict,
        as_profile=profile,
        progress=True,
    )
    typer.echo(str(found))
    if fix is not None:
        checks.fix(found, fix)
        typer.echo(f"corrected copy: {fix}")
    raise typer.Exit(found.exit_code)


@app.command()
def export(
    drafter: DrafterPath,
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators or safeailab.")],
    out: Annotated[Path, typer.Option(help="Folder for the written drafter.")],
    target: Annotated[
        str | None, typer.Option(help="Target, for files that leave parts to it.")
    ] = None,
) -> None:
    """Write a drafter as another engine or trainer reads it."""
    from driftlab.models.checkpoints import load_drafter, save_drafter

    opened = None if target is None else _open_target(target)
    made = load_drafter(drafter, target=opened)
    for note in save_drafter(made, out, dialect=to, target=opened):
        typer.echo(f"note: {note}")
    typer.echo(f"written: {out}")


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
    out: Annotated[Path | None, typer.Option(help="Folder for the files.")] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Copy the small tables there and draw from the copy.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Only prove that stored files are current.")] = False,
) -> None:
    """Draw the figures of a run or of a paper: PNG, PDF, and the CSV of what is drawn."""
    from driftlab.results import papers

    if publish is not None:
        typer.echo(f"published: {papers.publish(source, publish)}")
        return
    if papers.is_paper(source):
        stale = papers.draw(source, check=check)
        if stale:
            raise ConfigError(
                f"{len(stale)} file(s) are not what the tables give: {', '.join(stale)}",
                remedy=f"Draw them again: driftlab figures {source}",
            )
        typer.echo(f"{source}: {'current' if check else 'drawn'}")
        return
    from driftlab.results.figures import save_figures
    from driftlab.results.records import RunDirectory

    run = RunDirectory.open(source)
    for name, paths in save_figures(run, out or source / "figures").items():
        typer.echo(f"{name}: {paths['png']}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the run.")] = None,
) -> None:
    """Write the one-page report of a run."""
    from driftlab.results.records import RunDirectory
    from driftlab.results.report import write_report

    typer.echo(str(write_report(RunDirectory.open(run), out or run / "report.html")))


def _open_target(source: str) -> LoadedTarget:
    from driftlab.config import TargetSpec
    from driftlab.experiment import open_target

    return open_target(TargetSpec(source=source), Path("runs") / "cache", label="target")


def _suite(name: str, overrides: tuple[str, ...]) -> Experiment:
    from importlib import resources

    folder = resources.files("driftlab.data") / "suites"
    known = sorted(p.name.removesuffix(".toml") for p in folder.iterdir())
    if name not in known:
        raise ConfigError(
            f"no packaged suite {name!r}",
            remedy=f"Packaged: {', '.join(known)}. Or give the path of an experiment file.",
        )
    with resources.as_file(folder / f"{name}.toml") as path:
        return read_experiment(path, overrides)


def _run(spec: Experiment, out: Path, *, strict: bool) -> None:
    from driftlab.experiment import run_experiment

    _finish(run_experiment(spec, out, strict=strict, command=_command()))


def _finish(run: RunDirectory) -> None:
    """Draw, report, and print the answers with the paths of what was written."""
    from driftlab.results.answers import answers, summary_table
    from driftlab.results.figures import save_figures
    from driftlab.results.report import write_report

    tables = run.tables()
    drawn = save_figures(tables, run.path / "figures")
    page = write_report(tables, run.path / "report.html", images=drawn)
    assumed = run.manifest.get("assumed") or {}
    for name, source in assumed.items():
        typer.echo(f"assumed: {name} = {source['value']} ({source['where']})")
    typer.echo("")
    typer.echo(_table(summary_table(tables)))
    typer.echo("")
    for answer in answers(tables):
        typer.echo(f"- {answer.sentence}")
    typer.echo("")
    typer.echo(f"report:  {page}")
    typer.echo(f"figures: {run.path / 'figures'} ({', '.join(drawn)})")
    typer.echo(f"tables:  {run.path}/*.parquet, settings and assumptions in manifest.json")


def _table(frame: object) -> str:
    """A measure a row, a variant a column, as text."""
    import pandas as pd

    assert isinstance(frame, pd.DataFrame)
    return frame.map(lambda e: getattr(e, "short", str(e))).T.to_string()


def _command() -> str:
    return " ".join(["driftlab", *sys.argv[1:]])


def main() -> None:
    """Entry point: run a verb and turn every failure into two lines and an exit code."""
    # Read by torch when it is imported: on few cores a spinning thread takes another's core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(standalone_mode=False)
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted", "What is finished is kept: the same command goes on from there.")
        raise SystemExit(130) from None
    except DriftlabError as error:
        _say(error.cause, error.remedy)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = ResourceError(
            f"no space left on the disk ({error.filename or 'while writing'})",
            remedy="Free some space; the same command goes on from what is finished.",
        )
        _say(full.cause, full.remedy)
        raise SystemExit(full.exit_code) from None
    except Exception as error:
        # Wrong options: click's own errors know how to show themselves.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        raise SystemExit(getattr(error, "exit_code", 2)) from None


def _say(cause: str, remedy: str | None) -> None:
    print(f"driftlab: {cause}", file=sys.stderr)
    if remedy:
        print(f"          {remedy}", file=sys.stderr)


if __name__ == "__main__":
    main()
