//! Writes `include/flashboot.h` anew, from the crate's own text. `cargo test -p flashboot-capi` says when that is due.
#![allow(clippy::expect_used, reason = "a tool of the crate's own")]

use std::path::Path;

fn main() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = crate_folder.join("include/flashboot.h");
    let made = cbindgen::generate(crate_folder).expect("a header of this crate");
    println!("{}: {}", header.display(), if made.write_to_file(&header) { "changed" } else { "as it was" });
}
