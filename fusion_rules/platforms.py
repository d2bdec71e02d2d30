"""Platforms: what is lowered otherwise for one of them, as rows of one table.

A lowering is written once, for any platform. Where one has a better way, that way is a *variant* beside it, and not a
branch inside. One rule of precedence: a platform's own variant before the one for `any`.

>>> @variants
... def total(x): ...          # any platform
>>> @total.on("cpu")
... def in_steps(x): ...       # on XLA:CPU this one is called
>>> TILE = Variants("attention tile", any=None, cpu=4 << 20)
>>> TILE.here
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

ANY = "any"
PLATFORMS = ("cpu", "gpu", "tpu")

# JAX's names of platforms, and of their families.
_FAMILY = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}

_lowering = threading.local()


def family(platform: str) -> str:
    """The column for one of JAX's platforms; `any` for one that has none, as a plugin of somebody's."""
    return _FAMILY.get(platform, ANY)


def current() -> str:
    """The column of the platform that this thread lowers for; the CPU's if it was not said."""
    return getattr(_lowering, "platform", "cpu")


@contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """In the body, and in this thread, rules lower for one of JAX's platforms; with `any` for all of them at once."""
    before = current()
    _lowering.platform = family(platform)
    try:
        yield
    finally:
        _lowering.platform = before


class Variants(Generic[T]):
    """One thing (a number, a form, a function) for any platform, and what some platforms have instead of it.

    Args:
        name: what the generated table calls it.
        why: what a platform gains by its own, in a few words.
        any: for each platform that has none of its own.
        own: by platform.

    Raises:
        ValueError: there is no such platform.
    """

    def __init__(self, name: str, *, any: T, why: str = "", **own: T):
        self.name, self.why, self.any = name, why, any
        self.own: dict[str, T] = {}
        for platform, value in own.items():
            self._enter(platform, value)
        if name in VARIANTS:
            raise ValueError(f"there are two lists of variants named {name!r}")
        VARIANTS[name] = self

    def _enter(self, platform: str, value: T) -> None:
        if platform not in PLATFORMS:
            raise ValueError(f"{self.name}: there is no platform {platform!r}, only {', '.join(PLATFORMS)}")
        if platform in self.own:
            raise ValueError(f"{self.name} has two variants for {platform}")
        self.own[platform] = value

    @property
    def here(self) -> T:
        """The variant for the platform that is lowered for."""
        return self.own.get(current(), self.any)

    def on(self, *platforms: str) -> Callable[[T], T]:
        """Decorator: the variant for these platforms."""

        def enter(value: T) -> T:
            for platform in platforms:
                self._enter(platform, value)
            return value

        return enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the variant, where variants are functions."""
        return self.here(*args, **kwargs)  # type: ignore[operator]


VARIANTS: dict[str, Variants[Any]] = {}


def variants(generic: Callable[..., Any]) -> Variants[Callable[..., Any]]:
    """Decorator: a function for any platform, that some platforms may have variants of."""
    made = Variants(f"{generic.__module__.rpartition('.')[2]}.{generic.__name__}", any=generic)
    made.__doc__ = generic.__doc__
    return made
