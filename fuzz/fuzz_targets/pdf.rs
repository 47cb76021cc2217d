#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = refrain_documents::read(bytes, "document.pdf");
});
