"""The options of each row of a batch, packed in few arrays: `Sampling`."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options of each row, packed in few arrays, because each costs the host 1 µs per call.

    Each column of `reals` and `counts` is also an attribute [B] with the name of the option. Beside
    the options there are `seed` as uint32, `sample_index` (the row's index among the samples or
    beams of its prompt) and `top_logprobs` (0 is off). A `temperature` of 0 is greedy.

    Attributes:
      reals: [B, R] fp32 options with real values.
      counts: [B, C] int32 options with integer values.
      stop_tokens: [B, N] int32 end-of-sequence ids, padded with -1.
      bias: [B, M] fp32 numbers added to the logits of `bias_ids`; -inf forbids a token.
      bias_ids: [B, M] int32 token ids, padded with -1.
      bias_until: [B, M] int32 first step without the bias.
      bad_words: [B, W, T] int32 forbidden sequences of tokens, padded in front with -1.
      names: (names of the columns of `reals`, names of the columns of `counts`).
    """

    reals: Array
    counts: Array
    stop_tokens: Array
    bias: Array
    bias_ids: Array
    bias_until: Array
    bad_words: Array
    names: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> Array:
        for names, values in zip(self.__dict__.get("names", ()), ("reals", "counts"), strict=False):
            if name in names:
                column = getattr(self, values)[:, names.index(name)]
                is_seed = name == "seed"
                return lax.bitcast_convert_type(column, jnp.uint32) if is_seed else column
        raise AttributeError(f"Sampling has no attribute {name!r}")

    @classmethod
    def pack(
        cls, reals: Mapping[str, Sequence], counts: Mapping[str, Sequence], **arrays: np.ndarray
    ) -> "Sampling":
        """Pack host values.

        Args:
          reals, counts: B values for each column, by name.
          **arrays: the other attributes.
        """
        return cls(
            reals=np.array([*reals.values()], np.float32).T,
            counts=np.array([*counts.values()], np.int32).T,
            names=(tuple(reals), tuple(counts)),
            **arrays,
        )

    def rows(self, index: Array) -> "Sampling":
        """The options of the rows with these indices [N] int32."""
        return jax.tree.map(lambda a: a[index], self)
