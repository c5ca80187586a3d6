"""Scores from processes that can be killed: whatever a reward function does costs one reward of 0, and is counted."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import bad_rewards
import psutil
import pytest
from bad_rewards import Task, isolated, judge, setup_of
from factories import make_group
from runs import wait_until

from offline_grpo.errors import ScoreError
from offline_grpo.generation.judging import Judgement
from offline_grpo.generation.scoring import IsolatedTask, Scorers
from offline_grpo.train.experience import check_scored
from offline_grpo.train.metrics import score_metrics
from offline_grpo.types import Problem, Score

pytestmark = pytest.mark.slow

EXPECTED = {
    "fine": 1.0,
    "hangs": "timeout",
    "hangs_in_c": "timeout",
    "forks": 0.75,
    "escapes": "timeout",
    "spawns": "crashed",
    "prints": 0.25,
    "leaks": "memory",
    "raises": "raised",
    "exits": "raised",
    "segfaults": "crashed",
    "kills_group": "crashed",
    "closes_files": "crashed",
    "sees": 1.0,
}


def outcome(judgement):
    [score] = judgement.scores()
    assert score.is_scored == (score.failure is None)
    return score.failure.partition(":")[0] if score.failure else score.reward


def outcomes(path, kinds, **settings):
    """What all these are scored as at the same time."""
    task = isolated(path, **settings)
    try:
        return [outcome(judgement) for judgement in [judge(task, kind) for kind in kinds]]
    finally:
        task.close()


def strays():
    return [p for p in psutil.process_iter(["cmdline"]) if bad_rewards.STRAY_S in (p.info["cmdline"] or [])]


def gone(processes):
    """Whether all end within a few seconds."""
    return wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), 5)


def test_misbehaviour_costs_one_reward(tmp_path, caplog):
    """Every kind at the same time, twice: in this order, and in the opposite order."""
    task = isolated("bad_rewards:misbehaves", tmp_path / "scoring.log")
    try:
        found = [outcome(each) for each in [judge(task, kind) for kind in [*EXPECTED, *reversed(EXPECTED)]]]
        assert gone(strays()), "they are swept up a moment after the worker that started them"
    finally:
        task.close()
    assert dict(zip(EXPECTED, found, strict=False)) == EXPECTED
    assert found[::-1] == found
    assert len(caplog.messages) == 4, "the first of each cause is told"
    [raised] = [text for text in caplog.messages if "scoring/num_failed_raised counts them" in text]
    assert "Traceback" in raised
    printed = (tmp_path / "scoring.log").read_text()
    for line in ("printed by a reward", "and to stderr", "past Python"):
        assert printed.count(f"{line}\n") == 2
    assert "Segmentation fault" in printed


def test_what_is_printed_is_bounded(tmp_path):
    """Where it has grown too large, the later half goes; what comes after is appended."""
    log = tmp_path / "scoring.log"
    log.write_text("first\n" + "x" * 64 * 2**20)
    task = isolated("bad_rewards:misbehaves", log)
    try:
        wait_until(lambda: log.stat().st_size <= 32 * 2**20, 20)
        assert judge(task, "prints").scores()[0].reward == 0.25
    finally:
        task.close()
    printed = log.read_bytes()
    assert (printed[:6], printed.count(b"past Python\n")) == (b"first\n", 1)


def test_what_a_sound_worker_has_started_outlives_another_worker():
    assert outcomes("bad_rewards:misbehaves", ["keeps_a_helper", "dies"], workers=2) == [1.0, "crashed"]
    assert gone(strays())


def test_async_scores_fail_alone():
    """One that blocks its worker, or kills it, costs those nothing that the worker awaits meanwhile."""
    expected = {"fine": 0.5, "waits": "timeout", "hangs": "timeout", "raises": "raised", "exits": "raised"}
    expected |= {"dies": "crashed"}
    kinds = [*expected, *["fine"] * 20]
    found = outcomes("bad_rewards:misbehaves_later", kinds, workers=2, timeout_s=1.5)
    assert found == [expected[kind] for kind in kinds]


def test_scores_may_run_an_event_loop_themselves_beside_others_that_are_awaited():
    kinds = ["later"] * 8 + ["old way", "fine", "raises", "exits", "waits", "fine"]
    expected = [0.5] * 10 + ["raised", "raised", "timeout", 0.5]
    assert outcomes("bad_rewards:sometimes_awaited", kinds, workers=1) == expected


def test_the_one_score_beside_another_that_ends_its_worker_is_not_to_blame():
    assert outcomes("bad_rewards:misbehaves_later", ["later", "leaks"], workers=1) == [0.5, "memory"]


def test_nothing_outlives_a_trainer_that_is_killed():
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import bad_rewards\n"
        "task = bad_rewards.isolated('bad_rewards:misbehaves', timeout_s=100)\n"
        "judging = [bad_rewards.judge(task, kind) for kind in ('hangs', 'hangs_in_c', 'escapes')]\n"
        "input()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not strays() and time.monotonic() < deadline:
        time.sleep(0.05)
    below = [*psutil.Process(trainer.pid).children(recursive=True), *strays()]
    assert len(below) >= 5
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert gone(below)


def test_a_task_that_workers_cannot_make_ends_the_run():
    settings = bad_rewards.scoring_config()
    scorers = Scorers(setup_of(partial(Task, "nowhere:f"), settings))
    task = IsolatedTask(Task("bad_rewards:misbehaves"), scorers, settings)
    try:
        with pytest.raises(ScoreError, match=r"do not work .*task.reward=nowhere:f: cannot be imported"):
            judge(task, "fine").scores()
    finally:
        task.close()


def test_a_reward_over_the_group_that_misbehaves_costs_the_group_its_rewards():
    task = bad_rewards.in_workers(bad_rewards.OfGroups, timeout_s=1.0)
    kinds = [("now", kind) for kind in ("fine", "raises", "hangs")]
    kinds += [("later", "fine"), ("later", "waits"), ("now", "dies")]
    try:
        problems = [Problem(name, (), kind) for name, kind in kinds]
        found = [judgement.scores() for judgement in [Judgement(task, problem, ["a", "b"]) for problem in problems]]
    finally:
        task.close()
    assert [
        [score.failure.partition(":")[0] if score.failure else score.parts["own"] + score.parts[part] for score in own]
        for own, part in zip(found, ["group", *[""] * 2, "group_later", *[""] * 2], strict=True)
    ] == [[1.0, 2.0], ["raised"] * 2, ["timeout"] * 2, [1.0, 2.0], ["timeout"] * 2, ["crashed"] * 2]


def test_what_a_task_measures_comes_along_and_failures_are_counted():
    task = bad_rewards.in_workers(bad_rewards.Measuring)
    try:
        score = judge(task, "fine").scores()[0]
    finally:
        task.close()
    assert score == bad_rewards.Measuring().score(None, "")

    def groups(scores):
        group = make_group(*[("t", 0.0)] * len(scores))
        rollouts = [replace(rollout, score=score) for rollout, score in zip(group.rollouts, scores, strict=True)]
        return [replace(group, rollouts=tuple(rollouts))]

    measured = groups([replace(score, measured=m) for m in ({"speed": 2.0}, {"speed": 4.0, "size": 1.0}, {})])
    assert score_metrics(measured) == {"measured/size": 1.0, "measured/speed": 3.0, "scoring/num_failed": 0.0}
    causes = ("timeout: more: words", None, "raised: more", "raised")
    failed = groups([Score(0.0, False, {}, cause) for cause in causes])
    counts = {"scoring/num_failed": 3.0, "scoring/num_failed_timeout": 1.0, "scoring/num_failed_raised": 2.0}
    assert score_metrics(failed) == counts
    check_scored(failed, 1.0)
    check_scored(groups([Score(0.0, False, {}, "raised")] * 2), None)
    with pytest.raises(ScoreError, match=r"3 of 4 .*\(2 raised, 1 timeout\).*scoring.stop_at_failed_frac=0.7"):
        check_scored(failed, 0.7)
