"""Coroutine functions are awaited together, each for so long only, and one spoils no other."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from lacuna.config import OutageError
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout import asking
from lacuna.rollout.asking import _event_loop, ask_alone
from lacuna.rollout.rewards import FAILED, score
from lacuna.rollout.verifiers import Answered, find_rewards

ANSWERS = [Answered({"answer": n}, f"data, row {n}", str(n), left=1) for n in range(4)]
Scores = list[float]


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What functions of a test have noted. None is waited for long that does not end."""
    monkeypatch.setattr(asking, "_CLOSING", 1.5)
    NOTED.clear()
    yield NOTED
    for loop in LOOPS:
        loop.close()
    LOOPS.clear()
    _event_loop.cache_clear()


NOTED: list[str] = []
LOOPS: list[asyncio.AbstractEventLoop] = []


def scores(*names: str, seconds: float = 0.3, on_error: str = "stop") -> dict[str, Scores]:
    functions = tuple(f"{__name__}:{name}" for name in names)
    own = RewardsConfig(functions=functions, timeout_seconds=seconds, on_error=on_error)
    found = score(find_rewards(own, lambda name: pytest.fail(name)), ANSWERS, own)
    return {name.partition(":")[2]: values for name, values in found.items()}


async def waits(rows: list[dict], completions: list[str]) -> Scores:
    NOTED.append("waits begins")
    await asyncio.sleep(0.15)
    NOTED.append("waits ends")
    return [float(one) for one in completions]


async def waits_too(rows: list[dict], completions: list[str]) -> Scores:
    NOTED.append("waits_too begins")
    await asyncio.sleep(0.15)
    NOTED.append("waits_too ends")
    return [-float(row["answer"]) for row in rows]


def plain(rows: list[dict], completions: list[str]) -> Scores:
    return [0.5] * len(rows)


class Judge:
    async def __call__(self, rows: list[dict], completions: list[str]) -> Scores:
        await asyncio.sleep(0)
        return [7.0] * len(rows)

    async def method(self, rows: list[dict], completions: list[str]) -> Scores:
        return await self(rows, completions)


judge = Judge()
method = judge.method


def test_all_are_awaited_at_the_same_time_beside_plain_ones() -> None:
    found = scores("waits", "plain", "waits_too", "judge", "method")
    assert [*found] == ["waits", "plain", "waits_too", "judge", "method"]
    assert found["waits"] == [0, 1, 2, 3] and found["waits_too"] == [0, -1, -2, -3]
    assert found["plain"] == [0.5] * 4 and found["judge"] == found["method"] == [7] * 4
    assert NOTED[:2] == ["waits begins", "waits_too begins"]


async def raises(rows: list[dict], completions: list[str]) -> Scores:
    if "2" in completions:
        raise KeyError("no two")
    return [1.0] * len(rows)


async def never_done(rows: list[dict], completions: list[str]) -> Scores:
    try:
        if "2" in completions:
            await asyncio.Event().wait()
        return [1.0] * len(rows)
    except asyncio.CancelledError:
        NOTED.append("cancelled")
        raise


async def blocks(rows: list[dict], completions: list[str]) -> Scores:
    if "2" in completions:
        time.sleep(60)
    return [1.0] * len(rows)


async def ignores_cancelling(rows: list[dict], completions: list[str]) -> Scores:
    while "2" in completions:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            NOTED.append("ignored")
    return [1.0] * len(rows)


async def miscounts(rows: list[dict], completions: list[str]) -> Scores:
    return [1.0] * (len(rows) - ("2" in completions))


async def exits(rows: list[dict], completions: list[str]) -> Scores:
    if "2" in completions:
        await asyncio.gather(_exits())
    return [1.0] * len(rows)


async def _exits() -> None:
    raise SystemExit(0)


async def cancels_itself(rows: list[dict], completions: list[str]) -> Scores:
    if "2" in completions:
        raise asyncio.CancelledError
    return [1.0] * len(rows)


async def yields(rows: list[dict], completions: list[str]):  # noqa: ANN201
    for _ in rows:
        yield 1.0


def returns_a_coroutine(rows: list[dict], completions: list[str]) -> object:
    return waits(rows, completions)


FAILING = {
    "raises": r"KeyError: 'no two'",
    "never_done": r"it takes longer than rewards.timeout_seconds = 0.3",
    "blocks": r"it takes longer than rewards.timeout_seconds = 0.3",
    "ignores_cancelling": r"it takes longer than rewards.timeout_seconds = 0.3",
    "miscounts": "it returned 0 scores for 1 completions",
    "exits": r"it called sys.exit\(0\)",
    "cancels_itself": "it was cancelled",
}


