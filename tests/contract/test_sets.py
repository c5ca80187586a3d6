"""How the tokens that filters left are found inside vLLM on a GPU: by Triton's interpreter, which is switched on before
Triton is imported, and with vLLM's own class that knows what requests ask for.
"""

import os
import subprocess
import sys

import pytest

from offline_grpo.engine.vllm import EXTENSION_FOLDER

pytest.importorskip("vllm", reason="its sampler is what is changed")
pytest.importorskip("triton")

FOUND = """
import torch, offline_grpo_sets as module

module.BLOCK = 64
torch.manual_seed(0)
logits = torch.randn(7, 1000)
logits[:3] = torch.where(logits[:3] < logits[:3].topk(6).values[:, -1:], -torch.inf, logits[:3])
logits[1], logits[1, 999] = -torch.inf, 3.0
logits[3], logits[3, 40:53] = -torch.inf, 2.0  # more than are told, all as probable
logits[4] = logits[4].bfloat16()  # no filter
logits[5, :900] = -torch.inf
logits[6] = torch.nan
sampled = logits.softmax(1).nan_to_num(1.0).multinomial(1)[:, 0]
ids, logprobs, ranks = module.sets_of(logits, 9, sampled)
expected = logits.log_softmax(1)
for row, token in enumerate(sampled.tolist()):
    kept = (logits[row] != -torch.inf).nonzero()[:, 0].tolist()[:9]
    assert ids[row, : 1 + len(kept)].tolist() == [token, *kept]
    torch.testing.assert_close(logprobs[row, : 1 + len(kept)], expected[row, [token, *kept]], equal_nan=True)
    assert (logprobs[row, 1 + len(kept) :] == -torch.inf).all()
    assert ranks[row] == (logits[row] >= logits[row, token]).sum()
"""

ASKED = """
import numpy as np, torch, offline_grpo_sets as module
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample import sampler, states

class OnHost:  # as what vLLM has in memory that a GPU sees
    def __init__(self, size, dtype):
        self.np = np.zeros(size)
        self.copy_to_uva = lambda: None

states.UvaBackedTensor = OnHost
name = "compute_topk_scores" if hasattr(sampler, "compute_topk_scores") else "compute_topk_logprobs"
setattr(sampler, name, lambda _, number, *__, **___: f"vLLM's {number}")
module.find_sets_at_once()

requests = states.SamplingStates(5, 1000)
sets = {"extra_args": {"alternatives": True}}
asked = {"logprobs": 9, **sets}, {"logprobs": 7, **sets}, {"logprobs": 0}, {}, {"logprobs": 8}
for index, params in enumerate(asked):
    requests.add_request(index, SamplingParams(top_k=3, **params))
logits = torch.full((2, 1000), -torch.inf)
logits[:, 5:8] = 1.0

def told(*indices, **others):
    number = requests.max_num_logprobs(np.array(indices))
    found = getattr(sampler, name)(logits, number, torch.tensor([5, 6]), others.pop("starts", None), **others)
    return found if isinstance(found, str) else [list(column.shape) for column in found[:3]]

assert told(0, 1) == told(1, 3, 0) == told(2, 0) == [[2, 10], [2, 10], [2]]
assert told(1) == [[2, 8], [2, 8], [2]]
assert (told(0, 4), told(4), told(2), told(3), told(2, 3)) == tuple(f"vLLM's {n}" for n in (9, 8, 0, -1, 0))
assert told(0, starts=[0, 1]) == told(0, max_per_req_token_ids=2) == "vLLM's 9"
requests.add_request(0, SamplingParams(logprobs=2))  # another one in its place
assert told(0) == "vLLM's 2"
"""

ALIKE = """
import torch
from offline_grpo_alike import be_batch_invariant
from vllm.v1.sample.ops import topk_topp_sampler as filters, topk_topp_triton as kernels
from vllm.v1.worker.gpu.sample import sampler

sampler.Sampler.__call__ = lambda self, logits: logits
be_batch_invariant()

# Logits of 100 tokens, of which vLLM has padded the vocabulary to 128: as they come, which is how 0.32
# leaves those that no request has processed, and in fp32 as its sampler copies others.
seen = set()
for rows in (1, 2):
    logits = sampler.Sampler.__call__(None, torch.ones(rows, 128, dtype=torch.bfloat16)[:, :100])
    seen |= {each.stride() for each in (logits, torch.empty_like(logits, dtype=torch.float32))}
assert seen == {(100, 1)}, seen

# What filters leave is found by one kernel.
kernels.apply_top_k_top_p_triton = lambda *args: args
assert filters.apply_top_k_top_p_pytorch("logits", "k", "p", allow_cpu_sync=True) == ("logits", "k", "p")
"""


@pytest.mark.parametrize("code", [FOUND, *(pytest.param(code, marks=pytest.mark.slow) for code in (ASKED, ALIKE))])
def test_what_filters_left_is_found(code: str) -> None:
    """All of it, up to as many as are told, with logprobs and ranks; only where nobody asks for anything else. In
    batch-invariant servers rows are read by the same kernels whatever others there are.
    """
    paths = os.pathsep.join(filter(None, [str(EXTENSION_FOLDER), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
