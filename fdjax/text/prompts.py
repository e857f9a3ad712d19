"""Prompts and texts as they are given: a text, token ids, or several of either."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from fdjax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

_NOT_SEQUENCES = bytes | bytearray | memoryview | Mapping | Set


def as_several(given: Any, what: str) -> tuple[list[Any], bool]:
    """A list of prompts, and whether it is that of a single one.

    What are ids is told by the first; `token_ids` looks at the others.

    Args:
      given: what the user handed over.
      what: its name in errors, as in "generate: prompts".

    Raises:
      ValueError: it is neither one prompt nor several.
    """
    if isinstance(given, str):
        return [given], True
    given = _listed(given, what)
    one = bool(given) and _is_id_type(type(given[0]))
    return [given] if one else given, one


def token_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int, what: str) -> list[int]:
    """The ids of a prompt.

    Args:
      prompt: a text or token ids.
      tokenizer, vocab_size: of the model.
      what: its name in errors, as in "generate: prompt 0".

    Raises:
      ValueError: there are none, or they are no ids of the vocabulary.
      MissingTokenizerError: it is a text, and there is no tokenizer.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else _listed(prompt, what)
    if not ids:
        raise ValueError(f"{what} is empty; give at least one token")
    # By type, not one by one: 1024 ids would cost half a millisecond before the first token.
    kinds = set(map(type, ids))
    if not all(map(_is_id_type, kinds)) or min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(t for t in ids if not _is_id_type(type(t)) or not 0 <= t < vocab_size)
        wrong = wrong.item() if isinstance(wrong, np.generic) else wrong
        hint = "; tokenizer.json has more tokens than the model" * isinstance(prompt, str)
        raise ValueError(f"{what} has id {wrong!r}, the vocabulary is 0..{vocab_size - 1}{hint}")
    return ids if kinds == {int} else list(map(int, ids))


def _listed(given: Any, what: str) -> list[Any]:
    if isinstance(given, jax.Array):
        given = np.asarray(given)
    # Iterable, but of bytes, of keys, in no order, or in name only.
    scalar = isinstance(given, np.ndarray) and given.ndim == 0
    if isinstance(given, Iterable) and not isinstance(given, _NOT_SEQUENCES) and not scalar:
        return list(given)
    raise ValueError(f"{what} must be text or token ids, got {given!r}")


def _is_id_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool
