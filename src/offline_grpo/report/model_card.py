"""The README.md of an exported model: what it was trained on, how, and what it reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from offline_grpo.hub import is_model_id
from offline_grpo.redaction import redacted
from offline_grpo.report.runs import Run, count
from offline_grpo.report.tables import Table, with_interval

LOADS_NF4 = """```python
import peft, transformers

# the base as it was trained beside
nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
base = transformers.AutoModelForCausalLM.from_pretrained(BASE, quantization_config=nf4, dtype="auto")
model = peft.PeftModel.from_pretrained(base, FOLDER)
```"""


def model_card(
    title: str,
    *,
    state: Mapping[str, Any] | None,
    run: Run | None,
    base: str | None,
    is_adapter: bool,
    versions: Sequence[str],
    picture: str | None = None,
) -> str:
    """The card, in Markdown with the Hub's header.

    Args:
        state: `trainer/state.json` of the checkpoint; None for a model that no run of ours trained.
        versions: packages, such as "torch 2.9".
        picture: name of a file with the run's curves, beside the card.
    """
    is_hub_id = base is not None and _public(base) == base and is_model_id(base)
    fields = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", "offline-grpo"],
        **({"base_model": base} if is_hub_id else {}),
    }
    head = f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n\n# {title}\n\n"
    if state is None:
        return head + "Exported by offline-grpo; not trained by it.\n"
    # Settings without secrets, and without the folders of this machine.
    config, data = _public(redacted(state["config"])), state["config"]["data"]
    beside = "" if config["model"].get("quantization") is None else ", beside base weights in 4 bits (NF4)"
    # A table of the evaluations before training and at this checkpoint.
    evals, evaluation = {} if run is None else run.evals, "This checkpoint was not evaluated by its run."
    points = (("before training", -1), ("this checkpoint", state["iteration"]))
    if run is not None and (measured := {name: evals[i] for name, i in points if i in evals}):
        keys = [*(f"pass@{k}" for k in run.eval_ks()), "reward_mean_all", "completion_tokens_mean"]
        rows = [
            [key, *(with_interval(m.get(key), (m.get(f"{key}_low"), m.get(f"{key}_high"))) for m in measured.values())]
            for key in keys
        ]
        some = next(iter(measured.values()))
        evaluation = (
            f"{some['tasks']:.0f} held-out problems, {some['replicates']:.0f} completions each at temperature "
            f"{config['eval']['temperature']:g}; in brackets 95% intervals over problems.\n\n"
            f"{Table(['', *measured], rows).markdown()}"
        ).rstrip()
    model = f"`{_public(base)}`" if base is not None else "a small model, built and warm-started by the run itself"
    return head + "\n\n".join(
        [
            f"{'A LoRA adapter for' if is_adapter else 'Trained from'} {model} with Group Relative Policy Optimization "
            f"(GRPO) by offline-grpo: {count(state['iteration'] + 1, 'iteration')}, "
            f"{count(state['counters']['num_updates'], 'update')}{beside}.",
            *([LOADS_NF4] if beside and is_adapter else []),
            "## Data",
            f"Task `{config['task']['_target_'].rpartition('.')[2]}`, {data['problems_per_iteration']} problems per "
            f"iteration with {data['rollouts_per_problem']} completions each:\n\n{_yaml(config['task'])}",
            "## Evaluation",
            evaluation,
            *([] if picture is None else [f"![Metrics of the run over its iterations]({picture})"]),
            "## Licence",
            "Not stated yet: add `license:` to the header. The terms of the base model and of the data apply.",
            f"## Software\n\n{', '.join(versions)}.",
            f"## Configuration\n\n{_yaml(config)}\n",
        ]
    )


def _yaml(content: Mapping[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip()}\n```"


def _public(value: Any) -> Any:
    """A configuration, or a part of it, with the last name alone of each path from the root or from home."""
    if isinstance(value, dict):
        return {key: _public(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_public(child) for child in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~/")) and "\n" not in value and Path(value).name
    return f".../{Path(value).name}" if is_path else value
