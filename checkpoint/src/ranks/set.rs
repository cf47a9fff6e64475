//! All ranks of a layout: what each image holds and where, and which ranks' images are the same.

use crate::assign::{Assignment, Groups, RankTensor, RankView};
use crate::error::Result;
use crate::gather::Gather;
use crate::image::{Coordinate, ModelPart};
use crate::parallel::Rank;
use crate::stream::{Intake, Origin, Work};
use flashboot_core::Layout;
use flashboot_core::layout::Spec;
use std::collections::HashMap;

/// One image that is to be written.
pub(super) struct ImagePlan {
    /// The rank it is named after, the first that has it.
    pub(super) coordinate: Coordinate,
    pub(super) view: usize,
    /// Its groups, in payload order.
    pub(super) groups: Vec<u32>,
    pub(super) layout: Layout,
    pub(super) hash: blake3::Hash,
}

/// Every rank, and every image once.
pub(super) struct RankSet<'a, 'm> {
    pub(super) assignment: &'a Assignment<'m>,
    pub(super) all: Groups,
    pub(super) views: Vec<RankView<'a, 'm>>,
    pub(super) images: Vec<ImagePlan>,
    /// Each rank with the number of its image.
    pub(super) ranks: Vec<(Rank, usize)>,
}

/// Where a tensor's bytes are.
pub(crate) trait Provider {
    /// The origins of what `wanted` takes of a tensor, each with its gather.
    fn resolve(&self, tensor: u32, wanted: &Gather, take: &mut dyn FnMut(Origin, Gather));
}

impl<'a, 'm> RankSet<'a, 'm> {
    pub(super) fn new(assignment: &'a Assignment<'m>) -> Result<Self> {
        let wanted = ranks(assignment)?;
        Self::of(assignment, wanted)
    }

    /// The same of some ranks.
    pub(super) fn of(assignment: &'a Assignment<'m>, wanted: Vec<Rank>) -> Result<Self> {
        let all = Groups::new(assignment)?;
        let mut set = Self { assignment, all, views: Vec::new(), images: Vec::new(), ranks: Vec::new() };
        let mut by_hash = HashMap::<blake3::Hash, usize>::new();
        let mut by_rank = HashMap::new();
        for rank in wanted {
            let c = rank.coordinate;
            // Ranks that differ in nothing but their data-parallel group need not be looked at twice.
            let key = (c.model, c.pp, c.tp, c.ep, rank.moe_tp);
            let image = match by_rank.get(&key) {
                Some(&image) => image,
                None => {
                    let view = RankView::new(assignment, rank);
                    let plan = set.plan(&view)?;
                    let number = *by_hash.entry(plan.hash).or_insert(set.images.len());
                    if number == set.images.len() {
                        set.images.push(ImagePlan { view: set.views.len(), ..plan });
                        set.views.push(view);
                    }
                    by_rank.insert(key, number);
                    number
                }
            };
            set.ranks.push((rank, image));
        }
        Ok(set)
    }

    fn plan(&self, view: &RankView<'_, '_>) -> Result<ImagePlan> {
        let (mut groups, mut bytes) = (Vec::new(), Vec::new());
        let mut hasher = blake3::Hasher::new();
        // A target's and a draft's image have names of their own, even where both are empty.
        hasher.update(&[u8::from(view.rank.coordinate.model == ModelPart::Draft)]);
        for (number, group) in self.all.0.iter().enumerate() {
            let Some(tensor) = view.tensor(group)? else { continue };
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            hasher.update(&number.to_le_bytes());
            for dim in &tensor.shape {
                hasher.update(&dim.to_le_bytes());
            }
            for g in &tensor.gathers {
                for value in [u64::from(g.source), g.from, g.at, g.run, g.count, g.from_step, g.at_step] {
                    hasher.update(&value.to_le_bytes());
                }
            }
            groups.push(number);
            bytes.push(tensor.bytes);
        }
        let spec = |i: usize| {
            let group = groups.get(i).and_then(|g| self.all.0.get(*g as usize));
            let name = group.map_or("", |g| self.assignment.name_of(g));
            let place = group.map_or(flashboot_core::layout::Place::NonExpert, |g| g.place);
            Spec { name, bytes: bytes.get(i).copied().unwrap_or(0), place }
        };
        let layout = Layout::in_order(groups.len(), spec)?;
        Ok(ImagePlan { coordinate: view.rank.coordinate, view: 0, groups, layout, hash: hasher.finalize() })
    }

