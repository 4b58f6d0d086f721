"""The mutants of the Metal kernels: every kind of fault that a kernel can have, planted in each.

A row has the kind, a description, the function or struct, and the change as a `source_pattern`. Equivalent mutants are
left out: sums that begin with other finite numbers while their maximum is NOTHING, as their weight becomes 0; and extra
threads, queries or keys whose results a later condition discards.

`python -m tests.kernels.metal.mutants` prints the table of mutants.md, beside this file.
"""

from __future__ import annotations

import sys

import torch

from tests.kernels.metal.mutation_testing import Kind, Mutant, try_mutant, workers

DROPPED, MEMORY, BRANCH, INDEX, BOUND, WRITERS, LOGIC = Kind

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# What tells the names of a thread's lane and simdgroup.
KERNEL = "uint $lane [[thread_index_in_simdgroup]], uint $simdgroup [[simdgroup_index_in_threadgroup]]"
GROUP_SUM = "uint $lane, uint $simdgroup, uint $simdgroups)"


def _barrier(
    kernel: str, words: str, within: str, names: str, before: str, memory: str, branch: str
) -> tuple[Mutant, ...]:
    """Return the mutants of the barrier before some code."""

    def mutant(kind: Kind, words: str, by: str) -> Mutant:
        return Mutant(kernel, kind, words, within, f"{names} ... «{BARRIER}→{by}» {before}")

    return (
        mutant(DROPPED, words, ""),
        mutant(MEMORY, f"{memory} {words}", f"threadgroup_barrier(mem_flags::{memory});"),
        mutant(BRANCH, f"{branch} {words}", f"if (${branch} == 0) {BARRIER}"),
    )


