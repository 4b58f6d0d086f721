"""A step as large as any, before the KV memory is taken: the device's allocator keeps what it took for it.

So what is free afterwards already leaves out the activations, the logits and their log-probabilities, whatever the
model is like; and what torch compiles at first use is compiled (the kernels of this project are by the self-check and
by `Ops.prepare`). Attention answers with zeros: its scratch memory
does not grow with a step. Knows no cache and no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import Draw, draw_tokens
from server.engine.sampling.logprobs import compute_logprobs
from server.models.base import Model

MAX_LOGPROBS = 20  # log-probabilities beside a token's own, as many as the API lets anybody ask for
DUMMY_SAMPLING = SamplingParams(1, temperature=1.0, top_k=2, top_p=0.9, min_p=0.1)  # all there is to draw by


class DummyAttention:
    """Implements `kernels.ops.Attention`."""

    def __init__(self, tokens: int, logits: int, device: torch.device) -> None:
        """Prepare a step of that many tokens and rows of logits."""
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.logit_index = torch.zeros(logits, dtype=torch.int64, device=device)

    @property
    def kv_locations(self) -> None:
        """Nowhere."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Zeros [N,Hq,Dv]."""
        return q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))


@torch.inference_mode()
def run_dummy_step(model: Model, *, num_tokens: int, num_logits: int) -> None:
    """Compute a step of `num_tokens` tokens, score all its logits and draw a token from one of them."""
    step = DummyAttention(num_tokens, num_logits, model.device)
    found = model.forward(torch.zeros_like(step.positions), step)
    compute_logprobs(found, [0] * num_logits, MAX_LOGPROBS)
    draw_tokens(found[:1], [Draw(DUMMY_SAMPLING, 0)])
