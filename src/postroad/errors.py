"""Every exception Postroad raises, in one tree.

Three kinds of fault are kept apart, because three different people act on them: the caller's
(`UsageError`: fix the call), the peer's (`PeerError`: the other side broke the protocol, its link is
closed) and our own (`BugError`: an invariant does not hold; report it). What the world does to us
(`UnavailableError`, `StorageError`) is nobody's fault and worth a retry.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE: Final = (
    2_000  # characters; what somebody sent may be part of a message, and is sent back with it
)
_EXCERPT: Final = 60  # characters of a condition shown on either side of the place that is wrong
_CUT: Final = "..."


class PostroadError(Exception):
    """The root of all Postroad errors. `code` is what travels on the wire."""

    code = "error"

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message, MAX_MESSAGE))


class UsageError(PostroadError):
    """The caller asked for something that cannot be: bad topic, bad option, bad configuration."""

    code = "usage"


class SelectorError(UsageError):
    """A condition that does not parse or is not allowed. `position` is the offending character's index."""

    code = "selector"

    def __init__(self, message: str, *, text: str = "", position: int = 0) -> None:
        super().__init__(message)
        self.message = shorten(message, MAX_MESSAGE)
        self.text = text
        self.position = position

    def __str__(self) -> str:
        if not self.text:
            return self.message
        begin, end = max(0, self.position - _EXCERPT), self.position + _EXCERPT
        before = _CUT if begin else ""
        after = _CUT if end < len(self.text) else ""
        pointer = " " * (len(before) + self.position - begin)
        # On one line, so that the mark stands below its character.
        shown = "".join(letter if letter.isprintable() else " " for letter in self.text[begin:end])
        return f"{self.message} at character {self.position + 1}\n  {before}{shown}{after}\n  {pointer}^"


class TooLargeError(UsageError):
    """An event, topic, attribute set or batch over its limit."""

    code = "too-large"


class DeniedError(UsageError):
    """Authentication failed, or an access rule forbids it."""

    code = "denied"


class DeletedError(UsageError):
    """The durable subscription was deleted while this one used it."""

    code = "deleted"


class MovedError(UsageError):
    """Another connection, at another broker, took the durable subscription."""

    code = "moved"


class PeerError(PostroadError):
    """The other side broke the protocol or a limit. Its link is closed; nothing else suffers."""

    code = "protocol"


class DamagedError(PeerError):
    """Bytes changed on their way: a frame has another checksum than it says. A new connection goes on."""

    code = "damaged"


class UnavailableError(PostroadError):
    """No broker could be reached, or it went away before it answered."""

    code = "unavailable"


class RedundantError(UnavailableError):
    """Another connection does this one's work: a second link to one broker, or to oneself."""

    code = "redundant"


class SlowConsumerError(UnavailableError):
    """This subscriber fell behind its buffer and its policy is to be disconnected."""

    code = "slow-consumer"


class FullError(UnavailableError):
    """An inbox or its arc is at a limit. Nothing of the message is kept: it may be sent again later."""

    code = "full"


class TakenError(PostroadError):
    """Another consumer has accepted the message, or it is gone: the work of this one does not count."""


class StorageError(PostroadError):
    """A disk is full, failing or damaged. What was acknowledged before stays readable."""

    code = "storage"


class BugError(PostroadError):
    """An invariant of our own does not hold."""

    code = "bug"


def shorten(text: str, limit: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def _tree(kind: type[PostroadError]) -> dict[str, type[PostroadError]]:
    kinds: dict[str, type[PostroadError]] = {}
    for child in kind.__subclasses__():
        kinds |= _tree(child)
    return kinds | {kind.code: kind}  # a child without a code of its own travels as this


def from_wire(code: str, message: str) -> PostroadError:
    """The error a peer reported, as the exception our caller should see."""
    return _tree(PostroadError).get(code, PostroadError)(message)


def from_name(name: str, message: str) -> PostroadError:
    """The error of a worker process, known by the name of its class in a traceback."""
    known = {kind.__name__: kind for kind in _tree(PostroadError).values()}
    return known.get(name, PostroadError)(message)
