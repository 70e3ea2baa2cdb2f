# The index: selectors in and out.

cdef class Index:
    """Selector numbers -> conjunctions and targets. `MatchIndex` hands the numbers out."""

    cdef Topics topics
    cdef Table keys  # hash of pattern, signature and values -> conjunction or bucket of them
    cdef Table names  # hash of attribute name -> chain of Name
    cdef dict slots  # name -> slot
    cdef list slot_names  # by slot
    cdef list free_slots
    cdef Value* values  # of the rows being matched, `rows` times `slot_count`
    cdef uint32_t rows
    cdef uint32_t* slot_users  # by slot: checks that read it
    cdef uint32_t slot_count
    cdef dict signatures  # (slot, prefix) pairs -> number
    cdef list signature_keys  # by number
    cdef list free_signatures
    cdef Signature* signature
    cdef uint32_t signature_count
    cdef Selection* selection  # by number; `conjunctions` and `targets` 0 where there is none
    cdef uint32_t selection_count
    cdef dict programs  # steps -> number
    cdef list program_keys  # by number
    cdef list free_programs
    cdef Program* program
    cdef uint32_t program_count
    cdef uint64_t programs_run
    cdef dict target_numbers  # value -> number
    cdef list free_targets
    cdef Target* target
    cdef uint32_t target_count
    cdef dict lists  # selector number -> its targets' values in order, kept while they do not change
    cdef uint64_t conjunctions
    cdef uint64_t stamp  # of the row being matched
    cdef uint64_t batch
    cdef Matcher matcher

    def __cinit__(self):
        self.topics = Topics()
        table_start(&self.keys)
        table_start(&self.names)
        self.slots = {}
        self.slot_names = []
        self.free_slots = []
        self.signatures = {}
        self.signature_keys = []
        self.free_signatures = []
        self.programs = {}
        self.program_keys = []
        self.free_programs = []
        self.target_numbers = {}
        self.free_targets = []
        self.lists = {}
        self.matcher = Matcher()
        self.rows = CHUNK  # as long as nobody asks about attributes

    def __dealloc__(self):
        cdef uint32_t at
        cdef uint64_t cell
        cdef Name* name
        cdef Name* later
        for at in range(self.selection_count):
            self.free_selection(&self.selection[at])
        for at in range(self.program_count):
            free_program(&self.program[at])
        if self.keys.cell != NULL:
            for cell in range(self.keys.mask + 1):
                item_end(self.keys.cell[cell].item)
        if self.names.cell != NULL:
            for cell in range(self.names.mask + 1):
                name = <Name*>self.names.cell[cell].item
                while name != NULL:
                    later = name.next
                    give(name, sizeof(Name) + name.length)
                    name = later
        table_end(&self.keys)
        table_end(&self.names)
        give(self.values, <size_t>self.rows * self.slot_count * sizeof(Value))
        give(self.slot_users, self.slot_count * sizeof(uint32_t))
        give(self.signature, self.signature_count * sizeof(Signature))
        give(self.selection, self.selection_count * sizeof(Selection))
        give(self.program, self.program_count * sizeof(Program))
        give(self.target, self.target_count * sizeof(Target))

    cdef void free_selection(self, Selection* selection) noexcept:
        cdef uint32_t at
        for at in range(selection.conjunctions):
            free_conjunction(selection.conjunction[at])
        give(selection.conjunction, selection.conjunctions * sizeof(Conjunction*))
        give(selection.target, selection.capacity * sizeof(uint32_t))
        memset(selection, 0, sizeof(Selection))

    # ------------------------------------------------------------ selectors

    def insert(self, uint32_t number, str topic, tuple plan, selector):
        """A new selector. `plan` is what selectors.plan made of its boxes; nothing else of it is needed."""
        cdef uint32_t at, wider
        cdef Selection* selection
        cdef Pattern* pattern
        cdef bytes text = topic.encode()
        if number >= self.selection_count:
            wider = max(16, 2 * self.selection_count, number + 1)
            self.selection = <Selection*>resize(
                self.selection, self.selection_count * sizeof(Selection), wider * sizeof(Selection)
            )
            memset(&self.selection[self.selection_count], 0, (wider - self.selection_count) * sizeof(Selection))
            self.selection_count = wider
        selection = &self.selection[number]
        if selection.conjunctions or selection.targets:
            raise BugError(f"selector {number} is in the index already")
        if not plan:
            return
        selection.conjunction = <Conjunction**>take(len(plan) * sizeof(Conjunction*))
        selection.conjunctions = 0
        for checks, residue in plan:
            pattern = self.topics.acquire(text)
            selection.conjunction[selection.conjunctions] = self.build(number, pattern, checks, residue)
            selection.conjunctions += 1

    def delete(self, uint32_t number):
        cdef Selection* selection = &self.selection[number]
        cdef uint32_t at, key
        cdef Conjunction* conjunction
        if selection.targets:
            raise BugError(f"selector {number} still has targets")
        for at in range(selection.conjunctions):
            conjunction = selection.conjunction[at]
            for key in range(conjunction.keys):
                key_remove(&self.keys, keys_of(conjunction)[key], conjunction)
            self.drop_checks(conjunction)
            for key in range(conjunction.programs):
                self.drop_program(programs_of(conjunction)[key])
            self.drop_use(conjunction.pattern, conjunction.signature)
            self.conjunctions -= 1
        self.lists.pop(number, None)
        self.free_selection(selection)

    cdef Conjunction* build(self, uint32_t number, Pattern* pattern, tuple checks, tuple residue) except NULL:
        """A conjunction in all its places."""
        cdef list parts = choose_parts(checks)
        cdef uint32_t signature = self.use_signature(parts)
        cdef uint64_t base = self.use(pattern, signature)
        cdef list hashes = [base]
        cdef size_t size, room = 0
        cdef Conjunction* conjunction
        cdef int at
        for _, prefix, values in parts:
            hashes = [join(<uint64_t>one, hash_value(value)) for one in hashes for value in values]
        hashes = sorted({mix(<uint64_t>one) for one in hashes})
        for _, kind, data in checks:
            if kind == 0 and len(data[0]) == 1 and isinstance(data[0][0], bytes):
                room += len(data[0][0])
            elif kind == 1:
                room += len(data)
        size = sizeof(Conjunction) + len(hashes) * sizeof(uint64_t) + len(checks) * sizeof(Check) + room
        size += len(residue) * sizeof(uint32_t)
        conjunction = <Conjunction*>take(size)
        memset(conjunction, 0, size)
        conjunction.size = <uint32_t>size
        conjunction.pattern = pattern
        conjunction.selector = number
        conjunction.signature = signature
        conjunction.keys = len(hashes)
        conjunction.checks = len(checks)
        conjunction.programs = len(residue)
        for at in range(conjunction.keys):
            keys_of(conjunction)[at] = hashes[at]
        self.fill(conjunction, checks)
        if residue:
            for at in range(conjunction.programs):
                programs_of(conjunction)[at] = self.use_program(residue[at][1])
            conjunction.band = min(MAX_BAND, (<object>sum([cost for cost, _ in residue])).bit_length())
        for at in range(conjunction.keys):
            key_add(&self.keys, keys_of(conjunction)[at], conjunction)
        self.conjunctions += 1
        return conjunction

    cdef int fill(self, Conjunction* conjunction, tuple checks) except -1:
        """The checks, and the range that the conjunction is sorted by: the narrowest, if it has any."""
        cdef Check* check = checks_of(conjunction)
        cdef size_t tail = sizeof(Conjunction) + conjunction.keys * sizeof(uint64_t)
        cdef double width, narrowest = INFINITY
        cdef bint is_float
        tail += conjunction.checks * sizeof(Check) + conjunction.programs * sizeof(uint32_t)
        conjunction.lane = NO_LANE
        conjunction.low = -INFINITY
        conjunction.high = INFINITY
        for name, kind, data in checks:
            check.slot = self.use_slot(name)
            if kind == 0 and len(data[0]) == 1:
                value = data[0][0]
                if isinstance(value, bool):
                    check.kind = IS_BOOLEAN
                    check.flags = 2 if value else 1
                elif isinstance(value, bytes):
                    tail = put_bytes(conjunction, check, IS_TEXT, value, tail)
                else:
                    check.kind = IS_NUMBER
                    is_float = put_number(&check.low, value)
                    check.flags = LOW_FLOAT if is_float else 0
            elif kind == 1:
                tail = put_bytes(conjunction, check, HAS_PREFIX, data, tail)
            elif kind == 2:
                check.kind = IN_RANGE
                check.flags = put_cuts(&check.low, &check.high, data)
                width = float(data[1][0]) - float(data[0][0])
                if conjunction.lane == NO_LANE or width < narrowest:
                    narrowest = width
                    conjunction.lane = check.slot
                    conjunction.low = below(data[0][0])
                    conjunction.high = above(data[1][0])
            else:
                check.kind = IN_DOMAIN
                check.low.i = <int64_t><uintptr_t>make_domain(data[1] if kind == 0 else data)
            check += 1
        return 0

    cdef int drop_checks(self, Conjunction* conjunction) except -1:
        cdef Check* check = checks_of(conjunction)
        cdef uint32_t at
        for at in range(conjunction.checks):
            self.drop_slot(check[at].slot)
        return 0

    # ------------------------------------------------------------ programs

    cdef uint32_t use_program(self, tuple steps) except? 0xFFFFFFFF:
        """The number of the program with these steps."""
        cdef object known = self.programs.get(steps)
        cdef uint32_t number, wider
        if known is not None:
            number = known
            self.program[number].users += 1
            return number
        check_depth(steps)
        if not self.free_programs:
            wider = 2 * self.program_count if self.program_count else 8
            self.program = <Program*>resize(
                self.program, self.program_count * sizeof(Program), wider * sizeof(Program)
            )
            memset(&self.program[self.program_count], 0, (wider - self.program_count) * sizeof(Program))
            self.free_programs = list(range(wider - 1, <long>self.program_count - 1, -1))
            self.program_keys += [None] * (wider - self.program_count)
            self.program_count = wider
        number = self.free_programs.pop()
        self.write_program(&self.program[number], steps)
        self.program[number].users = 1
        self.programs[steps] = number
        self.program_keys[number] = steps
        return number

    cdef int write_program(self, Program* program, tuple steps) except -1:
        cdef size_t room = text_room(steps), size = len(steps) * sizeof(Step) + room
        cdef uint8_t* tail
        cdef Step* step
        cdef bytes text
        step = program.step = <Step*>take(size)
        program.size = size
        tail = <uint8_t*>(step + len(steps))
        memset(step, 0, size)
        for described in steps:
            step.operation = described[0]
            if step.operation == READ or step.operation == MISSING:
                step.place = self.use_slot(described[1])
            elif step.operation == PUSH:
                step.type = described[1]
                if step.type == TEXT:
                    text = described[2]
                    step.place = <uint32_t>len(text)
                    step.n.i = <int64_t><uintptr_t>tail
                    memcpy(tail, PyBytes_AS_STRING(text), len(text))
                    tail += len(text)
                elif step.type != UNKNOWN:
                    put_number(&step.n, described[2])
            elif step.operation == COMPARE:
                step.type = described[1]
            elif step.operation == LISTED:
                step.type = described[1]
                step.n.i = <int64_t><uintptr_t>make_domain(described[2])
            elif step.operation == LIKE:
                step.n.i = <int64_t><uintptr_t>make_like(described[1])
            elif step.operation == AND or step.operation == OR:
                step.place = described[1]
            step += 1
            program.steps += 1
        return 0

    cdef int drop_program(self, uint32_t number) except -1:
        cdef Program* program = &self.program[number]
        cdef uint32_t at
        program.users -= 1
        if program.users:
            return 0
        for at in range(program.steps):
            if program.step[at].operation == READ or program.step[at].operation == MISSING:
                self.drop_slot(program.step[at].place)
        del self.programs[self.program_keys[number]]
        self.program_keys[number] = None
        free_program(program)
        self.free_programs.append(number)
        return 0

    # ------------------------------------------------------------ attribute names

    cdef uint32_t use_slot(self, bytes name) except? 0xFFFFFFFF:
        cdef object known = self.slots.get(name)
        cdef uint32_t slot, wider, rows
        cdef Name* made
        if known is not None:
            slot = known
            self.slot_users[slot] += 1
            return slot
        if not self.free_slots:
            wider = 2 * self.slot_count if self.slot_count else 8
            rows = max(1, min(CHUNK, CHUNK_VALUES // wider))
            self.values = <Value*>resize(
                self.values,
                <size_t>self.rows * self.slot_count * sizeof(Value),
                <size_t>rows * wider * sizeof(Value),
            )
            # Stamps are never 0, so that nothing is read before it is written.
            memset(self.values, 0, <size_t>rows * wider * sizeof(Value))
            self.rows = rows
            self.slot_users = <uint32_t*>resize(
                self.slot_users, self.slot_count * sizeof(uint32_t), wider * sizeof(uint32_t)
            )
            self.free_slots = list(range(wider - 1, <long>self.slot_count - 1, -1))
            self.slot_names += [None] * (wider - self.slot_count)
            self.slot_count = wider
        slot = self.free_slots.pop()
        self.slot_users[slot] = 1
        self.slots[name] = slot
        self.slot_names[slot] = name
        made = <Name*>take(sizeof(Name) + len(name))
        made.slot = slot
        made.length = <uint32_t>len(name)
        memcpy(<uint8_t*>(made + 1), PyBytes_AS_STRING(name), made.length)
        made.hash = hash_bytes(<uint8_t*>(made + 1), made.length)
        made.next = <Name*>table_find(&self.names, made.hash).item
        table_set(&self.names, made.hash, made)
        return slot

    cdef int drop_slot(self, uint32_t slot) except -1:
        cdef Name* name
        cdef Name* before
        cdef bytes text
        self.slot_users[slot] -= 1
        if self.slot_users[slot]:
            return 0
        text = self.slot_names[slot]
        name = self.find_name(<const uint8_t*>PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        before = <Name*>table_find(&self.names, name.hash).item
        if before != name:
            while before.next != name:
                before = before.next
            before.next = name.next
        elif name.next != NULL:
            table_set(&self.names, name.hash, name.next)
        else:
            table_drop(&self.names, name.hash)
        give(name, sizeof(Name) + name.length)
        del self.slots[text]
        self.slot_names[slot] = None
        self.free_slots.append(slot)
        return 0

    cdef Name* find_name(self, const uint8_t* text, size_t length) noexcept:
        cdef Name* name = <Name*>table_find(&self.names, hash_bytes(text, length)).item
        while name != NULL and (name.length != length or memcmp(<uint8_t*>(name + 1), text, length)):
            name = name.next
        return name

    # ------------------------------------------------------------ signatures and their use

    cdef uint32_t use_signature(self, list parts) except? 0xFFFFFFFF:
        """The number of the signature with these parts, which are (name, prefix, values)."""
        cdef tuple key = tuple([(name, prefix) for name, prefix, _ in parts])
        cdef object known = self.signatures.get(key)
        cdef uint32_t number, wider
        cdef Signature* made
        if known is not None:
            number = known
            self.signature[number].users += 1
            return number
        if not self.free_signatures:
            wider = 2 * self.signature_count if self.signature_count else 8
            self.signature = <Signature*>resize(
                self.signature, self.signature_count * sizeof(Signature), wider * sizeof(Signature)
            )
            memset(&self.signature[self.signature_count], 0, (wider - self.signature_count) * sizeof(Signature))
            self.free_signatures = list(range(wider - 1, <long>self.signature_count - 1, -1))
            self.signature_keys += [None] * (wider - self.signature_count)
            self.signature_count = wider
        number = self.free_signatures.pop()
        made = &self.signature[number]
        memset(made, 0, sizeof(Signature))
        made.users = 1
        for name, prefix in key:
            # A signature holds its slots as the checks of its conjunctions do.
            made.part[made.parts].slot = self.use_slot(name)
            made.part[made.parts].prefix = prefix
            if made.part[made.parts].slot < 64:
                made.mask |= <uint64_t>1 << made.part[made.parts].slot
            made.parts += 1
        self.signatures[key] = number
        self.signature_keys[number] = key
        return number

    cdef int drop_signature(self, uint32_t number) except -1:
        cdef Signature* signature = &self.signature[number]
        cdef uint32_t at
        signature.users -= 1
        if signature.users:
            return 0
        del self.signatures[self.signature_keys[number]]
        self.signature_keys[number] = None
        for at in range(signature.parts):
            self.drop_slot(signature.part[at].slot)
        self.free_signatures.append(number)
        return 0

    cdef uint64_t use(self, Pattern* pattern, uint32_t signature) except? 0:
        """Notes one more conjunction of this signature under this pattern; the hash its keys start from."""
        cdef uint32_t at = 0, wider
        while at < pattern.used and pattern.uses[at].signature != signature:
            at += 1
        if at == pattern.capacity:
            wider = 2 * pattern.capacity if pattern.capacity else 1
            pattern.uses = <Use*>resize(pattern.uses, pattern.capacity * sizeof(Use), wider * sizeof(Use))
            pattern.capacity = wider
        if at == pattern.used:
            pattern.uses[at].base = join(mix(pattern.number), signature)
            pattern.uses[at].signature = signature
            pattern.uses[at].users = 0
            pattern.used += 1
        pattern.uses[at].users += 1
        pattern.users += 1
        return pattern.uses[at].base

    cdef int drop_use(self, Pattern* pattern, uint32_t signature) except -1:
        cdef uint32_t at = 0
        while at < pattern.used and pattern.uses[at].signature != signature:
            at += 1
        if at == pattern.used:
            raise BugError("a pattern does not know a signature used under it")
        pattern.uses[at].users -= 1
        if pattern.uses[at].users == 0:
            pattern.used -= 1
            pattern.uses[at] = pattern.uses[pattern.used]
        pattern.users -= 1
        if pattern.users == 0:
            self.topics.release(pattern)
        return self.drop_signature(signature)

    # ------------------------------------------------------------ targets

    def attach(self, uint32_t number, int64_t value):
        """Gives a selector a target; False if it has it already."""
        cdef Selection* selection = &self.selection[number]
        cdef uint32_t target, at, wider
        cdef uint32_t* held
        cdef object known = self.target_numbers.get(value)
        if known is None:
            target = self.new_target(value)
        else:
            target = known
        at = target_at(selection, target)
        held = targets_of(selection)
        if at < selection.targets and held[at] == target:
            return False
        if selection.targets == (selection.capacity if selection.capacity else 1):
            wider = 2 * selection.capacity if selection.capacity else 4
            selection.target = <uint32_t*>resize(
                selection.target, selection.capacity * sizeof(uint32_t), wider * sizeof(uint32_t)
            )
            if selection.capacity == 0:
                selection.target[0] = selection.only
            selection.capacity = wider
            held = selection.target
        memmove(&held[at + 1], &held[at], (selection.targets - at) * sizeof(uint32_t))
        held[at] = target
        selection.targets += 1
        self.lists.pop(number, None)
        if self.target[target].users == 1:
            self.selection[self.target[target].mixed].shared += 1
        self.target[target].users += 1
        self.target[target].mixed ^= number
        if self.target[target].users > 1:
            selection.shared += 1
        return True

    def detach(self, uint32_t number, int64_t value):
        """Takes a target from a selector; how many it has left."""
        cdef Selection* selection = &self.selection[number]
        cdef uint32_t target = self.target_numbers[value]
        cdef uint32_t at = target_at(selection, target)
        cdef uint32_t* held = targets_of(selection)
        if at == selection.targets or held[at] != target:
            raise BugError(f"selector {number} does not have target {value}")
        selection.targets -= 1
        memmove(&held[at], &held[at + 1], (selection.targets - at) * sizeof(uint32_t))
        self.lists.pop(number, None)
        if self.target[target].users > 1:
            selection.shared -= 1
        self.target[target].users -= 1
        self.target[target].mixed ^= number
        if self.target[target].users == 1:
            self.selection[self.target[target].mixed].shared -= 1
        elif self.target[target].users == 0:
            del self.target_numbers[value]
            self.free_targets.append(target)
        return selection.targets

    def targets(self, uint32_t number):
        """How many targets a selector has."""
        return self.selection[number].targets

    cdef uint32_t new_target(self, int64_t value) except? 0xFFFFFFFF:
        cdef uint32_t wider, target
        if not self.free_targets:
            wider = 2 * self.target_count if self.target_count else 8
            self.target = <Target*>resize(
                self.target, self.target_count * sizeof(Target), wider * sizeof(Target)
            )
            self.free_targets = list(range(wider - 1, <long>self.target_count - 1, -1))
            self.target_count = wider
        target = self.free_targets.pop()
        memset(&self.target[target], 0, sizeof(Target))
        self.target[target].value = value
        self.target_numbers[value] = target
        return target

    cdef list listed(self, uint32_t number):
        """The targets of a selector, ascending."""
        cdef Selection* selection = &self.selection[number]
        cdef uint32_t at
        cdef list found = self.lists.get(number)
        if found is None:
            found = sorted([self.target[targets_of(selection)[at]].value for at in range(selection.targets)])
            self.lists[number] = found
        return found

    # ------------------------------------------------------------ questions

    def match(self, bytes data, bytes extents):
        return self.matcher.match(self, data, extents)

    def stats(self):
        return {
            "compiled": 1,
            "conjunctions": self.conjunctions,
            "patterns": self.topics.count,
            "signatures": len(self.signatures),
            "attributes": len(self.slots),
            "programs": len(self.programs),
            "programs_run": self.programs_run,
            "targets": len(self.target_numbers),
            "process_bytes": allocated,  # of all indexes of the process
        }

    def check(self):
        """Walks everything and compares it with what is counted."""
        cdef uint64_t found = 0, seen = 0
        cdef uint32_t number, at, key
        cdef Conjunction* conjunction
        cdef Selection* selection
        users = {}
        programs = {}
        for number in range(self.selection_count):
            selection = &self.selection[number]
            found += selection.conjunctions
            shared = 0
            for at in range(selection.conjunctions):
                conjunction = selection.conjunction[at]
                if conjunction.selector != number:
                    raise BugError("a conjunction belongs to another selector")
                for key in range(conjunction.programs):
                    one = programs_of(conjunction)[key]
                    programs[one] = programs.get(one, 0) + 1
                for key in range(conjunction.keys):
                    seen += 1
                    if not key_holds(&self.keys, keys_of(conjunction)[key], conjunction):
                        raise BugError("a conjunction does not stand under its key")
            for at in range(selection.targets):
                key = targets_of(selection)[at]
                users[key] = users.get(key, 0) + 1
                shared += self.target[key].users > 1
                if at and key <= targets_of(selection)[at - 1]:
                    raise BugError("targets of a selector are out of order")
            if shared != selection.shared:
                raise BugError("shared targets of a selector are miscounted")
        if programs != {number: self.program[number].users for number in self.programs.values()}:
            raise BugError("the conjunctions of a program are miscounted")
        if found != self.conjunctions or seen != keys_held(&self.keys):
            raise BugError("conjunctions or keys are miscounted")
        if users != {number: self.target[number].users for number in self.target_numbers.values()}:
            raise BugError("the selectors of a target are miscounted")
        if sum([self.signature[number].users for number in self.signatures.values()]) != self.conjunctions:
            raise BugError("the users of some signature are miscounted")


cdef void free_conjunction(Conjunction* conjunction) noexcept:
    cdef Check* check = checks_of(conjunction)
    cdef uint32_t at
    for at in range(conjunction.checks):
        if check[at].kind == IN_DOMAIN:
            give(<void*><uintptr_t>check[at].low.i, (<Domain*><uintptr_t>check[at].low.i).size)
    give(conjunction, conjunction.size)

cdef size_t put_bytes(
    Conjunction* conjunction, Check* check, uint8_t kind, bytes text, size_t tail
) except? 0:
    check.kind = kind
    check.low.i = <int64_t>tail
    check.high.i = len(text)
    memcpy(<uint8_t*>conjunction + tail, PyBytes_AS_STRING(text), len(text))
    return tail + len(text)

cdef inline uint32_t* targets_of(Selection* selection) noexcept nogil:
    return selection.target if selection.capacity else &selection.only

cdef uint32_t target_at(Selection* selection, uint32_t target) noexcept:
    cdef uint32_t start = 0, end = selection.targets, middle
    cdef uint32_t* held = targets_of(selection)
    while start < end:
        middle = (start + end) // 2
        if held[middle] < target:
            start = middle + 1
        else:
            end = middle
    return start

cdef list choose_parts(tuple checks):
    """What to hash a conjunction by, as (name, prefix, values): few values first, then prefixes."""
    cdef list exact = sorted([(len(data[0]), name, data[0]) for name, kind, data in checks if kind == 0])
    cdef list parts = []
    cdef int keys = 1
    for count, name, values in exact:
        if len(parts) < MAX_PARTS and keys * count <= MAX_KEYS:
            parts.append((name, 0, values))
            keys *= count
    for name, kind, data in checks:
        if kind == 1 and len(parts) < MAX_PARTS:
            length = min(MAX_PREFIX, len(data))
            parts.append((name, length, (data[:length],)))
    parts.sort()
    return parts
