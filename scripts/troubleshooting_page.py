"""Writes the tables of docs/troubleshooting.md: errors, and conditions of `plexrl doctor`.

python -m scripts.troubleshooting_page          (write the page)
"""

from collections.abc import Iterator
from pathlib import Path

from plexrl import errors
from plexrl.cli.cluster.observe.doctor import REMEDIES
from scripts.limits_page import replace_part

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
HEAD = "| code | HTTP | class and meaning | what to do |\n|---|---|---|---|"
CONDITIONS_HEAD = "| condition | what to do |\n|---|---|"

TO_DO: dict[str, str] = {
    "internal": "report it with the traceback (`PLEXRL_TRACEBACK=full`)",
    "invalid_request": "correct what the message names; [limits](limits.md) has the bounds of "
    "numbers",
    "batch_shape": "give each value one entry for each token, and the values that the "
    "[loss](training.md#losses) needs",
    "no_token_counts": "leave the batch out, or correct its `mask`",
    "token_out_of_vocabulary": "use the model's own tokenizer: `actor.tokenizer()`",
    "non_finite_input": "look for NaN and infinity in rewards, advantages and logprobs",
    "layout": "choose another layout: [axes of each backend](layouts.md#layouts)",
    "trace": "correct the lines that it names: [traces](traces.md)",
    "invalid_config": "correct the settings that it names: `plexrl config check FILE`, "
    "[all settings](configuration.md)",
    "clock_difference": "set the clock of the machine that is wrong: `timedatectl`",
    "unsupported_model": "use a family that the backend runs, or another backend: "
    "[models](models.md#families)",
    "unsupported_dtype": "use `float32` or `bfloat16`, whichever the message allows",
    "unauthenticated": "set `PLEXRL_API_KEY`, or ask the operator for a key: "
    "[API keys](tenants.md#api-keys)",
    "join_token": "make a new token on the head: `plexrl node token`",
    "permission_denied": "use a key that may do this; of a folder, correct its owner and mode",
    "quota_exceeded": "end jobs or delete checkpoints, or ask the operator for a larger "
    "[quota](tenants.md)",
    "not_found": "correct the name; of a model, a directory that the "
    "[tenant may load](tenants.md#which-models-a-tenant-may-load)",
    "unknown_job": "`plexrl jobs --all` has the ids; old jobs are "
    "[forgotten](recovery.md#what-is-remembered)",
    "unknown_deployment": "create it first; `plexrl jobs JOB` lists those of the job",
    "unknown_operation": "submit it again if its result is still needed: old ones are "
    "[forgotten](recovery.md#what-is-remembered)",
    "unknown_checkpoint": "`plexrl checkpoints list JOB` lists those that exist; save it again "
    "if its node failed",
    "conflict": "wait until the state that it names has passed, then repeat the call",
    "job_ended": "begin a new job, from a [checkpoint](checkpoints.md) if there is one",
    "no_gradients": "run `forward_backward` before `optim_step`",
    "stale_token": "nothing: an outdated message was refused; report it if a controller gets it",
    "wrong_worker": "nothing: the router takes that worker for gone",
    "earlier_failure": "read `__cause__`, then [acknowledge it](failures.md#a-failed-operation): "
    "`actor.recover()`",
    "controller_replaced": "end this controller: [a job has one](failures.md#resuming-a-job)",
    "checkpoint_exists": "choose another name, or `overwrite=True`",
    "model_does_not_fit": 'more workers or another layout, `optimizer="host"`, a shorter '
    "`max_sequence_tokens`: [memory](layouts.md#memory-and-precision)",
    "payload_too_large": "send smaller batches, or raise the router's bound: "
    "[limits of a router](routers.md#limits-of-a-router)",
    "capacity": "ask for fewer GPUs, or add nodes",
    "non_finite_gradient": "lower `learning_rate`, clip (`grad_clip_norm`), look at the batch; the "
    "weights are as before",
    "non_finite_weights": "load an earlier checkpoint, or go on with a lower `learning_rate`; the "
    "step was undone",
    "overloaded": "nothing: the SDK retries until `timeout_s` or the deadline; then submit less at "
    'once, or raise the bound in `details["bound"]`',
    "operation_cancelled": "submit it again if it was not meant to end",
    "execution_failed": "`plexrl logs JOB` has the workers' traceback",
    "rollout_failed": "mend the last cause that it names, then call `job.rollout` again with the "
    "[same arguments](async_rollouts.md#when-it-stops)",
    "stale_weights": "sync or load again; `plexrl logs JOB` says why the engine missed the update",
    "connection_lost": "is the cluster up, and the URL right? `plexrl status`, "
    "[connect](sdk.md#connect)",
    "unavailable": "nothing: the SDK repeats the request; if it lasts, `plexrl doctor`",
    "lease_held": "nothing: this scheduler stands by. Else give each scheduler a "
    "[`holder`](routers.md#the-journal-in-postgresql-and-a-standby) of its own",
    "store_unavailable": "see to the object store, its address and credentials: "
    "[object stores](object_stores.md)",
    "no_answer": "nothing: the SDK repeats the request; if it lasts, `plexrl doctor`",
    "deadline_exceeded": "give more time (`within`, `timeout_s`, `reward_timeout_s`); "
    "`plexrl explain JOB` says what it waited for",
    "scheduler_fault": "report it with the [scheduler's log]"
    "(recovery.md#when-the-scheduler-has-a-fault)",
    "invariant": "report it with the command and its seed",
    "sandbox": "install what it names: [where the sandbox works]"
    "(rewards.md#where-the-sandbox-works)",
    "device": "see to the driver and the GPU: `plexrl logs JOB`, `nvidia-smi`",
    "device_unavailable": "install the driver, or use `--virtual-gpus`: [GPUs](gpu.md)",
    "device_memory_full": "end the processes that it names, or `plexrl nodes drain NODE`",
    "storage": "see to the disk that it names",
    "storage_full": "free space; work goes on by itself: "
    "[when something is full](recovery.md#when-something-is-full-or-away)",
    "storage_unavailable": "mend the disk or mount; nothing has to be restarted",
    "journal_unavailable": "see to the database or disk of the journal",
    "journal_full": "free space on its disk, or raise `--journal-bytes-max`",
    "journal_missing": "restore the journal, or give up the jobs with `--new-journal`: "
    "[restarting](recovery.md#restarting)",
    "lease_lost": "nothing: another scheduler leads; start this one again as a standby",
    "state_tier_full": "raise the tier's bound, add NVMe, or end jobs",
    "state_lost": "begin a job from its newest checkpoint, if nothing could be "
    "[computed again](recovery.md#restarting)",
    "corrupt_state": "look for a failing disk; load an earlier checkpoint, or what the message "
    "names",
    "payload_lost": "submit the operation again; look for a failing disk",
}
"""What to do about each error, by its code."""


def tables() -> dict[str, str]:
    """The text of each generated part, by the name in its markers."""
    conditions = (f"| `{code}` | {text} |" for code, text in REMEDIES.items())
    return {
        "errors": "\n".join([HEAD, *_rows()]),
        "conditions": "\n".join([CONDITIONS_HEAD, *conditions]),
    }


def classes() -> dict[str, type[errors.PlexRLError]]:
    """All errors by their codes, in alphabetical order."""
    found = (each for each in vars(errors).values() if isinstance(each, type))
    kinds = [each for each in found if issubclass(each, errors.PlexRLError)]
    return {each.code: each for each in sorted(kinds, key=lambda each: each.code)}


def _rows() -> Iterator[str]:
    for code, kind in classes().items():
        meaning = " ".join((kind.__doc__ or "").split())
        yield f"| `{code}` | {kind.status} | `{kind.__name__}`: {meaning} | {TO_DO[code]} |"


def filled_in(page: str) -> str:
    """The page with its tables updated.

    Raises:
        KeyError: nothing says what to do about an error.
        ValueError: a table has no markers in the page.
    """
    for name, text in tables().items():
        page = replace_part(page, name, text)
    return page


def main() -> None:
    """Write the page again."""
    PAGE.write_text(filled_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
