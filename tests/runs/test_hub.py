"""Whether a model can be loaded is said in seconds, by the cache or by one request to a hub, which stands in here."""

import socket
import threading
import time
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

    def log_message(self, *_):
        pass


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Function that says where the hub is; the cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "LIMIT_S", 0.5)

    def at(port):
        url = f"http://127.0.0.1:{port}/{{repo_id}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)

    return at


def test_a_model_is_on_the_hub_or_not(place):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place(server.server_port)
        assert hub.cached("you/model") is hub.cached("you/busy") is None
        for name in ("you/other", "a/b/c"):
            with pytest.raises(hub.NotOnHub) as error:
                hub.cached(name)
            assert error.type is hub.NotOnHub
        server.shutdown()


@pytest.mark.parametrize("listens", [False, True])
def test_a_hub_that_cannot_be_reached_or_does_not_answer_is_given_up_on(place, listens):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        place(silent.getsockname()[1])
        begun = time.monotonic()
        with pytest.raises(hub.HubUnreachable):
            hub.cached("you/model")
        assert time.monotonic() - begun < 10


def test_a_run_that_asks_modelscope_asks_nothing_of_the_hub(monkeypatch):
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert hub.cached("you/other") is None


def test_offline_the_cache_is_enough_and_nothing_is_asked(place, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hub.NotOnHub, match="HF_HUB_OFFLINE"):
        hub.cached("you/model")
    folder = tmp_path / "models--you--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("1")
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "snapshots" / "1" / "config.json").write_text("{}")
    with pytest.raises(hub.NotOnHub):
        hub.cached("you/model")  # without weights
    (folder / "snapshots" / "1" / "model.safetensors").write_text("")
    assert hub.cached("you/model") == str(tmp_path)
