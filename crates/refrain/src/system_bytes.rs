//! Bytes that Linux tells of memory.

/// The bytes of a line `NAME VALUE kB` of a file of the system, where it has that line: `MemTotal:` of `/proc/meminfo`.
pub fn system_bytes(file: &str, name: &str) -> Option<u64> {
    bytes_in(&std::fs::read_to_string(file).ok()?, name)
}

fn bytes_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_in_kib_is_read() {
        let text = "VmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\nThreads:\t2\n";
        assert_eq!(bytes_in(text, "VmRSS:"), Some(2 << 20));
        assert_eq!((bytes_in(text, "Threads:"), bytes_in(text, "VmSwap:")), (None, None));
        assert_eq!(system_bytes("/there/is/no/such/file", "VmRSS:"), None);
    }
}
