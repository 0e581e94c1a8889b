// Warp-level pieces that TileLang has no form for: transposed fragment traffic with 128-byte swizzled tiles, row masks,
// and the inverse of a 64x64 unit lower triangle. Every function is called by whole warps; "lane" is the index in the
// warp. Fragments are arrays of the size that one warpgroup's share has, so that others do not compile.
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
__device__ __forceinline__ void load_transposed(T (&x)[32], const void* tile) {
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
__device__ __forceinline__ void delta_error(T (&w)[32], const float (&u)[32], const float* decay) {
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

// u = v - diag(decay) u in float32 and v = -diag(beta) u as an operand, on fragments [64 columns][64 tokens] of a
// warpgroup. decay, beta: one factor a token.
template <typename T>
__device__ __forceinline__ void chunk_error(T (&v)[32], float (&u)[32], const float* decay, const float* beta) {
  const float2* decays = reinterpret_cast<const float2*>(decay) + (threadIdx.x & 3);
  const float2* betas = reinterpret_cast<const float2*>(beta) + (threadIdx.x & 3);
  uint32_t* words = reinterpret_cast<uint32_t*>(v);
#pragma unroll
  for (int tokens = 0; tokens < 8; ++tokens) {
    const float2 d = decays[tokens * 4], b = betas[tokens * 4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int i = tokens * 4 + row * 2;
      const float2 x = Pair<T>::unpack(words[i / 2]);
      u[i] = x.x - u[i] * d.x;
      u[i + 1] = x.y - u[i + 1] * d.y;
      words[i / 2] = Pair<T>::pack(-b.x * u[i], -b.y * u[i + 1]);
    }
  }
}

// x diag(factor) of an operand fragment [64 columns][64 tokens] of a warpgroup. factor: one a token.
template <typename T>
__device__ __forceinline__ void scale_columns(T (&x)[32], const float* factor) {
  const float2* factors = reinterpret_cast<const float2*>(factor) + (threadIdx.x & 3);
  uint32_t* words = reinterpret_cast<uint32_t*>(x);
#pragma unroll
  for (int tokens = 0; tokens < 8; ++tokens) {
    const float2 f = factors[tokens * 4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float2 y = Pair<T>::unpack(words[tokens * 2 + row]);
      words[tokens * 2 + row] = Pair<T>::pack(y.x * f.x, y.y * f.y);
    }
  }
}

// Stores an operand fragment [64 rows][128 columns] of a warpgroup into two swizzled [64][64] tiles.
template <typename T>
__device__ __forceinline__ void store_operand(const T (&x)[64], void* tiles) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
  const uint32_t target = shared_address(tiles) + (warp * 16 + (lane & 15)) * 128;
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    const uint32_t* y = words + block * 4;
    const uint32_t column = ((2 * (block & 3) + (lane >> 4)) ^ (lane & 7)) << 4;
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(target + (block >> 2) * 8192 + column),
        "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3])
        : "memory");
  }
}

// Writes the lower triangle of factor(i, j) exp2(g_i - g_j) x_ij, with its diagonal unless kStrict, of an accumulator
// fragment x of a warpgroup into a swizzled tile whose blocks above the diagonal stay as they are.
template <bool kStrict, typename T, typename Factor>
__device__ __forceinline__ void store_decayed(const float (&x)[32], const float* g, T* tile, Factor factor) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, column = (lane & 3) * 2;
  const int low = warp * 16 + (lane >> 2), high = low + 8;
  const float g_low = g[low], g_high = g[high];
  const uint32_t target = shared_address(tile) + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block <= warp) {
      uint32_t packed[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = block * 16 + half * 8 + column;
        const float2 g_column = *reinterpret_cast<const float2*>(g + c);
        const float* z = x + block * 8 + half * 4;
        float y[4] = {z[0] * (factor(low, c) * exp2f(g_low - g_column.x)),
                      z[1] * (factor(low, c + 1) * exp2f(g_low - g_column.y)),
                      z[2] * (factor(high, c) * exp2f(g_high - g_column.x)),
                      z[3] * (factor(high, c + 1) * exp2f(g_high - g_column.y))};
        if (block == warp) {
          const int first = c + (kStrict ? 1 : 0);
          y[0] = low >= first ? y[0] : 0.f;
          y[1] = low >= first + 1 ? y[1] : 0.f;
          y[2] = high >= first ? y[2] : 0.f;
          y[3] = high >= first + 1 ? y[3] : 0.f;
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

// scale lower(p) o D of p = Q K^T, D_ij = exp2(g_i - g_j).
template <typename T>
__device__ __forceinline__ void decay_scores(const float (&p)[32], const float* g, float scale, T* tile) {
  store_decayed<false>(p, g, tile, [=](int, int) { return scale; });
}

// F = scale lower(x diag(beta)) o D of x = dO e^T.
template <typename T>
__device__ __forceinline__ void decay_score_gradients(const float (&x)[32], const float* g, const float* beta,
                                                      float scale, T* tile) {
  store_decayed<false>(x, g, tile, [=](int, int j) { return scale * beta[j]; });
}

// H = -strictLower(diag(beta) x diag(beta)) o D of x = Z e^T, and its diagonal, the gradient of beta.
template <typename T>
__device__ __forceinline__ void decay_coupling_gradients(const float (&x)[32], const float* g, const float* beta,
                                                         T* tile, float* dbeta) {
  store_decayed<true>(x, g, tile, [=](int i, int j) { return -beta[i] * beta[j]; });
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block == warp && (row & ~1) == column) {
      const float* z = x + block * 8;
      dbeta[warp * 16 + row] = (row & 1) ? z[1] : z[0];
      dbeta[warp * 16 + 8 + row] = (row & 1) ? z[7] : z[6];
    }
  }
}

// diag(factor) x of an accumulator fragment [64][64] of a warpgroup.
__device__ __forceinline__ void scale_rows(float (&x)[32], const float* factor) {
  const int row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
  const float low = factor[row], high = factor[row + 8];
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    x[i] *= low;
    x[i + 1] *= low;
    x[i + 2] *= high;
    x[i + 3] *= high;
  }
}

