from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from offline_grpo.interfaces import RunListener
from offline_grpo.logger.tensorboard import TensorBoardLogger


def test_event_files_hold_prefixed_metrics_against_completed_iterations(tmp_path: Path) -> None:
    logger = TensorBoardLogger(output_dir=tmp_path, flush_s=10)
    assert isinstance(logger, RunListener)
    logger.start({"train": {"lr": 0.5}}, 2)
    logger.log("eval", {"pass@1": 0.25}, iteration=-1)
    for iteration in range(2):
        logger.log("train", {"time/generate_s": 1.5 + iteration}, iteration=iteration)
        logger.log("eval", {"pass@1": 0.5 + iteration / 4}, iteration=iteration)
    logger.close()
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/pass@1")] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("train/time/generate_s")] == [(0, 1.5), (1, 2.5)]
    assert b'"lr": 0.5' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
