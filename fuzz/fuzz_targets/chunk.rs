//! A chunk file of arbitrary bytes, as it is and with its header's checksum made right: reading it must not panic or
//! allocate beyond what the bytes justify, and what is accepted must survive being written and read again.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use refrain_store::Chunk;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    if let Some(forged) = forge(bytes) {
        read(&forged);
    }
});

fn read(bytes: &[u8]) {
    let Ok(chunk) = Chunk::from_bytes(bytes) else { return };
    for layer in 0..chunk.layers() {
        assert_eq!(chunk.k(layer).len(), chunk.v(layer).len());
    }
    let again = Chunk::from_bytes(&chunk.to_bytes()).expect("what was accepted is accepted again");
    assert_eq!((again.id(), again.key(), again.label()), (chunk.id(), chunk.key(), chunk.label()));
    let layers = |chunk: &Chunk| -> Vec<Vec<u8>> {
        (0..chunk.layers())
            .flat_map(|l| [chunk.k(l).as_bytes().to_vec(), chunk.v(l).as_bytes().to_vec()])
            .collect()
    };
    assert_eq!(layers(&again), layers(&chunk));
}

/// The file with a checksum of the header that matches, so that what lies behind it is tried too.
fn forge(bytes: &[u8]) -> Option<Vec<u8>> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let end = length.checked_add(8)?;
    let mut header: Value = serde_json::from_slice(bytes.get(8..end)?).ok()?;
    let metadata = header.get_mut("__metadata__")?;
    let mut entries: BTreeMap<String, String> = serde_json::from_value(metadata.clone()).ok()?;
    entries.remove("header.blake3");
    let mut hasher = blake3::Hasher::new();
    for text in entries.iter().flat_map(|(name, value)| [name, value]) {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    entries.insert("header.blake3".to_owned(), hasher.finalize().to_string());
    *metadata = serde_json::to_value(entries).ok()?;
    let header = serde_json::to_vec(&header).ok()?;
    Some([&(header.len() as u64).to_le_bytes(), header.as_slice(), &bytes[end..]].concat())
}
