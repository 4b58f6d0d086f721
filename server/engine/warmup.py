"""Runs a dummy step: the largest possible one before the KV memory is allocated, or one token to test the model.

The device's allocator keeps the memory of the largest step, so the memory that is free afterwards already excludes
activations, logits and log-probabilities of any model. torch also compiles its operations at first use (this project's
kernels are compiled by the self-check and by `Ops.prepare`). Attention only returns zeros: its scratch memory does not
grow with a step, so it need not be tried. Knows no cache and no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ops import AttentionSlice
from server.engine.ipc.messages import SamplingParams
from server.engine.sampling.draw import Draw, draw_tokens
from server.engine.sampling.logprobs import compute_logprobs
from server.models.base import Model

MAX_LOGPROBS = 20  # maximum of the API's `top_logprobs`
# Enables every filter of likely tokens: top_k, top_p, min_p
DUMMY_SAMPLING = SamplingParams(1, temperature=1.0, top_k=2, top_p=0.9, min_p=0.1)


class DummyAttention:
    """A step's attention without a KV cache, which returns zeros: implements `kernels.ops.Attention`."""

    slices: Sequence[AttentionSlice] = ()  # there is no KV memory

    def __init__(self, num_tokens: int, num_logits: int, device: torch.device) -> None:
        """Prepare a step of `num_tokens` tokens, of which `num_logits` get logits."""
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.logit_index = torch.zeros(num_logits, dtype=torch.int64, device=device)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return zeros [N,Hq,Dv] as the output of attention."""
        return q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))


@torch.inference_mode()
def run_dummy_step(model: Model, *, num_tokens: int, num_logits: int) -> None:
    """Compute a step of `num_tokens` tokens, the log-probabilities of `num_logits` rows, and sample one token."""
    step = DummyAttention(num_tokens, num_logits, model.device)
    logits = model.forward(torch.zeros_like(step.positions), step)
    compute_logprobs(logits, [0] * num_logits, MAX_LOGPROBS)
    draw_tokens(logits[:1], [Draw(DUMMY_SAMPLING, 0)])
