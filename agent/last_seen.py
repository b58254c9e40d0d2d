"""The last record of each of many things, as arrays of them come in. Pure numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedtrace.events import Array


class LastSeen:
    """Records of one dtype by key, sorted by it."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._keys = np.zeros(0, np.int64)
        self._records = np.zeros(0, dtype)

    def replace(self, keys: Array, records: Array) -> tuple[Array, Array]:
        """The next records, in order, of the things ``keys`` (int64). For each: was there one of the same thing before
        it, and which (zeros if there was none)."""
        order = np.argsort(keys, kind="stable")
        keys, records = keys[order], records[order]
        starts = np.ones(len(keys), bool)
        starts[1:] = keys[1:] != keys[:-1]
        known, places = self._find(keys[starts])
        before = np.zeros(len(keys), records.dtype)
        before[1:] = records[:-1]
        carried = np.zeros(len(known), records.dtype)
        carried[known] = self._records[places[known]]
        before[starts] = carried
        found = ~starts
        found[starts] = known
        ends = np.ones(len(keys), bool)
        ends[:-1] = starts[1:]
        self._store(keys[ends], records[ends], known, places)
        result, was_found = np.empty_like(before), np.empty_like(found)
        result[order], was_found[order] = before, found
        return was_found, result

    def _find(self, keys: Array) -> tuple[Array, Array]:
        places = np.searchsorted(self._keys, keys)
        known = places < len(self._keys)
        known[known] = self._keys[places[known]] == keys[known]
        return known, places

    def _store(self, keys: Array, records: Array, known: Array, places: Array) -> None:
        self._records[places[known]] = records[known]
        if not known.all():
            at = places[~known]
            self._keys = np.insert(self._keys, at, keys[~known])
            self._records = np.insert(self._records, at, records[~known])

    def all(self) -> tuple[Array, Array]:
        """Keys, sorted, and the last record of each."""
        return self._keys, self._records
