"""The page for operators of several machines, followed line by line on bare simulated hosts."""

import pytest

from tests.hosts.console import Reader, sections
from tests.hosts.host import REPOSITORY
from tests.hosts.network import hosts

PAGE = REPOSITORY / "docs" / "many_machines.md"
CHECKOUT = "/srv/plexrl"
LOST = "A machine that is lost for good"
SHARED_MEMORY_BYTES = 4 << 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_namespaces")
def test_the_page_leads_from_bare_machines_to_a_job_and_through_a_nodes_life() -> None:
    names = ("head", "gpu1", "gpu2", "researcher")
    with hosts(*names, shared_memory_bytes=SHARED_MEMORY_BYTES) as network:
        # What the page asks for: the head's name, and a checkout.
        for host in network:
            with host.on_disk("/etc/hosts").open("a") as file:
                file.write(f"{network['head'].address} head.example\n")
            host.on_disk(CHECKOUT).symlink_to(REPOSITORY)
        reader = Reader(network, {"all": names[:3], "nodes": names[1:3]})
        for heading, typed in sections(PAGE).items():
            if heading == LOST:
                network["gpu2"].lose()
            for each in typed:
                reader.follow(each)
