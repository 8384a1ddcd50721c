"""One HTML page a run: the answer first, then the table, the figures, and how it was made.

The page loads nothing: styles are inline, images are base64, a content policy forbids the
rest. Everything that comes from the run (prompt ids, notes, config) is escaped.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from driftlab.results.answers import (
    Answer,
    answers,
    basis,
    effects,
    load,
    preferred,
    summary,
    summary_table,
)
from driftlab.results.drawing import PAGE, own_style
from driftlab.results.figures import FIGURES, available
from driftlab.results.records import RunDirectory, Tables
from driftlab.results.shards import atomic_file, remove_dead
from driftlab.results.slices import TextKind, take, text_kinds, without_conditions
from driftlab.results.stats import Estimate, count_comparisons

__all__ = ["Answer", "answers", "summary_table", "write_report"]

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 Georgia, "Times New Roman", serif; color: #111; background: #fff;
  max-width: 52rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #bbb; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; }
.answers dt { font-size: .85rem; color: #555; margin-top: .8rem; }
.answers dd { margin: 0; }
.answers dd.none { color: #444; }
small, figcaption, .basis { font-size: .82rem; color: #444; }
figure { margin: 1rem 0; break-inside: avoid; }
img { max-width: 100%; height: auto; }
img.column { width: 48%; min-width: min(100%, 20rem); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; margin: .5rem 0;
  font-variant-numeric: tabular-nums; }
thead { border-top: 2px solid #111; border-bottom: 1px solid #111; }
tbody { border-bottom: 2px solid #111; }
th, td { padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top; }
td small { white-space: nowrap; }
pre { font-size: .78rem; overflow-x: auto; background: #f4f4f4; padding: .6rem;
  white-space: pre-wrap; }
.flag { background: #fff3cd; padding: 0 .2rem; }
@media print { body { max-width: none; font-size: 10pt; padding: 0; } .scroll { overflow: visible; }
  a { color: inherit; text-decoration: none; } h2 { break-after: avoid; } pre { background: none; }
  table { font-size: 7pt; } th, td { padding-right: .3rem; } }
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    run: RunDirectory | Tables,
    path: str | Path,
    *,
    images: Mapping[str, Mapping[str, Path]] | None = None,
) -> Path:
    """Write the page of ``run`` to ``path`` and return it.

    ``images`` is what :func:`driftlab.results.figures.save_figures` returned for the same run,
    so that nothing is drawn twice.

    Raises RunError when the run is not finished, ResourceError when the disk is full.
    """
    tables = load(run)
    manifest = tables.manifest
    config = manifest.get("config")
    name = (config.get("name") if isinstance(config, Mapping) else None) or "run"
    kinds = text_kinds(tables)
    parts = [
        f"<h1>{_text(name)}</h1>",
        _question(config),
        _answers(answers(tables), kinds, basis(tables)),
        _headline(tables, kinds[0], "What each variant does"),
        _effects(tables),
        _figures(tables, images or {}),
        *(_other_text(tables, kind) for kind in kinds[1:]),
        _texts(tables),
        _cells(tables),
        _assumed(manifest.get("assumed")),
        _made(manifest),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(name)} - driftlab</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )
    path = Path(path)
    remove_dead(path.parent, path.name)
    with atomic_file(path) as handle:
        handle.write(page.encode())
    return path


def _text(value: object) -> str:
    return escape(str(value))


def _question(config: object) -> str:
    question = config.get("question") if isinstance(config, Mapping) else ""
    return f"<p><em>{_text(question)}</em></p>" if question else ""


def _answers(found: Sequence[Answer], kinds: Sequence[TextKind], over: str) -> str:
    rows = []
    for answer in found:
        negative = "no evidence" in answer.sentence.lower()
        p = answer.p.get("effect", math.nan)
        details = [answer.basis]
        if not math.isnan(p):
            family = _family(found, answer)
            among = count_comparisons(family)
            details.append(f"p = {p:.2g} after Holm's correction for {among}")
        details += _seeds(answer.estimates.get("effect"))
        rows.append(
            f"<dt>{_text(answer.question)}</dt>"
            f"<dd{' class=none' if negative else ''}>{_text(answer.sentence)}<br>"
            f"<small>{_text('; '.join(details))}</small></dd>"
        )
    others = ", ".join(str(k) for k in kinds[1:])
    note = f"These numbers come from {over}; comparisons are paired by prompt and seed." + (
        f" {others[:1].upper()}{others[1:]} is reported apart, below." if others else ""
    )
    return (
        f'<h2>The answer</h2><p class="basis">{_text(note)}</p>'
        f'<dl class="answers">{"".join(rows)}</dl>'
    )


def _family(found: Sequence[Answer], answer: Answer) -> int:
    """Comparisons that are corrected together with ``answer``'s."""
    explored = answer.role == "exploratory"
    family = [a for a in found if (a.role == "exploratory") == explored]
    return sum(not math.isnan(a.p.get("effect", math.nan)) for a in family)


