//! `refrain tune --forget`: the model's choice is what is built in again.

use std::io::ErrorKind;

use anyhow::{Context as _, Result};
use refrain::folders::tilde;
use refrain::{Choice, tuned_path};
use serde_json::json;

use crate::output::{json_path, print, print_json};
use crate::settings::Context;

/// Removes the choice that `refrain tune` has kept for the model.
pub(super) fn forget(context: &Context) -> Result<()> {
    let path = tuned_path(context.data_folder.as_deref(), &context.fingerprint()?)?;
    let is_removed = match std::fs::remove_file(&path) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| format!("cannot remove {}", tilde(&path))),
    };
    let choice = context.choice()?;
    if context.json {
        let removed = is_removed.then(|| json_path(&path));
        return print_json(&json!({ "removed": removed, "auto": choice }));
    }
    let Choice { method, prefix, why } = choice;
    let done = if is_removed { "removed" } else { "there is no choice in" };
    print(&format!("{done} {}; auto is {method} behind prefix {prefix}: {why}\n", tilde(&path)))
}
