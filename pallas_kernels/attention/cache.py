"""The KV cache in int8: a scale for each token and KV head.

    scale = max |x| over D / 127,   code = round(x / scale),   x' = scale · code

so |x - x'| <= scale / 2. Each token has its own scale, so nothing is calibrated, and nothing
overflows. A cache takes (D + 4) / (2·D) of the bytes of bfloat16.

Scales are fp32. In bfloat16 they would save 2 of D + 4 bytes. But rounding the scale would change
values by up to 2^-9, almost as much as the rounding of the codes, or clip the largest code. fp32
scales also multiply the fp32 scores without a conversion.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.pallas_kernels.dispatch import NO_FEATURES, Features

LARGEST = 127


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class QuantisedCache:
    """Keys or values in int8. Attention ops take it in place of an array [..., Hkv, S, D].

    Attributes:
      codes: [..., Hkv, S, D] int8, from -127 to 127.
      scales: [..., Hkv, S] fp32; 0 if all values of a token's head are zero, not finite if a value
        is not finite.
      dtype: dtype of the dequantised keys and values.
    """

    codes: Array
    scales: Array
    dtype: np.dtype

    @classmethod
    def abstract(cls, shape: tuple[int, ...], dtype: str) -> "QuantisedCache":
        """Shapes and dtypes of a cache for values [..., S, D]."""
        return cls(
            jax.ShapeDtypeStruct(shape, jnp.int8),
            jax.ShapeDtypeStruct(shape[:-1], jnp.float32),
            jnp.dtype(dtype),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the keys or values."""
        return self.codes.ndim


# An array or its quantised replacement.
Cache = Array | QuantisedCache


def cache_features(kv_dtype: str | None) -> Features:
    """Features that attention must support for a cache of this dtype, see `Implementation.can`.

    None means the dtype of the activations.
    """
    return NO_FEATURES if kv_dtype is None else frozenset({f"{kv_dtype}_cache"})


def features_of(cache: Cache) -> Features:
    """Features that attention must support for this cache."""
    return cache_features("int8" if isinstance(cache, QuantisedCache) else None)


def check_caches(op: str, k: Cache, v: Cache) -> None:
    """Raise ValueError if only one of two caches is quantised, or scales have wrong shapes."""
    caches = [cache for cache in (k, v) if isinstance(cache, QuantisedCache)]
    if len(caches) == 1:
        raise ValueError(f"{op}: k and v must both be quantised or neither")
    for cache in caches:
        if cache.scales.shape != cache.shape[:-1]:
            raise ValueError(
                f"{op}: scales must be {list(cache.shape[:-1])}, got {list(cache.scales.shape)}"
            )


def quantise(values: Array) -> QuantisedCache:
    """Quantise keys or values [..., D], with one scale per head of a token.

    Zeros give the scale 0. If a value is not finite, its token's whole head becomes so.
    """
    x = values.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / LARGEST
    usable = ((scales > 0) & jnp.isfinite(scales))[..., None]
    codes = jnp.where(usable, x / jnp.where(usable, scales[..., None], 1), 0)
    codes = jnp.clip(jnp.round(codes), -LARGEST, LARGEST)
    return QuantisedCache(codes.astype(jnp.int8), scales, values.dtype)


def dequantised(cache: Cache) -> Array:
    """The keys or values of a cache in their dtype. An array is returned unchanged."""
    if not isinstance(cache, QuantisedCache):
        return cache
    values = cache.codes.astype(jnp.float32) * cache.scales[..., None]
    return values.astype(cache.dtype)


def stored_in(cache: Cache, values: Array) -> Any:
    """Keys or values [..., D] in the form of a cache, for `jax.tree.map` with that cache."""
    return quantise(values) if isinstance(cache, QuantisedCache) else values
