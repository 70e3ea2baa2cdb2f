"""Contexts: what a command takes from flags, the environment and a context, and in which order."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from postroad.cli import contexts, main
from postroad.cli.connection import OPTIONS, connecting
from postroad.cli.contexts import Contexts, Options
from postroad.errors import UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def resolved(**given: str) -> Options:
    """What a command is given that is called with these options."""

    def command(*, connection: Options) -> Options:
        return connection

    result = connecting(command)(**{name: given.get(name) for name in (*OPTIONS, "context")})
    assert isinstance(result, Options)
    return result


def test_a_context_is_used_by_its_name_or_because_it_is_in_use(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "token").write_text("s3cret\n")
    assert main(["context", "add", "prod", "--broker", "b1:1", "--token-file", str(home / "token")]) == 0
    assert main(["context", "add", "test", "--broker", "b2:2"]) == 0
    assert resolved() == Options(broker="b1:1", token="s3cret")
    assert resolved(context="test") == Options(broker="b2:2")
    assert resolved(broker="b3:3").broker == "b3:3"
    assert resolved(token="other").token == "other"  # one token, however it is given
    assert main(["context", "use", "test"]) == 0
    assert resolved() == Options(broker="b2:2")
    assert main(["context", "use", "-"]) == 0
    assert resolved() == Options()
    capsys.readouterr()
    assert main(["context", "list"]) == 0
    assert "b1:1" in (listed := capsys.readouterr().out)
    assert "*" not in listed
    assert main(["context", "remove", "prod"]) == 0
    with pytest.raises(UsageError, match="there is no context 'prod': test"):
        resolved(context="prod")


def test_tokens_are_nobody_elses_and_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["context", "add", "prod", "--token", "s3cret"]) == 0
    assert stat.S_IMODE(contexts.place().stat().st_mode) == 0o600
    assert main(["context", "list", "--json"]) == 0
    assert "s3cret" not in capsys.readouterr().out
    assert resolved().token == "s3cret"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["add", "x"], "at least one of"),
        (["add", "", "--broker", "b:1"], "a name of 1 to"),
        (["add", "x", "--broker", "b1:x"], "b1:x"),
        (["add", "x", "--tls-ca", "no-such-file"], "no such file"),
        (["use", "x"], "there is no context 'x'"),
        (["remove", "x"], "there is no context 'x'"),
    ],
)
def test_mistakes_are_told(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["context", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_damaged_file_is_named() -> None:
    contexts.save(Contexts())
    for text in ("", "{}", "[]", '{"current": "", "contexts": {"a": {"brokr": "b:1"}}}'):
        contexts.place().write_text(text)
        with pytest.raises(UsageError, match=r"contexts\.json is damaged"):
            contexts.load()


def test_both_kinds_of_token_and_a_key_alone_are_refused(home: Path) -> None:
    (home / "token").write_text("\n")
    with pytest.raises(UsageError, match="not both"):
        resolved(token="a", token_file="b")
    with pytest.raises(UsageError, match="is empty"):
        resolved(token_file=str(home / "token"))
    with pytest.raises(UsageError, match="add --tls-cert"):
        resolved(tls_key="k")
