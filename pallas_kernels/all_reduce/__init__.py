"""`all_reduce`: the sum of the devices' arrays, on each device."""

from fdjax.pallas_kernels.all_reduce.all_reduce import ALL_REDUCE, all_reduce, mailbox, sum_shape
from fdjax.pallas_kernels.all_reduce.hopper.mailbox import mailbox_bytes

__all__ = ["ALL_REDUCE", "all_reduce", "mailbox", "mailbox_bytes", "sum_shape"]
