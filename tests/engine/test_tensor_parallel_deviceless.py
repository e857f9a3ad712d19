"""Programs of several devices, compiled for two H100s: two all-reduces a layer, no copies."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.tensor_parallel import with_all_reduce, with_one_launch
from deviceless import (
    _parse,
    _reachable,
    alias_bytes,
    compile_for,
    kernel_names,
    large_copies,
    mesh_of,
    temp_bytes,
)
from fdjax.engine.engine import compiler_options
from fdjax.engine.memory import workspace_bytes
from fdjax.engine.mesh import Place, is_spec
from fdjax.engine.state import SLOT_MULTIPLE, init_cache, init_pool, start, start_in_pages
from fdjax.engine.state import state_specs as specs_of_state
from fdjax.engine.step import decode_steps, prompt_logits
from fdjax.models import describe, parse_config
from fdjax.models.random_weights import _random_weight
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.weights.stacked import layer_slices, stacked_shapes

pytestmark = pytest.mark.deviceless

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf" / "configs"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu")
RANKS, LAYERS, SLOTS, STEPS = 2, 2, 2048, 32
WHOLE = PartitionSpec()


@functools.cache
def model(tied, name="llama-3-8b", all_reduce="xla", tiles=1):
    """Two layers of a model in full size."""
    data = json.loads((CONFIGS / f"{name}.new.json").read_text(encoding="utf-8"))
    layers = "n_layer" if "n_layer" in data else "num_hidden_layers"
    data |= {layers: LAYERS, "layer_types": None, "tie_word_embeddings": tied}
    config = parse_config(data)
    plan = with_all_reduce(H100, all_reduce, config.width, RANKS)
    plan = dataclasses.replace(plan, prompt_tiles=tiles)
    return describe(config, plan=plan, tensor_parallel=RANKS)


def abstract_state(m, batch, pages):
    def make():
        if pages:
            return start_in_pages(init_pool(m.local, pages), batch, SLOTS)
        return start(init_cache(m.local, batch, SLOTS))

    return jax.eval_shape(make)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def divided(tree, specs):
    """Shapes of whole arrays, from those of a device."""
    mesh = mesh_of("h100", RANKS, AXIS)

    def whole(spec, leaf):
        shape = [n * (RANKS if axis else 1) for n, axis in zip(leaf.shape, spec, strict=False)]
        shape += leaf.shape[len(spec) :]
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    # The description of a quantised weight says whether it is a whole one.
    specs, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    return structure.unflatten(map(whole, specs, jax.tree.leaves(tree)))


def compiled(function, m, batch, pages, *host, tiled=False, folder=None, stacked=False, **static):
    """A program as the engine makes it, and a device's part of the state.

    With `stacked`, decode steps run in one launch.
    """
    place = Place(tuple(mesh_of("h100", RANKS, AXIS).devices.flat))
    state = abstract_state(m, batch, pages)
    params, partitions = m.local.abstract_params, m.partitions
    if stacked:
        params = params | {"blocks": stacked_shapes(params)}
        of_layer = traverse_util.flatten_dict(partitions["blocks"][0], sep=".")
        of_stack = {name: PartitionSpec(None, *spec) for name, spec in of_layer.items()}
        partitions = partitions | {"blocks": of_stack}
    specs = partitions, specs_of_state(m.local, bool(pages))

    def run_local(params, state, *host):
        layers = {}
        if stacked:
            layers = {"layers": params["blocks"]}
            params = params | {"blocks": layer_slices(params["blocks"])}
        state, *out = function(m.local, params, state, *host, **static, **layers)
        return state, out

    run = place.over(run_local, (*specs, *[WHOLE] * len(host)), (specs[1], WHOLE))
    args = divided(params, specs[0]), divided(state, specs[1]), *host
    program = compile_for(
        *("h100", run, *args),
        donate_argnums=1,
        n_devices=RANKS,
        axis=AXIS,
        compiler_options=compiler_options(
            decode_steps if function is decode_steps else prompt_logits, m, tiled=tiled
        )
        | ({"xla_dump_to": str(folder)} if folder else {}),
    )
    return program, state


def abstract(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_sampling(batch):
    rows = per_row([GenerationConfig()] * batch, batch)
    return jax.tree.map(lambda a: abstract(*a.shape, dtype=a.dtype), rows)


def collectives(program, computations=None):
    """Opcodes of the collective operations: how many, in these computations or in all."""
    module = _parse(program)
    found = {}
    for name in module if computations is None else _reachable(module, computations):
        for instruction in module[name].instructions.values():
            kind = re.fullmatch(
                r"(all-\w+|all-to-all|collective-\w+|reduce-scatter)(-start)?", instruction.opcode
            )
            if kind:
                found[kind[1]] = found.get(kind[1], 0) + 1
    return found


def check_in_place(program, state, m):
    """The state is updated where it is, and no cache or weight of a device is copied."""
    assert alias_bytes(program) == nbytes(state)
    weights = [leaf for leaf in jax.tree.leaves(m.local.abstract_params) if leaf.ndim > 1]
    copies = large_copies(program, min(map(nbytes, weights)) // 4)
    copies = [copy for copy in copies if "jit(_take)" not in copy.op_name]  # rows of the embedding
    assert not copies, "\n".join(map(str, copies))
    # Other devices write to a mailbox at any time.
    assert not re.search(r"= s32\[2,\d+,\d+,\d+,128,\d\]\S* copy", program.as_text())


@pytest.mark.parametrize(
    ("batch", "tied", "pages", "all_reduce"),
    [
        pytest.param(1, False, 0, "xla", marks=pytest.mark.soak),
        (8, True, 0, "xla"),
        pytest.param(1, False, 300, "xla", marks=pytest.mark.soak),
        (8, True, 300, "mosaic_gpu"),
    ],
)
def test_decode_steps(batch, tied, pages, all_reduce, tmp_path):
    m = model(tied, all_reduce=all_reduce)
    table = (abstract(batch, SLOTS // SLOT_MULTIPLE),) if pages else ()
    program, state = compiled(
        *(decode_steps, m, batch, pages, abstract_sampling(batch), abstract(), *table),
        max_steps=STEPS,
        folder=tmp_path,
    )
    # One CUDA graph holds the loop, with the collective operations.
    (file,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    (chunk,) = re.findall(r"^\d+:.*", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert "kCommandBuffer" in chunk
    check_in_place(program, state, m)
    # A tied embedding is divided by the vocabulary, so its rows are summed too.
    by_xla = (2 * LAYERS + tied) * (all_reduce == "xla")
    assert collectives(program).pop("all-reduce", 0) == by_xla
    assert collectives(program)["all-gather"] == 1
    assert kernel_names(program).count("open_mailbox") == (all_reduce == "mosaic_gpu")


def with_one_kv_head():
    data = json.loads((CONFIGS / "llama-3-8b.new.json").read_text(encoding="utf-8"))
    data |= {"num_hidden_layers": LAYERS, "layer_types": None, "num_key_value_heads": 1}
    plan = dataclasses.replace(H100, divide_tokens=True)
    return describe(parse_config(data), plan=plan, tensor_parallel=RANKS)


def test_random_weights_start_no_nccl():
    """Devices that share a KV head make it without the others."""
    m = with_one_kv_head()
    trees = m.abstract_params, m.partitions
    like, spec = (tree["blocks"][0]["attention"]["qkv"]["weight"] for tree in trees)
    make = _random_weight(like, RANKS, NamedSharding(mesh_of("h100", RANKS, AXIS), spec))
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = compile_for("h100", make, key, n_devices=RANKS, axis=AXIS)
    assert not collectives(program)


@pytest.mark.parametrize("batch", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_decode_steps_with_divided_tokens(batch, tmp_path):
    """Queries and results travel inside the CUDA graph, and kernels attend."""
    m = with_one_kv_head()
    table = abstract(batch, SLOTS // (RANKS * SLOT_MULTIPLE))
    program, state = compiled(
        *(decode_steps, m, batch, 300, abstract_sampling(batch), abstract(), table),
        max_steps=STEPS,
        folder=tmp_path,
    )
    (file,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    (chunk,) = re.findall(r"^\d+:.*", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert "kCommandBuffer" in chunk
    check_in_place(program, state, m)
    assert kernel_names(program).count("decode_attention") == LAYERS
    assert kernel_names(program).count("all_reduce") == 2 * LAYERS
    assert collectives(program) == {"all-gather": LAYERS + 1, "all-to-all": LAYERS}


@pytest.mark.soak
@pytest.mark.parametrize("form", [None, MX], ids=str)
def test_kernels_of_experts_run_on_each_device(form):
    """Each reads its share of the chosen experts where it is."""
    config = model(False, "olmoe-1b-7b").config
    if form is not None:
        parts = [(i, name) for i in range(LAYERS) for name in ("gate_up", "down")]
        names = [("blocks", i, "mlp", "experts", name) for i, name in parts]
        config = config.with_formats(dict.fromkeys(names, form))
    plan = dataclasses.replace(H100, named=(("moe", "mosaic_gpu"),))
    m = describe(config, plan=plan, tensor_parallel=RANKS)
    program, state = compiled(
        *(decode_steps, m, 8, 300, abstract_sampling(8), abstract()),
        abstract(8, SLOTS // SLOT_MULTIPLE),
        max_steps=STEPS,
    )
    names = kernel_names(program)
    assert names.count("moe_up_kernel") == names.count("moe_down_kernel") == LAYERS
    assert alias_bytes(program) == nbytes(state)
    assert not large_copies(program, 2**20)


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.soak)])
def test_decode_steps_in_one_launch(batch, tmp_path):
    """One kernel for the layers of a step, with the exchange between the devices inside."""
    config = model(False).config
    plan = with_one_launch(H100, config, RANKS)
    m = describe(config, plan=plan, tensor_parallel=RANKS)
    assert m.one_launch(batch, SLOTS)
    program, state = compiled(
        *(decode_steps, m, batch, 300, abstract_sampling(batch), abstract()),
        abstract(batch, SLOTS // SLOT_MULTIPLE),
        max_steps=STEPS,
        folder=tmp_path,
        stacked=True,
    )
    (file,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    (chunk,) = re.findall(r"^\d+:.*", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert "kCommandBuffer" in chunk
    check_in_place(program, state, m)
    assert collectives(program) == {"all-gather": 1}
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 1


@pytest.mark.parametrize(
    ("name", "tied", "sums", "squares"),
    [
        # The squares of Q and K travel together.
        ("olmoe-1b-7b", False, 2 * LAYERS, LAYERS),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("bloom-7b1", True, 2 * LAYERS + 1, 0),
                ("mixtral-8x7b", False, 2 * LAYERS, 0),
                ("olmo-2-7b", False, 2 * LAYERS, LAYERS),
                ("qwen1.5-moe-a2.7b", False, 2 * LAYERS, 0),
            )
        ),
    ],
)
@pytest.mark.parametrize("all_reduce", [pytest.param("xla", marks=pytest.mark.soak), "mosaic_gpu"])
def test_collective_operations_of_a_decode_step(name, tied, sums, squares, all_reduce):
    m = model(tied, name, all_reduce=all_reduce)
    program, _ = compiled(
        *(decode_steps, m, 1, 0, abstract_sampling(1), abstract()), max_steps=STEPS
    )
    by_xla = squares + sums * (all_reduce == "xla")
    assert collectives(program).pop("all-reduce", 0) == by_xla
    assert collectives(program)["all-gather"] == 1
    assert kernel_names(program).count("all_reduce") == sums * (all_reduce == "mosaic_gpu")


@pytest.mark.parametrize(
    ("batch", "blocks", "tiles", "all_reduce"),
    [(1, 1, 2, "xla"), (8, 16, 1, "mosaic_gpu"), (8, 16, 2, "xla")],
)
def test_prefill_in_pages(batch, blocks, tiles, all_reduce):
    m = model(False, tiles=tiles, all_reduce=all_reduce)
    block, row = abstract(blocks), abstract(batch)
    host = abstract(blocks, SLOT_MULTIPLE), block, block
    table = abstract(batch, SLOTS // SLOT_MULTIPLE)

    def packed(model, params, state, *host):
        *host, pages, prompts, owners, last = host
        named = {"pages": pages, "prompts": prompts, "owners": owners, "last": last}
        return prompt_logits(model, params, state, *host, **named, tiles=ran)

    ran = m.prompt_tiles(blocks, SLOT_MULTIPLE)
    assert ran == (tiles if blocks > 1 else 1)
    args = batch, 300, *host, table, row, block, row
    program, state = compiled(packed, m, *args, tiled=ran > 1)
    check_in_place(program, state, m)
    if all_reduce == "xla":  # the sums of tiles are not joined
        assert collectives(program) == {"all-reduce": 2 * LAYERS * ran, "all-gather": 1}
    else:
        assert collectives(program) == {"all-gather": 1}
        assert kernel_names(program).count("all_reduce") == 2 * LAYERS
        assert kernel_names(program).count("open_mailbox") == 1
        assert temp_bytes(program) <= workspace_bytes(m.local, batch, SLOTS, SLOTS)


def test_prefill_with_divided_tokens():
    m, block = with_one_kv_head(), abstract(1)
    host = abstract(1, SLOT_MULTIPLE), block, block
    host = *host, abstract(1, SLOTS // (RANKS * SLOT_MULTIPLE))

    def paged(model, params, state, *host):
        return prompt_logits(model, params, state, *host[:-1], pages=host[-1])

    program, state = compiled(paged, m, 1, 300, *host)
    check_in_place(program, state, m)
    # The pages before the block, and the block.
    assert kernel_names(program).count("prefill_attention") == 2 * LAYERS
    assert kernel_names(program).count("all_reduce") == 2 * LAYERS
    assert collectives(program) == {"all-gather": LAYERS + 1, "all-to-all": LAYERS}
