"""Nothing that is read runs, nothing leaves its folder, and a page shows text as text."""

from __future__ import annotations

import ast
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import synthetic_run

import driftlab
from driftlab import experiment
from driftlab.errors import CheckpointError
from driftlab.models.loading import load_model
from driftlab.models.target import Target
from driftlab.models.tiny import tiny_llama
from driftlab.results.records import RunDirectory
from driftlab.results.report import write_report

SOURCES = sorted(Path(driftlab.__file__).parent.rglob("*.py"))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


# --- no code in data ------------------------------------------------------------------------------


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Every call in the package. torch reads tensors only, with weights_only=True."""
    forbidden = {
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"),
        *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pd.read_pickle"),
        *("joblib.load", "yaml.load", "np.load", "numpy.load", "torch.jit.load"),
    }
    wrong = []
    for path in SOURCES:
        for name, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
            given = {k.arg: ast.unparse(k.value) for k in call.keywords}
            if name in forbidden or given.get("shell") == "True":
                wrong.append(f"{path.name}:{call.lineno} {name}")
            if name == "torch.load" and given.get("weights_only") != "True":
                wrong.append(f"{path.name}:{call.lineno} {name} without weights_only")
    assert wrong == []


def test_code_of_a_checkpoint_is_off_and_recorded_when_it_is_asked_for(tmp_path: Path) -> None:
    """Off in every signature; by name in an experiment file only; a test with code in a
    checkpoint is in test_target.py."""
    folder = tmp_path / "t"
    tiny_llama(vocab_size=40, hidden_size=16, layers=1, max_position=32).save_pretrained(folder)
    plain = Target.load(str(folder)).provenance["trust_remote_code"]
    asked = Target.load(str(folder), trust_remote_code=True).provenance["trust_remote_code"]
    assert (plain.value, asked.value) == (False, True)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                named = [*node.args.args, *node.args.kwonlyargs]
                values = [*node.args.defaults, *node.args.kw_defaults]
                for arg, value in zip(reversed(named), reversed(values), strict=False):
                    if arg.arg == "trust_remote_code" and value is not None:
                        assert ast.unparse(value) == "False", path


# --- no way out of a folder -----------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../x", 3, ""])
def test_a_target_s_index_stays_in_its_folder(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "t"
    tiny_llama(vocab_size=40, hidden_size=16, layers=1, max_position=32).save_pretrained(folder)
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    options: dict[str, Any] = {"revision": None, "dtype": "float32", "device": "cpu"}
    options |= {"device_map": None, "tp_plan": None, "trust_remote_code": False}
    with pytest.raises(CheckpointError, match="out of its folder"):
        load_model(str(folder), **options)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "A", "", "x y", "a\n", "a" * 3 + "/.."])
def test_an_experiment_s_name_is_one_folder(name: str) -> None:
    from driftlab.config import read_experiment
    from driftlab.errors import ConfigError

    with pytest.raises(ConfigError):
        read_experiment(small.SUITE, (f"name={json.dumps(name)}",))


# --- the page -------------------------------------------------------------------------------------

NASTY = (
    "</pre></script><script>document.title='run'</script>"
    "<img src=x onerror=\"document.title='run'\"><b id=bold>&amp;\"'</b>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose every text from the run is markup with script in it."""
    folder = tmp_path_factory.mktemp("nasty")
    run = synthetic_run.make_run(
        folder / "run", seeds=(0,), prompts=[f"{NASTY}{i}" for i in range(3)], depth=4, anchors=4
    )
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["question"] = manifest["command"] = NASTY
    manifest["config"] = {"name": NASTY, "question": NASTY, NASTY: NASTY}
    manifest["assumed"] = {NASTY: {"value": NASTY, "where": NASTY, "origin": "assumed"}}
    path.write_text(json.dumps(manifest))
    return write_report(RunDirectory.open(run.path), folder / "report.html")


def test_markup_of_a_prompt_is_escaped(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text and "<b id=bold>" not in text and 'onerror="' not in text
    assert "&lt;script&gt;" in text


def test_a_browser_runs_nothing_of_it(page: Path, tmp_path: Path) -> None:
    """Chromium's own reading of the page: the markup is text, and no script ran."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={tmp_path}", "--dump-dom", page.as_uri()]
    try:
        done = subprocess.run([browser, *words], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("chromium does not answer here")
    if done.returncode or "<html" not in done.stdout:
        pytest.skip(f"chromium does not run here: {done.stderr.strip()[-80:]}")
    dom = done.stdout
    assert "<title>run</title>" not in dom
    assert "&lt;script&gt;document.title" in dom
    assert '<b id="bold">' not in dom and "<script" not in dom and 'src="x"' not in dom


# --- no network -----------------------------------------------------------------------------------


def test_a_run_and_its_page_open_no_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Target, texts, states, cells, tables and report, from an empty cache."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked for")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    with small.shrunk():
        run = experiment.run_experiment(
            small.spec('axes.feedback=["pre_norm"]'), tmp_path / "run", quiet=True
        )
        assert write_report(run, tmp_path / "r.html").exists()


@pytest.mark.slow
def test_notebooks_and_the_command_line_run_without_a_network(tmp_path: Path) -> None:
    """In a network namespace of its own, where only the loopback device is up."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"]).returncode:
        pytest.skip("no network namespaces here")
    root = Path(__file__).parent.parent
    tests = ["tests/test_notebooks.py", "tests/test_cli.py::test_sites_lists_them_all"]
    run = f"exec {sys.executable} -m pytest -q {' '.join(tests)}"
    words = ["unshare", "-n", "sh", "-c", f"ip link set lo up 2>/dev/null; {run}"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:]
