"""Implementations whose kernels take any size, for tests that replace these kernels."""

import dataclasses

from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS


def _fits(shape):
    return None


ANY_SIZE = tuple(
    dataclasses.replace(i, fits=_fits) if i.op in ("linear_chain", "decode_layers") else i
    for i in IMPLEMENTATIONS
)
