# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Checking frames from outside, compiled. `reference.py` says what it means.

Memory safety rests on this order: the length of the frame is compared with what its header claims, each
row's extent with what is left of the heap, and only then is a row looked into, never beyond its extent.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from postroad.kernel.memory cimport (
    BEST_EFFORT,
    BOOLEAN,
    DELIVERY,
    FLAG_DURABLE,
    FLAG_LOST,
    FLOAT,
    HEADER,
    KNOWLEDGE,
    PUBLISH,
    TEXT,
    TICK,
    VERSION,
    i64,
    start_of,
    u16,
    u32,
    u64,
)

# The values of layout.Rule; a test compares them.
cdef enum:
    NONE = 0
    HEADER_CUT = 1
    LENGTH = 2
    KIND = 3
    BAD_VERSION = 4
    FLAGS = 5
    RESERVED = 6
    BATCH_BYTES = 7
    BATCH_EVENTS = 8
    LOST_EVENTS = 9
    PUBLISH_SPAN = 10
    SPAN = 11
    ROWS_CUT = 12
    ROW_RESERVED = 13
    BAD_TICK = 14
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

# As C constants, so that the compiler sees their values.
cdef extern from *:
    """
    #define POSTROAD_FNV_OFFSET 0xCBF29CE484222325ULL
    #define POSTROAD_FNV_PRIME 0x100000001B3ULL
    #define POSTROAD_NOT_ASCII 0x8080808080808080ULL
    """
    const uint64_t FNV_OFFSET "POSTROAD_FNV_OFFSET"
    const uint64_t FNV_PRIME "POSTROAD_FNV_PRIME"
    const uint64_t NOT_ASCII "POSTROAD_NOT_ASCII"


def fnv1a64(bytes data not None):
    cdef uint64_t value = FNV_OFFSET
    cdef const uint8_t* p = start_of(data)
    cdef Py_ssize_t i
    for i in range(PyBytes_GET_SIZE(data)):
        value = (value ^ p[i]) * FNV_PRIME
    return value


cdef bint is_utf8(const uint8_t* p, Py_ssize_t n) noexcept nogil:
    """Whether Python's strict decoder would take it: no overlong forms, no surrogates, up to U+10FFFF."""
    cdef Py_ssize_t i = 0
    cdef uint8_t c, second
    while i < n:
        if n - i >= 8 and u64(p + i) & NOT_ASCII == 0:
            i += 8
            continue
        c = p[i]
        if c < 0x80:
            i += 1
            continue
        if c < 0xC2 or c > 0xF4 or n - i < 2:
            return False
        second = p[i + 1]
        if second & 0xC0 != 0x80:
            return False
        if c < 0xE0:
            i += 2
            continue
        if n - i < 3 or p[i + 2] & 0xC0 != 0x80:
            return False
        if c < 0xF0:
            if (c == 0xE0 and second < 0xA0) or (c == 0xED and second >= 0xA0):
                return False
            i += 3
            continue
        if n - i < 4 or p[i + 3] & 0xC0 != 0x80:
            return False
        if (c == 0xF0 and second < 0x90) or (c == 0xF4 and second >= 0x90):
            return False
        i += 4
    return True


cdef int check_topic(const uint8_t* p, Py_ssize_t n, uint64_t number, int64_t depth) noexcept nogil:
    cdef Py_ssize_t i
    cdef uint8_t c
    cdef uint64_t value = FNV_OFFSET
    cdef int64_t slashes = 0
    if not is_utf8(p, n):
        return TOPIC_UTF8
    for i in range(n):
        c = p[i]
        # The control characters from U+0080 on are C2 80 to C2 9F; valid UTF-8 never ends with C2.
        if c < 0x20 or c == 0x7F or c == 0x2B or c == 0x23 or (c == 0xC2 and p[i + 1] < 0xA0):
            return TOPIC_CHARACTER
        slashes += c == 0x2F
        value = (value ^ c) * FNV_PRIME
    if slashes >= depth:
        return TOPIC_DEPTH
    return NONE if value == number else TOPIC_NUMBER


cdef int check_value(const uint8_t* p, Py_ssize_t n, int kind, Py_ssize_t* size) noexcept nogil:
    """Check one value at the beginning of n bytes and say how many it takes."""
    cdef double number
    if kind > BOOLEAN:
        return ATTRIBUTE_TYPE
    size[0] = 2 if kind == TEXT else 1 if kind == BOOLEAN else 8
    if n < size[0]:
        return ATTRIBUTE_CUT
    if kind == TEXT:
        size[0] += u16(p)
        if n < size[0]:
            return ATTRIBUTE_CUT
        if not is_utf8(p + 2, size[0] - 2):
            return ATTRIBUTE_UTF8
    elif kind == FLOAT:
        memcpy(&number, p, 8)
        if number != number:
            return ATTRIBUTE_NAN
    elif kind == BOOLEAN and p[0] > 1:
        return ATTRIBUTE_BOOLEAN
    return NONE


cdef int check_attributes(const uint8_t* p, Py_ssize_t n, int count) noexcept nogil:
    cdef Py_ssize_t position = 0, size = 0, length, previous_length = 0
    cdef const uint8_t* previous = p
    cdef const uint8_t* name
    cdef int rule, order
    for _ in range(count):
        if position >= n:
            return ATTRIBUTE_CUT
        length = p[position]
        if length == 0:
            return ATTRIBUTE_NAME
        name = p + position + 1
        position += 1 + length
        if position >= n:
            return ATTRIBUTE_CUT
        if not is_utf8(name, length):
            return ATTRIBUTE_UTF8
        order = memcmp(name, previous, length if length < previous_length else previous_length)
        if order < 0 or (order == 0 and length <= previous_length):
            return ATTRIBUTE_ORDER
        previous = name
        previous_length = length
        rule = check_value(p + position + 1, n - position - 1, p[position], &size)
        if rule != NONE:
            return rule
        position += 1 + size
    return NONE if position == n else ATTRIBUTE_EXTRA


