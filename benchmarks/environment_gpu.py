"""What episodes of several turns cost beyond their tokens: a calculator, asked through a vLLM server.

    python benchmarks/environment_gpu.py WORK --model FOLDER    # SmolLM2-135M-Instruct, say, with a template for tools
    python benchmarks/environment_gpu.py WORK                   # Qwen3-0.6B's shape with random weights, without tools
    python benchmarks/environment_gpu.py WORK --small           # a tiny model and vLLM's CPU build

Arms, each round the same 256 episodes, from an empty prefix cache:
    environment             `task=environment`: a process for each episode, the dialogue, the scores
    environment_requests    the very requests of those episodes, each turn as soon as the one before is answered
    agent                   `task=agent`: a conversation through the proxy, by a client of its own, without tools
    agent_requests          the requests of those

What an arm takes beyond its requests is compared with an iteration of a run on the same server, which also trains.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_grpo.types import Completion, RolloutGroup, SamplingRequest

REQUESTS = "_requests"


class Talk:
    """Adds up what the policy says, and asks on."""

    def reset(self, turns: int, **row: Any) -> None:
        self.left, self.said = turns - 1, 0

    def respond(self, text: str) -> str | None:
        self.left -= 1
        self.said += text.count("1")
        return f"{self._sum(text)}. And twice {self.left + 11}?" if self.left >= 0 else None

    def get_reward(self) -> float:
        return float(self.said)

    def _sum(self, text: str) -> int:
        return sum(int(number[:9]) for number in re.findall(r"\d+", text))


class Calculator(Talk):
    """The same with a tool."""

    def add(self, numbers: str) -> str:
        """Add numbers up.

        Args:
            numbers: The numbers, with spaces between them.
        """
        self.left -= 1
        return str(self._sum(numbers))


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """`Talk` as an agent."""
    import httpx

    world = Talk()
    world.reset(**row)
    messages = [{"role": "user", "content": row["prompt"]}]
    with httpx.Client(base_url=base_url, timeout=None, verify=False) as http:
        while True:
            choice = http.post("/chat/completions", json={"messages": messages}).json()["choices"][0]
            answer = world.respond(choice["message"]["content"] or "")
            if answer is None or choice["finish_reason"] == "length":
                return world.get_reward()
            messages += [choice["message"], {"role": "user", "content": answer}]


def tokens_of(group: RolloutGroup) -> int:
    return sum(rollout.num_sampled for rollout in group.rollouts)


def in_chains(client: Any, chains: Sequence[Sequence[SamplingRequest]], sampling: Any) -> None:
    """Ask all requests, each once the one before it in its chain is answered."""
    ready, sent, num_left = deque((chain, 0) for chain in chains), [], sum(map(len, chains))

    def coming() -> Iterator[SamplingRequest | None]:
        while num_left:
            if ready:
                chain, place = ready.popleft()
                sent.append((chain, place))
                yield chain[place]
            else:
                yield None

    for number, _ in client.generate(coming(), sampling):
        num_left -= 1
        chain, place = sent[number]
        if place + 1 < len(chain):
            ready.append((chain, place + 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", type=Path, help="in transformers' format, with ChatML's tokens")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-tokens", type=int, default=128, help="at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=4, help="of the run, of which the first does not count")
    parser.add_argument("--share", type=float, default=0.4, help="of the card's memory, for the server")
    parser.add_argument("--out", default="environment_gpu")
    return parser.parse_args()


def main() -> None:
    import httpx
    from common import Target, alternate, environment, make_model, records_of, write_result
    from generation import CPU_ARGS, CPU_ENV, Served

    import offline_grpo
    from offline_grpo.config.compose import composed, register, typed
    from offline_grpo.config.problems import build_task, isolated
    from offline_grpo.engine.vllm import VllmEngine
    from offline_grpo.generation.sample import sample_in_order
    from offline_grpo.model.load import generation_config_of, load_tokenizer, read_model_config
    from offline_grpo.model.text import TokenizerCodec, end_ids
    from offline_grpo.types import SamplingParams, Split

    arguments = parse()
    work = arguments.work.absolute()
    os.environ |= environment(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    work.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{i}+{i + 3}=", "turns": arguments.turns} for i in range(2 * arguments.problems)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind, model, stop = "Calculator", arguments.model, []
    args: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": arguments.share, "max_model_len": 4096}
    if model is None:  # its tokens are numbers: the more sevens, the longer a reply
        make_model(work / "random", "0.6b", small=arguments.small)
        kind, model, stop = "Talk", work / "random" / "model", ["7" if arguments.small else "77"]
    if arguments.small:
        args = {**CPU_ARGS, "max_model_len": 512 if arguments.model is None else 1024}
    words = [
        *("model=hf", f"model.train_id={model}", f"task.path={work}/rows.jsonl"),
        *(f"data.num_train_seeds={arguments.problems}", f"data.problems_per_iteration={arguments.problems}"),
        *(f"data.rollouts_per_problem={arguments.group}", f"scoring.episodes={arguments.problems * arguments.group}"),
        f"generation.max_new_tokens={min(arguments.turns * arguments.turn_tokens, args['max_model_len'] // 2)}",
        *(f"task.max_turn_tokens={arguments.turn_tokens}", f"task.max_turns={arguments.turns}"),
        *("task.max_environment_tokens=240", "eval.enabled=false", "generation=vllm_server", "weight_sync=reload"),
        f"generation.stop={json.dumps(stop)}",
    ]
    template = str(Path(offline_grpo.__file__).parent / "model" / "smollm2_tools.jinja") if arguments.model else None
    words += [f"model.chat_template={template}"] if template else []
    words += ["train.precision=fp32", "model.device=cpu"] if arguments.small else ["train.precision=bf16"]
    tasks = {
        "environment": ["task=environment", f"task.environment=environment_gpu:{kind}"],
        "agent": ["task=agent", "task.agent=environment_gpu:solve"],
    }
    register()
    configs = {name: typed(composed([*words, *own])) for name, own in tasks.items()}
    with ExitStack() as stack:
        served = Served(model, args, work, CPU_ENV if arguments.small else {})
        stack.callback(served.close)
        server = served.client
        tokenizer = load_tokenizer(str(model), chat_template=template)
        codec = TokenizerCodec(tokenizer, end_ids(generation_config_of(str(model)), tokenizer))
        vocab_size = read_model_config(str(model), "model").get_text_config().vocab_size
        asked: dict[tuple[tuple[int, ...], tuple[int, ...]], SamplingRequest] = {}

        class Client(VllmEngine):
            """Notes what it is asked."""

            async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
                [completion] = await super().ask(request, sampling)
                asked[request.prompt_ids, completion.token_ids] = request
                return [completion]

        client = Client(
            base_url=server.base_url,
            api_key=server.api_key,
            eos_ids=list(codec.end_ids),
            vocab_size=vocab_size,
            batch_size=arguments.problems * arguments.group,
            timeout_s=600,
            max_retries=0,
        )
        stack.callback(client.close)
        generation = configs["environment"].generation
        sampling = SamplingParams(max_new_tokens=generation["max_new_tokens"], stop=tuple(stop))
        played: dict[str, list[RolloutGroup]] = {}
        chains: dict[str, list[list[SamplingRequest]]] = {}
        names = [name + kind for name in tasks for kind in ("", REQUESTS)]
        cpu_s: dict[str, list[float]] = {name: [] for name in names}
        cached: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

        def counted() -> tuple[float, float]:
            """Prompt tokens that the server looked for in its prefix cache, and those that it found."""
            headers = {"Authorization": f"Bearer {server.api_key}"}
            text = httpx.get(f"{server.base_url}/metrics", headers=headers, timeout=60).text
            found = re.findall(r"^vllm:prefix_cache_(queries|hits)_total\S* (\S+)", text, re.MULTILINE)
            numbers = {name: sum(float(value) for own, value in found if own == name) for name in ("queries", "hits")}
            return numbers["queries"], numbers["hits"]

        def arm(name: str) -> Any:
            def run() -> None:
                began, before = time.process_time(), counted()
                if name.endswith(REQUESTS):
                    in_chains(client, chains[name.removesuffix(REQUESTS)], sampling)
                else:
                    draws = [(problem, 1000 * i) for i, problem in enumerate(problems[name])]
                    how = {"group_size": arguments.group}
                    played[name] = sample_in_order(client, task[name], codec, draws, sampling, **how)
                queries, hits = (after - old for after, old in zip(counted(), before, strict=True))
                cpu_s[name].append(time.process_time() - began)
                cached[name].append((queries, hits))

            return run

        task = {name: isolated(build_task(config.task), config, None, stack) for name, config in configs.items()}
        problems = {name: [*own.problems(Split.TRAIN)][: arguments.problems] for name, own in task.items()}
        for name in tasks:
            arm(name)()
            chains[name] = [
                [
                    asked[rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end]]
                    for turn in rollout.turns
                ]
                for group in played[name]
                for rollout in group.rollouts
            ]
        arms = {name: arm(name) for name in names}
        timings = alternate(
            arms, rounds=arguments.rounds, settle=dict.fromkeys(arms, partial(client.post, "/reset_prefix_cache"))
        )
        command = [sys.executable, "-m", "offline_grpo", *words, *tasks["environment"]]
        command += [f"generation.base_url={server.base_url}", f"generation.api_key={server.api_key}"]
        command += [f"train.iterations={arguments.iterations}", f"hydra.run.dir={work}/run"]
        command += ["checkpoint.enabled=false", "logger=[json]"]
        subprocess.run(command, check=True)
    records = records_of(work / "run")[1:]
    iterations = sorted(record["time/iteration_s"] for record in records)
    iteration_s = iterations[len(iterations) // 2]
    rollouts = [rollout for group in played["environment"] for rollout in group.rollouts]
    num_turns = sum(len(rollout.turns) for rollout in rollouts)
    beyond = {name: timings.median_s(name) - timings.median_s(name + REQUESTS) for name in tasks}
    hits = {name: sum(hit for _, hit in own) / sum(asked for asked, _ in own) for name, own in cached.items()}
    measured = {
        "environment_cost_frac": beyond["environment"] / iteration_s,
        "agent_cost_frac": beyond["agent"] / iteration_s,
        "environment_over_requests": timings.ratio("environment", "environment" + REQUESTS),
        "agent_over_requests": timings.ratio("agent", "agent" + REQUESTS),
        "prefix_cache_hit_frac": hits["environment"],
        "prefix_cache_hit_frac_of_requests": hits["environment" + REQUESTS],
        "seconds_per_turn": timings.median_s("environment") / max(len(rollout.turns) for rollout in rollouts),
        "iteration_s": iteration_s,
        "turns_per_episode": num_turns / len(rollouts),
        "calls_per_episode": sum(rollout.score.measured["calls"] for rollout in rollouts) / len(rollouts),
        "tokens_per_turn": sum(map(tokens_of, played["environment"])) / num_turns,
        "own_cpu_ms_per_turn": 1000 * (min(cpu_s["environment"]) - min(cpu_s["environment" + REQUESTS])) / num_turns,
    }
    write_result(
        arguments.out,
        claim="Dialogues, environments in processes, and the proxy cost at most 5% of an iteration of 256 episodes",
        targets=[Target("environment_cost_frac", "<=", 0.05), Target("agent_cost_frac", "<=", 0.05)],
        settings={key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={
            "timings": timings.summary("environment" + REQUESTS),
            "cpu_s": cpu_s,
            "cached": cached,
            "run": [{key: record[key] for key in record if key.startswith("time/")} for record in records],
        },
    )


if __name__ == "__main__":
    main()
