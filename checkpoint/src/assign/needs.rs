//! What a model of a family must have, its recipe says; whatever of it no tensor is of is missing from all experts, from a
//! layer, or from the whole checkpoint, where nothing else would tell.

use super::template::How;
use crate::cause::Names;
use crate::parallel::Refused;
use crate::quant::MAINS;
use crate::recipe::{Pattern, Recipe};
use std::collections::BTreeSet;

/// More layers than this are not listed for one module.
const MOST: usize = 1000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum In {
    Every,
    Experts,
    Dense,
}

struct Need<'r> {
    pattern: &'r Pattern,
    layers: In,
    /// The layers that have it; for what is there once, any number.
    seen: BTreeSet<u32>,
}

/// What is needed, and what of it was seen.
pub(super) struct Needed<'r> {
    recipe: &'r Recipe,
    needs: Vec<Need<'r>>,
    /// By template the need that its tensors meet.
    met_by: Vec<Option<Option<usize>>>,
    expert_layers: BTreeSet<u32>,
}

impl<'r> Needed<'r> {
    pub(super) fn new(recipe: &'r Recipe) -> Self {
        let kinds = [
            (&recipe.needs.every, In::Every),
            (&recipe.needs.experts, In::Experts),
            (&recipe.needs.dense, In::Dense),
        ];
        let needs = kinds.into_iter().flat_map(|(patterns, layers)| {
            patterns.iter().map(move |pattern| Need { pattern, layers, seen: BTreeSet::new() })
        });
        Self { recipe, needs: needs.collect(), met_by: Vec::new(), expert_layers: BTreeSet::new() }
    }

    /// Notes a tensor of the target, also one that is left out on purpose.
    pub(super) fn see(&mut self, template: u32, name: &str, layer: Option<u32>, is_expert: bool) {
        if self.needs.is_empty() {
            return;
        }
        if let (true, Some(layer)) = (is_expert, layer) {
            self.expert_layers.insert(layer);
        }
        let slot = template as usize;
        if self.met_by.len() <= slot {
            self.met_by.resize(slot + 1, None);
        }
        let known = self.met_by.get(slot).copied().flatten();
        let met = known.unwrap_or_else(|| self.needs.iter().position(|need| meets(need.pattern, name)));
        if let Some(place) = self.met_by.get_mut(slot) {
            *place = Some(met);
        }
        if let Some(need) = met.and_then(|n| self.needs.get_mut(n)) {
            need.seen.insert(layer.unwrap_or(0));
        }
    }

    /// Notes a further name of a tensor: a tied embedding may be stored as the head.
    pub(super) fn see_alias(&mut self, name: &str) {
        if let Some(need) =
            self.needs.iter_mut().find(|n| n.pattern.star().is_none() && meets(n.pattern, name))
        {
            need.seen.insert(0);
        }
    }

    /// Refuses a model of so many layers in which something is missing, by name.
    pub(super) fn check(self, layers: u64) -> Result<(), Refused> {
        let mut names = Names::default();
        for need in &self.needs {
            if need.pattern.star().is_none() {
                if need.seen.is_empty() {
                    names.push(need.pattern.text());
                }
                continue;
            }
            let lacking = |layer: &u32| {
                let of_experts = self.expert_layers.contains(layer);
                let asked = match need.layers {
                    In::Every => true,
                    In::Experts => of_experts,
                    In::Dense => !of_experts,
                };
                asked && !need.seen.contains(layer)
            };
            let last = u32::try_from(layers).unwrap_or(u32::MAX);
            (0..last).filter(lacking).take(MOST).for_each(|l| names.push(need.pattern.numbered(l.into())));
        }
        if names.is_empty() {
            return Ok(());
        }
        Err(Refused::Lacking { family: self.recipe.family.clone(), names })
    }
}

/// Whether a tensor is the weight of the module that `pattern` names, or the whole tensor.
fn meets(pattern: &Pattern, name: &str) -> bool {
    let components: Vec<_> = name.split('.').collect();
    match super::template::claims(pattern, &components) {
        Some(How::Module) => components.last().is_some_and(|param| MAINS.contains(param)),
        Some(How::Whole | How::Ending("_blocks")) => true,
        Some(How::Ending(_)) | None => false,
    }
}
