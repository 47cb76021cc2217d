// Launches of kernels on emulated threads, and the memory that they work on.
#include "kernels.cu"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "The emulator switches stacks in assembly for Linux on x86-64 alone."
#endif

namespace emulator {

asm(R"(
.text
.p2align 4
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

const size_t PAGE = 4096, STACK = 64 << 10, ERROR = 512;

// Pages that may be touched, between two that may not.
static char* guarded(size_t bytes) {
    void* all = mmap(nullptr, bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    char* pages = (char*)all + PAGE;
    if (bytes && mprotect(pages, bytes, PROT_READ | PROT_WRITE)) {
        munmap(all, bytes + 2 * PAGE);
        return nullptr;
    }
    return pages;
}
static void release(char* pages, size_t bytes) { munmap(pages - PAGE, bytes + 2 * PAGE); }
static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Memory, from its first byte on to a page's end, and what a launch does with it.
struct Region {
    char* first;
    size_t bytes;
    bool is_constant; // may be read while the kernels before are busy
    bool is_written;
    void protect(int protection) const {
        char* page = (char*)((uintptr_t)first / PAGE * PAGE);
        mprotect(page, whole_pages((size_t)(first - page) + bytes), protection);
    }
};

// What a thread of the host keeps from launch to launch.
struct Workplace {
    std::vector<char*> stacks; // not in use
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Group> groups;
    std::vector<BulkCopy> bulk_copies;
    std::vector<char*> owned;
    std::vector<Region> regions; // those of the launch, if no other thread uses them
    char* shared = guarded(whole_pages(MOST_SHARED_HOPPER));
    sigjmp_buf after_fault;
    u64 random;
    ~Workplace() {
        for (char* stack : owned) release(stack, STACK);
        release(shared, whole_pages(MOST_SHARED_HOPPER));
    }
    u64 next() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }
};
static thread_local Workplace workplace_of_thread;
// The same, of the launch that runs: a plain pointer, which costs no check at each use.
static thread_local Workplace* workplace;
static thread_local sigjmp_buf* after_fault = nullptr;

void fail(const char* format, ...) {
    char what[ERROR / 2];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    snprintf(now.error, ERROR, "block %u,%u,%u, thread %u: %s", now.block.x, now.block.y, now.block.z, now.self, what);
    now.failed = true;
    leave();
    __builtin_unreachable();
}

static struct sigaction faults_before;
// A fault inside a launch ends the launch; any other goes where faults went before.
static void on_fault(int signal, siginfo_t* info, void* context) {
    if (after_fault) {
        const auto is_read = [&](const Region& region) {
            const size_t at = (size_t)((char*)info->si_addr - region.first);
            return at < region.bytes && !region.is_written && (region.is_constant || !now.is_early);
        };
        const auto& regions = workplace->regions;
        const char* what = std::any_of(regions.begin(), regions.end(), is_read) ? "a write to memory that the launch only reads"
                           : now.is_early ? "outside of memory, or in that of kernels that have not been waited for"
                                          : "outside of memory";
        snprintf(now.error, ERROR, "block %u,%u,%u, thread %u: an access to %p, %s", now.block.x, now.block.y, now.block.z, now.self,
                 info->si_addr, what);
        siglongjmp(*after_fault, 1);
    }
    if (faults_before.sa_flags & SA_SIGINFO) faults_before.sa_sigaction(signal, info, context);
    else ::signal(signal, SIG_DFL);
}
static bool catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return !sigaction(SIGSEGV, &action, &faults_before);
}

// Lets the kernels before be busy, so that what they use may not be touched, or done.
static void set_early(bool is_early) {
    if (now.is_early == is_early) return;
    now.is_early = is_early;
    now.kernels_done += !is_early;
    for (const Region& region : workplace->regions)
        region.protect(is_early && !region.is_constant ? PROT_NONE : region.is_written ? PROT_READ | PROT_WRITE : PROT_READ);
}

static void enter() {
    now.kernel(now.arguments);
    self().done = true;
    leave();
}

static bool sleeps(const Fiber& fiber) { return fiber.sleeps_on && *fiber.sleeps_on == fiber.seen; }

static void resume(u32 index) {
    Fiber& fiber = now.fibers[index];
    now.self = index;
    now.thread = {index, 0, 0};
    fiber.sleeps_on = nullptr;
    if (!fiber.started) {
        auto& stacks = workplace->stacks;
        if (stacks.empty()) {
            stacks.push_back(guarded(STACK));
            workplace->owned.push_back(stacks.back());
        }
        fiber.stack = stacks.back();
        stacks.pop_back();
        fiber.started = true;
        void** top = (void**)(fiber.stack + STACK - 8);
        *--top = (void*)enter;
        for (int saved = 0; saved < 6; saved++) *--top = nullptr;
        fiber.stack_pointer = top;
    }
    emulator_switch(&now.scheduler, fiber.stack_pointer);
    if (fiber.done) workplace->stacks.push_back(fiber.stack);
}

// Lets each lane of a warp, or at times some, run until it sleeps; whether any did.
static bool run_lanes(u32 warp) {
    u32 random = (u32)workplace->next(), lane = random % 32, stride = random >> 5 | 1, most = random >> 30 ? 32 : 1 + random % 31, ran = 0;
    for (u32 i = 0; i < 32 && ran < most && !now.failed; i++, lane = (lane + stride) % 32) {
        Fiber& fiber = now.fibers[warp * 32 + lane];
        if (fiber.done || sleeps(fiber)) continue;
        resume(warp * 32 + lane);
        ran++;
    }
    return ran;
}

static void run_block(u32 threads) {
    workplace->warps.resize(threads / 32);
    for (auto& warp : workplace->warps) warp.generation = warp.arrived = 0;
    for (auto& fiber : workplace->fibers) {
        fiber.sleeps_on = nullptr;
        fiber.started = fiber.done = false;
        fiber.groups.clear();
        fiber.open.clear();
        fiber.products_begun = 0;
        fiber.products_committed.clear();
    }
    workplace->groups.assign((threads + 127) / 128, Group{});
    workplace->bulk_copies.clear();
    now.warps = workplace->warps.data();
    now.groups = workplace->groups.data();
    now.bulk_copies = &workplace->bulk_copies;
    now.generation = now.arrived = 0;
    for (u32 warps = threads / 32; !now.failed;) {
        // A warp that can run, and how far it runs ahead of the others.
        const u32 ahead[] = {1, 8, ~0u};
        u32 first = workplace->next() % warps, budget = ahead[workplace->next() % 3];
        bool ran = false;
        for (u32 i = 0; i < warps && !ran && !now.failed; i++)
            while (budget && run_lanes((first + i) % warps)) {
                ran = true;
                budget--;
            }
        if (ran) continue;
        auto& copies = workplace->bulk_copies;
        const auto& fibers = workplace->fibers;
        // The kernels before end when no thread goes on without them, and copies that have begun may come before that or after it.
        const auto waits = [](const Fiber& fiber) { return fiber.sleeps_on == &now.kernels_done && !fiber.done; };
        if (now.is_early && std::any_of(fibers.begin(), fibers.end(), waits) && (copies.empty() || workplace->next() % 2)) {
            set_early(false);
            continue;
        }
        if (!copies.empty() && std::any_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return !fiber.done; })) {
            const auto copy = copies.begin() + (long)(workplace->next() % copies.size());
            const BulkCopy landed = *copy;
            copies.erase(copy);
            land(landed);
            continue;
        }
        for (u32 i = 0; i < threads && !now.failed; i++)
            if (!workplace->fibers[i].done) {
                now.failed = true;
                snprintf(now.error, ERROR, "block %u,%u,%u: thread %u waits for threads that never come", now.block.x, now.block.y,
                         now.block.z, i);
            }
        auto leftover = [&](bool found, const char* what) {
            if (!found || now.failed) return;
            now.failed = true;
            snprintf(now.error, ERROR, "block %u,%u,%u: %s that nobody has waited for", now.block.x, now.block.y, now.block.z, what);
        };
        leftover(now.is_early, "kernels before this one");
        leftover(!workplace->bulk_copies.empty(), "a bulk copy");
        for (auto& group : workplace->groups) leftover(group.done < group.products.size(), "a product of a warpgroup");
        return;
    }
}

