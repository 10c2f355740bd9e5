"""The operator's page in Chromium: what it shows, with which keys, widths and colours."""

import pytest

from tests.router.dashboard.browser import Tab, needs_browser
from tests.router.dashboard.fleet import HOSTILE, SMALL, tenant_name
from tests.router.live_router import OPERATOR_KEY, LiveRouter

pytestmark = needs_browser
NO_SERVICE = "/v1/rollouts"
"""The fleet has no rollout service, so the browser logs that this is not found."""
SHOWN = "document.querySelectorAll('.lane canvas[tabindex]').length && document.querySelector('td')"


def enter(tab: Tab, router: LiveRouter, key: str = OPERATOR_KEY, place: str = "#/") -> None:
    """Open the page and type the key."""
    tab.open(f"{router.url}/dashboard{place}")
    tab.wait_for("document.activeElement?.id === 'key'")
    # A browser drops text that comes before it has painted the page.
    while tab.evaluate("document.getElementById('key').value") != key:
        tab.evaluate("document.getElementById('key').value = ''")
        tab.call("Input.insertText", text=key)
    tab.press("Enter")


def text(tab: Tab) -> str:
    found: str = tab.evaluate("document.body.innerText")
    return found


def check_quiet(tab: Tab) -> None:
    """Nothing was thrown, blocked or opened."""
    assert [error for error in tab.errors if NO_SERVICE not in error] == []


def test_the_first_page_answers_how_full_who_waits_and_whether_it_is_fair(
    small: LiveRouter, tab: Tab
) -> None:
    enter(tab, small)
    tab.wait_for(SHOWN)
    tab.wait_for("document.querySelector('.good')")
    shown = text(tab)
    assert f"GPUs {8 * SMALL.nodes}" in shown
    for words in ("healthy", "computing", "held, idle", "for a turn", "impossible 1"):
        assert words in shown, words
    for index in range(SMALL.tenants):
        assert tenant_name(index) in shown
    check_quiet(tab)


def test_names_of_tenants_are_text(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small, place="#/queue?which=turns")
    tab.wait_for(f"document.body.innerText.includes({HOSTILE[:20]!r})")
    assert HOSTILE in text(tab)
    assert tab.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
    blocked = "try { document.body.innerHTML = '<b>x</b>'; 'set' } catch (e) { e.name }"
    check_quiet(tab)
    assert tab.evaluate(blocked) == "TypeError"


def test_the_key_stays_out_of_address_and_history(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small)
    tab.wait_for(SHOWN)
    assert OPERATOR_KEY not in tab.evaluate("location.href")
    assert tab.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
    assert tab.evaluate(f"document.documentElement.outerHTML.includes({OPERATOR_KEY!r})") is False
    assert tab.evaluate("document.getElementById('key').value") == ""
    tab.evaluate("document.getElementById('forget').click()")
    assert tab.evaluate("sessionStorage.length") == 0
    assert OPERATOR_KEY not in small.log.read_text()


def test_a_wrong_key_is_asked_for_again(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small, key="wrong")
    tab.wait_for("document.querySelector('#health .condition')")
    tab.wait_for("!document.getElementById('access').hidden")
    assert tab.evaluate("sessionStorage.length") == 0


def test_a_tenant_sees_no_other_tenant(small: LiveRouter, tab: Tab) -> None:
    own, *others = (tenant_name(at) for at in range(SMALL.tenants))
    enter(tab, small, key=own)
    tab.wait_for(SHOWN)
    tab.wait_for(f"document.body.innerText.includes({own!r})")
    assert not [name for name in others if name in text(tab)]
    assert "others'" in text(tab)


def test_lanes_are_read_and_zoomed_with_the_keyboard(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small, place="#/lanes")
    tab.wait_for("document.querySelectorAll('.lane canvas[tabindex]').length")
    tab.evaluate("document.querySelector('canvas[tabindex]').focus()")
    tab.press("ArrowLeft")
    tab.wait_for("/work|switch/.test(document.querySelector('.spot').innerText)")
    newest = tab.evaluate("document.querySelector('.spot').innerText")
    tab.press("ArrowLeft")
    tab.wait_for(f"document.querySelector('.spot').innerText !== {newest!r}")
    tab.press("+")
    tab.wait_for("!document.querySelector('.controls [aria-pressed=true]')")
    tab.wait_for("document.activeElement.tagName === 'CANVAS'")
    tab.press("ArrowLeft")
    tab.wait_for("document.querySelector('.spot a')")
    tab.press("Enter")
    tab.wait_for("location.hash.startsWith('#/job/')")
    check_quiet(tab)


