"""The YAML files of the logger group build, and each key of theirs reaches the logger."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from offline_grpo.interfaces import RunListener
from offline_grpo.run.build import build

CONF = Path(__file__).parents[3] / "conf" / "logger"


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_file_is_one_named_logger(path: Path, tmp_path: Path) -> None:
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(loaded, dict)
    [(name, node)] = loaded.items()
    assert name == path.stem, "`logger: [json, console]` joins the files into one mapping"
    logger = build(node, key=f"logger.{name}", protocol=RunListener, output_dir=tmp_path)
    for key, value in node.items():
        assert key == "_target_" or getattr(logger, key) == value
