"""Constants of scores in units of log2, in which kernels compute exponentials as powers of 2."""

import math

LOG2E = math.log2(math.e)
# Below every score, and finite, so that LOWEST - LOWEST is zero and not NaN.
LOWEST = -(2.0**120)
