"""Activations of linear layers."""

import jax
import jax.numpy as jnp

# Activations of gates, which `matmul` fuses: act(gate) * up.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
# Activations of an MLP without a gate. `jax.nn.relu` has its own derivative, which Pallas cannot
# lower for Mosaic GPU.
UNGATED = ACTIVATIONS | {"relu": lambda x: jnp.maximum(x, 0)}
# Constants of gpt-oss (OpenAI 2025): slope of the sigmoid, limit of gate and up.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def _clamped_swiglu(gate, up):
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


# Other functions of (gate, up). Only `moe` takes them.
PAIRED = {"clamped_swiglu": _clamped_swiglu}


def gated(name, gate, up):
    """The hidden values of an MLP with a gate.

    Args:
      name: a key of `ACTIVATIONS` or `PAIRED`.
      gate, up: [...] of one shape.
    """
    return PAIRED[name](gate, up) if name in PAIRED else ACTIVATIONS[name](gate) * up
