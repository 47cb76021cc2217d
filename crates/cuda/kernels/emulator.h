// Threads of a block on one thread of the CPU: the other side of device.h, for tests.
//
// Each thread is a fiber. Barriers, shuffles, ldmatrix, mma.sync and cp.async are played so that mistakes show as wrong numbers or as errors:
// - shared memory starts as NaNs and ends at a page that nobody may touch, as device memory does;
// - an asynchronous copy lands at once with an odd seed, and only when it is waited for with an even one;
// - warps run ahead of one another, and lanes in any order, by the seed;
// - a barrier that not all threads reach, and lanes of a warp at different operations, are errors.
// Bank conflicts, speed and memory ordering beyond barriers are not seen.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#define DEVICE inline
#define UNROLL
#define UNROLL_BY(times)
#define REGISTERED_KERNEL(threads, most_shared, name, parameters)                                                           \
    static void name parameters;                                                                                            \
    static emulator::Registered registered_##name(#name, threads, most_shared, emulator::Signature<decltype(&name)>::sizes(), \
                                                  emulator::Signature<decltype(&name)>::call<&name>);                       \
    static void name parameters
#define KERNEL(threads, name, parameters) REGISTERED_KERNEL(threads, emulator::MOST_SHARED, name, parameters)
#define shared_memory emulator::now.shared
#define threadIdx emulator::now.thread
#define blockIdx emulator::now.block
#define blockDim emulator::now.block_size
#define gridDim emulator::now.grid

struct Barrier;

namespace emulator {

// What a block may have of shared memory on an sm_86 or sm_89, which run what is compiled for sm_80, and on an sm_90.
constexpr size_t MOST_SHARED = 99 << 10, MOST_SHARED_HOPPER = 227 << 10;

struct Index {
    u32 x, y, z;
};

// A copy of 16 bytes that is under way.
struct Copy {
    void* to;
    const void* from;
    bool live;
};

struct Fiber {
    void* stack_pointer;
    char* stack;
    // Where a generation is counted and which one the fiber has seen: it sleeps until there is a newer one.
    const u32* sleeps_on;
    u32 seen;
    bool started, done;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    // Products of the warpgroup that this thread has begun, and how many of them when it made a group, for each group.
    size_t products_begun;
    std::vector<size_t> products_committed;
};

// Where the lanes of a warp meet. The last lane to come computes for all.
struct Warp {
    u32 generation, arrived;
    const char* operation;
    u32 in[32][8];
    const void* rows[32];
    u32 words[32][4];
    float floats[32][4];
};

// A bulk copy that is under way.
struct BulkCopy {
    void* to;
    const void* from;
    u32 bytes;
    Barrier* barrier;
};
struct Group;

struct Now {
    unsigned char* shared;
    Index thread, block, block_size, grid;
    Fiber* fibers;
    Warp* warps;
    Group* groups;
    void* scheduler;
    u32 self;
    u32 generation, arrived;
    // Whether the kernels before are still busy, so that their memory may not be touched; and how many times they have ended.
    bool is_early;
    u32 kernels_done;
    bool copies_land_at_once, products_land_at_once, failed;
    void (*kernel)(void**);
    void** arguments;
    char* error;
    std::vector<BulkCopy>* bulk_copies;
};
static thread_local Now now;

// Saves the stack in *from and goes on with another.
extern "C" void emulator_switch(void** from, void* to);
// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...);

// A kernel by name, as launches find it.
struct Registered {
    const char* name;
    u32 threads;
    size_t most_shared;
    const std::vector<size_t> sizes;
    void (*call)(void**);
    const Registered* next;
    static const Registered*& first() {
        static const Registered* first = nullptr;
        return first;
    }
    Registered(const char* name, u32 threads, size_t most_shared, std::vector<size_t> sizes, void (*call)(void**))
        : name(name), threads(threads), most_shared(most_shared), sizes(std::move(sizes)), call(call), next(first()) {
        first() = this;
    }
};

// Calls a function with arguments behind pointers.
template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> {
    static std::vector<size_t> sizes() { return {sizeof(A)...}; }
    template <void (*F)(A...)> static void call(void** arguments) {
        spread<F>(arguments, std::index_sequence_for<A...>{});
    }
    template <void (*F)(A...), size_t... I> static void spread(void** arguments, std::index_sequence<I...>) {
        F(*(A*)arguments[I]...);
    }
};

inline Fiber& self() { return now.fibers[now.self]; }

inline void leave() { emulator_switch(&self().stack_pointer, now.scheduler); }

inline void sleep_on(const u32& generation) {
    self().sleeps_on = &generation;
    self().seen = generation;
    leave();
}

// All lanes of the warp come here with the same operation; `compute` runs once, when all are there.
template <class Compute> inline Warp& meet(Warp& warp, const char* operation, Compute compute) {
    if (!warp.arrived) warp.operation = operation;
    if (warp.operation != operation) fail("lanes of a warp are at %s and at %s", warp.operation, operation);
    if (++warp.arrived < 32) {
        sleep_on(warp.generation);
        return warp;
    }
    warp.arrived = 0;
    warp.generation++;
    compute();
    return warp;
}

inline Warp& warp() { return now.warps[now.self / 32]; }

inline void land(const Copy& copy) {
    if (copy.live) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
}

} // namespace emulator