    /// Bytes of all images.
    pub(super) fn bytes(&self) -> u64 {
        self.images.iter().fold(0, |sum, image| sum.saturating_add(image.layout.payload()))
    }

    /// Hands out the work of every group, in payload order; of streams that are complete up to `floors`, nothing
    /// below is taken.
    pub(super) fn produce(
        &self,
        provider: &dyn Provider,
        floors: &[u64],
        take: &mut dyn FnMut(&Work) -> Result<()>,
    ) -> Result<()> {
        let mut next = vec![0usize; self.images.len()];
        let mut origins = HashMap::<(u32, u64), u32>::new();
        for (number, group) in self.all.0.iter().enumerate() {
            let mut work = Work::default();
            origins.clear();
            for (stream, (image, next)) in self.images.iter().zip(&mut next).enumerate() {
                if image.groups.get(*next).is_none_or(|g| *g as usize != number) {
                    continue;
                }
                let (Some(view), Some(offset)) = (self.views.get(image.view), image.layout.offset(*next))
                else {
                    continue;
                };
                *next += 1;
                let Some(tensor) = view.tensor(group)? else { continue };
                let end = offset.saturating_add(tensor.bytes);
                let mut gathers = Vec::new();
                let complete = floors.get(stream).is_some_and(|floor| end <= *floor);
                for g in tensor.gathers.iter().filter(|_| !complete) {
                    provider.resolve(g.source, g, &mut |origin: Origin, g: Gather| {
                        let fresh = u32::try_from(work.origins.len()).unwrap_or(u32::MAX);
                        let local = *origins.entry((origin.file, origin.offset)).or_insert(fresh);
                        if local == fresh {
                            work.origins.push(origin);
                        }
                        gathers.push(Gather { source: local, at: g.at.saturating_add(offset), ..g });
                    });
                }
                let holes = holes(&tensor, offset);
                let stream = u32::try_from(stream).unwrap_or(u32::MAX);
                work.intakes.push(Intake { stream, start: offset, end, holes, gathers });
            }
            if !work.intakes.is_empty() {
                take(&work)?;
            }
        }
        Ok(())
    }
}

/// Every rank of a layout, the target's first.
pub(super) fn ranks(assignment: &Assignment<'_>) -> Result<Vec<Rank>> {
    let parallel = &assignment.options.parallel;
    let mut wanted = parallel.ranks(ModelPart::Target)?;
    if assignment.options.draft && assignment.has_draft() {
        // The draft runs where the target ends.
        let last = parallel.pp.saturating_sub(1);
        let draft = parallel.ranks(ModelPart::Draft)?;
        wanted.extend(draft.into_iter().filter(|rank| rank.coordinate.pp == last));
    }
    Ok(wanted)
}

/// What of a tensor at `offset` nothing is gathered into: the padding that an engine asks for.
fn holes(tensor: &RankTensor, offset: u64) -> Vec<(u64, u64)> {
    let taken = tensor.gathers.iter().fold(0u64, |sum, g| sum.saturating_add(g.bytes()));
    if taken >= tensor.bytes {
        return Vec::new();
    }
    // Only rows at the end are padded, so the runs of what is there are few.
    let mut runs: Vec<(u64, u64)> = tensor
        .gathers
        .iter()
        .flat_map(|g| (0..g.count).map(move |i| (g.at + i * g.at_step, g.at + i * g.at_step + g.run)))
        .collect();
    runs.sort_unstable();
    let (mut holes, mut end) = (Vec::new(), 0);
    for (from, to) in runs.into_iter().chain([(tensor.bytes, tensor.bytes)]) {
        if from > end {
            holes.push((offset + end, offset + from));
        }
        end = end.max(to);
    }
    holes
}
