//! A size that parses prints as a text that parses to the same size; nothing panics.
#![no_main]

use flashboot_core::ByteSize;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse(), Ok(size), "{text:?} printed as {size}");
    }
});
