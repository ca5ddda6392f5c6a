"""Chat templates: render messages to one prompt, with the Jinja template of the model or of the operator.

A template is third-party code, so it runs in a sandbox (`sandbox.py`), cannot change its input, and has a budget of
time and output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from weft.base.errors import InvalidField, ModelError, OptionError, RequestError
from weft.text.sandbox import Sandbox, budget
from weft.text.tokenizer import read_json

MAX_CHARACTERS = 1 << 24
# Of a template that the operator passes as a file.
MAX_TEMPLATE_BYTES = 1 << 20
# Names that rendering sets, besides those of the sandbox and of the model's special tokens.
SET_NAMES: tuple[str, ...] = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
SET_NAMES += ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Characters that a template may build on the way, for each one that it may write.
WORK = 16
Message = Mapping[str, Any]
# Templates write roles where no client text belongs.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
ROLE_FORM = "must be a word: a letter, then up to 31 letters, digits, underscores and dashes"


RESERVED = "is set by the server and cannot be a variable of the chat template"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment(clock: Callable[[], datetime]) -> Sandbox:
    environment = Sandbox()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _compile(environment: Sandbox, source: str) -> jinja2.Template:
    try:
        return environment.compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
    except (SyntaxError, RecursionError, ValueError, OverflowError) as error:
        # Python compiles what Jinja makes of a template, and refuses deep nesting.
        raise ModelError(f"the chat template cannot be compiled: {str(error).splitlines()[0]}") from None


class ChatTemplate:
    """A template and the special tokens that it may name; some models have another one for use with tools."""

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str] | None = None,
        *,
        with_tools: str | None = None,
        clock: Callable[[], datetime] = datetime.now,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self.source = source
        self.tool_source = with_tools
        self._specials = dict(specials or {})
        self._max_characters = max_characters
        environment = _environment(clock)
        self._template = _compile(environment, source)
        self._with_tools = self._template if with_tools is None else _compile(environment, with_tools)
        # Names that are not free for a caller's variables.
        self.reserved = frozenset((*SET_NAMES, *self._specials, *environment.globals))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. `variables` are additional names that this model's template knows."""
        for name in self.reserved.intersection(variables or ()):
            raise InvalidField(f"chat_template_kwargs.{name}", RESERVED)
        values = {
            **self._specials,
            **(variables or {}),
            "messages": [plain_message(message, place) for place, message in enumerate(check_messages(messages))],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        # Any failure of third-party code on the caller's messages is an error of this request alone.
        try:
            return self._bounded(self._with_tools if tools else self._template, values)
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise InvalidField("messages", f"do not fit the model's chat template: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(f"the model's chat template failed on these messages: {error!r}") from None

    def _bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_characters
        with budget(WORK * room):
            for piece in template.generate(values):
                room -= len(piece)
                if room < 0:
                    raise RequestError(f"the chat template wrote more than {self._max_characters} characters")
                pieces.append(piece)
        return "".join(pieces)


def check_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Check that messages form a conversation; errors name the message."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidField("messages", "must be a list of at least one message with role and content")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidField(f"messages[{place}]", f"must be an object with role and content, got {message!r}")
        if not isinstance(message.get("role"), str):
            raise InvalidField(f"messages[{place}].role", f"must be a string, got {message.get('role')!r}")
        if not is_role(message["role"]):
            raise InvalidField(f"messages[{place}].role", f"{ROLE_FORM}, got {message['role']!r:.80}")
    return messages


def is_role(text: str) -> bool:
    """
    >>> is_role("tool-2"), is_role("user<|end|>")
    (True, False)
    """
    return _ROLE.fullmatch(text) is not None


def plain_message(message: Message, place: int) -> dict[str, Any]:
    """Return a message with text as its content: parts of type "text" are joined, others refused."""
    content = message.get("content")
    kept = {name: value for name, value in message.items() if name != "cache_control"}
    if isinstance(content, str) or (content is None and "content" in message) or "tool_calls" in message:
        return kept
    if not isinstance(content, Sequence):
        raise InvalidField(f"messages[{place}].content", f"must be a string or a list of parts, got {content!r}")
    kept["content"] = "".join(_part_text(part, place) for part in content)
    return kept


def _part_text(part: Any, place: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidField(
            f"messages[{place}].content", f'must have parts {{"type": "text", "text": ...}}, got {part!r}'
        )
    return str(part["text"])


def read_template(path: Path, specials: Mapping[str, str]) -> ChatTemplate:
    """Return the chat template in a file that the operator chose."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        source = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"chat_template: cannot read {path}: {what}") from None
    if len(data) > MAX_TEMPLATE_BYTES:
        raise OptionError(f"chat_template: {path} has more than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return ChatTemplate(source, specials)
    except ModelError as error:
        raise OptionError(f"chat_template: {path}: {error}") from None


def load_template(folder: Path, specials: Mapping[str, str], chosen: str | None = None) -> ChatTemplate | None:
    """Return the `chosen` file, or the model's own: chat_template.jinja, or that of a configuration file, or None.

    A file may have several under names; "tool_use" is for conversations with tools, "default" for the others.
    """
    if chosen is not None:
        return read_template(Path(chosen), specials)
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), specials)
    for name in ("chat_template.json", "tokenizer_config.json"):
        stated = read_json(folder / name).get("chat_template")
        if isinstance(stated, str):
            return ChatTemplate(stated, specials)
        if isinstance(stated, list):
            named = {str(entry["name"]): str(entry["template"]) for entry in stated}
            if "default" in named:
                return ChatTemplate(named["default"], specials, with_tools=named.get("tool_use"))
    return None
