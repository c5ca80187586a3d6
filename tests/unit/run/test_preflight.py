"""Bad input: each is refused before a model is loaded, in one message that names key, value and fix, and leaves nothing
behind.
"""

import pytest
from factories import compose_config
from recorded import write_store

from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.run import app, assemble
from offline_grpo.run.config import typed
from offline_grpo.run.describe import describe_batches, describe_staleness, describe_warmup
from offline_grpo.run.engine_spec import check_overrides
from offline_grpo.run.preflight import make_plan

OWN = "generation=vllm_server"
FOUND = "generation=vllm_server generation.base_url=http://127.0.0.1:1"
IN_PROCESS = "offline_grpo.generation.transformers_client.TransformersClient"
TWO = "placement.num_engines=2"
LISTED = "generation=vllm_server weight_sync=reload generation.base_url=[http://127.0.0.1:1,http://127.0.0.1:2]"
REFUSED = {
    "placement.num_engines=0": r"placement.num_engines=0: must be at least 1",
    TWO: r"placement.num_engines=2: generation samples in this process, so this would do nothing; leave it at 1",
    f"{OWN} {TWO}": r"placement.num_engines=2: serves one engine: .* another weight_sync than shared_vllm",
    "model/lora=default model.ref_device=cpu": r"model.ref_device=cpu: under LoRA the reference is the trained model .*; leave it null",
    f"{OWN} {TWO} weight_sync=reload engine.port=65535": r"engine.port=65535: placement.num_engines=2 takes as many .* use 65534 or less",
    f"{FOUND} {TWO} weight_sync=reload": r"placement.num_engines=2: the servers at generation.base_url=http://127.0.0.1:1 run already",
    f"{LISTED} placement.num_engines=3": r"placement.num_engines=3: the servers at generation.base_url=\[.*:1,.*:2\] run already",
    f"{LISTED} weight_sync=shared_vllm": r"generation.base_url=\[http://127.0.0.1:1,.*\]: serves one engine",
    f"{OWN} generation.base_url=[]": r"generation.base_url=\[\]: names no server; null starts one",
    f"{OWN} generation.base_url=[http://a:1,http://a:1/v1/]": r"generation.base_url=\[http://a:1,http://a:1/v1/\]: names a server twice",
    f"{OWN} generation.base_url=[http://a:1,b]": r"generation.base_url=b: must begin with http://",
    f"{OWN} rollouts=atropos weight_sync=reload {TWO}": r"placement.num_engines=2: environments are told one server; leave it at 1",
    f"{LISTED} rollouts=atropos": r"generation.base_url=\[.*\]: environments are told one server; name one",
    "data.rollouts_per_problem=1": r"data.rollouts_per_problem=1: .*a group of one has no signal, use 2 or more",
    "generation.top_p=0.9": r"generation.top_p=0.9: .*set generation.top_p=1, or .*allow_truncated_sampling=true",
    "generation.top_k=50": r"generation.top_k=50: .*set generation.top_k=0",
    "generation.repetition_penalty=1.1": r"generation.repetition_penalty=1.1: .*set generation.repetition_penalty=1",
    "generation.temperature=0 eval.temperature=1": r"generation.temperature=0: .*above 0",
    "generation.temperature=-1": r"generation.temperature=-1: must be 0 \(greedy\) or more",
    "generation.max_new_tokens=0 eval.max_new_tokens=8": r"generation.max_new_tokens=0: must be at least 1",
    "eval.max_new_tokens=0": r"eval.max_new_tokens=0: must be at least 1",
    "generation.max_new_tokens=many eval.max_new_tokens=8": r"generation.max_new_tokens='many': expected int, got str",
    "generation.max_new_tokens=512": r"generation.max_new_tokens=512: leaves no room for a prompt in the context of .*=512",
    "generation.max_new_tokens=508": r"generation.max_new_tokens=508: .*longest prompt of 7 tokens .*context of 512; use .*=505 or less",
    "generation._target_=offline_grpo.generation.Nothing": r"generation._target_=.*cannot be imported",
    "+generation.speed=3": r"generation.speed=3: TransformersClient has no such setting; it has batch_size",
    "train.loss.clip_low=fast": r"train.loss.clip_low='fast': expected float",
    "+train.loss.clipp=1": r"train.loss.clipp=1: GRPO has no such setting",
    "train.loss.ratio_reference=rollout": r"train.loss.importance_correction is .*; set it to none: .*train.loss.ratio_reference=rollout",
    "train.lr=0": r"train.lr=0.0: must be above 0",
    "train.lr=-1e-3": r"train.lr=-0.001: must be above 0",
    "train.schedule=sine": r"train.schedule=sine: must be one of constant, linear, cosine",
    "train.precision=fp8": r"train.precision=fp8: must be one of fp32, bf16, fp16",
    "train.batch_size=null": r"train.batch_size=None: set exactly one of train.batch_size .* and train.tokens_per_microbatch",
    "train.grad_accum_steps=2": r"train.grad_accum_steps=2: set exactly one of train.grad_accum_steps and train.updates_per_iteration",
    "train.iterations=0": r"train.iterations=0: must be at least 1",
    "eval.ks=[10]": r"eval.ks=\[10\]: pass@10 needs at least 10 replicates and eval.replicates=4",
    "eval.do_sample=false": r"eval.replicates=4: greedy decoding .* use eval.replicates=1",
    "eval.num_ids=100000": r"eval.num_ids=100000: asks for problem 99999 and the task has",
    "eval.ids=[0,-3]": r"eval.ids=\[0, -3\]: asks for problem -3 and",
    "eval.ids=[3,1,3]": r"eval.ids=\[3, 1, 3\]: names problem 3 more than once",
    "eval.ks=[0]": r"eval.ks=\[0\]: name at least one k, and none below 1",
    "eval.bootstrap_samples=100001": r"eval.bootstrap_samples=100001: must be at most 100000",
    "generation.temperature=inf": r"generation.temperature=inf: must be a finite number",
    "train.kl_coef=inf": r"train.kl_coef=inf: must be a finite number",
    "train.weight_decay=inf": r"train.weight_decay=inf: must be a finite number",
    "train.stop_when.threshold=nan": r"train.stop_when.threshold=nan: must be a finite number",
    "train.grad_clip=nan": r"train.grad_clip=nan: must be above 0; use inf",
    "data.num_train_seeds=1000000": r"data.num_train_seeds=1000000: asks for",
    "checkpoint.keep_last_k=0": r"checkpoint.keep_last_k=0: must be at least 1",
    "model.device=mps": r"^model.device=mps: models run on CPUs and CUDA devices only; use auto, cpu, cuda or cuda:N",
    "model.device=meta": r"^model.device=meta: models run on CPUs and CUDA devices only; use auto, cpu, cuda or cuda:N",
    "model.device=cuda:7": r"model.device=cuda:7: this machine has (no CUDA device; use model.device=cpu|\d CUDA devices?; use cuda:0)",
    "model.device=tpu0": r"model.device=tpu0: no device of that name",
    "model.layout=tight": r"model.layout=tight: must be one of auto, .*, flash4; a layout of your own is .* model/layout=tight",
    "model.layout=varlen model.device=cpu": r"model.layout=varlen: needs a CUDA device .* cpu and float32; use model.layout=auto",
    "+model.layout._target_=offline_grpo.loss.grpo.Nothing": r"model.layout._target_=.*cannot be imported",
    "model.head._target_=torch.nn.Identity": r"model.head._target_=torch.nn.Identity: does not implement LossHead",
    "model.head.tile_width=0": r"model.head.tile_width=0: must be at least 1, or null",
    "train.optimizer._target_=torch.nn.Identity": r"train.optimizer._target_=torch.nn.Identity: does not implement OptimizerFactory",
    f"model.train_id={__file__}": r"model.train_id=.*test_preflight.py: is a file; give the folder of a model",
    "model.train_id=/no/such/model": r"model.train_id=/no/such/model: no such folder",
    "task.max_operand=0": r"task.max_operand=0: must be",
    "task=gsm8k task.path=/no/file.jsonl": r"task.path=.*no/file.jsonl",
    "resume=/no/such/run": r"resume=/no/such/run: no checkpoint there",
    f"{FOUND} weight_sync=restart": r"generation.base_url=http://127.0.0.1:1: weight_sync=restart starts .*; set generation.base_url=null",
    f"{FOUND} weight_sync=lora_restart model/lora=default": r"generation.base_url=http://127.0.0.1:1: weight_sync=lora_restart starts",
    f"{OWN} weight_sync=lora_hotswap model/lora=default model.lora.r=32": r"weight_sync.server_args.max_lora_rank=16: the adap",
    f"{FOUND} weight_sync=ipc model.device=cpu": r"model.device=cpu: weight_sync=ipc moves weights from GPU to GPU",
    "eval.weight_sync=reload": r"eval.weight_sync=reload: must be null \(push the policy\) or none \(send no weights\)",
    "eval.weight_sync=none": r"eval.weight_sync=none: applies only to a separate evaluation server",
    f"{FOUND} weight_sync=reload eval.base_url=http://127.0.0.1:1 eval.weight_sync=none": r"eval.weight_sync=none: applies only",
    "weight_sync=none": r"weight_sync=none: is for a vLLM or SGLang server; use another generation",
    "generation.batch_size=0": r"generation.batch_size=0: must be at least 1",
    f"{OWN} generation.timeout_s=0": r"generation.timeout_s=0.*: must be above 0",
    f"{OWN} generation.max_retries=-1": r"generation.max_retries=-1: must be 0 or more",
    "generation.stop=['']": r"generation.stop=\[''\]: an empty string is in every text",
    "eval.stop=['']": r"eval.stop=\[''\]: an empty string is in every text",
    f"eval.backend={{_target_:{IN_PROCESS},batch_size:0}}": r"eval.backend.batch_size=0: must be",
    "logger.console.refresh_per_s=0": r"logger.console.refresh_per_s=0: must be above 0",
}


