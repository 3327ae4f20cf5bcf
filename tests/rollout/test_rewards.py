"""Rewards are weighted, may not apply, and name the sample that they fail on."""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from lacuna.config import OutageError, UserError
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout import asking, math_reward
from lacuna.rollout.asking import Overdue, Unheard, ask, ask_alone
from lacuna.rollout.rewards import FAILED, score, total
from lacuna.rollout.verifiers import Answered, Reward, answer_in, find_rewards

ANSWERS = [
    Answered({"answer": "4"}, "data, row 1", "so <a>3</a> or <a> 4 </a>", left=40),
    Answered({"answer": 5}, "data, row 2", "5", left=8),
    Answered({}, "data, row 3", "<a>6</a>", left=0),
]


def no_model(name: str) -> Reward:
    raise AssertionError(f"{name} is no model")


def scores(**settings: object) -> dict[str, list[float]]:
    own = RewardsConfig(**settings)
    return score(find_rewards(own, no_model), ANSWERS, own)


def test_exact_compares_the_last_answer_with_that_of_the_row() -> None:
    assert scores(functions=("exact",))["exact"][:2] == [0, 1]
    found = scores(functions=("exact",), answer_pattern="<a>(.*?)</a>")["exact"]
    assert found[:2] == [1, 0] and math.isnan(found[2])
    assert scores(functions=("exact",), answer_pattern=r"\d")["exact"][:2] == [1, 1]


def test_patterns_are_searched_and_formats_fit_as_a_whole() -> None:
    assert scores(functions=("pattern",))["pattern"][:2] == [1, 1]
    found = scores(functions=("format",), format=r"<a>\d</a>")
    assert found["format"] == [0, 0, 1]


def test_formulas_are_equal_as_mathematics_has_it() -> None:
    pytest.importorskip("math_verify")
    settings = RewardsConfig(functions=("math",))
    cases = {
        "1/2": ("so it is $\\frac{2}{4}$", 1),
        "x+1": ("\\boxed{1+x}", 1),
        "3": ("there are 4", 0),
        "7": ("who knows", 0),
    }
    answers = [
        Answered({"answer": wanted}, "data", text, left=1) for wanted, (text, _) in cases.items()
    ]
    found = score(find_rewards(settings, no_model), answers, settings)
    assert found["math"] == [value for _, value in cases.values()]
    unclear = [Answered({"answer": "?!"}, "data, row 9", "4", left=1)]
    with pytest.raises(OutageError, match="row 9 .* is no formula"):
        score(find_rewards(settings, no_model), unclear, settings)


def test_a_formula_that_takes_too_long_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify = pytest.importorskip("math_verify")
    monkeypatch.setattr(math_reward, "_SECONDS", 0.2)
    monkeypatch.setattr(math_verify, "verify", lambda *_, **__: time.sleep(60))
    settings = RewardsConfig(functions=("math",))
    answers = [Answered({"answer": "3"}, "data", "$9^{9^9}$", left=1)]
    assert score(find_rewards(settings, no_model), answers, settings)["math"] == [0]


def test_formulas_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[math\]'"):
        find_rewards(RewardsConfig(functions=("math",)), no_model)


def test_length_falls_over_the_margin() -> None:
    assert scores(functions=("length",), length_margin=16)["length"] == [0, -0.5, -1]


def test_rewards_are_weighted_where_they_apply() -> None:
    settings = RewardsConfig(functions=("exact", "length"), weights=(2.0, 0.5), length_margin=16)
    found = total(score(find_rewards(settings, no_model), ANSWERS, settings), settings)
    assert found == [0, 2 - 0.25, -0.5]
    assert math.isnan(total({"exact": [math.nan]}, RewardsConfig(functions=("exact",)))[0])


def test_functions_of_weight_0_only_tell_something() -> None:
    settings = RewardsConfig(functions=("exact", "length"), weights=(1.0, 0.0))
    found = total({"exact": [math.nan, 1.0], "length": [0.0, FAILED]}, settings)
    assert math.isnan(found[0]) and found[1] == 1


