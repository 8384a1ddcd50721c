"""Captured states and fc, fusion norm, residual and feedback."""

from __future__ import annotations

from typing import Any

from driftlab.config import Feedback, FusionNorm, Origin, Residual
from driftlab.errors import CheckpointError, ContractError
from driftlab.models.checkpoints.boundaries import IDS, layer_ids
from driftlab.models.checkpoints.dialects import Dialect
from driftlab.models.checkpoints.sheet import Sheet, there


def resolve_fusion(sheet: Sheet, hidden: int) -> dict[str, Any]:
    """Number of captured states and the target's width, from fc."""
    ledger = sheet.ledger
    use = sheet.flag("use_aux_hidden_state")
    has_fc = "fc.weight" in sheet.tensors
    if use is not None and use.value != has_fc:
        raise CheckpointError(
            f"{use.where} is {use.value}, but fc.weight is {there(has_fc)}",
            remedy="Config and weights do not belong together.",
        )
    if not has_fc:
        if use is None:
            sheet.shape("fc.weight")  # raises: an EAGLE-3 drafter without fc says so
        width = _target_width(sheet)
        if width not in (None, hidden):
            raise ContractError(
                f"a drafter without fc reads the target's state of width {hidden}",
                got=f"target width {width}",
            )
        ledger.derived("target_hidden_size", hidden, "no fc: the target's own width")
        return {"target_hidden_size": hidden, "n_states": 0}
    wide = sheet.shape("fc.weight")[1]
    width = _target_width(sheet)
    counts = _counts(sheet)
    if width is None:
        width = _guess_width(sheet, wide, hidden, counts)
    states, rest = divmod(wide, width)
    if rest:
        raise CheckpointError(
            f"fc expects {wide} input features, no multiple of the target's width",
            got=f"{width} ({ledger.provenance['target_hidden_size'].where})",
            remedy=f"If it captures 3 states, the target's width is {wide / 3:g}; "
            "state target_hidden_size in the config.",
        )
    for count, place in counts:
        if count != states:
            raise CheckpointError(
                f"fc expects {wide} = {states} x {width}, but {place} names {count} state(s)",
                got=f"fc.weight {sheet.shape('fc.weight')}",
                remedy="Correct the config; the weights decide.",
            )
    return {"target_hidden_size": width, "n_states": states}


def _target_width(sheet: Sheet) -> int | None:
    said = sheet.top.get("target_hidden_size", int)
    has = sheet.target.hidden_size if sheet.target is not None else None
    if said is not None:
        if has is not None and said.value != has:
            raise ContractError(
                f"the drafter was made for a target of width {said.value} ({said.where})",
                got=f"a target of width {has}",
                remedy="Give the drafter's own target.",
            )
        if said.value <= 0:
            raise CheckpointError(f"{said.where} must be above 0", got=said.value)
        return sheet.ledger.take("target_hidden_size", said)
    if has is not None:
        return sheet.ledger.derived("target_hidden_size", has, "the target")
    return None


def _counts(sheet: Sheet) -> list[tuple[int, str]]:
    """Every statement of the config on how many states are captured."""
    found = []
    for fields, name in (
        (sheet.top, "num_aux_hidden_states"),
        (sheet.top, "num_aux_layers"),
        (sheet.eagle, "num_aux_hidden_states"),
    ):
        said = fields.get(name, int)
        if said is not None:
            found.append((said.value, said.where))
    for fields in (sheet.top, sheet.eagle):
        ids = layer_ids(fields)
        if ids is not None:
            found.append((len(set(ids)), f"{fields.where}, {IDS}"))
    norms = {n for n in sheet.tensors if n.startswith("fc_norm.")}
    if norms:
        found.append((len(norms), "the number of fc_norm tensors"))
    if sheet.given is not None:
        found.append((len(sheet.given), "the argument boundaries"))
    return found


def _guess_width(sheet: Sheet, wide: int, hidden: int, counts: list[tuple[int, str]]) -> int:
    for count, place in counts:
        if count > 0 and wide % count == 0:
            return sheet.ledger.derived(
                "target_hidden_size", wide // count, f"fc's {wide} inputs over {place}"
            )
    if wide % hidden == 0:
        return sheet.ledger.assumed(
            "target_hidden_size", hidden, "target_hidden_size is absent, the drafter's width"
        )
    if wide % 3 == 0:
        sheet.ledger.note(
            f"fc expects {wide} = 3 x {wide // 3}, the drafter's own width is {hidden}"
        )
        return sheet.ledger.assumed(
            "target_hidden_size", wide // 3, f"a third of fc's {wide} inputs"
        )
    raise CheckpointError(
        f"fc expects {wide} input features, which no number of states explains",
        got=f"drafter width {hidden}, no target_hidden_size",
        remedy="State target_hidden_size in the config, or give the target.",
    )


