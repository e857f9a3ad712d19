"""The devices whose memory kernels must fill: H100 (SXM) and H200."""

MULTIPROCESSORS = 132
