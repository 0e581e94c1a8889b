"""State passes of the backward: walks the chunks of a sequence and value head, forward for the states, back for their
cotangents. One grid holds both directions; they need nothing of each other.

Forward, from the state S that enters a chunk, with Y of chunk_inverse:

    W  = V - diag(gam) K S            e = W - Y diag(beta) W
    S' = gam_C S + K^T diag(gam_C / gam * beta) e

Back, from the cotangent dS of the state that leaves it:

    dU = diag(gam_C / gam) K dS + P^T dO            P = scale lower(Q K^T) o D
    Z  = dU - Y^T diag(beta) dU                     dV = diag(beta) Z
    dS_before = gam_C dS + Q^T diag(gam * scale) dO - K^T diag(gam) dV

e is the error of the delta rule and Z the cotangent of beta * e; neither divides by beta, so that beta may be 0. What
backward_gradients needs is stored by chunks: S and dS as [V, K], e and Z as [64, V].

As in fused_forward all of it is transposed, a warpgroup holds 64 rows of the state, one more computes the scores P and
the warps of the last load and store.
"""

from typing import Any, NamedTuple

import tilelang
import tilelang.language as T

from kernels.hopper import HOPPER
from kernels.tiles import CHUNK as C
from kernels.tiles import CUDA_SOURCE, dims

# Rows of the gates tile: g in base 2, gam = exp2(g), gam_C / gam, beta, gam * scale, -gam * beta, gam_C / gam * beta.
G, DECAY, REST, BETA, READ, ERASE, WRITE = range(7)


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
    """Shared memory; the inputs have one tile a pipeline stage."""

    q: Any
    k: Any
    x: Any  # of v forward, of do back
    y: Any
    p: Any
    gates: Any
    state: Any
    error: Any  # e forward, Z back
    dv: Any


class Barriers(NamedTuple):
    """Who waits for whom.

    loaders -> loaded -> state, scores -> released -> loaders; scores -> scored -> state -> scores_released -> scores;
    state -> written -> storers -> stored -> state, for the state tile and for the rows of a chunk.
    """

    loaded: Any
    released: Any
    scored: Any
    scores_released: Any
    landed: Any
    state_written: Any
    state_stored: Any
    rows_written: Any
    rows_stored: Any


