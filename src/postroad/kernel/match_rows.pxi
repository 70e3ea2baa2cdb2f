# One batch: rows -> conjunctions -> selectors -> targets -> groups.

cdef class Matcher:
    """Working room for `match`, kept between batches."""

    cdef Row row[CHUNK]  # the rows matched together
    cdef Pattern** pattern  # what their topics match, row after row
    cdef uint64_t pattern_room
    cdef uint64_t* hash  # the keys to look for; once found, their items
    cdef uint64_t hash_room
    cdef Conjunction** candidate  # what was found, row after row
    cdef uint64_t candidates
    cdef Hit* hit  # what was verified
    cdef uint64_t hits
    cdef uint64_t hit_room
    cdef Unit* unit
    cdef uint64_t units
    cdef uint64_t unit_room
    cdef Link* link
    cdef uint64_t links
    cdef uint64_t link_room
    cdef Value stack[STACK]  # of the program being run
    cdef uint64_t* selector_stamp  # by number: the last row that is known to go to its targets
    cdef uint64_t selector_room
    cdef uint64_t* target_stamp  # the same by target
    cdef uint64_t target_room
    cdef Seen seen[MAX_SEEN]
    cdef uint32_t seen_count
    cdef list singles  # arrays of one row, read-only, shared by all groups that need one

    def __cinit__(self):
        self.singles = []

    def __dealloc__(self):
        give(self.pattern, self.pattern_room * sizeof(Pattern*))
        give(self.hash, self.hash_room * sizeof(uint64_t))
        give(self.hit, self.hit_room * sizeof(Hit))
        give(self.candidate, self.candidates * sizeof(Conjunction*))
        give(self.unit, self.unit_room * sizeof(Unit))
        give(self.link, self.link_room * sizeof(Link))
        give(self.selector_stamp, self.selector_room * sizeof(uint64_t))
        give(self.target_stamp, self.target_room * sizeof(uint64_t))

    cdef list match(self, Index index, bytes frame, bytes extents):
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(frame)
        cdef uint64_t size = PyBytes_GET_SIZE(frame)
        cdef const uint8_t* offsets = <const uint8_t*>PyBytes_AS_STRING(extents)
        cdef uint32_t count, start, rows, at
        if size < 48:
            raise BugError("a batch is shorter than its header")
        memcpy(&count, data + 8, 4)
        if 48 + 48 * <uint64_t>count > size or <uint64_t>PyBytes_GET_SIZE(extents) < 4 * (<uint64_t>count + 1):
            raise BugError("a batch is shorter than its event headers")
        if index.conjunctions == 0 or count == 0:
            return []
        index.batch += 1
        self.units = self.links = 0
        self.seen_count = 0
        start = 0
        while start < count:
            # Step by step for many rows at once: while one row's memory is on its way, the others work.
            rows = min(index.rows, count - start)
            for at in range(rows):
                self.prepare(index, at, start + at, data, size, offsets)
            self.find(index, rows)
            self.open_all(index, rows)
            self.verify_all(index, rows)
            self.settle(index)
            start += rows
        return self.groups(index) if self.units else []

    cdef int prepare(
        self, Index index, uint32_t at, uint32_t number, const uint8_t* data, uint64_t size, const uint8_t* offsets
    ) except -1:
        """One row: what its topic matches, its values, the keys to look for."""
        cdef const uint8_t* header = data + 48 + 48 * <uint64_t>number
        cdef Row* row = &self.row[at]
        cdef uint32_t begin, end
        cdef uint64_t topic, mask = 0
        cdef uint16_t topic_length, attributes_length, attributes
        cdef Memo* memo
        memcpy(&begin, offsets + 4 * <uint64_t>number, 4)
        memcpy(&end, offsets + 4 * <uint64_t>number + 4, 4)
        memcpy(&topic, header + 24, 8)
        memcpy(&topic_length, header + 32, 2)
        memcpy(&attributes_length, header + 34, 2)
        memcpy(&attributes, header + 42, 2)
        if end > size or <uint64_t>begin + topic_length + attributes_length > end:
            raise BugError("an event reaches outside its batch")
        index.stamp += 1
        row.stamp = index.stamp
        row.number = number
        row.begin = begin + topic_length
        row.attributes = attributes
        row.values = index.values + <size_t>at * index.slot_count if index.slot_count else NULL
        row.patterns = self.row[at - 1].patterns if at else 0
        row.hashes = self.row[at - 1].hashes if at else 0
        memo = index.topics.lookup(topic, data + begin, topic_length)
        if memo.patterns == 0:
            return 0
        # The memo may be gone when the next row's topic is looked up; the patterns stay.
        if row.patterns + memo.patterns > self.pattern_room:
            self.pattern = <Pattern**>resize(
                self.pattern,
                self.pattern_room * sizeof(Pattern*),
                2 * (row.patterns + memo.patterns) * sizeof(Pattern*),
            )
            self.pattern_room = 2 * (row.patterns + memo.patterns)
        memcpy(&self.pattern[row.patterns], patterns_of(memo), memo.patterns * sizeof(Pattern*))
        row.patterns += memo.patterns
        if attributes and index.slot_count:
            mask = self.read(index, row, data + row.begin, attributes_length)
        return self.hash_row(index, row, row.patterns - memo.patterns, mask)

    # ------------------------------------------------------------ a row's values

    cdef uint64_t read(self, Index index, Row* row, const uint8_t* at, uint32_t length) except? 0:
        """Puts the values that some selector asks about into their slots; bit per slot below 64."""
        cdef const uint8_t* end = at + length
        cdef uint64_t mask = 0
        cdef uint32_t place, name_length, size
        cdef int32_t slot
        cdef uint8_t type
        cdef Value* value
        for place in range(row.attributes):
            if at == end or end - at < 2 + at[0]:
                raise BugError("an attribute reaches outside its event")
            name_length = at[0]
            type = at[1 + name_length]
            slot = self.slot(index, place, at + 1, name_length)
            at += 2 + name_length
            size = value_size(type, at, end)
            if size == 0:
                raise BugError("an attribute's value reaches outside its event")
            if slot >= 0:
                value = &row.values[slot]
                take_value(value, type, at, size)
                value.stamp = row.stamp
                if slot < 64:
                    mask |= <uint64_t>1 << slot
            at += size
        return mask

    cdef inline int32_t slot(self, Index index, uint32_t place, const uint8_t* name, uint32_t length) noexcept:
        """The slot of a name or -1. Rows of a batch tend to have the same names in the same places."""
        cdef Seen* seen
        cdef Name* known
        if place < self.seen_count:
            seen = &self.seen[place]
            if seen.length == length and memcmp(seen.name, name, length) == 0:
                return seen.slot
        known = index.find_name(name, length)
        if place < MAX_SEEN:
            seen = &self.seen[place]
            seen.name = name
            seen.length = length
            seen.slot = -1 if known == NULL else <int32_t>known.slot
            if self.seen_count == place:
                self.seen_count += 1
        return -1 if known == NULL else <int32_t>known.slot

    # ------------------------------------------------------------ candidates

    cdef int hash_row(self, Index index, Row* row, uint32_t first, uint64_t mask) except -1:
        cdef uint32_t one, use
        cdef uint64_t wider
        cdef Pattern* pattern
        cdef Signature* signature
        for one in range(first, row.patterns):
            pattern = self.pattern[one]
            if <uint64_t>row.hashes + pattern.used > self.hash_room:
                wider = 2 * (<uint64_t>row.hashes + pattern.used)
                self.hash = <uint64_t*>resize(
                    self.hash, self.hash_room * sizeof(uint64_t), wider * sizeof(uint64_t)
                )
                self.hash_room = wider
            for use in range(pattern.used):
                signature = &index.signature[pattern.uses[use].signature]
                if signature.mask & ~mask == 0 and key_of(
                    &self.hash[row.hashes], pattern.uses[use].base, signature, row.values, row.stamp
                ):
                    POSTROAD_PREFETCH(&index.keys.cell[self.hash[row.hashes] & index.keys.mask])
                    row.hashes += 1
        return 0

    cdef void find(self, Index index, uint32_t rows) noexcept:
        """Puts the items of the keys that are there in the place of the hashes."""
        cdef uint32_t at, place, start = 0, end, present = 0
        cdef Cell* cell
        for at in range(rows):
            end = self.row[at].hashes
            for place in range(start, end):
                cell = table_find(&index.keys, self.hash[place])
                if cell.item != NULL:
                    POSTROAD_PREFETCH(as_bucket(cell.item))
                    POSTROAD_PREFETCH(<char*>as_bucket(cell.item) + 64)
                    if is_handful(cell.item):
                        POSTROAD_PREFETCH(<char*>as_bucket(cell.item) + 128)
                        POSTROAD_PREFETCH(<char*>as_bucket(cell.item) + 192)
                    self.hash[present] = <uint64_t><uintptr_t>cell.item
                    present += 1
            start = end
            self.row[at].hashes = present

    cdef int open_all(self, Index index, uint32_t rows) except -1:
        cdef uint32_t at, place, start = 0
        cdef uint64_t found = 0
        cdef Row* row
        for at in range(rows):
            row = &self.row[at]
            for place in range(start, row.hashes):
                found = self.open(<void*><uintptr_t>self.hash[place], row.values, row.stamp, found)
            start = row.hashes
            row.candidates = <uint32_t>found
        return 0

    cdef inline int64_t open(self, void* item, Value* values, uint64_t stamp, uint64_t found) except -1:
        """Adds the conjunctions of one key."""
        cdef Handful* handful
        cdef Loose* entry
        cdef uint32_t at
        if is_bucket(item):
            return self.scan(as_bucket(item), values, stamp, found)
        if found + SMALL > self.candidates:
            self.widen(found + SMALL)
        if not is_handful(item):
            self.candidate[found] = <Conjunction*>item
            return found + 1
        handful = as_handful(item)
        for at in range(handful.used):
            entry = &handful.entry[at]
            if entry.slot == NO_LANE or within(&values[entry.slot], stamp, entry.low, entry.high):
                self.candidate[found] = entry.conjunction
                POSTROAD_PREFETCH(entry.conjunction)
                POSTROAD_PREFETCH(<char*>entry.conjunction + 64)
                found += 1
        return found

    cdef int widen(self, uint64_t need) except -1:
        self.candidate = <Conjunction**>resize(
            self.candidate, self.candidates * sizeof(Conjunction*), 2 * need * sizeof(Conjunction*)
        )
        self.candidates = 2 * need
        return 0

    cdef int64_t scan(self, Bucket* bucket, Value* values, uint64_t stamp, uint64_t found) except -1:
        """Adds the conjunctions of a bucket in whose range the row's value lies."""
        cdef uint32_t at, place, inside, end
        cdef Lane* lane
        cdef Value* value
        cdef Block* block
        cdef double x = 0
        for at in range(bucket.lanes):
            lane = &bucket.lane[at]
            end = lane.used
            if lane.slot != NO_LANE:
                value = &values[lane.slot]
                if value.stamp != stamp or (value.type != INTEGER and value.type != FLOAT):
                    continue
                x = as_double(value)
                end = lane_end_at(lane, x)
            for place in range(end):
                if lane.slot != NO_LANE and lane.head[place].high < x:
                    continue
                block = lane.head[place].block
                if found + block.used > self.candidates:
                    self.widen(found + block.used)
                for inside in range(block.used):
                    if lane.slot == NO_LANE or (block.entry[inside].low <= x <= block.entry[inside].high):
                        self.candidate[found] = block.entry[inside].conjunction
                        POSTROAD_PREFETCH(self.candidate[found])
                        found += 1
        return found

    # ------------------------------------------------------------ matches

    cdef int verify_all(self, Index index, uint32_t rows) except -1:
        cdef uint32_t at, place, start = 0, patterns = 0, one, left
        cdef uint64_t hits
        cdef Row* row
        cdef Conjunction* conjunction
        self.hits = 0
        for at in range(rows):
            row = &self.row[at]
            hits = self.hits
            left = 0
            for one in range(patterns, row.patterns):
                self.pattern[one].stamp = row.stamp
            for place in range(start, row.candidates):
                conjunction = self.candidate[place]
                if conjunction.pattern.stamp != row.stamp or not verify(conjunction, row.values, row.stamp):
                    continue
                if conjunction.programs:
                    self.candidate[start + left] = conjunction
                    left += 1
                    continue
                self.add_hit(conjunction.selector, row.number)
                POSTROAD_PREFETCH(&index.selection[conjunction.selector])
                POSTROAD_PREFETCH(<char*>&index.selection[conjunction.selector + 1] - 1)
            if left:
                self.ask(index, row, &self.candidate[start], left, hits)
            start = row.candidates
            patterns = row.patterns
        return 0

    # ------------------------------------------------------------ programs

    cdef int ask(self, Index index, Row* row, Conjunction** left, uint32_t count, uint64_t hits) except -1:
        """Runs what is left to ask about a row, the cheapest first, unless nobody needs the answer any more."""
        cdef uint32_t at
        cdef uint64_t bands = 0
        cdef int band
        self.make_room(index)
        while hits < self.hits:
            self.mark(index, self.hit[hits].selector, row.stamp)
            hits += 1
        for at in range(count):
            bands |= <uint64_t>1 << left[at].band
        for band in range(MAX_BAND + 1):
            if not bands >> band & 1:
                continue
            for at in range(count):
                if left[at].band != band or self.is_settled(index, left[at].selector, row.stamp):
                    continue
                if self.holds(index, left[at], row):
                    self.add_hit(left[at].selector, row.number)
                    self.mark(index, left[at].selector, row.stamp)
        return 0

    cdef bint holds(self, Index index, Conjunction* conjunction, Row* row) noexcept:
        """Whether all programs of a conjunction are true of a row. Each is run once, whoever shares it."""
        cdef uint32_t at
        cdef Program* program
        for at in range(conjunction.programs):
            program = &index.program[programs_of(conjunction)[at]]
            if program.stamp != row.stamp:
                program.stamp = row.stamp
                index.programs_run += 1
                program.matched = run(program, row.values, row.stamp, self.stack)
            if not program.matched:
                return False
        return True

    cdef int make_room(self, Index index) except -1:
        """Stamps are never 0, so that what is new has none."""
        if self.selector_room != index.selection_count:
            self.selector_stamp = <uint64_t*>resize(
                self.selector_stamp,
                self.selector_room * sizeof(uint64_t),
                index.selection_count * sizeof(uint64_t),
            )
            memset(self.selector_stamp, 0, index.selection_count * sizeof(uint64_t))
            self.selector_room = index.selection_count
        if self.target_room != index.target_count:
            self.target_stamp = <uint64_t*>resize(
                self.target_stamp, self.target_room * sizeof(uint64_t), index.target_count * sizeof(uint64_t)
            )
            memset(self.target_stamp, 0, index.target_count * sizeof(uint64_t))
            self.target_room = index.target_count
        return 0

    cdef inline void mark(self, Index index, uint32_t selector, uint64_t stamp) noexcept:
        """Notes that a row goes to the targets of a selector; to the first few, if there are many."""
        cdef Selection* selection = &index.selection[selector]
        cdef uint32_t at
        self.selector_stamp[selector] = stamp
        for at in range(min(selection.targets, MAX_MARKED)):
            self.target_stamp[targets_of(selection)[at]] = stamp

    cdef inline bint is_settled(self, Index index, uint32_t selector, uint64_t stamp) noexcept:
        """Whether it is known already that a row goes to all targets of a selector."""
        cdef Selection* selection = &index.selection[selector]
        cdef uint32_t at
        if self.selector_stamp[selector] == stamp:
            return True
        if selection.targets > MAX_MARKED:
            return False
        for at in range(selection.targets):
            if self.target_stamp[targets_of(selection)[at]] != stamp:
                return False
        return True

    cdef inline int add_hit(self, uint32_t selector, uint32_t row) except -1:
        cdef uint64_t wider
        if self.hits == self.hit_room:
            wider = 2 * self.hit_room if self.hit_room else 256
            self.hit = <Hit*>resize(self.hit, self.hit_room * sizeof(Hit), wider * sizeof(Hit))
            self.hit_room = wider
        self.hit[self.hits].selector = selector
        self.hit[self.hits].row = row
        self.hits += 1
        return 0

    cdef int settle(self, Index index) except -1:
        """Gives the rows to those who want them."""
        cdef uint64_t at
        cdef uint32_t place, row
        cdef uint32_t* held
        cdef Selection* selection
        cdef Target* target
        for at in range(self.hits):
            selection = &index.selection[self.hit[at].selector]
            if selection.targets == 1:
                POSTROAD_PREFETCH(&index.target[targets_of(selection)[0]])
                POSTROAD_PREFETCH(<char*>&index.target[targets_of(selection)[0] + 1] - 1)
        for at in range(self.hits):
            row = self.hit[at].row
            selection = &index.selection[self.hit[at].selector]
            if selection.targets >= FAN and selection.shared == 0:
                if selection.batch != index.batch:
                    selection.batch = index.batch
                    selection.unit = self.new_unit(self.hit[at].selector, True)
                self.note(selection.unit, row)
                continue
            held = targets_of(selection)
            for place in range(selection.targets):
                target = &index.target[held[place]]
                if target.batch != index.batch:
                    target.batch = index.batch
                    target.unit = self.new_unit(held[place], False)
                self.note(target.unit, row)
        return 0

    cdef uint32_t new_unit(self, uint32_t item, bint selector) except? 0xFFFFFFFF:
        cdef Unit* unit
        cdef uint64_t wider
        if self.units == self.unit_room:
            wider = 2 * self.unit_room if self.unit_room else 64
            self.unit = <Unit*>resize(self.unit, self.unit_room * sizeof(Unit), wider * sizeof(Unit))
            self.unit_room = wider
        unit = &self.unit[self.units]
        memset(unit, 0, sizeof(Unit))
        unit.item = item
        unit.selector = selector
        unit.row = 0xFFFFFFFF
        self.units += 1
        return <uint32_t>(self.units - 1)

    cdef inline int note(self, uint32_t number, uint32_t row) except -1:
        """Gives a unit one more row, if it does not have it from another selector."""
        cdef Unit* unit = &self.unit[number]
        cdef uint64_t wider
        if unit.row == row:
            return 0
        if self.links == self.link_room:
            wider = 2 * self.link_room if self.link_room else 256
            self.link = <Link*>resize(self.link, self.link_room * sizeof(Link), wider * sizeof(Link))
            self.link_room = wider
        self.link[self.links].row = row
        if unit.count:
            self.link[unit.last].next = <uint32_t>self.links
        else:
            unit.first = <uint32_t>self.links
        unit.last = <uint32_t>self.links
        self.links += 1
        unit.count += 1
        unit.row = row
        unit.hash = join(unit.hash, row + 1)
        return 0

    # ------------------------------------------------------------ groups

    cdef bint same_rows(self, Unit* first, Unit* second) noexcept:
        cdef uint32_t left = first.first, right = second.first, at
        if first.count != second.count:
            return False
        for at in range(first.count):
            if self.link[left].row != self.link[right].row:
                return False
            left = self.link[left].next
            right = self.link[right].next
        return True

    cdef list groups(self, Index index):
        """Units with the same rows joined, in order of their rows."""
        cdef uint64_t size = 2, at, cell, total = 0, count = 0
        cdef uint32_t* head
        cdef Found* found
        cdef uint32_t* rows
        cdef uint32_t place, link
        cdef Unit* unit
        while size < 2 * self.units:
            size *= 2
        head = <uint32_t*>take(size * sizeof(uint32_t))
        found = NULL
        rows = NULL
        try:
            memset(head, 0xFF, size * sizeof(uint32_t))
            found = <Found*>take(self.units * sizeof(Found))
            for at in range(self.units):
                unit = &self.unit[at]
                cell = mix(unit.hash) & (size - 1)
                while head[cell] != 0xFFFFFFFF and not self.same_rows(&self.unit[found[head[cell]].unit], unit):
                    cell = (cell + 1) & (size - 1)
                if head[cell] == 0xFFFFFFFF:
                    head[cell] = <uint32_t>count
                    unit.next = 0xFFFFFFFF
                    total += unit.count
                    count += 1
                else:
                    unit.next = found[head[cell]].unit
                found[head[cell]].unit = <uint32_t>at
            rows = <uint32_t*>take(total * sizeof(uint32_t))
            total = 0
            for at in range(count):
                unit = &self.unit[found[at].unit]
                found[at].row = rows + total
                found[at].count = unit.count
                link = unit.first
                for place in range(unit.count):
                    rows[total] = self.link[link].row
                    total += 1
                    link = self.link[link].next
            # Units come in the order of their first rows, so that mostly nothing is left to sort.
            at = 1
            while at < count and by_rows(&found[at - 1], &found[at]) < 0:
                at += 1
            if at < count:
                qsort(found, count, sizeof(Found), by_rows)
            return self.shown(index, found, count)
        finally:
            give(rows, total * sizeof(uint32_t))
            give(found, self.units * sizeof(Found))
            give(head, size * sizeof(uint32_t))

    cdef list shown(self, Index index, Found* found, uint64_t count):
        cdef list made = []
        cdef uint64_t at
        cdef object rows
        for at in range(count):
            if found[at].count == 1:
                rows = self.single(found[at].row[0])
            else:
                rows = from_buffer(
                    (<const char*>found[at].row)[: found[at].count * sizeof(uint32_t)], row_type
                )
            made.append(postroad_pair(group_type, rows, self.wanting(index, found[at].unit)))
        return made

    cdef object single(self, uint32_t row):
        if row >= MAX_SHOWN:
            return np.array([row], np.uint32)
        while <uint32_t>len(self.singles) <= row:
            rows = np.array([len(self.singles)], np.uint32)
            rows.flags.writeable = False
            self.singles.append(rows)
        return self.singles[row]

    cdef list wanting(self, Index index, uint32_t number):
        """The targets of all units of a group, ascending."""
        cdef Unit* unit = &self.unit[number]
        cdef list found = []
        if unit.next == 0xFFFFFFFF:
            if unit.selector:
                return list(index.listed(unit.item))
            found.append(index.target[unit.item].value)
            return found
        while True:
            if unit.selector:
                found += index.listed(unit.item)
            else:
                found.append(index.target[unit.item].value)
            if unit.next == 0xFFFFFFFF:
                break
            unit = &self.unit[unit.next]
        found.sort()
        return found


