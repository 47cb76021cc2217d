// CUDA's driver as the tests of the driver's caller need it: a library of the same names that does on the host what is queued, as late and in
// as adverse an order as streams and events allow.
//
// Nothing queued is done before somebody waits; then the next piece of work is drawn among all streams that may go on. Memory is alive from
// its stream's turn at allocating it to some stream's turn at freeing it, and an access outside of that is an illegal address. Copies read the
// host's memory when they are done if it is pinned, and when they are queued if not. Where the pool may insert dependencies, memory waits for some
// other that is about to be freed. The kernel "hold" keeps its stream until "release" was run in another. FAKE_CUDA_DEVICES, FAKE_CUDA_LOST (one
// that cannot be asked), FAKE_CUDA_STUB, FAKE_CUDA_VERSION, FAKE_CUDA_CAPABILITY, FAKE_CUDA_PINNED (segments of pinned memory that there are),
// FAKE_CUDA_PINNED_BYTES and FAKE_CUDA_SEED say what is played.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

using u32 = uint32_t;
using u64 = uint64_t;
#define CALL extern "C" __attribute__((visibility("default"))) u32

enum : u32 { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, STUB_LIBRARY = 34, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

static u64 setting(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : otherwise;
}

struct Event { u64 recorded = 0, reached = 0; };
struct Work {
    Event* waits_for = nullptr;
    u64 until = 0;
    std::function<void()> run;
};
struct Stream { std::deque<Work> queue; int priority = 0; };
struct Memory { std::vector<unsigned char> bytes; void* pool = nullptr; bool alive = false; bool freed = false; Event left; };
struct Function { std::string name; u32 shared = 48 << 10; };

static std::recursive_mutex lock;
static std::vector<Stream*> streams;
static std::map<u64, Memory> memories;
struct Pinned { size_t bytes; u64 copies = 0; };
static std::map<u64, Pinned> pinned;
static u64 pieces_of_pinned = 0, bytes_of_pinned = 0;
static bool inserts_dependencies = true;
static Event held;
static u32 failed = OK;
static u64 draws = 0;
static thread_local void* current = nullptr;
static int context_of_all;

#define ENTER                                                  \
    std::lock_guard<std::recursive_mutex> guard(lock);         \
    if (current != &context_of_all) return INVALID_CONTEXT;

static u64 draw() {
    if (!draws) draws = setting("FAKE_CUDA_SEED", 1) * 0x9e3779b97f4a7c15ull | 1;
    draws ^= draws << 13, draws ^= draws >> 7, draws ^= draws << 17;
    return draws;
}

// Does what is queued, a piece of some stream at a time, until `done`.
static u32 play(const std::function<bool()>& done) {
    while (!done()) {
        std::vector<Stream*> ready;
        for (Stream* stream : streams)
            if (!stream->queue.empty() && (!stream->queue.front().waits_for || stream->queue.front().waits_for->reached >= stream->queue.front().until)) ready.push_back(stream);
        if (ready.empty()) fprintf(stderr, "fake driver: streams wait for each other\n"), abort();
        Stream* stream = ready[draw() % ready.size()];
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        if (work.run) work.run();
    }
    return failed;
}
static void queue(void* stream, std::function<void()> run) { ((Stream*)stream)->queue.push_back({nullptr, 0, std::move(run)}); }

// Bytes of memory that is alive; null, and the error is kept, if they are not all inside of one piece.
static unsigned char* device(u64 address, size_t bytes) {
    auto found = memories.upper_bound(address);
    if (found != memories.begin()) {
        --found;
        Memory& memory = found->second;
        if (memory.alive && address - found->first + bytes <= memory.bytes.size()) return &memory.bytes[address - found->first];
    }
    if (!failed) failed = ILLEGAL_ADDRESS;
    return nullptr;
}

CALL cuInit(u32) { return setting("FAKE_CUDA_STUB", 0) ? STUB_LIBRARY : setting("FAKE_CUDA_DEVICES", 1) ? OK : NO_DEVICE; }
CALL cuDriverGetVersion(int* version) { return *version = setting("FAKE_CUDA_VERSION", 13000), OK; }
CALL cuGetErrorName(u32, const char** text) { return *text = "NAME", OK; }
CALL cuGetErrorString(u32 error, const char** text) {
    return *text = error == ILLEGAL_ADDRESS ? "an illegal address" : error == NOT_FOUND ? "not found" : error == OUT_OF_MEMORY ? "out of memory" : "an error", OK;
}
CALL cuDeviceGetCount(int* count) { return *count = setting("FAKE_CUDA_DEVICES", 1), OK; }
CALL cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == (int)setting("FAKE_CUDA_LOST", ~0ull) ? DEVICE_UNAVAILABLE : OK; }
CALL cuDeviceGetName(char* name, int bytes, int device) { return snprintf(name, bytes, "Fake %d", device), OK; }
CALL cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1 << 30, OK; }
CALL cuDeviceGetAttribute(int* value, int attribute, int) {
    const int capability = setting("FAKE_CUDA_CAPABILITY", 90);
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 97 ? 227 << 10 : 0;
    return OK;
}
CALL cuDevicePrimaryCtxRetain(void** context, int) { return *context = &context_of_all, OK; }
CALL cuDevicePrimaryCtxRelease_v2(int) { return OK; }
CALL cuCtxGetCurrent(void** context) { return *context = current, OK; }
CALL cuCtxSetCurrent(void* context) { return current = context, OK; }
CALL cuCtxSynchronize() {
    ENTER return play([] {
        for (Stream* stream : streams) if (!stream->queue.empty()) return false;
        return true;
    });
}

