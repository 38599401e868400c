"""An application over a scripted engine, in this process or on a socket."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from orchestrator.engine.grammar import GrammarCompiler
from orchestrator.server import ServerSettings, create_app
from orchestrator.server.run import make_server
from orchestrator.server.scripted import ScriptedEngine
from orchestrator.text import bundled_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
MODEL = "v41-mini"
URL = "http://127.0.0.1"


@pytest.fixture(scope="session")
def tokenizer():
    made = bundled_tokenizer(MODEL)
    made.grammars = GrammarCompiler(made)  # one for all tests: making it costs more than most of them
    return made


class Rig:
    """One engine, one application, one client."""

    def __init__(self, tokenizer, text="Hello, world", **settings):
        self.tokenizer, self.text = tokenizer, text
        self.engine = ScriptedEngine(
            tokenizer, lambda prompt, params: tokenizer.encode_with_specials(self.text), grammars=tokenizer.grammars
        )
        options = {"model_name": MODEL, "max_context": 4096, "thinking": False}
        self.settings = ServerSettings(**{**options, **settings})
        self.app = create_app(self.engine, tokenizer, self.settings, grammars=self.engine.grammars)
        self.client = TestClient(self.app, base_url=URL, raise_server_exceptions=False)

    def chat(self, **fields):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def responses(self, **fields):
        return self.client.post("/v1/responses", json={"model": MODEL, "input": "Hi", **fields})

    def messages(self, **fields):
        body = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.client.post("/v1/messages", json=body)

    @property
    def in_flight(self):
        return self.client.get("/health").json()["requests_in_flight"]


@pytest.fixture
def make_rig(tokenizer):
    return lambda *args, **settings: Rig(tokenizer, *args, **settings)


@pytest.fixture
def rig(make_rig):
    return make_rig()


class Live:
    """A rig on a loopback socket, served by uvicorn in a thread."""

    def __init__(self, rig):
        self.rig, self.engine = rig, rig.engine
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"{URL}:{self._socket.getsockname()[1]}"
        self._server = make_server(rig.app, rig.settings, log_level="warning")
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def close(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        self._socket.close()


@pytest.fixture
def live(make_rig):
    made = []

    def start(*args, **settings):
        made.append(Live(make_rig(*args, **settings)))
        return made[-1]

    yield start
    for each in made:
        each.close()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture(name="wait_until")
def _wait_until():
    return wait_until
