// Warp-level pieces that TileLang has no form for: transposed fragment traffic with 128-byte swizzled tiles, row masks,
// and the inverse of a 64x64 unit lower triangle. Every function is called by whole warps; "lane" is the index in the
// warp.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

namespace jaxqla {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Makes this thread's writes to shared memory visible to TMA and WGMMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <typename T>
struct Pair;
template <>
struct Pair<cutlass::bfloat16_t> {
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&h);
  }
};
template <>
struct Pair<cutlass::half_t> {
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return __half22float2(*reinterpret_cast<__half2*>(&x));
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&h);
  }
};

// Address, for this lane, of the 8x8 matrix (lane >> 3) of a 16-token x 16-column block in a [64 tokens][64 columns]
// 16-bit tile with 128-byte rows swizzled in 16-byte units. The warp's 16 columns start at 16 * warp. Blocks of 16
// tokens are 2048 bytes apart.
__device__ __forceinline__ uint32_t transposed_block(const void* tile, int warp) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3, row = lane & 7;
  return shared_address(tile) + ((matrix >> 1) * 8 + row) * 128 + (((2 * warp + (matrix & 1)) ^ row) << 4);
}

// Loads a swizzled tile [64 tokens][64 columns] as a 16-bit operand fragment [64 columns][64 tokens].
template <typename T>
__device__ __forceinline__ void load_transposed(T* x, const void* tile) {
  const uint32_t address = transposed_block(tile, (threadIdx.x >> 5) & 3);
  uint32_t* words = reinterpret_cast<uint32_t*>(x);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t* y = words + block * 4;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(address + block * 2048));
  }
}

// w = v - diag(decay) u, on fragments [64 columns][64 tokens] of a warpgroup; w holds v before. decay: one factor a
// token.
template <typename T>
__device__ __forceinline__ void delta_error(T* w, const float* u, const float* decay) {
  const float2* factors = reinterpret_cast<const float2*>(decay) + (threadIdx.x & 3);
  uint32_t* words = reinterpret_cast<uint32_t*>(w);
#pragma unroll
  for (int tokens = 0; tokens < 8; ++tokens) {
    const float2 factor = factors[tokens * 4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = tokens * 4 + row * 2;
      const float2 v = Pair<T>::unpack(words[i / 2]);
      words[i / 2] = Pair<T>::pack(v.x - u[i] * factor.x, v.y - u[i + 1] * factor.y);
    }
  }
}

// scale lower(p) exp2(g_i - g_j) of the accumulator fragment of Q K^T, by a warpgroup, into a swizzled tile whose
// blocks above the diagonal stay as they are.
template <typename T>
__device__ __forceinline__ void decay_scores(const float* p, const float* g, float scale, T* tile) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  const float g_low = g[warp * 16 + row], g_high = g[warp * 16 + 8 + row];
  const uint32_t target = shared_address(tile) + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block <= warp) {
      uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 g_column = *reinterpret_cast<const float2*>(g + block * 16 + half * 8 + column);
        const float* x = p + block * 8 + half * 4;
        float y[4] = {x[0] * (scale * exp2f(g_low - g_column.x)), x[1] * (scale * exp2f(g_low - g_column.y)),
                      x[2] * (scale * exp2f(g_high - g_column.x)), x[3] * (scale * exp2f(g_high - g_column.y))};
        if (block == warp) {
          const int c = half * 8 + column;
          y[0] = row >= c ? y[0] : 0.f;
          y[1] = row >= c + 1 ? y[1] : 0.f;
          y[2] = row + 8 >= c ? y[2] : 0.f;
          y[3] = row + 8 >= c + 1 ? y[3] : 0.f;
        }
        packed[half * 2] = Pair<T>::pack(y[0], y[1]);
        packed[half * 2 + 1] = Pair<T>::pack(y[2], y[3]);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(
                       target + (((2 * block + (lane >> 4)) ^ (lane & 7)) << 4)),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
    }
  }
}

// Stores an accumulator fragment [64 columns][64 tokens] as [64 tokens][64 columns] into a swizzled tile.
template <typename T>
__device__ __forceinline__ void store_transposed(T*, void* tile, const float* o) {
  const uint32_t address = transposed_block(tile, (threadIdx.x >> 5) & 3);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const float* x = o + block * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(address + block * 2048),
                 "r"(Pair<T>::pack(x[0], x[1])), "r"(Pair<T>::pack(x[2], x[3])), "r"(Pair<T>::pack(x[4], x[5])),
                 "r"(Pair<T>::pack(x[6], x[7]))
                 : "memory");
  }
}