def _seeds(effect: Estimate | None) -> list[str]:
    if effect is None or effect.seeds < 2:
        return []
    each = ", ".join(f"{v:.3g}" for v in effect.by_seed)
    low, high = effect.over_prompts
    out = [f"by seed: {each}"]
    if not math.isnan(low):
        out.append(f"over prompts alone [{low:.3g}, {high:.3g}]")
    return out


def _headline(tables: Tables, kind: TextKind, title: str) -> str:
    numbers = summary(tables, kind)
    columns = list(dict.fromkeys(c for row in numbers.values() for c in row))
    piece = take(tables, preferred(tables, "free", "forced"), kind)
    apart = {g.label: words for g in piece.groups if (words := piece.apart(g))}
    rows = [
        [
            f"{label}, {apart[label]}" if label in apart else label,
            *(_number(row[c]) if c in row else "n/a" for c in columns),
        ]
        for label, row in numbers.items()
    ]
    caption = (
        f"{basis(tables, kind)}. Acceptance length counts the bonus token, accepted drafts "
        "do not; both weight prompts alike unless pooled over rounds. Growth is a ratio of "
        "geometric mean RMS. @ marks the depth."
    )
    if any(group.condition for group in piece.groups):
        caption += " Fed back: as handed on, before a condition changes it on its way."
    return f"<h2>{_text(title)}</h2>" + _table(["variant", *columns], rows, caption)


def _effects(tables: Tables) -> str:
    found = effects(tables)
    if not found:
        return ""
    columns = list(dict.fromkeys(c for row in found.values() for c in row))
    rows = [
        [n, *(_number(row[c]) if c in row else "" for c in columns)] for n, row in found.items()
    ]
    caption = (
        "Differences of means, ratios for growth. A main effect averages over the other norm; an "
        "interaction is the effect of post-norm feedback with that fusion norm against none."
    )
    return "<h2>The two norms apart</h2>" + _table(["effect", *columns], rows, caption)


class _Html(str):
    """Text that is HTML already."""


def _number(e: Estimate) -> _Html:
    value, _, interval = e.short.partition(" ")
    return _Html(f"{_text(value)}<br><small>{_text(interval)}</small>")


