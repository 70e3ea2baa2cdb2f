"""The byte layout of an event batch and the rules a frame must keep: one place for kernel and codec.

A batch frame is a frame header, `count` event headers of fixed width, then the heap: for each row its
topic, its attributes and its payload, row after row. Lengths are stored, offsets never are, so that a
selection of rows copies headers and heap unchanged. All integers are little-endian; message ids are 16
opaque bytes. docs/reference/protocol.md is the reference for other languages.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

FRAME_HEADER: Final = struct.Struct("<IBBHIIQqqII")
FRAME_HEADER_BYTES: Final = 48
EVENT_HEADER: Final = struct.Struct("<16sqQHHIHHI")
EVENT_HEADER_BYTES: Final = 48
ID_BYTES: Final = 16
ID_AND_TICK_BYTES: Final = 24
CHECKSUM_AT: Final = 12  # u32, 0 for none; it covers the whole frame, as if it were 0 itself
BATCH_VERSION: Final = 1
FLAG_LOST: Final = 1
FLAG_DURABLE: Final = 2  # of a publish frame: its events go to the log before they are acknowledged
MAX_FRAME_BYTES: Final = 0xFFFF_FFFF
MAX_U16: Final = 0xFFFF

KIND_PUBLISH: Final = 16
KIND_DELIVERY: Final = 23
KIND_BEST_EFFORT: Final = 27
KIND_KNOWLEDGE: Final = 32

TEXT: Final = 0
INTEGER: Final = 1
FLOAT: Final = 2
BOOLEAN: Final = 3
MAX_NAME_BYTES: Final = 255
Value = str | int | float | bool  # of an attribute
MIN_INTEGER: Final = -(1 << 63)
MAX_INTEGER: Final = (1 << 63) - 1


class Rule(IntEnum):
    """What `check_batch` found broken. The order of the checks is part of its meaning."""

    NONE = 0
    HEADER_CUT = 1
    LENGTH = 2
    KIND = 3
    VERSION = 4
    FLAGS = 5
    RESERVED = 6
    BATCH_BYTES = 7
    BATCH_EVENTS = 8
    LOST_EVENTS = 9
    PUBLISH_SPAN = 10
    SPAN = 11
    ROWS_CUT = 12
    ROW_RESERVED = 13
    TICK = 14
    TOPIC_EMPTY = 15
    TOPIC_BYTES = 16
    ATTRIBUTES = 17
    EVENT_BYTES = 18
    HEAP_CUT = 19
    TOPIC_UTF8 = 20
    TOPIC_CHARACTER = 21
    TOPIC_DEPTH = 22
    TOPIC_NUMBER = 23
    ATTRIBUTE_CUT = 24
    ATTRIBUTE_NAME = 25
    ATTRIBUTE_UTF8 = 26
    ATTRIBUTE_ORDER = 27
    ATTRIBUTE_TYPE = 28
    ATTRIBUTE_NAN = 29
    ATTRIBUTE_BOOLEAN = 30
    ATTRIBUTE_EXTRA = 31
    HEAP_EXTRA = 32


RULE_TEXT: Final[dict[Rule, str]] = {
    Rule.HEADER_CUT: "it ends within the frame header",
    Rule.LENGTH: "its length field is not its length",
    Rule.KIND: "its kind is not that of a batch",
    Rule.VERSION: "its layout version is unknown",
    Rule.FLAGS: "it has unknown flags",
    Rule.RESERVED: "a reserved field of its header is not zero",
    Rule.BATCH_BYTES: "it has more bytes than the limit for a batch",
    Rule.BATCH_EVENTS: "it has more events than the limit for a batch",
    Rule.LOST_EVENTS: "a lost span has no events",
    Rule.PUBLISH_SPAN: "a publish or best-effort frame has no span of ticks, nor is it lost",
    Rule.SPAN: "its span ends before it starts",
    Rule.ROWS_CUT: "it ends within the event headers",
    Rule.ROW_RESERVED: "a flag of the event header is not zero, or its record is longer than the payload",
    Rule.TICK: "the tick is out of the span or out of order",
    Rule.TOPIC_EMPTY: "the topic is empty",
    Rule.TOPIC_BYTES: "the topic has more bytes than the limit",
    Rule.ATTRIBUTES: "more attributes than the limit",
    Rule.EVENT_BYTES: "more bytes than the limit for an event",
    Rule.HEAP_CUT: "it reaches beyond the end of the frame",
    Rule.TOPIC_UTF8: "the topic is not UTF-8",
    Rule.TOPIC_CHARACTER: "the topic has a wildcard or a control character",
    Rule.TOPIC_DEPTH: "the topic has more levels than the limit",
    Rule.TOPIC_NUMBER: "the topic number is not the hash of the topic",
    Rule.ATTRIBUTE_CUT: "the attributes end within an attribute",
    Rule.ATTRIBUTE_NAME: "an attribute has no name",
    Rule.ATTRIBUTE_UTF8: "an attribute's name or text is not UTF-8",
    Rule.ATTRIBUTE_ORDER: "attributes are not sorted by name, or one is there twice",
    Rule.ATTRIBUTE_TYPE: "an attribute is of an unknown type",
    Rule.ATTRIBUTE_NAN: "an attribute is not a number (NaN)",
    Rule.ATTRIBUTE_BOOLEAN: "a boolean attribute is neither 0 nor 1",
    Rule.ATTRIBUTE_EXTRA: "bytes follow the last attribute",
    Rule.HEAP_EXTRA: "bytes follow the last event",
}
