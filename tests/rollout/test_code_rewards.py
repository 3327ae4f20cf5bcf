"""Code is worth the tests that it passes, and no more, whatever it does about them."""

import json
import math
from pathlib import Path

import pytest

from lacuna.config import OutageError, UserError
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout import code_rewards, sandbox
from lacuna.rollout.code_rewards import CodeReward, code_in
from lacuna.rollout.code_tests import Pair, read_tests
from lacuna.rollout.rewards import FAILED, score
from lacuna.rollout.sandbox import Limits, missing_protections
from lacuna.rollout.verifiers import Answered, find_rewards

needs_sandbox = pytest.mark.skipif(
    missing_protections(Limits(10, 2**30)) != (), reason="this system cannot shut in a process"
)
ASSERTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(20, 7) == 27"]
RIGHT = "def add(a, b):\n    return a + b"
PAIRS = [{"input": "2 3\n", "output": "5\n"}, {"input": "20 7", "output": "27"}]
SUM = "print(sum(map(int, input().split())))"


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def answered(code: str, tests: object) -> Answered:
    return Answered({"tests": tests}, "data, row 1", block(code), left=1)


def worth(code: str, tests: object = ASSERTS, name: str = "code_share", **more: object) -> float:
    settings = RewardsConfig(functions=(name,), **({"code_seconds": 5} | more))
    return score(find_rewards(settings, no_model), [answered(code, tests)], settings)[name][0]


def no_model(name: str) -> CodeReward:
    raise AssertionError(f"{name} is no model")


def test_code_is_the_last_block_of_python() -> None:
    plain = RewardsConfig(functions=("code",))
    assert code_in("```python\na\n```\nor\n```py\nb\n```\n```\n42\n```", plain) == "b"
    assert code_in("```\na\n```\n```bash\nls\n```", plain) == "a"
    assert code_in("1. so\n   ```python\n   if a:\n       b\n   ```", plain) == "if a:\n    b"
    assert code_in("```python\nnever ended", plain) is None
    assert code_in("```python\nnot ended\n```python\na\n```", plain) == "a"
    assert code_in("a = 1", plain) is None
    assert code_in("a ```b``` c", plain) is None
    tagged = RewardsConfig(functions=("code",), answer_pattern="<code>(.*?)</code>")
    assert code_in("<code>a</code> <code>b\nc</code>", tagged) == "b\nc"
    assert code_in("```python\na\n```", tagged) is None


@needs_sandbox
def test_a_reward_is_all_tests_or_their_share() -> None:
    assert worth(RIGHT) == worth(RIGHT, name="code") == 1
    half = "def add(a, b):\n    return abs(a) + abs(b)"
    assert worth(half) == pytest.approx(2 / 3) and worth(half, name="code") == 0
    assert math.isnan(worth(RIGHT, None)) and math.isnan(worth(RIGHT, []))
    settings = RewardsConfig(functions=("code",))
    nothing = Answered({"tests": ASSERTS}, "data", "I cannot.", left=1)
    assert score(find_rewards(settings, no_model), [nothing], settings) == {"code": [0]}


@needs_sandbox
def test_tests_have_the_forms_that_data_have() -> None:
    assert worth(RIGHT, "\n".join(ASSERTS)) == worth(RIGHT, json.dumps(ASSERTS)) == 1
    many = {"inputs": ["2 3", "20 7"], "outputs": ["5", "28"]}
    for tests in (many, json.dumps(many), {**many, "fn_name": None}):
        assert worth(SUM, tests) == 0.5
    assert worth(SUM, PAIRS) == worth(SUM, json.dumps(PAIRS)) == 1
    assert worth(SUM, {"input": ["2 3"], "output": ["5"]}) == 1
    assert worth(SUM, [{"input": "1 1", "output": "2", "testtype": "stdin"}]) == 1
    assert worth("print(*open(0))", {"inputs": [["a", "b"]], "outputs": [["a", " b"]]}) == 1
    check = "def check(one):\n    assert one(1, 2) == 3\ncheck(add)"
    assert worth(RIGHT, check) == 1 and worth("def add(a, b): return 0", check) == 0
    prepared = [
        "import math",
        "assert add(math.pi, 0) > 3",
        "for n in range(3): assert add(n, 0) == n",
    ]
    assert worth(RIGHT, prepared) == 1
    assert worth("def add(a, b): return a if a != 2 else 0", prepared) == 0.5


