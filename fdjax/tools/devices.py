"""Devices that `fdjax info` plans for where there is none of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """A GPU by its facts.

    Attributes:
      kind: what JAX calls it.
      compute_capability: of CUDA.
      memory_bytes: what JAX may use of its memory by default, three quarters.
    """

    kind: str
    compute_capability: tuple[int, int]
    memory_bytes: int


# Memory of the H100 and H200 is what JAX reported there; of the A100, three quarters of 80 GB.
DEVICES = {
    "h100": KnownDevice("NVIDIA H100 80GB HBM3", (9, 0), 63_763_906_560),
    "h200": KnownDevice("NVIDIA H200", (9, 0), 112_583_507_968),
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", (8, 0), 60_000_000_000),
}
