"""Conversations: turns messages into a prompt with the checkpoint's chat template.

The template writes all special tokens, including the one at the beginning of a text. So the
tokenizer adds none. A special token that is spelled out in a message counts as a special token, as
in transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fdjax.sampling.options import GenerationConfig
from fdjax.text.chat_template import Message
from fdjax.text.tokenizer import Tokenizer

# Options of a chat that go to the template. All others go to `generate`.
_TEMPLATE_OPTIONS = ("tools", "documents", "chat_template", "continue_final_message")


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], **template_options: Any
) -> list[int]:
    """Token ids of a conversation, followed by the beginning of the assistant's answer.

    Args:
      tokenizer: the model's tokenizer.
      messages: see `ChatTemplate.render`.
      **template_options: options of `ChatTemplate.render`. With `continue_final_message`, the model
        continues the last message and begins no new one.

    Raises:
      ValueError: there is no template, it refuses these messages, or it renders an empty text.
      MissingTokenizerError: the checkpoint has no tokenizer.
    """
    opens = not template_options.get("continue_final_message")
    text = tokenizer.chat_template.render(
        messages, **{"add_generation_prompt": opens} | template_options
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("chat: the chat template renders an empty text for these messages")
    return ids


def split_options(
    tokenizer: Tokenizer, defaults: GenerationConfig, config: GenerationConfig | None, options: dict
) -> tuple[dict, dict]:
    """Split the options of a chat: (options of the template, options of `generate`).

    The tokenizer's end token is added to the end tokens, unless the caller gives end tokens.

    Args:
      tokenizer: the model's tokenizer.
      defaults: the checkpoint's generation options.
      config, options: as in `LM.chat`.

    Raises:
      ValueError: `chat_template_kwargs` is not a dict, or contains "messages".
    """
    template = options.get("chat_template_kwargs") or {}
    if not isinstance(template, Mapping) or "messages" in template:
        raise ValueError(
            f"chat: chat_template_kwargs must be a dict without 'messages', got {template!r}"
        )
    template = dict(template)
    template |= {name: options[name] for name in _TEMPLATE_OPTIONS if name in options}
    done = {*_TEMPLATE_OPTIONS, "chat_template_kwargs"}
    options = {name: value for name, value in options.items() if name not in done}
    ends_given = isinstance(config, GenerationConfig) and "eos_token_ids" in config.given
    if not ends_given and (end := tokenizer.eos_token_id) is not None:
        # generation_config.json does not always name this end token.
        _fill_ends(options, tuple(dict.fromkeys((*defaults.eos_token_ids, end))))
    return template, options


def _fill_ends(options: dict, ends: tuple[int, ...]) -> None:
    """Give the options these end tokens, for all prompts that have none."""
    name = "eos_token_id" if "eos_token_id" in options else "eos_token_ids"
    given = options.get(name)
    if given is None and name == "eos_token_ids":
        options[name] = ends
    elif isinstance(given, list | tuple):
        options[name] = type(given)(ends if one is None else one for one in given)


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    """A list of conversations; a single conversation becomes a list of one."""
    sequence = list | tuple
    several = isinstance(messages, sequence) and messages and isinstance(messages[0], sequence)
    return messages if several else [messages]
