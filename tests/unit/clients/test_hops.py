"""Which traceparents are told of (W3C Trace Context, section 3.2)."""

from __future__ import annotations

import pytest

from postroad.clients.hops import is_sampled

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_sampled_one_is() -> None:
    assert is_sampled(f"00-{TRACE}-{SPAN}-01")
    assert is_sampled(f"00-{TRACE}-{SPAN}-03")


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}-00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01-more",
        "x" * 100_000,
    ],
)
def test_others_are_not(text: str) -> None:
    assert not is_sampled(text)