@needs_sandbox
@pytest.mark.parametrize(
    ("returned", "asked"),
    [
        ("[1, (2, 3.5), {'a': {1, 2}}]", "== [1, (2, 3.5), {'a': {1, 2}}]"),
        ("None", "is None"),
        ("True", "is True"),
        ("10**5000", "!= 1"),
        ("float('inf')", "> 10"),
        ("b'\\xff'", "== b'\\xff'"),
        ("1j", "== 1j"),
        ("'\\ud800'", "== '\\ud800'"),
        ("{1: 2}.keys()", "== {1}"),
        ("__import__('collections').Counter('aab')", "== {'a': 2, 'b': 1}"),
        ("__import__('decimal').Decimal('0.5')", "== 0.5"),
        ("__import__('fractions').Fraction(1, 2)", "== 0.5"),
        ("__import__('numpy').int64(3)", "== 3"),
        ("__import__('numpy').arange(3).tolist()", "== [0, 1, 2]"),
        ("'a'", "in 'abc'"),
        ("3", "not in [1, 2]"),
    ],
)
def test_values_are_compared_as_python_does(returned: str, asked: str) -> None:
    code = f"def value(): return {returned}"
    assert worth(code, [f"assert value() {asked}"]) == 1
    if "5000" not in returned:
        assert worth(code, [f"assert not value() {asked}"]) == 0


@needs_sandbox
def test_tuples_are_no_lists_and_constants_may_stand_first() -> None:
    assert worth("def value(): return (1, 2)", ["assert value() == [1, 2]"]) == 0
    assert worth(RIGHT, ["assert 5 == add(2, 3), 'a message'", "assert 3 < add(1, 1)"]) == 0.5


CHEATS = {
    "leaves at once": "import sys; sys.exit(0)",
    "leaves hard": "import os; os._exit(0)",
    "leaves when asked": "import os\ndef add(a, b): os._exit(0)",
    "is equal to all": """
class Any:
    __eq__ = __ge__ = __le__ = lambda self, other: True
    __hash__ = None
def add(a, b): return Any()""",
    "is a number that is equal to all": """
class Any(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __index__ = __int__ = lambda self: self
def add(a, b): return Any(77)""",
    "catches what asserts raise": """
import builtins, sys
class Never(BaseException):
    def __new__(cls, *args): sys.exit(0)
builtins.AssertionError = Never
sys.excepthook = lambda *args: None
def add(a, b): return None""",
    "replaces what runs tests": """
import builtins, json
builtins.eval = builtins.exec = builtins.bool = lambda *args: True
builtins.compile = lambda *args: 'True'
json.dumps = lambda value: '["", 0, ["constant", true]]'
def add(a, b): return None""",
    "writes the verdict": """
import os
print('3 passed'); print('[true, true, true]')
for number in range(64):
    for test in range(3):
        try: os.write(number, b'["", %d, ["int", "0x5"]]\\n' % test)
        except OSError: pass
def add(a, b): return None""",
    "finds the answers in the process": """
import re, sys, gc
def add(a, b):
    frame, seen = sys._getframe(), ''
    while frame is not None:
        seen += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    seen += repr([one for one in gc.get_objects() if isinstance(one, (list, dict, tuple))])
    found = re.search(r'== *(-?[0-9]+)', seen)
    return int(found[1]) if found else None""",
    "reads the tests": """
import sys
def add(a, b): return int(sys.stdin.readline())""",
    "never ends": "while True: pass",
    "fills memory": "everything = []\nwhile True: everything.append(bytearray(2**26))",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "is no Python": "def add(a, b:",
    "returns itself": "def add(a, b):\n    one = []\n    one.append(one)\n    return one",
}


@needs_sandbox
@pytest.mark.parametrize("cheat", [*CHEATS])
def test_code_earns_nothing_by(cheat: str) -> None:
    assert worth(CHEATS[cheat], code_seconds=2) == 0


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "wanted"),
    [
        ("bool = lambda x: True\ndef even(n): return n % 2", ["assert even(2)"], 0),
        ("bool = lambda x: True\ndef even(n): return n", ["assert not even(3)"], 0),
        ("def even(n): return n % 2 == 0", ["assert even(2) and not even(3)"], 1),
        ("def sets(): return {frozenset({1}), frozenset()}", ["assert sets() != set()"], 1),
        ("def sets(): return {frozenset({1}): 2}", ["assert sets()"], 1),
        ("def sets(): return {1, 2}", ["assert sets() == {2, 1}"], 1),
    ],
)
def test_truth_and_sets_are_what_python_takes_them_for(
    code: str, tests: list[str], wanted: int
) -> None:
    assert worth(code, tests) == wanted


