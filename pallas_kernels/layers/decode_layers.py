"""All layers of a decode step: attention, output projection and gated MLP, layer after layer.

Memory bound: it must read every weight and the live part of the cache once. One launch for all
layers keeps memory busy while one operation waits for another. It also saves the host time that
each launch and each array costs.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.pallas_kernels.activations import ACTIVATIONS
from fdjax.pallas_kernels.all_reduce import all_reduce
from fdjax.pallas_kernels.attention.append import append_decode_attention
from fdjax.pallas_kernels.attention.cache import Cache, check_caches, features_of
from fdjax.pallas_kernels.attention.operands import row_slots
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Dispatch, Features, Implementation, resolve
from fdjax.pallas_kernels.gemm.linear import matmul
from fdjax.pallas_kernels.layers.hopper.decode_layers import LAYERS_HOPPER
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.quantised import (
    WEIGHT_FEATURES,
    QTensor,
    WeightFormat,
    check,
    is_quantised,
)


class LayerWeights(NamedTuple):
    """Weights of all layers, stacked in one array for each kind.

    Attributes:
      attention_norm, mlp_norm: [L, E] scales of the RMS norms.
      qkv: [L, E, Hkv, G+2, D]: for each KV head its G queries, its key and its value.
      out: [L, H·D, E].
      gate_up: [L, E, 2, F], gate, then up.
      down: [L, F, E].

    All products may be stacks of quantised weights instead, of one format. qkv is then [E, N].
    """

    attention_norm: Array
    qkv: Array | QTensor
    out: Array | QTensor
    mlp_norm: Array
    gate_up: Array | QTensor
    down: Array | QTensor

    @property
    def products(self) -> dict[str, Array | QTensor]:
        """The weights of the products by name."""
        return {name: getattr(self, name) for name in ("qkv", "out", "gate_up", "down")}


def decode_layers(
    x: Array,
    k: Cache,
    v: Cache,
    lengths: Array,
    rotation: tuple[Array, Array],
    weights: LayerWeights,
    *,
    eps: float,
    gate: str,
    scale: float,
    pages: Array | None = None,
    ranks: int = 1,
    implementation: str | None = None,
    plan: Dispatch | None = None,
) -> tuple[Array, Cache, Cache]:
    """Run one new token of each row through all layers.

    Each layer computes x = x + attention(norm(x) @ qkv) @ out, then x = x + mlp(norm(x)) @ down. It
    rounds like `matmul` and `append_decode_attention`.

    Args:
      x: [B, E], the embedded tokens.
      k, v: [L, B, Hkv, S, D], caches, or pools of `pages`, or quantised ones; updated in place if
        they are donated or carried by a loop.
      lengths: [B] int32 slots filled before this call. The token goes to the next slot, if the
        cache has one.
      rotation: (cos, sin) of `rope.rotation` at the tokens' positions, [B, 1, D/2] fp32 each.
      weights: the weights of all layers.
      eps: added to the mean square in the norms.
      gate: name of the MLP's activation.
      scale: multiplies q·k, usually D ** -0.5.
      pages: [B, N] int32, see `decode_attention`. Rows must not share the page that they write.
      ranks: number of devices on the axis `ranks.AXIS` that share the layers. Each has its part of
        heads and F, and all get the same bits.
      implementation: "xla" runs one operation after the other and copies slices of stacked arrays.
        "mosaic_gpu" is one kernel for 132 multiprocessors. It never falls back.
      plan: chooses if no implementation is named; without either, XLA runs.

    Returns:
      (x [B, E] after the last layer, k, v).

    Raises:
      ValueError: shapes or dtypes disagree, or an unknown activation.
      NotImplementedError: the named implementation cannot do this.

    Costs the bytes of `weights`, and 2·L·sum(lengths)·Hkv·D·itemsize bytes of the cache.
    """
    _check(x, k, v, lengths, rotation, weights, gate, pages)
    if not len(x):
        return x, k, v
    key = layers_key(len(x), weights, k.shape, row_slots(k, pages)) | ranks_key(ranks)
    features = _formats(weights).features | features_of(k)
    features |= {"tensor_parallel"} if ranks > 1 else set()
    key["itemsize"] = x.dtype.itemsize
    chosen, config = resolve(DECODE_LAYERS, plan, implementation, features, **key)
    return chosen.run(
        *(x, k, v, lengths, *rotation),
        weights=weights,
        eps=eps,
        gate=gate,
        scale=scale,
        pages=pages,
        ranks=ranks,
        config=config,
    )


def ranks_key(ranks: int) -> dict[str, int]:
    """Entry of the key of `decode_layers` for devices that share the layers."""
    return {"ranks": ranks} if ranks > 1 else {}


def layers_key(
    rows: int, weights: LayerWeights, cache: tuple[int, ...], slots: int
) -> dict[str, int]:
    """The key of `decode_layers` for `Plan.choose`, without its itemsize."""
    heads, width = weights.out.shape[-2:]
    _, _, kv_heads, _, d = cache
    n = weights.qkv.size // (len(weights.attention_norm) * width)
    products = {"m": rows, "k": heads, "width": width, "hidden": weights.down.shape[-2], "n": n}
    return products | {"hkv": kv_heads, "d": d, "s": slots} | _formats(weights).key


class Formats(NamedTuple):
    """What the formats of the weights add to a call of `Plan.choose`.

    Attributes:
      features: features that an implementation must support.
      key: entries of the key: kind → group, 0 for groups of all rows; "zeros" if there are any.
        Empty for plain weights.
    """

    features: Features
    key: dict[str, int]


def formats_of(weights: Iterable[tuple[int, WeightFormat | None]]) -> Formats:
    """The `Formats` of products, given K and the format of each; the format of plain ones is None.

    Products of several formats have the feature "differing_weights", and no key.
    """
    weights = list(weights)
    features = frozenset().union(*(f.features for _, f in weights if f))
    # A group of all rows has as many rows as its product, so groups are compared apart.
    kinds = {
        f and (dataclasses.replace(f, group=1), 0 if f.group == k else f.group) for k, f in weights
    }
    if len(kinds) > 1:
        return Formats(features | {"differing_weights"}, {})
    (kind,) = kinds
    if kind is None:
        return Formats(features, {})
    form, group = kind
    return Formats(features, {form.kind: group} | ({"zeros": 1} if form.zeros else {}))


def _formats(weights: LayerWeights) -> Formats:
    return formats_of(
        (w.shape[0], w.format) if is_quantised(w) else (0, None) for w in weights.products.values()
    )


def _run_xla(x, k, v, lengths, *rotation, weights, eps, gate, scale, pages, ranks, config):
    """Run one layer after the other through XLA."""
    spec = AttentionSpec(scale)

    def added(product, weight):
        if ranks == 1:
            return matmul(product, weight, residual=x)
        return all_reduce(matmul(product, weight), "products", residual=x)

    kv_heads, d = k.shape[2], k.shape[4]
    for layer in range(k.shape[0]):
        w = jax.tree.map(operator.itemgetter(layer), weights)
        qkv = w.qkv if is_quantised(w.qkv) else w.qkv.reshape(len(w.qkv), -1)
        qkv = matmul(x, qkv, norm=RMSNorm(w.attention_norm, eps))
        qkv = qkv.reshape(len(x), 1, kv_heads, -1, d)
        o, k, v = append_decode_attention(
            *(qkv, k, v, lengths), rotation=rotation, layer=layer, pages=pages, spec=spec
        )
        x = added(o.reshape(len(x), -1), w.out)
        hidden = matmul(x, w.gate_up, norm=RMSNorm(w.mlp_norm, eps), gate=gate)
        x = added(hidden, w.down)
    return x, k, v


DECODE_LAYERS = (
    LAYERS_HOPPER,
    Implementation(
        *("decode_layers", "xla", _run_xla),
        can=LAYERS_HOPPER.can | WEIGHT_FEATURES | {"differing_weights"},
    ),
)


def _stacked_shape(weight: Array | QTensor) -> tuple[int, ...]:
    return (*weight.stack, *weight.shape) if is_quantised(weight) else weight.shape


def _check(x, k, v, lengths, rotation, weights, gate, pages) -> None:
    if not isinstance(gate, str) or gate not in ACTIVATIONS:
        raise ValueError(
            f"decode_layers: gate must be one of {', '.join(ACTIVATIONS)}, got {gate!r}"
        )
    shapes = {name: _stacked_shape(w) for name, w in weights.products.items()}
    qkv, down = shapes["qkv"], shapes["down"]
    if x.ndim != 2 or k.ndim != 5 or len(qkv) not in (3, 5) or len(down) != 3:
        raise ValueError(
            "decode_layers: x, k, qkv and down must be [B,E], [L,B,Hkv,S,D], [L,E,Hkv,G+2,D] and "
            f"[L,F,E], got {[list(shape) for shape in (x.shape, k.shape, qkv, down)]}"
        )
    (b, width), (layers, _, kv_heads, slots, d) = x.shape, k.shape
    if 0 in (layers, width, kv_heads, slots, d):
        raise ValueError(
            f"decode_layers: x {list(x.shape)} and k {list(k.shape)} must not be empty, except for "
            "the number of rows"
        )
    parts, hidden = math.prod(qkv[2:]) // (kv_heads * d), down[1]
    by_head = (kv_heads, parts, d) if len(qkv) == 5 else (kv_heads * parts * d,)
    shapes |= {"k": k.shape, "v": v.shape, "lengths": lengths.shape}
    shapes |= {name: a.shape for name, a in zip(("cos", "sin"), rotation, strict=True)}
    shapes |= {name: getattr(weights, name).shape for name in ("attention_norm", "mlp_norm")}
    for name, want in (
        ("k", (layers, b if pages is None else k.shape[1], kv_heads, slots, d)),
        ("v", k.shape),
        ("lengths", (b,)),
        ("cos", (b, 1, d // 2)),
        ("sin", (b, 1, d // 2)),
        ("attention_norm", (layers, width)),
        ("qkv", (layers, width, *by_head)),
        ("out", (layers, kv_heads * (parts - 2) * d, width)),
        ("mlp_norm", (layers, width)),
        ("gate_up", (layers, width, 2, hidden)),
        ("down", (layers, hidden, width)),
    ):
        if shapes[name] != want:
            raise ValueError(
                f"decode_layers: {name} must be {list(want)} beside x {list(x.shape)} and k "
                f"{list(k.shape)}, got {list(shapes[name])}"
            )
    check_caches("decode_layers", k, v)
    if not jnp.issubdtype(lengths.dtype, jnp.signedinteger):
        raise ValueError(f"decode_layers: lengths must be signed integers, got {lengths.dtype}")
    if pages is not None and (
        pages.ndim != 2 or len(pages) != b or not jnp.issubdtype(pages.dtype, jnp.signedinteger)
    ):
        raise ValueError(
            f"decode_layers: pages must be signed integers [{b},N], got {pages.dtype} "
            f"{list(pages.shape)}"
        )
    products = []
    for w in weights.products.values():
        if is_quantised(w):
            check(w, "decode_layers", stacked=True)
        else:
            products.append(w)
    dtypes = {str(jnp.dtype(a.dtype)) for a in (x, k, v, *products)}
    if len(dtypes) > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "decode_layers: x, caches and weights must be of one floating-point dtype, "
            f"got {', '.join(sorted(dtypes))}"
        )
