"""What the paths of all files of this library begin with."""

from __future__ import annotations

import os
from importlib.util import find_spec

FOLDER = os.path.dirname(__file__) + os.sep


def _folders() -> tuple[str, ...]:
    """That, and where the packages inside it lie in a checkout: beside it."""
    found = [find_spec(f"{__package__}.{name}") for name in ("fusion_rules", "cache")]
    paths = [os.path.join(path, "") for spec in found if spec for path in spec.submodule_search_locations or ()]
    return FOLDER, *[path for path in paths if not path.startswith(FOLDER)]


FOLDERS = _folders()