// Whether `token` belongs to the sequence that ends at `end` and is no padding; num_flags is 0 where no token is.
__device__ __forceinline__ bool row_valid(const int* row_flags, int num_flags, int token, int end) {
  return token < end && (num_flags == 0 || row_flags[token] != 0);
}

// The same of all 64 tokens from `first` on, asked by one warp.
__device__ __forceinline__ bool all_rows_valid(const int* row_flags, int num_flags, int first, int end) {
  if (first + 64 > end) return false;
  if (num_flags == 0) return true;
  const int lane = threadIdx.x & 31;
  return __all_sync(0xffffffffu, row_flags[first + lane] != 0 && row_flags[first + 32 + lane] != 0);
}

// Zeroes the invalid rows in each of the [64][64] 16-bit tiles that lie one behind another, by one warp.
__device__ __forceinline__ void zero_invalid_rows(void* tiles, int num_tiles, const int* row_flags, int num_flags,
                                                  int first, int end) {
  if (all_rows_valid(row_flags, num_flags, first, end)) return;
  uint32_t* words = reinterpret_cast<uint32_t*>(tiles) + (threadIdx.x & 31);
#pragma unroll 1
  for (int row = 0; row < 64; ++row) {
    if (!row_valid(row_flags, num_flags, first + row, end)) {
      for (int tile = 0; tile < num_tiles; ++tile) words[(tile * 64 + row) * 32] = 0;
    }
  }
}

// Writes the first rows of swizzled [64][64] 16-bit tiles, side by side, to rows `stride` elements apart, by one warp.
template <typename T>
__device__ __forceinline__ void store_rows(T* out, int64_t stride, const void* tiles, int num_tiles, int num_rows) {
  const int lane = threadIdx.x & 31;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(tiles);
  uint32_t* target = reinterpret_cast<uint32_t*>(out) + lane;
#pragma unroll 1
  for (int row = 0; row < num_rows; ++row) {
    for (int tile = 0; tile < num_tiles; ++tile)
      target[tile * 32] = words[(tile * 64 + row) * 32 + (lane ^ ((row & 7) << 2))];
    target += stride / 2;
  }
}

// Zeroes rows first, first + step, ... below `end`, 64 columns a tile, by one warp; rows lie `stride` elements apart.
template <typename T>
__device__ __forceinline__ void zero_rows(T* out, int64_t stride, int num_tiles, int first, int end, int step) {
  uint32_t* target = reinterpret_cast<uint32_t*>(out) + (threadIdx.x & 31);
#pragma unroll 1
  for (int64_t row = first; row < end; row += step) {
    for (int tile = 0; tile < num_tiles; ++tile) target[row * (stride / 2) + tile * 32] = 0;
  }
}

// The last sequence n with cu_seqlens[n] / 64 + n <= slot, asked by a block of 128 threads: a 129-way search, one
// barrier a level.
__device__ __forceinline__ int find_sequence(const int* cu_seqlens, int num_sequences, int slot) {
  int low = 0, count = num_sequences;  // the answer is in [low, low + count)
  while (count > 1) {
    const int step = (count + 127) / 128, n = low + static_cast<int>(threadIdx.x) * step;
    const bool before = n < low + count && (max(cu_seqlens[n], 0) >> 6) + n <= slot;
    const int passed = max(__syncthreads_count(before), 1);
    count = min(step, low + count - (low + (passed - 1) * step));
    low += (passed - 1) * step;
  }
  return low;
}

// Inclusive sum over the 64 tokens of a chunk by one warp: x0 is token lane, x1 token lane + 32.
__device__ __forceinline__ void chunk_cumsum(float* x0, float* x1) {
  const int lane = threadIdx.x & 31;
  float a = *x0, b = *x1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float up_a = __shfl_up_sync(0xffffffffu, a, step), up_b = __shfl_up_sync(0xffffffffu, b, step);
    if (lane >= step) a += up_a, b += up_b;
  }
  *x0 = a;
  *x1 = b + __shfl_sync(0xffffffffu, a, 31);
}

