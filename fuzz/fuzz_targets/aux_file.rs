//! An aux tensors file of arbitrary bytes, as it is and with its checksums made right: reading it must not panic or allocate
//! beyond what the bytes justify, and what is accepted must survive being written and read again.
#![no_main]

mod forge;

use forge::forge;
use libfuzzer_sys::fuzz_target;
use refrain_store::{ChunkKey, aux_file};

const KIND: &str = "sam_kv-64-1-2";

fuzz_target!(|bytes: &[u8]| {
    let key = ChunkKey([7; 32]);
    let mend = |entries: &mut std::collections::BTreeMap<String, String>, data: &[u8]| {
        entries.insert("chunk".to_owned(), key.to_string());
        entries.insert("kind".to_owned(), KIND.to_owned());
        entries.insert("data.blake3".to_owned(), blake3::hash(data).to_string());
    };
    for bytes in [Some(bytes.to_vec()), forge(bytes, mend)].into_iter().flatten() {
        let Ok(read) = aux_file::decode(&bytes, &key, KIND) else { continue };
        let again = aux_file::encode(&key, KIND, 0, &read).expect("what was accepted can be written");
        let again = aux_file::decode(&again, &key, KIND).expect("what was written is accepted");
        assert_eq!(format!("{again:?}"), format!("{read:?}"));
    }
});
