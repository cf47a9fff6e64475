//! Makes checkpoints to test with. Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

pub mod models;
pub mod references;

use flashboot_checkpoint::{Checkpoint, Image, OpenOptions, PackOptions, pack};
use flashboot_core::Dtype;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// One tensor to be written.
#[derive(Debug, Clone)]
pub struct Made {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A tensor whose bytes depend on its name, so that swapped tensors are seen.
pub fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Made {
    let len = dtype.bytes_of(shape).expect("a shape of whole bytes") as usize;
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut bytes);
    Made { name: name.into(), dtype, shape: shape.to_vec(), bytes }
}

pub fn header(tensors: &[Made], metadata: &[(&str, &str)]) -> String {
    let mut json = String::from("{");
    let quoted = |text: &str| serde_json::to_string(text).unwrap();
    if !metadata.is_empty() {
        let pairs: Vec<_> = metadata.iter().map(|(k, v)| format!("{}:{}", quoted(k), quoted(v))).collect();
        write!(json, "\"__metadata__\":{{{}}}", pairs.join(",")).unwrap();
    }
    let mut at = 0;
    for t in tensors {
        let comma = if json.len() > 1 { "," } else { "" };
        let end = at + t.bytes.len();
        write!(
            json,
            "{comma}{}:{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{at},{end}]}}",
            quoted(&t.name),
            t.dtype,
            t.shape
        )
        .unwrap();
        at = end;
    }
    json.push('}');
    json
}

/// The bytes of a safetensors file.
pub fn file(tensors: &[Made], metadata: &[(&str, &str)], padding: usize) -> Vec<u8> {
    let mut json = header(tensors, metadata).into_bytes();
    json.extend(std::iter::repeat_n(b' ', padding));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    tensors.iter().for_each(|t| bytes.extend(&t.bytes));
    bytes
}

/// Writes shards and the index that names them.
pub fn sharded(dir: &Path, shards: &[Vec<Made>]) {
    std::fs::create_dir_all(dir).unwrap();
    let mut map = BTreeMap::new();
    for (i, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        std::fs::write(dir.join(&name), file(tensors, &[("format", "pt")], i)).unwrap();
        tensors.iter().for_each(|t| drop(map.insert(t.name.clone(), name.clone())));
    }
    let index = serde_json::json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    let text = serde_json::to_string_pretty(&index).unwrap();
    std::fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
}

/// A small mixture-of-experts model in two shards.
pub fn small_moe() -> Vec<Vec<Made>> {
    let mut shards = vec![Vec::new(), Vec::new()];
    for layer in 0..3 {
        for expert in 0..12 {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
            shards[layer % 2].push(tensor(&name, Dtype::Bf16, &[3, 7]));
        }
        let name = format!("model.layers.{layer}.mlp.gate.weight");
        shards[(layer + 1) % 2].push(tensor(&name, Dtype::F32, &[5]));
    }
    shards[0].push(tensor("model.embed_tokens.weight", Dtype::Bf16, &[11, 3]));
    shards[1].push(tensor("empty", Dtype::F4, &[0, 4]));
    shards[1].push(tensor("scale", Dtype::F8E8M0, &[3]));
    shards
}

pub fn open(path: &Path) -> flashboot_checkpoint::Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default())
}

pub fn packed(checkpoint: &Path, image: &Path) -> Image {
    pack(&open(checkpoint).unwrap(), image, &PackOptions::default(), &()).unwrap();
    Image::open(image).unwrap()
}

/// Every regular file below `dir`, by its path there.
pub fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![dir.to_path_buf()];
    while let Some(at) = left.pop() {
        for entry in std::fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(path.strip_prefix(dir).unwrap().to_path_buf(), std::fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// The names in `dir`, hidden ones included.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Writes an image's metadata anew with another fingerprint, its id as the format says.
pub fn restage(image: &Path, change: impl FnOnce(&mut flashboot_checkpoint::Fingerprint)) {
    let path = image.join("metadata.json");
    let mut metadata = Image::open(image).unwrap().metadata().clone();
    change(&mut metadata.fingerprint);
    metadata.id = "0".repeat(64);
    let mut text = serde_json::to_string(&metadata).unwrap() + "\n";
    let mut hasher = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    field(b"flashboot image id, format 1");
    field(text.as_bytes());
    for rank in &metadata.ranks {
        for hash in [&rank.table_hash, &rank.root] {
            field(blake3::Hash::from_hex(hash).unwrap().as_bytes());
        }
    }
    let id = hasher.finalize().to_hex();
    text.replace_range(27..91, &id);
    std::fs::write(path, text).unwrap();
}
