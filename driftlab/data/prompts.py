"""Prompts: packaged sets, users' files, and the way from a prompt to token ids.

Whether a chat template is used and whether a BOS token stands in front moves the attention
sink, so both are explicit policies, and :class:`Rendered` keeps what came of them.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from driftlab.errors import DataError
from driftlab.files import named_once, refuse_irregular

TemplatePolicy = Literal["auto", "always", "never"]
BosPolicy = Literal["auto", "always", "never"]

SETS = ("held-out", "train")
PLAIN = "plain"  # the category of text to continue; ``auto`` uses no template for it
FIELDS = ("turns", "messages", "prompt", "text")

# Some templates print today's date; tokens must not depend on it.
_TODAY = datetime(2025, 1, 1)
_ASKS_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True)
class Prompt:
    """One user turn.

    Attributes
    ----------
    id: unique in its set and safe as a file name.
    category: ``chat``, ``code``, ``maths``, ``plain`` in the packaged sets; any word in files.
    text: the user turn, or the text to continue when ``category`` is ``plain``.
    system: system prompt; None leaves it to the template (some add one of their own).
    """

    id: str
    category: str
    text: str
    system: str | None = None


@dataclass(frozen=True)
class Rendered:
    """A prompt as token ids.

    Attributes
    ----------
    tokens: the ids, at least one.
    first_token: ``tokens[0]``; the candidate for the attention sink, BOS or not.
    bos: a BOS token stands in front. An id that the template repeats as its turn marker
        (``<|im_start|>`` of ChatML models, which some tokenizers also call BOS) does not count.
    template_sha: SHA-256 (hex) of the chat template's source when it was used.
    template_used: the chat template was applied.
    """

    tokens: tuple[int, ...]
    first_token: int
    bos: bool
    template_sha: str | None
    template_used: bool


@dataclass(frozen=True)
class Rendering:
    """A named way to render: the two policies, a system prompt that overrides the prompt's, and
    text ``before`` the user turn's own."""

    name: str
    template: TemplatePolicy = "auto"
    bos: BosPolicy = "auto"
    system: str | None = None
    before: str = ""

    def __call__(self, prompt: Prompt, tokenizer: Any, *, limit: int | None = None) -> Rendered:
        """:func:`render` under this rendering."""
        if self.system is not None:
            prompt = replace(prompt, system=self.system)
        if self.before:
            prompt = replace(prompt, text=f"{self.before}\n\n{prompt.text}")
        return render(prompt, tokenizer, self.template, self.bos, limit=limit)


def load_prompts(source: str | Path) -> list[Prompt]:
    """Read a packaged set (``held-out``, ``train``) or a ``.jsonl`` file, one object a line.

    Each object has one of the fields below (the first one found, in this order, is read):

    - ``turns``: list of user turns, as MT-bench, HumanEval and GSM8K files have them. The first
      turn is the prompt: a later turn needs an answer to the one before.
    - ``messages``: list of ``{"role", "content"}``; the first user message is the prompt, the
      system message before it, if any, the system prompt. Content in parts of text is joined.
    - ``prompt``: a user turn.
    - ``text``: text to continue.

    and may have ``id`` or ``question_id``, ``category`` and ``system``. The category defaults
    to ``plain`` for ``text`` and to ``chat`` otherwise. Other fields are ignored. Texts are taken
    as they are: markup in them, special tokens included, stays text.

    Raises
    ------
    DataError: no such set or file, no prompts in it, a line that is not a JSON object (with its
        number), a missing, empty or mistyped field, an id that occurs twice.
    """
    name = str(source)
    if name in SETS:
        resource = resources.files("driftlab.data") / "sets" / f"{name}.jsonl"
        return _parse(resource.read_bytes(), stem=name, where=f"packaged set {name}")
    path = Path(source)
    refuse_irregular(path, DataError)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"prompts {name}: no such set or file",
            remedy=f"Use one of {', '.join(SETS)}, or the path of a .jsonl file.",
        ) from None
    except OSError as error:
        raise DataError(
            f"prompts {name} cannot be read", got=error.strerror, remedy="Give a readable file."
        ) from None
    return _parse(raw, stem=path.stem, where=name)


