"""Conversations for rows of the table of benchmarks, made of Python's library."""

import json
import random
from pathlib import Path

from lacuna.data import corpus

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def write_conversations(folder: str, count: int) -> None:
    """JSON lines of a question and an answer, about 1,000 tokens together, with their template.

    They are pieces of Python's library.
    """
    Path(folder, "template.jinja").write_text(TEMPLATE)
    generator = random.Random(0)
    files = corpus.stdlib_files()["train"]
    text = "".join(Path(file).read_text(errors="replace") for file in files)
    with open(Path(folder, "conversations.jsonl"), "w") as output:
        for _ in range(count):
            start = generator.randrange(len(text) - 8000)
            middle = start + generator.randint(200, 600)
            end = middle + generator.randint(1500, 4500)
            messages = [
                {"role": "user", "content": text[start:middle]},
                {"role": "assistant", "content": text[middle:end]},
            ]
            output.write(json.dumps({"messages": messages}) + "\n")