def test_exact_takes_any_answer_of_a_list_and_numbers_as_a_model_writes_them() -> None:
    settings = RewardsConfig(functions=("exact",))
    cases = {"x": (["y", "x"], 1), "5": (5.0, 1), "2.5": (2.5, 1), "z": (["y", "x"], 0)}
    answers = [Answered({"answer": one}, "data", text, 1) for text, (one, _) in cases.items()]
    found = score(find_rewards(settings, no_model), answers, settings)
    assert found["exact"] == [value for _, value in cases.values()]
    [none] = score(
        find_rewards(settings, no_model), [Answered({"answer": []}, "data", "x", 1)], settings
    )["exact"]
    assert math.isnan(none)
    for wanted, functions, said in (
        ({"x": 1}, ("exact",), "is no answer"),
        (["x"], ("pattern",), "is no regular expression"),
        ("(", ("pattern",), "unterminated subpattern"),
    ):
        own = RewardsConfig(functions=functions)
        answers = [Answered({"answer": wanted}, "data, row 7", "x", left=1)]
        with pytest.raises(OutageError, match=f"row 7 .* {said}.* new run with that row mended"):
            score(find_rewards(own, no_model), answers, own)


def test_of_alternatives_in_a_pattern_the_answer_is_the_group_that_matched() -> None:
    assert answer_in("<b>5</b>", "<a>(.*?)</a>|<b>(.*?)</b>") == "5"
    assert answer_in("<a>4</a> <b>5</b>", "<a>(.*?)</a>|<b>(.*?)</b>") == "5"
    assert answer_in("b", "(a)|b") is None


def raises(rows: list[dict], completions: list[str]) -> list[float]:
    if any("6" in one for one in completions):
        raise KeyError("no six")
    return [1.0] * len(completions)


class Unusual(BaseException):
    """No Exception."""

    def __str__(self) -> str:
        return "'no error'"


def gives_up(rows: list[dict], completions: list[str]) -> list[float]:
    raise Unusual


def waits(rows: list[dict], completions: list[str]) -> list[float]:
    time.sleep(60)
    return []


def hangs(rows: list[dict], completions: list[str]) -> list[float]:
    for one in completions:
        try:
            while one == "5":
                time.sleep(0.01)
        except Exception:
            pass
    return [None] * len(completions)


def backtracks(rows: list[dict], completions: list[str]) -> list[float]:
    return [float(bool(re.fullmatch("(a+)+", "a" * 40 + "b"))) for _ in completions]


def miscounts(rows: list[dict], completions: list[str]) -> list[float]:
    return [1.0] * (len(completions) - 1)


def of_words(rows: list[dict], completions: list[str]) -> list[str]:
    return ["good"] * len(completions)


def leaves(rows: list[dict], completions: list[str]) -> list[float]:
    sys.exit(0)


def only_together(rows: list[dict], completions: list[str]) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, r"row 3 with the completion '<a>6</a>' \(KeyError: 'no six'\)"),
        (hangs, r"row 2 with the completion '5' \(it takes longer"),
        (backtracks, r"row 1 .*it takes longer than rewards.timeout_seconds = 0.2"),
        (miscounts, r"row 1 .*it returned 0 scores for 1 completions"),
        (of_words, r"row 1 .*it returned 'good', which is no number"),
        (leaves, r"row 1 .*it called sys.exit\(0\)"),
        (gives_up, r"row 1 .*\(Unusual: 'no error'\)"),
        (only_together, r"fails on 3 completions together .* on none of them alone"),
    ],
)
def test_a_failing_function_is_named_with_its_sample(
    function: Callable[[list[dict], list[str]], list[float]], said: str
) -> None:
    name = f"{__name__}:{function.__name__}"
    settings = RewardsConfig(functions=(name,), timeout_seconds=0.2)
    with pytest.raises(OutageError, match=said) as caught:
        score(find_rewards(settings, no_model), ANSWERS, settings)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("function", "wanted"), [(raises, [1, 1, FAILED]), (hangs, [math.nan, FAILED, math.nan])]
)
def test_completions_on_which_a_function_fails_are_not_judged_where_that_is_set(
    function: Callable[[list[dict], list[str]], list[float]], wanted: Sequence[float]
) -> None:
    name = f"{__name__}:{function.__name__}"
    settings = RewardsConfig(functions=(name,), timeout_seconds=0.2, on_error="skip")
    found = score(find_rewards(settings, no_model), ANSWERS, settings)[name]
    assert found == pytest.approx(wanted, nan_ok=True)
    both = settings.model_copy(update={"functions": (name, "length")})
    rewards = total({name: found, "length": [0.0, -1.0, 0.0]}, both)
    judged = [one != FAILED for one in wanted]
    assert [not math.isnan(one) for one in rewards] == judged


