"""What an experiment asks, held against what it will measure, before anything is made.

Here and not in the settings, which stored runs are read with: a run that is there stays readable.
"""

from __future__ import annotations

from driftlab.analysis.interventions import from_settings
from driftlab.config import Contrast, Experiment, Feedback, FusionNorm, Level, Residual
from driftlab.errors import ConfigError
from driftlab.experiment.plan import variants

_WORDS: dict[str, tuple[Level, ...]] = {
    "fusion_norm": tuple(n for n in FusionNorm if n is not FusionNorm.concat_per_layer),
    "feedback": tuple(Feedback),
    "residual": tuple(Residual),
    "attention_gate": (False, True),
}
_LENGTHS = ("accepted drafts", "share of own length")


def check_experiment(experiment: Experiment) -> None:
    """Raise ConfigError for two names of one thing, a setting without an effect, or a comparison
    that no run could answer."""
    _check_depth(experiment)
    _check_steps(experiment)
    _check_alignment(experiment)
    _check_conditions(experiment)
    for contrast in _contrasts(experiment):
        if fault := _fault(experiment, contrast):
            raise ConfigError(
                f"the registered comparison of {contrast.measure} by {contrast.factor} cannot be "
                f"answered: {fault}",
                remedy="Correct [analysis] before the run begins; later it counts as changed.",
            )


def unmeasured(experiment: Experiment) -> list[str]:
    """Levels of registered comparisons that this run trains no drafter of, in words.

    Not refused: the run may be a part of one that is merged.
    """
    if experiment.applied is not None and experiment.applied.drafters:
        return []
    trained = experiment.levels()
    found = {
        f"{factor} {level}": None
        for contrast in _contrasts(experiment)
        for factor, level in _named(contrast)
        if factor != "condition" and level not in trained[factor]
    }
    if not found:
        return []
    return [
        f"registered comparisons name {', '.join(found)}, which this run does not train: it "
        "answers them only when merged with one that does"
    ]


def _contrasts(experiment: Experiment) -> list[Contrast]:
    asked = experiment.analysis
    return [] if asked is None else [asked.primary, *asked.family]


def _named(contrast: Contrast) -> list[tuple[str, Level]]:
    """Every (factor, level) that ``contrast`` names."""
    return [*((contrast.factor, level) for level in contrast.levels), *contrast.at.items()]


def _fault(experiment: Experiment, contrast: Contrast) -> str | None:
    measure = experiment.measure
    mode = "forced" if contrast.measure == "forced accuracy" else "free"
    if mode not in measure.modes:
        return f"no {mode} chains are measured"
    depth = contrast.depth or measure.depth
    if contrast.measure in _LENGTHS and contrast.depth is not None:
        return f"a length has no depth, and depth {depth} is named"
    if depth > measure.depth:
        return f"depth {depth} is beyond measure.depth = {measure.depth}"
    if contrast.measure == "growth" and depth == 1:
        return "growth from depth 1 to depth 1 is none"
    conditions = () if experiment.applied is None else experiment.applied.conditions
    names = ("", *(condition.name for condition in conditions))
    for factor, level in _named(contrast):
        if factor in _WORDS or factor == "condition":
            known: tuple[Level, ...] = names if factor == "condition" else _WORDS[factor]
            if level not in known:
                there = ", ".join(str(name) or "the empty one" for name in known)
                return f"{factor} has no level {level!r}, only {there}"
        elif isinstance(level, bool | str) or level < 0:
            return f"{factor} has no level {level!r}: it is a number"
    if fault := _left_out(experiment, contrast):
        return fault
    if contrast.measure == "share of own length":
        held = contrast.at.get("condition")
        if contrast.factor != "condition" and not held:
            return "at names no condition to take the share under"
    return None


def _left_out(experiment: Experiment, contrast: Contrast) -> str | None:
    """A level that this run trains and measures, but not under a condition that is named."""
    applied = experiment.applied
    if applied is None or applied.drafters:
        return None  # what another run trained is known when it is read
    trained = variants(experiment)
    named = _named(contrast)
    for condition in applied.conditions:
        if ("condition", condition.name) not in named:
            continue
        kept = [
            v
            for v in trained
            if v.name in (applied.variants or [v.name])
            and v.name in (condition.variants or [v.name])
        ]
        for factor, level in named:
            has = {v.name for v in trained if factor != "condition" and getattr(v, factor) == level}
            if has and has.isdisjoint(v.name for v in kept):
                names = ", ".join(v.name for v in kept)
                return f"condition {condition.name} is measured on {names}, not on {factor} {level}"
    return None


def _check_depth(experiment: Experiment) -> None:
    text, depth = experiment.text, experiment.measure.depth
    new = text.measure_new_tokens or text.max_new_tokens
    if depth >= new:  # a chain reads the first new token and is held against those after it
        raise ConfigError(
            f"measure.depth = {depth} needs texts of {depth + 1} new tokens",
            got=f"{new} at most",
            remedy="Raise text.max_new_tokens or text.measure_new_tokens, or lower measure.depth.",
        )


def _check_steps(experiment: Experiment) -> None:
    """Scales that round to the same number of steps would be two names of one training."""
    seen: dict[int, float] = {}
    for scale in experiment.levels()["steps_scale"]:
        steps = round(scale * experiment.train.steps)
        if steps < 1 or steps in seen:
            raise ConfigError(
                f"steps_scale {scale:g} of train.steps = {experiment.train.steps} trains "
                + ("no step" if steps < 1 else f"{steps} steps, as {seen[steps]:g} does"),
                remedy="Leave it out, or raise train.steps.",
            )
        seen[steps] = scale


def _check_alignment(experiment: Experiment) -> None:
    layer, given = experiment.train.align_layer, experiment.applied
    if given is not None and given.drafters:
        return  # it is compared with what that run trained with
    if layer is not None and not any(experiment.levels()["alignment"]):
        raise ConfigError(
            "train.align_layer changes nothing: no drafter is trained with alignment",
            got=layer,
            remedy="Leave it out, or set train.alignment or axes.alignment above 0.",
        )


def _check_conditions(experiment: Experiment) -> None:
    applied = experiment.applied
    seen: dict[tuple[object, ...], str] = {}
    for condition in () if applied is None else applied.conditions:
        made = tuple(from_settings(one) for one in condition.interventions)
        usual = {n: None for n in ("template", "bos") if getattr(condition, n) == "auto"}
        condition = condition.model_copy(update=usual)
        if not (made or condition.quantize or condition.changes_text):
            raise ConfigError(
                f"condition {condition.name} changes nothing",
                got=f"{' and '.join(usual)} auto, as they are without it",
                remedy="It would be labelled as one that does: correct or remove it.",
            )
        rest = condition.model_dump(mode="json", exclude={"name", "interventions"})
        key = (made, *((n, str(v)) for n, v in rest.items()))
        if key in seen:
            raise ConfigError(
                f"the conditions {seen[key]} and {condition.name} are the same",
                remedy="Remove one: a condition has one name.",
            )
        seen[key] = condition.name
