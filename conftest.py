"""Settings of the whole suite: no timed tests, and what cannot be collected here is left out."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

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
_NEEDS_TORCH = ["src/branchline/engines/hf/*", "tests/engines/tiny_model.py", "tests/engines/hf/*"]
collect_ignore_glob = [] if find_spec("torch") else _NEEDS_TORCH

# Tests speak to this machine only, so they trust nobody else: a folder without certificates. Each HTTP client
# would read the certificates of the whole world otherwise, which takes longer than most tests.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# What is imported is never garbage, and takes half a second to look through each time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on only what tests make is looked at."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
