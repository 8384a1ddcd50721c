"""The target: the HuggingFace model that is verified against, and all that driftlab asks of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from driftlab.config import Origin, Provenance, Sourced, is_whole
from driftlab.errors import ContractError, DataError, NumericsError
from driftlab.models import attention, continuation, generation, wide
from driftlab.models.anatomy import Anatomy, Forward
from driftlab.models.attention import Pattern, Reader
from driftlab.models.continuation import Request
from driftlab.models.generation import Session
from driftlab.models.loading import fingerprint, load_model


class Target(Anatomy):
    """A causal LM of HuggingFace behind a narrow door: no other room touches HF internals.

    Boundary ``b`` is the residual stream after ``b`` blocks: 0 the embeddings as the first
    block receives them, ``n_layers`` the last block's output *before* the final norm.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        name: str,
        provenance: Provenance,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """Use :meth:`load` or :meth:`from_model`."""
        super().__init__(model, name=name)
        self.tokenizer = tokenizer
        self.provenance: Provenance = dict(provenance)
        self.eos_ids: frozenset[int] = self._find_eos(eos_ids)
        self.max_position: int = self._find_context()
        self.provenance["attention"] = Sourced(
            value=model.config._attn_implementation, origin=Origin.read, where="model"
        )
        native = wide.native(self.dtype, self.device)
        self.provenance["multiplication"] = Sourced(
            value=str(self.dtype if native else torch.float32).removeprefix("torch."),
            origin=Origin.derived,
            where="the device's own" if native else "the CPU has no units for the dtype",
        )
        generation.new_cache(model.config, 0)  # refuses what cannot be rewound
        self.self_check([t % self.vocab_size for t in range(1, min(8, self.max_position) + 1)])

    @classmethod
    def load(
        cls,
        source: str,
        *,
        revision: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        device_map: Any = None,
        tp_plan: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Load a target and its tokenizer.

        Parameters
        ----------
        source: a folder that ``save_pretrained`` wrote, a ``.gguf`` file (weights are
            dequantized, the tokenizer comes from it too), or a hub id ``owner/name``.
        dtype: float32, bfloat16 or float16; what was stored and what it became are recorded.
        device_map, tp_plan: handed to HuggingFace, for models larger than one device.
        trust_remote_code: run code that the checkpoint brings along. Recorded.

        Raises
        ------
        CheckpointError: files missing, damaged, or not a causal LM; tensors missing.
        ContractError: a model that driftlab cannot take apart.
        ResourceError: not enough memory.
        """
        model, tokenizer, provenance = load_model(
            source,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            tp_plan=tp_plan,
            trust_remote_code=trust_remote_code,
        )
        return cls(model, tokenizer, name=source, provenance=provenance)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any | None = None,
        *,
        name: str,
        eos_ids: Sequence[int] | None = None,
    ) -> Target:
        """Wrap a model that is in memory. It is set to eval mode and its weights are frozen.

        ``eos_ids`` replaces what the model's settings say; ``()`` means that no text ends early.
        """
        given = {"source": Sourced(value=name, origin=Origin.read, where="model in memory")}
        return cls(model, tokenizer, name=name, provenance=given, eos_ids=eos_ids)

    def __repr__(self) -> str:
        return (
            f"Target({self.name}: {type(self.model).__name__}, {self.n_layers} layers, "
            f"width {self.hidden_size}, vocabulary {self.vocab_size}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    def _find_eos(self, given: Sequence[int] | None) -> frozenset[int]:
        places = {
            "argument": given,
            "generation_config": getattr(self.model.generation_config, "eos_token_id", None),
            "config": getattr(self.model.config, "eos_token_id", None),
            "tokenizer": getattr(self.tokenizer, "eos_token_id", None),
        }
        where, value = next(
            ((k, v) for k, v in places.items() if v is not None), ("found nowhere: none", ())
        )
        ids = frozenset([value] if isinstance(value, int) else value)
        origin = Origin.assumed if where.startswith("found nowhere") else Origin.read
        self.provenance["eos_ids"] = Sourced(value=sorted(ids), origin=origin, where=where)
        return ids

    def _find_context(self) -> int:
        text = self.model.config.get_text_config(decoder=True)
        value = getattr(text, "max_position_embeddings", None)
        self.provenance["max_position"] = Sourced(
            value=value,
            origin=Origin.assumed if value is None else Origin.read,
            where="not in config: unlimited" if value is None else "config",
        )
        return sys.maxsize if value is None else int(value)

    # Boundaries

    def default_boundaries(self) -> tuple[int, ...]:
        """The usual three, ``(2, n // 2, n - 3)``.

        Raises ContractError when a shallow target makes them collide or fall below 0.
        """
        n = self.n_layers
        ids = (2, n // 2, n - 3)
        if len(set(ids)) < 3 or min(ids) < 0 or sorted(ids) != list(ids):
            raise ContractError(
                f"a target of {n} layers has no three default boundaries (2, n//2, n-3)",
                got=ids,
                remedy=f"State the boundaries yourself, ascending ids in 0..{n}.",
            )
        return ids

    def check_boundaries(self, boundaries: Sequence[int]) -> None:
        """Raise ContractError for an id outside 0..n, or ids that do not ascend (equal is fine)."""
        for b in boundaries:
            if not 0 <= b <= self.n_layers:
                raise ContractError(
                    f"boundary {b} is outside 0..{self.n_layers} of a target with "
                    f"{self.n_layers} layers",
                    remedy="Boundary b is the state after b blocks.",
                )
        if sorted(boundaries) != list(boundaries):
            raise ContractError(
                "boundaries must ascend", got=tuple(boundaries), remedy="Sort them."
            )

    # Forward

    def forward(
        self, tokens: Tensor, lengths: Tensor, boundaries: Sequence[int], *, logits: bool = True
    ) -> Forward:
        """States at ``tokens`` [B, S] int64, padded on the right to ``lengths`` [B].

        Padding needs no mask: causal attention keeps it out of every real position.

        Raises
        ------
        ContractError: see :meth:`check_boundaries`.
        DataError: an empty row, a token outside the vocabulary, more tokens than the context.
        """
        self.check_boundaries(boundaries)
        tokens, lengths = tokens.to(self.device), lengths.to(self.device)
        self._check_batch(tokens, lengths)
        with torch.no_grad(), self.capture(boundaries) as states:
            last = self.run(tokens)
            out = self.collect(states, boundaries, last, logits=last if logits else None)
        real = torch.arange(tokens.shape[1], device=self.device) < lengths[:, None]
        if bool(real.all()):
            return out
        keep = real[..., None]
        return Forward(out.aux.where(keep, 0), out.last.where(keep, 0), out.logits)

    def _check_batch(self, tokens: Tensor, lengths: Tensor) -> None:
        rows, size = tokens.shape
        if lengths.shape != (rows,) or int(lengths.min()) < 1 or int(lengths.max()) > size:
            raise DataError(
                f"lengths do not fit a batch of {rows} rows and {size} columns",
                got=lengths.tolist(),
                remedy="One length per row, from 1 to the number of columns.",
            )
        if size > self.max_position:
            raise self.too_long("the batch", size)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise self._foreign("the batch", int(tokens.min()), int(tokens.max()))

    def check_tokens(self, tokens: Sequence[int], *, what: str, extra: int = 0) -> None:
        """Raise DataError if ``tokens`` are empty, no ids, or too long with ``extra`` more."""
        if len(tokens) == 0:
            raise DataError(f"{what} is empty", remedy="Give at least one token.")
        if odd := [t for t in tokens if not is_whole(t)]:
            raise DataError(
                f"{what} holds what is no token id",
                got=repr(odd[0]),
                remedy="Ids are whole numbers.",
            )
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise self._foreign(what, min(tokens), max(tokens))
        if len(tokens) + extra > self.max_position:
            raise self.too_long(what, len(tokens), extra)

    def too_long(self, what: str, n: int, extra: int = 0) -> DataError:
        more = f" + {extra} new" if extra else ""
        return DataError(
            f"{what} exceeds the context of {self.name}, {self.max_position} tokens",
            got=f"{n}{more} tokens",
            remedy="Shorten or drop it" + (", or ask for fewer new tokens." if extra else "."),
        )

    def _foreign(self, what: str, low: int, high: int) -> DataError:
        return DataError(
            f"{what} holds token ids outside 0..{self.vocab_size - 1}",
            got=f"ids from {low} to {high}",
            remedy="The text was made with another tokenizer.",
        )

    def self_check(self, tokens: Sequence[int]) -> None:
        """Prove that captured states are the ones that the logits are made of.

        ``head(last)`` and ``head(final_norm(boundary n))`` must have the argmax of the model's
        own logits at every position. Runs when a target is made and before states are stored.

        Raises
        ------
        ContractError: naming which of the two differs, and at how many positions.
        NumericsError: the model's own logits are not finite.
        """
        self.check_tokens(tokens, what="the self-check")
        ids = torch.tensor([list(tokens)], device=self.device)
        out = self.forward(ids, torch.tensor([len(tokens)]), (self.n_layers,))
        with torch.no_grad(), self.multiplying():
            own = self.model(input_ids=ids, use_cache=False).logits.to(self.device)
            best = own.amax(-1)[0]
            if not bool(best.isfinite().all()):
                raise NumericsError(
                    f"the logits of {self.name} are not finite at position "
                    f"{int((~best.isfinite()).nonzero()[0])} of the self-check",
                    got=f"computed in {str(own.dtype).removeprefix('torch.')}",
                    remedy="Load the target in bfloat16 or float32; if it is, its weights are "
                    "damaged.",
                )
            rebuilt = {
                "last": out.logits,
                f"boundary {self.n_layers}": self.head(self.final_norm(out.aux)).to(self.device),
            }
        for what, logits in rebuilt.items():
            assert logits is not None  # asked for above
            gap = own.amax(-1) - own.gather(-1, logits.argmax(-1, keepdim=True))[..., 0]
            # A random model can tie; a tie is no disagreement.
            wrong = int((gap > 1e-5 * own.abs().amax(-1).clamp(min=1)).sum())
            if wrong:
                raise ContractError(
                    f"{self.name}: logits rebuilt from {what} disagree with the model's own",
                    got=f"{wrong} of {len(tokens)} positions",
                    remedy="The model changes its states between the last block and the head in a "
                    "way that driftlab does not know; do not train or measure on it.",
                )

    # Generation, sessions, attention

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        batch: int = 32,
        progress: str = "",
    ) -> list[list[int]]:
        """Continue each prompt; only the new tokens are returned, EOS included when it came.

        Greedy at temperature 0, else a draw whose noise depends on (seed, index of the prompt,
        step) and not on the batch. In fp32 a batch gives what single prompts give. ``progress``
        is the label of a bar, "" shows none.

        Raises
        ------
        DataError: an empty prompt, foreign tokens, or prompt + new tokens beyond the context.
        NumericsError: logits are not finite; prompt and position are named.
        """
        for i, prompt in enumerate(prompts):
            self.check_tokens(prompt, what=f"prompt {i}", extra=max_new_tokens)
        # Like lengths together: the order cannot matter to any result.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts: list[list[int]] = [[] for _ in prompts]
        with tqdm(
            total=len(prompts) * max_new_tokens,
            desc=progress,
            unit="tok",
            disable=None if progress else True,
        ) as bar:
            for request, text in self.stream(
                (Request(prompts[i], seed, i) for i in order),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                batch=batch,
                on_tokens=bar.update,
            ):
                texts[request.index] = text
                bar.update(max_new_tokens - len(text))
        return texts

    def stream(
        self,
        requests: Iterable[Request],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        batch: int = 32,
        on_tokens: Callable[[int], object] = lambda n: None,
    ) -> Iterator[tuple[Request, list[int]]]:
        """Like :meth:`generate`, for prompts that are taken when a row of the batch is free.

        A request and its new tokens come out as soon as they are complete, in any order.
        ``on_tokens`` is told how many tokens each step made.
        """
        return continuation.stream(
            self,
            requests,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            batch=batch,
            on_tokens=on_tokens,
        )

    def session(self, tokens: Sequence[int], boundaries: Sequence[int]) -> Session:
        """One sequence with a cache that can be extended by blocks and rewound."""
        return Session(self, tokens, boundaries)

    def attention(
        self,
        tokens: Tensor,
        lengths: Tensor,
        reader: Reader,
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Hand each layer's :class:`Pattern` to ``reader``, in order; nothing is kept.

        ``tokens`` [B, S] are padded on the right to ``lengths`` [B]. Every pattern is proved
        causal and its rows to sum to 1 (with the mass of a learned sink) before it is handed on.

        Raises
        ------
        ContractError: the model's attention cannot be replaced, or a layer did not fire.
        NumericsError: see :func:`driftlab.models.attention.checked`.
        """
        tokens, lengths = tokens.to(self.device), lengths.to(self.device)
        self._check_batch(tokens, lengths)
        wanted = set(range(self.n_layers)) if layers is None else set(layers)
        if wanted - set(range(self.n_layers)):
            raise ContractError(
                f"layers outside 0..{self.n_layers - 1}", got=sorted(wanted), remedy="Correct them."
            )
        fired: set[int] = set()

        def give(pattern: Pattern) -> None:
            if pattern.layer in wanted:
                fired.add(pattern.layer)
                reader(attention.checked(pattern, lengths, self.dtype))

        with torch.no_grad(), attention.recording(self.model, give):
            self.run(tokens)
        if fired != wanted:
            raise ContractError(
                "layers of the target never called their attention function",
                got=sorted(wanted - fired),
                remedy="Attention of these layers cannot be measured; leave them out.",
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of config and weights; see :func:`driftlab.models.loading.fingerprint`."""
        return fingerprint(self.model, owner=self.name)