@pytest.mark.parametrize("name", [*FAILING])
def test_one_that_fails_is_named_with_its_sample(name: str) -> None:
    with pytest.raises(OutageError, match=f"{name} fails on data, row 2 .*{FAILING[name]}"):
        scores("waits", name)


@pytest.mark.parametrize("name", [*FAILING])
def test_one_that_fails_loses_no_scores_of_others_nor_of_other_samples(name: str) -> None:
    found = scores("waits", name, "waits_too", on_error="skip")
    assert found["waits"] == [0, 1, 2, 3] and found["waits_too"] == [0, -1, -2, -3]
    assert found[name] == [1, 1, FAILED, 1]
    if name == "never_done":
        assert NOTED.count("cancelled") == 2  # with the others, and alone
    if name not in ("blocks", "exits"):  # they held up the others, who were asked once more
        assert NOTED.count("waits begins") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("yields", "an async_generator object|async_generator"),
        ("returns_a_coroutine", "it returned a coroutine: write it as async def"),
    ],
)
def test_what_is_not_awaited_is_told_how_to_be(name: str, said: str) -> None:
    with pytest.raises(OutageError, match=said):
        scores(name)


async def leaves_a_task(rows: list[dict], completions: list[str]) -> Scores:
    LEFT.append(asyncio.ensure_future(_ticks()))
    return [1.0] * len(rows)


async def _ticks() -> None:
    while True:
        NOTED.append("tick")
        await asyncio.sleep(0.01)


LEFT: list[asyncio.Future[None]] = []


@pytest.mark.parametrize("name", ["leaves_a_task", "ignores_cancelling", "never_done"])
def test_nothing_of_a_step_runs_in_the_next(name: str) -> None:
    scores(name, on_error="skip")
    assert all(task.cancelled() for task in LEFT)
    before = [*NOTED]
    assert scores("waits")["waits"] == [0, 1, 2, 3]
    assert NOTED[len(before) :] == ["waits begins", "waits ends"]


async def notes_its_loop(rows: list[dict], completions: list[str]) -> Scores:
    LOOPS.append(asyncio.get_running_loop())
    return [1.0] * len(rows)


def test_steps_share_a_loop_so_that_connections_stay_open() -> None:
    scores("notes_its_loop")
    scores("notes_its_loop")
    assert LOOPS[0] is LOOPS[1] and not LOOPS[0].is_closed()
    del LOOPS[1:]


# The example of docs/grpo.md.
async def judged(rows: list[dict], completions: list[str]) -> Scores:
    limit = asyncio.Semaphore(2)

    async def one(row: dict, said: str) -> float:
        async with limit:
            return await ask_judge(row["answer"], said)

    return await asyncio.gather(*map(one, rows, completions))


async def ask_judge(answer: object, said: str) -> float:
    NOTED.append("+")
    await asyncio.sleep(0.01)
    NOTED.append("-")
    return float(str(answer) == said)


def test_a_judge_is_asked_for_each_completion_so_many_at_a_time() -> None:
    assert scores("judged")["judged"] == [1] * 4
    running = [NOTED[:end].count("+") - NOTED[:end].count("-") for end in range(len(NOTED))]
    assert max(running) == 2


async def slow_but_one(rows: list[dict], completions: list[str]) -> Scores:
    await asyncio.sleep(0.1)
    return await raises(rows, completions)


def test_completions_are_asked_about_together_also_where_each_is_alone() -> None:
    own = RewardsConfig(functions=(f"{__name__}:slow_but_one",))
    [function] = find_rewards(own, lambda name: pytest.fail(name)).values()
    answers = ANSWERS * 16
    began = time.monotonic()
    found = [*ask_alone(function, answers, 5.0)]
    assert time.monotonic() - began < 3, "64 calls of 0.1 s"
    assert [isinstance(one, KeyError) for one in found] == [False, False, True, False] * 16


async def closes_slowly(rows: list[dict], completions: list[str]) -> Scores:
    LOOPS.append(asyncio.get_running_loop())
    if len(LOOPS) > 1:
        return [1.0] * len(rows)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(1)  # as connections do that say goodbye
    return []


def test_what_is_slow_to_close_costs_no_connections() -> None:
    with pytest.raises(OutageError, match="takes longer"):
        scores("closes_slowly")
    del LOOPS[1:]
    assert scores("closes_slowly")["closes_slowly"] == [1] * 4
    assert LOOPS[0] is LOOPS[1] and not LOOPS[0].is_closed()
    del LOOPS[1:]
