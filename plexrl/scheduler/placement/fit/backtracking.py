"""A search with backtracking that is bounded in time, and in depth by the choices only. Pure."""

from collections.abc import Callable, Iterator

STEPS_MAX = 10_000
"""Steps after which a search counts as successful; they take some 50 ms."""

Options = Callable[[int], Iterator[bool]]
"""The options of a choice, given those before it. True: one was taken, and is undone when the next
is asked for. False: one was looked at, and cannot be taken."""


def is_possible(choices: int, options: Options) -> bool:
    """Whether so many choices can be made one after the other; also true after `STEPS_MAX` steps.

    Args:
        choices: their number.
        options: the options of each, from 0 on.
    """
    if not choices:
        return True
    # No recursion: a job may have more deployments than Python has stack frames.
    made = [options(0)]
    for _ in range(STEPS_MAX):
        is_taken = next(made[-1], None)
        if is_taken is None:
            made.pop()
            if not made:
                return False
        elif is_taken:
            if len(made) == choices:
                return True
            made.append(options(len(made)))
    return True
