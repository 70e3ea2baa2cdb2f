"""Compiles the kernel. Everything else is said in pyproject.toml.

Where there is no working compiler the package installs all the same, with a warning, and runs on the
plain Python reference of the kernel. POSTROAD_CFLAGS adds compiler and linker flags (tests/sanitize.sh).
"""

import os
import shlex
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNEL = Path("src/postroad/kernel")
FLAGS = shlex.split(os.environ.get("POSTROAD_CFLAGS", ""))


def extensions() -> list[Extension]:
    modules = [
        Extension(
            f"postroad.kernel.{path.stem}",
            [str(path)],
            extra_compile_args=["-O3", *FLAGS],
            extra_link_args=FLAGS,
            optional=True,
        )
        for path in sorted(KERNEL.glob("*.pyx"))
    ]
    return cythonize(modules, language_level=3)


setup(ext_modules=extensions())
