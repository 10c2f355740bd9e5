"""What a command keeps of a login is renewed in time, by one command at a time, and ended."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from plexrl.cluster.data_dir.logins import Login, forget, log_in, store, stored_token
from plexrl.errors import AuthenticationError, InvalidRequestError, UnavailableError

CLUSTER = "https://plexrl.example"
TOKEN_S = 600


def id_token(number: int = 0) -> str:
    now = int(time.time())
    claims = {"iat": now, "exp": now + TOKEN_S, "number": number}
    return f"ey.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"


class FakeProvider(ThreadingHTTPServer):
    """A provider that rotates refresh tokens, and whose access tokens outlive its ID tokens."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.documents: dict[str, Any] = {}
        self.valid = "r0"
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.status = 200

    def answer(self, path: str, form: dict[str, str]) -> Any:
        with self.lock:
            self.asked.append((path, form))
            if path in self.documents:
                return self.documents[path]
            if path != "/token":
                return {}
            if form["refresh_token"] != self.valid:
                self.valid = "ended"
                return {"error": "invalid_grant"}
            self.valid = f"r{len(self.asked)}"
            return {
                "id_token": id_token(len(self.asked)),
                "refresh_token": self.valid,
                "expires_in": 86_400,
            }


class Answers(BaseHTTPRequestHandler):
    server: FakeProvider

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._reply(dict(parse_qsl(body.decode())))

    def _reply(self, form: dict[str, str]) -> None:
        text = json.dumps(self.server.answer(self.path, form)).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProvider]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with FakeProvider() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def login(provider: FakeProvider, **changes: Any) -> Login:
    fields = {
        "url": CLUSTER,
        "token_endpoint": f"{provider.url}/token",
        "client_id": "cli",
        "id_token": "old",
        "expires_at": 0.0,
        "refresh_token": "r0",
        "revocation_endpoint": f"{provider.url}/revoke",
        **changes,
    }
    found = Login(**fields)
    store(found)
    return found


def test_a_login_is_renewed_when_its_id_token_ends_not_its_access_token(
    provider: FakeProvider, tmp_path: Path
) -> None:
    login(provider)
    assert stored_token(CLUSTER) == stored_token(CLUSTER) != "old"
    assert len(provider.asked) == 1
    (file,) = (tmp_path / "plexrl").glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["refresh_token"] == provider.valid
    assert kept["revocation_endpoint"] == f"{provider.url}/revoke"
    assert kept["expires_at"] == pytest.approx(time.time() + TOKEN_S, abs=60)


def test_commands_at_the_same_time_use_a_refresh_token_once(provider: FakeProvider) -> None:
    login(provider)
    with ThreadPoolExecutor(8) as threads:
        tokens = set(threads.map(stored_token, [CLUSTER] * 8))
    assert len(tokens) == 1
    assert [path for path, _ in provider.asked] == ["/token"]


def test_logging_out_revokes_the_refresh_token_or_says_that_it_does_not(
    provider: FakeProvider,
) -> None:
    login(provider)
    assert forget(CLUSTER) is True
    form = {"token": "r0", "token_type_hint": "refresh_token", "client_id": "cli"}
    assert provider.asked == [("/revoke", form)]
    assert forget(CLUSTER) is None
    login(provider, revocation_endpoint="")
    assert forget(CLUSTER) is False
    login(provider)
    provider.status = 503
    assert forget(CLUSTER) is False
    login(provider, revocation_endpoint="http://127.0.0.1:1/")
    assert forget(CLUSTER) is False
    assert stored_token(CLUSTER) is None


def test_a_login_that_was_ended_at_the_provider_says_how_to_go_on(provider: FakeProvider) -> None:
    login(provider, refresh_token="another")
    with pytest.raises(AuthenticationError, match="plexrl login"):
        stored_token(CLUSTER)


@pytest.mark.parametrize(
    "described",
    [
        {"token_endpoint": "http://id.example/token"},
        {"device_authorization_endpoint": "http://id.example/device"},
        {"revocation_endpoint": "http://id.example/revoke"},
        {"revocation_endpoint": "https://["},
    ],
)
def test_no_secret_goes_to_an_endpoint_that_others_read(
    provider: FakeProvider, described: dict[str, str]
) -> None:
    settings = {"client_id": "cli", "issuer": provider.url, "scope": "openid"}
    right = dict.fromkeys(("token_endpoint", "revocation_endpoint"), f"{provider.url}/x")
    provider.documents = {
        "/v1/login/settings": settings,
        "/.well-known/openid-configuration": {
            "issuer": provider.url,
            "device_authorization_endpoint": f"{provider.url}/x",
            **right,
            **described,
        },
    }
    with pytest.raises(InvalidRequestError, match="no https URL"):
        log_in(provider.url, lambda *_: None)
    settings["issuer"] = "http://id.example"
    with pytest.raises(InvalidRequestError, match="no https URL"):
        log_in(provider.url, lambda *_: None)


def test_a_cluster_that_does_not_answer_is_a_typed_error(provider: FakeProvider) -> None:
    del provider
    with pytest.raises(UnavailableError):
        log_in("http://127.0.0.1:1", lambda *_: None)
