"""What a long job is doing, while it runs; and its failures in one line (spec P11)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from postroad.errors import PostroadError, StorageError, from_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S: Final = 0.25
_OURS: Final = re.compile(r"postroad\.errors\.(\w+): (.*)")
_REASON: Final = re.compile(r"(?:Caused by: )?[\w.$]+(?:Exception|Error): (.*)")


@contextmanager
def watched(spark: SparkSession, doing: str) -> Iterator[None]:
    """A bar on stderr with tasks, rows and rows a second of what runs now; failures become one line.

    Where stderr is no terminal, a line says that it begins.

    A Spark Connect server tells bytes that were read instead of rows.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tasks")),
        *(TextColumn("{task.fields[rows]}"), TimeElapsedColumn()),
    )
    ended = threading.Event()
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{doing} ...")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(doing, total=None, rows="")

        def poll() -> None:
            began, before = time.monotonic(), 0
            while not ended.wait(POLL_S):
                done, total, rows = running(spark)
                if not total:
                    continue
                now = time.monotonic()
                if rows < before:  # the next stage counts from nothing
                    began = now
                before = rows
                rate = rows / (now - began) if now > began else 0.0
                progress.update(bar, completed=done, total=total, rows=f"{rows:,} rows, {rate:,.0f}/s")

        def hear(stages: Iterable[Any] | None, **_: object) -> None:
            listed = list(stages or ())
            done, total, size = (
                sum(getattr(stage, name) for stage in listed)
                for name in ("num_completed_tasks", "num_tasks", "num_bytes_read")
            )
            if total:
                progress.update(bar, completed=done, total=total, rows=f"{size:,} bytes read")

        remote = type(spark).__module__.startswith("pyspark.sql.connect")
        thread = threading.Thread(target=poll, name="progress", daemon=True)
        if remote:
            spark.registerProgressHandler(cast(Any, hear))
        else:
            thread.start()
        try:
            with plain_errors():
                yield
        finally:
            ended.set()
            if not remote:
                thread.join()


def running(spark: SparkSession) -> tuple[int, int, int]:
    """(tasks done, tasks, rows so far) of the stages that run now; nothing where Spark does not tell."""
    try:
        stages: Any = spark.sparkContext._jsc.sc().statusStore().activeStages()
        listed = [stages.apply(at) for at in range(stages.size())]
        return (
            sum(stage.numCompleteTasks() for stage in listed),
            sum(stage.numTasks() for stage in listed),
            sum(max(stage.inputRecords(), stage.shuffleReadRecords()) for stage in listed),
        )
    except Exception:
        # A session that ends closes this door under us. It is only a picture.
        return 0, 0, 0


@contextmanager
def plain_errors() -> Iterator[None]:
    """Failures of Spark as ours: what went wrong in an executor, or the reason Spark gives, in one line."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PostroadError:
        raise
    except Exception as error:
        if not isinstance(error, PySparkException) and not type(error).__module__.startswith("py4j"):
            raise
        raise translated(str(error)) from error


def translated(text: str) -> PostroadError:
    ours = _OURS.findall(text)
    if ours:
        name, message = ours[-1]
        return from_name(name, message.strip())
    reasons = _REASON.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return StorageError(
        f"the job failed: {(reasons or lines or ['Spark does not say why'])[-1 if reasons else 0]}"
    )
