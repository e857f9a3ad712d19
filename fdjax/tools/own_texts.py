"""Texts that a model writes itself, to see how its layers are used when there is no other text.

Quantising with such texts loses about as little as with real ones (Williams et al. 2025,
"Self-calibration for language model quantization and pruning").
"""

from collections.abc import Callable
from typing import Any

TEXTS, TOKENS = 64, 128


def own_texts(
    generate: Callable[..., Any],
    start: int | None,
    *,
    vocab_size: int,
    texts: int = TEXTS,
    tokens: int = TOKENS,
) -> list[list[int]]:
    """Texts drawn from a model, the same in each call.

    Args:
      generate: `LM.generate` of the model.
      start: id of the token that begins a text, or ends the one before; None if the model has
        neither. Then each text begins with another token of the vocabulary.
      vocab_size: size of the vocabulary.
      texts: number of texts.
      tokens: most tokens to draw for each; the end comes after a quarter of them or later.

    Returns:
      Token ids of each text, with the one that it begins with.
    """
    starts = [i * vocab_size // texts if start is None else start for i in range(texts)]
    drawn = generate(
        [[first] for first in starts],
        max_new_tokens=tokens,
        min_new_tokens=tokens // 4,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=list(range(texts)),
    )
    return [[first, *ids] for first, ids in zip(starts, drawn.tokens, strict=True)]
