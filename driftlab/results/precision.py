"""What a manifest says of the target's precision, in one line."""

from __future__ import annotations

from typing import Any


def precision_note(found: dict[str, Any] | None) -> str:
    """``manifest.precision`` for a person; "" when there is nothing to say."""
    if not found:
        return ""
    said = []
    if found["ties"]:
        said.append(
            f"the target's best token is tied at {found['ties']} of {found['positions']} positions"
        )
    if reason := found.get("not_compared"):
        said.append(f"{found['dtype']} was not compared with float32: {reason}")
    elif found["dtype"] != "float32":
        first = found["first_other_choice"]
        said.append(
            f"{found['dtype']} moves a logit by at most {found['largest_logit_difference']:.3g} "
            f"and the choice at {found['other_choices']} of {found['positions']} positions"
        )
        if first:
            kind = "rounding" if first["within_rounding"] else "MORE THAN ROUNDING"
            said.append(
                f"first at index {first['index']} of text {first['text']}, where float32's two "
                f"best logits are {first['gap']:.3g} apart ({kind})"
            )
    return "; ".join(said)
