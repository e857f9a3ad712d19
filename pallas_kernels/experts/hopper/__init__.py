"""Kernels of mixtures of experts for Hopper (H100, H200)."""
