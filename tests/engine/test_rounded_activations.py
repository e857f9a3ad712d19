"""How much is lost if the activations of prompts are rounded as the weights are."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

import fdjax
from fdjax.models import describe
from fdjax.pallas_kernels.dispatch import Implementation
from fdjax.pallas_kernels.gemm import matmul
from fdjax.pallas_kernels.hopper.fragments import in_byte_order
from fdjax.pallas_kernels.hopper.rounded_rows import rounded_rows
from fdjax.pallas_kernels.norm import normalised
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES, QTensor, WeightFormat, in_layout, pack
from fdjax.tools.quantise import quantise_checkpoint
from fdjax.tools.smoothing import observe
from fdjax.weights.quantise import to_quantise

from .test_int8_cache import predictions, stories

pytestmark = pytest.mark.usefixtures("quick_compiles")


def rounded(x, kind):
    """x after a round trip through codes of a kind, in its dtype."""
    codes, scales = rounded_rows(x, kind=kind, in_xla=True)
    order = np.argsort(in_byte_order(np.arange(x.shape[1])))
    values = codes.astype(jnp.float32) * scales[:, None]
    return values[:, order].astype(x.dtype)


def run_rounded(x, w, *, norm, dtype, config, batch_invariant, **fused):
    x = rounded(x if norm is None else normalised(x, norm), w.kind)
    w = dataclasses.replace(w, rounded_activations=False)
    return matmul(x, w, preferred_element_type=dtype, **fused)


ROUNDED = Implementation(
    *("matmul", "rounded", run_rounded),
    can=WEIGHT_FEATURES | {"norm", "layer_norm", "bias", "gate", "activation", "residual"},
    needs=frozenset({"weight.rounded_activations"}),
)


def in_bytes(weight, form):
    """A weight [K,N], [K,2,N], or of queries, keys and values [K,Hkv,G+2,D], in fp8 or int8."""
    weight = weight if weight.ndim == 3 else weight.reshape(len(weight), -1)
    groups = np.asarray(weight, np.float32).reshape(-1, form.group, *weight.shape[1:])
    scales = np.abs(groups).max(axis=1, keepdims=True) / (448 if form.kind == "fp8" else 127)
    codes = groups / scales
    if form.kind == "fp8":
        codes = codes.astype(jnp.float8_e4m3fn).view(np.uint8)
    else:
        codes = (np.round(codes) + 128).astype(np.uint8)
    words = pack(jnp.asarray(codes.reshape(weight.shape)), form.kind)
    fixed = form.kind, form.group, weight.shape, "plain", form.rounded_activations
    return QTensor(words, jnp.asarray(scales[:, 0]), None, *fixed)


def quantised(lm, plan, kind, **options):
    """The model and its parameters with weights of a kind."""
    forms = {path: WeightFormat(kind, k, **options) for _, path, k in to_quantise(lm.model.config)}
    model = describe(lm.model.config.with_formats(forms), dtype="bfloat16", plan=plan)
    params = jax.tree.map(lambda a: a, lm.params)
    for (*path, last), form in forms.items():
        at = functools.reduce(lambda tree, key: tree[key], path, params)
        weight = model.config.format_of((*path, last))
        at[last] = in_layout(in_bytes(np.asarray(at[last]), form), weight.layout)
    return model, params


def error_beside(lm, plan, kind, want, ids, **options):
    """Root mean square error of log-probabilities, and the share of equal likeliest tokens."""
    lengths = np.full(len(ids), ids.shape[1], np.int32)
    got = predictions(*quantised(lm, plan, kind, **options), ids, lengths)
    got = np.asarray(got).astype(np.float64)
    same = got.argmax(axis=-1) == want.argmax(axis=-1)
    return {"error": np.sqrt(np.mean((got - want) ** 2)), "agreement": same.mean()}


def with_outliers(source, folder, columns, factor):
    """The same model, but some inputs of its layers are larger, and their weights smaller."""
    shutil.copytree(source, folder)
    tensors = dict(load_file(folder / "model.safetensors"))
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = tensor.at[columns].multiply(factor)
        if re.search(r"\.(q|k|v|gate|up)_proj\.weight", name):
            tensors[name] = tensor.at[:, columns].divide(factor)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_large_inputs_are_smoothed(two_layers, tmp_path):
    """Rounding a row with few large values loses the others, unless they move to the weights."""
    folder = with_outliers(two_layers, tmp_path / "outliers", jnp.array([3, 70, 200]), 64)
    options = {"compilation_cache": False, "progress": False}
    lm = fdjax.load(str(folder), dtype="bfloat16", **options)
    texts = stories(lm.tokenizer, 8, 128)
    ids, lengths = np.array(texts[:4], np.int32), np.full(4, 128, np.int32)
    want = np.asarray(predictions(lm.model, lm.params, ids, lengths)).astype(np.float64)
    plan = dataclasses.replace(
        lm.model.plan, implementations=(ROUNDED, *lm.model.plan.implementations)
    )

    def error(name, inputs):
        output = tmp_path / name
        fields = {"bits": 8, "scales": "bfloat16", "activations": "int8", "inputs": inputs}
        quantise_checkpoint(folder, output, lm.config, **fields)
        other = fdjax.load(str(output), dtype="bfloat16", plan=plan, **options)
        got = np.asarray(predictions(other.model, other.params, ids, lengths)).astype(np.float64)
        return np.sqrt(np.mean((got - want) ** 2))

    smoothed, plain = error("smoothed", observe(lm.engine, texts[4:])), error("plain", None)
    print(json.dumps({"smoothed": smoothed, "plain": plain}))
    assert smoothed < 0.5 * plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "most"),
    [
        ("fp8", "cpu", 2.0),
        pytest.param("fp8", "gpu", 2.0, marks=pytest.mark.gpu),
        ("int8", "cpu", 4.5),  # the error of the weights alone is a third of that in fp8
        pytest.param("int8", "gpu", 4.5, marks=pytest.mark.gpu),
    ],
)
def test_little_more_is_lost_than_with_the_weights_alone(kind, device, most):
    """On a GPU a kernel runs; elsewhere XLA rounds the activations of every product."""
    lm = fdjax.load("tiny", dtype="bfloat16", compilation_cache=False, progress=False)
    plan = lm.model.plan
    rounding = plan
    if device == "cpu":
        rounding = dataclasses.replace(plan, implementations=(ROUNDED, *plan.implementations))
    ids = np.array(stories(lm.tokenizer, 4, 256), np.int32)
    want = predictions(lm.model, lm.params, ids, np.full(4, 256, np.int32))
    want = np.asarray(want).astype(np.float64)
    weights = error_beside(lm, plan, kind, want, ids)
    both = error_beside(lm, rounding, kind, want, ids, rounded_activations=True)
    print(json.dumps({"weights": weights, "and activations": both}))
    assert 1.1 * weights["error"] < both["error"] < most * weights["error"]
    assert both["error"] < 0.3
    assert both["agreement"] > (0.99 if kind == "fp8" else 0.985)
