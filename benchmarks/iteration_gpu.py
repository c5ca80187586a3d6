"""Whole iterations on one GPU, sampling by vLLM on the same card: run_grpo.py against TRL's GRPOTrainer with vLLM in
its process.

    # Qwen3-0.6B's shape: about 20 minutes, half of them starts of vLLM
    python benchmarks/iteration_gpu.py WORK
    python benchmarks/iteration_gpu.py WORK --arms ours     # seconds of our phases alone
    python benchmarks/iteration_gpu.py WORK --shape qwen2_5_vl_3b --prompts 64     # with a picture in each prompt
    python benchmarks/iteration_gpu.py WORK --shape qwen2_5_vl_3b --arms ours -- task.image_field=null    # without it
    python benchmarks/iteration_gpu.py WORK --small         # a tiny model on the CPU, without TRL's vLLM

32 prompts x 8 completions x 512 tokens an iteration, one update of all 256, bf16, the same random model, prompts,
reward, loss, optimizer and learning rate. Random weights hardly ever draw the end of a sequence, so both arms make the
same number of tokens; the script compares that, and the ids of the prompts, before it compares times. Each arm runs in
its own process, as its users start it, one after the other and --rounds times in turn, or at the same time with --gpus
0 1, which gives each a card of its own. Times are medians over the iterations of all rounds but the first two of each.

    ours    run_grpo.py with weight_sync=shared_vllm: fp32 masters, weights shared with the server
    lora    the same with weight_sync=lora_hotswap and adapters of rank 16 on all linear layers
    distill the same as ours with train/advantage=distill and a teacher of the policy's size in the trainer's process
    trl     vllm_mode=colocate with bf16 weights and optimizer, without recomputation, in microbatches of --trl-batch
            sequences
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Target, environment, make_model, parser_of, print_ends, records_of, run_command, write_result
from random_model import sevens

from offline_grpo.engine.http import choose_port

OURS = {
    "ours": ["weight_sync=shared_vllm"],
    "lora": ["weight_sync=lora_hotswap", "model/lora=default"],
    "distill": ["weight_sync=shared_vllm", "train/advantage=distill", "train.advantage.teacher={work}/model"],
}
"""Our arms, and the overrides that tell one from the others."""
ARMS = (*OURS, "trl")
WARMUP = 2
STORED = {"iteration": "*.parquet", "picture": "images/*"}
"""Files in a run's rollouts; the rollouts of a prompt share its picture."""
PROMPTS, GROUP, TOKENS = 32, 8, 512
LR = 1e-5


def our_command(work: Path, args: argparse.Namespace, arm: str, words: Sequence[str]) -> list[str]:
    on_gpu = ("train.precision=bf16", "train.tokens_per_microbatch=16384", "engine.args.max_model_len=1024")
    on_gpu += (f"engine.args.gpu_memory_utilization={args.share}",)
    on_cpu = ("train.precision=fp32", "train.tokens_per_microbatch=2048", "model.device=cpu")
    on_cpu += ("engine.args.enforce_eager=true", "engine.args.gpu_memory_utilization=0.1")
    own = ("generation=vllm_server", "data.shuffle=false", f"train.lr={LR}", *(on_cpu if args.small else on_gpu))
    return [sys.executable, *run_command(work, args, work / arm, *own, *words)]


def our_result(folders: Sequence[Path]) -> dict[str, Any]:
    """What the metrics of the runs say."""
    records = [record for folder in folders for record in records_of(folder)[WARMUP:]]
    phases = sorted(
        {key for record in records for key in record if key.startswith("time/") and not key.startswith("time/start")}
    )
    stored = {
        of: [each.stat().st_size for each in folders[0].glob(f"rollouts/{files}")] for of, files in STORED.items()
    }
    return {
        "seconds": [record["time/iteration_s"] for record in records],
        "tokens": [record["num_completion_tokens"] for record in records],
        "phases_s": {key: statistics.median(record.get(key, 0.0) for record in records) for key in phases},
        "card_gb": max(record.get("perf/gpu_memory_card_gb", 0.0) for record in records),
        "mismatch_nats": statistics.median(record["alignment/diff_abs_mean"] for record in records),
        "stored_bytes": {of: sum(sizes) / max(1, len(sizes)) for of, sizes in stored.items()},
    }


