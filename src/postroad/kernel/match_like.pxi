# LIKE. `like_reference.py` says what it means and why it takes one look per character.

cdef enum:
    ANY_LENGTH = -2  # signs of a pattern that are not characters
    ANY_CHARACTER = -1
    ASCII = 128
    MAX_LIKE = 4096  # characters that a pattern demands
    LIKE_WORDS = 65  # of a row, and one more because a piece may begin inside of a word

ctypedef struct Piece:
    uint32_t first  # bit
    uint32_t length  # characters
    uint8_t lead  # first byte of its first character; 0 if that may be any, or is 0

ctypedef struct Like:  # followed by its rows, its pieces, the characters beyond ASCII
    size_t size
    uint32_t pieces
    uint32_t words  # of a row
    uint32_t wide  # characters beyond ASCII; they have the last rows
    uint32_t rows
    uint32_t demanded  # characters that a text needs at least
    uint16_t row[ASCII]  # by character. Row 0 is for those that the pattern does not name.

cdef inline uint64_t* like_rows(Like* like) noexcept nogil:
    return <uint64_t*>(like + 1)

cdef inline Piece* like_pieces(Like* like) noexcept nogil:
    return <Piece*>(like_rows(like) + <size_t>like.rows * like.words)

cdef inline uint32_t* like_wide(Like* like) noexcept nogil:
    return <uint32_t*>(like_pieces(like) + like.pieces)

cdef Like* make_like(tuple signs) except NULL:
    """From code points, ANY_CHARACTER and ANY_LENGTH. A row has a bit per sign that its character fits."""
    cdef list named = sorted({sign for sign in signs if sign >= 0})
    cdef uint32_t narrow = sum([1 for letter in named if letter < ASCII])
    cdef uint32_t pieces = 1 + sum([1 for sign in signs if sign == ANY_LENGTH])
    cdef uint32_t demanded = len(signs) + 1 - pieces
    cdef uint32_t words = (demanded + 63) // 64, rows = 1 + len(named), at, bit = 0, row
    cdef size_t size = sizeof(Like) + <size_t>rows * words * sizeof(uint64_t) + pieces * sizeof(Piece)
    cdef Like* like
    cdef Piece* piece
    cdef int64_t sign
    if demanded > MAX_LIKE:
        raise BugError(f"a pattern demands {demanded} characters, the limit is {MAX_LIKE}")
    size += (len(named) - narrow) * sizeof(uint32_t)
    like = <Like*>take(size)
    memset(like, 0, size)
    like.size = size
    like.pieces = pieces
    like.words = words
    like.rows = rows
    like.wide = rows - 1 - narrow
    like.demanded = demanded
    for at in range(1, rows):
        if at <= narrow:
            like.row[<uint32_t>named[at - 1]] = at
        else:
            like_wide(like)[at - 1 - narrow] = named[at - 1]
    piece = like_pieces(like)
    for sign in signs:
        if sign == ANY_LENGTH:
            piece += 1
            piece.first = bit
            continue
        if sign == ANY_CHARACTER:
            for row in range(rows):
                like_rows(like)[<size_t>row * words + bit // 64] |= <uint64_t>1 << (bit % 64)
        else:
            row = like_row(like, <uint32_t>sign)
            like_rows(like)[<size_t>row * words + bit // 64] |= <uint64_t>1 << (bit % 64)
            if piece.length == 0:
                piece.lead = chr(sign).encode()[0]
        piece.length += 1
        bit += 1
    return like

cdef inline uint32_t like_row(Like* like, uint32_t letter) noexcept nogil:
    """The row of a character."""
    cdef uint32_t start = 0, end = like.wide, middle
    cdef uint32_t* wide
    if letter < ASCII:
        return like.row[letter]
    wide = like_wide(like)
    while start < end:
        middle = (start + end) // 2
        if wide[middle] < letter:
            start = middle + 1
        else:
            end = middle
    if start == like.wide or wide[start] != letter:
        return 0
    return like.rows - like.wide + start

cdef inline const uint8_t* next_letter(const uint8_t* at, const uint8_t* end, uint32_t* letter) noexcept nogil:
    """Reads one character, within the text whatever its bytes are."""
    cdef uint32_t more, place
    if at[0] < ASCII:
        letter[0] = at[0]
        return at + 1
    more = 1 if at[0] < 0xE0 else 2 if at[0] < 0xF0 else 3
    letter[0] = at[0] & (0x3F >> more)
    at += 1
    for place in range(more):
        if at == end:
            break
        letter[0] = letter[0] << 6 | (at[0] & 0x3F)
        at += 1
    return at

cdef const uint8_t* like_fits(
    Like* like, Piece* piece, const uint8_t* at, const uint8_t* end
) noexcept nogil:
    """Where the piece ends if the text has it right here, else NULL."""
    cdef uint32_t bit, letter, row
    for bit in range(piece.first, piece.first + piece.length):
        if at == end:
            return NULL
        at = next_letter(at, end, &letter)
        row = like_row(like, letter)
        if not like_rows(like)[<size_t>row * like.words + bit // 64] >> (bit % 64) & 1:
            return NULL
    return at

cdef const uint8_t* like_find(
    Like* like, Piece* piece, const uint8_t* at, const uint8_t* end
) noexcept nogil:
    """Where the piece ends that begins first, else NULL."""
    cdef uint32_t low = piece.first // 64, last = piece.first + piece.length - 1, letter, row, place
    cdef uint32_t count = last // 64 - low + 1
    cdef uint64_t begin = <uint64_t>1 << (piece.first % 64), goal = <uint64_t>1 << (last % 64)
    cdef uint64_t state[LIKE_WORDS]
    cdef uint64_t alive = 0, carry, word
    cdef const uint64_t* fitting
    memset(state, 0, count * sizeof(uint64_t))
    while at != end:
        if alive == 0 and piece.lead:
            at = <const uint8_t*>memchr(at, piece.lead, end - at)
            if at == NULL:
                return NULL
        at = next_letter(at, end, &letter)
        row = like_row(like, letter)
        fitting = like_rows(like) + <size_t>row * like.words + low
        if count == 1:
            alive = state[0] = (state[0] << 1 | begin) & fitting[0]
            if alive & goal:
                return at
            continue
        carry = begin
        alive = 0
        for place in range(count):
            word = state[place]
            state[place] = (word << 1 | carry) & fitting[place]
            carry = word >> 63
            alive |= state[place]
        if state[count - 1] & goal:
            return at
    return NULL

cdef bint like_matches(Like* like, const uint8_t* text, uint32_t length) noexcept nogil:
    cdef Piece* piece = like_pieces(like)
    cdef Piece* last = piece + like.pieces - 1
    cdef const uint8_t* at = text
    cdef const uint8_t* end = text + length
    cdef const uint8_t* tail = end
    cdef uint32_t place
    if length < like.demanded:
        return False
    at = like_fits(like, piece, at, end)
    if at == NULL:
        return False
    if like.pieces == 1:
        return at == end
    for place in range(last.length):
        if tail == at:
            return False
        tail -= 1
        while tail > at and (tail[0] & 0xC0) == 0x80:
            tail -= 1
    if like_fits(like, last, tail, end) != end:
        return False
    piece += 1
    while piece != last:
        if piece.length:
            at = like_find(like, piece, at, tail)
            if at == NULL:
                return False
        piece += 1
    return True
