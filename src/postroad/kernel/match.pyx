# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The matching index. `match_reference.py` says what it means.

A selector comes as boxes; a box is a conjunction: a topic pattern and a set of allowed values for some
attributes. A conjunction is found by hashing. Its signature is the set of attributes for which it asks
for one of few values, or for a prefix; its key is the hash of pattern, signature and values. All
conjunctions stand in one hash table under their keys (several when it asks IN), those of one key in a
bucket, and within a bucket sorted by the range they ask of one attribute. A row is matched by looking up
the patterns of its topic (remembered per topic), hashing the row once per signature in use under those
patterns, and verifying every conjunction found against the row's real values. So a collision costs time
and never a wrong answer. Conditions that are not sets of values (arithmetic, LIKE inside) are programs, run
last: equal ones once per row, cheap ones first, and none whose targets have the row already. Rows are then collected per target, and targets with the same rows grouped.

Memory is counted by hand in C; `Index.check` walks all of it. Everything read from a frame is checked
against the frame's length first.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.math cimport floor, nextafter, nextafterf, INFINITY
from libc.stdint cimport INT64_MIN, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memchr, memcmp, memcpy, memmove, memset

import numpy as np

from postroad.errors import BugError
from postroad.kernel.match_reference import Group

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define POSTROAD_PREFETCH(p) __builtin_prefetch(p)
    #else
    #define POSTROAD_PREFETCH(p) ((void)0)
    #endif

    #include <stdlib.h>
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif

    /* Memory that begins with a page of 2 MiB; `huge`: the system is asked for such pages. */
    static void* postroad_chunk(size_t size, int huge) {
        void* found = NULL;
        if (posix_memalign(&found, 1 << 21, size)) return NULL;
    #if defined(MADV_HUGEPAGE)
        if (huge) madvise(found, size, MADV_HUGEPAGE);
    #endif
        return found;
    }

    /* Under the address sanitizer every piece is its own, so that it sees who reaches outside one. */
    #if defined(__SANITIZE_ADDRESS__)
    #define POSTROAD_PIECES 0
    #else
    #define POSTROAD_PIECES 1
    #endif

    /* A named tuple of two without the detour over its Python constructor. */
    static PyObject* postroad_pair(PyObject* type, PyObject* first, PyObject* second) {
        PyObject* made = ((PyTypeObject*)type)->tp_alloc((PyTypeObject*)type, 2);
        if (made != NULL) {
            Py_INCREF(first);
            Py_INCREF(second);
            PyTuple_SET_ITEM(made, 0, first);
            PyTuple_SET_ITEM(made, 1, second);
        }
        return made;
    }
    """
    void POSTROAD_PREFETCH(const void*) noexcept nogil
    void* postroad_chunk(size_t, bint) noexcept
    const bint POSTROAD_PIECES
    object postroad_pair(object, object, object)

cdef object group_type = Group
cdef object from_buffer = np.frombuffer
cdef object row_type = np.dtype(np.uint32)

include "match_types.pxi"
include "match_table.pxi"
include "match_values.pxi"
include "match_like.pxi"
include "match_program.pxi"
include "match_topics.pxi"
include "match_rows.pxi"
include "match_index.pxi"
