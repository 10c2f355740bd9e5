"""Everything in the documentation that is not run exactly as it stands, and why."""

from collections.abc import Mapping, Sequence

PARSED = {
    "curl ": "needs an operation under way; tests/cluster/test_streams.py reads the same stream",
    "cp ": "changes the machine that it runs on",
    "install ": "changes the machine that it runs on",
    "make ": "changes the environment or takes minutes; one target runs this test",
    "pip ": "changes the environment that it runs in",
    "plexrl fidelity": "needs the recording of a job of many cycles; tests/sim and"
    " tests/cluster/test_fidelity.py run it",
    "plexrl statemanager ": "asks for 256 GiB of host memory; tests/statemanager starts it",
    "plexrl up --ray": "needs a Ray cluster; tests/cluster/test_ray_cluster.py has one",
    "gpu_check.sh ": "needs what `make gpu-kit` packed, and a GPU; run by hand",
    "ray ": "starts a Ray cluster on this machine; tests/cluster/test_ray_cluster.py has one",
    "systemctl ": "changes the machine that it runs on",
}
"""Beginnings of commands that are held against their parser and not run."""

TYPED = {
    "Parallelism(dp=4)": "12 ranks take minutes to start; tests/cluster/test_layout_switching.py",
    'backend="megatron"': "four ranks take minutes to start; tests/cluster/test_megatron.py",
    "# fails, and nobody reads its future": "shows an error; tests/cluster/test_silent_failures.py",
    'cluster.drain("node3")': "three keys and a node that must be there; tests/cluster",
    'plexrl.ModelSpec(path="/models': "needs Hugging Face models on disk;"
    " tests/cluster/test_model_directories.py",
}
"""Parts of snippets whose names and types are checked, and which are not run."""

OPTIONS_OF_OTHERS = {"--address", "--no-build-isolation", "--url"}
"""Options that the text names of programs that are not ours."""

PLACEHOLDERS = {
    "JOB": "docs-0123456789",
    "JOB2": "docs-9876543210",
    "NAME": "team",
    "KEYID": "0123456789ab",
    "NODE": "node0",
    "FILE": "config.json",
    "HEAD:6379": "head:6379",
}
"""What the text leaves to the reader, as parsers get it. When a command runs, the cluster's own."""

FOLDERS = {"/var/lib/plexrl": "data"}
"""Folders of the text by where they are instead, in the folder that commands run in."""

SMALLER = {("--host-memory", "32"): "1"}
"""Values of options that the machine may be too small for, by those that it is not."""


def substituted(words: Sequence[str], actual: Mapping[str, str] = PLACEHOLDERS) -> list[str]:
    """The words with placeholders, folders and large values replaced."""
    found: list[str] = []
    for option, word in zip(["", *words], words, strict=False):
        word = SMALLER.get((option, word), word)
        for folder, instead in FOLDERS.items():
            word = word.replace(folder, instead)
        found.append(actual.get(word, word))
    return found
