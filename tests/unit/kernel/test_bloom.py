"""Bloom filters over batches of ids (spec T2)."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest

from postroad import kernel as chosen
from postroad.errors import BugError
from postroad.ids import IdSource
from postroad.kernel import reference

MASK = (1 << 64) - 1
# The compiled one where there is one.
KERNELS = pytest.mark.parametrize("kernel", [chosen, reference], ids=["chosen", "reference"])


def naive_positions(identity: bytes, m: int, k: int) -> list[int]:
    """The definition once more, in plain integers of any size."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    a, b = int.from_bytes(identity[:8], "little"), int.from_bytes(identity[8:], "little")
    h1 = mix(b + mix(a + 0x9E3779B97F4A7C15 & MASK) & MASK)
    h2 = mix(a ^ mix(b + 0xD1B54A32D192ED03 & MASK)) | 1
    return [mix(h1 + i * h2 & MASK) * m >> 64 for i in range(k)]


def some_ids(count: int, *, publisher: int = 42, start_ms: int = 1_700_000_000_000) -> bytes:
    """Ids as a busy publisher makes them: a few per millisecond, so that they differ in a few bits only."""
    source = IdSource(publisher, 7)
    return b"".join(source.next(start_ms + i // 5) for i in range(count))


VECTORS = [
    (bytes(16), 1000, 4, [203, 528, 426, 845]),
    (bytes(range(16)), 1 << 20, 5, [753365, 88470, 773989, 777994, 71241]),
    (bytes.fromhex("0000002a000000070193c1d2e3f40001"), 1 << 32, 3, [3710708515, 3107692858, 3478193523]),
    (b"\xff" * 16, 8, 8, [7, 3, 2, 4, 1, 6, 0, 0]),
]


@pytest.mark.parametrize(("identity", "m", "k", "positions"), VECTORS)
def test_vectors(identity: bytes, m: int, k: int, positions: list[int]) -> None:
    """T2: Filters are stored: these positions are part of the format for ever."""
    assert reference.bloom_positions(identity, m, k).tolist() == [positions]
    assert naive_positions(identity, m, k) == positions


@KERNELS
@pytest.mark.parametrize(("m", "k"), [(8, 1), (9, 3), (1000, 7), (1 << 16, 17), (4099, 64)])
def test_bits_are_the_positions(kernel: ModuleType, m: int, k: int) -> None:
    ids = some_ids(37)
    bits = bytearray((m + 7) // 8)
    kernel.bloom_add(bits, m, k, ids)
    expected = {p for i in range(0, len(ids), 16) for p in naive_positions(ids[i : i + 16], m, k)}
    assert {p for p in range(8 * len(bits)) if bits[p // 8] >> p % 8 & 1} == expected


@KERNELS
def test_nothing_that_was_added_is_missing(kernel: ModuleType) -> None:
    """T2: add and contains, both over whole batches."""
    ids, others = some_ids(500), some_ids(500, publisher=43)
    bits = bytearray(1 << 13)
    kernel.bloom_add(bits, 1 << 16, 7, ids)
    assert kernel.bloom_contains(bits, 1 << 16, 7, ids) == b"\1" * 500
    assert kernel.bloom_contains(bytes(bits), 1 << 16, 7, others).count(1) < 5
    assert kernel.bloom_contains(bits, 1 << 16, 7, b"") == b""


def test_both_kernels_agree() -> None:
    """T2."""
    ids, probes = some_ids(300), some_ids(3000, publisher=43)
    for m, k in ((8, 2), (63, 1), (777, 4), (3001, 5)):
        one, two = bytearray((m + 7) // 8), bytearray((m + 7) // 8)
        chosen.bloom_add(one, m, k, ids)
        reference.bloom_add(two, m, k, ids)
        assert one == two
        assert chosen.bloom_contains(one, m, k, probes) == reference.bloom_contains(two, m, k, probes)


def test_the_largest_filter_has_its_last_bit() -> None:
    positions = reference.bloom_positions(some_ids(100_000), 1 << 32, 4)
    assert int(positions.max()) < 1 << 32
    assert int(positions.max()) > 0.9999 * (1 << 32)


@pytest.mark.parametrize(
    ("m", "k", "n", "trials"),
    [
        (1_000, 7, 100, 20),
        (1_024, 7, 100, 20),
        (2_310, 10, 200, 20),  # many divisors, where plain double hashing falls into short cycles
        (10_007, 3, 2_000, 5),
        (95_851, 7, 10_000, 3),
        (2_400, 17, 100, 40),  # right 99.999% of the time
        (24_000, 17, 1_000, 40),
    ],
)
def test_false_positive_rate(m: int, k: int, n: int, trials: int) -> None:
    """T2: the measured false-positive rate agrees with (1 - (1 - 1/m)**(kn))**k."""
    probes_each = 100_000
    probes = some_ids(probes_each, publisher=99)
    found = 0
    for trial in range(trials):
        bits = bytearray((m + 7) // 8)
        chosen.bloom_add(bits, m, k, some_ids(n, publisher=trial))
        found += chosen.bloom_contains(bits, m, k, probes).count(1)
    rate = (1 - (1 - 1 / m) ** (k * n)) ** k
    expected = rate * probes_each * trials
    # Two sources of chance: which probes hit (binomial), and how full each filter happens to be. The share
    # of bits set has a variance below 1 / (4 m), and the rate changes k / share times as fast.
    share = 1 - math.exp(-k * n / m)
    deviation = math.sqrt(expected + (expected * k / share) ** 2 / (4 * m * trials))
    assert abs(found - expected) < 4 * deviation


def test_positions_are_uniform() -> None:
    m, k = 97, 6
    positions = reference.bloom_positions(some_ids(50_000), m, k)
    for column in range(k):
        counts = np.bincount(positions[:, column].astype(np.int64), minlength=m)
        chi_square = float(((counts - 50_000 / m) ** 2 / (50_000 / m)).sum())
        assert chi_square < 160  # 96 degrees of freedom: exceeded once in 20,000 columns


@KERNELS
@pytest.mark.parametrize(
    ("size", "m", "k", "ids"),
    [
        (1, 7, 1, 16),
        (125, 1000, 0, 16),
        (125, 1000, 65, 16),
        (124, 1000, 7, 16),
        (126, 1000, 7, 16),
        (125, 1000, 7, 15),
    ],
)
def test_arguments_are_checked(kernel: ModuleType, size: int, m: int, k: int, ids: int) -> None:
    with pytest.raises(BugError):
        kernel.bloom_add(bytearray(size), m, k, bytes(ids))
    with pytest.raises(BugError):
        kernel.bloom_contains(bytearray(size), m, k, bytes(ids))


@KERNELS
def test_more_bits_than_can_be_addressed(kernel: ModuleType) -> None:
    with pytest.raises(BugError, match="cannot be"):
        kernel.bloom_add(bytearray(8), (1 << 32) + 1, 7, bytes(16))


@KERNELS
def test_only_what_can_be_written_is_written(kernel: ModuleType) -> None:
    with pytest.raises(BugError, match="writable"):
        kernel.bloom_add(bytes(125), 1000, 7, bytes(16))
