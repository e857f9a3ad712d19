"""What a decoder block asks of whoever owns the cache."""

from typing import Any, Protocol, Self

from jax import Array

from fdjax.pallas_kernels.attention.spec import AttentionSpec


class Attend(Protocol):
    """Attention against a cache the model knows nothing of.

    A block hands over what its projection gave for the new tokens, qkv [B,T,Hkv,G+2,D]: the G
    queries of a KV head, its key, its value, before RoPE and after any q/k norm. With it goes its
    layer's part of the cache; it gets o [B,T,H,D] and that part updated. The owner of the cache
    knows the positions; RoPE, append and attention are its business, fused or not. A pure function:
    blocks that are alike are traced once.
    """

    def __call__(self, spec: AttentionSpec, kv: Any, qkv: Array) -> tuple[Array, Any]:
        """One layer's attention."""
        ...


class Stack(Protocol):
    """The caches of all layers in one pytree, which goes through the layers whole."""

    def layer(self, index: Array) -> Any:
        """What `Attend` takes and returns as the part of the layer `index`, [] int32."""
        ...

    def updated(self, layer: Any) -> Self:
        """The caches with a layer as `Attend` returned it."""
        ...
