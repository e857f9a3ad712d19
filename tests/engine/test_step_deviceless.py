"""The decode chunk and a prefill call, compiled for a GPU: the caches stay where they are."""

import collections
import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deviceless import (
    _parse,
    _reachable,
    alias_bytes,
    compile_for,
    kernel_names,
    large_copies,
    temp_bytes,
    while_bodies,
)
from fdjax.engine.engine import compiler_options
from fdjax.engine.memory import workspace_bytes
from fdjax.engine.scheduler import StateShape
from fdjax.engine.state import (
    SLOT_MULTIPLE,
    init_cache,
    init_pool,
    start,
    start_in_pages,
    without_cache,
)
from fdjax.engine.step import decode_steps, first_tokens, prompt_logits
from fdjax.models import describe, parse_config
from fdjax.models.decoder import layers_of_a_turn
from fdjax.pallas_kernels.attention import find_shared
from fdjax.pallas_kernels.attention.hopper import widen
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.sampling.beams import BeamState
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors
from fdjax.weights.quantise import to_quantise
from fdjax.weights.stacked import layer_slices, stacked_shapes

pytestmark = pytest.mark.deviceless

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf" / "configs"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0), implementation="xla")
SLOTS = 2048
CHUNK = 128
STEPS = 32
LOOPED = 6  # layers of a model that runs them in a loop: three turns of two


# Every op that has a kernel runs it, as with measured tables.
KERNELS, CHAINED, ONE_LAUNCH = (
    dataclasses.replace(
        H100,
        named=(("matmul", "mosaic_gpu"), ("linear_chain", chain), ("decode_layers", layers)),
    )
    for chain, layers in (("xla", "xla"), ("mosaic_gpu", "xla"), ("xla", "mosaic_gpu"))
)


