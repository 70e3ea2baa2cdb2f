"""What repair says, byte for byte: summaries, requests, asks and repairs (spec B3 to B9).

They travel as payloads of best-effort events on topics of their own, so brokers know nothing of them, and
anybody who may publish there can send anything: whatever is read here is bounded, and what cannot be read is
a PeerError.

A number is a varint of 7 bits a byte, the lowest first. The bits of an entry are the gaps between its ones,
Rice coded (paper 3.5: compressed Bloom filters). Consecutive events of a publisher are similar (3.5, temporal
locality), so entries are merged without loss: what all of them have in common is said once, one that equals
the entry before it takes two bits, and one that equals an earlier one is a reference to that. Joining similar
ones into one filter, as the paper proposes, was tried: events that differ in one value are just those that
subscriptions tell apart, so receivers asked for what they do not want, and got Gaps.
"""

from __future__ import annotations

from typing import Final

import msgspec

from postroad.errors import BugError, PeerError
from postroad.events.carried import REPAIR
from postroad.selectors.tags import WIDTH, positions

PREFIX_BYTES: Final = 8  # of an id: whose it is, publisher and broker
MAX_ENTRIES: Final = 256  # in one summary
MAX_WANTED: Final = 64  # messages named in one request
MAX_RANGES: Final = 8  # and ranges of which no summary came
MAX_SEQUENCE: Final = 1 << 62
AGE_STEPS: Final = 64  # of a summary: ages are told in so many steps from its first entry to its last
_MAX_AGES_BYTES: Final = (MAX_ENTRIES + AGE_STEPS) // 8 + 1
_MAX_RICE: Final = 8  # of the parameter
_VARINT_BITS: Final = 63

SUMMARY: Final = 1
REQUEST: Final = 2
ASK: Final = 3
GONE: Final = 5


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher sent: the bits of the messages `first`, `first` + 1, ... and their ages, how long ago
    each was published. Without entries it says how far the publisher is, up to `first` - 1, and the age of
    that one. On its way an age is rounded down to one of AGE_STEPS, the first is exact."""

    first: int
    entries: tuple[int, ...]
    ages_ms: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.first + len(self.entries) - 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """To a publisher: these messages, and summaries of these ranges (first and last) are missing."""

    receiver: bytes
    wanted: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...] = ()


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """To all who may have cached it (spec B5): one message, by its bits and its id."""

    receiver: bytes
    publisher: bytes
    sequence: int
    bits: int
    sent_us: int  # by the asker's clock, brought to its broker's
    wait_us: int  # (C1 + C2/2) d of the asker, which caches size themselves by (spec B8)


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """A message again: its publisher, its number and the row as it was published."""

    publisher: bytes
    sequence: int
    row: bytes


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher no longer has these."""

    publisher: bytes
    sequences: tuple[int, ...]


Message = Summary | Request | Ask | Repair | Gone


def encode(message: Message) -> bytes:
    if isinstance(message, Summary):
        out = bytearray((SUMMARY,))
        _put(out, message.first)
        _put_ages(out, message.ages_ms)
        return bytes(out + encode_entries(message.entries))
    if isinstance(message, Request):
        out = bytearray((REQUEST,)) + message.receiver
        _put_increasing(out, message.wanted)
        _put(out, len(message.ranges))
        for first, last in message.ranges:
            _put(out, first)
            _put(out, last - first)
        return bytes(out)
    if isinstance(message, Ask):
        out = bytearray((ASK,)) + message.receiver + message.publisher
        for number in (message.sequence, message.sent_us, message.wait_us):
            _put(out, number)
        return bytes(out + encode_entries((message.bits,)))
    if isinstance(message, Repair):
        out = bytearray((REPAIR,)) + message.publisher
        _put(out, message.sequence)
        return bytes(out + message.row)
    out = bytearray((GONE,)) + message.publisher
    _put_increasing(out, message.sequences)
    return bytes(out)


