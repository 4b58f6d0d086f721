"""Attention over keys and values that are head-major and repeated for the query heads, in torch's products.

The keys K [Hq, S, D] and values V [Hq, S, Dv] of a sequence are only passed as views: torch multiplies by transposed
and sliced matrices as they are, with the exceptions that `_compute_scores` and `_multiply` describe. Scores and softmax
are computed in float32. A row of one token (decode) is two products. A longer row is computed in tiles of queries, so
that its scores take little memory.

A query must not depend on tokens that it does not see, even if they are NaN. Their scores are replaced, but their
values have weight 0 and 0 * NaN is NaN. So values that only some queries of a tile see are made finite first, and the
queries that do see a value that was not finite become NaN. Those values are at most two runs of a tile's length: the
tile's own tokens, and with a window the tokens that leave it within the tile. All others are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.types import LayerSpec

QUERY_TILE = 64  # number of queries whose scores are computed at once
LARGE_HEAD_BYTES = 2**17  # from here on, 16-bit keys or values of a head are faster multiplied alone


def first_visible(position: int, spec: LayerSpec) -> int:
    """Return the first position that a query at `position` sees within the model's window."""
    return 0 if spec.window is None else max(0, position + 1 - spec.window)


def attend_to_mirror(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec) -> None:
    """Attend from q [n,Hq,D], the last n tokens, to keys [Hq,S,D] and values [Hq,S,Dv], into out [n,Hq,Dv]."""
    n, S = len(q), keys.shape[1]
    if n == 1:
        first = first_visible(S - 1, spec)
        weights = _compute_weights(q, keys[:, first:], spec, None)
        out.copy_(_multiply(weights, values[:, first:]).transpose(0, 1))
        return
    for begin in range(0, n, QUERY_TILE):
        tile = slice(begin, min(begin + QUERY_TILE, n))
        _attend_tile(out[tile], q[tile], keys[:, : S - n + tile.stop], values[:, : S - n + tile.stop], spec)


def _attend_tile(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec) -> None:
    """Attend from q [t,Hq,D], the last t of S tokens, as attend_to_mirror does, with a mask [t, visible keys]."""
    start, S = keys.shape[1] - len(q), keys.shape[1]
    first = first_visible(start, spec)  # of the tile's first query
    common = min(first_visible(S - 1, spec), start + 1)  # all queries see the tokens from here to `start`
    query = torch.arange(start, S, device=q.device)[:, None]
    key = torch.arange(first, S, device=q.device)
    visible = key <= query
    if spec.window is not None:
        visible &= key > query - spec.window
    weights = _compute_weights(q, keys[:, first:], spec, visible)
    # Of 16-bit matrices with an odd number of columns, oneDNN multiplies the first number of the next row by zero.
    broken = weights[:, :, :1].isnan()  # softmax makes all weights of a query NaN, or none
    weights = weights.nan_to_num(0.0)
    mixed = torch.bmm(weights[:, :, common - first : start + 1 - first], values[:, common : start + 1])
    for begin, end in ((first, common), (start + 1, S)):
        if begin < end:
            part = slice(begin - first, end - first)
            mixed += _mix_partly_visible(weights[:, :, part], values[:, begin:end], visible[:, part])
    out.copy_(mixed.masked_fill_(broken, torch.nan).transpose(0, 1))


def _compute_weights(q: Tensor, keys: Tensor, spec: LayerSpec, visible: Tensor | None) -> Tensor:
    """Return the softmax weights [Hq, t, S] of q [t,Hq,D] for keys [Hq,S,D] in their dtype; 0 for invisible keys."""
    scores = _compute_scores(q.transpose(0, 1).float(), keys).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    if spec.sink_logits is not None:
        sinks = spec.sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), 2)
    return scores.softmax(2)[:, :, : keys.shape[1]].to(keys.dtype)


def _compute_scores(q: Tensor, keys: Tensor) -> Tensor:
    """Return the products [Hq,t,S] in float32 of q [Hq,t,D] in float32 and keys [Hq,S,D].

    torch rounds products of 16-bit matrices to 16 bits, and e to the power of a rounded score is wrong by per cents.
    So 16-bit keys are converted first; large ones head by head, which takes little memory.
    """
    if keys.dtype is torch.float32 or keys[0].nbytes < LARGE_HEAD_BYTES:
        return torch.bmm(q, keys.float().transpose(1, 2))
    scores = q.new_empty(*q.shape[:2], keys.shape[1])
    for head in zip(q, keys, scores, strict=True):
        torch.mm(head[0], head[1].float().T, out=head[2])
    return scores


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of a [Hq,1,m] and b [Hq,m,n] by head.

    On a CPU, torch.bmm copies 16-bit matrices if there are gaps between the heads, as in a mirror. In decode that takes
    longer than to multiply large ones one by one, where oneDNN packs at most one head at a time.
    """
    is_copied = b.dtype is not torch.float32 and b.device.type == "cpu"
    if not is_copied or b[0].nbytes < LARGE_HEAD_BYTES:
        return torch.bmm(a, b)
    product = a.new_empty(a.shape[0], 1, b.shape[2])
    for head in zip(a, b, product, strict=True):
        torch.mm(head[0], head[1], out=head[2])
    return product


def _mix_partly_visible(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return weights [Hq,t,E] @ values [Hq,E,Dv]: NaN for queries that see a value that is not finite, but no others.

    `visible` [t,E] says which queries see which values.
    """
    mixed = torch.bmm(weights, values.nan_to_num(0.0, 0.0, 0.0))
    broken = ~values.isfinite().all(2)  # [Hq, E]
    return mixed.masked_fill_((visible & broken[:, None]).any(2, keepdim=True), torch.nan)
