"""Persistent kernels for Hopper: all blocks of the grid run the same stages, one after the other.

===============  ======================================================
`stage`          interface of a stage: one method for each warpgroup
`product`        a linear layer as a stage
`linear_layers`  the linear layers of a decoder layer, and their memory
`block`          a block's place in the grid, memory and signals
`launch`         the kernel: stages repeated for every layer
===============  ======================================================
"""
