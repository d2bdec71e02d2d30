"""Why things end, sync, or run natively: every boundary is a coded value, never a bare False."""

from __future__ import annotations

from dataclasses import dataclass

from .site import UNKNOWN, Site


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of reason: what it means, and what a user can change."""

    name: str
    meaning: str
    hint: str


CODES: dict[str, Code] = {
    row.name: row
    for row in (
        Code("sync.value", "Python asked for a number", "read values less often, or after the loop"),
        Code("sync.shape", "a result's shape depends on values", "use a mask of fixed shape instead"),
        Code("sync.memory", "something asked for a tensor's memory", "keep data as tensors until the end"),
        Code("sync.island", "an op that must run at once needs the value", "see the island's own reason"),
        Code("sync.thread", "another thread needs a pending value", "hand over finished tensors"),
        Code("sync.call", "the program called sync()", "remove it if only speed is wanted"),
        Code("sync.fork", "the process is about to fork", "start workers before the context"),
        Code("cut.backward", "backward() returned", "none needed: a natural cut"),
        Code("cut.optimizer", "an optimizer step ended", "none needed: a natural cut"),
        Code("cut.exit", "the context ended", "keep the context around the whole loop"),
        Code("cut.options", "a nested context changed the options", "use one context where speed matters"),
        Code("cut.full", "the stream reached max_pending ops", "raise max_pending"),
        Code("mode.single", "the mode runs one op at a time", "use mode fused"),
        Code(
            "region.unstable",
            "these ops keep coming with other shapes, so ATen runs them",
            "pad to a few fixed shapes; drop_last=True",
        ),
        Code("region.size", "the region reached max_region ops", "raise max_region"),
        Code("region.island", "an op that ATen runs needs a result", "see the island's own reason"),
        Code("region.end", "the stream ended", "see why the stream was cut"),
    )
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A code with the place it applies to and what exactly it was."""

    code: str
    detail: str = ""
    site: Site = UNKNOWN

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"no reason code {self.code!r}; known: {', '.join(CODES)}")

    def __str__(self) -> str:
        where = "" if self.site is UNKNOWN else f" at {self.site}"
        what = f" ({self.detail})" if self.detail else ""
        return f"{self.code}: {CODES[self.code].meaning}{what}{where}"
