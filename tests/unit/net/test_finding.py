"""Where brokers of last time are asked: what cannot be read is left out."""

from __future__ import annotations

import asyncio

import pytest

from postroad.errors import UsageError
from postroad.net.finding import recall, remember, resolve

UNREADABLE = ["a/b:80", "::1:80", "1234", "[]:80", "x:99999", ""]


def test_a_remembered_address_that_cannot_be_read_is_left_out(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember([*UNREADABLE, "127.0.0.1:7420"])
    assert asyncio.run(resolve(recall(), must=False)) == [("127.0.0.1", 7420)]


@pytest.mark.parametrize("address", UNREADABLE)
def test_an_address_that_somebody_named_must_be_one(address: str) -> None:
    with pytest.raises(UsageError):
        asyncio.run(resolve([address]))
