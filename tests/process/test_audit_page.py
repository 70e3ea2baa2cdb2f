"""The page of the audit, as a browser shows it: on a screen and on a telephone (P7)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.worlds.audit_pages import findings

from postroad.spark.report import _size, _spread, render

CHROMIUM = shutil.which("chromium")


def test_brokers_have_names_and_times_have_dates() -> None:
    """P7."""
    page = render(findings())
    assert "of brokers warsaw never came" in page
    assert "<td class=t>berlin</td><td class=t>2026-11-15 23:30:05.123456</td><td class=t>paris</td>" in page
    assert "<td class=t>tokyo (0000002e)</td>" in page  # there are two of that name
    assert not re.search(r"<td class=t>0000002.(-00000000)?</td>", page)
    assert "<th>half within</th><th>95 % within</th><th>99 % within</th>" in page
    assert "<td>48 MB</td><td>191 B</td>" in page


def test_sizes_have_two_figures() -> None:
    assert [_size(value) for value in (0, 999, 4_321, 9_960, 1_234_567, 5e10)] == [
        *("0 B", "999 B", "4.3 kB", "10 kB"),
        *("1.2 MB", "50 GB"),
    ]


def test_paths_use_their_space() -> None:
    """A ring fills its square, a line its width; who has no link does not push the others together."""
    ring = _spread("abcd", [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    for axis in (0, 1):
        assert (min(place[axis] for place in ring.values()), max(place[axis] for place in ring.values())) == (
            0,
            1,
        )
    line = _spread("abcx", [("a", "b"), ("b", "c")])
    assert sorted(line[broker] for broker in "abc") == [(0.0, 0.5), (pytest.approx(0.5), 0.5), (1.0, 0.5)]
    assert line["x"][1] < 0
    assert _spread("a", []) == {"a": (0.5, 0.5)}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_it_can_be_read_at_both_widths(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    file = tmp_path / "audit.html"
    file.write_text(render(findings()))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, shown, hidden in ((1400, "wide", "narrow"), (400, "narrow", "wide")):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(file.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
            assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
            assert page.locator(f".{hidden} >> visible=true").count() == 0
            plots = page.locator(f".{shown} svg")
            assert plots.count() >= 6
            for at in range(plots.count()):
                box = plots.nth(at).bounding_box()
                assert box is not None
                # Letters are 9 points at the scale of the plot: they keep that size, or nearly.
                drawn = page.evaluate(
                    "at => document.querySelectorAll(at[0])[at[1]].viewBox.baseVal.width",
                    [f".{shown} svg", at],
                )
                assert box["width"] / drawn > 1.0, "letters below 9 px"
        browser.close()
