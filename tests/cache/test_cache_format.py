"""docs/cache_format.md is enough to write a second implementation: here is one, using nothing of the package."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import struct
import zlib
from pathlib import Path

import pytest
from fused_eager.cache import Entry, Key, LocalStore, Origin, Tier, generate, load_keyring
from fused_eager.cache.tiers import Cache

DOC = (Path(__file__).parents[2] / "docs" / "cache_format.md").read_text()


def u64(n):
    return struct.pack(">Q", n)


def canonical(form, value_of=True):
    """Section 1.1 over Python values, floats as struct "F" bits."""
    if form is None:
        return b"N" + u64(0)
    if isinstance(form, bool):
        return b"B" + u64(1) + bytes([form])
    if isinstance(form, int):
        size = next(n for n in range(1, 10**6) if -(1 << (8 * n - 1)) <= form < 1 << (8 * n - 1))
        return b"I" + u64(size) + form.to_bytes(size, "big", signed=True)
    if isinstance(form, float):
        return b"F" + u64(8) + struct.pack(">d", form)
    if isinstance(form, str):
        return b"S" + u64(len(form.encode())) + form.encode()
    if isinstance(form, bytes):
        return b"Y" + u64(len(form)) + form
    if isinstance(form, list):
        return b"L" + u64(len(form)) + b"".join(map(canonical, form))
    members = sorted((name.encode(), value) for name, value in form.items())
    return b"M" + u64(len(form)) + b"".join(canonical(name.decode()) + canonical(value) for name, value in members)


def value(form):
    """Section 1.2, from JSON."""
    if isinstance(form, list):
        return [value(item) for item in form]
    if not isinstance(form, dict):
        return form
    ((tag, body),) = form.items()
    return {
        "i": lambda: int(body, 16),
        "f": lambda: struct.unpack(">d", bytes.fromhex(body))[0],
        "b": lambda: base64.b64decode(body),
        "m": lambda: {name: value(item) for name, item in body.items()},
    }[tag]()


def signed_message(manifest):
    """Section 5."""
    body = {name: item for name, item in manifest.items() if name != "signature"}
    for name in ("parts", "metadata"):
        body[name] = {part: value(form) for part, form in body[name].items()}
    return b"fused-eager/manifest/1\0" + canonical(body)


PARTS = {
    "region": {"eps": 1e-5, "big": -(2**80), "raw": b"\x00\xff", "nodes": ["add", None, True, -0.0]},
    "\u00e9": 128,
}
SECRET = generate("hmac-sha256")["writer"]
RAW = base64.b64decode(SECRET.split(":")[1])
HERE = Origin("h", "cpu", ("b", "a"))


def digest_of(parts):
    return hashlib.sha256(b"fused-eager/key/1\0" + canonical(parts)).hexdigest()


def cache_on(root):
    store = LocalStore(root, private=False)
    return Cache([Tier(store, signed=True)], keyring=load_keyring(SECRET.encode()), origin=HERE)


def test_the_second_implementation_reads_what_the_first_wrote(tmp_path):
    blobs = {"executable": bytes(100_000), "noise": hashlib.sha256(b"x").digest() * 1}
    assert not cache_on(tmp_path).publish(Key(PARTS), blobs, metadata={"choice": "xla", "s": 0.5}).refused
    manifest = json.loads((tmp_path / "ac" / digest_of(PARTS)).read_text())
    assert manifest["format"] == 1 and manifest["key"] == digest_of(PARTS)
    assert canonical({name: value(form) for name, form in manifest["parts"].items()}) == canonical(PARTS)
    key_id = hmac.digest(RAW, b"fused-eager/key-id/1\0", "sha256").hex()[:16]
    assert manifest["signature"]["algorithm"] == "hmac-sha256" and manifest["signature"]["key_id"] == key_id
    assert base64.b64decode(manifest["signature"]["value"]) == hmac.digest(RAW, signed_message(manifest), "sha256")
    for blob in manifest["blobs"]:
        stored = (tmp_path / "cas" / blob["sha256"]).read_bytes()
        assert hashlib.sha256(stored).hexdigest() == blob["sha256"] and len(stored) == blob["size"]
        if blob["compression"] == "zlib":
            stored = zlib.decompress(stored)
        elif blob["compression"] == "zstd":
            stored = pytest.importorskip("zstandard").ZstdDecompressor().decompress(stored)
        assert hashlib.sha256(stored).hexdigest() == blob["raw_sha256"] and stored == blobs[blob["name"]]


def test_the_first_implementation_reads_what_the_second_wrote(tmp_path):
    raw = b"native code " * 100
    stored = zlib.compress(raw)
    blob = {
        "name": "executable", "sha256": hashlib.sha256(stored).hexdigest(), "size": len(stored), "compression": "zlib",
        "raw_sha256": hashlib.sha256(raw).hexdigest(), "raw_size": len(raw),
    }  # fmt: skip
    parts = {
        "region": {"m": {
            "eps": {"f": struct.pack(">d", 1e-5).hex()}, "big": {"i": hex(-(2**80))}, "raw": {"b": "AP8="},
            "nodes": ["add", None, True, {"f": "8000000000000000"}],
        }},
        "\u00e9": 128,
    }  # fmt: skip
    manifest = {
        "format": 1, "key": digest_of(PARTS), "parts": parts, "blobs": [blob], "versions": {"other": "1"},
        "origin": {"host_class": "", "device_kind": "cpu", "cpu_features": ["a", "b"]}, "created": 0,
        "metadata": {"choice": "xla"},
    }  # fmt: skip
    manifest["signature"] = {
        "algorithm": "hmac-sha256",
        "key_id": hmac.digest(RAW, b"fused-eager/key-id/1\0", "sha256").hex()[:16],
        "value": base64.b64encode(hmac.digest(RAW, signed_message(manifest), "sha256")).decode(),
    }
    for name, data in ((f"cas/{blob['sha256']}", stored), (f"ac/{digest_of(PARTS)}", json.dumps(manifest).encode())):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    got = cache_on(tmp_path).lookup(Key(PARTS))
    assert isinstance(got, Entry) and got.blobs == {"executable": raw} and got.metadata == {"choice": "xla"}


def test_the_examples_of_the_page_are_true():
    hexes = "".join(re.findall(r"^    ((?:[0-9a-f]{2}|[0-9a-f]{16}| )+)$", DOC, re.MULTILINE)[i] for i in range(5))
    assert bytes.fromhex(hexes.replace(" ", "")) == canonical({"b": [True, None], "a": -1})
    assert f"    {digest_of({'a': 1})}\n" in DOC


def test_the_threat_model_names_tests_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "cache_threat_model.md").read_text()
    names = {name for row in re.findall(r"\| ([^|]*) \|$", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    code = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = {name for name in names if f"def {name}(" in code or f'"{name}": ' in code}
    assert len(named) >= 15 and named == names
