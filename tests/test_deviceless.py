"""The compile checks can pass and can fail."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from deviceless import (
    alias_bytes,
    compile_for,
    kernel_names,
    large_buffers,
    large_copies,
    mesh_of,
    temp_bytes,
    while_bodies,
)

pytestmark = pytest.mark.deviceless

CACHE = jax.ShapeDtypeStruct((4, 8, 1024, 128), jnp.bfloat16)  # [L,Hkv,S,D]
LAYER = jax.ShapeDtypeStruct(CACHE.shape[1:], CACHE.dtype)
CACHE_BYTES = 4 * 8 * 1024 * 128 * 2
LAYER_BYTES = CACHE_BYTES // 4
NEW = jax.ShapeDtypeStruct((8, 1, 128), jnp.bfloat16)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
WEIGHT_BYTES = 512 * 512 * 2
WEIGHTS = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16)
X = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)


def append_in_loop(caches, new, n):
    """Write a list of caches at positions 0 to n - 1."""

    def body(step, caches):
        return [
            lax.dynamic_update_slice(c, new, (jnp.int32(0), step, jnp.int32(0))) for c in caches
        ]

    return lax.fori_loop(0, n, body, caches)


@pytest.mark.parametrize("target", ["h100", "a100"])
def test_donated_state_is_updated_in_place(target):
    compiled = compile_for(target, append_in_loop, [LAYER] * 4, NEW, COUNT, donate_argnums=0)
    assert alias_bytes(compiled) == CACHE_BYTES
    assert temp_bytes(compiled) < 4096
    assert large_buffers(compiled, LAYER_BYTES // 64) == []
    assert len(while_bodies(compiled)) == 1


def test_state_that_is_not_donated_is_copied():
    compiled = compile_for("h100", append_in_loop, [LAYER] * 4, NEW, COUNT)
    assert alias_bytes(compiled) == 0
    copies = large_copies(compiled, LAYER_BYTES)
    assert [(c.kind, c.nbytes, c.in_loop) for c in copies] == [("copy", LAYER_BYTES, False)] * 4
    assert large_copies(compiled, LAYER_BYTES + 1) == []


def test_a_jitted_function_keeps_its_donations():
    jitted = jax.jit(append_in_loop, donate_argnums=0)
    assert alias_bytes(compile_for("h100", jitted, [LAYER], NEW, COUNT)) == LAYER_BYTES
    with pytest.raises(ValueError, match="own donations"):
        compile_for("h100", jitted, [LAYER], NEW, COUNT, donate_argnums=0)


def layers_by_scan(weights, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def layers_in_while(weights, x, n):
    def body(_, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return lax.fori_loop(0, n, body, x)


def test_layers_of_a_scan_are_sliced_out():
    copies = large_copies(compile_for("h100", layers_by_scan, WEIGHTS, X), WEIGHT_BYTES)
    assert [(c.kind, c.in_loop) for c in copies] == [("dynamic-slice", True)]


def test_layers_of_a_stack_are_sliced_out_in_a_while():
    copies = large_copies(compile_for("h100", layers_in_while, WEIGHTS, X, COUNT), WEIGHT_BYTES)
    assert [(c.kind, c.in_loop) for c in copies] == [("slice", True)] * 4


def test_layers_of_a_list_stay_where_they_are():
    layers = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 4
    compiled = compile_for("h100", layers_in_while, layers, X, COUNT)
    assert large_copies(compiled, WEIGHT_BYTES // 32) == []


@pytest.mark.parametrize(
    ("kind", "move"),
    [
        ("transpose", lambda c: jnp.swapaxes(c, 0, 1)),
        ("convert", lambda c: c.astype(jnp.float32)),
        ("broadcast", lambda c: jnp.repeat(c, 4, axis=0)),
        ("slice", lambda c: c[:, :512]),
        ("concatenate", lambda c: jnp.concatenate([c, c], axis=1)),
        ("gather", lambda c: c[:, jnp.asarray([5, 3, 8] * 300)]),
        ("select", lambda c: jnp.where(jnp.arange(1024)[:, None] < 7, c, jnp.zeros_like(c))),
    ],
)
def test_moved_data_is_a_copy(kind, move):
    def by_barrier(c):  # so that the copy is not the output, which could absorb it by its layout
        return lax.optimization_barrier(move(c)) * jnp.asarray(2, c.dtype).astype(move(c).dtype)

    copies = large_copies(compile_for("h100", by_barrier, LAYER), LAYER_BYTES // 2)
    assert [c.kind for c in copies] == [kind]


def test_computed_data_is_a_buffer_but_no_copy():
    compiled = compile_for("h100", lambda c: jnp.exp(c), LAYER)
    assert [b.kind for b in large_buffers(compiled, LAYER_BYTES)] == ["compute"]
    assert large_copies(compiled, 1) == []


def _append_kernel(new_ref, position_ref, cache_ref):
    h = lax.axis_index("h")
    cache_ref[h, position_ref[0]] = new_ref[h]


def _append(cache, new, position):
    ref = jax.new_ref(cache)
    plgpu.kernel(_append_kernel, out_type=(), grid=(8,), grid_names=("h",))(
        new, position.reshape(1), ref
    )
    return jax.freeze(ref)


def test_mosaic_kernels_are_named_and_write_in_place():
    def loop(cache, new, n):
        return lax.fori_loop(0, n, lambda i, c: _append(c, new, i), cache)

    cache = jax.ShapeDtypeStruct((8, 1024, 128), jnp.float32)
    new = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    compiled = compile_for("h100", loop, cache, new, COUNT, donate_argnums=0)
    assert kernel_names(compiled) == ["_append_kernel"]
    assert alias_bytes(compiled) == 8 * 1024 * 128 * 4
    assert large_buffers(compiled, 4096) == []


def _mma_kernel(a_ref, b_ref, o_ref):
    acc = plgpu.layout_cast(jnp.zeros((128, 8), jnp.float32), plgpu.Layout.MMA_ACC(jnp.bfloat16))
    a = plgpu.load(a_ref, layout=plgpu.Layout.MMA_LHS(jnp.bfloat16), optimized=False)
    b = plgpu.load(b_ref.T, layout=plgpu.Layout.MMA_RHS(jnp.bfloat16), optimized=False)
    o_ref[...] = plgpu.mma(acc, a, b)


def test_an_ampere_kernel_compiles_for_ampere():
    mma = plgpu.kernel(
        _mma_kernel,
        out_type=jax.ShapeDtypeStruct((128, 8), jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    a = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    assert kernel_names(compile_for("a100", mma, a, b)) == ["_mma_kernel"]


def test_shards_keep_their_spec():
    columns, rows = (
        NamedSharding(mesh_of("h100", 4), spec)
        for spec in (PartitionSpec(None, "x"), PartitionSpec("x", None))
    )
    x = jax.ShapeDtypeStruct((8, 512), jnp.float32, sharding=columns)
    w = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=rows)
    compiled = compile_for("h100", jnp.matmul, x, w, n_devices=4)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == (8 * 512 + 512 * 256)


def test_keys_statics_and_keyword_arguments():
    def sample(key, size, *, scale):
        return jax.random.normal(key, (size,)) * scale

    key = jax.random.key(0)
    compiled = compile_for("h100", sample, key, 8, static_argnums=1, kwargs={"scale": 2.0})
    assert compiled.out_info.shape == (8,)
    jitted = jax.jit(sample, static_argnames=("size", "scale"))
    compiled = compile_for("h100", jitted, key, kwargs={"size": 4, "scale": 2.0})
    assert compiled.out_info.shape == (4,)
