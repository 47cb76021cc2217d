/* Writes down what a program does on an NVIDIA GPU: every kernel, every copy, and every call of the driver, with times in ns.
 *
 * The driver loads the library that CUDA_INJECTION64_PATH names into any program that uses it. Records come from CUPTI. TRACE is the file
 * (trace.txt), a record a line:
 *
 *     K start end stream correlation name        a kernel
 *     C start end stream correlation kind bytes  a copy
 *     A start end thread correlation number      a call of the driver, which has the correlation of the kernel or copy that it began
 *
 * tools/gpu-trace builds it, and shows what it wrote.
 */
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* out;

static void CUPTIAPI request(uint8_t** buffer, size_t* bytes, size_t* records) {
    *bytes = 8 << 20;
    *buffer = aligned_alloc(64, *bytes);
    *records = 0;
}

#define WRITE(kind, of, id, format, ...) \
    fprintf(out, kind " %llu %llu %u %u " format "\n", (unsigned long long)(of)->start, (unsigned long long)(of)->end, id, (of)->correlationId, __VA_ARGS__)

static void CUPTIAPI complete(CUcontext context, uint32_t stream, uint8_t* buffer, size_t bytes, size_t filled) {
    (void)context, (void)stream, (void)bytes;
    for (CUpti_Activity* record = NULL; out && cuptiActivityGetNextRecord(buffer, filled, &record) == CUPTI_SUCCESS;) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel10* kernel = (const void*)record;
            WRITE("K", kernel, kernel->streamId, "%s", kernel->name);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const CUpti_ActivityMemcpy6* copy = (const void*)record;
            WRITE("C", copy, copy->streamId, "%d %llu", copy->copyKind, (unsigned long long)copy->bytes);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_DRIVER) {
            const CUpti_ActivityAPI* call = (const void*)record;
            WRITE("A", call, call->threadId, "%d", call->cbid);
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    if (out) fclose(out);
    out = NULL;
}

int InitializeInjection(void) {
    const char* path = getenv("TRACE");
    out = fopen(path ? path : "trace.txt", "w");
    if (!out) return perror("gpu_trace"), 0;
    cuptiActivityRegisterCallbacks(request, complete);
    const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_DRIVER};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) cuptiActivityEnable(kinds[i]);
    atexit(finish);
    return 1;
}
