"""docs/state_machines.md shows the tables that the scheduler follows."""

from scripts.state_machines import PAGE, TABLES, diagram, with_diagrams


def test_the_page_of_state_machines_equals_the_tables() -> None:
    page = PAGE.read_text()
    assert page == with_diagrams(page), "run python -m scripts.state_machines"


def test_a_diagram_has_an_edge_for_each_pair_of_states() -> None:
    assert diagram(TABLES["lock"]).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> free",
        "    free --> held: granted",
        "    held --> switching: switch_began",
        "    switching --> held: handed_over, switch_ended",
        "    held --> free: released",
        "    switching --> free: released",
        "    free --> awaited: switch_began",
        "    switching --> awaited: vacated",
        "    awaited --> held: handed_over",
        "    awaited --> free: switch_ended",
        "```",
    ]
