"""Scores as the kernels hold them: in units of log2, so that their exponentials are powers of 2."""

import math

LOG2E = math.log2(math.e)
# Below every score, and finite: the difference of two is zero, not NaN.
LOWEST = -(2.0**120)
