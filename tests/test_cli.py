"""The command line: every verb once, and every fault as two lines and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
import small

import driftlab
from driftlab import cli, experiment
from driftlab.data.grammar import VOCABULARY, WordTokenizer, stories
from driftlab.engines.pool import run_jobs
from driftlab.errors import DriftlabError
from driftlab.models.checkpoints import load_drafter, save_drafter
from driftlab.models.hooks import SITES
from driftlab.models.tiny import tiny_llama
from driftlab.papers import committed
from driftlab.results import figures
from driftlab.results.records import RunDirectory

Call = Callable[..., tuple[int, str, str]]

INTERRUPTED = [
    "driftlab: interrupted",
    "          What is finished is kept: the same command goes on from there.",
]


@pytest.fixture(autouse=True)
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Work in the shared folder, with cells in this process and one figure for all of them."""

    def one(run: Any, out: str | Path, processes: int = 1) -> dict[str, dict[str, Path]]:
        tables = figures.load(run)
        return {"forced_accuracy": figures.save_figure(tables, "forced_accuracy", out)}

    monkeypatch.chdir(small.home())
    monkeypatch.setattr(figures, "save_figures", one)
    monkeypatch.setattr(committed, "save_figures", one)
    with small.shrunk() as patch:
        yield patch


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Exit code, stdout and stderr of a command."""

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(w) for w in words])
        said = capfd.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, said.out, said.err

    return run


@pytest.fixture
def refused(call: Call) -> Callable[..., str]:
    """The two lines of a command that must end with exit code 2; gives the first."""

    def run(*words: object) -> str:
        code, _, err = call(*words)
        lines = err.splitlines()
        assert code == 2
        assert len(lines) == 2, err
        assert lines[0].startswith("driftlab: ") and lines[1].startswith(" " * 10)
        assert "Traceback" not in err and "driftlab failed in" not in err
        return lines[0]

    return run


@pytest.fixture
def out(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = small.home() / f"cli-{abs(hash(request.node.nodeid))}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


DRAFTER = Path("done") / "drafters" / small.CELLS[1]


# --- starting -------------------------------------------------------------------------------------


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_light() -> None:
    code = "import time; t = time.process_time(); import driftlab, sys; "
    code += "print(time.process_time() - t, len({'torch', 'numpy', 'pandas'} & sys.modules.keys()))"
    seconds, heavy = fresh(code).split()
    assert float(seconds) < 0.3
    assert heavy == "0"


@pytest.mark.parametrize("words", [["--help"], ["ablate", "--help"], ["ablate", "no.toml"]])
def test_help_and_early_faults_load_no_model_library(words: list[str]) -> None:
    code = f"""
import sys, atexit
atexit.register(lambda: print('loaded', *({{'torch', 'transformers'}} & sys.modules.keys())))
from driftlab.cli import main
try:
    main({words})
except SystemExit as stop:
    print('code', stop.code)
