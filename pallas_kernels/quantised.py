"""Quantised weights: codes of a few bits in int32 words, with scales.

w = scale · (code - zero) for "int4" and "int8", whose codes are unsigned: 0..15 and 0..255. Without
zeros, the zero is the middle code, 8 or 128. w = scale · code for "fp8" and "fp4", whose codes are
the bits of float8_e4m3fn and of float4_e2m1fn. `group` successive rows of a column share a scale
and a zero. MXFP4 (OCP 2023) is "fp4" by 32 with powers of 2 as scales, float8_e8m0fnu.

Words are int32 because NumPy and XLA store narrower integers in one byte or more.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.bricks import BITS, BRICK, brick_words, pack_bricks, unpack_bricks
from fdjax.pallas_kernels.dispatch import Features

# Bits of a code.
_FLOATS = ("fp8", "fp4")
# Standard deviation of the 16 values of float4_e2m1fn.
_E2M1_DEVIATION = math.sqrt(68.5 / 8)
PLAIN, BRICKS = "plain", "bricks"
# Kinds of weights beside which activations may be rounded to the same kind.
ROUNDED_KINDS = "fp8", "int8"
# Features of `matmul` for everything that this module can dequantise.
WEIGHT_FEATURES = frozenset(
    {
        *(f"weight.{kind}" for kind in BITS),
        *(f"weight.layout.{layout}" for layout in (PLAIN, BRICKS)),
        "weight.zeros",
        "weight.rounded_activations",
    }
)


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The format of a quantised weight, which is known before the weight is loaded.

    Attributes:
      kind: "int4" | "int8" | "fp8" | "fp4".
      group: rows of the weight that share a scale; K if a column has one scale.
      zeros: whether there are zeros. Floating-point codes have none.
      scales: dtype of scales and zeros, a NumPy name.
      layout: order of the words, see `QTensor`.
      rounded_activations: whether the activations of prompts may be rounded as well, to fp8 beside
        weights in fp8, to int8 beside int8.
    """

    kind: str
    group: int
    zeros: bool = False
    scales: str = "float32"
    layout: str = PLAIN
    rounded_activations: bool = False

    def __post_init__(self):
        if self.kind not in BITS:
            raise ValueError(f"weight: kind must be one of {', '.join(BITS)}, got {self.kind!r}")
        if self.group < 1:
            raise ValueError(f"weight: group must be positive, got {self.group}")
        if self.zeros and self.kind in _FLOATS:
            raise ValueError(f"weight: {self.kind} has no zeros")
        if self.rounded_activations and self.kind not in ROUNDED_KINDS:
            raise ValueError(f"weight: {self.kind} has no rounded_activations")

    def __str__(self) -> str:
        return f"{self.kind} by {self.group}" + " (W8A8)" * self.rounded_activations

    @property
    def features(self) -> Features:
        """Features that an implementation must support to read this weight."""
        names = {f"weight.{self.kind}", f"weight.layout.{self.layout}"}
        if self.zeros:
            names.add("weight.zeros")
        if self.rounded_activations:
            names.add("weight.rounded_activations")
        return frozenset(names)

    @property
    def key(self) -> dict[str, int]:
        """Entry that it adds to the key of `matmul` for `Plan.choose`: kind → group."""
        return {self.kind: self.group}

    def empty(self, shape: tuple[int, ...], stack: tuple[int, ...] = ()) -> "QTensor":
        """A weight of zero words and scales.

        Args:
          shape: [K,N] or [K,2,N].
          stack: leading axes of the arrays, for a stack of such weights.

        Raises:
          ValueError: the group does not divide K.
        """
        k, *outs = shape
        if k % self.group:
            raise ValueError(f"weight: group must divide K = {k}, got {self.group}")
        scales = jnp.zeros((*stack, k // self.group, *outs), self.scales)
        words = jnp.zeros((*stack, *words_shape(self.kind, shape, self.layout)), jnp.int32)
        zeros = scales if self.zeros else None
        fixed = self.kind, self.group, tuple(shape), self.layout, self.rounded_activations
        return QTensor(words, scales, zeros, *fixed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantised weight [K,N], or [K,2,N] (gate, then up). It is a pytree.

    The arrays may have a leading axis that `shape` leaves out. They are then a stack of weights,
    such as those of all layers or experts.

    Attributes:
      words: int32. In the layout "plain", a word holds successive rows of a column, the first in
        its lowest bits: [K/8, ...] for 4 bits, else [K/4, ...]. Missing rows are zero bits. For
        "bricks" see `bricks`.
      scales: [G, ...] floating point, with K = G · group.
      zeros: [G, ...] floating point, or None.
      kind: see `WeightFormat`.
      group: rows that share a scale.
      shape: (K,N) or (K,2,N).
      layout: order of the words.
      rounded_activations: see `WeightFormat`.
    """

    words: Array
    scales: Array
    zeros: Array | None
    kind: str = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(default=PLAIN, metadata={"static": True})
    rounded_activations: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def format(self) -> WeightFormat:
        """Its format."""
        scales = jnp.dtype(self.scales.dtype).name
        own = self.kind, self.group, self.zeros is not None, scales, self.layout
        return WeightFormat(*own, self.rounded_activations)

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod((*self.stack, *self.shape))

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading axes of its arrays that `shape` leaves out."""
        return tuple(self.scales.shape[: self.scales.ndim - len(self.shape)])


def word_rows(k: int, kind: str) -> int:
    """Number of words that hold K codes of a column in the layout "plain"."""
    return -(-k * BITS[kind] // 32)


def words_shape(kind: str, shape: tuple[int, ...], layout: str = PLAIN) -> tuple[int, ...]:
    """Shape of the words of a weight [K,N] or [K,2,N]."""
    k, *outs = shape
    if layout == BRICKS:
        *parts, n = outs
        return *parts, n // BRICK, k // BRICK, *brick_words(kind)
    return word_rows(k, kind), *outs


def in_layout(q: QTensor, layout: str) -> QTensor:
    """The same weight, or stack of weights, with its words in another order.

    Raises:
      ValueError: it cannot have this layout.
    """
    if layout == q.layout:
        return q
    if q.stack:  # one after the other, because codes take more memory than words
        return lax.map(lambda one: in_layout(one, layout), q)
    check(q, "in_layout")
    if layout == BRICKS:
        if problem := no_bricks(q.shape):
            raise ValueError(f"in_layout: {problem}")
        words = pack_bricks(_codes(q), q.kind)
    else:
        words = pack(_codes(q), q.kind)
    return dataclasses.replace(q, words=words, layout=layout)


def no_bricks(shape: tuple[int, ...]) -> str | None:
    """Why a weight cannot have the layout "bricks"; None if it can."""
    if shape[0] % BRICK or shape[-1] % BRICK:
        return f"bricks need K and N that are multiples of {BRICK}, got {list(shape)}"
    return None


def _codes(q: QTensor) -> Array:
    """Codes [K, ...] uint8."""
    if q.layout == BRICKS:
        return unpack_bricks(q.words, q.kind)
    return unpack(q.words, q.kind, q.shape[0])


def pack(codes: Array, kind: str) -> Array:
    """Pack codes [K, ...] along K, as unsigned integers, into words [K/8 or K/4, ...] int32."""
    bits = BITS[kind]
    per_word = 32 // bits
    k, *outs = codes.shape
    codes = jnp.pad(codes, ((0, -k % per_word), *((0, 0),) * len(outs))).astype(jnp.uint32)
    codes = codes.reshape(-1, per_word, *outs)
    words = jnp.sum(codes << _shifts(bits, len(outs)), axis=1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack(words: Array, kind: str, k: int) -> Array:
    """The inverse of `pack`: codes [K, ...] uint8."""
    bits = BITS[kind]
    words = lax.bitcast_convert_type(words, jnp.uint32)[:, None]
    codes = (words >> _shifts(bits, words.ndim - 2)) & jnp.uint32(2**bits - 1)
    return codes.astype(jnp.uint8).reshape(-1, *words.shape[2:])[:k]


def _shifts(bits: int, outs: int) -> Array:
    return jnp.arange(0, 32, bits, dtype=jnp.uint32).reshape(1, -1, *[1] * outs)


def dequantise(q: QTensor, dtype: Any) -> Array:
    """The weight [K,N] or [K,2,N], computed in fp32 and rounded once.

    Raises:
      ValueError: the arrays do not fit together.
    """
    check(q, "dequantise")
    _, *outs = q.shape
    codes = _codes(q)
    if q.kind == "fp8":
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    elif q.kind == "fp4":
        if q.layout == BRICKS:
            # Without the barrier, XLA moves several arrays of int32 instead of the codes.
            codes = lax.optimization_barrier(codes)
        codes = _e2m1(codes)
    values = codes.astype(jnp.float32).reshape(-1, q.group, *outs)
    if q.zeros is not None:
        values -= q.zeros.astype(jnp.float32)[:, None]
    elif q.kind not in _FLOATS:
        values -= 2.0 ** (BITS[q.kind] - 1)
    values *= q.scales.astype(jnp.float32)[:, None]
    return values.reshape(q.shape).astype(dtype)


def _e2m1(codes: Array) -> Array:
    """The values of float4_e2m1fn codes. XLA can convert this dtype only on few devices."""
    codes = codes.astype(jnp.int32)
    exponent, fraction = codes >> 1 & 3, codes & 1
    # 0, 1/2, 1, 3/2, 2, 3, 4, 6, as halves.
    halves = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes >= 8, -0.5, 0.5) * halves.astype(jnp.float32)


def check(q: QTensor, op: str, *, stacked: bool = False) -> None:
    """Raise ValueError if the arrays of a weight do not fit together.

    Args:
      q: the weight.
      op: name at the beginning of the error message.
      stacked: whether the arrays have a leading axis.
    """
    kind, (k, *outs) = q.format.kind, q.shape
    if k % q.group:
        raise ValueError(f"{op}: group must divide K = {k}, got {q.group}")
    if len(q.stack) != stacked:
        raise ValueError(f"{op}: w must have {int(stacked)} axes before {list(q.shape)}")
    factors = (k // q.group, *outs)
    shapes = {"scales": factors, "zeros": factors}
    shapes["words"] = words_shape(kind, q.shape, q.layout)
    for name, shape in shapes.items():
        array = getattr(q, name)
        if array is None:
            continue
        want = (*q.stack, *shape)
        if array.shape != want:
            raise ValueError(f"{op}: w.{name} must be {list(want)}, got {list(array.shape)}")
        dtype = jnp.int32 if name == "words" else jnp.floating
        if not jnp.issubdtype(array.dtype, dtype):
            raise ValueError(f"{op}: w.{name} must be {dtype.__name__}, got {array.dtype}")


def is_quantised(leaf: Any) -> bool:
    """Whether an object is a `QTensor`, for the argument `is_leaf` of `jax.tree` functions."""
    return isinstance(leaf, QTensor)


def random_quantised(key: Array, like: QTensor, deviation: float) -> QTensor:
    """A random weight with mean 0 and the shapes of another weight.

    Args:
      key: key of JAX's random numbers.
      like: the other weight; only shapes and dtypes are used.
      deviation: standard deviation of the weights.
    """
    if like.stack:
        one = jax.eval_shape(lambda q: jax.tree.map(lambda a: a[0], q), like)
        keys = jax.random.split(key, like.stack[0])
        return lax.map(lambda key: random_quantised(key, one, deviation), keys)
    levels = 2 ** BITS[like.kind]
    if like.kind == "fp8":
        values = jax.random.normal(key, like.shape).astype(jnp.float8_e4m3fn)
        codes, scale = lax.bitcast_convert_type(values, jnp.uint8), deviation
    else:
        codes = jax.random.bits(key, like.shape, jnp.uint8) & jnp.uint8(levels - 1)
        spread = _E2M1_DEVIATION
        if like.kind != "fp4":
            # Codes lie around levels / 2, except for the smallest. With a mean below 0, all values
            # of a row would become alike from layer to layer, and scores of attention huge.
            middle, largest = levels // 2, levels // 2 - 1
            codes = jnp.where(codes == 0, jnp.uint8(middle), codes)
            spread = math.sqrt(largest * (largest + 1) * (2 * largest + 1) / (3 * levels))
        scale = deviation / spread
    scales = jnp.full_like(like.scales, scale)
    zeros = None if like.zeros is None else jnp.full_like(like.zeros, levels / 2)
    words = pack(codes, like.kind)
    plain = dataclasses.replace(like, words=words, scales=scales, zeros=zeros, layout=PLAIN)
    return in_layout(plain, like.layout)


def refuse_quantised(op: str, *weights: Array | QTensor) -> None:
    """Raise NotImplementedError if one of the weights is quantised."""
    if found := sorted({w.kind for w in weights if isinstance(w, QTensor)}):
        raise NotImplementedError(f"{op}: cannot do weights in {', '.join(found)}")
