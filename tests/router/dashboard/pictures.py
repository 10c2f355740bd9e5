"""Writes the pictures of docs/dashboard.md.

python -m tests.router.dashboard.pictures
"""

import tempfile
import time
from pathlib import Path

from tests.router.dashboard.browser import Tab, running_browser
from tests.router.dashboard.conftest import router_of
from tests.router.dashboard.fleet import SMALL
from tests.router.dashboard.test_page import enter
from tests.router.live_router import LiveRouter

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
JOB = "job-00001"
PICTURES = {
    "dashboard": ("", 1280, False),
    "dashboard-dark": ("", 1280, True),
    "dashboard-phone": ("", 390, False),
    "dashboard-lanes": ("lanes", 1280, False),
    "dashboard-queue": ("queue?which=turns", 1280, False),
    "dashboard-shares": ("shares", 1280, False),
    "dashboard-job": (f"job/{JOB}", 1280, False),
}
"""The view, the width of the window, and whether it is dark."""
SETTLE_S = 2.0


def log_run(router: LiveRouter) -> None:
    """Metrics and samples of a job, as a controller logs them."""
    with router.client() as client:
        for step in range(60):
            values = {
                "reward": 0.9 - 0.8 * 0.95**step + 0.03 * ((7 * step) % 5 - 2),
                "length": 310.0 + 4 * step - 9 * (step % 4),
                "kl": 0.002 * step**0.5 + 0.001 * (step % 3),
                "grad_norm": 0.4 + 2.0 * 0.9**step + 0.05 * (step % 5),
            }
            client.post(f"/v1/jobs/{JOB}/metrics", json={"step": step, "values": values})
        sample = {
            "prompt": "What is 17 + 25?",
            "text": "17 + 25 = 42",
            "reward": 1.0,
            "length": 9,
            "ended_by": "stop",
        }
        body = {"step": 59, "samples": [sample], "total": 64, "failed": 0}
        client.post(f"/v1/jobs/{JOB}/samples", json=body).raise_for_status()


def take(tab: Tab, router: LiveRouter, name: str) -> None:
    """One picture."""
    place, width, dark = PICTURES[name]
    tab.show(width, 800, dark=dark)
    enter(tab, router, place=f"#/{place}")
    tab.wait_for("document.querySelector('.good') && document.querySelector('td, canvas')")
    time.sleep(SETTLE_S)
    tab.picture(FOLDER / f"{name}.png")


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        router_of(SMALL, Path(folder)) as router,
        running_browser() as browser,
    ):
        log_run(router)
        for name in PICTURES:
            tab = Tab(browser)
            take(tab, router, name)
            tab.close()


if __name__ == "__main__":
    main()
