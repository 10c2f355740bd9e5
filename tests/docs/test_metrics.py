"""docs/metrics.md has exactly the metrics that parts serve.

Alerts and the dashboard use no others.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from plexrl.router.observe.metrics import metrics_text
from plexrl.router.observe.rollouts import RolloutCollector
from tests.docs.pages import ROOT
from tests.docs.test_tables import rows
from tests.router.live_router import LiveRouter, live_router

MONITORING = ROOT / "deploy" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool")
STATEMANAGER = "plexrl_statemanager_"


@pytest.fixture(scope="module")
def router() -> Iterator[LiveRouter]:
    with live_router() as found:
        yield found


def scrape(router: LiveRouter) -> str:
    answer = httpx.get(f"{router.url}/v1/metrics", timeout=30)
    assert answer.status_code == 200
    return answer.text


def documented() -> dict[str, set[str]]:
    """The labels of each metric of the page."""
    found = {}
    for name, labels, meaning in rows("metrics.md", "| metric | labels | meaning |"):
        assert meaning
        found[name.strip("`")] = set(re.findall(r"`(\w+)`", labels))
    return found


def names(text: str) -> dict[str, Metric]:
    """The families of a scrape, by their names as queries write them."""
    return {
        f"{each.name}_total" if each.type == "counter" else each.name: each
        for each in text_string_to_metric_families(text)
    }


def test_the_page_has_the_metrics_of_a_live_router(router: LiveRouter) -> None:
    served = names(scrape(router))
    rollouts = names(metrics_text(RolloutCollector([], is_connected=True)).decode())
    shown = {name for name in documented() if not name.startswith(STATEMANAGER)}
    assert {*served, *rollouts} == shown


def test_the_page_has_the_labels_of_a_live_router(router: LiveRouter) -> None:
    for name, family in names(scrape(router)).items():
        for sample in family.samples:
            assert set(sample.labels) <= documented()[name], name


def test_the_page_has_the_metrics_of_a_statemanager() -> None:
    source = (ROOT / "plexrl/statemanager/daemon/metrics.py").read_text()
    pattern = r"\b(\w+MetricFamily|_gauge|_labelled)\(\s*\"(\w+)\""
    served = set()
    for kind, name in re.findall(pattern, source):
        whole = name if name.startswith(STATEMANAGER) else STATEMANAGER + name
        served.add(f"{whole}_total" if kind == "CounterMetricFamily" else whole)
    assert served == {name for name in documented() if name.startswith(STATEMANAGER)}


@pytest.mark.parametrize("file", ["alerts.yaml", "grafana.json"])
def test_expressions_use_documented_metrics_and_labels(file: str) -> None:
    known = documented()
    found = list(expressions(file))
    assert len(found) > 10
    for expression in found:
        used = re.findall(r"(plexrl_\w+)(?:\{([^}]*)\})?", expression)
        assert used, expression
        for name, selector in used:
            metric = re.sub(r"_(bucket|sum|count)$", "", name)
            assert metric in known, expression
            for label in re.findall(r"(\w+)\s*[=!]", selector):
                assert label in known[metric], expression


@pytest.mark.parametrize("file", ["alerts.yaml", "grafana.json"])
def test_a_maximum_over_routers_is_over_nothing_else(file: str) -> None:
    """A label that a maximum leaves out has one value only: else parts of a sum are lost."""
    known, checked = documented(), 0
    pattern = r"max(?: by \(([^)]*)\))? ?\((?:\w+\()?(plexrl_\w+)(?:\{([^}]*)\})?"
    for expression in expressions(file):
        for kept, name, selector in re.findall(pattern, expression):
            fixed = re.findall(r"(\w+)=\"", selector)
            assert known[name] <= {*kept.split(", "), *fixed}, expression
            checked += 1
    assert checked > 5


def expressions(file: str) -> Iterator[str]:
    text = (MONITORING / file).read_text()
    if file.endswith(".json"):
        for panel in json.loads(text)["panels"]:
            yield from (target["expr"] for target in panel["targets"])
        return
    for group in yaml.safe_load(text)["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_each_alert_says_what_to_do() -> None:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert rule["annotations"].keys() == {"summary", "action"}
            for page, anchor in re.findall(r"(docs/\w+\.md)#([\w-]+)", str(rule["annotations"])):
                heads = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
                known = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
                assert anchor in known, rule["alert"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((MONITORING / "grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
def test_promtool_accepts_the_alerts_and_every_expression(
    router: LiveRouter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", str(MONITORING / "alerts.yaml")], check=True)
    rules = [
        {"record": f"panel:{at}", "expr": each}
        for at, each in enumerate(expressions("grafana.json"))
    ]
    file = tmp_path_factory.mktemp("rules") / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run([PROMTOOL, "check", "rules", str(file)], check=True)
    text = scrape(router)
    subprocess.run([PROMTOOL, "check", "metrics"], input=text.encode(), check=True)
