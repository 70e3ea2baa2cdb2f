"""The documents do what they say: every block of shell and Python of a page is typed here, in order.

Pages whose blocks need more than a broker have a test of their own; `tests.worlds.pages.RUN_BY` names it.
"""

from __future__ import annotations

import pytest
from tests.worlds.pages import RUN_BY, TYPED, Desk, blocks, pages_to_type


def test_there_are_pages_to_type() -> None:
    assert len(pages_to_type()) >= 5
    assert not RUN_BY.keys() & {*pages_to_type()}


@pytest.mark.parametrize("page", pages_to_type())
def test_a_page(desk: Desk, page: str) -> None:
    assert [block for block in blocks(page) if block.language in TYPED]
    desk.type_page(page)
