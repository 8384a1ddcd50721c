"""Drafters in vLLM, one prompt at a time: what each proposed and what vLLM counted.

    python worker.py JOB.json RESULT.json        (run by check.py, in vLLM's environment)

The proposals are those that vLLM's own proposer returns, whether they are verified or not; the
counters are those of its metrics. Nothing else of vLLM is touched.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt, __version__
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
proposed: list[list[int]] = []
_propose = SpecDecodeBaseProposer.propose


def propose(self: SpecDecodeBaseProposer, *args: Any, **kwargs: Any) -> Any:
    drafts = _propose(self, *args, **kwargs)
    proposed.extend(drafts.tolist())
    return drafts


def counted(llm: LLM, depth: int) -> dict[str, list[int]]:
    """vLLM's counters since it started."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    values = {}
    for name in COUNTERS:
        metric = found.get(f"vllm:spec_decode_{name}")
        if name.endswith("_per_pos"):
            values[name] = list(metric.values) if metric else [0] * depth
        else:
            values[name] = [metric.value if metric else 0]
    return values


def serve(job: dict[str, Any], drafter: str) -> list[dict[str, Any]]:
    """The prompts of ``job`` with one drafter."""
    depth = job["depth"]
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        seed=0,
        speculative_config={
            "method": "eagle3",
            "model": drafter,
            "num_speculative_tokens": depth,
        },
    )
    served = []
    for prompt in job["prompts"]:
        proposed.clear()
        before = counted(llm, depth)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=prompt["max_new_tokens"],
            stop_token_ids=prompt["stop"],
            detokenize=False,
        )
        tokens = TokensPrompt(prompt_token_ids=prompt["tokens"])
        (output,) = llm.generate(tokens, params, use_tqdm=False)
        after = counted(llm, depth)
        served.append(
            {
                "continuation": list(output.outputs[0].token_ids),
                "proposed": list(proposed),
                **{n: [a - b for a, b in zip(after[n], before[n], strict=True)] for n in COUNTERS},
            }
        )
    return served


def main(job: dict[str, Any], result: Path) -> None:
    """A drafter's results are written when they are there; what vLLM refuses, with its words."""
    SpecDecodeBaseProposer.propose = propose
    made: dict[str, Any] = {"vllm": __version__, "served": {}, "refused": {}}
    for kind, drafter in job["drafters"].items():
        begun = time.monotonic()
        try:
            made["served"][kind] = serve(job, drafter)
        except Exception as error:
            traceback.print_exc()
            made["refused"][kind] = f"{type(error).__name__}: {error}"
        cleanup_dist_env_and_memory()
        print(f"{kind}: {time.monotonic() - begun:.1f} s", flush=True)
        result.write_text(json.dumps(made))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
