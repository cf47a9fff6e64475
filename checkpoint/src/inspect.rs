//! What a path holds, without reading a tensor.

use crate::error::Result;
use crate::image::{Fingerprint, Image, Segment, is_image};
use crate::open::{Checkpoint, OpenOptions};
use flashboot_core::layout::Place;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A checkpoint or an image, opened.
#[derive(Debug, Clone)]
pub enum Opened {
    /// Stock safetensors.
    Checkpoint(Box<Checkpoint>),
    /// A packed model.
    Image(Box<Image>),
}

impl Opened {
    /// Opens whichever `path` is: an image is a directory whose `metadata.json` says so.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        // One that lost its metadata is still meant as an image.
        if path.is_dir() && (is_image(path)? || crate::image::is_half_an_image(path)) {
            return Image::open(path).map(|image| Self::Image(Box::new(image)));
        }
        Checkpoint::open(path, options).map(|checkpoint| Self::Checkpoint(Box::new(checkpoint)))
    }
}

/// Checkpoint or image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InspectedKind {
    /// Stock safetensors.
    Checkpoint,
    /// A packed model.
    Image,
}

/// One file and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct InspectedFile {
    /// Its name.
    pub file: String,
    /// Its tensors.
    pub tensors: u64,
    /// Bytes of its tensors (checkpoint) or of the payload (image).
    pub bytes: u64,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Inspection {
    /// Checkpoint or image.
    pub kind: InspectedKind,
    /// Where.
    #[serde(serialize_with = "crate::text::lossy")]
    pub path: PathBuf,
    /// Tensors, aliases not counted; of an image over all its rank images.
    pub tensors: u64,
    /// Bytes of the tensors (checkpoint) or of the payloads (image).
    pub bytes: u64,
    /// Rank images; 0 for a checkpoint.
    pub ranks: u64,
    /// Bytes of expert tensors.
    pub expert_bytes: u64,
    /// Expert tensors.
    pub expert_tensors: u64,
    /// Aliases, with the tensor each names.
    pub aliases: BTreeMap<String, String>,
    /// Bytes by dtype.
    pub dtypes: BTreeMap<&'static str, u64>,
    /// Its files.
    pub files: Vec<InspectedFile>,
    /// The image id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The image's fingerprint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// `model_type` of the checkpoint's `config.json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_type: Option<String>,
    /// What a person should know: a `config.json` that could not be used, files that the index leaves out.
    pub notes: Vec<String>,
}

impl Inspection {
    fn new(kind: InspectedKind, path: &Path) -> Self {
        Self {
            kind,
            path: path.into(),
            tensors: 0,
            bytes: 0,
            ranks: 0,
            expert_bytes: 0,
            expert_tensors: 0,
            aliases: BTreeMap::new(),
            dtypes: BTreeMap::new(),
            files: Vec::new(),
            id: None,
            fingerprint: None,
            model_type: None,
            notes: Vec::new(),
        }
    }

    fn count(&mut self, dtype: flashboot_core::Dtype, bytes: u64, expert: bool) {
        self.tensors = self.tensors.saturating_add(1);
        let total = self.dtypes.entry(dtype.name()).or_default();
        *total = total.saturating_add(bytes);
        if expert {
            self.expert_tensors = self.expert_tensors.saturating_add(1);
            self.expert_bytes = self.expert_bytes.saturating_add(bytes);
        }
    }
}

/// Opens what `path` holds, which checks all of it but the tensors' bytes, and sums it up.
pub fn inspect(path: &Path, options: &OpenOptions) -> Result<Inspection> {
    Ok(match Opened::open(path, options)? {
        Opened::Checkpoint(checkpoint) => inspect_checkpoint(path, &checkpoint),
        Opened::Image(image) => inspect_image(path, &image),
    })
}

fn inspect_checkpoint(path: &Path, checkpoint: &Checkpoint) -> Inspection {
    let mut found = Inspection::new(InspectedKind::Checkpoint, path);
    found.bytes = checkpoint.data_bytes();
    found.files = checkpoint
        .shards()
        .iter()
        .map(|s| InspectedFile { file: s.name.clone(), tensors: 0, bytes: s.data_bytes })
        .collect();
    let tensors = checkpoint.tensors();
    for tensor in tensors.iter() {
        found.count(tensor.dtype, tensor.bytes, crate::experts::place(tensor.name) != Place::NonExpert);
        if let Some(file) = found.files.get_mut(tensor.shard) {
            file.tensors = file.tensors.saturating_add(1);
        }
    }
    for (alias, number) in checkpoint.aliases() {
        let name = tensors.at(*number).map_or_else(String::new, |t| t.name.to_owned());
        found.aliases.insert(alias.clone(), name);
    }
    found.model_type = checkpoint.config().model_type.clone();
    found.notes = checkpoint.notes().to_vec();
    found
}

fn inspect_image(path: &Path, image: &Image) -> Inspection {
    let mut found = Inspection::new(InspectedKind::Image, path);
    found.ranks = image.ranks().len() as u64;
    found.id = Some(image.id().to_owned());
    found.fingerprint = Some(image.metadata().fingerprint.clone());
    found.model_type.clone_from(&image.metadata().fingerprint.model_type);
    for rank in image.files() {
        found.bytes = found.bytes.saturating_add(rank.payload_bytes);
        let file = rank.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (tensors, bytes) = (rank.table.len() as u64, rank.payload_bytes);
        found.files.push(InspectedFile { file, tensors, bytes });
        for tensor in rank.table.iter() {
            found.count(tensor.dtype, tensor.bytes, tensor.segment == Segment::Experts);
        }
        for (alias, number) in rank.table.aliases() {
            let name = rank.table.at(*number).map_or_else(String::new, |t| t.name.to_owned());
            found.aliases.insert(alias.clone(), name);
        }
        for view in rank.table.views() {
            let name = rank.table.at(view.of).map_or_else(String::new, |t| t.name.to_owned());
            found.aliases.insert(view.name.clone(), name);
        }
    }
    found
}
