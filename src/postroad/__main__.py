"""`python -m postroad` is `postroad`."""

import sys

from postroad.cli import main

sys.exit(main())
