"""`postroad page` where it cannot run."""

from __future__ import annotations

import sys

import pytest

from postroad.cli import main


def test_without_the_extra_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    assert main(["page"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'postroad[page]'" in said


def test_an_address_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", "--listen", "192.0.2.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "choose another --listen" in said
