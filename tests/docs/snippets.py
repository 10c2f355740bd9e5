"""Names that snippets of the documentation use without a definition, made at their first use."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

import plexrl
from tests.cluster.tools import VOCABULARY, some_batch
from tests.docs.conftest import ANSWER_S, Docs
from tests.docs.pages import Block

Names = dict[str, Any]
PROMPTS = [[3, 4, 5, 6], [7, 8, 9, 10]]
COMPLETIONS = [[4, 5, 6, 2], [8, 9, 10, 2]]

DEPLOYMENTS = (plexrl.TrainDeployment, plexrl.RolloutDeployment, plexrl.ReferenceDeployment)

TYPES = {
    "AutoModelForCausalLM": "Any",
    "advantages": "list[list[float]]",
    "actor": "plexrl.TrainDeployment",
    "api_key": "str",
    "batch": "plexrl.Batch",
    "cluster": "plexrl.Cluster",
    "completions": "list[list[int]]",
    "data_dir": "str",
    "future": "plexrl.GenerateFuture",
    "job": "plexrl.Job",
    "job_id": "str",
    "keep": "list[bool]",
    "logprobs": "list[list[float]]",
    "loss": "plexrl.LossSpec",
    "masks": "list[list[float]]",
    "model": "plexrl.ModelSpec",
    "prompts": "list[list[int]]",
    "reference": "plexrl.ReferenceDeployment",
    "rollout": "plexrl.RolloutDeployment",
    "rows": "list[list[int]]",
    "sample": "plexrl.Sample",
    "samples": "list[list[plexrl.Sample]]",
    "step": "int",
    "url": "str",
}
"""Names that a snippet may use without a definition, with their types."""


def tree(block: Block) -> ast.Module:
    """Parse the snippet, which may await at its top level."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    found = compile(block.text, block.name, "exec", flags)
    assert isinstance(found, ast.Module)
    return found


def needed(block: Block) -> list[str]:
    """Names of `TYPES` that the snippet reads before it assigns them."""
    events: list[tuple[int, int, str, bool]] = []
    for name, end in _names(tree(block), None):
        is_made = isinstance(name.ctx, ast.Store)
        line, column = end if is_made and end else (name.lineno, name.col_offset)
        events.append((line, column, name.id, is_made))
    made: set[str] = set()
    found: dict[str, None] = {}
    for _, _, identifier, is_made in sorted(events):
        if is_made:
            made.add(identifier)
        elif identifier not in made and identifier in TYPES:
            found[identifier] = None
    return list(found)


def _names(
    node: ast.AST, end: tuple[int, int] | None
) -> Iterator[tuple[ast.Name, tuple[int, int] | None]]:
    """Every name, and the end of the assignment that defines it."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        end = (node.end_lineno or 0, node.end_col_offset or 0)
    if isinstance(node, ast.Name):
        yield node, end
    for child in ast.iter_child_nodes(node):
        yield from _names(child, end)


class Prepared:
    """Makes the names for one snippet, in a new job."""

    def __init__(self, docs: Docs, cluster: plexrl.Cluster, title: str) -> None:
        self._docs = docs
        self._title = title
        self._cluster = cluster
        self._job: plexrl.Job | None = None
        self.names: Names = {"plexrl": plexrl, "cluster": cluster}

    def get(self, name: str) -> Any:
        """The value; made at its first use."""
        if name not in self.names:
            makers: dict[str, Callable[[], Any]] = {
                "AutoModelForCausalLM": _auto_model,
                "actor": lambda: self.get("job").train_deployment("actor", self.get("model")),
                "advantages": lambda: [[1.0, -1.0], [0.5, -0.5]],
                "api_key": lambda: self._docs.api_key,
                "batch": lambda: some_batch(1),
                "completions": lambda: COMPLETIONS,
                "data_dir": lambda: str(self._docs.data_dir),
                "future": lambda: self.get("rollout").generate(PROMPTS, stream=True),
                "job": self._new_job,
                "job_id": self._left_job,
                "keep": lambda: [True, False],
                "logprobs": lambda: [[-1.0] * len(row) for row in COMPLETIONS],
                "loss": plexrl.losses.grpo,
                "masks": lambda: [[1.0] * len(row) for row in PROMPTS],
                "model": lambda: plexrl.tiny_qwen2(VOCABULARY),
                "prompts": lambda: PROMPTS,
                "reference": lambda: self.get("job").reference_deployment(
                    "reference", self.get("model")
                ),
                "rollout": lambda: self.get("job").rollout_deployment("rollout", self.get("model")),
                "rows": lambda: PROMPTS,
                "sample": lambda: self.get("samples")[0][0],
                "samples": lambda: (
                    self.get("rollout").generate(PROMPTS, n=2).result(ANSWER_S).samples
                ),
                "step": lambda: 0,
                "url": lambda: self._docs.url,
            }
            self.names[name] = makers[name]()
        return self.names[name]

    def _new_job(self) -> plexrl.Job:
        self._job = self._cluster.create_job(self._title)
        return self._job

    def _left_job(self) -> str:
        """A job with an actor, whose controller has left."""
        with plexrl.connect(self._docs.url, self._docs.api_key) as other:
            job = other.create_job(f"{self._title}-left")
            job.train_deployment("actor", self.get("model")).barrier().result(ANSWER_S)
            return job.job

    def finish(self) -> None:
        """Wait for the snippet's deployments and operations, then end its job.

        Raises:
            PlexRLError: a deployment did not come up, or an operation failed.
        """
        if self._job is None:
            return
        for value in self.names.values():
            if not isinstance(value, DEPLOYMENTS):
                continue
            # Deployments of the snippet's own jobs have ended with these.
            is_of_job = value.deployment.startswith(f"{self._job.job}/")
            if is_of_job and value.status()["state"] != "stopped":
                value.barrier().result(ANSWER_S)
        self._job.finish()

    def failed(self) -> list[str]:
        """The operations of the snippet that failed, with their errors."""
        rows = [] if self._job is None else self._cluster.operations(job=self._job.job)
        return [f"{row['kind']}: {row['error']}" for row in rows if row["state"] == "failed"]

    def close(self) -> None:
        """Cancel the snippet's job."""
        if self._job is not None:
            self._job.finish("cancelled")


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM
