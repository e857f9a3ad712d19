"""Sets options of NCCL, which must be done before it makes its first communicator."""

import os

# Whether operations of NCCL may run inside and outside a CUDA graph at the same time.
_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


def allow_in_graphs() -> None:
    """Let a CUDA graph with a loop hold NCCL's operations, unless the environment decides.

    NCCL records an event before and after each captured operation, because others might run outside
    the graph at the same time. CUDA refuses events in a loop: "Failed to instantiate CUDA graph".
    The programs of an engine run one after the other, so they need no such events.
    """
    os.environ.setdefault(_MIXING, "0")


def advise(error: Exception) -> None:
    """Add to an error what to do if `allow_in_graphs` came too late."""
    if "instantiate CUDA graph" in str(error):
        error.add_note(
            f"If NCCL was used before fdjax, set {_MIXING}=0 in the environment of the process."
        )
