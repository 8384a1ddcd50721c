"""Reading a target from a folder, a hub id or a GGUF file, with every fault as one clear error."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GgufConfig,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import cached_file

from driftlab.config import Origin, Provenance, Sourced
from driftlab.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DriftlabError,
    ResourceError,
    first_line,
    lacks_memory,
)
from driftlab.files import refuse_irregular
from driftlab.models.checkpoints.read import expanded
from driftlab.models.gguf_header import GgufHeader, read_gguf_header
from driftlab.models.memory import free_bytes, size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_WEIGHTS = (".safetensors", ".bin")
# Not part of what a model computes, so not part of its fingerprint.
_UNHASHED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
_SUPPORTED = ((5, 24), (6, 0))  # the cache's API changed in 5.24


def load_model(
    source: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    device_map: Any,
    tp_plan: str | None,
    trust_remote_code: bool,
) -> tuple[Any, Any | None, Provenance]:
    """Model, tokenizer (None when there is none) and provenance; see ``Target.load`` for errors."""
    _check_transformers()
    if dtype not in DTYPES:
        raise ConfigError("unknown dtype", got=dtype, remedy=f"Use one of {', '.join(DTYPES)}.")
    gguf = source.endswith(".gguf")
    read = {"revision": revision, "trust_remote_code": trust_remote_code}
    quantization: str | None = None
    n_bytes: int | None = None
    header: GgufHeader | None = None
    name, has_tokenizer = source, True
    if gguf:
        path = expanded(source)
        header = read_gguf_header(path)
        quantization = f"gguf {header.types}, dequantized"
        n_bytes = header.elements * DTYPES[dtype].itemsize
        name = str(path.parent)
        file = {"gguf_file": path.name}
        extra: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    else:
        file, extra = {}, {}
        folder = expanded(source)
        if os.path.isdir(folder):
            name = str(folder)
            if revision is not None:
                raise CheckpointError(
                    f"{folder} is a local folder and has no revision",
                    got=revision,
                    remedy="Leave the revision away, or work where no folder is named like the hub "
                    "id.",
                )
            _check_folder(folder)
            n_bytes = _bytes_in_memory(folder, DTYPES[dtype])
            has_tokenizer = any((folder / part).exists() for part in _TOKENIZER_FILES)
        elif os.path.exists(folder) or source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise CheckpointError(
                "the target is neither a folder, a .gguf file nor a hub id",
                got=source,
                remedy="Check the path; a hub id looks like owner/name.",
            )
    if device_map is None and tp_plan is None and torch.device(device).type == "cpu":
        _check_memory(n_bytes, source)

    _check_placement(device_map, tp_plan)
    placement = {"device_map": device_map, "tp_plan": tp_plan}
    how = {k: v for k, v in placement.items() if v is not None} | read | file | extra
    with _stage(f"reading {source}"), _quiet(), _as_checkpoint_error(source):
        cls: Any = AutoModelForCausalLM if gguf else _auto_class(name, read)
        model, report = cls.from_pretrained(
            name, dtype=DTYPES[dtype], output_loading_info=True, **how
        )
        raw, commit = ({}, None) if gguf else _config_as_written(name, revision)
    left_out = _check_report(report, model, source)
    _check_constants(model.config, source)
    if header is not None:
        _check_gguf(header, model, source)
    if device_map is None and tp_plan is None:
        model = model.to(device)
    tokenizer = None
    if has_tokenizer:
        what = f"tokenizer of {source}"
        with _stage(f"reading {what}"), _quiet(), _as_checkpoint_error(what):
            tokenizer = AutoTokenizer.from_pretrained(name, **read, **file)

    quantization = quantization or _quantization(model.config, raw)
    provenance = {
        "source": Sourced(value=source, origin=Origin.read, where="argument"),
        "revision": Sourced(
            value=commit or revision,
            origin=Origin.read,
            where="hub snapshot" if commit else "argument",
        ),
        "trust_remote_code": Sourced(value=trust_remote_code, origin=Origin.read, where="argument"),
        "placement": Sourced(
            value={"device_map": device_map, "tp_plan": tp_plan},
            origin=Origin.read,
            where="argument",
        ),
        "quantization": Sourced(value=quantization, origin=Origin.read, where="checkpoint"),
        "dtype": Sourced(
            value=dtype,
            origin=Origin.read,
            where=f"argument; stored as {quantization if gguf else _stored_dtype(raw)}",
        ),
        "tokenizer": Sourced(
            value=type(tokenizer).__name__ if tokenizer is not None else None,
            origin=Origin.read,
            where="checkpoint" if has_tokenizer else "the folder has no tokenizer file",
        ),
    }
    if left_out:
        provenance["tensors left out"] = Sourced(
            value=", ".join(left_out[:4])
            + (f" and {n - 4} more" if (n := len(left_out)) > 4 else ""),
            origin=Origin.assumed,
            where=f"in the files, and no part of {type(model).__name__}",
        )
    if not gguf:
        provenance |= _unstated(raw, model.config)
    return model, tokenizer, provenance


_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def _check_placement(device_map: Any, tp_plan: str | None) -> None:
    if tp_plan is not None and os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        raise ConfigError(
            "tp_plan splits a target over processes, and there is one",
            got=tp_plan,
            remedy="Start them with torchrun, one a device, or leave tp_plan out.",
        )
    if not isinstance(device_map, str) or device_map in _MAPS:
        return
    try:
        device = torch.device(device_map)
    except RuntimeError:
        raise ConfigError(
            "device_map is neither a device nor a way to spread layers",
            got=device_map,
            remedy=f"Give a device such as cuda:0, or {', '.join(_MAPS)}.",
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device_map names a GPU, and this machine or this torch has none",
            got=device_map,
            remedy="Use cpu or auto, or install the build of torch for the GPU.",
        )


def _auto_class(name: str, how: dict[str, Any]) -> Any:
    """The class that reads a causal LM, or the one for models that also see."""
    config = AutoConfig.from_pretrained(name, **how)
    refuse_encoder_decoder(config, name)  # its weights do not fit a causal LM, whole as they are
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def refuse_encoder_decoder(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ContractError(
            f"{name} is an encoder-decoder", remedy="The target must be a causal LM."
        )


def _config_as_written(name: str, revision: str | None) -> tuple[dict[str, Any], str | None]:
    """config.json without the library's defaults, and the commit of a hub id: both of the
    snapshot that the library has just loaded, without asking the hub again."""
    path = Path(str(cached_file(name, "config.json", revision=revision, local_files_only=True)))
    commit = None if os.path.isdir(name) else path.parent.name
    return json.loads(path.read_text(encoding="utf-8")), commit


def _check_transformers() -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not _SUPPORTED[0] <= version < _SUPPORTED[1]:
        raise ConfigError(
            "driftlab works with transformers 5.24 or later, below 6",
            got=transformers.__version__,
            remedy="pip install 'transformers>=5.24,<6'",
        )


def _check_folder(folder: Path) -> None:
    """Raise CheckpointError when a file that must be there is not, or is not what it must be."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHTS or not path.is_dir():
            refuse_irregular(path, CheckpointError)
    if not os.path.isfile(folder / "config.json"):
        raise CheckpointError(
            f"{folder} holds no config.json", remedy="Give the folder that save_pretrained wrote."
        )
    settings = folder / "generation_config.json"  # where texts end; the library reads on without
    if settings.is_file():
        try:
            json.loads(settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{settings} cannot be read", got=error, remedy="Fetch it again, or remove it."
            ) from None
    indexes = sorted(folder.glob("*.index.json"))
    if any(folder.glob("model*.safetensors")):  # the library reads nothing else then
        indexes = [i for i in indexes if i.name == "model.safetensors.index.json"]
    for index in indexes:
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = set(places.values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{index} is not an index of shards", got=repr(error), remedy="Fetch it again."
            ) from None
        outside = [s for s in shards if not isinstance(s, str) or not s or s != Path(s).name]
        if outside:
            raise CheckpointError(
                f"{index} sends tensors out of its folder",
                got=repr(outside[0]),
                remedy="A shard is a file beside its index; do not load files from this source.",
            )
        lost = sorted(shard for shard in shards if not os.path.isfile(folder / shard))
        if lost:
            raise CheckpointError(
                f"{folder}: {len(lost)} of {len(shards)} weight files are missing",
                got=", ".join(lost[:4]),
                remedy=f"Fetch the files that {index.name} names.",
            )
        _check_shards(folder, index.name, places)
    if not any(p.suffix in _WEIGHTS and p.is_file() for p in folder.iterdir()):
        raise CheckpointError(
            f"{folder} holds no weights",
            got=", ".join(sorted(p.name for p in folder.iterdir())[:8]),
            remedy="Expected model.safetensors, or shards with their index.",
        )