@functools.cache
def model(tied, plan=H100, kv_dtype=None, weights=None, layers=2):
    """Two layers of Llama 3 8B, in full size: a layer more shows no more, but for loops.

    `weights` is the format of the weights of layers, if they are quantised.
    """
    data = json.loads((CONFIGS / "llama-3-8b.new.json").read_text(encoding="utf-8"))
    data |= {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    config = parse_config(data)
    if weights is not None:
        config = config.with_formats({path: weights for _, path, _ in to_quantise(config)})
    return describe(config, plan=plan, kv_dtype=kv_dtype)


def room(batch, pages=0):
    """Number of rows of a state of which decode steps run `batch`."""
    return StateShape(batch, SLOTS, pages=pages, most_rows=32 if pages else 0).room


@functools.cache
def abstract_state(tied, batch, stacked=False, pages=0, kv_dtype=None, layers=2):
    m = model(tied, kv_dtype=kv_dtype, layers=layers)

    def make():
        if pages:
            return start_in_pages(init_pool(m, pages), room(batch, pages), SLOTS)
        return start(init_cache(m, batch, SLOTS, stacked))

    return jax.eval_shape(make)


def abstract_sampling(batch, **options):
    rows = per_row([GenerationConfig(**options)] * batch, batch)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def unlikely_buffers(compiled):
    """Names of the instructions in rare branches, for values that are not finite."""
    module = _parse(compiled)
    branches = []
    for computation in module.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "conditional":
                false, _ = instruction.called("branch_computations") or (
                    instruction.called(f"{truth}_computation")[0] for truth in ("false", "true")
                )
                branches.append(false)
    return {name for c in _reachable(module, branches) for name in module[c].instructions}


def outermost_thunks(folder):
    """The operations of the program compiled last. The nodes of a CUDA graph count as one."""
    (thunks,) = folder.glob("*.thunk_sequence_after_thunk_passes.txt")
    return re.findall(r"^\d+:.*", thunks.read_text(encoding="utf-8"), re.MULTILINE)


def check_in_place(
    compiled, tied, batch, *, masked_values, stacked=False, pages=0, kv_dtype=None, layers=2
):
    """All of the state is updated where it is, and no layer's keys or values are moved.

    But for `masked_values`: XLA's attention over a prompt zeroes the values of slots that hold
    nothing, in a buffer of its own, once a layer. That is its price, and not the engine's.
    """
    state = abstract_state(tied, batch, stacked, pages, kv_dtype, layers)
    assert alias_bytes(compiled) == nbytes(state)
    unlikely = unlikely_buffers(compiled)
    of_a_layer = nbytes(state.kv) // layers
    copies = large_copies(compiled, of_a_layer // 4)
    copies = [c for c in copies if c.name not in unlikely]
    if masked_values:
        masked = [c for c in copies if c.kind == "select" and "_where" in c.op_name]
        assert len(masked) <= layers
        copies = [c for c in copies if c not in masked]
    assert not copies, "\n".join(map(str, copies))


def compiled_chunk(
    plan, tied, batch, folder, processors=Processors(), pages=0, shared=None, kv_dtype=None
):
    """A chunk of decode steps, as users get it: one CUDA graph, and all of the state in place."""
    m = model(tied, plan, kv_dtype)
    stacked = m.one_launch(batch, SLOTS)
    params = m.abstract_params
    if stacked:
        params = params | {"blocks": stacked_shapes(params)}

    def run(params, state, sampling, n, table, shared):
        layers = None
        if stacked:
            layers = params["blocks"]
            params = params | {"blocks": layer_slices(layers)}
        return decode_steps(
            *(m, params, state, sampling, n, table, shared),
            max_steps=STEPS,
            rows=batch if batch < room(batch, pages) else None,
            processors=processors,
            layers=layers,
        )

    n = jax.ShapeDtypeStruct((), jnp.int32)
    state = abstract_state(tied, batch, stacked, pages, kv_dtype)
    args = params, state, abstract_sampling(batch), n, abstract_table(batch, pages), shared
    options = compiler_options(decode_steps) | {"xla_dump_to": str(folder)}
    compiled = compile_for("h100", run, *args, donate_argnums=1, compiler_options=options)
    in_place = {"stacked": stacked, "pages": pages, "kv_dtype": kv_dtype}
    check_in_place(compiled, tied, batch, masked_values=False, **in_place)
    (chunk,) = outermost_thunks(folder)
    assert "kCommandBuffer" in chunk
    return compiled


@pytest.mark.parametrize(
    ("plan", "batch", "tied"),
    [
        # Each plan compiles for one batch. Others are part of a grid.
        pytest.param(
            *(plan, batch, name == "tied"),
            id=f"{of}-{batch}-{name}",
            marks=() if (batch, name) == chosen else pytest.mark.soak,
        )
        for of, plan, chosen in (
            ("xla", H100, (1, "untied")),
            ("kernels", KERNELS, (8, "tied")),
            ("chained", CHAINED, (8, "tied")),
            ("one launch", ONE_LAUNCH, (1, "untied")),
        )
        for batch in (1, 8)
        for name in ("untied", "tied")
    ],
)
def test_decode_steps(plan, tied, batch, tmp_path):
    compiled = compiled_chunk(plan, tied, batch, tmp_path)
    assert temp_bytes(compiled) <= batch * 2**21
    # Norm, QKV; RoPE, append, attention; output; norm, gate, up, activation; down. In a chain, all
    # but attention is one kernel from a layer to the next.
    layers = model(tied).config.layers
    kernels = {
        KERNELS: 5 * layers,
        CHAINED: 1 + layers + (layers - 1) + 3,
        ONE_LAUNCH: 1,
    }.get(plan)
    if kernels:
        calls = re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text())
        assert len(calls) == kernels + (not tied)
        assert not between_layers(compiled, kernels)


def test_decode_steps_with_every_processor(tmp_path):
    compiled = compiled_chunk(
        CHAINED,
        False,
        8,
        tmp_path,
        Processors(edit=True, sample=True, truncate=True, logprobs=True),
    )
    logits = 4 * 8 * model(False).config.vocab_size
    assert temp_bytes(compiled) <= 9 * logits
    # As in `test_decode_steps`, and one kernel for the limits of all that is drawn.
    layers = model(False).config.layers
    calls = re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text())
    assert len(calls) == 1 + layers + (layers - 1) + 3 + 1 + 1


def between_layers(compiled, count):
    """Names of the other operations between the first and the last kernel of the layers."""
    step = next(
        computation
        for computation in _parse(compiled).values()
        if sum("mosaic_gpu" in i.text for i in computation.instructions.values()) >= count
    )
    names = list(step.instructions)
    kernels = [n for n in names if "mosaic_gpu" in step.instructions[n].text][:count]
    inner = names[names.index(kernels[0]) : names.index(kernels[-1])]
    free = ("bitcast", "get-tuple-element", "parameter", "constant", "tuple")
    return [
        name for name in inner if name not in kernels and step.instructions[name].opcode not in free
    ]


