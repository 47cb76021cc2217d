//! Listings of chunks.

use std::collections::{BTreeMap, BTreeSet};

use super::Store;
use crate::folder::{FolderEntry, open_chunk};
use crate::index::IndexRow;
use crate::tiers::MemoryEntry;
use crate::{ChunkDetail, ChunkInfo, ChunkKey, InvalidKey, Listing, Result, Scope, StoreError, Unusable};

impl Store {
    /// The chunks in `scope`, of all models, from the headers of their files and from memory.
    ///
    /// For a namespace only its own rows of the index and its own files are read: a chunk file that another program has put
    /// into the folder is listed once the index knows it, after its first use or after [`Store::gc`] or [`Store::verify`].
    /// Where the index cannot be used, the headers of all files are read.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list(&self, scope: Scope<'_>) -> Result<Listing> {
        let (found, rows) = self.files_in(scope)?;
        let mut memory: BTreeMap<ChunkKey, MemoryEntry> =
            self.0.memory.iter().filter(|(_, entry)| scope.has(&entry.chunk.id().namespace)).collect();
        let mut listing = Listing::default();
        let mut beside = self.beside(&found);
        for found in found {
            let FolderEntry::Chunk(key, path) = found else { continue };
            match open_chunk(&path, &key) {
                Ok(Some((_, header))) => {
                    let in_memory = memory.remove(&key).is_some();
                    listing.chunks.push(ChunkInfo::of_header(&header, path, in_memory, rows.get(&key)));
                }
                Ok(None) => {}
                // The namespace of an unreadable file is unknown, so only the listing of all names it.
                Err(problem) if scope == Scope::All => listing.unusable.push(Unusable { path, problem }),
                Err(_) => {}
            }
        }
        listing.chunks.extend(memory.values().map(|entry| ChunkInfo::of_memory(&entry.chunk, entry.expires)));
        listing.chunks.retain(|info| scope.has(&info.namespace));
        listing.chunks.sort_by_key(|info| info.key);
        for info in &mut listing.chunks {
            beside.remove(&info.key).unwrap_or_default().tell(info);
        }
        Ok(listing)
    }

    /// The files that may be of chunks in `scope`, by their names, and the rows of the index in it.
    fn files_in(&self, scope: Scope<'_>) -> Result<(Vec<FolderEntry>, BTreeMap<ChunkKey, IndexRow>)> {
        let Some(disk) = self.0.disk.as_deref() else { return Ok(Default::default()) };
        if let Scope::Namespace(namespace) = scope
            && let Ok(rows) = disk.rows_of(namespace)
        {
            let rows: BTreeMap<_, _> = rows.into_iter().collect();
            return Ok((disk.folder().files_of(&rows.keys().copied().collect())?, rows));
        }
        let rows = disk.rows().unwrap_or_default().into_iter().collect();
        Ok((disk.folder().scan()?, rows))
    }

    /// The only key of a chunk in `scope` that begins with `prefix`, 1 to 64 hexadecimal digits.
    ///
    /// # Errors
    /// If there is none, or several (the error lists them), or the prefix is not hexadecimal.
    pub fn resolve(&self, prefix: &str, scope: Scope<'_>) -> Result<ChunkKey> {
        if !(1..=64).contains(&prefix.len()) || !prefix.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(InvalidKey { text: prefix.to_owned(), expected: "1 to 64" }.into());
        }
        let wanted = prefix.to_ascii_lowercase();
        let on_disk = self.0.folder().map_or(Ok(Vec::new()), |folder| folder.keys(&wanted))?;
        let in_memory = self.0.memory.iter().map(|(key, _)| key);
        let keys: BTreeSet<ChunkKey> = on_disk
            .into_iter()
            .chain(in_memory)
            .filter(|key| key.to_string().starts_with(&wanted) && self.is_in(key, scope))
            .collect();
        match keys.first() {
            None => Err(StoreError::NoSuchChunk { prefix: prefix.to_owned() }),
            Some(key) if keys.len() == 1 => Ok(*key),
            Some(_) => Err(StoreError::Ambiguous {
                prefix: prefix.to_owned(),
                candidates: keys.into_iter().collect(),
            }),
        }
    }

    /// Whether a chunk is in the scope. One whose header cannot be read is in that of all.
    fn is_in(&self, key: &ChunkKey, scope: Scope<'_>) -> bool {
        let on_disk = || self.0.folder()?.open_chunk(key).ok()?.map(|(_, header)| header.id.namespace);
        let namespace = match self.0.memory.peek(key) {
            Some(held) => Some(held.chunk.id().namespace.clone()),
            None if scope == Scope::All => None,
            None => on_disk(),
        };
        namespace.map_or(scope == Scope::All, |namespace| scope.has(&namespace))
    }

    /// A description of a chunk, with its token ids.
    ///
    /// # Errors
    /// If there is no such chunk, or its header cannot be used.
    pub fn show(&self, key: &ChunkKey) -> Result<ChunkDetail> {
        let mut detail = self.detail(key)?;
        let mut beside = self.beside(&self.aux_files_on_disk(key)?);
        beside.remove(key).unwrap_or_default().tell(&mut detail.info);
        Ok(detail)
    }

    fn detail(&self, key: &ChunkKey) -> Result<ChunkDetail> {
        let in_memory = self.0.memory.peek(key);
        if let Some(folder) = self.0.folder() {
            let path = folder.path(key);
            let opened = match folder.open_chunk(key) {
                Err(problem) if in_memory.is_none() => return Err(StoreError::Unusable { path, problem }),
                opened => opened,
            };
            if let Ok(Some((_, header))) = opened {
                let row = self.0.disk.as_ref().and_then(|disk| disk.row(key).ok().flatten());
                let info = ChunkInfo::of_header(&header, path, in_memory.is_some(), row.as_ref());
                return Ok(ChunkDetail { info, token_ids: header.id.tokens });
            }
        }
        let held = in_memory.ok_or_else(|| StoreError::NoSuchChunk { prefix: key.to_string() })?;
        Ok(ChunkDetail {
            info: ChunkInfo::of_memory(&held.chunk, held.expires),
            token_ids: held.chunk.tokens().to_vec(),
        })
    }

    /// The keys of all chunks in `scope` that are on disk, ascending.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn keys(&self, scope: Scope<'_>) -> Result<Vec<ChunkKey>> {
        let chunks = self.list(scope)?.chunks.into_iter();
        Ok(chunks.filter(|info| info.path.is_some()).map(|info| info.key).collect())
    }

    /// The keys of all chunks in memory, and of all chunk files in the folder, ascending. No file is opened, so that a key may be that
    /// of a broken file.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn held(&self) -> Result<BTreeSet<ChunkKey>> {
        let on_disk = self.0.folder().map_or(Ok(Vec::new()), |folder| folder.keys(""))?;
        let in_memory = self.0.memory.iter().map(|(key, _)| key);
        Ok(on_disk.into_iter().chain(in_memory).collect())
    }
}