def _bytes_in_memory(folder: Path, dtype: torch.dtype) -> int:
    """What the weights take once they are ``dtype``; files that the library leaves alone, as
    copies in another layout, do not count."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return _as_dtype(folder / name, dtype)
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return sum(_as_dtype(folder / shard, dtype) for shard in shards)
    return 0


def _as_dtype(file: Path, dtype: torch.dtype) -> int:
    """Bytes of one file's tensors; quantized ones, and other files than safetensors, as stored."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return size
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                held = tensors.get_slice(name)
                if stored := _FLOATS.get(held.get_dtype()):
                    size += (dtype.itemsize - stored) * math.prod(held.get_shape())
    except (SafetensorError, OSError):
        pass  # said when it is read
    return size


_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

# Fields of HuggingFace's configs that move numbers, and the names that a rotation has had.
EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_MOVING = (
    *EPS,
    "hidden_act",
    "activation_function",
    "max_position_embeddings",
)
_ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_emb_base")


def _unstated(raw: dict[str, Any], config: Any) -> Provenance:
    """Fields that config.json leaves to the defaults of a class of transformers: assumed."""
    text = config.get_text_config(decoder=True)
    stated = {**raw, **(raw.get("text_config") or {})}
    absent = [n for n in _MOVING if getattr(text, n, None) is not None and n not in stated]
    if getattr(text, "rope_parameters", None) and not any(n in stated for n in _ROTARY):
        absent.append("rope_parameters")
    return {
        f"config.{n}": Sourced(
            value=getattr(text, n),
            origin=Origin.assumed,
            where=f"absent from config.json, default of {type(text).__name__}",
        )
        for n in absent
    }


