"""The settings of how conversations become tokens, and which of these are trained."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from lacuna.config.fields import Names, Path, Section

# Our names of the columns of conversations.
COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "tools",
    "system",
    "chosen",
    "rejected",
    "label",
)


def _check_columns(pairs: tuple[str, ...]) -> tuple[str, ...]:
    renamed = dict(pair.partition("=")[::2] for pair in pairs)
    is_known_once = renamed.keys() <= set(COLUMNS) and len(renamed) == len(pairs)
    if not is_known_once or not all(renamed.values()):
        raise ValueError(
            f"should be such as messages=dialog, each of {', '.join(COLUMNS)} once at most"
        )
    return pairs


def _check_roles(pairs: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [pair for pair in pairs if not all(pair.partition("=")[::2])]
    if wrong:
        raise ValueError(f"should be such as user=human,assistant=bot (got {', '.join(wrong)})")
    return pairs


class ChatConfig(Section):
    """How conversations become tokens, and which of them are trained."""

    template: Path | None = None
    """Chat template: chatml, llama3, or a Jinja file. Unset: the tokenizer's own."""

    train_on: Literal["all", "last"] = "all"
    """Train all answers of the assistant, or only the last of each conversation."""

    columns: Annotated[Names, AfterValidator(_check_columns)] = ()
    """Columns that the data calls otherwise, such as messages=dialog,tools=functions; the names are
    messages, prompt, completion, instruction, input, output, text, tools, system, chosen, rejected
    and label. Unset: these, or ShareGPT's conversations and system_prompt."""

    roles: Annotated[Names, AfterValidator(_check_roles)] = ()
    """Roles that the data calls otherwise, such as user=human,assistant=bot."""
