"""Taking a HuggingFace causal LM apart: its blocks, final norm, head, and the states between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.config import Rope
from driftlab.errors import ContractError
from driftlab.models import wide
from driftlab.models.loading import EPS, refuse_encoder_decoder, whole

_BLOCKS = ("layers", "h", "blocks")
# HuggingFace's names of the MLP's width and of the number of key/value heads.
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")


@dataclass(frozen=True)
class Forward:
    """States of the target at the tokens of one call.

    Attributes
    ----------
    aux: [B, S, A*Ht], the asked boundaries side by side, in the order asked (ascending).
    last: [B, S, Ht], state after the final norm, the input of the head.
    logits: [B, S, V], or None when they were not asked for.

    In a padded batch ``aux`` and ``last`` are 0 at padding; ``logits`` there mean nothing.
    """

    aux: Tensor
    last: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Shape:
    """Sizes of a target's own layers; ``assumed`` names the fields that its config lacks.

    ``whole``: the target turns a part of each head, and ``rope`` is of whole ones.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    assumed: tuple[str, ...] = ()
    whole: bool = False


class Anatomy:
    """The parts of a causal LM and how states pass through them."""

    def __init__(self, model: Any, *, name: str) -> None:
        refuse_encoder_decoder(model.config, name)
        self.model = model.eval().requires_grad_(False)
        self.name = name
        text = model.config.get_text_config(decoder=True)
        model.config.return_dict = text.return_dict = True  # the library's own code needs it
        self._decoder: Any = model.get_decoder()
        if self._decoder is model:  # Llama 4 hides it behind its name in a larger model
            self._decoder = getattr(model, "model", model)
        self._head: Any = model.get_output_embeddings()
        self._embedding: Any = model.get_input_embeddings()
        blocks = next(
            (b for k in _BLOCKS if (b := getattr(self._decoder, k, None)) is not None), None
        )
        if not blocks or self._head is None:
            raise ContractError(
                f"{name}: blocks or head were not found in the model",
                got=type(model).__name__,
                remedy="The target must be a HuggingFace causal LM of the Llama or GPT-2 kind.",
            )
        self._blocks: nn.ModuleList = blocks
        self._norm: Any = next(
            (m for k in _FINAL_NORMS if (m := getattr(self._decoder, k, None)) is not None), None
        )
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.logit_scale: float = getattr(text, "logit_scale", None) or 1.0  # Cohere
        scaling = getattr(text, "logits_scaling", None) or 1.0
        if text.model_type.startswith("hyperclovax"):
            self.logit_scale *= scaling
        else:
            self.logit_scale /= scaling  # Granite
        self.n_layers: int = len(blocks)
        self.vocab_size, self.hidden_size = map(int, self._head.weight.shape)
        self.dtype: torch.dtype = self._embedding.weight.dtype
        self.device: torch.device = self._embedding.weight.device

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        """States [B, S, Ht] after the final norm; ``kwargs`` go to the HuggingFace decoder."""
        cached = kwargs.get("cache") is not None
        with self.multiplying():
            return self._decoder(input_ids=tokens, use_cache=cached, **kwargs).last_hidden_state

    def multiplying(self) -> AbstractContextManager[object]:
        """Context in which the model's layers multiply as fast as its device can."""
        return wide.multiplying(self.dtype, self.device)

    @contextmanager
    def capture(self, boundaries: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        states: dict[int, Tensor] = {}

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            states[0] = args[0] if args else kwargs["hidden_states"]

        def after(b: int) -> Any:
            def hook(module: nn.Module, args: tuple, output: Any) -> None:
                # A tensor in transformers 5, a tuple in older and in custom code.
                states[b] = output[0] if isinstance(output, tuple) else output

            return hook

        with ExitStack() as stack:
            for b in set(boundaries):
                handle = (
                    self._blocks[0].register_forward_pre_hook(before, with_kwargs=True)
                    if b == 0
                    else self._blocks[b - 1].register_forward_hook(after(b))
                )
                stack.callback(handle.remove)
            yield states

    def collect(
        self,
        states: dict[int, Tensor],
        boundaries: Sequence[int],
        last: Tensor,
        *,
        logits: Tensor | None,
    ) -> Forward:
        for b in boundaries:
            shape = getattr(states[b], "shape", None)
            if shape != last.shape:
                raise ContractError(
                    f"{self.name}: boundary {b} is not one state a token",
                    got=type(states[b]).__name__ if shape is None else tuple(shape),
                    remedy="Blocks that hand on several streams cannot be fused; use another "
                    "target.",
                )
        last = last.to(self.device)
        parts = [states[b].to(self.device) for b in boundaries]
        aux = torch.cat(parts, -1) if parts else last.new_empty((*last.shape[:-1], 0))
        return Forward(aux, last, None if logits is None else self.head(logits).to(self.device))

    def head(self, last: Tensor) -> Tensor:
        """Logits [..., V] of states [..., Ht] after the final norm, soft cap and scale included."""
        with self.multiplying():
            logits = self._head(last)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def final_norm(self, x: Tensor) -> Tensor:
        """The norm between boundary ``n_layers`` and the head; the identity when there is none."""
        return x if self._norm is None else self._norm(x)

    @property
    def shape(self) -> Shape:
        """The sizes that a drafter takes over when nothing else is said."""
        text = _full_layer(self.model.config.get_text_config(decoder=True))
        heads = int(text.num_attention_heads)
        rope = dict(getattr(text, "rope_parameters", None) or {})
        # Layers of several kinds have one block each; the drafter's layer is a full one. A block
        # of None is a layer without positions.
        rope = dict(rope.get("full_attention", rope) or {})
        rope.pop("type", None)  # the older name of rope_type
        stated = bool(rope)
        part = rope.get("partial_rotary_factor") or 1.0
        # The default rotation of Llama's class, which a drafter's layer is, turns whole heads.
        whole = rope.get("rope_type", "default") == "default" and part != 1
        if whole or part == 1:
            rope.pop("partial_rotary_factor", None)
        eps = next((v for name in EPS if (v := getattr(text, name, None))), None)
        inner = next((v for name in _INNER if (v := getattr(text, name, None))), None)
        groups = next((v for name in _GROUPS if (v := getattr(text, name, None))), heads)
        if getattr(text, "multi_query", False) and not getattr(
            text, "new_decoder_architecture", False
        ):
            groups = 1  # Falcon's older layer, whatever its number of heads says
        return Shape(
            intermediate_size=int(inner or 4 * self.hidden_size),
            num_heads=heads,
            num_kv_heads=int(groups),
            head_dim=int(getattr(text, "head_dim", None) or self.hidden_size // heads),
            norm_eps=float(eps or 1e-6),
            rope=Rope(
                rope_type=rope.pop("rope_type", "default"),
                theta=rope.pop("rope_theta", None) or 10000.0,
                parameters=rope,
                max_position=int(getattr(text, "max_position_embeddings", None) or 4096),
            ),
            assumed=(() if inner else ("intermediate_size",))
            + (() if eps else ("norm_eps",))
            + (() if stated else ("rope",)),
            whole=whole,
        )

    @property
    def head_weight(self) -> Tensor:
        """[V, Ht]"""
        return whole(self._head.weight)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, Ht], as stored: a scale that the model applies after the look-up is not in it."""
        return whole(self._embedding.weight)

    @property
    def final_norm_weight(self) -> Tensor | None:
        """[Ht], the factor that the final norm multiplies with (Gemma's 1 + w), or None."""
        weight = getattr(self._norm, "weight", None)
        if weight is None:
            return None
        weight = whole(weight)
        signs = torch.ones_like(weight)
        signs[1::2] = -1  # mean 0 and RMS 1, so the norm returns its own factor, and a bias
        with torch.no_grad():
            effective = (self._norm(signs) - self._norm(-signs)) * signs / 2
        near = [
            w for w in (weight, 1 + weight) if torch.allclose(effective, w, rtol=1e-2, atol=1e-3)
        ]
        return near[0] if near else None


def _full_layer(text: Any) -> Any:
    """The config of the last layer of full attention, where layers differ in their sizes."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    kinds = list(getattr(text, "layer_types", None) or ())
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return text.per_layer_config[full[-1] if full else text.num_hidden_layers - 1]
