"""Chunk-parallel part of the forward and of the backward: for each chunk and value head

    A = (I + diag(beta) M)^-1 diag(beta)    or    Y = M (I + diag(beta) M)^-1,    A = (I - diag(beta) Y) diag(beta),

    M_ij = <k_i, k_j> exp2(G_i - G_j) for i > j, else 0

with G the in-chunk sum of the gates in base 2, clamped so that a token which erases the state leaves later tokens
accurate. One block a chunk and key head: K K^T is made once and serves all value heads of the key head.

Chunks are counted from the start of their sequence. Chunk c of sequence n has slot cu_seqlens[n] // 64 + n + c; slots
that no chunk has are left unwritten.
"""

import tilelang
import tilelang.language as T

from kernels.tiles import CHUNK as C
from kernels.tiles import CUDA_SOURCE, LOG2_E, MIN_LOG2_GATE, PAD, RESET, TOKEN, dims

THREADS = 128
NUM_WARPS = THREADS // 32
BLOCKS_PER_SM = 5


def chunk_inverse(dtype: str, inverse: bool, K: int = 128):
    """Builds the kernel for keys of `dtype`: A of the forward if `inverse`, else Y of the backward."""
    NT, NC, H, HV, N, NF = dims("NT", "NC", "H", "HV", "N", "NF")
    f32, i32 = "float32", "int32"

    @T.macro
    def load_gates(g, beta, row_flags, g_cum, g_s, beta_s, slot, first, num_rows, first_head, num_heads, tx):
        """G and beta of the chunk's tokens, a head a warp, for four heads; padding neither decays nor writes."""
        flag = T.alloc_local((2,), i32)
        sums = T.alloc_local((2,), f32)
        betas = T.alloc_local((2,), f32)
        warp = tx // 32
        lane = tx % 32
        if warp < num_heads:
            for part in T.unroll(2):
                flag[part] = T.if_then_else(part * 32 + lane < num_rows, TOKEN, PAD)
                if NF > 0 and part * 32 + lane < num_rows:
                    flag[part] = row_flags[first + part * 32 + lane]
            # All loads before the first use: one latency.
            for part in T.unroll(2):
                sums[part] = 0.0
                betas[part] = 0.0
                if flag[part] != PAD:
                    sums[part] = g[first + part * 32 + lane, first_head + warp]
                    betas[part] = beta[first + part * 32 + lane, first_head + warp]
            for part in T.unroll(2):
                sums[part] = T.if_then_else(
                    flag[part] == RESET, MIN_LOG2_GATE, T.max(sums[part] * LOG2_E, MIN_LOG2_GATE)
                )
            T.call_extern("handle", "jaxqla::chunk_cumsum", T.address_of(sums[0]), T.address_of(sums[1]))
            for part in T.unroll(2):
                beta_s[warp, part * 32 + lane] = betas[part]
                g_s[warp, part * 32 + lane] = sums[part]
                g_cum[slot, first_head + warp, part * 32 + lane] = sums[part]

    @T.prim_func
    def gdn_chunk_inverse(
        k: T.Tensor((NT, H, K), dtype),
        g: T.Tensor((NT, HV), f32),
        beta: T.Tensor((NT, HV), f32),
        cu_seqlens: T.Tensor((N + 1,), i32),
        row_flags: T.Tensor((NF,), i32),
        out: T.Tensor((NC, HV, C, C), dtype),
        g_cum: T.Tensor((NC, HV, C), f32),
    ):
        with T.Kernel(NC, H, threads=THREADS) as (slot, key_head):
            T.import_source(CUDA_SOURCE)
            T.annotate_min_blocks_per_sm(BLOCKS_PER_SM)
            tx = T.get_thread_binding()
            sequence = T.alloc_var(i32)
            start = T.alloc_var(i32)
            end = T.alloc_var(i32)
            first = T.alloc_var(i32)
            num_rows = T.alloc_var(i32)
            group = T.alloc_var(i32)
            sequence = T.call_extern("int32", "jaxqla::find_sequence", cu_seqlens.data, N, slot)
            start = T.max(cu_seqlens[sequence], 0)
            end = T.min(cu_seqlens[sequence + 1], NT)
            first = start + (slot - (start // C + sequence)) * C
            num_rows = T.min(end - first, C)
            group = HV // H

            k_s = T.alloc_shared((C, K), dtype)
            out_s = T.alloc_shared((C, C), dtype)
            g_s = T.alloc_shared((NUM_WARPS, C), f32, scope="shared")
            beta_s = T.alloc_shared((NUM_WARPS, C), f32, scope="shared")
            KK = T.alloc_fragment((C, C), f32)
            landed = T.alloc_barrier(arrive_count=[32])
            T.annotate_layout({out_s: tilelang.layout.make_swizzled_layout(out_s)})

            if num_rows > 0:
                if tx < 32:
                    T.tma_copy(k[first : first + C, key_head, 0:K], k_s, barrier=landed[0])
                    T.barrier_arrive(landed[0])
                for r, c in T.Parallel(C, C):
                    out_s[r, c] = 0.0
                load_gates(g, beta, row_flags, g_cum, g_s, beta_s, slot, first, num_rows, key_head * group, group, tx)
                T.barrier_wait(landed[0], 0)
                if tx < 32:
                    # Rows of padding or of the next sequence may hold anything, NaN too.
                    zero = "jaxqla::zero_invalid_rows"
                    T.call_extern("handle", zero, T.address_of(k_s[0, 0]), K // 64, row_flags.data, NF, first, end)
                    T.call_extern("handle", "jaxqla::fence_async_proxy")
                T.sync_threads()
                T.gemm(k_s, k_s, KK, transpose_B=True, clear_accum=True)
                for h in T.serial(group):
                    if h % NUM_WARPS == 0:
                        if h > 0:
                            head = key_head * group + h
                            load_gates(
                                g, beta, row_flags, g_cum, g_s, beta_s, slot, first, num_rows, head, group - h, tx
                            )
                        T.sync_threads()
                    T.call_extern(
                        "handle",
                        f"jaxqla::gated_inverse<{str(inverse).lower()}>",
                        KK.data,
                        T.address_of(g_s[h % NUM_WARPS, 0]),
                        T.address_of(beta_s[h % NUM_WARPS, 0]),
                        T.address_of(k_s[0, 0]),
                        T.address_of(out_s[0, 0]),
                    )
                    T.call_extern("handle", "jaxqla::fence_async_proxy")
                    T.sync_threads()
                    if tx < 32:
                        T.tma_copy(out_s, out[slot, key_head * group + h, 0:C, 0:C])
                        T.tma_store_wait(0)

    return gdn_chunk_inverse