DRAW = """import('./dashboard/views/lane_canvas.js').then(({ drawLane }) => {
  const drawn = (job, gaps, kind = 0) => {
    const canvas = document.createElement('canvas');
    canvas.style.cssText = 'width: 200px; height: 20px';
    document.body.append(canvas);
    const spans = job ? [[0, 100, 0, kind]] : [];
    const view = { since: 0, until: 100, oldest: 0, gaps, jobs: [{ job, name: 'x'.repeat(99) }] };
    drawLane(canvas, view, { lane: { spans }, chosen: -1 });
    const context = canvas.getContext('2d');
    const rows = Array.from({ length: canvas.height - 4 }, (_, y) =>
      context.getImageData(8, y + 2, canvas.width - 16, 1).data);
    canvas.remove();
    return { isHatched: rows.some((row) => row.some((each, at) => each !== row[at % 4])),
      look: rows.map((row) => row.slice(0, 3).join()).join(' ') };
  };
  const jobs = Array.from({ length: 200 }, (_, at) => drawn(`job-${at}`, []));
  const looks = [0, 1, 2].map((kind) => drawn('job', [], kind).look);
  return { unknown: drawn('', [[0, 100]]).isHatched, kinds: new Set(looks).size,
    jobs: jobs.some((each) => each.isHatched),
    looks: new Set(jobs.map((each) => each.look)).size };
})"""


def test_only_what_is_unknown_is_hatched_and_kinds_of_spans_differ(
    small: LiveRouter, tab: Tab
) -> None:
    enter(tab, small)
    tab.wait_for(SHOWN)
    assert tab.evaluate(DRAW) == {
        "unknown": True,
        "kinds": 3,
        "jobs": False,
        "looks": 14,
    }


def test_a_late_answer_does_not_replace_a_newer_one(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small, place="#/queue?which=turns")
    rows = "[...document.querySelectorAll('tbody tr')].map((each) => each.cells[1].innerText)"
    tab.wait_for(f"{rows}.length")
    turns = tab.evaluate(rows)
    late = """globalThis.late = 0; globalThis.soon = fetch;
    globalThis.fetch = async (path, how) => {
      const reply = await soon(path, how);
      if (!path.includes('which=gpus')) return reply;
      await new Promise((done) => setTimeout(done, 1000));
      setTimeout(() => { late += 1; }, 500);
      return reply;
    }"""
    tab.evaluate(f"{late}; 0")
    click = "document.querySelectorAll('.controls button')[{}].click()"
    tab.evaluate(f"{click.format(0)}; {click.format(1)}")
    tab.wait_for("late")
    assert tab.evaluate(rows) == turns


def test_a_jobs_page_shows_times_metrics_and_samples(small: LiveRouter, tab: Tab) -> None:
    with small.client() as client:
        for step in range(3):
            values = {"reward": 0.1 * step, "grad_norm": 1.0, "<b>odd</b>": 2.0}
            client.post("/v1/jobs/job-00001/metrics", json={"step": step, "values": values})
        sample = {"prompt": "1+1?", "text": "<script>alert(2)</script>", "reward": 1.0}
        body = {
            "step": 2,
            "total": 1,
            "failed": 0,
            "samples": [{**sample, "length": 3, "ended_by": "stop"}],
        }
        client.post("/v1/jobs/job-00001/samples", json=body).raise_for_status()
    enter(tab, small, place="#/job/job-00001")
    tab.wait_for("document.querySelectorAll('.chart').length === 3")
    tab.wait_for("document.querySelector('details')")
    shown = text(tab)
    order = [shown.index(name) for name in ("reward\n", "grad_norm\n", "<b>odd</b>\n")]
    assert order == sorted(order)
    assert "<script>alert(2)</script>" in shown
    for words in ("Where the time went", "forward_backward", "Unfinished operations", "SUSPENDED"):
        assert words in shown, words
    check_quiet(tab)


def test_an_unknown_job_is_an_error_and_no_empty_page(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small, place="#/job/nothing")
    tab.wait_for("document.querySelector('.bad')")
    assert "nothing" in tab.evaluate("document.querySelector('.bad').innerText")


@pytest.mark.parametrize("place", ["", "lanes", "queue?which=turns", "shares", "job/job-00001"])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(small: LiveRouter, tab: Tab, place: str, dark: bool) -> None:
    tab.show(375, 700, dark=dark)
    enter(tab, small, place=f"#/{place}")
    tab.wait_for("document.querySelector('section td, section canvas')")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(21, 23, 26)") is dark


def test_every_control_is_reached_with_tab_and_has_a_name(small: LiveRouter, tab: Tab) -> None:
    enter(tab, small)
    tab.wait_for(SHOWN)
    nameless = tab.evaluate(
        """[...document.querySelectorAll('button, input, canvas[role=img], [role=img]')].filter(
        (each) => !(each.ariaLabel || each.innerText || each.labels?.length)).length"""
    )
    assert nameless == 0
    tab.evaluate("document.querySelector('.brand').focus()")
    reached = set()
    for _ in range(12):
        tab.call(
            "Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9
        )
        reached.add(tab.evaluate("document.activeElement.innerText || document.activeElement.id"))
    assert {"Lanes", "Queue", "Shares", "job", "Forget key", "1 h"} <= reached
