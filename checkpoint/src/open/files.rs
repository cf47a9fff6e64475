//! Which files of a directory are a checkpoint's.

use crate::cause::Names;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

fn entries(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io("readdir", dir, &e))? {
        let entry = entry.map_err(|e| Error::io("readdir", dir, &e))?;
        // A name that is not UTF-8 is no file of a checkpoint: indices are JSON.
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable_by(|a, b| flashboot_core::layout::natural_order(a, b));
    Ok(names)
}

pub(super) fn find_index(dir: &Path) -> Result<Option<PathBuf>> {
    let found: Vec<_> =
        entries(dir)?.into_iter().filter(|n| n.ends_with(".safetensors.index.json")).collect();
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(dir.join(one))),
        several => match several.iter().find(|n| *n == "model.safetensors.index.json") {
            Some(stock) => Ok(Some(dir.join(stock))),
            None => {
                let mut names = Names::default();
                several.iter().for_each(|n| names.push(n));
                Err(Error::SeveralIndices { dir: dir.into(), names })
            }
        },
    }
}

pub(super) fn list_safetensors(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let names = entries(dir)?.into_iter().filter(|n| n.ends_with(".safetensors") && !n.starts_with('.'));
    Ok(names.map(|n| (n.clone(), dir.join(n))).collect())
}
