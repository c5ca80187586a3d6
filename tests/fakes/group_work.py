"""What each process of a group does in tests: updates with a part of the model in each process beside the same updates
with the whole model in each; and calls that fail in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from architectures import VOCAB, ZOO
from factories import LOSS, SETTINGS, make_rollout, make_scoring
from torch import Tensor

from offline_grpo.errors import ConfigError, EngineDied, EngineError, GrpoError
from offline_grpo.loss import cispo, dapo, dppo, dr_grpo, grpo, gspo, sapo
from offline_grpo.model.layers import compile_blocks
from offline_grpo.model.layouts import Padded, Tree
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import share_sequences
from offline_grpo.model.scoring import BaseScoring, Scoring, measure_logit_transform
from offline_grpo.model.ulysses import check_shareable
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.advantage import GroupStd
from offline_grpo.train.batch import Passes, build_batch, with_advantages
from offline_grpo.train.fsdp2 import FullyShardedPolicy
from offline_grpo.train.optimizer import AdamW
from offline_grpo.train.schedule import LrSchedule
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater
from offline_grpo.types import TokenBatch

LOSSES = {"cispo": cispo.CISPO, "dapo": dapo.DAPO, "dr_grpo": dr_grpo.DrGRPO, "grpo": grpo.GRPO, "gspo": gspo.GSPO}
LOSSES |= {"dppo": dppo.DPPO, "sapo": sapo.SAPO}
TERMS = {**LOSS, "kl_coef": 0.1, "divergence": "tv", "ratio_cap": 20.0, "tau_pos": 1.0, "tau_neg": 1.05}
LENGTHS = (2, 13, 5, 7, 3, 11, 2)
Result = tuple[dict[str, float], dict[str, Tensor]]


def batch_of(seed: int, *, filtered: bool = False, lengths: Sequence[int] = LENGTHS) -> TokenBatch:
    """Seven sequences of odd lengths; of their tokens, if filtered, every third was the only one left."""
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(8, VOCAB, (length,), generator=draw).tolist()

    rollouts = [make_rollout(ids(3), ids(length)) for length in lengths]
    if filtered:  # token ids below 8 are not drawn
        sets = [((), (), (), *(tuple(range(t % 3)) for t in r.token_ids[3:])) for r in rollouts]
        rollouts = [replace(r, alternatives=own) for r, own in zip(rollouts, sets, strict=True)]
    return with_advantages(build_batch(rollouts), torch.randn(7, generator=draw).tolist())


def train(case: dict[str, Any], ranks: Any, sharding: Any, folder: Path) -> Result:
    """Metrics and weights after four updates."""
    model: Any = ZOO[case["model"]].build(**case.get("changes", {}))
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model  # which takes seconds

        torch.manual_seed(3)
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        )
    if case.get("recompute"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(make_scoring(model, Tree() if case.get("tree") else Padded()), SimpleNamespace())  # type: ignore[arg-type]
    share = case.get("share", 1) if ranks.world_size > 1 else 1  # processes that have a slice of each sequence
    if share > 1:
        share_sequences(policy.scoring, ranks.neighbours(share), policy.device)
    if case.get("compile") and ranks.world_size > 1:  # the other one shows what is right
        compile_blocks(policy.causal_lm)
    sharding.prepare(policy)
    masters = policy.make_masters()
    other = ZOO[case["model"]].build(**{**case.get("changes", {}), "initializer_range": 0.1})
    frozen = make_scoring(other.requires_grad_(False), policy.scoring.layout)
    reference = BaseScoring(policy.scoring) if case.get("lora") else frozen
    sharding.prepare_reference(reference)
    settings = {"lr": 1e-3, "epochs": 2, "updates_per_iteration": 2, "batch_size": 2, "grad_clip": 0.1, "kl_coef": 0.1}
    settings["sequence_parallel"] = share
    loss: Any = LOSSES[case.get("loss", "grpo")]
    terms = {name: value for name, value in TERMS.items() if name in {field.name for field in fields(loss)}}
    # A key's bias has no gradient but rounding, which a smaller eps would turn into steps.
    optimizer = AdamW(lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-5, offload=False)
    passes = Passes(
        policy=policy,
        reference=reference,
        loss=loss(**terms),
        advantage=GroupStd(),
        config=TrainConfig(**{**SETTINGS, **settings}),
        ranks=ranks,
        sharding=sharding,
    )
    updater = Updater(
        passes=passes,
        optimizer=optimizer.create(masters.parameters.values()),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        max_new_tokens=20,
        lr_schedule=LrSchedule(kind="constant", num_updates=4, warmup_steps=0),
        seed=0,
        failure_dir=folder,
    )
    batch = batch_of(1, filtered=case.get("filtered", False), lengths=case.get("lengths", LENGTHS))
    metrics = updater.run(passes.score(batch), iteration=0)
    is_whole = not case.get("lora")
    weights = sharding.lead(
        lambda: {name: t.clone() for name, t in sharding.full_weights(policy) if is_whole or "lora" in name}
    )
    state = updater.state_dict()
    whole = sharding.lead(lambda: sharding.whole(state, folder), state)["optimizer"]["state"]
    means = {
        f"{number}.{name}": tensor
        for number, found in whole.items()
        for name, tensor in found.items()
        if name != "step"
    }
    return metrics, weights | means


def follow(folder: str, cases: list[dict[str, Any]]) -> None:
    """Write how far apart the two are, at most, in each case. The first process alone computes what is right."""
    ranks = Ranks(use_cpu=True)
    alone: Any = SimpleNamespace(
        rank=0,
        world_size=1,
        is_main=True,
        gather=list,
        sum_=lambda _: None,
        broadcast=lambda value: value,
        on_main=lambda act: act(),
    )
    lines = []
    for case in cases:
        sharding = Sharding(ranks) if case.get("whole") else FullyShardedPolicy(ranks)
        found = train(case, ranks, sharding, Path(folder))
        names = ranks.gather([[sorted(part) for part in found]])
        if not ranks.is_main:  # the others wait for it in the next case
            continue
        expected = train(case, alone, Sharding(alone), Path(folder))
        assert names == [[sorted(part) for part in expected]] * ranks.world_size, case
        apart = max(abs(found[0][name] - value) / max(1.0, abs(value)) for name, value in expected[0].items())
        weights = max((found[1][name] - value).abs().max().item() for name, value in expected[1].items())
        lines.append(f"{apart:.3g} {weights:.3g} {case}")
    if ranks.is_main:
        Path(folder, "0.txt").write_text("\n".join(lines))


def one_fails(folder: str) -> None:
    """Write what this process hears when it or the other one fails."""
    ranks = Ranks(use_cpu=True)

    def work(*errors: GrpoError | None) -> list[int]:
        error = errors[ranks.rank]
        if error is not None:
            raise error
        return [ranks.rank * 10, ranks.rank * 10 + 1]

    heard: list[object] = [
        ranks.gather_results(lambda: work(None, None)),
        ranks.gather_interleaved(lambda: work(None, None)),
    ]
    for errors in (
        (None, EngineError("late")),
        (EngineError("early"), EngineDied("gone")),
        (EngineError("first"), EngineError("second")),
    ):
        try:
            heard.append(ranks.gather_results(lambda errors=errors: work(*errors)))
        except EngineError as error:
            heard.append(repr(error))
    Path(folder, str(ranks.rank)).write_text(repr(heard))


def share_all(folder: str, names: Sequence[str]) -> None:
    """Write what is said of each architecture of the zoo whose sequences the processes of the group are to share."""
    ranks = Ranks(use_cpu=True)
    lines = []
    for name in names:
        model = ZOO[name].build()
        try:
            check_shareable(model.config, ranks.world_size, has_pictures=False)
            scoring = Scoring(model, Padded(), TiledHead(tile_width=None), logits=measure_logit_transform(model))
            share_sequences(scoring, ranks.neighbours(ranks.world_size), torch.device("cpu"))
            lines.append(f"{name}: shared")
        except ConfigError as error:
            lines.append(f"{name}: {error}")
    Path(folder, f"{ranks.rank}.txt").write_text("\n".join(lines))
