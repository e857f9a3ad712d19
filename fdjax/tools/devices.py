"""GPUs that `fdjax info` can plan for without having one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """The properties of a GPU.

    Attributes:
      kind: JAX's name of the device.
      compute_capability: compute capability of CUDA, (major, minor).
      memory_bytes: bytes that JAX uses by default, three quarters of the memory.
    """

    kind: str
    compute_capability: tuple[int, int]
    memory_bytes: int


# JAX reported the numbers of the H100 and H200. That of the A100 is three quarters of 80 GB.
DEVICES = {
    "h100": KnownDevice("NVIDIA H100 80GB HBM3", (9, 0), 63_763_906_560),
    "h200": KnownDevice("NVIDIA H200", (9, 0), 112_583_507_968),
    "a100": KnownDevice("NVIDIA A100-SXM4-80GB", (8, 0), 60_000_000_000),
}
