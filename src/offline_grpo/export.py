"""`python -m offline_grpo.export CHECKPOINT OUT`: a model folder that others can load, with a model card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from offline_grpo import hub
from offline_grpo.commands import cli
from offline_grpo.errors import ConfigError
from offline_grpo.history.records import hide_progress_bars

MERGED = (
    "the adapter was trained beside a base in 4 bits, and is merged into the one of the files: completions differ from "
    "the run's by what 4 bits had rounded; evaluate the folder, or serve the adapter (--no-merge) with a 4-bit base"
)
PACKAGES = ("offline-grpo", "torch", "transformers", "peft")


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.export", description=__doc__)
    about = "checkpoints/iter_NNN, a run folder (its best or newest checkpoint), or an adapter"
    parser.add_argument("model", metavar="CHECKPOINT", help=about)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new or empty")
    about = "add an adapter to its base (the default), or write the adapter alone"
    parser.add_argument("--merge", action=argparse.BooleanOptionalAction, help=about)
    about = "format of the weights; as trained if left out"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help=about)
    parser.add_argument("--push-to-hub", metavar="USER/MODEL", help="upload the folder to the Hugging Face Hub too")
    parser.add_argument("--private", action="store_true", help="make the new repository on the Hub private")
    cli.add_trust_option(parser)
    options = parser.parse_args(arguments)
    if options.private and options.push_to_hub is None:
        raise ConfigError("--private: is for a repository on the Hub; add --push-to-hub USER/MODEL, or leave it out")

    print("offline-grpo: loading ...", file=sys.stderr, flush=True)
    hub.need_model(options.model, "MODEL")  # before imports that take seconds
    if options.push_to_hub is not None and (why := hub.unreachable()) is not None:
        raise ConfigError("--push-to-hub", options.push_to_hub, f"the Hub cannot be reached ({why}); leave it out")

    from offline_grpo.checkpoint.pretrained import export_model, find_model, push_to_hub
    from offline_grpo.report.model_card import model_card
    from offline_grpo.report.runs import load_run

    hide_progress_bars()
    # What is written, and what its card says of the run that it comes from.
    source = find_model(options.model, trust_remote_code=options.trust_remote_code)
    if options.merge is not None and source.adapter is None:
        option = "--merge" if options.merge else "--no-merge"
        raise ConfigError(f"{option}: {options.model} is a whole model, not an adapter; leave it out")
    merge = options.merge is not False
    model = (source.config or {}).get("model", {})
    drawn = None if source.run_folder is None else source.run_folder / "report.png"
    picture = drawn if drawn is not None and drawn.exists() else None
    card = model_card(
        options.out.resolve().name,
        state=None if source.state is None else asdict(source.state),
        run=load_run(source.run_folder) if source.run_folder is not None else None,
        base=(source.adapter and source.weights) or model.get("train_id") or model.get("gguf_file"),
        is_adapter=source.adapter is not None and not merge,
        versions=[f"{name} {version(name)}" for name in PACKAGES],
        picture=None if picture is None else picture.name,
    )
    export_model(source, options.out, merge=merge, dtype=options.dtype, card=card, picture=picture)
    what = "the adapter of" if source.adapter is not None and not merge else "the model of"
    if source.quantization is not None and merge:
        print(MERGED)
    print(f"wrote {what} {source.checkpoint or source.name} to {options.out}")
    if options.push_to_hub is not None:
        print(f"pushed it to {push_to_hub(options.out, options.push_to_hub, private=options.private)}")


if __name__ == "__main__":
    cli.run_command(run)
