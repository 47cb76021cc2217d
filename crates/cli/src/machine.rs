//! What a measurement was made on, and when.

use std::time::{SystemTime, UNIX_EPOCH};

/// The processor's name, where the system tells.
pub(crate) fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named =
        info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    named.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// The command line as it was given, to be given again.
pub(crate) fn command() -> String {
    let quoted = |word: String| {
        let safe = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/@".contains(c);
        if !word.is_empty() && word.chars().all(safe) { word } else { format!("{word:?}") }
    };
    let words = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned()));
    std::iter::once("refrain".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// The operating system's name, where it tells.
pub(crate) fn system() -> String {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let named = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    named.map_or_else(|| std::env::consts::OS.to_owned(), |name| name.trim_matches('"').to_owned())
}

/// Most memory that this process has had in bytes, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    own("VmHWM:")
}

/// Bytes of this process that are in memory now, where the system tells.
pub(crate) fn resident_memory() -> Option<u64> {
    own("VmRSS:")
}

fn own(entry: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(entry))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes of memory that a program can still take, where the system tells.
pub(crate) fn free_memory() -> Option<u64> {
    memory("MemAvailable:")
}

/// Bytes of memory that the machine has, where the system tells.
pub(crate) fn all_memory() -> Option<u64> {
    memory("MemTotal:")
}

fn memory(entry: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix(entry))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes of the first core's largest cache, which it may share with others, where the system tells.
pub(crate) fn cache_bytes() -> Option<u64> {
    let size = |level: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size");
        crate::output::parse_size(std::fs::read_to_string(path).ok()?.trim()).ok()
    };
    (0..8).map_while(size).max()
}

/// Lets [`peak_memory`] begin again at what is held now, where the system can.
pub(crate) fn forget_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Today in UTC: `2025-11-03`.
pub(crate) fn today() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86400);
    date(days)
}

/// The date of a day since 1970 (Howard Hinnant, `civil_from_days`).
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{date:02}", year + era * 400 + next)
}

#[cfg(test)]
mod tests {
    #[test]
    fn days_are_dates() {
        for (days, text) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_454, "2026-01-01")]
        {
            assert_eq!(super::date(days), text);
        }
    }
}