@pytest.fixture
def output_dir(tmp_path):
    path = tmp_path / "outputs" / "2026-01-01" / "00-00-00-000000"
    (path / ".hydra").mkdir(parents=True)
    return path


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_input_is_refused_and_leaves_nothing(overrides, output_dir, tmp_path, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(assemble, "load_policy", no_model)
    with pytest.raises(ConfigError, match=REFUSED[overrides]) as caught:
        app.run(
            compose_config(f"cache_dir={tmp_path}/cache", "model.tiny.warm_start_steps=1", *overrides.split()),
            output_dir,
        )
    assert "\n" not in str(caught.value)
    assert list((tmp_path).glob("outputs/*")) == []


@pytest.mark.parametrize("start", [FOUND, ""])
@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("engine=sglang", "engine=sglang"),
        ("engine.port=8000", "engine.port=8000"),
        ("+engine.args.tensor_parallel_size=2", "engine.args.tensor_parallel_size=2"),
        ("placement.engine_devices=[1]", r"placement.engine_devices=\[1\]"),
        ("+weight_sync.server_args.seed=1", "weight_sync.server_args.seed=1"),
    ],
)
def test_what_only_an_own_server_listens_to(start, override, shown):
    plan = make_plan(typed(compose_config(*start.split())))
    where = "the server at generation.base_url=http://127.0.0.1:1 runs already" if start else "the run starts no server"
    with pytest.raises(
        ConfigError, match=rf"^{shown}: {where}, so this would do nothing; leave it out, or .*base_url=null\)$"
    ):
        check_overrides([*start.split(), override], plan.engine)
    check_overrides(
        [*start.split(), "engine_like.key=1", "placement.check_memory=false", "weight_sync=reload"], plan.engine
    )


