"""Tasks of other libraries: `reasoning_gym`, and files that Hugging Face `datasets` reads."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.environments.tools import Task
from plexrl.errors import InvalidRequestError
from plexrl.rewards.graders.answers import exact

if TYPE_CHECKING:
    from plexrl.rewards.grade import Grade


def reasoning_gym_tasks(name: str, *, size: int, seed: int, **settings: Any) -> Iterator[Task]:
    """`size` tasks of the dataset `name` of `reasoning_gym`, drawn with `seed`, which score answers
    themselves. `settings` are those of the dataset, such as `min_terms` of `chain_sum`.

    Raises:
        InvalidRequestError: `reasoning_gym` is missing.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise InvalidRequestError(
            "these tasks need `reasoning_gym`: pip install 'plexrl[reasoning-gym]'"
        ) from error
    dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    for entry in dataset:
        yield Task(entry["question"], partial(_score, dataset, entry))


def _score(dataset: Any, entry: Any, reply: str) -> float:
    return float(dataset.score_answer(answer=reply.strip(), entry=entry))


def dataset_tasks(
    path: str | os.PathLike[str],
    *,
    question: str = "question",
    answer: str = "answer",
    grade: "Callable[[str, str], Grade]" = exact,
) -> Iterator[Task]:
    """A task for each row of a file of JSON lines, CSV or Parquet on this machine, or of a folder
    that `datasets.Dataset.save_to_disk` has written.

    `question` and `answer` are columns; a question may be a text, or a list of messages. `grade`
    compares a reply with the row's answer, as those of `plexrl.rewards` do.

    Raises:
        InvalidRequestError: `datasets` is missing, the file has another form, or a column is not
            there.
    """
    dataset = _load(Path(path))
    missing = {question, answer} - set(dataset.column_names)
    if missing:
        raise InvalidRequestError(
            f"{path} has no column {', '.join(sorted(missing))}: name two of "
            f"{', '.join(dataset.column_names)} as question and answer"
        )
    return (Task(row[question], partial(_grade, grade, str(row[answer]))) for row in dataset)


def _grade(grade: "Callable[[str, str], Grade]", right: str, reply: str) -> float:
    return grade(reply, right).score


def _load(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InvalidRequestError(
            "these tasks need `datasets`: pip install 'plexrl[datasets]'"
        ) from error
    if path.is_dir():
        return datasets.load_from_disk(str(path))
    forms = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    form = forms.get(path.suffix)
    if form is None:
        raise InvalidRequestError(f"{path}: give a file of {', '.join(forms)}, or a saved folder")
    return datasets.load_dataset(form, data_files=str(path), split="train")
