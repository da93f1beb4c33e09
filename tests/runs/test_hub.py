"""Whether a model can be loaded is said in seconds, by the cache or by one request to a hub, which stands in here."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

hub = pytest.importorskip("oar_plugin.runs.hub")
constants = pytest.importorskip("huggingface_hub.constants")

HEADERS = {"you/model": (200, {"ETag": "1", "X-Repo-Commit": "1", "Content-Length": "1"}), "you/busy": (429, {})}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        status, headers = HEADERS.get("/".join(self.path.split("/")[1:3]), (404, {"X-Error-Code": "RepoNotFound"}))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Function that says at which port the hub is; the cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "LIMIT_S", 0.5)
    url = "http://127.0.0.1:{}/{{repo_id}}/{{filename}}"
    return lambda port: monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url.format(port))


def test_a_model_is_on_the_hub_or_not(at, monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at(server.server_port)
        assert hub.cached("you/model") is hub.cached("you/busy") is None
        for name in ("you/other", "a/b/c"):
            with pytest.raises(hub.NotOnHub, match="it must exist"):
                hub.cached(name)
        monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
        assert hub.cached("you/other") is None, "a run asks another hub"
        server.shutdown()


def test_a_hub_that_does_not_answer_is_given_up_on(at):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        at(silent.getsockname()[1])
        with pytest.raises(hub.HubUnreachable):
            hub.cached("you/model")


def test_offline_the_cache_is_enough_if_it_has_weights(at, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--you--model"
    for file, text in (("refs/main", "1"), ("snapshots/1/config.json", "{}")):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(text)
    with pytest.raises(hub.NotOnHub, match="HF_HUB_OFFLINE"):
        hub.cached("you/model")
    (folder / "snapshots" / "1" / "model.safetensors").write_text("")
    assert hub.cached("you/model") == str(tmp_path)
