"""Sums over devices again and again in one kernel."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.all_reduce import means_in_one_kernel
from deviceless import compile_for, mesh_of
from fdjax.pallas_kernels.ranks import AXIS


def on(mesh, rounds):
    """A function of the values of all devices and a residual."""

    def run(x, residual):
        return means_in_one_kernel(x[0], residual, rounds)

    specs = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


@pytest.mark.deviceless
def test_the_kernel_compiles_without_spills(capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = mesh_of("h100", 2, AXIS)
    divided = NamedSharding(mesh, PartitionSpec(AXIS))
    x = jax.ShapeDtypeStruct((2, 32, 4096), jnp.bfloat16, sharding=divided)
    residual = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    compile_for("h100", on(mesh, 64), x, residual, n_devices=2, axis=AXIS)
    dumped = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in dumped.out + dumped.err


@pytest.mark.multigpu
@pytest.mark.parametrize("m", [1, 32])
def test_every_round_adds_the_mean_and_the_residual(m, rounds=4):
    ranks = jax.local_device_count()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    rng = np.random.default_rng(0)
    x, residual = (
        rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((ranks, m, 4096), (m, 4096))
    )
    got, squares = jax.jit(on(mesh, rounds))(x, residual)
    values, sums = np.float32(x), 0.0
    for _ in range(rounds):
        total = functools.reduce(np.add, values) / np.float32(ranks) + np.float32(residual)
        value = np.float32(total.astype(ml_dtypes.bfloat16))
        values = [value] * ranks
        sums = sums + (value**2).reshape(m, -1, 64).sum(axis=2)
    np.testing.assert_allclose(np.float32(got), value, rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(squares, sums.T, rtol=1e-2)
