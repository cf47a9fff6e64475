//! A recipe that is accepted says the same again when it is read again; nothing panics, whatever the text.
#![no_main]

use flashboot_checkpoint::Recipe;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(recipe) = Recipe::parse("fuzzed.toml", text) else { return };
    assert_eq!(Recipe::parse("fuzzed.toml", text).as_ref(), Ok(&recipe));
    assert!(!recipe.family().is_empty());
});
