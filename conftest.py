"""Settings of the whole suite: no timed tests, and what cannot be collected here is left out."""

import os
from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# Speed is shown by `make bench`; a busy machine must not make a property fail.
# CI draws the same examples every time, so that what it says is about the change; people draw new ones.
settings.register_profile(
    "house",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("house")

# The embedded engine needs torch.
collect_ignore_glob = [] if find_spec("torch") else ["src/branchline/engines/hf/*", "tests/engines/tiny.py"]
