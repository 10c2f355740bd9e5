"""The house rules that no linter knows: import direction, purity of cores, size, names, docs."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plexrl"

# A module may import from its own room and from those to the right. The command line is the last to
# know everybody; nobody knows it.
DIRECTION = (
    "cli",
    "sim",
    "router",
    "scheduler",
    "rollout",
    "worker",
    "statemanager",
    "traces",
    "plexrl",
)

SHELLS_IN_SCHEDULER = {
    *("journal", "sql_journal", "database", "schema", "recovery", "leadership"),
    *("shell", "links", "service", "set_aside", "held_door", "journal_hold"),
    *("connection", "tenant_calls", "__main__"),
}
OTHER_CORES = (
    "backend_capabilities.py",
    "deployment_spec.py",
    "lora.py",
    "megatron_dimensions.py",
    "model_layout.py",
    "kv_cache.py",
    "operation_phases.py",
    "parallelism.py",
    "router/balance.py",
    "router/context_split.py",
    "router/dispatch.py",
    "router/generate_plan.py",
    "router/micro_batches.py",
    "router/reductions.py",
    "router/stream_events.py",
    "router/validation.py",
    "sim/group_members.py",
    "sim/job_run.py",
    "sim/report/comparison.py",
    "sim/report/style.py",
    "sim/report/tables.py",
    "sim/report/units.py",
    "sim/bounds.py",
    "sim/chance.py",
    "sim/checks.py",
    "sim/collector.py",
    "sim/device_state.py",
    "sim/failures.py",
    "sim/fidelity.py",
    "sim/move_costs.py",
    "sim/occupancy.py",
    "sim/recording.py",
    "sim/sketch.py",
    "sim/tenant_table.py",
    "sim/utilisation.py",
    "sim/virtual_state.py",
    "sim/axes.py",
    "sim/objectives.py",
    "sim/result_json.py",
    "sim/slo.py",
    "sim/survey.py",
    "statemanager/boxes.py",
    "statemanager/casts.py",
    "statemanager/checkpoint/plan.py",
    "statemanager/checkpoint/record.py",
    "statemanager/checkpoint/retention.py",
    "statemanager/checkpoint/safetensors_format.py",
    "statemanager/checkpoint/tensors.py",
    "statemanager/delta.py",
    "statemanager/delta_codec.py",
    "statemanager/delta_pace.py",
    "statemanager/free_ranges.py",
    "statemanager/keys.py",
    "statemanager/layout.py",
    "statemanager/plan.py",
    "statemanager/plan_balance.py",
    "statemanager/plan_cache.py",
    "statemanager/plan_cost.py",
    "statemanager/plan_layout.py",
    "statemanager/plan_match.py",
    "statemanager/residency.py",
    "statemanager/residents.py",
    "statemanager/relayout.py",
    "statemanager/runs.py",
    "statemanager/scales.py",
    "statemanager/state_digest.py",
    "traces/cells.py",
    "traces/describe.py",
    "traces/fitting.py",
    "traces/formats/jobs.py",
    "traces/laws.py",
    "traces/length_model.py",
    "traces/problems.py",
    "traces/published.py",
    "traces/recorder.py",
    "traces/rhythm.py",
    "traces/schema.py",
    "traces/shaping.py",
    "traces/workload.py",
    "worker/engine/blocks.py",
    "worker/engine/seating.py",
    "worker/engine/shards.py",
    "statemanager/windows.py",
    "worker/training/megatron/boxes.py",
    "worker/training/megatron/names.py",
)
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


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in DIRECTION else "plexrl"


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that runs, wherever it stands; type-only ones do not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.body:
                for child in ast.walk(inner):
                    child.__dict__["type_only"] = True
    for node in ast.walk(tree):
        if node.__dict__.get("type_only"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def scheduler_cores() -> list[Path]:
    return [
        path
        for path in python_files("plexrl/scheduler")
        if path.stem not in SHELLS_IN_SCHEDULER and path.stem != "__init__"
    ]


def test_imports_point_down_the_list_of_rooms() -> None:
    wrong = []
    for path in python_files("plexrl"):
        own = DIRECTION.index(room_of(path))
        for line, module in imports(ast.parse(path.read_text())):
            parts = module.split(".")
            if parts[0] != "plexrl" or len(parts) < 2:
                continue
            target = parts[1] if parts[1] in DIRECTION[:-1] else "plexrl"
            if DIRECTION.index(target) < own:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_cores_meet_no_clock_no_chance_and_no_outside_world() -> None:
    wrong = []
    for path in [*scheduler_cores(), *(PACKAGE / name for name in OTHER_CORES)]:
        for line, module in imports(ast.parse(path.read_text())):
            shell = module.split(".")
            if shell[0] in BANNED_IN_CORES or (
                shell[:2] == ["plexrl", "scheduler"]
                and len(shell) > 2
                and shell[2] in SHELLS_IN_SCHEDULER
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_file_wants_to_be_two_rooms() -> None:
    long = [
        f"{path.relative_to(ROOT)} has {count} lines"
        for path in python_files("plexrl", "tests", "benchmarks", "examples")
        if (count := len(path.read_text().splitlines())) > LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_no_file_is_a_drawer() -> None:
    drawers = [path for path in python_files("plexrl", "tests") if path.stem in BANNED_NAMES]
    assert not drawers, f"name these by what they hold: {drawers}"


def test_no_environment_is_read_below_the_doors() -> None:
    """Configuration is handed to constructors; only the SDK's and CLI's doors read variables."""
    doors = {"cli", "client", "cluster", "demo"}
    wrong = []
    for path in python_files("plexrl"):
        if path.relative_to(PACKAGE).parts[0] in doors or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                speaks_to_children = (
                    "launcher.py",
                    "process.py",
                    "agent.py",
                    "fork_server_lifeline.py",
                )
                if path.name not in speaks_to_children:
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
    """Errors and enumerations speak by their name, their code and the tree at the file's top."""
    if not isinstance(node, ast.ClassDef):
        return False
    return any(ast.unparse(base).endswith(("Error", "Enum")) for base in node.bases)


@pytest.mark.parametrize(
    "room", ["scheduler", "statemanager", "router", "worker", "rollout", "sim", "traces"]
)
def test_the_door_at_the_top_leads_into_the_package(room: str) -> None:
    door = ROOT / room
    if not door.is_symlink():
        pytest.fail(f"{room} is no link: the tree was checked out without link support")
    assert door.resolve() == PACKAGE / room


def test_the_tree_holds_no_generated_files() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    generated = [name for name in tracked if name.endswith((".pyc", ".log", ".sqlite", ".tmp"))]
    assert not generated, generated


def test_the_command_line_writes_through_one_module() -> None:
    """It shows what controls a terminal as escapes."""
    past_it = ("sys.stdout.write", "sys.stderr.write", "typer.echo", " print(", "import Text\n")
    for path in (PACKAGE / "cli").glob("*.py"):
        if path.name != "context.py":
            found = [each for each in past_it if each in path.read_text()]
            assert found == [], f"{path.name} writes by itself: use plexrl.cli.context"
