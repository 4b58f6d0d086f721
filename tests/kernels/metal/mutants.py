"""The mutants of the Metal kernels: every kind of fault that a kernel can have, planted in each.

Left out is what nothing could tell from the right kernel: sums that begin with other finite numbers while their maximum
is NOTHING, for their weight becomes 0; and threads, queries or keys too many, all of whose results a later condition
leaves out.

`python -m tests.kernels.metal.mutants` prints the table of docs/metal.md.
"""

from __future__ import annotations

import sys

import torch

from tests.kernels.metal.mutation_testing import Kind, Mutant, try_mutant, workers

DROPPED, MEMORY, BRANCH, INDEX, BOUND, WRITERS, LOGIC = Kind


def _barrier(kernel: str, nth: int, words: str, memory: str, branch: str) -> tuple[Mutant, ...]:
    text = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    return (
        Mutant(kernel, DROPPED, words, text, "", nth),
        Mutant(kernel, MEMORY, f"{memory} {words}", text, f"threadgroup_barrier(mem_flags::{memory});", nth),
        Mutant(kernel, BRANCH, f"{branch} {words}", text, f"if ({branch} == 0) {text}", nth),
    )


def _of(kernel: str, *rows: tuple[Kind, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(kernel, *row) for row in rows)


def _rounding(kernel: str, words: str, text: str, by: str) -> Mutant:
    return Mutant(kernel, LOGIC, words, text, by, dtype=torch.bfloat16)


SURVIVES = "**nothing**"
RING = "(position - sinks) % ring"
SEAT = "table + size_t(row_seat[row])"
ROW = "table + size_t(row)"

MUTANTS: tuple[Mutant, ...] = (
    *_barrier("rms_norm", 1, "before sums are joined", "mem_none", "simdgroup"),
    *_of(
        "rms_norm",
        (WRITERS, "all lanes write a sum", "if (lane == 0) sums[simdgroup] = ours", "sums[simdgroup] = ours"),
        (INDEX, "rows as if dense", "x += size_t(row) * sizes.x_stride;\n  out", "x += size_t(row) * width;\n  out"),
        (BOUND, "a sum too many", "lane < simdgroups ?", "lane <= simdgroups ?"),
        (BOUND, "last square", "i < width; i += threads) squares", "i + 1 < width; i += threads) squares"),
        (
            BOUND,
            "a number too many",
            "i < width; i += threads) out[i] = weighted(float(x",
            "i <= width; i += threads) out[i] = weighted(float(x",
        ),
        (LOGIC, "epsilon", "float(width) + eps", "float(width)"),
    ),
    _rounding("rms_norm", "rounding before the weight", "T(float(T(x)) * float(weight))", "T(x * float(weight))"),
    _rounding(
        "rms_norm", "rounding after the weight alone", "? T(x * float(weight))", "? T(float(T(x)) * float(weight))"
    ),
    *_barrier("add_rms_norm", 1, "before sums are joined", "mem_device", "lane"),
    *_of(
        "add_rms_norm",
        (
            MEMORY,
            "the sum read by other threads than wrote it",
            "i = thread_index; i < width; i += threads) out[i] = weighted(float(total",
            "i = width - 1 - thread_index; i < width; i -= threads) out[i] = weighted(float(total",
        ),
        (WRITERS, "rows of the sum", "total += size_t(row) * width;", ""),
        (INDEX, "stride of x for delta's", "* sizes.delta_stride", "* sizes.x_stride"),
        (INDEX, "stride of delta for x's", "* sizes.x_stride;\n  delta", "* sizes.delta_stride;\n  delta"),
        (BOUND, "a sum too many", "i < width; i += threads) {", "i <= width; i += threads) {"),
        (LOGIC, "delta in the norm", "weighted(float(total[i])", "weighted(float(x[i])"),
    ),
    *_of(
        "rope",
        (
            INDEX,
            "tokens and heads",
            "size_t(at.z) * sizes.x_token + size_t(at.y) * sizes.x_head",
            "size_t(at.y) * sizes.x_token + size_t(at.z) * sizes.x_head",
        ),
        (INDEX, "the head's position", "positions[at.z]", "positions[at.y]"),
        (INDEX, "neighbours for halves", "b = float(x[sizes.half_dim])", "b = float(x[1])"),
        (BOUND, "rows of the tables", "* sizes.half_dim + at.x", "* sizes.half_dim + at.x + 1"),
        (WRITERS, "heads", "(size_t(at.z) * sizes.heads + at.y)", "(size_t(at.z) * sizes.heads)"),
        (LOGIC, "a sign", "a * c - b * s", "a * c + b * s"),
    ),
    *_of(
        "silu_mul",
        (INDEX, "rows as if dense", "size_t(at.y) * sizes.stride", "size_t(at.y) * (2 * sizes.width)"),
        (INDEX, "the other half's gate", "x = float(gate_up[0])", "x = float(gate_up[sizes.width])"),
        (BOUND, "the second half", "float(gate_up[sizes.width]))", "float(gate_up[sizes.width + 1]))"),
        (WRITERS, "rows", "out[size_t(at.y) * sizes.width + at.x]", "out[at.x]"),
    ),
    _rounding("silu_mul", "rounding the gate", "const T gate = T(x", "const float gate = (x"),
    *_of(
        "repeat_kv_heads",
        (INDEX, "order of the heads", "at.z / uint(sizes.groups)", "at.z % uint(sizes.groups)"),
        (INDEX, "tokens by heads", "size_t(at.y) * sizes.x_token", "size_t(at.y) * sizes.x_head"),
        (BOUND, "the group", "uint(sizes.groups)", "uint(sizes.groups + 1)"),
        (WRITERS, "tokens", "size_t(at.y) * sizes.out_token + at.x", "at.x"),
    ),
    *_of(
        "quantize",
        (INDEX, "vectors as if dense", "x + size_t(at.y) * sizes.stride", "x + size_t(at.y) * sizes.dim"),
        (BOUND, "the last number's size", "i < n; i += LANES) largest", "i + 1 < n; i += LANES) largest"),
        (BOUND, "a number too many", "i < n; i += LANES) to[i] = char", "i <= n; i += LANES) to[i] = char"),
        (WRITERS, "all lanes write the scale", "if (at.x == 0) scale", "scale"),
        (LOGIC, "numbers after the first 32", "i < n; i += LANES) largest", "i < n; i += n) largest"),
        (LOGIC, "rounding", "char(rint(float(from[i]) / divisor))", "char(float(from[i]) / divisor)"),
        (LOGIC, "other lanes' numbers", "simd_max(largest)", "largest"),
    ),
    *_of(
        "dequantize",
        (INDEX, "vectors as if dense", "size_t(at.y) * sizes.stride + at.x])", "size_t(at.y) * sizes.dim + at.x])"),
        (INDEX, "a scale a number", "scale[at.y];", "scale[at.x];"),
        (BOUND, "the width", "size_t(at.y) * sizes.dim + at.x] =", "size_t(at.y) * (sizes.dim - 1) + at.x] ="),
        (WRITERS, "vectors", "out[size_t(at.y) * sizes.dim + at.x] =", "out[at.x] ="),
        (LOGIC, "the scale", " * scale[at.y];", ";"),
    ),
    *_of(
        "write_kv",
        (INDEX, "keys among values", "keys = {memory, blocks, planes.k", "keys = {memory, blocks, planes.v"),
        (INDEX, "values' stride for keys", "* entering.k_head", "* entering.v_head"),
        (
            INDEX,
            "the row for its seat",
            f"{SEAT} * m.table_width;\n  const Plane<KV>",
            f"{ROW} * m.table_width;\n  const Plane<KV>",
        ),
        (BOUND, "a row's first token", "q_start[middle] <= token", "q_start[middle] < token"),
        (BOUND, "the ring", RING, "(position - sinks) % (ring + 1)"),
        (BOUND, "a number too many", "i < n; i += LANES) to[i] = from", "i <= n; i += LANES) to[i] = from"),
        (WRITERS, "heads", "size_t(head) * sizes.head_stride +", ""),
        (WRITERS, "all lanes write a scale", "if (lane == 0) *(device float*)", "*(device float*)"),
        (LOGIC, "sinks before the ring", f"sinks + {RING}", RING),
        (LOGIC, "padding", "start[row] < 0 || token", "token"),
    ),
    *_of(
        "gather",
        (
            INDEX,
            "the row for its seat",
            f"{SEAT} * m.table_width;\n  const Plane<const KV>",
            f"{ROW} * m.table_width;\n  const Plane<const KV>",
        ),
        (BOUND, "the ring", RING, "(position - sinks) % (ring - 1)"),
        (BOUND, "a number too many", "i < p.dim; i", "i <= p.dim; i"),
        (WRITERS, "heads", "(size_t(at.z) * grid.y + at.y)", "(size_t(at.z) * grid.y)"),
        (LOGIC, "numbers after the first 32", "i < p.dim; i += LANES", "i < p.dim; i += p.dim"),
        (LOGIC, "the scale", "float(vector[i]) * scale_of(vector, dim)", "float(vector[i])"),
    ),
    *_of(
        "copy_blocks",
        (
            INDEX,
            "source and destination",
            "pair.y) * page + at.x] = memory[size_t(pair.x",
            "pair.x) * page + at.x] = memory[size_t(pair.y",
        ),
        (INDEX, "pairs by place", "pairs[at.y]", "pairs[at.x]"),
        (BOUND, "the page", "memory[size_t(pair.x) * page", "memory[size_t(pair.x) * (page - 1)"),
        (WRITERS, "places", "pair.y) * page + at.x] =", "pair.y) * page] ="),
    ),
    *_barrier("decode", 1, "before sums are joined", "mem_none", "simdgroup"),
    *_barrier("decode", 2, "before the next head's sums", "mem_device", "lane"),
    *_of(
        "decode",
        (INDEX, "rows and splits", "+ group_at.y, split = group_at.z", "+ group_at.z, split = group_at.y"),
        (
            INDEX,
            "keys for values",
            "value_plane = {memory, blocks, planes.v",
            "value_plane = {memory, blocks, planes.k",
        ),
        (INDEX, "the row for its seat", SEAT, ROW),
        (BOUND, "the last key", "query + 1), lane", "query), lane"),
        (BOUND, "a simdgroup's last key", "min(begin + LANES, query", "min(begin + LANES - 1, query"),
        (BOUND, "a split's first key", "query < split * SPLIT", "query <= split * SPLIT"),
        (BOUND, "the block's end", "block_size - at % block_size", "block_size - at % block_size + 1"),
        (BOUND, "the ring's end", "sinks + ring - at", "sinks + ring - at + 1"),
        (BOUND, "the window", "distance < window", "distance <= window"),
        (BOUND, "the model's window", "distance < model_window", "distance <= model_window"),
        (BOUND, "sinks", "key < sinks", "key <= sinks"),
        (BOUND, "the head's width, read", "to[n] = lane * N + n < dim", "to[n] = lane * N + n <= dim"),
        (BOUND, "the head's width, written", "if (lane * N + n < dim) to", "if (lane * N + n <= dim) to"),
        (BOUND, "the last simdgroup's sums", "s < SIMDGROUPS; s++", "s + 1 < SIMDGROUPS; s++"),
        (WRITERS, "all lanes write a sum", "if (lane == 0) {\n      tops", "{\n      tops"),
        (WRITERS, "simdgroups", "values[(simdgroup * N + n)", "values[n"),
        (WRITERS, "heads beyond the group", "min(HEADS, a.group - first)", "HEADS"),
        (WRITERS, "splits", "+ head) * splits.count + split;\n      if", "+ head) * splits.count;\n      if"),
        (LOGIC, "raising the maximum", "    top = higher;\n", ""),
        (LOGIC, "lowering what is summed", "total *= factor;", ""),
        (LOGIC, "other lanes' products", "simd_sum(product)", "product"),
        (LOGIC, "the scale of keys", "k_scale = scale_of(key, k_dim)", "k_scale = 1.0f"),
        (LOGIC, "the scale of values", "v_scale = scale_of(value, v_dim)", "v_scale = 1.0f"),
        (LOGIC, "the soft cap", "precise::tanh(score / scoring.softcap)", "(score / scoring.softcap)"),
        (LOGIC, "sinks outside the window", " || key < sinks", ""),
        (LOGIC, "learned sinks", "all, sink_logits[head], planes.v", "all, NOTHING, planes.v"),
    ),
    *_of(
        "merge",
        (
            INDEX,
            "rows and heads",
            "from = (size_t(at.z) * a.q_heads + head)",
            "from = (size_t(head) * a.q_heads + at.z)",
        ),
        (BOUND, "the last split", "split <= start[row] / SPLIT", "split < start[row] / SPLIT"),
        (BOUND, "a split too many", "split <= start[row] / SPLIT", "split <= start[row] / SPLIT + 1"),
        (WRITERS, "heads", "+ size_t(head) * a.out_head;\n", ";\n"),
        (LOGIC, "totals", "partial[from].total, theirs", "1.0f, theirs"),
        (LOGIC, "padding", "if (start[row] < 0) return;\n  Sums", "Sums"),
        (LOGIC, "learned sinks", "all, sink_logits[head], dim", "all, NOTHING, dim"),
    ),
    *_barrier("prefill", 1, "before keys are read", "mem_none", "simdgroup"),
    *_barrier("prefill", 2, "before values come", "mem_device", "lane"),
    *_barrier("prefill", 3, "before values are read", "mem_none", "simdgroup"),
    *_barrier("prefill", 4, "before the next keys come", "mem_device", "lane"),
    *_of(
        "prefill",
        (INDEX, "tokens and heads", "first_token + i / group", "first_token + i % group"),
        (INDEX, "rows", "row = first_row + group_at.z", "row = group_at.z"),
        (INDEX, "the row for its seat", SEAT, ROW),
        (INDEX, "keys for values", "values = {memory, blocks, planes.v", "values = {memory, blocks, planes.k"),
        (BOUND, "a tile's first key", "begin <= span.newest", "begin < span.newest"),
        (BOUND, "a key too many", "j < Shape<N>::KEYS; j", "j <= Shape<N>::KEYS; j"),
        (BOUND, "keys of wide heads", "visible = lane < S::KEYS &&", "visible ="),
        (BOUND, "the last sink", "min(end, mask.sinks) - 1", "min(end, mask.sinks)"),
        (BOUND, "the ring", RING, "(position - sinks) % (ring + 1)"),
        (BOUND, "the window", "distance < window", "distance <= window"),
        (BOUND, "the head's width", "n * LANES + lane < dim", "n * LANES + lane <= dim"),
        (WRITERS, "all lanes write a scale", "if (lane == 0) scales[j] = scale_of", "scales[j] = scale_of"),
        (WRITERS, "simdgroups' weights", "weights + before * S::KEYS", "weights"),
        (WRITERS, "queries beyond the end", "first + r >= all.count", "first + r > all.count"),
        (LOGIC, "clearing keys that nobody sees", "to[d] = KV(0)", ";"),
        (LOGIC, "numbers after the first 32", "d += LANES) to[d] = vector", "d += dim) to[d] = vector"),
        (LOGIC, "other lanes' scores", "simd_max(score)", "score"),
        (LOGIC, "other lanes' weights", "simd_sum(weight)", "weight"),
        (LOGIC, "the scale of keys", "products[r] * tile.scales[key]", "products[r]"),
        (LOGIC, "learned sinks", "sums[r].add_sink(sink_logits[head]);", ""),
    ),
    *_of(
        "linear",
        (INDEX, "rows as if dense", "sizes.rows - 1)) * sizes.x_stride", "sizes.rows - 1)) * sizes.inputs"),
        (
            INDEX,
            "outputs as if dense",
            "sizes.outputs - 1)) * sizes.weight_stride",
            "sizes.outputs - 1)) * sizes.inputs",
        ),
        (INDEX, "bias", "bias[output + o]", "bias[o]"),
        (BOUND, "a row too many", "row + r < sizes.rows", "row + r <= sizes.rows"),
        (BOUND, "an output too many", "output + o < sizes.outputs", "output + o <= sizes.outputs"),
        (BOUND, "the last row for others", "min(row, sizes.rows - 1)", "min(row, sizes.rows)"),
        (BOUND, "the last input", "for (; i < sizes.inputs; i++)", "for (; i + 1 < sizes.inputs; i++)"),
        (WRITERS, "all lanes", "if (lane == 0 && row", "if (row"),
        (WRITERS, "threadgroups", "(group_at.x * SIMDGROUPS + simdgroup)", "simdgroup"),
        (LOGIC, "other lanes' sums", "simd_sum(sums[r][o])", "sums[r][o]"),
        (LOGIC, "sums at 0", "sums[ROWS][OUTPUTS] = {{0.0f}}", "sums[ROWS][OUTPUTS] = {{1.0f}}"),
    ),
    *_of(
        "quantized_linear",
        (INDEX, "numbers of a word", "s % WORD * BITS", "(WORD - 1 - s % WORD) * BITS"),
        (INDEX, "groups of a row", "weight_row * groups.row", "weight_row * groups.size"),
        (BOUND, "bits", "(1u << BITS) - 1u", "(1u << (BITS - 1)) - 1u"),
        (BOUND, "the last inputs", "i < sizes.inputs; i", "i + STEP < sizes.inputs; i"),
        (BOUND, "the last output for others", "min(output + o, sizes.outputs - 1)", "(output + o)"),
        (WRITERS, "all lanes", "if (lane == 0 && row", "if (row"),
        (LOGIC, "inputs after the first 256", "i += LANES * STEP", "i += sizes.inputs"),
        (LOGIC, "offsets", " + float(offset[group]) * totals[r]", ""),
    ),
    *_of(
        "dequantize_weight",
        (INDEX, "groups of a row", "size_t(at.y) * groups.row", "size_t(at.x) * groups.row"),
        (BOUND, "a number too many", "s < STEP; s++)\n    out", "s <= STEP; s++)\n    out"),
        (WRITERS, "outputs", "out[size_t(at.y) * sizes.inputs + i + s]", "out[i + s]"),
        (LOGIC, "offsets", " + float(offset[group]));", ");"),
    ),
)


def markdown() -> str:
    """The table for people; stderr hears how far it is."""
    rows = ["| kernel | mutant | caught by |", "|---|---|---|"]
    with workers() as pool:
        for i, (mutant, by) in enumerate(zip(MUTANTS, pool.map(try_mutant, MUTANTS), strict=True), 1):
            rows.append(f"| `{mutant.kernel}` | {mutant.kind}: {mutant.words} | {by or SURVIVES} |")
            print(f"{i} of {len(MUTANTS)}: {rows[-1]}", file=sys.stderr, flush=True)
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