def decode(data: bytes) -> Message:
    """PeerError if it is none."""
    reader = _Reader(data)
    kind = reader.byte()
    if kind == SUMMARY:
        first, ages_ms = reader.number(), reader.ages()
        entries = reader.entries()
        if len(ages_ms) != max(1, len(entries)):
            raise PeerError(f"a summary of {len(entries)} entries with {len(ages_ms)} ages")
        message: Message = Summary(first=first, entries=entries, ages_ms=ages_ms)
    elif kind == REQUEST:
        receiver, wanted = reader.take(PREFIX_BYTES), reader.increasing(MAX_WANTED)
        message = Request(receiver=receiver, wanted=wanted, ranges=reader.ranges())
    elif kind == ASK:
        receiver, publisher = reader.take(PREFIX_BYTES), reader.take(PREFIX_BYTES)
        sequence, sent_us, wait_us = reader.number(), reader.number(), reader.number()
        entries = reader.entries()
        if len(entries) != 1:
            raise PeerError(f"an ask for {len(entries)} messages; it is for one")
        message = Ask(
            receiver=receiver,
            publisher=publisher,
            sequence=sequence,
            bits=entries[0],
            sent_us=sent_us,
            wait_us=wait_us,
        )
    elif kind == REPAIR:
        publisher, sequence = reader.take(PREFIX_BYTES), reader.number()
        message = Repair(publisher=publisher, sequence=sequence, row=reader.rest())
    elif kind == GONE:
        message = Gone(publisher=reader.take(PREFIX_BYTES), sequences=reader.increasing(MAX_WANTED))
    else:
        raise PeerError(f"a repair message of the unknown kind {kind}")
    reader.end()
    return message


