"""`python -m branchline.cli` runs the `branchline` command."""

import sys

from branchline.cli.main import main

sys.exit(main())
