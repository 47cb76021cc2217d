// What kernels use of a Hopper GPU (sm_90a) beside device.h: products of warpgroups, copies in bulk, and barriers on which both are waited for.
//
// A warpgroup is 128 threads, of which the first is a multiple of 128. Products and bulk copies go by the asynchronous proxy: what threads
// have written to shared memory themselves is seen by them after async_fence and a barrier.
#pragma once

// Runs a statement on GPUs that have all this, and nothing on others, whose code is never launched.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ON_HOPPER(statement) statement
#else
#define ON_HOPPER(statement)
#endif
// A kernel of which a multiprocessor holds one block, so that a thread has as many registers as there are.
#define HOPPER_KERNEL(threads, name, parameters) extern "C" __global__ void __launch_bounds__(threads, 1) name parameters

// A barrier in shared memory. Its phase ends, and the next begins, when as many threads have arrived as it was made for and all bytes that
// they expect have come. The first phase has parity 0.
struct Barrier {
    u64 bits;
};
DEVICE void barrier_init(Barrier* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Shows the barriers that this thread has made to all who use them; a barrier of the block has to follow.
DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and has the phase wait for some bytes of bulk copies.
DEVICE void barrier_expect(Barrier* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Returns when the phase of this parity has ended.
DEVICE void barrier_wait(Barrier* barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Copies bytes to shared memory without waiting; the barrier's phase waits for them. Addresses and the number of bytes are multiples of 16.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Has the asynchronous proxy see what this thread has written to shared memory.
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Changes the registers of each thread of a warpgroup, all of which come here: down to N, up to N.
template <int N> DEVICE void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// A matrix of rows of 64 elements of 16 bits in shared memory, 128 bytes each, in which 16-byte pieces of row r stand at their index xor r % 8. It
// begins at a multiple of 1024 bytes.
struct SharedTile {
    u64 bits;
    // The matrix from column 16 · k on.
    DEVICE SharedTile columns(u32 k) const { return {bits + 2 * k}; }
};
DEVICE SharedTile shared_tile(const void* first) {
    // Eight rows are 1024 bytes from the next eight; pieces are swizzled over 128 bytes.
    return {(u64)((shared_address(first) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62};
}

// Products of a warpgroup go on while its threads do: they begin behind what the threads have written to sums before, belong to the group that
// is made next, and sums and operands are left alone until at most N groups are under way.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits of different PLACE are not merged by the compiler.
template <int N, int PLACE = 0> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0; // %1" ::"n"(N), "n"(PLACE) : "memory"); }

#define REGISTERS_0_15 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_0 REGISTERS_0_15 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_32 \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_64 \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_96 \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122," \
    "%123,%124,%125,%126,%127"
#define SUMS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_16(c, i) SUMS_4(c, i), SUMS_4(c, i + 4), SUMS_4(c, i + 8), SUMS_4(c, i + 12)
#define SUMS_64(c, i) SUMS_16(c, i), SUMS_16(c, i + 16), SUMS_16(c, i + 32), SUMS_16(c, i + 48)

// c (64 × N, f32) += a (64 × 16) · bᵀ (N × 16), of bf16. Warp w of the warpgroup has rows 16 w to 16 w + 15; of eight columns each, a lane has four
// neighbouring elements of c, as mma.sync.m16n8k16 has them.
DEVICE void product_of_group(float (&c)[16], SharedTile a, SharedTile b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" REGISTERS_0_15 "}, %16, %17, 1, 1, 1, 0, 0;"
                 : SUMS_16(c, 0)
                 : "l"(a.bits), "l"(b.bits));
}
DEVICE void product_of_group(float (&c)[32], SharedTile a, SharedTile b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_0 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : SUMS_16(c, 0), SUMS_16(c, 16)
                 : "l"(a.bits), "l"(b.bits));
}
DEVICE void product_of_group(float (&c)[64], SharedTile a, SharedTile b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_0 "," REGISTERS_32 "}, %64, %65, 1, 1, 1, 0, 0;"
                 : SUMS_64(c, 0)
                 : "l"(a.bits), "l"(b.bits));
}
DEVICE void product_of_group(float (&c)[128], SharedTile a, SharedTile b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_0 "," REGISTERS_32 "," REGISTERS_64 "," REGISTERS_96
                 "}, %128, %129, 1, 1, 1, 0, 0;"
                 : SUMS_64(c, 0), SUMS_64(c, 64)
                 : "l"(a.bits), "l"(b.bits));
}

// A matrix that is multiplied from the right as it stands: its rows are the inner dimension. Rows of 64 elements as in SharedTile; the next 64
// columns are a tile of their own, `next` bytes behind.
struct TransposedTile {
    u64 bits;
    // The matrix from row 16 · k on.
    DEVICE TransposedTile rows(u32 k) const { return {bits + 128 * k}; }
};
DEVICE TransposedTile transposed_tile(const void* first, u32 next) {
    return {(u64)((shared_address(first) & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62};
}

// Holds back what threads do with sums until here: to the compiler they are ready when a product has begun.
template <u32 N> DEVICE void hold_sums(float (&c)[N]) {
    UNROLL for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// c (64 × 64, f32) = or += a (64 × 16) · bᵀ (64 × 16); and c (64 × N, f32) += a (64 × 16) · b (16 × N). a is in registers as mma.sync.m16n8k16 has it,
// 16 rows a warp.
#define ATTENTION_PRODUCTS(type)                                                                                                          \
    template <bool ADD> DEVICE void product_of_group_##type(float (&c)[32], const u32 (&a)[4], SharedTile b) {                           \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type             \
                     " {" REGISTERS_0 "}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;}"                                                         \
                     : SUMS_16(c, 0), SUMS_16(c, 16)                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "n"(ADD));                                               \
    }                                                                                                                                     \
    DEVICE void product_of_group_##type(float (&c)[32], const u32 (&a)[4], TransposedTile b) {                                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type " {" REGISTERS_0 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;" \
                     : SUMS_16(c, 0), SUMS_16(c, 16)                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits));                                                         \
    }                                                                                                                                     \
    DEVICE void product_of_group_##type(float (&c)[64], const u32 (&a)[4], TransposedTile b) {                                           \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." #type "." #type " {" REGISTERS_0 "," REGISTERS_32                    \
                     "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                                             \
                     : SUMS_64(c, 0)                                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits));                                                         \
    }
ATTENTION_PRODUCTS(f16)
ATTENTION_PRODUCTS(bf16)
