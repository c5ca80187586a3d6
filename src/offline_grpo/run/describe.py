"""What a run says about its plan before it begins."""

from __future__ import annotations

from offline_grpo.run.plan import Plan
from offline_grpo.run.task_data import TaskData
from offline_grpo.settings import RunConfig


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
    """The batch arithmetic of an iteration, spelled out in two lines."""
    data, train, rollouts = plan.config.data, plan.config.train, plan.config.rollouts
    per_microbatch = (
        f"{train.batch_size} sequences" if train.batch_size is not None else f"{train.tokens_per_microbatch} tokens"
    )
    if "group_size" not in rollouts:  # the source decides how large groups are
        count = rollouts.get("problems_per_iteration", "as its source says")
        taken = (
            "all groups of a recorded one"
            if count is None
            else f"{count} recorded groups"
            if isinstance(count, int)
            else count
        )
        per_update = train.batch_size * train.grad_accum_steps if train.batch_size and train.grad_accum_steps else None
        updates = (
            f"updates of {per_update} sequences"
            if per_update
            else _updates((train.updates_per_iteration or 1) * train.epochs)
        )
        return f"each iteration: {taken}", f"{updates}, in microbatches of up to {per_microbatch}"
    sequences = data.problems_per_iteration * data.rollouts_per_problem
    updates = plan.config.planned_updates
    return (
        f"each iteration: {data.problems_per_iteration} problems x {data.rollouts_per_problem} rollouts = "
        f"{sequences} sequences, {train.iterations * sequences:,} in all",
        f"{_updates(updates)} of about {sequences * train.epochs // updates} sequences, in microbatches of up to "
        f"{per_microbatch}",
    )


def _updates(count: int) -> str:
    return f"{count} update{'s' if count > 1 else ''}"


def describe_staleness(plan: Plan) -> str | None:
    """A warning if rollouts may be older than the policy and the clip ignores it; otherwise None."""
    interval = plan.weight_sync.interval
    if interval == 1 or plan.loss.ratio_reference == "rollout":
        return None
    age = f"{interval - 1} iteration{'s' if interval > 2 else ''}"
    return (
        f"weight_sync.interval={interval}: rollouts may be sampled with weights up to {age} old, and the clip does not "
        "limit that; to clip it, use train.loss.ratio_reference=rollout train.loss.importance_correction=none"
    )


def describe_warmup(config: RunConfig) -> str | None:
    """A warning if the run ends before its learning rate has risen; otherwise None."""
    train, num_updates = config.train, config.train.iterations * config.planned_updates
    if train.warmup_steps < num_updates:
        return None
    return (
        f"train.warmup_steps={train.warmup_steps}: the run makes {_updates(num_updates)}, so the learning rate still "
        f"rises at their end, to {num_updates / train.warmup_steps * train.lr:.2g}"
    )
