# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""New frames from checked ones, rows and attributes, compiled. `reference.py` says what each function means.

Every function first proves that what it is about to read lies inside the object that it was given, and
allocates exactly what it then writes.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from postroad.kernel.checksum cimport frame_checksum
from postroad.kernel.memory cimport (
    BOOLEAN,
    CHECKSUM,
    FLOAT,
    HEADER,
    ID,
    INTEGER,
    MAX_NAME,
    MAX_U16,
    TEXT,
    TICK,
    VERSION,
    i64,
    start_of,
    u16,
    u32,
)

from postroad.errors import BugError
from postroad.kernel import reference

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    int PyDict_Next(dict p, Py_ssize_t* position, PyObject** key, PyObject** value)
    bint PyUnicode_CheckExact(object o)
    bint PyLong_CheckExact(object o)
    bint PyFloat_CheckExact(object o)
    bint PyBool_Check(object o)
    double PyFloat_AS_DOUBLE(object o)
    long long PyLong_AsLongLongAndOverflow(object o, int* overflow) except? -1

cdef enum:
    MOST_ATTRIBUTES = 64  # larger sets are encoded by the reference

cdef extern from *:
    """
    #define POSTROAD_MAX_FRAME 0xFFFFFFFFLL
    """
    const int64_t MAX_FRAME "POSTROAD_MAX_FRAME"


cdef void put_header(
    uint8_t* p, uint32_t length, uint8_t kind, uint32_t count, uint64_t pubend, int64_t start, int64_t end,
    uint32_t channel
) noexcept nogil:
    memset(p, 0, HEADER)
    memcpy(p, &length, 4)
    p[4] = kind
    p[5] = VERSION
    memcpy(p + 8, &count, 4)
    memcpy(p + 16, &pubend, 8)
    memcpy(p + 24, &start, 8)
    memcpy(p + 32, &end, 8)
    memcpy(p + 40, &channel, 4)


