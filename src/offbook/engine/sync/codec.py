"""A patch: which words of an array changed since a base, and by how much. Bit-exact for any dtype.

Between two steps at a small learning rate about one bfloat16 weight in fifty changes, almost always to the next number
of the format. So a change is kept as its distance in units in the last place, zigzag coded (+1 is 2, -1 is 1), and its
place as the gap to the change before it. Both are compressed byte by byte: all first bytes, then all second ones ...

If most words change (an anchor is a patch on zeros; float32 weights), all distances are kept and no gaps. A distance
means something on its base only, so the reader checks the result by its digest.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from offbook.types import OffbookError

Words = NDArray[Any]  # unsigned integers: the bits of weights
DENSE = 0.5  # share of changed words above which gaps are not worth their bytes
LEVEL = 1
HEAD = struct.Struct("<cBQQ")  # kind, bytes per word, words, changed ones
KIND = b"V"
GAP_BYTES = 4


class Damaged(OffbookError):
    """An object in a store is not what was written there."""


def encode(old: Words, new: Words) -> bytes:
    """The patch that makes `old` to `new`, arrays of the same unsigned dtype and length. Empty if they are equal."""
    index = np.flatnonzero(old != new)
    if not len(index):
        return b""
    gaps = np.empty(0, f"<u{GAP_BYTES}")
    head = HEAD.pack(KIND, old.itemsize, len(old), len(index))
    if len(index) <= DENSE * len(old):
        gaps = np.diff(index, prepend=-1).astype(gaps.dtype)
        old = old[index]
        new = new[index]
    distance = _ordered(new) - _ordered(old)
    coded = ((distance << 1) ^ (distance >> (8 * old.itemsize - 1))).view(old.dtype)
    pack = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress
    return head + pack(_planes(gaps) + _planes(coded))


def decode(patch: bytes, old: Words) -> tuple[NDArray[np.int64] | slice, Words]:
    """The places and new words; a slice means everywhere. Raises Damaged if it is no patch on such an array."""
    try:
        kind, width, words, changed = HEAD.unpack_from(patch)
        if kind != KIND or (width, words) != (old.itemsize, len(old)) or changed > words:
            raise Damaged("a patch of weights is for other weights")
        is_dense = changed > DENSE * words
        gap_bytes = 0 if is_dense else GAP_BYTES * changed
        size = gap_bytes + width * (words if is_dense else changed)
        if zstandard.frame_content_size(patch[HEAD.size :]) != size:
            raise Damaged("a patch of weights has another size than it should have")
        raw = zstandard.ZstdDecompressor().decompress(patch[HEAD.size :], max_output_size=size)
    except (struct.error, zstandard.ZstdError) as error:
        raise Damaged(f"a patch of weights cannot be read: {error}") from None
    index: NDArray[np.int64] | slice = slice(None)
    if not is_dense:
        index = np.cumsum(_unplaned(raw[:gap_bytes], np.dtype(f"<u{GAP_BYTES}")), dtype=np.int64) - 1
        if not changed or index[0] < 0 or index[-1] >= words:
            raise Damaged("a patch of weights reaches outside of them")
    coded = _unplaned(raw[gap_bytes:], old.dtype)
    signed = f"<i{width}"
    distance = (coded >> 1).view(signed) ^ -(coded & 1).view(signed)
    ordered = _ordered(old[index]) + distance
    return index, _ordered(ordered).view(old.dtype)


def _planes(words: Words) -> bytes:
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), words.itemsize).T).tobytes()


def _unplaned(raw: bytes, dtype: np.dtype[Any]) -> Words:
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _ordered(words: Words) -> Words:
    """As signed numbers in the order of the floats whose bits they are: neighbours differ by 1, and -0 is below 0. The
    function is its own inverse."""
    signed = words.view(f"<i{words.itemsize}")
    return signed ^ ((signed >> (8 * words.itemsize - 1)) & np.iinfo(signed.dtype).max)
