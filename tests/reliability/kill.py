"""SIGKILL `ablate` and `train` at random moments, run the same command again, compare tables.

    python tests/reliability/kill.py [--moments 50] [--seed 0] [--only ablate]

The experiment is the embedded suite made tiny (tests/small.py). Models are imported once and
every run is a fork, so that moments fall on work and not on imports; cells run in workers. Every
other time target, texts and states are made in the run, too. Figures are not drawn: nothing of a
run is read back from them. Ends with 1 when a single byte differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import small

from driftlab import cli
from driftlab.engines import pool
from driftlab.experiment import texts

VERBS = ("ablate", "train")
SIZES = [s for s in small.SETTINGS if not s.startswith(("axes", "seeds", "workers"))]


def command(verb: str, out: Path) -> list[str]:
    if verb == "ablate":
        words = ["ablate", "--suite", "micro", "--out", str(out)]
        return [*words, *small.arguments("workers=2", "train.checkpoint_every=1")]
    words = ["train", "--target", "micro", "--data", "micro", "--fusion-norm", "per_layer"]
    sizes = [*SIZES, "train.checkpoint_every=1", "train.steps=12"]
    return [*words, "--out", str(out), *(w for s in sizes for w in ("--set", s))]


def start(words: Sequence[str], seen: Path | None = None) -> int:
    """The command in a process group of its own, silent. ``seen`` gets what it imported."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.setpgid(0, 0)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(silent, stream)
        cli.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        if seen is not None:
            seen.write_text("\n".join(sys.modules))
        os._exit(code)


def ended(child: int) -> int | None:
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def finish(words: Sequence[str], seen: Path | None = None) -> float:
    """Run to the end; seconds."""
    started = time.monotonic()
    child = start(words, seen)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise SystemExit(f"{words[0]} ended with {code}")
    return time.monotonic() - started


def preload(seen: Path) -> None:
    """Import what a run imported, so that the next ones find it."""
    for name in seen.read_text().splitlines():
        if not name.startswith(("__main__", "__mp_main__")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def stage(out: Path) -> str:
    """What a killed run had reached."""
    if (out / "cells.parquet").exists():
        return "tables"
    if any((out / "shards").rglob("*.shard")):
        return "measuring"
    if any((out / "training").glob("*")) or any((out / "drafters").glob("*")):
        return "training"
    return "target, texts, states" if (out / "manifest.json").exists() else "before the run"


def found(out: Path) -> tuple[Any, Any]:
    return small.contents(out), small.drafters(out)


def trial(verb: str, home: Path, expected: Any, whole: float, rng: random.Random) -> str:
    """Kill once, run again, compare. Returns the stage that was hit, or "" for a late kill."""
    out = home / verb
    words = command(verb, out)
    shutil.rmtree(out, ignore_errors=True)
    child = start(words)
    time.sleep(rng.uniform(0.0, 1.0) * whole)
    if ended(child) is not None:
        return ""
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    hit = stage(out)
    finish(words)
    if found(out) != expected:
        raise SystemExit(f"{verb}, killed in stage {hit!r}: the tables differ")
    if left := [*small.leftovers(out), *home.rglob("*.tmp")]:
        raise SystemExit(f"{verb}, killed in stage {hit!r}: {left[0]} stays")
    return hit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=VERBS, help="half of the moments, on one command")
    asked = parser.parse_args()
    verbs = (asked.only,) if asked.only else VERBS
    rng = random.Random(asked.seed)
    # Workers are forked, not spawned: they need not import what is imported.
    forked = multiprocessing.context.ForkContext
    pool.multiprocessing.get_context = lambda kind: forked()  # type: ignore[assignment]
    cli._finish = lambda run: None
    vars(texts).update(small.MICRO)
    hits: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for verb in verbs:
            home = Path(folder) / verb
            out = home / verb
            finish(command(verb, out), Path(folder) / "seen")
            preload(Path(folder) / "seen")
            shutil.rmtree(home)
            long = finish(command(verb, out))
            expected = found(out)
            shutil.rmtree(out)
            short = finish(command(verb, out))
            if found(out) != expected:
                raise SystemExit(f"{verb}: two undisturbed runs differ")
            wanted = asked.moments // 2
            done = 0
            while done < wanted:
                anew = done % 2 == 1
                if anew:
                    shutil.rmtree(home / "cache")
                hit = trial(verb, home, expected, long if anew else short, rng)
                if hit:
                    done += 1
                    hits[f"{verb}: {hit}"] += 1
                    print(f"{verb} {done}/{wanted}: killed in {hit}, equal", flush=True)
    print(f"\n{sum(hits.values())} kills, all tables and drafters equal byte for byte")
    for name, n in sorted(hits.items()):
        print(f"  {name}: {n}")
    spent = sum(os.times()[:4])
    print(f"{time.monotonic() - started:.0f} s, {spent:.0f} s of processor time")


if __name__ == "__main__":
    main()
