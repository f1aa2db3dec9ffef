"""Attention in Triton: the keys of a row in several parts, read in parallel, then combined (flash decoding)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # to keep a GPU busy: a few for each of its processors
MOST_PARTS = 32
FEWEST_QUERIES = 16  # of a program: what a matrix unit takes
MOST_QUERIES = 64  # what registers hold
KEYS = 64  # that a program reads at a time


@triton.jit
def _read_part(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, position_ptr, slot_ptr, out_ptr, total_ptr,
    scale, top, heads, shared, width,
    query_row, query_head, query_token, key_slot, key_head, key_token,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(2)
    d_D, key_K = tl.arange(0, D), tl.arange(0, KEYS)
    at_Q = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query_Q = at_Q < shared * width
    token_Q, query_head_Q = at_Q % width, head * shared + at_Q // width
    position_Q = tl.load(position_ptr + row * width + token_Q, mask=is_query_Q, other=0)
    position_Q = tl.where(position_Q < top, position_Q, 0)
    seen = tl.max(position_Q, 0) + 1
    share = tl.cdiv(tl.cdiv(seen, KEYS), PARTS) * KEYS
    begin = part * share
    end = tl.minimum(begin + share, seen)
    from_Q = row.to(tl.int64) * query_row + query_head_Q * query_head + token_Q * query_token
    query_QD = tl.load(query_ptr + from_Q[:, None] + d_D[None, :], mask=is_query_Q[:, None], other=0.0)
    base = tl.load(slot_ptr + row) * key_slot + head.to(tl.int64) * key_head
    most_Q = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_Q = tl.zeros([QUERIES], tl.float32)
    out_QD = tl.zeros([QUERIES, D], tl.float32)
    for start in range(begin, end, KEYS):
        token_K = start + key_K
        is_key_K = token_K < end
        at_KD = base + token_K[:, None] * key_token + d_D[None, :]
        key_KD = tl.load(key_ptr + at_KD, mask=is_key_K[:, None], other=0.0)
        score_QK = tl.dot(query_QD, tl.trans(key_KD), input_precision="ieee") * scale
        sees_QK = is_key_K[None, :] & (token_K[None, :] <= position_Q[:, None])
        score_QK = tl.where(sees_QK, score_QK, float("-inf"))
        new_most_Q = tl.maximum(most_Q, tl.max(score_QK, 1))
        less_Q = tl.where(new_most_Q == float("-inf"), 0.0, new_most_Q)
        weight_QK = tl.exp(score_QK - less_Q[:, None])
        decay_Q = tl.exp(most_Q - less_Q)
        value_KD = tl.load(value_ptr + at_KD, mask=is_key_K[:, None], other=0.0)
        sum_Q = sum_Q * decay_Q + tl.sum(weight_QK, 1)
        weighed_QD = tl.dot(weight_QK.to(value_KD.dtype), value_KD, input_precision="ieee")
        out_QD = out_QD * decay_Q[:, None] + weighed_QD
        most_Q = new_most_Q
    to_Q = ((row.to(tl.int64) * width + token_Q) * heads * shared + query_head_Q) * PARTS + part
    has_seen_Q = sum_Q > 0
    total_Q = tl.where(has_seen_Q, most_Q + tl.log(tl.where(has_seen_Q, sum_Q, 1.0)), float("-inf"))
    tl.store(total_ptr + to_Q, tl.where(sum_Q == sum_Q, total_Q, sum_Q), mask=is_query_Q)  # NaN stays NaN
    out_QD = out_QD / tl.where(sum_Q == 0, 1.0, sum_Q)[:, None]
    tl.store(out_ptr + to_Q[:, None] * D + d_D[None, :], out_QD, mask=is_query_Q[:, None])


@triton.jit
def _combine(parts_ptr, total_ptr, out_ptr, D: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part_P, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, D)
    total_P = tl.load(total_ptr + row * PARTS + part_P)
    share_P = tl.exp(total_P - tl.max(total_P, 0))
    part_PD = tl.load(parts_ptr + (row * PARTS + part_P[:, None]) * D + d_D[None, :])
    out_D = tl.sum(share_P[:, None] * part_PD, 0) / tl.sum(share_P, 0)
    tl.store(out_ptr + row * D + d_D, out_D)


def attend(query: Tensor, keys: Tensor, values: Tensor, position_RW: Tensor, slot_R: Tensor, scaling: float) -> Tensor:
    """See `kernels.Kernel`."""
    assert position_RW.is_contiguous()
    assert slot_R.is_contiguous()
    assert keys.stride() == values.stride()
    query = query if query.stride(3) == 1 else query.contiguous()
    rows, query_heads, width, size = query.shape
    heads, length = keys.shape[1:3]
    shared = query_heads // heads
    queries = min(MOST_QUERIES, max(FEWEST_QUERIES, triton.next_power_of_2(shared * width)))
    blocks = triton.cdiv(shared * width, queries)
    wanted = triton.cdiv(PROGRAMS, rows * heads * blocks)
    parts = max(2, min(MOST_PARTS, triton.next_power_of_2(wanted), triton.next_power_of_2(triton.cdiv(length, KEYS))))
    out = query.new_empty(rows, width, query_heads, size)
    each = torch.empty(*out.shape[:3], parts, size, dtype=torch.float32, device=query.device)
    totals = torch.empty(each.shape[:4], dtype=torch.float32, device=query.device)
    _read_part[(rows * heads, blocks, parts)](
        query, keys, values, position_RW, slot_R, each, totals,
        scaling, length - 1, heads, shared, width, *query.stride()[:3], *keys.stride()[:3],
        QUERIES=queries, KEYS=KEYS, D=size, PARTS=parts, num_warps=4,
    )  # fmt: skip
    _combine[(rows * width * query_heads,)](each, totals, out, D=size, PARTS=parts, num_warps=1)
    return out
