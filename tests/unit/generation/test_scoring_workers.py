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

from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.scoring.isolated import IsolatedTask
from offline_grpo.generation.scoring.pool import Scorers
from offline_grpo.settings import ScoringConfig
from offline_grpo.train.experience import check_scored, score_metrics
from offline_grpo.types import Score

pytestmark = pytest.mark.slow

EXPECTED = {
    "fine": 1.0,
    "hangs": "timeout",
    "hangs_in_c": "timeout",
    "sleeps": "timeout",
    "forks": 0.75,
    "escapes": "timeout",
    "spawns": "crashed",
    "prints": 0.25,
    "leaks": "memory",
    "raises": "raised",
    "exits": "raised",
    "dies": "crashed",
    "segfaults": "crashed",
    "recurses": "raised",
    "nothing": "raised",
    "kills_group": "crashed",
    "closes_files": "crashed",
    "sees": 1.0,
}


def outcome(judgement):
    score = judgement.result()
    assert (score.reward, score.is_correct, score.parts) == (0.0, False, {}) or score.failure is None
    return score.failure or score.reward


def strays():
    return [p for p in psutil.process_iter(["cmdline"]) if bad_rewards.STRAY_S in (p.info["cmdline"] or [])]


def gone(processes):
    """Whether all end within a few seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Every kind of misbehaviour at the same time, twice: in this order, and in the opposite order. Outcomes, warnings,
    file, strays.
    """
    printed = tmp_path_factory.mktemp("scoring") / "scoring.log"
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "offline_grpo.generation.scoring.isolated.log.warning", lambda text, *args: told.append(text % args)
        )
        task = isolated("bad_rewards:misbehaves", printed)
        try:
            kinds = [*EXPECTED, *reversed(EXPECTED)]
            outcomes = [outcome(judgement) for judgement in [judge(task, kind) for kind in kinds]]
            left = [] if gone(strays()) else strays()  # they are swept up a moment after the worker that started them
        finally:
            task.close()
    return outcomes, told, printed, left


@pytest.mark.parametrize("kind", EXPECTED)
def test_misbehaviour_costs_one_reward(kind, judged):
    outcomes, *_ = judged
    place = list(EXPECTED).index(kind)
    assert outcomes[place] == outcomes[-1 - place] == EXPECTED[kind]


def test_the_first_of_each_cause_is_told_with_its_traceback(judged):
    _, told, *_ = judged
    assert sorted(text.split(";")[0] for text in told if "failed" not in text.split(";")[0])[1:] == [
        "the code that scores needed more than 256 MiB (scoring.memory_mib)",
        "the code that scores took more than 2 s (scoring.timeout_s)",
    ]
    assert len(told) == 4
    [raised] = [text for text in told if "Traceback" in text and "MiB" not in text]
    assert "bad_rewards.py" in raised
    assert "offline_grpo/generation" not in raised
    assert "scoring/num_failed_raised counts them" in raised


def test_a_reward_that_is_no_number_is_told_in_one_line(caplog):
    task = isolated("bad_rewards:misbehaves", workers=1)
    try:
        assert outcome(judge(task, "nothing")) == "raised"
    finally:
        task.close()
    assert caplog.messages[0].startswith(
        "the code that scores failed: task.reward=bad_rewards:misbehaves returned None; it must be like "
    )
    assert "\n" not in caplog.messages[0]


def test_what_is_printed_goes_to_a_file(judged):
    text = judged[2].read_text()
    for line in ("printed by a reward", "and to stderr", "past Python"):
        assert text.count(f"{line}\n") == 2
    assert "Segmentation fault" in text


def test_nothing_that_a_score_started_outlives_it(judged):
    assert judged[3] == []


def test_what_a_sound_worker_has_started_outlives_another_worker():
    task = isolated("bad_rewards:misbehaves", workers=2)
    try:
        judgements = [judge(task, kind) for kind in ("keeps_a_helper", "dies")]
        assert [outcome(judgement) for judgement in judgements] == [1.0, "crashed"]
    finally:
        task.close()
    assert gone(strays())


def test_async_scores_fail_alone(caplog):
    """One that blocks its worker, or kills it, costs those nothing that the worker awaits meanwhile."""
    task = isolated("bad_rewards:misbehaves_later", workers=2, timeout_s=1.5)  # thirty times what a sound one takes
    try:
        kinds = ["fine", "waits", "hangs", "fine", "raises", "exits", "dies", *["fine"] * 20]
        judgements = [judge(task, kind) for kind in kinds]
        assert [outcome(j) for j in judgements] == [
            0.5,
            "timeout",
            "timeout",
            0.5,
            "raised",
            "raised",
            "crashed",
            *[0.5] * 20,
        ]
    finally:
        task.close()


