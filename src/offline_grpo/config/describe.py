"""The lines and warnings about a run's plan before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from offline_grpo.config.plan import Plan
from offline_grpo.config.problems import TaskData

TINY_ANSWER = 16
"""Tokens that hold an answer of the tiny model, and of hardly any other."""


def describe_data(data: TaskData, problems_per_iteration: int) -> list[str]:
    """The problems of a run, and what may be unexpected about them."""
    num_train = None if data.train is None else len(data.train)
    training = "no" if num_train is None else f"{num_train:,}"
    evaluated = f"{len(data.held_out):,} held-out problems" if len(data.held_out) else "no evaluations"
    lines = [f"data: {training} training problems, {evaluated}"]
    if data.num_dropped:
        lines.append(f"left out of training: {data.num_dropped:,} problems with prompts that are held out")
    if near := data.near_duplicates:
        closest = max(near, key=lambda each: each.share)
        lines.append(
            f"{len(near):,} held-out problems are almost the same as a training problem, such as {closest.held_out_id} "
            f"and {closest.train_id} ({closest.share:.0%} of its sequences of 8 words): evaluations reward memory there"
        )
    if num_train is not None and problems_per_iteration > num_train:
        lines.append(f"data.problems_per_iteration={problems_per_iteration} is more: an iteration repeats problems")
    return lines


def describe_batches(plan: Plan) -> tuple[str, str]:
    """The batch arithmetic of an iteration, in two lines."""
    data, train, rollouts = plan.config.data, plan.config.train, plan.config.rollouts
    sequences = data.problems_per_iteration * data.rollouts_per_problem
    budget = f"{train.batch_size} sequences" if train.batch_size else f"{train.tokens_per_microbatch} tokens"
    microbatches = f"in microbatches of up to {budget}"
    if "group_size" in rollouts:
        updates = plan.config.planned_updates
        problems = f"{data.problems_per_iteration} problems x {data.rollouts_per_problem} rollouts"
        return (
            f"each iteration: {problems} = {sequences} sequences, {train.iterations * sequences:,} in all",
            f"{_counted(updates, 'update')} of about {sequences * train.epochs // updates} sequences, {microbatches}",
        )
    # the source decides how large groups are
    count = rollouts.get("problems_per_iteration", "as its source says")
    taken = "all groups of a recorded one" if count is None else count
    taken = f"{count} recorded groups" if isinstance(count, int) else taken
    if train.batch_size and train.grad_accum_steps:
        updates = f"updates of {train.batch_size * train.grad_accum_steps} sequences"
    else:
        updates = _counted((train.updates_per_iteration or 1) * train.epochs, "update")
    return f"each iteration: {taken}", f"{updates}, {microbatches}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def warnings(plan: Plan) -> Iterator[str]:
    """That settings are those of the tiny model; that rollouts may be older than the policy while the clip ignores it;
    that the run ends while its learning rate still rises.
    """
    interval, train, config = plan.weight_sync.interval, plan.config.train, plan.config
    is_tiny = config.model.train_id is None and config.model.gguf_file is None
    if plan.sampling.max_new_tokens <= TINY_ANSWER and not is_tiny:
        yield (
            f"generation.max_new_tokens={plan.sampling.max_new_tokens}: too short for most models; this, train.lr and "
            "num_threads suit model=tiny by default, and usual for others are 256, 1e-6 (LoRA: 1e-5) and null"
        )
    if interval > 1 and plan.loss.ratio_reference != "rollout":
        age = _counted(interval - 1, "iteration")
        yield (
            f"weight_sync.interval={interval}: rollouts may be sampled with weights up to {age} old, and the clip does "
            "not limit that; to clip it: train.loss.ratio_reference=rollout train.loss.importance_correction=none"
        )
    num_updates = train.iterations * plan.config.planned_updates
    if train.warmup_steps >= num_updates:
        made = _counted(num_updates, "update")
        yield (
            f"train.warmup_steps={train.warmup_steps}: the run makes {made}, so the learning rate still rises at their "
            f"end, to {num_updates / train.warmup_steps * train.lr:.2g}"
        )
