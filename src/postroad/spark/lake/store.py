"""Where a lake is: a folder, or a place in an object store or on HDFS (spec P4, P10).

One thing names it, for the driver and for executors alike. Settings of an object store are taken from the
environment where the command runs, and travel with it, so executors need none of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any, Final

from postroad.errors import PostroadError, StorageError, UsageError, shorten

SCHEMES: Final = ("s3", "s3a", "gs", "abfs", "abfss", "hdfs")
_FORMS: Final = f"begins with {', '.join(SCHEMES)} and ://, with a place after it"
_URL: Final = re.compile(r"([a-z0-9]+)://(.+)")
_LIKE_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # a folder of such a name is ./NAME
_SETTINGS: Final = ("AWS_", "GOOGLE_", "AZURE_", "HADOOP_CONF_DIR")  # of the environment, beginnings of names
_UNUSABLE: Final = re.compile(r"[%\\]")  # of a folder's name, which the log of a table would read otherwise
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m|↳")
_SAID: Final = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)  # by an object store
_MAX_REASON: Final = 300  # characters


@dataclass(frozen=True, slots=True)
class Store:
    """A place for tables. `folder` is there if it is one of this machine's file system."""

    url: str
    folder: Path | None
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.url

    def table(self, name: str) -> str:
        return f"{self.url}/{name}"

    def create(self, table: str, path: str) -> IO[bytes]:
        """A new file of a table: nothing is there under its name until it is closed, or it is cut short."""
        if self.folder is not None:
            file = self.folder / table / path
            file.parent.mkdir(parents=True, exist_ok=True)
            return file.open("xb")
        stream: IO[bytes] = self._files(table).open_output_stream(path)
        return stream

    def close(self, out: IO[bytes]) -> None:
        """Close a file that was created; in a folder it is on the disk then, whenever the machine stops."""
        if self.folder is not None:
            out.flush()
            os.fsync(out.fileno())
        out.close()

    def sync_log(self, table: str, versions: range) -> None:
        """Have commits on the disk: brokers forget what they are told was landed."""
        if self.folder is None:
            return
        log = self.folder / table / "_delta_log"
        for place in (*(log / f"{version:020}.json" for version in versions), log):
            opened = os.open(place, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def open(self, table: str, path: str) -> Any:
        if self.folder is not None:
            return (self.folder / table / path).open("rb")
        return self._files(table).open_input_file(path)

    def missing(self, table: str, paths: Iterable[str]) -> str | None:
        """A file that a task says it wrote and that is not there, if there is one.

        Where the folder is a network file system, looking at a file is not enough: the system may remember
        for a while that there was none, until the folders above it are listed. In other stores somebody's
        clean-up may have been faster than a long batch.
        """
        if self.folder is None:
            from pyarrow.fs import FileType

            with plain_failures(f"{self.table(table)} cannot be read"):
                about = self._files(table).get_file_info(list(paths))
            return next((info.path for info in about if info.type == FileType.NotFound), None)
        for path in paths:
            file = self.folder / table / path
            if not file.exists():
                for above in reversed(PurePath(table, path).parents):
                    if (self.folder / above).is_dir():
                        os.listdir(self.folder / above)
                if not file.exists():
                    return path
        return None

    def remove(self, table: str, paths: Iterable[str]) -> None:
        """Files that are of no version; one that is gone meanwhile is no matter."""
        for path in paths:
            if self.folder is not None:
                (self.folder / table / path).unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):
                    self._files(table).delete_file(path)

    def paths(self, table: str) -> list[str]:
        """All files below a table's place, whether they are of it or not."""
        if self.folder is not None:
            place = self.folder / table
            return [str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()]
        from pyarrow.fs import FileSelector, FileType

        listed = self._files(table).get_file_info(FileSelector("", recursive=True, allow_not_found=True))
        return [info.path for info in listed if info.type == FileType.File]

    def surrounding_table(self) -> str | None:
        """The Delta table that this place is, or lies in. Of a store it is looked for here and one level
        above: each look is a request."""
        if self.folder is not None:
            places = (self.folder, *self.folder.parents)
            return next((str(place) for place in places if (place / "_delta_log").is_dir()), None)
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        with plain_failures(f"{self.url} cannot be read"):
            if DeltaTable.is_deltatable(self.url, dict(self.options)):
                return self.url
        above = self.url.rpartition("/")[0]
        try:
            within = not above.endswith("/") and DeltaTable.is_deltatable(above, dict(self.options))
        except (DeltaError, OSError):  # who may use a lake need not be allowed to look beside it
            within = False
        return above if within else None

    def _files(self, table: str) -> Any:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self.table(table), dict(self.options)))


def store_at(place: str | Path, environment: Mapping[str, str] | None = None) -> Store:
    """The store that a person names; UsageError if it can be none."""
    text = str(place)
    parts = _URL.fullmatch(text)
    if not text or (parts is None and _LIKE_URL.match(text)):
        raise UsageError(f"a lake is a folder, or {_FORMS}; not {text!r}")
    if parts is None or parts[1] == "file":
        folder = Path(text if parts is None else f"/{parts[2].lstrip('/')}").absolute()
        if _UNUSABLE.search(str(folder)):
            raise UsageError(f"{folder} cannot be a lake: the name of its folder has a % or a \\ in it")
        return Store(str(folder), folder)
    if parts[1] not in SCHEMES:
        raise UsageError(f"a lake is a folder, or {_FORMS}; not {text!r}")
    given = os.environ if environment is None else environment
    options = {name: value for name, value in given.items() if name.startswith(_SETTINGS)}
    return Store(text.rstrip("/"), None, options)


@contextmanager
def plain_failures(doing: str) -> Iterator[None]:
    """Failures of a store in one line."""
    from deltalake.exceptions import DeltaError
    from pyarrow import ArrowInvalid  # of a file that is damaged

    try:
        yield
    except PostroadError:
        raise
    except (DeltaError, OSError, ArrowInvalid) as error:
        raise StorageError(f"{doing}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What a store said last, which is the cause of all before it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = _SAID.search(str(error))
    if said is not None:
        return shorten(" ".join(f"{said[1]}: {said[2]}".split()), _MAX_REASON)
    lines = [_ESCAPES.sub("", line).strip() for line in str(error).splitlines()]
    texts = [line for line in lines if line]
    chosen = texts if len(texts) < 3 else (texts[0], texts[-1])
    return shorten(": ".join(chosen) or repr(error), _MAX_REASON)
