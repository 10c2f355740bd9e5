"""The report page: contents, safety, and equal bytes for equal results."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.sim.report import write_report
from plexrl.sim.report.plots.gantt import job_colours, natural
from plexrl.sim.report.plots.style import looks
from plexrl.sim.report.units import duration, percent, short
from plexrl.sim.results.comparison import compare, drawn
from plexrl.sim.results.result import (
    DistributionSummary,
    DrainBounds,
    SimResult,
    Span,
    Speed,
    TenantResult,
)

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    r"$\frac{$",
    "_hidden",
    "{{ 7 * 7 }}",
    "--><!-- ]]>",
    "名\x07\u202e",
)
LINES = (("trace", "bundled"), ("jitter", "15 %"))


def spread_over(*values: float) -> DistributionSummary:
    """Of a few values, each as frequent as the others."""
    ordered = sorted(values)
    count = len(ordered)
    return DistributionSummary(
        count=count,
        mean=sum(ordered) / count,
        median=ordered[count // 2],
        p95=ordered[-1],
        p99=ordered[-1],
        highest=ordered[-1],
        cdf=tuple((value, (place + 1) / count) for place, value in enumerate(ordered)),
    )


def run_of(policy: str, *, gpus: int = 64, drain_s: float = 864_000.0) -> SimResult:
    """A small result with everything there is to draw."""
    return SimResult(
        policy=policy,
        gpus=gpus,
        jobs=321,
        failed_jobs=0,
        cycles=4_000,
        events=9_000,
        switches=1_717,
        drain_s=drain_s,
        bounds=DrainBounds(critical_path_s=100_000.0, area_s=216_000.0),
        wait=spread_over(0.0, 7_200.0, 86_400.0 * 3.25),
        normalized_wait=spread_over(0.0, 0.2, 3.0),
        job_slowdown=spread_over(0.01, 0.02, 0.03),
        completion=spread_over(1.0, 1.2, 4.1),
        cycle_slowdown=spread_over(0.0, 0.0123, 0.0456),
        training_gpu_hours=5_760.0,
        busy_gpu_hours=3_840.0,
        switch_gpu_hours=100.0,
        rollout_gpu_hours=9_000.0,
        cost=54_321.0,
        rollout_cost=22_500.0,
        gpu_hours_per_cycle=5.25,
        utilisation=tuple((drain_s * bin_ / 10, 0.9, 0.25) for bin_ in range(10)),
        tenants=tuple(
            TenantResult(
                tenant=tenant,
                jobs=100,
                gpu_hours=hours,
                rollout_gpu_hours=hours,
                wait_mean_s=3_000.0,
                slowdown_mean=1.375,
            )
            for tenant, hours in (("vision", 7_000.0), ("speech", 5_000.0))
        ),
        worst_tenant=1.6,
        spans=tuple(
            Span(
                group=f"g{group}",
                job=f"job-{group}-{job}",
                kind=kind,
                start_s=1_000.0 + 200 * job + start,
                end_s=1_000.0 + 200 * job + end,
            )
            for group in range(3)
            for job in range(2)
            for kind, start, end in (("load", 0, 8), ("run", 8, 150), ("offload", 150, 158))
        ),
        failures=0,
        speed=Speed(wall_s=1.0, events_per_s=9_000.0, peak_bytes=1 << 28),
    )


def page_of(
    results: Sequence[SimResult],
    folder: Path,
    *,
    gpus_per_node: int | None = None,
    headline: Sequence[str] = (),
) -> str:
    path = write_report(
        results,
        folder,
        title="A plan",
        scenario_lines=LINES,
        gpus_per_node=gpus_per_node,
        headline=headline,
    )
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', page)


class _Reader(HTMLParser):
    """Collects what a browser would run, load or link, and the text that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("src", "href", "xlink:href") and value is not None:
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    return reader


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(
        [run_of("isolated"), run_of("spread", drain_s=432_000.0)],
        tmp_path_factory.mktemp("report"),
        gpus_per_node=8,
        headline=["spread drains in 50.0 % of the time of isolated."],
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of([run_of("spread")], tmp_path_factory.mktemp("report"))


def test_each_run_stands_in_the_table_with_its_figures(compared: str) -> None:
    times, slowdowns = re.findall(r"<tr><td>spread</td>(.*?)</tr>", compared)
    assert re.findall(r"<td>(.*?)</td>", times) == [
        *("8", "64", "321", "5.00 days", "2.50 days"),
        "50.0 %",  # of the isolated run's 10 days
        "66.7 %",  # 5 of the 7.5 days from there to the bound
        *("2.00 h", "3.25 days", "54,321", "7,680", "9,000", "5.25", "1.60"),
    ]
    assert re.findall(r"<td>(.*?)</td>", slowdowns) == [
        *("8", "64", "1.2 %", "1.9 %", "4.6 %", "2.0 %", "2.0 %", "3.0 %", "1.20", "4.10"),
        # Of 64 GPUs for 5 days:
        *("50.0 %", "1.3 %", "75.0 %", "1,717"),
    ]


def test_page_says_what_sharing_gains(compared: str) -> None:
    text = " ".join(read(compared).text.split())
    assert "spread drains in 50.0 % of the time of isolated." in text


def test_scenario_and_tenants_are_listed(compared: str) -> None:
    text = read(compared).text
    for part in ("jitter", "15 %", "vision", "speech", "7,000", "1.38", "worst", "1.60"):
        assert part in text


def test_page_needs_nothing_beside_it(compared: str) -> None:
    reader = read(compared)
    assert "script" not in reader.tags
    assert all(link.startswith(("#", "data:image/png;")) for link in reader.links)
    assert "@import" not in compared
    ids = re.findall(r'\bid="([^"]+)"', compared)
    assert len(ids) == len(set(ids)), "two elements share an id"
    for link in [link[1:] for link in reader.links if link.startswith("#")]:
        assert link in ids, f"{link} leads nowhere"


def test_every_plot_that_has_its_data_is_there(compared: str) -> None:
    assert sections(compared) == [
        *("runs", "gpuhours", "drain", "cost", "wait", "completion", "utilisation", "gantt"),
        "tenants",
    ]


def test_single_run_is_compared_with_nothing(alone: str) -> None:
    assert not {"drain", "cost", "sweep"} & set(sections(alone))
    assert "<th>gap recovered</th>" not in alone
    assert "of the isolated drain time" not in alone


@pytest.mark.parametrize("absent", [{"gantt", "tenants"}, {"utilisation", "wait", "completion"}])
def test_plots_without_data_are_left_out(absent: set[str], alone: str, tmp_path: Path) -> None:
    result = run_of("spread")
    if "gantt" in absent:
        result = replace(result, spans=(), tenants=result.tenants[:1])
    else:
        nothing = replace(spread_over(0.0), cdf=())
        result = replace(
            result, utilisation=(), completion=nothing, normalized_wait=spread_over(0.0, 0.0)
        )
    page = page_of([result], tmp_path)
    assert set(sections(alone)) - set(sections(page)) == absent


def test_sweep_over_sizes_is_drawn_and_single_runs_are_of_one_size(tmp_path: Path) -> None:
    results = [
        run_of(policy, gpus=gpus) for gpus in (32, 64, 128) for policy in ("isolated", "spread")
    ]
    page = page_of(results, tmp_path)
    assert "sweep" in sections(page)
    assert "clusters of 64 GPUs" in page
    assert [run.result.gpus for run in drawn(compare(results))] == [64, 64]


def test_of_many_seeds_those_are_drawn_that_have_a_run_of_every_policy() -> None:
    policies = ("isolated", "isolated+backfill", "spread+backfill")
    results = [run_of(policy) for _ in range(5) for policy in policies]
    shown = [run.result.policy for run in drawn(compare(results))]
    assert shown == [*policies] * 3


def test_hostile_names_are_text(tmp_path: Path) -> None:
    result = run_of("isolated")
    hostile = replace(
        result,
        policy=HOSTILE[0],
        tenants=tuple(replace(result.tenants[0], tenant=name) for name in HOSTILE),
        spans=tuple(
            replace(span, group=name, job=name)
            for name, span in zip(HOSTILE, result.spans, strict=False)
        ),
    )
    path = write_report(
        [result, hostile],
        tmp_path,
        title=HOSTILE[0],
        scenario_lines=[(name, name) for name in HOSTILE],
    )
    reader = read(path.read_text(encoding="utf-8"))
    assert not {"script", "img"} & reader.tags
    assert not {name for name in reader.attributes if name.startswith("on")}
    for name in HOSTILE:
        assert reader.text.count(name) >= 3, f"{name} is not shown as it is"


def test_equal_results_make_equal_bytes(alone: str, tmp_path: Path) -> None:
    slower = replace(run_of("spread"), speed=Speed(wall_s=9.0, events_per_s=1.0, peak_bytes=1))
    assert page_of([slower], tmp_path) == alone


def test_no_figure_stays_open_and_no_setting_changes(tmp_path: Path) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    before = dict(mpl.rcParams)
    page_of([replace(run_of("spread"), spans=())], tmp_path)
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_a_reader_s_own_settings_of_matplotlib_change_nothing(alone: str, tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "text.parse_math": True}):
        assert page_of([run_of("spread")], tmp_path) == alone


