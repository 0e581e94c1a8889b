"""Chunk-parallel part of the backward: the gradients of q, k, g and beta from what backward_states stored.

With V' = diag(beta) e, for each chunk and value head:

    F  = scale lower(dO V'^T) o D                    H = -strictLower(diag(beta) Z V'^T) o D
    dQ = diag(gam * scale) dO S^T + F K
    dK = dK_erase + dK_write,    dK_erase = -diag(gam * beta) Z S^T + H K
                                 dK_write = diag(gam_C / gam) V' dS^T + F^T Q + H^T K
    dbeta_i = <Z_i, e_i>
    dG_i = <q_i, dQ_i> + <k_i, dK_erase_i> - <k_i, dK_write_i>, and <S', dS> more at the last token
    dg = sums of dG from each token to the end of its chunk

One block a chunk and key head goes through the value heads of the key head, so that dq and dk are summed in float32
registers. Two warpgroups have half of the columns of K each; they share F and H, of which each makes one. The warps of
the third load, and sum up what becomes dg.
"""

from typing import Any, NamedTuple

import tilelang
import tilelang.language as T

from kernels.hopper import HOPPER
from kernels.tiles import CHUNK as C
from kernels.tiles import CUDA_SOURCE, TOKEN, dims

NUM_STAGES = 2
# Rows of the gates tile: g in base 2, beta, gam * scale, -gam * beta, gam_C / gam * beta.
G, BETA, READ, ERASE, WRITE = range(5)
# Rows of the tile of sums: <q, dQ>, <k, dK_erase>, <k, dK_write>, and of the last the part that came through dS.
QUERY, ERASED, WRITTEN, WRITTEN_BY_STATE = range(4)


class Chunk(NamedTuple):
    """What a block works on: a slot, its tokens first.. to the end of its sequence, and a key head."""

    slot: Any
    first: Any
    end: Any
    key_head: Any
    group: Any


class Tiles(NamedTuple):
    """Shared memory; the rows of a value head have one tile a pipeline stage, tiles with K columns one a half of K."""

    q: Any
    k: Any
    do: Any
    e: Any
    z: Any
    gates: Any
    state: Any
    dstate: Any
    f: Any
    h: Any
    sums: Any
    dbeta: Any
    state_sums: Any


class Barriers(NamedTuple):
    """Who waits for whom; a value head at a time.

    loaders -> *_loaded -> readers -> *_released -> loaders; exchanged: F and H are there; products_done: they are no
    longer needed; sums_written: the warp that finishes dg may read the sums; sums_read: it has.
    """

    keys_loaded: Any
    landed: Any
    rows_loaded: Any
    rows_released: Any
    state_loaded: Any
    state_released: Any
    dstate_loaded: Any
    dstate_released: Any
    exchanged: Any
    products_done: Any
    sums_written: Any
    sums_read: Any