static int run_grid(u32 threads, u32 shared, bool is_early) {
    // Locals that change would be lost by the jump back from a fault.
    if (sigsetjmp(workplace->after_fault, 1)) {
        after_fault = nullptr;
        now.failed = true;
    } else {
        after_fault = &workplace->after_fault;
        for (now.block.z = 0; now.block.z < now.grid.z && !now.failed; now.block.z++)
            for (now.block.y = 0; now.block.y < now.grid.y && !now.failed; now.block.y++)
                for (now.block.x = 0; now.block.x < now.grid.x && !now.failed; now.block.x++) {
                    memset(now.shared, 0xff, shared);
                    set_early(is_early && !(now.block.x | now.block.y | now.block.z));
                    run_block(threads);
                }
        after_fault = nullptr;
    }
    set_early(false);
    for (const Region& region : workplace->regions) region.protect(PROT_READ | PROT_WRITE);
    if (now.failed) workplace->stacks = workplace->owned; // fibers that will not come back are forgotten
    return now.failed;
}

} // namespace emulator

extern "C" {

// Memory of NaNs, whose end lies at a page that may not be touched; null if there is none.
void* emulator_alloc(size_t bytes) {
    size_t pages = emulator::whole_pages(bytes);
    char* memory = emulator::guarded(pages);
    if (!memory) return nullptr;
    memset(memory, 0xff, pages);
    return memory + pages - (bytes + 15) / 16 * 16;
}

// Frees what emulator_alloc gave.
void emulator_free(void* memory, size_t bytes) {
    size_t pages = emulator::whole_pages(bytes);
    emulator::release((char*)memory + (bytes + 15) / 16 * 16 - pages, pages);
}

// Runs a kernel for each block of a grid. `arguments` are pointers to values of `sizes` bytes. The first block begins while kernels before it still use
// the memory of `regions`, if there are any, but for what is constant; what is not written may only be read. Returns 0, or writes why not to `error` (512 bytes).
int emulator_launch(const char* name, const u32* blocks, u32 threads, u32 shared, u64 seed, u64 launch, const size_t* sizes,
                    void** arguments, size_t count, const emulator::Region* regions, size_t regions_count, char* error) {
    using namespace emulator;
    static const bool caught = catch_faults();
    const Registered* kernel = Registered::first();
    while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
    auto refuse = [&](const char* why) { return snprintf(error, ERROR, "%s", why), 1; };
    if (!caught) return refuse("faults cannot be caught");
    if (!kernel) return refuse("there is no such kernel");
    if (!threads || threads % 32 || threads > kernel->threads) return refuse("a block has another number of threads than its kernel allows");
    if (!blocks[0] || !blocks[1] || !blocks[2] || blocks[1] > 65535 || blocks[2] > 65535) return refuse("the grid is no grid");
    if (shared > kernel->most_shared) return refuse("a block asks for more shared memory than there is");
    if (kernel->sizes != std::vector<size_t>(sizes, sizes + count)) return refuse("the arguments are not those of the kernel");
    size_t rounded = (shared + 15) / 16 * 16;
    workplace = &workplace_of_thread;
    workplace->fibers.resize(threads);
    workplace->random = (seed * 0x9e3779b97f4a7c15ull ^ (launch + 1) * 0xbf58476d1ce4e5b9ull) | 1;
    now = {};
    now.shared = (unsigned char*)workplace->shared + whole_pages(MOST_SHARED_HOPPER) - rounded;
    now.block_size = {threads, 1, 1};
    now.grid = {blocks[0], blocks[1], blocks[2]};
    now.fibers = workplace->fibers.data();
    now.copies_land_at_once = seed % 2;
    now.products_land_at_once = (seed ^ seed >> 2) % 2;
    now.kernel = kernel->call;
    now.arguments = arguments;
    now.error = error;
    workplace->regions.assign(regions, regions + regions_count);
    return run_grid(threads, shared, regions_count);
}

} // extern "C"
