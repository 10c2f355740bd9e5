"""`plexrl simulate`: output for people and for programs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plexrl.cli.app import app, run_command
from plexrl.cli.simulate.answers import Answers
from plexrl.cli.simulate.output import show, write
from plexrl.cli.simulate.tables import print_runs
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.source.survey import survey_jobs
from plexrl.traces import write_jobs
from plexrl.traces.io.files import write_whole
from tests.sim.search.test_sweep import BASE, FewJobs

DOCS = Path(__file__).parents[3] / "docs" / "simulating.md"
NARROW, WIDE = "80", "220"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "few.csv"
    write_jobs(path, FewJobs().jobs())
    return str(path)


def shown(*arguments: str | Path, code: int = 0, columns: str = NARROW) -> str:
    """The output of the command for people."""
    found = CliRunner().invoke(
        app, ["simulate", *map(str, arguments)], env={"COLUMNS": columns, "TERM": "dumb"}
    )
    assert found.exit_code == code, found.output
    if columns == NARROW and "--json" not in arguments:
        # A path that stands alone cannot be broken.
        assert max(len(line) for line in found.stdout.splitlines() if " " in line) <= int(NARROW)
    return found.stdout


def told(*arguments: str | Path, code: int = 0) -> Any:
    """The JSON output of the command."""
    return json.loads(shown(*arguments, "--json", code=code))


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The error message of an invalid question."""
    monkeypatch.setattr(sys, "argv", ["plexrl", "simulate", *arguments])
    assert run_command(lambda: app(standalone_mode=False)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("plexrl: ")
    return printed.err


def test_a_program_gets_a_row_a_run_and_no_rule(trace: str) -> None:
    lines = shown(trace, "--nodes", "2", "--policy", "pack,isolated", columns="").splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("policy"))
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["pack", "isolated"]
    assert not any("─" in line for line in lines)
    widths = [len(line) for line in lines if re.match(r"(pack|isolated) +2 ", line)]
    assert 0 < max(widths) <= 80


def test_policies_are_compared_in_one_table_or_in_three(trace: str) -> None:
    narrow = shown(trace, "--nodes", "2", "--workers", "1")
    assert "6 jobs over 3.3 min, up to 8 GPUs each" in " ".join(narrow.split())
    assert re.search(r"isolated +2 +\d", narrow)
    assert re.search(r"spread\+backfill +2 +\d", narrow)
    assert all(word in narrow for word in ("recovered", "worst", "switches", "cost"))
    wide = shown(trace, "--nodes", "2", "--workers", "1", columns=WIDE)
    assert "cost" in wide
    assert sum(line.startswith(" isolated ") for line in wide.splitlines()) == 2
    said = " ".join(narrow.split())
    assert "Drain and bound count training GPUs only" in said
    assert "spread+backfill drains in" in said
    assert "of its GPU-hours on the whole cluster" in said


def test_a_sweep_over_sizes_says_the_size_of_each_comparison(trace: str) -> None:
    asked = (trace, "--sweep", "nodes=1:2", "--policy", "isolated,pack", "--workers", "1")
    text = " ".join(shown(*asked).split())
    assert "nodes 1: pack drains" in text
    assert "nodes 2: pack drains" in text


def test_several_seeds_are_told_by_median_and_band_and_fit_a_narrow_terminal(trace: str) -> None:
    asked = (trace, "--nodes", "2", "--workers", "1", "--policy", "isolated,pack")
    text = shown(*asked, "--jitter", "0.3", "--sweep", "seed=0:2")
    band = r"pack drains in \d+\.\d % \(\d+\.\d to \d+\.\d\) of the time of isolated"
    assert re.search(band, " ".join(text.split()))
    (headline,) = told(*asked, "--jitter", "0.3", "--sweep", "seed=0:2")["headlines"]
    assert headline["seeds"] == 3
    assert headline["drain"]["lowest"] <= headline["drain"]["median"]


