"""Finds body and key inside messages of the layouts that nearly all messages have.

* plain: `00 53 75 a0 n`, the body; the data section and nothing else;
* keyed: `00 53 72 c1 s 02 a3 0d "x-routing-key" a1 k`, the key, then a plain message.

`a0 n` may be `b0` with a length of four bytes. What has other sections than those, which nobody
asked for, goes through `arrow_sections`. Every length is checked, so that what is found is what
the general reader would find; all other messages are left to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sharding.stream.formats.arrow_rows import Integers, Octets, Rows, unaligned
from sharding.stream.formats.arrow_sections import (
    ANNOTATIONS,
    APPLICATION,
    DELIVERY,
    HEADER,
    PROPERTIES,
    find_keys,
    step_over,
)
from sharding.stream.formats.columns import Columns

_KEY_AT = 23
"""Where the key begins in a keyed message; the byte before is its length."""
_MAP_WITHOUT_KEY = 18
"""The size of the map of annotations, less the key: count, name, and the key's own head."""


def _number(octets: bytes) -> int:
    return int.from_bytes(octets, "little")


_SHORT_DATA, _LONG_DATA = _number(b"\x00\x53\x75\xa0"), _number(b"\x00\x53\x75\xb0")
_ANNOTATIONS = _number(b"\x00\x53\x72\xc1")
_NAME_START, _NAME_END = _number(b"\xa3\x0dx-rout"), _number(b"ing-key\xa1")


@dataclass(frozen=True, slots=True)
class Layout:
    """Body and key of every row; where `known` is False, nothing is said."""

    known: npt.NDArray[np.bool_]
    keyed: npt.NDArray[np.bool_]
    body_starts: Integers
    """A body ends where its message ends."""
    key_starts: Integers
    key_ends: Integers


def layout_of(rows: Rows, columns: Columns) -> Layout:
    ends = rows.ends
    body_starts, plain = _data_section(rows.buffer, rows.starts, ends)
    nothing = np.zeros(len(ends), np.int64)
    if plain.all():
        return Layout(plain, ~plain, body_starts, nothing, nothing)
    key_sizes, annotated = _annotation(rows)
    key_starts = rows.starts + _KEY_AT
    key_ends = key_starts + key_sizes
    # Where there is no annotation the end of the key means nothing, but lies within the padding.
    starts_after_key, data_follows = _data_section(rows.buffer, key_ends, ends)
    keyed = annotated & data_follows
    body_starts = np.where(keyed, starts_after_key, body_starts)
    layout = Layout(plain | keyed, keyed, body_starts, key_starts, key_ends)
    others = np.flatnonzero(~layout.known)
    if len(others):
        _add_others(layout, others, rows, columns)
    return layout


def _add_others(layout: Layout, others: Integers, rows: Rows, columns: Columns) -> None:
    """Adds what can be said of messages with more sections, if those are not asked for."""
    sections = (
        HEADER,
        DELIVERY,
        ANNOTATIONS,
        *(() if columns.properties else (PROPERTIES,)),
        *(() if columns.application_properties else (APPLICATION,)),
    )
    ends = rows.ends[others]
    data, annotations = step_over(rows.buffer, rows.starts[others], ends, sections)
    layout.body_starts[others], known = _data_section(rows.buffer, data, ends)
    if columns.key:
        keys = find_keys(rows.buffer, annotations)
        known &= keys.known
        layout.keyed[others] = keys.keyed & known
        layout.key_starts[others] = keys.key_starts
        layout.key_ends[others] = keys.key_ends
    layout.known[others] = known


def _data_section(
    buffer: Octets, starts: Integers, ends: Integers
) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Where the body begins, and whether one data section fills all from start to end."""
    heads = unaligned(buffer, "<u4")[starts]
    body_starts = starts + 5
    found = (heads == _SHORT_DATA) & (body_starts + buffer[starts + 4] == ends)
    long = heads == _LONG_DATA
    if long.any():
        sizes = unaligned(buffer, ">u4")[starts + 4].astype(np.int64)
        found |= long & (starts + 8 + sizes == ends)
        body_starts = np.where(long, starts + 8, body_starts)
    return body_starts, found


def _annotation(rows: Rows) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The size of the key, and whether a map with the key and nothing else begins the message."""
    buffer, starts = rows.buffer, rows.starts
    eights = unaligned(buffer, "<u8")
    key_sizes = buffer[starts + (_KEY_AT - 1)].astype(np.int64)
    found = (
        (unaligned(buffer, "<u4")[starts] == _ANNOTATIONS)
        & (buffer[starts + 4] == key_sizes + _MAP_WITHOUT_KEY)
        & (buffer[starts + 5] == 2)
        & (eights[starts + 6] == _NAME_START)
        & (eights[starts + 14] == _NAME_END)
    )
    return key_sizes, found
