//! A safetensors header that is accepted gives every tensor a range of its own that its shape fills; nothing panics.
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
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no byte twice");
});
