"""Persistent kernels for Hopper: stages that all blocks of the grid go through one after the other.

===============  =====================================================
`stage`          what each warpgroup of a block does for a stage
`product`        a linear layer as a stage
`linear_layers`  those of a decoder's layer, and what they need
`block`          a block's place in the grid, memory and signals
`launch`         the kernel, made of stages repeated for every layer
===============  =====================================================
"""