@needs_sandbox
def test_programs_earn_nothing_by_what_they_print_or_leave() -> None:
    assert worth("print('5 passed'); print(True)", PAIRS) == 0
    assert worth("print(5)\nimport sys; sys.exit(0)", PAIRS) == 0.5
    assert worth(f"{SUM}\nraise ValueError", PAIRS) == 0
    assert worth("while True: print('x' * 10**6)", PAIRS) == 0
    assert worth(f"import time\n{SUM}\ntime.sleep(60)", PAIRS, code_seconds=1) == 0


@needs_sandbox
def test_tests_on_disk_are_out_of_reach(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("5\n27\n")
    assert worth(f"print(open({str(data)!r}).readline())", PAIRS) == 0


@needs_sandbox
def test_tests_before_one_that_hangs_count() -> None:
    hangs = "def add(a, b):\n    while a == 20: pass\n    return a + b"
    assert worth(hangs, code_seconds=1) == pytest.approx(2 / 3)
    slow = "line = input()\nwhile line == '20 7': pass\nprint(sum(map(int, line.split())))"
    assert worth(slow, PAIRS, code_seconds=1) == 0.5


@needs_sandbox
def test_many_run_at_once_and_in_order() -> None:
    settings = RewardsConfig(functions=("code",), code_processes=4, code_seconds=20)
    waits = "import time; time.sleep(0.5)\ndef add(a, b): return {}"
    answers = [answered(waits.format("a + b" if n % 3 else "0"), ASSERTS) for n in range(8)]
    found = score(find_rewards(settings, no_model), answers, settings)["code"]
    assert found == [float(n % 3 > 0) for n in range(8)]


@needs_sandbox
def test_the_time_of_code_is_its_own() -> None:
    waits = f"import time; time.sleep(0.3)\n{RIGHT}"
    assert worth(waits, timeout_seconds=0.1) == 1


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("def test_add():\n    assert add(1, 2) == 3", "no assert, and do not call"),
        ("print(add(1, 2))", "no assert, and do not call"),
        (['{"input": "1", "output": "1"}'], "no assert, and do not call"),
        (["assert add(1, 2) =="], "is no Python"),
        ([1, 2], "but list"),
        (7, "but int"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [[1, 2]], "outputs": ["3"]}, "list, not text"),
        ({"input": "1"}, "no inputs with outputs, but input"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "write them as asserts"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "write them as asserts"),
        ("[1, 2", "Expecting"),
    ],
)
def test_tests_that_are_none_are_refused(tests: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(tests)


def test_blanks_at_ends_of_lines_do_not_count() -> None:
    pair = Pair("", "1 2\n3\n")
    assert (
        pair.accepts("1 2  \r\n3\n\n") and not pair.accepts("1  2\n3") and not pair.accepts("1 2")
    )


@needs_sandbox
def test_a_row_with_wrong_tests_is_named_and_the_others_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def noting(*arguments: object) -> sandbox.Ended:
        ran.append(arguments)
        return sandbox.run(*arguments)  # type: ignore[arg-type]

    settings = RewardsConfig(functions=("code",), on_error="skip")
    functions = find_rewards(settings, no_model)
    monkeypatch.setattr(code_rewards, "run", noting)
    answers = [answered(RIGHT, ASSERTS), answered(RIGHT, ["assert"]), answered("", ASSERTS)]
    found = score(functions, answers, settings)["code"]
    assert found == [1, FAILED, 0] and len(ran) == 2
    stops = RewardsConfig(functions=("code",))
    with pytest.raises(OutageError, match="row 1 .* is no Python"):
        score(find_rewards(stops, no_model), answers, stops)


@needs_sandbox
def test_code_is_refused_where_it_cannot_be_shut_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "call_filter", lambda: [])
    code_rewards._check_protections.cache_clear()
    with pytest.raises(UserError, match="network, processes and signals.*code_unprotected"):
        worth(RIGHT)
    assert worth(RIGHT, code_unprotected=True) == 1
    assert "nothing keeps the code of completions from network" in caplog.text
    code_rewards._check_protections.cache_clear()


@needs_sandbox
def test_code_that_has_no_time_to_begin_is_refused() -> None:
    with pytest.raises(UserError, match="too long to begin"):
        worth(RIGHT, code_seconds=0.001)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tests_column": "asserts"}, "only code and code_share take it"),
        ({"code_seconds": 3}, "only code and code_share take it"),
        ({"code_unprotected": True}, "only code and code_share take it"),
    ],
)
def test_settings_of_code_need_code(settings: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_rewards(RewardsConfig(functions=("length",), **settings), no_model)
