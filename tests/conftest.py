"""Settings that must be made before torch is imported."""

import os

# A test forks its ranks (tests/distributed/harness.py). A fork hangs after a multi-threaded matrix product
# in the parent, so there must be none; this is read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
