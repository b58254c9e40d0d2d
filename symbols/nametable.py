"""Names in a table of NUL-terminated strings, matched in bulk.

Both .strtab and pclntab's funcnametab are such tables, and a large program has half a million names. To
make a Python string of each would take a second and 100 MB. Instead the names wanted are compared, eight
bytes at a time, with all entries at once, and only entries that agreed so far are looked at further.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MAX_NAME = 65536  # bytes; instantiated generic names reach some thousands
_FIRST_READ = 128


class NameTable:
    """``data`` holds the strings; the end of the table ends the last of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        # The word that starts at each byte, overlapping; the last seven starts are completed with zero bytes.
        whole = max(len(data) - 7, 0)
        self._words = np.ndarray((whole,), "<u8", data, strides=(1,)) if whole else np.empty(0, "<u8")
        ending = bytes(data[whole:]) + bytes(8)
        tail = [int.from_bytes(ending[i : i + 8], "little") for i in range(len(data) - whole)]
        self._tail_words = np.array([*tail, 0], np.uint64)

    def name_at(self, offset: int) -> str | None:
        """The name at ``offset``; None outside the table. Bytes that aren't UTF-8 are replaced."""
        if not 0 <= offset < len(self._data):
            return None
        size = _FIRST_READ
        while True:
            name, end, _ = bytes(self._data[offset : offset + size]).partition(b"\0")
            if end or offset + size >= len(self._data) or size >= _MAX_NAME:
                return name.decode("utf-8", "replace")
            size *= 4

    def matches(self, offsets: npt.NDArray[np.uint32], names: Iterable[str]) -> dict[str, npt.NDArray[np.intp]]:
        """For each of ``names`` that occurs, the ascending indices into ``offsets`` of its entries.

        ``offsets``: where each entry's name starts in the table; any order, repeats and nonsense allowed.
        """
        first = self._gather(offsets.astype(np.int64))
        agreeing: dict[tuple[int, int], npt.NDArray[np.intp]] = {}
        found: dict[str, npt.NDArray[np.intp]] = {}
        for name in dict.fromkeys(names):
            pieces = _masked_words(name)
            if pieces[0] not in agreeing:
                mask, word = pieces[0]
                agreeing[pieces[0]] = np.flatnonzero((first & np.uint64(mask)) == np.uint64(word))
            entries = agreeing[pieces[0]]
            for position, (mask, word) in enumerate(pieces[1:], start=1):
                if len(entries) == 0:
                    break
                here = self._gather(offsets[entries].astype(np.int64) + 8 * position)
                entries = entries[(here & np.uint64(mask)) == np.uint64(word)]
            if len(entries) and name:
                found[name] = entries
        return found

    def starting_with(self, offsets: npt.NDArray[np.uint32], prefix: str) -> npt.NDArray[np.intp]:
        """The ascending indices into ``offsets`` of names that begin with ``prefix``, of at most eight bytes."""
        raw = prefix.encode()
        if len(raw) > 8:
            raise ValueError(f"{prefix!r} is longer than a word")
        mask = (1 << 8 * len(raw)) - 1
        first = self._gather(offsets.astype(np.int64))
        return np.flatnonzero((first & np.uint64(mask)) == np.uint64(int.from_bytes(raw, "little")))

    def _gather(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The word at each of ``starts`` (none negative); zero outside the table."""
        whole = len(self._words)
        if len(starts) == 0 or int(starts.max()) < whole:
            return self._words[starts]
        gathered = np.zeros(len(starts), np.uint64)
        inside = starts < whole
        gathered[inside] = self._words[starts[inside]]
        gathered[~inside] = self._tail_words[np.minimum(starts[~inside] - whole, len(self._tail_words) - 1)]
        return gathered


def _masked_words(name: str) -> list[tuple[int, int]]:
    """A name with its terminator, cut into (mask, word) of up to eight bytes each."""
    raw = name.encode("utf-8", "surrogateescape") + b"\0"
    pieces = (raw[start : start + 8] for start in range(0, len(raw), 8))
    return [((1 << 8 * len(piece)) - 1, int.from_bytes(piece, "little")) for piece in pieces]