def test_a_function_that_fails_on_all_together_alone_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"{__name__}:only_together"
    settings = RewardsConfig(functions=(name,), on_error="skip")
    assert score(find_rewards(settings, no_model), ANSWERS, settings)[name] == [1, 1, 1]
    assert "fails on 3 completions together" in caplog.text


@pytest.mark.parametrize("function", [gives_up, waits])
def test_the_first_failure_is_told_of_where_failures_do_not_stop_the_run(
    function: Callable[[list[dict], list[str]], list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{__name__}:{function.__name__}"
    settings = RewardsConfig(functions=(name,), timeout_seconds=0.1, on_error="skip")
    found = score(find_rewards(settings, no_model), [*ANSWERS, *ANSWERS], settings)[name]
    assert found == [FAILED] * 6
    assert "row 1 with" in caplog.text
    assert ("takes longer" if function is waits else "Unusual") in caplog.text
    assert "6 of 6 samples are left out" in caplog.text


def endless(count: int) -> Iterator[float]:
    while True:
        yield 1.0


RETURNED: dict[str, Callable[[int], object]] = {
    "array": lambda count: np.array([0.5] * count, dtype=np.float32),
    "integers": lambda count: np.array([2] * count),
    "booleans": lambda count: np.array([True] * count),
    "column": lambda count: np.array([[0.5]] * count),
    "objects": lambda count: np.array([None] * count),
    "masked": lambda count: np.ma.masked_array([1.0] * count, mask=[True] * count),
    "tensor": lambda count: torch.full((count,), 0.5, dtype=torch.bfloat16, requires_grad=True),
    "tensor column": lambda count: torch.full((count, 1), 0.5),
    "numbers of arrays": lambda count: [np.float64(0.5)] * count,
    "0-d arrays": lambda count: [np.array(0.5)] * count,
    "0-d tensors": lambda count: (torch.tensor(0.5) for _ in range(count)),
    "generator": lambda count: (0.5 for _ in range(count)),
    "map": lambda count: map(float, ["0.5"] * count),
    "values": lambda count: dict.fromkeys(range(count), 0.5).values(),
    "fractions": lambda count: [Fraction(1, 2)] * count,
    "decimals": lambda count: (Decimal("0.5"),) * count,
    "bools": lambda count: [True] * count,
    "nothing": lambda count: [None] * count,
    "nan": lambda count: [math.nan] * count,
    "array of nan": lambda count: np.full(count, np.nan),
    # What is no number for each completion:
    "infinite": lambda count: [math.inf] * count,
    "array of infinity": lambda count: np.full(count, -np.inf),
    "huge": lambda count: [10**400] * count,
    "too large to be learnt from": lambda count: [-1e13] * count,
    "complex": lambda count: [1j] * count,
    "texts": lambda count: ["1"] * count,
    "array of texts": lambda count: np.array(["1"] * count),
    "text": lambda count: "1" * count,
    "bytes": lambda count: b"1" * count,
    "set": lambda count: set(range(count)),
    "dictionary": lambda count: dict.fromkeys(range(count), 1.0),
    "one number": lambda count: 1.0,
    "one boolean": lambda count: True,
    "none at all": lambda count: None,
    "0-d array": lambda count: np.array(1.0),
    "0-d tensor": lambda count: torch.tensor(1.0),
    "pairs": lambda count: np.ones((count, 2)),
    "pairs of a tensor": lambda count: torch.ones(count, 2),
    "no values": lambda count: torch.ones(count, device="meta"),
    "lists": lambda count: [[1.0]] * count,
    "endless": endless,
    "one too many": lambda count: np.ones(count + 1),
}
ASKED: list[str] = []


def returns(rows: list[dict], completions: list[str]) -> object:
    return RETURNED[ASKED[-1]](len(rows))


async def returns_later(rows: list[dict], completions: list[str]) -> object:
    return RETURNED[ASKED[-1]](len(rows))


@pytest.mark.parametrize("function", ["returns", "returns_later"])
@pytest.mark.parametrize("kind", [*RETURNED])
def test_numbers_of_all_libraries_are_read_and_nothing_else(kind: str, function: str) -> None:
    ASKED.append(kind)
    name = f"{__name__}:{function}"
    wanted = {"integers": 2.0, "booleans": 1.0, "bools": 1.0} | dict.fromkeys(
        ("objects", "masked", "nothing", "nan", "array of nan"), math.nan
    )
    place = [*RETURNED].index
    if place(kind) < place("infinite"):
        found = scores(functions=(name,))[name]
        assert found == pytest.approx([wanted.get(kind, 0.5)] * 3, nan_ok=True)
        assert {type(one) for one in found} == {float}
        return
    with pytest.raises(OutageError, match=f"{function} fails on data, row 1 "):
        scores(functions=(name,))
    found = scores(functions=(name,), on_error="skip")[name]
    assert found == [FAILED] * 3


number = 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"functions": ("exakt",)}, "did you mean exact"),
        ({"functions": ("no_such_module:score",)}, "no_such_module does not import"),
        ({"functions": (f"{__name__}:raise",)}, "did you mean raises"),
        ({"functions": (f"{__name__}:number",)}, "is no function"),
        ({"functions": (f"{__name__}:of_one",)}, "of_one cannot be called with rows and"),
        ({"functions": ("exact", "exact")}, "named twice"),
        ({"functions": ("exact",), "weights": (1.0, 2.0)}, "2 for 1"),
        ({"functions": ("format",)}, "needs a regular expression"),
        ({"functions": ("exact",), "format": "a"}, "only format takes it"),
        ({"functions": ("exact",), "answer_pattern": "("}, "answer_pattern"),
        ({"functions": ("format",), "format": "a", "answer_column": "b"}, "answer_column: only"),
        ({"functions": ("exact",), "length_margin": 5}, "only length takes it"),
        ({"functions": ("no_such_module:score",), "format": "a"}, "no_such_module does not import"),
        ({"functions": ("exact", "length"), "weights": (0.0, 0.0)}, "all are 0"),
    ],
)
def test_rewards_that_cannot_be_had_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_rewards(RewardsConfig(**settings), no_model)