def test_a_policy_that_is_longer_than_isolated_is_said_to_be_and_no_gap_is_told(trace: str) -> None:
    asked = (trace, "--nodes", "20", "--workers", "1", "--policy", "isolated,pack")
    text = " ".join(shown(*asked).split())
    assert re.search(r"pack 20 .*? % longer", text)
    assert "isolated is within 5.0 % of the bound" not in text, "no dash has to be explained"
    assert told(*asked)["runs"][1]["gap_recovered"] is None


def test_the_document_is_the_same_each_time_however_many_run_at_once(trace: str) -> None:
    asked = (trace, "--sweep", "nodes=1:2", "--policy", "isolated,pack", "--jitter", "0.15")
    one, other = told(*asked, "--workers", "1"), told(*asked, "--workers", "2")
    assert len(one.pop("speed")) == len(other.pop("speed")) == 4
    assert json.dumps(one) == json.dumps(other)
    assert one["trace"]["jobs"] == 6
    runs = one["runs"]
    assert [(each["scenario"]["policy"], each["result"]["gpus"]) for each in runs] == [
        ("isolated", 8),
        ("pack", 8),
        ("isolated", 16),
        ("pack", 16),
    ]
    assert runs[0]["gap_recovered"] is None
    isolated, pack = (each["result"] for each in runs[:2])
    gap_s = isolated["drain_s"] - max(pack["bounds"].values())
    assert runs[1]["gap_recovered"] == pytest.approx(
        (isolated["drain_s"] - pack["drain_s"]) / gap_s
    )


def test_the_smallest_cluster_is_found_and_said_how_surely(trace: str, tmp_path: Path) -> None:
    asked = (trace, "--slo", "wait.max<=1s", "--policy", "isolated", "--workers", "1")
    (plan,) = told(*asked)["smallest"]
    assert plan["nodes"] == 6
    assert plan["monotone"]
    assert [probe["nodes"] for probe in plan["probes"] if probe["met"]] == [6]
    text = shown(*asked, "--out", tmp_path)
    assert re.search(r"isolated: 6 nodes; all sizes from \d to 5 fail", text)
    assert text.count("To keep wait.max<=1s, isolated needs 6 nodes") == 1
    page = (tmp_path / "report.html").read_text()
    assert "To keep wait.max&lt;=1s, isolated needs 6 nodes" in page
    assert re.findall(r'<section id="([a-z]+)"', page)[:4] == [
        *("objectives", "costcurve", "probes", "runs")
    ]
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["headline"].startswith("To keep wait.max<=1s, isolated needs 6 nodes")
    none = shown(trace, "--slo", "wait.max<=1s", "--policy", "isolated", "--max-nodes", "3")
    assert "no cluster of up to 3 nodes meets the" in none
    dear = shown(*asked[:2], "wait.max<=1s,cost<=1", *asked[3:])
    assert "cost<=1 does not" in " ".join(dear.split())


def test_what_ifs_are_run_or_priced(trace: str) -> None:
    asked = ("--what-if", "price=5", "--what-if", "node-type=a100", "--what-if", "nodes=3")
    found = told(trace, "--nodes", "2", "--policy", "pack", "--workers", "1", *asked)
    before = found["runs"][0]["result"]
    priced, slower, larger = found["what_if"]
    assert [each["ran"] for each in found["what_if"]] == [False, True, True]
    assert priced["result"]["cost"] == pytest.approx(2 * before["cost"])
    assert slower["result"]["drain_s"] > before["drain_s"]
    assert larger["result"]["gpus"] == 24
    text = shown(trace, "--nodes", "2", "--policy", "pack", "--workers", "1", *asked)
    assert re.search(r"price=5 +pack +2 .*\+100.0 %", text)


def test_objectives_that_fill_a_terminal_stand_in_several_tables(trace: str) -> None:
    wanted = "wait.max<=1s,job_slowdown.median<=90%,gpu_hours_per_cycle<=400,normalized_wait.p95<=9"
    text = shown(trace, "--slo", f"{wanted},cycle_slowdown.p99<=90%", "--policy", "pack")
    assert text.count("Sizes that were run") > 1
    words = " ".join(text.split())
    assert all(word in words for word in ("cost", "fewest", ".median", "gpu_hours_per_cycle"))


