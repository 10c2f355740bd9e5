"""How a command finds the cluster on a data directory."""

import pytest

from plexrl.cluster.data_dir.endpoint import Endpoint


@pytest.mark.parametrize(
    ("urls", "is_own"),
    [
        ("https://10.0.0.1:8443", True),
        ("https://head.example:8443/", True),
        ("https://elsewhere:8443, https://head.example:8444", True),
        ("https://elsewhere:8443", False),
        ("", False),
    ],
)
def test_a_cluster_is_known_by_each_of_its_urls(urls: str, is_own: bool) -> None:
    public = "https://head.example:8443,https://head.example:8444"
    endpoint = Endpoint("https://10.0.0.1:8443", "key", 1, "/data", False, public_url=public)
    assert endpoint.serves(urls) == is_own
