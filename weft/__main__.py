"""`python -m weft`: the same as `weft`."""

import sys

from weft.cli.main import main

sys.exit(main())
