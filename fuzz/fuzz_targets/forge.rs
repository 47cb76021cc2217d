//! Files of the store's header format, made plausible.

use std::collections::BTreeMap;

use serde_json::Value;

/// The file with a checksum of the header that matches, so that what lies behind it is tried too. `mend` may change the
/// entries in view of what follows the header.
pub fn forge(bytes: &[u8], mend: impl Fn(&mut BTreeMap<String, String>, &[u8])) -> Option<Vec<u8>> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let end = length.checked_add(8)?;
    let mut header: Value = serde_json::from_slice(bytes.get(8..end)?).ok()?;
    let metadata = header.get_mut("__metadata__")?;
    let mut entries: BTreeMap<String, String> = serde_json::from_value(metadata.clone()).ok()?;
    entries.remove("header.blake3");
    mend(&mut entries, &bytes[end..]);
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