def test_a_gantt_chart_of_many_groups_is_cut_and_says_so(tmp_path: Path) -> None:
    result = run_of("spread")
    spans = tuple(replace(result.spans[1], group=f"g{index}") for index in range(75))
    page = page_of([replace(result, spans=spans)], tmp_path)
    assert "the first 60 of 75 groups" in page
    assert "g59: job-0-0" in page
    assert "g60: job-0-0" not in page


def test_neighbours_in_a_row_have_colours_of_their_own() -> None:
    spans = run_of("spread").spans
    colours = job_colours(spans)
    assert colours["g0", "job-0-0"] != colours["g0", "job-0-1"]


def test_groups_stand_in_the_order_of_their_numbers() -> None:
    assert natural({"g10", "g2", "h1", "g", "2"}) == ["2", "g", "g2", "g10", "h1"]


def test_a_policy_looks_the_same_at_every_size_and_no_two_look_alike() -> None:
    results = [run_of(f"policy {index}", gpus=gpus) for gpus in (8, 16) for index in range(10)]
    look = looks(compare(results))
    assert set(look) >= {f"policy {index}" for index in range(10)}
    assert len({(entry.colour, entry.dash) for entry in look.values()}) == len(look)


def test_runs_that_share_a_name_are_numbered_and_labels_replace_policies() -> None:
    results = [run_of("spread"), run_of("spread"), run_of("spread", gpus=8)]
    assert [run.label for run in compare(results)] == ["spread", "spread (2)", "spread"]
    assert [run.label for run in compare(results, ["a", "b", "c"])] == ["a", "b", "c"]


