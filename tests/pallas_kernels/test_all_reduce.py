"""The sum over devices: XLA's on fake CPU devices, and the kernel on several GPUs.

The kernel cannot be interpreted, because the interpreter knows no other devices.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deviceless import compile_for, kernel_names, mesh_of
from fdjax.pallas_kernels.all_reduce import ALL_REDUCE, all_reduce, mailbox
from fdjax.pallas_kernels.all_reduce.hopper.mailbox import fits
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.ranks import AXIS

from ..engine.test_tensor_parallel import report

BF16 = jnp.bfloat16
DIVIDED, WHOLE = PartitionSpec(AXIS), PartitionSpec()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 8])
def test_sums_of_fake_devices(ranks):
    found = report("all_reduce_sums", ranks)
    assert set(found) == {"", "bias", "residual", "bias residual"}
    for error, differs in found.values():
        assert error < 1e-5 and not differs


@pytest.mark.parametrize("m", [1, 4096])
def test_which_devices_use_the_kernel(m):
    """Those with NVLink; more than two have not been measured."""

    def chosen(kind, **changes):
        shape = dict(m=m, width=4096, ranks=2, itemsize=2) | changes
        return Plan.for_kind(kind, (9, 0)).choose("all_reduce", **shape).implementation

    assert chosen("NVIDIA H100 80GB HBM3") == chosen("NVIDIA H200") == "mosaic_gpu"
    assert chosen("NVIDIA H200", ranks=4) == chosen("NVIDIA H200", itemsize=4) == "xla"
    for unlinked in ("H100 PCIe", "H100 NVL", "H100 80GB HBM3 MIG 3g.40gb"):
        assert chosen(f"NVIDIA {unlinked}") == "xla"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"width": 4097}, "multiple of 512, got 4097"),
        ({"itemsize": 4}, "bfloat16"),
        ({"ranks": 16}, "at most 8 devices, got 16"),
        ({"m": 128}, "at most 524288 bytes for more than 2 devices, got 1048576"),
    ],
)
def test_what_the_kernel_refuses(changes, says):
    shape = dict(m=64, width=4096, ranks=8, itemsize=2)
    assert fits(shape) is None
    assert fits(shape | {"m": 8192, "ranks": 2}) is None
    assert says in fits(shape | changes)


def run(x, bias, residual, *, implementation):
    added = {"bias": bias, "residual": residual}
    added = {name: array for name, array in added.items() if array is not None}
    return all_reduce(x[0], "test", **added, implementation=implementation)[None]


def on(mesh, implementation):
    function = functools.partial(run, implementation=implementation)
    specs = DIVIDED, WHOLE, WHOLE
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=DIVIDED, check_vma=False)
    )


@pytest.mark.parametrize(
    ("bias", "residual", "says"),
    [
        (np.zeros(7, np.float32), None, r"bias must be float32\[8\], got float32\[7\]"),
        (None, np.zeros((2, 8), BF16), r"residual must be float32\[2, 8\], got bfloat16\[2, 8\]"),
    ],
)
def test_what_does_not_belong_together_is_refused(bias, residual, says):
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), (AXIS,))
    with pytest.raises(ValueError, match=says):
        on(mesh, "xla")(np.zeros((1, 2, 8), np.float32), bias, residual)


def test_one_device_alone_has_no_sum():
    with pytest.raises(
        ValueError, match=r"^all_reduce: call it inside a jax.shard_map over .* 'tp'"
    ):
        all_reduce(np.zeros((2, 8), np.float32), "test")


def gpus_for(m, width):
    """(number of GPUs, their mesh), if the kernel can sum [m, width] over them."""
    ranks = jax.local_device_count()
    if not ALL_REDUCE[0].supports(dict(m=m, width=width, ranks=ranks, itemsize=2)):
        pytest.skip(f"more bytes than the kernel is for with {ranks} GPUs")
    return ranks, Mesh(np.array(jax.devices()), (AXIS,))


def through_mailbox(x, residual):
    """Sums of x [1,N,M,E] of this device, and of the first half of the rows, in one loop."""
    m, width = x.shape[2:]
    first = slice((m + 1) // 2)
    once = functools.partial(all_reduce, name="test", implementation="mosaic_gpu")

    def both(x):
        return once(x, residual=residual), once(x[first], residual=residual[first])

    with mailbox(m, width, x.dtype, after=x, named="mosaic_gpu"):
        return jax.tree.map(lambda y: y[None], lax.map(both, x[0]))


def mailbox_on(mesh):
    return jax.jit(
        jax.shard_map(
            through_mailbox,
            mesh=mesh,
            in_specs=(DIVIDED, WHOLE),
            out_specs=DIVIDED,
            check_vma=False,
        )
    )


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("ranks", "m", "width"), [(2, 1, 4096), pytest.param(8, 32, 8192, marks=pytest.mark.soak)]
)
def test_a_mailbox_stays_where_it_is(ranks, m, width, capfd, monkeypatch):
    """Devices write to it at any time, so XLA may not copy it. A sum is one kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = mesh_of("h100", ranks, AXIS)
    x = jax.ShapeDtypeStruct((ranks, 4, m, width), BF16, sharding=NamedSharding(mesh, DIVIDED))
    residual = jax.ShapeDtypeStruct((m, width), BF16)
    program = compile_for("h100", mailbox_on(mesh), x, residual, n_devices=ranks, axis=AXIS)
    text = program.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3
    # All devices have emptied their places before one writes. After that, nobody waits.
    assert text.count("skip_device_barrier = false") == 1
    assert text.count("skip_device_barrier = true") == 2
    places = rf"s32\[2,{ranks - 1},{m * width // 512},1,128,2\]"
    assert re.search(rf"= {places}\S* fusion", text)
    assert not re.search(rf"= {places}\S* copy", text)
    dumped = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in dumped.out + dumped.err