def load_filler(source: str | Path, tokenizer: Any, tokens: int) -> str:
    """Text of about ``tokens`` tokens to stand before prompts, the same for all of them.

    ``source``: a ``.txt`` file, or prompts as :func:`load_prompts` takes them, whose texts are
    joined. Text that is too short is repeated.

    Raises
    ------
    DataError: as :func:`load_prompts`, or an empty file.
    """
    if str(source).endswith(".txt"):
        refuse_irregular(Path(source), DataError)
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"filler {source} cannot be read", got=error, remedy="Give a UTF-8 .txt file."
            ) from None
    else:
        text = "\n\n".join(prompt.text for prompt in load_prompts(source))
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    if not ids:
        raise DataError(f"filler {source} holds no text", remedy="Give a file with text in it.")
    ids = (list(ids) * (1 + tokens // len(ids)))[:tokens]
    return str(tokenizer.decode(ids))


def _parse(raw: bytes, *, stem: str, where: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    lines_of: dict[str, int] = {}
    for number, record in records(raw, where):
        prompt = _prompt(record, stem, number, f"{where}, line {number}")
        if prompt.id in lines_of:
            raise DataError(
                f"{where}, line {number}: id occurs twice, first in line {lines_of[prompt.id]}",
                got=prompt.id,
                remedy="Ids must differ (also after characters unsafe in file names became -).",
            )
        lines_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{where}: no prompts in it", remedy="Put one JSON object on each line.")
    return prompts


def records(raw: bytes, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. Raises DataError for another line."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}, line {number}: not UTF-8", got=error.reason, remedy="Save it as UTF-8."
            ) from None
        if not text:
            continue
        try:
            record = json.loads(text, object_pairs_hook=named_once)
        except (ValueError, RecursionError) as error:  # also nested too deep, numbers too long
            why = str(error).removesuffix("(char 0)").splitlines()[0].strip()
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg}, column {error.colno}"
            raise DataError(
                f"{where}, line {number}: not JSON ({why})",
                got=f"{text[:60]!r}",
                remedy="Each line must be one JSON object.",
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{where}, line {number}: not a JSON object",
                got=f"{text[:60]!r}",
                remedy='Each line must be one JSON object, such as {"prompt": "..."}.',
            )
        yield number, record


def whole(what: str, value: str, where: str) -> None:
    """Raise DataError for half a surrogate pair in ``value``."""
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(
            f"{where}: {what} holds half a surrogate pair, which no text encoding has",
            got=f"{value!r:.60}",
            remedy="Write such characters as UTF-8, or as both halves.",
        )


def _prompt(record: dict[str, Any], stem: str, number: int, where: str) -> Prompt:
    field = next((f for f in FIELDS if f in record), None)
    if field is None:
        raise DataError(
            f"{where}: none of the fields {', '.join(FIELDS)}",
            got=", ".join(record) or "an empty object",
            remedy='Name the prompt\'s field, for example {"prompt": "..."}.',
        )
    system = record.get("system")
    text: Any = record[field]
    if field == "turns":
        text = text[0] if isinstance(text, list) and text else None
    elif field == "messages":
        text, system = (joined(part, where) for part in _first_exchange(text, system, where))
    if not isinstance(text, str) or not text.strip():
        form = {"turns": "Give a list that opens with", "messages": "Give messages that hold"}
        raise DataError(
            f"{where}: {field} holds no text",
            got=f"{record[field]!r:.60}",
            remedy=f"{form.get(field, 'Give')} a non-empty string.",
        )
    if system is not None and not isinstance(system, str):
        raise DataError(
            f"{where}: system is not a string",
            got=f"{system!r:.60}",
            remedy="Give a string, or leave it out.",
        )
    category = record.get("category", PLAIN if field == "text" else "chat")
    if not isinstance(category, str) or not category:
        raise DataError(
            f"{where}: category is not a word",
            got=f"{category!r:.60}",
            remedy="Give a word, or leave it out.",
        )
    for what, value in ((field, text), ("system", system or ""), ("category", category)):
        whole(what, value, where)
    name = _name(record, stem, number, where)
    return Prompt(re.sub(r"[^A-Za-z0-9._-]+", "-", name), category, text, system)


def _name(record: dict[str, Any], stem: str, number: int, where: str) -> str:
    """The id, or one made of the file's name and ``question_id`` or the line's number."""
    for field in ("id", "question_id"):
        value = record.get(field)
        if field not in record:
            continue
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise DataError(
                f"{where}: {field} is neither a word nor a whole number",
                got=f"{value!r:.60}",
                remedy="Give one, or leave it out: lines are numbered.",
            )
        return str(value) if field == "id" else f"{stem}-{value}"
    return f"{stem}-{number:04d}"


def joined(content: Any, where: str) -> Any:
    """Content in parts, as chat services take it, as one text; any other as it is."""
    if not isinstance(content, list):
        return content
    parts = [p if isinstance(p, dict) else {} for p in content]
    texts = [p.get("text") if p.get("type") == "text" else None for p in parts]
    if not all(isinstance(t, str) for t in texts):
        raise DataError(
            f"{where}: a message has parts that are no text",
            got=f"{content!r:.60}",
            remedy='Only parts {"type": "text", "text": "..."} are read.',
        )
    return "".join(map(str, texts))


def _first_exchange(messages: Any, system: Any, where: str) -> tuple[Any, Any]:
    """First user message, and the system message before it when there is one."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(
            f"{where}: messages is not a list of objects",
            got=f"{messages!r:.60}",
            remedy='Use [{"role": "user", "content": "..."}].',
        )
    for message in messages:
        if message.get("role") == "system":
            system = message.get("content")
        elif message.get("role") == "user":
            return message.get("content"), system
        else:
            break  # an assistant that speaks first is no prompt
    raise DataError(
        f"{where}: messages does not open with a user message",
        got=[m.get("role") for m in messages],
        remedy="The roles must be user, or system and then user; later messages are not read.",
    )


def render(
    prompt: Prompt,
    tokenizer: Any,
    template: TemplatePolicy = "auto",
    bos: BosPolicy = "auto",
    *,
    limit: int | None = None,
) -> Rendered:
    """Turn a prompt into token ids, ready for the target to continue.

    Parameters
    ----------
    template: ``auto`` applies the tokenizer's chat template when it has one, but not to prompts
        of the category ``plain``; ``always`` also to those; ``never`` joins system prompt and
        text by a blank line.
    bos: ``auto`` leaves BOS to the template, or to the tokenizer where no template is used;
        ``always`` puts a BOS in front unless one stands there; ``never`` takes it away, also
        when it stands there twice. No other token is ever dropped.
    limit: longest prompt allowed, in tokens.

    Text that spells a special token (``<|im_end|>``) is encoded as ordinary characters. A
    template that prints the date gets 2025-01-01.

    Raises
    ------
    DataError: an unknown policy, a template or BOS that is asked for and does not exist, a
        template that refuses the prompt or drops its system prompt, an empty rendering, one that
        has ended already, more than ``limit`` tokens.
    """
    for policy, value in (("template", template), ("bos", bos)):
        if value not in get_args(TemplatePolicy):
            raise DataError(
                f"unknown {policy} policy", got=value, remedy="Use auto, always or never."
            )
    source = None if template == "never" else _template_source(tokenizer)
    if template == "always" and source is None:
        raise DataError(
            "the tokenizer has no chat template",
            remedy="Render with template = auto or never.",
        )
    use = source is not None and (
        template == "always" or (template == "auto" and prompt.category != PLAIN)
    )
    if use and source is not None:
        tokens = _with_template(prompt, tokenizer, source)
    else:
        joined = prompt.text if not prompt.system else f"{prompt.system}\n\n{prompt.text}"
        tokens = tokenizer.encode(joined, add_special_tokens=True, split_special_tokens=True)
    tokens, has_bos = _apply_bos(tokens, tokenizer, bos, prompt.id)
    if not tokens:
        raise DataError(
            f"prompt {prompt.id} renders to no tokens",
            remedy="Give it text, or a BOS token (bos = always).",
        )
    _refuse_ended(tokens, tokenizer, prompt.id)
    if limit is not None and len(tokens) > limit:
        raise DataError(
            f"prompt {prompt.id} is longer than the limit of {limit} tokens",
            got=f"{len(tokens)} tokens",
            remedy="Shorten or remove it, or use a target with a longer context.",
        )
    sha = sha256(source.encode()).hexdigest() if use and source is not None else None
    return Rendered(tuple(tokens), tokens[0], has_bos, sha, use)


def _template_source(tokenizer: Any) -> str | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise DataError(
            "the tokenizer has several chat templates and none is called default",
            got=", ".join(tokenizer.chat_template),
            remedy="Name one of them default, or render with template = never.",
        ) from None


def _with_template(prompt: Prompt, tokenizer: Any, source: str) -> list[int]:
    user = {"role": "user", "content": prompt.text}
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    tokens = _applied([*system, user], prompt.id, tokenizer, source)
    unlike = {"role": "user", "content": f"{prompt.text} x"}
    if tokens == _applied([*system, unlike], prompt.id, tokenizer, source):
        raise DataError(
            f"the chat template drops the text of prompt {prompt.id}",
            got=f"{prompt.text!r:.60}",
            remedy="Correct the template of the target's tokenizer, or use template = never.",
        )
    # Another one is the test, not none: a template's own system prompt may be asked for.
    other = {"role": "system", "content": f"{prompt.system} x"}
    if prompt.system and tokens == _applied([other, user], prompt.id, tokenizer, source):
        raise DataError(
            f"the chat template drops the system prompt of prompt {prompt.id}",
            got=f"{prompt.system!r:.60}",
            remedy="Leave the system prompt out, or put it into the user's turn.",
        )
    return tokens


def _applied(
    messages: list[dict[str, str]], prompt_id: str, tokenizer: Any, source: str
) -> list[int]:
    dated = _ASKS_DATE.sub(lambda m: repr(_TODAY.strftime(m[2])), source)
    if re.search(r"strftime_now\s*\(", dated):
        raise DataError(
            "the chat template prints today's date in a form that it computes",
            remedy="Write the form into its call of strftime_now, or render with template = never.",
        )
    try:
        with _limited(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                chat_template=dated,
            )
    except TimeoutError:
        raise DataError(
            f"the chat template does not end for prompt {prompt_id}",
            got=f"{TEMPLATE_SECONDS} s",
            remedy="Correct the template of the target's tokenizer, or use template = never.",
        ) from None
    except Exception as error:  # jinja2's own classes, and whatever a template raises
        raise DataError(
            f"the chat template refuses prompt {prompt_id}",
            got=error,
            remedy="Drop the system prompt if it names one, or render with template = never.",
        ) from error


TEMPLATE_SECONDS = 20  # a checkpoint brings its template, which may loop for ever


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; in other threads than the first, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    start = time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if left:  # the caller's own alarm goes on, late rather than never
            left = max(left - (time.monotonic() - start), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, again)


def _refuse_ended(tokens: list[int], tokenizer: Any, prompt_id: str) -> None:
    """Raise DataError for a prompt whose end token is followed by white space at most."""
    for token in reversed(tokens[1:]):
        if token == tokenizer.eos_token_id:
            raise DataError(
                f"prompt {prompt_id} ends with the end token, after which nothing is an answer",
                got=repr(tokenizer.decode([token])),
                remedy="Turn off add_eos_token in tokenizer_config.json, or use a chat template "
                "that opens the answer (add_generation_prompt).",
            )
        if tokenizer.decode([token]).strip():
            return


def _apply_bos(
    tokens: list[int], tokenizer: Any, bos: BosPolicy, prompt_id: str
) -> tuple[list[int], bool]:
    bos_id = tokenizer.bos_token_id
    if bos_id is None and bos == "always":
        raise DataError(
            f"prompt {prompt_id}: the tokenizer has no BOS token",
            remedy="Render with bos = auto or never.",
        )
    # Some templates print one where the tokenizer adds one, too. An id that comes again later is
    # the template's turn marker, not a BOS.
    run = next((i for i, token in enumerate(tokens) if token != bos_id), len(tokens))
    has_bos = run > 0 and bos_id not in tokens[run:]
    if bos == "always" and not has_bos:
        return [bos_id, *tokens], True
    if bos == "never" and has_bos:
        return tokens[run:], False
    return tokens, has_bos
