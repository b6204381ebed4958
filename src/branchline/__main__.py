"""`python -m branchline` is the `branchline` command."""

import sys

from branchline.cli.main import main

sys.exit(main())
