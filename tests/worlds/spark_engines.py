"""Engines of Spark as separate processes on loopback: a standalone cluster, a Spark Connect server (P10)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark
from tests.worlds.processes import SOURCE, wait_until

from postroad.spark.java import java_home

REPOSITORY = Path(__file__).parents[2]
START_S = 120.0
RUN_S = 400.0
LOG = """
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
# Short jobs: compiling well takes longer than running. What is compiled so has 48 MB if nothing is said, and
# all tests of a session together fill those.
LIGHT = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
DEFAULTS = f"""
spark.sql.shuffle.partitions 2
spark.default.parallelism 2
spark.executor.memory 600m
spark.driver.defaultJavaOptions {LIGHT}
spark.executor.defaultJavaOptions {LIGHT}
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(SOURCE), str(REPOSITORY)))
    return os.environ | {
        "PYTHONPATH": path,
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(Path(pyspark.__path__[0])),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
    }


class Engine:
    """Processes in one folder; `end` ends them all, and what they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "log4j2.properties").write_text(LOG)
        self._processes: list[subprocess.Popen[bytes]] = []

    def _java(self, name: str, options: list[str], *arguments: str) -> Path:
        """Start a class of Spark's in a process group of its own; its log."""
        log = self.folder / f"{name}.log"
        jars = Path(pyspark.__path__[0]) / "jars"
        java = java_home() / "bin" / "java"
        opened = [
            "java.base/java.lang",
            "java.base/java.lang.invoke",
            "java.base/java.lang.reflect",
            "java.base/java.io",
            "java.base/java.net",
            "java.base/java.nio",
            "java.base/java.util",
            "java.base/java.util.concurrent",
            "java.base/java.util.concurrent.atomic",
            "java.base/jdk.internal.ref",
            "java.base/sun.nio.ch",
            "java.base/sun.nio.cs",
            "java.base/sun.util.calendar",
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    str(java),
                    *LIGHT.split(),
                    *(f"--add-opens={one}=ALL-UNNAMED" for one in opened),
                    f"-Dlog4j2.configurationFile={(self.folder / 'log4j2.properties').as_uri()}",
                    "-Dio.netty.tryReflectionSetAccessible=true",
                    *options,
                    "-cp",
                    f"{jars}/*",
                    *arguments,
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment(),
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def _says(self, log: Path, pattern: str) -> str:
        """The first group of the pattern, once the log has it."""
        compiled = re.compile(pattern)
        try:
            wait_until(lambda: compiled.search(log.read_text()) is not None, pattern, START_S)
        except AssertionError:
            raise AssertionError(f"{log.name} does not say {pattern!r}:\n{log.read_text()[-3000:]}") from None
        found = compiled.search(log.read_text())
        assert found is not None
        return found[1]

    def end(self) -> None:
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Cluster(Engine):
    """A master and two workers, each of one core."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        spark = "org.apache.spark.deploy"
        place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        log = self._java("master", ["-Xmx160m"], f"{spark}.master.Master", *place)
        self.url = self._says(log, r"(spark://127\.0\.0\.1:\d+)")
        workers = [
            self._java(
                name,
                ["-Xmx160m"],
                f"{spark}.worker.Worker",
                *(*place, "--cores", "1", "--memory", "700m"),
                *("--work-dir", str(folder / name), self.url),
            )
            for name in ("worker-1", "worker-2")
        ]
        for worker in workers:
            self._says(worker, r"(Successfully registered with master)")

    def executors(self) -> list[int]:
        """Process ids of the executors that run now."""
        found: list[int] = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (place / "cmdline").read_bytes().split(b"\0")
                mine = os.readlink(place / "cwd").startswith(str(self.folder))
                if mine and b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in words:
                    found.append(int(place.name))
        return sorted(found)


class ConnectServer(Engine):
    """A Spark Connect server with an engine of its own, local[2]."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        settings = {
            "spark.master": "local[2]",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.log.structuredLogging.enabled": "false",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        log = self._java(
            "connect",
            ["-Xmx900m", *(f"-D{key}={value}" for key, value in settings.items())],
            "org.apache.spark.sql.connect.service.SparkConnectServer",
        )
        self.url = "sc://127.0.0.1:" + self._says(log, r"Connect server started at: \S*?:(\d+)")


class Driver:
    """A Python program that drives Spark, in a process group of its own."""

    def __init__(
        self, log: Path, script: str, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        conf = log.parent / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "spark-defaults.conf").write_text(DEFAULTS)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", script, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment() | {"SPARK_CONF_DIR": str(conf)} | dict(settings or {}),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9, of its JVM too."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def interrupt(self) -> None:
        """As Ctrl-C does, which a terminal sends to all of the group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def finish(self, seconds: float = RUN_S) -> str:
        """Wait for its end; what it printed."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done after {seconds} s:\n{self.log.read_text()[-4000:]}") from None
        text = self.log.read_text()
        assert code == 0, f"exit code {code}:\n{text[-4000:]}"
        return text

    def end(self) -> None:
        if self.running:
            self.kill()
