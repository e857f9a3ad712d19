"""`forward` and `generate` as pure functions of `(model, params, ids)`."""

import dataclasses
import functools
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from fdjax.engine.state import SLOT_MULTIPLE, init_cache, start
from fdjax.engine.step import decode_steps, prefill
from fdjax.models import Attend, Model, Params
from fdjax.pallas_kernels.attention import prefill_attention, split_qkv, with_norms
from fdjax.pallas_kernels.attention.cache import dequantised, quantise
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.pallas_kernels.rope import apply_rope
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.system.process import refuse_forked, transfers_allowed


@transfers_allowed()
def forward(
    model: Model,
    params: Params,
    ids: Array,
    lengths: Array | None = None,
    *,
    last: int | None = None,
    kv_dtype: str | None = None,
) -> Array:
    """Logits at every position, without a cache. Pure and jittable; all but arrays is static.

    Inside `jax.jit`, values of `ids` and `lengths` cannot be checked. Values out of range give
    logits without meaning.

    Args:
      model, params: the model.
      ids: [B, T] integers of the vocabulary.
      lengths: [B] integers in 1..T, valid tokens per row, default T; logits past them mean nothing.
      last: only the logits of this many positions at the end of T.
      kv_dtype: "int8" rounds keys and values as a cache in int8 does.

    Returns:
      [B, T, V] fp32, or [B, last, V].

    Raises:
      ValueError: `ids`, `lengths` or `last` have a wrong shape or are out of range, `kv_dtype` is
        unknown, `params` do not belong to the model, or several devices share the model and
        `params` are not on them.
    """
    if kv_dtype not in (None, "int8"):
        raise ValueError(f"forward: kv_dtype must be int8 or None, got {kv_dtype!r}")
    ids, lengths = _checked("forward", ids, lengths, model)
    t = ids.shape[1]
    is_integer = isinstance(last, numbers.Integral) and not isinstance(last, bool)
    if last is not None and not (is_integer and 0 < last <= t):
        raise ValueError(f"forward: last must be an integer in 1..{t}, got {last!r}")
    static = {"last": last, "kv_dtype": kv_dtype}
    return _on_all("forward", _forward, model, params, ids, lengths, **static)


def _forward(
    model: Model,
    params: Params,
    ids: Array,
    lengths: Array,
    *,
    last: int | None,
    kv_dtype: str | None,
) -> Array:
    module = model.module(params)
    attend = attend_without_cache(lengths, model.plan, kv_dtype)
    hidden, _ = module(ids, [None] * model.config.layers, attend, model.plan, starts=None)
    return module.logits(hidden if last is None else hidden[:, -last:], model.plan)


def attend_without_cache(lengths: Array, plan: Plan, kv_dtype: str | None = None) -> Attend:
    """Attention within whole texts, as a function that returns caches unchanged.

    Args:
      lengths: [B] int32 valid tokens of each text.
      plan: chooses the implementations.
      kv_dtype: see `forward`.
    """

    def attend(spec, kv, qkv, sinks=None, norms=None):
        b, t = qkv.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
        q, k, v = split_qkv(qkv if norms is None else with_norms(qkv, norms, plan))
        if spec.rope is not None:
            q, k = (
                apply_rope(a, positions, spec.rope, prompt=lengths, limit=lengths) for a in (q, k)
            )
        k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
        if kv_dtype is not None:
            k, v = (dequantised(quantise(a)) for a in (k, v))
        return prefill_attention(q, k, v, lengths, spec=spec, sinks=sinks, plan=plan), kv

    return attend


@transfers_allowed()
def generate(
    model: Model,
    params: Params,
    ids: Array,
    config: GenerationConfig,
    lengths: Array | None = None,
) -> Array:
    """Generate from a batch of prompts. Pure and jittable (`model` and `config` static).

    Inside `jax.jit`, values of `ids` and `lengths` cannot be checked. Values out of range give
    tokens without meaning.

    Args:
      model, params: the model.
      ids: [B, P] ids of the prompts, padded at the end with any ids of the vocabulary.
      config: the options of all rows. Defaults of a checkpoint are not used: a field that is not
        given has the option's own default, and only `eos_token_ids` end a row. Row i draws with
        seed `config.seed + i`, or i if there is no seed. Options that end a row on the host
        (`stop_strings`, `stopping_criteria`) and `num_return_sequences` must be off.
      lengths: [B] integers in 1..P, tokens of each prompt; default P.

    Returns:
      [B, max_new_tokens] int32, -1 after a row has ended. Values below -1 mean that the logits were
      not finite, or that all tokens were forbidden.

    Raises:
      ValueError: shapes disagree, a value is out of range, an option names an id that is not in the
        vocabulary or works on the host only, `params` do not belong to the model, or several
        devices share the model and `params` are not on them.
      TypeError: `config` is not a `GenerationConfig`.
    """
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"generate: config must be a GenerationConfig, got {config!r}")
    config = config.filled()
    for name in ("stop_strings", "stopping_criteria"):
        if getattr(config, name):
            raise ValueError(f"generate: {name} must be empty in a jitted function")
    if config.num_beams != 1:
        raise ValueError("generate: num_beams must be 1 in a jitted function")
    if config.num_return_sequences != 1:
        raise ValueError("generate: num_return_sequences must be 1: repeat the prompts")
    if wrong := config.id_outside(model.config.vocab_size):
        raise ValueError(f"generate: {wrong}")
    ids, lengths = _checked("generate", ids, lengths, model, config.max_new_tokens)
    if config.max_new_tokens == 0:
        return jnp.zeros((len(ids), 0), jnp.int32)
    return _on_all("generate", _generate, model, params, ids, lengths, config=config)


