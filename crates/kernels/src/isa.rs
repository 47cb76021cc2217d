//! Instruction sets by name, and the one that this process uses.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::simd::Avx512;
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::features::{Avx2, Features};
use crate::simd::{Level, Portable};

/// Environment variable that selects the instruction set of the process.
const VARIABLE: &str = "REFRAIN_CPU";

/// Instruction set used by the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// NEON, on every 64-bit Arm processor.
    Neon,
    /// [`Isa::Neon`] with dot products of bytes (`sdot`).
    NeonDotprod,
    /// AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with VNNI of 256 bits for products of bytes: AVX-VNNI, or that of AVX-512.
    Avx2Vnni,
    /// AVX-512 F, BW, VL and DQ; `bf16` weights are widened and multiplied by `f32` FMA.
    Avx512,
    /// [`Isa::Avx512`] with VNNI for products of bytes, and BF16's rounding where the machine has it and VBMI.
    Avx512Vnni,
    /// [`Isa::Avx512Vnni`] with BF16 and VBMI: pairs of `bf16` are multiplied by `vdpbf16ps`.
    Avx512Bf16,
    /// [`Isa::Avx512Vnni`], and tiles of `bf16` pairs multiplied by AMX.
    Amx,
}

impl Isa {
    /// All instruction sets, those of newer machines last.
    pub const ALL: [Isa; 9] = [
        Isa::Portable,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::Avx2,
        Isa::Avx2Vnni,
        Isa::Avx512,
        Isa::Avx512Vnni,
        Isa::Avx512Bf16,
        Isa::Amx,
    ];

    /// The name that [`FromStr`] reads and that `REFRAIN_CPU` takes.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neondotprod",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512vnni",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
        }
    }

    /// Whether this machine has the set.
    pub fn available(self) -> bool {
        self.level().is_some()
    }

    /// The instruction set of this process: the one that the environment variable `REFRAIN_CPU` names, or the best one
    /// of this machine where the variable is unset or empty. The variable is read once.
    ///
    /// Functions that take no [`Cpu`](crate::Cpu), such as conversions of a [`Buffer`](crate::Buffer), use this set. A
    /// program should call it at its start, since they panic with the message of an error.
    ///
    /// # Errors
    /// If the variable names no instruction set, or one that this machine lacks.
    pub fn selected() -> Result<Isa, IsaError> {
        static SELECTED: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
        let selected = SELECTED.get_or_init(|| match std::env::var_os(VARIABLE) {
            Some(name) if !name.is_empty() => name.to_string_lossy().parse::<Isa>()?.checked(),
            _ => Ok(Isa::best()),
        });
        selected.clone()
    }

    /// The best set of this machine.
    fn best() -> Isa {
        let dots = if slow_dots() { Isa::Avx512Vnni } else { Isa::Avx512Bf16 };
        [Isa::Amx, dots, Isa::Avx512Vnni, Isa::Avx512, Isa::Avx2Vnni, Isa::Avx2, Isa::NeonDotprod, Isa::Neon]
            .into_iter()
            .find(|isa| isa.available())
            .unwrap_or(Isa::Portable)
    }

    /// The set, if this machine has it.
    pub(crate) fn checked(self) -> Result<Isa, IsaError> {
        if self.available() { Ok(self) } else { Err(IsaError::Unavailable(self)) }
    }

    /// Entry into kernels with this set, if this machine has it.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn level(self) -> Option<Level> {
        Some(match self {
            Isa::Portable => Level::Portable(Portable),
            Isa::Neon | Isa::NeonDotprod => return None,
            Isa::Avx2 => Level::Avx2(Avx2::detect()?),
            Isa::Avx2Vnni => Level::Avx2(Avx2::detect()?.with_vnni()?),
            Isa::Avx512 => Level::Avx512(Avx512::widening(Features::detect()?)),
            Isa::Avx512Vnni => {
                let features = Features::detect()?.extended();
                features.vnni()?;
                Level::Avx512(Avx512::widening(features))
            }
            Isa::Avx512Bf16 => Level::Avx512Dots(Avx512::dots(Features::detect()?.extended())?),
            Isa::Amx => Level::Avx512(Avx512::widening(Features::detect()?.with_amx()?)),
        })
    }

    /// Entry into kernels with this set, if this machine has it.
    #[cfg(target_arch = "aarch64")]
    pub(crate) fn level(self) -> Option<Level> {
        match self {
            Isa::Portable => Some(Level::Portable(Portable)),
            Isa::Neon => Some(Level::Neon(Neon::base())),
            Isa::NeonDotprod => Neon::with_dot_products().map(Level::Neon),
            _ => None,
        }
    }

    /// Entry into kernels with this set, if this machine has it.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub(crate) fn level(self) -> Option<Level> {
        (self == Isa::Portable).then_some(Level::Portable(Portable))
    }
}

/// Entry into kernels with the instruction set of this process.
///
/// # Panics
/// If [`Isa::selected`] is an error.
pub(crate) fn process_level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let isa = Isa::selected().unwrap_or_else(|error| panic!("{error}"));
        isa.level().expect("the selected set is available")
    })
}

/// Whether `vdpbf16ps` is slower than widening and two FMAs. It is on Intel's cores: measured on Sapphire Rapids, one
/// in two cycles, beside two FMAs a cycle.
fn slow_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(s: &str) -> Result<Isa, IsaError> {
        let named = Isa::ALL.into_iter().find(|isa| isa.name() == s);
        named.ok_or_else(|| IsaError::Unknown(s.to_owned()))
    }
}

