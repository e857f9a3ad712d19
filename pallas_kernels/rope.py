"""Rotary position embedding (Su et al. 2021, section 3.4.2), half-split as in Hugging Face.

Frequencies are a static property of a model, so they are computed with NumPy when a program is
traced. Memory bound; meant to be fused into whatever reads q and k.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

SCALINGS = ("default", "llama3")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Static description of a rotary embedding.

    Attributes:
      dim: rotated dimensions of a head (all of them, or the first `dim`).
      theta: base of the frequencies.
      scaling: "default" or "llama3".
      factor, low_freq_factor, high_freq_factor, original_max_position: the llama3 scaling.
    """

    dim: int
    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"Rope: dim must be positive and even, got {self.dim}")
        if self.scaling not in SCALINGS:
            raise ValueError(
                f"Rope: scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}"
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(
                f"Rope: theta and factor must be positive, got {self.theta} and {self.factor}"
            )
        if self.scaling == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "Rope: low_freq_factor must be below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def inverse_frequencies(self) -> np.ndarray:
        """[dim/2] float32 angles per position."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        frequencies = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.scaling == "llama3":
            frequencies = self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: np.ndarray) -> np.ndarray:
        """Llama 3.1: keep high frequencies, divide low ones by `factor`, blend in between."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_max_position / wavelengths
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return ((1 - blend) * frequencies / self.factor + blend * frequencies).astype(np.float32)


def apply_rope(x: Array, positions: Array, rope: Rope) -> Array:
    """Rotate the heads of x by their positions.

    Args:
      x: [B, T, H, D].
      positions: [B, T] int32, absolute.
      rope: static description; `rope.dim` <= D, dimensions past it are passed through.

    Returns:
      [B, T, H, D] in the dtype of x; angles and rotation are computed in fp32.

    Raises:
      ValueError: shapes disagree.
    """
    if x.ndim != 4 or positions.shape != x.shape[:2]:
        raise ValueError(
            f"apply_rope: x must be [B,T,H,D] and positions [B,T], got {list(x.shape)} "
            f"and {list(positions.shape)}"
        )
    if rope.dim > x.shape[-1]:
        raise ValueError(f"apply_rope: rope.dim {rope.dim} exceeds the head dim {x.shape[-1]}")
    frequencies = jnp.asarray(rope.inverse_frequencies())
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    rotated = x[..., : rope.dim].astype(jnp.float32)
    a, b = jnp.split(rotated, 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    if rope.dim == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., rope.dim :]], axis=-1)