// <x_i, y_i> of the rows of an accumulator fragment x [64][64] of a warpgroup and of a swizzled tile y.
template <typename T>
__device__ __forceinline__ void row_dots(const float (&x)[32], const T* tile, float* out) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, row = warp * 16 + (lane >> 2);
  const uint32_t* low = reinterpret_cast<const uint32_t*>(tile) + row * 32 + (lane & 3);
  float sum_low = 0.f, sum_high = 0.f;
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    const int unit = (block ^ (row & 7)) * 4;
    const float2 y_low = Pair<T>::unpack(low[unit]), y_high = Pair<T>::unpack(low[unit + 8 * 32]);
    const float* z = x + block * 4;
    sum_low += z[0] * y_low.x + z[1] * y_low.y;
    sum_high += z[2] * y_high.x + z[3] * y_high.y;
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum_low += __shfl_xor_sync(0xffffffffu, sum_low, step);
    sum_high += __shfl_xor_sync(0xffffffffu, sum_high, step);
  }
  if ((lane & 3) == 0) out[row] = sum_low, out[row + 8] = sum_high;
}

// Stores an accumulator fragment [64][64] of a warpgroup into a swizzled tile.
template <typename T>
__device__ __forceinline__ void store_accumulator(const float (&x)[32], T* tile) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const uint32_t target = shared_address(tile) + (warp * 16 + (lane & 15)) * 128;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const float* z = x + block * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(
                     target + (((2 * block + (lane >> 4)) ^ (lane & 7)) << 4)),
                 "r"(Pair<T>::pack(z[0], z[1])), "r"(Pair<T>::pack(z[2], z[3])), "r"(Pair<T>::pack(z[4], z[5])),
                 "r"(Pair<T>::pack(z[6], z[7]))
                 : "memory");
  }
}

