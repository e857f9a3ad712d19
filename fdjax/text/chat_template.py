"""Chat templates of a checkpoint, which render messages as the text of one prompt.

Templates are Jinja programs from the checkpoint and are not trusted. They run in a sandbox with
limits and see only plain data.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from fdjax.models import CheckpointError
from fdjax.models.readable import readable
from fdjax.text.template_limits import LimitedEnvironment, TemplateLimitError, limited
from fdjax.text.tokenizer_files import TokenizerFiles
from fdjax.weights.stored import is_there, read_json

Message = Mapping[str, Any]

# Appended to a message that is to be continued, to find its end in the rendered text. The space
# shows whether the template trims the end of a message.
_OPEN_END = "[this message goes on here] "
# Names of a message's thoughts. Templates read the first name, and those of gpt-oss the second.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of one checkpoint.

    Attributes:
      templates: Jinja source by name. A single template has the name "default".
      special_tokens: texts that templates see as `bos_token`, `eos_token` and so on.
      source: name of the checkpoint or file in errors.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str] = MappingProxyType({})
    source: str = "this model"

    @classmethod
    def from_folder(cls, folder: Path, beside: TokenizerFiles | None = None) -> "ChatTemplate":
        """Read the templates of a checkpoint folder. There may be none.

        The first of these places with a template is read: chat_template.jinja together with
        additional_chat_templates/*.jinja; `chat_template` in tokenizer_config.json, which is a text
        or a list of named texts; chat_template.json.

        Args:
          folder: the checkpoint.
          beside: its tokenizer files, if they have been read already.

        Raises:
          CheckpointError: a file cannot be read or has a wrong form.
        """
        config = folder / "tokenizer_config.json"
        data = read_json(config, required=False)
        legacy = folder / "chat_template.json"
        single = folder / "chat_template.jinja"
        additional = sorted(folder.glob("additional_chat_templates/*.jinja"))
        files = {path.stem: path for path in additional if is_there(path)}
        files |= {"default": single} if is_there(single) else {}
        source, templates = single, {name: _read_text(path) for name, path in files.items()}
        if not templates:
            source, templates = config, _named(data.get("chat_template"), config)
        if not templates:
            legacy_data = read_json(legacy, required=False)
            source, templates = legacy, _named(legacy_data.get("chat_template"), legacy)
        beside = TokenizerFiles.read(folder) if beside is None else beside
        return cls(templates, beside.texts(), str(source if templates else folder))

    def __bool__(self) -> bool:
        return bool(self.templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages as text. The arguments have the meaning they have in transformers.

        Args:
          messages: dicts with "role" and "content". Keys with the value None are left out. Thoughts
            may be given as "reasoning_content", "thinking" or "reasoning".
          tools: JSON schemas of functions that the model may call.
          documents: dicts that the template may show to the model.
          chat_template: the name of one of `templates`, or Jinja source. Default: "tool_use" if
            there are tools and a template of this name, else "default".
          add_generation_prompt: end the text with the beginning of the assistant's message.
          continue_final_message: end the text inside the content of the last message.
          **variables: further variables of the template, such as `enable_thinking`.

        Returns:
          The text that the model continues.

        Raises:
          ValueError: there is no template, it refuses these messages, or it exceeds a limit.
          CheckpointError: the checkpoint's template is not valid Jinja.
        """
        if not isinstance(continue_final_message, bool | None):
            raise ValueError(
                "chat: continue_final_message must be True or False, "
                f"got {continue_final_message!r}"
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "chat: add_generation_prompt and continue_final_message exclude each other"
            )
        source = self.choose(chat_template, tools=bool(tools))
        messages = _checked(messages)
        if continue_final_message:
            if not isinstance(messages[-1].get("content"), str):
                raise ValueError("chat: the content of the message to continue must be a text")
            messages[-1]["content"] += _OPEN_END
        given = {
            **self.special_tokens,
            "messages": messages,
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            **_plain("template variables", variables),
        }
        try:
            with limited(given):
                text = _compile(source).render(given)
        except TemplateLimitError as error:
            raise ValueError(f"chat: the template was stopped: {error}") from None
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            if source == chat_template:
                raise ValueError(f"chat: chat_template is not valid Jinja ({where})") from None
            raise CheckpointError(
                f"{self.source}: chat template is not valid Jinja ({where})"
            ) from None
        except (jinja2.TemplateError, ArithmeticError, LookupError) as error:
            raise ValueError(f"chat: the template refuses these messages: {_line(error)}") from None
        except (
            *(TypeError, ValueError, AttributeError),
            *(RecursionError, MemoryError, SyntaxError),  # the template is nested too deeply
        ) as error:
            raise ValueError(
                f"chat: the template fails on these messages: {_line(error)}"
            ) from None
        return _open_ended(text) if continue_final_message else text

    def choose(self, chat_template: str | None = None, *, tools: bool = False) -> str:
        """The Jinja source that `render` uses.

        Args:
          chat_template: as in `render`.
          tools: whether there are tools.

        Raises:
          ValueError: there is no template of that name, or none at all.
        """
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise ValueError(
                    f"chat: chat_template must be a name or Jinja, got {chat_template!r}"
                )
            if chat_template in self.templates:
                return self.templates[chat_template]
            if "{{" in chat_template or "{%" in chat_template:
                return chat_template
            known = f"; the names are {', '.join(sorted(self.templates))}" if self.templates else ""
            raise ValueError(
                f"chat: chat_template {chat_template!r} is neither Jinja nor a name{known}"
            )
        for name in ["tool_use"] * tools + ["default"]:
            if name in self.templates:
                return self.templates[name]
        if self.templates:
            raise ValueError(
                f"chat: {self.source} has no default template; "
                f"name one of {', '.join(sorted(self.templates))}"
            )
        raise ValueError(
            f"chat: {self.source} has no chat template, so this may be a base model; "
            "use generate, or give a chat template"
        )


def _line(error: Exception) -> str:
    return readable(" ".join(str(error).split()) or type(error).__name__)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def _named(value: Any, source: Path) -> dict[str, str]:
    """Templates by name, from a text, a list of {"name", "template"} or a dict."""
    match value:
        case None:
            named = []
        case str():
            named = [("default", value)]
        case dict():
            named = list(value.items())
        case list() if all(isinstance(v, dict) for v in value):
            named = [(v.get("name"), v.get("template")) for v in value]
        case _:
            named = [(None, value)]
    if not all(isinstance(part, str) for pair in named for part in pair):
        raise CheckpointError(f"{source}: 'chat_template' must be a text or a list of named texts")
    return dict(named)


def _plain(what: str, value: Any) -> Any:
    """A copy of JSON types only, because a template could call methods of other objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat: {what} must be JSON values ({error})") from None


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            "chat: messages must be a list of dicts such as {'role': 'user', 'content': 'Hi'}, "
            f"got {messages!r}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"chat: message {i} must be a dict with a 'role', got {message!r}")
    plain = _plain("messages", [dict(message) for message in messages])
    return [
        _with_thoughts({k: v for k, v in message.items() if v is not None}) for message in plain
    ]


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under each name that templates read."""
    thoughts = next((message[name] for name in _THOUGHTS if name in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _open_ended(text: str) -> str:
    end = text.rfind(_OPEN_END.strip())
    if end < 0:
        raise ValueError("chat: the template does not show the message to continue")
    trims = not text.startswith(_OPEN_END, end)
    return text[:end].rstrip() if trims else text[:end]


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks text to train on. It renders its content."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller):
        return caller()


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)
