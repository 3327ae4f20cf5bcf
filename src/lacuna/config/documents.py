"""The settings of the data: where documents come from, what of them is trained, how rows are filled, in which order."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from lacuna.config.errors import UserError, refuse
from lacuna.config.fields import Names, Path, Paths, Section, Shares, Texts


class Source(Section):
    """One source of documents; the fields are those of `datasets.load_dataset`.

    dataset: Hub id, local folder, or reader of local files (json, parquet, csv, text, arrow).
    name: Configuration of the dataset.
    split: Split of the dataset.
    dir: Folder inside the dataset.
    files: Files of the dataset.
    weight: Share of the samples, relative to the other sources' weights.
    """

    dataset: Path
    name: str | None = None
    split: str = "train"
    dir: Path | None = None
    files: Paths = ()
    weight: NonNegativeFloat | None = None


# Field of a source -> setting; of the training data with one value per dataset, where one serves
# all and none means the default.
_LISTS = {
    "name": "dataset_name",
    "split": "dataset_split",
    "dir": "data_dir",
    "files": "data_files",
}


class DataConfig(Section):
    """Which documents are trained on, and how they become batches.

    dataset: Datasets: Hub ids, local folders, or readers of local files (json, parquet, csv, text,
        arrow).
    dataset_name: Configuration of each dataset; one value serves all.
    dataset_split: Split of each dataset; one value serves all.
    data_dir: Folder inside each dataset; one value serves all.
    data_files: Files of the dataset; with several datasets one per dataset (or several with
        commas), or one for all.
    data_probs: Share of the samples from each dataset, relative to the others; needed with several
        datasets.
    sources: The same as [[data.sources]] tables with dataset, name, split, dir, files, weight; TOML
        only.
    streaming: Read the data while training instead of downloading it first.
    num_workers: Processes that prepare batches; 0 means the training process. Unset: what fits the
        machine.
    prefetch_factor: Batches that each worker prepares ahead.
    document_mask: Keep the documents of one sequence from attending to each other.
    predict_across_documents: Train the last token of a document to predict the first of the next.
    shuffle: Shuffle the documents, anew in each epoch.
    text_column: Column that holds the text. Unset: the first of text and content that exists.
    tokenization: Tokenise once into a cache on disk, or while training; auto decides by the data.
    max_broken_records: Unreadable records that are skipped and counted before the run stops.
    retries: Times that a failed download or read is tried again, with growing pauses.
    """

    dataset: Paths = ()
    dataset_name: Names = ()
    dataset_split: Names = ("train",)
    data_dir: Paths = ()
    data_files: Paths = ()
    data_probs: Shares = ()
    sources: tuple[Source, ...] = Field((), strict=False)
    streaming: bool = False
    num_workers: NonNegativeInt | None = None
    prefetch_factor: PositiveInt = 2
    document_mask: bool = True
    predict_across_documents: bool = False
    shuffle: bool = True
    text_column: str | None = None
    tokenization: Literal["auto", "cache", "online"] = "auto"
    max_broken_records: NonNegativeInt = 100
    retries: NonNegativeInt = 5

    def resolved_sources(self) -> tuple[Source, ...]:
        """Both spellings as one list of sources.

        They have either all a weight, relative to one another, or none (`weight` is None): then
        each document is seen once per epoch. Raises UserError when the lists do not fit each other.
        """
        sources = self.sources or self._sources_of_lists()
        if len({source.weight is None for source in sources}) > 1:
            raise UserError("data.sources: only some have a weight; give every source its weight")
        return sources

    def _sources_of_lists(self) -> tuple[Source, ...]:
        count, shares = len(self.dataset), self.data_probs
        wrong = f"data.data_probs, data.dataset: each of the {count} datasets needs a share, not all 0 (got {shares})"
        nameless = (
            f"data.dataset: one of the {count} names is empty; leave out the comma, or give a name"
        )
        refuse(
            {
                nameless: "" in self.dataset,
                wrong: shares != () and (len(shares) != count or not any(shares)),
            }
        )
        columns: dict[str, tuple[Any, ...]] = {
            "dataset": self.dataset,
            "weight": shares or ("",) * count,
        }
        for field, setting in _LISTS.items():
            values = getattr(self, setting)
            values = (values,) if field == "files" and count == 1 else values
            wrong = f"data.{setting}, data.dataset: has {len(values)} values for {count} datasets"
            refuse(
                {f"{wrong}; give one for each, or one for all": len(values) not in (0, 1, count)}
            )
            columns[field] = values if len(values) == count else (values or ("",)) * count
        tables = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        return tuple(
            Source(**{field: value for field, value in row.items() if value != ""})
            for row in tables
        )


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
    "chosen",
    "rejected",
    "label",
)


def _known_once(pairs: tuple[str, ...]) -> tuple[str, ...]:
    renamed = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(renamed.values()) or not renamed.keys() <= set(COLUMNS) or len(renamed) < len(pairs):
        raise ValueError(
            f"should be such as messages=dialog, each of {', '.join(COLUMNS)} once at most"
        )
    return pairs


def _roles(pairs: tuple[str, ...]) -> tuple[str, ...]:
    if wrong := [pair for pair in pairs if not all(pair.partition("=")[::2])]:
        raise ValueError(f"should be such as user=human,assistant=bot (got {', '.join(wrong)})")
    return pairs


class ChatConfig(Section):
    """How conversations become tokens, and which of them are trained.

    template: Chat template: chatml, llama3, or a Jinja file. Unset: the tokenizer's own.
    train_on: Train all answers of the assistant, or only the last of each conversation.
    columns: Columns that the data calls otherwise, such as messages=dialog,tools=functions; the
        names are messages, prompt, completion, instruction, input, output, text, tools, chosen,
        rejected and label. Unset: these, or ShareGPT's conversations.
    roles: Roles that the data calls otherwise, such as user=human,assistant=bot.
    """

    template: Path | None = None
    train_on: Literal["all", "last"] = "all"
    columns: Annotated[Names, AfterValidator(_known_once)] = ()
    roles: Annotated[Names, AfterValidator(_roles)] = ()


class PackingConfig(Section):
    """How examples share the rows of a batch.

    mode: Lay texts end to end and cut rows out, fit whole examples into rows, or give each a row of
        its own; auto is concatenate for pretrain and best_fit for sft.
    long_examples: What happens to examples longer than a row, unless texts are concatenated.
    buffer: Rows whose examples are fitted together where data is tokenised while training; more
        waste less, but the first step waits for as many of each of its rows.
    """

    mode: Literal["auto", "concatenate", "best_fit", "none"] = "auto"
    long_examples: Literal["truncate", "drop", "split"] = "truncate"
    buffer: PositiveInt = 16


class ValidationConfig(Section):
    """What the model is tried on while it trains; one source, and prompts to continue.

    enable: Measure the validation loss. Unset: yes when validation.dataset is given.
    dataset: Hub id, local folder, or reader of local files (json, parquet, csv, text, arrow).
    dataset_name: Configuration of the dataset.
    dataset_split: Split of the dataset.
    data_dir: Folder inside the dataset.
    data_files: Files of the dataset.
    freq: Training steps between two validations.
    steps: Batches of one validation; -1 means all there are.
    patience: Stop after that many validations without a better loss. Unset: never.
    prompts: Texts continued before training, at each validation and at the end; commas do not split
        them.
    max_new_tokens: Longest continuation of a prompt, in tokens.
    temperature: Temperature of the continuations; 0 takes the likeliest token.
    """

    enable: bool | None = None
    dataset: Path | None = None
    dataset_name: str | None = None
    dataset_split: str = "validation"
    data_dir: Path | None = None
    data_files: Paths = ()
    freq: PositiveInt = 500
    steps: int = Field(-1, ge=-1)
    patience: PositiveInt | None = None
    prompts: Texts = ()
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 0.8

    def resolved_source(self) -> Source | None:
        """The source of the validation documents, None when no validation loss is measured."""
        if self.enable is False or self.dataset is None:
            return None
        return Source(
            dataset=self.dataset,
            **{field: getattr(self, setting) for field, setting in _LISTS.items()},
        )


class Stage(Section):
    """What changes in a run from a step or a loss on; all else stays as it was.

    from_step: Steps done when it begins.
    from_loss: Validation loss at which it begins, or below.
    data_probs: As in [data]; 0 leaves a source out for now.
    seq_len: As in [training].
    batch_size: As in [training]; the sequences of a step stay the same.
    global_batch_size: As in [training].
    """

    from_step: PositiveInt | None = None
    from_loss: PositiveFloat | None = None
    data_probs: Shares = ()
    seq_len: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None


class CurriculumConfig(Section):
    """In which order the data comes, and what changes on the way.

    difficulty_column: Column of numbers by which each pass over the data goes from low to high.
    rank_every: Steps between two rankings by the model's own loss, from step 0 on: what a pass has
        left then comes from low to high. Unset: never.
    stages: Tables [[curriculum.stages]], each with from_step or from_loss, and data_probs, seq_len,
        batch_size or global_batch_size to have from then on; TOML only. Each stage draws its data
        anew.
    """

    difficulty_column: str | None = None
    rank_every: PositiveInt | None = None
    stages: tuple[Stage, ...] = Field((), strict=False)