cdef Py_ssize_t rows_in(bytes data, bytes extents) except -1:
    """The number of rows, once it is certain that their headers and heap lie in `data`."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(extents)
    cdef Py_ssize_t count = size // 4 - 1
    cdef const uint8_t* e = start_of(extents)
    if (
        size % 4 != 0 or count < 0 or u32(e) != <uint64_t> (HEADER + count * HEADER)
        or u32(e + 4 * count) != <uint64_t> PyBytes_GET_SIZE(data)
        or HEADER + count * HEADER > PyBytes_GET_SIZE(data)
    ):
        raise BugError("the extents are not those of the frame")
    return count


cdef int64_t size_of_rows(
    const uint8_t* rows, Py_ssize_t chosen, const uint8_t* extents, Py_ssize_t count, Py_ssize_t n
) noexcept nogil:
    """The heap bytes of these rows; -1 if they do not increase, do not exist or do not lie in the frame."""
    cdef int64_t size = 0, previous = -1
    cdef uint32_t row, begin, end
    cdef Py_ssize_t i
    for i in range(chosen):
        row = u32(rows + 4 * i)
        if row <= previous or row >= count:
            return -1
        begin = u32(extents + 4 * <Py_ssize_t> row)
        end = u32(extents + 4 * <Py_ssize_t> row + 4)
        if begin > end or end > n:
            return -1
        size += end - begin
        previous = row
    return size


cdef void copy_rows(
    uint8_t* out, const uint8_t* p, const uint8_t* extents, const uint8_t* rows, Py_ssize_t chosen
) noexcept nogil:
    """Copy headers and heap, neighbours together."""
    cdef uint8_t* heap = out + chosen * HEADER
    cdef Py_ssize_t i = 0, first, after
    cdef uint32_t begin, end
    while i < chosen:
        first = u32(rows + 4 * i)
        after = first + 1
        i += 1
        while i < chosen and u32(rows + 4 * i) == after:
            after += 1
            i += 1
        memcpy(out, p + HEADER + first * HEADER, (after - first) * HEADER)
        out += (after - first) * HEADER
        begin = u32(extents + 4 * first)
        end = u32(extents + 4 * after)
        memcpy(heap, p + begin, end - begin)
        heap += end - begin


cdef bytes with_header(
    bytes data, Py_ssize_t count, uint8_t kind, uint64_t pubend, int64_t start, int64_t end, uint32_t channel
):
    """A copy of the whole frame under another header."""
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, n)
    cdef uint8_t* out = <uint8_t*> PyBytes_AS_STRING(frame)
    put_header(out, <uint32_t> n, kind, <uint32_t> count, pubend, start, end, channel)
    memcpy(out + HEADER, start_of(data) + HEADER, n - HEADER)
    return frame


cdef void put_checksum(uint8_t* out, Py_ssize_t n) noexcept nogil:
    cdef uint32_t checksum = frame_checksum(out, n)
    memcpy(out + CHECKSUM, &checksum, 4)


def sealed(bytes frame not None):
    # The frame is new and nobody else has it, so that it may be written to.
    if PyBytes_GET_SIZE(frame) < HEADER:
        raise BugError("no batch frame is shorter than its header")
    put_checksum(<uint8_t*> PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame))
    return frame


def intact(bytes frame not None):
    if PyBytes_GET_SIZE(frame) < HEADER:
        raise BugError("no batch frame is shorter than its header")
    cdef uint32_t given = u32(start_of(frame) + CHECKSUM)
    return given == 0 or given == frame_checksum(start_of(frame), PyBytes_GET_SIZE(frame))


def gather(
    bytes data not None, bytes extents not None, rows, uint8_t kind, uint64_t pubend, int64_t start, int64_t end,
    uint32_t channel
):
    cdef Py_ssize_t count = rows_in(data, extents), chosen
    if rows is None:
        return sealed(with_header(data, count, kind, pubend, start, end, channel))
    cdef Py_buffer view
    cdef int64_t size
    cdef bytes frame
    cdef uint8_t* out
    try:
        PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
    except (BufferError, ValueError):
        raise BugError("rows are an array of u32") from None
    try:
        if view.itemsize != 4:
            raise BugError("rows are an array of u32")
        chosen = view.len // 4
        size = size_of_rows(<const uint8_t*> view.buf, chosen, start_of(extents), count, PyBytes_GET_SIZE(data))
        if size < 0:
            raise BugError("rows must increase and exist")
        # Rows increase, so the new frame is no larger than the old one, whose length fits its field.
        size += HEADER + chosen * HEADER
        frame = PyBytes_FromStringAndSize(NULL, size)
        out = <uint8_t*> PyBytes_AS_STRING(frame)
        put_header(out, <uint32_t> size, kind, <uint32_t> chosen, pubend, start, end, channel)
        copy_rows(out + HEADER, start_of(data), start_of(extents), <const uint8_t*> view.buf, chosen)
        put_checksum(out, size)
        return frame
    finally:
        PyBuffer_Release(&view)


def with_ticks(
    bytes data not None, bytes extents not None, int64_t first_tick, uint8_t kind, uint64_t pubend, int64_t start,
    uint32_t channel
):
    cdef Py_ssize_t count = rows_in(data, extents), row
    cdef int64_t tick
    if first_tick > INT64_MAX - count:
        raise BugError(f"no {count} ticks from {first_tick} on")
    cdef bytes frame = with_header(data, count, kind, pubend, start, first_tick + count - 1, channel)
    cdef uint8_t* out = <uint8_t*> PyBytes_AS_STRING(frame)
    for row in range(count):
        tick = first_tick + row
        memcpy(out + HEADER + row * HEADER + TICK, &tick, 8)
    return frame


def concatenate(
    list frames not None, list extents not None, uint8_t kind, uint64_t pubend, int64_t start, int64_t end,
    uint32_t channel
):
    cdef Py_ssize_t total = 0, length = HEADER, index, n, rows, row
    cdef bytes data, each
    if len(frames) != len(extents):
        raise BugError("each frame has its extents")
    for index in range(len(frames)):
        data = frames[index]
        total += rows_in(data, extents[index])
        length += PyBytes_GET_SIZE(data) - HEADER
    if length > MAX_FRAME:
        raise BugError(f"a frame of {length} bytes cannot be")
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, length)
    cdef bytes joined = PyBytes_FromStringAndSize(NULL, 4 * (total + 1))
    cdef uint8_t* out = <uint8_t*> PyBytes_AS_STRING(frame)
    cdef uint8_t* offsets = <uint8_t*> PyBytes_AS_STRING(joined)
    cdef Py_ssize_t position = HEADER + total * HEADER
    cdef uint8_t* headers = out + HEADER
    cdef uint32_t offset, heap
    put_header(out, <uint32_t> length, kind, <uint32_t> total, pubend, start, end, channel)
    for index in range(len(frames)):
        data = frames[index]
        each = extents[index]
        n = PyBytes_GET_SIZE(data)
        rows = PyBytes_GET_SIZE(each) // 4 - 1
        heap = u32(start_of(each))
        memcpy(headers, start_of(data) + HEADER, rows * HEADER)
        headers += rows * HEADER
        for row in range(rows):
            offset = <uint32_t> position + (u32(start_of(each) + 4 * row) - heap)
            memcpy(offsets, &offset, 4)
            offsets += 4
        memcpy(out + position, start_of(data) + heap, n - heap)
        position += n - heap
    offset = <uint32_t> position
    memcpy(offsets, &offset, 4)
    return frame, joined


def packed_ids(bytes data not None, Py_ssize_t count):
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data), row
    if count < 0 or n < HEADER or count > (n - HEADER) // HEADER:
        raise BugError(f"the frame has no {count} rows")
    cdef bytes ids = PyBytes_FromStringAndSize(NULL, count * ID)
    cdef char* out = PyBytes_AS_STRING(ids)
    cdef const uint8_t* p = start_of(data) + HEADER
    for row in range(count):
        memcpy(out + row * ID, p + row * HEADER, ID)
    return ids


cdef inline uint64_t big_endian(const uint8_t* p, int size) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(size):
        value = value << 8 | p[i]
    return value


def unpack_rows(bytes data not None, bytes extents not None, Py_ssize_t first, Py_ssize_t after):
    cdef Py_ssize_t count = rows_in(data, extents), n = PyBytes_GET_SIZE(data), row, last_length = -1
    cdef const uint8_t* p = start_of(data)
    cdef const uint8_t* header
    cdef const uint8_t* last_topic = p
    cdef int64_t begin, middle, end, payload
    cdef list rows = []
    cdef str topic = ""
    if not 0 <= first <= after <= count:
        raise BugError(f"rows {first} to {after} of a batch of {count}")
    for row in range(first, after):
        header = p + HEADER + row * HEADER
        begin = u32(start_of(extents) + 4 * row)
        end = u32(start_of(extents) + 4 * row + 4)
        middle = begin + u16(header + 32)
        payload = middle + u16(header + 34)
        if payload > end or end > n:
            raise cut()
        if middle - begin != last_length or memcmp(p + begin, last_topic, last_length) != 0:
            last_topic = p + begin
            last_length = middle - begin
            topic = PyUnicode_DecodeUTF8(<const char*> last_topic, last_length, NULL)
        rows.append((
            big_endian(header, 4), big_endian(header + 4, 4), big_endian(header + 8, 6), big_endian(header + 14, 2),
            i64(header + TICK), topic, attributes_of(data, middle, u16(header + 42)),
            PyBytes_FromStringAndSize(<const char*> p + payload, end - payload),
        ))
    return rows


# ---------------------------------------------------------------- attributes


cdef struct Attribute:
    # The texts belong to objects of the dictionary, which nothing can change while this code runs.
    const char* name
    const char* text
    Py_ssize_t name_length
    Py_ssize_t size  # of the value: of its text, or 8, or 1
    int64_t integer
    double number
    int kind


cdef inline bint precedes(Attribute* a, Attribute* b) noexcept nogil:
    cdef int order = memcmp(a.name, b.name, min(a.name_length, b.name_length))
    return order < 0 or (order == 0 and a.name_length < b.name_length)


cdef bint read_attribute(object name, object value, Attribute* a) except -1:
    """False if the reference should look at it, because it is unusual or wrong."""
    cdef int overflow = 0
    if not PyUnicode_CheckExact(name):
        return False
    a.name = PyUnicode_AsUTF8AndSize(name, &a.name_length)
    if a.name_length < 1 or a.name_length > MAX_NAME:
        return False
    if PyUnicode_CheckExact(value):
        a.kind = TEXT
        a.text = PyUnicode_AsUTF8AndSize(value, &a.size)
        return a.size <= MAX_U16
    if PyBool_Check(value):
        a.kind = BOOLEAN
        a.size = 1
        a.integer = value is True
        return True
    if PyLong_CheckExact(value):
        a.kind = INTEGER
        a.size = 8
        a.integer = PyLong_AsLongLongAndOverflow(value, &overflow)
        return overflow == 0
    if PyFloat_CheckExact(value):
        a.kind = FLOAT
        a.size = 8
        a.number = PyFloat_AS_DOUBLE(value)
        return a.number == a.number
    return False


cdef bytes write_attributes(Attribute* sorted_, Py_ssize_t count, Py_ssize_t size):
    cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
    cdef uint8_t* out = <uint8_t*> PyBytes_AS_STRING(data)
    cdef Attribute* a
    cdef uint16_t length
    cdef Py_ssize_t i
    for i in range(count):
        a = sorted_ + i
        out[0] = <uint8_t> a.name_length
        memcpy(out + 1, a.name, a.name_length)
        out += 1 + a.name_length
        out[0] = <uint8_t> a.kind
        out += 1
        if a.kind == TEXT:
            length = <uint16_t> a.size
            memcpy(out, &length, 2)
            out += 2
            memcpy(out, a.text, a.size)
        elif a.kind == BOOLEAN:
            out[0] = <uint8_t> a.integer
        elif a.kind == INTEGER:
            memcpy(out, &a.integer, 8)
        else:
            memcpy(out, &a.number, 8)
        out += a.size
    return data


def encode_attributes(attributes):
    cdef Attribute found[MOST_ATTRIBUTES]
    cdef Attribute new
    cdef Py_ssize_t position = 0, count = 0, size = 0, i
    cdef PyObject* key
    cdef PyObject* value
    if type(attributes) is not dict or len(<dict> attributes) > MOST_ATTRIBUTES:
        return reference.encode_attributes(attributes)
    while PyDict_Next(<dict> attributes, &position, &key, &value):
        try:
            usual = read_attribute(<object> key, <object> value, &new)
        except UnicodeEncodeError:
            usual = False
        if not usual:
            return reference.encode_attributes(attributes)
        i = count
        while i > 0 and precedes(&new, &found[i - 1]):
            found[i] = found[i - 1]
            i -= 1
        found[i] = new
        count += 1
        size += 2 + new.name_length + new.size + (2 if new.kind == TEXT else 0)
    if size > MAX_U16:
        return reference.encode_attributes(attributes)
    return write_attributes(found, count, size)


cdef object cut():
    return BugError("a row that was not checked")


def decode_attributes(bytes data not None, Py_ssize_t start, int count):
    return attributes_of(data, start, count)


cdef dict attributes_of(bytes data, Py_ssize_t start, int count):
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data), position = start, length
    cdef const uint8_t* p = start_of(data)
    cdef dict found = {}
    cdef double number
    cdef uint8_t kind
    if start < 0:
        raise cut()
    for _ in range(count):
        if n - position < 1 or n - position - 2 < p[position]:
            raise cut()
        length = p[position]
        name = PyUnicode_DecodeUTF8(<const char*> p + position + 1, length, NULL)
        position += 1 + length
        kind = p[position]
        position += 1
        length = 1 if kind == BOOLEAN else 2 if kind == TEXT else 8
        if n - position < length:
            raise cut()
        if kind == TEXT:
            length = u16(p + position)
            position += 2
            if n - position < length:
                raise cut()
            found[name] = PyUnicode_DecodeUTF8(<const char*> p + position, length, NULL)
        elif kind == INTEGER:
            found[name] = i64(p + position)
        elif kind == FLOAT:
            memcpy(&number, p + position, 8)
            found[name] = number
        else:
            found[name] = p[position] == 1
        position += length
    return found
