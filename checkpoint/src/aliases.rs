//! Names that mean the bytes of another tensor: tied weights. Two places record them.
//!
//! `safetensors.torch.save_model` writes each name it dropped into `__metadata__`, with the name it kept.
//! `tie_word_embeddings` in `config.json` says that `lm_head.weight` is the input embedding.

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::tensors::Tensors;
use std::{collections::HashMap, path::Path};

const HEAD: &str = "lm_head.weight";
const EMBEDDINGS: [&str; 3] = ["embed_tokens.weight", "wte.weight", "word_embeddings.weight"];

/// Every alias with the number of its tensor, by name.
pub(crate) fn find(
    dir: &Path,
    tensors: &Tensors,
    metadata: &[(String, String)],
    config: &ModelConfig,
) -> Result<Vec<(String, usize)>> {
    let mut found = HashMap::<&str, usize>::new();
    for (alias, name) in metadata {
        let Some(number) = tensors.find(name) else { continue };
        if alias == "format" || tensors.find(alias).is_some() {
            continue;
        }
        if found.insert(alias, number).is_some_and(|before| before != number) {
            return Err(Error::Duplicate { file: dir.into(), tensor: format!("__metadata__.{alias}") });
        }
    }
    if config.tied_embeddings && tensors.find(HEAD).is_none() && !found.contains_key(HEAD) {
        let is_embedding = |name: &str| {
            EMBEDDINGS.iter().any(|e| name.strip_suffix(e).is_some_and(|p| p.is_empty() || p.ends_with('.')))
        };
        let mut embeddings =
            (0..tensors.len()).filter(|&i| tensors.at(i).is_some_and(|t| is_embedding(t.name)));
        if let (Some(one), None) = (embeddings.next(), embeddings.next()) {
            found.insert(HEAD, one);
        }
    }
    let mut aliases: Vec<_> = found.into_iter().map(|(alias, number)| (alias.to_owned(), number)).collect();
    aliases.sort_unstable();
    Ok(aliases)
}
