"""Check the shapes and types of the pure functions on tensors in these tests."""

from jaxtyping import install_import_hook

# Not the whole package: beartype cannot check the protocols that base.py names.
MODULES = [f"rlayout.algorithms.{name}" for name in ("advantages", "kl", "losses", "statistics")]

install_import_hook(MODULES, "beartype.beartype")
