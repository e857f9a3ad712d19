"""Rotary position embedding (Su et al. 2021, section 3.4.2), half-split as in Hugging Face.

Frequencies are a static property of a model: NumPy computes them when a program is traced. Only the
frequencies of `Dynamic` and `LongRope` depend on the length of a sequence. The rotation is memory
bound and meant to be fused into the operation that reads q and k.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): divides every frequency by `factor`."""

    factor: float

    def __post_init__(self):
        _check_positive(self, "factor")

    def inverse_frequencies(self, dim: int, theta: float) -> np.ndarray:
        """[dim/2] float32."""
        return _plain(dim, theta) / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1: keeps high frequencies, divides low ones by `factor`, blends in between.

    Attributes:
      factor: divisor of the low frequencies.
      low_freq_factor, high_freq_factor: rotations within the original length between which the
        two are blended.
      original_max_position: context length of the first training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        _check_positive(self, "factor")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "Rope: low_freq_factor must be below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def inverse_frequencies(self, dim: int, theta: float) -> np.ndarray:
        """[dim/2] float32."""
        frequencies = _plain(dim, theta)
        rotations = self.original_max_position / (2 * math.pi / frequencies)
        blend = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return ((1 - blend) * frequencies / self.factor + blend * frequencies).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, section 3.2): a ramp from unchanged to divided frequencies.

    Attributes:
      factor: divisor of the low frequencies.
      original_max_position: context length of the first training, in tokens.
      attention_factor: multiplies rotated q and k (section 3.4).
      beta_fast, beta_slow: rotations within the original length where the ramp begins and ends.
      truncate: whether the ramp begins and ends at whole pairs.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        _check_positive(self, "factor", "original_max_position", "attention_factor", "beta_slow")
        if not self.beta_slow < self.beta_fast:
            raise ValueError(
                "Rope: beta_slow must be below beta_fast, "
                f"got {self.beta_slow} and {self.beta_fast}"
            )

    def inverse_frequencies(self, dim: int, theta: float) -> np.ndarray:
        """[dim/2] float32."""
        low, high = (
            self._pair(rotations, dim, theta) for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # A ramp of zero width is a step.
        width = high - low or 1e-3
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
        plain = _plain(dim, theta)
        return (plain / self.factor * ramp + plain * (1 - ramp)).astype(np.float32)

    def _pair(self, rotations: float, dim: int, theta: float) -> float:
        """The pair of dimensions that makes `rotations` within the original length."""
        return (
            dim
            * math.log(self.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Dynamic NTK: beyond the original length, theta grows with the sequence.

    The frequencies of a token come from the length of the sequence when the token was processed:
    the prompt's length for its tokens, position + 1 for each later token. Keys in the cache are not
    rotated again. transformers does the same with a cache and one sequence.

    Attributes:
      factor: how fast theta grows.
      original_max_position: length up to which nothing is scaled, in tokens.
    """

    factor: float
    original_max_position: int

    def __post_init__(self):
        _check_positive(self, "factor", "original_max_position")

    def lengths(self, positions: Array, prompt: Array, limit: Array) -> Array:
        """[B, T] the length that sets each token's frequencies."""
        return jnp.maximum(prompt[:, None], positions + 1)

    def inverse_frequencies(self, dim: int, theta: float, lengths: Array) -> Array:
        """lengths [...] int32 → [..., dim/2] float32."""
        grown = jnp.maximum(lengths, self.original_max_position).astype(jnp.float32)
        growth = self.factor * grown / self.original_max_position - (self.factor - 1)
        base = theta * growth ** (dim / (dim - 2))
        exponents = _exponents(dim).reshape((1,) * base.ndim + (-1,))
        return 1 / base[..., None] ** exponents


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): one divisor per pair, from a short or a long set.

    A sequence that may outgrow the original length uses the long set from its first token, because
    keys rotated with different sets do not fit together in one cache.

    Attributes:
      short_factors, long_factors: [dim/2] divisors.
      original_max_position: length up to which the short set applies, in tokens.
      attention_factor: multiplies rotated q and k.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def __post_init__(self):
        _check_positive(self, "original_max_position", "attention_factor")
        if not all(f > 0 for f in (*self.short_factors, *self.long_factors)):
            raise ValueError("Rope: short_factors and long_factors must be positive")

    def lengths(self, positions: Array, prompt: Array, limit: Array) -> Array:
        """[B, 1] the length that sets each token's frequencies."""
        return limit[:, None]

    def inverse_frequencies(self, dim: int, theta: float, lengths: Array) -> Array:
        """lengths [...] int32 → [..., dim/2] float32."""
        powers = np.float32(theta) ** _exponents(dim)
        short, long = (
            jnp.asarray(1 / (np.float32(factors) * powers)).reshape((1,) * lengths.ndim + (-1,))
            for factors in (self.short_factors, self.long_factors)
        )
        return jnp.where((lengths > self.original_max_position)[..., None], long, short)


Scaling = LinearScaling | Llama3 | Yarn | Dynamic | LongRope


@dataclasses.dataclass(frozen=True)
class Rope:
    """Static description of a rotary embedding.

    Attributes:
      dim: number of rotated dimensions of a head.
      theta: base of the frequencies.
      scaling: changes the frequencies for long contexts, or None.
      span: dimensions i and i + span/2 form pair i, for i below dim/2; others stay as they are.
        Default dim, so that the first dimensions rotate. Kernels take the size of a head.
    """

    dim: int
    theta: float
    scaling: Scaling | None = None
    span: int | None = None

    def __post_init__(self):
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"Rope: dim must be positive and even, got {self.dim}")
        if self.span is not None and (self.span < self.dim or self.span % 2):
            raise ValueError(
                f"Rope: span must be even and at least dim, got {self.span} and {self.dim}"
            )
        if not self.theta > 1:
            raise ValueError(f"Rope: theta must exceed 1, got {self.theta}")
        if isinstance(self.scaling, Dynamic) and self.dim < 4:
            raise ValueError(f"Rope: dynamic scaling needs dim of at least 4, got {self.dim}")
        if isinstance(self.scaling, LongRope):
            counts = [len(self.scaling.short_factors), len(self.scaling.long_factors)]
            if counts != [self.dim // 2] * 2:
                raise ValueError(
                    f"Rope: short_factors and long_factors must have {self.dim // 2} values "
                    f"each, got {counts[0]} and {counts[1]}"
                )

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of a sequence."""
        return isinstance(self.scaling, Dynamic | LongRope)

    @property
    def attention_factor(self) -> float:
        """Factor that multiplies rotated q and k."""
        return getattr(self.scaling, "attention_factor", 1.0)

    def inverse_frequencies(self, lengths: Array | None = None) -> np.ndarray | Array:
        """Angles per position, float32.

        Args:
          lengths: [...] int32 lengths of the sequences, needed if frequencies depend on them.

        Returns:
          [dim/2], or [..., dim/2] if frequencies depend on lengths.
        """
        if self.scaling is None:
            return _plain(self.dim, self.theta)
        if self.depends_on_length:
            return self.scaling.inverse_frequencies(self.dim, self.theta, lengths)
        return self.scaling.inverse_frequencies(self.dim, self.theta)


def rotation(
    positions: Array, rope: Rope, *, prompt: Array | None = None, limit: Array | None = None
) -> tuple[Array, Array]:
    """The angles of a rotary embedding; all heads and all layers with the same `Rope` share them.

    Args:
      positions: [B, T] int32, absolute.
      rope: static description.
      prompt: [B] int32 tokens of each prompt; needed if frequencies depend on lengths.
      limit: [B] int32 largest number of tokens of each sequence; needed with `prompt`.

    Returns:
      (cos, sin), each [B, T, N] fp32, times the attention factor; N is rope.dim / 2, or
      rope.span / 2 with 1 and 0 for dimensions that stay as they are.

    Raises:
      ValueError: frequencies depend on lengths and `prompt` or `limit` is not [B].
    """
    if rope.depends_on_length:
        for name, lengths in (("prompt", prompt), ("limit", limit)):
            if lengths is None or lengths.shape != positions.shape[:1]:
                given = None if lengths is None else list(lengths.shape)
                raise ValueError(
                    f"rotation: {type(rope.scaling).__name__} needs {name} "
                    f"[{positions.shape[0]}], got {given}"
                )
        lengths = rope.scaling.lengths(positions, prompt, limit)
        frequencies = rope.inverse_frequencies(lengths)
    else:
        frequencies = jnp.asarray(rope.inverse_frequencies())[None, None]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    if rope.span is not None:
        rest = (0, 0), (0, 0), (0, (rope.span - rope.dim) // 2)
        cos, sin = (jnp.pad(a, rest, constant_values=fill) for a, fill in ((cos, 1), (sin, 0)))
    return cos, sin


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the heads of x [B,T,H,D] by cos and sin [B,T,dim/2] from `rotation`.

    Returns [B,T,H,D] in the dtype of x. It computes in fp32; dimensions past dim stay as they are.
    """
    dim = 2 * cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = x[..., :dim].astype(jnp.float32)
    a, b = jnp.split(rotated, 2, axis=-1)
    turned = _product(a, cos) - _product(b, sin), _product(b, cos) + _product(a, sin)
    rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    if dim == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., dim:]], axis=-1)


