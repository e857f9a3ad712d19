"""`BlockSpec`, the one description of a decoder block, from which everything else derives.

The decoder derives its modules from it, the weight map its tensors, memory plans their buffers,
`tune` and `info` their shapes. It also decides which kernels for several layers can run a block.
"""

import dataclasses
import functools
import math

from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import NO_FEATURES, Features, used_features
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES, WeightFormat

Path = tuple[str, ...]

# Features of a `BlockSpec` that the modules of `fdjax.models.decoder` support.
DECODER_CAN = frozenset(
    {"qkv_bias", "out_bias", "mlp_bias", "norm_offset", "qk_norm", "post_norms"}
    | {"tensor_parallel"}
    | WEIGHT_FEATURES
)


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """The shape of a linear layer and of what is fused with it.

    Attributes:
      k, n: shape of the weight [K,N], or [K,2,N/2] with a gate.
      gate: the result is act(gate) * up. All activations cost the same.
      norm: x is normalised first.
      residual: a residual is added.
      result: dtype of the result, default that of x.
      weight: format of a quantised weight, or None.
    """

    k: int
    n: int
    gate: bool = False
    norm: bool = False
    residual: bool = False
    result: str | None = None
    weight: WeightFormat | None = None

    @property
    def features(self) -> Features:
        """The features of `matmul` for `Plan.choose`."""
        names = frozenset(name for name in ("gate", "norm", "residual") if getattr(self, name))
        return names | (self.weight.features if self.weight else NO_FEATURES)

    @property
    def fused(self) -> bool:
        """Whether anything is fused with the product."""
        return self.gate or self.norm or self.residual

    def key(self, m: int, itemsize: int) -> dict[str, int]:
        """The key of `matmul` for `Plan.choose`, with M rows."""
        return {
            "m": m,
            "k": self.k,
            "n": self.n,
            "itemsize": itemsize,
            "gate": int(self.gate),
            "fused": int(self.fused),
            **(self.weight.key if self.weight else {}),
        }

    def __str__(self):
        weight = f"[{self.k},2,{self.n // 2}]" if self.gate else f"[{self.k},{self.n}]"
        weight += f" {self.weight}" if self.weight else ""
        return weight + " norm" * self.norm + " gate" * self.gate + " residual" * self.residual


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """A linear layer of a block.

    Attributes:
      path: path of its parameters in the block.
      k: rows of the weight.
      outs: the weight's other axes.
      bias: whether it has a bias.
      norm, gate, residual: what is fused with it, as in `LinearShape`.
      weight: format of a quantised weight, or None.
      ranks: devices whose products are summed.
    """

    path: Path
    k: int
    outs: tuple[int, ...]
    bias: bool
    norm: bool = False
    gate: bool = False
    residual: bool = False
    weight: WeightFormat | None = None
    ranks: int = 1

    @property
    def shape(self) -> LinearShape:
        """Its shape for a plan and `tune`. The bias is left out: it costs nothing measurable."""
        n = math.prod(self.outs)
        fused = {"gate": self.gate, "norm": self.norm, "residual": self.residual}
        return LinearShape(self.k, n, **fused, weight=self.weight)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A decoder layer. A field that is not at its default is a feature.

    All code that runs a block lists the features it supports and refuses all others.

    Attributes:
      width: E.
      mlp_width: F.
      heads, kv_heads, head_dim: H, Hkv, D.
      norm_eps: epsilon of the RMS norms.
      activation: activation of the gated MLP, a key of `pallas_kernels.gemm.ACTIVATIONS`.
      attention: scores, mask and RoPE.
      qkv_bias, out_bias, mlp_bias: whether these linear layers have a bias.
      norm_offset: added to the weights of every RMS norm.
      qk_norm: q and k are normalised per head, before RoPE.
      post_norms: the outputs of attention and MLP are normalised before they are added to the
        residual stream.
      formats: formats of the quantised weights, by the names in `linears`.
      tensor_parallel: devices that share the layer. Heads and F are then those of one device.
    """

    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention: AttentionSpec
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    formats: tuple[tuple[str, WeightFormat], ...] = ()
    tensor_parallel: int = 1

    def __post_init__(self):
        for name in ("width", "mlp_width", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                "config: heads must be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """G = H / Hkv."""
        return self.heads // self.kv_heads

    @functools.cached_property
    def features(self) -> Features:
        """Features outside of attention, as the names of their fields."""
        weights = (weight.features for _, weight in self.formats)
        return (used_features(self) - {"formats"}).union(*weights)

    @functools.cached_property
    def attention_features(self) -> Features:
        """Features of its attention, such as "attention.window"."""
        rope = self.attention.rope
        names = set(self.attention.features)
        if rope is None:
            names.add("no_rope")
        elif rope.dim != self.head_dim:
            names.add("partial_rope")
        return frozenset(f"attention.{name}" for name in names)

    @property
    def linears(self) -> dict[str, LinearSpec]:
        """The linear layers by name, in the order they run."""
        heads = self.heads * self.head_dim
        qkv = self.kv_heads, self.group + 2, self.head_dim
        ranks = self.tensor_parallel
        # The residual is added to the sum over the devices.
        summed = not self.post_norms and ranks == 1
        linears = {
            "qkv": LinearSpec(("attention", "qkv"), self.width, qkv, self.qkv_bias, norm=True),
            "out": LinearSpec(
                *(("attention", "out"), heads, (self.width,), self.out_bias),
                residual=summed,
                ranks=ranks,
            ),
            "gate_up": LinearSpec(
                *(("mlp", "gate_up"), self.width, (2, self.mlp_width), self.mlp_bias),
                norm=True,
                gate=True,
            ),
            "down": LinearSpec(
                *(("mlp", "down"), self.mlp_width, (self.width,), self.mlp_bias),
                residual=summed,
                ranks=ranks,
            ),
        }
        for name, weight in self.formats:
            linears[name] = dataclasses.replace(linears[name], weight=weight)
        return linears

    @property
    def norms(self) -> dict[Path, int]:
        """Width of each norm, by the path of its parameters."""
        norms = {("attention_norm",): self.width, ("mlp_norm",): self.width}
        if self.post_norms:
            norms |= {("attention_post_norm",): self.width, ("mlp_post_norm",): self.width}
        if self.qk_norm:
            norms |= {("attention", name): self.head_dim for name in ("q_norm", "k_norm")}
        return norms

    @property
    def mlp_values(self) -> int:
        """Values per token that the MLP holds at the same time.

        FlashDecoding++Next (Dai et al., section V) needs buffers of 2E + F. A gated MLP holds the
        2F values of its product and the F values computed from them, and XLA of JAX 0.11 keeps the
        residual stream a third time.
        """
        return 3 * (self.width + self.mlp_width)

    @property
    def attention_values(self) -> int:
        """The same for attention: residual stream; Q, K and V; rotated Q or the result."""
        return self.width + 2 * (self.heads + self.kv_heads) * self.head_dim
