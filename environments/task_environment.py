"""An Atropos environment around any task of this project; `serve --help` lists its settings. See docs/atropos.md.

    uv run --extra atropos environments/task_environment.py serve --env.task gsm8k --env.task_overrides
    'format_weight=0.2'

Where the package was installed without this folder, it is `python -m offline_grpo.commands.task_environment serve`.
"""

from offline_grpo.commands.task_environment import TaskEnvironment

if __name__ == "__main__":
    TaskEnvironment.cli()
