// The other side of hopper.h, for tests: barriers, bulk copies and products of warpgroups on emulated threads.
//
// With an odd seed bulk copies are done at once, with an even one as late as may be: when no thread can go on. So are products with seeds below 4;
// from there to 7 it is the other way round. What goes by the asynchronous proxy is not told from what threads do themselves.
#pragma once

#define ON_HOPPER(statement) statement
#define HOPPER_KERNEL(threads, name, parameters) REGISTERED_KERNEL(threads, emulator::MOST_SHARED_HOPPER, name, parameters)

struct Barrier {
    u32 generation; // phases that have ended
    unsigned char arrivals, missing;
    short pieces; // of 16 bytes that are still to come
};

struct SharedTile {
    const unsigned char* first;
    SharedTile columns(u32 k) const { return {first + 32 * k}; }
};

struct TransposedTile {
    const unsigned char* first;
    u32 next;
    TransposedTile rows(u32 k) const { return {first + 2048 * k, next}; }
};

namespace emulator {

// A product of a warpgroup: 64 rows of a by `columns` columns, sixteen products each, and where its threads have their sums, and a where it is
// not in shared memory. The right side is the rows of b, or the columns of `transposed`.
struct Product {
    u32 columns;
    bool add;
    float (*widen)(u16);
    SharedTile a, b;
    TransposedTile transposed;
    float* sums[128];
    const u32* registers[128];
    // The sides as read: 64 rows, and columns, of 16 each.
    std::vector<float> left, right;
};

// Where the threads of a warpgroup meet, and its products, of which the first ones are done.
struct Group {
    u32 generation, arrived;
    Product next;
    std::vector<Product> products;
    size_t done;
};

inline void end_phase(Barrier& barrier) {
    if (barrier.missing || barrier.pieces) return;
    barrier.missing = barrier.arrivals;
    barrier.generation++;
}

inline void land(const BulkCopy& copy) {
    memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->pieces -= (short)(copy.bytes / 16);
    end_phase(*copy.barrier);
}

inline void arrive(Barrier& barrier) {
    if (!barrier.missing) fail("a barrier in shared memory: one thread too many arrives");
    barrier.missing--;
    end_phase(barrier);
}

} // namespace emulator

inline void barrier_init(Barrier* barrier, u32 arrivals) {
    if (arrivals < 1 || arrivals > 255) emulator::fail("a barrier in shared memory: %u arrivals", arrivals);
    *barrier = {0, (unsigned char)arrivals, (unsigned char)arrivals, 0};
}
inline void show_barriers() {}
inline void barrier_expect(Barrier* barrier, u32 bytes) {
    barrier->pieces += (short)(bytes / 16);
    emulator::arrive(*barrier);
}
inline void barrier_arrive(Barrier* barrier) { emulator::arrive(*barrier); }
inline void barrier_wait(Barrier* barrier, u32 parity) {
    while ((barrier->generation & 1) == parity) emulator::sleep_on(barrier->generation);
}

inline void copy_bulk(void* to, const void* from, u32 bytes, Barrier* barrier) {
    using namespace emulator;
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fail("cp.async.bulk: an address or a size is no multiple of 16");
    const BulkCopy copy = {to, from, bytes, barrier};
    if (now.copies_land_at_once) land(copy);
    else now.bulk_copies->push_back(copy);
}

inline void async_fence() {}
template <int N> inline void release_registers() {}
template <int N> inline void claim_registers() {}

inline SharedTile shared_tile(const void* first) {
    if ((uintptr_t)first % 1024) emulator::fail("wgmma: a tile is not at a multiple of 1024");
    return {(const unsigned char*)first};
}