CALL cuMemPoolCreate(void** pool, const void*) { ENTER return *pool = new int, OK; }
CALL cuMemPoolDestroy(void* pool) {
    ENTER for (auto& memory : memories) if (memory.second.pool == pool && !memory.second.freed) fprintf(stderr, "fake driver: memory outlives its pool\n"), abort();
    return OK;
}
CALL cuMemPoolSetAttribute(void*, u32 attribute, void* value) {
    ENTER if (attribute == 3) return inserts_dependencies = *(int*)value, OK;
    return attribute == 4 && *(u64*)value == ~0ull ? OK : INVALID_VALUE;
}
CALL cuMemPoolGetAttribute(void*, u32 attribute, void* value) { ENTER return *(u64*)value = attribute == 5 ? 3 << 20 : attribute == 7 ? 1 << 20 : 0, OK; }
CALL cuMemPoolTrimTo(void*, size_t) { ENTER return OK; }
CALL cuMemGetInfo_v2(size_t* free, size_t* total) { ENTER return *free = 1 << 20, *total = 1 << 30, OK; }
CALL cuMemAllocFromPoolAsync(u64* address, size_t bytes, void* pool, void* stream) {
    ENTER if (bytes > 1 << 30) return OUT_OF_MEMORY;
    static u64 next = 0x10000;
    const u64 at = *address = next;
    next += (bytes + 511) / 256 * 256;
    memories[at].bytes.assign(bytes, 0xff);
    memories[at].pool = pool;
    for (auto& memory : memories)
        if (inserts_dependencies && memory.second.left.recorded > memory.second.left.reached) ((Stream*)stream)->queue.push_back({&memory.second.left, 1, {}});
    queue(stream, [at] { memories[at].alive = true; });
    return OK;
}
CALL cuMemFreeAsync(u64 address, void* stream) {
    ENTER auto found = memories.find(address);
    if (found == memories.end() || found->second.freed) return INVALID_VALUE;
    found->second.freed = true;
    found->second.left.recorded = 1;
    queue(stream, [address] {
        if (device(address, 0)) memories[address].alive = false;
        memories[address].left.reached = 1;
    });
    return OK;
}
CALL cuMemHostAlloc(void** memory, size_t bytes, u32) {
    ENTER if (pieces_of_pinned++ >= setting("FAKE_CUDA_PINNED", ~0ull)) return OUT_OF_MEMORY;
    if (bytes_of_pinned + bytes > setting("FAKE_CUDA_PINNED_BYTES", ~0ull)) return OUT_OF_MEMORY;
    bytes_of_pinned += bytes;
    *memory = malloc(bytes);
    pinned[(u64)*memory] = {bytes};
    return OK;
}
CALL cuMemFreeHost(void* memory) {
    ENTER auto found = pinned.find((u64)memory);
    if (found == pinned.end()) return INVALID_VALUE;
    bytes_of_pinned -= found->second.bytes;
    pinned.erase(found);
    return free(memory), OK;
}

