"""Metrics in Weights & Biases; by default only written to disk, for a later `wandb sync`."""

from __future__ import annotations

import errno
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from offline_grpo.disk import NOT_WRITABLE, utf8
from offline_grpo.errors import ConfigError, reason_of, told
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations, sweep_folder, tagged
from offline_grpo.logger.atropos_names import SECTIONS, check_choice, renamed
from offline_grpo.logger.benchmark import Benchmark, mode_of
from offline_grpo.logger.samples import Advantages, chosen, prompt_text, record
from offline_grpo.redaction import redacted, redacted_text
from offline_grpo.types import Metrics, RolloutGroup

MODES = ("online", "offline", "disabled")
NOT_IN_PROJECT = "/\\#?%:"
LONGEST = {"project": 128, "tag": 64}
"""Letters that names may have in Weights & Biases, which says so only when the model is loaded."""
STEP_METRIC = "iteration"
SUMMARIES = {
    "max": (
        *(
            "eval/pass@*",
            "eval/pass_ordered@*",
            "eval/mean@*",
            "eval/best@*",
            "eval/success_rate_all",
            "eval/reward_mean_all",
        ),
        *(
            "train/reward_mean",
            "train/success_rate",
            "train/kl_divergence",
            "train/grad_norm",
            "train/perf/gpu_memory*",
        ),
    ),
    "min": ("eval/truncated_frac", "train/truncated_frac", "train/entropy", "train/num_groups_trained"),
}
"""What W&B's table of runs shows beside the last value."""

log = logging.getLogger(__name__)


