"""Features that need something besides the package: what, whether it is here, and what installs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature. `missing` says what keeps it from working here, or ""."""

    name: str
    about: str
    missing: Callable[[], str]
    cure: str


def _without(*modules: str) -> Callable[[], str]:
    """What is missing where a feature needs these modules."""

    def missing() -> str:
        gone = [module for module in modules if importlib.util.find_spec(module) is None]
        return f"not installed: {', '.join(gone)}" if gone else ""

    return missing


def _no_follower() -> str:
    from ..follower import build

    return build.obstacle()


def _no_targets() -> str:
    from ..targets.topology import obstacle

    return obstacle()


def _no_process_groups() -> str:
    import torch

    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    return "" if torch.distributed.is_gloo_available() else "this torch was built without gloo"


def _extra(name: str) -> str:
    return f"pip install 'fused-eager[{name}]'"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "follower",
        "ops that come again are followed in C++",
        _no_follower,
        "install a C++ compiler and Python's headers (on Debian: apt-get install g++ python3-dev)",
    ),
    Feature(
        "distributed",
        "collectives of tensors on the device",
        _no_process_groups,
        "install torch from PyPI: its builds for Linux have gloo",
    ),
    Feature("targets", "compile and forecast for TPUs that are not here", _no_targets, _extra("tpu")),
    Feature("export", "fused_eager.export", _without("flatbuffers"), _extra("export")),
    Feature("remote", "a shared cache in S3, GCS or any store of fsspec's", _without("fsspec"), _extra("remote")),
    Feature("redis", "a shared cache in Redis", _without("redis"), _extra("redis")),
    Feature("signing", "cache entries signed with a private key", _without("cryptography"), _extra("signing")),
    Feature("zstd", "cache entries packed smaller", _without("zstandard"), _extra("zstd")),
)


def obstacles() -> dict[str, str]:
    """For each feature what keeps it from working here; "" where nothing does."""
    return {feature.name: feature.missing() for feature in FEATURES}