def test_a_server_of_the_runs_own_listens():
    plan = make_plan(typed(compose_config(OWN)))
    check_overrides(
        [OWN, "engine.port=8000", "placement.engine_devices=[1]", "weight_sync.server_args.seed=1"], plan.engine
    )


def test_the_command_line_is_looked_at(output_dir):
    """Files are not: a preset for runs that start a server may be used with one that was found."""
    with pytest.raises(ConfigError, match=r"^engine.port=8000: the server at"):
        app.run(compose_config(*FOUND.split(), "engine.port=8000"), output_dir, ["engine.port=8000"])
    with pytest.raises(EngineError, match="no healthy server answers"):
        app.run(
            compose_config(*FOUND.split(), "weight_sync=reload", "engine.port=8000", "model.train_id=/no/such"),
            output_dir,
        )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", None),
        ("generation=vllm_server weight_sync=restart", None),
        (
            "generation=vllm_server weight_sync=restart weight_sync.interval=3",
            "weight_sync.interval=3: rollouts may be sampled with weights up to 2 iterations old, and the clip does not limit that",
        ),
        (
            "generation=vllm_server weight_sync=restart weight_sync.interval=3 train.loss.ratio_reference=rollout "
            "train.loss.importance_correction=none",
            None,
        ),
    ],
)
def test_staleness_that_nothing_clips_is_told(overrides, expected):
    told = describe_staleness(make_plan(typed(compose_config(*overrides.split()))))
    assert told is None if expected is None else told.startswith(expected)


