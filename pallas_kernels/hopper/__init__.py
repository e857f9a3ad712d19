"""Code that Hopper kernels share. MULTIPROCESSORS is the number on an H100 (SXM) and an H200."""

MULTIPROCESSORS = 132
