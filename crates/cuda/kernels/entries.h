// What the plain kernels of attention share: blocks of entries, tiles of keys, scores.
//
// Row r of the queries (rows × heads × d) sees the slots visible[r].x .. visible[r].y. An entry is a row and a head of a KV head's group:
// entry e is row e / group and head e % group of the group, so that entries of neighbours share tiles of keys. A block has 128 threads;
// a lane has a slot of a tile, a warp takes every fourth entry.
#pragma once
#include "device.h"

constexpr u32 TILE = 32;    // slots of a tile
constexpr u32 ENTRIES = 16; // entries of a block
constexpr u32 WARPS = 4;
constexpr u32 THREADS = 32 * WARPS;

// An attention of some rows over a cache of Hkv × capacity × d.
template <class T> struct Attention {
    const float* q;
    const typename T::Stored* k;
    const Pair* visible;
    u32 rows, heads, kv_heads, capacity, d;
    float scale;

    DEVICE u32 group() const { return heads / kv_heads; }
    DEVICE u32 entries() const { return rows * group(); }
    // Index of an entry of KV head g among rows × heads.
    DEVICE size_t index(u32 g, u32 entry) const { return (size_t)(entry / group()) * heads + g * group() + entry % group(); }
};

// Gumbel noise of scores, drawn from a table of e^g: a hash of the seed, the query head and the row's position says where the row begins.
struct NoNoise {
    DEVICE void start(u32, u32) {}
    DEVICE float apply(float score, size_t) const { return score; }
};
DEVICE u64 mix64(u64 x) { // SplitMix64's finaliser
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
DEVICE u32 mix32(u32 x) { // MurmurHash3's finaliser
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}
struct Gumbel {
    const float* logarithms;    // g of the table's 65,536 entries
    const u32* query_positions; // one a row
    const u32* key_positions;   // kv_heads × capacity; without them slots are positions
    u32 capacity;
    u64 seed;
    u32 has_seed;
    float temperature;
    u32 key;

    // Makes the key of a query head and a row.
    DEVICE void start(u32 head, u32 row) { key = (u32)mix64(seed ^ mix64((u64)head << 32 | query_positions[row])); }
    // (score + g) / τ, where `token` indexes the positions of keys. Without a seed there is no noise.
    DEVICE float apply(float score, size_t token) const {
        if (has_seed) {
            const u32 position = key_positions ? key_positions[token] : (u32)(token % capacity);
            score += logarithms[(mix32(key + (position >> 16)) + position) & 0xffffu];
        }
        return score / temperature;
    }
};

// Distance of rows of a tile of keys in shared memory: odd, so that the lanes of a warp fall in all banks.
DEVICE u32 tile_stride(u32 d) { return d | 1; }

// Loads the slots base .. base + TILE of one head, those below `end`, as f32. All threads take part; a barrier has to follow.
template <class T> DEVICE void load_tile(float* tile, u32 stride, const typename T::Stored* head, u32 d, u32 base, u32 end) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 i = lane; i < d; i += 32)
        UNROLL for (u32 j = 0; j < TILE / WARPS; j++) {
            const u32 row = j * WARPS + warp, slot = base + row;
            if (slot < end) tile[row * stride + i] = T::widen(head[(size_t)slot * d + i]);
        }
}

DEVICE float dot(const float* a, const float* b, u32 d) {
    float sum = 0;
    for (u32 i = 0; i < d; i++) sum += a[i] * b[i];
    return sum;
}

// The entries of this block, of KV head blockIdx.y, and the slots that any of their rows sees.
struct EntryBlock {
    u32 g, first, count, from, to;
};
template <class T> DEVICE EntryBlock entry_block(const Attention<T>& a, u32 first_slot) {
    EntryBlock block = {blockIdx.y, blockIdx.x * ENTRIES, a.entries() - blockIdx.x * ENTRIES, ~0u, 0};
    if (block.count > ENTRIES) block.count = ENTRIES;
    const u32 last = (block.first + block.count - 1) / a.group();
    for (u32 row = block.first / a.group(); row <= last; row++) {
        const Pair seen = a.visible[row];
        if (seen.x < block.from) block.from = seen.x;
        if (seen.y > block.to) block.to = seen.y;
    }
    if (block.from < first_slot) block.from = first_slot;
    return block;
}

// Loads the queries of a block's entries, ENTRIES × d. A barrier has to follow.
template <class T> DEVICE void load_queries(float* queries, const Attention<T>& a, const EntryBlock& block) {
    for (u32 at = threadIdx.x; at < block.count * a.d; at += THREADS)
        queries[at] = a.q[a.index(block.g, block.first + at / a.d) * a.d + at % a.d];
}
