"""One training step of another trainer, on a job that `driftlab bench` wrote.

    python worker.py speculators|specforge

Speaks the lines of JSON of driftlab/bench/peers.py. Runs in the environment that
`make bench-peers` builds; imports nothing of driftlab.

What differs from the trainers as they ship: compilation is off (it needs a GPU in one, a C++
compiler in the other), SpecForge's loss is its own reference in torch, since its kernel needs a
GPU, speculators learns its head too, and KL gets the target's entropy added, so that both report
a cross entropy.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from types import ModuleType
from typing import Any, ClassVar

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch._dynamo  # asks for triton: before Absent would answer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that a trainer names when it is imported and never uses in a step on a CPU."""

    names: ClassVar = (
        *("triton", "sglang", "yunchang", "wandb", "openai_harmony", "tensorboard"),
        *("openai", "datasets", "aiohttp", "httpx", "psutil"),
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    __path__: ClassVar = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Named,), {})


class _Named:
    """Stands in annotations as a type does, and as a decorator hands back what it decorates."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if args else super().__new__(cls)


class Specforge:
    """SpecForge 0.2.0: attention backend sdpa, the teacher from hidden states."""

    def __init__(self, job: dict[str, Any]) -> None:
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core import loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from transformers import LlamaConfig

        class Reference:
            apply = staticmethod(loss._compute_loss)

        eagle3.LogSoftmaxLoss = Reference
        config = LlamaConfig(
            **job["config"],
            hidden_act="silu",
            pad_token_id=0,
            tie_word_embeddings=False,
            attention_bias=False,
        )
        config.pretraining_tp = 1
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        vocab, ids = job["config"]["vocab_size"], job["draft_to_target"]
        weights = {_rename(k, "layers.0.", "midlayer."): v for k, v in job["weights"].items()}
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][ids] = True
        weights["d2t"] = ids - torch.arange(len(ids))
        draft.load_state_dict(weights, strict=False)
        draft.embed_tokens.requires_grad_(False)
        self.model = eagle3.OnlineEagle3Model(draft, length=job["depth"], attention_backend="sdpa")
        self.draft, self.job = draft, job
        self.weights = {
            _rename(k, "midlayer.", "layers.0."): p
            for k, p in draft.named_parameters()
            if p.requires_grad
        }

    def loss(self) -> torch.Tensor:
        job = self.job
        losses = self.model(
            input_ids=job["ids"],
            attention_mask=torch.ones_like(job["ids"]),
            target=None,
            loss_mask=job["mask"][..., None].int(),
            hidden_states=job["aux"],
            target_hidden_for_compact=job["last"],
            target_head_weight=job["head"],
        )[0]
        # Its mean is over all rows, ours over the learned ones.
        scale = job["mask"].numel() / job["mask"].sum()
        return scale * sum(job["decay"] ** k * x for k, x in enumerate(losses))


class Speculators:
    """speculators 0.9.0: attention sdpa, eager loss, the texts packed one after the other."""

    def __init__(self, job: dict[str, Any]) -> None:
        from speculators import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        given = dict(job["config"])
        size = given.pop("draft_vocab_size")
        layer = LlamaConfig(**given, num_hidden_layers=1, tie_word_embeddings=False)
        layer._attn_implementation = "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=size,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["depth"])],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        model = Eagle3DraftModel(config)
        ids = job["draft_to_target"]
        chosen = torch.zeros(given["vocab_size"], dtype=torch.bool)
        chosen[ids] = True
        if size != given["vocab_size"]:
            model.load_vocab_mappings(chosen, ids - torch.arange(len(ids)))
        model.load_state_dict(
            {**job["weights"], "verifier_lm_head.weight": job["head"][ids]}, strict=False
        )
        # The job's last state is after the final norm already.
        model.verifier_norm = torch.nn.Identity()
        model.lm_head.weight.requires_grad_(True)
        self.model, self.job = model, job
        self.losses = resolve_loss_config("kl_div", "eager")
        rows, size = job["ids"].shape
        self.packed = {
            "hidden_states": job["aux"].reshape(1, rows * size, -1),
            "input_ids": job["ids"].reshape(1, -1),
            "document_ids": torch.arange(rows).repeat_interleave(size)[None],
            "loss_mask": job["mask"].reshape(1, -1),
            "verifier_last_hidden_states": job["last"].reshape(1, rows * size, -1),
        }
        with torch.no_grad():
            logits = job["last"][job["mask"]] @ job["head"][ids].T
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        self.entropy = float(entropy) * sum(job["decay"] ** k for k in range(job["depth"]))
        self.weights = {k: p for k, p in model.named_parameters() if p.requires_grad}

    def loss(self) -> torch.Tensor:
        job = self.job
        return (
            self.entropy
            + self.model(
                **self.packed,
                ttt_steps=job["depth"],
                ttt_step_loss_decay=job["decay"],
                loss_config=self.losses,
            )[1]
        )


def _rename(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def step(trainer: Any) -> torch.Tensor:
    device = trainer.job["ids"].device.type
    for weight in trainer.weights.values():
        weight.grad = None
    with torch.autocast(device, torch.bfloat16, enabled=trainer.job["autocast"]):
        loss = trainer.loss()
    loss.backward()
    return loss


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a trainer prints is no answer
    sys.meta_path.append(Absent())
    kind = {"speculators": Speculators, "specforge": Specforge}[sys.argv[1]]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trainer: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if "load" in order:
            torch.set_default_device(DEVICE)
            trainer = kind(torch.load(order["load"], weights_only=True, map_location=DEVICE))
            answer: dict[str, Any] = {"ready": sys.argv[1]}
        elif "check" in order:
            answer = {"loss": float(step(trainer))}
            torch.save({k: w.grad.cpu() for k, w in trainer.weights.items()}, order["check"])
        else:
            wall, busy = time.perf_counter(), time.process_time()
            step(trainer)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - wall
            spent = taken if DEVICE == "cuda" else time.process_time() - busy
            answer = {"wall": taken, "busy": spent}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