"""
    lines = fresh(code).splitlines()
    assert lines[-1].split() == ["loaded"]
    assert lines[-2] == ("code 2" if "no.toml" in words else "code 0")


def test_help_names_every_verb(call: Call) -> None:
    code, said, _ = call("--version")
    assert (code, said) == (0, f"driftlab {driftlab.__version__}\n")
    code, said, _ = call("--help")
    verbs = ["ablate", "train", "probe", "doctor", "export", "sites", "figures", "report"]
    assert code == 0
    assert [v for v in verbs if f"\n  {v} " not in said] == []
    assert call()[0] == 2, "no verb"


# --- verbs ----------------------------------------------------------------------------------------


def test_ablate_prints_the_answers_and_where_they_are(call: Call, out: Path) -> None:
    words = ["ablate", "--suite", "micro", "--out", out, *small.arguments()]
    code, said, err = call(*words)
    assert (code, err) == (0, ""), "off a terminal nothing but the answers is printed"
    assert "forced accuracy @4" in said
    sentences = [line for line in said.splitlines() if line.startswith("- ")]
    assert sentences and "[" in sentences[0], "an interval in every answer"
    named = ["report.html", "figures/forced_accuracy.png", "steps.parquet", "manifest.json"]
    assert [name for name in named if not (out / name).is_file()] == []
    assert f"report:  {out}/report.html" in said
    assert small.contents(out) == small.contents(Path("done"))
    command = RunDirectory.open(out).manifest["command"]
    assert command.startswith("driftlab ablate --suite micro --out ")
    assert """--set 'axes.fusion_norm=["none"]'""" in command, "quoted as a shell needs it"


def test_train_says_where_the_drafter_is(call: Call, out: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cli, "_finish", lambda run: None)
    sizes = [s for s in small.SETTINGS if not s.startswith(("axes", "seeds", "workers"))]
    words = [w for s in sizes for w in ("--set", s)]
    variant = ["--fusion-norm", "per_layer", "--feedback", "post_norm", "--seed", 5]
    code, said, _ = call(
        "train", "--target", "micro", "--data", "micro", *variant, *words, "--out", out
    )
    assert code == 0
    folder = out / "drafters" / "per_layer+post_norm" / "s5"
    assert f"drafter: {folder}" in said.splitlines()
    assert load_drafter(folder).config.variant == "per_layer+post_norm"


def probe(out: Path, *more: object) -> list[object]:
    words = ["probe", "--target", "micro", "--drafter", DRAFTER, "--prompts", "micro"]
    return [*words, "--limit", 2, "--tokens", 12, "--out", out, *more]


def test_probe_measures_a_drafter_of_a_run(call: Call, out: Path, refused: Any) -> None:
    code, said, _ = call(*probe(out, "--depth", 3))
    assert code == 0
    assert "acceptance length" in said
    steps = RunDirectory.open(out).steps
    assert set(steps["depth"]) == {1, 2, 3} and steps["prompt"].nunique() == 2
    assert call(*probe(out, "--depth", 3))[0] == 0, "the same again"
    assert "already holds another run" in refused(*probe(out, "--depth", 2))
    far = [os.path.abspath(w) if w == DRAFTER else w for w in probe(out, "--depth", 3)]
    assert call(*far)[0] == 0  # the same drafter, named otherwise
    page = out / "report.html"  # seen before anything is measured
    words = ["probe", "--target", "none", "--drafter", "none", "--out", page]
    assert "report.html is a file" in refused(*words)


def test_sampled_text_of_a_run_can_be_probed(call: Call, out: Path, refused: Any) -> None:
    cell = Path(DRAFTER).relative_to("done/drafters")
    words = ["probe", "--target", "micro", "--drafter", DRAFTER, "--prompts", "micro", "--limit", 3]
    words += ["--tokens", 24, "--depth", 4, "--temperature", 1, "--batch", 8, "--out"]
    assert call(*words, out / "same")[0] == 0
    code, said, _ = call("compare", f"done:{cell}", out / "same")
    assert code == 0 and "sampled text (temperature 1), 3 prompts" in said
    assert call(*words, out / "other", "--seed", 1)[0] == 0
    assert "text of 3 of 3 prompts" in refused("compare", f"done:{cell}", out / "other")


def test_sites_lists_them_all(call: Call) -> None:
    code, said, _ = call("sites", "--boundaries", 2)
    assert code == 0
    names = [line.split()[0] for line in said.splitlines() if line.strip()]
    assert [s.name for s in SITES if s.name.replace("{i}", "1") not in names] == []
    assert "fuse.in.1" in names and "fuse.in.2" not in names


def test_figures_of_a_run_and_of_a_paper(call: Call, out: Path, refused: Any) -> None:
    assert call("figures", "done", "--out", out / "figures")[0] == 0
    assert (out / "figures" / "forced_accuracy.csv").is_file()
    assert call("figures", "done", "--out", out / "figures", "--check")[0] == 0
    (out / "figures" / "forced_accuracy.csv").write_text("x\n1\n")
    said = refused("figures", "done", "--out", out / "figures", "--check")
    assert "1 file(s) are not what the tables give: forced_accuracy.csv" in said

    paper = out / "paper"
    assert call("figures", "done", "--publish", paper / "item")[:2] == (
        0,
        f"published: {paper / 'item'}\n",
    )
    assert call("figures", paper, "--check")[:2] == (0, f"{paper}: current\n")
    (paper / "item" / "figures" / "forced_accuracy.png").write_bytes(b"")
    assert "item/figures/forced_accuracy.png" in refused("figures", paper, "--check")
    assert call("figures", paper)[0] == 0
    assert call("figures", paper, "--check")[0] == 0
    assert call("figures", paper / "item", "--check")[:2] == (0, f"{paper / 'item'}: current\n")
    assert "stands alone" in refused("figures", "done", "--publish", paper / "item", "--check")


def test_report_writes_one_page(call: Call, out: Path) -> None:
    code, said, _ = call("report", "done", "--out", out / "page.html")
    assert (code, said) == (0, f"{out / 'page.html'}\n")
    assert "<html" in (out / "page.html").read_text()


@pytest.mark.parametrize("taken", ["manifest.json", "folder.html", "page"])
def test_report_writes_over_nothing_else(refused: Any, out: Path, taken: str) -> None:
    out.mkdir()
    (out / "folder.html").mkdir()
    (out / "manifest.json").write_text("{}")
    assert "would not be a .html file" in refused("report", "done", "--out", out / taken)
    assert (out / "manifest.json").read_text() == "{}"
    assert not (out / "page").exists()


def test_what_is_drawn_of_a_run_is_not_put_into_another(out: Path, refused: Any) -> None:
    (out / "shards").mkdir(parents=True)
    (out / "manifest.json").write_text("{}")
    for verb, name in (("figures", "figures"), ("report", "report.html")):
        assert f"lies in the run {out}" in refused(verb, "done", "--out", out / name)
        assert not (out / name).exists()


def test_export_writes_what_loads_again(call: Call, out: Path, refused: Any) -> None:
    assert call("export", DRAFTER, "--to", "vllm", "--out", out)[0] == 0
    assert json.loads((out / "config.json").read_text())["architectures"]
    for other in ("x", "angelslim"):
        said = call("export", DRAFTER, "--to", other, "--out", out / "x")[2]
        assert "does not write" in said and "speculators" in said


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", 3, "--set", "seeds=[7]"),
        ("--set", "axes.feedback=['post_norm']"),
        ("--fusion-norm", "none", "--set", "axes.fusion_norm=['none', 'concat']"),
    ],
)
def test_train_has_one_name_for_one_setting(words: tuple[object, ...], refused: Any) -> None:
    said = refused("train", "--target", "micro", "--data", "micro", *words)
    assert "contradicts the option of its own" in said


def test_ablate_has_a_base_for_files_only(refused: Any) -> None:
    for words in (("--base", "smollm2"), ("--suite", "micro", "--base", "nowhere.toml")):
        assert "no file is named" in refused("ablate", *words)
    assert "no packaged suite" in refused("ablate", "--suite", "")


def test_the_module_is_the_command() -> None:
    words = [sys.executable, "-m", "driftlab", "sites"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "attn.pattern" in done.stdout


@pytest.mark.parametrize("setting", ['dtype="bfloat16"', 'revision="a"', "trust_remote_code=true"])
def test_the_embedded_target_has_nothing_to_choose(setting: str, refused: Any) -> None:
    assert "'micro' is trained in float32" in refused("ablate", "--set", f"target.{setting}")


def test_a_working_folder_that_is_gone(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, said = call("sites")
    assert code == 2 and said.splitlines()[0] == "driftlab: the working folder is gone"


def test_a_fault_that_cannot_be_said_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", "nowhere", "x"])
    assert stop.value.code == 2
    with contextlib.suppress(OSError):
        full.close()


def test_export_says_what_the_file_contradicts(call: Call, out: Path, tmp_path: Path) -> None:
    """The copy states one value, and nobody would look for the other again."""
    save_drafter(pairs.drafter(), tmp_path / "d", dialect="vllm")
    config = tmp_path / "d" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 500.0}))
    code, said, _ = call("export", tmp_path / "d", "--to", "speculators", "--out", out)
    assert code == 0 and "note: the config names several rotary bases: 10000.0" in said


def test_a_runtime_s_reading_is_refused_before_it_is_examined(
    refused: Any, patch: pytest.MonkeyPatch, out: Path
) -> None:
    from driftlab import doctor

    patch.setattr(doctor, "examine", None)
    words = ["doctor", "--target", "micro", "--drafter", DRAFTER, "--as", "vllm", "--fix", out]
    assert "by the file's own reading, not by that of vllm" in refused(*words)


@pytest.mark.parametrize("code", [0, 3, 4])
def test_doctor_ends_with_what_it_found(
    call: Call, patch: pytest.MonkeyPatch, code: int, out: Path
) -> None:
    from driftlab import doctor

    class Found:
        exit_code, winner, verdict = code, None, doctor.Verdict.doubtful

        def __str__(self) -> str:
            return "the diagnosis"

    patch.setattr(doctor, "examine", lambda target, drafter, **_: Found())
    words = ("doctor", "--target", "micro", "--drafter", DRAFTER)
    assert call(*words)[:2] == (code, "the diagnosis\n")
    told = "the diagnosis\ncorrected copy: none, no other reading is surely better\n"
    assert call(*words, "--fix", out)[:2] == (code, told)
    assert not out.exists()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "train.stepps=3"], "train.stepps: Extra inputs are not permitted, found 3"),
        (["--set", "train.steps=many"], "train.steps: Input should be a valid integer"),
        (["--set", "seeds"], "--set needs key=value"),
        (["--suite", "../micro"], "no packaged suite '../micro'"),
        (["none.toml"], "experiment file none.toml does not exist"),
        (["bad.toml"], "bad.toml is not a TOML file"),
        (["bad.toml", "--suite", "micro"], "an experiment file and a suite are named"),
        (["."], ". is no regular file (got a folder)"),
        (["--out", "bad.toml/x"], "bad.toml is a file"),
        (["--out", "bad.toml"], "bad.toml is a file"),
        (["--out", "texts"], "texts holds files that are no run (got notes.txt)"),
        (["--out", "done"], "done already holds another run"),
    ],
)
def test_ablate_refuses(refused: Any, words: list[str], said: str) -> None:
    home = small.home()
    (home / "bad.toml").write_text("name = ")
    (home / "texts").mkdir(exist_ok=True)
    (home / "texts" / "notes.txt").write_text("mine")
    before = small.contents(home / "done")
    assert said in refused("ablate", *words)
    assert small.contents(home / "done") == before
    assert [p.name for p in (home / "texts").iterdir()] == ["notes.txt"]


def test_wrong_options_are_explained(call: Call) -> None:
    for words in (["ablate", "--nope"], ["nope"], ["probe"], ["probe", "--depth", "x"]):
        code, _, err = call(*words)
        assert code == 2
        assert "driftlab" in err and "Traceback" not in err


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets: without end token, truncated, without weights. Drafters: another's, truncated."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(vocab_size=97, hidden_size=32, layers=4, max_position=64).save_pretrained(
        folder / "target"
    )
    shutil.copytree(folder / "target", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (folder / "empty").mkdir()
    shutil.copy(folder / "target" / "config.json", folder / "empty")
    save_drafter(pairs.drafter(), folder / "other")
    shutil.copytree(small.home() / DRAFTER, folder / "short")
    weights = folder / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("target", "drafter", "said"),
    [
        ("cut", "other", "cut"),
        ("empty", "other", "holds no weights"),
        ("nowhere", "other", "neither a folder"),
        ("micro", "other", "width 32"),
        ("micro", "short", "short"),
        ("micro", "empty", "empty"),
        ("micro", "none", "none"),
    ],
)
def test_models_that_cannot_be_used_are_named(
    refused: Any, models: Path, out: Path, target: str, drafter: str, said: str
) -> None:
    source = target if target == "micro" else models / target
    words = ["probe", "--target", source, "--drafter", models / drafter, "--prompts", "micro"]
    assert said in refused(*words, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_hidden_size": 64, "boundaries": (0, 1, 2)}, "97 tokens"),
        ({"vocab_size": len(VOCABULARY), "boundaries": (0, 1, 2)}, "width 32"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(
    refused: Any, out: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    save_drafter(pairs.drafter(**changes), tmp_path / "d")
    line = refused("probe", "--target", "micro", "--drafter", tmp_path / "d", "--prompts", "micro")
    assert said in line


def test_prompt_files(refused: Any, out: Path, tmp_path: Path) -> None:
    empty, long, broken = (tmp_path / f"{n}.jsonl" for n in ("empty", "long", "broken"))
    empty.write_text("\n")
    text = WordTokenizer().decode([t for s in stories(60, 0) for t in s[1:-1]][:2100])
    long.write_text(json.dumps({"id": "long", "text": text}))
    broken.write_text('{"text": "x"}\n{')
    words = ["probe", "--target", "micro", "--drafter", DRAFTER, "--out", out, "--prompts"]
    assert "no prompts in it" in refused(*words, empty)
    assert "prompt long is longer than the limit of 1920 tokens" in refused(*words, long)
    assert "line 2: not JSON" in refused(*words, broken)
    assert "no such set or file" in refused(*words, "nowhere")
    assert not out.exists()


def test_strict_ends_before_anything_is_measured(refused: Any, models: Path, out: Path) -> None:
    words = ["ablate", "--out", out, "--strict", *small.arguments()]
    source = f"target.source={json.dumps(str(models / 'target'))}"
    line = refused(*words, "--set", source, "--set", "target.boundaries=[1,2,3]")
    assert "target.eos_ids = [] (found nowhere: none)" in line
    assert not out.exists()


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    """As somebody else than root, who may read everything."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    home = Path(cli.__file__).parent.parent
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(home)!r})\n"
        "from driftlab.cli import main\n"
        "import driftlab.results.report, driftlab.engines.pool\n"
        "os.setuid(65534)\n"
        f"main(['report', {str(locked / 'run')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2, done.stderr
    assert "Permission denied" in done.stderr
    assert len(done.stderr.splitlines()) == 2


