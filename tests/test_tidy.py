"""Rules that no linter checks: import direction, purity of cores, sizes, names, docstrings."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plexrl"

# A module may import from its own package and from those to the right (docs/architecture.md).
DIRECTION = (
    "cli",
    "cluster",
    "sim",
    "router",
    "scheduler",
    "rollout",
    "worker",
    "statemanager",
    "latency",
    "traces",
    "environments",
    "client",
    "runs",
    "rewards",
    "model",
    "events",
    "wire",
    "storage",
    "process",
    "plexrl",
)
LAYERS = {
    "cli": (
        *("app", "demo", "simulate_rollout", "simulate", "cluster", "traces", "jobs", "starter"),
        *("terminal",),
    ),
    "client": (
        "public",
        "asynchronous",
        "blocking",
        "profiling",
        "futures",
        "calls",
        "display",
        "trackers",
        "data",
    ),
    "runs": ("service", "controller_process", "records"),
    "environments": ("adapters", "roll_out", "trajectory", "tools", "texts", "environment"),
    "cluster": (
        "supervisor",
        "stored_page",
        "ray",
        "kubernetes",
        "embedded",
        "node",
        "join",
        "data_dir",
        "config",
    ),
    "events": ("publisher", "subscriber", "broker", "config", "outbox", "records"),
    "latency": ("pace", "models", "gpus", "costs"),
    "model": (
        *("layout", "capabilities", "memory", "deployment_spec", "lora", "spec", "architecture"),
        *("text", "parallelism"),
    ),
    "process": (
        *("children", "plain_text", "ray_connection", "garbage_collection", "folders", "memory"),
        *("sandbox", "conditions", "extras"),
    ),
    "rewards": ("graders", "scheduler", "decisions", "grade"),
    "rollout": (
        *("on_demand", "service", "coordinator", "policies", "staleness", "instances"),
        *("trajectories",),
    ),
    "router": (
        *("http", "tinker", "services", "observe", "job_files", "execution", "dispatch", "blobs"),
        *("server",),
    ),
    "scheduler": (
        *("service", "core", "queries", "dispatch", "recovery", "jobs", "admission"),
        *("operations", "placement", "accounting", "rules", "state"),
    ),
    "sim": (
        *("rollout", "report", "search", "fidelity", "engine", "state", "metrics", "results"),
        *("workload",),
    ),
    "statemanager": (
        *("daemon", "observe", "client", "checkpoint", "transfer", "store", "config"),
        *("protocol", "bytes", "layout", "device"),
    ),
    "storage": ("multipart", "model_folder", "object_store", "location"),
    "traces": ("sources", "describe", "convert", "formats", "generate", "io", "schema", "bundled"),
    "wire": (
        *("parameter_checks", "tensors", "links", "rpc", "scheduler_methods", "messages"),
        *("codec", "framing", "operations"),
    ),
    "worker": (
        *("agent", "process", "rollout", "forward", "training", "models", "state"),
        *("interface", "batches"),
    ),
}
"""Folders and modules of a package. Each may import from itself and from those to its right, so the
order says what may know what; the process's entry point, `__main__`, may import all."""

UPWARDS = (
    *("plexrl/client/blocking/cluster.py", "plexrl/__init__.py", "plexrl/__main__.py"),
    "plexrl/losses.py",
)
"""May import upwards: `plexrl.connect` starts a cluster; controllers import the others."""

