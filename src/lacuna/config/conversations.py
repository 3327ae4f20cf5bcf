"""The settings of conversations: how they are written as text, and what of them is trained."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from lacuna.config.fields import Names, Path, Section

COLUMNS = ("messages", "prompt", "completion", "text", "tools")


def _known_once(pairs: tuple[str, ...]) -> tuple[str, ...]:
    renamed = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(renamed.values()) or not renamed.keys() <= set(COLUMNS) or len(renamed) < len(pairs):
        raise ValueError(f"should be such as messages=dialog, each of {', '.join(COLUMNS)} once at most")
    return pairs


class ChatConfig(Section):
    """How conversations become tokens, and which of them are trained.

    template: Chat template: chatml, llama3, or a Jinja file. Unset: the tokenizer's own.
    train_on: Train all answers of the assistant, or only the last of each conversation.
    columns: Columns that the data calls otherwise, such as messages=dialog,tools=functions; the names are messages,
        prompt, completion, text and tools. Unset: these, or ShareGPT's conversations.
    """

    template: Path | None = None
    train_on: Literal["all", "last"] = "all"
    columns: Annotated[Names, AfterValidator(_known_once)] = ()

    @property
    def renamed(self) -> dict[str, str]:
        """Our name -> the data's, of the columns that are named."""
        return dict(pair.split("=", 1) for pair in self.columns)
