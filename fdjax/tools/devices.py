"""GPUs that `fdjax info` can plan for without having one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """The properties of a GPU.

    Attributes:
      kind: JAX's name of the device.
      compute_capability: compute capability of CUDA, (major, minor).
      memory_bytes: bytes of memory, of which JAX takes a share.
    """

    kind: str
    compute_capability: tuple[int, int]
    memory_bytes: int


# For the H100 and H200, the bytes that JAX reports for its share of 75 %, divided by 0.75. For the
# A100, 80 GB.
DEVICES = {
    "h100": KnownDevice("NVIDIA H100 80GB HBM3", (9, 0), 85_018_542_080),
    "h200": KnownDevice("NVIDIA H200", (9, 0), 150_111_343_957),
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", (8, 0), 80_000_000_000),
}
