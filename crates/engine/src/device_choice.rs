//! The device that an engine computes on.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use refrain_kernels::{Cpu, Device};

use crate::{Error, Result};

/// The device that an engine computes on. As text: `cpu`, `cuda`, `cuda:N` or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its index among those that the driver shows. `cuda` is the first.
    ///
    /// Experimental: it is tested under emulation, and has run on two kinds of GPU, an H200 and an H100.
    Cuda(usize),
    /// The first NVIDIA GPU where it can compute, else the CPU.
    Auto,
}

impl DeviceChoice {
    /// The device, whose host shares work among `threads` threads: 0 for one a core.
    ///
    /// # Errors
    /// If the GPU that was chosen is not there or cannot compute, or the environment asks for an instruction set that the CPU lacks.
    pub fn open(self, threads: usize) -> Result<Arc<dyn Device>> {
        let cpu = || -> Result<Arc<dyn Device>> { Ok(Arc::new(Cpu::new(threads)?)) };
        match self {
            DeviceChoice::Cpu => cpu(),
            DeviceChoice::Cuda(index) => refrain_cuda::open(index, threads)
                .map_err(|reason| Error::Device { device: self.to_string(), reason: reason.to_string() }),
            DeviceChoice::Auto => refrain_cuda::open(0, threads).or_else(|_| cpu()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(0) => f.write_str("cuda"),
            DeviceChoice::Cuda(index) => write!(f, "cuda:{index}"),
            DeviceChoice::Auto => f.write_str("auto"),
        }
    }
}

/// A text that names no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown device {0:?}: use cpu, cuda, cuda:N (the GPU of index N, from 0) or auto")]
#[non_exhaustive]
pub struct UnknownDevice(pub String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(s: &str) -> std::result::Result<DeviceChoice, UnknownDevice> {
        let unknown = || UnknownDevice(s.to_owned());
        match s {
            "cpu" => Ok(DeviceChoice::Cpu),
            "cuda" => Ok(DeviceChoice::Cuda(0)),
            "auto" => Ok(DeviceChoice::Auto),
            _ => {
                let index = s.strip_prefix("cuda:").ok_or_else(unknown)?;
                // A sign is no part of an index, though numbers may have one.
                let is_number = index.bytes().all(|byte| byte.is_ascii_digit());
                index.parse().ok().filter(|_| is_number).map(DeviceChoice::Cuda).ok_or_else(unknown)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_and_written() {
        for (text, choice) in [
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:1", DeviceChoice::Cuda(1)),
            ("cuda:12", DeviceChoice::Cuda(12)),
            ("auto", DeviceChoice::Auto),
        ] {
            assert_eq!((text.parse(), choice.to_string().as_str()), (Ok(choice), text));
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!(DeviceChoice::default(), DeviceChoice::Cpu);
    }

    #[test]
    fn other_texts_are_told_with_the_choices() {
        for text in [
            "",
            "gpu",
            "CPU",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:+1",
            "cuda: 1",
            "cuda:99999999999999999999",
        ] {
            let error = text.parse::<DeviceChoice>().unwrap_err();
            assert_eq!(error, UnknownDevice(text.to_owned()));
            for choice in ["cpu", "cuda", "cuda:N", "auto"] {
                assert!(error.to_string().contains(choice), "{error}");
            }
        }
    }

    #[test]
    fn cpu_and_auto_always_open() {
        assert_eq!(DeviceChoice::Cpu.open(1).unwrap().threads(), 1);
        assert_eq!(DeviceChoice::Auto.open(1).unwrap().threads(), 1);
    }

    #[test]
    fn a_gpu_that_is_not_there_is_an_error() {
        let error = DeviceChoice::Cuda(999).open(1).unwrap_err();
        assert!(matches!(&error, Error::Device { device, .. } if device == "cuda:999"), "{error}");
        assert!(error.to_string().starts_with("cannot compute on cuda:999: "), "{error}");
    }
}
