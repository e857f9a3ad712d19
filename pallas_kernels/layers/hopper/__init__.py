"""The Hopper kernel (H100, H200) that runs all layers of a decode step."""
