"""Interfaces between a decoder block and the owner of the cache."""

from typing import Any, Protocol, Self

from jax import Array

from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.norm import HeadNorms


class Attend(Protocol):
    """A function for attention against a cache that the model does not know.

    A block passes its projection of the new tokens, qkv [B,T,Hkv,G+2,D]: for each KV head its G
    queries, its key and its value, before RoPE. It also passes its layer's part of the cache. It
    gets back o [B,T,H,D] and the updated part. The owner of the cache knows the positions and does
    RoPE, append and attention, fused or not. The function must be pure, because equal blocks are
    traced once. With `spec.sinks`, a block also passes its sinks [H]. A block that normalises each
    query and key before RoPE passes both norms, with scales [D].
    """

    def __call__(
        self,
        spec: AttentionSpec,
        kv: Any,
        qkv: Array,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Any]:
        """Compute one layer's attention; returns (o, updated part of the cache)."""
        ...


class Stack(Protocol):
    """The caches of all layers in one pytree, which passes through the layers as a whole."""

    def layer(self, i: int) -> Any:
        """The part of layer i, as `Attend` takes and returns it."""
        ...

    def updated(self, i: int, layer: Any) -> Self:
        """The caches after `Attend` has returned layer i."""
        ...
