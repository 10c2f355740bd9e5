"""Codes and statuses of errors are stable: the tree in `plexrl.errors` lists all of them."""

import re

from plexrl import errors

LINE = re.compile(r"^([│├└─ ]*)(\w+Error)\s+(\d+)\s+(\w+)", re.MULTILINE)


def test_the_tree_of_errors_lists_every_class_with_its_parent_status_and_code() -> None:
    parents: dict[int, type[errors.PlexRLError]] = {0: errors.PlexRLError}
    listed = set()
    for prefix, name, status, code in LINE.findall(errors.__doc__ or ""):
        found = getattr(errors, name)
        depth = len(prefix) // 4 - 1
        assert found.__base__ is parents[depth - 1], name
        assert (found.status, found.code) == (int(status), code), name
        parents[depth] = found
        listed.add(found)
    defined = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.PlexRLError)
    }
    assert listed == defined - {errors.PlexRLError}
