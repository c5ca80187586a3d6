"""The server of a run, with a small HTTP server in place of vLLM, and vLLM's command line and token gate."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from engines import COMMAND_LINE, make_client
from fake_vllm import load_extension
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo import progress
from offline_grpo.engine import process as process_module
from offline_grpo.engine import server as server_module
from offline_grpo.engine.http import NotFound, Refused, read
from offline_grpo.engine.process import temporary_folder
from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm import VllmLauncher
from offline_grpo.errors import ConfigError, EngineDied, EngineError

STAND_IN = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"path": self.path, "authorization": self.headers["Authorization"], "argv": sys.argv[1:]}
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


@dataclass(frozen=True)
class Launcher:
    """Starts the stand-in."""

    name: str = "the stand-in"
    host: str = "127.0.0.1"
    port: int | None = None
    api_key: str | None = None
    start_timeout_s: float = 30.0
    code: str = STAND_IN

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        words = (f"{name}={value}" for name, value in args.items())
        return [sys.executable, "-I", "-c", self.code, str(port), model, *words]

    def key_args(self, folder: Path) -> list[str]:
        return []

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        return {"EXTRA": f"{dict(env)} {gpus}"}


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Stopped after the test."""
    started: list[Server] = []
    yield started
    for server in started:
        server.stop()


def own(servers: list[Server], folder: Path, launcher: Any = None, **settings: Any) -> Server:
    servers.append(Server(base_url=None, api_key=None, launcher=launcher or Launcher(), log_dir=folder, **settings))
    return servers[-1]


def stand_in_of(server: Server) -> psutil.Process:
    assert server.pid is not None
    [child] = psutil.Process(server.pid).children()
    return child


# A server of our own


def test_start(servers: list[Server], tmp_path: Path) -> None:
    server = own(servers, tmp_path, gpus=[1], args={"a": 1, "b": 1}, env={"V": "w"})
    assert server.is_managed
    assert server.pid is None
    said: list[Any] = []
    with progress.followed():
        progress.tell([SimpleNamespace(phase=lambda *event: said.append(event))])  # type: ignore[list-item]
        server.start("some/model", args={"b": 2})
        assert progress.start_metrics()["time/start_start_server_s"] > 0
    assert said == [("start server", -1)]
    answer = server.api.get("/anything").json()
    assert answer["argv"] == [server.base_url.rpartition(":")[2], "some/model", "a=1", "b=2"]
    assert answer["extra"].endswith("'V': 'w'} [1]")
    assert answer["authorization"] is None
    assert "\nup\n" in (tmp_path / "server_0.log").read_text()
    server.check_alive()
    server.stop()
    assert server.pid is None
    with pytest.raises(EngineError, match="ConnectError"):
        server.api.get("/anything")


def test_a_server_that_nobody_waited_for_leaves_nothing(servers: list[Server], tmp_path: Path) -> None:
    server = own(servers, tmp_path)
    server.begin("model")
    pid, scratch = server.pid, server.scratch
    assert pid is not None
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not scratch.exists()
    assert list(tmp_path.iterdir()) == []


def test_death_is_noticed(servers: list[Server], tmp_path: Path) -> None:
    server = own(servers, tmp_path)
    server.start("m")
    scratch = server.scratch
    stand_in_of(server).send_signal(signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"the server has ended \(signal 9\).*server_0\.log"):
        server.check_alive(grace_s=10)
    assert not scratch.exists()
    server.stop()
    server.check_alive()  # of what has been stopped nothing is expected


BUSY = STAND_IN.replace(
    "def do_GET(self):",
    """def do_GET(self):
        if self.path.startswith("/work"):  # nobody else is answered meanwhile
            import time
            time.sleep(float(self.path.removeprefix("/work/")))""",
)


