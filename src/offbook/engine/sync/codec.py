"""A patch: which words of an array changed since a base, and by how much. Bit-exact for any dtype.

Between two steps at a small learning rate about one bfloat16 weight in fifty changes, almost always to the next number
that the format has. So what is kept of a change is its distance in units in the last place, zigzag coded: +1 is 2,
-1 is 1. Where it is, is the gap to the change before it. Both are made of bytes that zstd's entropy coder likes:

gaps     255 says "255 more and go on", so that one stream holds gaps of any size
small    distances up to 14, two to a byte; 15 says that the distance is among the wide ones
wide     the others, byte by byte: all first bytes, then all second ones ...

Where most words change (an anchor is a patch on zeros; float32 weights), distances are kept of all and gaps of none.
A distance means something on its base alone: who applies a patch checks the base and the result by their hashes.
What comes out of it are indices and new words, and to write these twice does no harm.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from offbook.types import OffbookError

Words = NDArray[Any]  # unsigned whole numbers: the bits of weights
MORE, WIDE = 255, 15
DENSE = 0.5  # the share of changed words from which on gaps are not worth their bytes
LEVEL = 1
HEAD = struct.Struct("<cBQQ")  # what it is, bytes per word, words, changed ones; then the size of each stream
KIND = b"U"


class Damaged(OffbookError):
    """Something from a store is not what was written there."""


def encode(old: Words, new: Words) -> bytes:
    """The patch that makes `old` to `new`, arrays of the same unsigned dtype and length. Empty if they are equal."""
    index = np.flatnonzero(old != new)
    if not len(index):
        return b""
    gaps = np.empty(0, np.uint8)
    if len(index) > DENSE * len(old):
        distance = _zigzag(_ordered(new) - _ordered(old))
    else:
        gaps = _gaps(index)
        distance = _zigzag(_ordered(new[index]) - _ordered(old[index]))
    small = np.minimum(distance, WIDE).astype(np.uint8)
    wide = distance[small == WIDE]
    if len(small) % 2:
        small = np.append(small, np.uint8(0))
    planes = wide.view(np.uint8).reshape(len(wide), old.itemsize).T
    pack = zstandard.ZstdCompressor(LEVEL, write_checksum=False).compress
    streams = [pack(np.ascontiguousarray(each).data) for each in (gaps, small[::2] | small[1::2] << 4, *planes)]
    sizes = struct.pack(f"<{len(streams)}Q", *map(len, streams))
    return b"".join([HEAD.pack(KIND, old.itemsize, len(old), len(index)), sizes, *streams])


def decode(patch: bytes, old: Words) -> tuple[NDArray[np.int64] | slice, Words]:
    """Where, and the new words there; a slice means everywhere. Raises Damaged if it is no patch on such an array."""
    try:
        return _decode(patch, old)
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as error:
        raise Damaged(f"a patch of weights cannot be read: {error}") from None


def _decode(patch: bytes, old: Words) -> tuple[NDArray[np.int64] | slice, Words]:
    kind, width, words, changed = HEAD.unpack_from(patch)
    if kind != KIND or (width, words) != (old.itemsize, len(old)) or changed > words:
        raise Damaged("a patch of weights is for other weights")
    sizes = struct.unpack_from(f"<{2 + width}Q", patch, HEAD.size)
    bounds = list(accumulate(sizes, initial=HEAD.size + 8 * len(sizes)))
    if bounds[-1] != len(patch):
        raise Damaged("a patch of weights is not whole")
    dense = changed > DENSE * words
    count = words if dense else changed
    # A stream says itself how large it is; what it may be at most is known.
    gaps = _unpack(patch[bounds[0] : bounds[1]], 0 if dense else changed + words // MORE)
    pairs = _unpack(patch[bounds[1] : bounds[2]], (count + 1) // 2)
    small = np.stack([pairs & WIDE, pairs >> 4], axis=1).reshape(-1)[:count]
    is_wide = small == WIDE
    num_wide = int(np.count_nonzero(is_wide))
    distance = small.astype(old.dtype)
    planes = [_unpack(patch[start:end], num_wide) for start, end in pairwise(bounds[2:])]
    distance[is_wide] = np.stack(planes, axis=1).reshape(-1).view(old.dtype)
    index: NDArray[np.int64] | slice = slice(None)
    if not dense:
        ends = np.flatnonzero(gaps != MORE)
        index = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
        if len(index) != changed or index[-1] >= words:
            raise Damaged("a patch of weights reaches outside of them")
    return index, _bits(_ordered(old[index]) + _unzigzag(distance))


def _gaps(index: NDArray[np.int64]) -> NDArray[np.uint8]:
    gap = np.diff(index, prepend=-1) - 1
    more = gap // MORE
    out = np.full(len(gap) + int(more.sum()), MORE, np.uint8)
    out[np.cumsum(more + 1) - 1] = gap - more * MORE
    return out


def _ordered(words: Words) -> Words:
    """As signed numbers in the order of the floats whose bits they are: neighbours differ by 1, and -0 is below 0."""
    signed = words.view(f"<i{words.itemsize}")
    return signed ^ ((signed >> (8 * words.itemsize - 1)) & np.iinfo(signed.dtype).max)


def _bits(ordered: Words) -> Words:
    """The way back: `_ordered` is its own inverse."""
    signs = ordered >> (8 * ordered.itemsize - 1)
    return (ordered ^ (signs & np.iinfo(ordered.dtype).max)).view(f"<u{ordered.itemsize}")


def _zigzag(distance: Words) -> Words:
    return ((distance << 1) ^ (distance >> (8 * distance.itemsize - 1))).view(f"<u{distance.itemsize}")


def _unzigzag(coded: Words) -> Words:
    return (coded >> 1).view(f"<i{coded.itemsize}") ^ -(coded & 1).view(f"<i{coded.itemsize}")


def _unpack(stream: bytes, at_most: int) -> NDArray[np.uint8]:
    size = zstandard.frame_content_size(stream)
    if not 0 <= size <= at_most:
        raise Damaged("a stream of a patch of weights has another size than it can have")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(stream, max_output_size=size), np.uint8)
