"""The Python of Spark's workers on this machine: this one, which finds PySpark where it is installed.

Spark puts its own zip of PySpark first into the path of every worker. What is in there is compiled at every
start: 1.2 s of processor time against 0.3. Spark waits ten seconds for the Python of a streaming source, and
on a busy machine that is not enough. So workers get a small `python` that leaves the zip out and runs the
real one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from postroad.spark.java import cached_script, quoted

_WRAPPER: Final = """#!/bin/sh
# Made by Postroad: runs {python} with PySpark as it is installed, not from Spark's zip.
rest=$PYTHONPATH: PYTHONPATH=
while [ -n "$rest" ]; do
  one=${{rest%%:*}} rest=${{rest#*:}}
  case "$one" in
    ''|*/pyspark/python/lib/*.zip) ;;
    *) PYTHONPATH=$PYTHONPATH${{PYTHONPATH:+:}}$one ;;
  esac
done
export PYTHONPATH
exec {python} "$@"
"""


def worker_python() -> Path:
    """What to give Spark as PYSPARK_PYTHON."""
    return cached_script("python", "python", _WRAPPER.format(python=quoted(sys.executable)))