def backward_gradients(dtype: str, K: int = 128, V: int = 128):
    """Builds the kernel for operands of `dtype`."""
    NT, NC, H, HV, N, NF = dims("NT", "NC", "H", "HV", "N", "NF")
    f32, i32 = "float32", "int32"
    num_threads = 3 * 128

    @T.macro
    def compute_gradients(half, own, chunk, tiles, barriers, scale):
        """One warpgroup: columns 64 * half .. of K; `own` is F or H, which it makes."""
        products = T.alloc_fragment((C, C), f32)
        dQ = T.alloc_fragment((C, 64), f32)
        dK_erase = T.alloc_fragment((C, 64), f32)
        dK_write = T.alloc_fragment((C, 64), f32)
        dQ_sum = T.alloc_fragment((C, 64), f32)
        dK_sum = T.alloc_fragment((C, 64), f32)
        T.clear(dQ_sum)
        T.clear(dK_sum)
        for r, c in T.Parallel(C, C):
            own[r, c] = 0.0
        T.sync_threads(half + 1, 128)
        T.barrier_wait(barriers.keys_loaded[0], 0)
        for i in T.serial(chunk.group):
            st = i % NUM_STAGES
            phase = i % 2
            T.barrier_wait(barriers.rows_loaded[st], (i // NUM_STAGES) % 2)
            if half == 0:
                T.wgmma_gemm(tiles.do[st, :, :], tiles.e[st, :, :], products, transpose_B=True, clear_accum=True)
            else:
                T.wgmma_gemm(tiles.z[st, :, :], tiles.e[st, :, :], products, transpose_B=True, clear_accum=True)
            T.barrier_wait(barriers.state_loaded[0], phase)
            T.wgmma_gemm(tiles.do[st, :, :], tiles.state[half, :, :], dQ, clear_accum=True)
            T.wgmma_gemm(tiles.z[st, :, :], tiles.state[half, :, :], dK_erase, clear_accum=True)
            T.barrier_wait(barriers.dstate_loaded[0], phase)
            T.wgmma_gemm(tiles.e[st, :, :], tiles.dstate[half, :, :], dK_write, clear_accum=True)
            T.wait_wgmma(3)
            T.barrier_wait(barriers.products_done[0], phase ^ 1)
            T.barrier_wait(barriers.sums_read[0], phase ^ 1)
            if half == 0:
                T.call_extern(
                    "handle",
                    "jaxqla::decay_score_gradients",
                    products.data,
                    T.address_of(tiles.gates[st, G, 0]),
                    T.address_of(tiles.gates[st, BETA, 0]),
                    scale,
                    T.address_of(tiles.f[0, 0]),
                )
            else:
                T.call_extern(
                    "handle",
                    "jaxqla::decay_coupling_gradients",
                    products.data,
                    T.address_of(tiles.gates[st, G, 0]),
                    T.address_of(tiles.gates[st, BETA, 0]),
                    T.address_of(tiles.h[0, 0]),
                    T.address_of(tiles.dbeta[0]),
                )
            T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.exchanged[0])
            T.wait_wgmma(0)
            T.barrier_arrive(barriers.state_released[0])
            T.barrier_arrive(barriers.dstate_released[0])
            T.call_extern("handle", "jaxqla::scale_rows", dQ.data, T.address_of(tiles.gates[st, READ, 0]))
            T.call_extern("handle", "jaxqla::scale_rows", dK_erase.data, T.address_of(tiles.gates[st, ERASE, 0]))
            T.call_extern("handle", "jaxqla::scale_rows", dK_write.data, T.address_of(tiles.gates[st, WRITE, 0]))
            T.barrier_arrive(barriers.rows_released[st])
            T.call_extern(
                "handle",
                "jaxqla::row_dots",
                dK_write.data,
                T.address_of(tiles.k[half, 0, 0]),
                T.address_of(tiles.sums[half, WRITTEN_BY_STATE, 0]),
            )
            T.barrier_wait(barriers.exchanged[0], phase)
            T.wgmma_gemm(tiles.f, tiles.k[half, :, :], dQ, clear_accum=False)
            T.wgmma_gemm(tiles.h, tiles.k[half, :, :], dK_erase, clear_accum=False)
            T.wgmma_gemm(tiles.f, tiles.q[half, :, :], dK_write, transpose_A=True, clear_accum=False)
            T.wgmma_gemm(tiles.h, tiles.k[half, :, :], dK_write, transpose_A=True, clear_accum=False)
            T.wait_wgmma(0)
            T.barrier_arrive(barriers.products_done[0])
            T.call_extern(
                "handle",
                "jaxqla::row_dots",
                dQ.data,
                T.address_of(tiles.q[half, 0, 0]),
                T.address_of(tiles.sums[half, QUERY, 0]),
            )
            T.call_extern(
                "handle",
                "jaxqla::row_dots",
                dK_erase.data,
                T.address_of(tiles.k[half, 0, 0]),
                T.address_of(tiles.sums[half, ERASED, 0]),
            )
            T.call_extern(
                "handle",
                "jaxqla::row_dots",
                dK_write.data,
                T.address_of(tiles.k[half, 0, 0]),
                T.address_of(tiles.sums[half, WRITTEN, 0]),
            )
            T.barrier_arrive(barriers.sums_written[0])
            for r, c in T.Parallel(C, 64):
                dQ_sum[r, c] += dQ[r, c]
            for r, c in T.Parallel(C, 64):
                dK_sum[r, c] += dK_erase[r, c] + dK_write[r, c]
        # The tiles of q and k have served; each warpgroup puts its gradients in the half that only it reads.
        T.call_extern("handle", "jaxqla::store_accumulator", dQ_sum.data, T.address_of(tiles.q[half, 0, 0]))
        T.call_extern("handle", "jaxqla::store_accumulator", dK_sum.data, T.address_of(tiles.k[half, 0, 0]))
        T.call_extern("handle", "jaxqla::fence_async_proxy")
        T.sync_threads(half + 1, 128)

    @T.macro
    def store_gradients(half, dq, dk, chunk, tiles):
        """One warp of the warpgroup that has made this half."""
        first = chunk.first
        left = half * 64
        if chunk.end - first >= C:
            T.copy(tiles.q[half, :, :], dq[first : first + C, chunk.key_head, left : left + 64])
            T.copy(tiles.k[half, :, :], dk[first : first + C, chunk.key_head, left : left + 64])
        else:
            num_rows = chunk.end - first
            store = "jaxqla::store_rows"
            T.call_extern(
                "handle",
                store,
                T.address_of(dq[first, chunk.key_head, left]),
                H * K,
                T.address_of(tiles.q[half, 0, 0]),
                1,
                num_rows,
            )
            T.call_extern(
                "handle",
                store,
                T.address_of(dk[first, chunk.key_head, left]),
                H * K,
                T.address_of(tiles.k[half, 0, 0]),
                1,
                num_rows,
            )

    @T.macro
    def load_rows(q, k, do, errors, derrors, states, dstates, row_flags, chunk, tiles, barriers):
        """One warp. Rows of padding or of the next sequence may hold anything, NaN too: zeroed before they are read."""
        clean = T.alloc_var("bool")
        head = T.alloc_var(i32)
        first = chunk.first
        zero = "jaxqla::zero_invalid_rows"
        clean = T.call_extern("bool", "jaxqla::all_rows_valid", row_flags.data, NF, first, chunk.end)
        for half in T.unroll(2):
            left = half * 64
            T.tma_copy(
                q[first : first + C, chunk.key_head, left : left + 64], tiles.q[half, :, :], barrier=barriers.landed[0]
            )
            T.tma_copy(
                k[first : first + C, chunk.key_head, left : left + 64], tiles.k[half, :, :], barrier=barriers.landed[0]
            )
        T.barrier_arrive(barriers.landed[0])
        T.barrier_wait(barriers.landed[0], 0)
        T.call_extern("handle", zero, T.address_of(tiles.q[0, 0, 0]), K // 64, row_flags.data, NF, first, chunk.end)
        T.call_extern("handle", zero, T.address_of(tiles.k[0, 0, 0]), K // 64, row_flags.data, NF, first, chunk.end)
        T.call_extern("handle", "jaxqla::fence_async_proxy")
        T.barrier_arrive(barriers.keys_loaded[0])
        for i in T.serial(chunk.group):
            st = i % NUM_STAGES
            phase = i % 2
            head = chunk.key_head * chunk.group + i
            T.barrier_wait(barriers.rows_released[st], (i // NUM_STAGES + 1) % 2)
            T.tma_copy(errors[chunk.slot, head, 0:C, 0:V], tiles.e[st, :, :], barrier=barriers.rows_loaded[st])
            T.tma_copy(derrors[chunk.slot, head, 0:C, 0:V], tiles.z[st, :, :], barrier=barriers.rows_loaded[st])
            if clean:
                T.tma_copy(do[first : first + C, head, 0:V], tiles.do[st, :, :], barrier=barriers.rows_loaded[st])
            else:
                T.tma_copy(do[first : first + C, head, 0:V], tiles.do[st, :, :], barrier=barriers.landed[0])
                T.barrier_arrive(barriers.landed[0])
                T.barrier_wait(barriers.landed[0], phase ^ 1)
                T.call_extern(
                    "handle", zero, T.address_of(tiles.do[st, 0, 0]), V // 64, row_flags.data, NF, first, chunk.end
                )
                T.call_extern("handle", "jaxqla::fence_async_proxy")
            T.barrier_arrive(barriers.rows_loaded[st])
            T.barrier_wait(barriers.state_released[0], phase ^ 1)
            for half in T.unroll(2):
                T.tma_copy(
                    states[chunk.slot, head, 0:V, half * 64 : half * 64 + 64],
                    tiles.state[half, :, :],
                    barrier=barriers.state_loaded[0],
                )
            T.barrier_arrive(barriers.state_loaded[0])
            T.barrier_wait(barriers.dstate_released[0], phase ^ 1)
            for half in T.unroll(2):
                T.tma_copy(
                    dstates[chunk.slot, head, 0:V, half * 64 : half * 64 + 64],
                    tiles.dstate[half, :, :],
                    barrier=barriers.dstate_loaded[0],
                )
            T.barrier_arrive(barriers.dstate_loaded[0])

    @T.macro
    def load_gates(g_cum, beta, row_flags, chunk, tiles, barriers, scale, lane):
        """One warp: the factors of each token."""
        g = T.alloc_local((2,), f32)
        b = T.alloc_local((2,), f32)
        g_last = T.alloc_var(f32)
        head = T.alloc_var(i32)
        row = T.alloc_var(i32)
        for i in T.unroll(chunk.group, unroll_factor=1):
            st = i % NUM_STAGES
            head = chunk.key_head * chunk.group + i
            for part in T.unroll(2):
                row = part * 32 + lane
                g[part] = g_cum[chunk.slot, head, row]
                b[part] = 0.0
                if T.call_extern("bool", "jaxqla::row_valid", row_flags.data, NF, chunk.first + row, chunk.end):
                    b[part] = beta[chunk.first + row, head]
            g_last = g_cum[chunk.slot, head, C - 1]
            T.barrier_wait(barriers.rows_released[st], (i // NUM_STAGES + 1) % 2)
            for part in T.unroll(2):
                row = part * 32 + lane
                tiles.gates[st, G, row] = g[part]
                tiles.gates[st, BETA, row] = b[part]
                tiles.gates[st, READ, row] = T.exp2(g[part]) * scale
                tiles.gates[st, ERASE, row] = -T.exp2(g[part]) * b[part]
                tiles.gates[st, WRITE, row] = T.exp2(g_last - g[part]) * b[part]
            T.barrier_arrive(barriers.rows_loaded[st])

    @T.macro
    def dot_states(half, i, tiles, barriers):
        """One warp: <S, dS> of its half of the columns."""
        T.barrier_wait(barriers.state_loaded[0], i % 2)
        T.barrier_wait(barriers.dstate_loaded[0], i % 2)
        tiles.state_sums[half] = T.call_extern(
            f32,
            "jaxqla::tile_dot",
            T.address_of(tiles.state[half, 0, 0]),
            T.address_of(tiles.dstate[half, 0, 0]),
        )
        T.barrier_arrive(barriers.state_released[0])
        T.barrier_arrive(barriers.dstate_released[0])

    @T.macro
    def sum_states(chunk, tiles, barriers):
        """One warp: <S, dS> of the first half of the columns."""
        for i in T.serial(chunk.group):
            T.barrier_wait(barriers.sums_read[0], (i + 1) % 2)
            dot_states(0, i, tiles, barriers)
            T.barrier_arrive(barriers.sums_written[0])

    @T.macro
    def finish_gates(g_cum, row_flags, dg, dbeta, chunk, tiles, barriers, lane):
        """One warp: the second half of <S, dS>, dg and dbeta."""
        sums = T.alloc_local((2,), f32)
        by_state = T.alloc_var(f32)
        head = T.alloc_var(i32)
        row = T.alloc_var(i32)
        for i in T.serial(chunk.group):
            head = chunk.key_head * chunk.group + i
            dot_states(1, i, tiles, barriers)
            T.barrier_wait(barriers.sums_written[0], i % 2)
            by_state = 0.0
            # From the last token back, so that the sum is one of all tokens behind.
            for part in T.unroll(2):
                row = C - 1 - (part * 32 + lane)
                sums[part] = 0.0
                for half in T.unroll(2):
                    sums[part] += (
                        tiles.sums[half, QUERY, row] + tiles.sums[half, ERASED, row] - tiles.sums[half, WRITTEN, row]
                    )
                    by_state += tiles.sums[half, WRITTEN_BY_STATE, row]
            by_state = T.warp_reduce_sum(by_state)
            if lane == 0:
                sums[0] += (
                    T.exp2(g_cum[chunk.slot, head, C - 1]) * (tiles.state_sums[0] + tiles.state_sums[1]) + by_state
                )
            T.call_extern("handle", "jaxqla::chunk_cumsum", T.address_of(sums[0]), T.address_of(sums[1]))
            # Not unrolled: the addresses of both rows are too many registers.
            for part in T.unroll(2, unroll_factor=1):
                row = C - 1 - (part * 32 + lane)
                if chunk.first + row < chunk.end:
                    dbeta[chunk.first + row, head] = tiles.dbeta[row]
                    is_token = NF == 0 or row_flags[chunk.first + row] == TOKEN
                    dg[chunk.first + row, head] = T.if_then_else(
                        is_token, T.if_then_else(part == 0, sums[0], sums[1]), 0.0
                    )
            T.barrier_arrive(barriers.sums_read[0])

    @T.prim_func
    def gdn_backward_gradients(
        q: T.Tensor((NT, H, K), dtype),
        k: T.Tensor((NT, H, K), dtype),
        do: T.Tensor((NT, HV, V), dtype),
        states: T.Tensor((NC, HV, V, K), dtype),
        errors: T.Tensor((NC, HV, C, V), dtype),
        dstates: T.Tensor((NC, HV, V, K), dtype),
        derrors: T.Tensor((NC, HV, C, V), dtype),
        g_cum: T.Tensor((NC, HV, C), f32),
        beta: T.Tensor((NT, HV), f32),
        cu_seqlens: T.Tensor((N + 1,), i32),
        row_flags: T.Tensor((NF,), i32),
        dq: T.Tensor((NT, H, K), dtype),
        dk: T.Tensor((NT, H, K), dtype),
        dg: T.Tensor((NT, HV), f32),
        dbeta: T.Tensor((NT, HV), f32),
        scale: T.float32,
    ):
        with T.Kernel(NC, H, threads=num_threads) as (slot, key_head):
            T.import_source(CUDA_SOURCE)
            tx = T.get_thread_binding()
            sequence = T.alloc_var(i32)
            start = T.alloc_var(i32)
            end = T.alloc_var(i32)
            first = T.alloc_var(i32)
            group = T.alloc_var(i32)
            sequence = T.call_extern("int32", "jaxqla::find_sequence", cu_seqlens.data, N, slot)
            start = T.max(cu_seqlens[sequence], 0)
            end = T.min(cu_seqlens[sequence + 1], NT)
            first = start + (slot - (start // C + sequence)) * C
            group = HV // H
            chunk = Chunk(slot, first, end, key_head, group)

            q_s = T.alloc_shared((2, C, 64), dtype)
            k_s = T.alloc_shared((2, C, 64), dtype)
            do_s = T.alloc_shared((NUM_STAGES, C, V), dtype)
            e_s = T.alloc_shared((NUM_STAGES, C, V), dtype)
            z_s = T.alloc_shared((NUM_STAGES, C, V), dtype)
            gates_s = T.alloc_shared((NUM_STAGES, 5, C), f32, scope="shared")
            state_s = T.alloc_shared((2, V, 64), dtype)
            dstate_s = T.alloc_shared((2, V, 64), dtype)
            f_s = T.alloc_shared((C, C), dtype)
            h_s = T.alloc_shared((C, C), dtype)
            sums_s = T.alloc_shared((2, 4, C), f32, scope="shared")
            dbeta_s = T.alloc_shared((C,), f32, scope="shared")
            state_sums_s = T.alloc_shared((2,), f32, scope="shared")
            swizzled = (q_s, k_s, do_s, e_s, z_s, state_s, dstate_s, f_s, h_s)
            # What the warp-level loads and stores expect.
            T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile) for tile in swizzled})
            tiles = Tiles(q_s, k_s, do_s, e_s, z_s, gates_s, state_s, dstate_s, f_s, h_s, sums_s, dbeta_s, state_sums_s)
            keys_loaded = T.alloc_barrier(arrive_count=[32])
            landed = T.alloc_barrier(arrive_count=[32])
            rows_loaded = T.alloc_barrier(arrive_count=[64] * NUM_STAGES)
            rows_released = T.alloc_barrier(arrive_count=[256] * NUM_STAGES)
            state_loaded = T.alloc_barrier(arrive_count=[32])
            state_released = T.alloc_barrier(arrive_count=[320])
            dstate_loaded = T.alloc_barrier(arrive_count=[32])
            dstate_released = T.alloc_barrier(arrive_count=[320])
            exchanged = T.alloc_barrier(arrive_count=[256])
            products_done = T.alloc_barrier(arrive_count=[256])
            sums_written = T.alloc_barrier(arrive_count=[288])
            sums_read = T.alloc_barrier(arrive_count=[32])
            barriers = Barriers(
                keys_loaded,
                landed,
                rows_loaded,
                rows_released,
                state_loaded,
                state_released,
                dstate_loaded,
                dstate_released,
                exchanged,
                products_done,
                sums_written,
                sums_read,
            )

            if tx < 128:
                T.set_max_nreg(HOPPER.gradient_registers, 1)
                if first < end:
                    compute_gradients(0, f_s, chunk, tiles, barriers, scale)
                    if tx < 32:
                        store_gradients(0, dq, dk, chunk, tiles)
            elif tx < 256:
                T.set_max_nreg(HOPPER.gradient_registers, 1)
                if first < end:
                    compute_gradients(1, h_s, chunk, tiles, barriers, scale)
                    if tx < 160:
                        store_gradients(1, dq, dk, chunk, tiles)
            else:
                T.set_max_nreg(HOPPER.gradient_producer_registers, 0)
                lane = tx % 32
                if tx < 288:
                    if first < end:
                        load_rows(q, k, do, errors, derrors, states, dstates, row_flags, chunk, tiles, barriers)
                elif tx < 320:
                    if first < end:
                        load_gates(g_cum, beta, row_flags, chunk, tiles, barriers, scale, lane)
                elif tx < 352:
                    if first < end:
                        sum_states(chunk, tiles, barriers)
                    # Rows past the last sequence are padding; the blocks of a head share them out.
                    unused = T.max(T.min(cu_seqlens[N], NT), 0) + slot
                    zero = "jaxqla::zero_rows"
                    T.call_extern("handle", zero, T.address_of(dq[0, key_head, 0]), H * K, K // 64, unused, NT, NC)
                    T.call_extern("handle", zero, T.address_of(dk[0, key_head, 0]), H * K, K // 64, unused, NT, NC)
                else:
                    if first < end:
                        finish_gates(g_cum, row_flags, dg, dbeta, chunk, tiles, barriers, lane)

    return gdn_backward_gradients
