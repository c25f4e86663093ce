"""Problems from files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlayout.data.problem import Message
from rlayout.data.sources import load
from rlayout.errors import DataError
from rlayout.spec.serialization import from_plain
from rlayout.spec.task import Columns, Dataset, Gsm8k, Local

ROWS = [{"q": "1 + 1?", "a": 2, "s": "1+1=2"}, {"q": "half of 1?", "a": "1/2", "s": "1/2"}]
COLUMNS = Columns(question="q", answer="a", solution="s")


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_problems(tmp_path):
    train, test = load(Local(write(tmp_path / "a.jsonl", ROWS), columns=COLUMNS))
    assert [(p.question, p.answer, p.solution) for p in train] == [
        ("1 + 1?", "2", "1+1=2"),
        ("half of 1?", "1/2", "1/2"),
    ]
    assert len(test) == 0


def test_parquet_gives_the_same_problems_as_jsonl(tmp_path):
    rows = [{**row, "a": str(row["a"])} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_jsonl = load(Local(write(tmp_path / "a.jsonl", rows), columns=COLUMNS))
    assert load(Local(str(tmp_path / "a.parquet"), columns=COLUMNS)) == from_jsonl


def test_a_question_may_be_a_conversation(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "a.jsonl", [{"messages": turns}])
    (problem,), _ = load(Local(path, columns=Columns(question="messages", answer=None)))
    assert problem.question == "u"
    assert problem.messages == (Message("system", "s"), Message("user", "u"))


def test_held_out_questions_are_left_out_of_training(tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", [*ROWS, {"q": "3?", "a": 3, "s": ""}])
    test = write(tmp_path / "test.jsonl", [ROWS[1]])
    problems, held_out = load(Local(train, test, COLUMNS))
    assert [p.question for p in problems] == ["1 + 1?", "3?"]
    assert [p.question for p in held_out] == ["half of 1?"]
    assert "left out 1 problems" in caplog.text


def test_training_on_nothing_but_held_out_problems_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="every training problem is also a held-out problem"):
        load(Local(path, path, COLUMNS))


def test_blank_lines_and_line_separators_inside_texts_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "a\u2028b", "a": "1"}\n\n{"q": "c", "a": "2"}\n', encoding="utf-8")
    train, _ = load(Local(str(tmp_path / "a.jsonl"), columns=Columns("q", "a")))
    assert [p.question for p in train] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"qestion": "?", "answer": 1}\n', r"line 1: no column 'question'. did you mean 'qestion'.*answer"),
        ('{"question": "?", "answer": 1}\n{"question": \n', r"a\.jsonl, line 2: not JSON"),
        ("[1]\n", "line 1: expected an object, got list"),
        ('{"question": "?", "answer": null}\n', "line 1: column 'answer' is empty"),
        ('{"question": "?", "answer": [1]}\n', "column 'answer' holds list, expected a text or a number"),
        ('{"question": 5, "answer": 1}\n', "a question is a text or a list of messages"),
        ('{"question": [{"role": "user"}], "answer": 1}\n', "'role' and 'content', got {'role': 'user'}"),
        ("\n", r"a\.jsonl: the dataset is empty"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load(Local(str(tmp_path / "a.jsonl")))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: not UTF-8"):
        load(Local(str(tmp_path / "a.jsonl")))


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        load(Local(str(tmp_path / "a.parquet")))


def test_a_missing_file_names_its_neighbours(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"did you mean 'train\.jsonl'"):
        load(Local(str(tmp_path / "trian.jsonl")))
    with pytest.raises(DataError, match=f"nearest folder that exists is {tmp_path}"):
        load(Local(str(tmp_path / "no" / "folder" / "train.jsonl")))


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("q,a\n")
    with pytest.raises(DataError, match=r"ends in \.jsonl or \.parquet"):
        load(Local(str(tmp_path / "a.csv")))


def test_gsm8k_loses_its_calculator_marks_and_thousands_commas(tmp_path):
    published = "He has 3*500 = $<<3*500=1500>>1,500.\nLess 10 it is <<1500-10=1490>>1490.\n#### 1,490"
    write(tmp_path / "train.jsonl", [{"question": "How much?", "answer": published}])
    write(tmp_path / "test.jsonl", [{"question": "And now?", "answer": "#### -7"}])
    (train,), (test,) = load(Gsm8k(str(tmp_path)))
    assert train.answer == "1490"
    assert train.solution == "He has 3*500 = $1,500.\nLess 10 it is 1490.\n#### 1490"
    assert (test.answer, test.solution) == ("-7", "#### -7")


def test_a_file_that_is_not_gsm8k_is_refused(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": "?", "answer": "#### 1"}])
    write(tmp_path / "test.jsonl", [{"question": "?", "answer": "just 5"}])
    with pytest.raises(DataError, match=r"test\.jsonl, line 1: a GSM8K answer ends with '#### '"):
        load(Gsm8k(str(tmp_path)))


def test_datasets_are_told_apart_by_name():
    assert from_plain(Dataset, {"name": "gsm8k", "folder": "f"}) == Gsm8k("f")  # type: ignore[arg-type]
    plain = {"name": "file", "train": "t.jsonl", "columns": {"question": "q"}}
    assert from_plain(Dataset, plain) == Local("t.jsonl", columns=Columns(question="q"))  # type: ignore[arg-type]
