"""Compile for a GPU without having one, and examine XLA's program.

Needs `pip install -e '.[deviceless]'`. Such a compile does not cover autotuning, cuDNN and memory
kinds.

    compiled = compile_for("h100", step, params, state, donate_argnums=1)
    assert alias_bytes(compiled) == state_bytes
    assert not large_copies(compiled, min_bytes=layer_cache_bytes)
"""

import dataclasses
import functools
import math
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils as mosaic_gpu_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Target = Literal["h100", "a100"]

_COMPUTE_CAPABILITY = {"h100": (9, 0), "a100": (8, 0)}


@functools.cache
def mesh_of(target: Target, n_devices: int = 1, axis: str = "x") -> Mesh:
    """A mesh with one axis over `n_devices` GPUs of one host. They need not exist."""
    config = Path(__file__).parent / "targets" / f"{target}.txtpb"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config.read_text(), topology=f"1x1x{n_devices}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "compile_for: the CUDA plugin must be installed (pip install -e '.[deviceless]'), and "
            "JAX_PLATFORMS=cpu set where there is no GPU"
        ) from error
    return topologies.make_mesh(topology, (n_devices,), (axis,))


def compile_for(
    target: Target,
    fn: Callable,
    *args: Any,
    kwargs: dict[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    n_devices: int = 1,
    axis: str = "x",
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile `fn(*args, **kwargs)` for a target.

    Args:
      target: the GPU, one of `tests/targets`.
      fn: a function. If it is a result of `jax.jit`, it keeps its own donations and statics.
      *args: pytrees. Arrays and `jax.ShapeDtypeStruct`s are replicated, unless they have a
        `NamedSharding` with a spec over `axis`. Other leaves are passed without changes.
      kwargs: keyword arguments, treated in the same way.
      donate_argnums: as for `jax.jit`.
      static_argnums: as for `jax.jit`.
      n_devices: devices on the mesh axis.
      axis: name of the mesh axis.
      compiler_options: XLA options of this one compile.
    """
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
    elif donate_argnums != () or static_argnums != ():
        raise ValueError("compile_for: a jitted function has its own donations and statics")
    mesh = mesh_of(target, n_devices, axis)

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = getattr(sharding, "spec", None) or PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    args, kwargs = jax.tree.map(placed, (args, kwargs or {}))
    # Mosaic GPU takes any device for a Hopper that it cannot ask.
    arch = mock.patch.object(mosaic_gpu_utils, "_infer_arch", lambda: _COMPUTE_CAPABILITY[target])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), arch:
        return fn.lower(*args, **kwargs).compile(compiler_options)


def alias_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of the outputs that live in the buffer of a donated argument, per device."""
    return compiled.memory_analysis().alias_size_in_bytes


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of scratch memory that a call needs, per device."""
    return compiled.memory_analysis().temp_size_in_bytes


class Buffer(NamedTuple):
    """A buffer that a GPU kernel or a memcpy writes."""

    name: str
    kind: str  # "copy", "transpose", "slice", ... where it only moves data, otherwise "compute"
    nbytes: int
    in_loop: bool
    op_name: str  # its place in the traced function


def large_copies(compiled: jax.stages.Compiled, min_bytes: int) -> list[Buffer]:
    """Buffers of at least `min_bytes` that hold only data of other buffers.

    The data was copied, transposed, sliced, converted, repeated or partly replaced. A state that is
    updated in place, or a weight that is read in place, never needs that. The search includes
    fusions and asynchronous calls, but not custom calls.
    """
    return [b for b in large_buffers(compiled, min_bytes) if b.kind != "compute"]


def large_buffers(compiled: jax.stages.Compiled, min_bytes: int) -> list[Buffer]:
    """Buffers of at least `min_bytes` that are written, except by an update in place."""
    module = _parse(compiled)
    in_loops = _reachable(module, [c.name for c in while_bodies(compiled)])
    in_kernels = {
        name
        for computation in module.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("fusion", "fusion-start")
        for name in instruction.called("calls")
    }
    return [
        Buffer(instruction.name, kind, nbytes, computation.name in in_loops, instruction.op_name)
        for computation in module.values()
        if computation.name not in in_kernels
        for instruction in computation.instructions.values()
        for kind, nbytes in _written(module, computation, instruction)
        if nbytes >= min_bytes
    ]


def kernel_names(compiled: jax.stages.Compiled) -> list[str]:
    """Names of the Pallas kernels and targets of the other custom calls, one per call."""
    names = []
    for computation in _parse(compiled).values():
        for instruction in computation.instructions.values():
            if target := re.search(r'custom_call_target="([^"]*)"', instruction.text):
                # It is the last such string of Mosaic's serialised module. The first names a
                # dialect.
                kernel = re.findall(r"\\00(\w+)_mosaic_gpu\\00", instruction.text)
                names.append(kernel[-1] if kernel else target[1])
    return names


def while_bodies(compiled: jax.stages.Compiled) -> list["Computation"]:
    """The bodies of the device loops, of inner and outer ones."""
    module = _parse(compiled)
    return [
        module[name]
        for computation in module.values()
        for instruction in computation.instructions.values()
        for name in instruction.called("body")
    ]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO: `%name = outputs opcode(operands), attributes`."""

    name: str
    opcode: str
    output_bytes: tuple[int, ...]  # one per leaf if the output is a tuple
    operands: tuple[str, ...]
    attributes: str  # the whole line, with empty strings in place of its strings
    text: str  # of the whole line
    is_root: bool

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    def called(self, attribute: str) -> list[str]:
        """Names of the computations in an attribute: `calls=%f`, `calls={%f, %g}`."""
        found = re.search(rf" {attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the HLO module, with its instructions in execution order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)


def _parse(compiled: jax.stages.Compiled) -> dict[str, Computation]:
    module: dict[str, Computation] = {}
    for line in compiled.as_text().splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            computation = module[header[1]] = Computation(header[1], {})
        elif match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
            instruction = _instruction(match[2], match[3], is_root=match[1] is not None)
            computation.instructions[instruction.name] = instruction
    return module


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    # A tuple type holds spaces and parentheses, so the opcode is the first word after a space that
    # a parenthesis follows.
    # Serialised kernels are strings of many kilobytes, in which anything may occur.
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    match = re.match(r"(.*?) ([a-z][\w\-]*)\(", bare)
    if match is None:
        raise ValueError(f"deviceless: unknown form of HLO instruction, got {text[:200]!r}")
    arguments, _, attributes = bare[match.end() :].partition(")")
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", match[1])
    return Instruction(
        name=name,
        opcode=match[2],
        output_bytes=tuple(_array_bytes(dtype, shape) for dtype, shape in arrays),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        attributes=attributes,
        text=text,
        is_root=is_root,
    )


def _array_bytes(dtype: str, shape: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)  # 8 in f8e4m3fn; pred and token have none
    itembits = int(bits[1]) if bits else 8 * (dtype == "pred")
    return math.prod(int(size) for size in shape.split(",") if size) * itembits // 8


def _reachable(module: dict[str, Computation], names: list[str]) -> set[str]:
    """The computations with these names, and all that they call."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for instruction in module[name].instructions.values():
            for attribute in ("calls", "to_apply", "body", "condition", "branch_computations"):
                todo += instruction.called(attribute)
    return found


# For operations that only move data: the operands that hold the data.
_MOVED_OPERANDS = {
    "copy": slice(1),
    "transpose": slice(1),
    "reshape": slice(1),
    "slice": slice(1),
    "dynamic-slice": slice(1),
    "gather": slice(1),
    "pad": slice(1),
    "reverse": slice(1),
    "convert": slice(1),
    "broadcast": slice(1),
    "concatenate": slice(None),
    "select": slice(1, 3),
}
_UPDATES = ("dynamic-update-slice", "scatter")  # in place: needed copies are separate
_SCALAR_BYTES = 8
_NO_BUFFER = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("while", "conditional", "call", "async-start", "async-update", "async-done"),
    *("after-all", "partition-id", "replica-id"),
)


def _written(
    module: dict[str, Computation], computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, int]]:
    """(kind, bytes) of each buffer that an instruction outside kernels writes."""
    opcode, output_bytes = instruction.opcode, instruction.output_bytes
    if opcode in _NO_BUFFER or opcode in _UPDATES or opcode.endswith("-start"):
        return
    if opcode.endswith("-done"):  # has the type of the result; the rest was said at the start
        opcode = opcode.removesuffix("-done")
        instruction = computation.instructions[instruction.operands[0]]
    if opcode == "fusion":
        kernel = module[instruction.called("calls")[0]]
        root = kernel.root
        outputs = root.operands if root.opcode == "tuple" else (root.name,)
        kinds = [
            _kind_in_kernel(kernel, output)
            for output in outputs
            for _ in kernel.instructions[output].output_bytes  # a reduction may have several
        ]
    elif opcode == "custom-call":
        aliases = re.search(r" output_to_operand_aliasing=\{(.*?)\)\}", instruction.attributes)
        aliased = re.findall(r"\{(\d*)\}: \(", aliases[1]) if aliases else []
        kinds = [
            "in place" if aliased == [""] or str(index) in aliased else "compute"
            for index in range(len(output_bytes))
        ]
    else:
        kinds = [opcode if _moves(computation, instruction, opcode) else "compute"]
        kinds *= len(output_bytes)
    for kind, nbytes in zip(kinds, output_bytes, strict=True):
        if kind != "in place":
            yield kind, nbytes


def _moves(computation: Computation, instruction: Instruction, opcode: str) -> bool:
    """Whether an instruction outside kernels moves data, and is not a constant fill."""
    operands = instruction.operands[_MOVED_OPERANDS.get(opcode, slice(0))]
    return any(max(computation.instructions[o].output_bytes) > _SCALAR_BYTES for o in operands)


def _kind_in_kernel(kernel: Computation, name: str) -> str:
    """The origin of an output: "in place", "compute", or the last operation that moved the data."""
    instruction = kernel.instructions[name]
    opcode = instruction.opcode
    if opcode == "parameter":
        return "in place"
    if opcode == "bitcast" or opcode in _UPDATES:
        return _kind_in_kernel(kernel, instruction.operands[0])
    return opcode if opcode in _MOVED_OPERANDS and _is_moved(kernel, name) else "compute"


def _is_moved(kernel: Computation, name: str) -> bool:
    """Whether a value is a parameter that was only updated in place or got another type."""
    instruction = kernel.instructions[name]
    opcode = instruction.opcode
    if opcode == "parameter":
        return max(instruction.output_bytes) > _SCALAR_BYTES
    if opcode == "bitcast" or opcode in _UPDATES:
        operands = instruction.operands[:1]
    else:
        operands = instruction.operands[_MOVED_OPERANDS.get(opcode, slice(0))]
    return any(_is_moved(kernel, operand) for operand in operands)


def code_bytes(ptx: str) -> int:
    """Bytes of the machine code that ptxas makes of PTX for an H100."""
    import nvidia.cu13

    ptxas = next(Path(root) / "bin" / "ptxas" for root in nvidia.cu13.__path__)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        subprocess.run([ptxas, "-arch=sm_90a", source, "-o", target], check=True)
        elf = target.read_bytes()
    # Fields of the ELF header, then of each section: name, offset and size; see elf.h.
    (at,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, index = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", elf, at + i * size) for i in range(count)]
    names = sections[index][1]
    return sum(n for name, _, n in sections if elf[names + name :].startswith(b".text"))
