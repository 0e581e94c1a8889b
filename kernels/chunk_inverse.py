"""Chunk-parallel part of the forward: for each chunk and value head

    A = (I + L)^-1 diag(beta),    L_ij = beta_i <k_i, k_j> exp2(G_i - G_j) for i > j, else 0

with G the in-chunk sum of the gates in base 2, clamped so that a token which erases the state leaves later tokens
accurate. One block a chunk and key head: K K^T is made once and serves all value heads of the key head.

Chunks are counted from the start of their sequence. Chunk c of sequence n has slot cu_seqlens[n] // 64 + n + c; slots
that no chunk has are left unwritten. Rows of `o` past the last sequence are zeroed here; the fused kernel writes the
others.
"""

import tilelang.language as T

from kernels.tiles import CHUNK as C
from kernels.tiles import CUDA_SOURCE, LOG2_E, MIN_LOG2_GATE, PAD, RESET, dims

PITCH = 72  # kPitch of tiles.cuh
DIAGONAL_PITCH = 24  # kDiagPitch of tiles.cuh
THREADS = 128
BLOCKS_PER_SM = 5  # what shared memory allows


def chunk_inverse(dtype: str, K: int = 128, V: int = 128):
    """Builds the kernel for keys of `dtype`."""
    NT, NC, H, HV, N, NF = dims("NT", "NC", "H", "HV", "N", "NF")
    f32, i32 = "float32", "int32"

    @T.macro
    def prepare_gates(g, beta, flags_s, g_s, beta_s, g_cum, slot, first, num_rows, head, tx):
        """One warp: G and beta of the chunk's tokens; padding neither decays nor writes."""
        sums = T.alloc_local((2,), f32)
        for part in T.unroll(2):
            row = part * 32 + tx
            sums[part] = 0.0
            beta_s[row] = 0.0
            if row < num_rows and flags_s[row] != PAD:
                beta_s[row] = beta[first + row, head]
                sums[part] = T.if_then_else(
                    flags_s[row] == RESET, MIN_LOG2_GATE, T.max(g[first + row, head] * LOG2_E, MIN_LOG2_GATE)
                )
        T.call_extern("handle", "jaxqla::chunk_cumsum", T.address_of(sums[0]), T.address_of(sums[1]))
        for part in T.unroll(2):
            g_s[part * 32 + tx] = sums[part]
            g_cum[slot, head, part * 32 + tx] = sums[part]

    @T.prim_func
    def gdn_chunk_inverse(
        k: T.Tensor((NT, H, K), dtype),
        g: T.Tensor((NT, HV), f32),
        beta: T.Tensor((NT, HV), f32),
        cu_seqlens: T.Tensor((N + 1,), i32),
        row_flags: T.Tensor((NF,), i32),
        a: T.Tensor((NC, HV, C, C), dtype),
        g_cum: T.Tensor((NC, HV, C), f32),
        o: T.Tensor((NT, HV, V), dtype),
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
            lower_s = T.alloc_shared((C, PITCH), "float16")
            columns_s = T.alloc_shared((4, 16, 16), f32)
            diagonal_s = T.alloc_shared((4, 16, DIAGONAL_PITCH), "float16")
            a_s = T.alloc_shared((C, PITCH), dtype)
            g_s = T.alloc_shared((C,), f32, scope="shared")
            beta_s = T.alloc_shared((C,), f32, scope="shared")
            flags_s = T.alloc_shared((C,), i32, scope="shared")
            KK = T.alloc_fragment((C, C), f32)

            if sequence == N - 1:
                for r in T.serial(T.max(first, end), T.min(first + C, NT)):
                    for h in T.serial(group):
                        o[r, key_head * group + h, tx] = 0.0

            if num_rows > 0:
                if tx < C:
                    flags_s[tx] = 1
                    if NF > 0 and tx < num_rows:
                        flags_s[tx] = row_flags[first + tx]
                for r, c in T.Parallel(C, PITCH):
                    a_s[r, c] = 0.0
                T.sync_threads()
                for r, c in T.Parallel(C, K):
                    k_s[r, c] = T.if_then_else(
                        r < num_rows and flags_s[r] != PAD, k[first + r, key_head, c], T.cast(0, dtype)
                    )
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(k_s, k_s, KK, transpose_B=True, clear_accum=True)

                for h in T.serial(group):
                    head = key_head * group + h
                    if tx < 32:
                        prepare_gates(g, beta, flags_s, g_s, beta_s, g_cum, slot, first, num_rows, head, tx)
                    T.sync_threads()
                    T.call_extern(
                        "handle",
                        "jaxqla::gate_lower",
                        KK.data,
                        T.address_of(g_s[0]),
                        T.address_of(beta_s[0]),
                        T.address_of(lower_s[0, 0]),
                        T.address_of(columns_s[0, 0, 0]),
                    )
                    T.sync_threads()
                    T.call_extern(
                        "handle",
                        "jaxqla::invert_diagonal_blocks",
                        T.address_of(columns_s[0, 0, 0]),
                        T.address_of(diagonal_s[0, 0, 0]),
                    )
                    T.sync_threads()
                    T.call_extern(
                        "handle",
                        "jaxqla::merge_inverse",
                        T.address_of(lower_s[0, 0]),
                        T.address_of(diagonal_s[0, 0, 0]),
                        T.address_of(beta_s[0]),
                        T.address_of(a_s[0, 0]),
                    )
                    T.sync_threads()
                    for r, c in T.Parallel(C, C):
                        a[slot, head, r, c] = a_s[r, c]

    return gdn_chunk_inverse