namespace emulator {

// Element (row, column) of a tile.
inline u16 tile_element(SharedTile tile, u32 row, u32 column) {
    uintptr_t at = (uintptr_t)tile.first + row * 128 + column * 2;
    at ^= (at >> 7 & 7) << 4;
    return *(const u16*)at;
}

inline Group& group() { return now.groups[now.self / 128]; }

// Elements of the sides of a product: of a row and an inner index, and of an inner index and a column.
inline u16 left_element(const Product& product, u32 row, u32 k) {
    if (product.a.first) return tile_element(product.a, row, k);
    const u32 thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
    return (u16)(product.registers[thread][row / 8 % 2 + k / 8 * 2] >> 16 * (k % 2));
}
inline u16 right_element(const Product& product, u32 k, u32 column) {
    if (product.b.first) return tile_element(product.b, column, k);
    return tile_element({product.transposed.first + column / 64 * product.transposed.next}, k, column % 64);
}

// Reads both sides, unless they have been.
inline void read_sides(Product& product) {
    if (product.right.size()) return;
    product.left.resize(64 * 16);
    product.right.resize(product.columns * 16);
    for (u32 k = 0; k < 16; k++) {
        for (u32 row = 0; row < 64; row++) product.left[row * 16 + k] = product.widen(left_element(product, row, k));
        for (u32 column = 0; column < product.columns; column++)
            product.right[column * 16 + k] = product.widen(right_element(product, k, column));
    }
}

// Does the products of a warpgroup that come before the one of this number.
inline void do_products(Group& group, size_t end) {
    for (; group.done < end; group.done++) {
        Product& product = group.products[group.done];
        read_sides(product);
        for (u32 thread = 0; thread < 128; thread++)
            for (u32 i = 0; i < product.columns / 2; i++) {
                const u32 row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
                float sum = 0;
                for (u32 k = 0; k < 16; k++) sum += product.left[row * 16 + k] * product.right[column * 16 + k];
                product.sums[thread][i] = product.add ? product.sums[thread][i] + sum : sum;
            }
        product.left = product.right = {};
    }
}

// All threads of a warpgroup come here with the same product, and each with its sums, and its part of a unless that is in shared memory. A product
// that is done at once reads shared memory when the first thread comes.
inline void start_product(const Product& product, float* sums, const u32* registers) {
    Group& own = group();
    if (now.block_size.x % 128) fail("wgmma: a block is no whole number of warpgroups");
    if (!own.arrived) {
        own.next = product;
        if (now.products_land_at_once && product.a.first) read_sides(own.next);
    }
    const Product& next = own.next;
    if (next.columns != product.columns || next.a.first != product.a.first || next.b.first != product.b.first ||
        next.transposed.first != product.transposed.first)
        fail("wgmma: threads of a warpgroup are at different products");
    own.next.sums[now.self % 128] = sums;
    own.next.registers[now.self % 128] = registers;
    self().products_begun++;
    if (++own.arrived < 128) return sleep_on(own.generation);
    own.arrived = 0;
    own.generation++;
    own.products.push_back(own.next);
    if (now.products_land_at_once) do_products(own, own.products.size());
}

} // namespace emulator

inline void begin_products() {}
inline void commit_products() {
    emulator::Fiber& fiber = emulator::self();
    fiber.products_committed.push_back(fiber.products_begun);
}
template <int N, int = 0> inline void wait_products() {
    auto& committed = emulator::self().products_committed;
    if (committed.size() > N) emulator::do_products(emulator::group(), committed[committed.size() - 1 - N]);
}

template <size_t SUMS> inline void product_of_group(float (&c)[SUMS], SharedTile a, SharedTile b) {
    emulator::start_product({2 * SUMS, true, emulated_bf16_to_f32, a, b, {}, {}, {}, {}, {}}, c, nullptr);
}

inline TransposedTile transposed_tile(const void* first, u32 next) {
    if ((uintptr_t)first % 1024 || next % 1024) emulator::fail("wgmma: a tile is not at a multiple of 1024");
    return {(const unsigned char*)first, next};
}
template <u32 N> inline void hold_sums(float (&)[N]) {}
#define ATTENTION_PRODUCTS(type, widen)                                                                                    \
    template <bool ADD> inline void product_of_group_##type(float (&c)[32], const u32 (&a)[4], SharedTile b) {            \
        emulator::start_product({64, ADD, widen, {}, b, {}, {}, {}, {}, {}}, c, a);                                                \
    }                                                                                                                      \
    template <u32 N> inline void product_of_group_##type(float (&c)[N], const u32 (&a)[4], TransposedTile b) {            \
        emulator::start_product({2 * N, true, widen, {}, {}, b, {}, {}, {}, {}}, c, a);                                            \
    }
ATTENTION_PRODUCTS(f16, f16_to_f32)
ATTENTION_PRODUCTS(bf16, emulated_bf16_to_f32)