@pytest.mark.deviceless
def test_each_sum_without_a_mailbox_opens_its_own():
    """XLA may not open one for several sums, because it would copy it for each of them."""
    mesh = mesh_of("h100", 2, AXIS)
    once = functools.partial(all_reduce, name="test", implementation="mosaic_gpu")

    def repeat(x):
        return lax.fori_loop(0, 6, lambda _, y: once(y, residual=x), x, unroll=2)

    function = jax.shard_map(repeat, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
    x = jax.ShapeDtypeStruct((8, 4096), BF16)
    program = compile_for("h100", function, x, n_devices=2, axis=AXIS)
    names = kernel_names(program)
    assert names.count("open_mailbox") == names.count("all_reduce") == 2


@pytest.mark.deviceless
@pytest.mark.parametrize(("ranks", "m", "added"), [(2, 1, True), (8, 32, False), (2, 4096, True)])
def test_the_kernel_compiles_without_spills(ranks, m, added, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = mesh_of("h100", ranks, AXIS)
    sharded = NamedSharding(mesh, DIVIDED)
    x = jax.ShapeDtypeStruct((ranks, m, 4096), BF16, sharding=sharded)
    bias = jax.ShapeDtypeStruct((4096,), BF16) if added else None
    residual = jax.ShapeDtypeStruct((m, 4096), BF16) if added else None
    compiled = compile_for(
        *("h100", on(mesh, "mosaic_gpu"), x, bias, residual), n_devices=ranks, axis=AXIS
    )
    # It opens a mailbox, because none is open.
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 2
    dumped = capfd.readouterr()
    assert "0 bytes spill stores, 0 bytes spill loads" in dumped.out + dumped.err


@pytest.mark.multigpu
@pytest.mark.parametrize("m", [1, 32, 128])
@pytest.mark.parametrize("width", [512, 5120, 8192])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_sums_through_a_mailbox(m, width, dtype):
    ranks, mesh = gpus_for(m, width)
    function = mailbox_on(mesh)
    rng = np.random.default_rng(m)
    for n in (7, 100):  # odd and even numbers of sums
        x = rng.standard_normal((ranks, n, m, width)).astype(dtype)
        residual = rng.standard_normal((m, width)).astype(dtype)
        want = x.astype(np.float64).sum(0) + residual.astype(np.float64)
        for found in function(x, residual):
            found = np.asarray(found)
            np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))
            check_rounded_once(found[0], want[:, : found.shape[2]])


def check_rounded_once(found, want):
    eps = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=eps / 2, atol=1e-5)


@pytest.mark.multigpu
@pytest.mark.parametrize("m", [1, 3, 32, 64, 700])
@pytest.mark.parametrize("width", [512, 5120, 8192])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_sums_of_gpus(m, width, dtype):
    ranks, mesh = gpus_for(m, width)
    function = on(mesh, "mosaic_gpu")
    rng = np.random.default_rng(m)
    for repeat in range(20):  # what one call has left must not disturb the next
        x = rng.standard_normal((ranks, m, width)).astype(dtype)
        bias, residual = (rng.standard_normal(s).astype(dtype) for s in (width, (m, width)))
        if repeat % 3 == 1:
            bias = None
        if repeat % 3 == 2:
            residual = None
        found = np.asarray(function(x, bias, residual))
        want = x.astype(np.float64).sum(0)
        want += sum(a.astype(np.float64) for a in (bias, residual) if a is not None)
        np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))
        check_rounded_once(found[0], want)
