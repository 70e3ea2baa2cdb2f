# Conditions that are not sets of values, as programs for a machine with a stack. Each does exactly what
# `compile_condition` of selectors/predicate.py says, which is the oracle of their tests; `to_program` of
# selectors/program.py makes them.

cdef enum:
    UNKNOWN = 4  # type of a value that there is not

    PUSH = 0  # operations, as in selectors/program.py
    READ = 1
    MISSING = 2
    TRUTH = 3
    NEGATE = 4
    ADD = 5
    SUBTRACT = 6
    MULTIPLY = 7
    DIVIDE = 8
    COMPARE = 9
    LISTED = 10
    LIKE = 11
    NOT = 12
    AND = 13
    OR = 14

    EQUAL = 0  # comparisons
    UNEQUAL = 1
    LESS = 2
    AT_MOST = 3
    GREATER = 4
    AT_LEAST = 5

    HAS_NUMBERS = 1  # what a list has
    HAS_TEXTS = 2
    HAS_BOOLEANS = 4

    STACK = 256  # values; a condition within the limits of the language needs far fewer

cdef extern from *:
    # Of GCC and Clang: whether the exact result does not fit.
    bint __builtin_add_overflow(int64_t, int64_t, int64_t*) noexcept nogil
    bint __builtin_sub_overflow(int64_t, int64_t, int64_t*) noexcept nogil
    bint __builtin_mul_overflow(int64_t, int64_t, int64_t*) noexcept nogil

ctypedef struct Step:
    uint8_t operation
    uint8_t type  # of a constant; comparison; what a list has
    uint32_t place  # slot; step to go to; bytes of a text
    Bits n  # a number or a boolean; address of a text, a Domain or a Like

ctypedef struct Program:
    uint64_t stamp  # of the row that it was last asked about
    size_t size  # bytes of its steps and the texts behind them
    Step* step
    uint32_t steps
    uint32_t users  # conjunctions
    uint8_t matched  # that row

# ---------------------------------------------------------------- running

cdef inline bint is_numeric(Value* value) noexcept nogil:
    return value.type == INTEGER or value.type == FLOAT

cdef inline void put_truth(Value* value, bint flag) noexcept nogil:
    value.type = BOOLEAN
    value.n.i = flag

cdef inline void put_real(Value* value, double real) noexcept nogil:
    """What is not a number is unknown."""
    value.type = FLOAT if real == real else UNKNOWN
    value.n.f = real

cdef void calculate(uint8_t operation, Value* left, Value* right) noexcept nogil:
    """Arithmetic as tree.calculate does it; the result takes the place of the left value."""
    cdef double first, second
    cdef bint wide
    if not (is_numeric(left) and is_numeric(right)):
        left.type = UNKNOWN
        return
    if left.type == INTEGER and right.type == INTEGER and operation != DIVIDE:
        if operation == ADD:
            wide = __builtin_add_overflow(left.n.i, right.n.i, &left.n.i)
        elif operation == SUBTRACT:
            wide = __builtin_sub_overflow(left.n.i, right.n.i, &left.n.i)
        else:
            wide = __builtin_mul_overflow(left.n.i, right.n.i, &left.n.i)
        if wide:
            left.type = UNKNOWN
        return
    first, second = as_double(left), as_double(right)
    if operation == ADD:
        put_real(left, first + second)
    elif operation == SUBTRACT:
        put_real(left, first - second)
    elif operation == MULTIPLY:
        put_real(left, first * second)
    elif second == 0:
        left.type = UNKNOWN
    else:
        put_real(left, first / second)

cdef void negate(Value* value) noexcept nogil:
    if value.type == FLOAT:
        value.n.f = -value.n.f
    elif value.type == INTEGER and value.n.i != INT64_MIN:
        value.n.i = -value.n.i
    else:
        value.type = UNKNOWN

cdef void compare_values(uint8_t comparison, Value* left, Value* right) noexcept nogil:
    """The truth of a comparison takes the place of the left value."""
    cdef int found
    if left.type == TEXT and right.type == TEXT:
        found = compare_texts(left.text, left.length, right.text, right.length)
    elif is_numeric(left) and is_numeric(right):
        found = compare_numbers(left.n, left.type == FLOAT, right.n, right.type == FLOAT)
    elif left.type == BOOLEAN and right.type == BOOLEAN and comparison <= UNEQUAL:
        found = left.n.i != right.n.i
    else:
        left.type = UNKNOWN
        return
    if comparison == EQUAL:
        put_truth(left, found == 0)
    elif comparison == UNEQUAL:
        put_truth(left, found != 0)
    elif comparison == LESS:
        put_truth(left, found < 0)
    elif comparison == AT_MOST:
        put_truth(left, found <= 0)
    elif comparison == GREATER:
        put_truth(left, found > 0)
    else:
        put_truth(left, found >= 0)

