"""Settings that must be made before torch is imported."""

import os

# A test forks its ranks (tests/distributed/harness.py). A fork hangs after a multi-threaded matrix product
# in the parent, so there must be none; this is read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import settings

# Machines that run tests are shared: how long an example takes says nothing about it. The same examples
# every time, so that a change that fails is a change's fault.
settings.register_profile("rlayout", deadline=None, derandomize=True)
settings.load_profile("rlayout")
