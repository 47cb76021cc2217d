//! The machine, the time and the command of a measurement.

use std::time::{SystemTime, UNIX_EPOCH};

use refrain::system_bytes;

/// Options whose values are secrets, which no file of a measurement may hold.
const SECRETS: [&str; 2] = ["--credential", "--namespace-key"];

/// The command line as it was given, to be given again; secrets are left out.
pub(crate) fn command() -> String {
    command_of(std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()))
}

/// The command line of these words.
fn command_of(words: impl Iterator<Item = String>) -> String {
    let mut is_secret = false;
    let shown = words.map(|word| {
        if std::mem::replace(&mut is_secret, SECRETS.contains(&word.as_str())) {
            return "…".to_owned();
        }
        match word.split_once('=') {
            Some((name, _)) if SECRETS.contains(&name) => format!("{name}=…"),
            _ => quoted(word),
        }
    });
    std::iter::once("refrain".to_owned()).chain(shown).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
fn quoted(word: String) -> String {
    let safe = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/@".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        return word;
    }
    // Within single quotes a shell takes every character but that quote as it is.
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The machine's name, where the system tells.
#[cfg(feature = "remote")]
pub(crate) fn host_name() -> String {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let told = told.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    told.trim().to_owned()
}

/// The operating system's name, where it tells.
pub(crate) fn system() -> String {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let named = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    named.map_or_else(|| std::env::consts::OS.to_owned(), |name| name.trim_matches('"').to_owned())
}

/// Most memory that this process has had in bytes, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    system_bytes("/proc/self/status", "VmHWM:")
}

/// Bytes of this process that are in memory now, where the system tells.
pub(crate) fn resident_memory() -> Option<u64> {
    system_bytes("/proc/self/status", "VmRSS:")
}

/// Bytes of memory that the machine has, where the system tells.
pub(crate) fn all_memory() -> Option<u64> {
    system_bytes("/proc/meminfo", "MemTotal:")
}

/// Resets [`peak_memory`] to the memory held now, where the system can.
pub(crate) fn forget_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The time, in seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Seconds since a time in seconds since 1970.
pub(crate) fn seconds_since(time: u64) -> u64 {
    now().saturating_sub(time)
}

/// Today in UTC: `2025-11-03`.
pub(crate) fn today() -> String {
    refrain_eval::utc(now())[..10].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_without_its_secrets() {
        let words = "eval run --credential sk-one --namespace-key=5a5a --namespace-key-file key --credential=sk=2 --out x";
        let others = ["two words", "cost in $USD `id`", "it's", ""].map(str::to_owned);
        let shown = command_of(words.split(' ').map(str::to_owned).chain(others));
        let wanted = "refrain eval run --credential … --namespace-key=… --namespace-key-file key --credential=… --out x \
                      'two words' 'cost in $USD `id`' 'it'\\''s' ''";
        assert_eq!(shown, wanted);
    }
}