def test_nodes_are_reserved_or_on_demand_and_the_bill_says_which(
    trace: str, tmp_path: Path
) -> None:
    asked = (trace, "--nodes", "4", "--policy", "pack,isolated", "--workers", "1")
    prices = ("--price-reserved", "1", "--price-on-demand", "3", "--price-rollout", "0.5")
    whatifs = ("--what-if", "reserved-nodes=4", "--what-if", "horizon-days=1")
    text = shown(*asked, *prices, *whatifs, "--out", tmp_path)
    words = " ".join(text.split())
    assert "prices of a GPU-hour: 1 of reserved nodes, 3 of nodes on demand, 0.5 of" in words
    assert "reserving a node pays if it is held for more than 33.3 % of the paid time" in words
    page = (tmp_path / "report.html").read_text()
    assert "bills" in set(re.findall(r'<section id="([a-z]+)"', page))
    document = json.loads((tmp_path / "results.json").read_text())
    pack = document["runs"][0]
    assert pack["break_even"] == pytest.approx(1 / 3)
    result = pack["result"]
    assert 0 < result["reserved_nodes"] < 4
    reserved = result["reserved_nodes"] * 8 * result["drain_s"] / 3600
    parts = (reserved, result["on_demand_cost"], 0.5 * result["rollout_gpu_hours"])
    assert result["cost"] == pytest.approx(sum(parts))
    assert not any(each["ran"] for each in document["what_if"])
    all_reserved = document["what_if"][0]["result"]
    assert (all_reserved["reserved_nodes"], all_reserved["on_demand_cost"]) == (4, 0.0)
    assert all_reserved["cost"] > result["cost"]


def test_a_horizon_that_ends_before_the_drain_is_warned_of(trace: str) -> None:
    asked = ("simulate", trace, "--nodes", "2", "--policy", "pack", "--workers", "1", "--json")
    short = CliRunner().invoke(app, [*asked, "--horizon-days", "0.001", "--what-if", "price=9"])
    assert "later than the horizon of" in short.stderr
    changed = CliRunner().invoke(app, [*asked, "--what-if", "horizon-days=0.001"])
    assert changed.stderr == short.stderr
    long = CliRunner().invoke(app, [*asked, "--horizon-days", "1"])
    assert long.stderr == ""
    ran, paid = (json.loads(each.stdout)["runs"][0]["result"] for each in (short, long))
    assert ran["paid_s"] == ran["drain_s"]
    assert paid["paid_s"] == 86_400.0
    training = paid["cost"] - paid["rollout_cost"]
    assert training == pytest.approx(2 * 8 * 2.5 * 24)


