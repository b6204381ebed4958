"""Settings of all tests: no deadlines, and no tests of packages that are not installed."""

import gc
import logging
import os
import signal
from importlib.util import find_spec
from pathlib import Path

from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings
from tests.hang import HANG_S

# No deadlines: `make bench` measures speed, and a busy machine must not fail a test.
# CI draws the same examples every time, so that a failure comes from the change; locally they are random.
# Half as many examples as hypothesis draws by default keep the suite below five minutes.
settings.register_profile(
    "branchline",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("branchline")

# The embedded engine and training need torch.
_NEEDS_TORCH = [
    "src/branchline/engines/hf/*",
    "src/branchline/train/*",
    "tests/engines/tiny_model.py",
    "tests/engines/hf/*",
]
collect_ignore_glob = [] if find_spec("torch") else _NEEDS_TORCH

# Tests connect to loopback only. With a folder that has no certificates, each HTTP client skips reading the
# system's certificates, which takes longer than most tests.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A client without a limit of its own has 5 s, less than an answer may take on a busy machine.
for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, HANG_S)

# A shell starts processes in the background with SIGINT ignored; tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Imported modules are never garbage, and scanning them takes half a second per collection.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on, only objects made by tests are scanned."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Removes the log handler of a gateway: it writes to the stream that was captured in its test."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler).__name__ == "_BranchlineHandler"]:
        root.removeHandler(handler)
