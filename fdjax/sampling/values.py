"""What each row of a batch asked for, as few arrays: `Sampling`."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What each row asked for, in few arrays: each costs the host a microsecond a call.

    The columns of `reals` and `counts` are attributes by their names, [B] each: options that have a
    value for each row, `seed` as uint32, `sample_index` (which of several samples of one prompt
    this row is) and `top_logprobs` (0 is off). A `temperature` of 0 is greedy.

    Attributes:
      reals: [B, R] fp32.
      counts: [B, C] int32.
      stop_tokens: [B, N] int32 end-of-sequence ids, padded with -1.
      bias: [B, M] fp32 added to the logits of `bias_ids`; -inf forbids.
      bias_ids: [B, M] int32, padded with -1.
      bias_until: [B, M] int32, the step from which on a bias is not added.
      bad_words: [B, W, T] int32 sequences that must not come about, padded in front with -1.
      names: of the columns of `reals`, and of those of `counts`.
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
        """From B values for each column by name, and the other attributes as host arrays."""
        return cls(
            reals=np.array([*reals.values()], np.float32).T,
            counts=np.array([*counts.values()], np.int32).T,
            names=(tuple(reals), tuple(counts)),
            **arrays,
        )

    def rows(self, index: Array) -> "Sampling":
        """What some rows asked for."""
        return jax.tree.map(lambda a: a[index], self)
