"""The program `postroad`, which `python -m postroad` is too."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Run one command; the exit code. Ctrl-C ends it quietly, from the first import on."""
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # else it is ignored, as of what a script runs in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # importing takes exceptions amiss
    from postroad.cli import main as run

    signal.signal(signal.SIGINT, heard)
    try:
        return run()
    except KeyboardInterrupt:  # before it was listening
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