__device__ __forceinline__ void mma_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b with rows 8 to 15 of a zero, and of d unused.
__device__ __forceinline__ void mma_half_8(float (&d)[4], uint32_t a, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a), "r"(0), "r"(b));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* pointer) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(pointer)));
}

constexpr int kPitch = 72;      // halves a row of a padded 64x64 tile: ldmatrix rows fall in distinct banks
constexpr int kDiagPitch = 24;  // the same for a 16x16 tile

// Working memory of gated_inverse; it fits into a [64][128] 16-bit tile.
struct InverseScratch {
  cutlass::half_t lower[64 * kPitch];            // blocks of I + L below the diagonal, of 16, and of 8 in those on it
  float columns[4][2][8 * 8];                    // strictly lower part of the diagonal blocks of 8, column-contiguous
  cutlass::half_t diagonal[4][16 * kDiagPitch];  // inverses of the diagonal blocks of 16, row-major
};
static_assert(sizeof(InverseScratch) <= 64 * 128 * 2);

// The gated strict lower triangle L_ij = beta_i kk_ij exp2(g_i - g_j) of a chunk from the accumulator fragment of K
// K^T: warp w writes its 16 rows.
__device__ __forceinline__ void gate_lower(const float* kk, const float* g, const float* beta,
                                           InverseScratch& scratch) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  const float g_low = g[warp * 16 + row], g_high = g[warp * 16 + 8 + row];
  const float beta_low = beta[warp * 16 + row], beta_high = beta[warp * 16 + 8 + row];
  uint32_t* out = reinterpret_cast<uint32_t*>(scratch.lower + (warp * 16 + row) * kPitch + column);
  float* diagonal = scratch.columns[warp][0] + column * 8 + row;
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    if (block <= 2 * warp + 1) {
      const float2 g_column = *reinterpret_cast<const float2*>(g + block * 8 + column);
      const float* x = kk + block * 4;
      const float high[2] = {x[2] * (beta_high * exp2f(g_high - g_column.x)),
                             x[3] * (beta_high * exp2f(g_high - g_column.y))};
      if (block <= 2 * warp) {
        const float low[2] = {x[0] * (beta_low * exp2f(g_low - g_column.x)),
                              x[1] * (beta_low * exp2f(g_low - g_column.y))};
        out[block * 4 + 4 * kPitch] = Pair<cutlass::half_t>::pack(high[0], high[1]);
        if (block < 2 * warp) {
          out[block * 4] = Pair<cutlass::half_t>::pack(low[0], low[1]);
        } else {
          diagonal[0] = row > column ? low[0] : 0.f;
          diagonal[8] = row > column + 1 ? low[1] : 0.f;
        }
      } else {
        diagonal[64] = row > column ? high[0] : 0.f;
        diagonal[72] = row > column + 1 ? high[1] : 0.f;
      }
    }
  }
}

// Warp w inverts the 16x16 diagonal block w of I + L: its two blocks X1, X2 of 8 in float32 by forward substitution,
// one column a lane, and between them -X2 L21 X1 on tensor cores.
__device__ __forceinline__ void invert_diagonal_block(InverseScratch& scratch) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, column = lane & 7, part = lane >> 3;
  const float4* block = reinterpret_cast<const float4*>(scratch.columns[warp][part & 1]);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int k = 0; k < 7; ++k) {
#pragma unroll
    for (int quad = (k + 1) / 4; quad < 2; ++quad) {
      const float4 l = block[k * 2 + quad];
      if (4 * quad + 0 > k) x[4 * quad + 0] -= l.x * x[k];
      if (4 * quad + 1 > k) x[4 * quad + 1] -= l.y * x[k];
      if (4 * quad + 2 > k) x[4 * quad + 2] -= l.z * x[k];
      if (4 * quad + 3 > k) x[4 * quad + 3] -= l.w * x[k];
    }
  }
  // Parts of the warp: 0 writes X1, 1 writes X2, 2 the zeros above the diagonal.
  cutlass::half_t* inverse = scratch.diagonal[warp];
  cutlass::half_t* target = inverse + (part == 1 ? 8 * kDiagPitch : 0) + (part == 0 ? 0 : 8) + column;
  if (part < 3) {
#pragma unroll
    for (int i = 0; i < 8; ++i) target[i * kDiagPitch] = cutlass::half_t(part < 2 ? x[i] : 0.f);
  }
  __syncwarp();
  const cutlass::half_t* x1 = inverse + column * kDiagPitch;
  const cutlass::half_t* x2 = x1 + 8 * kDiagPitch + 8;
  uint32_t x1_transposed, l21, x2_rows;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0},[%1];"
               : "=r"(x1_transposed)
               : "r"(shared_address(x1)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];"
               : "=r"(l21)
               : "r"(shared_address(scratch.lower + (warp * 16 + 8 + column) * kPitch + warp * 16)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];" : "=r"(x2_rows) : "r"(shared_address(x2)));
  float y[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0};
  mma_half_8(y, x1_transposed, l21);
  mma_half_8(z, Pair<cutlass::half_t>::pack(-y[0], -y[1]), x2_rows);
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0],{%1};" ::"r"(shared_address(x1 + 8 * kDiagPitch)),
               "r"(Pair<cutlass::half_t>::pack(z[0], z[1]))
               : "memory");
}