def encode_record(entries: tuple[int, ...], room: int) -> bytes:
    """A publication record (spec B3): as many entries, the latest first, as fit; b"" if none does."""
    while entries:
        encoded = encode_entries(entries)
        if len(encoded) <= room:
            return encoded
        entries = entries[: len(entries) * room // len(encoded)]
    return b""


def decode_record(data: bytes) -> tuple[int, ...]:
    """PeerError if it is none."""
    reader = _Reader(data)
    entries = reader.entries()
    reader.end()
    return entries


def encode_entries(entries: tuple[int, ...]) -> bytes:
    """The bits of messages."""
    if len(entries) > MAX_ENTRIES:
        raise BugError(f"{len(entries)} entries, the most is {MAX_ENTRIES}")
    out = bytearray()
    _put(out, len(entries))
    if not entries:
        return bytes(out)
    common = entries[0]
    for bits in entries:
        common &= bits
    writer = _Bits()
    writer.filter(common)
    known: dict[int, int] = {}
    last = -1
    for bits in entries:
        at = known.get(bits)
        if bits == last:
            writer.put(0b11, 2)
        elif at is not None:
            writer.put(0b10, 2)
            writer.put(at, 8)
        else:
            known[bits] = len(known)
            writer.put(0, 1)
            writer.filter(bits ^ common)
        last = bits
    return bytes(out) + writer.bytes()


def _put(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _put_increasing(out: bytearray, numbers: tuple[int, ...]) -> None:
    _put(out, len(numbers))
    last = 0
    for number in numbers:
        _put(out, number - last)
        last = number


def _put_ages(out: bytearray, ages_ms: tuple[int, ...]) -> None:
    """The first; then, if there are more, how long a step is, and of each the steps from the one before it in
    ones, and a zero. Ones fill the last byte: steps that lead to no message."""
    _put(out, ages_ms[0])
    writer = _Bits()
    step_ms = (ages_ms[0] - min(ages_ms)) // AGE_STEPS + 1
    last = 0
    for age_ms in ages_ms[1:]:
        steps = max(last, -((age_ms - ages_ms[0]) // step_ms))
        writer.put(((1 << steps - last) - 1) << 1, steps - last + 1)
        last = steps
    encoded = writer.bytes(padding=1)
    _put(out, len(encoded))
    if encoded:
        _put(out, step_ms)
        out += encoded


class _Bits:
    """Writes bits, the first ones first."""

    __slots__ = ("_count", "_value")

    def __init__(self) -> None:
        self._value = 0
        self._count = 0

    def put(self, value: int, count: int) -> None:
        self._value = self._value << count | value
        self._count += count

    def filter(self, bits: int) -> None:
        """How many ones, 9 bits; then the gaps, each divided by 2**k: the quotient in ones, a zero, the
        rest."""
        ones = positions(bits)
        self.put(len(ones), 9)
        if not ones:
            return
        k = _rice(len(ones))
        last = -1
        for at in ones:
            gap = at - last - 1
            self.put(((1 << (gap >> k)) - 1) << 1, (gap >> k) + 1)
            if k:
                self.put(gap & (1 << k) - 1, k)
            last = at

    def bytes(self, padding: int = 0) -> bytes:
        spare = -self._count % 8
        last = (1 << spare) - 1 if padding else 0
        return (self._value << spare | last).to_bytes((self._count + spare) // 8, "big")


def _rice(ones: int) -> int:
    """The parameter for gaps in a filter with so many ones."""
    return min(_MAX_RICE, max(0, (WIDTH * 69 // (100 * ones)).bit_length() - 1))


class _Reader:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise PeerError(f"a repair message of {len(self._data)} bytes that ends too soon")
        self._at += count
        return taken

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], len(self._data)
        return taken

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= _VARINT_BITS:
                raise PeerError(f"a number of more than {_VARINT_BITS} bits in a repair message")
        if value > MAX_SEQUENCE:
            raise PeerError(f"the number {value} in a repair message, the most is {MAX_SEQUENCE}")
        return value

    def _count(self, limit: int) -> int:
        count = self.number()
        if count > limit:
            raise PeerError(f"a repair message with {count} parts, the most is {limit}")
        return count

    def increasing(self, limit: int) -> tuple[int, ...]:
        numbers: list[int] = []
        last = 0
        for _ in range(self._count(limit)):
            last += self.number()
            numbers.append(last)
        return tuple(numbers)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        ranges: list[tuple[int, int]] = []
        for _ in range(self._count(MAX_RANGES)):
            first = self.number()
            ranges.append((first, first + self.number()))
        return tuple(ranges)

    def ages(self) -> tuple[int, ...]:
        age_ms, size = self.number(), self._count(_MAX_AGES_BYTES)
        if not size:
            return (age_ms,)
        step_ms, text = self.number(), _as_text(self.take(size))
        ages_ms = [age_ms]
        for ones in text.split("0")[:-1]:
            age_ms = max(0, age_ms - step_ms * len(ones))
            ages_ms.append(age_ms)
        return tuple(ages_ms)

    def entries(self) -> tuple[int, ...]:
        count = self._count(MAX_ENTRIES)
        if not count:
            return ()
        return _read_entries(self.rest(), count)

    def end(self) -> None:
        if self._at != len(self._data):
            raise PeerError(f"{len(self._data) - self._at} bytes follow a repair message")


def _as_text(data: bytes) -> str:
    """Its bits as zeros and ones."""
    return format(int.from_bytes(data, "big"), f"0{8 * len(data)}b") if data else ""


def _read_entries(data: bytes, count: int) -> tuple[int, ...]:
    text = _as_text(data)
    try:
        common, at = _read_filter(text, 0)
        known: list[int] = []
        entries: list[int] = []
        for _ in range(count):
            if text[at : at + 2] == "11":
                bits = entries[-1]
                at += 2
            elif text[at] == "1":
                bits = known[int(text[at + 2 : at + 10], 2)]
                at += 10
            else:
                bits, at = _read_filter(text, at + 1)
                bits ^= common
                known.append(bits)
            entries.append(bits)
    except (IndexError, ValueError):
        raise PeerError(f"{count} entries of a repair message in {len(data)} bytes cannot be read") from None
    if len(text) - at >= 8 or "1" in text[at:]:
        raise PeerError(f"bytes follow the {count} entries of a repair message")
    return tuple(entries)


def _read_filter(text: str, at: int) -> tuple[int, int]:
    count = int(text[at : at + 9], 2)
    at += 9
    if not count:
        return 0, at
    k = _rice(count)
    bits, last = 0, -1
    for _ in range(count):
        zero = text.index("0", at)
        gap = (zero - at) << k
        at = zero + 1
        if k:
            gap |= int(text[at : at + k], 2)
            at += k
        last += gap + 1
        if last >= WIDTH:
            raise ValueError(last)
        bits |= 1 << last
    return bits, at
