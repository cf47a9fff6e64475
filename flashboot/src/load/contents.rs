//! What lies where in a rank that was loaded, for who binds it by name.

use flashboot_checkpoint::{Fingerprint, Image, Manifest, RankImage, RankPlan, RankTable, strides};
use flashboot_core::{Dtype, Error, Kind, Result};
use std::sync::Arc;

/// What lies where in a rank's payload, whatever it came from.
#[derive(Debug, Clone)]
pub struct Contents {
    fingerprint: Option<Fingerprint>,
    tensors: Arc<[Entry]>,
    table: Option<Arc<RankTable>>,
    proof: Option<Proof>,
}

/// Where the manifest is that proves the bytes.
#[derive(Debug, Clone)]
enum Proof {
    Image(Box<(Image, RankImage)>),
    Manifest(Arc<Manifest>),
}

/// One name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its first byte, counted from the payload's.
    pub offset: u64,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its strides in elements.
    pub stride: Vec<u64>,
    /// What the name is.
    pub what: What,
}

/// What a name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A tensor.
    Tensor,
    /// Another name of a tensor.
    Alias,
    /// A tensor's bytes seen otherwise.
    View,
}

impl Contents {
    /// Of a rank image on disk.
    pub fn of_rank(image: &Image, rank: &RankImage) -> Self {
        let fingerprint = image.metadata().fingerprint.clone();
        let proof = Proof::Image(Box::new((image.clone(), rank.clone())));
        Self { proof: Some(proof), ..Self::image(fingerprint, Arc::clone(&rank.table)) }
    }

    /// Of an image that is known by its manifest.
    pub fn of_manifest(manifest: Arc<Manifest>) -> Self {
        let table = Arc::new(manifest.table.clone());
        let contents = Self::image(manifest.metadata.fingerprint.clone(), table);
        Self { proof: Some(Proof::Manifest(manifest)), ..contents }
    }

    /// Of an image.
    pub fn image(fingerprint: Fingerprint, table: Arc<RankTable>) -> Self {
        let own = table.iter().map(|t| Entry {
            name: t.name.to_owned(),
            dtype: t.dtype,
            offset: t.offset,
            shape: t.shape.to_vec(),
            stride: t.stride(),
            what: What::Tensor,
        });
        let mut tensors: Vec<_> = own.collect();
        let further = table.aliases().iter().filter_map(|(alias, number)| aliased(&tensors, alias, *number));
        let further: Vec<_> = further.collect();
        let views = table.views().iter().filter_map(|view| {
            Some(Entry {
                name: view.name.clone(),
                dtype: view.dtype,
                offset: table.at(view.of)?.offset.saturating_add(view.offset),
                shape: view.shape.clone(),
                stride: view.stride.clone(),
                what: What::View,
            })
        });
        tensors.extend(further);
        tensors.extend(views);
        Self { fingerprint: Some(fingerprint), tensors: tensors.into(), table: Some(table), proof: None }
    }

    /// Of a stock checkpoint, cut for one rank.
    pub fn checkpoint(plan: &RankPlan) -> Self {
        let own = plan.tensors.iter().map(|t| Entry {
            name: t.name.clone(),
            dtype: t.dtype,
            offset: t.offset,
            shape: t.shape.clone(),
            stride: strides(&t.shape),
            what: What::Tensor,
        });
        let mut tensors: Vec<_> = own.collect();
        let further: Vec<_> =
            plan.aliases.iter().filter_map(|(alias, number)| aliased(&tensors, alias, *number)).collect();
        tensors.extend(further);
        Self { fingerprint: None, tensors: tensors.into(), table: None, proof: None }
    }

    /// What the bytes are good for; a stock checkpoint has nothing that says so.
    pub fn fingerprint(&self) -> Option<&Fingerprint> {
        self.fingerprint.as_ref()
    }

    /// Every name: tensors in payload order, then aliases, then views.
    pub fn entries(&self) -> &[Entry] {
        &self.tensors
    }

    /// What proves the bytes to others. Blocks: of an image on disk it is read now.
    ///
    /// # Errors
    /// [`Kind::Invalid`] of a stock checkpoint; those of reading.
    pub fn manifest(&self) -> Result<Arc<Manifest>> {
        match &self.proof {
            Some(Proof::Image(from)) => Ok(Arc::new(Manifest::of(&from.0, &from.1)?)),
            Some(Proof::Manifest(manifest)) => Ok(Arc::clone(manifest)),
            None => {
                Err(Error::new(Kind::Invalid, "manifest", "nothing proves these bytes: they are no image's")
                    .with_remedy("pack the checkpoint, and load the image"))
            }
        }
    }

    /// The image's table, which has the digests.
    pub fn table(&self) -> Option<&Arc<RankTable>> {
        self.table.as_ref()
    }
}

fn aliased(tensors: &[Entry], alias: &str, number: usize) -> Option<Entry> {
    Some(Entry { name: alias.to_owned(), what: What::Alias, ..tensors.get(number)?.clone() })
}
