"""`python -m eggpu` is the command `eggpu`."""

import sys

from eggpu.cli import main

sys.exit(main())
