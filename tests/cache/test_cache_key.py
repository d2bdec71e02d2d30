"""The canonical encoding and the keys over it: equal values give equal bytes, different ones never do."""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import math
import os
import pickle
import struct
from types import MappingProxyType

import cache_alone
import numpy as np
import pytest
from fused_eager.cache.encode import MAX_DEPTH, Unencodable, encode, freeze, from_json, to_json
from fused_eager.cache.key import Key, differences, explain, nearest
from hypothesis import given, settings
from hypothesis import strategies as st

text = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
bits = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 3), st.floats(), bits, text, st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=12,
)


def same(a, b) -> bool:
    """Equality written down independently of the encoding: types exact, floats by bits, lists equal tuples."""
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (dict, MappingProxyType)):
        return isinstance(b, (dict, MappingProxyType)) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if type(a) is not type(b):
        return False
    return struct.pack(">d", a) == struct.pack(">d", b) if type(a) is float else a == b


@settings(max_examples=500, deadline=None)
@given(values, values)
def test_encodings_are_equal_exactly_when_the_values_are(a, b):
    assert (encode(a) == encode(b)) == same(a, b)
    assert encode(a) == encode(copy.deepcopy(a)) == encode(freeze(a))


@settings(max_examples=500, deadline=None)
@given(values)
def test_json_form_is_exact(value):
    again = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert same(again, value)
    assert encode(again) == encode(value)


@settings(max_examples=200, deadline=None)
@given(st.lists(values, min_size=1, max_size=3), st.lists(values, min_size=1, max_size=3))
def test_no_encoding_is_a_prefix_of_another(a, b):
    """Prefix-free: joining the parts of two lists differently cannot give the same bytes."""
    if not same(a, b):
        assert b"".join(map(encode, a)) != b"".join(map(encode, b)) or same(a, b)
    x, y = encode(a), encode(b)
    assert same(a, b) or not (x.startswith(y) or y.startswith(x))


