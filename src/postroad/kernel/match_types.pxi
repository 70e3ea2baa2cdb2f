# What the index is made of. Sizes matter: a million conjunctions should stay near 100 bytes each.

cdef enum:
    TEXT = 0  # value types, as in the frame
    INTEGER = 1
    FLOAT = 2
    BOOLEAN = 3

    IS_NUMBER = 0  # kinds of check
    IS_TEXT = 1
    IS_BOOLEAN = 2
    HAS_PREFIX = 3
    IN_RANGE = 4
    IN_DOMAIN = 5

    LOW_FLOAT = 1  # flags of a range: which bound is a float, on which side of its value a cut lies
    HIGH_FLOAT = 2
    LOW_ABOVE = 4
    HIGH_ABOVE = 8
    NO_END = 16

    NO_LANE = -1
    BLOCK = 64  # entries of a block
    SMALL = 16  # entries of a bucket that is not sorted yet
    MAX_PREFIX = 32  # bytes of a prefix that are hashed
    MAX_PARTS = 3  # attributes in a signature
    MAX_KEYS = 16  # keys of one conjunction
    MAX_MEMOS = 16384  # topics remembered
    MAX_SHOWN = 4096  # single rows for which an array is kept
    MAX_SEEN = 256  # attribute names of the last row kept
    CHUNK = 64  # rows matched together
    CHUNK_VALUES = 4096  # values of such rows
    MAX_BAND = 31  # of a conjunction's cost
    MAX_MARKED = 8  # targets of a selector for which it is noted that a row goes to them
    FAN = 4  # a selector with at least so many targets of its own is collected as one

ctypedef union Bits:
    int64_t i
    double f

ctypedef struct Value:
    uint64_t stamp  # of the row that has it
    uint64_t hash
    Bits n
    const uint8_t* text
    uint32_t length
    uint8_t type

ctypedef struct Check:
    Bits low  # number; or offset of bytes in the conjunction; or address of a Domain
    Bits high  # number; or length of those bytes
    uint32_t slot
    uint8_t kind
    uint8_t flags  # of a range; or the allowed booleans

ctypedef struct NumberSpan:
    Bits low
    Bits high
    uint8_t flags

ctypedef struct TextSpan:
    uint32_t low
    uint32_t low_length
    uint32_t high
    uint32_t high_length
    uint8_t flags

ctypedef struct Domain:  # followed by its spans, sorted, then the bytes of its texts
    size_t size
    uint32_t numbers
    uint32_t texts
    uint8_t missing
    uint8_t booleans

ctypedef struct Part:
    uint32_t slot
    uint32_t prefix  # bytes; 0 for the whole value

ctypedef struct Signature:
    uint64_t mask  # bit per slot below 64 that a row must have
    uint32_t users
    uint32_t parts
    Part part[MAX_PARTS]

ctypedef struct Use:
    uint64_t base  # hash of pattern and signature
    uint32_t signature
    uint32_t users

ctypedef struct Pattern:
    Pattern* next  # of the same hash
    uint64_t hash
    uint64_t number
    Use* uses
    uint32_t used
    uint32_t capacity
    uint32_t users
    uint32_t length  # of the bytes that follow
    uint8_t wildcard
    uint64_t stamp  # of the row whose topic it matched last

ctypedef struct Conjunction:  # followed by its keys, its checks, its programs, the bytes of its texts
    Pattern* pattern
    uint32_t size
    uint32_t selector
    uint32_t signature
    int32_t lane  # slot of the attribute whose range it is sorted by
    float low
    float high
    uint8_t keys
    uint8_t band  # logarithm of what its programs cost
    uint16_t checks
    uint16_t programs

ctypedef struct Entry:
    float low  # rounded outwards; the exact range is among the checks
    float high
    Conjunction* conjunction

ctypedef struct Block:
    uint32_t used
    uint32_t capacity
    Entry entry[1]

ctypedef struct Head:
    float low  # least low and greatest high of the block
    float high
    Block* block

ctypedef struct Lane:
    int32_t slot
    uint32_t used
    uint32_t capacity
    Head* head

ctypedef struct Bucket:
    uint32_t count
    uint32_t lanes
    Lane* lane

ctypedef struct Loose:
    float low
    float high
    Conjunction* conjunction
    int32_t slot  # of the range, or NO_LANE

ctypedef struct Handful:  # a bucket of up to SMALL entries, in one piece of memory
    uint32_t used
    uint32_t capacity
    Loose entry[1]

ctypedef struct Cell:
    uint64_t hash
    void* item  # NULL if empty

ctypedef struct Table:
    Cell* cell
    uint64_t mask
    uint64_t used

ctypedef struct Name:
    Name* next
    uint64_t hash
    uint32_t slot
    uint32_t length  # of the bytes that follow

ctypedef struct Node:  # of the tree of wildcard patterns
    Node* next
    Node* parent
    Node* plus
    Pattern* here
    Pattern* rest
    uint64_t hash
    uint64_t number
    uint32_t children
    uint32_t length  # of the bytes that follow

ctypedef struct Memo:  # followed by the patterns, then the topic's bytes
    size_t size
    uint32_t patterns
    uint32_t length

ctypedef struct Selection:
    uint64_t batch  # the last batch in which it was a unit
    Conjunction** conjunction
    uint32_t* target  # unless there is room for one only, which is `only`
    uint32_t only
    uint32_t conjunctions
    uint32_t targets
    uint32_t capacity  # of `target`
    uint32_t shared  # targets that other selectors have as well
    uint32_t unit

ctypedef struct Target:
    int64_t value
    uint64_t batch
    uint32_t unit
    uint32_t users  # selectors
    uint32_t mixed  # exclusive or of their numbers: the number itself when there is one

ctypedef struct Unit:
    uint64_t hash  # of its rows
    uint32_t item  # number of the target or selector
    uint32_t selector  # whether it is one
    uint32_t count
    uint32_t first  # link
    uint32_t last
    uint32_t row  # last one
    uint32_t next  # unit of the same group

ctypedef struct Link:
    uint32_t row
    uint32_t next

ctypedef struct Found:
    uint32_t* row
    uint32_t count
    uint32_t unit

ctypedef struct Row:
    uint64_t stamp
    Value* values  # by slot
    uint32_t number
    uint32_t begin  # of its attributes in the frame
    uint32_t attributes
    uint32_t patterns  # where what belongs to the next row begins
    uint32_t hashes
    uint32_t candidates

ctypedef struct Hit:
    uint32_t selector
    uint32_t row

ctypedef struct Seen:
    const uint8_t* name
    uint32_t length
    int32_t slot
