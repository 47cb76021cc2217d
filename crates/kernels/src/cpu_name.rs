//! The name of this machine's processor.

/// Name of this machine's processor, for measurements to tell: its model, or on 64-bit Arm under Linux, which says no
/// model, its implementer and part; the architecture where neither is known.
pub fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    named_in(&info).or_else(brand).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The name that a text in the form of `/proc/cpuinfo` has.
fn named_in(info: &str) -> Option<String> {
    let entry = |name: &str| {
        let mut entries = info.lines().filter_map(|line| line.split_once(':'));
        entries.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    let part = || {
        let (implementer, part) = (entry("CPU implementer")?, entry("CPU part")?);
        Some(format!("{}, implementer {implementer}, part {part}", std::env::consts::ARCH))
    };
    entry("model name").map(str::to_owned).or_else(part)
}

/// The brand that macOS says, such as `Apple M4`.
fn brand() -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let said = std::process::Command::new("sysctl").args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
    let brand = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    (!brand.is_empty()).then_some(brand)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_before_a_part() {
        let model = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nmodel name\t: other\n";
        assert_eq!(named_in(model).unwrap(), "AMD EPYC");
        let part = named_in("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n").unwrap();
        assert!(part.ends_with(", implementer 0x41, part 0xd4f"), "{part}");
        assert_eq!(named_in("processor\t: 0\n"), None);
        assert!(!cpu_name().is_empty());
    }
}
