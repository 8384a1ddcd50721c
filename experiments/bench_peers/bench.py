"""Time the training step beside speculators and SpecForge.

    python experiments/bench_peers/bench.py --out FOLDER [--repeats N] [--smoke]

Makes an environment of their own once (.cache/bench-peers, about 2 GB), then runs
`driftlab bench --stage training` with both as peers. Nothing of it enters driftlab's environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from environments import environment  # noqa: E402

HOME = Path(".cache/bench-peers")
NEEDS = HERE / "requirements.txt"
TRAINERS = ("speculators==0.9.0", "specforge==0.2.0", "hs-connectors==0.9.0")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--out", required=True)
    words.add_argument("--repeats", default="5")
    words.add_argument("--smoke", action="store_true")
    given = words.parse_args()
    command = [sys.executable, "-m", "driftlab.cli", "bench", "--stage", "training"]
    command += ["--repeats", given.repeats, "--out", given.out]
    command += ["--smoke"] if given.smoke else []
    python = environment(HOME / "venv", NEEDS, *TRAINERS, size="about 2 GB")
    for name in ("speculators", "specforge"):
        command += ["--peer", f"{name}={python} {HERE / 'worker.py'} {name}"]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
