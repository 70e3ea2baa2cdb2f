"""One stored filter, or one stored part of the exact log, as bytes that check themselves.

    0 magic "PRtf" | 4 version u8 | 5 flags u8 (bit 0: body is zlib) | 6 u16 = 0 | 8 meta bytes u32
    12 body bytes u32 | 16 crc32c of bytes 0..15 and the meta u32 | 20 crc32c of the body u32
    24 meta: MessagePack array of `FilterMeta` | body: the filter's bits, or the log's entries

All little-endian. The meta has a checksum of its own so that an index of many records is read without
reading their bodies.
"""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from typing import Final

import google_crc32c
import msgspec

from postroad.errors import BugError, StorageError
from postroad.tracking.bloom import MAX_BITS, MAX_HASHES, MIN_BITS, BloomFilter
from postroad.tracking.keys import LOG, HistoryKey
from postroad.tracking.moments import MAX_SPANS, Spans, covered, holds

MAGIC: Final = b"PRtf"
VERSION: Final = 1
PREFIX_BYTES: Final = 24
MAX_META_BYTES: Final = 1 << 20
MAX_BODY_BYTES: Final = MAX_BITS // 8
_COMPRESSED: Final = 1
_WORTH_COMPRESSING: Final = 0.25  # share of bits set: from here on zlib gains next to nothing
_PREFIX: Final = struct.Struct("<4sBBHIIII")


class FilterMeta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Everything about a stored filter but its bits. The range is empty when lo_ms > hi_ms."""

    key: HistoryKey
    sequence: int
    m: int  # 0 for a part of the log
    n: int
    k: int
    count: int
    lo_ms: int
    hi_ms: int
    singles: Spans = ()
    opened_us: int = 0
    stored_us: int = 0
    replaces: int | None = None
    final: bool = True
    names: tuple[str, ...] = ()  # of subscribers, by their numbers in the log's entries

    def matches(self, time_ms: int) -> bool:
        """Whether it is in M(H, t)."""
        return self.lo_ms <= time_ms <= self.hi_ms or holds(self.singles, time_ms)

    @property
    def ranged(self) -> bool:
        """Whether it holds keys of about when they were added, and not only of other times."""
        return self.lo_ms <= self.hi_ms

    @property
    def spans(self) -> Spans:
        """All times it is for; the range may be among the others."""
        return (*self.singles, (self.lo_ms, self.hi_ms)) if self.ranged else self.singles

    @property
    def span_ms(self) -> int:
        return covered(self.lo_ms, self.hi_ms, self.singles)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(FilterMeta)


def encode_record(meta: FilterMeta, body: bytes, *, compress: bool = False, fill: float = 0.0) -> bytes:
    """`fill` is the share of bits set, so that no time is spent on compressing what has no redundancy."""
    flags = 0
    if compress and fill < _WORTH_COMPRESSING:
        packed = zlib.compress(body, 1)
        if len(packed) < len(body):
            body, flags = packed, _COMPRESSED
    head = _ENCODER.encode(meta)
    if len(head) > MAX_META_BYTES:
        raise BugError(f"{len(head)} bytes about one stored filter")
    if len(body) > MAX_BODY_BYTES:
        raise BugError(f"{len(body)} bytes in one stored filter")
    front = _PREFIX.pack(MAGIC, VERSION, flags, 0, len(head), len(body), 0, 0)[:16]
    sums = struct.pack("<II", _crc(front + head), _crc(body))
    return b"".join((front, sums, head, body))


def encode_description(meta: FilterMeta) -> bytes:
    """A record that lacks its body: `decode_meta` reads it, `decode_record` does not, whatever follows."""
    return encode_record(meta, b"\1")[:-1]


def record_extent(prefix: bytes) -> tuple[int, int]:
    """(bytes of meta, bytes of body) of the record that begins so; StorageError if none does."""
    if len(prefix) < PREFIX_BYTES:
        raise StorageError(f"cut off in the middle of a record, after {len(prefix)} of {PREFIX_BYTES} bytes")
    magic, version, flags, zero, meta, body, _, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise StorageError(f"not a filter record: it begins with {magic.hex()}, and not with {MAGIC.hex()}")
    if version != VERSION:
        raise StorageError(f"a filter record of version {version}, this Postroad reads {VERSION}")
    if flags & ~_COMPRESSED or zero or meta > MAX_META_BYTES or body > MAX_BODY_BYTES:
        raise StorageError(
            f"a filter record with flags {flags:x}, {zero} in place of 0, {meta} bytes of description and"
            f" {body} of content; at most {MAX_META_BYTES} and {MAX_BODY_BYTES} are read"
        )
    return meta, body


def decode_meta(data: bytes) -> FilterMeta:
    """From the prefix and the meta that follows it."""
    size, _ = record_extent(data)
    head = data[PREFIX_BYTES : PREFIX_BYTES + size]
    if len(head) < size:
        raise StorageError(f"cut off in the middle of a record, after {len(head)} of {size} bytes")
    if _crc(data[:16] + head) != int.from_bytes(data[16:20], "little"):
        raise StorageError("the checksum of a record's description is wrong")
    try:
        meta = _DECODER.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"a record's description cannot be read: {error}") from None
    _check_meta(meta)
    return meta


def _check_meta(meta: FilterMeta) -> None:
    spans = meta.singles
    sound = meta.sequence >= 0 and meta.count >= 0 and len(spans) <= MAX_SPANS
    if spans:
        sound = sound and all(lo <= hi for lo, hi in spans)
        sound = sound and all(earlier[1] < later[0] for earlier, later in pairwise(spans))
    if meta.key.kind != LOG:
        sound = sound and MIN_BITS <= meta.m <= MAX_BITS and 1 <= meta.k <= MAX_HASHES and meta.n >= 1
    if not sound:
        raise StorageError(
            f"a record's description makes no sense: number {meta.sequence}, {meta.count} keys, {len(spans)}"
            f" spans, {meta.m} bits for {meta.n} keys with {meta.k} hashes"
        )


def decode_record(data: bytes) -> tuple[FilterMeta, bytes]:
    """A whole record: what it is about, and its body."""
    meta = decode_meta(data)
    meta_bytes, body_bytes = record_extent(data)
    body = data[PREFIX_BYTES + meta_bytes :]
    if len(body) != body_bytes:
        raise StorageError(f"a record with {len(body)} bytes of content where {body_bytes} are announced")
    if _crc(body) != int.from_bytes(data[20:24], "little"):
        raise StorageError("the checksum of a filter's bits is wrong")
    size = (meta.m + 7) // 8
    if data[5] & _COMPRESSED:
        body = _inflated(body, size or MAX_BODY_BYTES)
    if meta.key.kind != LOG and len(body) != size:
        raise StorageError(f"a filter of {meta.m} bits with {len(body)} bytes")
    return meta, body


def _inflated(body: bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(body, limit)
    except zlib.error as error:
        raise StorageError(f"a compressed filter cannot be read: {error}") from None
    if not unpacker.eof:
        raise StorageError(f"a compressed filter has more than the {limit} bytes that it may have")
    return plain


def filter_of(meta: FilterMeta, body: bytes) -> BloomFilter:
    return BloomFilter(meta.m, meta.n, meta.k, bits=body, count=meta.count)


def _crc(data: bytes) -> int:
    return int(google_crc32c.value(data))
