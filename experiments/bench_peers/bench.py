"""Time the training step beside speculators and SpecForge.

    python experiments/bench_peers/bench.py --out FOLDER [--repeats N] [--smoke]

Makes an environment of their own once (.cache/bench-peers, about 2 GB), then runs
`driftlab bench --stage training` with both as peers. Nothing of it enters driftlab's environment.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOME = Path(".cache/bench-peers")
NEEDS = HERE / "requirements.txt"
TRAINERS = ("speculators==0.9.0", "specforge==0.2.0", "hs-connectors==0.9.0")


def environment() -> Path:
    """The python of the trainers' environment, which is built when it or a pin is new."""
    python = HOME / "venv" / "bin" / "python"
    pins = hashlib.sha256(NEEDS.read_bytes() + " ".join(TRAINERS).encode()).hexdigest()
    stamp = HOME / "venv" / "ready"
    if stamp.exists() and stamp.read_text() == pins:
        return python
    print(f"Installing {', '.join(TRAINERS)} into {HOME}: some minutes, about 2 GB.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME / "venv"], check=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--requirement", NEEDS], check=True)
    subprocess.run([*install, "--no-deps", *TRAINERS], check=True)
    stamp.write_text(pins)
    return python


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--out", required=True)
    words.add_argument("--repeats", default="5")
    words.add_argument("--smoke", action="store_true")
    given = words.parse_args()
    command = [sys.executable, "-m", "driftlab.cli", "bench", "--stage", "training"]
    command += ["--repeats", given.repeats, "--out", given.out]
    command += ["--smoke"] if given.smoke else []
    python = environment()
    for name in ("speculators", "specforge"):
        command += ["--peer", f"{name}={python} {HERE / 'worker.py'} {name}"]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
