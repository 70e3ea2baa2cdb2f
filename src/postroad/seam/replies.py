"""Answers to what clients request, for whichever room gives them, at once or later."""

from __future__ import annotations

from collections.abc import Mapping

from postroad.errors import PostroadError, UsageError, shorten
from postroad.seam.turn import Turn
from postroad.wire.frames import Reply, encode, json_within_frame


def reply(turn: Turn, connection: int, number: int, body: Mapping[str, object]) -> None:
    """`number` is the request's. UnavailableError if the body is too large for one frame."""
    answer = Reply(number=number, code="", body=json_within_frame(body))
    turn.send(connection, encode(answer))


def reply_error(turn: Turn, connection: int, number: int, error: PostroadError) -> None:
    """The request could not be granted."""
    turn.send(connection, encode(Reply(number=number, code=error.code, body=str(error))))


def whole_number(text: str, most: int) -> int:
    """What an argument of a request says: 0 to `most` in plain digits. UsageError if it says anything else:
    int() also reads digits of other scripts, and fails over a few thousand of them."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or int(text) > most:
        raise UsageError(f"a number is 0 to {most}, not {shorten(text, 40)!r}")
    return int(text)
