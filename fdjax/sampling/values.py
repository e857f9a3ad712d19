"""What each row of a batch asked for, as few arrays: `Sampling`."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_COUNTS = (
    "top_k",
    "seed",
    "sample_index",
    "max_new_tokens",
    "no_repeat_ngram_size",
    "top_logprobs",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What each row asked for, in few arrays: each costs the host a microsecond a call.

    The columns of `reals` and `counts` are attributes, [B] each: `temperature` (0 is greedy),
    `top_p`, `typical_p`, `repetition_penalty` (1 is off), `min_p`, `presence_penalty`,
    `frequency_penalty`, `top_k`, `no_repeat_ngram_size`, `top_logprobs` (0 is off), `seed`
    (uint32), `sample_index` (which of several samples of one prompt this row is) and
    `max_new_tokens`.

    Attributes:
      reals: [B, R] fp32.
      counts: [B, C] int32.
      stop_tokens: [B, N] int32 end-of-sequence ids, padded with -1.
      bias: [B, M] fp32 added to the logits of `bias_ids`; -inf forbids.
      bias_ids: [B, M] int32, padded with -1.
      bias_until: [B, M] int32, the step from which on a bias is not added.
      bad_words: [B, W, T] int32 sequences that must not come about, padded in front with -1.
    """

    reals: Array
    counts: Array
    stop_tokens: Array
    bias: Array
    bias_ids: Array
    bias_until: Array
    bad_words: Array

    def __getattr__(self, name: str) -> Array:
        for names, columns in ((_REALS, "reals"), (_COUNTS, "counts")):
            if name in names:
                return getattr(self, columns)[:, names.index(name)]
        raise AttributeError(f"Sampling has no attribute {name!r}")

    @property
    def seed(self) -> Array:
        """[B] uint32."""
        bits = self.counts[:, _COUNTS.index("seed")]
        return lax.bitcast_convert_type(bits, jnp.uint32)

    @classmethod
    def pack(cls, columns: Mapping[str, Sequence], **arrays: np.ndarray) -> "Sampling":
        """From B values for each column by name, and the other attributes as host arrays."""
        seed = {"seed": np.array(columns["seed"], np.uint32).view(np.int32)}
        return cls(
            reals=np.array([columns[n] for n in _REALS], np.float32).T,
            counts=np.array([(columns | seed)[n] for n in _COUNTS], np.int32).T,
            **arrays,
        )

    def rows(self, index: Array) -> "Sampling":
        """What some rows asked for."""
        return jax.tree.map(lambda a: a[index], self)
