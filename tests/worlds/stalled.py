"""Clients that say what they want and then do nothing: raw sockets that read when they are told to."""

from __future__ import annotations

import contextlib
import socket
from types import TracebackType

from postroad.wire.frames import (
    DEFAULT_LIMITS,
    Hello,
    Message,
    Splitter,
    Subscribe,
    Subscribed,
    Welcome,
    decode,
    encode,
)

WINDOW = 64 << 20  # the largest that a broker takes


class RawClient:
    """A client's connection, up, without any of the client's code behind it."""

    def __init__(self, address: str, *, name: str = "raw", token: str = "", window: int = WINDOW) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._splitter = Splitter(DEFAULT_LIMITS.batch_bytes)
        self._frames: list[bytes] = []
        hello = Hello(
            version=1, role="client", name=name, token=token, limits=DEFAULT_LIMITS, window=window, time_us=0
        )
        try:
            self.send(hello)
            self.wait_for(Welcome)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def send_some(self, data: bytes) -> None:
        """As much of it as is taken before the broker closes the connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def read(self) -> bytes:
        """The next frame. ConnectionError: there is none any more."""
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    def wait_for(self, kind: type[Message]) -> Message:
        """The next message of this kind; others are passed over."""
        while True:
            message = decode(self.read())
            if isinstance(message, kind):
                return message

    def subscribe(self, topic: str, *, number: int = 1, where: str = "", **asked: object) -> None:
        self.send(Subscribe(number=number, topic=topic, where=where, **asked))  # type: ignore[arg-type]
        self.wait_for(Subscribed)
