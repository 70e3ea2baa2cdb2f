"""Errors travel in control frames and stand in logs, so what they say is bounded."""

from __future__ import annotations

import copy
import pickle

import pytest

from postroad import errors
from postroad.errors import MAX_MESSAGE, PostroadError, SelectorError, StorageError, from_name, from_wire
from postroad.seam.storage import NoRoom


def every(kind: type[PostroadError]) -> list[type[PostroadError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in every(child))]


@pytest.mark.parametrize("kind", every(PostroadError))
def test_a_message_is_bounded_whatever_was_put_into_it(kind: type[PostroadError]) -> None:
    assert str(kind("short")) == "short"
    assert str(kind("x" * MAX_MESSAGE)) == "x" * MAX_MESSAGE
    text = str(kind("begin" + "x" * (4 << 20)))
    assert text.startswith("begin")
    assert text.endswith("...")
    assert len(text) == MAX_MESSAGE
    assert len(str(from_wire(kind.code, "y" * (4 << 20)))) == MAX_MESSAGE


def test_an_error_without_a_message() -> None:
    assert str(errors.UnavailableError()) == ""


def test_a_short_condition_is_shown_whole() -> None:
    error = SelectorError("a value is missing", text="price >", position=6)
    assert str(error) == "a value is missing at character 7\n  price >\n        ^"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), str(copy.copy(error))) == (str(error), str(error))


@pytest.mark.parametrize("position", [0, 50, 2000, 4094, 4095, 4096])
def test_of_a_long_condition_the_place_is_shown(position: int) -> None:
    text = "".join(chr(0x100 + at) for at in range(4096))
    lines = str(SelectorError("wrong", text=text, position=position)).split("\n")
    assert lines[0] == f"wrong at character {position + 1}"
    column = lines[2].index("^")
    if position < len(text):
        assert lines[1][column] == text[position]
    assert max(map(len, lines)) < 200
    assert lines[1].startswith("  ...") == (position > 2000 - 1950)


def test_an_error_without_a_code_of_its_own_travels_as_its_parent() -> None:
    assert type(from_name("StorageError", "full")) is StorageError
    assert NoRoom.code == StorageError.code
    assert type(from_wire("storage", "full")) is StorageError
