"""Plain data to dataclasses: what is built, and how wrong data is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlayout.errors import ConfigError
from rlayout.spec.serialization import from_plain, to_plain


@dataclass(frozen=True)
class Circle:
    radius: float = 1.0
    name: Literal["circle"] = "circle"

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ValueError(f"radius must be positive, got {self.radius}")


@dataclass(frozen=True)
class Square:
    side: int
    name: Literal["square"] = "square"


@dataclass(frozen=True)
class Drawing:
    title: str
    shape: Circle | Square
    sizes: tuple[int, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    note: str | None = None
    frame: Circle | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    dark: bool = False


def test_round_trip() -> None:
    drawing = Drawing("a", Square(3), (1, 2), (0.5, 2.0), "hm", Circle(2.0), {"x": [1, {"y": 2}]}, True)
    assert from_plain(Drawing, to_plain(drawing)) == drawing


def test_defaults_and_conversions() -> None:
    built = from_plain(Drawing, {"title": "t", "shape": {"name": "circle", "radius": 2}, "pair": [1, "1e-5"]})
    assert built == Drawing("t", Circle(2.0), pair=(1.0, 1e-5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "titel: unknown key. did you mean 'title'"),
        ({"shape": {"name": "circle", "radios": 2}}, "shape.radios: unknown key. did you mean 'radius'"),
        ({"shape": {"name": "cicle"}}, "shape.name: 'cicle' is not known. did you mean 'circle'"),
        ({"shape": {"radius": 1}}, "shape.name: None is not known"),
        ({"shape": {"name": "square"}}, "shape.side: missing"),
        ({"shape": {"name": "circle", "radius": -1}}, "shape: radius must be positive"),
        ({"title": 3}, "title: expected str, got 3"),
        ({"dark": 1}, "dark: expected bool, got 1"),
        ({"sizes": [1, "a"]}, r"sizes\[1\]: expected int, got 'a'"),
        ({"sizes": [True]}, r"sizes\[0\]: expected int, got True"),
        ({"sizes": "12"}, "sizes: expected a list"),
        ({"pair": [1.0]}, "pair: expected 2 items, got 1"),
        ({"pair": [1.0, "fast"]}, r"pair\[1\]: expected float, got 'fast'"),
        ({"frame": 3}, "frame: expected a mapping of Circle"),
        ({"extras": 3}, "extras: expected a mapping"),
    ],
)
def test_wrong_data_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    data = {"title": "t", "shape": {"name": "circle"}, **change}
    with pytest.raises(ConfigError, match=message):
        from_plain(Drawing, data)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="title: missing: Drawing needs it"):
        from_plain(Drawing, {"shape": {"name": "circle"}})
