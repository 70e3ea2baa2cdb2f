"""Compiles the kernel. Everything else is said in pyproject.toml.

Where there is no working compiler the package installs all the same, with a warning, and runs on the
plain Python reference of the kernel. POSTROAD_CFLAGS adds compiler and linker flags (tests/sanitize.sh).
"""

import os
import shlex
from pathlib import Path
from subprocess import CalledProcessError

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

KERNEL = Path("src/postroad/kernel")
FLAGS = shlex.split(os.environ.get("POSTROAD_CFLAGS", ""))


class BuildKernel(build_ext):
    """Setuptools lets an optional extension fail, but not when the compiler itself fails or is missing."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CalledProcessError, OSError) as error:
            self.warn(f"{ext.name} was not compiled, its plain Python reference takes over: {error}")


def extensions() -> list[Extension]:
    modules = [
        Extension(
            f"postroad.kernel.{path.stem}",
            [str(path)],
            extra_compile_args=["-O3", *FLAGS],
            extra_link_args=FLAGS,
        )
        for path in sorted(KERNEL.glob("*.pyx"))
    ]
    compiled = cythonize(modules, language_level=3, nthreads=os.cpu_count() or 1)
    for module in compiled:
        module.optional = True  # cythonize forgets it
    return compiled


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernel})
