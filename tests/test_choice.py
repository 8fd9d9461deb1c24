"""Multiple choice: which letter a text answers with, and what a row must have."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.rewards import RowError, choice

OPTIONS = {"A": "one", "B": "two", "C": "three", "D": "four"}
WRAPPINGS = ("{}", "<answer>{}</answer>", "I think.\n</think>\n{}")


def answered(completion, options=OPTIONS):
    """The letter for which a completion would be right; None without, "AB" for two of them."""
    rows = {letter: row(letter, options, answer_idx=letter) for letter in options}
    right = [k for k, row in rows.items() if choice.score(completion, row).correct]
    return "".join(right) or None


def row(answer, options=OPTIONS, **fields):
    return {"options": options, "answer": answer} | fields


# ---- the verdict ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        # the last capital anywhere would be A and D
        ("... A perfect answer cannot be found.", None),
        ("Dog is not an answer.", None),
        # a letter of the cue itself would be S, A and T
        ("Answer seems to be A", "A"),
        ("Answer: **D**", "D"),
        ("answer is d.", "D"),
        # the article would be A
        ("The answer is B because a car moves.", "B"),
        ("d", "D"),
        ("(b) 4", "B"),
        # the first that is named would be B
        ("Answer: It is not B, the answer is D", "D"),
        ("Answer: D, not B", "D"),
    ],
)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_faults_that_others_had(wrapping, text, letter):
    assert answered(wrapping.format(text)) == letter


FORMS = ["B", "b", "(B)", "B.", "B)", "[B]", "**B**", "`B`", "$B$", r"\boxed{B}", "Option B", "two"]
FORMS += [r"\[\boxed{\text{B}}\]", "B. two", "B) two", "B two", "Two.", "The answer is B"]
FORMS += ["answer: (b).", "Final Answer: B) two", "the correct answer is option (B), since ..."]
FORMS += [
    "Answer = B",
    "The best option is B",
    "B, not D",
    "A is wrong, so the answer is B. A car.",
]
FORMS += [r"\boxed{B. two}", r"\boxed{\text{B. two}}", "B - two", "B – two", "B)two", "B.two"]
FORMS += ["__B__", "_B_"]


@pytest.mark.parametrize("text", FORMS)
def test_forms_of_an_answer(text):
    assert answered(f"<answer>{text}</answer>") == "B"


SEVERAL = [
    "The answer is B or C",
    "B or C",
    "b or c",
    "answer: b, c",
    "A B C D",
    "A, B, C, D",
    "B/C",
]
SEVERAL += [
    "A. one\nB. two\nC. three\nD. four",
    "(A) (B)",
    "B. But it could be (C).",
    "A. B. C. D.",
]
SEVERAL += ["B. Or is it? The answer is C."]
NEGATED = ["not B", "The answer is not B", "I don't think the answer is B", "The wrong answer is B"]
NEGATED += [
    "the answer is B?",
    "If the answer is B then",
    "the answer is B is wrong",
    "none of A, B",
]
WORDS = [
    "Vitamin B",
    "B-cells",
    "Answer: A-fib",
    "The answer is C. difficile",
    "The answer is a car",
]
WORDS += [
    "B - three",
    "Btwo",
    "vitamin_B_12",
    "THE ANSWER IS A CAR",
    "The answer is B's",
    "The answer is Bé",
    "two three",
]
# full-width, Cyrillic, with a zero-width space, the long s
LIKE_LETTERS = ["Ｂ", "В", "B\u200b", "\u200bB", "Answer: Ｂ", "ſ"]
OTHERS = ["E", "Answer: E", "", " ", "**", "B" * 2000, "B" + " " * 1000 + "x"]


@pytest.mark.parametrize("text", SEVERAL + NEGATED + WORDS + LIKE_LETTERS + OTHERS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_no_verdict(wrapping, text):
    assert answered(wrapping.format(text)) is None


def test_an_abbreviation_is_read_as_the_option_that_has_its_text():
    """As a label, `C.` would make it C."""
    options = {"A": "E. coli", "B": "C. difficile", "C": "S. aureus", "D": "a virus"}
    assert answered("<answer>C. difficile</answer>", options) == "B"
    assert answered("<answer>D. a virus</answer>", options) == "D"
    assert answered("The answer is D. a virus", options) == "D"


def test_a_letter_is_a_label_before_it_is_a_text():
    blood = {"A": "O", "B": "A", "C": "AB", "D": "B"}
    assert answered("<answer>A</answer>", blood) == "A"
    assert answered("<answer>AB</answer>", blood) == "C"
    assert answered("<answer>O</answer>", blood) == "A"


def test_the_options_own_words_list_nothing():
    """`A type 1 error` after `D.` is no second letter."""
    options = {"A": "A type 2 error", "B": "A fever", "C": "Vitamin A or D", "D": "A type 1 error"}
    for letter, text in options.items():
        for form in ("The answer is {}. {}", "<answer>{}. {}</answer>", "<answer>{}) {}</answer>"):
            assert answered(form.format(letter, text), options) == letter


def test_without_a_block_the_last_line_counts():
    assert answered("The answer is B.\nNo, the answer is C.") == "C"
    assert answered("So the answer is\n\n(C)") == "C"
    assert answered("**Answer:**\nB") == "B"
    assert answered("**Final Answer**\n\n\\boxed{B}") == "B"
    assert answered("\\boxed{B}\nor not") is None
    assert answered("The answer is B.\nBut I am not sure of it.") is None
    assert answered("The answer is B. The answer is C.") is None
    assert answered("The answer is B.</think>\nI do not know.") is None
    assert answered("Options:\nA. one\nB. two\nC. three\nD. four") is None
    assert answered("I will look at\nD") is None


def test_the_last_block_counts_wherever_it_stands():
    assert answered("<answer>B</answer> or <answer>C</answer>") == "C"
    assert answered("<answer>B</answer></think>The answer is C.") == "B"
    assert answered("<answer>A<answer>B</answer>C</answer>") == "B"
    assert answered("<answer><think>B</think></answer>") is None


def test_the_format_earns_its_weight():
    right = choice.score("Because.</think>\n<answer>B</answer>", row("B"))
    assert (right.reward, right.correct) == (1.1, True)
    assert right.components == {"format": 1.0, "correct": 1.0}
    wrong = choice.score("Because.</think>\n<answer>C</answer>", row("B"), format_weight=0.25)
    assert (wrong.reward, wrong.correct, wrong.reason) == (0.25, False, "the answer is C, not B")
    assert choice.score("", row("B")).reward == 0.0


def test_a_vote_is_a_letter():
    assert choice.answer("x</think><answer>(b)</answer>") == "B"
    assert choice.answer("x</think><answer>Some Text.</answer>") == "some text"
    assert choice.answer("I do not know.") is None


@pytest.mark.parametrize("piece", ["B ", "(", "answer: ", "<answer>", "A. ", "\n", "*", "I think "])
def test_a_megabyte_takes_a_moment(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for completion in (
        text,
        f"<answer>{text}</answer>",
        f"<answer>{text[:1000]}</answer>",
        text + "B",
    ):
        choice.score(completion, row("B"))
    assert time.process_time() - start < 2.0


PIECES = ["answer", " is ", ": ", "B", "c", "(", ")", ".", ", ", " or ", "not ", "<answer>", "\n"]
PIECES += ["</answer>", "</think>", "<think>", "the ", "**", "\\boxed{", "}", "two", "a ", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
def test_no_text_is_two_answers_or_a_failure(text):
    found = answered(text)
    assert found is None or len(found) == 1


# ---- the row ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (OPTIONS, "B", "B"),
        (OPTIONS, "b", "B"),
        (OPTIONS, "two", "B"),
        (list(OPTIONS.values()), "B", "B"),
        (list(OPTIONS.values()), 1, "B"),
        (list(OPTIONS.values()), "1", "B"),
        ({"a": "x", "b": "y", "c": None}, 1, "B"),
        ([1, 2.5], "2.5", "B"),
    ],
)
def test_the_right_option_by_letter_text_and_index(options, answer, letter):
    found, right = choice.problem(row(answer, options))
    assert right == letter and found[letter]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answer": "B"}, "`options` is missing"),
        ({"options": OPTIONS}, "`answer` is missing"),
        (row("E"), "letter, the text or the index"),
        (row(4), "letter, the text or the index"),
        (row(True), "letter, the text or the index"),
        (row("B", "one two"), "list of texts, or texts by letter"),
        (row("A", ["one"]), "must be 2 to 26, not 1"),
        (row("A", ["one", None]), "option B must be a text"),
        (row("A", {"A": "x", "a": "y"}), "a letter twice"),
        (row("A", {"A1": "x", "B": "y"}), "single letters"),
        (row("A", ["same", "same "]), "a text twice"),
        # by letter it is B, by its text A; by index 3, by text 2
        (row("B", {"A": "B", "B": "C"}), "ambiguous: 'B' is option B by letter, A by text"),
        (row(2, ["1", "2", "3"]), "ambiguous"),
        (row("one", answer_idx="B"), "the same option"),
    ],
)
def test_bad_rows_are_refused(bad, message):
    with pytest.raises(RowError, match=message):
        choice.score("", bad)


def test_answer_idx_decides_what_a_text_leaves_open():
    assert choice.problem(row("B", {"A": "B", "B": "C"}, answer_idx="A"))[1] == "A"
