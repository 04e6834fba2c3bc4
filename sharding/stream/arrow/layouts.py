"""Finds body and key inside messages of the layouts that nearly all messages have.

* plain: `00 53 75 a0 n`, the body; the data section and nothing else;
* keyed: `00 53 72 c1 s 02 a3 0d "x-routing-key" a1 k`, the key, then a plain message.

`a0 n` may be `b0` with a length of four bytes. What has other sections than those, which nobody
asked for, goes section by section. Every length is checked, so that what is found is what
the general reader would find; all other messages are left to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sharding.stream.arrow.rows import Integers, Octets, Rows, unaligned
from sharding.stream.options import Columns

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


Flags: TypeAlias = npt.NDArray[np.bool_]

HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION = 0x70, 0x71, 0x72, 0x73, 0x74
_LISTS = (HEADER, PROPERTIES)
_EMPTY_LIST = 0x45
_SYMBOL, _STRING = 0xA3, 0xA1
_MAX_ANNOTATIONS = 16

# How many bytes a value has after its constructor; those that begin with their length: _SHORT.
_UNKNOWN, _SHORT = -1, -2
_WIDTHS = np.full(256, _UNKNOWN, np.int64)
for _width, _constructors in {
    0: range(0x40, 0x46),
    1: range(0x50, 0x57),
    2: range(0x60, 0x62),
    4: range(0x70, 0x75),
    8: range(0x80, 0x85),
    16: (0x94, 0x98),
    _SHORT: (0xA0, _STRING, _SYMBOL),
}.items():
    _WIDTHS[list(_constructors)] = _width


# Steps over the sections that stand before the body, for all messages at once.
#
# What RabbitMQ makes of messages that were published over AMQP 0-9-1 is a header, annotations (the
# exchange, the routing key, sometimes more), often properties, and one data section. Each section
# says how long it is, so it takes five steps at most from the start of a message to its body; each
# step is made for all messages at once. In the same way the entries of the annotations are passed
# in search of the key.
#
# Sections that are asked for are not stepped over, and whatever is unusual stops a message: both
# are left to the general reader. What lies within a section that nobody asked for is not looked at.


@dataclass(frozen=True, slots=True)
class Annotations:
    """What the annotations of each message hold; where `known` is False, nothing is said."""

    known: Flags
    keyed: Flags
    key_starts: Integers
    key_ends: Integers


def step_over(
    buffer: Octets, starts: Integers, ends: Integers, sections: tuple[int, ...]
) -> tuple[Integers, Integers]:
    """Where `sections` are over, and where the annotations began (−1 without any)."""
    words = unaligned(buffer, ">u4")
    position, previous = starts, np.zeros(len(starts), np.int64)
    annotations = np.full(len(starts), -1, np.int64)
    for _ in sections:
        head = words[position].astype(np.int64)  # 00 53, the section, the constructor
        section, constructor = head >> 8 & 0xFF, head & 0xFF
        is_list = np.isin(section, _LISTS)
        wide = constructor == np.where(is_list, 0xD0, 0xD1)
        short = constructor == np.where(is_list, 0xC0, 0xC1)
        size = np.where(wide, 8 + words[position + 4].astype(np.int64), 4)
        size = np.where(short, 5 + buffer[position + 4].astype(np.int64), size)
        stepping = (
            (head >> 16 == 0x0053)
            & np.isin(section, sections)
            & (section > previous)
            & (wide | short | (is_list & (constructor == _EMPTY_LIST)))
            & (position + size <= ends)
        )
        if not stepping.any():
            break
        annotations = np.where(stepping & (section == ANNOTATIONS), position, annotations)
        previous = np.where(stepping, section, previous)
        position = np.where(stepping, position + size, position)
    return position, annotations


def find_keys(buffer: Octets, annotations: Integers) -> Annotations:
    """The keys in the sections that begin at `annotations`, which lie within the buffer."""
    present = annotations >= 0
    eights = unaligned(buffer, "<u8")
    section = np.maximum(annotations, 0)
    known = ~present | (buffer[section + 3] == 0xC1)  # a map whose sizes are single bytes
    end = section + 5 + buffer[section + 4]
    values = buffer[section + 5].astype(np.int64)
    known &= ~present | ((values % 2 == 0) & (values <= 2 * _MAX_ANNOTATIONS))
    position = np.minimum(section + 6, end)
    key_starts, key_ends = np.zeros((2, len(annotations)), np.int64)
    keyed = np.zeros(len(annotations), np.bool_)
    for number in range(int(values[present & known].max(initial=0)) // 2):
        here = present & known & (2 * number < values)
        name_size = buffer[position + 1].astype(np.int64)
        value = position + 2 + name_size
        constructor = buffer[value]
        width = _WIDTHS[constructor]
        after = value + 1 + np.where(width == _SHORT, 1 + buffer[value + 1].astype(np.int64), width)
        is_key = (
            here
            & (name_size == 13)
            & (eights[position + 2] == int.from_bytes(b"x-routin", "little"))
            & (eights[position + 7] == int.from_bytes(b"ting-key", "little"))
        )
        usual = (buffer[position] == _SYMBOL) & (width != _UNKNOWN) & (after <= end)
        known &= ~here | (usual & (~is_key | (constructor == _STRING)))
        keyed |= is_key
        key_starts = np.where(is_key, value + 2, key_starts)
        key_ends = np.where(is_key, after, key_ends)
        position = np.where(here & known, after, position)
    known &= ~present | (position == end)
    return Annotations(known, keyed & known, key_starts, key_ends)