cdef int check_header(const uint8_t* p, Py_ssize_t n, int64_t batch_bytes, int64_t batch_events) noexcept nogil:
    cdef int kind, flags
    cdef int64_t count, start, end
    if n < HEADER:
        return HEADER_CUT
    kind = p[4]
    flags = u16(p + 6)
    count = u32(p + 8)
    start = i64(p + 24)
    end = i64(p + 32)
    if u32(p) != <uint64_t> n:
        return LENGTH
    if kind != PUBLISH and kind != DELIVERY and kind != KNOWLEDGE and kind != BEST_EFFORT:
        return KIND
    if p[5] != VERSION:
        return BAD_VERSION
    if flags & ~(FLAG_LOST | FLAG_DURABLE if kind == PUBLISH else FLAG_LOST):
        return FLAGS
    if u32(p + 44) != 0:
        return RESERVED
    if n > batch_bytes:
        return BATCH_BYTES
    if count > batch_events:
        return BATCH_EVENTS
    if flags & FLAG_LOST and count:
        return LOST_EVENTS
    if (kind == PUBLISH or kind == BEST_EFFORT) and (flags & FLAG_LOST or start or end):
        return PUBLISH_SPAN
    if start > end:
        return SPAN
    if HEADER + count * HEADER > n:
        return ROWS_CUT
    return NONE


cdef struct Row:
    # What the row before this one had: rows often repeat a topic or a set of attributes, and what was
    # found sound once is sound again.
    const uint8_t* topic
    const uint8_t* attributes
    uint64_t number
    Py_ssize_t topic_length
    Py_ssize_t attributes_length
    int attribute_count


cdef int check_contents(
    const uint8_t* heap, const uint8_t* header, Py_ssize_t topic_length, Py_ssize_t attributes_length,
    int64_t topic_depth, Row* last
) noexcept nogil:
    cdef uint64_t number = u64(header + 24)
    cdef int count = u16(header + 42)
    cdef const uint8_t* attributes = heap + topic_length
    cdef int rule
    if not (
        number == last.number
        and topic_length == last.topic_length
        and memcmp(heap, last.topic, topic_length) == 0
    ):
        rule = check_topic(heap, topic_length, number, topic_depth)
        if rule != NONE:
            return rule
        last.topic = heap
        last.number = number
        last.topic_length = topic_length
    if not (
        count == last.attribute_count
        and attributes_length == last.attributes_length
        and memcmp(attributes, last.attributes, attributes_length) == 0
    ):
        rule = check_attributes(attributes, attributes_length, count)
        if rule != NONE:
            return rule
        last.attributes = attributes
        last.attributes_length = attributes_length
        last.attribute_count = count
    return NONE


def check_batch(
    bytes data not None, int64_t batch_bytes, int64_t batch_events, int64_t event_bytes, int64_t attributes,
    int64_t topic_bytes, int64_t topic_depth
):
    cdef const uint8_t* p = start_of(data)
    cdef const uint8_t* header
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    cdef int rule = check_header(p, n, batch_bytes, batch_events)
    if rule != NONE:
        return rule, -1, 0, b""
    cdef Py_ssize_t count = u32(p + 8), row
    cdef bint publish = p[4] == PUBLISH, best_effort = p[4] == BEST_EFFORT
    cdef int64_t last_tick = i64(p + 24), end = i64(p + 32), tick, position = HEADER + count * HEADER, size
    cdef Py_ssize_t topic_length, attributes_length
    cdef Row last
    last.topic = last.attributes = p
    last.number = 0
    last.topic_length = -1
    last.attributes_length = 0
    last.attribute_count = 0
    cdef bytes extents = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef char* out = PyBytes_AS_STRING(extents)
    cdef uint32_t offset = <uint32_t> position
    memcpy(out, &offset, 4)
    for row in range(count):
        header = p + HEADER + row * HEADER
        tick = i64(header + TICK)
        topic_length = u16(header + 32)
        attributes_length = u16(header + 34)
        size = topic_length + attributes_length + <int64_t> u32(header + 36)
        if u16(header + 40) != 0 or u32(header + 44) > (u32(header + 36) if best_effort else 0):
            rule = ROW_RESERVED
        elif (tick != 0) if publish else (tick < 1) if best_effort else (tick <= last_tick or tick > end):
            rule = BAD_TICK
        elif topic_length == 0:
            rule = TOPIC_EMPTY
        elif topic_length > topic_bytes:
            rule = TOPIC_BYTES
        elif u16(header + 42) > attributes:
            rule = ATTRIBUTES
        elif size > event_bytes:
            rule = EVENT_BYTES
        elif position + size > n:
            rule = HEAP_CUT
        else:
            rule = check_contents(p + position, header, topic_length, attributes_length, topic_depth, &last)
        if rule != NONE:
            return rule, row, 0, b""
        last_tick = tick
        position += size
        offset = <uint32_t> position
        memcpy(out + 4 * (row + 1), &offset, 4)
    if position != n:
        return HEAP_EXTRA, -1, 0, b""
    return 0, -1, count, extents
