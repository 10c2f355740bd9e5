"""Everything in the documentation that the tests do not run as it is, with the reason."""

from collections.abc import Mapping, Sequence

PARSED = {
    "curl ": "needs an operation under way; tests/cluster/rollouts has one",
    "cp ": "changes the machine that it runs on",
    "install ": "changes the machine that it runs on",
    "make ": "changes the environment or takes minutes; one target runs this test",
    "pip ": "changes the environment that it runs in",
    "plexrl dashboard ": "serves until it is stopped; tests/router/dashboard/test_reopen.py",
    "plexrl doctor": "fails if anything is wrong; tests/cli/cluster/test_top_and_doctor.py",
    "plexrl fidelity": "needs the recording of a job of many cycles; tests/sim and"
    " tests/cluster/sharing/test_fidelity.py run it",
    "plexrl forecast": "needs recordings, as `plexrl fidelity`; tests/sim/fidelity runs it",
    "plexrl history ": "needs an archive; tests/cli/cluster/test_history.py",
    "plexrl plan-rollout ": "needs a profile; tests/cluster/rollouts/test_rollout_profile.py",
    "plexrl rollouts JOB --profile ": "needs a rollout that has trained; as `plan-rollout`",
    "plexrl fork ": "needs a script; tests/cluster/training/test_time_machine.py",
    "plexrl rewind ": "fences the job's controller; as `plexrl fork`",
    "plexrl quote ": "needs a script or a profiled job; tests/cluster/commands/test_quote.py",
    "plexrl logs -f ": "ends with its job; tests/cluster/training/test_run_records.py",
    "plexrl statemanager ": "asks for 256 GiB of host memory; tests/statemanager starts it",
    "plexrl up --ray": "needs a Ray cluster; tests/cluster/ray/test_ray_cluster.py has one",
    "gpu_check.sh ": "needs what `make gpu-kit` packed, and a GPU; run by hand",
    "python -m scripts.gemma_model": "needs 233 MB of weights; run by hand",
    "python examples/gemma_arithmetic.py": "needs those weights, and an hour; run by hand",
    "ray ": "starts a Ray cluster on this machine; tests/cluster/ray/test_ray_cluster.py has one",
    "systemctl ": "changes the machine that it runs on",
}
"""Beginnings of commands that are parsed and not run."""

TYPED = {
    "steps=100):": "takes a hundred steps; tests/cluster/rollouts",
    "steps=100, tokens_min=16384):": "takes a hundred steps; tests/cluster/rollouts",
    "Parallelism(dp=4)": "12 ranks take minutes to start; tests/cluster/sharing",
    'backend="megatron"': "four ranks take minutes to start; tests/cluster/training",
    "tinker.ServiceClient(": "needs Hugging Face models on disk; tests/router/tinker",
    "# fails, and nobody reads its future": "shows an error; tests/cluster/faults",
    'cluster.drain("node3")': "three keys and a node that must be there; tests/cluster",
    'plexrl.ModelSpec(path="/models': "needs Hugging Face models on disk;"
    " tests/cluster/training/test_model_directories.py",
}
"""Parts of snippets that are type-checked and not run."""

OPTIONS_OF_OTHERS = {"--address", "--ignorefile", "--no-build-isolation", "--url"}
"""Options of other programs that the text mentions."""

PLACEHOLDERS = {
    "JOB": "docs-0123456789",
    "JOB2": "docs-9876543210",
    "NAME": "team",
    "KEYID": "0123456789ab",
    "NODE": "node0",
    "FILE": "config.json",
    "HEAD:6379": "head:6379",
}
"""Values of placeholders for parsers. Commands that run get the cluster's own values."""

FOLDERS = {"/var/lib/plexrl": "data"}
"""Folders in the text, with their replacements in the working directory of the commands."""

SMALLER = {("--host-memory", "32"): "1"}
"""Options with values that are too large for some machines, with smaller values."""


def substituted(words: Sequence[str], actual: Mapping[str, str] = PLACEHOLDERS) -> list[str]:
    """Replace placeholders, folders and large values in `words`."""
    found: list[str] = []
    for option, word in zip(["", *words], words, strict=False):
        word = SMALLER.get((option, word), word)
        for folder, instead in FOLDERS.items():
            word = word.replace(folder, instead)
        found.append(actual.get(word, word))
    return found
