//! A model as one rank sees it: what it owns, and its part of each tensor.

use super::cut::{Part, part};
use super::group::{Fused, Group, GroupKind};
use super::template::{Kind, Stages};
use super::{Assignment, Entry, NONE};
use crate::gather::{Gather, compose};
use crate::image::ModelPart;
use crate::parallel::{Rank, Refused};
use flashboot_core::Dtype;
use std::collections::BTreeMap;

/// A tensor of a rank's image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankTensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
    /// From the checkpoint's tensors, counted from each one's first byte; in the order of where they go.
    pub(crate) gathers: Vec<Gather>,
}

/// One rank's view.
#[derive(Debug)]
pub(crate) struct RankView<'a, 'm> {
    pub(crate) assignment: &'a Assignment<'m>,
    pub(crate) rank: Rank,
    /// By class; `None` where the rank could hold none of it.
    parts: Vec<Option<Part>>,
    /// Experts that the rank's group owns: of layers without a map of their own, and of the others.
    owned: Vec<bool>,
    owned_by_layer: BTreeMap<u32, Vec<bool>>,
}

impl<'a, 'm> RankView<'a, 'm> {
    pub(crate) fn new(assignment: &'a Assignment<'m>, rank: Rank) -> Self {
        let mut view = Self {
            assignment,
            rank,
            parts: Vec::with_capacity(assignment.classes.len()),
            owned: Vec::new(),
            owned_by_layer: BTreeMap::new(),
        };
        let total = assignment.experts(rank.coordinate.model);
        let set = |layer: u32| {
            let mut set = vec![false; usize::try_from(total).unwrap_or(0)];
            for expert in view.experts(layer) {
                if let Some(slot) = usize::try_from(expert).ok().and_then(|e| set.get_mut(e)) {
                    *slot = true;
                }
            }
            set
        };
        let owned = set(NONE);
        let mut by_layer = BTreeMap::new();
        if assignment.options.experts.by_layer() {
            let layers = assignment.entries.iter().filter(|e| e.expert != NONE).map(|e| e.layer);
            for layer in layers {
                by_layer.entry(layer).or_insert_with(|| set(layer));
            }
        }
        (view.owned, view.owned_by_layer) = (owned, by_layer);
        for class in &assignment.classes {
            let cut = class.cuts.get(assignment.place_of(class, &rank)).and_then(Option::as_ref);
            let lead = class.lead.then(|| runs(&view.experts(class.key.layer)));
            view.parts.push(part(&class.key.shape, class.key.dtype, lead.as_deref(), cut));
        }
        view
    }

    fn is_draft(&self) -> bool {
        self.rank.coordinate.model == ModelPart::Draft
    }

    /// Whether experts are spread over groups, or every group has all.
    fn spreads(&self) -> bool {
        self.assignment.options.parallel.ep > 1
            && (!self.is_draft() || self.assignment.recipe.draft_expert_parallel)
    }

    /// The experts of a layer in the rank's group, slot by slot.
    pub(crate) fn experts(&self, layer: u32) -> Vec<u64> {
        let total = self.assignment.experts(self.rank.coordinate.model);
        if !self.spreads() {
            return (0..total).collect();
        }
        let groups = self.assignment.options.parallel.ep;
        let group = self.rank.coordinate.ep;
        let map = &self.assignment.options.experts;
        match map {
            // A map is the target's; a draft has experts of its own.
            crate::parallel::ExpertMap::Explicit { .. } if self.is_draft() => {
                crate::parallel::ExpertMap::Contiguous.of_group(0, group, groups, total)
            }
            _ => map.of_group(layer.into(), group, groups, total),
        }
    }

    /// Whether the rank holds any of a tensor.
    pub(crate) fn owns(&self, entry: &Entry) -> bool {
        let stage = self.rank.coordinate.pp;
        let last = self.assignment.options.parallel.pp.saturating_sub(1);
        match (entry.kind, self.is_draft()) {
            (Kind::Draft, true) => {}
            (Kind::Target, false) => {
                let here = match entry.stages {
                    Stages::First => stage == 0,
                    Stages::Last => stage == last,
                    Stages::FirstAndLast => stage == 0 || stage == last,
                    Stages::Layer => self.assignment.stages.holds(stage, entry.layer.into()),
                    Stages::Every => true,
                };
                if !here {
                    return false;
                }
            }
            _ => return false,
        }
        if entry.expert == NONE || !self.spreads() {
            return true;
        }
        let owned = self.owned_by_layer.get(&entry.layer).unwrap_or(&self.owned);
        owned.get(entry.expert as usize).copied().unwrap_or(false)
    }