// Sum of all products of the elements of two [128][64] 16-bit tiles of one swizzle, by one warp; every lane gets it.
template <typename T>
__device__ __forceinline__ float tile_dot(const T* x, const T* y) {
  const uint4* a = reinterpret_cast<const uint4*>(x) + (threadIdx.x & 31);
  const uint4* b = reinterpret_cast<const uint4*>(y) + (threadIdx.x & 31);
  float sums[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < 32; ++i) {
    const uint4 u = a[i * 32], w = b[i * 32];
    const uint32_t us[4] = {u.x, u.y, u.z, u.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 p = Pair<T>::unpack(us[j]), r = Pair<T>::unpack(ws[j]);
      sums[j] += p.x * r.x + p.y * r.y;
    }
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// Stores an accumulator fragment [64 columns][64 tokens] as [64 tokens][64 columns] into a swizzled tile.
template <typename T>
__device__ __forceinline__ void store_transposed(const T (&)[32], void* tile, const float (&o)[32]) {
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
  cutlass::half_t lower[64 * kPitch];            // M below the diagonal blocks of 16; in those Y once it is known
  float columns[4][2][8 * 8];                    // strictly lower part of the diagonal blocks of 8, column-contiguous
  cutlass::half_t diagonal[4][16 * kDiagPitch];  // (I + M diag(beta))^-1 of the diagonal blocks of 16, row-major
};
static_assert(sizeof(InverseScratch) <= 64 * 128 * 2);

// The strict lower triangle M_ij = kk_ij exp2(g_i - g_j) of a chunk from the accumulator fragment of K K^T: warp w
// writes its 16 rows.
__device__ __forceinline__ void gate_lower(const float (&kk)[32], const float* g, InverseScratch& scratch) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
  const float g_low = g[warp * 16 + row], g_high = g[warp * 16 + 8 + row];
  uint32_t* out = reinterpret_cast<uint32_t*>(scratch.lower + (warp * 16 + row) * kPitch + column);
  float* diagonal = scratch.columns[warp][0] + column * 8 + row;
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    if (block <= 2 * warp + 1) {
      const float2 g_column = *reinterpret_cast<const float2*>(g + block * 8 + column);
      const float* x = kk + block * 4;
      const float high[2] = {x[2] * exp2f(g_high - g_column.x), x[3] * exp2f(g_high - g_column.y)};
      if (block <= 2 * warp) {
        const float low[2] = {x[0] * exp2f(g_low - g_column.x), x[1] * exp2f(g_low - g_column.y)};
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

// Warp w makes the 16x16 diagonal block w of Y and of E = (I + M diag(beta))^-1 = I - Y diag(beta): the two blocks of 8
// in float32 by forward substitution, one column a lane, and between them Y21 = E2 M21 (I - diag(beta) Y1) on tensor
// cores.
__device__ __forceinline__ void invert_diagonal_block(const float* beta, InverseScratch& scratch) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, column = lane & 7, part = lane >> 3,
            half = part & 1;
  const float4* block = reinterpret_cast<const float4*>(scratch.columns[warp][half]);
  const float* betas = beta + warp * 16;
  float y[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < 7; ++k) {
    const float x = (k == column ? 1.f : 0.f) - betas[half * 8 + k] * y[k];
#pragma unroll
    for (int quad = (k + 1) / 4; quad < 2; ++quad) {
      const float4 m = block[k * 2 + quad];
      if (4 * quad + 0 > k) y[4 * quad + 0] += m.x * x;
      if (4 * quad + 1 > k) y[4 * quad + 1] += m.y * x;
      if (4 * quad + 2 > k) y[4 * quad + 2] += m.z * x;
      if (4 * quad + 3 > k) y[4 * quad + 3] += m.w * x;
    }
  }
  cutlass::half_t* e_block = scratch.diagonal[warp];
  cutlass::half_t* y_block = scratch.lower + warp * 16 * kPitch + warp * 16;
  // Of M21 only the registers are needed from here on.
  uint32_t m21;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];"
               : "=r"(m21)
               : "r"(shared_address(y_block + (8 + column) * kPitch)));
  // Parts of the warp: 0 and 1 write the blocks of E on the diagonal, 2 and 3 those of Y; 1 and 3 zeros above them.
  const bool of_e = part < 2;
  const int pitch = of_e ? kDiagPitch : kPitch;
  cutlass::half_t* target = (of_e ? e_block : y_block) + half * 8 + column;
  const float factor = of_e ? -betas[half * 8 + column] : 1.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    target[(half * 8 + i) * pitch] = cutlass::half_t((of_e && i == column ? 1.f : 0.f) + factor * y[i]);
    if (half == 1) target[i * pitch] = cutlass::half_t(0.f);
  }
  __syncwarp();
  uint32_t y1_transposed, e2;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0},[%1];"
               : "=r"(y1_transposed)
               : "r"(shared_address(y_block + column * kPitch)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0},[%1];"
               : "=r"(e2)
               : "r"(shared_address(e_block + (8 + column) * kDiagPitch + 8)));
  const int row = lane >> 2, token = (lane & 3) * 2;
  const float2 y1 = Pair<cutlass::half_t>::unpack(y1_transposed);
  const uint32_t x1_transposed = Pair<cutlass::half_t>::pack((row == token ? 1.f : 0.f) - betas[token] * y1.x,
                                                             (row == token + 1 ? 1.f : 0.f) - betas[token + 1] * y1.y);
  float u[4] = {0, 0, 0, 0}, y21[4] = {0, 0, 0, 0};
  mma_half_8(u, x1_transposed, m21);
  mma_half_8(y21, Pair<cutlass::half_t>::pack(u[0], u[1]), e2);
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0],{%1};" ::"r"(
                   shared_address(y_block + (8 + column) * kPitch)),
               "r"(Pair<cutlass::half_t>::pack(y21[0], y21[1]))
               : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0],{%1};" ::"r"(
                   shared_address(e_block + (8 + column) * kDiagPitch)),
               "r"(Pair<cutlass::half_t>::pack(-betas[row] * y21[0], -betas[row] * y21[1]))
               : "memory");
}

