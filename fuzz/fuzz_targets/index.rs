//! An index that is accepted names only files inside its own directory; nothing panics.
#![no_main]

use flashboot_checkpoint::Index;
use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};

fuzz_target!(|data: &[u8]| {
    let mut named = 0_u64;
    let mut highest = None;
    let parsed = Index::parse(Path::new("model.safetensors.index.json"), data, |_, file| {
        named += 1;
        highest = highest.max(Some(file));
    });
    let Ok(index) = parsed else { return };
    assert_eq!(index.tensors, named);
    assert!(highest.is_none_or(|file| file < index.files.len()));
    for file in &index.files {
        let inside = |part| matches!(part, Component::Normal(_) | Component::CurDir);
        assert!(!file.is_empty() && Path::new(file).components().all(inside), "{file:?}");
    }
});
