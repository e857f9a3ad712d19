"""`AttentionSpec`, the static description of an attention."""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.dispatch import Features, used_features
from fdjax.pallas_kernels.ranks import own_share
from fdjax.pallas_kernels.rope import Rope

# Features that do not count as masks: measurements without them also hold with them.
_NOT_MASKS = frozenset({"rope", "causal", "phi", "unified", "sinks"})


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static description of one layer's attention, passed from the model to the kernel.

    An implementation lists the fields it supports. It refuses a spec in which any other field is
    not at its default.

    Attributes:
      scale: multiplies q·k, usually D ** -0.5.
      rope: rotary embedding of q and k, applied before attention, or None.
      window: a query at position p sees only positions above p - window; None for no window.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) (Gemma 2); None for no cap.
      alibi: one slope per query head, or None; slope * (key position - query position) is added to
        the scores (Press et al. 2022).
      phi: unified maximum per query head in natural units (FlashDecoding++, section 3.1), or None
        for 0. Only "mosaic_gpu" uses it. It changes the speed but no result.
      unified: whether "mosaic_gpu" may use the unified maximum. False makes it use a running
        maximum, for heads whose scores leave the safe range of any φ too often.
      causal: a query sees no later position. With False, which is for prompts only, it sees every
        live slot.
      sinks: each head has a learned logit in the denominator of its softmax, an operand of the ops.
      ranks: number of devices that share the heads. `alibi` and `phi` have values for the heads of
        all.
    """

    scale: float
    rope: Rope | None = None
    window: int | None = None
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None
    phi: tuple[float, ...] | None = None
    unified: bool = True
    causal: bool = True
    sinks: bool = False
    ranks: int = 1

    @functools.cached_property
    def features(self) -> Features:
        """Names of the fields that are not at their defaults, without `ranks`."""
        return used_features(self) - {"ranks"}

    @property
    def is_masked(self) -> bool:
        """Whether it has a feature that counts as a mask: a window, a soft cap or ALiBi."""
        return bool(self.features - _NOT_MASKS)

    def for_kernels(self) -> tuple["AttentionSpec", Array | None]:
        """The spec that kernels are compiled for, and φ [H] fp32 or None.

        The spec leaves out φ, which is an operand, and RoPE and sinks, which are applied elsewhere.
        So layers that differ only in them share one lowering.
        """
        phi = None
        if self.phi is not None:
            phi = own_share(jnp.array(self.phi, jnp.float32), self.ranks)
        ranks = 1 if self.alibi is None else self.ranks
        return dataclasses.replace(self, rope=None, phi=None, sinks=False, ranks=ranks), phi

    def slopes(self) -> Array | None:
        """The slopes [H] fp32 of this device's heads, or None without ALiBi."""
        if self.alibi is None:
            return None
        return own_share(jnp.array(self.alibi, jnp.float32), self.ranks)


ALL_FEATURES = frozenset(
    {"rope", "window", "soft_cap", "alibi", "phi", "unified", "causal", "sinks"}
)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of Press et al. 2022, section 3, for any number of heads."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / closest) for i in range(closest)]
    extra = [2 ** (-8 * (i + 1) / (2 * closest)) for i in range(0, 2 * (heads - closest), 2)]
    return tuple(slopes + extra)
