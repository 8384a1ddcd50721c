"""Break the code on purpose, one place at a time; the named tests must notice.

    python tests/reliability/mutations.py [--only WORD] [--share 1/2] [--minutes 60]

Works in a copy of the tree. A mutation whose text does not stand there exactly once is an error:
the code has moved on, and mutations.toml with it. Third-party modules are imported once, each
mutation is a fork that imports driftlab and the tests anew. The unbroken code must pass the same
tests first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 60  # seconds of processor time for one mutation; all take a few
PRELOADED = (
    *("numpy", "scipy.stats", "pandas", "pyarrow.parquet", "torch", "transformers", "einops"),
    *("transformers.models.llama.modeling_llama", "safetensors.torch", "pydantic"),
    *("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
    *("transformers.modeling_gguf_pytorch_utils", "jaxtyping", "pytest", "hypothesis"),
)


def run_tests(copy: Path, tests: Sequence[str], log: Path, *, unbroken: bool = False) -> str:
    """passed, failed, or slow, in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            os.chdir(copy)
            if not unbroken:
                resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(copy), str(copy / "tests")]
            import pytest

            import driftlab

            if not str(driftlab.__file__).startswith(str(copy)):
                os._exit(98)
            words = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "0"]
            # What is imported already cannot be rewritten, and need not be.
            words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = int(pytest.main([*words, *(f"tests/{t}" for t in tests)]))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if -code in (signal.SIGXCPU, signal.SIGKILL) and not unbroken:
        return "slow"
    if code not in (0, 1):
        raise SystemExit(f"{tests}: pytest ended with {code}\n{log.read_text()[-2000:]}")
    return "passed" if code == 0 else "failed"


def mutations() -> list[dict[str, Any]]:
    return tomllib.loads((HERE / "mutations.toml").read_text(encoding="utf-8"))["mutation"]


def misfits(listed: Sequence[dict[str, Any]]) -> list[str]:
    """Mutations whose place does not stand in the code exactly once, or whose test is gone."""
    wrong = []
    for m in listed:
        n = (ROOT / m["file"]).read_text(encoding="utf-8").count(m["old"])
        if n != 1:
            wrong.append(f"{m['what']}: stands {n} times in {m['file']}")
        for file, name in (test.split("::") for test in m["tests"]):
            if f"def {name}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8"):
                wrong.append(f"{m['what']}: no test {name} in {file}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="mutations whose text or file holds this word")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--share", default="1/1", help="K/N: every N-th from the K-th on")
    parser.add_argument("--check", action="store_true", help="only look for the places")
    asked = parser.parse_args()
    listed = mutations()
    nth, of = map(int, asked.share.split("/"))
    chosen = [m for m in listed if asked.only in m["what"] + m["file"]][nth - 1 :: of]
    wrong = misfits(chosen)
    if wrong:
        raise SystemExit("mutations that fit no longer:\n" + "\n".join(wrong))
    print(f"{len(chosen)} mutations, each at one place", flush=True)
    if asked.check:
        return
    for name in PRELOADED:
        importlib.import_module(name)
    started = time.monotonic()
    missed: list[str] = []
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder) / "tree", Path(folder) / "log"
        skipped = shutil.ignore_patterns("__pycache__", "golden_big", ".cache")
        for part in ("driftlab", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", copy)
        every = sorted({t for m in chosen for t in m["tests"]})
        if run_tests(copy, every, log, unbroken=True) != "passed":
            raise SystemExit(f"tests fail on the unbroken code:\n{log.read_text()[-2000:]}")
        print(f"{len(every)} tests pass unbroken, {time.monotonic() - started:.0f} s", flush=True)
        for m in chosen:
            if time.monotonic() - started > asked.minutes * 60:
                print(f"stopped after {asked.minutes:g} minutes")
                break
            path = copy / m["file"]
            whole = path.read_text(encoding="utf-8")
            path.write_text(whole.replace(m["old"], m["new"]), encoding="utf-8")
            found = run_tests(copy, m["tests"], log)
            path.write_text(whole, encoding="utf-8")
            ok = found != "passed"
            tried += 1
            if not ok:
                missed.append(m["what"])
            print(f"{'caught' if ok else 'MISSED'}  {m['what']}", flush=True)
    caught = tried - len(missed)
    print(f"\n{caught} of {tried} caught in {time.monotonic() - started:.0f} s")
    if tried < len(chosen):
        print(f"{len(chosen) - tried} were not tried")
    if missed:
        raise SystemExit("not caught: " + "; ".join(missed))


if __name__ == "__main__":
    main()
