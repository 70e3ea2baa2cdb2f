"""`postroad discover` for people."""

from __future__ import annotations

import pytest

from postroad.cli.discover import _show
from postroad.discovery.search import SearchResult
from postroad.discovery.selection import Candidate
from postroad.wire.discovery import Response, Usage


@pytest.mark.parametrize("name", ["[/b]x", "[red]x", "[link=http://x]y"])
def test_names_that_others_chose_are_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    response = Response(
        uuid=bytes(16),
        attempt=1,
        sent_us=0,
        broker=1,
        name=name,
        address="[::1]:7420",
        transports=(),
        ping_key=bytes(24),
        usage=Usage(),
        network=1,
        members=1,
    )
    candidate = Candidate(
        response=response, endpoint=("::1", 7420), address="[::1]:7420", delay_us=0, weight=0.0
    )
    _show(SearchResult(candidates=(candidate,), pinged=1, phases_us={}))
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[:2] == [name, "[::1]:7420"]
