"""What commands ask of the whole network, through one broker."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from postroad.cli.words import printable

if TYPE_CHECKING:
    from postroad.client.aio import Client


async def ask_all(client: Client, what: str, **arguments: str) -> dict[str, Any]:
    """{"answers": {broker: its answer}, "silent": [broker], "refused": {broker: why}}."""
    answer = await client.request("network", what=what, **arguments)
    for broker in (
        list(answer["refused"]) if "broker" not in arguments else []
    ):  # there may be room for it alone
        alone = await client.request("network", what=what, broker=broker, **arguments)
        answer["refused"] |= alone["refused"]
        if broker in alone["answers"]:
            answer["answers"][broker] = alone["answers"][broker]
            del answer["refused"][broker]
    return answer


def report_missing(answer: dict[str, Any]) -> None:
    """Say on stderr who did not answer, and why."""
    if answer["silent"]:
        print(f"postroad: no answer from {printable(', '.join(answer['silent']))}", file=sys.stderr)
    for broker, reason in answer["refused"].items():
        print(f"postroad: {printable(f'{broker} did not answer: {reason}')}", file=sys.stderr)