CALL cuMemHostRegister_v2(void* memory, size_t bytes, u32 flags) {
    ENTER if (flags != 1 || setting("FAKE_CUDA_REGISTERS", 1) == 0) return OUT_OF_MEMORY;
    const u64 page = 4096, first = (u64)memory / page * page, end = ((u64)memory + bytes + page - 1) / page * page;
    for (auto& other : pinned)
        if (other.first < end && first < other.first + other.second.bytes) return INVALID_VALUE;
    pinned[(u64)memory] = {bytes};
    return OK;
}
CALL cuMemHostUnregister(void* memory) {
    ENTER auto found = pinned.find((u64)memory);
    if (found == pinned.end()) return INVALID_VALUE;
    if (found->second.copies) fprintf(stderr, "fake driver: memory is unpinned while it is copied\n"), abort();
    return pinned.erase(found), OK;
}

CALL cuCtxGetStreamPriorityRange(int* least, int* greatest) { ENTER return *least = 0, *greatest = -5, OK; }
CALL cuStreamCreateWithPriority(void** stream, u32 flags, int priority) {
    ENTER if (flags != 1 || priority > 0 || priority < -5) return INVALID_VALUE;
    streams.push_back(new Stream{{}, priority});
    return *stream = streams.back(), OK;
}
CALL cuStreamDestroy_v2(void* stream) { ENTER return ((Stream*)stream)->queue.empty() ? OK : INVALID_VALUE; }
CALL cuStreamSynchronize(void* stream) { ENTER return play([stream] { return ((Stream*)stream)->queue.empty(); }); }
CALL cuStreamWaitEvent(void* stream, void* event, u32) {
    ENTER Event* waited = (Event*)event;
    ((Stream*)stream)->queue.push_back({waited, waited->recorded, {}});
    return OK;
}
CALL cuEventCreate(void** event, u32) { ENTER return *event = new Event, OK; }
CALL cuEventDestroy_v2(void*) { ENTER return OK; }
CALL cuEventRecord(void* event, void* stream) {
    ENTER Event* recorded = (Event*)event;
    const u64 version = ++recorded->recorded;
    queue(stream, [recorded, version] { recorded->reached = version; });
    return OK;
}
CALL cuEventSynchronize(void* event) { ENTER return play([event] { return ((Event*)event)->reached == ((Event*)event)->recorded; }); }

CALL cuMemsetD8Async(u64 to, unsigned char value, size_t bytes, void* stream) {
    ENTER queue(stream, [=] {
        if (unsigned char* at = device(to, bytes)) memset(at, value, bytes);
    });
    return OK;
}
CALL cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void* stream) {
    ENTER auto found = pinned.upper_bound((u64)from);
    const bool is_pinned = found != pinned.begin() && (u64)from - (--found)->first + bytes <= found->second.bytes;
    if (is_pinned) found->second.copies++;
    std::vector<unsigned char> read;
    if (!is_pinned) read.assign((const unsigned char*)from, (const unsigned char*)from + bytes);
    queue(stream, [=] {
        if (unsigned char* at = device(to, bytes)) memcpy(at, is_pinned ? from : read.data(), bytes);
        if (is_pinned) found->second.copies--;
    });
    return OK;
}
CALL cuMemcpyBatchAsync_v2(u64* to, u64* from, size_t* bytes, size_t count, u32* attributes, size_t* indices, size_t kinds, void* stream) {
    ENTER if (kinds != 1 || indices[0] != 0 || attributes[0] != 1 || !count) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (u32 error = cuMemcpyHtoDAsync_v2(to[i], (const void*)from[i], bytes[i], stream)) return error;
    return OK;
}
CALL cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void* stream) {
    ENTER queue(stream, [=] {
        if (unsigned char* at = device(from, bytes)) memcpy(to, at, bytes);
    });
    return OK;
}
CALL cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) {
    ENTER queue(stream, [=] {
        unsigned char *source = device(from, bytes), *target = device(to, bytes);
        if (source && target) memcpy(target, source, bytes);
    });
    return OK;
}