def test_results_and_report_are_written(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    options = ("--nodes", "2", "--workers", "1", "--compress", "2", "--window", "0:1")
    text = shown(trace, *options, "--out", out, columns=WIDE)
    assert str(out / "report.html") in text.replace("\n", "")
    found = json.loads((out / "results.json").read_text())
    assert found["runs"][0]["result"]["spans"]
    page = (out / "report.html").read_text()
    assert "arrivals 2 times as fast" in page
    assert "by state and rates" in page


def test_without_the_packages_of_the_report_there_are_results_still(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = CliRunner().invoke(
        app,
        ["simulate", trace, "--nodes", "1", "--policy", "pack", "--out", str(tmp_path), "--json"],
    )
    assert found.exit_code == 0, found.output
    assert "no report.html, as matplotlib cannot be found" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == found.stdout


def test_without_the_scheduler_s_packages_the_message_says_which_extra(trace: str) -> None:
    code = (
        "import sys; sys.modules['sortedcontainers'] = None; "
        "from plexrl.cli.app import app, run_command; "
        f"sys.argv = ['plexrl', 'simulate', {trace!r}]; sys.exit(run_command(app))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert "needs sortedcontainers" in found.stderr
    assert "plexrl[simulator]" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_run_that_failed_is_told_beside_the_results_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = run_all((BASE, replace(BASE, policy="no-such-policy")), workers=1)
    good, bad = outcomes
    assert isinstance(good, SimResult)
    assert isinstance(bad, FailedRun)
    found = Answers(
        trace="few", survey=survey_jobs(FewJobs().jobs()), runs=((BASE, good),), failed=(bad,)
    )
    show(found)
    printed = capsys.readouterr()
    assert "spread+backfill" in printed.out
    assert "plexrl: no-such-policy on 2 x h200, seed 0: policy" in printed.err
    write(found, tmp_path, quiet=True)
    (failed,) = json.loads((tmp_path / "results.json").read_text())["failed"]
    assert failed["scenario"]["policy"] == "no-such-policy"
    assert failed["error"]["code"] == "invalid_request"
    only_bad = replace(found, runs=())
    show(only_bad)
    write(only_bad, tmp_path / "bad", quiet=True)
    assert [path.name for path in (tmp_path / "bad").iterdir()] == ["results.json"]


def test_all_that_differs_from_the_trace_reaches_the_scenario(trace: str) -> None:
    found = told(
        *(trace, "--nodes", "2", "--policy", "pack", "--workers", "1", "--seed", "7", "--check"),
        *("--gpus-per-node", "4", "--price", "1.5", "--switch-s", "3", "--staleness", "1"),
        *("--responses", "16", "--tool-stalls", "0.1:20:0.5", "--detail", "operation"),
        *(
            "--node-mtbf-hours",
            "500",
            "--state-survives",
            "0.5",
            "--repair-minutes",
            "5",
            "--worker-mtbf-hours",
            "400",
        ),
        *("--cold", "--jitter", "0.2", "--cap-days", "0.01", "--min-gpus", "2", "--max-gpus", "8"),
    )
    scenario = found["runs"][0]["scenario"]
    assert scenario["pools"][0]["node_type"]["gpus"] == 4
    assert scenario["pools"][0]["node_type"]["price"] == 1.5
    behaviour = {
        "jitter": 0.2,
        "responses": 16,
        "lengths": "r1",
        "stalls": {"chance": 0.1, "mean_s": 20.0, "sigma": 0.5},
        "staleness": 1,
    }
    failures = {
        "node_mtbf_s": 1_800_000.0,
        "repair_s": 300.0,
        "worker_mtbf_s": 1_440_000.0,
        "state_survives": 0.5,
    }
    assert {name: scenario["behaviour"][name] for name in behaviour} == behaviour
    assert {name: scenario["failures"][name] for name in failures} == failures
    assert (scenario["seed"], scenario["switch_s"], scenario["detail"]) == (7, 3.0, "operation")
    assert (scenario["check"], scenario["warm"]) == (True, False)
    assert scenario["source"]["shape"]["cap_s"] == 864.0
    assert found["runs"][0]["result"]["jobs"] == 6


def test_made_up_jobs_and_pools_of_two_kinds() -> None:
    found = told(
        *("published", "--days", "1", "--cap-days", "0.05", "--max-gpus", "8", "--backlog"),
        *("--pool", "h200:2", "--pool", "a100:2", "--policy", "pack", "--workers", "1"),
    )
    (run,) = found["runs"]
    assert run["result"]["gpus"] == 32
    assert run["result"]["jobs"] == found["trace"]["jobs"] > 0


def test_bad_rows_are_an_error_or_are_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,8,600\nb,x,8,60\n")
    assert "line 3: submit_s is not a number" in refused(monkeypatch, capsys, str(path))
    found = CliRunner().invoke(
        app, ["simulate", str(path), "--skip-bad", "--nodes", "1", "--workers", "1", "--json"]
    )
    assert found.exit_code == 0
    assert f"{path}:3: submit_s is not a number" in found.stderr
    assert json.loads(found.stdout)["trace"]["jobs"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "packed"), "'packed' is unknown: use one of isolated"),
        (("--nodes", "2", "--min-gpus", "16"), "has no jobs, or the options exclude all"),
        (("--gpus-per-node", "4", "--nodes", "1"), r"6 jobs \(job-0, job-1, job-2, …\)"),
        (("--node-type", "h2000"), "'h2000' is unknown"),
        (("--pool", "h200"), "write NODE_TYPE:NODES"),
        (("--pool", "h200:1", "--pool", "h200:2"), "a name is repeated"),
        (("--sweep", "colour=red"), "only policy, nodes"),
        (("--slo", "wait<=2h"), "a statistic missing"),
        (("--slo", "drain<=2h", "--sweep", "seed=1:3"), "can vary only the policy"),
        (("--slo", "drain<=2h", "--gpus-per-node", "1", "--max-nodes", "2"), "needs 8 nodes"),
        (("--what-if", "price"), "write NAME=VALUE"),
        (("--price-reserved", "nan"), "--price-reserved is .*; it"),
        (("--price-on-demand", "inf"), "--price-on-demand is .*; it"),
        (("--horizon-days", "0"), "--horizon-days is .*; it"),
        (("--reserved-nodes", "1"), "without a price of the others"),
        (("--what-if", "reserved-nodes=1"), "without a price of the others"),
        (("--reserved-nodes", "9", "--price-on-demand", "3", "--nodes", "2"), "largest .* has 2"),
        (("--pool", "h200:1", "--pool", "a100:1", "--price-on-demand", "3"), "one pool"),
        (("--what-if", "nodes=1", "--gpus-per-node", "4", "--nodes", "4"), "too small for 6 jobs"),
        (("--tool-stalls", "often"), "write CHANCE:SECONDS"),
        (("--tool-stalls", "2:10"), "a chance is 0 to 1"),
        (("--window", "5:3", "--out", "results"), "write START:END in hours"),
        (("--detail", "fine"), "use burst or operation"),
        (("--lengths", "none.csv", "--responses", "4"), "neither r1 nor a file"),
        (("--lengths", str(DOCS), "--responses", "4"), "simulating.md"),
        (("--compress", "0"), "--compress is 0.0; it .*at least 0.001"),
        (("--min-duration", "nan"), "--min-duration is nan; it .*at least 0"),
        (("--jitter", "15"), "--jitter is 15.0; it .*at most 3, as 0.15 for 15 %"),
        (("--jitter", "inf"), "--jitter is inf; it .*"),
        (("--switch-s", "inf"), "--switch-s is inf; it .*at most 86,400"),
        (("--node-mtbf-hours", "1", "--repair-minutes", "inf"), "--repair-minutes is inf"),
        (("--worker-mtbf-hours", "1e-9"), r"at least 1 s \(0.000278\), or 0 for never"),
        (("--window", "0:1e308", "--out", "results"), "at most 1e"),
        (("--nodes", "1000000000"), "--nodes is 1000000000; it .*at most 10,000"),
        (("--gpus-per-node", "1000000000"), "--gpus-per-node is 1000000000; .*at most 1,024"),
        (("--pool", "h200:2", "--nodes", "3"), "--nodes 3 with --pool is ignored"),
        (("--pool", "h200:2", "--node-type", "h100"), "--node-type h100 with --pool is ignored"),
        (("--pool", "h200:99999999"), "a pool has 1 to 10000 nodes"),
        (("--lengths", "r1"), "--lengths r1 without --responses is ignored"),
        (("--repair-minutes", "5"), "without --node-mtbf-hours is ignored"),
        (("--state-survives", "0.5", "--node-mtbf-hours", "0"), "without --node-mtbf-hours is"),
        (("--max-nodes", "5"), "--max-nodes 5 without --slo is ignored"),
        (("--slo", "drain<=2h", "--nodes", "3"), "--nodes 3 with --slo is ignored"),
        (("--slo", "drain<=2h", "--pool", "h200:3"), "--pool h200:3 with --slo is ignored"),
        (("--backlog", "--compress", "2"), "--compress 2.0 with --backlog is ignored"),
        (("--ray", "auto", "--workers", "2"), "--workers 2 with --ray is ignored"),
        (("--window", "0:1"), "--window 0:1 without --out or --json is ignored"),
        (("--sweep", "nodes=1:2", "--nodes", "3"), "--nodes 3 with --sweep nodes is ignored"),
        (("--sweep", "nodes=1:2", "--pool", "h200:3"), "--pool h200:3 with --sweep nodes"),
        (("--sweep", "policy=pack", "--policy", "pack"), "--policy pack with --sweep policy"),
        (("--sweep", "jitter=0", "--jitter", "0.1"), "--jitter 0.1 with --sweep jitter"),
        (("--sweep", "staleness=1", "--staleness", "1"), "--staleness 1 with --sweep stal"),
        (("--sweep", "switch-s=1", "--switch-s", "1"), "--switch-s 1.0 with --sweep switch-s"),
        (("--sweep", "staleness=99999"), "'99999' is invalid: use 0 to 64 steps"),
        (("--sweep", "nodes=2,2"), "'2' is repeated"),
        (("--policy", "pack,pack"), "'pack' is repeated"),
        (("--what-if", "price=3", "--what-if", "price=3"), "--what-if price=3 is given twice"),
        (("--slo", "drain<=2h", "--slo", "drain<=2h"), "--slo drain<=2h is given twice"),
        (("--jobs-per-day", "3"), "--jobs-per-day 3.0 with a trace is ignored"),
        (("--min-gpus", "8", "--max-gpus", "4"), "--min-gpus 8 is more than --max-gpus 4"),
        (("--staleness", "99999"), "--staleness is 99999; it .*at least 0 .* at most 64"),
        (("--responses", "99999999"), "--responses is 99999999; it .*at most 1,000,000"),
        (("--tool-stalls", "0.1:10:99"), "sigma is at most 3"),
        (("--compress", "nan"), "--compress is nan; it .*"),
        (("--from", ""), "--from is empty"),
        (("--out", "/proc/results"), "/proc cannot be written"),
        (("--out", str(DOCS / "out")), r"--out .*simulating\.md is not a folder"),
    ],
)
def test_what_cannot_be_answered_is_one_message_before_anything_runs(
    trace: str,
    options: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert re.search(said, refused(monkeypatch, capsys, trace, *options))


@pytest.mark.parametrize("options", [("--days", "1e4", "--jobs-per-day", "1e6")])
def test_jobs_without_end_are_not_made_up(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "can be generated" in refused(monkeypatch, capsys, "published", *options)


@pytest.mark.parametrize(
    "option", [("--from", "philly"), ("--skip-bad",), ("--any-node-type",), ("--no-profiles",)]
)
def test_options_of_a_trace_are_refused_where_jobs_are_made_up(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(monkeypatch, capsys, "published", *option)
    assert f"{' '.join(option)} with `published` is ignored" in message


def test_a_folder_that_stands_where_a_result_is_to_be_is_refused_before_the_run(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    message = refused(monkeypatch, capsys, trace, "--nodes", "2", "--out", str(tmp_path))
    assert "report.html is a folder" in message


def test_rollouts_without_gpus_are_warned_of(trace: str, tmp_path: Path) -> None:
    asked = ("--nodes", "2", "--policy", "pack", "--workers", "1", "--json")
    unpaid = tmp_path / "unpaid.csv"
    write_jobs(unpaid, (replace(job, rollout_gpus=0) for job in FewJobs().jobs()))
    found = CliRunner().invoke(app, ["simulate", str(unpaid), *asked])
    assert "6 of 6 jobs have rollouts and no rollout GPUs" in found.stderr
    assert json.loads(found.stdout)["trace"]["jobs_without_rollout_gpus"] == 6
    assert "no rollout GPUs" not in CliRunner().invoke(app, ["simulate", trace, *asked]).stderr


def test_a_job_that_failed_is_counted_once_and_long_seeds_stand_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", WIDE)
    result = run_all((BASE,), workers=1)[0]
    assert isinstance(result, SimResult)
    print_runs(
        [
            (replace(BASE, seed=12_345_678), replace(result, failed_jobs=2)),
            (replace(BASE, seed=12_345_679), result),
        ]
    )
    printed = capsys.readouterr().out
    assert "6 jobs" in printed
    assert "12345678" in printed
    assert "12345679" in printed


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new, and then \ud800")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_jobs_without_cycles_need_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,8,600\n")
    message = refused(monkeypatch, capsys, str(path), "--no-profiles")
    assert "1 job (a) without segments" in message
    assert told(path, "--nodes", "1", "--policy", "pack")["runs"][0]["result"]["jobs"] == 1
