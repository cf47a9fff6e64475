//! `metadata.json`: what an image is made of, and what it may be used for.

use super::fingerprint::Fingerprint;
use std::{collections::BTreeMap, fmt, path::Path, str::FromStr};

/// Which of the models that are served together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelPart {
    /// The model itself.
    Target,
    /// Its draft for speculative decoding.
    Draft,
}

/// Which part of a model a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coordinate {
    /// Target or draft.
    pub model: ModelPart,
    /// Pipeline stage.
    pub pp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
    /// Expert-parallel rank.
    pub ep: u32,
    /// Data-parallel rank.
    pub dp: u32,
}

impl Coordinate {
    /// The only coordinate of a model that is not split.
    pub const WHOLE: Self = Self { model: ModelPart::Target, pp: 0, tp: 0, ep: 0, dp: 0 };
}

impl fmt::Display for Coordinate {
    /// `target-PP-TP-EP-DP`: the stem of its rank image's files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = match self.model {
            ModelPart::Target => "target",
            ModelPart::Draft => "draft",
        };
        write!(f, "{model}-{}-{}-{}-{}", self.pp, self.tp, self.ep, self.dp)
    }
}

impl FromStr for Coordinate {
    type Err = String;

    /// What [`Display`](fmt::Display) gives.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no rank: one is called target-PP-TP-EP-DP, or draft-…");
        let mut parts = text.split('-');
        let model = match parts.next() {
            Some("target") => ModelPart::Target,
            Some("draft") => ModelPart::Draft,
            _ => return Err(wrong()),
        };
        let mut number = || parts.next().and_then(|part| part.parse().ok()).ok_or_else(wrong);
        let found = Self { model, pp: number()?, tp: number()?, ep: number()?, dp: number()? };
        // Nothing after it, and every number written as it is printed.
        if found.to_string() == text { Ok(found) } else { Err(wrong()) }
    }
}

/// How many ranks there are along each axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct World {
    /// Pipeline stages.
    pub pp: u32,
    /// Tensor-parallel ranks.
    pub tp: u32,
    /// Expert-parallel ranks.
    pub ep: u32,
    /// Data-parallel ranks.
    pub dp: u32,
    /// Ranks that share one expert, where that is not `tp * dp / ep`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_tp: Option<u32>,
}

impl World {
    /// Of a model that is not split.
    pub const ONE: Self = Self { pp: 1, tp: 1, ep: 1, dp: 1, moe_tp: None };

    /// Whether `coordinate` is one of them.
    pub fn has(&self, coordinate: Coordinate) -> bool {
        let Coordinate { pp, tp, ep, dp, .. } = coordinate;
        pp < self.pp && tp < self.tp && ep < self.ep && dp < self.dp
    }
}

/// The rules by which tensors were placed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutInfo {
    /// [`LayoutInfo::NAME`].
    pub name: String,
    /// Alignment of each tensor: 512.
    pub tensor_align: u64,
    /// Alignment of the payload's end: 4096.
    pub payload_align: u64,
    /// Bytes of a block: 16 MiB.
    pub block: u64,
    /// Ranks along each axis.
    pub world: World,
    /// The whole numbers of the model's `config.json`, for whoever cuts this image again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, u64>,
}

impl LayoutInfo {
    /// `[ experts | non-experts ]`, experts by layer, number, name.
    pub const NAME: &str = "experts-then-rest";
}

/// One rank of an image. Ranks with identical images name the same files.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankEntry {
    /// Whose it is.
    pub coordinate: Coordinate,
    /// The payload's file name.
    pub payload: String,
    /// Its length.
    pub payload_bytes: u64,
    /// Its BLAKE3 hash: what `b3sum` prints.
    pub root: String,
    /// The tensor table's file name.
    pub table: String,
    /// Its length.
    pub table_bytes: u64,
    /// Its BLAKE3 hash.
    pub table_hash: String,
}

/// All of `metadata.json`. Members are written in this order.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metadata {
    /// The format's version: 1.
    pub flashboot_image: u64,
    /// The image id, in hexadecimal.
    pub id: String,
    /// What must agree.
    pub fingerprint: Fingerprint,
    /// How tensors were placed.
    pub layout: LayoutInfo,
    /// Every rank.
    pub ranks: Vec<RankEntry>,
}

impl Metadata {
    /// Parses the bytes of a `metadata.json` and checks them against their id; the tables and payloads it names are
    /// not looked at. `path` is for errors only.
    pub fn parse(path: &Path, json: &[u8]) -> crate::Result<Self> {
        super::id::unseal(path, json)
    }
}
