"""Drafters of other implementations, computed by driftlab to 1e-5 (tests/golden/README.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import cases
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from driftlab.engines.chain import speculate
from driftlab.models.checkpoints import Dialect, load_drafter
from driftlab.models.drafter import Drafter
from driftlab.models.hooks import capture
from driftlab.models.target import Target

TOLERANCE = 1e-5
DIALECTS = {
    "SafeAILab/EAGLE": Dialect.safeailab,
    "specforge": Dialect.specforge,
    "torchspec": Dialect.torchspec_gqa,
    "torchspec_dogacel": Dialect.torchspec_gqa,
    "speculators": Dialect.speculators,
}


@dataclass(frozen=True)
class Shape:
    """The verifier of the random cases, as far as a drafter asks."""

    hidden_size: int = 64
    n_layers: int = 8
    vocab_size: int = 320

    @property
    def embedding_weight(self) -> Tensor:
        raise AssertionError("every random case has its own embeddings")

    head_weight = embedding_weight


@pytest.fixture
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    folder = cases.case(request.node.callspec.params["name"]).write(tmp_path / "drafter")
    return load_drafter(folder, target=Shape())


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", cases.names())
def test_the_writer_is_recognised(name: str, drafter: Drafter) -> None:
    case = cases.case(name)
    assert drafter.provenance["dialect"].value == DIALECTS[case.peer]
    ids = case.config.get("eagle_aux_hidden_state_layer_ids", (2, 4, 5))
    assert drafter.config.boundaries == tuple(ids)


@pytest.mark.parametrize("name", [n for n in cases.names() if "padded" not in n])
def test_chains(name: str, drafter: Drafter) -> None:
    """States, logits, tokens and attention of every depth of a greedy chain."""
    case = cases.case(name)
    want = case.expected
    tokens = case.inputs["chain.input_ids"][None]
    memory, patterns = drafter.new_memory(), []
    with torch.no_grad(), capture(drafter, "attn.pattern") as seen:
        u = drafter.fuse(case.inputs["chain.aux_hidden"][None])
        for depth in range(8):
            state = drafter.step(tokens, u, memory, depth=depth + 1)
            logits = drafter.logits(state)[0, -1]
            assert_close(state.pre[0, -1], want["chain.prenorm_hidden"][depth])
            assert_close(logits, want["chain.logits"][depth])
            tokens = drafter.to_target(logits.argmax()).reshape(1, 1)
            assert tokens.item() == want["chain.tokens"][depth]
            u = state.feedback[:, -1:]
            patterns.append(seen["attn.pattern", depth + 1][0, :, -1])
            if depth == 0:
                memory.select(memory.anchors[-1:])
    prefix = memory.length
    for depth, pattern in enumerate(patterns):
        if "chain.attn_weights" in want:
            assert_close(pattern, want["chain.attn_weights"][depth][:, : prefix + depth])
        if "chain.attn_prefix" in want:
            assert_close(pattern[:, :prefix], want["chain.attn_prefix"][depth])
            # Their column i is the row's own depth i; 0 is unused.
            assert_close(pattern[:, prefix:], want["chain.attn_chain"][depth][:, 1 : depth + 1])


@pytest.mark.parametrize(
    "name", [n for n in cases.names() if "ttt.logits" in cases.packed()["cases"][n]["expected"]]
)
def test_training_unrolls(name: str, drafter: Drafter) -> None:
    """All rows at once under the text's tokens, as the trainers unroll."""
    case, data = cases.case(name), cases.packed()
    tokens, aux = case.inputs["ttt.input_ids"], case.inputs["ttt.aux_hidden"]
    if tokens.dim() == 1:
        tokens, aux = tokens[None], aux[None]
    memory = drafter.new_memory()
    found = []
    with torch.no_grad():
        u = drafter.fuse(aux)
        for depth in range(max(data["depths"]) + 1):
            shifted = torch.nn.functional.pad(tokens, (0, depth))[:, depth:]
            state = drafter.step(shifted, u, memory, depth=depth + 1)
            u = state.feedback
            if depth in data["depths"]:
                found.append(drafter.logits(state)[:, data["rows"]].flatten(0, 1))
    assert_close(torch.stack(found), case.expected["ttt.logits"])


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return cases.rounds()


def test_whole_rounds(recorded: dict[str, Any], tmp_path: Path) -> None:
    """SafeAILab's eagenerate: the drafts of every round, how many were accepted, the text."""
    model = LlamaForCausalLM(LlamaConfig(**recorded["target_config"]))
    model.load_state_dict(recorded["target"])
    target = Target.from_model(model.eval(), name="golden")
    folder = cases.write_checkpoint(
        tmp_path / "drafter", recorded["config"], recorded["checkpoint"]
    )
    drafter = load_drafter(folder, target=target)
    assert torch.equal(drafter.embed_tokens.weight, model.model.embed_tokens.weight)
    for prompt in recorded["prompts"]:
        done = speculate(target, drafter, prompt["prompt_ids"], depth=8, max_new_tokens=80)
        text = list(done.tokens)
        assert text[: len(prompt["output_ids"])] == prompt["output_ids"]
        newest = [text[r.anchor + 1] for r in done.rounds]
        found = [
            {"candidate": [token, *r.drafted], "accepted": r.accepted}
            for token, r in zip(newest, done.rounds, strict=True)
        ]
        assert found[: len(prompt["rounds"])] == prompt["rounds"]
