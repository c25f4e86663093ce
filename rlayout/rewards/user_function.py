"""A reward function written by the user."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlayout.data.problem import Problem
from rlayout.errors import ConfigError, RewardError, nearest
from rlayout.rewards.verdict import Verdict

LARGEST = 3.4e38
"""Rewards are stored as float32."""


class FunctionVerifier:
    """Pays what ``function(problem, text)`` returns: a number or a bool.

    The answer counts as correct from a reward of 1. Answers cut by the length limit are passed on like
    all others. Copies in other processes import the function anew.
    """

    def __init__(self, function: str) -> None:
        """Import ``function``, named ``package.module:function`` or ``path/to/file.py:function``.

        Raises:
            ConfigError: there is no such module, file or function, or importing it fails.
        """
        place, _, name = function.rpartition(":")
        if place.endswith(".py"):
            place = str(Path(place).absolute())
        self.function = f"{place}:{name}"
        self._call = _import_function(place, name)

    def __reduce__(self) -> tuple[type[FunctionVerifier], tuple[str]]:
        return FunctionVerifier, (self.function,)

    def judge(self, problem: Problem, text: str, finished: bool) -> Verdict:
        """Call the function.

        Raises:
            RewardError: it raised, or returned something that is not a finite number.
        """
        del finished
        try:
            value = self._call(problem, text)
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward function {self.function} failed:\n{traceback.format_exc()}") from error
        reward = _number(value)
        if reward is None:
            raise RewardError(f"reward function {self.function} returned {value!r}, not a finite number")
        return Verdict(reward, reward >= 1, f"{self.function} returned {value!r}")


def _number(value: Any) -> float | None:
    """``value`` as a reward; None if it is not a number, or not one that float32 can hold."""
    if isinstance(value, (str, bytes, bytearray)):  # float() would read them
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _import_function(place: str, name: str) -> Callable[[Problem, str], Any]:
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise ConfigError(f"reward: {place} has no function {name!r}. {nearest(name, functions)}")


def _import_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise ConfigError(f"reward: module {place!r} cannot be imported: {error!r}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        files = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"reward: no file {path}. {nearest(path.name, files)}")
    unique = f"rlayout_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward: {path} cannot be read as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # before running it: dataclasses look up their own module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[unique]
        raise ConfigError(f"reward: {path} cannot be imported: {error!r}") from error
    return module