// Block column w of Y by warp w, with no barrier: Y_iw = E_i sum_{w<=k<i} M_ik X_kw, with X = I - diag(beta) Y and E_i
// the diagonal blocks of E. Kept transposed, each product's accumulator is the next one's A operand. Writes the blocks
// on and below the diagonal, of Y or of X diag(beta), into a tile with 128-byte rows swizzled in 16-byte units.
template <bool kInverse, typename T>
__device__ __forceinline__ void merge_inverse(const InverseScratch& scratch, const float* beta, T* out) {
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, token = (lane & 3) * 2;
  const int row = (lane & 7) + ((lane >> 4) << 3), column = ((lane >> 3) & 1) * 8;
  const float beta_low = beta[warp * 16 + (lane >> 2)], beta_high = beta[warp * 16 + 8 + (lane >> 2)];
  const uint32_t target = transposed_block(out, warp);
  uint32_t x[4][4], y[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int i = warp + step;
    if (i < 4) {
      if (step == 0) {
        asm volatile(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
            : "=r"(y[0]), "=r"(y[2]), "=r"(y[1]), "=r"(y[3])
            : "r"(shared_address(scratch.lower + (warp * 16 + (lane & 15)) * kPitch + warp * 16 + (lane >> 4) * 8)));
      } else {
        float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        uint32_t b[4];
#pragma unroll
        for (int k = 0; k < step; ++k) {
          load_matrices(b, scratch.lower + (i * 16 + row) * kPitch + (warp + k) * 16 + column);
          mma_half(low, x[k], b[0], b[1]);
          mma_half(high, x[k], b[2], b[3]);
        }
        const uint32_t a[4] = {Pair<cutlass::half_t>::pack(low[0], low[1]), Pair<cutlass::half_t>::pack(low[2], low[3]),
                               Pair<cutlass::half_t>::pack(high[0], high[1]),
                               Pair<cutlass::half_t>::pack(high[2], high[3])};
        load_matrices(b, scratch.diagonal[i] + row * kDiagPitch + column);
        float r_low[4] = {0, 0, 0, 0}, r_high[4] = {0, 0, 0, 0};
        mma_half(r_low, a, b[0], b[1]);
        mma_half(r_high, a, b[2], b[3]);
        y[0] = Pair<cutlass::half_t>::pack(r_low[0], r_low[1]);
        y[1] = Pair<cutlass::half_t>::pack(r_low[2], r_low[3]);
        y[2] = Pair<cutlass::half_t>::pack(r_high[0], r_high[1]);
        y[3] = Pair<cutlass::half_t>::pack(r_high[2], r_high[3]);
      }
      uint32_t packed[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        // This word: row `position` (+ 8) of the block column, and two tokens of block i.
        const int position = (lane >> 2) + (part & 1) * 8, first = token + (part >> 1) * 8;
        const float2 b = *reinterpret_cast<const float2*>(beta + i * 16 + first);
        const float2 value = Pair<cutlass::half_t>::unpack(y[part]);
        const float2 inverse = make_float2((step == 0 && position == first ? 1.f : 0.f) - b.x * value.x,
                                           (step == 0 && position == first + 1 ? 1.f : 0.f) - b.y * value.y);
        x[step][part] = Pair<cutlass::half_t>::pack(inverse.x, inverse.y);
        const float factor = (part & 1) ? beta_high : beta_low;
        packed[part] =
            kInverse ? Pair<T>::pack(inverse.x * factor, inverse.y * factor) : Pair<T>::pack(value.x, value.y);
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(target + i * 2048),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
    }
  }
}

// With M the gated strict lower triangle of K K^T of a chunk, by a block of 128 threads: Y = M (I + diag(beta) M)^-1,
// or the inverse itself times diag(beta), (I - diag(beta) Y) diag(beta). No division by beta anywhere. `kk` is the
// accumulator fragment of K K^T; `out` a swizzled tile whose blocks above the diagonal stay as they are. A caller must
// not need `out` or `scratch` any more.
template <bool kInverse, typename T>
__device__ __forceinline__ void gated_inverse(const float (&kk)[32], const float* g, const float* beta, void* scratch,
                                              T* out) {
  InverseScratch& s = *static_cast<InverseScratch*>(scratch);
  gate_lower(kk, g, s);
  __syncwarp();
  invert_diagonal_block(beta, s);
  __syncthreads();
  merge_inverse<kInverse>(s, beta, out);
}

}  // namespace jaxqla
