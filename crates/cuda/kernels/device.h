// What kernels use of a GPU: PTX under nvcc, the emulator (emulator.h) under any other compiler.
//
// Kernels are written against the names of this file alone, so that the sources that run on a GPU are those that tests run on the CPU.
// Nothing of CUDA's headers is included.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Two and four words, as they lie in memory.
struct alignas(8) Pair {
    u32 x, y;
};
struct alignas(16) Quad {
    u32 x, y, z, w;
};

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
// A kernel: the most threads of a block, its name, its parameters in parentheses.
#define KERNEL(threads, name, parameters) extern "C" __global__ void __launch_bounds__(threads) name parameters
#define PRAGMA(text) _Pragma(#text)
#define UNROLL PRAGMA(unroll)
#define UNROLL_BY(times) PRAGMA(unroll times)

// Dynamic shared memory of the block.
extern __shared__ __align__(1024) unsigned char shared_memory[];

// Lets the next kernel of the stream begin when all blocks have said so. It begins with what it does before it waits for this one.
DEVICE void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Returns when all kernels before are done. What they write is not read before, and what they read or write is not written before.
DEVICE void wait_for_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns when all threads of the block have come here.
DEVICE void block_barrier() { __syncthreads(); }

DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float x) { return __float_as_uint(x); }

DEVICE float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE u16 f32_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
DEVICE u16 f32_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// Two numbers rounded into one word, the first in its lower half.
DEVICE u32 pack_f16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// A word of four bytes of `low` and `high`: byte i is the one whose number, 0 to 3 of `low` and 4 to 7 of `high`, is hexadecimal digit i of `which`.
DEVICE u32 select_bytes(u32 low, u32 high, u32 which) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
    return y;
}

// 2^x, to about 2 ulp.
DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns when all lanes of the warp have come here.
DEVICE void warp_barrier() { __syncwarp(); }

// x of the lane whose index differs in the bits of `mask`. All lanes of the warp take part.
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// Whether x holds in any lane. All lanes of the warp take part.
DEVICE bool any_lane(bool x) { return __any_sync(~0u, x); }

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory without waiting; zeros where not `live`. Both addresses are multiples of 16.
DEVICE void copy_async(void* to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(live ? 16 : 0)
                 : "memory");
}
// Makes a group of this thread's copies since the last group.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most N groups of this thread are under way.
template <int N> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8 × 8 matrices of 16 bits from shared memory: lane l gives the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
}

// c (16 × 8, f32) += a (16 × 16) · b (16 × 8), each in the fragments of mma.sync.m16n8k16.
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#include "hopper.h"
#else
#include "emulator.h"
#endif

// The beginning of a kernel that does nothing before those before it are done.
DEVICE void begin_kernel() {
    release_next_kernel();
    wait_for_kernels();
}

DEVICE float minus_infinity() { return float_of_bits(0xff800000); }

// Element types of tensors: how one is stored, read and rounded to, ties to even.
struct F32 {
    typedef float Stored;
    static DEVICE float widen(float x) { return x; }
    static DEVICE float narrow(float x) { return x; }
};
struct F16 {
    typedef u16 Stored;
    static DEVICE float widen(u16 x) { return f16_to_f32(x); }
    static DEVICE u16 narrow(float x) { return f32_to_f16(x); }
    static DEVICE u32 pack(float low, float high) { return pack_f16(low, high); }
    static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
    template <bool ADD> static DEVICE void group_scores(float (&c)[32], const u32 (&a)[4], SharedTile b) { product_of_group_f16<ADD>(c, a, b); }
    template <u32 N> static DEVICE void group_values(float (&c)[N], const u32 (&a)[4], TransposedTile b) { product_of_group_f16(c, a, b); }
};
struct Bf16 {
    typedef u16 Stored;
    static DEVICE float widen(u16 x) { return float_of_bits((u32)x << 16); }
    static DEVICE u16 narrow(float x) { return f32_to_bf16(x); }
    static DEVICE u32 pack(float low, float high) { return pack_bf16(low, high); }
    static DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }
    template <bool ADD> static DEVICE void group_scores(float (&c)[32], const u32 (&a)[4], SharedTile b) { product_of_group_bf16<ADD>(c, a, b); }
    template <u32 N> static DEVICE void group_values(float (&c)[N], const u32 (&a)[4], TransposedTile b) { product_of_group_bf16(c, a, b); }
};

// Eight neighbouring floats, at a multiple of 16, each rounded to 16 bits.
template <class T> DEVICE Quad load_packed(const float* from) {
    const Quad low = ((const Quad*)from)[0], high = ((const Quad*)from)[1];
    auto pack = [](u32 a, u32 b) { return T::pack(float_of_bits(a), float_of_bits(b)); };
    return Quad{pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y), pack(high.z, high.w)};
}

// The sum and the maximum of a number over a warp, the same in each lane.
DEVICE float warp_sum(float x) {
    UNROLL for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE float warp_max(float x) {
    UNROLL for (int mask = 16; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// The least and the greatest number of a warp, the same in each lane.
DEVICE u32 warp_least(u32 x) {
    UNROLL for (int mask = 16; mask; mask /= 2) {
        const u32 other = bits_of_float(shuffle_xor(float_of_bits(x), mask));
        x = other < x ? other : x;
    }
    return x;
}
DEVICE u32 warp_greatest(u32 x) { return ~warp_least(~x); }

// The KV head and the first entry of a block of attention, which has `size` entries. Blocks begin with the last rows, which see most, of all heads: those
// that take longest begin first.
struct HeadBlock {
    u32 kv_head, first;
};
DEVICE HeadBlock head_block(u32 kv_heads, u32 size) {
    return {blockIdx.x % kv_heads, (gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads) * size};
}

// The index of this thread in a grid of one dimension.
DEVICE size_t thread_index() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }
