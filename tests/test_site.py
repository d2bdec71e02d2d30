"""Call sites: the user's line, whatever lies between it and the op."""

from __future__ import annotations

import os
import sys

import torch

from fused_eager import fused_eager, site
from tests.streams import open_stream


def line() -> int:
    """The caller's line number."""
    return sys._getframe(1).f_lineno


def last_site() -> site.Site:
    return site.describe(open_stream().nodes[-1].place)


def test_here_is_the_caller() -> None:
    place, at = site.here(), line()
    found = site.describe(place)
    assert (found.file, found.line, found.function) == (__file__, at, "test_here_is_the_caller")
    assert str(found) == f"{__file__}:{at}"


def test_nowhere_has_a_name_too() -> None:
    assert site.describe(None) is site.UNKNOWN
    assert str(site.UNKNOWN) == "?:0"


def test_torch_and_this_library_are_looked_through() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with fused_eager():
        y, at = torch.nn.functional.softmax(x, -1), line()
        assert last_site().line == at
        z, at = torch.nn.Linear.forward(torch.nn.Linear(4, 4), y), line()
        assert (last_site().file, last_site().line) == (__file__, at)
        del y, z


def test_internal_is_a_matter_of_the_folder_not_of_the_name() -> None:
    spaces: list[dict[str, object]] = []
    for file in (os.path.join(os.path.dirname(torch.__file__), "x.py"), "/home/me/torch/x.py"):
        space: dict[str, object] = {"site": site}
        exec(compile("def f(): return site.here()", file, "exec"), space)
        spaces.append(space)
    inside, outside = (space["f"]() for space in spaces)  # type: ignore[operator]
    assert site.describe(inside).file == __file__
    assert site.describe(outside).file == "/home/me/torch/x.py"
