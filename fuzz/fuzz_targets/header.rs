//! A safetensors header that is accepted gives every tensor a range that its shape fills, and one whose coverage is
//! accepted gives every byte to one tensor; nothing panics.
#![no_main]

use flashboot_checkpoint::Header;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let Ok(header) = Header::parse(Path::new("fuzz.safetensors"), data) else { return };
    let mut ranges = Vec::new();
    for index in 0..header.tensors.len() {
        let tensor = header.tensors.at(index).expect("every index below the length");
        assert_eq!(header.tensors.find(tensor.name), Some(index), "no name twice");
        let elements: u128 = tensor.shape.iter().map(|&dim| u128::from(dim)).product();
        assert_eq!(elements * u128::from(tensor.dtype.bits()), u128::from(tensor.bytes) * 8);
        ranges.push((tensor.begin, tensor.begin.checked_add(tensor.bytes).expect("within u64")));
    }
    assert!(header.tensors.at(header.tensors.len()).is_none());
    ranges.retain(|(begin, end)| begin < end);
    ranges.sort_unstable();
    let whole = ranges.iter().map(|(_, end)| *end).max().unwrap_or(0);
    let Some(file_len) = whole.checked_add(8) else { return };
    let covered = header.check_coverage(Path::new("fuzz.safetensors"), 8, file_len, false).is_ok();
    let each_once = ranges.first().is_none_or(|(begin, _)| *begin == 0)
        && ranges.windows(2).all(|pair| pair[0].1 == pair[1].0);
    assert!(!covered || each_once, "every byte once");
});