def _generate(
    model: Model, params: Params, ids: Array, lengths: Array, *, config: GenerationConfig
) -> Array:
    b, p = ids.shape
    slots = -(-(p + config.max_new_tokens) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    rows = [dataclasses.replace(config, seed=((config.seed or 0) + i) % 2**32) for i in range(b)]
    state = start(init_cache(model, b, slots))
    state, sampling = jax.tree.map(jnp.asarray, (state, per_row(rows, b)))
    processors = dataclasses.replace(config.processors, logprobs=False)
    zeros = jnp.zeros((b,), jnp.int32)
    final = jnp.ones((b,), bool)
    state, first, _ = prefill(
        model, params, state, sampling, ids, lengths, zeros, final, processors=processors
    )
    n = config.max_new_tokens - 1
    if n == 0:
        return first[:, None]
    _, rest, _ = decode_steps(
        model, params, state, sampling, jnp.int32(n), max_steps=n, processors=processors
    )
    return jnp.concatenate([first[:, None], rest], axis=1)


def _on_all(
    op: str, function: Callable[..., Array], model: Model, params: Params, *args: Array, **static
) -> Array:
    """Run function(model, params, *args, **static) on every device that shares the model.

    Raises:
      ValueError: the parameters do not belong to the model, or are not on these devices.
    """
    check_params(params, model.abstract_params, dtypes=False)
    if model.ranks == 1:
        return function(model, params, *args, **static)
    first = jax.tree.leaves(params)[0]
    if not isinstance(first, jax.core.Tracer):
        devices = len(first.devices()) if isinstance(first, jax.Array) else 0
        if devices != model.ranks:
            raise ValueError(
                f"{op}: params must be on the {model.ranks} devices that share the model, "
                "as those of an LM are"
            )
    return _jitted_on_all(function, model, params, *args, **static)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("last", "kv_dtype", "config"))
def _jitted_on_all(
    function: Callable[..., Array], model: Model, params: Params, *args: Array, **static
) -> Array:
    whole = PartitionSpec()
    # The parameters say which devices these are. Inside a trace nothing else does.
    return jax.shard_map(
        functools.partial(function, model.local, **static),
        mesh=AbstractMesh((model.ranks,), (AXIS,), axis_types=(AxisType.Auto,)),
        in_specs=(model.partitions, *[whole] * len(args)),
        out_specs=whole,
        check_vma=False,
    )(params, *args)


def check_params(params: Params, wanted: Params, *, dtypes: bool = True) -> None:
    """Raise ValueError if parameters do not have the structure and shapes of the model.

    Args:
      params: the parameters.
      wanted: those of the model, without values.
      dtypes: whether they must also have the dtypes of the model.
    """

    def described(leaf):
        return f"{leaf.dtype if dtypes else ''}{[*np.shape(leaf)]}"

    given, want = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): described(leaf)
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for tree in (params, wanted)
    )
    for name in {**want, **given}:
        if given.get(name) != want.get(name):
            raise ValueError(
                f"params: {name} must be {want.get(name, 'absent')}, "
                f"got {given.get(name, 'nothing')}"
            )
    if jax.tree.structure(params) != jax.tree.structure(wanted):
        raise ValueError("params: must be nested dicts, like those of `LM.params`")


def _checked(
    function: str, ids: Array, lengths: Array | None, model: Model, new_tokens: int = 0
) -> tuple[Array, Array]:
    """Ids [B,T] and lengths [B] as int32 arrays. Of tracers, it checks only shape and dtype.

    Raises:
      ValueError: see `forward`.
    """
    refuse_forked()
    ids = _integers(function, "ids", ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"{function}: ids must be [B,T] and not empty, got {list(ids.shape)}")
    b, t = ids.shape
    lengths = np.full((b,), t, np.int32) if lengths is None else lengths
    lengths = _integers(function, "lengths", lengths)
    if lengths.shape != (b,):
        raise ValueError(f"{function}: lengths must be [{b}], got {list(lengths.shape)}")
    v = model.config.vocab_size
    _check_within(function, "ids", ids, 0, v - 1, "the vocabulary")
    _check_within(function, "lengths", lengths, 1, t, "what ids has room for")
    if model.config.position_offset is not None:
        room = model.config.max_position_embeddings - new_tokens
        _check_within(function, "lengths", lengths, 1, room, "the positions the model has learned")
    return jnp.asarray(ids, jnp.int32), jnp.asarray(lengths, jnp.int32)


def _integers(function: str, name: str, values: Array) -> Array:
    """Check that an array has integers. Values stay in their dtype, which may exceed int32."""
    values = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{function}: {name} must be integers, got {values.dtype}")
    return values


def _check_within(
    function: str, name: str, values: Array, least: int, most: int, what: str
) -> None:
    if isinstance(values, jax.core.Tracer):
        return
    outside = values[(values < least) | (values > most)]
    if outside.size:
        raise ValueError(f"{function}: {name} must be in {least}..{most}, {what}, got {outside[0]}")
