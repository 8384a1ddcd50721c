"""Which residual streams are captured (docs/checkpoints.md, Boundaries)."""

from __future__ import annotations

from driftlab.config import Origin
from driftlab.errors import CheckpointError, ConfigError, ContractError
from driftlab.models.checkpoints.dialects import EXPORT_KEY, Dialect
from driftlab.models.checkpoints.fields import Fields
from driftlab.models.checkpoints.sheet import Sheet

IDS = "eagle_aux_hidden_state_layer_ids"


def layer_ids(fields: Fields) -> list[int] | None:
    """The list as it is written; None when it is absent, null or empty."""
    ids = fields.data.get(IDS)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise CheckpointError(f"{fields.where}: {IDS} is no list of integers", got=repr(ids))
    return ids


def resolve_boundaries(sheet: Sheet, states: int) -> tuple[int, ...] | None:
    ledger = sheet.ledger
    n = sheet.target.n_layers if sheet.target is not None else None
    if sheet.given is not None:
        ids = tuple(sorted(sheet.given))
        if states != len(ids):
            raise ContractError(f"the drafter captures {states} state(s)", got=f"boundaries {ids}")
        _inside(ids, n, "the argument boundaries")
        return ledger.put("boundaries", ids, Origin.read, "argument")
    if states == 0:
        return ledger.derived("boundaries", (), "no fc: the target's post-final-norm state")
    exported = sheet.top.child(EXPORT_KEY).data.get("boundaries")
    if exported is not None:
        if not isinstance(exported, list) or any(type(i) is not int for i in exported):
            raise CheckpointError(f"{EXPORT_KEY}.boundaries is no list of integers", got=exported)
        ids = tuple(exported)
        if len(ids) != states:
            raise CheckpointError(
                f"fc reads {states} captured state(s), {EXPORT_KEY}.boundaries names {len(ids)}",
                got=exported,
                remedy="Correct the config, or export the drafter again.",
            )
        _inside(ids, n, f"{EXPORT_KEY}.boundaries")
        # As exports write them: boundaries at top level, the blocks before them in eagle_config.
        for fields, shift in ((sheet.top, 0), (sheet.eagle, 1)):
            listed = layer_ids(fields)
            if listed is not None and (read := [i + shift for i in listed]) != exported:
                ledger.conflict(
                    f"{fields.where}: {IDS} {listed}, which engines read as boundaries {read}, "
                    f"contradicts {EXPORT_KEY}.boundaries {exported}; the latter was taken"
                )
        return ledger.put("boundaries", ids, Origin.read, f"{EXPORT_KEY}.boundaries")
    top, nested = layer_ids(sheet.top), layer_ids(sheet.eagle)
    if top is None and nested is None:
        return _default(sheet, states, n)
    return _listed(sheet, top, nested, n)


def _listed(
    sheet: Sheet, top: list[int] | None, nested: list[int] | None, n: int | None
) -> tuple[int, ...]:
    ledger = sheet.ledger
    written = top if top is not None else nested or []
    if written != sorted(set(written)):
        ledger.note(f"{IDS} {written} was sorted; states are concatenated ascending")
    ids = sorted(set(written))
    convention, origin, why = _convention(sheet, top, nested, n)
    if ids[-1] == n and origin is not Origin.read:
        convention, origin = "entry", Origin.derived
        why = f"{ids} counted as blocks leaves the target's {n} layers"
    ledger.put("boundary_convention", convention, origin, why)
    convention = ledger["boundary_convention"]
    if convention not in {"entry", "output"}:
        raise ConfigError("boundary_convention is entry or output", got=convention)
    shift = 1 if convention == "output" else 0
    found = tuple(i + shift for i in ids)
    if origin is Origin.assumed and not ledger.overridden("boundary_convention"):
        other = tuple(i + 1 - shift for i in ids)
        ledger.note(
            f"{IDS} {ids} was read as boundaries {found} ({why}); "
            f"the text alone would also allow {other}"
        )
    _inside(found, n, IDS)
    origin = ledger.provenance["boundary_convention"].origin
    return ledger.put("boundaries", found, origin, f"{IDS} {ids}, convention {convention}")


def _convention(
    sheet: Sheet, top: list[int] | None, nested: list[int] | None, n: int | None
) -> tuple[str, Origin, str]:
    """What an id means depends on where it stands and who wrote it."""
    if top is not None:
        if nested is not None and top != nested:
            sheet.ledger.conflict(
                f"{IDS} at top level {top} and in eagle_config {nested} differ; the first was taken"
            )
        known = sheet.dialect is Dialect.speculators or nested == top
        return "entry", Origin.read if known else Origin.assumed, "list at top level"
    torchspec = sheet.dialect in {Dialect.torchspec_gqa, Dialect.torchspec_mla}
    trained_names = any(name.startswith("midlayer.") for name in sheet.files.tensors)
    if torchspec and sheet.top.data.get("model_type") == "kimi_k2" and not trained_names:
        # Its export for vLLM adds one to the ids of this type, wherever they stand.
        shifted = n is not None and sorted(set(nested or [])) == sorted({2, n // 2, n - 3})
        why = "its default after the export for vLLM" if shifted else "unless exported for vLLM"
        kind = "entry" if shifted else "output"
        return kind, Origin.assumed, f"list in eagle_config, {sheet.dialect}, {why}"
    ids = sheet.traits.ids
    decisive = sheet.ledger.provenance["dialect"].origin is not Origin.assumed and (
        sheet.dialect in {Dialect.torchspec_gqa, Dialect.torchspec_mla, Dialect.specforge}
        or sheet.traits.fixed_ids
    )
    origin = Origin.derived if decisive else Origin.assumed
    return ids, origin, f"list in eagle_config, {sheet.dialect}"


def _default(sheet: Sheet, states: int, n: int | None) -> tuple[int, ...] | None:
    if n is None:
        sheet.pending = ContractError(
            "the config names no captured layers, and the default depends on the target",
            got=f"fc with {states} state(s)",
            remedy="Give the target: --target, or target= in Python.",
        )
        return None
    ids = tuple(sorted({2, n // 2, n - 3}))
    if len(ids) != states or ids[0] < 0:
        raise ContractError(
            f"the config names no captured layers, and the default {ids} of a target with "
            f"{n} layers does not fit",
            got=f"fc with {states} state(s)",
            remedy=f"Write them into the drafter's config.json as {IDS} in eagle_config; in Python "
            "boundaries= names residual streams.",
        )
    origin = Origin.derived if sheet.traits.fixed_ids else Origin.assumed
    return sheet.ledger.put(
        "boundaries", ids, origin, f"none named, default (2, n//2, n-3) with n = {n}"
    )


def _inside(ids: tuple[int, ...], n: int | None, place: str) -> None:
    bad = [i for i in ids if i < 0 or (n is not None and i > n)]
    if bad or len(set(ids)) != len(ids):
        raise ContractError(
            f"{place}: {bad[0] if bad else ids} is not one of 0..{n or 'n'}, each once",
            got=f"boundaries {ids}",
            remedy="Give the drafter's own target, or correct them in the drafter's config.json.",
        )
