"""The formats in which checkpoints store quantised weights, one file for each."""
