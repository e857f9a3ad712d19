"""Linear layers of a decoder: `matmul` for one, `linear_chain` for all between two attentions."""

from fdjax.pallas_kernels.activations import ACTIVATIONS
from fdjax.pallas_kernels.gemm.chain import LINEAR_CHAIN, chain_key, linear_chain
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import FlatGemmConfig
from fdjax.pallas_kernels.gemm.hopper.linear_chain import LinearChainConfig, chain_counters
from fdjax.pallas_kernels.gemm.linear import MATMUL, matmul
from fdjax.pallas_kernels.gemm.reference import matmul_reference

__all__ = [
    "ACTIVATIONS",
    "LINEAR_CHAIN",
    "MATMUL",
    "FlatGemmConfig",
    "LinearChainConfig",
    "chain_counters",
    "chain_key",
    "linear_chain",
    "matmul",
    "matmul_reference",
]
