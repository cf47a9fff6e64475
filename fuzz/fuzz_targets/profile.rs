//! A machine's profile that is accepted can be simulated or is refused with a reason; nothing panics, whatever the text.
#![no_main]

use flashboot_sim::{Chunk, Profile, Scenario, simulate};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(profile) = Profile::parse("fuzzed.toml", text) else { return };
    if let Ok(outcome) = simulate(&profile, &Scenario::new(40 << 20, 2)) {
        // On links so slow that words stand still a clone gives up, as a real one would.
        assert_eq!(outcome.clones.len() + outcome.failed.len(), 2);
    }
    // As much as there can be, on the same links.
    let whole = Scenario { chunk: Chunk::Whole, ..Scenario::new(1 << 50, 2) };
    if let Ok(outcome) = simulate(&profile, &whole) {
        assert_eq!(outcome.clones.len() + outcome.failed.len(), 2);
    }
});
