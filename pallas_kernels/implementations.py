"""All implementations of all ops. A new kernel is added to its op's tuple.

Where nothing was measured, the first implementation of an op that can run and whose heuristic
accepts the shape runs it.
"""

from fdjax.pallas_kernels import all_reduce, attention, experts, gemm, layers, truncation

IMPLEMENTATIONS = (
    *gemm.MATMUL,
    *gemm.LINEAR_CHAIN,
    *experts.MOE,
    *layers.DECODE_LAYERS,
    *all_reduce.ALL_REDUCE,
    *attention.DECODE_ATTENTION,
    *attention.PREFILL_ATTENTION,
    *attention.SHARED_PAGES,
    *truncation.TRUNCATE,
)
