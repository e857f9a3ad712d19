"""The flat GEMM compiled for an H100: no spills, no copies, one lowering for all layers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import FlatGemmConfig, matmul_flat_gemm
from fdjax.pallas_kernels.norm import RMSNorm
from fdjax.pallas_kernels.plan import read_table, shipped_table_path
from fdjax.pallas_kernels.quantised import BITS

pytestmark = pytest.mark.deviceless

BF16 = jnp.bfloat16


def _operands(m, k, n, *, norm=False, bias=False, gate=None, residual=False, layers=None):
    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, BF16)

    columns = (2, n) if gate else (n,)
    return {
        "x": spec(m, k),
        "w": spec(*((layers,) if layers else ()), k, *columns),
        "norm": RMSNorm(spec(k), 1e-5) if norm else None,
        "bias": spec(*columns) if bias else None,
        "residual": spec(m, n) if residual else None,
    }


@pytest.mark.parametrize(
    "case",
    [
        # Every number of rows once, and the most and the fewest of each; others are a grid.
        *(dict(m=m, k=4096, n=12288, norm=True) for m in (1, 8, 64)),
        *(dict(m=m, k=4096, n=4096, residual=True) for m in (1, 16, 64)),
        *(dict(m=m, k=4096, n=11008, norm=True, gate="silu") for m in (1, 32, 64)),
        *(
            pytest.param(dict(m=m, k=4096, **of), marks=pytest.mark.soak)
            for of, rows in (
                (dict(n=12288, norm=True), (16, 32)),
                (dict(n=4096, residual=True), (8, 32)),
                (dict(n=11008, norm=True, gate="silu"), (8, 16)),
            )
            for m in rows
        ),
        dict(m=8, k=11008, n=4096, residual=True),
        dict(m=8, k=4096, n=32000, norm=True, dtype=jnp.float32),
        dict(m=12, k=4096, n=28672),
        dict(m=12, k=4096, n=11008, norm=True, gate="silu"),
        dict(m=49, k=4096, n=4096, norm=True, bias=True, residual=True),
        dict(m=200, k=2048, n=2048, norm=True, bias=True, gate="gelu", residual=True),
        dict(m=2, k=1024, n=1024, norm=True, bias=True, gate="gelu_tanh", layer=True),
        dict(m=64, k=4096, n=4096, norm=True, config=FlatGemmConfig(64, 128, 4, 2)),
        dict(m=64, k=4096, n=28672, config=FlatGemmConfig(256, 64, 3)),
        dict(m=64, k=4096, n=6144, norm=True, config=FlatGemmConfig(64, 64, 8)),
        dict(m=128, k=4096, n=4096, config=FlatGemmConfig(64, 64, 6, 2, 128)),
        dict(m=96, k=4096, n=12288, norm=True, config=FlatGemmConfig(128, 64, 6, 1, 128)),
        dict(m=128, k=4096, n=22016, config=FlatGemmConfig(192, 64, 4, 1, 128)),
    ],
    ids=str,
)
def test_compiles_without_spills(case, monkeypatch, capfd):
    from deviceless import compile_for

    case = dict(case)
    dtype, config, gate = case.pop("dtype", BF16), case.pop("config", None), case.get("gate")
    layer = jax.ShapeDtypeStruct((), jnp.int32) if case.pop("layer", False) else None
    operands = _operands(**case, layers=None if layer is None else 2) | {"layer": layer}

    def run(operands):
        return matmul_flat_gemm(**operands, gate=gate, dtype=dtype, config=config)

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for("h100", run, operands)
    assert "flat_gemm_kernel" in compiled.as_text()
    _check_no_spills(capfd)


def _check_no_spills(capfd) -> None:
    said = capfd.readouterr().out.splitlines()
    spills = [line for line in said if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


def _shipped() -> list[tuple[dict, FlatGemmConfig]]:
    """Operands and tilings of the shipped tables, each tiling with the most rows it runs."""
    devices = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    tables = (read_table(shipped_table_path(device)) for device in devices)
    entries = [e for e in itertools.chain.from_iterable(tables) if e.op == "matmul"]
    entries = [e for e in entries if not BITS.keys() & dict(e.shape).keys()]  # another kernel
    most = {}
    for entry in sorted(entries, key=lambda e: dict(e.shape)["m"]):
        if entry.choice.implementation == "mosaic_gpu":
            m, k, n, gate, fused = (dict(entry.shape)[x] for x in ("m", "k", "n", "gate", "fused"))
            norm = fused and (gate or n > k)
            kinds = {
                "gate": "silu" if gate else None,
                "norm": norm and m <= 64,  # more rows are normalised before the kernel
                "residual": fused and not norm,
            }
            kernel = (k, n // 2 if gate else n, *kinds.values(), entry.choice.config)
            most[kernel] = {"m": m, "k": k, "n": kernel[1], **kinds}
    return [(operands, FlatGemmConfig(**dict(config))) for (*_, config), operands in most.items()]


def _some_shipped() -> list:
    """The parameters of `_shipped`. Each tiling with one size is for CI, others are a grid."""
    seen, cases = set(), []
    for case, config in _shipped():
        cases.append(pytest.param(case, config, marks=pytest.mark.soak if config in seen else ()))
        seen.add(config)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), _some_shipped(), ids=str)
def test_the_shipped_choices_compile_without_spills(case, config, monkeypatch, capfd):
    from deviceless import compile_for

    def run(operands):
        return matmul_flat_gemm(**operands, gate=case["gate"], dtype=jnp.dtype(BF16), config=config)

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_for("h100", run, _operands(**case))
    _check_no_spills(capfd)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_layers_share_a_lowering_and_are_not_copied(stacked):
    from deviceless import compile_for, kernel_names, large_copies

    layers, k = 4, 1024
    one = jax.ShapeDtypeStruct((k, k), BF16)
    weights = jax.ShapeDtypeStruct((layers, k, k), BF16) if stacked else [one] * layers
    x = jax.ShapeDtypeStruct((8, k), BF16)
    product = functools.partial(matmul, implementation="mosaic_gpu")

    def step(weights, x, count):
        def body(_, x):
            for layer in range(layers):
                if stacked:
                    x = product(x, weights, layer=layer)
                else:
                    x = product(x, weights[layer])
            return x

        return lax.fori_loop(0, count, body, x)

    count = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for("h100", step, weights, x, count)
    assert kernel_names(compiled).count("flat_gemm_kernel") == layers
    assert large_copies(compiled, k * k) == []
    assert str(jax.make_jaxpr(step)(weights, x, count)).count("_launch = {") == 1


@pytest.mark.parametrize("triton", [True, False])
def test_xla_adds_a_residual_within_the_product(triton):
    from deviceless import compile_for

    compiled = compile_for(
        "h100",
        functools.partial(matmul, implementation="xla"),
        *(jax.ShapeDtypeStruct(shape, BF16) for shape in ((4096, 4096), (4096, 4096))),
        kwargs={"residual": jax.ShapeDtypeStruct((4096, 4096), BF16)},
        compiler_options={"xla_gpu_enable_triton_gemm": triton},
    )
    entry = compiled.as_text().partition("\nENTRY")[2]
    # One kernel: a fusion of Triton, or a product of cuBLAS with another operand.
    calls = [line for line in entry.splitlines() if " fusion(" in line or " custom-call(" in line]
    assert len(calls) == 1, calls
