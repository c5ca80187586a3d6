"""Runs of the whole application: in this process, in child processes that can be killed (forked from a server that has
imported everything already), and beside vLLM servers on the CPU, of the random model that `engines.save_model` makes.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pyarrow.parquet as parquet
import pytest
from factories import compose_config

from offline_grpo.engine.http import choose_port
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.interfaces import RunListener
from offline_grpo.report import plots
from offline_grpo.run import train
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Metrics, Problem, SamplingParams, SamplingRequest, Score, ServedWeights

CONTEXT = multiprocessing.get_context("forkserver")

SMALL = (
    *("model.tiny.warm_start_steps=60", "model.tiny.hidden_size=32", "task.format_weight=0.5", "num_threads=1"),
    *("data.num_train_seeds=200", "train.iterations=4", "train.updates_per_iteration=2"),
    *("train.drop_zero_signal_groups=false", "data.problems_per_iteration=4", "data.rollouts_per_problem=4"),
    *("eval.num_ids=4", "eval.interval=2", "eval.replicates=2", "eval.ks=[1,2]", "checkpoint.save_interval=2"),
    "scoring.episodes=4",  # each has a process, which has imports of its own
)
"""Four iterations of everything in a few seconds; the model has learnt to write integers sometimes, so that rewards
differ.
"""

ENVIRONMENT = dict(os.environ)

CLUSTER_OF = "TESTED_CLUSTER_OF"
"""A variable of the environment of all processes of a Ray cluster: the process of the tests that started it."""


Mishap = Mapping[tuple[str, int], Callable[[], Any]]
"""What happens at the beginning of a phase of an iteration, such as `("sync", 3)`."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or another signal, to itself at the `count`-th call of `module:Class.method` or `module:function`,
    before it or after it; of several processes to that of `rank`, if one is given.
    """

    where: str
    count: int
    when: str = "before"
    number: int = signal.SIGKILL
    rank: int | None = None


class Mishaps(RunListener):
    """A listener to which things happen when a phase begins: each of `planned`, once. It writes nothing."""

    planned: ClassVar[dict[tuple[str, int], Callable[[], Any]]] = {}
    override = "+logger.mishaps._target_=runs.Mishaps"

    def phase(self, name: str, iteration: int) -> None:
        self.planned.pop((name, iteration), lambda: None)()


class StopsRun(RunListener):
    """Asks the run in folder `name` to stop, as its second iteration begins to sample."""

    def __init__(self, output_dir: Path, name: str) -> None:
        self.is_meant = output_dir.name == name

    def phase(self, name: str, iteration: int) -> None:
        if self.is_meant and (name, iteration) == ("generate", 1):
            signal.raise_signal(signal.SIGTERM)


class Heard(RunListener):
    """Remembers what a run in this process told its listeners, except the groups."""

    events: ClassVar[list[tuple[Any, ...]]] = []
    override = "+logger.heard._target_=runs.Heard"

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        self.events.append(("start", num_iterations))

    def phase(self, name: str, iteration: int) -> None:
        self.events.append(("phase", name, iteration))

    def progress(self, done: int, total: int, unit: str) -> None:
        self.events.append(("progress", done, total, unit))

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self.events.append(("log", name, iteration))


def child_process(target: Callable[..., Any], *args: Any, daemon: bool | None = None) -> BaseProcess:
    """A process that calls `target(*args)` once it is started, forked from a server that has imported preloaded.py."""
    fork_server()
    return CONTEXT.Process(target=target, args=args, daemon=daemon)


@functools.cache
def fork_server() -> None:
    """Start the server, which serves all workers, or find it; it has the environment in which tests began."""
    path, tests = Path(os.environ["OFFLINE_GRPO_TESTS_CACHE"], "fork_server"), os.environ["OFFLINE_GRPO_TESTS_PROCESS"]
    with path.with_suffix(".log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        if not path.exists():
            folders = [str(Path(__file__).parent), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
            subprocess.run(
                [sys.executable, Path(__file__).with_name("fork_server.py"), path, tests],
                stdout=log,
                stderr=log,
                env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(folders)},  # preloaded.py takes it off again
                check=True,
            )
        fcntl.flock(log, fcntl.LOCK_UN)  # which the server has inherited
    server: Any = forkserver._forkserver  # in place of one of this process alone
    server._forkserver_address, server._forkserver_alive_fd = str(path), os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running


def start_in_child(
    output_dir: Path,
    *overrides: str,
    kill: Kill | None = None,
    mishaps: Mishap | None = None,
    fresh: bool = False,
    draws: bool = False,
) -> BaseProcess:
    """`app.run` with these overrides in a process of its own; what it printed goes to `output_dir`.txt.

    Args:
        mishaps: what happens in that process at the beginning of a phase of an iteration, such as `("sync", 3)`.
        fresh: start the process anew and not from the server, whose imports make CUDA unusable in a fork.
        draws: draw the report, which takes longer than the rest. Otherwise it is an empty file.
    """
    make = (
        (lambda target, *args: multiprocessing.get_context("spawn").Process(target=target, args=args))
        if fresh
        else child_process
    )
    process = make(_child, str(output_dir), list(overrides), kill, dict(mishaps or {}), draws)
    process.start()
    return process


def run_in_child(output_dir: Path, *overrides: str, timeout_s: float = 300, **how: Any) -> int:
    """See `start_in_child`. Waits for the end and returns the exit code."""
    process = start_in_child(output_dir, *overrides, **how)
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"the run took longer than {timeout_s} s:\n{printed(output_dir)}")
    assert process.exitcode is not None
    return process.exitcode


def run_in_children(
    count: int, output_dir: Path, *overrides: str, kill: Kill | None = None, mishaps: Mishap | None = None
) -> list[int]:
    """`app.run` in several processes of one group, as `accelerate launch` starts them. Returns their exit codes.

    Args:
        kill: of each process that makes the call.
        mishaps: see `start_in_child`; they happen in the first process.
    """
    return in_group(count, _child, str(output_dir), list(overrides), kill, dict(mishaps or {}), False)


def in_group(count: int, target: Callable[..., None], *args: Any) -> list[int]:
    """Call `target(*args)` in `count` processes, with the environment by which `torch.distributed` finds the others."""
    port = choose_port("127.0.0.1", None, key="-")
    return _exit_codes([child_process(_as_rank, rank, count, port, target, args) for rank in range(count)])


def _exit_codes(processes: list[Any], timeout_s: float = 300) -> list[int]:
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in codes, f"still running after {timeout_s} s: {codes}"
    return codes


def _as_rank(rank: int, count: int, port: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update(
        {name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"
    )
    target(*args)


def run_command(
    folder: Path, script: Path, *words: str, count: int = 1, draws: bool = False
) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS` from `folder`, in processes forked from the server: they have torch already, and are the
    command otherwise.

    Args:
        draws: see `start_in_child`.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as outputs:
        arguments = (str(folder), str(script), list(words), outputs, draws, None)
        codes = (
            in_group(count, _command, *arguments) if count > 1 else _exit_codes([child_process(_command, *arguments)])
        )
        out, err = (Path(outputs, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([str(script), *words], max(codes), out, err)


def start_command(folder: Path, script: Path, *words: str, outputs: Path, python: str | None = None) -> BaseProcess:
    """See `run_command`. Does not wait; what is printed goes to the files `out` and `err` in `outputs`. As started by
    a shell, it leads a process group of its own.

    Args:
        python: what it starts others with, such as `preloaded_python`; None: this interpreter.
    """
    process = child_process(_command, str(folder), str(script), list(words), str(outputs), False, python)
    process.start()
    return process


def _command(folder: str, script: str, words: list[str], outputs: str, draws: bool, python: str | None) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{outputs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.setpgid(0, 0)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not draws:
        _leave_out_drawing()
    sys.argv, sys.executable = [script, *words], python or sys.executable
    atexit._clear()  # the server's; a process of multiprocessing would not run its own either
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()  # here, because what runs at exit ends the process
        raise
    finally:
        atexit._run_exitfuncs()


def printed(output_dir: Path) -> str:
    """What the child for this folder printed, the newest last."""
    return Path(f"{output_dir}.txt").read_text()


def draw_nothing(history: Any) -> None:
    """In place of `save_report`."""
    (history.folder / "report.png").touch()


def _leave_out_drawing() -> None:
    plots.save_report = draw_nothing  # type: ignore[assignment]


def _child(
    output_dir: str,
    overrides: list[str],
    kill: Kill | None,
    mishaps: dict[tuple[str, int], Callable[[], Any]],
    draws: bool,
) -> None:
    from tqdm import tqdm

    from offline_grpo.commands import cli

    tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore, which in a spawned process stays until the tests have ended
    if not draws:
        _leave_out_drawing()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whoever started the tests
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    Path(output_dir).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{output_dir}.txt", "a", buffering=1) as output:
        sys.stdout = sys.stderr = output
        if kill is not None:
            _arm(kill)
        if mishaps:
            Mishaps.planned.update(mishaps)
            overrides += [] if Mishaps.override in overrides else [Mishaps.override]
        try:
            train(compose_config(*overrides), Path(output_dir))
        except cli.EXPECTED as error:
            cli.leave(error)
        except Exception:
            traceback.print_exc()
            sys.exit(99)


def _arm(kill: Kill) -> None:
    if kill.rank not in (None, int(os.environ.get("RANK", "0"))):
        return
    module, _, path = kill.where.partition(":")
    *owners, method_name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, method_name)
    calls = 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.count and kill.when == "before":
            os.kill(os.getpid(), kill.number)
        result = original(*args, **kwargs)
        if calls == kill.count and kill.when == "after":
            os.kill(os.getpid(), kill.number)
        return result

    setattr(owner, method_name, method)


def metrics_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """File name -> metrics, without what depends on the clock."""
    return {
        path.name: {
            key: value for key, value in json.loads(path.read_text()).items() if not key.startswith(("time/", "perf/"))
        }
        for path in sorted((run_dir / "metrics").glob("*.json"))
    }


def drawn(run_dir: Path) -> list[Any]:
    """What was sampled in each iteration and what it was worth. Logprobs are left out: their last bits depend on what a
    server computes at the same time.
    """
    columns = ["problem_id", "completion_ids", "reward", "version", "advantage"]
    files = sorted((run_dir / "rollouts").glob("iter_*.parquet"))
    return [parquet.read_table(file, columns=columns).to_pylist() for file in files]


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """Checkpoint -> the bytes of its model file."""
    return {path.parent.name: path.read_bytes() for path in sorted(run_dir.glob("checkpoints/iter_*/*.safetensors"))}


def assert_alike(run: Path, expected: Path) -> None:
    """The metrics of both are the same but for rounding."""
    ours, theirs = metrics_of(run), metrics_of(expected)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        # float32: `alignment/diff_max` alone is some ulps of a logprob
        assert ours[name] == pytest.approx(theirs[name], abs=5e-6, rel=1e-5), name


def alone_and_together(folder: Path, *overrides: str, together: Sequence[str] = ()) -> tuple[Path, Path]:
    """A run of one process and one of two, which must be alike; `together` are further overrides of the second."""
    one, two = folder / "alone", folder / "together"
    assert run_in_child(one, *overrides) == 0, printed(one)
    assert run_in_children(2, two, *overrides, *together) == [0, 0], printed(two)
    assert_alike(two, one)
    return one, two


def own_server(python: str) -> tuple[str, ...]:
    """Overrides for a run that starts its server on the CPU. `python`: see `preloaded_python` and `forking_python`."""
    return (
        *("generation=vllm_server", f"engine.python={python}", "engine.args.enforce_eager=true"),
        *("engine.args.distributed_executor_backend=uni", "+engine.args.kv_cache_memory_bytes=67108864"),
        *("+engine.args.max_num_batched_tokens=32768", "engine.args.gpu_memory_utilization=null"),
        *("+engine.env.OMP_NUM_THREADS=1", '+engine.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"'),
        '+engine.env.TORCHDYNAMO_DISABLE="1"',  # see `engines.CPU_ENV`
    )


@dataclass(frozen=True)
class Variety(Arithmetic):
    """The problems of arithmetic, with a reward that the answers of a random model differ in: how many characters they
    use.
    """

    def score(self, problem: Problem, text: str) -> Score:
        variety = len(set(text)) / 10
        return Score(reward=variety, is_correct=variety > 0.6, parts={"variety": variety})


class Endless(VllmEngine):
    """Asks for completions that only their length ends."""

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        return super().body(request, sampling, weights) | {"ignore_eos": True, "stop_token_ids": []}


def five(model: Path) -> tuple[str, ...]:
    """Overrides for five iterations with this model.

    Adam divides gradients by their own size, so where they are nothing but rounding, rounding decides which way weights
    go: with the usual eps and LoRA's learning rate, 1e-6 nats between two servers became other samples within three
        iterations. Gradients have norms of 2 to
    10 here; with this eps the policy moves as far, and those 1e-6 stay below a tenth of what `assert_same` tolerates.
    """
    return (
        *(*SMALL, f"model.train_id={model}", "task._target_=runs.Variety", "train.iterations=5", "eval.interval=5"),
        *("train.lr=1e-3", "train.optimizer.eps=1e-4", "checkpoint.enabled=false", "model.device=cpu"),
    )


def at(server: VllmEngine | str) -> tuple[str, str]:
    """Overrides for sampling from a server that is there."""
    return "generation=vllm_server", f"generation.base_url={server if isinstance(server, str) else server.base_url}"


def run(folder: Path, model: Path, *overrides: str, mishaps: Mishap | None = None) -> dict[str, dict[str, float]]:
    """A run in this process; its metrics. `mishaps`: see `start_in_child`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mishaps, "planned", dict(mishaps or {}))
        patch.setattr(plots, "save_report", draw_nothing)
        train(compose_config(*five(model), *overrides, *([Mishaps.override] if mishaps else [])), folder)
        assert not Mishaps.planned, "planned and did not happen"
    return metrics_of(folder)


CANCELLING = ("loss_pg", "loss_total")
"""Sums of advantages times ratios: terms of size 1, of which little remains. So rounding is measured by the terms."""


def assert_same(left: dict[str, dict[str, float]], right: dict[str, dict[str, float]]) -> None:
    """Equal up to rounding, apart from what says how the weights travelled."""
    assert left.keys() == right.keys()
    for name, found in left.items():
        for key, value in found.items():
            if not key.startswith(("sync/", "alignment/", "mismatch/", "logprobs/inference")):
                tolerance = 1e-4 if key in CANCELLING else 1e-5
                assert right[name][key] == pytest.approx(value, rel=1e-4, abs=tolerance), (
                    name,
                    key,
                    value,
                    right[name][key],
                )


T = TypeVar("T")


def wait_until(is_so: Callable[[], T], seconds: float = 300, told: Callable[[], str] = lambda: "waited in vain") -> T:
    """Ask until it is. Returns the answer."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
    return found
