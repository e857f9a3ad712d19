"""The state of a batch in flight: one pytree, allocated once and donated to every program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from fdjax.models import Model
from fdjax.pallas_kernels.attention.cache import Cache, QuantisedCache
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.sampling.beams import BeamState

# One layer's cache: keys and values, each [B, Hkv, S, D].
LayerCache = tuple[Cache, Cache]

# One layer of a `StackedCache`: the whole cache, and the layer's index, [] int32. The index is
# traced, so that equal layers share one lowering.
StackedLayer = tuple[Cache, Cache, Array]

# Actions of `restart` for a row.
KEEP, EMPTY = 0, 1

# Cache slots are a multiple of this, so that a chunk of a prompt always fits. A page has as many.
SLOT_MULTIPLE = 128

# Page 0 of a pool is never handed out. Rows without work write to it.
NOBODYS_PAGE = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedCache:
    """The cache of all layers: rows, or pages of rows.

    Attributes:
      k, v: [L, B, Hkv, S, D], or a pool of pages [L, P, Hkv, 128, D].
    """

    k: Cache
    v: Cache

    def layer(self, i: int) -> StackedLayer:
        """Layer i of the cache."""
        return self.k, self.v, jnp.int32(i)

    def updated(self, i: int, layer: StackedLayer) -> "StackedCache":
        """The cache after layer i was updated."""
        return StackedCache(*layer[:2])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch in flight.

    Attributes:
      kv: one `LayerCache` per layer, or a `StackedCache`. Slots at and past `lengths` are
        meaningless.
      ids: [B, S] int32 token in each slot.
      progress: [4, B] int32, whose rows are the properties `lengths`, `tokens`, `steps` and
        `finished`. It is one array because each donated array costs the host microseconds per call.
      beams: the beams among the rows, or None if there are none.
    """

    kv: list[LayerCache] | StackedCache
    ids: Array
    progress: Array
    beams: BeamState | None = None

    @property
    def lengths(self) -> Array:
        """[B] int32 slots filled."""
        return self.progress[0]

    @property
    def tokens(self) -> Array:
        """[B] int32 last chosen token, which has no slot yet."""
        return self.progress[1]

    @property
    def steps(self) -> Array:
        """[B] int32 tokens chosen so far."""
        return self.progress[2]

    @property
    def finished(self) -> Array:
        """[B] bool; an empty row is finished."""
        return self.progress[3] != 0

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return self.ids.shape[0]

    @property
    def slots(self) -> int:
        """Number of slots per row, S."""
        return self.ids.shape[1]

    def first(self, rows: int) -> "DecodeState":
        """The state of the first rows. It has the whole cache."""
        beams = jax.tree.map(lambda a: a[:rows], self.beams)
        return DecodeState(self.kv, self.ids[:rows], self.progress[:, :rows], beams)

    def with_first(self, state: "DecodeState") -> "DecodeState":
        """A copy whose first rows, and whose cache, are those of `state`."""
        n = state.batch
        ids, beams = jax.tree.map(
            lambda a, new: a.at[:n].set(new), (self.ids, self.beams), (state.ids, state.beams)
        )
        return DecodeState(state.kv, ids, self.progress.at[:, :n].set(state.progress), beams)


def pack_progress(lengths: Array, tokens: Array, steps: Array, finished: Array) -> Array:
    """Pack four arrays [B] into `DecodeState.progress` [4, B]."""
    return jnp.stack([lengths, tokens, steps, finished.astype(jnp.int32)])


def abstract_cache(
    model: Model, batch: int, slots: int, stacked: bool = False
) -> list[LayerCache] | StackedCache:
    """Shapes and dtypes of the cache that `init_cache` makes."""
    c = model.config
    shape = (batch, c.kv_heads, slots, c.head_dim)
    shape = (c.layers, *shape) if stacked else shape
    if model.kv_dtype == "int8":
        one = QuantisedCache.abstract(shape, model.dtype)
    else:
        one = jax.ShapeDtypeStruct(shape, jnp.dtype(model.dtype))
    return StackedCache(one, one) if stacked else [(one, one)] * c.layers


