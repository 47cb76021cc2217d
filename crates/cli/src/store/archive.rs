//! `refrain store export` and `import`.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use refrain::store::{Scope, Store, archive};

use super::selection::keys;
use crate::output::{bytes, count, print, print_json, show as move_bar, warn};
use crate::settings::Context;

pub(super) fn export(
    context: &Context,
    store: &Store,
    file: &Path,
    named: &[String],
    all: bool,
) -> Result<()> {
    let keys = match (all, named.is_empty()) {
        (true, _) => store.keys(Scope::All)?,
        (false, own) => keys(context, store, named, own)?,
    };
    let bar = context.bar("exporting", "{bytes} of {total_bytes}{left}");
    let moved = |progress: archive::ArchiveProgress| {
        move_bar(&bar, progress.bytes_done, progress.bytes.unwrap_or(progress.bytes_done));
    };
    let wrong = || format!("cannot write {}", file.display());
    let to_stdout = file == Path::new("-") || is_stdout(file);
    let report = if to_stdout {
        archive::export(store, &keys, io::stdout().lock(), moved)?
    } else if is_written_in_place(file) {
        let opened = File::create(file).with_context(wrong)?;
        archive::export(store, &keys, BufWriter::new(opened), moved)?
    } else {
        // The file has a temporary name until it is whole: an archive under its own name is complete.
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let folder =
            target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut temporary = tempfile::NamedTempFile::new_in(folder).with_context(wrong)?;
        let report = archive::export(store, &keys, BufWriter::new(temporary.as_file_mut()), moved)?;
        temporary.as_file().sync_all().with_context(wrong)?;
        temporary.persist(&target).with_context(wrong)?;
        report
    };
    bar.finish_and_clear();
    told(context, &report, "exported", to_stdout)
}

/// Whether a path names the file, pipe or device that is standard output.
fn is_stdout(file: &Path) -> bool {
    let stdout = io::stdout().as_fd().try_clone_to_owned().and_then(|stdout| File::from(stdout).metadata());
    let (Ok(stdout), Ok(named)) = (stdout, fs::metadata(file)) else { return false };
    (stdout.dev(), stdout.ino()) == (named.dev(), named.ino())
}

/// Whether a path names a device or a pipe, which no file may replace, or a link to a file that is not there yet.
fn is_written_in_place(file: &Path) -> bool {
    fs::metadata(file).map_or_else(|_| file.is_symlink(), |metadata| !metadata.is_file())
}

pub(super) fn import(context: &Context, store: &Store, file: &Path, namespaces: bool) -> Result<()> {
    let bar = context.bar("importing", "{bytes} of {total_bytes}{left}");
    let (archive, size): (Box<dyn Read>, u64) = if file == Path::new("-") {
        (Box::new(io::stdin().lock()), 0)
    } else {
        let opened = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
        let size = opened.metadata().map_or(0, |metadata| metadata.len());
        (Box::new(BufReader::new(opened)), size)
    };
    let namespace = context.namespace()?;
    let into = (!namespaces).then_some(namespace.as_str());
    let report = archive::import(store, archive, into, |progress| {
        move_bar(&bar, progress.bytes_done, size.max(progress.bytes_done));
    })
    .with_context(|| format!("cannot import {}", file.display()))?;
    bar.finish_and_clear();
    told(context, &report, "imported", false)
}

/// The outcome of an export or import; on standard error where standard output is the archive.
fn told(context: &Context, report: &archive::ArchiveReport, done: &str, aside: bool) -> Result<()> {
    for (name, why) in &report.left_out {
        warn(&format!("left out: {}: {why}", name.display()));
    }
    if context.json && !aside {
        return print_json(report);
    }
    let mut text = format!("{done} {}", count(report.chunks as usize, "chunk"));
    if report.aux_files > 0 {
        text.push_str(&format!(" and {}", count(report.aux_files as usize, "file")));
        text.push_str(" of what methods keep beside them");
    }
    text.push_str(&format!(", {}", bytes(report.bytes)));
    if report.known > 0 {
        text.push_str(&format!("; {} there already", count(report.known as usize, "chunk")));
    }
    if aside {
        context.say(&text);
        return Ok(());
    }
    print(&format!("{text}\n"))
}
