"""Conversations: a model's answer to messages, through its checkpoint's chat template.

What a template writes is encoded as it stands: the template itself puts the special tokens, the
beginning of the text included, so the tokenizer adds none. Special tokens that are written out in a
message's content count as such, as they do in transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fdjax.sampling.options import GenerationConfig
from fdjax.text.chat_template import Message
from fdjax.text.tokenizer import Tokenizer

# What is said to the template; all else is said to `generate`.
_TEMPLATE_OPTIONS = ("tools", "documents", "chat_template", "continue_final_message")


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], **template_options: Any
) -> list[int]:
    """Ids of a conversation and of what opens the assistant's answer.

    Args:
      tokenizer: of the model.
      messages: see `ChatTemplate.render`.
      **template_options: options of `ChatTemplate.render`. `continue_final_message` has the model
        go on with the last message instead of opening another.

    Raises:
      ValueError: there is no template, or it refuses these messages or makes nothing of them.
      MissingTokenizerError: the checkpoint has no tokenizer.
    """
    opens = not template_options.get("continue_final_message")
    text = tokenizer.chat_template.render(
        messages, **{"add_generation_prompt": opens} | template_options
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("chat: the chat template makes nothing of these messages")
    return ids


def split_options(
    tokenizer: Tokenizer, defaults: GenerationConfig, config: GenerationConfig | None, options: dict
) -> tuple[dict, dict]:
    """The options of a chat: (what the template is told, what `generate` is told)."""
    template = options.get("chat_template_kwargs") or {}
    if not isinstance(template, Mapping) or "messages" in template:
        raise ValueError(
            f"chat: chat_template_kwargs must be a dict without 'messages', got {template!r}"
        )
    template = dict(template)
    template |= {name: options[name] for name in _TEMPLATE_OPTIONS if name in options}
    told = {*_TEMPLATE_OPTIONS, "chat_template_kwargs"}
    options = {name: value for name, value in options.items() if name not in told}
    given = options.keys() | (config.given if isinstance(config, GenerationConfig) else set())
    ends_given = not given.isdisjoint({"eos_token_id", "eos_token_ids"})
    if not ends_given and (end := tokenizer.eos_token_id) is not None:
        # Not every generation_config.json names it.
        options["eos_token_id"] = tuple(dict.fromkeys((*defaults.eos_token_ids, end)))
    return template, options


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    """Several conversations, or one as the only one of a list."""
    sequence = list | tuple
    several = isinstance(messages, sequence) and messages and isinstance(messages[0], sequence)
    return messages if several else [messages]
