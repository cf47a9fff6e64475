//! Which experts and layers there are, by their numbers. What `config.json` says must be there, all of it and nothing
//! else: an expert or a layer that nobody owns would be lost without a word, and so would a tensor that one expert lacks.

use super::Entry;
use super::class::Class;
use super::template::Kind;
use crate::cause::Names;
use crate::parallel::Refused;
use crate::recipe::Recipe;
use crate::tensors::Tensors;
use std::collections::BTreeMap;

/// Far above any layer's experts; bounds what one number in a name or a shape can ask for.
const MOST: u64 = 1 << 16;

/// An expert that has a name of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Numbered {
    draft: bool,
    layer: u32,
    expert: u32,
    /// Tensors that each of a layer's experts must have.
    tensors: u32,
}

impl Numbered {
    fn is(&self, other: &Self) -> bool {
        (self.draft, self.layer, self.expert) == (other.draft, other.layer, other.expert)
    }
}

/// What was seen of experts and layers.
#[derive(Default)]
pub(super) struct Counts {
    /// By draft and layer: one past the highest expert, or how many are stacked.
    experts: BTreeMap<(bool, u64), u64>,
    /// Each expert that has a name of its own; mostly in order, some several times.
    numbered: Vec<Numbered>,
    /// One past the target's highest layer.
    pub(super) layers: u64,
}

impl Counts {
    /// Notes a tensor of an expert of a layer, whether it is laid out or left out on purpose.
    pub(super) fn expert(&mut self, draft: bool, layer: u32, expert: u32, param: &str) {
        let tensors = u32::from(!may_lack(param));
        self.note(Numbered { draft, layer, expert, tensors });
    }

    fn note(&mut self, numbered: Numbered) {
        match self.numbered.last_mut() {
            Some(last) if last.is(&numbered) => last.tensors = last.tensors.saturating_add(numbered.tensors),
            _ => self.numbered.push(numbered),
        }
    }

    /// Notes that a layer has `count` experts at least.
    pub(super) fn at_least(&mut self, draft: bool, layer: u32, count: u64) {
        let place = self.experts.entry((draft, layer.into())).or_default();
        *place = (*place).max(count);
    }

    /// Layers of the target that have experts.
    pub(super) fn expert_layers(&self) -> Vec<u64> {
        self.experts.keys().filter(|(draft, _)| !draft).map(|(_, layer)| *layer).collect()
    }

    /// Routed experts of target and draft, numbered without gaps and as many as `config.json` says.
    pub(super) fn check_experts(
        &mut self,
        recipe: &Recipe,
        fact: &dyn Fn(&str) -> Option<u64>,
        found: &Found<'_>,
    ) -> Result<[u64; 2], Refused> {
        let most = |draft: bool| self.experts.iter().filter(|((d, _), _)| *d == draft).map(|(_, n)| *n).max();
        let counts = [most(false).unwrap_or(0), most(true).unwrap_or(0)];
        self.check_config(recipe, fact, found, counts)?;
        self.sort();
        self.check_gaps()?;
        self.check_alike(found)?;
        for class in found.classes.iter().filter(|class| class.lead) {
            let [target, draft] = counts;
            let (wanted, has) = (if class.key.draft { draft } else { target }, class.key.shape.first());
            if has != Some(&wanted) {
                let has = has.copied().unwrap_or(0);
                let detail = format!("some layers stack {has} experts and others have {wanted}");
                return Err(Refused::Experts { detail });
            }
        }
        Ok(counts)
    }

    fn check_config(
        &self,
        recipe: &Recipe,
        fact: &dyn Fn(&str) -> Option<u64>,
        found: &Found<'_>,
        [target, _]: [u64; 2],
    ) -> Result<(), Refused> {
        let Some(first) = recipe.experts.first().filter(|_| target > 0) else { return Ok(()) };
        let said = recipe.experts.iter().find_map(|key| Some((key, fact(key)?)));
        let no_fact = || Refused::NoFact { family: recipe.family.clone(), key: first.clone() };
        let (key, needed) = said.ok_or_else(no_fact)?;
        let wrong = self.experts.iter().find(|((draft, _), n)| !draft && **n != needed);
        let Some(((_, layer), count)) = wrong else { return Ok(()) };
        let names = found.names(|entry| {
            let is_expert = found.classes.get(entry.class as usize).is_some_and(|c| c.is_expert);
            let past = entry.expert == super::NONE || u64::from(entry.expert) + 1 == *count;
            u64::from(entry.layer) == *layer && entry.kind == Kind::Target && is_expert && past
        });
        Err(Refused::ExpertCount { key: key.clone(), needed, found: *count, names })
    }

