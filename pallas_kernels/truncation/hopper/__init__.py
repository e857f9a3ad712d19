"""The kernel for Hopper."""