def resolve_norms(sheet: Sheet) -> dict[str, Any]:
    """Fusion norm, residual and feedback: tensors and flags must agree."""
    per_layer = any(n.startswith("fc_norm.") for n in sheet.tensors)
    concat = "input_norm.weight" in sheet.tensors
    flags = {
        "fc_norm": (sheet.flag("fc_norm", "use_aux_norm"), per_layer, "fc_norm.*.weight"),
        "norm_before_fc": (
            sheet.flag("norm_before_fc", eagle_first=True),
            concat,
            "input_norm.weight",
        ),
    }
    for name, (said, present, tensor) in flags.items():
        wanted = said.value if said is not None else False
        if wanted != present and not sheet.ledger.overridden("fusion_norm"):
            place = said.where if said is not None else f"{sheet.where}, {name} (absent)"
            raise CheckpointError(
                f"{place} is {'on' if wanted else 'off'}, but {tensor} is {there(present)}",
                remedy=f"Set {name} as the drafter was trained, or override fusion_norm.",
            )
    kind = {
        (False, False): FusionNorm.none,
        (True, False): FusionNorm.per_layer,
        (False, True): FusionNorm.concat,
        (True, True): FusionNorm.concat_per_layer,
    }[per_layer, concat]
    if kind is FusionNorm.concat_per_layer:
        sheet.ledger.note("both fusion norms are there: concat first, then per layer, as vLLM")
    sheet.ledger.derived("fusion_norm", kind, "norm tensors, and flags that agree")
    out: dict[str, Any] = {"fusion_norm": kind}
    out["residual"] = _residual(sheet)
    out["feedback"], out["logits_from_raw"] = _feedback(sheet)
    return out


def _residual(sheet: Sheet) -> Residual:
    said = sheet.flag("norm_before_residual")
    if said is None:
        if sheet.dialect is Dialect.speculators:
            sheet.ledger.note(
                "norm_before_residual is absent: off as speculators' class, vLLM turns it on"
            )
            return sheet.ledger.assumed("residual", Residual.raw, "norm_before_residual absent")
        return sheet.ledger.derived(
            "residual", Residual.raw, f"norm_before_residual is absent, {sheet.dialect}"
        )
    wish = Residual.normed if said.value else Residual.raw
    if said.value and not sheet.traits.residual_flag:
        sheet.ledger.note(f"{said.where} is on, but {sheet.dialect} trains without it")
        return sheet.ledger.assumed(
            "residual", Residual.raw, f"{sheet.dialect} does not know norm_before_residual"
        )
    modelopt = sheet.dialect in {Dialect.modelopt_hf, Dialect.modelopt_megatron}
    origin = Origin.assumed if said.value and modelopt else Origin.read
    if origin is Origin.assumed:
        sheet.ledger.note(f"{said.where} is on; ModelOpt's templates say so of raw residuals too")
    return sheet.ledger.put("residual", wish, origin, said.where)


def _feedback(sheet: Sheet) -> tuple[Feedback, bool]:
    ledger, rule = sheet.ledger, sheet.traits.norm_output
    said = sheet.flag("norm_output", "return_hidden_post_norm")
    guessed = ledger.provenance["dialect"].origin is Origin.assumed
    if rule == "head":
        raw_head = said is not None and not said.value
        origin = Origin.derived if said is None else Origin.assumed
        if said is not None:
            ledger.note(
                f"{said.where} is {said.value}: SpecForge before #879 feeds back the raw state "
                "with either, and reads the raw state in its head when off; engines feed back "
                "the normed state when on"
            )
        ledger.put("logits_from_raw", raw_head, origin, "SpecForge's norm_output")
        feedback = ledger.put(
            "feedback", Feedback.pre_norm, origin, "SpecForge before #879 never norms it"
        )
        return feedback, ledger["logits_from_raw"]
    ledger.derived("logits_from_raw", False, f"{sheet.dialect} reads the normed state")
    if said is None:
        feedback = ledger.derived(
            "feedback", Feedback.pre_norm, f"norm_output is absent, {sheet.dialect}"
        )
    elif rule == "no" and not said.where.endswith("return_hidden_post_norm"):
        if said.value:
            ledger.note(f"{said.where} is on, but {sheet.dialect} trains without it")
        feedback = ledger.put(
            "feedback",
            Feedback.pre_norm,
            Origin.assumed if said.value else Origin.read,
            f"{sheet.dialect} does not know norm_output",
        )
    else:
        if said.value and guessed:
            ledger.note(
                f"{said.where} is on: the normed state is fed back, unless SpecForge before "
                "#879 wrote the file"
            )
        feedback = ledger.put(
            "feedback",
            Feedback.post_norm if said.value else Feedback.pre_norm,
            Origin.assumed if guessed else Origin.read,
            said.where,
        )
    return feedback, ledger["logits_from_raw"]