PURE_FOLDERS = (
    "rewards/decisions",
    "rollout/coordinator",
    "rollout/instances",
    "rollout/policies",
    "rollout/staleness",
    "rollout/trajectories",
    "scheduler/accounting",
    "scheduler/admission",
    "scheduler/core",
    "scheduler/dispatch",
    "scheduler/jobs",
    "scheduler/operations",
    "scheduler/placement",
    "scheduler/queries",
    "scheduler/recovery",
    "scheduler/rules",
    "scheduler/state",
    "sim/engine/checks",
    "sim/fidelity",
    "sim/results",
    "statemanager/checkpoint/format",
    "statemanager/layout",
    "statemanager/store/tiers/eviction",
    "statemanager/transfer/delta",
    "client/data",
    "worker/batches",
)
"""Folders without clock, randomness, threads, files and imports of the shells of their package."""
SCHEDULER_SHELLS = ("plexrl.scheduler.service",)
ENTRIES_MAX = 9
"""Entries of a folder, without `__init__.py` and `__main__.py`."""
LAYERS_MAX = 12
"""Layers of a package with many of them."""
LAYERED = ("scheduler", "statemanager")
BANNED_IN_CORES = {
    *("asyncio", "io", "logging", "os", "pathlib", "random", "secrets", "shutil", "signal"),
    *("socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "uuid"),
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
LINES_MAX = 500


def python_files(*folders: str) -> list[Path]:
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]
    assert found, f"no Python file under {folders}"
    return found


def package_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in DIRECTION else "plexrl"


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import of a file, except those that only type checkers see."""
    tree = ast.parse(path.read_text())
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.body:
                for child in ast.walk(inner):
                    child.__dict__["type_only"] = True
    for node in ast.walk(tree):
        if node.__dict__.get("type_only"):
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return tuple(found)


def test_imports_point_down_the_list_of_packages() -> None:
    wrong = []
    for path in python_files("plexrl"):
        own = DIRECTION.index(package_of(path))
        for line, module in imports(path):
            parts = module.split(".")
            if parts[0] != "plexrl" or len(parts) < 2:
                continue
            target = parts[1] if parts[1] in DIRECTION[:-1] else "plexrl"
            name = str(path.relative_to(ROOT))
            if DIRECTION.index(target) < own and name not in UPWARDS:
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down_the_layers_of_a_package(package: str) -> None:
    layers, wrong = LAYERS[package], []
    folder = PACKAGE / package
    for path in python_files(f"plexrl/{package}"):
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        assert own in layers, f"{own} is no layer of {package}: add it to LAYERS"
        for line, module in imports(path):
            parts = module.split(".")
            if parts[:2] != ["plexrl", package] or len(parts) < 3 or parts[2] not in layers:
                continue
            if layers.index(parts[2]) < layers.index(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles() -> None:
    modules = {module_of(path): path for path in python_files("plexrl")}
    graph = {
        name: {each for _, each in imports(path) if each in modules}
        - {name, name.rpartition(".")[0]}
        for name, path in modules.items()
        if path.stem != "__init__"
    }
    order = TopologicalSorter({name: on & graph.keys() for name, on in graph.items()})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_folder_has_too_many_entries() -> None:
    long = []
    for folder in {path.parent for path in python_files("plexrl")}:
        entries = [
            each
            for each in folder.iterdir()
            if each.stem not in ("__init__", "__main__", "__pycache__", "py")
            # A folder that only has bytecode is of another commit.
            and (any(each.rglob("*.py")) or each.suffix == ".py")
        ]
        most = LAYERS_MAX if folder.name in LAYERED and folder.parent == PACKAGE else ENTRIES_MAX
        if len(entries) > most and folder != PACKAGE:
            long.append(f"{folder.relative_to(ROOT)} has {len(entries)} entries")
    assert not long, "\n".join(sorted(long))


def test_pure_folders_import_no_clock_randomness_or_io() -> None:
    wrong = []
    for path in python_files(*(f"plexrl/{folder}" for folder in PURE_FOLDERS)):
        for line, module in imports(path):
            is_shell = module.startswith(SCHEDULER_SHELLS)
            if module.split(".")[0] in BANNED_IN_CORES or is_shell:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


STATE_WRITERS = {
    "holder": {"group_lock.py"},
    "incoming": {"group_lock.py"},
    "switched": {"group_lock.py"},
    "token": {"group_lock.py"},
    "residency": {"wpg.py"},
    "state": {"job.py", "operation.py", "wpg.py"},
}
"""Fields of state machines, and the modules of `plexrl/scheduler/state` that write them."""


def test_fields_that_follow_a_state_machine_have_one_writer() -> None:
    wrong = []
    for path in python_files("plexrl/scheduler"):
        for node in ast.walk(ast.parse(path.read_text())):
            for line, target in _assigned(node):
                writers = STATE_WRITERS.get(target.attr)
                base = ast.unparse(target.value)
                # A record may set its own fields; an operation stores the token of its run.
                is_own = base == "self" or (base == "operation" and target.attr == "token")
                if writers is None or is_own:
                    continue
                if "state" not in path.parts or path.name not in writers:
                    name = path.relative_to(ROOT)
                    wrong.append(f"{name}:{line} writes {ast.unparse(target)}")
    assert not wrong, "\n".join(wrong)


def _assigned(node: ast.AST) -> Iterator[tuple[int, ast.Attribute]]:
    """(line, attribute) of each attribute that a statement assigns."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    else:
        return
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(each, ast.Attribute):
                yield node.lineno, each


def test_no_file_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)} has {count} lines"
        for path in python_files("plexrl", "tests", "benchmarks", "examples")
        if (count := len(path.read_text().splitlines())) > LINES_MAX
    ]
    assert not long, "\n".join(long)