    /// The rank's part of a tensor of the checkpoint, if it owns it.
    pub(crate) fn part(&self, entry: &Entry) -> Option<&Part> {
        self.parts.get(entry.class as usize)?.as_ref()
    }

    /// The rank's tensor of a group; `None` where it holds none of it.
    pub(crate) fn tensor(&self, group: &Group) -> Result<Option<RankTensor>, Refused> {
        match &group.is {
            GroupKind::One(tensor) => {
                let Some(entry) = self.assignment.entries.get(*tensor as usize) else { return Ok(None) };
                if !self.owns(entry) {
                    return Ok(None);
                }
                let Some(part) = self.part(entry) else { return Ok(None) };
                let gathers = part.gathers.iter().map(|g| g.moved(*tensor, 0, 0)).collect();
                let dtype = self.dtype(entry);
                Ok(Some(RankTensor { dtype, shape: part.shape.clone(), bytes: part.bytes, gathers }))
            }
            GroupKind::Fused(fused) => self.fused(fused),
        }
    }

    fn dtype(&self, entry: &Entry) -> Dtype {
        self.assignment.classes.get(entry.class as usize).map_or(Dtype::U8, |class| class.key.dtype)
    }

    fn fused(&self, fused: &Fused) -> Result<Option<RankTensor>, Refused> {
        let refuse = |problem: String| Refused::Fusion { name: fused.name.clone(), problem };
        let entry = |tensor: u32| self.assignment.entries.get(tensor as usize);
        let Some(first) = fused.members.first().and_then(|m| entry(m.tensor)) else { return Ok(None) };
        // The layer's stage decides; whose an expert is, its slots do.
        if !self.owns(&Entry { expert: NONE, ..*first }) {
            return Ok(None);
        }
        let slots = if fused.stacked { self.experts(first.layer) } else { vec![0] };
        let mut slot_shape: Option<(Vec<u64>, Vec<PartForm>)> = None;
        let mut tensor =
            RankTensor { dtype: self.dtype(first), shape: Vec::new(), bytes: 0, gathers: Vec::new() };
        for (slot, expert) in slots.iter().enumerate() {
            let mut parts = Vec::with_capacity(fused.parts as usize);
            for part in 0..fused.parts {
                let wanted = (u32::try_from(*expert).unwrap_or(NONE), part);
                let found = fused.members.binary_search_by_key(&wanted, |m| (m.expert, m.part));
                let member = found.ok().and_then(|i| fused.members.get(i));
                let member = member.and_then(|m| Some((m.tensor, entry(m.tensor)?)));
                let Some((number, entry)) = member else {
                    let of = if fused.stacked { format!(" of expert {expert}") } else { String::new() };
                    return Err(refuse(format!("its part {part}{of} is not in the checkpoint")));
                };
                let Some(own) = self.part(entry) else { return Err(refuse("a byte would be cut".into())) };
                if self.dtype(entry) != tensor.dtype {
                    return Err(refuse("its parts have several types".into()));
                }
                let outputs = self.assignment.classes.get(entry.class as usize).and_then(|c| c.outputs);
                parts.push((number, own, outputs));
            }
            let joined = join(&parts, tensor.dtype).map_err(refuse)?;
            match &slot_shape {
                None => slot_shape = Some(joined),
                Some(known) if *known == joined => {}
                Some(_) => return Err(refuse(format!("expert {expert} has another shape"))),
            }
            let Some((shape, forms)) = &slot_shape else { continue };
            let bytes = tensor.dtype.bytes_of(shape).unwrap_or(0);
            for ((number, part, _), form) in parts.iter().zip(forms) {
                form.place(*number, part, slot as u64 * bytes, &mut tensor.gathers);
            }
        }
        let (mut shape, _) = slot_shape.unwrap_or_default();
        if fused.stacked {
            shape.insert(0, slots.len() as u64);
        }
        tensor.bytes = tensor.dtype.bytes_of(&shape).map_err(|e| refuse(e.to_string()))?;
        tensor.shape = shape;
        Ok(Some(tensor))
    }
}

