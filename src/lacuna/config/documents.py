"""The settings of the data: where it comes from, what of it is trained, and in which order."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from lacuna.config.errors import UserError
from lacuna.config.fields import (
    Names,
    Path,
    Paths,
    Section,
    Shares,
    Temperature,
    Texts,
    packaged,
)

# The name of the text that every Python brings along, and of the tokenizer that is trained on it.
BUILT_IN = "python-stdlib"
# Datasets that are readers of local files; data_files names these.
READERS = ("json", "text", "parquet", "csv", "arrow")


class Source(Section):
    """One source of documents; the fields are those of `datasets.load_dataset`."""

    dataset: Path
    """Hub id, local folder or file, or reader of local files (json, parquet, csv, text, arrow)."""

    name: str | None = None
    """Configuration of the dataset."""

    split: str = "train"
    """Split of the dataset."""

    dir: Path | None = None
    """Folder inside the dataset."""

    files: Paths = ()
    """Files of the dataset."""

    weight: NonNegativeFloat | None = None
    """Share of the samples, relative to the other sources' weights."""


# Field of a source -> setting of [data] and [validation]. In [data] the setting has a value for
# each dataset, or one for all; where it has none, the field keeps its default.
_LISTS = {
    "name": "dataset_name",
    "split": "dataset_split",
    "dir": "data_dir",
    "files": "data_files",
}


class DataConfig(Section):
    """Which documents are trained on, and how they become batches."""

    dataset: Annotated[Paths, AfterValidator(lambda names: tuple(map(packaged, names)))] = ()
    """Datasets: Hub ids, local folders or files (a text file is one document), readers of local
    files (json, parquet, csv, text, arrow), or a file that ships with lacuna."""

    dataset_name: Names = ()
    """Configuration of each dataset; one value serves all."""

    dataset_split: Names = ("train",)
    """Split of each dataset; one value serves all."""

    data_dir: Paths = ()
    """Folder inside each dataset; one value serves all."""

    data_files: Paths = ()
    """Files of the dataset; with several datasets one per dataset (or several with commas), or one
    for all."""

    data_probs: Shares = ()
    """Share of the samples from each dataset, relative to the others; needed with several
    datasets."""

    sources: tuple[Source, ...] = Field(default=(), strict=False)
    """The same as [[data.sources]] tables with dataset, name, split, dir, files, weight; TOML
    only."""

    streaming: bool = False
    """Read the data while training instead of downloading it first."""

    num_workers: NonNegativeInt | None = None
    """Processes that prepare batches; 0 means the training process. Unset: what fits the
    machine."""

    prefetch_factor: PositiveInt = 2
    """Batches that each worker prepares ahead."""

    document_mask: bool = True
    """Keep the documents of one sequence from attending to each other."""

    predict_across_documents: bool = False
    """Train the last token of a document to predict the first of the next."""

    shuffle: bool = True
    """Shuffle the documents, anew in each epoch."""

    text_column: str | None = None
    """Column that holds the text. Unset: the first of text, content and input_ids that exists."""

    tokenization: Literal["auto", "cache", "online"] = "auto"
    """Tokenise once into a cache on disk, or while training; auto decides by the data."""

    max_broken_records: NonNegativeInt = 100
    """Unreadable records that are skipped and counted before the run stops."""

    retries: NonNegativeInt = 5
    """Times that a failed download or read is tried again, with growing pauses."""

    def resolved_sources(self) -> tuple[Source, ...]:
        """The sources, whether they are given as tables or as lists.

        Either all have a weight, or none has: then each document is seen once per epoch. Raises
        `UserError` if the lists do not fit together.
        """
        sources = self.sources or self._sources_of_lists()
        if len({source.weight is None for source in sources}) > 1:
            raise UserError("data.sources: only some have a weight; give every source its weight")
        return sources

    def _sources_of_lists(self) -> tuple[Source, ...]:
        count = len(self.dataset)
        shares = self.data_probs
        if "" in self.dataset:
            raise UserError(
                f"data.dataset: one of the {count} names is empty; leave out the comma, or give a "
                "name."
            )
        if shares and (len(shares) != count or not any(shares)):
            raise UserError(
                f"data.data_probs, data.dataset: each of the {count} datasets needs a share, not "
                f"all 0 (got {shares})."
            )
        columns: dict[str, tuple[Any, ...]] = {
            field: self._one_for_each_dataset(setting) for field, setting in _LISTS.items()
        }
        columns["dataset"] = self.dataset
        columns["weight"] = shares or ("",) * count
        rows = zip(*columns.values(), strict=True)
        tables = (dict(zip(columns, row, strict=True)) for row in rows)
        return tuple(
            Source(**{field: value for field, value in table.items() if value != ""})
            for table in tables
        )

    def _one_for_each_dataset(self, setting: str) -> tuple[Any, ...]:
        """The values of a setting, one for each dataset; empty strings where it is not given."""
        count = len(self.dataset)
        values: tuple[Any, ...] = getattr(self, setting)
        if setting == "data_files" and count == 1:
            values = (values,)
        if len(values) not in (0, 1, count):
            raise UserError(
                f"data.{setting}, data.dataset: has {len(values)} values for {count} datasets; "
                "give one for each, or one for all."
            )
        if len(values) == count:
            return values
        return (values[0] if values else "",) * count


