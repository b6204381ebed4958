"""`python -m branchline.cli` is the `branchline` command."""

import sys

from branchline.cli.main import main

sys.exit(main())
