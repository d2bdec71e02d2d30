"""Call sites: the user's line, whatever lies between it and the op."""

from __future__ import annotations

import os
import sys

import torch

from fused_eager import fused_eager
from fused_eager.log import site
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


def test_details_name_the_module_and_backward_ops_the_forward_line() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * 2.0  # the line that everything is attributed to

    net, x = Net(), torch.ones(2, 4)
    at = Net.forward.__code__.co_firstlineno + 1
    with site.detailed(), fused_eager():
        total = net(x).sum()
        grads = torch.autograd.grad(total, list(net.parameters()))
        found = {str(n.op): site.describe(n.place) for n in open_stream().nodes}
        del grads
    for forward, module in {"aten.addmm.default": "Net.body.0", "aten.tanh.default": "Net.body.1"}.items():
        assert (found[forward].module, found[forward].line, found[forward].backward) == (module, at, False)
    assert (found["aten.mul.Tensor"].line, found["aten.mul.Tensor"].backward) == (at, True), "the gradient of mul"
    gradient = found["aten.tanh_backward.default"]
    assert (gradient.module, gradient.line, gradient.backward) == ("Net.body.1", at, True)
    assert found["aten.mm.default"].module == "Net.body.0"


def test_details_are_off_unless_somebody_asks() -> None:
    assert type(site.here()) is tuple
    with site.detailed():
        assert isinstance(site.here(), site.Place)
    assert type(site.here()) is tuple


def test_the_memory_of_forward_lines_is_bounded() -> None:
    lines = site._Forward()
    x = torch.ones(3, requires_grad=True)
    size = len(lines.places)
    y = x
    place = site.Place(line.__code__, 1, "", False, None)
    for _ in range(10):
        y = y * 1.5
        lines.add(place)
    assert len(lines.places) == len(lines.numbers) == size == site.REMEMBERED
    number = y.grad_fn._sequence_nr()
    assert lines.of(number) is place and lines.of(number - site.REMEMBERED) is None


def test_the_caller_is_the_program_not_the_library() -> None:
    assert site.caller().line == line()


def test_a_forward_that_raises_leaves_no_module_behind() -> None:
    class Wrong(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("wrong")

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wrong()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return x * 2.0

    with site.detailed(), fused_eager():
        y = Outer()(torch.ones(2))
        assert last_site().module == "Outer"
        z = y * 3.0
        assert last_site().module == ""
        del y, z


def test_gradients_of_views_go_by_their_neighbours() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    with site.detailed(), fused_eager():
        y, at = (x * 2.0)[1:].transpose(0, 1)[2:].mul(3.0), line()
        (g,) = torch.autograd.grad(y.sum(), x)
        nodes = [site.describe(n.place) for n in open_stream().nodes if "slice_backward" in str(n.op)]
        assert nodes and all(n.line == at and n.backward for n in nodes)
        del y, g


def test_no_line_of_the_librarys_own_packages_is_the_programs() -> None:
    """Wherever they lie: in a checkout two of them lie beside the first."""
    import fused_eager.cache
    import fused_eager.fusion_rules

    from fused_eager.folder import FOLDERS

    for package in (fused_eager, fused_eager.cache, fused_eager.fusion_rules):
        assert str(package.__file__).startswith(FOLDERS)
