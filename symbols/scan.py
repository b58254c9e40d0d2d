"""Finding what is known by its content alone: for files whose section headers are gone or don't name it."""

from collections.abc import Iterator, Sequence

import numpy as np

from schedtrace.symbols.binary import Binary, Segment

_CHUNK_WORDS = 1 << 17  # 1 MiB: the temporary arrays stay in the processor's cache
_PIECE_SIZE = 1 << 20
_MAX_HITS = 256  # in one segment; real files have a few
_ALL_BITS = (1 << 64) - 1


def find_words(
    binary: Binary, segment: Segment, words: Sequence[int], *, mask: int = _ALL_BITS, alignment: int = 8
) -> Iterator[int]:
    """Addresses, ascending, of 8-byte little-endian words ``w`` of which ``w & mask`` is one of ``words``.

    Only multiples of ``alignment`` (itself one of 8) are looked at, and only in the segment's part of the
    file. Ends after 256 of them. The pages read are the file's own; about 1 MiB of memory is used
    besides.
    """
    if not words:
        return
    skip = -segment.vaddr % alignment
    size = (segment.file_size - skip) // 8 * 8
    if size <= 0:
        return
    content = np.frombuffer(binary.view(segment.vaddr + skip, size), "<u8")[:: alignment // 8]
    wanted = np.unique(np.array(words, np.uint64))
    hits = 0
    for start in range(0, len(content), _CHUNK_WORDS):
        chunk = content[start : start + _CHUNK_WORDS]
        if mask != _ALL_BITS:
            chunk = chunk & np.uint64(mask)
        if len(wanted) == 1:
            found = np.flatnonzero(chunk == wanted[0])
        else:
            near = np.flatnonzero((chunk >= wanted[0]) & (chunk <= wanted[-1]))
            found = near[np.isin(chunk[near], wanted)]
        for index in found[: _MAX_HITS - hits].tolist():
            hits += 1
            yield segment.vaddr + skip + (start + index) * alignment
        if hits >= _MAX_HITS:
            return


def find_bytes(binary: Binary, segment: Segment, wanted: bytes) -> Iterator[int]:
    """Addresses, ascending, of ``wanted`` in the segment's part of the file. Ends after 256 of them."""
    hits = 0
    for start in range(0, segment.file_size, _PIECE_SIZE):
        size = min(_PIECE_SIZE + len(wanted) - 1, segment.file_size - start)
        piece = binary.read(segment.vaddr + start, size)
        position = piece.find(wanted)
        while position >= 0:
            yield segment.vaddr + start + position
            hits += 1
            if hits >= _MAX_HITS:
                return
            position = piece.find(wanted, position + 1)