def abstract_table(batch, pages):
    return jax.ShapeDtypeStruct((batch, SLOTS // SLOT_MULTIPLE), jnp.int32) if pages else None


def compiled_prefill(
    plan, tied, batch, stacked=False, pages=0, blocks=0, loops=False, kv_dtype=None, weights=None
):
    """A prefill call as users get it; with `blocks` of 128 tokens that rows share."""
    m = model(tied, plan, kv_dtype, weights, LOOPED if loops else 2)
    params = m.abstract_params
    if loops:
        params = params | {"blocks": stacked_shapes(params)}

    rows = min(blocks, room(batch, pages)) or batch

    def run(params, state, tokens, lengths, offsets, table, *packed):
        named = dict(zip(("rows", "prompts", "owners", "last"), packed, strict=False), pages=table)
        if loops:
            named["layers"] = params["blocks"]
            params = params | {"blocks": layer_slices(params["blocks"])}
        return prompt_logits(m, params, state, tokens, lengths, offsets, **named)

    block = jax.ShapeDtypeStruct((blocks or batch,), jnp.int32)
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((*block.shape, SLOT_MULTIPLE if blocks else CHUNK), jnp.int32)
    return compile_for(
        "h100",
        run,
        params,
        abstract_state(tied, batch, stacked, pages, kv_dtype, m.config.layers),
        tokens,
        block,
        block,
        abstract_table(rows, pages),
        *((row, row, block, row) if blocks else ()),
        donate_argnums=1,
        compiler_options=compiler_options(prompt_logits, m),
    )


@pytest.mark.parametrize(
    ("batch", "tied"),
    [
        pytest.param(1, False, id="1-untied"),
        # Combinations are a grid: the weights of the logits have little to do with the rows.
        *(
            pytest.param(batch, tied, id=f"{batch}-{name}", marks=pytest.mark.soak)
            for batch, tied, name in ((1, True, "tied"), (8, False, "untied"), (8, True, "tied"))
        ),
    ],
)
def test_prefill(tied, batch):
    compiled = compiled_prefill(H100, tied, batch)
    check_in_place(compiled, tied, batch, masked_values=True)
    # The scores in fp32 are the largest temporary array.
    scores = 4 * batch * model(tied).config.heads * CHUNK * SLOTS
    assert temp_bytes(compiled) <= 3 * scores


def test_prefill_of_a_stacked_cache():
    plan = dataclasses.replace(H100, named=(("prefill_attention", "mosaic_gpu"),))
    compiled = compiled_prefill(plan, False, 8, stacked=True)
    check_in_place(compiled, False, 8, masked_values=False, stacked=True)
    assert kernel_names(compiled).count("write_chunk") == model(False).config.layers
    # Kernels read and write the stack itself, and not a slice of one layer.
    stack = abstract_state(False, 8, stacked=True).kv.k
    layer = ",".join(map(str, stack.shape[1:]))
    assert not re.findall(rf"\[(?:1,)?{layer}\]", compiled.as_text())


PAGES = 300
IN_PAGES = (("decode_attention", "mosaic_gpu"), ("prefill_attention", "mosaic_gpu"))


@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        # Each plan compiles for one batch. The other is part of a grid.
        pytest.param(plan, batch, id=f"{name}-{batch}", marks=() if kept else pytest.mark.soak)
        for name, plan, of in (
            ("kernels", KERNELS, 8),
            ("chained", CHAINED, 1),
            ("one launch", ONE_LAUNCH, 1),
        )
        for batch in (1, 8)
        for kept in [batch == of]
    ],
)
def test_decode_steps_in_pages(plan, batch, tmp_path):
    plan = dataclasses.replace(plan, named=plan.named + IN_PAGES)
    compiled = compiled_chunk(plan, False, batch, tmp_path, pages=PAGES)
    assert temp_bytes(compiled) <= batch * 2**21


def test_decode_steps_with_an_int8_cache_in_pages(tmp_path):
    """One kernel a layer writes the token and reads the codes, all where they are."""
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    compiled = compiled_chunk(plan, False, 8, tmp_path, pages=PAGES, kv_dtype="int8")
    assert temp_bytes(compiled) <= 8 * 2**21
    layers = model(False).config.layers
    assert kernel_names(compiled).count("decode_attention") == layers
    assert not between_layers(compiled, 5 * layers)