@dataclass
class WandbLogger(RunListener):
    """Logs `train/...` and `eval/...`; the x axis is completed iterations. A resumed run continues the same wandb run.

    Args:
        group: "auto" is the folder of the sweep that the run belongs to, and no group outside a sweep.
        names: "atropos" writes training metrics under the names of Atropos' trainer, and its `benchmark/*` of this
            start at the end.

    Raises:
        ConfigError: the project is missing, Weights & Biases does not take a setting, or there is no API key to be
        online with.
    """

    output_dir: Path
    mode: str
    project: str | None
    entity: str | None
    group: str | None
    name: str | None
    notes: str | None
    names: str
    tags: list[str]
    samples: int
    _defined: set[str] = field(default_factory=set, init=False, repr=False)
    _run: Any = field(default=None, init=False, repr=False)
    _mode: str = field(default="", init=False, repr=False)
    _benchmark: Benchmark = field(default_factory=Benchmark, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            origin = "; it is the environment variable WANDB_MODE" if self.mode == os.environ.get("WANDB_MODE") else ""
            raise ConfigError(f"logger.wandb.mode={self.mode}: must be one of {', '.join(MODES)}{origin}")
        check_choice("logger.wandb.names", self.names)
        if not self.project:
            raise ConfigError(
                f"logger.wandb.project={self.project}: set the project of the run, for example offline-grpo"
            )
        _check_names(self.project, self.tags)
        if self.mode == "online":
            _log_in()

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        with _refused("logger=wandb: cannot start"), _public_arguments():
            import wandb

            self._run = wandb.init(
                dir=self.output_dir,
                mode=self.mode,  # pyright: ignore[reportArgumentType]  # one of MODES
                project=self.project,
                entity=self.entity,
                group=self._group(),
                name=self.name,
                notes=self.notes,
                tags=self.tags,
                config=redacted(config),
                id=self._stable_run_id(),
                resume="allow"
                if self.mode == "online"
                else None,  # offline, the shared id joins the parts when they are synced
            )
        self._mode = mode_of(config) if self.names == "atropos" else ""
        with self._going_on_without():
            self._define_axes()

    def _define_axes(self) -> None:
        # wandb's own step can only increase, but a resumed run logs some iterations again.
        self._run.define_metric(STEP_METRIC, hidden=True)
        for section in {"train", "eval", "eval_intervals", *(SECTIONS if self._mode else ())}:
            self._run.define_metric(f"{section}/*", step_metric=STEP_METRIC)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        if self._run is None:
            return
        with self._going_on_without():
            self._log(name, metrics, iteration)

    def _log(self, name: str, metrics: Metrics, iteration: int) -> None:
        theirs: dict[str, float] = {}
        if self._mode and name == "train":
            self._benchmark.add(metrics)
            theirs, metrics = renamed(metrics)
        shown = tagged(name, metrics) | theirs
        for key in shown.keys() - self._defined:  # each by its name: of two patterns that fit, W&B takes any
            self._defined.add(key)
            for best, patterns in SUMMARIES.items():
                if any(fnmatchcase(key, pattern) for pattern in patterns):
                    self._run.define_metric(key, step_metric=STEP_METRIC, summary=f"{best},last")
        self._run.log({STEP_METRIC: completed_iterations(name, iteration)} | shown)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        """A table of the samples of an evaluation."""
        if name == "train" or not self.samples or self._run is None:
            return
        import wandb

        records = [record(*sample) for sample in chosen(groups, advantages, self.samples)]
        table = wandb.Table(columns=["prompt", "completion", "answer", "reward", "is_correct", "problem_id"])
        for r in records:
            texts = (utf8(text) for text in (prompt_text(r), r["completion"], r["answer"] or ""))
            table.add_data(*texts, r["reward"], r["is_correct"], r["problem_id"])
        with self._going_on_without():
            self._run.log({STEP_METRIC: completed_iterations(name, iteration), "eval/samples": table})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with self._going_on_without():
                if self._mode:
                    run.summary.update({"benchmark/mode": self._mode, **self._benchmark.as_metrics()})
                run.finish()

    @contextmanager
    def _going_on_without(self) -> Iterator[None]:
        """What fails in W&B, as when its own process was killed, is no reason to end a training."""
        try:
            yield
        except Exception as error:
            if getattr(error, "errno", None) in NOT_WRITABLE:
                raise
            self._run = None
            log.warning(
                "logger.wandb: %s; the run goes on without Weights & Biases, and logger=json has its metrics",
                told(error),
            )
            _forget_process()

    def _group(self) -> str | None:
        """`2026-01-31_12-00-00-000000` for `multirun/2026-01-31/12-00-00-000000/3`."""
        if self.group != "auto":
            return self.group
        folder = sweep_folder(self.output_dir)
        return None if folder is None else "_".join(folder.parts[-2:])

    def _stable_run_id(self) -> str:
        path = self.output_dir / "wandb_run_id"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()


def _check_names(project: str, tags: Sequence[str]) -> None:
    """Raise ConfigError about names that W&B would refuse."""
    found = [letter for letter in NOT_IN_PROJECT if letter in project]
    if found:
        raise ConfigError(f"logger.wandb.project={project}: cannot have {' '.join(found)} in it; choose another name")
    if len(project) > LONGEST["project"]:
        raise ConfigError(
            f"logger.wandb.project={project}: has {len(project)} letters; use {LONGEST['project']} at most"
        )
    for tag in tags:
        if not 1 <= len(tag) <= LONGEST["tag"]:
            raise ConfigError(f"logger.wandb.tags: the tag {tag!r} has {len(tag)} letters; use 1 to {LONGEST['tag']}")


def _log_in() -> None:
    """Raise ConfigError if W&B has no API key, or none that could be one."""
    with _refused("logger.wandb.mode=online: cannot log in"):
        import wandb  # slow to import (a second), and most runs do not need it

        if not wandb.login(prompt=False):
            raise ConfigError(
                "logger.wandb.mode=online: Weights & Biases has no API key of yours; run `wandb login`, set WANDB_API_KEY, or use "
                "logger.wandb.mode=offline and `wandb sync` later"
            )


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """One line for whatever W&B raises about settings, its environment variables and its folders."""
    try:
        yield
    except Exception as error:
        if (
            isinstance(error, ConfigError) or getattr(error, "errno", None) == errno.ENOSPC
        ):  # a full disk is told as such
            raise
        variables = sorted(name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE")
        place = f" and the environment variables {', '.join(variables)}" if variables else ""
        raise ConfigError(
            f"{what}: Weights & Biases says: {_said(error)}; look at logger.wandb{place}, or leave wandb out"
        ) from error


def _said(error: Exception) -> str:
    """What is wrong; pydantic's first line only counts that."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
    return reason_of(error)


def _forget_process() -> None:
    """Otherwise W&B would speak to its process once more when Python ends, and print a traceback."""
    import wandb

    with suppress(Exception, SystemExit):  # it speaks to the process now, or ends this one with the exit code of that
        wandb.teardown()


@contextmanager
def _public_arguments() -> Iterator[None]:
    """Inside, `sys.argv`, which W&B uploads, has no secrets."""
    typed = sys.argv
    sys.argv = [redacted_text(word) for word in typed]
    try:
        yield
    finally:
        sys.argv = typed
