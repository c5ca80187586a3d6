"""The life of a server of the run, with a small HTTP server in place of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
from engines import CLIENT, COMMAND_LINE, make_client
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo import progress
from offline_grpo.engine import server_engine
from offline_grpo.engine.server_engine import Launcher
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineDied, EngineError

STAND_IN = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"path": self.path, "authorization": self.headers["Authorization"], "argv": sys.argv[1:]}
        body["version"] = "0.32.0"
        body["extra"] = os.environ.get("EXTRA")
        if self.path == "/v1/models":
            body = {"data": [{"id": "policy"}]}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

print("up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True, kw_only=True)
class StandIn(Launcher):
    name = "the stand-in"
    variables: ClassVar[Mapping[str, str]] = {}
    code: str = STAND_IN

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        words = (f"{name}={value}" for name, value in args.items())
        return [sys.executable, "-I", "-c", self.code, str(port), model, *words]

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        return {"EXTRA": f"{dict(env)} {gpus}"}


@pytest.fixture
def servers() -> Iterator[list[VllmEngine]]:
    """Stopped after the test."""
    started: list[VllmEngine] = []
    yield started
    for server in started:
        server.stop()


def own(servers: list[VllmEngine], folder: Path, code: str = STAND_IN, limit_s: float = 30, **more: Any) -> VllmEngine:
    launcher = StandIn(**{**COMMAND_LINE, "python": None, "start_timeout_s": limit_s}, args={}, code=code)
    servers.append(VllmEngine(**CLIENT, launcher=launcher, log_dir=folder, **more))
    return servers[-1]


def stand_in_of(server: VllmEngine) -> psutil.Process:
    assert server.pid is not None
    [child] = psutil.Process(server.pid).children()
    return child


# A server of our own


def test_start(servers: list[VllmEngine], tmp_path: Path) -> None:
    server = own(servers, tmp_path, gpus=[1])
    assert server.is_managed
    assert server.pid is None
    said: list[Any] = []
    with progress.followed():
        progress.tell([SimpleNamespace(phase=lambda *event: said.append(event))])  # type: ignore[list-item]
        server.start("some/model", {"a": 1, "b": 2})
        assert progress.start_metrics()["time/start_start_server_s"] > 0
    assert said == [("start server", -1)]
    answer = server.api.get("/anything").json()
    assert answer["argv"] == [server.base_url.rpartition(":")[2], "some/model", "a=1", "b=2"]
    assert answer["extra"].endswith("} [1]")
    assert answer["authorization"] is None
    assert "\nup\n" in (tmp_path / "server_0.log").read_text()
    server.check_alive()
    server.stop()
    assert server.pid is None
    with pytest.raises(EngineError, match="ConnectError"):
        server.api.get("/anything")


def test_a_server_that_nobody_waited_for_leaves_nothing(servers: list[VllmEngine], tmp_path: Path) -> None:
    server = own(servers, tmp_path)
    server.begin("model", {})
    pid, scratch = server.pid, server.scratch
    assert pid is not None
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not scratch.exists()
    assert list(tmp_path.iterdir()) == []


BUSY = STAND_IN.replace(
    "def do_GET(self):",
    """def do_GET(self):
        if self.path.startswith("/work"):  # nobody else is answered meanwhile
            import time
            time.sleep(float(self.path.removeprefix("/work/")))""",
)


def test_a_busy_server_has_time(servers: list[VllmEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "HEALTH_INTERVAL_S", 0.05)
    server = own(servers, tmp_path, BUSY)
    server.start("model", {})
    assert server.get("/work/0.8").status_code == 200
    monkeypatch.setattr(server_engine, "PATIENCE_S", 0.4)
    with pytest.raises(EngineDied, match="the server was unhealthy and was stopped"):
        server.get("/work/60")


SILENT = STAND_IN.replace(
    "def do_GET(self):",
    """def do_POST(self):
        print("asked", flush=True)
        self.connection.close()

    def do_GET(self):""",
)


def test_a_server_that_breaks_a_call_off_is_stopped(
    servers: list[VllmEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much of it was done. What only reads is asked again first."""
    monkeypatch.setattr(server_engine, "GRACE_S", 0.0)
    for changes, asked in ((True, 1), (False, 2)):
        server = own(servers, tmp_path / str(changes), SILENT)
        server.start("model", {})
        with pytest.raises(EngineDied, match=r"/load: .* and was stopped; its last words"):
            server.post("/load", changes=changes)
        with pytest.raises(EngineDied, match=r"^the server was stopped; its last words"):
            server.check_alive()
        assert (tmp_path / str(changes) / "server_0.log").read_text().count("asked\n") == asked


def test_a_call_does_not_use_a_connection_that_the_server_may_be_closing(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        is_known = request.connection in [earlier.connection for earlier in web.requests[: request.number]]
        return Reply(cut="reset") if is_known else Reply({"version": "0.25"})

    with ScriptedServer(script) as web:
        control = make_client(web.base_url)
        assert [control.version() for _ in range(3)] == ["0.25"] * 3
        control.pause("keep")
        control.resume()
        assert len(web.requests) == 5


def test_death_of_a_server_that_another_process_started_is_noticed(servers: list[VllmEngine], tmp_path: Path) -> None:
    server = own(servers, tmp_path)
    server.start("model", {})
    there = make_client(server)
    there.watched_pid = server.pid
    there.check_alive(grace_s=0.3)
    stand_in_of(server).kill()
    with pytest.raises(EngineDied, match=f"the server at {server.base_url}, which another process of this run"):
        there.check_alive(grace_s=15)  # its parent has not asked yet: a zombie counts as ended


def test_a_server_that_does_not_start(servers: list[VllmEngine], tmp_path: Path) -> None:
    server = own(servers, tmp_path, "raise ValueError('no room')")
    with pytest.raises(EngineDied, match=r"exit code 1\); its last words: ValueError: no room"):
        server.start("m", {})
    slow = own(servers, tmp_path / "slow", "import time; time.sleep(100)", 0.3)
    with pytest.raises(EngineError, match=rf"^the stand-in at {slow.base_url} was not ready after 0\.3 s \(engine\.st"):
        slow.start("m", {})


# A server that was found


def test_a_found_server_is_left_alone(tmp_path: Path) -> None:
    with ScriptedServer(lambda _: Reply({"version": "0.32.0"})) as web:
        server = make_client(web.base_url + "/v1/", api_key="k")
        assert server.base_url == web.base_url
        assert not server.is_managed
        server.start("some/model", {})
        scratch = server.scratch
        server.stop()
        server.check_alive(grace_s=100)
        assert not scratch.exists()
        assert server.api.get("/health").status_code == 200
        assert {request.path for request in web.requests} == {"/health", "/version"}
        assert {request.headers["Authorization"] for request in web.requests} == {"Bearer k"}
    assert list(tmp_path.iterdir()) == []
