from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoProcessor

from offline_grpo.errors import ConfigError
from offline_grpo.model.pictures import opened, vision_of
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import TinyModel
from offline_grpo.model.tiny_vl import TinyVisionModel
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.task.picture_sums import PictureSums
from offline_grpo.types import Split

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_key_value_heads": 1,
}
TEXT |= {"max_position_embeddings": 64, "warm_start_steps": 3, "warm_start_batch_size": 8, "seed": 0}
TRAINED: dict[str, Any] = {"rope_theta": 100.0, "initializer_range": 0.1, "warm_start_lr": 1e-2, "noise_frac": 0.5}
TOWER: dict[str, Any] = {"picture_size": 16, "patch_size": 8, "tower_hidden_size": 8, "tower_layers": 1}
SUMS: dict[str, Any] = {"max_operand": 9, "operations": ["+"], "eval_frac": 0.3, "format_weight": 0.0}
SUMS |= {"prompt_template": "{a}{op}{b}="}
TASK = PictureSums(**SUMS, picture_size=16)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return TinyVisionModel(**TEXT, **TRAINED, **TOWER).prepare(TASK, tmp_path_factory.mktemp("cache"))


def test_the_folder_has_all_that_the_auto_classes_need(built):
    processor, model = AutoProcessor.from_pretrained(built), AutoModelForMultimodalLM.from_pretrained(built)
    problem = TASK.problems(Split.TRAIN)[0]
    images = [opened(picture) for picture in problem.pictures]
    text = processor.apply_chat_template(list(problem.messages), add_generation_prompt=True)
    assert text == "<bos><image>+<image>="
    both, swapped = (processor(text=[text], images=[own], return_tensors="pt") for own in (images, images[::-1]))
    picture = ["<fake_token_around_image>", "<global-img>", "<image>", "<fake_token_around_image>"]
    assert processor.tokenizer.convert_ids_to_tokens(both["input_ids"][0]) == ["<bos>", *picture, "+", *picture, "="]
    with torch.no_grad():
        difference = model(**both).logits[:, -1] - model(**swapped).logits[:, -1]
    assert difference.abs().max() > 1e-3


def test_prompts_are_those_of_the_pipeline(built):
    vision = vision_of(str(built), AutoConfig.from_pretrained(built))
    assert vision is not None
    problem = TASK.problems(Split.TRAIN)[0]
    text = TokenizerCodec(vision.processor.tokenizer).rendered(problem.messages)
    ids, unexpanded = vision.encode(text, problem.pictures)
    assert len(ids) == 11
    assert unexpanded == vision.processor.tokenizer.convert_tokens_to_ids(["<bos>", "<image>", "+", "<image>", "="])


def test_the_blind_model_refuses_pictures_and_the_other_one_takes_text(tmp_path):
    with pytest.raises(ConfigError, match="model=tiny_vl"):
        TinyModel(**TEXT, **TRAINED).prepare(TASK, tmp_path)
    TinyVisionModel(**TEXT, **TRAINED, **TOWER).prepare(Arithmetic(**SUMS), tmp_path)


def test_other_pictures_are_another_model(built, tmp_path):
    other = replace(TASK, picture_size=24)
    model = TinyVisionModel(**TEXT | {"warm_start_steps": 0}, **TRAINED, **TOWER)
    assert len({model.prepare(task, tmp_path) for task in (TASK, other, TASK)}) == 2
