"""Fused state and output pass of the forward: walks the chunks of a sequence and value head, the state in registers.

    U  = K S              W = V - diag(gam) U            N = A W     (A: gated inverse times beta, from chunk_inverse)
    O  = scale (diag(gam) Q S + P N)                     P = lower(Q K^T) o D
    S' = gam_C S + K^T diag(gam_C / gam) N

All of it transposed: a warpgroup holds 64 rows of S^T [V, K] as a WGMMA accumulator, whose layout is also that of an A
operand, so the serial chain never leaves registers. One more warpgroup computes the scores P; the warps of the last one
load and store.
"""

from typing import Any, NamedTuple

import tilelang
import tilelang.language as T

from kernels.hopper import HOPPER
from kernels.tiles import CHUNK as C
from kernels.tiles import CUDA_SOURCE, dims

# Rows of the gates tile: g in base 2, gam = exp2(g), gam * scale, gam_C / gam
G, DECAY, DECAY_SCALE, REST = range(4)


class Item(NamedTuple):
    """What a block works on: columns first_column.. of one value head of one sequence, tokens start..end."""

    sequence: Any
    head: Any
    key_head: Any
    first_column: Any
    start: Any
    end: Any
    num_chunks: Any
    first_slot: Any


class Tiles(NamedTuple):
    """Shared memory; all but o have one tile a pipeline stage."""

    q: Any
    k: Any
    v: Any
    a: Any
    p: Any
    o: Any
    gates: Any  # of each token: see G, DECAY, DECAY_SCALE, REST


class Barriers(NamedTuple):
    """Who waits for whom.

    loaders -> loaded -> state, scores -> released -> loaders; scores -> scored -> state -> scores_released -> scores.
    """

    loaded: Any
    released: Any
    scored: Any
    scores_released: Any
    landed: Any
    o_written: Any
    o_stored: Any


