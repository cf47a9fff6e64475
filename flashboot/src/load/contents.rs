//! What lies where in a rank that was loaded, for who binds it by name.

use flashboot_checkpoint::{Fingerprint, RankPlan, RankTable, strides};
use flashboot_core::Dtype;
use std::sync::Arc;

/// What lies where in a rank's payload, whatever it came from.
#[derive(Debug, Clone)]
pub struct Contents {
    fingerprint: Option<Fingerprint>,
    tensors: Arc<[Entry]>,
    table: Option<Arc<RankTable>>,
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
        Self { fingerprint: Some(fingerprint), tensors: tensors.into(), table: Some(table) }
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
        Self { fingerprint: None, tensors: tensors.into(), table: None }
    }

    /// What the bytes are good for; a stock checkpoint has nothing that says so.
    pub fn fingerprint(&self) -> Option<&Fingerprint> {
        self.fingerprint.as_ref()
    }

    /// Every name: tensors in payload order, then aliases, then views.
    pub fn entries(&self) -> &[Entry] {
        &self.tensors
    }

    /// The image's table, which has the digests.
    pub fn table(&self) -> Option<&Arc<RankTable>> {
        self.table.as_ref()
    }
}

fn aliased(tensors: &[Entry], alias: &str, number: usize) -> Option<Entry> {
    Some(Entry { name: alias.to_owned(), what: What::Alias, ..tensors.get(number)?.clone() })
}
