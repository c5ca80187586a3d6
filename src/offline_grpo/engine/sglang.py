"""How an SGLang server is started, 0.5.11 to 0.5.15."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offline_grpo.engine.command_line import CommandLine, flags
from offline_grpo.errors import require


@dataclass(frozen=True, kw_only=True)
class SglangEngine(CommandLine):
    """The command line and environment of an SGLang managed server. See `CommandLine`."""

    name = "SGLang"
    package = "sglang"
    essentials: ClassVar[Mapping[str, Any]] = {
        "args": {"mem_fraction_static": 0.45, "enable_deterministic_inference": True},
        "env": {},
    }
    key_is_option = True

    def __post_init__(self) -> None:
        super().__post_init__()
        seeded = self.args.get("enable_deterministic_inference")
        require(
            bool(seeded),
            "engine.args.enable_deterministic_inference",
            seeded,
            "SGLang would ignore seeds; set it to true",
        )
        file = self.args.get("config")
        require(
            file is None,
            "engine.args.config",
            file,
            "the run hands the server's key over in such a file; set the options themselves",
        )

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        """See `Launcher.command`. The module is started, not the `sglang` script: an interpreter is all that has to be
        known.
        """
        settings = {"host": self.host, "port": port, **self.args, **args}
        return [self.interpreter, "-m", "sglang.launch_server", "--model-path", model, *flags(settings)]

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """See `CommandLine.variables`."""
        ours = {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # "1" gives logprobs from before the division by the temperature
            # "1": /health samples a token, and so fails while weights are loaded
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # these two keep a server that has failed from ending, for 5 to 65 s
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "PYTHONUNBUFFERED": "1",
        }
        return self.merged(ours, env)
