//! That an index agrees with the files beside it and with what is in them.

use super::files::list_safetensors;
use crate::cause::Names;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::source::Source;
use crate::tensors::Tensors;
use std::collections::HashSet;
use std::path::Path;

/// Checks that no shard beside an index is left out of it: a file numbered as the index's own are. Others are
/// returned, to be told.
pub(super) fn check_all_named(dir: &Path, path: &Path, index: &Index) -> Result<Names> {
    let families: HashSet<&str> = index.files.iter().filter_map(|name| shard_family(name)).collect();
    let named: HashSet<&str> = index.files.iter().map(String::as_str).collect();
    let (mut shards, mut unrelated) = (Names::default(), Names::default());
    for (name, _) in list_safetensors(dir)?.iter().filter(|(name, _)| !named.contains(name.as_str())) {
        match shard_family(name) {
            Some(family) if families.contains(family) => shards.push(name),
            _ => unrelated.push(name),
        }
    }
    if shards.is_empty() {
        Ok(unrelated)
    } else {
        Err(Error::ShardNotInIndex { index: path.into(), names: shards })
    }
}

/// `model` of `model-00001-of-00002.safetensors`.
fn shard_family(name: &str) -> Option<&str> {
    let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (family, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(total) && digits(number)).then_some(family)
}

/// Checks that the index names every tensor once, in the shard that holds it, and nothing else.
pub(super) fn check_index(source: &Source, tensors: &Tensors, aliases: &[(String, usize)]) -> Result<()> {
    let path = &source.path;
    let mut named = vec![false; tensors.len()];
    let (mut not_in_shard, mut elsewhere, mut not_in_index) =
        (Names::default(), Names::default(), Names::default());
    let mut twice = None;
    // Its length was held against the cap when it was read first.
    let json = source.bytes_at(0, source.len())?;
    Index::parse(path, &json, |name, file| {
        let Some(number) = tensors.find(name) else {
            if !aliases.iter().any(|(alias, _)| alias == name) {
                not_in_shard.push(name);
            }
            return;
        };
        // Shards are numbered as the index first mentions them, so their numbers agree.
        if tensors.at(number).is_none_or(|t| t.shard != file) {
            elsewhere.push(name);
        }
        if let Some(seen) = named.get_mut(number)
            && std::mem::replace(seen, true)
        {
            twice.get_or_insert_with(|| name.to_owned());
        }
    })?;
    if let Some(tensor) = twice {
        return Err(Error::Duplicate { file: path.into(), tensor });
    }
    for (number, _) in named.iter().enumerate().filter(|(_, named)| !**named) {
        if let Some(tensor) = tensors.at(number) {
            not_in_index.push(tensor.name);
        }
    }
    if not_in_shard.is_empty() && elsewhere.is_empty() && not_in_index.is_empty() {
        return Ok(());
    }
    Err(Error::StaleIndex { index: path.into(), not_in_shard, elsewhere, not_in_index })
}
