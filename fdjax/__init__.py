"""LLM inference on NVIDIA GPUs from JAX.

>>> import fdjax
>>> lm = fdjax.load("tiny")
>>> lm.generate("What is the largest ocean?").text
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fdjax.engine.generation import forward, generate
    from fdjax.engine.results import GenerateResult, Generation, Interrupted, Stats
    from fdjax.lm import LM, load
    from fdjax.models import CheckpointError, describe, parse_config
    from fdjax.sampling.options import GenerationConfig

# Each name is imported on first use, so importing a kernel does not import the engine.
_HOMES = {
    "GenerationConfig": "fdjax.sampling.options",
    "forward": "fdjax.engine.generation",
    "generate": "fdjax.engine.generation",
    "LM": "fdjax.lm",
    "load": "fdjax.lm",
    "CheckpointError": "fdjax.models",
    "describe": "fdjax.models",
    "parse_config": "fdjax.models",
    "GenerateResult": "fdjax.engine.results",
    "Generation": "fdjax.engine.results",
    "Interrupted": "fdjax.engine.results",
    "Stats": "fdjax.engine.results",
}

__all__ = [
    "LM",
    "CheckpointError",
    "GenerateResult",
    "Generation",
    "GenerationConfig",
    "Interrupted",
    "Stats",
    "__version__",
    "describe",
    "forward",
    "generate",
    "load",
    "parse_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fdjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
