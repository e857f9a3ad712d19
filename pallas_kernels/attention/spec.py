"""The static variants of attention, and the checks and the choice that both ops share."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.plan import Choice, Plan, resolve


@dataclasses.dataclass(frozen=True)
class Masking:
    """Everything static that decides what a query sees and how scores are bent.

    Attributes:
      causal: a query sees no later position.
      window: a query at position p sees positions above p - window.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap) (Gemma 2).
      alibi: slope per query head; slope * (key position - query position) is added to the scores
        (Press et al. 2022).
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None

    @property
    def plain(self) -> bool:
        """No window, cap or bias."""
        return self.window is None and self.soft_cap is None and self.alibi is None


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of Press et al. 2022, section 3, for any number of heads."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / closest) for i in range(closest)]
    extra = [2 ** (-8 * (i + 1) / (2 * closest)) for i in range(0, 2 * (heads - closest), 2)]
    return tuple(slopes + extra)


def check_attention(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    layer: Array | int | None,
    scale: float,
    masking: Masking,
    rows: Array | None = None,
) -> None:
    """Raise ValueError when the operands of an attention op do not fit together."""
    stacked = layer is not None
    if q.ndim != 4:
        raise ValueError(f"{op}: q must be [B,T,H,D], got {list(q.shape)}")
    if k.ndim != 4 + stacked or k.shape != v.shape:
        axes = "[L,B,Hkv,S,D]" if stacked else "[B,Hkv,S,D]"
        raise ValueError(
            f"{op}: k and v must both be {axes}, got {list(k.shape)} and {list(v.shape)}"
        )
    b, t, h, d = q.shape
    kb, kv_heads, s, kd = k.shape[stacked:]
    if rows is not None and rows.shape != (b,):
        raise ValueError(f"{op}: rows must be [{b}], got {list(rows.shape)}")
    if (b, d) != (kb if rows is None else b, kd):
        raise ValueError(f"{op}: q {list(q.shape)} and k {list(k.shape)} disagree on B or D")
    if not kv_heads or h % kv_heads:
        raise ValueError(f"{op}: H must be a multiple of Hkv, got {h} and {kv_heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if lengths.shape != (b,):
        raise ValueError(f"{op}: lengths must be [{b}], got {list(lengths.shape)}")
    if not jnp.issubdtype(lengths.dtype, jnp.signedinteger):
        raise ValueError(f"{op}: lengths must be signed integers, got {lengths.dtype}")
    if isinstance(layer, int) and not 0 <= layer < k.shape[0]:
        raise ValueError(f"{op}: layer must be in 0..{k.shape[0] - 1}, got {layer}")
    for axis, size in (("T", t), ("H", h), ("S", s)):
        if size < 1:
            raise ValueError(f"{op}: {axis} must be at least 1, got {size}")
    if not scale > 0:
        raise ValueError(f"{op}: scale must be positive, got {scale}")
    if masking.window is not None and masking.window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {masking.window}")
    if masking.soft_cap is not None and not masking.soft_cap > 0:
        raise ValueError(f"{op}: soft_cap must be positive, got {masking.soft_cap}")
    if masking.alibi is not None and len(masking.alibi) != h:
        raise ValueError(f"{op}: alibi must have {h} slopes, got {len(masking.alibi)}")


def choose_attention(
    op: str, q: Array, k: Array, masking: Masking, implementation: str | None, plan: Plan | None
) -> Choice:
    """The choice for q [B,T,H,D] against k [...,Hkv,S,D]."""
    b, t, h, d = q.shape
    return resolve(
        plan,
        implementation,
        op,
        b=b,
        t=t,
        h=h,
        hkv=k.shape[-3],
        s=k.shape[-2],
        d=d,
        itemsize=q.dtype.itemsize,
        masks=int(not masking.plain),
    )
