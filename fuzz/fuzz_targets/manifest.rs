//! Bytes of a manifest are refused, or are of the image and the rank that were asked for; nothing panics.
//!
//! The first 64 bytes are the id that is asked for.
#![no_main]

use flashboot_checkpoint::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((id, bytes)) = data.split_at_checked(64) else { return };
    let Ok(id) = std::str::from_utf8(id) else { return };
    if let Ok(manifest) = Manifest::check(bytes, id, "target-0-0-0-0") {
        assert_eq!(manifest.metadata.id, id);
        assert_eq!(manifest.table.payload_bytes(), manifest.entry.payload_bytes);
    }
});
