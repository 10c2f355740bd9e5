"""docs/architecture.md agrees with the packages and with tests/test_tidy.py."""

from scripts.architecture_tree import PAGE, filled_in


def test_the_generated_parts_of_the_architecture_page_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == filled_in(text), "run `python -m scripts.architecture_tree`"
