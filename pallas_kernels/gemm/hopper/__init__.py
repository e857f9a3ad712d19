"""Linear-layer kernels for Hopper (H100, H200)."""
