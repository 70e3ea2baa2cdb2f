# cython: language_level=3
"""Reading frames: integers by memcpy, because nothing in a frame is aligned. layout.py has the layout."""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    HEADER = 48  # of a frame and of an event alike
    CHECKSUM = 12  # where a frame has it
    ID = 16
    TICK = 16
    FLAG_LOST = 1
    FLAG_DURABLE = 2
    VERSION = 1
    PUBLISH = 16
    DELIVERY = 23
    BEST_EFFORT = 27
    KNOWLEDGE = 32
    MAX_U16 = 0xFFFF
    MAX_NAME = 255

    TEXT = 0
    INTEGER = 1
    FLOAT = 2
    BOOLEAN = 3


cdef inline uint16_t u16(const uint8_t* p) noexcept nogil:
    cdef uint16_t value
    memcpy(&value, p, 2)
    return value


cdef inline uint32_t u32(const uint8_t* p) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, p, 4)
    return value


cdef inline uint64_t u64(const uint8_t* p) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, p, 8)
    return value


cdef inline int64_t i64(const uint8_t* p) noexcept nogil:
    cdef int64_t value
    memcpy(&value, p, 8)
    return value


cdef inline const uint8_t* start_of(bytes data) noexcept:
    return <const uint8_t*> PyBytes_AS_STRING(data)
