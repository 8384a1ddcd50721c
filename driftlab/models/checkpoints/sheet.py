"""What the resolving modules share: one drafter's config, tensors, target and ledger."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Protocol

from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from driftlab.config import Origin, Sourced
from driftlab.errors import CheckpointError, ContractError
from driftlab.models.checkpoints.dialects import TRAITS, Dialect, canonical_names
from driftlab.models.checkpoints.fields import Fields, Ledger
from driftlab.models.checkpoints.read import Files


class TargetLike(Protocol):
    """What a target must tell to resolve a drafter against it."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def embedding_weight(self) -> Tensor: ...

    @property
    def head_weight(self) -> Tensor: ...


def there(present: bool) -> str:
    return "there" if present else "absent"


class Sheet:
    """One drafter's files while they are resolved.

    ``top`` and ``eagle`` are the config and its ``eagle_config``, ``layer`` is where the sizes
    of the layer stand. ``tokens`` says that the token strings of drafter and target are equal,
    and is None when they could not be compared. ``pending`` is set when only the target can
    settle something.
    """

    def __init__(
        self,
        files: Files,
        dialect: Dialect,
        where: str,
        target: TargetLike | None,
        boundaries: Sequence[int] | None,
        ledger: Ledger,
        tokens: Sourced | None = None,
    ) -> None:
        self.files, self.dialect, self.where = files, dialect, where
        self.target, self.given, self.ledger = target, boundaries, ledger
        self.tokens = tokens
        self.traits = TRAITS[dialect]
        self.top = Fields(files.config, where)
        self.eagle = self.top.child("eagle_config")
        self.layer = self._layer_fields()
        self.tensors = canonical_names(files.tensors, self.layer.data)
        self.pending: ContractError | None = None

    def shape(self, name: str, dims: int = 2) -> tuple[int, ...]:
        """Shape of a tensor that must be there, under its canonical name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.files.folder / self.files.weights}: tensor {name} is missing",
                got=f"{len(self.tensors)} tensors: {', '.join(sorted(self.tensors)[:6])}, ...",
                remedy="The file is no whole EAGLE-3 drafter; fetch or write it again.",
            )
        if tensor.dim() != dims:
            raise CheckpointError(
                f"tensor {name} has {tensor.dim()} dimensions, not {dims}",
                got=tuple(tensor.shape),
            )
        return tuple(tensor.shape)

    def lie(self, name: str, said: object, tensor: str, shown: object) -> CheckpointError:
        """The error for a config that states what a tensor refutes."""
        return CheckpointError(
            f"{self.where}: {name} is {said}, but {tensor} has {tuple(self.tensors[tensor].shape)}",
            got=f"{shown} from the tensor",
            remedy="Config and weights do not belong together; correct the config.",
        )

    def sized(self, name: str, tensor: str, value: int) -> int:
        """A size that a tensor shows and the config, if it says it, must repeat."""
        said = self.layer.get(name, int)
        if said is not None and said.origin is Origin.read and said.value != value:
            raise self.lie(name, said.value, tensor, value)
        return value

    def flag(self, *names: str, eagle_first: bool = False) -> Sourced | None:
        """A boolean that may stand at top level or inside ``eagle_config``."""
        places = [self.top, self.eagle]
        if self.dialect is Dialect.speculators:
            places.append(self.layer)
        if eagle_first:
            places[:2] = [self.eagle, self.top]
        found = [v for fields in places for n in names if (v := fields.get(n, bool)) is not None]
        if len({f.value for f in found}) > 1:
            listed = ", ".join(f"{f.value} ({f.where})" for f in found)
            self.ledger.conflict(f"{names[0]} is said twice: {listed}; the first was taken")
        return found[0] if found else None

    def _layer_fields(self) -> Fields:
        """Where the sizes of the layer stand; speculators nests a diff to a class's defaults."""
        if self.dialect is not Dialect.speculators:
            return self.top
        nested = self.top.child("transformer_layer_config")
        kind = nested.get("model_type", str)
        if kind is None:
            # speculators would read qwen3, vLLM llama: the tensors decide.
            normed = any(n.endswith("self_attn.q_norm.weight") for n in self.files.tensors)
            where = f"{nested.where}: model_type is absent, QK norms are {there(normed)}"
            kind = Sourced(value="qwen3" if normed else "llama", origin=Origin.assumed, where=where)
            self.ledger.note(f"{where}: {kind.value}; speculators reads qwen3, vLLM llama")
        name = self.ledger.take("model_type", kind)
        if name not in CONFIG_MAPPING:
            raise CheckpointError(
                f"{nested.where}: model_type is unknown to transformers", got=name
            )
        data = deepcopy(dict(nested.data))  # transformers edits what it is given
        for name_of_other in ("rope_parameters", "rope_scaling", "layer_types", "model_type"):
            data.pop(name_of_other, None)
        try:
            defaults = CONFIG_MAPPING[name](**data).to_dict()
        except Exception as error:
            raise CheckpointError(
                f"{nested.where} is no {name} config", got=str(error).strip().splitlines()[-1]
            ) from None
        defaults.pop("rope_parameters", None)
        return Fields(
            nested.data, nested.where, defaults=defaults, default_of=f"transformers' {name}"
        )
