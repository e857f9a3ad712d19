"""The sum of what several devices have computed, on each of them: `all_reduce`."""

from fdjax.pallas_kernels.all_reduce.all_reduce import ALL_REDUCE, all_reduce

__all__ = ["ALL_REDUCE", "all_reduce"]
