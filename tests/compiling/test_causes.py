"""Why a region was compiled: the difference from the nearest earlier one, in words."""

from __future__ import annotations

import difflib
from dataclasses import replace

import pytest
import torch
from torch import nn

from fused_eager import fused_eager
from fused_eager.compiling import causes
from fused_eager.compiling.causes import Compiled, Memory
from fused_eager.log.site import Site
from tests.streams import events, stable_shapes

F32 = torch.float32


def compiled(*shapes: tuple[int, ...], ops: tuple[str, ...] = ("aten.mm.default", "aten.relu.default")) -> Compiled:
    """A region of `ops` on lines 1, 2, ... whose inputs have the given shapes, all read by the first op."""
    sites = tuple(Site("train.py", i + 1, "f") for i in range(len(ops)))
    n = len(ops)
    return Compiled(
        ops, sites, ("()",) * n, ((),) * n, tuple((F32, s) for s in shapes), (0,) * len(shapes), (n - 1,), (), "True"
    )


def test_the_first_time() -> None:
    cause = Memory().cause(compiled((8, 4)))
    assert (cause.code, cause.variant, cause.changes) == ("first", 1, ())
    assert str(cause.site) == "train.py:1"


def test_one_size_of_one_input() -> None:
    memory = Memory()
    memory.cause(compiled((2,), (3,), (4,), (31, 8)))
    cause = memory.cause(compiled((2,), (3,), (4,), (32, 8)))
    assert cause.code == "shape" and cause.variant == 2
    assert cause.changes == (("shape[0] of input 3", 31, 32),)
    assert cause.why == "only shape[0] of input 3 changed, 31 -> 32 (aten.mm.default at train.py:1)"


def test_equal_changes_are_told_together_and_others_apart() -> None:
    memory = Memory()
    memory.cause(compiled((8, 4), (8,)))
    assert memory.cause(compiled((7, 4), (7,))).why.startswith(
        "only shape[0] of input 0 and shape[0] of input 1 changed, 8 -> 7"
    )
    assert memory.cause(compiled((7, 5), (9,))).why.startswith(
        "shape[1] of input 0 changed, 4 -> 5; shape[0] of input 1 changed, 7 -> 9"
    )


def test_the_nearest_is_what_it_is_compared_with() -> None:
    memory = Memory()
    memory.cause(compiled((8, 4, 2)))
    memory.cause(compiled((1, 1, 1)))
    assert memory.cause(compiled((8, 5, 2))).changes == (("shape[1] of input 0", 4, 5),)


def test_of_equally_near_ones_the_last_counts() -> None:
    memory = Memory()
    for n in (1, 2, 3):
        memory.cause(compiled((n,)))
    assert memory.cause(compiled((4,))).changes == (("shape[0] of input 0", 3, 4),)


BASE = compiled((8, 4))


@pytest.mark.parametrize(
    ("other", "code", "text"),
    [
        (replace(BASE, inputs=((torch.float64, (8, 4)),)), "dtype", "dtype of input 0 changed, float32 -> float64"),
        (compiled((8, 4, 1)), "shape", "shape of input 0 changed, [8, 4] -> [8, 4, 1]"),
        (
            replace(BASE, arguments=("()", "(Ref(0), [12, 3])")),
            "argument",
            "an argument of aten.relu.default changed",
        ),
        (replace(BASE, views=((), (1,))), "layout", "strides or offset of what aten.relu.default"),
        (
            replace(BASE, alive=(0, 1)),
            "liveness",
            "only result of aten.mm.default at train.py:1 needed afterwards",
        ),
        (replace(BASE, alive=()), "liveness", "result of aten.relu.default at train.py:2 no longer needed"),
        (replace(BASE, donated=(0,)), "donation", "inputs whose memory may be reused changed, [] -> [0]"),
        (replace(BASE, flags="False"), "option", "options of the lowering changed, True -> False"),
    ],
)
def test_every_part_of_the_key_has_words(other: Compiled, code: str, text: str) -> None:
    memory = Memory()
    memory.cause(BASE)
    cause = memory.cause(other)
    assert cause.code == code
    assert text in cause.why


def test_an_argument_is_told_without_what_is_equal_around_it() -> None:
    memory = Memory()
    memory.cause(replace(BASE, arguments=("(Ref(0), [120, 3])", "()")))
    assert "[120, 3]" not in (cause := memory.cause(replace(BASE, arguments=("(Ref(0), [129, 3])", "()")))).why
    assert "changed, 120 -> 129" in cause.why


def test_a_list_of_other_length() -> None:
    memory = Memory()
    batch = ((((0, 1), (1, 2)), ()), ((), ()))
    memory.cause(replace(compiled((4,), (4,)), views=batch))
    cause = memory.cause(replace(compiled((4,)), views=((((0, 1),), ()), ((), ()))))
    assert (cause.code, cause.changes) == ("shape", (("number of inputs", 2, 1),))
    assert cause.why == "only number of inputs changed, 2 -> 1 (aten.mm.default at train.py:1)"


def test_other_ops_on_the_same_line() -> None:
    memory = Memory()
    memory.cause(compiled((8,), ops=("aten.mm.default", "aten.relu.default")))
    cause = memory.cause(compiled((8,), ops=("aten.mm.default", "aten.mul.Tensor", "aten.relu.default")))
    assert cause.code == "ops"
    assert "other ops than before from train.py:1" in cause.why and "aten.mul.Tensor at train.py:2" in cause.why


def test_other_ops_in_a_long_stream_are_found_between_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    class Matcher(difflib.SequenceMatcher[str]):
        def __init__(self, junk: None, a: list[str], b: list[str], autojunk: bool) -> None:
            searched.append(len(a) * len(b))
            super().__init__(junk, a, b, autojunk)

    monkeypatch.setattr(difflib, "SequenceMatcher", Matcher)
    memory = Memory()
    many = ("aten.mm.default",) * 5000
    sites = (BASE.sites[0],) * 10_002

    def stream(*ops: str) -> Compiled:
        return replace(compiled((8,)), ops=ops, sites=sites[: len(ops)])

    memory.cause(stream(*many, *many))
    cause = memory.cause(stream(*many, "aten.relu.default", *many))
    assert "1 more, first aten.relu.default" in cause.why
    memory.cause(stream(*many, "aten.sin.default", *many, "aten.cos.default"))
    assert max(searched) <= causes.COMPARED**2


def test_what_is_remembered_is_bounded() -> None:
    memory = Memory()
    for n in range(causes.VARIANTS + 20):
        memory.cause(compiled((n,)))
    assert len(memory.skeletons[BASE.ops][1]) == causes.VARIANTS


def test_an_odd_last_batch_in_a_real_program() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
    with stable_shapes(), events("compile") as seen, torch.no_grad(), fused_eager():
        for n in (16, 16, 11):
            model(torch.randn(n, 5)).sum().item()
    assert [e.data["cause"] for e in seen][-1] == "shape"
    last = seen[-1].data
    assert {tuple(c[1:]) for c in last["changes"]} == {(16, 11)}
    assert "16 -> 11" in last["why"] and __file__ in last["site"]
