"""Model families: a module here is a family, found by its file.

A family has `MODEL_TYPES`, `ARCHITECTURE`, `DEFAULTS` and `parse_config`; and `weight_map` and
`IGNORED_TENSORS` where they are not those of Llama.
"""

import importlib
import pkgutil
from types import ModuleType

FAMILIES: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
}