def test_a_score_that_is_not_async_may_run_an_event_loop_itself():
    task = isolated("bad_rewards:runs_a_loop", workers=1)
    try:
        for kind, expected in {
            "old way": 0.5,
            "fine": 0.5,
            "raises": "raised",
            "exits": "raised",
            "waits": "timeout",
        }.items():
            assert outcome(judge(task, kind)) == expected, kind
    finally:
        task.close()


def test_async_scores_go_on_beside_one_that_runs_an_event_loop_itself():
    task = isolated("bad_rewards:sometimes_awaited", workers=1)
    try:
        began = time.monotonic()
        judgements = [judge(task, kind) for kind in ["later"] * 8 + ["fine", "later", "raises", "fine"]]
        assert [outcome(j) for j in judgements] == [*[0.5] * 10, "raised", 0.5]
        assert time.monotonic() - began < 8 * 0.5  # what those that are awaited take one after the other
    finally:
        task.close()


@pytest.mark.parametrize("kind", ["exits", "leaks"])
def test_the_one_score_beside_another_that_ends_its_worker_is_not_to_blame(kind):
    task = isolated("bad_rewards:misbehaves_later", workers=1)
    try:
        judgements = [judge(task, each) for each in ("later", kind)]
        assert outcome(judgements[0]) == 0.5
        assert outcome(judgements[1]) == {"exits": "raised", "leaks": "memory"}[kind]
    finally:
        task.close()


def test_nothing_outlives_a_trainer_that_is_killed():
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import bad_rewards\n"
        "task = bad_rewards.isolated('bad_rewards:misbehaves', timeout_s=100)\n"
        "judging = [bad_rewards.judge(task, kind) for kind in ('hangs', 'sleeps', 'escapes')]\n"
        "input()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not strays() and time.monotonic() < deadline:
        time.sleep(0.05)
    below = psutil.Process(trainer.pid).children(recursive=True)
    assert len(below) >= 4
    assert [*below, *strays()]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert gone([*below, *strays()])


def test_a_task_that_workers_cannot_make_ends_the_run():
    settings = bad_rewards.scoring_config()
    task = IsolatedTask(
        Task("bad_rewards:misbehaves"), Scorers(setup_of(partial(Task, "nowhere:f"), settings)), settings
    )
    try:
        with pytest.raises(
            ScoreError,
            match=r"processes that score do not work: ConfigError: task.reward=nowhere:f: cannot be imported",
        ):
            judge(task, "fine").result()
    finally:
        task.close()


def test_what_a_task_measures_comes_along_and_its_means_are_metrics():
    task = bad_rewards.in_workers(bad_rewards.Measuring)
    try:
        score = bad_rewards.judge(task, "fine").result()
    finally:
        task.close()
    assert score == bad_rewards.Measuring().score(None, "")
    [group] = failures(None, None, "raised")
    scores = [replace(score, measured=each) for each in ({"speed": 2.0}, {"speed": 4.0, "size": 1.0}, {})]
    group = replace(group, rollouts=tuple(replace(r, score=s) for r, s in zip(group.rollouts, scores, strict=True)))
    assert score_metrics([group]) == {"measured/size": 1.0, "measured/speed": 3.0, "scoring/num_failed": 0.0}


def failures(*causes):
    group = make_group(*[("t", 0.0)] * len(causes))
    scores = [Score(0.0, False, {}, cause) for cause in causes]
    return [replace(group, rollouts=tuple(replace(r, score=s) for r, s in zip(group.rollouts, scores, strict=True)))]


def test_failures_are_counted_and_too_many_end_the_run():
    groups = failures("timeout", None, "raised", "raised")
    assert score_metrics(groups) == {
        "scoring/num_failed": 3.0,
        "scoring/num_failed_timeout": 1.0,
        "scoring/num_failed_raised": 2.0,
    }
    check_scored(groups, 1.0)
    check_scored(failures("raised", "raised"), None)
    check_scored([], 1.0)
    with pytest.raises(
        ScoreError, match=r"2 of 2 completions could not be scored \(2 memory; scoring.stop_at_failed_frac=1\)"
    ):
        check_scored(failures("memory", "memory"), 1.0)
    with pytest.raises(ScoreError, match=r"3 of 4 .*\(2 raised, 1 timeout; scoring.stop_at_failed_frac=0.7\)"):
        check_scored(groups, 0.7)


@pytest.mark.parametrize(
    ("name", "value"), [("workers", -1), ("timeout_s", 0), ("memory_mib", 10), ("stop_at_failed_frac", 0)]
)
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"scoring\.{name}={value}"):
        ScoringConfig(**{"workers": 8, "timeout_s": 30, "memory_mib": 4096, "stop_at_failed_frac": 1.0} | {name: value})
