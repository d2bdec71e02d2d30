"""Manifests and signatures: exact round trips, and nothing but a coded ManifestError for anything damaged."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import random

import cache_alone
import pytest
from fused_eager.cache import manifest as m
from fused_eager.cache.key import Key
from fused_eager.cache.pack import CODECS, PackError, pack, unpack
from fused_eager.cache.sign import Keyring, KeyTextError, generate, load_keyring
from hypothesis import given, settings
from hypothesis import strategies as st

HAVE = {name: importlib.util.find_spec(name) is not None for name in ("cryptography", "zstandard")}
ed25519 = pytest.mark.skipif(not HAVE["cryptography"], reason="Ed25519 needs the package cryptography")
zstd = pytest.mark.skipif(not HAVE["zstandard"], reason="zstd needs the package zstandard")
USABLE = [name for name in CODECS if HAVE["zstandard"] or name != "zstd"]
KINDS = [pytest.param("ed25519", marks=ed25519), "hmac-sha256"]
KEY = Key({"region": {"nodes": ["add", "mul"], "eps": 1e-5}, "salt": b"\x00\xff", "big": 2**70})


def blob(name="executable", data=b"native code", compression="none"):
    digest = hashlib.sha256(data).hexdigest()
    return m.Blob(name, digest, len(data), compression, digest, len(data))


def sample(**changes):
    fields = {
        "key": KEY,
        "blobs": (blob(), blob("text", b"hlo")),
        "versions": {"jax": "0.10.2", "lowering": "3"},
        "origin": m.Origin("c5.large", "cpu", ("avx2", "fma")),
        "created": 1_700_000_000_000,
        "metadata": {"choice": "xla", "seconds": 0.25, "runs": (1, 2)},
    }
    return m.Manifest(**{**fields, **changes})


KEYRINGS = {kind: {right: load_keyring(line.encode()) for right, line in generate(kind).items()}
            for kind in (["ed25519"] if HAVE["cryptography"] else []) + ["hmac-sha256"]}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_signed(kind):
    signed = KEYRINGS[kind]["writer"].sign(sample())
    again = m.parse(signed.to_bytes(), KEY.digest)
    assert again == signed
    assert again.to_bytes() == signed.to_bytes()
    assert again.signed_bytes() == sample().signed_bytes()
    assert KEYRINGS[kind]["reader"].refusal(again) == ""
    assert KEYRINGS[kind]["writer"].refusal(again) == ""
    assert m.parse(sample().to_bytes()).signature is None


def test_json_spelling_carries_no_meaning():
    signed = KEYRINGS["hmac-sha256"]["writer"].sign(sample())
    respelled = json.dumps(json.loads(signed.to_bytes()), indent=3).encode()
    assert m.parse(respelled) == signed
    assert KEYRINGS["hmac-sha256"]["reader"].refusal(m.parse(respelled)) == ""


CHANGES = {
    "blobs": (blob("executable", b"evil code"), blob("text", b"hlo")),
    "versions": {"jax": "0.10.3", "lowering": "3"},
    "origin": m.Origin("c5.large", "cpu", ("avx2",)),
    "created": 1_700_000_000_001,
    "metadata": {"choice": "aten", "seconds": 0.25, "runs": (1, 2)},
    "key": Key({"region": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_every_field_is_signed(kind, name):
    signature = KEYRINGS[kind]["writer"].sign(sample()).signature
    forged = m.parse(sample(**{name: CHANGES[name]}).signed(signature).to_bytes())
    assert KEYRINGS[kind]["reader"].refusal(forged) == "bad-signature"


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind):
    writer, reader = KEYRINGS[kind]["writer"], KEYRINGS[kind]["reader"]
    stranger = load_keyring(generate(kind)["writer"].encode())
    assert reader.refusal(sample()) == "unsigned"
    assert reader.refusal(stranger.sign(sample())) == "unknown-signer"
    assert Keyring().refusal(writer.sign(sample())) == "unknown-signer"
    good = writer.sign(sample())
    for value in (b"", b"x", good.signature.value[:-1], good.signature.value + b"\0", bytes(64)):
        forged = good.signed(m.Signature(good.signature.algorithm, good.signature.key_id, value))
        assert reader.refusal(m.parse(forged.to_bytes())) == "bad-signature"
    other = "ed25519" if kind == "hmac-sha256" else "hmac-sha256"
    assert reader.refusal(good.signed(m.Signature(other, good.signature.key_id, b""))) == "unknown-signer"


@ed25519
def test_a_reader_cannot_write_and_secrets_do_not_show():
    lines = generate("ed25519")
    reader, writer = load_keyring(lines["reader"].encode()), load_keyring(lines["writer"].encode())
    assert writer.can_sign and not reader.can_sign
    assert reader.sign(sample()).signature is None
    secret = lines["writer"].split(":")[1]
    assert secret not in repr(writer) and "writer" in repr(writer) and "reader" in repr(reader)
    both = load_keyring(f"# rotation\n\n{generate('ed25519')['writer']}\n {lines['reader']} \r\n".encode())
    assert both.can_sign and both.refusal(writer.sign(sample())) == ""


@pytest.mark.parametrize("line", [b"what:AAAA", pytest.param(b"ed25519-private:AAAA", marks=ed25519),
                                  b"ed25519-public:!!", b"hmac-sha256:c2hvcnQ=",
                                  b"\xff\xfe", b"ed25519-private", b"hmac-sha256:"])  # fmt: skip
def test_bad_key_text_names_the_line_not_the_secret(line):
    with pytest.raises(KeyTextError, match="line 2") as caught:
        load_keyring(b"# keys\n" + line)
    assert "c2hvcnQ" not in str(caught.value)


def test_hmac_needs_no_library():
    code = ("import sys; sys.modules['cryptography'] = None\n"
            "from fused_eager.cache.sign import generate, load_keyring\n"
            "from fused_eager.cache.extras import MissingExtra\n"
            "print(load_keyring(generate('hmac-sha256')['writer'].encode()).can_sign)\n"
            "try: load_keyring(b'ed25519-public:' + b'A' * 43 + b'=')\n"
            "except MissingExtra as error: print(error.extra, error)")  # fmt: skip
    out = cache_alone.run(code)
    assert out.startswith("True\nsigning ") and "pip install 'fused-eager[signing]'" in out


def edited(path, value):
    form = json.loads(sample().to_bytes())
    *way, last = path
    at = form
    for step in way:
        at = at[step]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return json.dumps(form).encode()


WRONG = [
    (("format",), 2, "future-format"), (("format",), 10**400, "future-format"), (("format",), 0, "bad-field"),
    (("format",), "1", "not-a-manifest"), (("format",), True, "not-a-manifest"),
    (("format",), KeyError, "not-a-manifest"),
    (("key",), "0" * 64, "key-mismatch"), (("key",), KEY.digest.upper(), "bad-field"), (("key",), 1, "bad-field"),
    (("parts", "salt"), "x", "key-mismatch"), (("parts",), [], "bad-field"),
    (("parts", "salt"), {"b": "?"}, "bad-field"),
    (("blobs",), {}, "bad-field"), (("blobs", 0, "name"), "../../etc/passwd", "bad-field"),
    (("blobs", 0, "name"), "text", "bad-field"), (("blobs", 0, "name"), "", "bad-field"),
    (("blobs", 0, "sha256"), "/etc/passwd", "bad-field"), (("blobs", 0, "sha256"), "\u0661" * 64, "bad-field"),
    (("blobs", 0, "size"), -1, "bad-field"), (("blobs", 0, "size"), True, "bad-field"),
    (("blobs", 0, "raw_size"), 2**60, "bad-field"), (("blobs", 0, "compression"), "lzma", "bad-field"),
    (("blobs", 0, "extra"), 1, "bad-field"), (("blobs", 0, "size"), KeyError, "bad-field"),
    (("blobs",), [None], "bad-field"), (("versions",), [], "bad-field"), (("versions", "jax"), 1, "bad-field"),
    (("origin",), None, "bad-field"), (("origin", "cpu_features"), "avx", "bad-field"),
    (("origin", "cpu_features"), [1], "bad-field"), (("created",), -1, "bad-field"),
    (("created",), 10**30, "bad-field"),
    (("created",), None, "bad-field"), (("metadata",), [], "bad-field"), (("metadata", "x"), {"q": 1}, "bad-field"),
    (("signature",), None, "bad-field"), (("signature",), {}, "bad-field"), (("unknown",), 1, "bad-field"),
    (("signature",), {"algorithm": "a", "key_id": "b", "value": "?"}, "bad-field"),
    (("metadata", "x"), 1.5, "not-json"), (("metadata", "x"), float("nan"), "not-json"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "code"), WRONG, ids=lambda x: repr(x)[:40])
def test_wrong_fields_have_their_code(path, value, code):
    with pytest.raises(m.ManifestError) as caught:
        m.parse(edited(path, value))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "not-json"), (b"\xff", "not-json"), (b"[]", "not-a-manifest"), (b"[" * 100_000, "not-json"),
     (b'{"format":1,"format":1}', "not-json"), (b'{"format":1}', "bad-field"), (b" " * (m.MAX_BYTES + 1), "too-large"),
     (b'{"format":' + b"9" * 5000 + b"}", "not-json"), ("{}".encode("utf-16"), "not-json")],
)  # fmt: skip
def test_garbage_has_its_code(data, code):
    with pytest.raises(m.ManifestError) as caught:
        m.parse(data)
    assert caught.value.code == code and code in m.CODES


def test_a_manifest_under_another_key_is_refused():
    with pytest.raises(m.ManifestError) as caught:
        m.parse(sample().to_bytes(), Key({"a": 1}).digest)
    assert caught.value.code == "key-mismatch"


@pytest.mark.parametrize("depth", [50, 101, 300, 900, 5000, 50_000])
@pytest.mark.parametrize("expect", [KEY, None])
def test_depth_is_refused_not_recursed(depth, expect):
    deep = sample().to_bytes().replace(b'"add"', b"[" * depth + b"]" * depth)
    with pytest.raises(m.ManifestError) as caught:
        m.parse(deep, expect)
    assert caught.value.code in ("key-mismatch", "bad-field", "not-json")


def test_the_short_cut_for_the_expected_key_tells_near_misses_apart():
    for a, b in ((1, True), (1, 1.0), (0.0, -0.0), ((), {}), (None, False)):
        data = sample(key=Key({"x": a})).to_bytes()
        assert m.parse(data, Key({"x": a})).key == Key({"x": a})
        with pytest.raises(m.ManifestError, match="key-mismatch"):
            m.parse(data, Key({"x": b}))
        forged = data.replace(Key({"x": a}).digest.encode(), Key({"x": b}).digest.encode())
        with pytest.raises(m.ManifestError, match="key-mismatch"):
            m.parse(forged, Key({"x": b}))


def test_ten_thousand_mutations_raise_nothing_else():
    rng = random.Random(5)
    good = KEYRINGS["hmac-sha256"]["writer"].sign(sample()).to_bytes()
    reader = KEYRINGS["hmac-sha256"]["reader"]
    survived = 0
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(max(1, len(data)))
            kind = rng.randrange(4)
            if kind == 0 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 40)]
            elif kind == 2:
                data[at:at] = bytes(rng.choice(b'{}[]":,0 \\eE.-') for _ in range(rng.randrange(1, 4)))
            else:
                data = data[:at] or bytearray(b" ")
        try:
            parsed = m.parse(bytes(data), rng.choice((KEY, KEY.digest)))
        except m.ManifestError as error:
            assert error.code in m.CODES
        else:
            # whatever still parses and is vouched for must be what was signed
            survived += reader.refusal(parsed) == ""
            assert reader.refusal(parsed) != "" or parsed == m.parse(good)
    assert survived < 500


def test_origin():
    here = m.Origin("a", "cpu", ("avx2", "fma"))
    assert m.Origin("b", "cpu", ("fma", "avx2")).foreign_to(here) == ""
    assert "avx512" in m.Origin("a", "cpu", ("avx2", "fma", "avx512")).foreign_to(here)
    assert "fma" in m.Origin("a", "cpu", ("avx2",)).foreign_to(here)
    assert "gpu" in m.Origin("a", "gpu", ("avx2", "fma")).foreign_to(here)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000), st.sampled_from(USABLE), st.integers(0, 3000))
def test_pack_round_trips_and_is_bounded(data, codec, size):
    name, stored = pack(data * 3, codec)
    assert unpack(name, stored, len(data) * 3) == data * 3
    if size != len(data) * 3:
        with pytest.raises(PackError):
            unpack(name, stored, size)
    name, stored = pack(data)
    assert unpack(name, stored, len(data)) == data and len(stored) <= len(data)


@pytest.mark.parametrize("codec", [pytest.param("zstd", marks=zstd), "zlib"])
def test_damaged_compression_is_coded_and_bombs_stay_small(codec):
    stored = pack(bytes(100 << 20), codec)[1]
    with pytest.raises(PackError) as caught:
        unpack(codec, stored, 1000)
    assert caught.value.code == "not-decompressible"
    rng = random.Random(3)
    original = bytes(rng.choices(range(256), k=2000)) * 2
    good = pack(original, codec)[1]
    for _ in range(300):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            # zstd frames may carry no checksum: what gets through here is caught by the raw digest
            unpack(codec, bytes(data), len(original))
        except PackError as error:
            assert error.code == "not-decompressible"


@zstd
def test_without_zstandard_zlib_writes_and_zstd_entries_say_what_is_missing():
    stored = base64.b64encode(pack(b"a" * 1000, "zstd")[1]).decode()
    code = ("import base64, sys; sys.modules['zstandard'] = None\n"
            "from fused_eager.cache.pack import PackError, pack, unpack\n"
            "print(pack(b'a' * 1000)[0])\n"
            f"try: unpack('zstd', base64.b64decode('{stored}'), 1000)\n"
            "except PackError as error: print(error.code, error)")  # fmt: skip
    out = cache_alone.run(code)
    assert out.startswith("zlib\ncodec-missing ") and "fused-eager[zstd]" in out
