"""The two kernels of `paged_attention`: one attends from a tile of rows to a span of keys, one joins a row's spans.

A tile's rows are (query token, head of one key head's group). Scores, sums and spans are fp32, weights are rounded to
q's type before they meet V; a span's output is normalised and carries its log-sum-exp in powers of two.
"""

from kernels.dispatch import tl, triton


@triton.jit
def paged_kernel(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, tree_mask, tree_words, sinks, k_scale, v_scale,
    spans, spans_lse,
    stride_qn, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, stride_tb, stride_mn,
    stride_kc, stride_vc, stride_sn, stride_sh, stride_ss, stride_ln, stride_lh,
    num_words, num_sequences, num_splits, span, tiles, group_size, window, scale_log2, cap_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, FIXED_SPAN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Attend a tile of one sequence's queries to one span of its keys; PACKED for several tokens a sequence."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if PACKED:
        # sequence s owns the tiles from cu[s] * group // BLOCK_M + s on: enough for its rows, none in common
        ids = tl.arange(0, BLOCK_B)
        starts = tl.load(cu_seqlens_q + ids, mask=ids < num_sequences, other=0)
        is_before = (starts * group_size // BLOCK_M + ids <= tile) & (ids < num_sequences)
        sequence = tl.sum(is_before.to(tl.int32), 0) - 1
        first_token = tl.load(cu_seqlens_q + sequence)
        n_q = tl.load(cu_seqlens_q + sequence + 1) - first_token
        tile = tile - (first_token * group_size // BLOCK_M + sequence)
    else:
        sequence = tile // tiles
        tile = tile % tiles
        first_token = sequence
        n_q = 1
    if tile * BLOCK_M >= n_q * group_size:
        return
    length = tl.load(context_lens + sequence)
    prefix = length - n_q
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < n_q * group_size
    token = offs_m // group_size
    position = prefix + token
    rows = first_token.to(tl.int64) + token
    heads = kv_head * group_size + offs_m % group_size
    last = length
    first = 0
    if HAS_TREE:
        if HAS_WINDOW:
            offs_w = tl.arange(0, BLOCK_W)
            tree_rows = tl.load(tree_mask + rows[:, None] * stride_mn + offs_w[None, :],
                                mask=is_row[:, None] & (offs_w < n_q)[None, :], other=0)
            position = prefix + tl.sum(tree_rows.to(tl.int32), 1) - 1
            first = tl.maximum(prefix - window, 0)
    else:
        last = tl.minimum(prefix + (tile * BLOCK_M + BLOCK_M - 1) // group_size + 1, length)
        if HAS_WINDOW:
            first = tl.maximum(prefix + tile * BLOCK_M // group_size + 1 - window, 0)
    # spans are whole steps, so that a step never crosses into the next span
    start = first // BLOCK_N * BLOCK_N
    end = last
    if SPLIT:
        if FIXED_SPAN:
            start = tl.maximum(start, split * span)
            end = tl.minimum(last, split * span + span)
        else:
            share = tl.cdiv(tl.cdiv(last - start, num_splits), BLOCK_N) * BLOCK_N
            start = start + split * share
            end = tl.minimum(start + share, last)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    q_rows = q + rows[:, None] * stride_qn + heads[:, None] * stride_qh
    q_tile = tl.load(q_rows + offs_d[None, :], mask=is_row[:, None] & (offs_d < D)[None, :], other=0.0)
    if REST > 0:
        offs_r = BLOCK_D + tl.arange(0, REST)
        q_rest = tl.load(q_rows + offs_r[None, :], mask=is_row[:, None], other=0.0)
    if HAS_SCALES:
        scale_log2 = scale_log2 * tl.load(k_scale + kv_head * stride_kc)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if HAS_SINKS:
        # the first span takes the sink in, as a key without a value
        is_first = tl.zeros([BLOCK_M], dtype=tl.int32) + split == 0
        sink = tl.load(sinks + heads, mask=is_row & is_first, other=float("-inf"))
        row_max = sink * 1.4426950408889634
        row_sum += tl.where(sink == float("-inf"), 0.0, 1.0)
    table = block_table + sequence.to(tl.int64) * stride_tb
    for n in tl.range(start, end, BLOCK_N):
        tokens = n + offs_n
        seen = tokens < end
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + n // PAGE).to(tl.int64)
            rows_k = page * stride_kp + (tokens % PAGE).to(tl.int64) * stride_kt
            rows_v = page * stride_vp + (tokens % PAGE).to(tl.int64) * stride_vt
        else:
            pages = tl.load(table + tokens // PAGE, mask=seen, other=0).to(tl.int64)
            rows_k = pages * stride_kp + (tokens % PAGE) * stride_kt
            rows_v = pages * stride_vp + (tokens % PAGE) * stride_vt
        k_rows = k_cache + rows_k[:, None] + kv_head * stride_kh
        k_tile = tl.load(k_rows + offs_d[None, :], mask=seen[:, None] & (offs_d < D)[None, :], other=0.0)
        if HAS_SCALES:
            k_tile = k_tile.to(tl.float16).to(q_tile.dtype)  # every E4M3 value is exact in fp16 and bf16
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(k_rows + offs_r[None, :], mask=seen[:, None], other=0.0)
            if HAS_SCALES:
                k_rest = k_rest.to(tl.float16).to(q_tile.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale_log2
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities
            scores = cap_log2 * (1.0 - 2.0 / (tl.math.exp2(scores / cap_log2 * 2.8853900817779268) + 1.0))
        if HAS_TREE:
            # each row's 64 bits from this step's first token on, out of the two words that hold them
            draft = n - prefix
            word = tl.zeros([BLOCK_M], dtype=tl.int32) + (draft >> 6)
            shift_right = (draft & 63).to(tl.uint64)
            row_words = tree_words + rows * num_words + word
            low = tl.load(row_words, mask=is_row & (word >= 0) & (word < num_words), other=0)
            high = tl.load(row_words + 1, mask=is_row & (word >= -1) & (word + 1 < num_words), other=0)
            low = low.to(tl.uint64, bitcast=True)
            high = high.to(tl.uint64, bitcast=True)
            bits = (low >> shift_right) | ((high << 1) << (63 - shift_right))
            is_prefix = seen & (tokens < prefix)
            in_tree = ((bits[:, None] >> offs_n.to(tl.uint64)[None, :]) & 1) != 0
            visible = is_prefix[None, :] | (in_tree & (seen & (tokens >= prefix))[None, :])
        elif PACKED:
            visible = seen[None, :] & (tokens[None, :] <= position[:, None])
        else:
            visible = seen[None, :]
        if HAS_WINDOW:
            visible = visible & (tokens[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key keeps -inf, which must not meet itself in a subtraction
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - shift[:, None])
        rescale = tl.math.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if SHARED:
            v_tile = k_tile
        else:
            v_tile = tl.load(v_cache + rows_v[:, None] + kv_head * stride_vh + offs_v[None, :],
                             mask=seen[:, None] & (offs_v < DV)[None, :], other=0.0)
            if HAS_SCALES:
                v_tile = v_tile.to(tl.float16).to(q_tile.dtype)
        acc = tl.dot(weights.to(q_tile.dtype), v_tile, acc, input_precision="ieee")
        row_max = new_max
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / safe_sum[:, None]
    if HAS_SCALES:
        acc = acc * tl.load(v_scale + kv_head * stride_vc)
    out = spans + rows[:, None] * stride_sn + heads[:, None] * stride_sh + split * stride_ss + offs_v[None, :]
    tl.store(out, acc.to(spans.dtype.element_ty), mask=is_row[:, None] & (offs_v < DV)[None, :])
    if SPLIT:
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.math.log2(safe_sum))
        tl.store(spans_lse + rows * stride_ln + heads * stride_lh + split, lse, mask=is_row)


@triton.jit
def join_kernel(
    spans, spans_lse, out, stride_sn, stride_sh, stride_ss, stride_ln, stride_lh, stride_on, stride_oh, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """Join the spans of one row and head by their log-sum-exps, in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_DV)
    joined = tl.zeros([BLOCK_DV], dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    # spans without keys weigh nothing: with a fixed BLOCK_S their number changes no bit
    for s in tl.range(0, num_splits, BLOCK_S):
        offs_s = s + tl.arange(0, BLOCK_S)
        is_split = offs_s < num_splits
        lse = tl.load(spans_lse + row * stride_ln + head * stride_lh + offs_s, mask=is_split, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.math.exp2(lse - shift)
        rescale = tl.math.exp2(largest - shift)
        part = tl.load(spans + row * stride_sn + head * stride_sh + offs_s[:, None] * stride_ss + offs_d[None, :],
                       mask=is_split[:, None] & (offs_d < DV)[None, :], other=0.0)
        joined = joined * rescale + tl.sum(part * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * stride_on + head * stride_oh + offs_d, joined.to(out.dtype.element_ty), mask=offs_d < DV)