    /// Each expert once, by draft, layer and number.
    fn sort(&mut self) {
        let mut seen = std::mem::take(&mut self.numbered);
        seen.sort_unstable();
        seen.into_iter().for_each(|numbered| self.note(numbered));
    }

    /// Refuses a layer whose experts are not 0, 1, 2, … up to its last, or that has more than anybody lays out.
    fn check_gaps(&self) -> Result<(), Refused> {
        let mut next = BTreeMap::<(bool, u64), u64>::new();
        for Numbered { draft, layer, expert, .. } in &self.numbered {
            let next = next.entry((*draft, u64::from(*layer))).or_default();
            *next += u64::from(u64::from(*expert) == *next);
        }
        for ((draft, layer), count) in &self.experts {
            // Where experts are stacked none has a number.
            let next = next.get(&(*draft, *layer)).copied().unwrap_or(*count);
            let of = if *draft { "the draft's layer" } else { "layer" };
            if next < *count {
                let detail = format!("{of} {layer} has an expert {} and no expert {next}", count - 1);
                return Err(Refused::Experts { detail });
            }
            if *count > MOST {
                let detail = format!("{of} {layer} has {count} experts, at most {MOST} are laid out");
                return Err(Refused::Experts { detail });
            }
        }
        Ok(())
    }

    /// Refuses a layer of which one expert lacks a tensor that another has, and names what is missing.
    fn check_alike(&self, found: &Found<'_>) -> Result<(), Refused> {
        for layer in self.numbered.chunk_by(|a, b| (a.draft, a.layer) == (b.draft, b.layer)) {
            let Some(most) = layer.iter().max_by_key(|expert| expert.tensors) else { continue };
            let lacking: Vec<_> = layer.iter().filter(|expert| expert.tensors < most.tensors).collect();
            if lacking.is_empty() {
                continue;
            }
            let mut names = Names::default();
            for (number, entry) in found.entries.iter().enumerate() {
                let draft = entry.kind == Kind::Draft;
                let of_most = (entry.layer, entry.expert) == (most.layer, most.expert) && draft == most.draft;
                let Some(name) = found.tensors.at(number).map(|t| t.name).filter(|_| of_most) else {
                    continue;
                };
                for expert in &lacking {
                    if let Some(theirs) = of_expert(name, expert.expert)
                        && !may_lack(theirs.rsplit('.').next().unwrap_or_default())
                        && found.tensors.find(&theirs).is_none()
                    {
                        names.push(&theirs);
                    }
                }
            }
            return Err(Refused::ExpertsDiffer { layer: most.layer, names });
        }
        Ok(())
    }

    /// The target's layers: as many as `config.json` says, where it does.
    pub(super) fn check_layers(
        &self,
        recipe: &Recipe,
        said: Option<u64>,
        found: &Found<'_>,
    ) -> Result<u64, Refused> {
        let said = said.filter(|said| recipe.layers.is_some() && *said != self.layers);
        let Some(said) = said else { return Ok(self.layers) };
        let last = said.min(self.layers.saturating_sub(1));
        let names = found.names(|entry| {
            entry.kind == Kind::Target && entry.layer != super::NONE && u64::from(entry.layer) >= last
        });
        Err(Refused::LayerCount { key: recipe.layer_count.clone(), said, found: self.layers, names })
    }
}

/// What calibration leaves beside weights is not there for an expert that it never met.
fn may_lack(param: &str) -> bool {
    param.starts_with("input_")
}

/// The name that another expert's tensor has.
fn of_expert(name: &str, expert: u32) -> Option<String> {
    const EXPERTS: &str = "experts.";
    let inside = name.find(".experts.").map(|dot| dot.saturating_add(1));
    let at = inside.or_else(|| name.starts_with(EXPERTS).then_some(0))?.saturating_add(EXPERTS.len());
    let (_, rest) = name.get(at..)?.split_once('.')?;
    Some(format!("{}{expert}.{rest}", name.get(..at)?))
}

/// What was found of every tensor, for errors.
pub(super) struct Found<'f> {
    pub(super) tensors: &'f Tensors,
    pub(super) entries: &'f [Entry],
    pub(super) classes: &'f [Class],
}

impl Found<'_> {
    fn names(&self, wanted: impl Fn(&Entry) -> bool) -> Names {
        let mut names = Names::default();
        for (number, _) in self.entries.iter().enumerate().filter(|(_, entry)| wanted(entry)) {
            names.push(self.tensors.at(number).map_or("", |t| t.name));
        }
        names
    }
}
