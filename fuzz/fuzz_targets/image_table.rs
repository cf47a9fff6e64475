//! A tensor table that is accepted keeps every tensor inside its payload, and apart from the others; nothing panics.
#![no_main]

use flashboot_checkpoint::RankTable;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let Ok(table) = RankTable::parse(Path::new("target-0-0-0-0.json"), data) else { return };
    assert_eq!(table.digests().payload(), table.payload_bytes());
    let mut ranges = Vec::new();
    for tensor in table.iter() {
        let end = tensor.offset.checked_add(tensor.bytes).expect("within u64");
        assert!(end <= table.payload_bytes(), "{} ends at {end}", tensor.name);
        ranges.push((tensor.offset, end));
    }
    ranges.retain(|(begin, end)| begin < end);
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no byte twice");
});
