"""Prompts as a caller gives them: a text, token ids, or a sequence of either."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from fdjax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

_NOT_SEQUENCES = bytes | bytearray | memoryview | Mapping | Set


def as_several(given: Any, what: str) -> tuple[list[Any], bool]:
    """Turn an argument into a list of prompts.

    A sequence is one prompt if its first item is an id. `token_ids` checks the other items.

    Args:
      given: the caller's argument.
      what: name of the argument in errors, such as "generate: prompts".

    Returns:
      (list of prompts, whether the argument was a single prompt).

    Raises:
      ValueError: it is neither a prompt nor a sequence of prompts.
    """
    if isinstance(given, str):
        return [given], True
    given = _on_host(given)
    if _holds_ids(given) and given.size:
        return [given], True
    given = _listed(given, what)
    one = bool(given) and _is_id_type(type(given[0]))
    return [given] if one else given, one


def token_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int, what: str) -> list[int]:
    """Like `token_array`, as a list."""
    return token_array(prompt, tokenizer, vocab_size, what).tolist()


def token_array(prompt: Any, tokenizer: Tokenizer, vocab_size: int, what: str) -> np.ndarray:
    """The token ids of a prompt [n] int32.

    Args:
      prompt: a text or token ids.
      tokenizer, vocab_size: the model's tokenizer and its number of token ids.
      what: name of the prompt in errors, such as "generate: prompt 0".

    Raises:
      ValueError: the prompt is empty or no valid text, or an id is not in the vocabulary.
      MissingTokenizerError: the prompt is a text, but there is no tokenizer.
    """
    ids = _on_host(prompt)
    if isinstance(ids, str):
        ids = _encoded(ids, tokenizer, what)
    elif not _holds_ids(ids):
        ids = _listed(ids, what)
    if not len(ids):
        raise ValueError(f"{what} is empty; give at least one token")
    if _holds_ids(ids):
        array = ids
    else:
        # Only the set of types is checked. A check of 1024 single ids takes half a millisecond,
        # which would delay the first token.
        array = _as_array(ids) if all(map(_is_id_type, set(map(type, ids)))) else None
    if array is None or array.min() < 0 or array.max() >= vocab_size:
        wrong = next(t for t in ids if not _is_id_type(type(t)) or not 0 <= t < vocab_size)
        wrong = wrong.item() if isinstance(wrong, np.generic) else wrong
        if not _is_id_type(type(wrong)):
            raise ValueError(f"{what} has id {wrong!r}, which is no integer")
        hint = "; tokenizer.json has more tokens than the model" * isinstance(prompt, str)
        raise ValueError(f"{what} has id {wrong!r}, the vocabulary is 0..{vocab_size - 1}{hint}")
    return array.astype(np.int32)  # a copy: the caller may change the array


def _on_host(given: Any) -> Any:
    """An array of a device as a NumPy array, anything else as it is."""
    return np.asarray(given) if isinstance(given, jax.Array) else given


def _holds_ids(given: Any) -> bool:
    """Whether this is a NumPy array [n] of integers. It need not become a list of objects."""
    return type(given) is np.ndarray and given.ndim == 1 and given.dtype.kind in "iu"


def _as_array(ids: list[Any]) -> np.ndarray | None:
    """Integers as [n] int32, or None if one is too large."""
    try:
        return np.fromiter(ids, np.int32, len(ids))
    except OverflowError:
        return None


def _encoded(text: str, tokenizer: Tokenizer, what: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{error.reason} at character {error.start}"
        raise ValueError(f"{what} is not valid text: {reason}") from None
    return tokenizer.encode(text)


def _listed(given: Any, what: str) -> list[Any]:
    # `_NOT_SEQUENCES` are iterable, but yield bytes or keys, or have no order.
    scalar = isinstance(given, np.ndarray) and given.ndim == 0
    if isinstance(given, Iterable) and not isinstance(given, _NOT_SEQUENCES) and not scalar:
        return list(given)
    raise ValueError(f"{what} must be text or token ids, got {given!r}")


def _is_id_type(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool
