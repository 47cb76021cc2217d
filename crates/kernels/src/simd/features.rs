//! Tokens of AVX2, AVX-512 and its extensions, made by checks at run time alone.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Proof that this process may use AVX2, FMA and F16C, and a token of VNNI if the selected instruction set includes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(Option<Vnni256>);

/// Proof that this process may use `vpdpbusd` of 256 bits beside AVX2, FMA and F16C, by the encoding of AVX-VNNI or by that of AVX-512.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Vnni256 {
    Vex(AvxVnni),
    Evex(Vnni),
}

/// Proof that this process may use AVX-VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AvxVnni(());

impl Avx2 {
    /// The token without VNNI, if the machine has the features.
    pub(crate) fn detect() -> Option<Avx2> {
        let there = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        there.then_some(Avx2(None))
    }

    /// The token with VNNI, if the machine has it for 256 bits.
    pub(crate) fn with_vnni(self) -> Option<Avx2> {
        let vex = is_x86_feature_detected!("avxvnni").then_some(Vnni256::Vex(AvxVnni(())));
        let evex = Features::detect().and_then(|features| features.extended().vnni);
        vex.or(evex.map(Vnni256::Evex)).map(|vnni| Avx2(Some(vnni)))
    }

    /// Byte products, if the set includes them.
    pub(crate) fn vnni(self) -> Option<Vnni256> {
        self.0
    }
}

/// Proof that this process may use AVX-512 F, BW, VL and DQ (and with them AVX2, FMA and F16C), and tokens of the
/// extensions that the selected instruction set includes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    vnni: Option<Vnni>,
    bf16: Option<Bf16>,
    amx: Option<Amx>,
}

/// Proof that this process may use AVX-512 VNNI beside the features that [`Features`] stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vnni(());

/// Proof that this process may use AVX-512 BF16 and VBMI beside the features that [`Features`] stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16(());

/// Proof that this process may use the tile registers, AVX-512 BF16 and the features that [`Features`] stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amx(());

impl Features {
    /// The features without extensions, if the machine has them.
    pub(crate) fn detect() -> Option<Features> {
        let there = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        there.then_some(Features { vnni: None, bf16: None, amx: None })
    }

    /// The features with VNNI and BF16, as far as the machine has them.
    pub(crate) fn extended(self) -> Features {
        let vnni = is_x86_feature_detected!("avx512vnni").then_some(Vnni(()));
        let bf16 = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi");
        let bf16 = bf16.then_some(Bf16(()));
        Features { vnni, bf16, ..self }
    }

    /// The extended features with AMX, if the machine has it and the system permits it.
    pub(crate) fn with_amx(self) -> Option<Features> {
        tiles_available().then_some(Features { amx: Some(Amx(())), ..self.extended() })
    }

    /// AVX2, which comes with AVX-512.
    pub(crate) fn avx2(self) -> Avx2 {
        Avx2(None)
    }

    /// Byte products, if the set includes them.
    pub(crate) fn vnni(self) -> Option<Vnni> {
        self.vnni
    }

    /// Conversions to `bf16`, if the set includes them.
    pub(crate) fn bf16(self) -> Option<Bf16> {
        self.bf16
    }

    /// The tile registers, if the set includes them.
    pub(crate) fn amx(self) -> Option<Amx> {
        self.amx
    }
}

impl Bf16 {
    /// The features that come with BF16.
    pub(crate) fn features(self) -> Features {
        Features { vnni: None, bf16: Some(self), amx: None }
    }
}

impl Amx {
    /// The features that come with AMX.
    pub(crate) fn features(self) -> Features {
        Features { vnni: None, bf16: Some(Bf16(())), amx: Some(self) }
    }
}

/// Whether CPU and system let this process use tiles; asks the system for them.
fn tiles_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        let most = __cpuid(0).eax;
        // Leaf 7, EDX: AMX-BF16 is bit 22, AMX-TILE bit 24.
        let bits = (1 << 22) | (1 << 24);
        most >= 7
            && __cpuid_count(7, 0).edx & bits == bits
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi")
            && permitted()
    })
}

/// Asks the system to let this process use the tile registers.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers and touches no memory of the process.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
             in("rsi") XFEATURE_XTILEDATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
