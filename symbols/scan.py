"""Finding what is known by its content alone: for files whose section headers are gone or don't name it.

A file may have to be searched from end to end for that, but need not stay in memory: what was searched is dropped.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from schedtrace.symbols.binary import Binary, Segment

_PIECE_SIZE = 1 << 20  # bytes; small enough for the processor's cache
_MAX_HITS = 256  # in one segment; real files have a few


def find_words(binary: Binary, segment: Segment, words: Sequence[int], *, alignment: int = 8) -> Iterator[int]:
    """Addresses, ascending, of 8-byte little-endian words that are one of ``words``.

    Only multiples of ``alignment`` (itself one of 8) are looked at, and only in the segment's part of the file.
    Ends after 256 of them. Takes about 1 MiB of memory.
    """
    if not words:
        return
    wanted = np.unique(np.array(words, np.uint64))
    first = segment.vaddr + -segment.vaddr % alignment
    end = first + (segment.vaddr + segment.file_size - first) // 8 * 8
    hits = 0
    for start in range(first, end, _PIECE_SIZE):
        size = min(_PIECE_SIZE, end - start)
        piece = np.frombuffer(binary.view(start, size), "<u8")[:: alignment // 8]
        if len(wanted) == 1:
            found = np.flatnonzero(piece == wanted[0])
        else:
            near = np.flatnonzero((piece >= wanted[0]) & (piece <= wanted[-1]))
            found = near[np.isin(piece[near], wanted)]
        binary.forget(start, size)
        for index in found[: _MAX_HITS - hits].tolist():
            yield start + index * alignment
        hits += len(found)
        if hits >= _MAX_HITS:
            return


def find_bytes(binary: Binary, segment: Segment, wanted: bytes) -> Iterator[int]:
    """Addresses, ascending, of ``wanted`` in the segment's part of the file. Ends after 256 of them."""
    hits = 0
    for start in range(segment.vaddr, segment.vaddr + segment.file_size, _PIECE_SIZE):
        size = min(_PIECE_SIZE + len(wanted) - 1, segment.vaddr + segment.file_size - start)
        piece = binary.read(start, size)
        binary.forget(start, size)
        position = piece.find(wanted)
        while position >= 0:
            yield start + position
            hits += 1
            if hits >= _MAX_HITS:
                return
            position = piece.find(wanted, position + 1)
