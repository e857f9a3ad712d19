"""What an attention is, statically: `AttentionSpec`."""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.dispatch import Features, used_features
from fdjax.pallas_kernels.rope import Rope

# Features that change how scores are made or which are seen, and so what a measurement says.
_NOT_MASKS = frozenset({"rope", "causal", "phi", "unified"})


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static description of one layer's attention, from the model to the kernel.

    An implementation lists the fields that it can do and refuses every other that is not at its
    default.

    Attributes:
      scale: multiplies q·k, usually D ** -0.5.
      rope: rotary embedding of q and k, or None; applied before attention.
      window: a query at position p sees positions above p - window, or None.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) (Gemma 2), or None.
      alibi: slope per query head, or None; slope * (key position - query position) is added to the
        scores (Press et al. 2022).
      phi: unified maximum per query head in natural units (FlashDecoding++, section 3.1), or None
        for 0; used by "mosaic_gpu" only. It changes the speed, never a result.
      unified: False takes the maximum of the rows seen so far instead, for heads whose scores leave
        the range of any φ too often; "mosaic_gpu" only.
      causal: a query sees no later position; False, for prompts only, sees every live slot.
    """

    scale: float
    rope: Rope | None = None
    window: int | None = None
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None
    phi: tuple[float, ...] | None = None
    unified: bool = True
    causal: bool = True

    @functools.cached_property
    def features(self) -> Features:
        """Names of the fields that are not at their defaults."""
        return used_features(self)

    @property
    def is_masked(self) -> bool:
        """Whether it is more than causal attention: other kernels may run it."""
        return bool(self.features - _NOT_MASKS)

    def for_kernels(self) -> tuple["AttentionSpec", Array | None]:
        """What kernels are compiled for, and φ [H] fp32 or None.

        φ is an operand, and RoPE is done elsewhere, so that layers which differ in them share one
        lowering.
        """
        phi = None if self.phi is None else jnp.array(self.phi, jnp.float32)
        return dataclasses.replace(self, rope=None, phi=None), phi


ALL_FEATURES = frozenset({"rope", "window", "soft_cap", "alibi", "phi", "unified", "causal"})


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of Press et al. 2022, section 3, for any number of heads."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / closest) for i in range(closest)]
    extra = [2 ** (-8 * (i + 1) / (2 * closest)) for i in range(0, 2 * (heads - closest), 2)]
    return tuple(slopes + extra)