PAIRS = [
    (True, 1), (1, 1.0), (0.0, -0.0), (False, None), ("", b""), ("", None), ((), {}), ((), None), ("1", 1),
    (("ab",), ("a", "b")), ((("a",), "b"), ("a", ("b",))), (((),), ()), ({"a": 1}, (("a", 1),)),
    (math.nan, struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]), (2**64, 2**64 + 1), (-1, 255), (128, -128),
    ({"a": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=repr)
def test_near_misses_differ(a, b):
    assert encode(a) != encode(b)
    assert Key({"x": a}) != Key({"x": b})
    assert explain(Key({"x": a}), Key({"x": b}))


def test_known_bytes():
    """The format document's example; a change here breaks every cache in the world."""
    assert encode({"b": (True, None), "a": -1}).hex() == (
        "4d0000000000000002" "530000000000000001" "61" "490000000000000001" "ff"
        "530000000000000001" "62" "4c0000000000000002" "420000000000000001" "01" "4e0000000000000000"
    )  # fmt: skip
    assert encode(1.5).hex() == "460000000000000008" + "3ff8000000000000"
    by_hand = (
        b"fused-eager/key/1\0" + b"M" + bytes(7) + b"\x01" + b"S" + bytes(7) + b"\x01a" + b"I" + bytes(7) + b"\x01\x01"
    )
    assert Key({"a": 1}).digest == hashlib.sha256(by_hand).hexdigest()


class Colour(enum.IntEnum):
    RED = 1


class Shape(tuple):
    pass


BAD = [
    object(), 1j, {1, 2}, Colour.RED, Shape((1, 2)), np.float64(1.0), np.int64(1), np.bool_(True), "\ud800",
    bytearray(b"x"), range(3), {1: 2}, {None: 1}, {b"k": 1}, {"\udfff": 1}, print, type,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{type(bad).__name__}")
def test_anything_else_is_refused_with_its_path(bad):
    with pytest.raises(Unencodable) as caught:
        Key({"region": {"inputs": [1, {"shape": (2, bad)}]}})
    assert caught.value.path.startswith("region.inputs[1].shape[1]")
    assert "region.inputs[1].shape[1]" in str(caught.value)


def test_cycles_and_depth_are_refused():
    cycle: list = []
    cycle.append(cycle)
    deep: object = 1
    for _ in range(MAX_DEPTH + 1):
        deep = (deep,)
    for value in (cycle, deep):
        with pytest.raises(Unencodable):
            encode(value)
    form: object = 1
    for _ in range(MAX_DEPTH + 1):
        form = [form]
    with pytest.raises(Unencodable):
        from_json(form)


@pytest.mark.parametrize(
    "form",
    [1.0, {}, {"f": "00"}, {"f": "zz" * 8}, {"f": 1}, {"b": "***"}, {"i": "x"}, {"i": 1}, {"q": 1}, {"m": []},
     {"f": "0" * 16, "b": ""}, ["ok", {"m": {"a": {"nope": 1}}}], "\ud800"],
)  # fmt: skip
def test_wrong_json_forms_are_refused(form):
    with pytest.raises(Unencodable):
        from_json(form)


def test_key_ignores_the_order_of_parts_and_freezes_them():
    shape = [2, 3]
    parts = {"region": {"shape": shape, "op": "add"}, "jax": "0.10.2"}
    key = Key(parts)
    shape.append(4)
    parts["jax"] = "other"
    assert key == Key({"jax": "0.10.2", "region": {"op": "add", "shape": (2, 3)}})
    assert key.parts["region"]["shape"] == (2, 3)
    assert len({key, Key({"jax": "0.10.2", "region": {"op": "add", "shape": (2, 3)}})}) == 1
    with pytest.raises(TypeError):
        key.parts["jax"] = "x"
    with pytest.raises(AttributeError):
        key.parts = {}
    with pytest.raises(Unencodable):
        Key([("a", 1)])


def test_key_survives_json_pickle_and_another_process():
    key = Key({"a": (1, -0.0, math.inf, b"\x00", 2**100, None, True), "b": {"n": "\u00e9\U0001f600"}})
    assert Key.from_json(json.loads(json.dumps(key.to_json()))) == key
    assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == key
    code = "import json; from fused_eager.cache.key import Key; print(Key.from_json(json.load(sys.stdin)).digest)"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    assert cache_alone.run(code, input=json.dumps(key.to_json()), env=env).strip() == key.digest


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(text, values, max_size=3), st.dictionaries(text, values, max_size=3))
def test_explain_is_empty_exactly_for_equal_keys(a, b):
    a, b = Key(a), Key(b)
    assert (explain(a, b) == []) == (a == b)
    assert len(list(differences(a, b))) == len(list(differences(b, a)))


def region(shape, ops=("add", "mul"), **parts):
    return Key({"region": {"nodes": list(ops), "inputs": [{"shape": (1,)}] * 3 + [{"shape": shape}]}, **parts})


def test_explain_in_words():
    assert explain(region((31, 8)), region((32, 8))) == ["only region.inputs[3].shape[0] changed, 31 -> 32"]
    assert explain(region((1,)), region((True,))) == ["only region.inputs[3].shape[0] changed, int 1 -> bool True"]
    assert explain(region((1,)), region((1,), salt="x")) == ["only salt was added, 'x'"]
    assert explain(region((1,), salt="x"), region((1,))) == ["only salt was removed, 'x'"]
    assert explain(region((1,), "abcd"), region((1,), "abxcd")) == [
        "len(region.nodes) changed, 4 -> 5", "region.nodes[2] was added, 'x'",
    ]  # fmt: skip
    assert explain(region((1,), "aaa"), region((1,), "aa")) == [
        "len(region.nodes) changed, 3 -> 2", "region.nodes[2] was removed, 'a'",
    ]  # fmt: skip
    assert explain(Key({"n": 10**5000}), Key({"n": "x" * 500}))[0].startswith("only n changed, int {'i': '0x")
    many = explain(Key({"n": range_(0, 50)}), Key({"n": range_(1, 51)}))
    assert len(many) == 21 and many[-1] == "and 30 more differences"


def range_(a, b):
    return tuple(range(a, b))


def test_nearest():
    keys = [
        region((1, 1), jax="a", salt="q"),
        region((30, 8), jax="a"),
        region((30, 9), jax="b"),
        region((30, 8), jax="a"),
    ]
    assert nearest(region((31, 8), jax="a"), keys) is keys[1]
    assert nearest(region((1,)), []) is None
