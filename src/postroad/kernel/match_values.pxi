# Values of a row, exact comparison, and the checks of a conjunction.

cdef inline int compare_mixed(int64_t whole, double real) noexcept nogil:
    """An integer with a float, exactly: as doubles, 2**53 and 2**53 + 1 would be equal."""
    cdef double down
    if real >= 9223372036854775808.0:
        return -1
    if real < -9223372036854775808.0:
        return 1
    down = floor(real)
    if whole != <int64_t>down:
        return -1 if whole < <int64_t>down else 1
    return -1 if real > down else 0

cdef inline int compare_numbers(Bits first, bint first_float, Bits second, bint second_float) noexcept nogil:
    if first_float:
        if second_float:
            return (first.f > second.f) - (first.f < second.f)
        return -compare_mixed(second.i, first.f)
    if second_float:
        return compare_mixed(first.i, second.f)
    return (first.i > second.i) - (first.i < second.i)

cdef inline int compare_texts(
    const uint8_t* first, size_t first_length, const uint8_t* second, size_t second_length
) noexcept nogil:
    cdef size_t common = first_length if first_length < second_length else second_length
    cdef int found = memcmp(first, second, common) if common else 0
    if found:
        return found
    return (first_length > second_length) - (first_length < second_length)

cdef inline uint64_t hash_number(Bits n, bint is_float) noexcept nogil:
    """Equal numbers hash equally, whatever their types."""
    if is_float:
        if not (n.f >= -9223372036854775808.0 and n.f < 9223372036854775808.0 and floor(n.f) == n.f):
            return mix(<uint64_t>n.i ^ <uint64_t>0xA24BAED4963EE407)
        n.i = <int64_t>n.f
    return mix(<uint64_t>n.i ^ <uint64_t>0x9FB21C651E98DF25)

cdef inline uint64_t hash_boolean(bint flag) noexcept nogil:
    return <uint64_t>0xC2B2AE3D27D4EB4F if flag else <uint64_t>0x165667B19E3779F9

cdef inline double as_double(Value* value) noexcept nogil:
    return value.n.f if value.type == FLOAT else <double>value.n.i

cdef inline bint in_range(Value* value, Bits low, Bits high, uint8_t flags) noexcept nogil:
    cdef bint is_float = value.type == FLOAT
    cdef int found = compare_numbers(value.n, is_float, low, flags & LOW_FLOAT)
    if found < 0 or (found == 0 and flags & LOW_ABOVE):
        return False
    found = compare_numbers(value.n, is_float, high, flags & HIGH_FLOAT)
    return found < 0 or (found == 0 and flags & HIGH_ABOVE)

cdef bint in_domain(Value* value, bint present, Domain* domain) noexcept nogil:
    """Whether a value, or its absence, is in a set. Of the sorted spans only the last to begin can hold it."""
    cdef NumberSpan* number = <NumberSpan*>(domain + 1)
    cdef TextSpan* text = <TextSpan*>(number + domain.numbers)
    cdef const uint8_t* data = <const uint8_t*>(text + domain.texts)
    cdef uint32_t start = 0, end, middle
    cdef int found
    if not present:
        return domain.missing
    if value.type == BOOLEAN:
        return domain.booleans >> value.n.i & 1
    end = domain.texts if value.type == TEXT else domain.numbers
    while start < end:
        middle = (start + end) // 2
        if value.type == TEXT:
            found = compare_texts(value.text, value.length, data + text[middle].low, text[middle].low_length)
            if found == 0 and text[middle].flags & LOW_ABOVE:
                found = -1
        else:
            found = compare_numbers(
                value.n, value.type == FLOAT, number[middle].low, number[middle].flags & LOW_FLOAT
            )
            if found == 0 and number[middle].flags & LOW_ABOVE:
                found = -1
        if found < 0:
            end = middle
        else:
            start = middle + 1
    if start == 0:
        return False
    start -= 1
    if value.type != TEXT:
        return in_range(value, number[start].low, number[start].high, number[start].flags)
    if text[start].flags & NO_END:
        return True
    found = compare_texts(value.text, value.length, data + text[start].high, text[start].high_length)
    return found < 0 or (found == 0 and (text[start].flags & HIGH_ABOVE) != 0)

cdef inline uint64_t* keys_of(Conjunction* conjunction) noexcept nogil:
    return <uint64_t*>(conjunction + 1)

cdef inline Check* checks_of(Conjunction* conjunction) noexcept nogil:
    return <Check*>(keys_of(conjunction) + conjunction.keys)

cdef inline uint32_t* programs_of(Conjunction* conjunction) noexcept nogil:
    return <uint32_t*>(checks_of(conjunction) + conjunction.checks)

