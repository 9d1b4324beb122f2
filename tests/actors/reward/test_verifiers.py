import json
from fractions import Fraction

import pytest

from actors.reward import verifiers
from actors.reward.verifiers import exact, last_number, math_verify, numeric, partial_credit, reasoning_gym


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("12", "12"),
        ("  12 \n", "12"),
        ("3+4=7, 7+5=12", "12"),
        ("3+4=7\n7+5= 12.\nDone", "12"),
        ("so we get\n#### 12", "12"),
        ("#### \n12\n", "12"),
        ("Answer: twelve", "twelve"),
        ("The answer is: 12", "12"),
        (r"thus \boxed{\frac{1}{2}} as wanted", r"\frac{1}{2}"),
        (r"$x = 3$ so \boxed{x = 3}.", "x = 3"),
        (r"\boxed{1} no, = 2", "2"),
        ("y=mx+b", "y=mx+b"),
        ("answer: $5$", "5"),
        (r"\boxed{unclosed", "unclosed"),
        ("", ""),
    ],
)
def test_final_answer_is_found_behind_its_marker(completion, answer):
    assert exact([completion], [answer]) == [1.0]
    assert exact([completion], [answer + "x"]) == [0.0]


def test_exact_reads_numbers_and_long_references():
    assert exact(["=12", "=12", "=12", "=13"], [12, 12.0, "3+9=12\n#### 12", 12]) == [1.0, 1.0, 1.0, 0.0]


def test_row_without_an_answer_abstains():
    assert exact(["12"], [None]) == [None]
    assert numeric(["12"], [None]) == [None]
    assert partial_credit(["12"], [None], ["1"]) == [None]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it costs $1,234.50 now", Fraction("1234.5")),
        ("from 10 to -3", -3),
        ("10-3", 3),
        ("x=(2)-3", 3),
        ("= -7.", -7),
        ("\N{MINUS SIGN}4", -4),
        ("half is 1/2", Fraction(1, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("1e3", 1000),
        (".5", Fraction(1, 2)),
        ("12,34", 34),
        ("1,234,567", 1234567),
        ("none", None),
        ("", None),
        ("1/0", None),
        ("9" * 5000, None),
        ("1e99999999", 99999999),
    ],
)
def test_last_number_is_read_exactly(text, number):
    assert last_number(text) == number


def test_numeric_compares_within_the_tolerance():
    assert numeric(["about 3.14", "3.2", "no number"], [3.14159] * 3, tolerance=0.001) == [1.0, 0.0, 0.0]
    assert numeric(["3.14"], [3.14159]) == [0.0]
    assert numeric(["0.1", "12", "1,000"], [0.1, "3*4=12", "1000"]) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="holds no number: 'twelve'"):
        numeric(["12"], ["twelve"])


def test_partial_credit_grows_with_the_correct_beginning():
    solution = "3+4=7\n7+5=12"
    scores = partial_credit(["", "3+4=7", "3+4=7\n7+5=13", solution], ["12"] * 4, [solution] * 4)
    assert scores[0] == 0.0
    assert scores == sorted(scores)
    assert 0 < scores[1] < scores[2] < 0.5
    assert scores[3] == 1.0
    assert partial_credit(["=12", "=13"], ["12"] * 2) == [1.0, 0.0]


def test_partial_credit_of_a_walk_that_is_checked_again():
    walk = "2c1d1e31c4d4e6"
    completions = [f"{walk}={6}", f"{walk}?{walk}=6", f"{walk}=", f"{walk[:7]}1c1d1e3=3"]
    scores = partial_credit(completions, ["6"] * 4, [walk] * 4)
    assert scores[:3] == [1.0, 1.0, 0.5]
    assert scores[3] == pytest.approx(0.5 * 9 / 14)


def test_math_verify_sees_equal_expressions():
    pytest.importorskip("math_verify")
    answers = [r"\frac{1}{2}", "0.5", "$x^2+2x+1$", "12", r"\frac{1}{2}"]
    completions = ["the answer is 1/2", r"\boxed{\frac{2}{4}}", "$(x+1)^2$", "so 13", "I do not know"]
    assert math_verify(completions, answers) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_math_verify_refuses_a_reference_that_is_no_mathematics(monkeypatch):
    monkeypatch.setattr(verifiers, "_math_verify_api", lambda: (lambda text: [], lambda reference, found: True))
    with pytest.raises(ValueError, match="cannot be read as mathematics: '#!'"):
        math_verify(["12"], ["#!"])


def _gym(task, **settings):
    gym = pytest.importorskip("reasoning_gym")
    item = next(iter(gym.create_dataset(task, size=1, seed=3, **settings)))
    return item["answer"], json.dumps(item)


def test_reasoning_gym_finds_the_answer_in_the_completion():
    answer, entry = _gym("basic_arithmetic")
    completions = [
        answer,
        f"First I think 7.\n<answer> {answer} </answer> and talk on 8",
        f"so the sum is = {answer}.",
        f"It is {answer}, I am sure",
        f"<answer>{answer}1</answer> {answer}",
        "no idea",
        "",
    ]
    scores = reasoning_gym(completions, ["basic_arithmetic"] * 7, [entry] * 7)
    assert scores[:4] == [1.0] * 4
    assert all(score < 1.0 for score in scores[4:])


def test_reasoning_gym_items_keep_their_meaning_through_json():
    answer, entry = _gym("arc_agi")  # its verifier compares with tuples
    assert reasoning_gym([answer, "1 2"], ["arc_agi"] * 2, [entry] * 2)[0] == 1.0


def test_reasoning_gym_blames_the_completion_only_when_its_own_answer_can_be_read():
    _, entry = _gym("prime_factorization")
    assert reasoning_gym(["xyzzy"], ["prime_factorization"], [entry]) == [0.0]
    broken = json.dumps({**json.loads(entry), "answer": "xyzzy"})
    with pytest.raises(ValueError, match="the verifier of prime_factorization fails on its own answer"):
        reasoning_gym(["xyzzy"], ["prime_factorization"], [broken])
    with pytest.raises(ValueError, match="not registered"):
        reasoning_gym(["xyzzy"], ["no_such_task"], [entry])