cdef void look_up(uint8_t has, Domain* domain, Value* value) noexcept nogil:
    """IN: what is equal to no member is unknown if some member is of another type."""
    cdef uint8_t own
    if value.type == UNKNOWN:
        return
    own = HAS_TEXTS if value.type == TEXT else HAS_BOOLEANS if value.type == BOOLEAN else HAS_NUMBERS
    if in_domain(value, True, domain):
        put_truth(value, True)
    elif has & ~own:
        value.type = UNKNOWN
    else:
        put_truth(value, False)

cdef bint run(Program* program, Value* values, uint64_t stamp, Value* stack) noexcept nogil:
    """Whether the condition is true of the row."""
    cdef Value* top = stack - 1
    cdef Step* step = program.step
    cdef Step* end = step + program.steps
    cdef bint wanted
    while step != end:
        if step.operation == READ:
            top += 1
            top[0] = values[step.place]
            if top.stamp != stamp:
                top.type = UNKNOWN
        elif step.operation == PUSH:
            top += 1
            top.type = step.type
            top.n = step.n
            top.text = <const uint8_t*><uintptr_t>step.n.i
            top.length = step.place
        elif step.operation == COMPARE:
            top -= 1
            compare_values(step.type, top, top + 1)
        elif step.operation == ADD or step.operation == SUBTRACT:
            top -= 1
            calculate(step.operation, top, top + 1)
        elif step.operation == MULTIPLY or step.operation == DIVIDE:
            top -= 1
            calculate(step.operation, top, top + 1)
        elif step.operation == NEGATE:
            negate(top)
        elif step.operation == LISTED:
            look_up(step.type, <Domain*><uintptr_t>step.n.i, top)
        elif step.operation == LIKE:
            if top.type == TEXT:
                put_truth(top, like_matches(<Like*><uintptr_t>step.n.i, top.text, top.length))
            else:
                top.type = UNKNOWN
        elif step.operation == MISSING:
            top += 1
            put_truth(top, values[step.place].stamp != stamp)
        elif step.operation == TRUTH:
            if top.type != BOOLEAN:
                top.type = UNKNOWN
        elif step.operation == NOT:
            if top.type == BOOLEAN:
                top.n.i = not top.n.i
        else:
            # Below the item's truth stands that of the items before it.
            wanted = step.operation == OR
            top -= 1
            if top[1].type != BOOLEAN:
                top.type = UNKNOWN
            elif top[1].n.i == wanted:
                put_truth(top, wanted)
                step = program.step + step.place
                continue
        step += 1
    return top.type == BOOLEAN and top.n.i

# ---------------------------------------------------------------- from Python

cdef int check_depth(tuple steps) except -1:
    """BugError unless the steps keep to the stack and leave one value on it."""
    cdef int depth = 0, operation, at, needs
    for at in range(len(steps)):
        operation = steps[at][0]
        needs = 0 if operation <= MISSING else 1
        if ADD <= operation <= COMPARE or operation >= AND:
            needs = 2
        if operation > OR or depth < needs:
            raise BugError(f"step {at} of a program finds {depth} values and needs {needs}")
        if operation >= AND and not at < steps[at][1] <= len(steps):
            raise BugError(f"step {at} of a program goes to step {steps[at][1]} of {len(steps)}")
        depth += 1 if needs == 0 else 1 - needs
        if depth > STACK:
            raise BugError(f"a program needs more than {STACK} values")
    if depth != 1:
        raise BugError(f"a program leaves {depth} values")
    return 0

cdef size_t text_room(tuple steps) except? 0:
    return sum([len(step[2]) for step in steps if step[0] == PUSH and step[1] == TEXT])

cdef void free_program(Program* program) noexcept:
    cdef uint32_t at
    cdef Step* step
    for at in range(program.steps):
        step = &program.step[at]
        if step.operation == LISTED:
            give(<void*><uintptr_t>step.n.i, (<Domain*><uintptr_t>step.n.i).size)
        elif step.operation == LIKE:
            give(<void*><uintptr_t>step.n.i, (<Like*><uintptr_t>step.n.i).size)
    give(program.step, program.size)
    memset(program, 0, sizeof(Program))
