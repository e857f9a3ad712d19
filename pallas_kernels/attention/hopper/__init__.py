"""Attention kernels for Hopper (H100, H200)."""
