"""The whole of Atropos on the CPU: the real run-api, real environments of atroposlib's BaseEnv, a real vLLM server, and
a run.
"""

import itertools
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from engines import preloaded_python, writers
from runs import SMALL, metrics_of, own_server, start_command, wait_until

from offline_grpo.engine.http import choose_port
from offline_grpo.rollouts.rows import group_rows, groups_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def named(trainer, text):
    """The processes below the trainer with this text in their command line, without guardians and shells."""
    found = []
    for process in trainer.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            words = process.cmdline()
            if text in " ".join(words) and "offline-grpo-guardian" not in words and Path(words[0]).name != "sh":
                found.append(process)
    return found


def spans(rollout):
    """Where each run of tokens that the model wrote begins."""
    return [i for i, (b, now) in enumerate(itertools.pairwise([False, *rollout.is_sampled])) if now and not b]


def recorded(folder):
    """All rollouts that a run has trained on."""
    tables = map(pq.read_table, sorted((folder / "rollouts").glob("iter_*.parquet")))
    groups = (group for table in tables for group in groups_of(table, group_rows(table).values(), {}.__getitem__))
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """`run_grpo.py experiment=atropos_shared` with its own environment and one of two turns, whose run-api was killed,
    and after three iterations and some groups of both the run itself.
    """
    folder = tmp_path_factory.mktemp("killed")
    python = preloaded_python(folder)  # which has most of what environments import, too
    words = (*SMALL, *own_server(python), f"hydra.run.dir={folder}/run", "rollouts.poll_s=0.2")
    url = f"http://127.0.0.1:{choose_port('127.0.0.1', None, key='-')}"
    words += ("experiment=atropos_shared", f"rollouts.url={url}", "model.tiny.hidden_size=128")
    words += ("model.tiny.warm_start_steps=10", "train.lr=1e-5")  # it need neither know nor learn much
    words += ("train.iterations=500", "train.updates_per_iteration=1", "eval.interval=500", "model.device=cpu")
    # That of two turns sends a group before the other one starts, which is faster and would keep the queue full.
    sent = folder / "sent.jsonl"
    fakes = f"SENT={sent} PYTHONPATH={ROOT}/tests/fakes"
    turns = f"{fakes} {python} -m multi_turn_environment serve --config $OFFLINE_GRPO_ENV_CONFIG"
    first = f"touch {sent}; n=$(wc -l < {sent}); {turns} & until [ $(wc -l < {sent}) -gt $n ]; do sleep 0.1; done"
    both = f"{first}; {python} -m offline_grpo.commands.task_environment serve"
    words += (f"rollouts.environment='{both} & wait'", "generation.max_new_tokens=24")
    child = start_command(ROOT, ROOT / "run_grpo.py", *words, outputs=folder)
    trainer = psutil.Process(child.pid)

    def metrics(iteration):
        path = folder / "run" / "metrics" / f"train_iter_{iteration:03d}.json"
        assert child.is_alive(), (folder / "out").read_text() + (folder / "err").read_text()
        return path.exists()

    wait_until(lambda: metrics(0) and named(trainer, "task_environment"))
    [environment] = named(trainer, "task_environment")
    environ = environment.environ()
    [api] = named(trainer, "run_api")
    api.kill()
    wait_until(lambda: (folder / "run" / "env_1.log").exists())  # with a new API comes a new environment
    wait_until(lambda: metrics(2) and {1, 2} <= {len(spans(rollout)) for rollout in recorded(folder / "run")})
    wait_until(lambda: named(trainer, "task_environment"))  # its log is there before it is
    logs = (folder / "run" / name for name in ("server_0.log", "env_1.log"))
    below = {*trainer.children(recursive=True), *(process for log in logs for process in writers(log))}
    trainer.kill()
    psutil.wait_procs(below, timeout=30)
    left = [process for process in below if process.is_running()]
    child.join()
    return SimpleNamespace(folder=folder / "run", environ=environ, num_below=len(below), left=left)


def test_a_run_trains_from_run_api_fed_by_its_own_environment_and_pushes_its_weights(killed):
    found = [metrics_of(killed.folder)[f"train_iter_{i:03d}.json"] for i in range(3)]
    assert [each["sync/version"] for each in found] == [1, 2, 3]
    assert all(0 <= each["reward_mean"] <= 10 for each in found)
    assert found[0]["mismatch/ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert found[0]["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert found[0]["alignment/diff_abs_mean"] < 1e-3
    assert all(each["mismatch/kl_k3"] < 0.1 for each in found)
    assert any(each["grad_norm"] > 0 for each in found)
    dropped = [f"rollouts/num_dropped_{reason}" for reason in ("malformed", "masks", "numbers")]
    assert not any(each[name] for each in found for name in dropped)


def test_what_was_killed_was_started_again_and_left_its_log(killed):
    names = {path.name for path in killed.folder.glob("*.log")}
    assert names >= {"run.log", "api.log", "api_1.log", "server_0.log", "env_0.log", "env_1.log"}
    told = (killed.folder / "run.log").read_text()
    assert "the Atropos API (run-api) has ended (signal 9)" in told


def test_the_servers_key_is_in_no_file_of_the_run(killed):
    key = killed.environ["OFFLINE_GRPO_SERVER_KEY"]
    assert len(key) > 10
    assert not [path for path in killed.folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_nothing_outlives_a_run_that_is_killed(killed):
    assert killed.num_below >= 10  # three guardians, the API, the environments and their shell, and the server's three
    assert killed.left == []


def test_of_several_turns_exactly_what_the_model_wrote_is_trained_on(killed):
    def known(tokens, is_sampled, logprobs):
        return tuple(tokens), tuple(is_sampled), tuple(np.float32(logprobs)[np.array(is_sampled)].tolist())

    sent = {
        known(tokens, [token != -100 for token in mask], logprobs)
        for group in map(json.loads, (killed.folder.parent / "sent.jsonl").read_text().splitlines())
        for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
    }
    turns = [rollout for rollout in recorded(killed.folder) if len(spans(rollout)) == 2]
    assert len(turns) >= 4
    assert all(known(turn.token_ids, turn.is_sampled, turn.logprobs) in sent for turn in turns)