def fused_forward(dtype: str, v_tile: int, K: int = 128, V: int = 128, num_stages: int = 3):
    """Builds the kernel for operands of `dtype`, with `v_tile` of the V columns of a head in one block."""
    NT, NC, H, HV, N, N0, N1, NF = dims("NT", "NC", "H", "HV", "N", "N0", "N1", "NF")
    f32, i32 = "float32", "int32"
    num_halves = v_tile // 64
    num_tiles = V // v_tile
    state_threads = 128 * num_halves
    score_end = state_threads + 128
    num_threads = score_end + 128

    @T.macro
    def walk_chunks(half, item, tiles, barriers, initial_state, final_state):
        """One state warpgroup: columns 64 * half .. of the block's tile of V."""
        S = T.alloc_fragment((64, K), f32)
        S_operand = T.alloc_fragment((64, K), dtype)
        U = T.alloc_fragment((64, C), f32)
        O = T.alloc_fragment((64, C), f32)
        W = T.alloc_fragment((64, C), dtype)
        N_operand = T.alloc_fragment((64, C), dtype)
        chunk_decay = T.alloc_local((1,), f32)
        T.set_max_nreg(HOPPER.state_registers, 1)
        if N0 > 0:
            for r, c in T.Parallel(64, K):
                S[r, c] = initial_state[item.sequence, item.head, c, item.first_column + half * 64 + r]
        else:
            T.clear(S)
        T.copy(S, S_operand)
        T.clear(O)
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            phase = (i // num_stages) % 2
            T.barrier_wait(barriers.loaded[st], phase)
            # U^T = S^T K^T; while it runs, the output of the chunk before goes out
            T.wgmma_gemm(S_operand, tiles.k[st, :, :], U, transpose_B=True, clear_accum=True)
            T.barrier_wait(barriers.o_stored, (i + 1) % 2)
            T.call_extern("handle", "jaxqla::store_transposed", W.data, T.address_of(tiles.o[0, half * 64]), O.data)
            # O^T = S^T Q^T
            T.wgmma_gemm(S_operand, tiles.q[st, :, :], O, transpose_B=True, clear_accum=True)
            T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.o_written)
            T.call_extern("handle", "jaxqla::load_transposed", W.data, T.address_of(tiles.v[st, 0, half * 64]))
            T.wait_wgmma(1)
            # W^T = V^T - U^T diag(gam)
            T.call_extern(
                "handle",
                "jaxqla::delta_error",
                W.data,
                U.data,
                T.address_of(tiles.gates[st, DECAY, 0]),
            )
            # N^T = W^T A^T
            T.wgmma_gemm(W, tiles.a[st, :, :], U, transpose_B=True, clear_accum=True)
            chunk_decay[0] = tiles.gates[st, DECAY, C - 1]
            for r, c in T.Parallel(64, K):
                S[r, c] *= chunk_decay[0]
            T.wait_wgmma(0)
            T.barrier_wait(barriers.scored[st], phase)
            for r, c in T.Parallel(64, C):
                W[r, c] = U[r, c] * tiles.gates[st, REST, c]
            # S^T = gam_C S^T + (diag(gam_C / gam) N)^T K and O^T = O^T diag(gam scale) + N^T P^T
            T.wgmma_gemm(W, tiles.k[st, :, :], S, clear_accum=False)
            for r, c in T.Parallel(64, C):
                O[r, c] *= tiles.gates[st, DECAY_SCALE, c]
            T.copy(U, N_operand)
            T.wgmma_gemm(N_operand, tiles.p[st, :, :], O, transpose_B=True, clear_accum=False)
            T.wait_wgmma(1)
            T.copy(S, S_operand)
            T.wait_wgmma(0)
            T.barrier_arrive(barriers.released[st])
            T.barrier_arrive(barriers.scores_released[st])
        T.barrier_wait(barriers.o_stored, (item.num_chunks + 1) % 2)
        T.call_extern("handle", "jaxqla::store_transposed", W.data, T.address_of(tiles.o[0, half * 64]), O.data)
        T.call_extern("handle", "jaxqla::fence_async_proxy")
        T.barrier_arrive(barriers.o_written)
        if N1 > 0:
            for r, c in T.Parallel(64, K):
                final_state[item.sequence, item.head, c, item.first_column + half * 64 + r] = S[r, c]

    @T.macro
    def compute_scores(item, tiles, barriers, scale):
        """P = scale lower(Q K^T) o D, D_ij = exp2(g_i - g_j)."""
        P = T.alloc_fragment((C, C), f32)
        T.set_max_nreg(HOPPER.helper_registers[num_halves], 0)
        for st, r, c in T.Parallel(num_stages, C, C):
            tiles.p[st, r, c] = 0.0
        # Another warp may write the scores of these places.
        T.sync_threads(1, 128)
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            phase = (i // num_stages) % 2
            T.barrier_wait(barriers.loaded[st], phase)
            T.gemm(tiles.q[st, :, :], tiles.k[st, :, :], P, transpose_B=True, clear_accum=True)
            T.barrier_wait(barriers.scores_released[st], phase ^ 1)
            T.call_extern(
                "handle",
                "jaxqla::decay_scores",
                P.data,
                T.address_of(tiles.gates[st, G, 0]),
                scale,
                T.address_of(tiles.p[st, 0, 0]),
            )
            T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.scored[st])
            T.barrier_arrive(barriers.released[st])

    @T.macro
    def load_chunk(q, k, v, a, item, tiles, st, left, slot, barriers, which):
        T.tma_copy(k[left : left + C, item.key_head, 0:K], tiles.k[st, :, :], barrier=barriers[which])
        T.tma_copy(q[left : left + C, item.key_head, 0:K], tiles.q[st, :, :], barrier=barriers[which])
        T.tma_copy(a[slot, item.head, 0:C, 0:C], tiles.a[st, :, :], barrier=barriers[which])
        T.tma_copy(
            v[left : left + C, item.head, item.first_column : item.first_column + v_tile],
            tiles.v[st, :, :],
            barrier=barriers[which],
        )

    @T.macro
    def load_chunks(q, k, v, a, row_flags, item, tiles, barriers):
        """One warp. Rows of padding or of the next sequence may hold anything, NaN too: zeroed before they are read."""
        left = T.alloc_var(i32)
        num_cut = T.alloc_var(i32)
        num_cut = 0
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            left = item.start + i * C
            T.barrier_wait(barriers.released[st], (i // num_stages + 1) % 2)
            if T.call_extern("bool", "jaxqla::all_rows_valid", row_flags.data, NF, left, item.end):
                load_chunk(q, k, v, a, item, tiles, st, left, item.first_slot + i, barriers.loaded, st)
            else:
                load_chunk(q, k, v, a, item, tiles, st, left, item.first_slot + i, barriers.landed, 0)
                T.barrier_arrive(barriers.landed[0])
                T.barrier_wait(barriers.landed[0], num_cut % 2)
                num_cut += 1
                zero = "jaxqla::zero_invalid_rows"
                T.call_extern(
                    "handle", zero, T.address_of(tiles.q[st, 0, 0]), K // 64, row_flags.data, NF, left, item.end
                )
                T.call_extern(
                    "handle", zero, T.address_of(tiles.k[st, 0, 0]), K // 64, row_flags.data, NF, left, item.end
                )
                T.call_extern(
                    "handle", zero, T.address_of(tiles.v[st, 0, 0]), num_halves, row_flags.data, NF, left, item.end
                )
                T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.loaded[st])

    @T.macro
    def load_gates(g_cum, item, tiles, barriers, scale, lane):
        """One warp: gam = exp2(g), gam * scale and gam_C / gam of each token."""
        g = T.alloc_local((2,), f32)
        g_last = T.alloc_var(f32)
        for i in T.unroll(item.num_chunks, unroll_factor=1):
            st = i % num_stages
            for part in T.unroll(2):
                g[part] = g_cum[item.first_slot + i, item.head, part * 32 + lane]
            g_last = g_cum[item.first_slot + i, item.head, C - 1]
            T.barrier_wait(barriers.released[st], (i // num_stages + 1) % 2)
            for part in T.unroll(2):
                tiles.gates[st, G, part * 32 + lane] = g[part]
                tiles.gates[st, DECAY, part * 32 + lane] = T.exp2(g[part])
                tiles.gates[st, DECAY_SCALE, part * 32 + lane] = T.exp2(g[part]) * scale
                tiles.gates[st, REST, part * 32 + lane] = T.exp2(g_last - g[part])
            T.barrier_arrive(barriers.loaded[st])

    @T.macro
    def store_outputs(o, cu_seqlens, item, tiles, barriers):
        """One warp. The first hand-over is empty: a chunk's output goes out while the state works on the next one."""
        for i in T.serial(item.num_chunks + 1):
            T.barrier_wait(barriers.o_written, i % 2)
            if i > 0:
                left = item.start + (i - 1) * C
                if item.end - left >= C:
                    T.copy(tiles.o, o[left : left + C, item.head, item.first_column : item.first_column + v_tile])
                else:
                    T.call_extern(
                        "handle",
                        "jaxqla::store_rows",
                        T.address_of(o[left, item.head, item.first_column]),
                        HV * V,
                        T.address_of(tiles.o[0, 0]),
                        num_halves,
                        item.end - left,
                    )
            T.barrier_arrive(barriers.o_stored)
        # Rows past the last sequence are padding; the blocks of a head share them out.
        T.call_extern(
            "handle",
            "jaxqla::zero_rows",
            T.address_of(o[0, item.head, item.first_column]),
            HV * V,
            num_halves,
            T.max(T.min(cu_seqlens[N], NT), 0) + item.sequence,
            NT,
            N,
        )

    @T.prim_func
    def gdn_fused_forward(
        q: T.Tensor((NT, H, K), dtype),
        k: T.Tensor((NT, H, K), dtype),
        v: T.Tensor((NT, HV, V), dtype),
        a: T.Tensor((NC, HV, C, C), dtype),
        g_cum: T.Tensor((NC, HV, C), f32),
        cu_seqlens: T.Tensor((N + 1,), i32),
        row_flags: T.Tensor((NF,), i32),
        initial_state: T.Tensor((N0, HV, K, V), f32),
        o: T.Tensor((NT, HV, V), dtype),
        final_state: T.Tensor((N1, HV, K, V), f32),
        scale: T.float32,
    ):
        with T.Kernel(N * HV * num_tiles, threads=num_threads) as (block,):
            T.import_source(CUDA_SOURCE)
            tx = T.get_thread_binding()
            sequence = T.alloc_var(i32)
            head = T.alloc_var(i32)
            key_head = T.alloc_var(i32)
            start = T.alloc_var(i32)
            end = T.alloc_var(i32)
            num_chunks = T.alloc_var(i32)
            first_slot = T.alloc_var(i32)
            first_column = 0 if num_tiles == 1 else block % num_tiles * v_tile
            sequence = block // num_tiles // HV
            head = block // num_tiles - sequence * HV
            key_head = head // (HV // H)
            start = T.max(cu_seqlens[sequence], 0)
            end = T.min(cu_seqlens[sequence + 1], NT)
            num_chunks = (end - start + C - 1) // C
            first_slot = start // C + sequence
            item = Item(sequence, head, key_head, first_column, start, end, num_chunks, first_slot)

            q_s = T.alloc_shared((num_stages, C, K), dtype)
            k_s = T.alloc_shared((num_stages, C, K), dtype)
            v_s = T.alloc_shared((num_stages, C, v_tile), dtype)
            a_s = T.alloc_shared((num_stages, C, C), dtype)
            p_s = T.alloc_shared((num_stages, C, C), dtype)
            o_s = T.alloc_shared((C, v_tile), dtype)
            gates_s = T.alloc_shared((num_stages, 4, C), f32, scope="shared")
            tiles = Tiles(q_s, k_s, v_s, a_s, p_s, o_s, gates_s)
            # What the warp-level loads and stores expect.
            T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile) for tile in (v_s, p_s, o_s)})

            loaded = T.alloc_barrier(arrive_count=[64] * num_stages)
            released = T.alloc_barrier(arrive_count=[state_threads + 128] * num_stages)
            scored = T.alloc_barrier(arrive_count=[128] * num_stages)
            scores_released = T.alloc_barrier(arrive_count=[state_threads] * num_stages)
            landed = T.alloc_barrier(arrive_count=[32])
            o_written = T.alloc_barrier(arrive_count=state_threads)
            o_stored = T.alloc_barrier(arrive_count=32)
            barriers = Barriers(loaded, released, scored, scores_released, landed, o_written, o_stored)

            if tx < 128:
                walk_chunks(0, item, tiles, barriers, initial_state, final_state)
            elif tx < state_threads:
                walk_chunks(1, item, tiles, barriers, initial_state, final_state)
            elif tx < score_end:
                compute_scores(item, tiles, barriers, scale)
            else:
                T.set_max_nreg(HOPPER.producer_registers[num_halves], 0)
                if tx < score_end + 32:
                    load_chunks(q, k, v, a, row_flags, item, tiles, barriers)
                elif tx < score_end + 64:
                    load_gates(g_cum, item, tiles, barriers, scale, tx - (score_end + 32))
                elif tx < score_end + 96:
                    store_outputs(o, cu_seqlens, item, tiles, barriers)

    return gdn_fused_forward
