//! Checkpoints that other people's code wrote, and what that code reads from them.
//!
//! `xtask/python/make_reference_models.py` makes them; `FLASHBOOT_REFERENCE_MODELS` says where they are. Without
//! it every case shows as ignored.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    OpenOptions, PackOptions, Segment, UnpackOptions, VerifyOptions, diff, pack, place, unpack, verify,
};
use flashboot_core::Dtype;
use flashboot_core::layout::Place;
use libtest_mimic::{Arguments, Failed, Trial};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tempfile::TempDir;

const WHERE: &str = "FLASHBOOT_REFERENCE_MODELS";
const MODELS: [&str; 5] = ["all-minilm-l6-v2", "llama-tied", "llama-tied-save-model", "mixtral", "qwen3-moe"];

fn main() -> ExitCode {
    let trials = match std::env::var_os(WHERE) {
        None => MODELS.iter().map(|model| ignored(model, &format!("{WHERE} is not set"))).collect(),
        Some(dir) => present(Path::new(&dir)),
    };
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn ignored(model: &str, why: &str) -> Trial {
    let reason = why.to_owned();
    Trial::test(model, move || Err(Failed::from(reason)))
        .with_kind(format!("not run here: {why}"))
        .with_ignored_flag(true)
}

fn present(dir: &Path) -> Vec<Trial> {
    let mut models: BTreeMap<String, PathBuf> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            models.insert(entry.file_name().to_string_lossy().into_owned(), entry.path());
        }
    }
    let missing = MODELS.iter().filter(|model| !models.contains_key(**model));
    let mut trials: Vec<_> = missing.map(|model| ignored(model, "the directory lacks it")).collect();
    for (name, path) in models {
        trials.push(Trial::test(name, move || check(&path)));
    }
    trials
}

#[derive(serde::Deserialize)]
struct Expected {
    dtype: String,
    shape: Vec<u64>,
    sha256: String,
}

fn check(model: &Path) -> Result<(), Failed> {
    let dir = TempDir::new()?;
    let (image, back) = (dir.path().join("image"), dir.path().join("back"));
    let checkpoint = support::open(model)?;
    pack(&checkpoint, &image, &PackOptions::default(), &())?;
    let opened = flashboot_checkpoint::Image::open(&image)?;
    assert!(verify(&opened, &VerifyOptions::default(), &())?.ok);
    unpack(&opened, &back, &UnpackOptions::default(), &())?;
    let mut files = support::tree(model);
    files.retain(|path, _| {
        let name = path.to_string_lossy();
        name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
    });
    assert!(!files.is_empty() && support::tree(&back) == files, "unpack(pack(x)) is x, bit for bit");

    let table = &*opened.ranks().first().ok_or("no rank")?.table;
    let payload = std::fs::read(&opened.ranks().first().ok_or("no rank")?.path)?;
    // Models of one's own may lack it; those of the script may not.
    let known = model.file_name().is_some_and(|name| MODELS.iter().any(|model| name == *model));
    let text = match std::fs::read(model.join("expected.json")) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !known => None,
        read => Some(read?),
    };
    if let Some(text) = text {
        let expected: BTreeMap<String, Expected> = serde_json::from_slice(&text)?;
        assert_eq!(table.len(), expected.len());
        for tensor in table.iter() {
            let wanted = expected.get(tensor.name).ok_or_else(|| format!("{} is not there", tensor.name))?;
            assert_eq!(tensor.dtype, wanted.dtype.parse::<Dtype>()?, "{}", tensor.name);
            assert_eq!(tensor.shape, wanted.shape, "{}", tensor.name);
            let bytes = &payload[tensor.offset as usize..(tensor.offset + tensor.bytes) as usize];
            let hash: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hash, wanted.sha256, "{}", tensor.name);
            assert_eq!(tensor.segment == Segment::Experts, place(tensor.name) != Place::NonExpert);
        }
    }
    if let Ok(text) = std::fs::read(model.join("same_bytes.json")) {
        for (a, b) in serde_json::from_slice::<Vec<(String, String)>>(&text)? {
            assert!(
                table.find(&a).is_some() && table.find(&a) == table.find(&b),
                "{a} and {b} are one tensor"
            );
        }
    } else {
        // Without ties the two hold the same names, so they compare equal; a tie may come from config.json alone,
        // which is beside the model and not beside what was unpacked.
        assert!(diff(model, &back, &OpenOptions::default())?.equal);
    }
    assert!(diff(model, &image, &OpenOptions::default())?.equal);
    Ok(())
}
