"""What a run starts for Atropos: told what they need, in private; started again; ended. Real processes, and the real
run-api.
"""

import json
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import yaml
from runs import wait_until

from offline_grpo.engine.http import choose_port
from offline_grpo.errors import GrpoError
from offline_grpo.rollouts.atropos import environment_of, run_api

KEY = "a-key-that-nobody-may-see"
SIZES = {"group_size": 8, "max_token_length": 32}


@pytest.fixture
def make(tmp_path):
    made = []

    def make(command, url="http://127.0.0.1:8000"):
        told = {"server_url": "http://127.0.0.1:9001", "server_key": KEY, "model": "some/model"}
        made.append(environment_of(command, url, tmp_path, **told, sizes=SIZES))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_an_environment_is_told_what_it_needs_by_its_variables_and_by_a_private_file(make, tmp_path, monkeypatch):
    copies = 'ls -l "$OFFLINE_GRPO_ENV_CONFIG"; cp "$OFFLINE_GRPO_ENV_CONFIG" config'
    running = make(f"env > told; {copies}; touch done; exec sleep 600")
    monkeypatch.chdir(tmp_path)
    running.keep_running()
    wait_until((tmp_path / "done").exists)
    told = dict(line.split("=", 1) for line in (tmp_path / "told").read_text().splitlines() if "=" in line)
    expected = {"SERVER_URL": "http://127.0.0.1:9001", "SERVER_KEY": KEY, "API_URL": "http://127.0.0.1:8000"}
    expected |= {"MODEL": "some/model", "RUN": str(tmp_path)}
    assert {name: told[f"OFFLINE_GRPO_{name}"] for name in expected} == expected
    config = yaml.safe_load((tmp_path / "config").read_text())
    names = {"tokenizer_name": "some/model", "rollout_server_url": "http://127.0.0.1:8000", "wandb_name": "environment"}
    endless = {"total_steps": 10**9, "min_batch_allocation": None, "use_wandb": False}
    assert config["env"] == {**SIZES, **names, **endless}
    servers = [(server["base_url"], server["api_key"]) for server in config["openai"]]
    assert servers == [("http://127.0.0.1:9001/v1", KEY)] * 2
    log = tmp_path / "env_0.log"
    assert "-rw-------" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0  # environments of atroposlib print the key
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if KEY in command]
    running.stop()
    assert not Path(told["OFFLINE_GRPO_ENV_CONFIG"]).parent.exists()


def test_an_environment_that_ends_is_started_again_until_it_keeps_ending(make, tmp_path):
    running = make("echo no such problem >&2; exit 3")
    running.keep_running()
    with pytest.raises(GrpoError, match=r"environment=echo .*3 times .*exit code 3.*no such problem.*env_2\.log"):
        wait_until(lambda: running.keep_running() and False)
    assert (tmp_path / "env_2.log").exists()
    assert not (tmp_path / "env_3.log").exists()


def test_the_real_api_is_started_for_this_machine_alone_and_again_after_a_kill_with_its_environment(make, tmp_path):
    url = f"http://127.0.0.1:{choose_port('127.0.0.1', None, key='-')}"

    def answers():
        try:
            with urlopen(url, timeout=2) as answer:
                return json.load(answer) == {"message": "AtroposLib API"}
        except OSError:
            return False

    api, environment = run_api(url, tmp_path), make("exec sleep 600", url)
    api.keep_running()
    wait_until(answers)
    environment.keep_running(anew=api.keep_running())
    port = int(url.rpartition(":")[2])
    [listener] = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    assert listener.laddr.ip == "127.0.0.1"
    psutil.Process(listener.pid).kill()
    wait_until(lambda: environment.keep_running(anew=api.keep_running()))
    wait_until(answers)
    assert {path.name for path in tmp_path.iterdir()} >= {"api.log", "api_1.log", "env_0.log", "env_1.log"}
    api.stop()
    assert not answers()
