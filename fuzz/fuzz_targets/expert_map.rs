//! A map of experts is read or refused; nothing panics, whatever the bytes.
#![no_main]

use flashboot_checkpoint::ExpertMap;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(map) = ExpertMap::parse(data) else { return };
    assert!(matches!(map, ExpertMap::Explicit { .. }), "a file gives groups");
    assert_eq!(ExpertMap::parse(data), Ok(map));
});
