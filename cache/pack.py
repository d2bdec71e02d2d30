"""Compression of blobs, where it pays, and its bounded undoing."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from fused_eager.cache.extras import MissingExtra, need

MIN_BYTES = 512  # below this a header costs more than it saves
WORTH = 0.9  # a stored form above this part of the original is not worth the time to undo it


class PackError(Exception):
    """The stored form cannot be undone. `code` is "codec-missing" (a library) or "not-decompressible" (damage)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def _zstd_pack(data: bytes) -> bytes:
    return bytes(need("zstandard").ZstdCompressor(level=3).compress(data))


def _zstd_unpack(data: bytes, size: int) -> bytes:
    zstandard = need("zstandard")
    try:
        # read one byte more than promised: a frame that claims to hold terabytes costs `size` bytes and no more
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=False) as reader:
            return _read_all(reader, size + 1)
    except zstandard.ZstdError as error:
        raise PackError("not-decompressible", str(error)) from error


def _read_all(reader: Any, limit: int) -> bytes:
    out = bytearray()
    while len(out) < limit and (piece := reader.read(limit - len(out))):
        out += piece
    return bytes(out)


def _zlib_pack(data: bytes) -> bytes:
    return zlib.compress(data, 6)


def _zlib_unpack(data: bytes, size: int) -> bytes:
    undo = zlib.decompressobj()
    try:
        out = undo.decompress(data, size + 1)
        out += undo.decompress(undo.unconsumed_tail, 1) if len(out) <= size else b""
    except zlib.error as error:
        raise PackError("not-decompressible", str(error)) from error
    if not undo.eof or undo.unused_data:
        raise PackError("not-decompressible", "the stream does not end where its bytes do")
    return out


CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes, int], bytes]]] = {
    "none": (lambda data: data, lambda data, size: data),
    "zstd": (_zstd_pack, _zstd_unpack),
    "zlib": (_zlib_pack, _zlib_unpack),
}


def pack(data: bytes, codec: str = "auto") -> tuple[str, bytes]:
    """(codec, stored bytes). "auto" takes zstd when it is installed, else zlib, and "none" where neither pays."""
    if codec != "auto":
        return codec, CODECS[codec][0](data)
    if len(data) < MIN_BYTES:
        return "none", data
    try:
        name, stored = "zstd", _zstd_pack(data)
    except MissingExtra:
        name, stored = "zlib", _zlib_pack(data)
    return (name, stored) if len(stored) <= WORTH * len(data) else ("none", data)


def unpack(codec: str, stored: bytes, size: int) -> bytes:
    """The original `size` bytes; raises PackError, and never allocates much more than `size`."""
    try:
        data = CODECS[codec][1](stored, size)
    except MissingExtra as error:
        raise PackError("codec-missing", str(error)) from error
    if len(data) != size:
        raise PackError("not-decompressible", f"{size} bytes promised, {min(len(data), size + 1)} or more found")
    return data