// Block column w of the inverse X = (I + L)^-1 by warp w, with no barrier: X_iw = -D_i sum_{w<=k<i} L_ik X_kw, D_i the
// inverted diagonal blocks. Kept transposed, each product's accumulator is the next one's A operand. Writes the blocks
// of X diag(beta) on and below the diagonal of a tile with 128-byte rows swizzled in 16-byte units.
template <typename T>
__device__ __forceinline__ void merge_inverse(const InverseScratch& scratch, const float* beta, T* out) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int row = (lane & 7) + ((lane >> 4) << 3), column = ((lane >> 3) & 1) * 8;
  const float beta_low = beta[warp * 16 + (lane >> 2)], beta_high = beta[warp * 16 + 8 + (lane >> 2)];
  const uint32_t target = transposed_block(out, warp);
  uint32_t x[4][4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0][0]), "=r"(x[0][2]), "=r"(x[0][1]), "=r"(x[0][3])
               : "r"(shared_address(scratch.diagonal[warp] + (lane & 15) * kDiagPitch + (lane >> 4) * 8)));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int i = warp + step;
    if (i < 4) {
      if (step > 0) {
        float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        uint32_t b[4];
#pragma unroll
        for (int k = 0; k < step; ++k) {
          load_matrices(b, scratch.lower + (i * 16 + row) * kPitch + (warp + k) * 16 + column);
          mma_half(low, x[k], b[0], b[1]);
          mma_half(high, x[k], b[2], b[3]);
        }
        const uint32_t a[4] = {
            Pair<cutlass::half_t>::pack(-low[0], -low[1]), Pair<cutlass::half_t>::pack(-low[2], -low[3]),
            Pair<cutlass::half_t>::pack(-high[0], -high[1]), Pair<cutlass::half_t>::pack(-high[2], -high[3])};
        load_matrices(b, scratch.diagonal[i] + row * kDiagPitch + column);
        float r_low[4] = {0, 0, 0, 0}, r_high[4] = {0, 0, 0, 0};
        mma_half(r_low, a, b[0], b[1]);
        mma_half(r_high, a, b[2], b[3]);
        x[step][0] = Pair<cutlass::half_t>::pack(r_low[0], r_low[1]);
        x[step][1] = Pair<cutlass::half_t>::pack(r_low[2], r_low[3]);
        x[step][2] = Pair<cutlass::half_t>::pack(r_high[0], r_high[1]);
        x[step][3] = Pair<cutlass::half_t>::pack(r_high[2], r_high[3]);
      }
      uint32_t packed[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float2 value = Pair<cutlass::half_t>::unpack(x[step][part]);
        const float factor = (part & 1) ? beta_high : beta_low;
        packed[part] = Pair<T>::pack(value.x * factor, value.y * factor);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(target + i * 2048),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
    }
  }
}

// a = (I + L)^-1 diag(beta) of a chunk, L gated, from the accumulator fragment of K K^T, by a block of 128 threads. `a`
// is a swizzled tile whose blocks above the diagonal stay as they are. A caller must not need `a` or `scratch` any
// more.
template <typename T>
__device__ __forceinline__ void gated_inverse(const float* kk, const float* g, const float* beta, void* scratch, T* a) {
  InverseScratch& s = *static_cast<InverseScratch*>(scratch);
  gate_lower(kk, g, beta, s);
  __syncwarp();
  invert_diagonal_block(s);
  __syncthreads();
  merge_inverse(s, beta, a);
}

}  // namespace jaxqla
