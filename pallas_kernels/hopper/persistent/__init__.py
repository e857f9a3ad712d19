"""Persistent kernels for Hopper: all blocks of the grid run the same stages, one after the other.

================  ======================================================
`stage`           interface of a stage: one method for each warpgroup
`product`         a linear layer as a stage
`packed_product`  the same with quantised weights
`linear_layers`   the linear layers of a decoder layer
`block`           a block's place in the grid, memory and signals
`memory`          shared memory of a block
`counters`        the barrier of all blocks
`words`           results of one row, sent without that barrier
`row_input`       how a block receives them
`exchange`        sums over devices
`launch`          the kernel: stages repeated for every layer
================  ======================================================
"""
