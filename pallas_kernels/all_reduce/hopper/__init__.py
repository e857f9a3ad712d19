"""Kernels for NVIDIA Hopper GPUs."""
