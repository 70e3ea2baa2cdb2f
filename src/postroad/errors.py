"""Every exception Postroad raises, in one tree.

Three kinds of fault are kept apart, because three different people act on them: the caller's
(`UsageError`: fix the call), the peer's (`PeerError`: the other side broke the protocol, its link is
closed) and our own (`BugError`: an invariant does not hold; report it). What the world does to us
(`UnavailableError`, `StorageError`) is nobody's fault and worth a retry.

The text of a class says what it means and, in a second paragraph, what to do: docs/reference/errors.md.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE: Final = (
    2_000  # characters; what somebody sent may be part of a message, and is sent back with it
)
_EXCERPT: Final = 60  # characters of a condition shown on either side of the place that is wrong
_CUT: Final = "..."


class PostroadError(Exception):
    """The root of all Postroad errors. `code` is what travels on the wire.

    Catch this one to catch all. The text says what to do.
    """

    code = "error"

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message, MAX_MESSAGE))


class UsageError(PostroadError):
    """The caller asked for something that cannot be: bad topic, bad option, bad configuration.

    Fix the call. The client goes on.
    """

    code = "usage"


class SelectorError(UsageError):
    """A condition that does not parse or is not allowed. `position` is the offending character's index.

    Mend the condition at the mark.
    """

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
    """An event, topic, attribute set or batch over its limit.

    Send less at a time, or raise `[limits]` at all brokers.
    """

    code = "too-large"


class DeniedError(UsageError):
    """Authentication failed, or an access rule forbids it.

    Check the token or certificate; ask for a rule in `[[auth.rules]]`.
    """

    code = "denied"


class DeletedError(UsageError):
    """The durable subscription was deleted while this one used it.

    Subscribe again if it is still wanted: it begins anew.
    """

    code = "deleted"


class MovedError(UsageError):
    """Another connection, at another broker, took the durable subscription.

    Run one consumer for a name, or share it with `shared=True`.
    """

    code = "moved"


class PeerError(PostroadError):
    """The other side broke the protocol or a limit. Its link is closed; nothing else suffers.

    Compare the versions of both sides. Report it if both are ours.
    """

    code = "protocol"


class DamagedError(PeerError):
    """Bytes changed on their way: a frame has another checksum than it says. A new connection goes on.

    Nothing, once. If it comes again, test the network and memory of the machines.
    """

    code = "damaged"


class UnavailableError(PostroadError):
    """No broker could be reached, or it went away before it answered.

    Try again. A durable publish may have been published: see the clients' page.
    """

    code = "unavailable"


class RedundantError(UnavailableError):
    """Another connection does this one's work: a second link to one broker.

    Nothing; take the second address out of `links` if it is always so.
    """

    code = "redundant"


class SameBrokerError(RedundantError):
    """Both ends of a link are one broker, or copies of one data folder.

    Take the broker's own address out of `links`, or give each broker its own `--data`: the error says which.
    """

    code = "same_broker"


class SlowConsumerError(UnavailableError):
    """This subscriber fell behind its buffer and its policy is to be disconnected.

    Read faster, share the work, or choose `overflow="drop"`.
    """

    code = "slow-consumer"


class FullError(UnavailableError):
    """An inbox or its arc is at a limit. Nothing of the message is kept: it may be sent again later.

    Send again later. Add consumers, or raise `[queues]`.
    """

    code = "full"


class TakenError(PostroadError):
    """Another consumer has accepted the message, or it is gone: the work of this one does not count.

    Undo the work, or ignore it. Accept sooner than the consumer is taken for lost.
    """


class UndeliveredError(PostroadError):
    """No consumer will accept a message: it has expired, is a dead letter, or was dropped.

    Look at the dead letters of the inbox (`postroad queues dead NAME`); send the message again if it is
    still wanted.
    """


class StorageError(PostroadError):
    """A disk is full, failing or damaged. What was acknowledged before stays readable.

    Make room on the broker's disk; it goes on by itself. Look at its log for a failing disk.
    """

    code = "storage"


class BugError(PostroadError):
    """An invariant of our own does not hold.

    Report it with the traceback in the log. A supervisor starts the broker again.
    """

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
