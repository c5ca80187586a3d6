"""Parts that live outside the package: one Python file and one YAML file each, found through Hydra's search path."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from engines import save_model
from factories import compose_config
from fake_vllm import FakeVllm
from runs import SMALL, assert_same, metrics_of
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.run import train

FILES = {
    "mine/dense.py": '''
        """The definition: all logits at once."""

        import torch

        calls = []


        class Dense:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            def __call__(self, hidden, weight, bias, targets, temperature, *, softcap=None, entropy_requires_grad):
                calls.append(len(targets))
                assert softcap is None
                logits = torch.nn.functional.linear(hidden, weight, bias).float() * self.scale / temperature[:, None]
                log_p = logits.log_softmax(-1)
                entropy = -(log_p.exp() * log_p).sum(-1)
                return log_p.gather(1, targets[:, None])[:, 0], entropy if entropy_requires_grad else entropy.detach()
        ''',
    "mine/conf/model/head/dense.yaml": """
        _target_: mine.dense.Dense
        scale: 1.0
        """,
    "mine/one_by_one.py": '''
        """One forward pass per sequence."""

        from contextlib import nullcontext

        import torch

        lengths = []


        class OneByOne:
            pads = False

            def check(self, device, dtype):
                pass

            def hidden_states(self, decoder, batch):
                rows = batch.token_ids.split(batch.sequence_lengths)
                lengths.extend(batch.sequence_lengths)
                return torch.cat([decoder(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows])

            def attention(self, decoder, batch):
                return nullcontext()
        ''',
    "mine/conf/model/layout/one_by_one.yaml": """
        _target_: mine.one_by_one.OneByOne
        """,
    "mine/toy.py": '''
        """A kind of server that nobody else knows."""

        from offline_grpo.engine.http import read
        from offline_grpo.engine.server_engine import ServerEngine


        class ToyEngine(ServerEngine):
            name = "Toy"
            path = "/complete"
            oldest, newest = (1, 0), (1, 9)

            @classmethod
            def start_words(cls, model, args, server_args):
                return ["toy", model]

            def version(self):
                return read(self.get("/about"), lambda answer: answer["version"])

            def lacks(self, moves):
                return None

            def load_weights(self, folder, *, tag, pause_mode):
                self.post("/load", {"folder": folder})
                self.set_tag(tag)

            def set_tag(self, tag):
                self.post("/tag", {"tag": tag})

            def served_tag(self):
                return self.get("/tag").json()["tag"]

            def body(self, request, sampling, weights):
                return {"prompt": list(request.prompt_ids), "count": request.num_completions, "seed": request.seed}

            def choices(self, answer, request):
                return [(ids, logprobs, reason) for ids, logprobs, reason in answer["found"]]
        ''',
    "mine/conf/generation/toy.yaml": """
        defaults:
          - transformers
          - _self_
        _target_: mine.toy.ToyEngine
        base_url: null
        api_key: null
        timeout_s: 60
        max_retries: 1
        """,
}
RUN = (
    *(*SMALL, "train.iterations=1", "model.device=cpu", "train.kl_coef=0.1", "eval.enabled=false"),
    "checkpoint.enabled=false",
)
CHOSEN = ("model/head=dense", "model/layout=one_by_one")


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return f"hydra.searchpath=[file://{tmp_path}/mine/conf]"


def test_they_train_as_the_packages_own_do(search_path: str, cache: str, tmp_path: Path) -> None:
    train(compose_config(*RUN, cache), tmp_path / "built_in")
    train(compose_config(search_path, *RUN, cache, *CHOSEN), tmp_path / "outside")
    from mine import dense, one_by_one  # pyright: ignore[reportMissingImports]

    assert len(dense.calls) >= 2  # policy and reference
    assert len(one_by_one.lengths) >= 2
    expected, actual = (metrics_of(tmp_path / name)["train_iter_000.json"] for name in ("built_in", "outside"))
    for name in ("loss_total", "loss_pg", "kl_divergence", "entropy", "grad_norm", "reward_mean"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


class ToyServer(FakeVllm):
    """What `ToyEngine` asks, as the script of a `ScriptedServer`."""

    tag: str | None = None

    def __call__(self, request: Request) -> Reply:
        if request.method == "GET":
            return Reply({"version": "1.2", "tag": self.tag})
        if request.path == "/load":
            self._call("reload_weights", {"weights_path": request.body["folder"]})
        if request.path == "/tag":
            self.tag = request.body["tag"]
        if request.path != "/complete":
            return Reply({})
        asked = {"prompt": {"prompt_token_ids": request.body["prompt"]}, "max_tokens": 8, "temperature": 1.0}
        with self._lock:
            choices = self._complete({**asked, "n": request.body["count"], "seed": request.body["seed"]})["choices"]
        return Reply({"found": [(c["token_ids"], c["logprobs"], c["finish_reason"]) for c in choices]})


@pytest.mark.slow
def test_a_kind_of_server(search_path: str, tmp_path: Path) -> None:
    """One file and one YAML: it samples what the trained module itself would, and every push to it is proven."""
    model = save_model(tmp_path / "model")
    run = (*RUN, f"model.train_id={model}", "train.iterations=3", "train.lr=1e-3", "train.optimizer.eps=1e-4")
    served = ("generation=toy", "weight_sync=reload", "weight_sync.pause_mode=abort")
    train(compose_config(*run), tmp_path / "here")
    with ScriptedServer(ToyServer(model)) as web:
        train(compose_config(search_path, *run, *served, f"generation.base_url={web.base_url}"), tmp_path / "there")
    here, there = metrics_of(tmp_path / "here"), metrics_of(tmp_path / "there")
    assert there["train_iter_002.json"]["sync/probe_diff_max"] < 1e-4
    assert {r.path for r in web.requests} == {"/health", "/about", "/load", "/tag", "/complete"}
    assert_same(
        here, {name: {key: value for key, value in of.items() if key in here[name]} for name, of in there.items()}
    )
