"""Frozen dataclasses to and from plain data (what JSON and YAML hold), strictly.

An unknown key, a missing key or a value of the wrong type is a ``ConfigError`` that names the place
(``sampling.temperature``) and the nearest valid name. A union of dataclasses is told apart by its
``name`` field, which each member gives a constant default.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from rlayout.errors import ConfigError, nearest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn dataclasses and tuples into dicts and lists, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """Build ``cls`` (a dataclass or a type annotation) from plain data.

    Args:
        cls: the dataclass to build.
        data: what a YAML or JSON reader returned.
        where: the dotted place of ``data`` in its file, for messages.

    Raises:
        ConfigError: an unknown, missing or wrongly typed key.
    """
    return _build(cls, data, where)


def _build(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    origin = typing.get_origin(kind)
    builder = _BUILDERS.get(origin) if origin else None
    if builder is not None:
        return builder(typing.get_args(kind), data, where)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    return _build_scalar(kind, data, where)


def _build_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{_at(where)}expected a mapping of {cls.__name__}, got {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in data:
        if key not in fields:
            raise ConfigError(
                f"{_at(_join(where, str(key)))}unknown key. {_right_key(str(key), hints, fields)}"
            )
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _build(hints[name], data[name], _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_at(_join(where, name))}missing: {cls.__name__} needs it")
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass checks itself at construction
        raise ConfigError(f"{_at(where)}{error}") from error


def _right_key(key: str, hints: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Where the key belongs, if a section has one of this very name; else the nearest of this level."""
    for name in fields:
        for option in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(option) and key in {f.name for f in dataclasses.fields(option)}:
                return f"did you mean '{name}.{key}'?"
    return nearest(key, fields)


def _build_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    options = tuple(o for o in options if o is not type(None))
    tagged = {_tag(o): o for o in options if dataclasses.is_dataclass(o)}
    if len(options) == 1:
        return _build(options[0], data, where)
    if tagged and isinstance(data, Mapping):
        name = data.get("name")
        if not isinstance(name, str) or name not in tagged:
            place = _at(_join(where, "name"))
            raise ConfigError(f"{place}{name!r} is not known. {nearest(str(name), map(str, tagged))}")
        return _build(tagged[name], data, where)
    if len(tagged) == len(options):
        chosen = next(iter(difflib.get_close_matches(str(data), map(str, tagged), n=1, cutoff=0)))
        raise ConfigError(f"{_at(where)}expected a mapping such as {{name: {chosen}}}, got {data!r}")
    problems = []
    for option in options:
        try:
            return _build(option, data, where)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; or ".join(problems))


def _tag(cls: Any) -> Any:
    for field in dataclasses.fields(cls):
        if field.name == "name":
            return field.default
    return cls.__name__


def _build_literal(choices: tuple[Any, ...], data: Any, where: str) -> Any:
    if data in choices:
        return data
    raise ConfigError(f"{_at(where)}{data!r} is not known. {nearest(str(data), map(str, choices))}")


def _build_tuple(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if isinstance(data, str) or not isinstance(data, (list, tuple)):
        raise ConfigError(f"{_at(where)}expected a list, got {data!r}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise ConfigError(f"{_at(where)}expected {len(args)} items, got {len(data)}")
    return tuple(_build(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, data, strict=True)))


def _build_mapping(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{_at(where)}expected a mapping, got {data!r}")
    return {_build(args[0], k, where): _build(args[1], v, _join(where, str(k))) for k, v in data.items()}


_BUILDERS = {
    typing.Union: _build_union,
    types.UnionType: _build_union,
    typing.Literal: _build_literal,
    tuple: _build_tuple,
    dict: _build_mapping,
    collections.abc.Mapping: _build_mapping,
}


def _build_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, (int, float, str)) and not isinstance(data, bool):
        # YAML 1.1 reads 1e-5 as a string, and everybody writes learning rates so.
        with contextlib.suppress(ValueError):
            if len(str(data)) < 400 and math.isfinite(number := float(data)):
                return number
            raise ConfigError(f"{_at(where)}expected a finite number, got {str(data)[:40]!r}")
    if isinstance(data, kind) and not (kind in (int, float) and isinstance(data, bool)):
        return data
    raise ConfigError(f"{_at(where)}expected {kind.__name__}, got {data!r} ({type(data).__name__})")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _at(where: str) -> str:
    return f"{where}: " if where else ""
