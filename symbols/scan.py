"""Finding a known 8-byte word in a file's segments, for files whose section headers are gone or name nothing."""

from collections.abc import Iterator

import numpy as np
from schedtrace.symbols.binary import Binary, Segment

_CHUNK_WORDS = 1 << 17  # 1 MiB: the temporary arrays stay in the processor's cache
_MAX_HITS = 256  # of one scan; a real file has a few


def find_words(binary: Binary, segment: Segment, word: int, *, mask: int = (1 << 64) - 1,
               alignment: int = 8) -> Iterator[int]:  # fmt: skip
    """Addresses, ascending, of 8-byte little-endian words ``w`` with ``w & mask == word`` at multiples of ``alignment``.

    Only the part of ``segment`` that is in the file is searched. ``alignment`` is a multiple of 8. Stops after 256 hits.
    """
    skip = -segment.vaddr % alignment
    count = (segment.file_size - skip) // 8
    if count <= 0:
        return
    words = np.frombuffer(binary.view(segment.vaddr + skip, count * 8), "<u8")[:: alignment // 8]
    hits = 0
    for start in range(0, len(words), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        if mask != (1 << 64) - 1:
            chunk = chunk & np.uint64(mask)
        for index in np.flatnonzero(chunk == np.uint64(word))[: _MAX_HITS - hits].tolist():
            hits += 1
            yield segment.vaddr + skip + (start + index) * alignment
        if hits >= _MAX_HITS:
            return
