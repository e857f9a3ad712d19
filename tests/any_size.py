"""Implementations whose kernels take any size and quantised weights in any layout.

They are for tests that replace these kernels.
"""

import dataclasses

from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES


def _fits(shape):
    return None


def _of_any_size(implementation):
    can = implementation.can
    if implementation.op == "decode_layers":
        can |= WEIGHT_FEATURES
    return dataclasses.replace(implementation, fits=_fits, can=can)


ANY_SIZE = tuple(
    _of_any_size(i) if i.op in ("linear_chain", "decode_layers") else i for i in IMPLEMENTATIONS
)