inline float float_of_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of_float(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float f16_to_f32(u16 bits) {
    // Both halves of the range by one multiplication; NaN and infinity keep their payload.
    u32 magnitude = (u32)(bits & 0x7fff) << 13, sign = (u32)(bits & 0x8000) << 16;
    float x = float_of_bits(magnitude) * float_of_bits(0x77800000);
    if ((bits & 0x7c00) == 0x7c00) x = float_of_bits(magnitude | 0x7f800000);
    return float_of_bits(bits_of_float(x) | sign);
}
inline u16 f32_to_f16(float x) {
    u32 bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (u16)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (u16)(sign | 0x7c00);
    // Below the least normal number the sum's unit is that of subnormal ones.
    if (magnitude < 0x38800000) return (u16)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
    return (u16)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
}
inline u16 f32_to_bf16(float x) {
    u32 bits = bits_of_float(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_f16(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }
inline u32 pack_bf16(float low, float high) { return f32_to_bf16(low) | (u32)f32_to_bf16(high) << 16; }
inline u32 select_bytes(u32 low, u32 high, u32 which) {
    const u64 both = low | (u64)high << 32;
    u32 y = 0;
    for (u32 i = 0; i < 4; i++) y |= (u32)(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return y;
}
inline float fast_exp2(float x) { return exp2f(x); }

inline void release_next_kernel() {}
inline void wait_for_kernels() {
    if (emulator::now.is_early) emulator::sleep_on(emulator::now.kernels_done);
}

inline void block_barrier() {
    using namespace emulator;
    if (++now.arrived < now.block_size.x) return sleep_on(now.generation);
    now.arrived = 0;
    now.generation++;
}

inline void warp_barrier() {
    emulator::meet(emulator::warp(), "barrier", [] {});
}

inline float shuffle_xor(float x, int mask) {
    emulator::Warp& warp = emulator::warp();
    u32 lane = threadIdx.x % 32;
    warp.in[lane][0] = bits_of_float(x);
    emulator::meet(warp, "shuffle", [&] {
        for (u32 i = 0; i < 32; i++) warp.words[i][0] = warp.in[i][0];
    });
    return float_of_bits(warp.words[lane ^ mask][0]);
}

inline bool any_lane(bool x) {
    emulator::Warp& warp = emulator::warp();
    u32 lane = threadIdx.x % 32;
    warp.in[lane][0] = x;
    emulator::meet(warp, "vote", [&] {
        u32 any = 0;
        for (u32 i = 0; i < 32; i++) any |= warp.in[i][0];
        for (u32 i = 0; i < 32; i++) warp.words[i][0] = any;
    });
    return warp.words[lane][0];
}

inline void copy_async(void* to, const void* from, bool live) {
    using namespace emulator;
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("cp.async: an address is no multiple of 16");
    Copy copy = {to, from, live};
    if (now.copies_land_at_once) land(copy);
    else self().open.push_back(copy);
}
inline void commit_copies() {
    emulator::Fiber& fiber = emulator::self();
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
template <int N> inline void wait_copies() {
    auto& groups = emulator::self().groups;
    for (; groups.size() > N; groups.erase(groups.begin()))
        for (auto& copy : groups.front()) emulator::land(copy);
}

template <bool TRANSPOSED> inline void load_matrices(u32 (&r)[4], const void* row) {
    using namespace emulator;
    u32 lane = threadIdx.x % 32;
    Warp& warp = emulator::warp();
    if ((uintptr_t)row % 16) fail("ldmatrix: an address is no multiple of 16");
    warp.rows[lane] = row;
    meet(warp, TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", [&] {
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 m = 0; m < 4; m++) {
                u16 x[2];
                for (u32 i = 0; i < 2; i++) {
                    u32 row = lane / 4, column = lane % 4 * 2 + i;
                    if (TRANSPOSED) std::swap(row, column);
                    x[i] = ((const u16*)warp.rows[m * 8 + row])[column];
                }
                warp.words[lane][m] = x[0] | (u32)x[1] << 16;
            }
    });
    memcpy(r, warp.words[lane], 16);
}

template <float (*WIDEN)(u16)>
inline void emulated_mma(const char* operation, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    using namespace emulator;
    u32 lane = threadIdx.x % 32;
    Warp& warp = emulator::warp();
    memcpy(warp.in[lane], a, 16);
    warp.in[lane][4] = b0;
    warp.in[lane][5] = b1;
    memcpy(warp.floats[lane], c, 16);
    meet(warp, operation, [&] {
        float left[16][16], right[16][8], sums[16][8] = {};
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 half = 0; half < 2; half++) {
                const u32* in = warp.in[lane];
                auto element = [&](u32 i) { return WIDEN((u16)(in[i] >> 16 * half)); };
                for (u32 i = 0; i < 4; i++) left[lane / 4 + i % 2 * 8][lane % 4 * 2 + half + i / 2 * 8] = element(i);
                for (u32 i = 0; i < 2; i++) right[lane % 4 * 2 + half + i * 8][lane / 4] = element(4 + i);
            }
        for (u32 row = 0; row < 16; row++)
            for (u32 k = 0; k < 16; k++)
                for (u32 column = 0; column < 8; column++) sums[row][column] += left[row][k] * right[k][column];
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 i = 0; i < 4; i++) warp.floats[lane][i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
    memcpy(c, warp.floats[lane], 16);
}
inline float emulated_bf16_to_f32(u16 x) { return float_of_bits((u32)x << 16); }
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated_mma<emulated_bf16_to_f32>("mma of bf16", c, a, b0, b1);
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulated_mma<f16_to_f32>("mma of f16", c, a, b0, b1);
}
#include "emulated_hopper.h"