@pytest.mark.soak
def test_one_launch_with_an_int8_cache_in_pages(tmp_path):
    plan = dataclasses.replace(ONE_LAUNCH, named=ONE_LAUNCH.named + IN_PAGES)
    compiled = compiled_chunk(plan, False, 1, tmp_path, pages=PAGES, kv_dtype="int8")
    assert kernel_names(compiled).count("layers_kernel") == 1


def test_prefill_with_an_int8_cache_in_pages(monkeypatch):
    """The live pages of a layer are dequantised, here for 4 of 16 rows at a time."""
    monkeypatch.setattr(widen, "_SLOTS_AT_ONCE", 4 * SLOTS)
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    m = model(False, plan, "int8")
    compiled = compiled_prefill(plan, False, 8, pages=PAGES, blocks=16, kv_dtype="int8")
    check_in_place(compiled, False, 8, masked_values=False, pages=PAGES, kv_dtype="int8")
    names = collections.Counter(kernel_names(compiled))
    assert names["widen_pages"] == names["prefill_attention"] == m.config.layers
    assert temp_bytes(compiled) <= workspace_bytes(m, 8, 2 * SLOT_MULTIPLE, SLOTS)


@pytest.mark.parametrize("blocks", [1, 4])
def test_prefill_with_the_layers_in_a_loop(blocks):
    """The program holds few layers. Kernels read their weights where they are."""
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    assert model(False, plan).loops(blocks * SLOT_MULTIPLE)
    compiled = compiled_prefill(
        plan, False, 1, pages=PAGES, blocks=blocks if blocks > 1 else 0, loops=True
    )
    check_in_place(compiled, False, 1, masked_values=False, pages=PAGES, layers=LOOPED)
    names = collections.Counter(kernel_names(compiled))
    products = "flat_gemm_kernel" if blocks == 1 else "prompt_gemm_kernel"
    each = layers_of_a_turn(LOOPED)
    assert LOOPED > each > 1
    # There is also the product of the logits.
    assert names == collections.Counter(
        [*[*[products] * 4, "write_chunk", "prefill_attention"] * each, "flat_gemm_kernel"]
    )
    assert temp_bytes(compiled) <= blocks * 2**24


@pytest.mark.parametrize(
    ("weights", "blocks", "products"),
    [
        (WeightFormat("int4", 128, scales="bfloat16"), 1, ["tall_gemm_kernel"]),
        (WeightFormat("int8", 128, scales="bfloat16"), 3, ["tall_gemm_kernel"]),
        (WeightFormat("fp8", 128), 1, ["tall_gemm_kernel"]),
        *(
            (
                WeightFormat("fp8", 128, rounded_activations=True),
                blocks,
                ["fp8_rows_kernel", "fp8_gemm_kernel"],
            )
            for blocks in (1, 8)
        ),
    ],
    ids=str,
)
def test_prefill_with_quantised_layers_in_a_loop(weights, blocks, products):
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    m = model(False, plan, weights=weights)
    assert m.loops(blocks * SLOT_MULTIPLE) and m.stacks_layers
    compiled = compiled_prefill(
        *(plan, False, 1),
        pages=PAGES,
        blocks=blocks if blocks > 1 else 0,
        loops=True,
        weights=weights,
    )
    check_in_place(compiled, False, 1, masked_values=False, pages=PAGES, layers=LOOPED)
    names = collections.Counter(kernel_names(compiled))
    assert {name: names[name] for name in products} == dict.fromkeys(
        products, 4 * layers_of_a_turn(LOOPED)
    )
    assert temp_bytes(compiled) <= blocks * 2**24


def test_products_that_copy_a_layer_are_not_looped_over():
    forms = WeightFormat("int8", 128), WeightFormat("fp4", 32, scales="float8_e8m0fnu")
    looped = [model(False, KERNELS, weights=weights).loops(512) for weights in forms]
    assert looped == [True, False]


def test_layers_that_differ_are_not_looped_over():
    plain = model(False, KERNELS)
    first, *rest = plain.config.blocks
    windowed = dataclasses.replace(first.attention, window=64)
    blocks = (dataclasses.replace(first, attention=windowed), *rest)
    differing = describe(dataclasses.replace(plain.config, blocks=blocks), plan=KERNELS)
    assert not differing.loops(SLOT_MULTIPLE) and not model(False).loops(SLOT_MULTIPLE)


