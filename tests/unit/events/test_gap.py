"""A Gap says in words whose events are missing, from when to when, and why."""

from __future__ import annotations

from postroad.events import Gap, GapError

TIME_US = 1_767_225_595_389_539


def test_in_words() -> None:
    said = str(Gap(pubend="086dac05-00000000", start=TIME_US, end=TIME_US + 2_000_000))
    assert said == (
        "events published at broker 086dac05 between 2025-12-31 23:59:55.389 UTC and"
        " 2025-12-31 23:59:57.389 UTC may be missing: they were lost, or are not kept any more"
    )
    assert "broker 086dac05 before 2025-12-31 23:59:55.389 UTC" in str(
        Gap(pubend="086dac05-00000000", start=0, end=TIME_US)
    )
    assert "this client was not connected" in str(Gap(pubend="", start=TIME_US, end=TIME_US + 1))
    assert "events 4 to 6 of publisher 00400001-6a3542e7" in str(
        Gap(pubend="00400001-6a3542e7", start=3, end=6)
    )
    assert "events 4 of publisher" in str(Gap(pubend="00400001-6a3542e7", start=3, end=4))
    assert "the end of time" in str(Gap(pubend="086dac05-00000000", start=TIME_US, end=1 << 62))


def test_as_an_error() -> None:
    gap = Gap(pubend="086dac05-00000000", start=TIME_US, end=TIME_US + 1)
    assert str(GapError(gap)) == str(gap)
    assert GapError(gap).gap is gap
