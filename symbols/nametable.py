"""Names in a table of NUL-terminated strings, matched in bulk.

Both .strtab and pclntab's funcnametab are such tables, and a large program has half a million names. Making a Python
string of each would cost a second and 100 MB; instead the names wanted are compared eight bytes at a time with all
entries at once, and only the entries that agreed so far are looked at further.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_MAX_NAME = 65536  # instantiated generic names reach some thousands of bytes


class NameTable:
    """``data`` holds the strings; the end of the table ends the last one."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        # The word that starts at each byte; the last seven starts are padded with zero bytes.
        inner = max(len(data) - 7, 0)
        self._words = np.ndarray((inner,), "<u8", data if inner else b"", strides=(1,))
        ending = bytes(data[inner:]) + bytes(8)
        self._ending = np.array([int.from_bytes(ending[i : i + 8], "little") for i in range(len(data) - inner)] + [0],
                                np.uint64)  # fmt: skip

    def name_at(self, offset: int) -> str | None:
        """The name that starts at ``offset``; None outside the table. Bytes that aren't UTF-8 are replaced."""
        if not 0 <= offset < len(self._data):
            return None
        step = 128
        while True:
            name, end, _ = bytes(self._data[offset : offset + step]).partition(b"\0")
            if end or offset + step >= len(self._data) or step >= _MAX_NAME:
                return name.decode("utf-8", "replace")
            step *= 4

    def matches(
        self, offsets: npt.NDArray[np.uint32], names: Iterable[str]
    ) -> dict[str, npt.NDArray[np.intp]]:
        """For each name of ``names`` that occurs: the ascending indices into ``offsets`` of the entries that have it.

        ``offsets``: where the names start in the table, one an entry, any order, repeats and nonsense allowed.
        """
        first = self._gather(offsets.astype(np.int64))
        by_first_word: dict[tuple[int, int], npt.NDArray[np.intp]] = {}
        found: dict[str, npt.NDArray[np.intp]] = {}
        for name in dict.fromkeys(names):
            words = _masked_words(name)
            if words[0] not in by_first_word:
                mask, word = words[0]
                by_first_word[words[0]] = np.flatnonzero((first & np.uint64(mask)) == np.uint64(word))
            entries = by_first_word[words[0]]
            for position, (mask, word) in enumerate(words[1:], start=1):
                if len(entries) == 0:
                    break
                here = self._gather(offsets[entries].astype(np.int64) + 8 * position)
                entries = entries[(here & np.uint64(mask)) == np.uint64(word)]
            if len(entries):
                found[name] = entries
        return found

    def _gather(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The word at each of ``starts`` (never negative); zero outside the table."""
        inner = len(self._words)
        if len(starts) == 0 or int(starts.max()) < inner:
            return self._words[starts]
        gathered = np.zeros(len(starts), np.uint64)
        inside = starts < inner
        gathered[inside] = self._words[starts[inside]]
        gathered[~inside] = self._ending[np.minimum(starts[~inside] - inner, len(self._ending) - 1)]
        return gathered


def _masked_words(name: str) -> list[tuple[int, int]]:
    """A name with its terminator, cut into (mask, word) of eight bytes each."""
    raw = name.encode("utf-8", "surrogateescape") + b"\0"
    words = []
    for start in range(0, len(raw), 8):
        piece = raw[start : start + 8]
        words.append(((1 << 8 * len(piece)) - 1, int.from_bytes(piece, "little")))
    return words