cdef int by_rows(const void* first, const void* second) noexcept nogil:
    cdef const Found* left = <const Found*>first
    cdef const Found* right = <const Found*>second
    cdef uint32_t at = 0
    while at < left.count and at < right.count:
        if left.row[at] != right.row[at]:
            return -1 if left.row[at] < right.row[at] else 1
        at += 1
    return (left.count > right.count) - (left.count < right.count)

cdef inline bint within(Value* value, uint64_t stamp, float low, float high) noexcept nogil:
    """Whether the row has a number there that may lie in a range, whose ends are rounded outwards."""
    if value.stamp != stamp or (value.type != INTEGER and value.type != FLOAT):
        return False
    return low <= as_double(value) <= high

cdef inline uint32_t lane_end_at(Lane* lane, double x) noexcept nogil:
    """How many blocks begin at or below x."""
    cdef uint32_t start = 0, end = lane.used, middle
    while start < end:
        middle = (start + end) // 2
        if lane.head[middle].low <= x:
            start = middle + 1
        else:
            end = middle
    return start

cdef inline bint key_of(
    uint64_t* out, uint64_t base, Signature* signature, Value* values, uint64_t stamp
) noexcept nogil:
    """The key under which a row finds the conjunctions of a signature; False if it lacks a part."""
    cdef uint32_t at
    cdef Value* value
    for at in range(signature.parts):
        value = &values[signature.part[at].slot]
        if value.stamp != stamp:
            return False
        if signature.part[at].prefix == 0:
            base = join(base, value.hash)
        elif value.type == TEXT and value.length >= signature.part[at].prefix:
            base = join(base, hash_bytes(value.text, signature.part[at].prefix))
        else:
            return False
    out[0] = mix(base)
    return True

cdef inline uint32_t value_size(uint8_t type, const uint8_t* at, const uint8_t* end) noexcept nogil:
    """Bytes that a value takes; 0 if it would reach beyond the end or has no known type."""
    cdef uint64_t room = end - at
    cdef uint16_t length
    if type == BOOLEAN:
        return 1 if room >= 1 else 0
    if type == INTEGER or type == FLOAT:
        return 8 if room >= 8 else 0
    if type != TEXT or room < 2:
        return 0
    memcpy(&length, at, 2)
    return 2 + length if room >= 2 + <uint64_t>length else 0

cdef inline void take_value(Value* value, uint8_t type, const uint8_t* at, uint32_t size) noexcept nogil:
    value.type = type
    if type == TEXT:
        value.text = at + 2
        value.length = size - 2
        value.hash = hash_bytes(value.text, value.length)
    elif type == BOOLEAN:
        value.n.i = at[0] != 0
        value.hash = hash_boolean(at[0] != 0)
    else:
        memcpy(&value.n, at, 8)
        value.hash = hash_number(value.n, type == FLOAT)