/// Why an instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaError {
    /// A name that is not one of [`Isa::ALL`].
    Unknown(String),
    /// An instruction set that this machine lacks.
    Unavailable(Isa),
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available: Vec<&str> =
            Isa::ALL.into_iter().filter(|isa| isa.available()).map(Isa::name).collect();
        match self {
            IsaError::Unknown(name) => write!(f, "{VARIABLE}: {name:?} is no instruction set")?,
            IsaError::Unavailable(isa) => {
                write!(f, "{VARIABLE}: this machine lacks the instruction set {isa}")?
            }
        }
        write!(f, "; use one that it has ({}), or unset {VARIABLE} for {}", available.join(", "), Isa::best())
    }
}

impl std::error::Error for IsaError {}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use half::f16;

    use super::*;
    use crate::simd::LAST_RUN;
    use crate::{Buffer, Dtype};

    /// Variable under which [`sets_of_this_process`] prints something.
    const PRINT: &str = "REFRAIN_TEST_PRINT";

    #[test]
    fn names_are_read_back_and_others_are_errors_that_help() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
            assert_eq!(isa.checked().is_ok(), isa.available());
        }
        let error = "avx9".parse::<Isa>().unwrap_err().to_string();
        assert!(error.starts_with("REFRAIN_CPU: \"avx9\" is no instruction set; use one"), "{error}");
        assert!(error.contains("(portable") && error.contains("unset REFRAIN_CPU for "), "{error}");
        let error = IsaError::Unavailable(Isa::Amx).to_string();
        assert!(error.starts_with("REFRAIN_CPU: this machine lacks the instruction set amx; use"), "{error}");
    }

    /// The name of the set that `work` runs a kernel with.
    fn set_of(work: impl FnOnce()) -> &'static str {
        LAST_RUN.set(None);
        work();
        match LAST_RUN.get() {
            None => "none",
            Some(Level::Portable(_)) => "portable",
            #[cfg(target_arch = "aarch64")]
            Some(Level::Neon(_)) => "neon",
            #[cfg(target_arch = "x86_64")]
            Some(Level::Avx2(_)) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Some(Level::Avx512(_) | Level::Avx512Dots(_)) => "avx512",
        }
    }

    #[test]
    fn sets_of_this_process() {
        if std::env::var_os(PRINT).is_none() {
            return;
        }
        let (mut floats, mut halves, mut sums) = ([1.0f32; 40], [f16::ONE; 40], [0.0f64; 40]);
        let mut sets = vec![
            ("softmax", set_of(|| crate::softmax(&mut floats))),
            ("a row of weights", set_of(|| crate::replace_row_in_sums(&mut halves, &floats, &mut sums))),
            ("rounding", set_of(|| crate::round_to_f16(&mut halves, &floats))),
            ("the smallest", set_of(|| _ = crate::argmin_before(&sums, &[0; 40], 1))),
        ];
        for (dtype, is_half) in [(Dtype::F32, false), (Dtype::F16, true), (Dtype::Bf16, true)] {
            let mut buffer = Buffer::zeros(dtype, 40);
            if is_half {
                sets.push(("to halves", set_of(|| buffer.write_f32(0, &floats))));
                sets.push(("from halves", set_of(|| buffer.as_slice().to_f32(&mut floats))));
            }
            let (codes, step) = ([3; 40], [0.5; 40]);
            sets.push(("columns", set_of(|| buffer.dequantize_columns(0, &codes, &step, &step))));
            sets.push(("runs", set_of(|| buffer.dequantize_runs(0, &codes, (40, 40), &[], &step[..1]))));
        }
        let others = |asked: &str| sets.iter().filter(|(_, set)| *set != asked).collect::<Vec<_>>();
        println!("<<{:?}>>", others(&std::env::var(VARIABLE).unwrap()));
    }

    /// The variable is read once a process, so that this program runs again.
    #[test]
    fn every_function_without_a_cpu_runs_the_set_that_is_asked_for() {
        for isa in
            [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.available())
        {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "isa::tests::sets_of_this_process", "--nocapture", "--test-threads=1"]);
            let output = command.env(VARIABLE, isa.name()).env(PRINT, "1").output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains("<<[]>>"), "{isa} was asked for, and others ran: {text}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_set_has_no_extension_that_its_name_leaves_out() {
        for isa in Isa::ALL {
            let Some(level) = isa.level() else { continue };
            let has = level.avx512().map(|features| {
                (features.vnni().is_some(), features.bf16().is_some(), features.amx().is_some())
            });
            let narrow = matches!(level, Level::Avx2(avx2) if avx2.vnni().is_some());
            let fits = match isa {
                Isa::Portable | Isa::Avx2 => has.is_none() && !narrow,
                Isa::Neon | Isa::NeonDotprod => false,
                Isa::Avx2Vnni => has.is_none() && narrow,
                Isa::Avx512 => has == Some((false, false, false)),
                Isa::Avx512Vnni => matches!(has, Some((true, _, false))),
                Isa::Avx512Bf16 => matches!(has, Some((_, true, false))),
                Isa::Amx => matches!(has, Some((_, true, true))),
            };
            assert!(fits, "{isa}: VNNI, BF16 and AMX are {has:?}");
        }
    }

    #[test]
    fn the_best_set_is_available() {
        assert!(Isa::best().available() && Isa::Portable.available());
    }
}
