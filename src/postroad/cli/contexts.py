"""Contexts: named sets of connection options, so that `--broker` and the rest need not be typed each time.

They are in one file of the user's, which nobody else may read: a context may hold a token.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

from postroad.errors import UsageError, shorten

MAX_CONTEXTS: Final = 1_000
MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where to connect to, and as whom; None where it is not said."""

    broker: str | None = None
    token: str | None = None
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def over(self, other: Options) -> Options:
        """What is said here, and what the other says besides. A token, however it is given, is one thing, and
        so are a certificate and its key."""
        mine = {name: value for name, value in asdict(self).items() if value is not None}
        rest = {name: value for name, value in asdict(other).items() if value is not None}
        for together in (("token", "token_file"), ("tls_cert", "tls_key")):
            if any(name in mine for name in together):
                rest = {name: value for name, value in rest.items() if name not in together}
        return Options(**(rest | mine))


@dataclass(slots=True)
class Contexts:
    current: str = ""  # the one in use; "" for none
    by_name: dict[str, Options] = field(default_factory=dict)

    def get(self, name: str) -> Options:
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "there is none; `postroad context add` makes one"
            raise UsageError(f"there is no context {shorten(name, MAX_NAME)!r}: {known}")
        return self.by_name[name]


def place() -> Path:
    """The user's file of contexts."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "postroad" / "contexts.json"


def load() -> Contexts:
    file = place()
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        by_name = {str(name): _options(said) for name, said in read["contexts"].items()}
        return Contexts(str(read["current"]), by_name)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"{file} is damaged: mend it, or remove it to begin anew") from None


def _options(said: dict[str, str]) -> Options:
    known = {option.name for option in fields(Options)}
    if not all(name in known and isinstance(value, str) for name, value in said.items()):
        raise ValueError("an option that is none")
    return Options(**said)


def save(contexts: Contexts) -> None:
    if len(contexts.by_name) > MAX_CONTEXTS:
        raise UsageError(f"there are at most {MAX_CONTEXTS} contexts")
    file = place()
    said = {
        name: {option: value for option, value in asdict(options).items() if value is not None}
        for name, options in contexts.by_name.items()
    }
    text = json.dumps({"current": contexts.current, "contexts": said}, indent=2)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
        beside.replace(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
