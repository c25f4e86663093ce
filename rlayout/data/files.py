"""Problems from files: JSONL, Parquet and GSM8K as published."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlayout.data.problem import Message, Problem
from rlayout.errors import DataError, nearest
from rlayout.spec.task import Columns, Gsm8k, Local

log = logging.getLogger(__name__)

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages, and its columns."""

CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator marks: ``48/2 = <<48/2=24>>24``."""


def load_local(config: Local) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Training and held-out problems of ``config``.

    Raises:
        DataError: a missing, empty or broken file, a missing column or value.
    """
    train = _read(Path(config.train), lambda row: _problem(row, config.columns))
    test = _read(Path(config.test), lambda row: _problem(row, config.columns)) if config.test else ()
    return without_held_out(train, test, config.train), test


def load_gsm8k(config: Gsm8k) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Training and held-out problems of GSM8K.

    Raises:
        DataError: a file is missing or is not GSM8K.
    """
    folder = Path(config.folder)
    test = _read(folder / "test.jsonl", _gsm8k_problem)
    train = _read(folder / "train.jsonl", _gsm8k_problem)
    return without_held_out(train, test, str(folder / "train.jsonl")), test


def without_held_out(train: Sequence[Problem], test: Sequence[Problem], source: str) -> Sequence[Problem]:
    """``train`` without the problems whose question is also in ``test``; says how many those were."""
    held_out = {(p.question, p.messages) for p in test}
    kept = tuple(p for p in train if (p.question, p.messages) not in held_out)
    if not kept:
        raise DataError(f"{source}: every training problem is also a held-out problem")
    if len(kept) < len(train):
        log.warning("%s: left out %d problems that are also held out", source, len(train) - len(kept))
    return kept


def _read(path: Path, build: Callable[[Row], Problem]) -> tuple[Problem, ...]:
    if not path.is_file():
        raise DataError(_missing(path))
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{path}: a dataset file ends in {' or '.join(readers)}")
    problems = tuple(build(row) for row in readers[path.suffix](path))
    if not problems:
        raise DataError(f"{path}: the dataset is empty")
    return problems


def _missing(path: Path) -> str:
    folder = next(p for p in path.absolute().parents if p.is_dir())
    if folder != path.absolute().parent:
        return f"{path}: no such file; the nearest folder that exists is {folder}"
    names = [p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".parquet")]
    return f"{path}: no such file. {nearest(path.name, names)}"


def _jsonl_rows(path: Path) -> Iterator[Row]:
    # As bytes, lines end at \n alone; JSON texts may hold other line separators, such as U+2028.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            yield f"{path}, line {number}", row


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _problem(row: Row, columns: Columns) -> Problem:
    question = _value(row, columns.question)
    messages = _messages(row, question) if not isinstance(question, str) else ()
    return Problem(
        question=messages[-1].content if messages else question,
        answer=_text(row, columns.answer),
        solution=_text(row, columns.solution),
        messages=messages,
    )


def _value(row: Row, column: str) -> Any:
    where, values = row
    if column not in values:
        raise DataError(f"{where}: no column {column!r}. {nearest(column, values)}")
    if values[column] is None:
        raise DataError(f"{where}: column {column!r} is empty")
    return values[column]


def _text(row: Row, column: str | None) -> str | None:
    if column is None:
        return None
    value = _value(row, column)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{row[0]}: column {column!r} holds {type(value).__name__}, expected a text or a number")


def _messages(row: Row, value: Any) -> tuple[Message, ...]:
    expected = f"{row[0]}: a question is a text or a list of messages with texts 'role' and 'content'"
    if not isinstance(value, list) or not value:
        raise DataError(f"{expected}, got {value!r}")
    for item in value:
        if not isinstance(item, dict) or not all(isinstance(item.get(k), str) for k in ("role", "content")):
            raise DataError(f"{expected}, got {item!r}")
    return tuple(Message(item["role"], item["content"]) for item in value)


def _gsm8k_problem(row: Row) -> Problem:
    question, published = _value(row, "question"), _value(row, "answer")
    steps, mark, answer = published.rpartition("#### ")
    if not mark:
        raise DataError(f"{row[0]}: a GSM8K answer ends with '#### ' and a number, got {published[-40:]!r}")
    answer = answer.strip().replace(",", "")
    return Problem(question, answer, solution=f"{CALCULATION.sub('', steps)}#### {answer}")
