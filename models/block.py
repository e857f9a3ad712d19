"""What a decoder block consists of: the one description that everything else derives from.

The decoder builds its modules from it, the weight map its tensors, memory plans their buffers,
`tune` and `info` their shapes. Kernels that run several layers at once decide by it whether they
can.
"""

import dataclasses
import functools
import math

from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Features, used_features

Path = tuple[str, ...]

# What the modules of `fdjax.models.decoder` can do of a `BlockSpec`.
DECODER_CAN = frozenset(
    {"qkv_bias", "out_bias", "mlp_bias", "norm_offset", "qk_norm", "post_norms"}
)


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """A linear layer: its weight [K,N], or [K,2,N/2] with a gate, and what is fused with it.

    Attributes:
      k, n: of the weight; N counts the columns of gate and up.
      gate: the result is act(gate) * up; all activations cost the same.
      norm: x is normalised first.
      residual: another summand.
      result: dtype of the result, default that of the weight.
    """

    k: int
    n: int
    gate: bool = False
    norm: bool = False
    residual: bool = False
    result: str | None = None

    @property
    def fused(self) -> bool:
        """Whether anything is done beside the product."""
        return self.gate or self.norm or self.residual

    def key(self, m: int, itemsize: int) -> dict[str, int]:
        """The shape by which `Plan.choose` knows `matmul`."""
        return {
            "m": m,
            "k": self.k,
            "n": self.n,
            "itemsize": itemsize,
            "gate": int(self.gate),
            "fused": int(self.fused),
        }

    def __str__(self):
        weight = f"[{self.k},2,{self.n // 2}]" if self.gate else f"[{self.k},{self.n}]"
        return weight + " norm" * self.norm + " gate" * self.gate + " residual" * self.residual


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """A linear layer of a block.

    Attributes:
      path: of its parameters in the block.
      k: rows of the weight.
      outs: its other axes.
      bias: whether it has one.
      norm, gate, residual: what is fused with it, as in `LinearShape`.
    """

    path: Path
    k: int
    outs: tuple[int, ...]
    bias: bool
    norm: bool = False
    gate: bool = False
    residual: bool = False

    @property
    def shape(self) -> LinearShape:
        """What a plan and `tune` know it by; a bias costs nothing measurable."""
        n = math.prod(self.outs)
        return LinearShape(self.k, n, gate=self.gate, norm=self.norm, residual=self.residual)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A decoder layer. A field that is not at its default is a feature.

    Whatever runs a block lists the features that it can do and refuses all others.

    Attributes:
      width: E.
      mlp_width: F.
      heads, kv_heads, head_dim: H, Hkv, D.
      norm_eps: epsilon of the RMS norms.
      activation: of the gated MLP, a key of `pallas_kernels.gemm.ACTIVATIONS`.
      attention: scores, mask, RoPE.
      qkv_bias, out_bias, mlp_bias: biases of the linear layers.
      norm_offset: added to the weights of every RMS norm.
      qk_norm: q and k are normalised per head, before RoPE.
      post_norms: what attention and MLP add to the residual stream is normalised first.
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
        """What it asks for outside of attention."""
        return used_features(self)

    @functools.cached_property
    def attention_features(self) -> Features:
        """What its attention asks for, as "attention.window" and so on."""
        rope = self.attention.rope
        names = set(self.attention.features)
        if rope is None:
            names.add("no_rope")
        elif rope.dim != self.head_dim:
            names.add("partial_rope")
        return frozenset(f"attention.{name}" for name in names)

    @property
    def linears(self) -> dict[str, LinearSpec]:
        """The linear layers by name, in the order in which they run."""
        heads = self.heads * self.head_dim
        qkv = self.kv_heads, self.group + 2, self.head_dim
        summed = not self.post_norms
        return {
            "qkv": LinearSpec(("attention", "qkv"), self.width, qkv, self.qkv_bias, norm=True),
            "out": LinearSpec(
                ("attention", "out"), heads, (self.width,), self.out_bias, residual=summed
            ),
            "gate_up": LinearSpec(
                *(("mlp", "gate_up"), self.width, (2, self.mlp_width), self.mlp_bias),
                norm=True,
                gate=True,
            ),
            "down": LinearSpec(
                ("mlp", "down"), self.mlp_width, (self.width,), self.mlp_bias, residual=summed
            ),
        }

    @property
    def norms(self) -> dict[Path, int]:
        """Width of each norm by the path of its parameters."""
        norms = {("attention_norm",): self.width, ("mlp_norm",): self.width}
        if self.post_norms:
            norms |= {("attention_post_norm",): self.width, ("mlp_post_norm",): self.width}
        if self.qk_norm:
            norms |= {("attention", name): self.head_dim for name in ("q_norm", "k_norm")}
        return norms

    @property
    def mlp_values(self) -> int:
        """Values of a token that the MLP holds at once.

        FlashDecoding++Next (Dai et al., section V) needs buffers of 2E + F. A gated MLP has its
        product of 2F values and the F made of them at once, and the XLA of JAX 0.11 keeps the
        residual stream a third time.
        """
        return 3 * (self.width + self.mlp_width)

    @property
    def attention_values(self) -> int:
        """The same of attention: residual stream; Q, K and V; rotated Q or the result."""
        return self.width + 2 * (self.heads + self.kv_heads) * self.head_dim
