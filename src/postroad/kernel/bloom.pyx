# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Bloom filters over batches of 16-byte ids, compiled. `reference.py` has the theory and the constants.

Every position is below m by construction, and m is checked against the length of the buffer first.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from postroad.errors import BugError

cdef enum:
    ID = 16
    MIN_BITS = 8
    MAX_HASHES = 64

# As C constants, so that the compiler sees their values.
cdef extern from *:
    """
    #define POSTROAD_MAX_BITS 0x100000000LL
    #define POSTROAD_GOLDEN 0x9E3779B97F4A7C15ULL
    #define POSTROAD_SILVER 0xD1B54A32D192ED03ULL
    #define POSTROAD_MIX_1 0xBF58476D1CE4E5B9ULL
    #define POSTROAD_MIX_2 0x94D049BB133111EBULL
    """
    const int64_t MAX_BITS "POSTROAD_MAX_BITS"
    const uint64_t GOLDEN "POSTROAD_GOLDEN"
    const uint64_t SILVER "POSTROAD_SILVER"
    const uint64_t MIX_1 "POSTROAD_MIX_1"
    const uint64_t MIX_2 "POSTROAD_MIX_2"


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


cdef inline uint64_t position_of(uint64_t x, uint64_t m) noexcept nogil:
    """The upper half of the 128-bit product x * m, which 64-bit arithmetic can hold because m <= 2**32."""
    return ((x >> 32) * m + ((<uint64_t> <uint32_t> x * m) >> 32)) >> 32


cdef inline void seeds(const uint8_t* id, uint64_t* h1, uint64_t* h2) noexcept nogil:
    cdef uint64_t a, b
    memcpy(&a, id, 8)
    memcpy(&b, id + 8, 8)
    h1[0] = mix(b + mix(a + GOLDEN))
    h2[0] = mix(a ^ mix(b + SILVER)) | 1


cdef int check(Py_ssize_t size, int64_t m, int64_t k, Py_ssize_t ids) except -1:
    if ids % ID != 0:
        raise BugError(f"ids have {ID} bytes each, {ids} is no multiple of that")
    if m < MIN_BITS or m > MAX_BITS or k < 1 or k > MAX_HASHES:
        raise BugError(f"a Bloom filter of {m} bits and {k} hashes cannot be")
    if size != (m + 7) // 8:
        raise BugError(f"a Bloom filter of {m} bits has {(m + 7) // 8} bytes, not {size}")
    return 0


cdef void add_all(uint8_t* bits, uint64_t m, int64_t k, const uint8_t* ids, Py_ssize_t count) noexcept nogil:
    cdef uint64_t h1 = 0, h2 = 0, at
    cdef Py_ssize_t i
    cdef int64_t j
    for i in range(count):
        seeds(ids + i * ID, &h1, &h2)
        for j in range(k):
            at = position_of(mix(h1), m)
            bits[at >> 3] |= <uint8_t> (1 << (at & 7))
            h1 += h2


cdef void test_all(
    const uint8_t* bits, uint64_t m, int64_t k, const uint8_t* ids, Py_ssize_t count, uint8_t* out
) noexcept nogil:
    cdef uint64_t h1 = 0, h2 = 0, at
    cdef Py_ssize_t i
    cdef int64_t j
    for i in range(count):
        seeds(ids + i * ID, &h1, &h2)
        out[i] = 1
        for j in range(k):
            at = position_of(mix(h1), m)
            if not (bits[at >> 3] >> (at & 7)) & 1:
                out[i] = 0
                break
            h1 += h2


def bloom_add(bits, int64_t m, int64_t k, bytes ids not None):
    cdef Py_buffer view
    try:
        PyObject_GetBuffer(bits, &view, PyBUF_WRITABLE)
    except (BufferError, ValueError):
        raise BugError("a Bloom filter to add to must be writable") from None
    try:
        check(view.len, m, k, PyBytes_GET_SIZE(ids))
        add_all(<uint8_t*> view.buf, m, k, <const uint8_t*> PyBytes_AS_STRING(ids), PyBytes_GET_SIZE(ids) // ID)
    finally:
        PyBuffer_Release(&view)


def bloom_contains(bits, int64_t m, int64_t k, bytes ids not None):
    cdef Py_buffer view
    cdef Py_ssize_t count = PyBytes_GET_SIZE(ids) // ID
    cdef bytes found
    PyObject_GetBuffer(bits, &view, PyBUF_SIMPLE)
    try:
        check(view.len, m, k, PyBytes_GET_SIZE(ids))
        found = PyBytes_FromStringAndSize(NULL, count)
        test_all(
            <const uint8_t*> view.buf, m, k, <const uint8_t*> PyBytes_AS_STRING(ids), count,
            <uint8_t*> PyBytes_AS_STRING(found),
        )
        return found
    finally:
        PyBuffer_Release(&view)