def test_a_function_of_ones_own_is_given_rows_and_completions() -> None:
    found: dict[str, Reward] = find_rewards(
        RewardsConfig(functions=(f"{__name__}:same",)), no_model
    )
    assert found[f"{__name__}:same"](ANSWERS) == [False, True, False]


def of_one(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def same(rows: list[dict], completions: list[str]) -> list[bool]:
    return [str(row.get("answer")) == one for row, one in zip(rows, completions, strict=True)]


def test_a_function_that_is_always_too_late_is_asked_no_more() -> None:
    asked = []

    def late(answers: Sequence[Answered]) -> list[float]:
        asked.append(len(answers))
        time.sleep(60)
        return []

    found = [*ask_alone(late, ANSWERS * 4, 0.1)]
    assert asked == [1] * 3 and len(found) == 12
    assert all(isinstance(one, Overdue | Unheard) for one in found)


def test_a_function_that_catches_everything_is_interrupted_again() -> None:
    def stubborn(answers: Sequence[Answered]) -> list[float]:
        for _ in range(2):
            try:
                time.sleep(60)
            except BaseException:
                continue
        time.sleep(60)
        return []

    with pytest.raises(Overdue):
        ask(stubborn, ANSWERS, 0.1)


def retries_for_ever(answers: Sequence[Answered]) -> list[float]:
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def asked_in_vain() -> None:
    asking._MOST_ALARMS = 2
    try:
        ask(retries_for_ever, ANSWERS, 0.1)
    finally:  # an exception would be status 1 as well
        os._exit(3)


def test_a_function_that_nothing_interrupts_ends_the_process() -> None:
    process = get_context("forkserver").Process(target=asked_in_vain)
    process.start()
    process.join(60)
    assert process.exitcode == 1
