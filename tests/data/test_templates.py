"""Problems become tokens."""

import pytest

from rlayout.data.problem import Message, Problem
from rlayout.data.prompts import prompt_batch, supervised_batch
from rlayout.data.templates import PromptEncoder
from rlayout.errors import DataError
from rlayout.spec.task import PromptTemplate
from tests.data.byte_tokenizer import BOS, EOS, ByteTokenizer

ADD = Problem("2 + 2 =", answer="4", solution="2+2=4\n#### 4")
LONG = Problem("1 + 1 + 1 + 1 =", answer="4", solution="#### 4")


def text(ids: list[int]) -> str:
    return "".join({BOS: "<|begin|>", EOS: "<|end|>"}.get(i) or chr(i) for i in ids)


def test_chat_prompt_has_the_turns_and_opens_the_answer():
    encoder = PromptEncoder(
        ByteTokenizer(), PromptTemplate(system="Be brief.", instruction="One step per line.")
    )
    assert text(encoder.prompt_ids(ADD)) == (
        "<system>Be brief.<|end|><user>2 + 2 =\nOne step per line.<|end|><assistant>"
    )


def test_a_conversation_keeps_its_turns_and_its_own_system_message():
    turns = (Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate(system="other", instruction="i"))
    expected = "<system>s<|end|><user>a<|end|><assistant>b<|end|><user>c\ni<|end|><assistant>"
    assert text(encoder.prompt_ids(Problem("c", messages=turns))) == expected
    assert turns[-1].content == "c"


def test_chat_prompt_gets_no_second_begin_token():
    assert BOS not in PromptEncoder(ByteTokenizer(bos=True), PromptTemplate()).prompt_ids(ADD)


def test_plain_prompt_begins_as_the_tokenizer_wants_and_stays_open():
    tokenizer = ByteTokenizer(chat_template=None, bos=True, closes=True)
    encoder = PromptEncoder(tokenizer, PromptTemplate(template="plain", instruction="Be brief."))
    assert text(encoder.prompt_ids(ADD)) == "<|begin|>Question: 2 + 2 =\nBe brief.\nAnswer:"


def test_plain_prompt_keeps_braces_of_the_question():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate(template="plain", format="{question}\n"))
    assert text(encoder.prompt_ids(Problem("{x: {question}}"))) == "{x: {question}}\n"


def test_a_tokenizer_without_chat_template_is_refused_with_the_way_out():
    with pytest.raises(DataError, match="template: plain"):
        PromptEncoder(ByteTokenizer(chat_template=None), PromptTemplate())


def test_plain_prompts_refuse_conversations():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate(template="plain"))
    with pytest.raises(DataError, match="template: chat"):
        encoder.prompt_ids(Problem("c", messages=(Message("user", "c"),)))


def test_supervised_rows_are_the_generation_prompt_then_the_solution_and_the_end():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate())
    prompts = prompt_batch([ADD, LONG], [7, 9], encoder, max_new_tokens=10, max_positions=100)
    batch = supervised_batch([ADD, LONG], [7, 9], encoder, max_positions=100)
    assert batch.ids == batch.groups == prompts.ids == (7, 9)
    assert batch.rows["problem"] == prompts.rows["problem"] == (ADD, LONG)
    for problem, prompt, tokens, mask in zip(
        [ADD, LONG],
        prompts.per_row("prompt_tokens"),
        batch.per_row("tokens"),
        batch.per_row("mask"),
        strict=True,
    ):
        assert tokens[~mask].tolist() == prompt.tolist() == tokens[: len(prompt)].tolist()
        assert text(tokens[mask].tolist()) == f"{problem.solution}<|end|>"


def test_another_end_token_can_be_named():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate())
    batch = supervised_batch([ADD], [0], encoder, max_positions=100, end_token_id=300)
    assert batch.tokens["tokens"][-1] == 300


def test_a_prompt_that_leaves_no_room_names_the_row_and_the_numbers():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate(template="plain", format="{question}"))
    prompt_batch([ADD], [3], encoder, max_new_tokens=93, max_positions=100)
    with pytest.raises(
        DataError, match=r"row 5: 15 prompt tokens \+ max_new_tokens 93 = 108.*max_positions 100"
    ):
        prompt_batch([ADD, LONG], [3, 5], encoder, max_new_tokens=93, max_positions=100)


def test_a_solution_that_is_too_long_names_the_row_and_the_numbers():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate(template="plain", format="{question}"))
    supervised_batch([ADD], [3], encoder, max_positions=20)
    with pytest.raises(DataError, match=r"row 3: 7 prompt tokens \+ 13 solution tokens = 20.*max_positions 19"):
        supervised_batch([ADD], [3], encoder, max_positions=19)


def test_a_problem_without_solution_names_the_row_and_the_tasks_that_have_one():
    encoder = PromptEncoder(ByteTokenizer(), PromptTemplate())
    with pytest.raises(DataError, match=r"row 4: .*columns\.solution.*chain_sum"):
        supervised_batch([Problem("?")], [4], encoder, max_positions=100)