def backward_states(dtype: str, v_tile: int, K: int = 128, V: int = 128):
    """Builds the kernel for operands of `dtype`, with `v_tile` of the V columns of a head in one block."""
    NT, NC, H, HV, N, N0, N1, NF = dims("NT", "NC", "H", "HV", "N", "N0", "N1", "NF")
    f32, i32 = "float32", "int32"
    num_halves = v_tile // 64
    num_tiles = V // v_tile
    num_stages = {64: 3, 128: 2}[v_tile]
    state_threads = 128 * num_halves
    score_end = state_threads + 128
    num_threads = score_end + 128

    @T.macro
    def load_state(S, state, item, half):
        for r, c in T.Parallel(64, K):
            S[r, c] = state[item.sequence, item.head, c, item.first_column + half * 64 + r]

    @T.macro
    def hand_over_state(S_operand, half, i, tiles, barriers):
        """The state tile goes to its storer."""
        T.barrier_wait(barriers.state_stored, (i + 1) % 2)
        T.call_extern("handle", "jaxqla::store_operand", S_operand.data, T.address_of(tiles.state[half, 0, 0]))
        T.call_extern("handle", "jaxqla::fence_async_proxy")
        T.barrier_arrive(barriers.state_written)

    @T.macro
    def walk_forward(half, item, tiles, barriers, initial_state):
        S = T.alloc_fragment((64, K), f32)
        S_operand = T.alloc_fragment((64, K), dtype)
        U = T.alloc_fragment((64, C), f32)
        W = T.alloc_fragment((64, C), dtype)
        chunk_decay = T.alloc_local((1,), f32)
        if N0 > 0:
            load_state(S, initial_state, item, half)
        else:
            T.clear(S)
        T.copy(S, S_operand)
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            T.barrier_wait(barriers.loaded[st], (i // num_stages) % 2)
            # U^T = S^T K^T
            T.wgmma_gemm(S_operand, tiles.k[st, :, :], U, transpose_B=True, clear_accum=True)
            hand_over_state(S_operand, half, i, tiles, barriers)
            T.call_extern("handle", "jaxqla::load_transposed", W.data, T.address_of(tiles.x[st, 0, half * 64]))
            T.wait_wgmma(0)
            # U = W, and as an operand -diag(beta) W
            T.call_extern(
                "handle",
                "jaxqla::chunk_error",
                W.data,
                U.data,
                T.address_of(tiles.gates[st, DECAY, 0]),
                T.address_of(tiles.gates[st, BETA, 0]),
            )
            # e^T = W^T - (diag(beta) W)^T Y^T
            T.wgmma_gemm(W, tiles.y[st, :, :], U, transpose_B=True, clear_accum=False)
            chunk_decay[0] = tiles.gates[st, DECAY, C - 1]
            for r, c in T.Parallel(64, K):
                S[r, c] *= chunk_decay[0]
            T.wait_wgmma(0)
            for r, c in T.Parallel(64, C):
                W[r, c] = U[r, c] * tiles.gates[st, WRITE, c]
            # S^T = gam_C S^T + (diag(gam_C / gam * beta) e)^T K
            T.wgmma_gemm(W, tiles.k[st, :, :], S, clear_accum=False)
            T.barrier_wait(barriers.rows_stored, (i + 1) % 2)
            T.call_extern("handle", "jaxqla::store_transposed", W.data, T.address_of(tiles.error[0, half * 64]), U.data)
            T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.rows_written)
            T.wait_wgmma(0)
            T.copy(S, S_operand)
            T.barrier_arrive(barriers.released[st])

    @T.macro
    def walk_back(half, item, tiles, barriers, dfinal_state, dinitial_state):
        dS = T.alloc_fragment((64, K), f32)
        dS_operand = T.alloc_fragment((64, K), dtype)
        U = T.alloc_fragment((64, C), f32)
        O = T.alloc_fragment((64, C), f32)
        dO = T.alloc_fragment((64, C), dtype)
        W = T.alloc_fragment((64, C), dtype)
        chunk_decay = T.alloc_local((1,), f32)
        if N1 > 0:
            load_state(dS, dfinal_state, item, half)
        else:
            T.clear(dS)
        T.copy(dS, dS_operand)
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            phase = (i // num_stages) % 2
            T.barrier_wait(barriers.loaded[st], phase)
            # U^T = dS^T K^T
            T.wgmma_gemm(dS_operand, tiles.k[st, :, :], U, transpose_B=True, clear_accum=True)
            hand_over_state(dS_operand, half, i, tiles, barriers)
            T.call_extern("handle", "jaxqla::load_transposed", dO.data, T.address_of(tiles.x[st, 0, half * 64]))
            T.barrier_wait(barriers.scored[st], phase)
            # O^T = dO^T P
            T.wgmma_gemm(dO, tiles.p[st, :, :], O, clear_accum=True)
            chunk_decay[0] = tiles.gates[st, DECAY, C - 1]
            for r, c in T.Parallel(64, K):
                dS[r, c] *= chunk_decay[0]
            T.wait_wgmma(0)
            for r, c in T.Parallel(64, C):
                U[r, c] = U[r, c] * tiles.gates[st, REST, c] + O[r, c]
            for r, c in T.Parallel(64, C):
                W[r, c] = -U[r, c] * tiles.gates[st, BETA, c]
            # Z^T = dU^T - (diag(beta) dU)^T Y
            T.wgmma_gemm(W, tiles.y[st, :, :], U, clear_accum=False)
            # dS^T = gam_C dS^T + (diag(gam scale) dO)^T Q - (diag(gam beta) Z)^T K
            T.call_extern("handle", "jaxqla::scale_columns", dO.data, T.address_of(tiles.gates[st, READ, 0]))
            T.wgmma_gemm(dO, tiles.q[st, :, :], dS, clear_accum=False)
            T.wait_wgmma(1)
            for r, c in T.Parallel(64, C):
                W[r, c] = U[r, c] * tiles.gates[st, ERASE, c]
            T.wgmma_gemm(W, tiles.k[st, :, :], dS, clear_accum=False)
            T.barrier_wait(barriers.rows_stored, (i + 1) % 2)
            T.call_extern("handle", "jaxqla::store_transposed", W.data, T.address_of(tiles.error[0, half * 64]), U.data)
            for r, c in T.Parallel(64, C):
                U[r, c] *= tiles.gates[st, BETA, c]
            T.call_extern("handle", "jaxqla::store_transposed", W.data, T.address_of(tiles.dv[0, half * 64]), U.data)
            T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.rows_written)
            T.wait_wgmma(0)
            T.copy(dS, dS_operand)
            T.barrier_arrive(barriers.released[st])
            T.barrier_arrive(barriers.scores_released[st])
        if N0 > 0:
            for r, c in T.Parallel(64, K):
                dinitial_state[item.sequence, item.head, c, item.first_column + half * 64 + r] = dS[r, c]

    @T.macro
    def compute_scores(item, tiles, barriers, scale):
        """P = scale lower(Q K^T) o D, D_ij = exp2(g_i - g_j)."""
        P = T.alloc_fragment((C, C), f32)
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
    def skip_scores(item, barriers):
        for i in T.serial(item.num_chunks):
            T.barrier_wait(barriers.loaded[i % num_stages], (i // num_stages) % 2)
            T.barrier_arrive(barriers.released[i % num_stages])

    @T.macro
    def load_chunk(reverse, q, k, x, y, item, tiles, st, left, slot, barriers, which):
        T.tma_copy(k[left : left + C, item.key_head, 0:K], tiles.k[st, :, :], barrier=barriers[which])
        if reverse:
            T.tma_copy(q[left : left + C, item.key_head, 0:K], tiles.q[st, :, :], barrier=barriers[which])
        T.tma_copy(y[slot, item.head, 0:C, 0:C], tiles.y[st, :, :], barrier=barriers[which])
        T.tma_copy(
            x[left : left + C, item.head, item.first_column : item.first_column + v_tile],
            tiles.x[st, :, :],
            barrier=barriers[which],
        )

    @T.macro
    def load_chunks(reverse, q, k, x, y, row_flags, item, tiles, barriers):
        """One warp. Rows of padding or of the next sequence may hold anything, NaN too: zeroed before they are read."""
        left = T.alloc_var(i32)
        chunk = T.alloc_var(i32)
        num_cut = T.alloc_var(i32)
        num_cut = 0
        for i in T.serial(item.num_chunks):
            st = i % num_stages
            chunk = item.num_chunks - 1 - i if reverse else i
            left = item.start + chunk * C
            T.barrier_wait(barriers.released[st], (i // num_stages + 1) % 2)
            if T.call_extern("bool", "jaxqla::all_rows_valid", row_flags.data, NF, left, item.end):
                load_chunk(reverse, q, k, x, y, item, tiles, st, left, item.first_slot + chunk, barriers.loaded, st)
            else:
                load_chunk(reverse, q, k, x, y, item, tiles, st, left, item.first_slot + chunk, barriers.landed, 0)
                T.barrier_arrive(barriers.landed[0])
                T.barrier_wait(barriers.landed[0], num_cut % 2)
                num_cut += 1
                zero = "jaxqla::zero_invalid_rows"
                if reverse:
                    T.call_extern(
                        "handle", zero, T.address_of(tiles.q[st, 0, 0]), K // 64, row_flags.data, NF, left, item.end
                    )
                T.call_extern(
                    "handle", zero, T.address_of(tiles.k[st, 0, 0]), K // 64, row_flags.data, NF, left, item.end
                )
                T.call_extern(
                    "handle", zero, T.address_of(tiles.x[st, 0, 0]), num_halves, row_flags.data, NF, left, item.end
                )
                T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.loaded[st])

    @T.macro
    def load_gates(reverse, g_cum, beta, row_flags, item, tiles, barriers, scale, lane):
        """One warp: the factors of each token."""
        g = T.alloc_local((2,), f32)
        b = T.alloc_local((2,), f32)
        g_last = T.alloc_var(f32)
        chunk = T.alloc_var(i32)
        row = T.alloc_var(i32)
        for i in T.unroll(item.num_chunks, unroll_factor=1):
            st = i % num_stages
            chunk = item.num_chunks - 1 - i if reverse else i
            for part in T.unroll(2):
                row = part * 32 + lane
                g[part] = g_cum[item.first_slot + chunk, item.head, row]
                b[part] = 0.0
                if T.call_extern(
                    "bool", "jaxqla::row_valid", row_flags.data, NF, item.start + chunk * C + row, item.end
                ):
                    b[part] = beta[item.start + chunk * C + row, item.head]
            g_last = g_cum[item.first_slot + chunk, item.head, C - 1]
            T.barrier_wait(barriers.released[st], (i // num_stages + 1) % 2)
            for part in T.unroll(2):
                row = part * 32 + lane
                tiles.gates[st, G, row] = g[part]
                tiles.gates[st, DECAY, row] = T.exp2(g[part])
                tiles.gates[st, REST, row] = T.exp2(g_last - g[part])
                tiles.gates[st, BETA, row] = b[part]
                tiles.gates[st, READ, row] = T.exp2(g[part]) * scale
                tiles.gates[st, ERASE, row] = -T.exp2(g[part]) * b[part]
                tiles.gates[st, WRITE, row] = T.exp2(g_last - g[part]) * b[part]
            T.barrier_arrive(barriers.loaded[st])

    @T.macro
    def store_states(reverse, states, item, tiles, barriers):
        """One warp."""
        slot = T.alloc_var(i32)
        for i in T.serial(item.num_chunks):
            slot = item.first_slot + (item.num_chunks - 1 - i if reverse else i)
            T.barrier_wait(barriers.state_written, i % 2)
            for half in T.unroll(num_halves):
                first = item.first_column + half * 64
                T.copy(tiles.state[half, :, :], states[slot, item.head, first : first + 64, 0:K])
            T.barrier_arrive(barriers.state_stored)

    @T.macro
    def store_rows(reverse, errors, dv, item, tiles, barriers):
        """One warp."""
        chunk = T.alloc_var(i32)
        for i in T.serial(item.num_chunks):
            chunk = item.num_chunks - 1 - i if reverse else i
            T.barrier_wait(barriers.rows_written, i % 2)
            T.copy(
                tiles.error,
                errors[item.first_slot + chunk, item.head, 0:C, item.first_column : item.first_column + v_tile],
            )
            if reverse:
                left = item.start + chunk * C
                if item.end - left >= C:
                    T.copy(tiles.dv, dv[left : left + C, item.head, item.first_column : item.first_column + v_tile])
                else:
                    T.call_extern(
                        "handle",
                        "jaxqla::store_rows",
                        T.address_of(dv[left, item.head, item.first_column]),
                        HV * V,
                        T.address_of(tiles.dv[0, 0]),
                        num_halves,
                        item.end - left,
                    )
            T.barrier_arrive(barriers.rows_stored)

    @T.prim_func
    def gdn_backward_states(
        q: T.Tensor((NT, H, K), dtype),
        k: T.Tensor((NT, H, K), dtype),
        v: T.Tensor((NT, HV, V), dtype),
        do: T.Tensor((NT, HV, V), dtype),
        y: T.Tensor((NC, HV, C, C), dtype),
        g_cum: T.Tensor((NC, HV, C), f32),
        beta: T.Tensor((NT, HV), f32),
        cu_seqlens: T.Tensor((N + 1,), i32),
        row_flags: T.Tensor((NF,), i32),
        initial_state: T.Tensor((N0, HV, K, V), f32),
        dfinal_state: T.Tensor((N1, HV, K, V), f32),
        states: T.Tensor((NC, HV, V, K), dtype),
        errors: T.Tensor((NC, HV, C, V), dtype),
        dstates: T.Tensor((NC, HV, V, K), dtype),
        derrors: T.Tensor((NC, HV, C, V), dtype),
        dv: T.Tensor((NT, HV, V), dtype),
        dinitial_state: T.Tensor((N0, HV, K, V), f32),
        scale: T.float32,
    ):
        with T.Kernel(2 * N * HV * num_tiles, threads=num_threads) as (block,):
            T.import_source(CUDA_SOURCE)
            tx = T.get_thread_binding()
            item_index = T.alloc_var(i32)
            sequence = T.alloc_var(i32)
            head = T.alloc_var(i32)
            key_head = T.alloc_var(i32)
            start = T.alloc_var(i32)
            end = T.alloc_var(i32)
            num_chunks = T.alloc_var(i32)
            first_slot = T.alloc_var(i32)
            # The way back takes longer, so its blocks come first.
            back = block < N * HV * num_tiles
            item_index = T.if_then_else(back, block, block - N * HV * num_tiles)
            first_column = 0 if num_tiles == 1 else item_index % num_tiles * v_tile
            sequence = item_index // num_tiles // HV
            head = item_index // num_tiles - sequence * HV
            key_head = head // (HV // H)
            start = T.max(cu_seqlens[sequence], 0)
            end = T.min(cu_seqlens[sequence + 1], NT)
            num_chunks = (end - start + C - 1) // C
            first_slot = start // C + sequence
            item = Item(sequence, head, key_head, first_column, start, end, num_chunks, first_slot)

            q_s = T.alloc_shared((num_stages, C, K), dtype)
            k_s = T.alloc_shared((num_stages, C, K), dtype)
            x_s = T.alloc_shared((num_stages, C, v_tile), dtype)
            y_s = T.alloc_shared((num_stages, C, C), dtype)
            p_s = T.alloc_shared((num_stages, C, C), dtype)
            gates_s = T.alloc_shared((num_stages, 7, C), f32, scope="shared")
            state_s = T.alloc_shared((num_halves, 64, K), dtype)
            error_s = T.alloc_shared((C, v_tile), dtype)
            dv_s = T.alloc_shared((C, v_tile), dtype)
            tiles = Tiles(q_s, k_s, x_s, y_s, p_s, gates_s, state_s, error_s, dv_s)
            # What the warp-level loads and stores expect.
            T.annotate_layout(
                {tile: tilelang.layout.make_swizzled_layout(tile) for tile in (x_s, p_s, state_s, error_s, dv_s)}
            )

            loaded = T.alloc_barrier(arrive_count=[64] * num_stages)
            released = T.alloc_barrier(arrive_count=[state_threads + 128] * num_stages)
            scored = T.alloc_barrier(arrive_count=[128] * num_stages)
            scores_released = T.alloc_barrier(arrive_count=[state_threads] * num_stages)
            landed = T.alloc_barrier(arrive_count=[32])
            state_written = T.alloc_barrier(arrive_count=state_threads)
            state_stored = T.alloc_barrier(arrive_count=32)
            rows_written = T.alloc_barrier(arrive_count=state_threads)
            rows_stored = T.alloc_barrier(arrive_count=32)
            barriers = Barriers(
                loaded,
                released,
                scored,
                scores_released,
                landed,
                state_written,
                state_stored,
                rows_written,
                rows_stored,
            )

            if tx < state_threads:
                T.set_max_nreg(HOPPER.state_registers, 1)
                if back:
                    for half in range(num_halves):
                        if tx // 128 == half:
                            walk_back(half, item, tiles, barriers, dfinal_state, dinitial_state)
                else:
                    for half in range(num_halves):
                        if tx // 128 == half:
                            walk_forward(half, item, tiles, barriers, initial_state)
            elif tx < score_end:
                T.set_max_nreg(HOPPER.helper_registers[num_halves], 0)
                if back:
                    compute_scores(item, tiles, barriers, scale)
                else:
                    skip_scores(item, barriers)
            else:
                T.set_max_nreg(HOPPER.producer_registers[num_halves], 0)
                if tx < score_end + 32:
                    if back:
                        load_chunks(True, q, k, do, y, row_flags, item, tiles, barriers)
                    else:
                        load_chunks(False, q, k, v, y, row_flags, item, tiles, barriers)
                elif tx < score_end + 64:
                    lane = tx - (score_end + 32)
                    if back:
                        load_gates(True, g_cum, beta, row_flags, item, tiles, barriers, scale, lane)
                    else:
                        load_gates(False, g_cum, beta, row_flags, item, tiles, barriers, scale, lane)
                elif tx < score_end + 96:
                    if back:
                        store_rows(True, derrors, dv, item, tiles, barriers)
                    else:
                        store_rows(False, errors, dv, item, tiles, barriers)
                    if back:
                        # Rows past the last sequence are padding; the blocks of a head share them out.
                        T.call_extern(
                            "handle",
                            "jaxqla::zero_rows",
                            T.address_of(dv[0, head, first_column]),
                            HV * V,
                            num_halves,
                            T.max(T.min(cu_seqlens[N], NT), 0) + sequence,
                            NT,
                            N,
                        )
                else:
                    if back:
                        store_states(True, dstates, item, tiles, barriers)
                    else:
                        store_states(False, states, item, tiles, barriers)

    return gdn_backward_states
