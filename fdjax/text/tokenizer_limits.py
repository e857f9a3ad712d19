"""Refuses a tokenizer.json that refers to missing tokens or can make a text far too long.

The tokenizers package panics or exhausts memory on such files, so they are refused at load. The
time of a regular expression is not limited here. The package gives up a match after ten million
steps, but tries a match at every character of a text, and an encoding cannot be interrupted.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdjax.models import CheckpointError

if TYPE_CHECKING:
    import tokenizers

# Limit for the result of a normaliser or decoder, in bytes per byte of its input. For example, a
# space that becomes "▁" turns one byte into three.
_MAX_GROWTH = 1024


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure of the tokenizers package: a plain `Exception` or a panic."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def check_tokenizer(tokenizer: "tokenizers.Tokenizer", path: Path) -> None:
    """Refuse a tokenizer that would fail on every text.

    Raises:
      CheckpointError: the post-processor names a token that it does not define, or the normaliser
        or decoder can make a text too long.
    """
    missing = _undefined(_state(tokenizer.post_processor))
    if missing:
        raise CheckpointError(
            f"{path}: the post-processor adds {missing[0]!r}, which its 'special_tokens' lack"
        )
    for part in ("normalizer", "decoder"):
        growth = _growth(_state(getattr(tokenizer, part)))
        if growth > _MAX_GROWTH:
            raise CheckpointError(
                f"{path}: the {part} can make a text {growth:.3g} times as long, "
                f"the limit is {_MAX_GROWTH}"
            )


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else json.loads(part.__getstate__())


def _undefined(state: dict[str, Any]) -> list[str]:
    if state.get("type") == "Sequence":
        return [token for inner in state["processors"] for token in _undefined(inner)]
    if state.get("type") != "TemplateProcessing":
        return []
    used = [piece["SpecialToken"]["id"] for piece in state["single"] if "SpecialToken" in piece]
    return [token for token in used if token not in state["special_tokens"]]


def _growth(state: dict[str, Any]) -> float:
    """The factor by which a text can grow, in bytes."""
    match state.get("type"):
        case "Sequence":
            growth = 1.0
            for inner in state.get("normalizers") or state.get("decoders") or ():
                growth *= _growth(inner)
            return growth
        case "Prepend":
            return 1.0 + len(state["prepend"].encode())
        case "Replace":
            content = len(state["content"].encode())
            # A regular expression can match an empty text between any two characters.
            pattern = len(state["pattern"].get("String", "").encode())
            return max(1.0, content / pattern) if pattern else 1.0 + content
        case _:
            return 1.0
