"""Which faults are worth another attempt."""

import pytest
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from lacuna.data.faults import may_pass, with_retries


def test_faults_of_the_network_may_pass_and_missing_things_do_not() -> None:
    assert (
        may_pass(ConnectionResetError())
        and may_pass(TimeoutError())
        and may_pass(OSError("broken pipe"))
    )
    assert not may_pass(FileNotFoundError()) and not may_pass(PermissionError())
    assert not may_pass(ValueError()) and not may_pass(HFValidationError())


def test_answers_of_a_server_are_told_apart() -> None:
    class Response:
        headers: dict = {}
        request = None

        def __init__(self, status_code: int) -> None:
            self.status_code = status_code

    def answer(status: int) -> Exception:
        return RepositoryNotFoundError("", response=Response(status))

    assert may_pass(answer(503)) and may_pass(answer(429)) and not may_pass(answer(404))


def test_the_last_fault_is_raised() -> None:
    attempts = []

    def fail() -> list[int]:
        attempts.append(1)
        raise ConnectionError(f"number {len(attempts)}")

    with pytest.raises(ConnectionError, match="number 2"):
        list(with_retries(fail, retries=1, what="this"))
    assert list(with_retries(lambda: [7, 8], retries=0, what="that")) == [7, 8]
