"""Activations of linear layers."""

import jax

# Activations of gates, which `matmul` fuses.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
# Activations of an MLP without a gate.
UNGATED = ACTIVATIONS | {"relu": jax.nn.relu}
