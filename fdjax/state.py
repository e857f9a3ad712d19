"""All state of a batch in flight: one pytree, allocated once, donated to every program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.models import Model
from fdjax.sampling import Sampling

# One layer's cache: keys and values, each [B, Hkv, S, D].
LayerCache = tuple[Array, Array]

# Cache slots come in multiples of this, so that a chunk of a prompt never sticks out.
SLOT_MULTIPLE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch in flight.

    Attributes:
      kv: one `LayerCache` per layer; slots at and past `lengths` hold nothing of meaning.
      lengths: [B] int32 slots filled.
      tokens: [B] int32 the last chosen token, not yet in the cache.
      steps: [B] int32 tokens chosen so far.
      finished: [B] bool; an unused row is finished.
      sampling: what each row asked for.
    """

    kv: list[LayerCache]
    lengths: Array
    tokens: Array
    steps: Array
    finished: Array
    sampling: Sampling

    @property
    def batch(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.kv[0][0].shape[2]


def init_cache(model: Model, batch: int, slots: int) -> list[LayerCache]:
    """An empty cache of `slots` tokens per row for every layer."""
    c = model.config
    shape = (batch, c.kv_heads, slots, c.head_dim)
    return [(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)) for _ in range(c.layers)]


def abstract_state(model: Model) -> DecodeState:
    """The structure of a state, with nothing in it."""
    fields = [f.name for f in dataclasses.fields(Sampling)]
    return DecodeState(
        kv=[(0, 0)] * model.config.layers,
        lengths=0,
        tokens=0,
        steps=0,
        finished=0,
        sampling=Sampling(**dict.fromkeys(fields, 0)),
    )


def cache_bytes(model: Model, batch: int, slots: int) -> int:
    """Bytes of `init_cache`."""
    itemsize = jnp.dtype(model.dtype).itemsize
    return batch * slots * model.config.kv_bytes_per_token(itemsize)


def start(kv: list[LayerCache], sampling: Sampling, used: np.ndarray) -> DecodeState:
    """A batch whose prompts are not yet processed.

    Args:
      kv: caches, of any content.
      sampling: per-row values.
      used: [B] bool rows that hold a request.
    """
    # Separate arrays: a donated buffer must not appear twice.
    lengths, tokens, steps = np.zeros((3, len(used)), np.int32)
    return DecodeState(
        kv=kv, lengths=lengths, tokens=tokens, steps=steps, finished=~used, sampling=sampling
    )
