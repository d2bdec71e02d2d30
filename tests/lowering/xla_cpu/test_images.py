"""Images: a result of a convolution that is only a step on the way stays as it is, others are turned once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.lowering import lower
from fused_eager.lowering.xla_cpu.images import Images
from fused_eager.planning.plan import Region
from fused_eager.tracing.stream import Node, Use
from tests.streams import END, aten, geometry, node

CONVOLUTION = aten.convolution.default
PICTURE = geometry()._replace(size=(2, 16, 4, 4), stride=(256, 16, 4, 1))


def image(made: int, *reads: int, op: Any = aten.relu.default) -> Node:
    """A node that reads images, and a vector if it reads value 9."""
    made_up = node(made, reads, op)
    return made_up.with_parts(tuple(Use(v, geometry() if v == 9 else PICTURE) for v in reads), made_up.results)


def followed(nodes: list[Node], outputs: tuple[int, ...]) -> list[tuple[bool, list[bool]]]:
    """For each convolution: whether its result is kept, and which operands lie by planes."""
    images = Images(nodes, Region(tuple(range(len(nodes))), (0, 9), outputs, (), "xla", END))
    found = []
    for each in nodes:
        if each.twin is CONVOLUTION:
            found.append((images.is_kept(each), images.by_planes(each)))
        images.passed(each)
    return found


def test_steps_on_the_way_from_one_convolution_to_the_next_are_left() -> None:
    way = [image(1, 0, op=CONVOLUTION), image(2, 1, 9), image(3, 2, op=CONVOLUTION)]
    assert followed(way, (3,)) == [(False, [True]), (False, [False])]


def test_what_is_read_twice_or_leaves_is_kept_and_what_comes_of_it_lies_by_planes() -> None:
    way = [image(1, 0, op=CONVOLUTION), image(2, 1, 9), image(3, 2, op=CONVOLUTION)]
    assert followed(way, (1, 3)) == [(True, [True]), (False, [True])]
    assert followed([*way, image(4, 1)], (4,)) == [(True, [True]), (False, [True])]


def test_an_input_and_what_is_computed_from_it_lie_by_planes() -> None:
    assert followed([image(1, 0), image(2, 1, op=CONVOLUTION)], (2,)) == [(False, [True])]
    assert followed([image(1, 9), image(2, 1, op=CONVOLUTION)], (2,)) == [(False, [False])]
    assert followed([image(1, 0, op=CONVOLUTION)], (1,)) == [(False, [True])]


def net() -> nn.Module:
    """Two convolutions that XLA runs as such: enough channels and pixels."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 20, 3), nn.BatchNorm2d(20))


@pytest.mark.parametrize("training", [False, True])
def test_a_net_turns_its_images_in_training_alone(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has eager's results, gradients and running statistics."""
    x = torch.randn(4, 3, 21, 23)
    asked: list[tuple[bool, bool]] = []
    original = lower.lower

    def watched(op: Any, args: Any, kwargs: Any, out: Any, bounds: bool, places: Any) -> Any:
        if op is CONVOLUTION:
            asked.append((places.is_kept, any(args[0] is each for each in places.by_planes)))
        return original(op, args, kwargs, out, bounds, places)

    monkeypatch.setattr(lower, "lower", watched)

    def run(model: nn.Module) -> list[torch.Tensor]:
        y = model.train(training)(x)
        if training:
            y.square().mean().backward()
        return [y, *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]

    expected = run(net())
    with torch.set_grad_enabled(training), fused_eager(mode="fused"):
        found = run(net())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert asked == ([(True, True)] * 3 if training else [(False, True), (False, False), (False, False)])


@pytest.mark.parametrize("channels", [16, 24])
def test_images_that_are_a_result_lie_by_planes(channels: int) -> None:
    """A convolution's are asked for by pixels, and JAX would hand them on so where that is the last equation."""
    x, w = torch.randn(4, channels, 8, 8), torch.randn(channels, channels, 3, 3)
    expected = torch.conv2d(x, w, padding=1) * 2
    with fused_eager(mode="strict"):
        found = torch.conv2d(x, w, padding=1) * 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
