# Memory, hashing, the one kind of hash table, and buckets.

cdef enum:
    HUGE_PAGE = 1 << 21  # bytes of a huge page
    PIECE = 16  # sizes of pieces are multiples of this
    MAX_PIECE = 512
    PIECE_SIZES = 33  # MAX_PIECE / PIECE and none

cdef size_t allocated = 0  # bytes in use by all indexes of the process

# A million subscriptions take some hundred MB, which a batch reads here and there. With pages of 4 KiB nearly
# every such look waits for a page walk first, prefetched or not; with huge pages few do. So arrays that fill a
# huge page have their own, and all small things are pieces of chunks of one huge page, none of which goes back
# before the last piece. A piece given back is the next one taken of its size.
cdef struct Chunk:
    Chunk* next

cdef struct Free:
    Free* next

cdef Chunk* chunks = NULL
cdef uint8_t* chunk_at = NULL  # the rest of the newest chunk
cdef uint8_t* chunk_end = NULL
cdef Free* free_pieces[PIECE_SIZES]  # by size
cdef size_t pieces = 0  # in use

cdef inline size_t piece_size(size_t size) noexcept:
    return (size + PIECE - 1) & ~<size_t>(PIECE - 1) if size else PIECE

cdef void* piece_take(size_t size) noexcept:
    global chunks, chunk_at, chunk_end, pieces
    cdef Free* found = free_pieces[size // PIECE]
    cdef Chunk* chunk
    if found != NULL:
        free_pieces[size // PIECE] = found.next
    else:
        if <size_t>(chunk_end - chunk_at) < size:
            # The first one is not a huge page: most indexes are small.
            chunk = <Chunk*>postroad_chunk(HUGE_PAGE, chunks != NULL)
            if chunk == NULL:
                return NULL
            chunk.next = chunks
            chunks = chunk
            chunk_at = <uint8_t*>chunk + PIECE
            chunk_end = <uint8_t*>chunk + HUGE_PAGE
        found = <Free*>chunk_at
        chunk_at += size
    pieces += 1
    return found

cdef void piece_give(void* old, size_t size) noexcept:
    global chunks, chunk_at, chunk_end, pieces
    cdef Free* piece = <Free*>old
    cdef Chunk* chunk
    piece.next = free_pieces[size // PIECE]
    free_pieces[size // PIECE] = piece
    pieces -= 1
    if pieces == 0:
        memset(free_pieces, 0, sizeof(free_pieces))
        while chunks != NULL:
            chunk = chunks
            chunks = chunk.next
            free(chunk)
        chunk_at = chunk_end = NULL

cdef void* take(size_t size) except NULL:
    global allocated
    cdef void* found
    if size >= HUGE_PAGE:
        found = postroad_chunk(size, True)
    elif size <= MAX_PIECE and POSTROAD_PIECES:
        found = piece_take(piece_size(size))
    else:
        found = malloc(size)
    if found == NULL:
        raise MemoryError
    allocated += size
    return found

cdef void* resize(void* old, size_t old_size, size_t size) except NULL:
    cdef void* found = take(size)
    if old != NULL:
        memcpy(found, old, old_size if old_size < size else size)
        give(old, old_size)
    return found

cdef void give(void* old, size_t size) noexcept:
    """Takes back what `take` gave for this very size."""
    global allocated
    if old == NULL:
        return
    if size <= MAX_PIECE and POSTROAD_PIECES:
        piece_give(old, piece_size(size))
    else:
        free(old)
    allocated -= size

cdef inline uint64_t mix(uint64_t value) noexcept nogil:
    value = (value ^ (value >> 32)) * <uint64_t>0xD6E8FEB86659FD93
    value = (value ^ (value >> 32)) * <uint64_t>0xD6E8FEB86659FD93
    return value ^ (value >> 32)

cdef inline uint64_t join(uint64_t first, uint64_t second) noexcept nogil:
    first = (first ^ second) * <uint64_t>0x9E3779B97F4A7C15
    return first ^ (first >> 29)

cdef inline uint64_t hash_bytes(const uint8_t* data, size_t length) noexcept nogil:
    cdef uint64_t found = <uint64_t>0x51ED270B1F0D4C5B ^ length
    cdef uint64_t word
    while length >= 8:
        memcpy(&word, data, 8)
        found = join(found, word)
        data += 8
        length -= 8
    if length:
        word = 0
        memcpy(&word, data, length)
        found = join(found, word)
    return mix(found)

cdef uint64_t fnv(const uint8_t* data, size_t length) noexcept nogil:
    cdef uint64_t found = <uint64_t>0xCBF29CE484222325
    cdef size_t at
    for at in range(length):
        found = (found ^ data[at]) * <uint64_t>0x100000001B3
    return found

# ---------------------------------------------------------------- tables: hash -> item, linear probing

cdef int table_start(Table* table) except -1:
    table.cell = <Cell*>take(8 * sizeof(Cell))
    memset(table.cell, 0, 8 * sizeof(Cell))
    table.mask = 7
    table.used = 0
    return 0

cdef void table_end(Table* table) noexcept:
    if table.cell != NULL:
        give(table.cell, (table.mask + 1) * sizeof(Cell))
    table.cell = NULL

cdef inline Cell* table_find(Table* table, uint64_t hash) noexcept nogil:
    """The cell of this hash, or the empty one where it would be."""
    cdef uint64_t at = hash & table.mask
    while table.cell[at].item != NULL and table.cell[at].hash != hash:
        at = (at + 1) & table.mask
    return &table.cell[at]

cdef int table_resize(Table* table, uint64_t size) except -1:
    cdef Cell* old = table.cell
    cdef uint64_t count = table.mask + 1, at
    cdef Cell* new = <Cell*>take(size * sizeof(Cell))
    memset(new, 0, size * sizeof(Cell))
    table.cell = new
    table.mask = size - 1
    for at in range(count):
        if old[at].item != NULL:
            table_find(table, old[at].hash)[0] = old[at]
    give(old, count * sizeof(Cell))
    return 0

cdef int table_set(Table* table, uint64_t hash, void* item) except -1:
    """Puts an item under a hash that may be there or not."""
    cdef Cell* cell = table_find(table, hash)
    if cell.item == NULL:
        if (table.used + 1) * 2 > table.mask + 1:
            table_resize(table, 2 * (table.mask + 1))
            cell = table_find(table, hash)
        table.used += 1
        cell.hash = hash
    cell.item = item
    return 0

cdef int table_drop(Table* table, uint64_t hash) except -1:
    """Takes a hash out and closes the gap that it leaves; a table mostly empty shrinks."""
    cdef uint64_t gap = table_find(table, hash) - table.cell
    cdef uint64_t at = gap, home
    if table.cell[gap].item == NULL:
        raise BugError("a hash is not in its table")
    while True:
        at = (at + 1) & table.mask
        if table.cell[at].item == NULL:
            break
        home = table.cell[at].hash & table.mask
        if ((at - home) & table.mask) >= ((at - gap) & table.mask):
            table.cell[gap] = table.cell[at]
            gap = at
    table.cell[gap].item = NULL
    table.used -= 1
    if table.mask > 7 and table.used * 8 < table.mask:
        table_resize(table, (table.mask + 1) // 2)
    return 0

# ---------------------------------------------------------------- lanes: entries sorted by (low, address)

cdef inline size_t block_size(uint32_t capacity) noexcept nogil:
    return sizeof(Block) + (capacity - 1) * sizeof(Entry)

cdef inline bint is_before(Entry* first, float low, Conjunction* conjunction) noexcept nogil:
    if first.low != low:
        return first.low < low
    return <uintptr_t>first.conjunction < <uintptr_t>conjunction

cdef void head_set(Head* head) noexcept nogil:
    cdef uint32_t at
    head.low = head.block.entry[0].low
    head.high = head.block.entry[0].high
    for at in range(1, head.block.used):
        if head.block.entry[at].high > head.high:
            head.high = head.block.entry[at].high

cdef uint32_t lane_at(Lane* lane, float low, Conjunction* conjunction) noexcept nogil:
    """The block in which this entry is or belongs: the last one that does not begin after it."""
    cdef uint32_t start = 0, end = lane.used, middle
    while end - start > 1:
        middle = (start + end) // 2
        if is_before(&lane.head[middle].block.entry[0], low, conjunction) or (
            lane.head[middle].block.entry[0].conjunction == conjunction
        ):
            start = middle
        else:
            end = middle
    return start

cdef uint32_t block_at(Block* block, float low, Conjunction* conjunction) noexcept nogil:
    cdef uint32_t start = 0, end = block.used, middle
    while start < end:
        middle = (start + end) // 2
        if is_before(&block.entry[middle], low, conjunction):
            start = middle + 1
        else:
            end = middle
    return start

cdef int lane_open(Lane* lane, uint32_t at, uint32_t capacity) except -1:
    """Makes an empty block before the block at `at`."""
    cdef uint32_t wider = 2 * lane.capacity if lane.capacity else 1
    if lane.used == lane.capacity:
        lane.head = <Head*>resize(lane.head, lane.capacity * sizeof(Head), wider * sizeof(Head))
        lane.capacity = wider
    cdef Block* block = <Block*>take(block_size(capacity))
    block.used = 0
    block.capacity = capacity
    memmove(&lane.head[at + 1], &lane.head[at], (lane.used - at) * sizeof(Head))
    lane.head[at].block = block
    lane.used += 1
    return 0

cdef int lane_add(Lane* lane, Conjunction* conjunction) except -1:
    cdef float low = conjunction.low
    cdef uint32_t at, inside, capacity
    cdef Block* block
    if lane.used == 0:
        lane_open(lane, 0, 2)
    at = lane_at(lane, low, conjunction)
    block = lane.head[at].block
    if block.used == BLOCK:
        lane_open(lane, at + 1, BLOCK)
        memcpy(&lane.head[at + 1].block.entry[0], &block.entry[BLOCK // 2], (BLOCK // 2) * sizeof(Entry))
        lane.head[at + 1].block.used = BLOCK // 2
        block.used = BLOCK // 2
        head_set(&lane.head[at])
        head_set(&lane.head[at + 1])
        at = lane_at(lane, low, conjunction)
        block = lane.head[at].block
    elif block.used == block.capacity:
        capacity = 2 * block.capacity
        block = <Block*>resize(block, block_size(block.capacity), block_size(capacity))
        block.capacity = capacity
        lane.head[at].block = block
    inside = block_at(block, low, conjunction)
    memmove(&block.entry[inside + 1], &block.entry[inside], (block.used - inside) * sizeof(Entry))
    block.entry[inside].low = low
    block.entry[inside].high = conjunction.high
    block.entry[inside].conjunction = conjunction
    block.used += 1
    head_set(&lane.head[at])
    return 0

cdef int lane_remove(Lane* lane, Conjunction* conjunction) except -1:
    cdef uint32_t at = lane_at(lane, conjunction.low, conjunction)
    cdef Block* block = lane.head[at].block
    cdef uint32_t inside = block_at(block, conjunction.low, conjunction)
    if inside == block.used or block.entry[inside].conjunction != conjunction:
        raise BugError("a conjunction is not in its lane")
    block.used -= 1
    memmove(&block.entry[inside], &block.entry[inside + 1], (block.used - inside) * sizeof(Entry))
    if block.used:
        head_set(&lane.head[at])
        return 0
    give(block, block_size(block.capacity))
    lane.used -= 1
    memmove(&lane.head[at], &lane.head[at + 1], (lane.used - at) * sizeof(Head))
    return 0

cdef void lane_end(Lane* lane) noexcept:
    cdef uint32_t at
    for at in range(lane.used):
        give(lane.head[at].block, block_size(lane.head[at].block.capacity))
    give(lane.head, lane.capacity * sizeof(Head))

cdef int bucket_add(Bucket* bucket, Conjunction* conjunction) except -1:
    cdef uint32_t at = 0
    while at < bucket.lanes and bucket.lane[at].slot != conjunction.lane:
        at += 1
    if at == bucket.lanes:
        bucket.lane = <Lane*>resize(bucket.lane, at * sizeof(Lane), (at + 1) * sizeof(Lane))
        memset(&bucket.lane[at], 0, sizeof(Lane))
        bucket.lane[at].slot = conjunction.lane
        bucket.lanes += 1
    lane_add(&bucket.lane[at], conjunction)
    bucket.count += 1
    return 0

cdef int bucket_remove(Bucket* bucket, Conjunction* conjunction) except -1:
    cdef uint32_t at = 0
    while at < bucket.lanes and bucket.lane[at].slot != conjunction.lane:
        at += 1
    if at == bucket.lanes:
        raise BugError("a conjunction's lane is missing")
    lane_remove(&bucket.lane[at], conjunction)
    bucket.count -= 1
    if bucket.lane[at].used:
        return 0
    lane_end(&bucket.lane[at])
    bucket.lanes -= 1
    bucket.lane[at] = bucket.lane[bucket.lanes]
    if bucket.lanes:
        bucket.lane = <Lane*>resize(bucket.lane, (bucket.lanes + 1) * sizeof(Lane), bucket.lanes * sizeof(Lane))
    else:
        give(bucket.lane, sizeof(Lane))
        bucket.lane = NULL
    return 0

cdef void bucket_end(Bucket* bucket) noexcept:
    cdef uint32_t at
    for at in range(bucket.lanes):
        lane_end(&bucket.lane[at])
    give(bucket.lane, bucket.lanes * sizeof(Lane))
    give(bucket, sizeof(Bucket))

# ---------------------------------------------------------------- items of the key table

# Most keys have one conjunction, which then is the item itself. A few are a handful, many a bucket; the
# lowest bits of the address tell.

cdef inline bint is_bucket(void* item) noexcept nogil:
    return <uintptr_t>item & 1

cdef inline bint is_handful(void* item) noexcept nogil:
    return (<uintptr_t>item & 2) != 0

cdef inline Bucket* as_bucket(void* item) noexcept nogil:
    return <Bucket*>(<uintptr_t>item & ~<uintptr_t>3)

cdef inline Handful* as_handful(void* item) noexcept nogil:
    return <Handful*>(<uintptr_t>item & ~<uintptr_t>3)

cdef inline size_t handful_size(uint32_t capacity) noexcept nogil:
    return sizeof(Handful) + (capacity - 1) * sizeof(Loose)

cdef inline void loose_set(Loose* entry, Conjunction* conjunction) noexcept nogil:
    entry.low = conjunction.low
    entry.high = conjunction.high
    entry.slot = conjunction.lane
    entry.conjunction = conjunction

cdef void* handful_add(Handful* handful, Conjunction* conjunction) except NULL:
    """The item to put in the handful's place: itself, moved, or a bucket when it is full."""
    cdef Bucket* bucket
    cdef uint32_t at, capacity
    if handful.used == SMALL:
        bucket = <Bucket*>take(sizeof(Bucket))
        memset(bucket, 0, sizeof(Bucket))
        for at in range(SMALL):
            bucket_add(bucket, handful.entry[at].conjunction)
        bucket_add(bucket, conjunction)
        give(handful, handful_size(handful.capacity))
        return <void*>(<uintptr_t>bucket | 1)
    if handful.used == handful.capacity:
        capacity = 2 * handful.capacity
        handful = <Handful*>resize(handful, handful_size(handful.capacity), handful_size(capacity))
        handful.capacity = capacity
    loose_set(&handful.entry[handful.used], conjunction)
    handful.used += 1
    return <void*>(<uintptr_t>handful | 2)

cdef void* handful_remove(Handful* handful, Conjunction* conjunction) except NULL:
    """The item to put in the handful's place: itself, or the one conjunction that is left."""
    cdef uint32_t at = 0
    cdef void* left
    while at < handful.used and handful.entry[at].conjunction != conjunction:
        at += 1
    if at == handful.used:
        raise BugError("a conjunction is not in its handful")
    handful.used -= 1
    handful.entry[at] = handful.entry[handful.used]
    if handful.used > 1:
        return <void*>(<uintptr_t>handful | 2)
    left = handful.entry[0].conjunction
    give(handful, handful_size(handful.capacity))
    return left

cdef int key_add(Table* table, uint64_t hash, Conjunction* conjunction) except -1:
    cdef Cell* cell = table_find(table, hash)
    cdef Handful* handful
    if cell.item == NULL:
        table_set(table, hash, conjunction)
    elif is_bucket(cell.item):
        bucket_add(as_bucket(cell.item), conjunction)
    elif is_handful(cell.item):
        cell.item = handful_add(as_handful(cell.item), conjunction)
    else:
        handful = <Handful*>take(handful_size(2))
        handful.used = 2
        handful.capacity = 2
        loose_set(&handful.entry[0], <Conjunction*>cell.item)
        loose_set(&handful.entry[1], conjunction)
        cell.item = <void*>(<uintptr_t>handful | 2)
    return 0

cdef int key_remove(Table* table, uint64_t hash, Conjunction* conjunction) except -1:
    cdef Cell* cell = table_find(table, hash)
    cdef Bucket* bucket
    if is_bucket(cell.item):
        bucket = as_bucket(cell.item)
        bucket_remove(bucket, conjunction)
        if bucket.count == 1:
            cell.item = bucket.lane[0].head[0].block.entry[0].conjunction
            bucket_end(bucket)
    elif is_handful(cell.item):
        cell.item = handful_remove(as_handful(cell.item), conjunction)
    elif cell.item == conjunction:
        table_drop(table, hash)
    else:
        raise BugError("a conjunction does not stand under its key")
    return 0

cdef void item_end(void* item) noexcept:
    """Frees what holds conjunctions, not the conjunctions."""
    if is_bucket(item):
        bucket_end(as_bucket(item))
    elif is_handful(item):
        give(as_handful(item), handful_size(as_handful(item).capacity))

cdef bint lane_holds(Lane* lane, Conjunction* conjunction) noexcept:
    cdef uint32_t at = lane_at(lane, conjunction.low, conjunction)
    cdef Block* block = lane.head[at].block
    cdef uint32_t inside = block_at(block, conjunction.low, conjunction)
    return inside < block.used and block.entry[inside].conjunction == conjunction

cdef bint key_holds(Table* table, uint64_t hash, Conjunction* conjunction) noexcept:
    cdef void* item = table_find(table, hash).item
    cdef uint32_t at
    if is_bucket(item):
        for at in range(as_bucket(item).lanes):
            if as_bucket(item).lane[at].slot == conjunction.lane:
                return lane_holds(&as_bucket(item).lane[at], conjunction)
        return False
    if is_handful(item):
        for at in range(as_handful(item).used):
            if as_handful(item).entry[at].conjunction == conjunction:
                return True
        return False
    return item == conjunction

cdef uint64_t keys_held(Table* table) noexcept:
    cdef uint64_t found = 0, at
    cdef void* item
    for at in range(table.mask + 1):
        item = table.cell[at].item
        if is_bucket(item):
            found += as_bucket(item).count
        elif is_handful(item):
            found += as_handful(item).used
        elif item != NULL:
            found += 1
    return found
