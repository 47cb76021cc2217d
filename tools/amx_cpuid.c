/* Tells a program what its processor's AMX tiles look like, where the virtual machine does not.
 *
 * Some virtual machines let AMX through but cut CPUID off before leaf 0x1D, which describes the tiles. oneDNN (in
 * torch) then believes in tiles of no size and dies of an illegal instruction. With this library in LD_PRELOAD every
 * CPUID instruction of the process faults (arch_prctl ARCH_SET_CPUID), and the handler answers with what the processor
 * says, completed with leaves 0x1D and 0x1E of palette 1, the only one there is.
 *
 *     cc -O2 -shared -fPIC -o amx_cpuid.so amx_cpuid.c
 *
 * tools/bench_peers.py builds and uses it when it is needed, so that torch is measured with all the machine has.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static struct sigaction before;

static long allow_cpuid(long allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void on_fault(int signal, siginfo_t *info, void *data) {
    greg_t *r = ((ucontext_t *)data)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)r[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
        sigaction(signal, &before, 0); /* Not CPUID: it faults again, and whoever was there before deals with it. */
        return;
    }
    unsigned leaf = (unsigned)r[REG_RAX], sub = (unsigned)r[REG_RCX], a, b, c, d;
    allow_cpuid(1);
    __cpuid_count(leaf, sub, a, b, c, d);
    allow_cpuid(0);
    if (leaf == 0 && a < 0x1e) {
        a = 0x1e;
    } else if (leaf == 0x1d) { /* 8 tiles of 16 rows of 64 bytes. */
        a = sub == 0 ? 1 : sub == 1 ? 0x04002000 : 0;
        b = sub == 1 ? 0x00080040 : 0;
        c = sub == 1 ? 16 : 0;
        d = 0;
    } else if (leaf == 0x1e) { /* Products of 16 rows by 64 bytes. */
        a = c = d = 0;
        b = sub == 0 ? 0x4010 : 0;
    }
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (sigaction(SIGSEGV, &action, &before) == 0) {
        allow_cpuid(0);
    }
}
