from pathlib import Path

import pytest

from offline_grpo.errors import GrpoError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.json_logger import JsonLogger


@pytest.fixture
def logger(tmp_path: Path) -> JsonLogger:
    logger = JsonLogger(tmp_path)
    logger.start({}, 2)
    return logger


def test_files_carry_the_names_that_people_parse(logger: JsonLogger, tmp_path: Path) -> None:
    assert isinstance(logger, RunListener)
    logger.log("eval", {"pass@1": 0.25}, iteration=-1)
    logger.log("train", {"loss_total": -0.5, "kl_divergence": 0.125}, iteration=0)
    logger.log("eval", {"pass@1": 0.5}, iteration=12)
    logger.close()
    files = {path.name: path.read_text() for path in (tmp_path / "metrics").iterdir()}
    assert set(files) == {"eval_init.json", "train_iter_000.json", "eval_iter_012.json"}
    assert files["train_iter_000.json"] == '{\n  "kl_divergence": 0.125,\n  "loss_total": -0.5\n}\n'


def test_a_number_that_json_lacks_is_an_error_that_names_it(logger: JsonLogger, tmp_path: Path) -> None:
    with pytest.raises(GrpoError, match=r"train metric grad_norm is nan \(iter_003\)"):
        logger.log("train", {"loss_total": 1.0, "grad_norm": float("nan")}, iteration=3)
    assert not (tmp_path / "metrics").exists()
