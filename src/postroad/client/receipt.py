"""What publishing gives back."""

from __future__ import annotations

from typing import final

from postroad.ids import MessageId


@final
class Receipt:
    """The id of a published event. Made for every event, so the id is unpacked only when asked for."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def id(self) -> MessageId:
        return MessageId.from_bytes(self._data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return f"Receipt(id={self.id})"