def _table(head: Iterable[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    def cell(value: object) -> str:
        return f"<td>{value if isinstance(value, _Html) else _text(value)}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    header = "".join(f"<th>{_text(h)}</th>" for h in head)
    said = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return (  # the caption stays in sight when a wide table scrolls
        f'<figure>{said}<div class="scroll"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _figures(tables: Tables, images: Mapping[str, Mapping[str, Path]]) -> str:
    out = ["<h2>Figures</h2>"]
    tables = without_conditions(tables)
    for name, reason in available(tables).items():
        spec = FIGURES[name]
        if reason:
            out.append(f"<p><small>{_text(spec.title)}: not drawn, {_text(reason)}.</small></p>")
            continue
        frame = spec.data(tables, None)
        if name in images:
            png = images[name]["png"].read_bytes()
        else:
            buffer = BytesIO()
            with own_style():
                figure = spec.figure(frame)
                figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
            png = buffer.getvalue()
        image = base64.b64encode(png).decode()
        caption = _text(spec.caption(frame))
        size = ' class="column"' if spec.width < PAGE else ""
        out.append(
            f'<figure><img{size} alt="{_text(spec.title)}" src="data:image/png;base64,{image}">'
            f"<figcaption>{caption} <code>{_text(name)}</code></figcaption></figure>"
        )
    return "".join(out)


def _other_text(tables: Tables, kind: TextKind) -> str:
    return _headline(tables, kind, f"The same on {kind}")


def _texts(tables: Tables) -> str:
    import pandas as pd

    prompts = tables.prompts.assign(condition="")
    if not len(prompts):
        return ""
    if "texts" in tables.extra:
        prompts = pd.concat([prompts, tables.extra["texts"]], ignore_index=True)
    counts = (
        prompts.groupby(["condition", "category", "text"], observed=True)
        .agg(
            texts=("prompt", "size"),
            loops=("loops", "sum"),
            tokens=("n_text", "sum"),
            anchors=("n_anchors", "sum"),
        )
        .reset_index()
    )
    rows = counts.astype(object).to_numpy().tolist()
    out = ["<h2>Texts</h2>"]
    head = ["condition", "category", "text", "texts", "looping", "tokens", "anchors"]
    if not any(row[0] for row in rows):
        head, rows = head[1:], [row[1:] for row in rows]
    out.append(_table(head, rows))
    loops = prompts[prompts["loops"].astype(bool)]
    if len(loops):
        each = zip(loops["prompt"], loops["text"], loops["condition"], strict=True)
        names = [f"{p} ({', '.join(filter(None, (t, c)))})" for p, t, c in each]
        shown = "".join(f'<li><span class="flag">{_text(n)}</span></li>' for n in names[:50])
        more = f"<li>and {len(names) - 50} more</li>" if len(names) > 50 else ""
        mode = preferred(tables, "free", "forced")
        kept = {
            f"{texts.kind}{f' of {condition}' if condition else ''}": None
            for k in text_kinds(tables)
            for condition, texts in take(tables, mode, k).texts.items()
            if texts.all_loop
        }
        but = f", but for {' and '.join(kept)}, of which all texts loop" if kept else ""
        out.append(
            f"<p>{len(loops)} of {len(prompts)} texts loop. Looping text flatters every drafter, "
            f"so it is left out of the numbers above{but}:</p><ul>{shown}{more}</ul>"
        )
    else:
        out.append("<p>No text loops.</p>")
    return "".join(out)


def _cells(tables: Tables) -> str:
    names = ["cell", "axis", "condition", "status", "ttt", "train_steps", "train_tokens"]
    names += ["train_loss", "coverage", "n_parameters", "note"]
    rows = [[_plain(v) for v in row] for row in tables.cells[names].astype(object).to_numpy()]
    caption = "trained: one drafter a cell; applied: toggled on a trained drafter, not retrained."
    return "<h2>Cells</h2>" + _table(names, rows, caption)


def _plain(value: Any) -> str:
    if value is None or type(value).__name__ == "NAType" or value != value:  # NA compares to NA
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _assumed(assumed: object) -> str:
    out = ["<h2>What was assumed</h2>"]
    if not assumed:
        out.append("<p>Nothing: every value was read or derived.</p>")
    elif isinstance(assumed, Mapping):
        rows = [[name, *_sourced(value)] for name, value in assumed.items()]
        out.append(_table(["what", "value", "where it comes from"], rows))
    else:
        items = assumed if isinstance(assumed, list | tuple) else [assumed]
        out.append("<ul>" + "".join(f"<li>{_text(_json(i))}</li>" for i in items) + "</ul>")
    return "".join(out)


def _sourced(value: object) -> tuple[str, str]:
    if isinstance(value, Mapping) and "value" in value:
        return _json(value["value"]), str(value.get("where", ""))
    return _json(value), ""


def _json(value: object, indent: int | None = None) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str, indent=indent)


_SKIPPED = {"config", "assumed", "command", "stages", "tables"}


def _made(manifest: Mapping[str, Any]) -> str:
    out = ["<h2>How it was made</h2>"]
    if command := manifest.get("command"):
        line = command if isinstance(command, str) else " ".join(map(str, command))
        out.append(f"<p>Command:</p><pre>{_text(line)}</pre>")
    if stages := manifest.get("stages"):
        rows = [[n, s.get("seconds"), s.get("peak_mib")] for n, s in stages.items()]
        out.append(_table(["stage", "wall time (s)", "peak memory so far (MiB)"], rows))
    rest = [[k, _json(v)] for k, v in sorted(manifest.items()) if k not in _SKIPPED]
    out.append(_table(["key", "value"], rest))
    if tables := manifest.get("tables"):
        rows = [[n, t.get("rows"), str(t.get("sha256"))[:16]] for n, t in tables.items()]
        out.append(_table(["table", "rows", "sha256"], rows))
    out.append(f"<h3>Config</h3><pre>{_text(_json(manifest.get('config'), indent=1))}</pre>")
    return "".join(out)
