"""Settings for all tests."""

import os

from hypothesis import settings

# A test forks its ranks (tests/distributed/harness.py). A fork hangs after a multi-threaded matrix product
# in the parent, so there must be none; this is read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# How long one example takes depends on what else the machine does.
settings.register_profile("rlayout", deadline=None)
settings.load_profile("rlayout")
