"""Sessions, controller, workers: the only package that imports Ray."""

import os

# Ray reads these when it is imported. What it starts on this machine listens on loopback only; joining a
# cluster on other machines works as ever. Processes prove with a token that they belong together.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