SERVED = "generation=vllm_server weight_sync"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{SERVED}=shared_vllm", r"weight_sync=shared_vllm: .* use weight_sync=nccl .*, ipc .* or reload"),
        ("train.precision=fp16", "train.precision=fp16: .* use bf16 or fp32"),
        ("train/optimizer=adafactor", "train.optimizer=.*Adafactor: .* use train/optimizer=adamw"),
        ("train.optimizer.offload=true", "train.optimizer=.*AdamW: .* train.optimizer.offload=false"),
        (f"{SERVED}=reload eval.top_k=5 eval.do_sample=true", "train.sharding=fsdp2: .* leave them out"),
    ],
)
def test_what_needs_whole_weights_is_refused_where_they_are_spread(override, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(typed(compose_config("train.sharding=fsdp2", *override.split())))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            "",
            (
                "each iteration: 32 problems x 8 rollouts = 256 sequences, 25,600 in all",
                "1 update of about 256 sequences",
            ),
        ),
        ("rollouts=replay", ("each iteration: all groups of a recorded one", "1 update")),
        (
            "rollouts=replay rollouts.problems_per_iteration=6 train.updates_per_iteration=2 train.epochs=3",
            ("each iteration: 6 recorded groups", "6 updates"),
        ),
        (
            "rollouts=replay train.updates_per_iteration=null train.grad_accum_steps=2 train.batch_size=16",
            ("each iteration: all groups of a recorded one", "updates of 32 sequences"),
        ),
    ],
)
def test_the_batches_of_an_iteration_are_told(overrides, told, tmp_path):
    words = overrides.split()
    if words:
        words.append(f"rollouts.path={write_store(tmp_path / 'store', iterations=1)}")
    batch_size = 16 if "train.batch_size=16" in words else 256
    lines = describe_batches(make_plan(typed(compose_config(*words))))
    assert lines == (told[0], f"{told[1]}, in microbatches of up to {batch_size} sequences")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train.iterations=1", None),
        ("train.iterations=4 train.warmup_steps=3", None),
        (
            "train.iterations=4 train.warmup_steps=4 train.lr=1e-3",
            "=4: the run makes 4 updates, so the learning rate still rises at their end, to 0.001",
        ),
        (
            "train.iterations=1 train.warmup_steps=100 train.lr=1e-3",
            "=100: the run makes 1 update, so the learning rate still rises at their end, to 1e-05",
        ),
    ],
)
def test_a_warmup_that_outlasts_the_run_is_told(words, told):
    said = describe_warmup(typed(compose_config(*words.split())))
    assert said is None if told is None else said == f"train.warmup_steps{told}"
