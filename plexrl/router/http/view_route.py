"""The class of the routes that answer with a view."""

from collections.abc import Callable
from typing import Any, get_type_hints, is_typeddict

from plexrl.router.services.guarded_route import GuardedRoute


class ViewRoute(GuardedRoute):
    """A route whose function may say which view it returns.

    The view goes out as it is: to check each answer against its type again would take time, and
    drop what a newer scheduler says. So to clients the answer is a JSON object.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        """As `GuardedRoute`."""
        if is_typeddict(get_type_hints(endpoint).get("return")):
            settings["response_model"] = dict[str, Any]
        super().__init__(path, endpoint, **settings)