def train_with_trl(work: Path, args: argparse.Namespace) -> None:
    """The other arm, in this process; writes trl.json where it was started."""
    import torch
    from transformers import TrainerCallback
    from trl_arm import IN_PROCESS, MethodTimes, make_trainer, opened, reader_of, with_pictures

    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if len(ended) > WARMUP:  # what was complete counts
                Path("trl.json").write_text(json.dumps(result()))

    def reward(completions: Any, **_: Any) -> list[float | None]:
        return [sevens(completion[0]["content"]) for completion in completions]

    on_gpu = {**IN_PROCESS, "vllm_gpu_memory_utilization": float(args.share), "vllm_max_model_length": 1024}
    on_gpu |= {"model_init_kwargs": {"dtype": "bfloat16"}}
    problems = [json.loads(line) for line in (work / "problems.jsonl").read_text().splitlines()]
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": each["prompt"]}]} for each in problems]
    for row, problem in zip(rows, problems, strict=True):
        row |= {"images": opened(problem["images"], work)} if "images" in problem else {}
    tokenizer = reader_of(str(work / "model"), rows)
    if "images" in rows[0]:  # it would sample tokens that stand for pictures, for which its training has no picture
        on_gpu["generation_kwargs"] = {"logit_bias": dict.fromkeys(stand_ins_of(work / "model"), -100.0)}
    trainer = make_trainer(
        str(work / "model"),
        tokenizer,
        rows,
        reward,
        [Clock()],
        per_device_train_batch_size=args.trl_batch,
        gradient_accumulation_steps=args.prompts * GROUP // args.trl_batch,
        num_generations=GROUP,
        max_completion_length=args.tokens,
        learning_rate=LR,
        logging_steps=1,
        max_steps=args.iterations,
        **({} if args.small else on_gpu),
    )
    times = MethodTimes(trainer, ("_generate", "compute_loss"))
    prompts = trainer._tokenize_prompts([with_pictures(row) for row in rows[: args.prompts]])[0]

    def result() -> dict[str, Any]:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        rows_logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
        return {
            "seconds": [b - a for a, b in pairwise(ended)][WARMUP - 1 :],
            "tokens": [row["completions/mean_length"] * args.prompts * GROUP for row in rows_logged][WARMUP:],
            "phases_s": {"generate": statistics.median(times.seconds["_generate"][WARMUP:])},
            "card_gb": (total - free) / 1e9,  # by all processes
            "prompts": prompts,
            "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        }

    trainer.train()


def stand_ins_of(model: Path) -> Sequence[int]:
    from transformers import AutoConfig

    from offline_grpo.model.pictures import vision_of

    vision = vision_of(str(model), AutoConfig.from_pretrained(model))
    return () if vision is None else vision.stand_ins


def check_same_work(work: Path, found: Mapping[str, Mapping[str, Any]], *, tolerance: float) -> None:
    """Raise AssertionError if the arms had other prompts, or made other numbers of tokens."""
    from transformers import AutoConfig, AutoTokenizer

    from offline_grpo.model.pictures import vision_of
    from offline_grpo.model.text import TokenizerCodec
    from offline_grpo.types import Picture

    model = str(work / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    codec = TokenizerCodec(tokenizer, vision=vision_of(model, AutoConfig.from_pretrained(model)))
    problems = [json.loads(line) for line in (work / "problems.jsonl").read_text().splitlines()]
    own = []
    for problem in problems[: len(found["trl"]["prompts"])]:
        pictures = [Picture((work / problem["images"]).read_bytes())] if "images" in problem else []
        parts = [{"type": "image"}, {"type": "text", "text": problem["prompt"]}]
        content = parts if pictures else problem["prompt"]
        own.append(codec.encode_with([{"role": "user", "content": content}], pictures).ids)
    assert own == found["trl"]["prompts"], "TRL's prompts have other token ids than ours"
    tokens = {arm: statistics.median(result["tokens"]) for arm, result in found.items()}
    assert max(tokens.values()) / min(tokens.values()) - 1 < tolerance, (
        f"the arms make different numbers of tokens: {tokens}"
    )


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "iteration_gpu")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--shape", default="0.6b", help="of the model, a name of shapes.py")
    parser.add_argument("--rounds", type=int, default=1, help="of all arms, in turn")
    parser.add_argument("--gpus", nargs="+", default=None, help="the card of each arm, which then run at the same time")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--share", default="0.35", help="of the card's memory, for vLLM")
    parser.add_argument("--trl-batch", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--inside-trl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.small:
        args.prompts, args.tokens, args.trl_batch = 2, 16, 16
    return args


def main() -> None:
    args = parse()
    work = args.work.resolve()
    if args.inside_trl:
        train_with_trl(work, args)
        return
    make_model(work, args.shape, small=args.small)
    trl = [sys.executable, str(Path(__file__).resolve()), str(work), "--inside-trl", *sys.argv[2:]]
    folders = {arm: [work / f"{arm}_{number}" for number in range(args.rounds)] for arm in args.arms}
    failed = []
    for number in range(args.rounds):
        processes = {}
        for i, arm in enumerate(args.arms):
            env = environment(MASTER_PORT=str(choose_port("127.0.0.1", None, key="MASTER_PORT")))  # TRL opens it
            env |= {"CUDA_VISIBLE_DEVICES": args.gpus[i]} if args.gpus else {}
            folder = folders[arm][number]
            folder.mkdir(exist_ok=True)
            words = [word.format(work=work) for word in OURS.get(arm, ())]
            command = our_command(work, args, folder.name, words) if arm in OURS else trl
            with (work / f"{folder.name}.log").open("w") as log:
                processes[folder.name] = subprocess.Popen(
                    command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder
                )
            if not args.gpus:
                processes[folder.name].wait()
        failed += [name for name, process in processes.items() if process.wait() != 0]
    print_ends(work, failed)
    found = {
        arm: our_result(own) for arm, own in folders.items() if any(len(records_of(each)) > WARMUP for each in own)
    }
    if results := [json.loads(path.read_text()) for path in sorted(work.glob("trl_*/trl.json"))]:
        found["trl"] = results[0] | {
            key: [each for own in results for each in own[key]] for key in ("seconds", "tokens")
        }
    if not found:
        sys.exit(1)
    measured = {f"{arm}_s": statistics.median(result["seconds"]) for arm, result in found.items()}
    targets = [Target(f"{arm}_s", "<=", 6.5) for arm in OURS if arm in found and args.shape == "0.6b"]
    for arm in OURS.keys() & found.keys():
        measured[f"{arm}_mismatch_nats"] = found[arm]["mismatch_nats"]
        measured |= {f"{arm}_bytes_per_{of}": size for of, size in found[arm]["stored_bytes"].items() if size}
    if "distill" in found:
        measured["teacher_share"] = found["distill"]["phases_s"]["time/teacher_s"] / measured["distill_s"]
        targets.append(Target("teacher_share", "<=", 0.15))
    if {"ours", "lora"} <= found.keys():
        phases, full = found["lora"]["phases_s"], found["ours"]["phases_s"]
        measured["lora_train_vs_full"] = phases["time/train_s"] / full["time/train_s"]
        measured["lora_push_s"] = phases["time/sync_push_s"]
        targets += [Target("lora_train_vs_full", "<=", 1.0), Target("lora_push_s", "<=", 0.15)]
    if "trl" in found:
        check_same_work(work, found, tolerance=0.5 if args.small else 0.02)  # with a vocabulary of 100, some end
        measured |= {f"{arm}_vs_trl": measured[f"{arm}_s"] / measured["trl_s"] for arm in OURS if arm in found}
        targets += [Target("ours_vs_trl", "<=", 0.5)] if "ours" in found else []  # TRL's arm trains all weights too
    for arm, result in found.items():
        measured[f"{arm}_tokens_per_s"] = statistics.median(result["tokens"]) / measured[f"{arm}_s"]
    write_result(
        args.out,
        claim=f"A whole iteration on one GPU: {args.prompts * GROUP} completions of {args.tokens} tokens, shape "
        f"{args.shape}, at most half of the time of TRL with vLLM",
        targets=targets,
        settings=args,
        measured=measured,
        details={arm: {key: own for key, own in result.items() if key != "prompts"} for arm, result in found.items()},
    )
    if failed:
        sys.exit(f"of {', '.join(failed)} the iterations that were complete are in the result")


if __name__ == "__main__":
    main()
