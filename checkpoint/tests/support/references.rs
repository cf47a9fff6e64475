//! Cases that compare with files which others' code made: where those are, and the comparison.

use flashboot_checkpoint::RankImage;
use libtest_mimic::{Failed, Trial};
use std::path::{Path, PathBuf};

/// A case on what lies below the folder that `variable` names. Without it the case shows as ignored.
pub fn trial(
    variable: &str,
    name: String,
    case: impl FnOnce(&Path) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    match std::env::var_os(variable).map(PathBuf::from) {
        Some(dir) => Trial::test(name, move || case(&dir)),
        None => {
            let reason = format!("{variable} is not set");
            let kind = format!("not run here: {reason}");
            Trial::test(name, move || Err(Failed::from(reason))).with_kind(kind).with_ignored_flag(true)
        }
    }
}

/// Holds a rank's image against a safetensors file: every tensor of it is there, with the same type, shape and bytes.
/// Gives how many there are, and how many of them the image has as a part of the checkpoint's.
pub fn same_tensors(rank: &RankImage, file: &Path, what: &str) -> Result<(usize, usize), Failed> {
    let payload = std::fs::read(&rank.path)?;
    let (theirs, bytes) = (super::open(file)?, std::fs::read(file)?);
    let start = theirs.shards()[0].data_start();
    let mut parts = 0;
    for tensor in theirs.tensors().iter() {
        let found = rank.table.find(tensor.name).and_then(|i| rank.table.at(i));
        let what = format!("{} on {what}", tensor.name);
        let ours = found.ok_or_else(|| format!("{what} is not in the image"))?;
        assert_eq!((ours.dtype, ours.shape), (tensor.dtype, tensor.shape), "{what}");
        let range = |at: u64| at as usize..(at + tensor.bytes) as usize;
        assert!(payload[range(ours.offset)] == bytes[range(start + tensor.begin)], "{what}");
        parts += usize::from(!ours.parts.is_empty());
    }
    Ok((theirs.tensors().len(), parts))
}
