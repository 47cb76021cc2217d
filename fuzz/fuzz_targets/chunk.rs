//! A chunk file of arbitrary bytes, as it is and with its header's checksum made right: reading it must not panic or
//! allocate beyond what the bytes justify, and what is accepted must survive being written and read again.
#![no_main]

mod forge;

use forge::forge;
use libfuzzer_sys::fuzz_target;
use refrain_store::Chunk;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    if let Some(forged) = forge(bytes, |_, _| ()) {
        read(&forged);
    }
});

fn read(bytes: &[u8]) {
    let Ok(chunk) = Chunk::from_bytes(bytes) else { return };
    for layer in 0..chunk.layers() {
        let layer = chunk.layer(layer);
        assert_eq!(layer.k().len(), layer.v().len());
    }
    let again = Chunk::from_bytes(&chunk.to_bytes()).expect("what was accepted is accepted again");
    assert_eq!((again.id(), again.key(), again.label()), (chunk.id(), chunk.key(), chunk.label()));
    let layers = |chunk: &Chunk| -> Vec<Vec<u8>> {
        (0..chunk.layers())
            .map(|l| chunk.layer(l))
            .flat_map(|l| [l.k().as_bytes().to_vec(), l.v().as_bytes().to_vec()])
            .collect()
    };
    assert_eq!(layers(&again), layers(&chunk));
}
