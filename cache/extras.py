"""Optional libraries: imported when first needed, and named with the extra that brings them when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

EXTRAS = {  # module -> (extra of this project, what needs it)
    "fsspec": ("remote", "stores on fsspec URLs"),
    "redis": ("redis", "redis:// stores"),
    "zstandard": ("zstd", "entries compressed with zstd"),
    "cryptography": ("signing", "Ed25519 signatures"),
}


class MissingExtra(ImportError):
    """An optional library is not installed. `extra` is what to install."""

    def __init__(self, module: str) -> None:
        self.extra, what = EXTRAS[module.partition(".")[0]]
        super().__init__(f"{what} need the package {module.partition('.')[0]}: pip install 'fused-eager[{self.extra}]'")


def need(module: str) -> ModuleType:
    """The optional module, or MissingExtra. `module` starts with a name in EXTRAS."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(module) from error