def test_decode_steps_with_shared_pages(tmp_path):
    """A layer takes another attention for the tiles, and nothing moves a page."""
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    shared = find_shared(np.array([[1, i + 2] + [0] * 14 for i in range(8)], np.int32), group=4)
    shared = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shared)
    compiled = compiled_chunk(plan, False, 8, tmp_path, pages=PAGES, shared=shared)
    names = collections.Counter(kernel_names(compiled))
    layers = model(False).config.layers
    assert names["decode_attention"] == 2 * layers


@pytest.mark.parametrize("aligned", [False, True], ids=["general", "aligned"])
def test_decode_steps_of_beams(aligned):
    """The kernel reads the pages of all beams of a prompt, and nothing gathers them."""
    plan = dataclasses.replace(KERNELS, named=KERNELS.named + IN_PAGES)
    m = model(False, plan)

    def run(params, state, sampling, n, table):
        static = {"processors": Processors(beams=(4, 2)), "aligned": aligned, "max_steps": STEPS}
        return decode_steps(m, params, state, sampling, n, table, rows=8, **static)

    of_all = room(8, PAGES), SLOTS
    beams = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, BeamState.empty(*of_all, 4)))
    state = dataclasses.replace(abstract_state(False, 8, pages=PAGES), beams=beams)
    n = jax.ShapeDtypeStruct((), jnp.int32)
    sampling = abstract_sampling(8, num_beams=4)
    args = m.abstract_params, state, sampling, n, abstract_table(8, PAGES)
    options = compiler_options(decode_steps)
    compiled = compile_for("h100", run, *args, donate_argnums=1, compiler_options=options)
    assert alias_bytes(compiled) == nbytes(state)
    assert kernel_names(compiled).count("decode_attention") == m.config.layers
    assert not large_copies(compiled, nbytes(state.kv) // m.config.layers // 4)


@pytest.mark.parametrize("layers", ["one by one", "one launch"])
def test_decode_steps_with_quantised_weights(layers):
    """They run through their kernels, and nothing is dequantised or copied."""
    data = json.loads((CONFIGS / "llama-2-7b.old.json").read_text(encoding="utf-8"))
    config = parse_config(data | {"num_hidden_layers": 2})
    formats = {
        ("blocks", i, *linear.path, "weight"): WeightFormat("int4", 128)
        for i, block in enumerate(config.blocks)
        for linear in block.linears.values()
    }
    formats["head", "weight"] = WeightFormat("int8", config.width)
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    one_launch = layers == "one launch"
    if not one_launch:
        plan = plan.with_xla("decode_layers")
    quantised = describe(config.with_formats(formats), dtype="bfloat16", plan=plan)
    assert quantised.one_launch(1, SLOTS) == one_launch
    pages = 32
    state = jax.eval_shape(lambda: start_in_pages(init_pool(quantised, pages), 1, SLOTS))
    weights = quantised.abstract_params
    if one_launch:
        weights = weights | {"blocks": stacked_shapes(weights)}

    def run(params, state, sampling, n, table):
        stacked = None
        if one_launch:
            stacked = params["blocks"]
            params = params | {"blocks": layer_slices(stacked)}
        return decode_steps(
            *(quantised, params, state, sampling, n, table), max_steps=STEPS, layers=stacked
        )

    n = jax.ShapeDtypeStruct((), jnp.int32)
    args = weights, state, abstract_sampling(1), n, abstract_table(1, pages)
    options = compiler_options(decode_steps, quantised)
    compiled = compile_for("h100", run, *args, donate_argnums=1, compiler_options=options)
    kernels = kernel_names(compiled)
    assert kernels.count("packed_gemm_kernel") == 1 + (0 if one_launch else 2 * 4)
    assert kernels.count("layers_kernel") == one_launch
    # Clusters that share a head send each other 0.5 MB.
    assert temp_bytes(compiled) < 1.25 * 2**20
    assert alias_bytes(compiled) == nbytes(state)


@pytest.mark.parametrize("name", ["bloom-7b1", "gpt-j-6b"])
def test_a_layer_takes_five_kernels(name):
    """LayerNorm, biases and GELU are in the products, the append is in the attention.

    BLOOM has no RoPE, and GPT-J rotates a part of each head.
    """
    data = json.loads((CONFIGS / f"{name}.new.json").read_text(encoding="utf-8"))
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    m = describe(parse_config(data | {"n_layer": 2}), dtype="bfloat16", plan=plan)
    state = jax.eval_shape(lambda: start_in_pages(init_pool(m, PAGES), 1, SLOTS))

    def run(params, state, sampling, n, table):
        return decode_steps(m, params, state, sampling, n, table, max_steps=STEPS)

    n = jax.ShapeDtypeStruct((), jnp.int32)
    args = m.abstract_params, state, abstract_sampling(1), n, abstract_table(1, PAGES)
    options = compiler_options(decode_steps)
    compiled = compile_for("h100", run, *args, donate_argnums=1, compiler_options=options)
    names = collections.Counter(kernel_names(compiled))
    assert names == {"flat_gemm_kernel": 4 * 2, "decode_attention": 2}
    # Between them, no kernel of XLA depends on the layer: none writes to the cache.
    (body,) = while_bodies(compiled)
    pool = "bf16[" + ",".join(map(str, state.kv.k.shape)) + "]"
    writers = [i for i in body.instructions.values() if i.opcode == "fusion" and pool in i.text]
    assert not writers
    assert alias_bytes(compiled) == nbytes(state)


MX = WeightFormat("fp4", 32, scales="float8_e8m0fnu")


@pytest.mark.parametrize(
    ("batch", "form"),
    [pytest.param(1, None, marks=pytest.mark.soak), (8, None), (8, MX)],
    ids=str,
)
def test_decode_steps_with_experts(batch, form, tmp_path):
    """Two kernels a layer read the chosen experts where they are, in the one CUDA graph."""
    data = json.loads((CONFIGS / "qwen3-30b-a3b.new.json").read_text(encoding="utf-8"))
    plan = dataclasses.replace(KERNELS, named=(*KERNELS.named, ("moe", "mosaic_gpu"), *IN_PAGES))
    data |= {"num_hidden_layers": 3, "moe_intermediate_size": 512}
    config = parse_config(data)
    if form is not None:
        parts = [(i, name) for i in range(3) for name in ("gate_up", "down")]
        names = [("blocks", i, "mlp", "experts", name) for i, name in parts]
        config = config.with_formats(dict.fromkeys(names, form))
    experts = describe(config, plan=plan)
    state = jax.eval_shape(lambda: start_in_pages(init_pool(experts, PAGES), batch, SLOTS))

    def run(params, state, sampling, n, table):
        return decode_steps(experts, params, state, sampling, n, table, max_steps=STEPS)

    n = jax.ShapeDtypeStruct((), jnp.int32)
    args = experts.abstract_params, state, abstract_sampling(batch), n
    options = compiler_options(decode_steps, experts) | {"xla_dump_to": str(tmp_path)}
    compiled = compile_for(
        *("h100", run, *args, abstract_table(batch, PAGES)),
        donate_argnums=1,
        compiler_options=options,
    )
    names = kernel_names(compiled)
    assert names.count("moe_up_kernel") == names.count("moe_down_kernel") == 3
    (chunk,) = outermost_thunks(tmp_path)
    assert "kCommandBuffer" in chunk
    assert alias_bytes(compiled) == nbytes(state)
    assert not large_copies(compiled, 2**20)
    assert temp_bytes(compiled) <= batch * 2**21


@pytest.mark.parametrize(("batch", "blocks"), [(1, 0), (8, 16)])
def test_prefill_in_pages(batch, blocks):
    plan = dataclasses.replace(H100, named=IN_PAGES)
    compiled = compiled_prefill(plan, False, batch, pages=PAGES, blocks=blocks)
    check_in_place(compiled, False, batch, masked_values=False, pages=PAGES)
    assert kernel_names(compiled).count("write_chunk") == model(False).config.layers


def test_the_first_tokens_of_greedy_prompts_take_few_kernels():
    """No condition is read on the host, which would wait for the prompts."""
    state = without_cache(abstract_state(False, 8))
    final = jax.ShapeDtypeStruct((8,), jnp.bool_)
    logits = jax.ShapeDtypeStruct((8, model(False).config.vocab_size), jnp.float32)
    compiled = compile_for(
        *("h100", first_tokens, state, logits, abstract_sampling(8), final),
        donate_argnums=0,
        compiler_options=compiler_options(first_tokens),
    )
    assert alias_bytes(compiled) == nbytes(state)
    opcodes = collections.Counter(
        instruction.opcode
        for c in _parse(compiled).values()
        for instruction in c.instructions.values()
    )
    assert opcodes["fusion"] <= 8 and not opcodes["conditional"]
