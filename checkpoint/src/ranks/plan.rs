//! One rank's image as reads: which bytes of which file of a checkpoint go where, without packing anything.

use super::set::{RankSet, ranks};
use crate::assign::{Assignment, LayoutOptions, Model, Slicing};
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::image::Coordinate;
use crate::open::Checkpoint;
use crate::parallel::Refused;
use flashboot_core::Dtype;

/// One tensor of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    /// Its name.
    pub name: String,
    /// The number of the checkpoint's tensor that it is, or is a part of; `None` for one put together from several.
    pub source: Option<usize>,
    /// Its element type.
    pub dtype: Dtype,
    /// The dimensions of the rank's part.
    pub shape: Vec<u64>,
    /// The dimensions of the checkpoint's tensor; the same as `shape` for one put together from several.
    pub full_shape: Vec<u64>,
    /// Where it begins in the rank's payload.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// What fills it: `source` is the number of a shard, `from` counts from the shard's first byte, `at` from the payload's.
    /// Bytes that none of them fills are zero.
    pub gathers: Vec<Gather>,
}

/// What one rank holds of a checkpoint, in the order of its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    /// Which rank.
    pub coordinate: Coordinate,
    /// Bytes of its payload.
    pub payload: u64,
    /// Where the non-experts begin.
    pub separator: u64,
    /// The recipe's family.
    pub family: String,
    /// What is cut.
    pub slicing: Slicing,
    /// Its tensors, in payload order.
    pub tensors: Vec<PlannedTensor>,
    /// Further names of tensors, with the number in `tensors` of each.
    pub aliases: Vec<(String, usize)>,
    /// What a person should know.
    pub notes: Vec<String>,
}

impl RankPlan {
    /// Plans the rank at `coordinate` of `layout`, from the checkpoint's headers. The payload is byte for byte the one that
    /// [`pack_ranks`](crate::pack_ranks) would write.
    ///
    /// # Errors
    /// Those of packing, and a coordinate that the layout does not have.
    pub fn new(checkpoint: &Checkpoint, layout: &LayoutOptions, coordinate: Coordinate) -> Result<Self> {
        let model = Model {
            tensors: checkpoint.tensors(),
            aliases: checkpoint.aliases(),
            config: checkpoint.config(),
        };
        let assignment = Assignment::new(model, layout)?;
        let all = ranks(&assignment)?;
        let rank = all.iter().copied().find(|rank| rank.coordinate == coordinate).ok_or_else(|| {
            let detail = format!("none of its {} ranks is called {coordinate}", all.len());
            Error::from(Refused::World { detail })
        })?;
        let set = RankSet::of(&assignment, vec![rank])?;
        let (Some(image), Some(view)) = (set.images.first(), set.views.first()) else {
            return Err(Refused::World { detail: format!("{coordinate} holds nothing") }.into());
        };
        let mut tensors = Vec::with_capacity(image.groups.len());
        for (position, number) in image.groups.iter().enumerate() {
            let (Some(group), Some(offset)) =
                (set.all.0.get(*number as usize), image.layout.offset(position))
            else {
                continue;
            };
            let Some(tensor) = view.tensor(group)? else { continue };
            let source = group.one().map(|number| number as usize);
            let full_shape =
                source.and_then(|number| checkpoint.tensors().at(number)).map(|t| t.shape.to_vec());
            let in_file = |g: &Gather| {
                let tensor = checkpoint.tensors().at(g.source as usize)?;
                let shard = checkpoint.shards().get(tensor.shard)?;
                let begin = shard.data_start().saturating_add(tensor.begin);
                Some(g.moved(u32::try_from(tensor.shard).ok()?, begin, offset))
            };
            tensors.push(PlannedTensor {
                name: assignment.name_of(group).to_owned(),
                source,
                dtype: tensor.dtype,
                full_shape: full_shape.unwrap_or_else(|| tensor.shape.clone()),
                shape: tensor.shape,
                offset,
                bytes: tensor.bytes,
                gathers: tensor.gathers.iter().filter_map(in_file).collect(),
            });
        }
        let position = |number: &usize| tensors.iter().position(|t| t.source == Some(*number));
        let aliases = checkpoint.aliases().iter();
        let aliases =
            aliases.filter_map(|(alias, number)| Some((alias.clone(), position(number)?))).collect();
        let mut notes = checkpoint.notes().to_vec();
        notes.extend(assignment.notes.iter().cloned());
        Ok(Self {
            coordinate,
            payload: image.layout.payload(),
            separator: image.layout.separator(),
            family: assignment.recipe.family.clone(),
            slicing: assignment.slicing,
            tensors,
            aliases,
            notes,
        })
    }

    /// Bytes that the rank needs of its checkpoint.
    pub fn bytes_needed(&self) -> u64 {
        let gathers = self.tensors.iter().flat_map(|tensor| &tensor.gathers);
        gathers.fold(0, |sum, gather| sum.saturating_add(gather.bytes()))
    }
}