def _zeros(like: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Array:
    return jnp.zeros(like.shape, like.dtype)


def init_cache(
    model: Model,
    batch: int,
    slots: int,
    stacked: bool = False,
    zeros: Callable[[jax.ShapeDtypeStruct, PartitionSpec], Array] = _zeros,
) -> list[LayerCache] | StackedCache:
    """An empty cache of `slots` tokens per row for every layer, stacked or one per layer.

    `zeros` is a function of (shape and dtype of a device's part, `PartitionSpec`) that makes an
    array.
    """
    cache = abstract_cache(model, batch, slots, stacked)
    return jax.tree.map(zeros, cache, kv_specs(cache))


def init_pool(
    model: Model,
    pages: int,
    zeros: Callable[[jax.ShapeDtypeStruct, PartitionSpec], Array] = _zeros,
) -> StackedCache:
    """An empty cache of a number of pages."""
    return init_cache(model, pages, SLOT_MULTIPLE, stacked=True, zeros=zeros)


def page_bytes(model: Model) -> int:
    """Bytes of a page on a device, over all layers."""
    return cache_bytes(model, 1, SLOT_MULTIPLE)


def page_tokens(model: Model) -> int:
    """Tokens of a page, on all devices that divide the tokens of a KV head."""
    return SLOT_MULTIPLE * model.token_ranks


def abstract_state(model: Model, stacked: bool = False, beams: bool = False) -> DecodeState:
    """The pytree structure of a state."""
    kv = abstract_cache(model, 1, 1, stacked)
    return DecodeState(kv, ids=0, progress=0, beams=BeamState(0, 0, 0, 0) if beams else None)


def without_cache(state: DecodeState) -> DecodeState:
    """The rest of a state, for programs that need no cache."""
    return dataclasses.replace(state, kv=[])


def state_specs(model: Model, stacked: bool = False, beams: bool = False) -> DecodeState:
    """How devices that share a model divide a state: the cache by KV heads."""
    whole, shape = PartitionSpec(), abstract_state(model, stacked, beams)
    specs = jax.tree.map(lambda _: whole, shape)
    return dataclasses.replace(specs, kv=kv_specs(shape.kv))


def kv_specs(kv: Any) -> Any:
    """How devices divide a cache: a tree of `PartitionSpec`s with the structure of `kv`."""
    axes = 2 if isinstance(kv, StackedCache) else 1
    return jax.tree.map(lambda _: PartitionSpec(*[None] * axes, AXIS), kv)


def cache_bytes(model: Model, batch: int, slots: int) -> int:
    """Bytes of the cache that `init_cache` makes."""
    leaves = jax.tree.leaves(abstract_cache(model, batch, slots, stacked=True))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def copy_pages(kv: StackedCache, sources: Array, targets: Array, count: Array) -> StackedCache:
    """A pool in which the first `count` of `targets` have the content of `sources`; both [N]."""

    def copy(i, pool):
        page = lax.dynamic_slice_in_dim(pool, sources[i], 1, axis=1)
        return lax.dynamic_update_slice_in_dim(pool, page, targets[i], axis=1)

    # One at a time, so that only one page exists twice.
    return lax.fori_loop(0, count, lambda i, kv: jax.tree.map(functools.partial(copy, i), kv), kv)


def start_in_pages(kv: StackedCache, batch: int, slots: int) -> DecodeState:
    """Like `start`, for a pool of pages and rows of up to `slots` slots."""
    return DecodeState(kv, np.zeros((batch, slots), np.int32), np.zeros((4, batch), np.int32))


def start(kv: list[LayerCache] | StackedCache) -> DecodeState:
    """A batch whose prompts are not processed yet.

    All arrays but the cache are on the host. The first call transfers them, which costs a tenth of
    making them on the device one by one.

    Args:
      kv: caches with any content.
    """
    batch, _, slots, _ = jax.tree.leaves(kv)[0].shape[-4:]
    return DecodeState(kv, np.zeros((batch, slots), np.int32), np.zeros((4, batch), np.int32))


def restart(state: DecodeState, rows: Array) -> DecodeState:
    """Reset some rows of a state as `start` makes them. Arrays on the device stay there.

    Args:
      state: a state with any content.
      rows: [B] int32. `KEEP` leaves a row as it is, `EMPTY` finishes it until its next prompt has
        been processed.
    """
    anew, zeros = rows != KEEP, jnp.zeros_like(rows)
    progress = pack_progress(zeros, zeros, zeros, rows == EMPTY)
    return dataclasses.replace(
        state,
        ids=jnp.where(anew[:, None], 0, state.ids),
        progress=jnp.where(anew, progress, state.progress),
    )