CALL cuModuleLoadData(void** module, const void* image) {
    ENTER const bool is_fatbin = (u64)image % 8 == 0 && *(const u32*)image == 0xba55ed50;
    return *module = &context_of_all, is_fatbin ? OK : INVALID_IMAGE;
}
CALL cuModuleUnload(void*) { ENTER return OK; }
static const char* const KERNELS[] = {"add_32", "tell", "crash", "hold", "release", "priority", "copy_from_host"};
static std::set<std::string> loaded;
CALL cuModuleGetFunctionCount(u32* count, void*) { ENTER return *count = std::size(KERNELS), OK; }
CALL cuModuleEnumerateFunctions(void** functions, u32 count, void*) {
    ENTER for (u32 i = 0; i < count; i++) functions[i] = new Function{KERNELS[i]};
    return OK;
}
CALL cuFuncLoad(void* function) { ENTER return loaded.insert(((Function*)function)->name), OK; }
// There is no memory for a kernel that was not loaded when the GPU was opened.
CALL cuModuleGetFunction(void** function, void*, const char* name) {
    ENTER if (std::find(std::begin(KERNELS), std::end(KERNELS), std::string(name)) == std::end(KERNELS)) return NOT_FOUND;
    if (!loaded.count(name)) return OUT_OF_MEMORY;
    return *function = new Function{name}, OK;
}
CALL cuFuncGetAttribute(int* value, u32, void*) { ENTER return *value = 1024, OK; }
CALL cuFuncSetAttribute(void* function, u32 attribute, int value) {
    ENTER if (attribute != 8 || value > (226 << 10)) return INVALID_VALUE;
    return ((Function*)function)->shared = value, OK;
}
struct Attribute { u32 id, pad; u64 value[8]; };
struct Config { u32 x, y, z, threads, ty, tz, shared; void* stream; const Attribute* attributes; u32 count; };
CALL cuLaunchKernelEx(const Config* config, void* function, void** arguments, void**) {
    ENTER const Function& kernel = *(Function*)function;
    const auto [x, y, z, threads, ty, tz, shared, stream, attributes, count] = *config;
    if (!x || !y || !z || !threads || ty != 1 || tz != 1 || shared > kernel.shared) return INVALID_VALUE;
    // Kernels of a Hopper alone may begin while the one before is busy: attribute 6.
    if (count != (setting("FAKE_CUDA_CAPABILITY", 90) == 90)) return INVALID_VALUE;
    if (count && (attributes->id != 6 || *(const int*)attributes->value != 1)) return INVALID_VALUE;
    if (kernel.name == "crash") queue(stream, [] { if (!failed) failed = ILLEGAL_ADDRESS; });
    if (kernel.name == "hold") ((Stream*)stream)->queue.push_back({&held, ++held.recorded, {}});
    if (kernel.name == "release") queue(stream, [] { held.reached = held.recorded; });
    if (kernel.name == "add_32") { // to[i] = from[i] + value
        const u64 to = *(u64*)arguments[0], from = *(u64*)arguments[1];
        const u32 value = *(u32*)arguments[2], count = *(u32*)arguments[3];
        queue(stream, [=] {
            u32 *target = (u32*)device(to, 4 * count), *source = (u32*)device(from, 4 * count);
            for (u32 i = 0; target && source && i < count; i++) target[i] = source[i] + value;
        });
    }
    if (kernel.name == "copy_from_host") {
        const u64 from = *(u64*)arguments[0], to = *(u64*)arguments[1], bytes = *(u64*)arguments[2];
        auto found = pinned.upper_bound(from);
        if (found == pinned.begin() || from - (--found)->first + bytes > found->second.bytes) return INVALID_VALUE;
        queue(stream, [=] {
            if (unsigned char* at = device(to, bytes)) memcpy(at, (const void*)from, bytes);
        });
    }
    if (kernel.name == "priority") { // to = that of the stream, upside down
        const u64 to = *(u64*)arguments[0];
        queue(stream, [=] {
            if (u32* target = (u32*)device(to, 4)) *target = -((Stream*)stream)->priority;
        });
    }
    if (kernel.name == "tell") { // to = [null, u64, f32, blocks]
        const u64 to = *(u64*)arguments[0], null = *(u64*)arguments[1], number = *(u64*)arguments[2];
        const float real = *(float*)arguments[3];
        queue(stream, [=] {
            u64* target = (u64*)device(to, 32);
            if (target) target[0] = null, target[1] = number, target[2] = (u64)(8 * real), target[3] = x * 10000 + y * 100 + z;
        });
    }
    return OK;
}
