# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The rows of a checked frame as columns, compiled. `columns_reference.py` says what it means.

A first pass proves that every length lies inside the frame and adds up the sizes; the second writes.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from postroad.kernel.memory cimport BOOLEAN, HEADER, TEXT, start_of, u16, u32

from postroad.errors import BugError


cdef struct Sizes:
    Py_ssize_t topics
    Py_ssize_t payloads
    Py_ssize_t attributes
    Py_ssize_t names
    Py_ssize_t texts


cdef Py_ssize_t value_size(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Bytes of the value whose type is at `p`, the type included; -1 if it does not end before `end`."""
    cdef Py_ssize_t size
    if p >= end:
        return -1
    if p[0] == TEXT:
        if end - p < 3:
            return -1
        size = 3 + u16(p + 1)
    elif p[0] < BOOLEAN:
        size = 9
    elif p[0] == BOOLEAN:
        size = 2
    else:
        return -1
    return size if size <= end - p else -1


cdef bint measure(const uint8_t* p, Py_ssize_t n, Py_ssize_t count, Sizes* sizes) noexcept nogil:
    """False unless the frame is whole."""
    cdef const uint8_t* row = p + HEADER
    cdef const uint8_t* heap = p + HEADER + count * HEADER
    cdef const uint8_t* end = p + n
    cdef const uint8_t* at
    cdef const uint8_t* stop
    cdef Py_ssize_t topic, attributes, payload, size, left, i
    for i in range(count):
        topic, attributes, payload = u16(row + 32), u16(row + 34), u32(row + 36)
        if topic + attributes + payload > end - heap:
            return False
        at = heap + topic
        stop = at + attributes
        left = u16(row + 42)
        sizes.attributes += left
        while left > 0:
            if at >= stop or 1 + <Py_ssize_t> at[0] > stop - at:
                return False
            sizes.names += at[0]
            at += 1 + at[0]
            size = value_size(at, stop)
            if size < 0:
                return False
            if at[0] == TEXT:
                sizes.texts += size - 3
            at += size
            left -= 1
        if at != stop:
            return False
        sizes.topics += topic
        sizes.payloads += payload
        heap += topic + attributes + payload
        row += HEADER
    return heap == end


def columns(bytes data not None):
    cdef const uint8_t* p = start_of(data)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t count = u32(p + 8) if n >= HEADER else -1
    cdef Sizes sizes
    sizes.topics = sizes.payloads = sizes.attributes = sizes.names = sizes.texts = 0
    if count < 0 or n > INT32_MAX or count > n // HEADER - 1 or not measure(p, n, count, &sizes):
        raise BugError("the columns of something that is not a checked frame")
    cdef Py_ssize_t held = sizes.attributes
    cdef bytes topic_offsets = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytes topics = PyBytes_FromStringAndSize(NULL, sizes.topics)
    cdef bytes payload_offsets = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytes payloads = PyBytes_FromStringAndSize(NULL, sizes.payloads)
    cdef bytes map_offsets = PyBytes_FromStringAndSize(NULL, 4 * (count + 1))
    cdef bytes name_offsets = PyBytes_FromStringAndSize(NULL, 4 * (held + 1))
    cdef bytes names = PyBytes_FromStringAndSize(NULL, sizes.names)
    cdef bytes kinds = PyBytes_FromStringAndSize(NULL, held)
    cdef bytes text_offsets = PyBytes_FromStringAndSize(NULL, 4 * (held + 1))
    cdef bytes texts = PyBytes_FromStringAndSize(NULL, sizes.texts)
    cdef bytes numbers = PyBytes_FromStringAndSize(NULL, 8 * held)
    cdef int32_t* topic_at = <int32_t*> PyBytes_AS_STRING(topic_offsets)
    cdef int32_t* payload_at = <int32_t*> PyBytes_AS_STRING(payload_offsets)
    cdef int32_t* map_at = <int32_t*> PyBytes_AS_STRING(map_offsets)
    cdef int32_t* name_at = <int32_t*> PyBytes_AS_STRING(name_offsets)
    cdef int32_t* text_at = <int32_t*> PyBytes_AS_STRING(text_offsets)
    cdef char* topic_bytes = PyBytes_AS_STRING(topics)
    cdef char* payload_bytes = PyBytes_AS_STRING(payloads)
    cdef char* name_bytes = PyBytes_AS_STRING(names)
    cdef char* text_bytes = PyBytes_AS_STRING(texts)
    cdef uint8_t* kind = <uint8_t*> PyBytes_AS_STRING(kinds)
    cdef char* number = PyBytes_AS_STRING(numbers)
    cdef const uint8_t* row = p + HEADER
    cdef const uint8_t* at = p + HEADER + count * HEADER
    cdef int64_t value
    cdef Py_ssize_t i, left, size, j = 0
    topic_at[0] = payload_at[0] = map_at[0] = name_at[0] = text_at[0] = 0
    for i in range(count):
        size = u16(row + 32)
        memcpy(topic_bytes + topic_at[i], at, size)
        topic_at[i + 1] = topic_at[i] + <int32_t> size
        at += size
        for left in range(u16(row + 42)):
            size = at[0]
            memcpy(name_bytes + name_at[j], at + 1, size)
            name_at[j + 1] = name_at[j] + <int32_t> size
            at += 1 + size
            kind[j] = at[0]
            value = size = 0
            if at[0] == TEXT:
                size = u16(at + 1)
                memcpy(text_bytes + text_at[j], at + 3, size)
                at += 3 + size
            elif at[0] == BOOLEAN:
                value = at[1]
                at += 2
            else:
                memcpy(&value, at + 1, 8)
                at += 9
            text_at[j + 1] = text_at[j] + <int32_t> size
            memcpy(number + 8 * j, &value, 8)
            j += 1
        map_at[i + 1] = <int32_t> j
        size = u32(row + 36)
        memcpy(payload_bytes + payload_at[i], at, size)
        payload_at[i + 1] = payload_at[i] + <int32_t> size
        at += size
        row += HEADER
    return (
        topic_offsets, topics, payload_offsets, payloads, map_offsets, name_offsets, names, kinds, text_offsets,
        texts, numbers
    )
