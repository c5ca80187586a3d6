"""For fork_server.py, so that not every child does it again: what a run imports late, and the grammars,
patterns and settings that a run makes as it begins.
"""
# ruff: noqa: E402

import gc
import os
from tempfile import TemporaryDirectory

gc.disable()  # else a third of the time goes into looking for garbage among the modules, of which there is none

import peft  # noqa: F401
import pyarrow
import transformers.models.llama.modeling_llama  # noqa: F401
from factories import compose_with_hydra, make_llama
from transformers import AutoModelForCausalLM

import offline_grpo.generation.transformers_client
import offline_grpo.logger.console
import offline_grpo.model.tiny
import offline_grpo.report.plots
import offline_grpo.report.tables
import offline_grpo.rollouts.on_policy
import offline_grpo.rollouts.rows
import offline_grpo.run
import offline_grpo.task.arithmetic  # noqa: F401
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan

make_plan(typed(compose_with_hydra()))
with TemporaryDirectory() as folder:
    make_llama().save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
pyarrow.array([0])  # imports pandas

_, _, path = os.environ["PYTHONPATH"].partition(os.pathsep)
os.environ.pop("PYTHONPATH")
if path:
    os.environ["PYTHONPATH"] = path

gc.freeze()
gc.enable()
