"""Weights: reading checkpoints, and layouts of the parameters in memory."""
