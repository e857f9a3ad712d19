"""Model families. Every module in this folder is a family.

A family has `MODEL_TYPES`, `ARCHITECTURE`, `DEFAULTS` and `parse_config`. It has `NAMES`
(fields of config.json), `TENSORS` (names of tensors) and `IGNORED_TENSORS` only if they differ from
Llama's.
"""

import importlib
import pkgutil
from types import ModuleType

FAMILIES: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
}