def test_ratio_needs_an_isolated_run_of_the_same_size_and_bound() -> None:
    shared = run_of("spread", drain_s=432_000.0)
    (alone,) = compare([shared])
    assert alone.ratio is None
    _, other_size = compare([run_of("isolated", gpus=8), shared])
    assert other_size.ratio is None
    slower = run_of("isolated", drain_s=1_728_000.0)
    _, _, ambiguous = compare([run_of("isolated"), slower, shared])
    assert ambiguous.ratio is None
    other_seed = replace(slower, bounds=DrainBounds(critical_path_s=90_000.0, area_s=216_000.0))
    _, _, told_apart = compare([run_of("isolated"), other_seed, shared])
    assert told_apart.ratio == pytest.approx(0.5)


def test_report_of_nothing_and_labels_that_do_not_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least one result"):
        write_report([], tmp_path / "none", title="", scenario_lines=[])
    with pytest.raises(InvalidRequestError, match="2 labels for 1 results"):
        write_report(
            [run_of("spread")], tmp_path / "none", title="", scenario_lines=[], labels=["a", "b"]
        )
    assert not (tmp_path / "none").exists()


def test_numbers_are_short() -> None:
    assert [duration(s) for s in (0, 5.25, 600, 86_400, 864_000)] == [
        *("0 s", "5.25 s", "10.0 min", "24.0 h", "10.0 days")
    ]
    assert [short(x) for x in (0.0, 0.01234, 12.34, 1234.5, float("nan"))] == [
        *("0", "0.0123", "12.3", "1,234", "\N{EN DASH}")
    ]
    assert [percent(part) for part in (0.1234, -1e-6, -0.5)] == ["12.3 %", "0.0 %", "-50.0 %"]


def test_many_bars_become_pixels_and_are_the_same_each_time(tmp_path: Path) -> None:
    result = run_of("spread")
    run = result.spans[1]
    many = tuple(
        replace(run, start_s=1_000.0 + index, end_s=1_000.5 + index) for index in range(3_000)
    )
    result = replace(result, spans=many, spans_left_out=1_234, utilisation=())
    page = page_of([result], tmp_path / "a")
    assert "data:image/png;base64," in page
    assert "1,234 stretches are left out" in page
    assert page_of([result], tmp_path / "b") == page


def test_labels_and_losses_are_shown_and_the_window_is_the_scenario_s(tmp_path: Path) -> None:
    path = write_report(
        [replace(run_of("spread"), failures=41, failed_jobs=7)],
        tmp_path,
        title="What if",
        scenario_lines=[],
        labels=["on other nodes"],
        window_s=(1_000.0, 2_800.0),
    )
    text = read(path.read_text(encoding="utf-8")).text
    for part in ("on other nodes", "jobs given up", "41", "30.0 min of the trace"):
        assert part in text