def apply_rope(
    x: Array,
    positions: Array,
    rope: Rope,
    *,
    prompt: Array | None = None,
    limit: Array | None = None,
) -> Array:
    """Rotate the heads of x by their positions.

    Args:
      x: [B, T, H, D].
      positions: [B, T] int32, absolute.
      rope: static description, `rope.dim` <= D; dimensions past it stay as they are.
      prompt, limit: see `rotation`.

    Returns:
      [B, T, H, D] in the dtype of x; angles and rotation are computed in fp32.

    Raises:
      ValueError: shapes disagree, x is not floating point, or see `rotation`.
    """
    if x.ndim != 4 or positions.shape != x.shape[:2]:
        raise ValueError(
            f"apply_rope: x must be [B,T,H,D] and positions [B,T], got {list(x.shape)} "
            f"and {list(positions.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"apply_rope: x must be floating point, got {x.dtype}")
    if (size := rope.span or rope.dim) > x.shape[-1]:
        raise ValueError(f"apply_rope: rope.dim {size} exceeds the head dim {x.shape[-1]}")
    return rotate(x, *rotation(positions, rope, prompt=prompt, limit=limit))


def _product(a: Array, b: Array) -> Array:
    """a * b, rounded before anything is added to it.

    A CPU compiler may fuse one of two products with their sum into an FMA. The shape decides which
    one, so a row's bits would depend on its batch. The bound below changes no finite value, but the
    compiler does not know that and keeps it between product and sum.
    """
    return jnp.maximum(a * b, jnp.finfo(jnp.float32).min)


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _plain(dim: int, theta: float) -> np.ndarray:
    """[dim/2] float32: theta ** (-2i / dim)."""
    return (1.0 / np.float32(theta) ** _exponents(dim)).astype(np.float32)


def _check_positive(scaling: Scaling, *names: str) -> None:
    for name in names:
        if not getattr(scaling, name) > 0:
            raise ValueError(f"Rope: {name} must be positive, got {getattr(scaling, name)}")
