//! Chunks that a command names.

use anyhow::Result;
use refrain::store::{ChunkKey, Scope, Store};

use crate::settings::Context;

/// Keys of the chunks of the user's namespace that begin with these digits, or of all of them.
pub(super) fn keys(context: &Context, store: &Store, keys: &[String], all: bool) -> Result<Vec<ChunkKey>> {
    let namespace = context.existing_namespace()?;
    let scope = Scope::Namespace(&namespace);
    if all {
        return Ok(store.list(scope)?.chunks.iter().map(|info| info.key).collect());
    }
    Ok(keys.iter().map(|key| store.resolve(key, scope)).collect::<Result<_, _>>()?)
}
