"""From the command to the first iteration, beside a vLLM server on the same card: a first start, then warm ones.

    python benchmarks/start.py WORK             # WORK is new: it keeps the model and all that is compiled
    python benchmarks/start.py WORK OVERRIDES --name start_NAME    # the same with other settings
    python benchmarks/start.py WORK --small     # a tiny model and vLLM's CPU build

The first push samples a probe right before the first iteration, so a token has been sampled by then. `server/NAME_s`
are seconds of the server's log, to whole ones, from its start to what NAME says.
"""

from __future__ import annotations

import re
import statistics
import subprocess
from datetime import datetime
from pathlib import Path

from common import Target, environment, make_model, parser_of, records_of, write_result
from iteration_gpu import PROMPTS, TOKENS, our_command

MARKS = {  # words of vLLM 0.32; it records CUDA graphs twice, the first time to measure their memory
    "imported": "non-default args",
    "engine": "Initializing a V1 LLM engine",
    "model": "Model loading took",
    "compiled": "profiling/warmup run took",
    "has_memory": "Maximum concurrency for",
    "graphs": "Graph capturing finished",
    "listens": "Starting vLLM server",
}


def times(folder: Path) -> dict[str, float]:
    """Of a start: the run's own, and those of its server."""
    [record] = records_of(folder)
    log, of_server = ((folder / name).read_text() for name in ("run.log", "server_0.log"))
    [began] = re.findall(r"^(\S+ \S+),\d+ .*starting vLLM", log, re.MULTILINE)
    print(*re.findall(r"(?:ready after|while the server).*", log), sep="\n", flush=True)
    marks = {name: re.findall(rf"(\d\d-\d\d \d\d:\d\d:\d\d).*{words}", of_server) for name, words in MARKS.items()}
    at = {name: datetime.fromisoformat(f"{began[:4]}-{found[-1]}") for name, found in marks.items() if found}
    server = {f"server/{name}_s": (when - datetime.fromisoformat(began)).total_seconds() for name, when in at.items()}
    return {key: value for key, value in record.items() if key.startswith("time/start")} | server


def main() -> None:
    parser = parser_of(__doc__, "start", "--name")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--shape", default="0.6b")
    args = parser.parse_args()
    sizes = ("small", 2, 16) if args.small else (args.shape, PROMPTS, TOKENS)
    args.shape, args.prompts, args.tokens = sizes
    args.iterations, args.share, work = 1, "0.35", args.work.resolve()
    make_model(work, args.shape, small=args.small)
    caches = {name: f"{work}/{name}" for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    folders = [work / args.name / f"{datetime.now():%H%M%S}_{number}" for number in range(args.starts)]
    for folder in folders:
        command = our_command(work, args, "ours", ("weight_sync=shared_vllm", f"hydra.run.dir={folder}"))
        subprocess.run(command, env=environment(**caches), stdout=subprocess.DEVNULL, check=True, timeout=600)
    starts = [times(folder) for folder in folders]
    warm = starts[1:] or starts
    measured = {"first/start_s": starts[0]["time/start_s"]}
    measured |= {key: statistics.median(start[key] for start in warm) for key in warm[0]}
    claim = "From the command to the first sampled token, with what was compiled before: at most 45 s"
    targets = [] if args.small else [Target("time/start_s", "<=", 45.0)]
    settings = {"shape": args.shape, "overrides": args.overrides}
    write_result(args.name, claim=claim, targets=targets, settings=settings, measured=measured, details={"all": starts})


if __name__ == "__main__":
    main()
