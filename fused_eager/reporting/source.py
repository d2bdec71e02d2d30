"""The program's own text: the line behind a `file:line`, and short names for files."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable


def split(site: str) -> tuple[str, int]:
    """File and line number of a `file:line`; ("?", 0) where there is none."""
    file, _, line = site.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else ("?", 0)


def text(site: str) -> str:
    """The program's line, without the white space around it; empty if the file is not there."""
    file, line = split(site)
    return linecache.getline(file, line).strip()


def statement(site: str, most: int = 8) -> str:
    """The line, with what follows while a bracket is open."""
    file, line = split(site)
    found = ""
    for number in range(line, line + most):
        found = f"{found} {linecache.getline(file, number).strip()}".strip()
        if sum(found.count(c) for c in "([{") <= sum(found.count(c) for c in ")]}"):
            break
    return found


def short(site: str, base: str | None = None) -> str:
    """A site with its file relative to `base` (the working directory) if it lies there, else its last two parts."""
    file, line = split(site)
    if line == 0:
        return site
    relative = os.path.relpath(file, base) if os.path.isabs(file) else file
    if relative.startswith(".."):
        relative = os.sep.join(file.split(os.sep)[-2:])
    return f"{relative}:{line}"


def shorten(words: str, sites: Iterable[str]) -> str:
    """A text with the given sites in it made short."""
    for site in sorted({site for site in sites if site in words}, key=len, reverse=True):
        if split(site)[1]:
            words = words.replace(site, short(site))
    return words