# --- other ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("x"), 2, "driftlab failed in cli.py:"),
        (OSError(28, "No space left on device"), 2, "no space left on the disk"),
        (DriftlabError("several\nlines", remedy="and\nmore"), 2, "driftlab: several lines"),
        (KeyboardInterrupt(), 130, "driftlab: interrupted"),
        (SystemExit(7), 7, ""),
    ],
)
def test_every_end_is_clean(
    call: Call, patch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    patch.setattr("driftlab.config.read_experiment", fail)
    found, _, err = call("ablate", "x.toml")
    assert found == code
    assert said in err and "Traceback" not in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_its_handler_is_given_back(
    call: Call, patch: pytest.MonkeyPatch, number: int
) -> None:
    """A process that was forked meanwhile, as those that draw are, ends without a word."""

    def stop(*_: object, **__: object) -> None:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
        os.kill(os.getpid(), number)

    patch.setattr("driftlab.config.read_experiment", stop)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        code, _, err = call("ablate", "x.toml")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    assert err.splitlines() == INTERRUPTED


def test_a_terminal_that_closes_does_not_interrupt_under_nohup(
    call: Call, patch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise SystemExit(7)

    patch.setattr("driftlab.config.read_experiment", stop)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert call("ablate", "x.toml")[0] == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_ends_all_within_two_seconds(out: Path, refused: Any) -> None:
    """Real processes; a second one is refused while the first one runs."""
    trained = out / "training" / "none+pre_norm_s0.pt"
    longer = ["train.steps=4000", "train.checkpoint_every=5"]
    process = subprocess.Popen(
        small.command(out, *longer),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 110
        while not trained.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert "in use by another process" in refused(
            "ablate", "--out", out, *small.arguments(*longer)
        )
        os.killpg(process.pid, signal.SIGINT)
        pressed = time.monotonic()
        said, err = process.communicate(timeout=60)
        waited = time.monotonic() - pressed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, said) == (130, "")
    assert err.splitlines() == INTERRUPTED
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert waited < 2 * busy, "two seconds on a machine with a core to spare"
    assert trained.exists(), "the same command goes on from here"


def test_a_worker_gives_what_this_process_gives(out: Path) -> None:
    with small.shrunk(processes=True) as patch:
        patch.setattr(experiment, "run_jobs", run_jobs)
        experiment.run_experiment(small.spec(), out, quiet=True)
    assert small.drafters(out) == small.drafters(Path("done"))
    assert small.contents(out) == small.contents(Path("done"))