class PackingConfig(Section):
    """How examples share the rows of a batch."""

    mode: Literal["auto", "concatenate", "best_fit", "none"] = "auto"
    """Lay texts end to end and cut rows out, fit whole examples into rows, or give each a row of
    its own; auto is concatenate for texts and best_fit for all else."""

    long_examples: Literal["truncate", "drop", "split"] = "truncate"
    """What happens to examples longer than a row, unless texts are concatenated."""

    buffer: PositiveInt = 16
    """Rows whose examples are fitted together where data is tokenised while training. A larger
    buffer leaves less of the rows empty, but before the first step one is filled for each row."""


class ValidationConfig(Section):
    """What the model is tried on while it trains; one source, and prompts to continue."""

    enable: bool | None = None
    """Measure the validation loss. Unset: yes when validation.dataset is given."""

    dataset: Path | None = None
    """Hub id, local folder or file, or reader of local files (json, parquet, csv, text, arrow)."""

    dataset_name: str | None = None
    """Configuration of the dataset."""

    dataset_split: str = "validation"
    """Split of the dataset."""

    data_dir: Path | None = None
    """Folder inside the dataset."""

    data_files: Paths = ()
    """Files of the dataset."""

    freq: PositiveInt = 500
    """Training steps between two validations."""

    steps: int = Field(default=-1, ge=-1)
    """Batches of one validation; -1 means all there are."""

    patience: PositiveInt | None = None
    """Stop after that many validations without a better loss. Unset: never."""

    prompts: Texts = ()
    """Texts continued before training, at each validation and at the end; commas do not split
    them."""

    max_new_tokens: PositiveInt = 64
    """Longest continuation of a prompt, in tokens."""

    temperature: Temperature = 0.8
    """Temperature of the continuations; 0 takes the likeliest token."""

    def resolved_source(self) -> Source | None:
        """The source of the validation documents, None when no validation loss is measured."""
        if self.enable is False or self.dataset is None:
            return None
        return Source(
            dataset=self.dataset,
            **{field: getattr(self, setting) for field, setting in _LISTS.items()},
        )


class CurriculumStage(Section):
    """What changes in a run from a step or a loss on; all else stays as it was."""

    from_step: PositiveInt | None = None
    """Number of steps after which the stage begins."""

    from_loss: PositiveFloat | None = None
    """The stage begins once the validation loss is this low."""

    data_probs: Shares = ()
    """As in [data]; 0 leaves a source out for now."""

    seq_len: PositiveInt | None = None
    """As in [training]."""

    batch_size: PositiveInt | None = None
    """As in [training]; the number of sequences in a step stays the same."""

    global_batch_size: PositiveInt | None = None
    """As in [training]."""


class CurriculumConfig(Section):
    """In which order the data comes, and what changes on the way."""

    difficulty_column: str | None = None
    """Column of numbers by which each pass over the data goes from low to high."""

    rank_every: PositiveInt | None = None
    """Steps between two rankings by the model's own loss, from step 0 on: the documents that a pass
    has left are then taken from low to high loss. Unset: never."""

    by_success: bool = False
    """Draw prompts that the model solves now and then more often than those that it solves always
    or never (job.task = grpo or ppo)."""

    success_decay: float = Field(default=0.5, ge=0, le=1)
    """For by_success: the weight of each draw of a prompt's completions beside the draw after it,
    which counts 1; 1 forgets nothing."""

    stages: tuple[CurriculumStage, ...] = Field(default=(), strict=False)
    """Tables [[curriculum.stages]], each with from_step or from_loss, and data_probs, seq_len,
    batch_size or global_batch_size that hold from then on; TOML only. Each stage draws its data
    anew."""