def _of(kernel: str, *rows: tuple[Kind, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(kernel, *row) for row in rows)


def _rounding(kernel: str, words: str, within: str, change: str) -> Mutant:
    return Mutant(kernel, LOGIC, words, within, change, dtype=torch.bfloat16)


SURVIVES = "**nothing**"

MUTANTS: tuple[Mutant, ...] = (
    *_barrier("rms_norm", "before sums are joined", "group_sum", GROUP_SUM, "return", "mem_none", "simdgroup"),
    *_of(
        "rms_norm",
        (WRITERS, "all lanes write a sum", "group_sum", "«if ($lane == 0)→» $sums[$simdgroup] = $ours"),
        (
            INDEX,
            "rows as if dense",
            "rms_norm",
            "const uint $width = uint($sizes.$columns); ... $x += size_t($row) * «$sizes.$x_stride→$width»",
        ),
        (BOUND, "a sum too many", "group_sum", "$lane «<→<=» $simdgroups ?"),
        (BOUND, "last square", "rms_norm", "$i«→ + 1» < $width; $i += $threads) $squares +="),
        (BOUND, "a number too many", "rms_norm", "$i «<→<=» $width; $i += $threads) $out[$i] = weighted(float($x"),
        (LOGIC, "epsilon", "factor_of", "float($width) «+ $eps→»"),
    ),
    _rounding("rms_norm", "rounding before the weight", "weighted", "T(«float(T($x))→$x» * float($weight))"),
    _rounding("rms_norm", "rounding after the weight alone", "weighted", "? T(«$x→float(T($x))» * float($weight))"),
    *_barrier("add_rms_norm", "before sums are joined", "group_sum", GROUP_SUM, "return", "mem_device", "lane"),
    *_of(
        "add_rms_norm",
        (
            MEMORY,
            "the sum read by other threads than wrote it",
            "add_rms_norm",
            "$i =«→ $width - 1 -» $thread_index; $i < $width; $i «+=→-=» $threads) $out[$i] = weighted(float($total",
        ),
        (
            WRITERS,
            "rows of the sum",
            "add_rms_norm",
            "«$total += size_t($row) * $width;→» $out += size_t($row) * $width;",
        ),
        (
            INDEX,
            "stride of x for delta's",
            "add_rms_norm",
            "* $sizes.$x_stride; $delta += ... * $sizes.«$delta_stride→$x_stride»",
        ),
        (
            INDEX,
            "stride of delta for x's",
            "add_rms_norm",
            "* $sizes.«$x_stride→$delta_stride»; $delta += size_t($row) * $sizes.$delta_stride",
        ),
        (BOUND, "a sum too many", "add_rms_norm", "$i «<→<=» $width; $i += $threads) {"),
        (LOGIC, "delta in the norm", "add_rms_norm", "float($x[$i]) + ... weighted(float(«$total→$x»[$i])"),
    ),
    *_of(
        "rope",
        (
            INDEX,
            "tokens and heads",
            "rope",
            "size_t(«$at.z→$at.y») * $sizes.$x_token + size_t(«$at.y→$at.z») * $sizes.$x_head",
        ),
        (INDEX, "the head's position", "rope", "$indexs[«$at.z→$at.y»]"),
        (INDEX, "neighbours for halves", "rope", "$b = float($x[«$sizes.$half_dim→1»])"),
        (BOUND, "rows of the tables", "rope", "size_t($indexs[$at.z]) * $sizes.$half_dim + $at.x«→ + 1»"),
        (WRITERS, "heads", "rope", "(size_t($at.z) * $sizes.$heads «+ $at.y→»)"),
        (LOGIC, "a sign", "rope", "$a * $c «-→+» $b * $s"),
    ),
    *_of(
        "silu_mul",
        (
            INDEX,
            "rows as if dense",
            "GateSizes silu_mul",
            "int $width, $stride; ... size_t($at.y) * «$sizes.$stride→(2 * $sizes.$width)»",
        ),
        (
            INDEX,
            "the other half's gate",
            "GateSizes silu_mul",
            "int $width, $stride; ... * $sizes.$stride ... $x = float($gate_up[«0→$sizes.$width»])",
        ),
        (BOUND, "the second half", "silu_mul", "float($gate_up[$sizes.$width«→ + 1»]))"),
        (WRITERS, "rows", "silu_mul", "$out[«size_t($at.y) * $sizes.$width +→» $at.x]"),
    ),
    _rounding("silu_mul", "rounding the gate", "silu_mul", "const «T→float» $gate = «T→»($x"),
    *_of(
        "repeat_kv_heads",
        (INDEX, "order of the heads", "repeat_kv_heads", "$at.z «/→%» uint($sizes.$groups)"),
        (
            INDEX,
            "tokens by heads",
            "RepeatSizes repeat_kv_heads",
            "int $groups, $x_token, $x_head, ... size_t($at.y) * $sizes.«$x_token→$x_head»",
        ),
        (BOUND, "the group", "repeat_kv_heads", "uint($sizes.$groups«→ + 1»)"),
        (WRITERS, "tokens", "repeat_kv_heads", "«size_t($at.y) * $sizes.$out_token +→» $at.x"),
    ),
    *_of(
        "write_kv",
        (BOUND, "the last number's size", "write_vector", "$i«→ + 1» < $n; $i += LANES) $largest = max"),
        (BOUND, "an int8 number too many", "write_vector", "$i «<→<=» $n; $i += LANES) $to[$i] = char"),
        (LOGIC, "numbers after the first 32", "write_vector", "$i < $n; $i += «LANES→$n») $largest = max"),
        (LOGIC, "rounding", "write_vector", "char(«rint(float($from[$i]) / $divisor)→float($from[$i]) / $divisor»)"),
        (LOGIC, "other lanes' numbers", "write_vector", "«simd_max($largest)→$largest»"),
        (
            INDEX,
            "keys among values",
            "Planes write_kv",
            "PlaneSizes $k, $v; ... {(device K*)$memory, $blocks, $planes.«$k→$v»",
        ),
        (
            INDEX,
            "values' stride for keys",
            "Entering write_kv",
            "int $k_token, $k_head, $v_token, $v_head; ... * $entering.«$k_head→$v_head»",
        ),
        (
            INDEX,
            "the row for its seat",
            "write_kv",
            "$table + size_t(«$table_row[$own]→$own») * $m.$table_width; const Plane<K>",
        ),
        (BOUND, "a row's first token", "row_of", "$q_start[$middle] «<=→<» $token"),
        (BOUND, "the ring", "slot", "($index - $sinks) % «$ring→($ring + 1)»"),
        (BOUND, "a number too many", "write_vector", "$i «<→<=» $sizes.$dim; $i += LANES) $to[$i] = $from"),
        (WRITERS, "heads", "at", "«size_t($head) * $sizes.$head_stride +→»"),
        (WRITERS, "all lanes write a scale", "write_vector", "«if ($lane == 0)→» *(device float*)"),
        (LOGIC, "sinks before the ring", "slot", "«$sinks +→» ($index - $sinks) % $ring"),
        (LOGIC, "padding", "write_kv", "«$start[$own] < 0 ||→» $token"),
        (INDEX, "even and odd fours of int4", "write_vector", "$four % 2 == 0 ? «$even→$odd» : «$odd→$even»"),
        (INDEX, "the word's other half", "write_vector", "$w == 0 ? «$i→$high» : «$high→$i»"),
        (BOUND, "a short group's size", "Grouped", "min(MOST_GROUPED, $dim «- $begin→»)"),
        (BOUND, "a group's lanes", "Rounding", "$distance < LANES_OF_GROUP«→ / 2»"),
        (
            BOUND,
            "the middle of a group",
            "write_vector",
            "$at.$size / 2 - $first «→+ 1 »: 0",
        ),
        (WRITERS, "all lanes write int4's scale", "write_vector", "«if ($i == 0)→» ((device uint*)"),
        (
            LOGIC,
            "other lanes' least number",
            "Rounding",
            "$least = min($least, «simd_shuffle_xor($least, ushort($distance))→$least»); $largest",
        ),
        (LOGIC, "numbers that are not finite", "Rounding", "«$finite != 0.0f &&→» is_number($scale)"),
        (LOGIC, "rounding a scale", "bfloat_bits", "($bits «+ 0x7FFFu + ($bits >> 16 & 1u)→») >> 16"),
        (LOGIC, "rounding int4", "Rounding", "clamp(«rint($x / $divisor)→$x / $divisor»"),
        (
            LOGIC,
            "numbers beyond 15",
            "Rounding",
            "uint(«clamp(rint($x / $divisor) + float(MIDDLE), 0.0f, 15.0f)→rint($x / $divisor) + float(MIDDLE)»)",
        ),
        (LOGIC, "the middle of int4", "Rounding", "rint($x / $divisor) «+ float(MIDDLE)→»"),
        (
            LOGIC,
            "rotation",
            "write_vector",
            "«if (is_rotated<uchar>($sizes)) rotate<EIGHT, EIGHT>($numbers, $dim, $lane);→»",
        ),
        (LOGIC, "vectors that are not rotated", "is_rotated", "is_same_v<Stored, uchar> «&& $plane.$rotated != 0→»"),
        (LOGIC, "a sign between lanes", "add_and_subtract_lanes", "$other «-→+» $numbers[$n]"),
        (LOGIC, "a sign within a lane", "add_and_subtract", "$first «-→+» $second"),
        (BOUND, "the last step of the transform", "rotate", "if ($distance«→ * 2» >= $size) break"),
        (LOGIC, "the transform's factor", "rotate", "«$numbers[$n] *= $factor→»"),
        (LOGIC, "the root of two", "inverse_root", "return «$size == 2 ? $root * 0.70710678118654752f :→» $root"),
    ),
    *_of(
        "gather",
        (
            INDEX,
            "the row for its seat",
            "gather",
            "$table + size_t(«$table_row[$m.own($row, $head)]→$row») * $m.$table_width; const Plane<const K>",
        ),
        (BOUND, "the ring", "slot", "($index - $sinks) % «$ring→($ring - 1)»"),
        (BOUND, "a number too many", "read_vector", "$i «<→<=» $sizes.$dim; $i += LANES) $out[$i] = $from[$i];"),
        (BOUND, "an int8 number too many", "read_vector", "$i «<→<=» $sizes.$dim; $i += LANES) $out[$i] = float("),
        (BOUND, "an int4 number too many", "read_vector", "EIGHT + $n «<→<=» $sizes.$dim"),
        (WRITERS, "heads", "gather", "size_t($at.z) * $grid.y «+ $at.y→»"),
        (
            LOGIC,
            "numbers after the first 32",
            "read_vector",
            "$i < $sizes.$dim; $i += «LANES→$sizes.$dim») $out[$i] = $from[$i];",
        ),
        (LOGIC, "the scale", "read_vector", "float($from[$i]) «* $scale→»"),
        (INDEX, "low and high bits of int4", "Grouped", "$number - $begin «>=→<» $size / 2"),
        (INDEX, "another group's scale", "read_numbers", "«$at.$begin / MOST_GROUPED→0»"),
        (INDEX, "the scale of the other half", "read_numbers", "«$scales & 0xFFFF0000u→$scales << 16» : $scales << 16"),
        (BOUND, "half of a group", "Grouped", "? $size / 2«→ - 1» : 0"),
        (LOGIC, "the middle of int4", "read_numbers", "15u) «- MIDDLE→») * $scale"),
        (
            LOGIC,
            "rotation",
            "read_vector",
            "«if (is_rotated<uchar>($sizes)) rotate<EIGHT, EIGHT>($numbers, $sizes.$dim, $lane);→»",
        ),
    ),
    *_of(
        "copy_blocks",
        (
            INDEX,
            "source and destination",
            "copy_blocks",
            "«$pair.y→$pair.x») * $page + $at.x] = $memory[size_t(«$pair.x→$pair.y»",
        ),
        (INDEX, "pairs by place", "copy_blocks", "$pairs[«$at.y→$at.x»]"),
        (BOUND, "the page", "copy_blocks", "$memory[size_t($pair.x) * «$page→($page - 1)»"),
        (WRITERS, "places", "copy_blocks", "$pair.y) * $page «+ $at.x→»] ="),
    ),
    *_of(
        "copy_tokens",
        (
            INDEX,
            "source and destination",
            "copy_tokens",
            "long* $src ... long* $dst ... HeadSlot $source = {«$src→$dst»[$at.z * $s.$src_token",
        ),
        (
            INDEX,
            "slots of another head",
            "copy_tokens",
            "long* $src [[buffer(2)]] ... HeadSlot $source = {$src[$at.z * $s.$src_token «+ $at.y * $s.$src_head→»]",
        ),
        (
            INDEX,
            "keys for values",
            "Planes copy_tokens",
            "PlaneSizes $k, $v; ... copy_vector($to + $target.$index($written.«$v→$k»)",
        ),
        (BOUND, "the block", "HeadSlot", "size_t($slot / «$block_size→($block_size + 1)»)"),
        (BOUND, "a number too many", "copy_vector", "$i «<→<=» int($p.$vector_stride)"),
        (WRITERS, "heads", "HeadSlot", "«+ size_t($head) * $p.$head_stride→»"),
        (WRITERS, "slots of a block", "HeadSlot", "«+ size_t($slot % $block_size) * $p.$vector_stride→»"),
        (
            LOGIC,
            "numbers after the first 32",
            "copy_vector",
            "$i < int($p.$vector_stride); $i += «LANES→int($p.$vector_stride)») $to[$i]",
        ),
        (
            LOGIC,
            "the scale",
            "PlaneSizes copy_vector",
            "long $dim, $offset, $block_stride, ... $i < int($p.«$vector_stride→$dim»)",
        ),
    ),
    *_barrier("decode", "before sums are joined", "decode", KERNEL, "if", "mem_none", "simdgroup"),
    *_barrier("decode", "before the next head's sums", "decode", KERNEL, "}", "mem_device", "lane"),
    *_of(
        "decode",
        (INDEX, "rows and splits", "decode", "+ «$group_at.y→$group_at.z», $split = «$group_at.z→$group_at.y»"),
        (
            INDEX,
            "keys for values",
            "Planes decode",
            "PlaneSizes $k, $v; ... {(const device V*)$memory, $blocks, $planes.«$v→$k»",
        ),
        (INDEX, "the row for its seat", "decode", "$table + size_t(«$table_row[$own]→$own»)"),
        (BOUND, "the last key", "decode", "$query «+ 1→»), $lane"),
        (BOUND, "a simdgroup's last key", "decode", "min($begin + LANES«→ - 1», $query"),
        (BOUND, "a split's first key", "decode", "$query «<→<=» $split * SPLIT"),
        (BOUND, "the block's end", "run", "$block_size - $at % $block_size«→ + 1»"),
        (BOUND, "the ring's end", "run", "$sinks + $ring - $at«→ + 1»"),
        (BOUND, "the window", "sees", "($query - $key «<→<=» $window"),
        (BOUND, "the model's window", "oldest_of", "$query - $model_window «+ 1→»"),
        (INDEX, "a window of another head", "mask_of", "$first * $m.$heads «+ ($m.$heads > 1 ? $head : 0)→»"),
        (INDEX, "addresses of another head", "own", "$row * $heads «+ $head→»"),
        (INDEX, "a head as if not split", "head_in_block", "return «$heads > 1 ? 0 : $head→$head»"),
        (BOUND, "sinks", "sees", "|| $key «<→<=» $sinks"),
        (BOUND, "the head's width, read", "read_numbers", "$to[$n] = $lane * N + $n «<→<=» $dim"),
        (BOUND, "the head's width, written", "write_numbers", "if ($lane * N + $n «<→<=» $dim) $to"),
        (BOUND, "the last simdgroup's sums", "joined", "$s«→ + 1» < SIMDGROUPS; $s++"),
        (WRITERS, "all lanes write a sum", "put", "«if ($lane == 0)→» { $tops"),
        (WRITERS, "simdgroups", "put", "$values[«($simdgroup * N + $n)→$n»"),
        (WRITERS, "heads beyond the group", "decode", "«min(HEADS, $a.$group - $first)→HEADS»"),
        (WRITERS, "splits", "decode", "+ $head) * $splits.$count «+ $split→»; if"),
        (LOGIC, "raising the maximum", "raise", "«$top = $higher;→»"),
        (LOGIC, "lowering what is summed", "raise", "«$total *= $factor;→»"),
        (LOGIC, "other lanes' products", "add", "«simd_sum($product)→$product»"),
        (LOGIC, "the scale of int8", "read_numbers", ">> 24) «* $scale→»"),
        (LOGIC, "the sign of int8", "read_numbers", "float(«int→»($word << (24 - 8 * $s)) >> 24)"),
        (BOUND, "bits of int4", "read_numbers", "$word >> (8 * $s) & «15u→7u»"),
        (LOGIC, "rotation of queries", "load", "«if (is_rotated<K>($keys)) rotate<N, N>($query, $keys.$dim, $lane);→»"),
        (
            LOGIC,
            "rotation of outputs",
            "finish",
            "«if (is_rotated<V>($values)) rotate<N, N>($output, $values.$dim, $lane);→»",
        ),
        (LOGIC, "rotation of keys for values'", "finish", "if (is_rotated<«V→K»>($values))"),
        (LOGIC, "the soft cap", "score_of", "«precise::tanh→»($score / $scoring.$softcap)"),
        (LOGIC, "sinks outside the window", "sees", "«|| $key < $sinks→»"),
        (LOGIC, "learned sinks", "decode", "$all, «$sink_logits[$head]→NOTHING», $planes.$v"),
        (WRITERS, "all lanes write the sum's logarithm", "finish", "!= nullptr «&& $lane == 0→»"),
        (LOGIC, "the maximum in the sum's logarithm", "lse", "return «$top +→» precise::log"),
    ),
    *_of(
        "merge",
        (INDEX, "rows and heads", "merge", "$from = (size_t(«$at.z→$head») * $a.$q_heads + «$head→$at.z»)"),
        (BOUND, "the last split", "merge", "$split «<=→<» $query / SPLIT"),
        (BOUND, "a split too many", "merge", "$split <= $query / SPLIT«→ + 1»"),
        (WRITERS, "heads", "merge", "«+ size_t($head) * $a.$out_head→»;"),
        (LOGIC, "totals", "merge", ", «$partial[$from].$total→1.0f», $theirs)"),
        (LOGIC, "padding", "merge", "«if ($query < 0) return;→» Sums"),
        (LOGIC, "learned sinks", "merge", "$all, «$sink_logits[$head]→NOTHING», $v"),
        (
            INDEX,
            "the token of a sum's logarithm",
            "merge",
            "$row = $splits.$first_row + $at.z; ... lse_of($lse, $a, «$token→$row», $head)",
        ),
    ),
    *_barrier("prefill", "before keys are read", "prefill", KERNEL, "$ours.score", "mem_none", "simdgroup"),
    *_barrier("prefill", "before values come", "prefill", KERNEL, "$tile.fetch", "mem_device", "lane"),
    *_barrier("prefill", "before values are read", "prefill", KERNEL, "$ours.add", "mem_none", "simdgroup"),
    *_barrier("prefill", "before the next keys come", "prefill", KERNEL, "}", "mem_device", "lane"),
    *_of(
        "prefill",
        (INDEX, "tokens and heads", "token", "$first_token + $i «/→%» $group"),
        (INDEX, "rows", "prefill", "$row = «$first_row +→» $group_at.z"),
        (INDEX, "the row for its seat", "prefill", "$table + size_t(«$table_row[$own]→$own»)"),
        (INDEX, "windows as if heads were alike", "oldest_of", "$window_start[($query - $start) «* $stride→»]"),
        (
            INDEX,
            "keys for values",
            "Planes prefill",
            "PlaneSizes $k, $v; ... {(const device V*)$memory, $blocks, $planes.«$v→$k»",
        ),
        (BOUND, "a tile's first key", "prefill", "$begin «<=→<» $span.$newest"),
        (BOUND, "a key too many", "fetch", "$j «<→<=» Shape<N>::KEYS; $j"),
        (BOUND, "keys of wide heads", "score", "$visible = «$lane < S::KEYS &&→»"),
        (BOUND, "the last sink", "any_sees", "min($end, $mask.$sinks) «- 1→»"),
        (BOUND, "the ring", "slot", "($index - $sinks) % «$ring→($ring + 1)»"),
        (BOUND, "the window", "sees", "($query - $key «<→<=» $window"),
        (BOUND, "the head's width", "write", "$n * LANES + $lane «<→<=» $values.$dim"),
        (WRITERS, "all lanes write of a vector", "fetch", "«if ($lane == 0)→» $sound[$j]"),
        (WRITERS, "simdgroups' weights", "prefill", "$weights «+ $before * S::KEYS→»"),
        (WRITERS, "queries beyond the end", "write", "$first + $r «>=→>» $all.$count"),
        (WRITERS, "lanes of a vector", "fetch", "$j * Shape<N>::PITCH «+ $lane * N→»"),
        (LOGIC, "other lanes' scores", "score", "«simd_max($score)→$score»"),
        (LOGIC, "other lanes' weights", "score", "«simd_sum($weight)→$weight»"),
        (LOGIC, "rotation of queries", "load", "«if (is_rotated<K>($keys)) rotate<N, N>($query, $keys.$dim, $lane);→»"),
        (
            LOGIC,
            "rotation of outputs",
            "write",
            "«if (is_rotated<V>($values)) rotate<N, 1>($output, $values.$dim, $lane);→»",
        ),
        (INDEX, "runs of outputs", "write", "rotate<N, «1→N»>"),
        (LOGIC, "learned sinks", "write", "«$sums[$r].add_sink($sink_logits[$head]);→»"),
        (INDEX, "the place of a sum's logarithm", "write", "lse_of($lse, $a, «$token→$head», «$head→$token»)"),
        (WRITERS, "all lanes write a sum's logarithm", "write", "!= nullptr «&& $lane == 0→»"),
    ),
    *_of(
        "linear",
        (
            INDEX,
            "rows as if dense",
            "LinearSizes row_at",
            "int $rows, $inputs, $outputs; ... $sizes.$rows - 1)) * $sizes.«$x_stride→$inputs»",
        ),
        (
            INDEX,
            "outputs as if dense",
            "LinearSizes linear",
            "int $rows, $inputs, $outputs; ... $sizes.$outputs - 1)) * $sizes.«$weight_stride→$inputs»",
        ),
        (INDEX, "bias", "finish", "$bias[«$output +→» $o]"),
        (BOUND, "a row too many", "finish", "$lane == 0 && $row + $r «<→<=» $sizes.$rows"),
        (BOUND, "an output too many", "finish", "$sizes.$rows && $output + $o «<→<=» $sizes.$outputs"),
        (BOUND, "the last row for others", "row_at", "min($row, $sizes.$rows «- 1→»)"),
        (BOUND, "the last input", "linear", "for (; $i«→ + 1» < $sizes.$inputs; $i++)"),
        (WRITERS, "all lanes", "finish", "if («$lane == 0 &&→» $row"),
        (WRITERS, "threadgroups", "linear", "«($group_at.x * SIMDGROUPS + $simdgroup)→$simdgroup»"),
        (LOGIC, "other lanes' sums", "finish", "«simd_sum($sums[$r][$o])→$sums[$r][$o]»"),
        (LOGIC, "sums at 0", "Product", "$sums[ROWS][OUTPUTS] = {{«0.0f→1.0f»}}"),
    ),
    *_of(
        "quantized_linear",
        (INDEX, "numbers of a word", "unpack", "«$s % WORD→(WORD - 1 - $s % WORD)» * BITS"),
        (INDEX, "groups of a row", "quantized_linear", "$weight_row * $groups.«$row→$size» + $i / $groups.$size"),
        (BOUND, "bits", "unpack", "(1u << «BITS→(BITS - 1)») - 1u"),
        (BOUND, "the last inputs", "quantized_linear", "$i«→ + STEP» < $sizes.$inputs; $i"),
        (
            BOUND,
            "the last output for others",
            "quantized_linear",
            "«min($output + $o, $sizes.$outputs - 1)→($output + $o)»",
        ),
        (WRITERS, "all lanes", "finish", "if («$lane == 0 &&→» $row"),
        (
            LOGIC,
            "inputs after the first 256",
            "quantized_linear",
            "$i < $sizes.$inputs; $i += «LANES * STEP→$sizes.$inputs»",
        ),
        (LOGIC, "offsets", "quantized_linear", "«+ float($offset[$group]) * $totals[$r]→»"),
    ),
    *_of(
        "dequantize_weight",
        (INDEX, "groups of a row", "dequantize_weight", "$group = size_t(«$at.y→$at.x») * $groups.$row"),
        (BOUND, "a number too many", "dequantize_weight", "$s «<→<=» STEP; $s++) $out"),
        (WRITERS, "outputs", "dequantize_weight", "$out[«size_t($at.y) * $sizes.$inputs +→» $i + $s]"),
        (LOGIC, "offsets", "dequantize_weight", "«+ float($offset[$group])→»);"),
    ),
    *_of(
        "block_linear",
        (INDEX, "blocks of a row", "Format", "$row + $column / BLOCK_COLUMNS * «BLOCK_BYTES→BLOCK_COLUMNS»"),
        (INDEX, "numbers of a run", "Field", "$column / COLUMNS * RUN + $place % «RUN→COLUMNS»"),
        (BOUND, "bits", "Field", "(1u << «BITS→(BITS - 1)») - 1u"),
        (BOUND, "the last inputs", "block_linear", "$i«→ + STEP» < $sizes.$inputs; $i"),
        (
            BOUND,
            "the last output for others",
            "block_linear",
            "«min($output + $o, $sizes.$outputs - 1)→($output + $o)»",
        ),
        (WRITERS, "all lanes", "finish", "if («$lane == 0 &&→» $row"),
        (LOGIC, "the higher bits", "Format", "«| $High::get($block, $first + $s) << $Low::WIDTH % 32→»"),
        (LOGIC, "the sign", "Signed", "«- 128→»"),
        (LOGIC, "offsets", "block_linear", "«+ $scales.y * $totals[$r]→»"),
        (LOGIC, "the later groups' scales", "ScalesOfQ4K", "«$group < 4 ?→true ?» $low & 63u : ($both & 15u)"),
        (
            LOGIC,
            "the sign of scales",
            "ScalesOfQ6K",
            "«Signed::get($block[192 + $column / 16])→float($block[192 + $column / 16])»",
        ),
        (LOGIC, "the zero of scales", "ScalesOfQ3K", "(int($scale) «- 32→»)"),
    ),
    *_of(
        "dequantize_blocks",
        (BOUND, "a number too many", "dequantize_blocks", "$s «<→<=» STEP; $s++) $out"),
        (WRITERS, "outputs", "dequantize_blocks", "$out[«size_t($at.y) * $sizes.$inputs +→» $i + $s]"),
        (INDEX, "bytes of a row", "dequantize_blocks", "$blocks + size_t(«$at.y→$at.x») * $sizes"),
        (LOGIC, "offsets", "dequantize_blocks", "«+ $scales.y→»);"),
    ),
)


def markdown() -> str:
    """Return the table of mutants.md; print the progress to stderr."""
    rows = ["| kernel | mutant | caught by |", "|---|---|---|"]
    with workers() as pool:
        for i, (mutant, by) in enumerate(zip(MUTANTS, pool.map(try_mutant, MUTANTS), strict=True), 1):
            rows.append(f"| `{mutant.kernel}` | {mutant.kind}: {mutant.words} | {by or SURVIVES} |")
            print(f"{i} of {len(MUTANTS)}: {rows[-1]}", file=sys.stderr, flush=True)
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
