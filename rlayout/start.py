"""The command's entry point: Ctrl-C ends it in order even while it is still importing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from rlayout.cli import main as run  # imports PyTorch, which takes a second or two

        run()
    except KeyboardInterrupt:
        print("stopped: nothing had been started", file=sys.stderr)
        sys.exit(130)