def test_a_busy_server_has_time(servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_INTERVAL_S", 0.05)
    server = own(servers, tmp_path, Launcher(code=BUSY))
    server.start("model")
    assert server.watched(lambda: server.api.get("/work/0.8")).status_code == 200
    monkeypatch.setattr(server_module, "PATIENCE_S", 0.4)
    with pytest.raises(EngineDied, match="the server was unhealthy and was stopped"):
        server.watched(lambda: server.api.get("/work/60"))


SILENT = STAND_IN.replace(
    "def do_GET(self):",
    """def do_POST(self):
        print("asked", flush=True)
        self.connection.close()

    def do_GET(self):""",
)


def test_a_server_that_breaks_a_call_off_is_stopped(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much of it was done. What only reads is asked again first."""
    monkeypatch.setattr(server_module, "GRACE_S", 0.0)
    for changes, asked in ((True, 1), (False, 2)):
        server = own(servers, tmp_path / str(changes), Launcher(code=SILENT))
        server.start("model")
        with pytest.raises(EngineDied, match=r"/load: .* and was stopped; its last words"):
            make_client(server).post("/load", changes=changes)
        assert server.has_ended
        assert (tmp_path / str(changes) / "server_0.log").read_text().count("asked\n") == asked


def test_a_call_does_not_use_a_connection_that_the_server_may_be_closing(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        is_known = request.connection in [earlier.connection for earlier in web.requests[: request.number]]
        return Reply(cut="reset") if is_known else Reply({"version": "0.25"})

    with ScriptedServer(script) as web:
        control = make_client(found(web.base_url, tmp_path))
        assert [control.version() for _ in range(3)] == ["0.25"] * 3
        control.pause("keep")
        control.resume()
        assert len(web.requests) == 5


def test_death_of_a_server_that_another_process_started_is_noticed(servers: list[Server], tmp_path: Path) -> None:
    server = own(servers, tmp_path)
    server.start("model")
    there = Server(base_url=server.base_url, api_key=None, launcher=None, log_dir=tmp_path)
    there.watched_pid = server.pid
    there.check_alive(grace_s=0.3)
    stand_in_of(server).kill()
    with pytest.raises(EngineDied, match=f"the server at {server.base_url}, which another process of this run"):
        there.check_alive(grace_s=15)  # its parent has not asked yet: a zombie counts as ended


def test_a_server_that_does_not_start(servers: list[Server], tmp_path: Path) -> None:
    server = own(servers, tmp_path, Launcher(code="raise ValueError('no room')"))
    with pytest.raises(EngineDied, match=r"exit code 1\); its last words: ValueError: no room"):
        server.start("m")
    slow = own(servers, tmp_path / "slow", Launcher(code="import time; time.sleep(100)", start_timeout_s=0.3))
    with pytest.raises(EngineError, match=rf"^the stand-in at {slow.base_url} was not ready after 0\.3 s \(engine\.st"):
        slow.start("m")


# A server that was found


def found(url: str, folder: Path, api_key: str | None = None) -> Server:
    return Server(base_url=url, api_key=api_key, launcher=None, log_dir=folder)


def test_a_found_server_is_left_alone(tmp_path: Path) -> None:
    with ScriptedServer(lambda _: Reply({"data": [{"id": "their/model"}]})) as web:
        server = found(web.base_url + "/v1/", tmp_path, "k")
        assert server.base_url == web.base_url
        assert not server.is_managed
        server.start("some/model")
        scratch = server.scratch
        server.stop()
        server.check_alive(grace_s=100)
        assert not scratch.exists()
        assert server.api.is_healthy()
        assert {request.path for request in web.requests} == {"/health"}
        assert {request.headers["Authorization"] for request in web.requests} == {"Bearer k"}
    assert list(tmp_path.iterdir()) == []


def test_failed_calls(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        if request.path == "/late":
            web.hold(request)
        return replies[request.path][0]

    replies = {
        "/refused": (Reply({"error": {"message": "no such adapter"}}, status=404), NotFound, r"status 404: no such"),
        "/plain": (Reply(b"oops", status=500, headers={}), Refused, r"status 500: oops"),
        "/broken": (Reply(b'{"a": '), EngineError, r"a malformed answer \(ValueError: "),
        "/late": (Reply(), EngineError, "ReadTimeout"),
    }
    with ScriptedServer(script) as web:
        api = found(web.base_url, tmp_path).api
        for path, (_, kind, message) in replies.items():
            with pytest.raises(kind, match=rf"^{web.base_url}{path}: {message}"):
                read(api.get(path, timeout_s=0.5), dict)
    with pytest.raises(ConfigError, match="must consist of printable ASCII"):
        found("http://127.0.0.1:1", tmp_path, "schlüssel")


# vLLM's command line and environment

SETTINGS: dict[str, Any] = {
    **COMMAND_LINE,
    "args": {"dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True, "seed": 0, "max_num_seqs": None},
    "blackwell_workaround": False,
}


def engine(**changes: Any) -> VllmLauncher:
    return VllmLauncher(**{**SETTINGS, **changes})


def environment(**changes: Any) -> dict[str, str]:
    return engine(**changes).environment({}, None)


def test_command() -> None:
    command = engine().command("some/model", 4321, {"max_model_len": 64, "weight_transfer_config": {"a": "b"}})
    assert command[0] == sys.executable
    assert " ".join(command[1:]) == (
        "-m offline_grpo_server --model some/model --host 127.0.0.1 --port 4321 "
        "--served-model-name policy --scheduler-cls offline_grpo_scheduler.bundling_scheduler "
        "--dtype bfloat16 --max-model-len 64 --enforce-eager --seed 0 "
        """--weight-transfer-config {"a": "b"} --worker-extension-cls offline_grpo_worker.WorkerExtension """
        "--middleware offline_grpo_generate.Generate"
    )


@pytest.mark.parametrize(
    ("num_sequences", "args", "largest"),
    [
        (512, {}, None),  # vLLM records graphs for as many by itself
        (5000, {"max_num_seqs": 2048}, 2048),
        (1000, {"enforce_eager": True}, None),
    ],
)
def test_cuda_graphs_for_as_many_sequences_as_are_sampled_at_once(
    num_sequences: int, args: dict[str, Any], largest: int | None
) -> None:
    before = engine(args=args)
    after = before.expecting(num_sequences)
    if largest is None:
        assert after is before
    else:
        sizes = after.args["cudagraph_capture_sizes"]
        assert (sizes[:5], sizes[-1], sorted(set(sizes))) == ([1, 2, 4, 8, 16], largest, sizes)
        assert replace(after, args=args) == before
        assert f"--cudagraph-capture-sizes 1 2 4 8 16 {sizes[5]}" in " ".join(after.command("m", 1, {}))


def test_a_key_guards_everything_and_other_users_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines are readable for everybody, environments are not."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    command = engine(api_key="hush-hush").command("m", 1, {})
    assert "hush-hush" not in " ".join(command)
    gate = ["--middleware", "offline_grpo_worker.TokenGate"]
    assert command[-2:] == gate  # the last one is outermost: without the key nobody samples either
    assert gate[1] not in engine().command("m", 1, {})
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    assert "VLLM_API_KEY" not in environment()


def test_what_is_compiled_is_there_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.25 files it under a hash of its own variables, VLLM_API_KEY included; so none of them may differ between
    two runs.
    """
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    one, other = (
        {name: value for name, value in environment(api_key=key).items() if name.startswith("VLLM_")}
        for key in ("hush", "hush-hush")
    )
    assert one == other
    assert [environment(api_key=key)["OFFLINE_GRPO_API_KEY"] for key in ("hush", "hush-hush")] == ["hush", "hush-hush"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "torch's, since it compiled in this process")
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/user")
    monkeypatch.setattr(process_module, "LONGEST_SOCKET_FOLDER", 1000)
    monkeypatch.setattr(process_module, "OF_THE_SHELL", {})
    kept = temporary_folder(tmp_path)
    assert kept["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user/offline-grpo/torchinductor"
    assert kept["TRITON_CACHE_DIR"] == "/of/the/user/offline-grpo/triton"
    monkeypatch.setattr(process_module, "OF_THE_SHELL", {"TRITON_CACHE_DIR": "/of/the/shell"})
    assert temporary_folder(tmp_path)["TRITON_CACHE_DIR"] == "/of/the/shell"


def test_an_address_that_others_reach_needs_a_key() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.host=0\.0\.0\.0: .*others could control the server"):
        engine(host="0.0.0.0")
    assert engine(host="0.0.0.0", api_key="k").host == "0.0.0.0"


# The token gate


def ask(
    kind: str, path: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, method: str = "GET"
) -> tuple[bool, list[Any]]:
    """Whether a request reached the server behind the gate, and what was sent back otherwise."""
    monkeypatch.setenv("VLLM_API_KEY", "hush-hush")
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the gate needs no body")

    scope: dict[str, Any] = {
        "type": kind,
        "path": path,
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
    }
    scope |= {"method": method} if kind == "http" else {}
    asyncio.run(load_extension().TokenGate(app)(scope, receive, send))
    return reached == [kind], sent


PATHS = ["/", "/pause", "/v1/completions", "/health/", "/HEALTH"]
GOOD = {"Authorization": "Bearer hush-hush"}
BAD = [{}, {"Authorization": "Bearer hush-hush2"}]


@pytest.mark.parametrize("headers", BAD)
def test_nothing_passes_without_the_token(headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for path in PATHS:
        for method in ("GET", "POST", "OPTIONS"):
            has_passed, [start, body] = ask("http", path, headers, monkeypatch, method=method)
            assert not has_passed, path
            assert start["status"] == 401
            assert b"hush" not in body["body"]
            assert ask("http", path, GOOD, monkeypatch, method=method) == (True, [])
    assert ask("http", "/health", {}, monkeypatch) == ask("lifespan", "", {}, monkeypatch) == (True, [])
