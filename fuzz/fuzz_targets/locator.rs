//! A locator that parses encodes to a text that parses to the same locator; nothing panics.
//!
//! The first byte says what the rest is: the whole text, or its content. No fuzzer guesses a BLAKE3 sum, so
//! the content is given its prefix, encoding and sum here.
#![no_main]

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use flashboot_core::Locator;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&form, rest)) = data.split_first() else { return };
    let text = match form {
        b'j' => sealed(rest),
        _ => String::from_utf8_lossy(rest).into_owned(),
    };
    if let Ok(locator) = text.parse::<Locator>() {
        assert_eq!(locator.encode().parse(), Ok(locator));
    }
});

/// `json` with what a locator has around it.
fn sealed(json: &[u8]) -> String {
    let body = format!("flashboot1.{}", URL_SAFE_NO_PAD.encode(json));
    let sum = blake3::hash(body.as_bytes()).to_hex();
    format!("{body}.{}", &sum[..16])
}
