"""The target: the HuggingFace model that is verified against, and all that driftlab asks of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from driftlab.config import Origin, Provenance, Sourced, is_whole
from driftlab.errors import (
    ContractError,
    DataError,
    NumericsError,
    first_line,
    lacks_memory,
)
from driftlab.models import attention, continuation, generation, wide
from driftlab.models.anatomy import Anatomy, Forward
from driftlab.models.attention import Pattern, Reader
from driftlab.models.continuation import Request
from driftlab.models.generation import Session
from driftlab.models.loading import fingerprint, load_model, too_large
from driftlab.progress import progress_bar

_EXACT = (torch.float32, torch.float64)


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
        tokens = [t % self.vocab_size for t in range(1, min(8, self.max_position) + 1)]
        try:
            self.self_check(tokens)
            self._check_cache(tokens)
        except RuntimeError as error:
            if lacks_memory(error):
                what = f"{self.name} does not fit in memory while it runs"
                raise too_large(what, error) from None
            raise ContractError(
                f"{self.name} cannot be run, at once or block by block on a cache",
                got=first_line(error),
                remedy="Load it in one dtype. driftlab works with models whose cache holds keys "
                "and values only.",
            ) from error

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
        CheckpointError: files missing, damaged, or not a causal LM; tensors missing or without a
            place in the model.
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
        """Where a text ends: the model's own settings, and the tokenizer's token as engines do."""
        settings = {
            "argument": given,
            "generation_config": getattr(self.model.generation_config, "eos_token_id", None),
            "config": getattr(self.model.config, "eos_token_id", None),
        }
        where, value = next(((k, v) for k, v in settings.items() if v is not None), ("", ()))
        ids = list(value) if isinstance(value, Iterable) else [value]
        own = getattr(self.tokenizer, "eos_token_id", None)
        if given is None and own is not None and own not in ids:
            ids.append(own)
            where = f"{where} and tokenizer" if where else "tokenizer"
        if odd := [i for i in ids if not is_whole(i)]:
            raise ContractError(
                f"{self.name}: eos_token_id of {where} is no token id",
                got=repr(odd[0]),
                remedy="Correct it in the model's files: whole numbers end a text.",
            )
        outside = sorted(i for i in ids if not 0 <= i < self.vocab_size)
        said = f"; {outside} are outside the vocabulary and end no text" if outside else ""
        known = sorted(set(ids) - set(outside))
        self.provenance["eos_ids"] = Sourced(
            value=known,
            origin=Origin.read if where and not outside else Origin.assumed,
            where=(where or "found nowhere: none") + said,
        )
        return frozenset(known)

    def _find_context(self) -> int:
        text = self.model.config.get_text_config(decoder=True)
        value = getattr(text, "max_position_embeddings", None)
        origin, where = Origin.read, "config"
        left = self.provenance.get("config.max_position_embeddings")
        if left is not None:
            origin, where = left.origin, left.where
        if value is None:
            origin, where = Origin.assumed, "not in config: unlimited"
        rope = getattr(text, "rope_parameters", None) or {}
        short = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and short and (value is None or short < value):
            # Longer texts have other states everywhere, also where a cache holds the old ones.
            value, origin = short, Origin.derived
            where = "longrope: in a longer text all positions are rotated by other factors"
        self.provenance["max_position"] = Sourced(value=value, origin=origin, where=where)
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
                remedy=f"State the boundaries yourself (target.boundaries): ascending, in 0..{n}.",
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
        where = self.provenance["max_position"].where
        why = f" ({where})" if where.startswith("longrope") else ""
        return DataError(
            f"{what} exceeds the context of {self.name}, {self.max_position} tokens{why}",
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

        ``head(last)`` and ``head(final_norm(boundary n))`` must be the model's own logits: the
        argmax at every position, and the values, whose scale is what a drafter is taught. Runs
        when a target is made and before states are stored.

        Raises
        ------
        ContractError: naming which of the two differs, and at how many positions or by how much.
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
            off = _distance(logits, own)
            if wrong or off > (1e-3 if self.dtype in _EXACT else 5e-2):
                raise ContractError(
                    f"{self.name}: logits rebuilt from {what} disagree with the model's own",
                    got=f"{wrong} of {len(tokens)} positions"
                    if wrong
                    else f"the same best tokens, values apart by {off:.2g} of the largest",
                    remedy="The model changes its states between the last block and the head in a "
                    "way that driftlab does not know; do not train or measure on it.",
                )

    def _check_cache(self, tokens: Sequence[int]) -> None:
        """Prove that blocks on a cache give what one run gives, and see what embeddings become.

        Half precision is not compared, nor are quantized layers, which multiply in it: a near tie
        of experts may fall another way.
        """
        n = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        whole = self.forward(ids, torch.tensor([n]), (0, self.n_layers), logits=False).aux
        off = 0.0
        session = self.session(tokens[: n // 2 + 1], (0, self.n_layers))
        for i in range(n // 2 + 1, n, 2):
            block = session.extend(tokens[i : i + 2]).aux
            off = max(off, _distance(block, whole[:, i : i + 2]))
        stored = getattr(self.model.config, "quantization_config", None)
        exact = self.dtype in _EXACT and (stored is None or getattr(stored, "dequantize", False))
        if exact and off > 1e-3:
            raise ContractError(
                f"{self.name}: states on a cache are not those of one run",
                got=f"apart by {off:.2g} of the largest",
                remedy="What is written by this target would not be what is measured; do not use "
                "it.",
            )
        self._note_embedding(tokens, whole[0, :, : self.hidden_size].float())

    def _note_embedding(self, tokens: Sequence[int], states: Tensor) -> None:
        """Record how boundary 0 [S, Ht] comes from the stored embeddings."""
        weight = self.embedding_weight
        if weight.is_meta or weight.shape[1] != self.hidden_size:
            return
        rows = weight[torch.tensor(list(tokens), device=weight.device)].to(states)
        scale = float((rows * states).sum() / rows.square().sum().clamp(min=1e-12))
        plain = _distance(rows * scale, states) < 2e-2
        self.provenance["embedding_scale"] = Sourced(
            value=float(f"{scale:.4g}") if plain else None,
            origin=Origin.derived,
            where="boundary 0 over the stored embeddings, which a drafter gets as they are stored"
            if plain
            else "the model adds to its embeddings or norms them; a drafter gets the stored ones",
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
        with progress_bar(progress, total=len(prompts) * max_new_tokens, unit="token") as bar:
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
            if pattern.layer >= self.n_layers or pattern.layer in fired:
                raise ContractError(
                    f"{self.name}: blocks call their attention function more than once",
                    got=f"layer {pattern.layer} of {self.n_layers}",
                    remedy="Attention of such a target cannot be told apart by layer.",
                )
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


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors over the largest finite number of the second."""
    apart = (a.float() - b.float()).abs().masked_fill(a == b, 0)  # also where both are infinite
    largest = b.float().abs().masked_fill(~b.isfinite(), 0).amax()
    return float(apart.amax() / largest.clamp(min=1e-6))
