"""Bad input: each is refused before a model is loaded, in one message that names key, value and fix, and leaves nothing
behind.
"""

import os
import re
from types import SimpleNamespace

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import check_settings, make_plan, warnings
from offline_grpo.config.problems import held_out_problems, train_problems
from offline_grpo.engine import spawn
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.model import load
from offline_grpo.run import train
from offline_grpo.types import Problem

OWN = "generation=vllm_server"
NF4 = "model/lora=default model.quantization=nf4"
FP8 = "+engine.args.quantization=fp8"
FOUND = "generation=vllm_server generation.base_url=http://127.0.0.1:1"
IN_PROCESS = "offline_grpo.generation.transformers_client.TransformersClient"
TWO = "placement.num_engines=2"
TAUGHT_BY = "train/advantage=distill train.advantage.teacher="
LISTED = "generation=vllm_server weight_sync=reload generation.base_url=[http://127.0.0.1:1,http://127.0.0.1:2]"
SGLANG = "generation=sglang_server weight_sync=reload weight_sync.pause_mode=abort"
REFUSED = {
    f"{OWN} {TWO}": "placement.num_engines=2: serves one engine",
    "model/lora=default model.ref_device=cpu": "model.ref_device=cpu",
    f"{LISTED} weight_sync=shared_vllm": "generation.base_url=[http://127.0.0.1:1,http://127.0.0.1:2]: serves one",
    f"{OWN} generation.base_url=[http://a:1,http://a:1/v1/]": "generation.base_url=[http://a:1,http://a:1/v1/]",
    f"{OWN} generation.base_url=[http://a:1,b]": "generation.base_url=b",
    "generation.repetition_penalty=1.1": "generation.repetition_penalty=1.1: training on samples with a penalty",
    f"{SGLANG} generation.min_p=0.1": "generation.min_p=0.1: SGLang does not tell what filters left",
    "rollouts=atropos generation.top_p=0.9 eval.enabled=false": "generation.top_p=0.9: environments sample",
    "model=tiny_moe train.updates_per_iteration=1": "model.router_replay=old: a single update chooses the experts",
    "model=tiny_moe model.tiny.num_experts=1": "model.tiny.num_experts_per_token=2: must be at most model.tiny.num_exp",
    "model.router_replay=rollout": "model.router_replay=rollout: the sampler of this process does not tell",
    f"{SGLANG} model.router_replay=rollout": "model.router_replay=rollout: SGLang does not tell",
    "rollouts=atropos model.router_replay=rollout eval.enabled=false": "model.router_replay=rollout: environments do",
    "model.router_replay=new": "model.router_replay=new: must be one of none, old, rollout",
    "generation.top_k=1": "generation.top_k=1: greedy completions",
    f"{TAUGHT_BY}http://a:1 generation.top_p=0.9": "generation.top_p=0.9: a server tells logprobs of the whole",
    "generation.min_p=2": "generation.min_p=2: a share",
    "task=mixture +task@task.tasks.a=arithmetic task.tasks.a.assistant_prefix=x": "task.tasks.a.assistant_prefix=x: a",
    "task.assistant_prefix=1": "task.assistant_prefix=1: must be text",
    "model.chat_template=none.jinja": "model.chat_template=none.jinja: no such file",
    "model.chat_template_kwargs={enable_thinking:false}": "model.chat_template_kwargs.enable_thinking=False: the chat",
    "generation.temperature=0 eval.temperature=1": "generation.temperature=0",
    "generation.max_new_tokens=512": "generation.max_new_tokens=512: leaves no room",
    "generation.max_new_tokens=508": "generation.max_new_tokens=508: with the longest prompt of 7",
    "train.loss.ratio_reference=rollout": "train.loss.importance_correction",
    "train.sharding=fsdp2 train.precision=fp16": "train.precision=fp16",
    "checkpoint.keep_best=pass@9": "checkpoint.keep_best=pass@9",
    "eval.num_ids=100000": "eval.num_ids=100000",
    "eval.ids=[3,1,3]": "eval.ids=[3, 1, 3]: names a problem more than once",
    "train.stop_when.threshold=nan": "train.stop_when.threshold=nan",
    "model.layout=varlen model.device=cpu": "model.layout=varlen",
    "model.train_id=/no/such/model": "model.train_id=/no/such/model",
    f"{FOUND} weight_sync=restart": "generation.base_url=http://127.0.0.1:1: weight_sync=restart starts",
    f"{OWN} weight_sync=lora_hotswap model/lora=default model.lora.r=32": "weight_sync.server_args.max_lora_rank=16",
    f"{OWN} weight_sync=reload model/lora=default": "weight_sync=reload: moves all weights",
    f"{OWN} weight_sync=restart mode=async": "rollouts.in_flight=keep: weight_sync=restart sends no weights",
    f"{FOUND} generation.batch_invariant=true": "generation.batch_invariant=true: the run cannot see",
    f"{OWN} weight_sync=reload mode=async generation.batch_invariant=true": "generation.batch_invariant=true: which",
    f"{OWN} model.device=cpu generation.batch_invariant=true": "generation.batch_invariant=true: vLLM can do so on",
    "generation=sglang_server weight_sync=reload": "weight_sync.pause_mode=keep: SGLang loads weights only",
    f"{OWN} weight_sync=shared_vllm {FP8}": "engine.args.quantization=fp8: weight_sync=shared_vllm",
    f"{OWN} weight_sync=reload {FP8} train.loss.importance_correction=none": "train.loss.importance_correction=none: ",
    "model.quantization=nf4": "model.quantization=nf4: quantised weights cannot be trained",
    f"{NF4} train.sharding=fsdp2": "model.quantization=nf4: train.sharding=fsdp2",
    f"{NF4} {OWN} weight_sync=lora_hotswap": "train.precision=fp32: a vLLM server",
    f"{NF4} {OWN} weight_sync=lora_hotswap weight_sync.share_base=true train.precision=bf16": "model.quantization=nf4",
    f"{NF4} {OWN} weight_sync=lora_hotswap train.precision=bf16": "engine.args.quantization=bitsandbytes: this vLLM",
    "weight_sync=none": "weight_sync=none",
    "train/advantage=distill": "train.advantage.teacher=null: name a model",
    f"{TAUGHT_BY}/no/model": "train.advantage.teacher=/no/model: no such folder",
    f"{TAUGHT_BY}http://a:1 generation.temperature=2": "generation.temperature=2: a server",
    f"{OWN} generation.timeout_s=0 eval.timeout_s=1": "generation.timeout_s=0",
    f"eval.backend={{_target_:{IN_PROCESS},batch_size:0}}": "eval.backend.batch_size=0",
    "eval.backend=pigeon": "eval.backend=pigeon: ",
    "eval.backend=vllm_server": "eval.backend=vllm_server: training samples from elsewhere",
    "eval.base_url=http://127.0.0.1:1": "eval.base_url=http://127.0.0.1:1: name the kind of server too",
    "eval.backend={_target_:builtins.dict}": "eval.backend._target_=builtins.dict: is no RolloutClient",
    f"{OWN} weight_sync=shared_vllm train.sharding=fsdp2": "weight_sync=shared_vllm: the server shares whole",
    "train.sharding=fsdp2 train.optimizer.offload=true": "train.optimizer=",
    "train/advantage=gdpo train.advantage.weights={correct:2,none:1}": "train.advantage.weights={'correct': 2, 'none'",
    "placement.trainer=ray": "placement.trainer=ray: add placement=ray",
    "placement.num_trainers=2": "placement.num_trainers=2: at least 1, and more with placement.trainer=ray alone",
    f"{OWN} +placement.ray_init.num_cpus=2": "placement.ray_init={'num_cpus': 2}: acts with placement=ray alone",
    f"{OWN} weight_sync=shared_vllm placement=ray": "placement.address=auto: weight_sync=shared_vllm needs a server",
    "placement.score_on_cluster=true": "placement.score_on_cluster=True: acts with placement=ray alone",
    "placement=ray placement.score_on_cluster=true": "placement.score_on_cluster=true: this task's scores are",
}
"""Overrides -> how the refusal begins."""


