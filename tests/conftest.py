"""Property tests draw the same examples in every `make test`; `make soak` explores new ones.

Tests of one group run in one process, one after the other, and groups begin in the order they have here.
Those that start Spark's streams are one group: Spark gives the Python of each ten seconds to start, which is
little where several start at once. Other tests on Spark are a second group, with a second session; the rest,
a file to a group, is shared by the third process and by those that are done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# The first text that is drawn on a machine takes seconds: a table of all letters is made for it.
_SLOW = [HealthCheck.too_slow]
settings.register_profile("steady", derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("explore", print_blob=True, suppress_health_check=_SLOW)
# No test looks for brokers of other tests, or of the network that this machine is in.
os.environ["POSTROAD_INTERFACE"] = "off"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# Helpers assert too; what failed in them is to be shown as in a test.
pytest.register_assert_rewrite("tests.worlds")

HERE = Path(__file__).parent
STREAMS = ("test_engines", "test_kills", "test_lake_pages", "test_landing", "test_sink", "test_source")
FOLDERS = ("spark", "browser", "process", "sim", "property", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, bool]:
        path = item.path.relative_to(HERE)
        folder = path.parts[0]
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), path.stem not in STREAMS

    items.sort(key=place)


class Groups(LoadScopeScheduling):
    """The marks of pytest-xdist do nothing with pytest 9.2, where the name of a test can no longer be set."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if "spark" not in path.parts:
            return str(path)
        return "streams" if path.stem in STREAMS else "tables"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)