def _check_shards(folder: Path, index: str, places: dict[str, str]) -> None:
    """The library reads every tensor of every shard, and the last one of a name wins."""
    for shard in sorted(set(places.values())):
        if not shard.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / shard, framework="pt") as file:
                stale = [n for n in file.keys() if places.get(n, shard) != shard]  # noqa: SIM118
        except (SafetensorError, OSError):
            continue  # said when it is read
        if stale:
            raise CheckpointError(
                f"{folder}: {shard} holds tensors that {index} places elsewhere",
                got=", ".join(sorted(stale)[:4]),
                remedy="Fetch the files again: two copies of a tensor, and one of them is stale.",
            )


def _check_report(report: dict[str, Any], model: Any, source: str) -> list[str]:
    """Tensors of the files that belong to no part of the model, such as another head.

    HuggingFace only logs what it did not find, and leaves it at random values; and what it could
    not place, and goes on without it.
    """
    missing, wrong = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    unexpected = sorted(n for n in report["unexpected_keys"] if not n.endswith(_CONSTANT))
    modules = dict(model.named_modules())
    dropped = [n for n in unexpected if not n.endswith(_SERVED) and _inside(n, modules, model)]
    found = {"missing": missing, "wrong shape": wrong, "without a place": dropped}
    if any(found.values()):
        raise CheckpointError(
            f"{source}: {sum(map(len, found.values()))} tensors do not fit the model",
            got="; ".join(f"{k}: {', '.join(v[:4])}" for k, v in found.items() if v),
            remedy="Weights and config.json belong to different models, or a file is incomplete.",
        )
    return unexpected


def _check_constants(config: Any, source: str) -> None:
    """Constants that the library takes as they stand, and that leave nothing of a state."""
    text = config.get_text_config(decoder=True)
    epsilons = {name: value for name in EPS if (value := getattr(text, name, None)) is not None}
    wrong = [f"{name} {value}" for name, value in epsilons.items() if not 0 <= value < 1]
    rope = getattr(text, "rope_parameters", None) or {}
    for stated in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        factor = stated.get("factor")
        if factor is not None and not factor > 0:
            wrong.append(f"rope factor {factor}")
    if wrong:
        raise CheckpointError(
            f"{source}: config.json holds constants that no model has",
            got=", ".join(wrong),
            remedy="Fetch config.json again; an epsilon is small, a factor above 0.",
        )


