"""Settings of the whole suite: no timed tests, and what cannot be collected here is left out."""

from importlib.util import find_spec

from hypothesis import settings

# Speed is shown by `make bench`; a busy machine must not make a property fail.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# The embedded engine needs torch.
collect_ignore_glob = [] if find_spec("torch") else ["src/branchline/engines/hf/*"]
