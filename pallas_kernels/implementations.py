"""All implementations of all ops: the one list that a new kernel is added to.

Of one op, the first that can run and whose heuristic takes a shape runs it.
"""

from fdjax.pallas_kernels import attention, gemm, layers

IMPLEMENTATIONS = (
    *gemm.MATMUL,
    *gemm.LINEAR_CHAIN,
    *layers.DECODE_LAYERS,
    *attention.DECODE_ATTENTION,
    *attention.PREFILL_ATTENTION,
)
