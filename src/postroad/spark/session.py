"""The one place that makes a Spark session (spec P10).

`local[*]` is the default and needs nothing prepared. Another engine is chosen with `master` (a standalone
cluster, YARN, Kubernetes) or `remote` (Spark Connect); executors there need Postroad installed.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from postroad.errors import UnavailableError, UsageError
from postroad.spark.python import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
CONNECT_S: Final = 5
_MASTER: Final = re.compile(
    r"local(\[([1-9]\d*|\*)(,\d+)?\])?|local-cluster\[.*\]|yarn|k8s://.+|spark://[^/,;:]+:\d+(,[^/,;:]+:\d+)*"
)
_PLACES: Final = re.compile(r"(?:spark|sc)://([^/;]+).*")  # of a standalone master, or of Spark Connect
_QUIET: Final = Path(__file__).with_name("log4j2.properties")
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A group of ids and filters is handed to Python as one table; its pieces on the way need not be small.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
}
_OWN_DRIVER: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.log.structuredLogging.enabled": "false",
    # Spark looks for a cause in the text of a failure, of which a long one overflows a stack of usual size.
    "spark.driver.extraJavaOptions": f"-Xss8m -Dlog4j2.configurationFile={_QUIET.as_uri()}",
}
_ON_THIS_MACHINE: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "16",
}


def check_installed() -> None:
    """UnavailableError where Postroad was installed without what the pipeline needs."""
    for name in ("pyspark", "pyarrow", "deltalake"):
        try:
            import_module(name)
        except ImportError:
            raise UnavailableError(
                f"the pipeline needs Spark, and there is no {name}: pip install 'postroad[spark]'"
            ) from None


def check_engine(master: str, remote: str) -> None:
    """Spark itself says it in many lines, and after a while."""
    if remote and master != LOCAL:
        raise UsageError("--master and --remote exclude each other")
    if remote and not remote.startswith("sc://"):
        raise UsageError(f"--remote is sc://HOST:PORT, not {remote!r}")
    if _MASTER.fullmatch(master) is None:
        raise UsageError(f"--master is local[*], spark://HOST:PORT, yarn or k8s://..., not {master!r}")
    if master == "yarn" and not {"HADOOP_CONF_DIR", "YARN_CONF_DIR"} & set(os.environ):
        raise UsageError("--master yarn needs HADOOP_CONF_DIR or YARN_CONF_DIR: the cluster's settings")


def make_session(
    *,
    master: str = LOCAL,
    remote: str = "",
    name: str = "postroad",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session, or the one there is; UnavailableError says in one line why there can be none."""
    check_engine(master, remote)
    check_installed()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    _choose_python(local=not remote and master.startswith("local"))
    _check_reachable(remote or master)
    chosen = dict(_SETTINGS)
    builder = SparkSession.Builder().appName(name)
    if remote:
        builder = builder.remote(remote)
    else:
        from postroad.spark.java import java_home

        os.environ["JAVA_HOME"] = str(java_home())
        chosen |= _OWN_DRIVER
        if master.startswith("local"):
            chosen |= _ON_THIS_MACHINE
        builder = builder.master(master)
    for key, value in (chosen | dict(settings or {})).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        where = remote or master
        line = str(error).strip().splitlines()
        raise UnavailableError(f"no Spark at {where}: {line[0] if line else error!r}") from None
    except Exception as error:
        # Py4J wraps whatever the JVM threw, in many lines.
        if type(error).__module__.startswith("py4j"):
            raise UnavailableError(f"no Spark at {remote or master}: {_first_line(error)}") from None
        raise


def _choose_python(*, local: bool) -> None:
    """Executors must be of the same Python, or nothing that is sent to them can be read."""
    ours = worker_python()
    if os.environ.get("PYSPARK_PYTHON", "") in ("", str(ours), sys.executable):
        os.environ["PYSPARK_PYTHON"] = str(ours) if local else sys.executable


def _check_reachable(url: str) -> None:
    """Spark itself tries for minutes, and then fails somewhere else."""
    places = _PLACES.fullmatch(url)
    if places is None:
        return
    failures: list[str] = []
    for place in places[1].split(","):
        host, _, port = place.partition(":")
        try:
            with socket.create_connection((host, int(port or 15002)), timeout=CONNECT_S):
                pass
            if url.startswith("sc:"):
                _check_connect(f"{host}:{port or 15002}", url)
            return
        except (OSError, ValueError) as error:
            failures.append(f"{place}: {error}")
    raise UnavailableError(f"no Spark at {url}: {'; '.join(failures)}")


def _check_connect(place: str, url: str) -> None:
    """What is no Spark Connect server is asked again and again by its client, for a quarter of an hour."""
    if "use_ssl=true" in url or ";token=" in url:  # which is by TLS
        return
    grpc: Any = import_module("grpc")
    with grpc.insecure_channel(place) as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            raise UnavailableError(f"no Spark at {url}: {place} answers, but not as Spark Connect") from None


def _first_line(error: Exception) -> str:
    lines = [line.strip(" :") for line in str(error).splitlines()]
    if "stopped SparkContext" in str(error):  # it gave up asking
        return "no master of Spark answers there"
    return next((line for line in lines if "Exception" in line), lines[0] if lines else repr(error))


@contextmanager
def session(*, master: str = LOCAL, remote: str = "", name: str = "postroad") -> Iterator[SparkSession]:
    """A session that ends with the block."""
    made = make_session(master=master, remote=remote, name=name)
    try:
        yield made
    finally:
        made.stop()