@pytest.fixture
def output_dir(tmp_path):
    path = tmp_path / "outputs" / "2026-01-01" / "00-00-00-000000"
    (path / ".hydra").mkdir(parents=True)
    return path


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_input_is_refused_and_leaves_nothing(overrides, output_dir, tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(load, "load_policy", no_model)
    with pytest.raises(ConfigError) as caught:
        train(
            compose_config(f"cache_dir={tmp_path}/cache", "model.tiny.warm_start_steps=1", *overrides.split()),
            output_dir,
        )
    assert str(caught.value).startswith(REFUSED[overrides])
    assert "\n" not in str(caught.value)
    assert list((tmp_path).glob("outputs/*")) == []


@pytest.mark.parametrize("start", [FOUND, ""])
def test_what_only_an_own_server_obeys(start, output_dir, tmp_path):
    """On the command line. Files are not looked at: a preset for runs that start a server may be used with another."""
    words = ["engine=sglang", "+engine.args.tensor_parallel_size=2", "placement.engine_devices=[1]"]
    others = ["engine_like.key=1", "placement.check_memory=false", "weight_sync=reload"]

    cfg = compose_config(*start.split(), "weight_sync=reload" if start else "seed=0")
    plan = make_plan(typed(cfg))
    for word in words:
        with pytest.raises(ConfigError, match=f"^{re.escape(word.lstrip('+'))}: .*would do nothing"):
            check_settings(plan, [*others, word], cfg.rollouts)
    cfg = compose_config(*OWN.split())
    check_settings(make_plan(typed(cfg)), [*words, *others], cfg.rollouts)
    if start:
        of_file = compose_config(*start.split(), "weight_sync=reload", "engine.port=8000", f"model.train_id={tmp_path}")
        with pytest.raises(EngineError, match="no healthy server answers"):
            train(of_file, output_dir)


def test_what_a_run_compiles_is_kept_for_the_next(tmp_path, monkeypatch):
    """By then transformers has named a folder in /tmp."""
    monkeypatch.setattr(spawn, "OF_THE_SHELL", {})
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/user")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/torch's")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torch's")
    with pytest.raises(ConfigError):
        train(compose_config("generation.top_p=2"), tmp_path / "run")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user/offline-grpo/torchinductor"


def test_settings_that_rarely_fit_are_named():
    def told(*overrides):
        return [line.partition(": ")[0] for line in warnings(make_plan(typed(compose_config(*overrides))))]

    stale = ("generation=vllm_server", "weight_sync=restart", "weight_sync.interval=3")
    clipped = ("train.loss.ratio_reference=rollout", "train.loss.importance_correction=none")
    assert told() == told(*stale, *clipped) == []
    assert told(*stale, "train.warmup_steps=500") == ["weight_sync.interval=3", "train.warmup_steps=500"]
    assert told("model=smollm2_135m") == told("model.train_id=.", "generation.max_new_tokens=17") == []
    assert told("model.train_id=.") == ["generation.max_new_tokens=8"]


def test_an_answer_that_is_no_text_is_refused():
    """It would equal no completion: every reward would be 0."""
    config = typed(compose_config("data.num_train_seeds=null", "eval.num_ids=all"))
    for wrong in ("1+1=", Problem("p", ({"role": "user", "content": "1+1="},), 2)):
        task = SimpleNamespace(problems=lambda _, wrong=wrong: [wrong])
        for choose in (train_problems, held_out_problems):
            with pytest.raises(ConfigError, match=r"^task: problems\(\) has "):
                choose(task, config)