def _check_gguf(header: GgufHeader, model: Any, source: str) -> None:
    """The library reads a list of fields and tensors that it knows, and no others."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if header.scaling is not None and rope.get("rope_type", "default") == "default":
        raise CheckpointError(
            f"{source} scales its rotations, and transformers does not read that",
            got=header.scaling,
            remedy="Load the model from its original folder; its states would be wrong.",
        )
    blocks = tuple(f"blk.{i}." for i in range(text.num_hidden_layers))
    others = sum(
        size
        for name, size in header.sizes.items()
        if name.startswith("rope_f") or (name.startswith("blk.") and not name.startswith(blocks))
    )
    surplus = header.elements - others - sum(p.numel() for p in model.parameters())
    if surplus > 0:
        raise CheckpointError(
            f"{source} holds tensors that {type(model).__name__} has no place for",
            got=f"{surplus} numbers more than the model",
            remedy="transformers does not read this kind of file whole; use the original folder.",
        )


# Tables that old files carry along, and scales for a server that keeps its cache in 8 bits.
_CONSTANT = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
_SERVED = (".k_scale", ".v_scale", ".kv_scale")


def _inside(name: str, modules: dict[str, Any], model: Any) -> bool:
    """Whether a tensor belongs to a part that the model has, as the bias of one of its layers."""
    while name := name.rpartition(".")[0]:
        part = modules.get(name)
        if part is not None:
            holds_all = part in (model, model.base_model, model.get_decoder())
            return not holds_all and not isinstance(part, torch.nn.ModuleList)
    return False


def _quantization(config: Any, raw: dict[str, Any]) -> str | None:
    """Method of quantized weights, and whether loading turned them back into plain ones."""
    stored = getattr(config, "quantization_config", None)
    plain = stored is None
    if plain:
        text = raw.get("text_config") or {}
        stored = raw.get("quantization_config") or text.get("quantization_config")
    if stored is None:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    return str(getattr(method, "value", method)) + (", dequantized" if plain else "")


def _check_memory(n_bytes: int | None, source: str) -> None:
    free = free_bytes()
    if free is not None and n_bytes is not None and n_bytes > free:
        raise ResourceError(
            f"{source} needs about {size(n_bytes)} of memory",
            got=f"{size(free)} free",
            remedy="Load in a smaller dtype, on a GPU, or with device_map.",
        )


def _stored_dtype(raw: dict[str, Any]) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "unstated")


def too_large(what: str, error: BaseException) -> ResourceError:
    """For a target that memory ran out under."""
    return ResourceError(
        what, got=first_line(error), remedy="Load in a smaller dtype, or with device_map."
    )


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Whatever a third-party loader raises becomes one of ours, with its reason kept."""
    try:
        yield
    except DriftlabError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise too_large(f"{what} does not fit in memory", error) from None
        raise CheckpointError(
            f"{what} cannot be loaded",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Check that the files are complete (fetch them again) and of a causal LM. "
            "Code in a checkpoint runs only with trust_remote_code.",
        ) from error


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """A line on the terminal that counts the seconds of a stage.

    The parsing of a GGUF file takes a minute and tells nobody how far it is.
    """
    with tqdm(desc=name, bar_format="{desc} {elapsed}", leave=False, disable=None) as bar:
        over = threading.Event()

        def tick() -> None:
            while not over.wait(0.5):
                bar.refresh()

        ticker = threading.Thread(target=tick, daemon=True)
        if not bar.disable:
            ticker.start()
        try:
            yield
        finally:
            over.set()
            if not bar.disable:
                ticker.join()


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars of third parties: they show some stages and hide the long ones."""
    bars, gguf = transformers.utils.logging, modeling_gguf_pytorch_utils
    shown, gguf_bar = bars.is_progress_bar_enabled(), gguf.tqdm
    bars.disable_progress_bar()
    gguf.tqdm = functools.partial(gguf_bar, disable=True)  # has no switch of its own
    try:
        yield
    finally:
        gguf.tqdm = gguf_bar
        if shown:
            bars.enable_progress_bar()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over devices, in one piece; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def fingerprint(model: Any, *, owner: str) -> str:
    """sha256 over a model's config and all its weights, in one cheap pass.

    Per tensor it takes the name, shape, dtype, 256 sampled values, and the exact sum of the
    bits read as integers, which any single changed value moves.

    Raises
    ------
    ResourceError: weights off-loaded to disk.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNHASHED}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ResourceError(
                f"{owner}: {name} is not in memory, so the target has no fingerprint",
                remedy="Use a device_map that does not off-load to disk.",
            )
        flat = whole(tensor).detach().reshape(-1)
        bits = flat.view(integers[flat.element_size()])
        sample = bits[:: max(1, len(bits) // 256)].tolist()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {flat.dtype} {total} {sample}".encode())
    return digest.hexdigest()
