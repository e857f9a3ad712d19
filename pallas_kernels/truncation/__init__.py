"""`truncate`, which limits the tokens that may be drawn."""

from fdjax.pallas_kernels.truncation.truncation import TRUNCATE, truncate

__all__ = ["TRUNCATE", "truncate"]
