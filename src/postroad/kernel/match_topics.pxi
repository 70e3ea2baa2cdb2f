# Patterns: which of them a topic matches. Exact ones are found by hash, wildcards by a walk of their tree.

cdef inline uint8_t* topic_of(Pattern* pattern) noexcept nogil:
    return <uint8_t*>(pattern + 1)

cdef inline Pattern** patterns_of(Memo* memo) noexcept nogil:
    return <Pattern**>(memo + 1)

cdef class Topics:
    """All patterns in use, and a memo of what each topic met lately matches."""

    cdef Table patterns  # hash of its text -> chain of Pattern
    cdef Table edges  # hash of parent and level -> chain of Node
    cdef Table memos  # topic number -> Memo; the newest of those that collide
    cdef Node* root
    cdef Pattern* anything
    cdef uint64_t numbers  # given to patterns and nodes so far
    cdef uint64_t count
    cdef uint64_t wildcards
    cdef Pattern** matched  # room for what one topic matches
    cdef uint64_t capacity

    def __cinit__(self):
        table_start(&self.patterns)
        table_start(&self.edges)
        table_start(&self.memos)
        self.root = <Node*>take(sizeof(Node))
        memset(self.root, 0, sizeof(Node))

    def __dealloc__(self):
        cdef uint64_t at
        cdef Pattern* pattern
        cdef Pattern* following
        cdef Node* node
        cdef Node* later
        if self.memos.cell != NULL:
            self.forget()
        if self.patterns.cell != NULL:
            for at in range(self.patterns.mask + 1):
                pattern = <Pattern*>self.patterns.cell[at].item
                while pattern != NULL:
                    following = pattern.next
                    self.free_pattern(pattern)
                    pattern = following
        if self.anything != NULL:
            self.free_pattern(self.anything)
        if self.edges.cell != NULL:
            for at in range(self.edges.mask + 1):
                node = <Node*>self.edges.cell[at].item
                while node != NULL:
                    later = node.next
                    give(node, sizeof(Node) + node.length)
                    node = later
        give(self.root, sizeof(Node))
        give(self.matched, self.capacity * sizeof(Pattern*))
        table_end(&self.patterns)
        table_end(&self.edges)
        table_end(&self.memos)

    cdef void free_pattern(self, Pattern* pattern) noexcept:
        give(pattern.uses, pattern.capacity * sizeof(Use))
        give(pattern, sizeof(Pattern) + pattern.length)

    cdef Pattern* acquire(self, bytes topic) except NULL:
        """The pattern of this text (b"" any), made when it is new; its `users` is for the caller to raise."""
        cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(topic)
        cdef uint32_t length = <uint32_t>PyBytes_GET_SIZE(topic)
        cdef uint64_t hash = fnv(text, length)
        cdef Cell* cell = table_find(&self.patterns, hash)
        cdef Pattern* pattern = <Pattern*>cell.item if length else self.anything
        while pattern != NULL and (pattern.length != length or memcmp(topic_of(pattern), text, length)):
            pattern = pattern.next
        if pattern != NULL:
            return pattern
        pattern = <Pattern*>take(sizeof(Pattern) + length)
        memset(pattern, 0, sizeof(Pattern))
        self.numbers += 1
        pattern.number = self.numbers
        pattern.hash = hash
        pattern.length = length
        memcpy(topic_of(pattern), text, length)
        pattern.wildcard = length == 0 or memchr(text, c'+', length) != NULL or memchr(text, c'#', length) != NULL
        if length == 0:
            self.anything = pattern
        else:
            pattern.next = <Pattern*>cell.item
            table_set(&self.patterns, hash, pattern)
            if pattern.wildcard:
                self.plant(pattern)
        self.count += 1
        self.wildcards += pattern.wildcard
        self.changed(pattern)
        return pattern

    cdef int release(self, Pattern* pattern) except -1:
        """Takes out a pattern without users."""
        cdef Pattern* before
        self.changed(pattern)
        self.count -= 1
        self.wildcards -= pattern.wildcard
        if pattern == self.anything:
            self.anything = NULL
        else:
            if pattern.wildcard:
                self.uproot(pattern)
            before = <Pattern*>table_find(&self.patterns, pattern.hash).item
            if before != pattern:
                while before.next != pattern:
                    before = before.next
                before.next = pattern.next
            elif pattern.next != NULL:
                table_set(&self.patterns, pattern.hash, pattern.next)
            else:
                table_drop(&self.patterns, pattern.hash)
        self.free_pattern(pattern)
        return 0

    cdef int changed(self, Pattern* pattern) except -1:
        """Forgets the topics whose memo the coming or going of a pattern makes wrong."""
        cdef Memo* memo
        if pattern.wildcard:
            self.forget()
            return 0
        memo = <Memo*>table_find(&self.memos, pattern.hash).item
        if memo != NULL:
            table_drop(&self.memos, pattern.hash)
            give(memo, memo.size)
        return 0

    cdef void forget(self) noexcept:
        cdef uint64_t at
        cdef Memo* memo
        if self.memos.used == 0:
            return
        for at in range(self.memos.mask + 1):
            memo = <Memo*>self.memos.cell[at].item
            if memo != NULL:
                give(memo, memo.size)
                self.memos.cell[at].item = NULL
        self.memos.used = 0

    # ------------------------------------------------------------ the tree of wildcard patterns

    cdef Node* child(self, Node* parent, const uint8_t* level, size_t length) noexcept:
        cdef Node* node = <Node*>table_find(&self.edges, join(hash_bytes(level, length), parent.number)).item
        while node != NULL and (
            node.parent != parent or node.length != length or memcmp(<uint8_t*>(node + 1), level, length)
        ):
            node = node.next
        return node

    cdef Node* grow(self, Node* parent, const uint8_t* level, size_t length) except NULL:
        cdef Node* node = self.child(parent, level, length)
        if node != NULL:
            return node
        node = <Node*>take(sizeof(Node) + length)
        memset(node, 0, sizeof(Node))
        self.numbers += 1
        node.number = self.numbers
        node.parent = parent
        node.length = <uint32_t>length
        node.hash = join(hash_bytes(level, length), parent.number)
        memcpy(<uint8_t*>(node + 1), level, length)
        node.next = <Node*>table_find(&self.edges, node.hash).item
        table_set(&self.edges, node.hash, node)
        parent.children += 1
        if length == 1 and level[0] == c'+':
            parent.plus = node
        return node

    cdef Node* descend(self, Pattern* pattern, bint grow, bint* rest) except NULL:
        """The node at which a wildcard pattern ends, and whether it ends in "#"."""
        cdef const uint8_t* at = topic_of(pattern)
        cdef const uint8_t* end = at + pattern.length
        cdef const uint8_t* stop
        cdef Node* node = self.root
        rest[0] = False
        while True:
            stop = <const uint8_t*>memchr(at, c'/', end - at)
            if stop == NULL:
                stop = end
            if stop == end and end - at == 1 and at[0] == c'#':
                rest[0] = True
                return node
            node = self.grow(node, at, stop - at) if grow else self.child(node, at, stop - at)
            if node == NULL:
                raise BugError("a pattern is not in its tree")
            if stop == end:
                return node
            at = stop + 1

    cdef int plant(self, Pattern* pattern) except -1:
        cdef bint rest
        cdef Node* node = self.descend(pattern, True, &rest)
        if rest:
            node.rest = pattern
        else:
            node.here = pattern
        return 0

    cdef int uproot(self, Pattern* pattern) except -1:
        cdef bint rest
        cdef Node* node = self.descend(pattern, False, &rest)
        cdef Node* parent
        cdef Node* before
        if rest:
            node.rest = NULL
        else:
            node.here = NULL
        while node != self.root and node.children == 0 and node.here == NULL and node.rest == NULL:
            parent = node.parent
            before = <Node*>table_find(&self.edges, node.hash).item
            if before != node:
                while before.next != node:
                    before = before.next
                before.next = node.next
            elif node.next != NULL:
                table_set(&self.edges, node.hash, node.next)
            else:
                table_drop(&self.edges, node.hash)
            if parent.plus == node:
                parent.plus = NULL
            parent.children -= 1
            give(node, sizeof(Node) + node.length)
            node = parent
        return 0

    cdef uint32_t walk(
        self, Node* node, const uint8_t* at, const uint8_t* end, bint hidden, uint32_t found
    ) noexcept:
        """Adds what matches the rest of a topic below `node`; `hidden` if wildcards do not count here."""
        cdef const uint8_t* stop
        cdef Node* next_node
        if node.rest != NULL and not hidden:
            self.matched[found] = node.rest
            found += 1
        if at > end:
            if node.here != NULL:
                self.matched[found] = node.here
                found += 1
            return found
        if node.children == 0:
            return found
        stop = <const uint8_t*>memchr(at, c'/', end - at) if end > at else NULL
        if stop == NULL:
            stop = end
        next_node = self.child(node, at, stop - at)
        if next_node != NULL:
            found = self.walk(next_node, stop + 1, end, False, found)
        if node.plus != NULL and not hidden:
            found = self.walk(node.plus, stop + 1, end, False, found)
        return found

    cdef Memo* lookup(self, uint64_t number, const uint8_t* topic, uint32_t length) except NULL:
        """What this topic matches, remembered or worked out."""
        cdef Memo* memo = <Memo*>table_find(&self.memos, number).item
        cdef Pattern* pattern
        cdef uint32_t found = 0
        cdef size_t size
        if memo != NULL and memo.length == length and (
            memcmp(<uint8_t*>(patterns_of(memo) + memo.patterns), topic, length) == 0
        ):
            return memo
        if self.wildcards + 1 > self.capacity:
            size = 2 * self.wildcards + 8
            self.matched = <Pattern**>resize(
                self.matched, self.capacity * sizeof(Pattern*), size * sizeof(Pattern*)
            )
            self.capacity = size
        pattern = <Pattern*>table_find(&self.patterns, number).item
        while pattern != NULL and not found:
            if pattern.length == length and memcmp(topic_of(pattern), topic, length) == 0:
                self.matched[0] = pattern
                found = 1
            pattern = pattern.next
        if self.root.children or self.root.rest != NULL:
            found = self.walk(self.root, topic, topic + length, length and topic[0] == c'$', found)
        if self.anything != NULL:
            self.matched[found] = self.anything
            found += 1
        if self.memos.used >= MAX_MEMOS:
            self.forget()
        if memo != NULL:
            memo = <Memo*>table_find(&self.memos, number).item
            if memo != NULL:
                table_drop(&self.memos, number)
                give(memo, memo.size)
        size = sizeof(Memo) + found * sizeof(Pattern*) + length
        memo = <Memo*>take(size)
        memo.size = size
        memo.patterns = found
        memo.length = length
        memcpy(patterns_of(memo), self.matched, found * sizeof(Pattern*))
        memcpy(<uint8_t*>(patterns_of(memo) + found), topic, length)
        table_set(&self.memos, number, memo)
        return memo
