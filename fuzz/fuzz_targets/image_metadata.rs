//! Bytes of a `metadata.json` are refused or carry the id they hash to; nothing panics.
#![no_main]

use flashboot_checkpoint::Metadata;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    if let Ok(metadata) = Metadata::parse(Path::new("metadata.json"), data) {
        assert_eq!(metadata.id.len(), 64);
    }
});
