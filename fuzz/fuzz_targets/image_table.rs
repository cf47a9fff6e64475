//! A tensor table that is accepted keeps every tensor inside its payload, and apart from the others, and every part
//! inside its tensor and its source; nothing panics.
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
        for part in tensor.parts {
            let data = table.sources()[part.source as usize].data_bytes;
            assert!(part.is_sound() && part.at_end() <= Some(tensor.bytes) && part.from_end() <= Some(data));
        }
    }
    ranges.retain(|(begin, end)| begin < end);
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no byte twice");
});
