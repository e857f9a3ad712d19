"""All state of a batch in flight: one pytree, allocated once, donated to every program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.models import Model

# One layer's cache: keys and values, each [B, Hkv, S, D].
LayerCache = tuple[Array, Array]

# One layer of a `StackedCache`: all of that, and which layer it is, [] int32; traced, so that
# layers that are alike share what is lowered.
StackedLayer = tuple[Array, Array, Array]

# What `restart` does with a row.
KEEP, START, EMPTY = 0, 1, 2

# Cache slots come in multiples of this, so that a chunk of a prompt never sticks out.
SLOT_MULTIPLE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedCache:
    """The cache of all layers, for programs that run them in one launch.

    Attributes:
      k, v: [L, B, Hkv, S, D].
    """

    k: Array
    v: Array

    def layer(self, index: Array) -> StackedLayer:
        """One layer of it."""
        return self.k, self.v, index

    def updated(self, layer: StackedLayer) -> "StackedCache":
        """The cache with that layer as it is now."""
        return StackedCache(*layer[:2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch in flight.

    Attributes:
      kv: one `LayerCache` per layer, or all in one; slots at and past `lengths` hold nothing of
        meaning.
      ids: [B, S] int32 the token in each slot.
      progress: [4, B] int32, of which the properties `lengths`, `tokens`, `steps` and `finished`
        are the rows; in one array because each that is donated costs the host microseconds a call.
    """

    kv: list[LayerCache] | StackedCache
    ids: Array
    progress: Array

    @property
    def lengths(self) -> Array:
        """[B] int32 slots filled."""
        return self.progress[0]

    @property
    def tokens(self) -> Array:
        """[B] int32 the last chosen token, not yet in a slot."""
        return self.progress[1]

    @property
    def steps(self) -> Array:
        """[B] int32 tokens chosen so far."""
        return self.progress[2]

    @property
    def finished(self) -> Array:
        """[B] bool; an unused row is finished."""
        return self.progress[3] != 0

    @property
    def batch(self) -> int:
        """B."""
        return self.ids.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.ids.shape[1]


def pack_progress(lengths: Array, tokens: Array, steps: Array, finished: Array) -> Array:
    """[4, B] from [B] each."""
    return jnp.stack([lengths, tokens, steps, finished.astype(jnp.int32)])


def init_cache(
    model: Model, batch: int, slots: int, stacked: bool = False
) -> list[LayerCache] | StackedCache:
    """An empty cache of `slots` tokens per row for every layer, `stacked` in one or apart."""
    c = model.config
    shape = (batch, c.kv_heads, slots, c.head_dim)
    if stacked:
        shape = (c.layers, *shape)
        return StackedCache(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype))
    return [(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)) for _ in range(c.layers)]


def abstract_state(model: Model, stacked: bool = False) -> DecodeState:
    """The structure of a state, with nothing in it."""
    kv = StackedCache(0, 0) if stacked else [(0, 0)] * model.config.layers
    return DecodeState(kv=kv, ids=0, progress=0)


def cache_bytes(model: Model, batch: int, slots: int) -> int:
    """Bytes of `init_cache`."""
    itemsize = jnp.dtype(model.dtype).itemsize
    return batch * slots * model.config.kv_bytes_per_token(itemsize)


def start(kv: list[LayerCache] | StackedCache) -> DecodeState:
    """A batch whose prompts are not yet processed.

    What is not cache is on the host still: it travels with the first call, which costs a tenth of
    what arrays made one by one do.

    Args:
      kv: caches, of any content.
    """
    batch, _, slots, _ = jax.tree.leaves(kv)[0].shape[-4:]
    return DecodeState(kv, np.zeros((batch, slots), np.int32), np.zeros((4, batch), np.int32))


def restart(state: DecodeState, rows: Array) -> DecodeState:
    """The state with some rows as those of `start`; where they are on the device, they stay there.

    Args:
      state: of any content.
      rows: [B] int32. `KEEP` leaves a row as it is, `START` begins it anew, `EMPTY` also marks it
        as finished.
    """
    anew, zeros = rows != KEEP, jnp.zeros_like(rows)
    progress = pack_progress(zeros, zeros, zeros, rows == EMPTY)
    return DecodeState(
        state.kv,
        jnp.where(anew[:, None], 0, state.ids),
        jnp.where(anew, progress, state.progress),
    )