SHARED_NAMES = {
    # The SDK's handle or argument, and the scheduler's record of the same thing.
    *("Cluster", "DemandTrace", "Deployment", "Job", "Segment"),
    # A run of a WPG, and the request for it to the StateManager, whose names are on the wire.
    *("Load", "Publish"),
    # Of an environment, in the words of its public interface, and of the cluster.
    *("Step", "Task", "Trajectory"),
}
"""Names of classes of which there may be several."""


def test_a_public_class_name_stands_in_one_module() -> None:
    modules: dict[str, list[str]] = {}
    for path in python_files("plexrl"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name for name, paths in modules.items() if len(paths) > 1}
    assert twice == SHARED_NAMES, [modules[name] for name in twice ^ SHARED_NAMES]


def test_no_file_has_a_name_without_meaning() -> None:
    unnamed = [path for path in python_files("plexrl", "tests") if path.stem in BANNED_NAMES]
    assert not unnamed, f"name these files by what they contain: {unnamed}"


def test_only_entry_points_read_the_environment() -> None:
    """Constructors get their configuration; only SDK, CLI and process starts read variables."""
    entry_points = {"cli", "client", "cluster", "process"}
    wrong = []
    for path in python_files("plexrl"):
        if path.relative_to(PACKAGE).parts[0] in entry_points or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                starts_children = (
                    "launcher.py",
                    "process.py",
                    "startup.py",
                    "children.py",
                    "agent.py",
                    "lifeline.py",
                )
                if path.name not in starts_children:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_every_public_module_class_and_function_is_documented() -> None:
    missing = []
    for path in python_files("plexrl"):
        tree = ast.parse(path.read_text())
        if tree.body and not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(ROOT)}: module")
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or ast.get_docstring(node):
                continue
            if _is_error_leaf(node):
                continue
            missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not missing, "\n".join(missing)


def _is_error_leaf(node: ast.AST) -> bool:
    """True for errors and enumerations: names and codes describe them."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any(ast.unparse(base).endswith(("Error", "Enum")) for base in node.bases)


@pytest.mark.parametrize(
    "package", ["scheduler", "statemanager", "router", "worker", "rollout", "sim", "traces"]
)
def test_a_top_level_link_leads_into_the_package(package: str) -> None:
    link = ROOT / package
    if not link.is_symlink():
        pytest.fail(f"{package} is no link: the checkout does not support symbolic links")
    assert link.resolve() == PACKAGE / package


def test_no_generated_files_are_tracked() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    generated = [name for name in tracked if name.endswith((".pyc", ".log", ".sqlite", ".tmp"))]
    assert not generated, generated


def test_the_command_line_prints_through_one_module() -> None:
    """That module escapes characters that control a terminal."""
    direct = ("sys.stdout.write", "sys.stderr.write", "typer.echo", " print(", "import Text\n")
    for path in (PACKAGE / "cli").rglob("*.py"):
        if path.name != "context.py" and path.parent.name != "demo":
            found = [each for each in direct if each in path.read_text()]
            assert found == [], f"{path.name} prints directly: use plexrl.cli.terminal.context"