/// Where a part goes in its fused tensor: rows of `run` bytes from `at` on, `pitch` apart.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PartForm {
    at: u64,
    run: u64,
    rows: u64,
    pitch: u64,
}

impl PartForm {
    fn place(&self, source: u32, part: &Part, base: u64, gathers: &mut Vec<Gather>) {
        let at = base.saturating_add(self.at);
        if self.run == 0 {
            return;
        }
        if self.rows <= 1 || self.run == self.pitch {
            gathers.extend(part.gathers.iter().map(|g| g.moved(source, 0, at)));
            return;
        }
        let whole = Gather {
            source,
            from: 0,
            at,
            run: self.run,
            count: self.rows,
            from_step: self.run,
            at_step: self.pitch,
        };
        for g in &part.gathers {
            // Turned round: from the part's own bytes to the checkpoint's.
            let back = Gather { from: g.at, at: g.from, from_step: g.at_step, at_step: g.from_step, ..*g };
            compose(&back, &whole, source, &mut |made| gathers.push(made));
        }
    }
}

/// The shape of parts put together, and where each goes.
fn join(parts: &[(u32, &Part, Option<usize>)], dtype: Dtype) -> Result<(Vec<u64>, Vec<PartForm>), String> {
    let product = |dims: &[u64]| dims.iter().fold(1u64, |n, d| n.saturating_mul(*d));
    let Some((_, first, axis)) = parts.first() else { return Err("it has no parts".into()) };
    if parts.iter().any(|(_, _, other)| other != axis) {
        return Err("its parts have their outputs along several dimensions".into());
    }
    let one = |bytes| PartForm { at: 0, run: bytes, rows: 1, pitch: bytes };
    let Some(axis) = *axis else {
        // One value a part: one after the other. More without outputs is the inputs': the same for all of them.
        if parts.iter().all(|(_, p, _)| product(&p.shape) == 1) {
            let shape = if parts.len() > 1 { vec![parts.len() as u64] } else { Vec::new() };
            let forms = (0..parts.len() as u64).map(|i| PartForm { at: i * first.bytes, ..one(first.bytes) });
            return Ok((shape, forms.collect()));
        }
        let mut forms = vec![one(first.bytes)];
        forms.resize(parts.len(), PartForm { at: 0, run: 0, rows: 0, pitch: 0 });
        return Ok((first.shape.clone(), forms));
    };
    let mut shape = first.shape.clone();
    let total = parts.iter().map(|(_, p, _)| p.shape.get(axis).copied().unwrap_or(0)).sum();
    *shape.get_mut(axis).ok_or("its parts have no such dimension")? = total;
    let rows = product(shape.get(..axis).unwrap_or_default());
    let bits = product(shape.get(axis + 1..).unwrap_or_default()).saturating_mul(dtype.bits());
    let pitch = total.saturating_mul(bits) / 8;
    let (mut forms, mut at) = (Vec::with_capacity(parts.len()), 0);
    for (_, p, _) in parts {
        let mut alike = p.shape.clone();
        let size = *p.shape.get(axis).ok_or("its parts have no such dimension")?;
        *alike.get_mut(axis).ok_or("its parts have no such dimension")? = total;
        if alike != shape {
            return Err(format!("its parts have the shapes {:?} and {:?}", first.shape, p.shape));
        }
        let run = size.saturating_mul(bits) / 8;
        if size.saturating_mul(bits) % 8 != 0 {
            return Err("a byte would be cut".into());
        }
        forms.push(PartForm { at, run, rows, pitch });
        at += run;
    }
    Ok((shape, forms))
}

/// Runs of consecutive numbers, in the order given.
fn runs(numbers: &[u64]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, end)) if *end == n => *end += 1,
            _ => runs.push((n, n + 1)),
        }
    }
    runs
}
