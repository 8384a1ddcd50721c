"""Environments beside driftlab's own, for programs that it is compared with."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


def environment(folder: Path, pins: Path, *packages: str, size: str) -> Path:
    """The python of the environment in ``folder``, which is built when it or a pin is new.

    ``packages`` go in after the file ``pins`` and without what they ask for. ``size`` is told.
    """
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(pins.read_bytes() + " ".join(packages).encode()).hexdigest()
    stamp = folder / "ready"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Installing {', '.join(packages)} into {folder}: some minutes, {size}.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--requirement", pins], check=True)
    subprocess.run([*install, "--no-deps", *packages], check=True)
    stamp.write_text(wanted)
    return python