cdef bint verify(Conjunction* conjunction, Value* values, uint64_t stamp) noexcept nogil:
    """Whether the values of the row are what the conjunction asks for, its programs aside."""
    cdef Check* check = checks_of(conjunction)
    cdef Check* end = check + conjunction.checks
    cdef Value* value
    cdef const uint8_t* text
    while check != end:
        value = &values[check.slot]
        if check.kind == IN_DOMAIN:
            if not in_domain(value, value.stamp == stamp, <Domain*><uintptr_t>check.low.i):
                return False
        elif value.stamp != stamp:
            return False
        elif check.kind == IS_TEXT or check.kind == HAS_PREFIX:
            text = <const uint8_t*>conjunction + check.low.i
            if value.type != TEXT or value.length < <uint32_t>check.high.i:
                return False
            if check.kind == IS_TEXT and value.length != <uint32_t>check.high.i:
                return False
            if memcmp(value.text, text, <size_t>check.high.i):
                return False
        elif check.kind == IS_BOOLEAN:
            if value.type != BOOLEAN or not check.flags >> value.n.i & 1:
                return False
        elif value.type != INTEGER and value.type != FLOAT:
            return False
        elif check.kind == IS_NUMBER:
            if compare_numbers(value.n, value.type == FLOAT, check.low, check.flags & LOW_FLOAT):
                return False
        elif not in_range(value, check.low, check.high, check.flags):
            return False
        check += 1
    return True

# ---------------------------------------------------------------- from Python values

cdef bint put_number(Bits* out, object value) except -1:
    """Stores a number; whether it is a float."""
    if isinstance(value, float):
        out.f = value
        return True
    out.i = value
    return False

cdef uint8_t put_cuts(Bits* low, Bits* high, object span) except? 255:
    cdef object first = span[0], second = span[1]
    cdef uint8_t flags = 0
    if put_number(low, first[0]):
        flags |= LOW_FLOAT
    if put_number(high, second[0]):
        flags |= HIGH_FLOAT
    if first[1]:
        flags |= LOW_ABOVE
    if second[1]:
        flags |= HIGH_ABOVE
    return flags

cdef float below(object value) except? -1:
    """A single-precision number not above an exact one."""
    cdef double wide = value
    cdef float found
    if not isinstance(value, float):
        wide = nextafter(wide, -INFINITY)
    found = <float>wide
    return found if <double>found <= wide else nextafterf(found, -INFINITY)

cdef float above(object value) except? -1:
    cdef double wide = value
    cdef float found
    if not isinstance(value, float):
        wide = nextafter(wide, INFINITY)
    found = <float>wide
    return found if <double>found >= wide else nextafterf(found, INFINITY)

cdef Domain* make_domain(object data) except NULL:
    """From (missing, booleans, numbers, texts), texts as bytes."""
    cdef object missing, booleans, numbers, texts, span
    missing, booleans, numbers, texts = data
    cdef size_t size = sizeof(Domain) + len(numbers) * sizeof(NumberSpan) + len(texts) * sizeof(TextSpan)
    cdef size_t at = 0
    for span in texts:
        size += len(span[0][0]) + (0 if span[1] is None else len(span[1][0]))
    cdef Domain* domain = <Domain*>take(size)
    memset(domain, 0, size)
    domain.size = size
    domain.missing = missing
    domain.booleans = booleans
    domain.numbers = len(numbers)
    domain.texts = len(texts)
    cdef NumberSpan* number = <NumberSpan*>(domain + 1)
    cdef TextSpan* text = <TextSpan*>(number + domain.numbers)
    cdef uint8_t* tail = <uint8_t*>(text + domain.texts)
    for span in numbers:
        number.flags = put_cuts(&number.low, &number.high, span)
        number += 1
    for span in texts:
        text.low = at
        text.low_length = len(span[0][0])
        memcpy(tail + at, <const char*><bytes>span[0][0], text.low_length)
        at += text.low_length
        if span[0][1]:
            text.flags |= LOW_ABOVE
        if span[1] is None:
            text.flags |= NO_END
        else:
            text.high = at
            text.high_length = len(span[1][0])
            memcpy(tail + at, <const char*><bytes>span[1][0], text.high_length)
            at += text.high_length
            if span[1][1]:
                text.flags |= HIGH_ABOVE
        text += 1
    return domain

cdef uint64_t hash_value(object value) except? 0:
    cdef Bits n
    cdef bint is_float
    if isinstance(value, bool):
        return hash_boolean(value)
    if isinstance(value, bytes):
        return hash_bytes(<const uint8_t*>PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
    is_float = put_number(&n, value)
    return hash_number(n, is_float)
