"""A real S3 server, versitygw, as a process on loopback: the machine's own, or built from Go's index."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from tests.worlds.processes import wait_until

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILD_S = 1200
BUCKET = "bucket"
KEY, SECRET = "key", "not-a-secret"


def program(folder: Path) -> Path:
    """The server; the test is skipped where there is neither it nor Go."""
    found = shutil.which("versitygw")
    if found is not None:
        return Path(found)
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no versitygw, and no Go to build it with")
    subprocess.run(
        [go, "install", MODULE], env=os.environ | {"GOBIN": str(folder)}, check=True, timeout=BUILD_S
    )
    return folder / "versitygw"


class S3Server:
    """One bucket, whose objects are files in `folder / "bucket"`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / BUCKET).mkdir(parents=True)
        self.url = f"s3://{BUCKET}"
        self._program = program(folder.parent)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.start()

    def start(self, *options: str) -> None:
        with (self.folder.parent / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), "--port", self.address, *options, "posix", str(self.folder)],
                env=os.environ | {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._answers, "the S3 server answers")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return self.environment_through(self.address)

    def environment_through(self, address: str) -> dict[str, str]:
        """What a client needs who comes by another address."""
        return {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
