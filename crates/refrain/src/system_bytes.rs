//! Bytes that Linux tells of memory.

use std::path::Path;

/// The bytes of a line `NAME VALUE kB` of a file of the system, where it has that line: `MemTotal:` of `/proc/meminfo`.
pub fn system_bytes(file: &str, name: &str) -> Option<u64> {
    bytes_in(&std::fs::read_to_string(file).ok()?, name)
}

/// Most bytes of memory that this process may have: those of the machine, or fewer where a control group bounds them, such as that of a container.
/// None where the system does not tell.
pub fn memory_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let bounds = group_bounds(Path::new("/sys/fs/cgroup"), &groups);
    bounds.into_iter().chain(system_bytes("/proc/meminfo", "MemTotal:")).min()
}

/// Bounds on the memory of the control groups in `groups`, a text like `/proc/self/cgroup`, and of those above them. `root` is where they are mounted.
fn group_bounds(root: &Path, groups: &str) -> Vec<u64> {
    let mut bounds = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        // Groups of version 2 have all controllers.
        let (folder, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            of if of.split(',').any(|of| of == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // In a container the own group may be mounted as the root, and those above it be missing.
        for group in Path::new(group.trim_start_matches('/')).ancestors() {
            let text = std::fs::read_to_string(folder.join(group).join(file));
            bounds.extend(text.ok().and_then(|text| text.trim().parse::<u64>().ok()));
        }
    }
    bounds
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

    #[test]
    fn bounds_of_control_groups_are_those_of_the_own_and_of_those_above() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("pods/memory.max", "4294967296\n");
        write("pods/one/memory.max", "max\n");
        write("pods/two/memory.max", "1024\n");
        write("memory/memory.limit_in_bytes", "2048\n");
        write("memory/docker/memory.limit_in_bytes", "9223372036854771712\n");
        let bounds = |groups| group_bounds(root.path(), groups);
        assert_eq!(bounds("0::/pods/one\n"), [4 << 30]);
        assert_eq!(bounds("0::/pods/two\n"), [1024, 4 << 30]);
        // Version 1: the own group is the root where the container does not see the path.
        assert_eq!(bounds("5:cpu,cpuacct:/pods/two\n4:memory:/docker\n"), [9_223_372_036_854_771_712, 2048]);
        assert_eq!(bounds("4:memory:/elsewhere/deep\n"), [2048]);
        assert_eq!(bounds("no control groups"), [0; 0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_has_a_limit() {
        let machine = system_bytes("/proc/meminfo", "MemTotal:").unwrap();
        assert!((1..=machine).contains(&memory_limit().unwrap()));
    }
}
