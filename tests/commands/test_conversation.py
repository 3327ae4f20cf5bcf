"""`lacuna generate --chat` without a prompt is a conversation; a misspelt folder is one line."""

import contextlib
import io
import os
import pty
import select
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lacuna.cli import main
from lacuna.rollout.generate import generate_text
from runs import environment, refused, run_to_end
from tiny import random_model, tiny_config, tokenizer_of_words

TEMPLATE = "{% for message in messages %}{{ message.content }} w9 {% endfor %}"
WORDS = ("--chat", "--max-new-tokens", "5", "--top-k", "3", "--temperature", "1")


class Terminal(io.StringIO):
    """Lines that somebody types, and then Ctrl-C."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:
        if line := super().readline(size):
            return line
        raise KeyboardInterrupt


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_model(tiny_config("llama", max_position_embeddings=40)).save_pretrained(tmp_path / "hf")
    tokenizer = tokenizer_of_words()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def expected(folder: Path, questions: list[str]) -> str:
    """What is to be printed: each answer to all that was said before."""
    model, tokenizer, said = AutoModelForCausalLM.from_pretrained(folder), tokenizer_of_words(), []
    tokenizer.chat_template = TEMPLATE
    for question in questions:
        said.append({"role": "user", "content": question})
        said.append(
            {
                "role": "assistant",
                "content": generate_text(model, tokenizer, said, 5, 1.0, 0, top_k=3),
            }
        )
    return "".join(f"{message['content']}\n" for message in said[1::2])


@pytest.mark.parametrize("stdin", [io.StringIO, Terminal])
def test_each_line_is_answered_with_all_that_was_said_before_until_the_end(
    stdin: type[io.StringIO],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = ["w5 w6", "w7", "w5 w6"]
    wanted = expected(model, questions)
    assert len({*wanted.splitlines()}) == 3
    monkeypatch.setattr("sys.stdin", stdin("w5 w6\n\nw7\nw5 w6\n"))
    capsys.readouterr()
    assert main(["generate", str(model), *WORDS]) == 0
    printed, noted = capsys.readouterr()
    assert printed == wanted
    if stdin is Terminal:
        assert noted.endswith("> > > > > \n")


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_keys_end_a_conversation_on_a_terminal_well(key: bytes, model: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        words = (sys.executable, "-m", "lacuna", "generate", str(model), *WORDS)
        os.execve(sys.executable, words, environment())
    shown = b""
    for typed in (b"w5 w6\n", key):
        while not shown.endswith(b"> "):
            shown += os.read(terminal, 1000)
        os.write(terminal, typed)
        shown += b"|"
    with contextlib.suppress(OSError):  # how a terminal says that nobody is there any more
        while True:
            # Python forgets a Ctrl-C that comes just before it waits for a line, until the next.
            while not select.select([terminal], [], [], 5)[0]:
                os.write(terminal, key)
            shown += os.read(terminal, 1000)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    answer = expected(model, ["w5 w6"]).encode().strip()
    assert answer in shown
    assert b"lacuna: " not in shown


def test_a_conversation_ends_in_one_message_where_the_model_has_no_more_positions(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\n" * 10))
    assert "positions: shorten it" in refused("generate", model, *WORDS)


def test_words_that_would_do_nothing_are_refused(model: Path) -> None:
    assert "give --prompt TEXT, or --chat" in refused("generate", model)
    assert "above 0 as well" in refused("generate", model, "--prompt", "w5", "--top-k", "3")
    assert "--top-p must be above 0" in refused("generate", model, "--prompt", "w5", "--top-p", "2")
    assert "UTF-8" in refused(
        "generate", model, "--prompt", b"w5 \xff".decode(errors="surrogateescape")
    )


def test_a_misspelt_folder_is_one_line_after_one_question_to_the_hub(model: Path) -> None:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = environment(HF_HUB_OFFLINE="0", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    outcome = run_to_end("generate", "run/hg", "--prompt", "w5", env=settings, cwd=model.parent)
    server.shutdown()
    assert outcome.status == 2
    assert outcome.output.startswith(
        "lacuna: run/hg: there is no such folder here, and no such model on the Hub"
    )
    assert outcome.output.count("\n") == 1, outcome.output
    assert len([path for path in asked if "run/hg" in path]) == 1
    assert "did you mean hf?" in refused("generate", model.with_name("hfs"), "--prompt", "w5")
