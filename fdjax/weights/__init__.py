"""Weights: how checkpoints are read, and the layouts of the parameters in memory."""
